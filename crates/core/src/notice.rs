//! What a machine tells people: typed, so that logs, metrics and the simulator's coverage read one thing.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::batch::Batch;
use crate::ports::Failure;
use crate::ports::dead_letters::Cause;
use crate::ports::delivery::PinId;
use crate::ports::store::{Class, Refusal, Target};
use crate::row::{Seq, TableName};

/// Why the consumer is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ResyncReason {
    /// The first reset of a tenure.
    NewPin,
    /// A delivery number is missing.
    Gap,
    /// A delivery goes back in the stream.
    WentBack,
    /// A delivery came under another pin.
    OtherPin,
    /// The consumer delivered more than was seen.
    Tail,
    /// The connection was made anew, or the client could not keep up.
    Disrupted,
    /// A pull got no final status.
    DeadPull,
    /// The first new row was not the one that the stream has next.
    Skipped,
    /// Nobody was pinned and nothing pending, but the record is not finished.
    Stranded,
}

impl ResyncReason {
    /// The reason as a word, for metrics.
    #[must_use]
    pub const fn key(self) -> &'static str {
        match self {
            Self::NewPin => "new-pin",
            Self::Gap => "gap",
            Self::WentBack => "went-back",
            Self::OtherPin => "other-pin",
            Self::Tail => "lost-tail",
            Self::Disrupted => "disrupted",
            Self::DeadPull => "dead-pull",
            Self::Skipped => "skipped",
            Self::Stranded => "stranded",
        }
    }
}

/// Why a lane does not get on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Its table cannot take rows now.
    Table(String),
    /// The store refuses or does not answer; tried again.
    Store(String),
    /// A row can never be inserted.
    BadRow {
        /// Which.
        seq: Seq,
        /// Why.
        why: String,
    },
    /// The dead letters take no letter now; tried again.
    DeadLetters {
        /// The row that waits for it.
        seq: Seq,
        /// Why.
        failure: Failure,
    },
    /// It gave up and needs a person.
    Stopped(String),
}

impl Trouble {
    /// Whether it is the same trouble in perhaps other words: messages of one code carry figures that change.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        let code = |why: &str| why.split_once(':').map_or(why, |(code, _)| code).to_owned();
        match (self, other) {
            (Self::Store(a), Self::Store(b)) | (Self::Table(a), Self::Table(b)) => code(a) == code(b),
            (Self::DeadLetters { failure: a, .. }, Self::DeadLetters { failure: b, .. }) => {
                a.class == b.class
            }
            _ => self == other,
        }
    }

    /// The kind as a word, for metrics.
    #[must_use]
    pub const fn key(&self) -> &'static str {
        match self {
            Self::Table(_) => "table",
            Self::Store(_) => "store",
            Self::BadRow { .. } => "bad-row",
            Self::DeadLetters { .. } => "dead-letters",
            Self::Stopped(_) => "stopped",
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(why) | Self::Store(why) => f.write_str(why),
            Self::BadRow { seq, why } => {
                write!(f, "row {seq} can never be inserted ({why}); its table waits, no row is lost")
            }
            Self::DeadLetters { seq, failure } => {
                write!(f, "row {seq} is a dead letter and cannot be kept as one ({failure}); its table waits")
            }
            Self::Stopped(why) => write!(f, "stopped: {why}"),
        }
    }
}

/// Why a shard ended by itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardFailure {
    /// The consumer or stream is gone, or does not fit.
    #[error("{0}")]
    ConsumerGone(String),
    /// The stream has rows, the ledger has no record, and nobody said where to start.
    #[error(
        "the stream already has rows and the ledger has no record of this shard: set topology.start once, to \"first\" (take every row), \"new\" (only rows that come from now on) or \"seq:N\""
    )]
    StartNeeded,
    /// The record cannot be used.
    #[error("{0}")]
    Record(#[from] crate::record::RecordError),
    /// The stream's sequences do not fit what the record says was written.
    #[error(
        "the stream lost its tail and uses sequences again ({0}): going on would drop rows in silence. Find out what the server lost, then set a new start with `holdfast ledger rebase`"
    )]
    SequencesReused(String),
}

