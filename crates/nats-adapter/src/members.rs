//! The members port: each member's record is a key of the bucket, watched by everyone; each member answers
//! requests to a subject of its own.
//!
//! A member's record is the key `member.<stream>.<id>` of the bucket, its id encoded like a table's name
//! ([`crate::subject`]). The watch is an ordered push consumer of our own making: it begins with the last record of
//! each key, and is made anew, with another snapshot, whenever a delivery is missing, its heartbeat stays away, or
//! the connection broke.

use std::sync::{Arc, Weak};
use std::time::Duration;

use async_nats::{HeaderMap, Message, StatusCode, Subscriber};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt as _;
use holdfast_core::member::MemberId;
use holdfast_core::ports::ledger::Revision;
use holdfast_core::ports::members::{Command, Entry, Port, Probe, Reply, Sink};
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::record::Session;
use holdfast_core::row::ShardId;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::ack_subject::AckSubject;
use crate::connect::Connection;
use crate::errors::{CallError, RequestError, cut};
use crate::ledger::{EXPECTED, bucket_stream};
use crate::request::{CALL_TIMEOUT, Listener, QUICK_TIMEOUT, read};
use crate::subject;

/// How often the server says that the watch lives while nothing changes.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// Without a message or a heartbeat for this long the watch is made anew.
const SILENCE: Duration = Duration::from_secs(5);

/// The pause before a watch that could not be made is tried again.
const PAUSE: Duration = Duration::from_millis(500);

/// How long the mark of a deleted record stays in the bucket, for watchers that were away.
const MARK_LIFE: &str = "1h";

/// The subjects that members answer: `<this>.*`.
pub(crate) fn member_prefix(bucket: &str, stream: &str) -> String {
    format!("holdfast.{bucket}.member.{stream}")
}

/// Where the members of one stream's daemons meet.
#[derive(Clone, Debug)]
pub struct Meeting {
    /// The bucket.
    pub bucket: String,
    /// The stream whose shards they share.
    pub stream: String,
    /// This process's name.
    pub member: MemberId,
    /// This process start.
    pub session: Session,
    /// How long a probe waits for its answer.
    pub probe: Duration,
}

impl Meeting {
    /// The subjects of all records: `<this>.*`.
    #[must_use]
    pub fn key_prefix(&self) -> String {
        format!("$KV.{}.member.{}", self.bucket, self.stream)
    }

    /// The subjects that members answer: `<this>.*`.
    #[must_use]
    pub fn probe_prefix(&self) -> String {
        member_prefix(&self.bucket, &self.stream)
    }

    fn key(&self, member: &MemberId) -> String {
        format!("{}.{}", self.key_prefix(), subject::encode(member.as_str()))
    }

    fn probe_subject(&self, member: &MemberId) -> String {
        format!("{}.{}", self.probe_prefix(), subject::encode(member.as_str()))
    }
}

/// The members port. Its watch and its answering end when it is dropped.
#[derive(Debug)]
pub struct Members {
    connection: Connection,
    meeting: Meeting,
    tasks: Vec<JoinHandle<()>>,
    _broken: Arc<Broken>,
}

/// Wakes the watch when messages may have been lost.
#[derive(Debug, Default)]
struct Broken(Notify);

impl Listener for Broken {
    fn disrupted(&self) {
        self.0.notify_one();
    }

    fn denied(&self, _subject: &str) {}
}

impl Members {
    /// Begins to watch and to answer. `sink` gets what the watch shows, `orders` what operators wish.
    ///
    /// # Errors
    /// If the subject of the answers cannot be subscribed to.
    pub async fn start(
        connection: Connection,
        meeting: Meeting,
        sink: Sink,
        orders: Orders,
    ) -> Result<Self, Failure> {
        let subject = meeting.probe_subject(&meeting.member);
        let asked = subscribe(&connection, &subject).await?;
        let broken = Arc::new(Broken::default());
        connection.listen(Arc::downgrade(&broken) as Weak<dyn Listener>);
        let watch = Watch {
            connection: connection.clone(),
            bucket: meeting.bucket.clone(),
            prefix: format!("{}.", meeting.key_prefix()),
            broken: Arc::clone(&broken),
            sink,
        };
        let tasks = vec![
            tokio::spawn(answer(connection.clone(), subject, asked, meeting.session, orders)),
            tokio::spawn(watch.run()),
        ];
        Ok(Self { connection, meeting, tasks, _broken: broken })
    }

