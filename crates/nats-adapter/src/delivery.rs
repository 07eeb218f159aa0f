//! Rows of one shard's durable pull consumer: raw pull requests under a pin, resets, looks.
//!
//! A pull is a request to `$JS.API.CONSUMER.MSG.NEXT` whose reply subject is `<inbox>.<attempt>`. One
//! subscription, `<inbox>.*`, receives everything: rows come under their own subject, final statuses under
//! the reply subject of their pull, so each status knows its pull.
//!
//! The server charges each row to a pull's `max_bytes` with its subject, its **reply subject** (about 55
//! bytes), its headers and its payload.
//!
//! Acknowledgements (ack policy explicit) are published to `$JS.ACK.…` without a reply subject: nothing waits
//! for them, and one that is lost brings its row again.
//!
//! A limit of the client: it takes a row whose header block is malformed (no UTF-8, a line without a colon)
//! for a broken connection. nats-server stores such rows, so a publisher that writes the protocol by hand can
//! send one that no client of this kind gets past. [`Delivery::remove_unreceivable`] is the way past them.

use std::collections::{BTreeMap, HashMap};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use async_nats::{Message, Subscriber};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::Stream as _;
use holdfast_core::ports::delivery::{
    Command, Inbox, InspectError, Inspection, PinId, Port, Pull, PullEnd, Reply, Rows, Sink,
};
use holdfast_core::ports::{Attempt, Failure, FailureClass};
use holdfast_core::row::{Delivery as Number, Mark, Row, Seq, ShardId, TableName, Unfit, Verdict};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::ack_subject::{AckSubject, acknowledgement, short_origin};
use crate::api::{self, ConsumerInfo, StreamInfo, Which};
use crate::connect::Connection;
use crate::dead_letters::DeadLetters;
use crate::errors::{CONSUMER_NOT_FOUND, CallError, STREAM_NOT_FOUND, cut};
use crate::pulls::{Ended, Pulls};
use crate::request::{CALL_TIMEOUT, Listener, QUICK_TIMEOUT};
use crate::topology::AckPolicy;
use crate::unreceivable::Unreceivable;
use crate::{status, subject};

/// Messages taken from the subscription at once; each such chunk goes to the sink as one vector of rows.
const CHUNK: usize = 1024;

/// Tables whose subjects are remembered. When they are more, all are forgotten: a subject is decoded again,
/// and its name is allocated again.
const CACHED_TABLES: usize = 4096;

/// The header that names the pin.
const PIN_HEADER: &str = "Nats-Pin-Id";

/// The header in which a final status says how many rows its pull had left.
const LEFT_HEADER: &str = "Nats-Pending-Messages";

/// Looks at a payload: can it become exactly one row of this table?
pub type Screen = Arc<dyn Fn(&TableName, &[u8]) -> Verdict + Send + Sync>;

/// Which consumer a [`Delivery`] serves, and what it expects of it.
#[derive(Clone, Debug)]
pub struct Source {
    /// The stream.
    pub stream: String,
    /// The durable pull consumer.
    pub consumer: String,
    /// The priority group.
    pub group: String,
    /// The publishers' subject prefix; the shard's rows are `<prefix>.<shard>.<table>`.
    pub prefix: String,
    /// The shard.
    pub shard: ShardId,
    /// The ack policy that the consumer must have.
    pub ack_policy: AckPolicy,
    /// The shortest pinned TTL that the shard can live with: three pull intervals.
    pub min_pinned_ttl: Duration,
    /// With acks: the lowest bound on unacknowledged rows that the shard can live with, in rows; no bound at all
    /// is better, see [`MIN_ACK_PENDING`](crate::topology::MIN_ACK_PENDING).
    pub min_ack_pending: u64,
}

/// The delivery port on one consumer.
#[derive(Debug)]
pub struct Delivery {
    connection: Connection,
    shared: Arc<Shared>,
    inboxes: tokio::sync::Mutex<Inboxes>,
}

#[derive(Debug, Default)]
struct Inboxes {
    /// Inboxes below this number are closed for ever.
    closed_below: u64,
    open: BTreeMap<u64, Reader>,
}

