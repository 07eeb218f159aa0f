//! Rows: opaque payloads with their place in the stream.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// A stream sequence: a row's place in the stream. The first row of a stream has 1; 0 is before every row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Seq(pub u64);

impl Seq {
    /// Before every row.
    pub const ZERO: Self = Self(0);

    // The signature is serde's.
    #[expect(clippy::trivially_copy_pass_by_ref)]
    pub(crate) fn is_zero(&self) -> bool {
        *self == Self::ZERO
    }

    /// The sequence after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Seq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A consumer sequence: the number of a delivery, starting at 1 after a reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Delivery(pub u64);

/// A place in the stream that can be recognised again: sequences can be reused by a server that lost its
/// tail, so the row's store time stands beside its sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// The row's sequence.
    pub seq: Seq,
    /// When the stream stored that row. Zero where that is not known (before the first row, say).
    pub stored_at: Timestamp,
}

impl Mark {
    /// The higher of two places; of two marks of one place, the one that says when its row was stored.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        let rank = |mark: Self| (mark.seq, mark.stored_at != Timestamp(0));
        if rank(other) > rank(self) { other } else { self }
    }
}

/// The name of a table as its subject gives it, percent-decoded. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TableName(Arc<str>);

impl TableName {
    /// A table's name. Any text is allowed: it is data until an adapter quotes it.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self(name.into())
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TableName {
    /// Control characters are escaped: a name comes from a subject, that is, from anyone, and goes to a
    /// terminal or a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            if c.is_control() { write!(f, "{}", c.escape_default())? } else { write!(f, "{c}")? }
        }
        Ok(())
    }
}

/// One shard of the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ShardId(pub u32);

impl fmt::Display for ShardId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a look at a row's payload said on delivery, before any intent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The payload is one row that the store can be asked to take.
    Good,
    /// It can never become exactly one row.
    Bad(Unfit),
}

/// Why a message can never become exactly one row, in words that quote nothing of the payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// Its subject names no table: [`Row::table`] holds the subject's token as it came.
    Subject(Arc<str>),
    /// Its payload.
    Payload(Arc<str>),
}

/// One message of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its place in the stream.
    pub seq: Seq,
    /// Its number among the consumer's deliveries since the last reset.
    pub delivery: Delivery,
    /// Whether the consumer has delivered it before, since the last reset: nobody acknowledged it in time.
    pub redelivered: bool,
    /// When the stream stored it.
    pub stored_at: Timestamp,
    /// The table it belongs to.
    pub table: TableName,
    /// The bytes as published. Owned by this row alone, so that a row that waits keeps nothing else alive.
    pub payload: Bytes,
    /// Whether the store can be asked to take it.
    pub verdict: Verdict,
}

impl Row {
    /// What a held row is charged beside its payload, in bytes: its own fields, its table's name behind a
    /// shared pointer, and the allocator's share.
    pub const OVERHEAD: u64 = 160;

    /// What holding this row costs, in bytes.
    #[must_use]
    pub fn weight(&self) -> u64 {
        self.payload.len() as u64 + Self::OVERHEAD
    }

    /// This row's place, recognisable.
    #[must_use]
    pub fn mark(&self) -> Mark {
        Mark { seq: self.seq, stored_at: self.stored_at }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_higher_of_two_marks_and_of_one_place_the_one_that_knows_its_time() {
        let mark = |seq, stored_at| Mark { seq: Seq(seq), stored_at: Timestamp(stored_at) };
        for (higher, lower) in [
            (mark(5, 0), mark(4, 9)),
            (mark(5, 9), mark(5, 0)),
            (mark(5, 1), mark(4, 9)),
            (mark(5, 9), mark(5, 9)),
        ] {
            assert_eq!((higher.max(lower), lower.max(higher)), (higher, higher));
        }
    }
}