    async fn put(&self, member: &MemberId, record: Bytes) -> Result<(), Failure> {
        self.publish(member, None, record).await
    }

    async fn delete(&self, member: &MemberId, only: Option<Revision>) -> Result<(), Failure> {
        let mut headers = HeaderMap::new();
        headers.insert("KV-Operation", "PURGE");
        headers.insert("Nats-Rollup", "sub");
        headers.insert("Nats-TTL", MARK_LIFE);
        if let Some(Revision(revision)) = only {
            headers.insert(EXPECTED, revision.to_string());
        }
        self.publish(member, Some(headers), Bytes::new()).await
    }

    async fn publish(
        &self,
        member: &MemberId,
        headers: Option<HeaderMap>,
        record: Bytes,
    ) -> Result<(), Failure> {
        #[derive(Deserialize)]
        struct Stored {
            #[serde(rename = "seq")]
            _seq: u64,
        }
        let subject = self.meeting.key(member);
        let message = self.connection.request(&subject, headers, record, QUICK_TIMEOUT).await;
        let message = message.map_err(|error| match error {
            RequestError::NoResponders(_) => Failure::new(
                FailureClass::Unavailable,
                format!("the bucket {} does not exist or has no leader now", self.meeting.bucket),
            ),
            other => other.failure(),
        })?;
        read::<Stored>(&message.payload).map(|_| ()).map_err(|error| error.failure())
    }

    /// Asks `member` for a sign of life.
    async fn probe(&self, member: &MemberId) -> Probe {
        if !self.connection.is_connected() {
            return Probe::Silent;
        }
        let subject = self.meeting.probe_subject(member);
        match self.connection.request(&subject, None, Bytes::new(), self.meeting.probe).await {
            Ok(_) => Probe::Alive,
            Err(RequestError::NoResponders(_)) => Probe::NoResponders,
            Err(_) => Probe::Silent,
        }
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

#[async_trait]
impl Port for Members {
    async fn call(&self, command: Command) -> Reply {
        match command {
            Command::Put { attempt, member, record } => {
                Reply::Put { attempt, outcome: self.put(&member, record).await }
            }
            Command::Delete { attempt, member, only } => {
                Reply::Deleted { attempt, outcome: self.delete(&member, only).await }
            }
            Command::Probe { attempt, member } => {
                Reply::Probed { attempt, answer: self.probe(&member).await }
            }
        }
    }
}

async fn subscribe(connection: &Connection, subject: &str) -> Result<Subscriber, Failure> {
    let subscribed = connection.client().subscribe(subject.to_owned()).await;
    subscribed.map_err(|error| Failure::new(FailureClass::Other, cut(&error.to_string())))
}

/// What an operator wishes of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wish {
    /// Nobody is to have this shard while the member lives.
    Pause(ShardId),
    /// The shard is to be tried again.
    Resume(ShardId),
}

/// Where wishes go; it must not block.
pub type Orders = Arc<dyn Fn(Wish) + Send + Sync>;

/// A member's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Here {
    /// Its process start.
    session: Session,
    /// What is wrong with the request, if anything is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Answers every request with this process start, and hands wishes on.
async fn answer(
    connection: Connection,
    subject: String,
    mut asked: Subscriber,
    session: Session,
    orders: Orders,
) {
    loop {
        while let Some(request) = asked.next().await {
            let wish = (!request.payload.is_empty()).then(|| serde_json::from_slice(&request.payload));
            let error = match wish {
                None => None,
                Some(Ok(wish)) => {
                    orders(wish);
                    None
                }
                Some(Err(_)) => Some("this daemon does not know the request".to_owned()),
            };
            if let Some(reply) = request.reply {
                let here = serde_json::to_vec(&Here { session, error }).unwrap_or_default();
                // An answer that cannot be sent is as good as none: the asker asks again.
                let _ = connection.client().publish(reply, here.into()).await;
            }
        }
        // The connection's client was replaced.
        asked = loop {
            tokio::time::sleep(PAUSE).await;
            if let Ok(asked) = subscribe(&connection, &subject).await {
                break asked;
            }
        };
    }
}

/// Who answered a wish, and what is wrong if anything is.
pub type Answered = Result<(), String>;

impl Meeting {
    /// Tells every member in the bucket a wish, and gives each one's answer. The meeting's own member and session are
    /// of no account.
    ///
    /// # Errors
    /// If the members' records cannot be read.
    pub async fn tell_all(
        &self,
        connection: &Connection,
        wish: Wish,
    ) -> Result<Vec<(String, Answered)>, Failure> {
        let body: Bytes = serde_json::to_vec(&wish).unwrap_or_default().into();
        let mut answers = Vec::new();
        for token in self.member_tokens(connection).await? {
            let subject = format!("{}.{token}", self.probe_prefix());
            let name = subject::decode(&token).map_or_else(|_| token.clone(), std::borrow::Cow::into_owned);
            let answer = match connection.request(&subject, None, body.clone(), QUICK_TIMEOUT).await {
                Ok(message) => match serde_json::from_slice::<Here>(&message.payload) {
                    Ok(Here { error: None, .. }) => Ok(()),
                    Ok(Here { error: Some(error), .. }) => Err(error),
                    Err(_) => Err("its answer cannot be read".to_owned()),
                },
                Err(RequestError::NoResponders(_)) => Err("it is gone".to_owned()),
                Err(error) => Err(error.to_string()),
            };
            answers.push((name, answer));
        }
        Ok(answers)
    }

