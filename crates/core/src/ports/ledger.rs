//! The ledger: one record a shard, written only by compare-and-set on its revision, read from its leader.

use async_trait::async_trait;
use bytes::Bytes;

use super::{Attempt, Failure};
use crate::row::ShardId;

/// The revision of a stored record; 0 for "there is none".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

/// A stored record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its revision.
    pub revision: Revision,
    /// Its bytes.
    pub record: Bytes,
}

/// What a shard asks of the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read the shard's record from the ledger's leader. Answered by [`Reply::Read`].
    Read {
        /// This command's number.
        attempt: Attempt,
        /// Whose record.
        shard: ShardId,
    },
    /// Store `record` if the stored revision is still `expected`. Answered by [`Reply::Written`].
    Write {
        /// This command's number.
        attempt: Attempt,
        /// Whose record.
        shard: ShardId,
        /// The revision that must be stored for the write to happen.
        expected: Revision,
        /// The new bytes.
        record: Bytes,
    },
}

/// How a write ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// Stored, under this revision.
    Stored(Revision),
    /// Not stored: another revision is.
    Conflict,
    /// Not known: no answer came, or the server's words leave it open.
    Unknown(Failure),
    /// Not stored, for a reason that may pass.
    Refused(Failure),
}

/// What a shard is told of the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The answer to a read.
    Read {
        /// The read's number.
        attempt: Attempt,
        /// The record, or that there is none.
        outcome: Result<Option<Entry>, Failure>,
    },
    /// The answer to a write.
    Written {
        /// The write's number.
        attempt: Attempt,
        /// How it ended.
        outcome: WriteOutcome,
    },
}

/// The port.
#[async_trait]
pub trait Port: Send + Sync {
    /// Carries out `command` and answers once.
    async fn call(&self, command: Command) -> Reply;
}
