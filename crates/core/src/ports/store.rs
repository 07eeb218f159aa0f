//! The store: inserts under a token, read-backs, and what a table allows.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::Attempt;
use crate::row::{Row, Seq, ShardId, TableName};
use crate::time::{Instant, Timestamp};

/// What a table lets Holdfast promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// Every row, in order; repeats are possible after trouble.
    AtLeastOnce,
    /// Once, but that a store killed within its commit can swallow a retried batch.
    Deduplicated,
    /// Once, through any crash.
    ExactlyOnce,
}

impl Level {
    /// Whether a batch of such a table can be read back by its sequence and stream columns.
    #[must_use]
    pub const fn can_read_back(self) -> bool {
        matches!(self, Self::ExactlyOnce)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AtLeastOnce => "at-least-once",
            Self::Deduplicated => "deduplicated",
            Self::ExactlyOnce => "exactly-once",
        })
    }
}

/// Where an open batch goes. It stands in the record, so that a changed configuration does not redirect it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// The database, unquoted.
    pub database: Arc<str>,
    /// The table, unquoted.
    pub table: Arc<str>,
    /// What the table allowed when the batch was opened.
    pub level: Level,
}

/// A deduplication token: the same batch and generation have the same token for ever.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub Arc<str>);

/// Rows to insert in one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Insert {
    /// This command's number.
    pub attempt: Attempt,
    /// The shard that asks.
    pub shard: ShardId,
    /// The table as its subject names it.
    pub table: TableName,
    /// Where the rows go.
    pub target: Target,
    /// The value of the stream column.
    pub created: Timestamp,
    /// The token of the batch.
    pub token: Token,
    /// The rows, in order.
    pub rows: Arc<[Row]>,
    /// Not to be sent after this instant: the intent must be checked again (rule 8). An insert that waited
    /// too long for its turn answers [`InsertOutcome::Stale`].
    pub send_by: Instant,
}

/// What a shard asks of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Insert a batch. Answered by [`Reply::Inserted`].
    Insert(Insert),
    /// Which sequences of `first..=last` are there? Answered by [`Reply::ReadBack`].
    ReadBack {
        /// This command's number.
        attempt: Attempt,
        /// The shard that asks.
        shard: ShardId,
        /// The table as its subject names it.
        table: TableName,
        /// Where the rows are looked for.
        target: Target,
        /// The value of the stream column.
        created: Timestamp,
        /// The first sequence.
        first: Seq,
        /// The last sequence.
        last: Seq,
    },
    /// What does the configuration and the table itself allow? Answered by [`Reply::Described`].
    Describe {
        /// This command's number.
        attempt: Attempt,
        /// The shard that asks.
        shard: ShardId,
        /// The table as its subject names it.
        table: TableName,
        /// Also look whether the table has rows that the record does not know of.
        holds: Option<HoldsAbove>,
    },
    /// Break off every command of `shard` with a number up to `until`, one that is yet to be started included.
    /// No answer of its own; what was broken off answers.
    Abort {
        /// The shard that gives up.
        shard: ShardId,
        /// The last number that it gave out.
        until: Attempt,
    },
}

/// What a description also looks for, where the table can be read back: rows above `above`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldsAbove {
    /// The value of the stream column.
    pub created: Timestamp,
    /// The highest row that the record knows to be written, or to be perhaps.
    pub above: Seq,
}

/// What a description showed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Where the table's rows go, and at what level.
    pub target: Target,
    /// The highest row that the table has above the one asked about; none if it has none, was not asked, or
    /// cannot be read back.
    pub holds: Option<Seq>,
}

/// How an insert ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InsertOutcome {
    /// Answered success.
    Stored,
    /// Certainly nothing was written; the same batch may be tried again.
    Again(Refusal),
    /// It may have been written, or a part of it, now or later.
    Doubt(Refusal),
    /// Not sent: its `send_by` had passed.
    Stale,
}

/// What kind of trouble a refusal tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// A row of the batch: the same rows will be refused again. The only class that leads to a split.
    Data,
    /// The store's state now: the same batch will be taken later.
    Passing,
    /// The table, its columns or the configuration: refused until somebody changes something.
    Table,
    /// The user, the password or a grant.
    Access,
    /// The answer itself says that it does not know, or is known to come after a part was written; or there
    /// was none.
    Doubt,
    /// An answer that is not known. Handled like one that passes, and reported once.
    Unknown,
}

impl Class {
    /// The name under which the class is counted and logged.
    #[must_use]
    pub const fn key(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Passing => "passing",
            Self::Table => "table",
            Self::Access => "access",
            Self::Doubt => "doubt",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.key())
    }
}

/// The store's reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What kind of trouble it is.
    pub class: Class,
    /// The store's error code, if it gave one.
    pub code: Option<u32>,
    /// Which row of those sent the store names as the bad one, counted from 1. A hint, and no more.
    pub row: Option<u32>,
    /// The store's words, cut to a sensible length.
    pub message: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => write!(f, "code {code}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

/// What a read-back found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The sequences that are there, rising, each once.
    pub seqs: Vec<Seq>,
    /// The first sequence that is there more than once.
    pub repeated: Option<Seq>,
}

/// Why a table cannot take rows now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DescribeError {
    /// Table or database does not exist.
    Missing(Refusal),
    /// The table cannot give the level that is asked of it.
    Unfit(String),
    /// The store could not be asked, or refused to say.
    Failed(Refusal),
}

impl fmt::Display for DescribeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(refusal) | Self::Failed(refusal) => refusal.fmt(f),
            Self::Unfit(why) => f.write_str(why),
        }
    }
}

/// What a shard is told of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The answer to an insert.
    Inserted {
        /// The insert's number.
        attempt: Attempt,
        /// The table as its subject names it.
        table: TableName,
        /// How it ended.
        outcome: InsertOutcome,
    },
    /// The answer to a read-back.
    ReadBack {
        /// The read-back's number.
        attempt: Attempt,
        /// The table as its subject names it.
        table: TableName,
        /// What was found.
        outcome: Result<Found, Refusal>,
    },
    /// The answer to a description.
    Described {
        /// The description's number.
        attempt: Attempt,
        /// The table as its subject names it.
        table: TableName,
        /// What it showed.
        outcome: Result<Description, DescribeError>,
    },
}

/// The port.
#[async_trait]
pub trait Port: Send + Sync {
    /// Carries out `command`. [`Command::Abort`] answers `None`; everything else answers once.
    async fn call(&self, command: Command) -> Option<Reply>;
}