    /// The tokens of all records' keys.
    async fn member_tokens(&self, connection: &Connection) -> Result<Vec<String>, Failure> {
        #[derive(Serialize)]
        struct Ask<'a> {
            subjects_filter: &'a str,
        }
        #[derive(Deserialize)]
        struct Answer {
            state: State,
        }
        #[derive(Deserialize)]
        struct State {
            #[serde(default)]
            subjects: std::collections::BTreeMap<String, u64>,
        }
        let prefix = format!("{}.", self.key_prefix());
        let filter = format!("{prefix}*");
        let subject = crate::api::stream_info(&bucket_stream(&self.bucket));
        let answer: Answer = connection
            .call(&subject, &Ask { subjects_filter: &filter }, CALL_TIMEOUT)
            .await
            .map_err(|error| error.failure())?;
        let tokens = answer.state.subjects.into_keys();
        Ok(tokens.filter_map(|subject| subject.strip_prefix(&prefix).map(str::to_owned)).collect())
    }
}

/// Why a watch ended.
type Ended = &'static str;

struct Watch {
    connection: Connection,
    bucket: String,
    prefix: String,
    broken: Arc<Broken>,
    sink: Sink,
}

#[derive(Serialize)]
struct CreateConsumer<'a> {
    stream_name: &'a str,
    config: ConsumerConfig<'a>,
}

#[derive(Serialize)]
struct ConsumerConfig<'a> {
    deliver_subject: &'a str,
    deliver_policy: &'static str,
    ack_policy: &'static str,
    replay_policy: &'static str,
    filter_subject: &'a str,
    /// Nanoseconds.
    idle_heartbeat: u64,
    mem_storage: bool,
    num_replicas: u32,
}

#[derive(Deserialize)]
struct Created {
    name: String,
    #[serde(default)]
    num_pending: u64,
}

