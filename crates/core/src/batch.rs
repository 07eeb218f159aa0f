//! Batches: their bounds and their tokens.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ports::store::Token;
use crate::row::Seq;
use crate::time::Timestamp;

/// Consecutive rows of a lane, inserted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    /// The first row.
    pub first: Seq,
    /// The last row.
    pub last: Seq,
    /// How many rows of the lane lie in between, both ends counted.
    pub rows: u32,
    /// 0 but for repairs: raised when a token was burned without its rows.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub generation: u8,
}

// The signature is serde's.
#[expect(clippy::trivially_copy_pass_by_ref)]
fn is_zero(generation: &u8) -> bool {
    *generation == 0
}

impl Batch {
    /// Generations a batch may go through before its lane stops and says why.
    pub const MAX_GENERATION: u8 = 2;

    /// What is wrong with these numbers, if anything is.
    #[must_use]
    pub fn defect(&self) -> Option<&'static str> {
        if self.first == Seq::ZERO {
            Some("a batch starts at sequence 0")
        } else if self.last < self.first {
            Some("a batch ends before it starts")
        } else if self.rows == 0 {
            Some("a batch has no rows")
        } else if u64::from(self.rows - 1) > self.last.0 - self.first.0 {
            Some("a batch has more rows than sequences")
        } else if self.generation > Self::MAX_GENERATION {
            Some("a batch has a generation that is never reached")
        } else {
            None
        }
    }

    /// The batch's deduplication token.
    ///
    /// It is spelled out rather than hashed: two batches can then never share one, and whoever looks at the
    /// store's query log sees which rows an insert carried. The target is not part of it, since the store
    /// keeps a window for each table.
    #[must_use]
    pub fn token(&self, stream: &str, created: Timestamp) -> Token {
        let Self { first, last, rows, generation } = self;
        Token(format!("{stream}@{}:{first}-{last}/{rows}.{generation}", created.0).into())
    }
}

/// When a batch is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// At most this many rows.
    pub max_rows: u32,
    /// At most this many payload bytes (one row may be larger).
    pub max_bytes: u64,
    /// A row waits this long at most.
    pub max_age: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCH: Batch = Batch { first: Seq(3), last: Seq(9), rows: 4, generation: 0 };

    #[test]
    fn the_token_names_stream_and_numbers() {
        assert_eq!(&*BATCH.token("INGEST", Timestamp(77)).0, "INGEST@77:3-9/4.0");
    }

    #[test]
    fn any_other_number_is_another_token() {
        let token = BATCH.token("S", Timestamp(1));
        let others = [
            Batch { first: Seq(2), ..BATCH }.token("S", Timestamp(1)),
            Batch { last: Seq(10), ..BATCH }.token("S", Timestamp(1)),
            Batch { rows: 5, ..BATCH }.token("S", Timestamp(1)),
            Batch { generation: 1, ..BATCH }.token("S", Timestamp(1)),
            BATCH.token("T", Timestamp(1)),
            BATCH.token("S", Timestamp(2)),
        ];
        assert!(others.iter().all(|other| *other != token));
    }

    #[test]
    fn impossible_numbers_are_named() {
        assert_eq!(BATCH.defect(), None);
        assert!(Batch { first: Seq(0), ..BATCH }.defect().is_some());
        assert!(Batch { last: Seq(2), ..BATCH }.defect().is_some());
        assert!(Batch { rows: 0, ..BATCH }.defect().is_some());
        assert!(Batch { rows: 8, ..BATCH }.defect().is_some());
        assert!(Batch { rows: 7, ..BATCH }.defect().is_none());
        assert!(Batch { generation: 3, ..BATCH }.defect().is_some());
    }
}
