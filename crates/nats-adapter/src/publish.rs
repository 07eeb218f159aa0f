//! Rows into the stream: pipelined publishes, each acknowledged by the stream.
//!
//! Every row carries a message id, so a row whose acknowledgement was lost is sent again and stored once, as
//! long as the stream remembers the id (its duplicate window). Receipts come in the order of the rows. Rows
//! are stored in that order too, except that a row which had to be sent again can be stored after rows that
//! followed it: the sequence in its receipt tells.
//!
//! Where the topology has several streams, which of them stores a row is the server's choice, always the same one for
//! a table; the receipt names it. A sole publisher's rows are chained within each stream, so it must know a table's
//! stream before it can have rows of that table in flight: the first row of each is waited for.

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use async_nats::HeaderMap;
use bytes::Bytes;
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::row::Seq;
use serde::Deserialize;
use tokio::time::Instant;

use crate::connect::Connection;
use crate::errors::{ApiError, CallError, RequestError, cut};
use crate::request::Pending;
use crate::subject;
use crate::topology::Streams;

pub(crate) const MESSAGE_ID: &str = "Nats-Msg-Id";
pub(crate) const EXPECTED_STREAM: &str = "Nats-Expected-Stream";
const EXPECTED_MESSAGE_ID: &str = "Nats-Expected-Last-Msg-Id";

/// The shortest and the longest pause before rows are sent again.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// How to publish.
#[derive(Clone, Debug)]
pub struct Options {
    /// Rows that may wait for their acknowledgement at once.
    pub window: usize,
    /// How long one acknowledgement is waited for before the row is sent again.
    pub ack_timeout: Duration,
    /// How long a row that may have been stored is sent again; at most the stream's duplicate window, after
    /// which a repeat would be a second row.
    pub doubt: Duration,
    /// How long rows are offered to a stream that takes none (full, no leader) before giving up; none for
    /// ever.
    pub give_up: Option<Duration>,
    /// Nobody else publishes to the stream. The server then refuses a row whose predecessor it has not stored,
    /// so that rows are stored in their order even if the connection breaks with rows in flight. (Without it
    /// rows of that moment can be stored after later ones; each is stored once either way.)
    ///
    /// **Not with replicas:** after its restart a server of a cluster can find that a row does not follow the one
    /// that it remembers, and drop its copy of the stream to fetch it anew, again and again (seen on nats-server
    /// 2.15.1: "last msgid mismatch").
    pub sole: bool,
}

impl Default for Options {
    /// 2,000 rows, five seconds, 100 seconds, one minute.
    fn default() -> Self {
        Self {
            window: 2_000,
            ack_timeout: Duration::from_secs(5),
            doubt: Duration::from_secs(100),
            give_up: Some(Duration::from_mins(1)),
            sole: false,
        }
    }
}

/// Where a row was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The row's number among those published, from 0.
    pub row: u64,
    /// Its place in the stream.
    pub seq: Seq,
    /// Which stream, by its number.
    pub stream: u32,
}

/// Why publishing stopped. The rows before `row` are stored; their receipts are in order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PublishError {
    /// The table's name is no subject.
    #[error(transparent)]
    Table(#[from] subject::TokenError),
    /// The row is larger than the server takes.
    #[error("row {row} takes {size} bytes, more than the server's limit of {limit}")]
    TooLarge {
        /// Its number.
        row: u64,
        /// Its size.
        size: usize,
        /// The server's limit.
        limit: usize,
    },
    /// The stream takes no rows.
    #[error("the stream took no row for {seconds} s, row {row} is not stored: {failure}")]
    GaveUp {
        /// The first row that is not stored.
        row: u64,
        /// How long was tried.
        seconds: u64,
        /// The last refusal. Of class full: the consumers are behind, or the stream's `max_bytes` is small.
        failure: Failure,
    },
    /// The row may have been stored, and can no longer be sent again without the risk of a second one.
    #[error("row {row} may or may not be stored: {failure}")]
    InDoubt {
        /// Its number.
        row: u64,
        /// The last failure.
        failure: Failure,
    },
    /// The stream refuses the row, and will again.
    #[error("row {row} is refused: {failure}")]
    Refused {
        /// Its number.
        row: u64,
        /// Why.
        failure: Failure,
    },
}

/// The answer to a publish. Read in one go: this happens once a row.
#[derive(Deserialize)]
struct Ack<'a> {
    #[serde(default, borrow)]
    stream: Cow<'a, str>,
    #[serde(default)]
    seq: u64,
    error: Option<ApiError>,
}

struct Sent {
    row: u64,
    /// The row before it in its stream, if the server is to make sure of that.
    after: Option<u64>,
    subject: Arc<str>,
    payload: Bytes,
    /// None while it waits to be sent again.
    pending: Option<Pending>,
    /// When it was sent for the first time without learning its fate.
    doubt_since: Option<Instant>,
}