/// The task that reads an inbox. It ends, unsubscribed, once `stop` is set or dropped.
#[derive(Debug)]
struct Reader {
    prefix: String,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// What the readers and the connection's events share with the port.
struct Shared {
    source: Source,
    next_subject: String,
    sink: Sink,
    screen: Screen,
    /// The open pulls of each open inbox.
    pulls: Mutex<BTreeMap<u64, Pulls>>,
    /// Where acknowledgements go, as the last delivery showed it.
    ack_origin: Mutex<Option<Arc<str>>>,
    /// The last row that reached the sink since the last reset; before one, the row before the next.
    reached: Arc<AtomicU64>,
    unreceivable: OnceLock<Arc<Unreceivable>>,
    unreadable: AtomicU64,
    unreadable_told: AtomicBool,
    unsent_acks: AtomicU64,
    denied_acks: AtomicU64,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("source", &self.source).finish_non_exhaustive()
    }
}

#[derive(Serialize)]
struct PullRequest<'a> {
    batch: u32,
    /// Nanoseconds.
    expires: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_bytes: Option<u64>,
    group: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
}

#[derive(Serialize)]
struct ResetRequest {
    seq: u64,
}

#[derive(Serialize)]
struct UnpinRequest<'a> {
    group: &'a str,
}

/// An answer of which only the absence of an error matters.
#[derive(Deserialize)]
struct Done {}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Delivery {
    /// The delivery port of `source`. Rows, and word of disruptions, go to `sink`, which must not block;
    /// `screen` is asked about every row.
    #[must_use]
    pub fn new(connection: Connection, source: Source, sink: Sink, screen: Screen) -> Self {
        let shared = Arc::new(Shared {
            next_subject: api::consumer_next(&source.stream, &source.consumer),
            source,
            sink,
            screen,
            pulls: Mutex::new(BTreeMap::new()),
            ack_origin: Mutex::new(None),
            reached: Arc::default(),
            unreceivable: OnceLock::new(),
            unreadable: AtomicU64::new(0),
            unreadable_told: AtomicBool::new(false),
            unsent_acks: AtomicU64::new(0),
            denied_acks: AtomicU64::new(0),
        });
        let listener: Weak<dyn Listener> = Arc::downgrade(&shared) as Weak<dyn Listener>;
        connection.listen(listener);
        Self { connection, shared, inboxes: tokio::sync::Mutex::default() }
    }

    /// From now on rows that the client cannot receive are kept as dead letters and taken out of the stream, over
    /// the connection of `dead_letters`, which should be another one than the rows'. Without this such a row
    /// breaks the connection for ever and its shard stands still.
    pub fn remove_unreceivable(&self, dead_letters: DeadLetters) {
        let source = &self.shared.source;
        let unreceivable = Unreceivable {
            connection: dead_letters.connection().clone(),
            dead_letters,
            stream: source.stream.clone(),
            prefix: source.prefix.clone(),
            shard: source.shard,
            busy: AtomicBool::new(false),
            removed: AtomicU64::new(0),
        };
        let _ = self.shared.unreceivable.set(Arc::new(unreceivable));
    }

    /// Rows that could not be received and were taken out of the stream.
    #[must_use]
    pub fn unreceivable(&self) -> u64 {
        self.shared.unreceivable.get().map_or(0, |unreceivable| unreceivable.removed.load(Ordering::Relaxed))
    }

    /// Messages that came to an inbox and were neither a row nor a status.
    #[must_use]
    pub fn unreadable(&self) -> u64 {
        self.shared.unreadable.load(Ordering::Relaxed)
    }

    /// Acknowledgements that were not sent for want of a connection. Their rows come again.
    #[must_use]
    pub fn unsent_acks(&self) -> u64 {
        self.shared.unsent_acks.load(Ordering::Relaxed)
    }

    /// Acknowledgements that the server did not let this user publish. While it does not, the stream forgets
    /// nothing and every row comes again after the consumer's `ack_wait`.
    #[must_use]
    pub fn denied_acks(&self) -> u64 {
        self.shared.denied_acks.load(Ordering::Relaxed)
    }

