//! Trimming written rows from a stream that Holdfast keeps itself (`ack_policy none`).

use async_trait::async_trait;

use super::{Attempt, Failure};
use crate::row::Seq;
use crate::time::Timestamp;

/// What is asked of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Remove every row below `below`, if the stream still is the one created at `created` (looked at just
    /// before). Answered by [`Reply::Trimmed`].
    Trim {
        /// This command's number.
        attempt: Attempt,
        /// The identity of the stream that may be trimmed.
        created: Timestamp,
        /// The first row that is kept.
        below: Seq,
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