impl Watch {
    async fn run(self) {
        loop {
            match self.watch_once().await {
                Ok(why) => tracing::debug!("the members' records are watched anew: {why}"),
                Err(error) => {
                    tracing::debug!("the members' records cannot be watched now: {error}");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn watch_once(&self) -> Result<Ended, CallError> {
        if !self.connection.connected(CALL_TIMEOUT).await {
            return Err(RequestError::NotConnected.into());
        }
        let client = self.connection.client();
        let inbox = client.new_inbox();
        let not_sent = |error: &dyn std::error::Error| RequestError::NotSent(cut(&error.to_string()));
        let mut messages = client.subscribe(inbox.clone()).await.map_err(|error| not_sent(&error))?;
        // What broke before this subscription is behind us.
        let _ = futures_util::FutureExt::now_or_never(self.broken.0.notified());
        let stream = bucket_stream(&self.bucket);
        let filter = format!("{}*", self.prefix);
        let name = format!("holdfast-watch-{}", inbox.rsplit('.').next().unwrap_or_default());
        let create = CreateConsumer {
            stream_name: &stream,
            config: ConsumerConfig {
                deliver_subject: &inbox,
                deliver_policy: "last_per_subject",
                ack_policy: "none",
                replay_policy: "instant",
                filter_subject: &filter,
                idle_heartbeat: u64::try_from(HEARTBEAT.as_nanos()).unwrap_or(u64::MAX),
                mem_storage: true,
                num_replicas: 1,
            },
        };
        let subject = format!("$JS.API.CONSUMER.CREATE.{stream}.{name}.{filter}");
        let created: Created = self.connection.call(&subject, &create, CALL_TIMEOUT).await?;
        let why = self.follow(&mut messages, created.num_pending).await;
        let delete = format!("$JS.API.CONSUMER.DELETE.{stream}.{}", created.name);
        // It goes by itself once nobody listens; this only spares the server the wait.
        drop(messages);
        let _ = client.publish(delete, Bytes::new()).await;
        Ok(why)
    }

    /// Hands on what comes until something may be missing.
    async fn follow(&self, messages: &mut Subscriber, pending: u64) -> Ended {
        let mut snapshot = Some(Vec::new());
        let mut seen = 0;
        if pending == 0 {
            (self.sink)(Reply::Snapshot(snapshot.take().unwrap_or_default()));
        }
        loop {
            let message = tokio::select! {
                message = timeout(SILENCE, messages.next()) => match message {
                    Err(_) => return "no heartbeat",
                    Ok(None) => return "the subscription ended",
                    Ok(Some(message)) => message,
                },
                () = self.broken.0.notified() => return "the connection broke",
            };
            if let Some(status) = message.status.filter(|status| *status != StatusCode::OK) {
                let last = header(&message, "Nats-Last-Consumer").and_then(|last| last.parse::<u64>().ok());
                match status.as_u16() {
                    100 if last.is_none_or(|last| last == seen) => continue,
                    100 => return "a change is missing",
                    _ => return "the consumer is gone",
                }
            }
            let Some(place) = message.reply.as_deref().and_then(AckSubject::parse) else { continue };
            if place.delivery.0 != seen + 1 {
                return "a change is missing";
            }
            seen = place.delivery.0;
            let change = self.change(&message, Revision(place.seq.0));
            match (&mut snapshot, change) {
                (None, Some(change)) => (self.sink)(change),
                (Some(entries), Some(Reply::Changed(entry))) => entries.push(entry),
                _ => {}
            }
            if place.pending == 0
                && let Some(entries) = snapshot.take()
            {
                (self.sink)(Reply::Snapshot(entries));
            }
        }
    }

    fn change(&self, message: &Message, revision: Revision) -> Option<Reply> {
        let token = message.subject.strip_prefix(&self.prefix)?;
        // A key that is no member's is handed on as it is: it is no record either.
        let key: Arc<str> = subject::decode(token).map_or_else(|_| token.into(), |id| id.as_ref().into());
        let deleted = header(message, "KV-Operation").is_some_and(|operation| operation != "PUT")
            || header(message, "Nats-Marker-Reason").is_some();
        Some(if deleted {
            Reply::Removed { key }
        } else {
            Reply::Changed(Entry { key, revision, record: Bytes::copy_from_slice(&message.payload) })
        })
    }
}

fn header<'a>(message: &'a Message, name: &str) -> Option<&'a str> {
    message.headers.as_ref()?.get(name).map(async_nats::HeaderValue::as_str)
}