/// Publishes rows. One task's tool: order comes from calling it in order.
pub struct Publisher {
    connection: Connection,
    streams: Streams,
    prefix: String,
    options: Options,
    session: String,
    next: u64,
    sent: VecDeque<Sent>,
    /// The connect under which the rows in flight were sent.
    connects: u64,
    receipts: Vec<Receipt>,
    last_subject: Option<(String, Arc<str>)>,
    /// Of a sole publisher: which stream each subject's rows go to, and the last row sent to each stream.
    routes: BTreeMap<Arc<str>, u32>,
    lasts: BTreeMap<u32, u64>,
}

impl std::fmt::Debug for Publisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher").field("next", &self.next).finish_non_exhaustive()
    }
}

/// What an attempt to store a row brought.
enum Fate {
    Stored(Seq, u32),
    /// Certainly not stored; may be tried again.
    Again(Failure),
    /// Perhaps stored; may be tried again under the same id.
    Doubt(Failure),
    /// Not stored, and never will be.
    Never(Failure),
}

fn fate(answer: Result<async_nats::Message, RequestError>, streams: &Streams) -> Fate {
    let error = match answer {
        Ok(message) => match serde_json::from_slice::<Ack<'_>>(&message.payload) {
            Ok(Ack { error: Some(error), .. }) => CallError::Api(error),
            Ok(ack) => match (streams.number(&ack.stream), ack.seq) {
                (None, _) => {
                    let words = format!("the stream {} stores this subject, not {streams}", cut(&ack.stream));
                    return Fate::Never(Failure::new(FailureClass::Other, words));
                }
                (Some(_), 0) => CallError::Unreadable("an acknowledgement without a sequence".into()),
                (Some(stream), seq) => return Fate::Stored(Seq(seq), stream),
            },
            Err(error) => CallError::Unreadable(cut(&error.to_string())),
        },
        Err(error) => CallError::Request(error),
    };
    let failure = error.failure();
    let passing =
        matches!(failure.class, FailureClass::Full | FailureClass::Unavailable | FailureClass::Unanswered);
    match error {
        CallError::Request(error) if !error.not_received() => Fate::Doubt(failure),
        CallError::Api(error) if !error.stored_nothing() => Fate::Doubt(failure),
        CallError::Unreadable(_) => Fate::Doubt(failure),
        _ if passing => Fate::Again(failure),
        _ => Fate::Never(failure),
    }
}

impl Publisher {
    /// Publishes to `<prefix>.<table>`, where `streams` must be those that store it.
    #[must_use]
    pub fn new(
        connection: Connection,
        streams: impl Into<Streams>,
        prefix: impl Into<String>,
        options: Options,
    ) -> Self {
        // Unique for this publisher: message ids must not meet another's.
        let session = connection.client().new_inbox().rsplit('.').next().unwrap_or_default().to_owned();
        Self {
            connection,
            streams: streams.into(),
            prefix: prefix.into(),
            options,
            session,
            next: 0,
            sent: VecDeque::new(),
            connects: 0,
            receipts: Vec::new(),
            last_subject: None,
            routes: BTreeMap::new(),
            lasts: BTreeMap::new(),
        }
    }

    /// Sends a row of `table`; waits only while the window is full. The row's number.
    ///
    /// # Errors
    ///
    /// See [`PublishError`]; about this row or an earlier one.
    pub async fn publish(&mut self, table: &str, payload: Bytes) -> Result<u64, PublishError> {
        let subject = match &self.last_subject {
            Some((known, subject)) if known == table => Arc::clone(subject),
            _ => {
                let token = subject::encode_checked(table)?;
                let subject: Arc<str> = subject::publish_subject(&self.prefix, &token).into();
                self.last_subject = Some((table.to_owned(), Arc::clone(&subject)));
                subject
            }
        };
        let row = self.next;
        // Headers take well under 200 bytes.
        let (size, limit) = (payload.len() + 200, self.connection.max_payload());
        if size > limit {
            return Err(PublishError::TooLarge { row, size: payload.len(), limit });
        }
        if self.sent.len() >= self.options.window.max(1) {
            // Down to half: waking up once for many rows is cheaper than once for each.
            self.settle(self.options.window / 2).await?;
        }
        // Rows in flight on a connection that broke may be lost. They go first, or this row would overtake
        // them. (A break at this very moment can still let it: the client gives no word in between.)
        if !self.sent.is_empty()
            && (self.connects != self.connection.hub().connects() || !self.connection.is_connected())
        {
            self.settle(0).await?;
        }
        let route = if self.options.sole { self.route(&subject) } else { None };
        let is_first = self.options.sole && route.is_none();
        if is_first {
            // Nothing is in flight that it could overtake, or be overtaken by.
            self.settle(0).await?;
        }
        self.connects = self.connection.hub().connects();
        self.next += 1;
        let after = route.and_then(|stream| self.lasts.insert(stream, row));
        let mut sent =
            Sent { row, after, subject: Arc::clone(&subject), payload, pending: None, doubt_since: None };
        self.send(&mut sent).await;
        self.sent.push_back(sent);
        if is_first {
            self.settle(0).await?;
            if let Some(Receipt { stream, .. }) = self.receipts.last() {
                self.routes.insert(subject, *stream);
                self.lasts.insert(*stream, row);
            }
        }
        Ok(row)
    }