    async fn pull(&self, pull: Pull) -> PullEnd {
        let source = &self.shared.source;
        // A request that waits in the client's queue for a reconnect would be sent long after its time.
        if !self.connection.connected(pull.expires).await {
            return PullEnd::Failed(crate::errors::RequestError::NotConnected.failure());
        }
        let request = PullRequest {
            batch: pull.batch,
            expires: nanos(pull.expires),
            max_bytes: pull.max_bytes,
            group: &source.group,
            id: pull.pin.as_ref().map(|pin| &*pin.0),
        };
        let body = match serde_json::to_vec(&request) {
            Ok(body) => body,
            Err(error) => return PullEnd::Failed(Failure::new(FailureClass::Other, error.to_string())),
        };
        let (reply, mut end) = {
            let mut inboxes = self.inboxes.lock().await;
            if pull.inbox.0 < inboxes.closed_below {
                return PullEnd::Closed;
            }
            let prefix = match inboxes.open.get(&pull.inbox.0) {
                // Its reader ends by itself only with the client.
                Some(reader) if !reader.task.is_finished() => reader.prefix.clone(),
                _ => match self.open(pull.inbox).await {
                    Ok(reader) => {
                        let prefix = reader.prefix.clone();
                        inboxes.open.insert(pull.inbox.0, reader);
                        prefix
                    }
                    Err(failure) => return PullEnd::Failed(failure),
                },
            };
            let mut pulls = self.shared.pulls();
            let (end, given_up) = pulls.entry(pull.inbox.0).or_default().add(&pull, Instant::now());
            drop(pulls);
            given_up.into_iter().for_each(Ended::tell);
            (format!("{prefix}.{}", pull.attempt.0), end)
        };
        let client = self.connection.client();
        let publish = client.publish_with_reply(self.shared.next_subject.clone(), reply, body.into());
        tokio::select! {
            biased;
            sent = publish => if let Err(error) = sent {
                return PullEnd::Failed(Failure::new(FailureClass::Other, cut(&error.to_string())));
            },
            ended = &mut end => return ended.unwrap_or(PullEnd::Closed),
        }
        end.await.unwrap_or(PullEnd::Closed)
    }

    async fn open(&self, inbox: Inbox) -> Result<Reader, Failure> {
        let prefix = self.connection.client().new_inbox();
        let subscriber = self
            .connection
            .client()
            .subscribe(format!("{prefix}.*"))
            .await
            .map_err(|error| Failure::new(FailureClass::Unanswered, cut(&error.to_string())))?;
        let (stop, stopped) = watch::channel(false);
        self.shared.pulls().entry(inbox.0).or_default();
        let reading = Reading {
            shared: Arc::clone(&self.shared),
            inbox,
            prefix: format!("{prefix}."),
            subscriber,
            pin: None,
            tables: HashMap::new(),
            ack_origin: None,
        };
        Ok(Reader { prefix, stop, task: tokio::spawn(reading.run(stopped)) })
    }

    /// Unsubscribes every inbox below `below`. When this returns their UNSUBs are in the client's queue, in
    /// front of anything sent later, and no row of theirs reaches the sink any more.
    async fn close(&self, below: u64) {
        let mut inboxes = self.inboxes.lock().await;
        inboxes.closed_below = inboxes.closed_below.max(below);
        let closing: Vec<u64> = inboxes.open.range(..below).map(|(inbox, _)| *inbox).collect();
        for inbox in &closing {
            if let Some(reader) = inboxes.open.get(inbox) {
                reader.stop.send_replace(true);
            }
        }
        for inbox in closing {
            if let Some(reader) = inboxes.open.get_mut(&inbox) {
                // If the caller gives up waiting, the reader stays known and is waited for again.
                if let Err(error) = (&mut reader.task).await {
                    tracing::error!(%error, "the reader of an inbox failed");
                    self.shared.end_inbox(inbox);
                }
                inboxes.open.remove(&inbox);
            }
        }
    }

    async fn reset(&self, inbox: Inbox, from: Seq) -> Result<(), Failure> {
        let source = &self.shared.source;
        let closed = tokio::time::timeout(QUICK_TIMEOUT, self.close(inbox.0)).await;
        if closed.is_err() {
            return Err(Failure::new(
                FailureClass::Unanswered,
                "an older inbox could not be unsubscribed in time",
            ));
        }
        self.shared.reached.store(from.0.saturating_sub(1), Ordering::Relaxed);
        let subject = api::consumer_reset(&source.stream, &source.consumer);
        let reset: Result<Done, _> =
            self.connection.call(&subject, &ResetRequest { seq: from.0 }, QUICK_TIMEOUT).await;
        reset.map(|Done {}| ()).map_err(|error| error.failure())
    }

