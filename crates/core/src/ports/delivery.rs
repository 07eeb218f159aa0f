//! Rows from one shard's durable pull consumer, and that consumer's pin and position.
//!
//! Two promises of an implementation: a [`Command::Reset`] unsubscribes every older inbox before its
//! request is sent, and a pull's rows reach the sink before its [`Reply::Ended`].

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{Attempt, Failure};
use crate::row::{Delivery, Mark, Row, Seq};
use crate::time::Timestamp;

/// The name the server gives the one client it delivers to: the header `Nats-Pin-Id`, opaque.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PinId(pub Arc<str>);

/// The number of an inbox, rising. A fresh one is subscribed by the first pull that names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Inbox(pub u64);

/// Whether written rows are acknowledged, and what that does. The protocol itself needs no acknowledgements: they
/// only let the stream forget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Acks {
    /// None; written rows are trimmed.
    #[default]
    None,
    /// Each row that is done, on a stream that keeps acknowledged rows.
    Explicit,
    /// Each row that is done, on a stream that removes acknowledged rows (work-queue retention).
    WorkQueue,
}

/// A request for rows, or for none: `max_bytes: Some(1)` renews the pin and delivers nothing
/// (nats-server refuses to send a message larger than that).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pull {
    /// This pull's number.
    pub attempt: Attempt,
    /// Where its rows and its final status go.
    pub inbox: Inbox,
    /// The pin it is sent under; none while nobody is known to be pinned, or somebody else is.
    pub pin: Option<PinId>,
    /// At most this many rows.
    pub batch: u32,
    /// At most this many bytes as the server counts them (payload, subject, headers).
    pub max_bytes: Option<u64>,
    /// After this long the server ends it.
    pub expires: Duration,
}

/// What a shard asks of its consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Ask for rows. Answered by [`Reply::Ended`] at the pull's end; its rows go to the sink before that.
    Pull(Pull),
    /// Unsubscribe `inbox` and every older one. What was on its way there is lost, so this is always
    /// followed by a reset, ours or an heir's. No answer.
    Close {
        /// The newest inbox to close.
        inbox: Inbox,
    },
    /// Unsubscribe every inbox older than `inbox`, then set the consumer's position so that `from` is the
    /// next row. Answered by [`Reply::Reset`].
    Reset {
        /// This command's number.
        attempt: Attempt,
        /// The inbox that the next pull will name.
        inbox: Inbox,
        /// The next row to deliver.
        from: Seq,
    },
    /// Look at the stream, then at the consumer. Answered by [`Reply::Inspected`].
    Inspect {
        /// This command's number.
        attempt: Attempt,
        /// Also say when the row at this place was stored.
        row: Seq,
        /// Also say which is the shard's first row above this place.
        above: Seq,
    },
    /// Let the stream forget these rows, each named with a delivery of it. No answer: one that is lost brings the
    /// row again, and with it the next acknowledgement. Never sent with [`Acks::None`].
    Ack {
        /// The rows.
        rows: Vec<(Seq, Delivery)>,
    },
    /// Take the pin from whoever holds it. Answered by [`Reply::Unpinned`].
    Unpin {
        /// This command's number.
        attempt: Attempt,
    },
}

/// Rows of one pull, in the order of their arrival.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The inbox they came to.
    pub inbox: Inbox,
    /// The pin they were sent under, if the server named one.
    pub pin: Option<PinId>,
    /// The rows; never empty.
    pub rows: Vec<Row>,
}

/// How a pull ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullEnd {
    /// It brought as many rows as it asked for.
    Full,
    /// Its time was up, or nothing was there (408, 404).
    Empty,
    /// The next row is larger than what was left of `max_bytes` (409).
    TooLarge,
    /// Another pin holds the shard, or nobody does although rows wait (423).
    NotPinned,
    /// The consumer's leader moved (409); the pin is gone with it.
    LeaderChanged,
    /// The consumer was deleted (409).
    Deleted,
    /// Nobody serves this consumer: it is gone, or has no leader now (503).
    NoResponders,
    /// The inbox was closed by a later command.
    Closed,
    /// It could not be sent, or the server refused it.
    Failed(Failure),
}

/// What a look at stream and consumer showed. The stream was looked at first, so every row of the shard up
/// to `last` that the consumer has not delivered is counted in `pending`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// When the stream was created: with its name, its identity.
    pub created: Timestamp,
    /// Rows in the stream.
    pub messages: u64,
    /// The stream's first row that is still there.
    pub first: Seq,
    /// The stream's last row.
    pub last: Mark,
    /// The last row of this shard that is still there.
    pub shard_last: Option<Seq>,
    /// When the row asked about was stored; none if it is no longer there.
    pub row_stored_at: Option<Timestamp>,
    /// The shard's first row above the place asked about that is still there.
    pub next: Option<Seq>,
    /// Deliveries since the last reset.
    pub delivered: u64,
    /// Rows of the shard that wait for delivery.
    pub pending: u64,
    /// Who is pinned.
    pub pinned: Option<PinId>,
    /// Why the consumer cannot be used, if it does not fit what a shard needs.
    pub unfit: Option<String>,
}

/// What a look-up may find instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InspectError {
    /// The stream or the consumer is gone; which, and how to get it back.
    Gone(String),
    /// It could not be asked now.
    Failed(Failure),
}

/// What a shard is told of its consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Rows arrived (from the sink).
    Rows(Rows),
    /// A pull ended.
    Ended {
        /// The pull's number.
        attempt: Attempt,
        /// How.
        end: PullEnd,
    },
    /// A reset was answered, or was not.
    Reset {
        /// The reset's number.
        attempt: Attempt,
        /// Whether the consumer's position is known to be set.
        outcome: Result<(), Failure>,
    },
    /// The answer to a look.
    Inspected {
        /// The look's number.
        attempt: Attempt,
        /// What it showed.
        outcome: Result<Inspection, InspectError>,
    },
    /// The answer to an unpin.
    Unpinned {
        /// The unpin's number.
        attempt: Attempt,
        /// Whether it was done.
        outcome: Result<(), Failure>,
    },
    /// Rows may have been lost on the way: the connection was made anew, or the client could not keep up.
    Disrupted,
}

/// Where a delivery adapter puts rows and disruptions; it must not block.
pub type Sink = Arc<dyn Fn(Reply) + Send + Sync>;

/// The port. One implementation serves one shard.
#[async_trait]
pub trait Port: Send + Sync {
    /// Carries out `command`. [`Command::Close`] answers `None`; everything else answers once.
    async fn call(&self, command: Command) -> Option<Reply>;
}
