//! How much a shard may hold.

use crate::row::Row;

/// A shard's part of what its process may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Rows.
    pub rows: u64,
    /// Bytes, each row charged with [`Row::OVERHEAD`] beside its payload.
    pub bytes: u64,
}

impl Share {
    /// No share is smaller than this many rows, whatever the number of shards.
    pub const MIN_ROWS: u64 = 1_000;

    /// An even share of `rows` and `bytes` over `shards`.
    #[must_use]
    pub fn even(rows: u64, bytes: u64, shards: u32) -> Self {
        let shards = u64::from(shards.max(1));
        Self { rows: (rows / shards).max(Self::MIN_ROWS), bytes: bytes / shards }
    }
}

/// What a shard holds against its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    share: Share,
    rows: u64,
    bytes: u64,
}

impl Budget {
    /// Nothing held yet.
    #[must_use]
    pub const fn new(share: Share) -> Self {
        Self { share, rows: 0, bytes: 0 }
    }

    /// The share, as it is now.
    #[must_use]
    pub const fn share(&self) -> Share {
        self.share
    }

    /// Sets another share. What is held beyond it stays held; only new pulls are smaller.
    pub const fn set_share(&mut self, share: Share) {
        self.share = share;
    }

    /// Rows held.
    #[must_use]
    pub const fn rows(&self) -> u64 {
        self.rows
    }

    /// Bytes held.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Rows there is room for.
    #[must_use]
    pub const fn room_rows(&self) -> u64 {
        self.share.rows.saturating_sub(self.rows)
    }

    /// Bytes there is room for.
    #[must_use]
    pub const fn room_bytes(&self) -> u64 {
        self.share.bytes.saturating_sub(self.bytes)
    }

    /// Counts a row that is held from now on.
    pub fn hold(&mut self, row: &Row) {
        self.rows += 1;
        self.bytes += row.weight();
    }

    /// Counts rows that are no longer held.
    ///
    /// # Panics
    /// If more is let go than was held: the count would be wrong for ever.
    pub fn let_go(&mut self, freed: Freed) {
        assert!(freed.rows <= self.rows && freed.bytes <= self.bytes, "{freed:?} let go of {self:?}");
        self.rows -= freed.rows;
        self.bytes -= freed.bytes;
    }
}

/// What rows that are no longer held were counted as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "what is let go must be taken off the budget"]
pub struct Freed {
    /// Rows.
    pub rows: u64,
    /// Bytes.
    pub bytes: u64,
}

impl std::ops::AddAssign for Freed {
    fn add_assign(&mut self, more: Self) {
        self.rows += more.rows;
        self.bytes += more.bytes;
    }
}

impl Freed {
    /// What `rows` are counted as.
    pub fn of<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Self {
        rows.into_iter().fold(Self::default(), |freed, row| Self {
            rows: freed.rows + 1,
            bytes: freed.bytes + row.weight(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_even_but_never_tiny() {
        assert_eq!(Share::even(200_000, 800, 8), Share { rows: 25_000, bytes: 100 });
        assert_eq!(Share::even(200_000, 1 << 29, 1_000).rows, Share::MIN_ROWS);
        assert_eq!(Share::even(10, 10, 0), Share { rows: 1_000, bytes: 10 });
    }

    #[test]
    fn a_smaller_share_leaves_no_room_and_takes_nothing_away() {
        let mut budget = Budget::new(Share { rows: 10, bytes: 10 });
        budget.rows = 6;
        budget.set_share(Share { rows: 4, bytes: 10 });
        assert_eq!((budget.room_rows(), budget.rows()), (0, 6));
    }
}