    /// Acknowledges `rows`: one message each, none waited for. The server goes by the row alone, not by the
    /// delivery, and takes no note of a row that it has not delivered since the last reset.
    async fn ack(&self, rows: &[(Seq, Number)]) {
        let shared = &self.shared;
        let origin = shared.ack_origin();
        let (client, connects) = (self.connection.client(), self.connection.hub().connects());
        let mut sent = 0;
        for &(seq, delivery) in rows {
            // What waited in the client's queue for a reconnect would reach a server that may have lost its tail
            // meanwhile, and then name another row.
            if !self.connection.is_connected() || self.connection.hub().connects() != connects {
                break;
            }
            let subject = acknowledgement(&origin, seq, delivery);
            if let Err(error) = client.publish(subject, Bytes::new()).await {
                tracing::debug!(%error, "an acknowledgement could not be sent");
                break;
            }
            sent += 1;
        }
        let unsent = (rows.len() - sent) as u64;
        if unsent > 0 {
            shared.unsent_acks.fetch_add(unsent, Ordering::Relaxed);
            tracing::debug!(consumer = %shared.source.consumer, unsent, "acknowledgements were not sent");
        }
    }

    async fn unpin(&self) -> Result<(), Failure> {
        let source = &self.shared.source;
        let subject = api::consumer_unpin(&source.stream, &source.consumer);
        let done: Result<Done, _> =
            self.connection.call(&subject, &UnpinRequest { group: &source.group }, QUICK_TIMEOUT).await;
        done.map(|Done {}| ()).map_err(|error| error.failure())
    }

    async fn inspect(&self, row: Seq, above: Seq) -> Result<Inspection, InspectError> {
        let source = &self.shared.source;
        let failed = |error: &CallError| InspectError::Failed(error.failure());
        let filter = subject::shard_filter(&source.prefix, source.shard);
        let stored = async |which: Which<'_>| api::stored(&self.connection, &source.stream, &which).await;
        let asked_about = async { if row == Seq::ZERO { Ok(None) } else { stored(Which::seq(row)).await } };
        let stream_info = api::stream_info(&source.stream);
        let stream = self.connection.ask::<StreamInfo>(&stream_info, CALL_TIMEOUT);
        // One after another: the shard's last and next rows must not be older than the stream's, and whatever
        // these saw and the consumer has not delivered must be pending there.
        let (stream, asked_about) = tokio::join!(stream, asked_about);
        let (shard_last, next) =
            tokio::join!(stored(Which::last(&filter)), stored(Which::next(above, &filter)));
        let stream = stream.map_err(|error| {
            if error.is(STREAM_NOT_FOUND) {
                InspectError::Gone(format!(
                    "the stream {} does not exist; `holdfast topology apply` creates it",
                    source.stream
                ))
            } else {
                failed(&error)
            }
        })?;
        let asked_about = asked_about.map_err(|error| failed(&error))?;
        let shard_last = shard_last.map_err(|error| failed(&error))?;
        let next = next.map_err(|error| failed(&error))?;
        let subject = api::consumer_info(&source.stream, &source.consumer);
        let consumer: ConsumerInfo = self.connection.ask(&subject, CALL_TIMEOUT).await.map_err(|error| {
            if error.is(CONSUMER_NOT_FOUND) || error.is(STREAM_NOT_FOUND) {
                InspectError::Gone(format!(
                    "the consumer {} of the stream {} does not exist; `holdfast topology apply` creates it",
                    source.consumer, source.stream
                ))
            } else {
                failed(&error)
            }
        })?;
        let last = Mark { seq: Seq(stream.state.last_seq), stored_at: stream.state.last_ts };
        let pinned = consumer
            .priority_groups
            .iter()
            .find(|group| group.group == source.group)
            .and_then(|group| group.pinned_client_id.as_deref())
            .filter(|id| !id.is_empty())
            .map(|id| PinId(id.into()));
        Ok(Inspection {
            created: stream.created,
            messages: stream.state.messages,
            first: Seq(stream.state.first_seq),
            last,
            shard_last: shard_last.map(|row| Seq(row.seq)),
            row_stored_at: asked_about.map(|row| row.time),
            next: next.map(|row| Seq(row.seq)),
            delivered: consumer.delivered.consumer_seq,
            pending: consumer.num_pending,
            pinned,
            unfit: unfit(source, &consumer),
        })
    }
}

