//! The members' records in the bucket, and whether a member's process still has a connection.
//!
//! What an implementation promises:
//!
//! - It watches every member's key from its start on. First [`Reply::Snapshot`] says all there are, then
//!   every change follows in the order of the bucket, **this process's own writes included**: a process that
//!   does not hear itself knows that it is deaf, and believes nobody dead meanwhile.
//! - A watch that may have missed something is made anew, and another snapshot sent.
//! - While the process lives, it answers requests to its own member's name, whatever else it is busy with.
//! - Keys and records are handed on as they are; they may be anything.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use super::ledger::Revision;
use super::{Attempt, Failure};
use crate::member::MemberId;

/// A stored record as the watch shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Whose: the key without the prefix that all members share.
    pub key: Arc<str>,
    /// Its revision.
    pub revision: Revision,
    /// Its bytes.
    pub record: Bytes,
}

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Store a member's record, whatever is there. Answered by [`Reply::Put`].
    Put {
        /// This command's number.
        attempt: Attempt,
        /// Whose record.
        member: MemberId,
        /// The bytes.
        record: Bytes,
    },
    /// Delete a member's record. Answered by [`Reply::Deleted`].
    Delete {
        /// This command's number.
        attempt: Attempt,
        /// Whose record.
        member: MemberId,
        /// Only if this revision is still the last one.
        only: Option<Revision>,
    },
    /// Ask the member's process for a sign of life. Answered by [`Reply::Probed`].
    Probe {
        /// This command's number.
        attempt: Attempt,
        /// Whom.
        member: MemberId,
    },
}

/// What came of asking a member for a sign of life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Probe {
    /// It answered.
    Alive,
    /// Nobody listens under its name: its connection is gone.
    NoResponders,
    /// No answer in time, or it could not be asked. That proves nothing: it may be stopped, or far.
    Silent,
}

/// What is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// All records there are (from the sink).
    Snapshot(Vec<Entry>),
    /// A record was written (from the sink).
    Changed(Entry),
    /// A record was deleted (from the sink).
    Removed {
        /// Whose.
        key: Arc<str>,
    },
    /// The answer to a put.
    Put {
        /// The put's number.
        attempt: Attempt,
        /// Whether it is known to be stored.
        outcome: Result<(), Failure>,
    },
    /// The answer to a delete.
    Deleted {
        /// The delete's number.
        attempt: Attempt,
        /// Whether it is known to be done.
        outcome: Result<(), Failure>,
    },
    /// The answer to a probe.
    Probed {
        /// The probe's number.
        attempt: Attempt,
        /// What came of it.
        answer: Probe,
    },
}

/// Where an adapter puts what its watch shows; it must not block.
pub type Sink = Arc<dyn Fn(Reply) + Send + Sync>;

/// The port. One implementation serves one process.
#[async_trait]
pub trait Port: Send + Sync {
    /// Carries out `command` and answers once.
    async fn call(&self, command: Command) -> Reply;
}