/// Something worth a line in the log or a count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The server pinned us.
    Pinned,
    /// The pin of an owner who is gone was taken away.
    PinTakenAway,
    /// The fence is stored: the tenure begins.
    TenureBegan {
        /// Its epoch.
        epoch: u64,
        /// Every row up to here is done.
        floor: Seq,
        /// Batches that may have been sent by an earlier tenure.
        inherited: usize,
        /// How long it took from the pin.
        took: Duration,
    },
    /// The tenure's first row was accepted.
    FirstRow {
        /// Which.
        seq: Seq,
    },
    /// The tenure is over; what was held is dropped and comes again.
    TenureEnded {
        /// Why.
        why: String,
        /// Rows that were held.
        held: u64,
    },
    /// The consumer was reset.
    Resynced {
        /// Why.
        reason: ResyncReason,
    },
    /// A row was delivered again and dropped.
    Repeats {
        /// How many in one go.
        rows: u64,
    },
    /// A batch is in the store.
    BatchStored {
        /// The table.
        table: TableName,
        /// Its numbers.
        batch: Batch,
        /// Attempts it took in this tenure (0: an earlier tenure's attempt had done it).
        attempts: u32,
        /// From the first attempt to the answer.
        took: Duration,
    },
    /// A table was described: where its rows go, at what level.
    Described {
        /// The table.
        table: TableName,
        /// Where.
        target: Target,
    },
    /// A lane has trouble, or other trouble than before.
    Trouble {
        /// The table.
        table: TableName,
        /// What.
        trouble: Trouble,
    },
    /// A lane's trouble is over.
    Recovered {
        /// The table.
        table: TableName,
    },
    /// An attempt may have been swallowed: rows were missing after a success, and go under a new token.
    TokenBurned {
        /// The table.
        table: TableName,
        /// The batch with its new generation.
        batch: Batch,
        /// Rows that were missing.
        missing: usize,
    },
    /// Rows of an inherited batch are no longer in the stream: somebody removed them.
    RowsRemoved {
        /// The table.
        table: TableName,
        /// The batch.
        batch: Batch,
        /// How many cannot be had any more.
        lost: u64,
    },
    /// The store refused an attempt, or did not answer it.
    Refused {
        /// The table.
        table: TableName,
        /// What kind of trouble it is.
        class: Class,
    },
    /// The store's answer is not known to Holdfast; it is taken for one that passes. Told once for each code.
    UnknownRefusal {
        /// The answer.
        refusal: Refusal,
    },
    /// A batch was refused for its data and is cut in two.
    Split {
        /// The table.
        table: TableName,
        /// The batch as it was.
        batch: Batch,
        /// Rows of the first part.
        left: usize,
    },
    /// A row is kept as a dead letter.
    Parked {
        /// The table.
        table: TableName,
        /// Which.
        seq: Seq,
        /// Why.
        cause: Cause,
        /// The store's error code, if it gave one.
        code: Option<u32>,
        /// The reason in words.
        why: Arc<str>,
    },
    /// A row that an earlier tenure found to be a dead letter is no longer in the stream: somebody removed it. It
    /// may or may not be kept.
    LetterLost {
        /// The table.
        table: TableName,
        /// Which.
        seq: Seq,
    },
    /// The table has rows that the ledger does not know of: it was lost, or restored older. They are read back
    /// before anything is sent.
    TableAhead {
        /// The table.
        table: TableName,
        /// Every row at or below it is done, as the ledger says.
        done: Seq,
        /// The highest row that the table has.
        holds: Seq,
    },
    /// The stream of this name is another one than the record's: a fresh record was started.
    StreamMadeAnew,
    /// Something cannot be asked or done now and is tried again.
    Waiting {
        /// What.
        what: &'static str,
        /// Why.
        why: String,
    },
    /// The stream was trimmed.
    Trimmed {
        /// Rows removed.
        rows: u64,
        /// The first row kept.
        below: Seq,
    },
}

/// What a shard tells the process that runs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// The shard has a record and waits for the pin: whatever is published from now on is taken.
    Ready,
    /// The tenure has begun.
    Owned {
        /// The pin that it rests on.
        pin: PinId,
    },
    /// The tenure is over and will be tried for again.
    Lost,
    /// The shard was given up cleanly, or past its deadline.
    Released {
        /// Whether everything accepted is written.
        clean: bool,
    },
    /// The shard ended by itself.
    Failed(ShardFailure),
}