/// Why a consumer cannot be a shard's, if it cannot.
fn unfit(source: &Source, consumer: &ConsumerInfo) -> Option<String> {
    let fit = match consumer.fit() {
        Ok(fit) => fit,
        Err(error) => return Some(error.to_string()),
    };
    let mut problems = Vec::new();
    if fit.deliver_subject.is_some_and(|subject| !subject.is_empty()) {
        problems.push("it is a push consumer, not a pull consumer".to_owned());
    }
    if fit.ack_policy != source.ack_policy.as_str() {
        problems.push(format!(
            "its ack policy is {}, not {}",
            cut(&fit.ack_policy),
            source.ack_policy.as_str()
        ));
    }
    if source.ack_policy == AckPolicy::Explicit {
        // The server takes -1 for "no bound"; a bound is shown as it is, its own default of 1,000 included.
        if u64::try_from(fit.max_ack_pending).is_ok_and(|bound| bound < source.min_ack_pending) {
            problems.push(format!(
                "it stops at {} rows that are not acknowledged yet (max_ack_pending), below {}",
                fit.max_ack_pending, source.min_ack_pending
            ));
        }
        if fit.max_deliver > 0 {
            problems.push(format!("it gives a row up after {} deliveries (max_deliver)", fit.max_deliver));
        }
    }
    if fit.deliver_policy != "all" {
        problems.push(format!("its deliver policy is {}, not all", cut(&fit.deliver_policy)));
    }
    if fit.headers_only {
        problems.push("it delivers headers only".to_owned());
    }
    let wanted = subject::shard_filter(&source.prefix, source.shard);
    let mut filters = fit.filter_subjects;
    filters.extend(fit.filter_subject.filter(|filter| !filter.is_empty()));
    if filters != [wanted.as_str()] {
        problems.push(format!("it is filtered to [{}], not to {wanted}", cut(&filters.join(", "))));
    }
    if fit.priority_policy.as_deref() != Some("pinned_client") {
        problems.push("its priority policy is not pinned_client".to_owned());
    } else if !fit.priority_groups.contains(&source.group) {
        problems.push(format!("it has no priority group {}", source.group));
    } else if u128::from(fit.priority_timeout) < source.min_pinned_ttl.as_nanos() {
        problems.push(format!(
            "its pinned TTL of {:?} is below {:?}",
            Duration::from_nanos(fit.priority_timeout),
            source.min_pinned_ttl
        ));
    }
    if problems.is_empty() {
        return None;
    }
    Some(format!(
        "the consumer {} of the stream {} does not fit: {}; `holdfast topology apply` sets it right",
        source.consumer,
        source.stream,
        problems.join("; ")
    ))
}

#[async_trait]
impl Port for Delivery {
    async fn call(&self, command: Command) -> Option<Reply> {
        match command {
            Command::Pull(pull) => {
                let attempt = pull.attempt;
                let end = self.pull(pull).await;
                Some(Reply::Ended { attempt, end })
            }
            Command::Close { inbox } => {
                self.close(inbox.0.saturating_add(1)).await;
                None
            }
            Command::Reset { attempt, inbox, from } => {
                let outcome = self.reset(inbox, from).await;
                Some(Reply::Reset { attempt, outcome })
            }
            Command::Inspect { attempt, row, above } => {
                let outcome = self.inspect(row, above).await;
                Some(Reply::Inspected { attempt, outcome })
            }
            Command::Ack { rows } => {
                self.ack(&rows).await;
                None
            }
            Command::Unpin { attempt } => {
                let outcome = self.unpin().await;
                Some(Reply::Unpinned { attempt, outcome })
            }
        }
    }
}

impl Shared {
    fn pulls(&self) -> MutexGuard<'_, BTreeMap<u64, Pulls>> {
        // Every change under this lock is whole; a panic elsewhere leaves nothing half done.
        self.pulls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ack_origin(&self) -> Arc<str> {
        let known = self.ack_origin.lock().unwrap_or_else(PoisonError::into_inner).clone();
        known.unwrap_or_else(|| short_origin(&self.source.stream, &self.source.consumer).into())
    }

    fn end_inbox(&self, inbox: u64) {
        let ended = self.pulls().remove(&inbox).map(|mut pulls| pulls.end_all(&PullEnd::Closed));
        ended.into_iter().flatten().for_each(Ended::tell);
    }
}

impl Shared {
    /// Something may stand behind `above` that cannot be received.
    fn look_behind(&self, above: Seq) {
        if let Some(unreceivable) = self.unreceivable.get() {
            unreceivable.look(above, Arc::clone(&self.reached));
        }
    }
}