    /// The stream that the rows of `subject` go to, as far as it is known.
    fn route(&self, subject: &str) -> Option<u32> {
        if self.streams.count() == 1 { Some(0) } else { self.routes.get(subject).copied() }
    }

    /// Waits until every row is stored.
    ///
    /// # Errors
    ///
    /// See [`PublishError`].
    pub async fn flush(&mut self) -> Result<(), PublishError> {
        self.settle(0).await
    }

    /// The receipts since the last call, in the order of the rows.
    pub fn take_receipts(&mut self) -> Vec<Receipt> {
        std::mem::take(&mut self.receipts)
    }

    /// Rows that wait for their acknowledgement.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.sent.len()
    }

    async fn send(&self, sent: &mut Sent) {
        let mut headers = HeaderMap::new();
        headers.insert(MESSAGE_ID, format!("{}-{}", self.session, sent.row));
        if let Some(after) = sent.after {
            headers.insert(EXPECTED_MESSAGE_ID, format!("{}-{after}", self.session));
        }
        let subject = Arc::clone(&sent.subject);
        sent.pending = self.connection.send(subject, Some(headers), sent.payload.clone()).await.ok();
    }

    async fn fate_of(&self, sent: &mut Sent) -> Fate {
        match sent.pending.take() {
            Some(pending) => fate(pending.wait(&sent.subject, self.options.ack_timeout).await, &self.streams),
            None => Fate::Again(RequestError::NotConnected.failure()),
        }
    }

    /// Waits until no more than `keep` rows are in flight.
    async fn settle(&mut self, keep: usize) -> Result<(), PublishError> {
        while self.sent.len() > keep {
            let Some(mut first) = self.sent.pop_front() else { break };
            match self.fate_of(&mut first).await {
                Fate::Stored(seq, stream) => self.receipts.push(Receipt { row: first.row, seq, stream }),
                Fate::Never(failure) => return Err(PublishError::Refused { row: first.row, failure }),
                Fate::Again(failure) => {
                    self.sent.push_front(first);
                    self.recover(failure).await?;
                }
                Fate::Doubt(failure) => {
                    first.doubt_since.get_or_insert_with(Instant::now);
                    self.sent.push_front(first);
                    self.recover(failure).await?;
                }
            }
        }
        Ok(())
    }

    /// The first row in flight is not known to be stored. Learns the fate of all that follow, then sends what
    /// is not stored again, in order, until the first is.
    async fn recover(&mut self, mut failure: Failure) -> Result<(), PublishError> {
        let mut start = Instant::now();
        let mut pause = BACKOFF.0;
        let mut stored = BTreeMap::new();
        loop {
            for mut sent in std::mem::take(&mut self.sent) {
                if sent.pending.is_some() {
                    match self.fate_of(&mut sent).await {
                        Fate::Stored(seq, stream) => {
                            stored.insert(sent.row, (seq, stream));
                            start = Instant::now();
                            continue;
                        }
                        Fate::Again(why) => failure = why,
                        Fate::Doubt(why) => {
                            sent.doubt_since.get_or_insert_with(Instant::now);
                            failure = why;
                        }
                        Fate::Never(failure) => {
                            return Err(PublishError::Refused { row: sent.row, failure });
                        }
                    }
                }
                self.sent.push_back(sent);
            }
            let Some(first) = self.sent.front() else { break };
            let row = first.row;
            // Rows before the first that is missing have their receipts; the others wait for it.
            let later = stored.split_off(&row);
            self.receipts.extend(stored.into_iter().map(|(row, (seq, stream))| Receipt { row, seq, stream }));
            stored = later;
            let doubtful =
                |sent: &&Sent| sent.doubt_since.is_some_and(|at| at.elapsed() > self.options.doubt);
            if let Some(sent) = self.sent.iter().find(doubtful) {
                return Err(PublishError::InDoubt { row: sent.row, failure });
            }
            if self.options.give_up.is_some_and(|limit| start.elapsed() > limit) {
                return Err(PublishError::GaveUp { row, seconds: start.elapsed().as_secs(), failure });
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(BACKOFF.1);
            self.connection.connected(Duration::from_secs(1)).await;
            for mut sent in std::mem::take(&mut self.sent) {
                self.send(&mut sent).await;
                self.sent.push_back(sent);
            }
        }
        self.receipts.extend(stored.into_iter().map(|(row, (seq, stream))| Receipt { row, seq, stream }));
        Ok(())
    }
}
