//! Trimming written rows from a stream that Holdfast keeps itself (`ack_policy none`).

use async_trait::async_trait;

use super::{Attempt, Failure};
use crate::row::{Mark, Seq};
use crate::time::Timestamp;

/// What is asked of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Remove every row below `below`, if the stream still is the one created at `created` and has not lost
    /// `witness`, both looked at just before. Answered by [`Reply::Trimmed`].
    Trim {
        /// This command's number.
        attempt: Attempt,
        /// The identity of the stream that may be trimmed.
        created: Timestamp,
        /// The first row that is kept; with [`Seq::ZERO`] nothing is removed, and the stream only looked at.
        below: Seq,
        /// The highest row that a record names; each record's is asked about, by a command of its own. If the stream
        /// ends before it, or has another row there, its sequences are used again: what lies below `below` may be
        /// new and unwritten.
        witness: Mark,
    },
}

/// What is told of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The answer to a trim: how many rows went.
    Trimmed {
        /// The trim's number.
        attempt: Attempt,
        /// Rows removed, or why none were.
        outcome: Result<u64, Failure>,
    },
}

/// The port.
#[async_trait]
pub trait Port: Send + Sync {
    /// Carries out `command` and answers once.
    async fn call(&self, command: Command) -> Reply;
}