impl Listener for Shared {
    fn disrupted(&self) {
        // Before the shard sets its position back.
        let reached = Seq(self.reached.load(Ordering::Relaxed));
        (self.sink)(Reply::Disrupted);
        self.look_behind(reached);
    }

    fn denied(&self, subject: &str) {
        if subject == self.next_subject {
            let end = PullEnd::Failed(crate::errors::RequestError::Denied(subject.to_owned()).failure());
            let ended: Vec<Ended> = self.pulls().values_mut().flat_map(|pulls| pulls.end_all(&end)).collect();
            ended.into_iter().for_each(Ended::tell);
        } else if let Some(ack) = AckSubject::parse(subject)
            && ack.stream == self.source.stream
            && ack.consumer == self.source.consumer
            && self.denied_acks.fetch_add(1, Ordering::Relaxed) == 0
        {
            tracing::error!(
                consumer = %self.source.consumer,
                "the NATS user may not acknowledge rows ({}.>); the stream forgets nothing (said once)",
                cut(ack.origin)
            );
        }
    }
}

/// What a message meant to the pulls of its inbox.
enum Arrival {
    Row { size: u64 },
    Status { attempt: Attempt, end: PullEnd, left: Option<u64> },
}

/// One inbox being read.
struct Reading {
    shared: Arc<Shared>,
    inbox: Inbox,
    /// With its dot.
    prefix: String,
    subscriber: Subscriber,
    /// The last pin seen, so that its name is allocated once.
    pin: Option<PinId>,
    tables: HashMap<Box<str>, (TableName, Option<Arc<str>>)>,
    /// The last origin of acknowledgements seen, so that it is shared once.
    ack_origin: Option<Arc<str>>,
}

impl Reading {
    async fn run(mut self, mut stopped: watch::Receiver<bool>) {
        let mut chunk = Vec::with_capacity(CHUNK);
        loop {
            // The runtime's budget would end a chunk after 128 messages; instead this task yields by itself.
            let filled = tokio::task::unconstrained(fill(&mut self.subscriber, &mut chunk));
            tokio::select! {
                biased;
                _ = stopped.wait_for(|stop| *stop) => break,
                open = filled => if !open { break },
            }
            let full = chunk.len() == CHUNK;
            self.deliver(&mut chunk);
            if full {
                tokio::task::yield_now().await;
            }
        }
        if let Err(error) = self.subscriber.unsubscribe().await {
            tracing::debug!(%error, "an inbox could not be unsubscribed");
        }
        self.shared.end_inbox(self.inbox.0);
    }

    /// Hands a chunk's rows to the sink, then tells the pulls that ended with it.
    fn deliver(&mut self, chunk: &mut Vec<Message>) {
        let mut rows: Vec<Row> = Vec::with_capacity(chunk.len());
        let mut rows_pin: Option<PinId> = None;
        let mut arrivals = Vec::with_capacity(chunk.len());
        let mut disrupted = false;
        for message in chunk.drain(..) {
            // The reply subject is the server's; everything else in a row is its publisher's, a status line
            // included. So a row is told by its reply subject first.
            let ack =
                message.reply.as_ref().and_then(|reply| AckSubject::parse(reply.as_str())).filter(|ack| {
                    ack.stream == self.shared.source.stream && ack.consumer == self.shared.source.consumer
                });
            let Some(ack) = ack else {
                if let Some(arrival) = self.status(&message) {
                    arrivals.extend(arrival);
                } else {
                    self.unreadable(&message);
                    disrupted = true;
                }
                continue;
            };
            let (seq, delivery, stored_at) = (ack.seq, ack.delivery, ack.stored_at);
            let redelivered = ack.deliveries > 1;
            if self.shared.source.ack_policy == AckPolicy::Explicit
                && self.ack_origin.as_deref() != Some(ack.origin)
            {
                let origin: Arc<str> = ack.origin.into();
                self.ack_origin = Some(Arc::clone(&origin));
                *self.shared.ack_origin.lock().unwrap_or_else(PoisonError::into_inner) = Some(origin);
            }
            let pin = self.pin_of(&message);
            if pin != rows_pin && !rows.is_empty() {
                self.push(rows_pin.clone(), std::mem::take(&mut rows));
            }
            arrivals.push(Arrival::Row { size: server_size(&message, pin.as_ref()) });
            rows_pin = pin;
            let (table, bad) = self.table_of(message.subject.as_str());
            let verdict = match bad {
                Some(why) => Verdict::Bad(Unfit::Subject(why)),
                None => (self.shared.screen)(&table, &message.payload),
            };
            rows.push(Row {
                seq,
                delivery,
                redelivered,
                stored_at,
                table,
                // A copy of its own: the message's bytes are a slice of the connection's read buffer.
                payload: Bytes::copy_from_slice(&message.payload),
                verdict,
            });
        }
        if !rows.is_empty() {
            self.push(rows_pin, rows);
        }
        if disrupted {
            // What was neither row nor status may stand for a row.
            (self.shared.sink)(Reply::Disrupted);
        }
        let now = Instant::now();
        let mut ended = Vec::new();
        if let Some(pulls) = self.shared.pulls().get_mut(&self.inbox.0) {
            for arrival in arrivals {
                match arrival {
                    Arrival::Row { size } => ended.extend(pulls.row(size, now)),
                    Arrival::Status { attempt, end, left } => {
                        pulls.status(attempt, end, left, now, &mut ended);
                    }
                }
            }
        }
        ended.into_iter().for_each(Ended::tell);
    }

