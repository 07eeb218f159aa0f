//! Dead letters: rows that can never be stored, kept with the reason, byte for byte.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{Attempt, Failure};
use crate::row::{Seq, ShardId, TableName};
use crate::time::{Instant, Timestamp};

/// Why a row is a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// Its subject names no table.
    Subject,
    /// Its payload can never become exactly one row.
    Payload,
    /// The store refused it, alone.
    Refused,
    /// Its table does not exist, and the configuration says not to wait for it.
    UnknownTable,
}

impl Cause {
    /// The cause as a word, for metrics and headers.
    #[must_use]
    pub const fn key(self) -> &'static str {
        match self {
            Self::Subject => "subject",
            Self::Payload => "payload",
            Self::Refused => "refused",
            Self::UnknownTable => "unknown-table",
        }
    }
}

/// A row that can never be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Letter {
    /// The identity of the stream: with shard, table and sequence the letter's own.
    pub created: Timestamp,
    /// The row's shard.
    pub shard: ShardId,
    /// The table as its subject names it; with [`Cause::Subject`] the token as it came.
    pub table: TableName,
    /// The row's place in the stream.
    pub seq: Seq,
    /// When the stream stored it.
    pub stored_at: Timestamp,
    /// The bytes as published.
    pub payload: Bytes,
    /// Why it is a dead letter.
    pub cause: Cause,
    /// The store's error code, if it gave one.
    pub code: Option<u32>,
    /// The reason in words, cut to a sensible length.
    pub message: Arc<str>,
    /// Times the row was sent to the store by the tenure that gave it up.
    pub attempts: u32,
}

/// What a shard asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Keep `letter`, unless it is kept already. Answered by [`Reply::Parked`].
    Park {
        /// This command's number.
        attempt: Attempt,
        /// The letter.
        letter: Letter,
        /// Not to be sent after this instant: the intent must be checked again (rule 8).
        send_by: Instant,
        /// Store it only if there is none with its identity. Only a mutant says no.
        unless_there: bool,
    },
}

/// How keeping a letter ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParkOutcome {
    /// It is kept, by this command or an earlier one.
    Parked,
    /// Not sent: its `send_by` had passed.
    Stale,
    /// Not kept, or not known to be; to be tried again.
    Failed(Failure),
}

/// What a shard is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The answer to [`Command::Park`].
    Parked {
        /// The command's number.
        attempt: Attempt,
        /// The table as its subject names it.
        table: TableName,
        /// How it ended.
        outcome: ParkOutcome,
    },
}

/// The port.
#[async_trait]
pub trait Port: Send + Sync {
    /// Carries out `command` and answers once.
    async fn call(&self, command: Command) -> Reply;
}