    fn push(&self, pin: Option<PinId>, rows: Vec<Row>) {
        if let (Some(first), Some(last)) = (rows.first(), rows.last()) {
            self.shared.reached.store(last.seq.0, Ordering::Relaxed);
            if pin.is_none() {
                // Its headers have no end, so that the server's own became a part of them.
                self.shared.look_behind(Seq(first.seq.0.saturating_sub(1)));
            }
        }
        (self.shared.sink)(Reply::Rows(Rows { inbox: self.inbox, pin, rows }));
    }

    /// A status message: the outer `None` if it is none, the inner if it ends no pull.
    #[expect(clippy::option_option, reason = "not a status, or a status that means nothing")]
    fn status(&self, message: &Message) -> Option<Option<Arrival>> {
        let code = message.status?.as_u16();
        let attempt = message
            .subject
            .as_str()
            .strip_prefix(&self.prefix)
            .and_then(|token| token.parse().ok())
            .map(Attempt)?;
        let left = message
            .headers
            .as_ref()
            .and_then(|headers| headers.get(LEFT_HEADER))
            .and_then(|left| left.as_str().parse().ok());
        let description = message.description.as_deref().unwrap_or_default();
        Some(status::pull_end(code, description).map(|end| Arrival::Status { attempt, end, left }))
    }

    fn unreadable(&self, message: &Message) {
        self.shared.unreadable.fetch_add(1, Ordering::Relaxed);
        if !self.shared.unreadable_told.swap(true, Ordering::Relaxed) {
            tracing::error!(
                consumer = %self.shared.source.consumer,
                subject = %cut(message.subject.as_str()),
                reply = %message.reply.as_ref().map(|reply| cut(reply.as_str())).unwrap_or_default(),
                "a message that is neither a row nor a status came to an inbox (said once)"
            );
        }
    }

    fn pin_of(&mut self, message: &Message) -> Option<PinId> {
        // The server's own header is the last of that name; an earlier one is the publisher's.
        let id = message.headers.as_ref()?.get_last(PIN_HEADER)?.as_str();
        if let Some(known) = self.pin.as_ref().filter(|known| &*known.0 == id) {
            return Some(known.clone());
        }
        let pin = PinId(id.into());
        self.pin = Some(pin.clone());
        Some(pin)
    }

    /// The row's table, and why it names none if it does not.
    fn table_of(&mut self, subject: &str) -> (TableName, Option<Arc<str>>) {
        if let Some(known) = self.tables.get(subject) {
            return known.clone();
        }
        let source = &self.shared.source;
        let found = match subject::split(&source.prefix, subject) {
            Some((shard, token)) if shard == source.shard => match subject::table_of(token) {
                Ok(table) => (table, None),
                Err((token, error)) => (token, Some(Arc::from(error.to_string()))),
            },
            _ => (TableName::new(subject), Some(Arc::from("the subject names no table of this shard"))),
        };
        if self.tables.len() >= CACHED_TABLES {
            self.tables.clear();
        }
        self.tables.insert(subject.into(), found.clone());
        found
    }
}

/// Takes what is ready, up to a chunk; waits for the first. False when the subscription is over.
async fn fill(subscriber: &mut Subscriber, chunk: &mut Vec<Message>) -> bool {
    poll_fn(|context| {
        while chunk.len() < CHUNK {
            match Pin::new(&mut *subscriber).poll_next(context) {
                Poll::Ready(Some(message)) => chunk.push(message),
                Poll::Ready(None) if chunk.is_empty() => return Poll::Ready(false),
                Poll::Pending if chunk.is_empty() => return Poll::Pending,
                _ => break,
            }
        }
        Poll::Ready(true)
    })
    .await
}

/// A row's size as the server charges it to a pull's `max_bytes`: stored subject, reply subject, stored
/// headers, payload. The pin's header is added after that.
fn server_size(message: &Message, pin: Option<&PinId>) -> u64 {
    const EMPTY_HEADERS: usize = "NATS/1.0\r\n\r\n".len();
    let reply = message.reply.as_ref().map_or(0, |reply| reply.as_str().len());
    let rest = message.subject.as_str().len() + reply + message.payload.len();
    let mut headers = message.length.saturating_sub(rest);
    if let Some(pin) = pin {
        headers = headers.saturating_sub(PIN_HEADER.len() + ": ".len() + pin.0.len() + "\r\n".len());
        if headers == EMPTY_HEADERS {
            headers = 0;
        }
    }
    (rest + headers) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source() -> Source {
        Source {
            stream: "INGEST".into(),
            consumer: "holdfast-3".into(),
            group: "holdfast".into(),
            prefix: "ingest".into(),
            shard: ShardId(3),
            ack_policy: AckPolicy::None,
            min_pinned_ttl: Duration::from_secs(1),
            min_ack_pending: 100,
        }
    }

    fn consumer(config: &serde_json::Value) -> ConsumerInfo {
        serde_json::from_value(serde_json::json!({ "config": config })).unwrap()
    }

    fn fitting() -> serde_json::Value {
        serde_json::json!({
            "deliver_policy": "all", "ack_policy": "none", "filter_subject": "ingest.3.*",
            "priority_policy": "pinned_client", "priority_groups": ["holdfast"],
            "priority_timeout": 10_000_000_000_u64,
        })
    }

    #[test]
    fn a_consumer_that_fits() {
        assert_eq!(unfit(&source(), &consumer(&fitting())), None);
        let mut listed = fitting();
        listed["filter_subject"] = serde_json::Value::Null;
        listed["filter_subjects"] = serde_json::json!(["ingest.3.*"]);
        assert_eq!(unfit(&source(), &consumer(&listed)), None);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        for (field, value, words) in [
            ("deliver_subject", serde_json::json!("push"), "push consumer"),
            ("ack_policy", serde_json::json!("explicit"), "ack policy is explicit, not none"),
            ("deliver_policy", serde_json::json!("new"), "deliver policy is new"),
            ("filter_subject", serde_json::json!("ingest.*.*"), "not to ingest.3.*"),
            ("priority_policy", serde_json::json!("overflow"), "not pinned_client"),
            ("priority_groups", serde_json::json!(["other"]), "no priority group holdfast"),
            ("priority_timeout", serde_json::json!(1), "below 1s"),
            ("headers_only", serde_json::json!(true), "headers only"),
            ("ack_policy", serde_json::json!(5), "cannot be read"),
        ] {
            let mut config = fitting();
            config[field] = value;
            let why = unfit(&source(), &consumer(&config)).unwrap();
            assert!(why.contains(words), "{why}");
        }
    }

    #[test]
    fn acks_need_room() {
        let source = Source { ack_policy: AckPolicy::Explicit, ..source() };
        let config = |pending: i64, deliver: i64| {
            let mut config = fitting();
            config["ack_policy"] = serde_json::json!("explicit");
            config["max_ack_pending"] = serde_json::json!(pending);
            config["max_deliver"] = serde_json::json!(deliver);
            consumer(&config)
        };
        assert_eq!(unfit(&source, &config(-1, -1)), None);
        assert_eq!(unfit(&source, &config(100, -1)), None);
        let why = unfit(&source, &config(99, -1)).unwrap();
        assert!(why.contains("max_ack_pending"), "{why}");
        let why = unfit(&source, &config(-1, 5)).unwrap();
        assert!(why.contains("after 5 deliveries"), "{why}");
    }
}
