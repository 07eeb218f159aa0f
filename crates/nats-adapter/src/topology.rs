//! The stream, consumers and buckets that Holdfast needs: what they should be, making them so, and checking.
//!
//! Publishers send to `<prefix>.<table>`. The stream's subject transform stores each row under
//! `<prefix>.<shard>.<table>`, the shard by NATS's own partition function, and each shard has one durable
//! pull consumer whose priority policy pins one client.
//!
//! With several streams, each for its own part of the shards, no stream can do that: which of them stores a row
//! depends on its shard. There the account's subject mapping does it, with the same partition function, before any
//! stream sees the row ([`Topology::mapping`]). A client can neither set it nor read it; whether rows find their way
//! is tried with rows that every stream must refuse ([`Topology::check_publishing`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use async_nats::HeaderMap;
use bytes::Bytes;
use holdfast_core::ports::Failure;
use holdfast_core::record::Record;

use holdfast_core::row::ShardId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::ack_subject::short_origin;
use crate::api::{self, ConsumerInfo, StreamInfo, Which};
use crate::connect::Connection;
use crate::delivery::Source;
use crate::errors::{ApiError, CONSUMER_NOT_FOUND, CallError, RequestError, STREAM_NOT_FOUND, cut};
use crate::ledger::{Ledger, bucket_stream};
use crate::publish::EXPECTED_STREAM;
use crate::request::CALL_TIMEOUT;
use crate::subject::{self, shard_filter};

/// The priority group of every consumer.
pub const GROUP: &str = "holdfast";

/// How long a stream remembers message ids.
const DUPLICATE_WINDOW: Duration = Duration::from_mins(2);

/// With acks: rows that may be delivered and not acked yet, a shard. No bound: what a daemon holds it bounds
/// itself, and acknowledgements that were lost count until `ack_wait` brings their rows again. With a bound a few
/// bad moments could add up to a shard that stands still for that long.
const MAX_ACK_PENDING: i64 = -1;

/// With acks: a shard's consumer with a lower bound on unacknowledged rows is not used. Twice the rows that a
/// daemon holds by default; whoever configures more should raise [`Source::min_ack_pending`].
pub const MIN_ACK_PENDING: u64 = 400_000;

/// Pulls that may wait at once, a shard: every member's standby pull, and leftovers of dead connections.
const MAX_WAITING: i64 = 512;

/// Creating a consumer or a stream in a cluster takes an election.
const CREATE_TIMEOUT: Duration = Duration::from_secs(10);

/// Whether rows are acked to the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AckPolicy {
    /// Rows are not acked; written rows are trimmed from the stream.
    #[default]
    None,
    /// Each row is acked once it is written.
    Explicit,
}

impl AckPolicy {
    /// As the server spells it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Explicit => "explicit",
        }
    }
}

/// When the stream forgets a row by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RetentionPolicy {
    /// Never; Holdfast trims what is written.
    #[default]
    Limits,
    /// When it is acked.
    WorkQueue,
}

/// The streams that hold the rows: one of this name, or several, `<name>-0`, `<name>-1`, …, over which the shards
/// are spread in turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Streams {
    name: String,
    count: u32,
}

impl Streams {
    /// So many streams. One has no number in its name.
    #[must_use]
    pub fn new(name: impl Into<String>, count: u32) -> Self {
        Self { name: name.into(), count: count.max(1) }
    }

    /// How many there are.
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Their names.
    pub fn names(&self) -> impl Iterator<Item = String> + use<'_> {
        (0..self.count).map(|number| self.name(number))
    }

    /// The name of one of them.
    #[must_use]
    pub fn name(&self, number: u32) -> String {
        if self.count == 1 { self.name.clone() } else { format!("{}-{number}", self.name) }
    }

    /// Which of them is called this.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u32> {
        if self.count == 1 {
            return (name == self.name).then_some(0);
        }
        // No second spelling of a number: `INGEST-01` is somebody else's.
        let number = name.strip_prefix(&self.name)?.strip_prefix('-')?.parse().ok()?;
        (number < self.count && name == self.name(number)).then_some(number)
    }

    /// Which of them holds the rows of `shard`.
    #[must_use]
    pub const fn number_of(&self, shard: ShardId) -> u32 {
        shard.0 % self.count
    }

    /// The one that holds the rows of `shard`.
    #[must_use]
    pub fn of(&self, shard: ShardId) -> String {
        self.name(self.number_of(shard))
    }
}

/// For people: the one, or the first and the last.
impl fmt::Display for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            1 => f.write_str(&self.name),
            count => write!(f, "{} to {}", self.name(0), self.name(count - 1)),
        }
    }
}

impl<S: AsRef<str> + ?Sized> From<&S> for Streams {
    fn from(name: &S) -> Self {
        Self::new(name.as_ref(), 1)
    }
}

/// What the topology is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The stream's name; of several, without their numbers.
    pub stream: String,
    /// How many streams there are, at most as many as shards.
    pub streams: u32,
    /// Publishers send to `<prefix>.<table>`. May hold dots.
    pub prefix: String,
    /// How many shards the tables are spread over.
    pub shards: u32,
    /// Consumers are `<durable>-0`, `<durable>-1`, …
    pub durable: String,
    /// The key-value bucket of members and ledger.
    pub bucket: String,
    /// The stream of the dead letters; its subjects are `<prefix>-dead.>`. Empty: there are none.
    pub dead_letters: String,
    /// How long a pin outlives its holder's last pull.
    pub pinned_ttl: Duration,
    /// Whether rows are acked.
    pub ack_policy: AckPolicy,
    /// With acks: a row that is not acked for this long is delivered again. Nothing waits for it, and a repeat
    /// is dropped, so it may be long; the rows of a table that cannot be written come again each time.
    pub ack_wait: Duration,
    /// When the stream forgets rows by itself.
    pub retention: RetentionPolicy,
    /// Each stream's size limit in bytes; at it publishers are refused. None: no limit.
    pub max_bytes: Option<u64>,
    /// Copies of every row and record in a cluster.
    pub replicas: u32,
}

impl Default for Topology {
    /// The configuration's defaults.
    fn default() -> Self {
        Self {
            stream: "INGEST".into(),
            streams: 1,
            prefix: "ingest".into(),
            shards: 8,
            durable: "holdfast".into(),
            bucket: "HOLDFAST".into(),
            dead_letters: "INGEST_DEAD".into(),
            pinned_ttl: Duration::from_secs(10),
            ack_policy: AckPolicy::None,
            ack_wait: Duration::from_hours(1),
            retention: RetentionPolicy::Limits,
            max_bytes: Some(10 << 30),
            replicas: 1,
        }
    }
}

/// What is wrong with a topology, or went wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// The configuration cannot be.
    #[error("topology.{field}: {problem}")]
    Invalid {
        /// The configuration key.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The server could not be asked.
    #[error("{object}: {failure}")]
    Failed {
        /// What it was about.
        object: String,
        /// The failure.
        failure: String,
    },
    /// The server refuses the object as it should be.
    #[error("{object}: the server refuses {changes}: {words}")]
    Refused {
        /// The object.
        object: String,
        /// What was to be created or changed.
        changes: String,
        /// The server's words.
        words: String,
    },
    /// Another number of shards moves tables to other shards while rows of the old ones may be unwritten.
    #[error(
        "{object} holds {messages} rows and its shards would change from {from} to {to}: a table's unwritten \
         rows would have two writers. Let the daemons write everything and stop them, then apply with resharding \
         allowed"
    )]
    Reshard {
        /// The stream.
        object: String,
        /// Rows in the stream.
        messages: u64,
        /// The transform or the subjects that are there.
        from: String,
        /// Those that should be.
        to: String,
    },
    /// A stream of another number of streams has rows: its tables' new rows would go elsewhere.
    #[error(
        "{object} holds {messages} rows and is none of the streams of topology.streams = {streams}: unwritten rows \
         would wait there for nobody while new rows of their tables are written. Let the daemons write everything \
         and stop them, then apply with resharding allowed"
    )]
    OtherStreams {
        /// The stream.
        object: String,
        /// Rows in it.
        messages: u64,
        /// How many streams there should be.
        streams: u32,
    },
}

/// What [`Topology::apply`] may do beyond the harmless.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Resharding {
    /// Refuse to change the number of shards of a stream that holds rows.
    #[default]
    Refuse,
    /// Change it: the caller knows that every row is written and no daemon runs.
    Allow,
}

/// A stream as JetStream configures it. Times in nanoseconds.
#[expect(clippy::struct_excessive_bools, reason = "the server's own fields")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StreamConfig {
    /// The name.
    pub name: String,
    /// Words for people.
    pub description: String,
    /// What it stores.
    pub subjects: Vec<String>,
    /// `limits` or `workqueue`.
    pub retention: RetentionPolicy,
    /// No limit: -1.
    pub max_consumers: i64,
    /// No limit: -1.
    pub max_msgs: i64,
    /// Bytes; no limit: -1.
    pub max_bytes: i64,
    /// No limit: 0.
    pub max_age: u64,
    /// No limit: -1; the history of a key-value bucket.
    pub max_msgs_per_subject: i64,
    /// No limit: -1.
    pub max_msg_size: i64,
    /// `new`: a full stream refuses rows instead of dropping old ones.
    pub discard: &'static str,
    /// `file`.
    pub storage: &'static str,
    /// Copies.
    pub num_replicas: u32,
    /// How long message ids are remembered.
    pub duplicate_window: u64,
    /// Reads by replicas, for tools; Holdfast's own reads ask the leader.
    pub allow_direct: bool,
    /// Whether a client may delete a message.
    pub deny_delete: bool,
    /// Whether a client may purge.
    pub deny_purge: bool,
    /// Whether a message may replace those before it, as key-value purges do.
    pub allow_rollup_hdrs: bool,
    /// Whether a message may say how long it is kept.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub allow_msg_ttl: bool,
    /// Publishers' subjects to stored subjects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject_transform: Option<SubjectTransform>,
}

/// How a stream renames subjects as it stores them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SubjectTransform {
    /// What is renamed.
    pub src: String,
    /// To what.
    pub dest: String,
}

/// A consumer as JetStream configures it. Times in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConsumerConfig {
    /// The name.
    pub name: String,
    /// The same: it outlives its clients.
    pub durable_name: String,
    /// Words for people.
    pub description: String,
    /// `all`: any reset is allowed.
    pub deliver_policy: &'static str,
    /// `none` or `explicit`.
    pub ack_policy: AckPolicy,
    /// With acks only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ack_wait: Option<u64>,
    /// With acks only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_ack_pending: Option<i64>,
    /// No limit: -1.
    pub max_deliver: i64,
    /// The shard's rows.
    pub filter_subject: String,
    /// `instant`.
    pub replay_policy: &'static str,
    /// Pulls that may wait.
    pub max_waiting: i64,
    /// The one group.
    pub priority_groups: Vec<String>,
    /// `pinned_client`.
    pub priority_policy: &'static str,
    /// The pinned TTL.
    pub priority_timeout: u64,
}

/// A consumer and its stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConsumerOf {
    /// The stream.
    pub stream: String,
    /// The consumer: what `nats consumer add --config` takes.
    pub config: ConsumerConfig,
}

/// Everything, as `holdfast topology print` writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Document {
    /// What `nats stream add --config` takes.
    pub streams: Vec<StreamConfig>,
    /// What `nats consumer add <stream> --config` takes.
    pub consumers: Vec<ConsumerOf>,
    /// Key-value buckets, as the streams they are: what `nats stream add --config` takes.
    pub buckets: Vec<StreamConfig>,
    /// With several streams: the publishers' account's subject mappings, in the form of nats-server's configuration.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub mappings: BTreeMap<String, String>,
}

/// Subjects that one user needs, in the form of nats-server's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Permissions {
    /// What it may publish to.
    pub publish: Allow,
    /// What it may subscribe to.
    pub subscribe: Allow,
}

/// A list of allowed subjects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Allow {
    /// The subjects.
    pub allow: Vec<String>,
}

/// The least permissions, as `holdfast topology print --permissions` writes them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PermissionsDocument {
    /// `holdfast run`.
    pub daemon: Permissions,
    /// `holdfast publish`, and whoever else publishes rows.
    pub publisher: Permissions,
    /// `holdfast topology apply`, `holdfast check` and `holdfast dead-letters`.
    pub operator: Permissions,
}

/// What was done with an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Applied {
    /// The object, for example `stream INGEST`.
    pub object: String,
    /// What was done.
    pub action: Action,
    /// The fields that were changed: each with what was and what is.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<String>,
}

/// What was done with an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// It did not exist.
    Created,
    /// It differed.
    Updated,
    /// It was as it should be.
    Unchanged,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Created => "created",
            Self::Updated => "updated",
            Self::Unchanged => "unchanged",
        })
    }
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Holdfast does not work, or not safely, until it is fixed.
    Required,
    /// Better otherwise.
    Recommended,
}

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// The object, for example `consumer holdfast-3`.
    pub object: String,
    /// The field; empty when it is about the whole object.
    pub field: String,
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub fix: String,
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Whether a stream, consumer or bucket may be called this.
fn name(field: &'static str, name: &str) -> Result<(), TopologyError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if name.is_empty() || name.len() > 200 || !name.chars().all(fits) {
        return Err(TopologyError::Invalid {
            field,
            problem: "a name is 1 to 200 letters, digits, - and _".to_owned(),
        });
    }
    Ok(())
}

impl Topology {
    /// Checks what can be checked without a server.
    ///
    /// # Errors
    ///
    /// [`TopologyError::Invalid`] names the configuration key.
    pub fn validate(&self) -> Result<(), TopologyError> {
        name("stream", &self.stream)?;
        name("durable", &self.durable)?;
        name("bucket", &self.bucket)?;
        if self.has_dead_letters() {
            name("dead_letters", &self.dead_letters)?;
        }
        let invalid =
            |field, problem: &str| Err(TopologyError::Invalid { field, problem: problem.to_owned() });
        let token = |token: &str| {
            !token.is_empty() && token.bytes().all(|b| b.is_ascii_graphic() && !b"*>".contains(&b))
        };
        if !self.prefix.split('.').all(token) || self.prefix.starts_with('$') {
            return invalid("prefix", "a subject without wildcards, such as ingest or eu.ingest");
        }
        if self.shards == 0 || self.shards > 1024 {
            return invalid("shards", "from 1 to 1024");
        }
        if self.streams == 0 || self.streams > self.shards {
            let most = self.shards;
            let problem =
                format!("from 1 to the number of shards, which is {most}: a stream without one is idle");
            return invalid("streams", &problem);
        }
        if self.streams().number(&self.dead_letters).is_some() {
            return invalid("dead_letters", "a stream of its own, not the rows' stream");
        }
        if self.replicas == 0 || self.replicas > 5 {
            return invalid("replicas", "from 1 to 5");
        }
        if self.pinned_ttl < Duration::from_secs(1) {
            return invalid("pinned_ttl", "at least one second");
        }
        // The server keeps it as a signed number of nanoseconds.
        if self.ack_wait < Duration::from_secs(1) || i64::try_from(self.ack_wait.as_nanos()).is_err() {
            return invalid("ack_wait", "at least one second, at most 292 years");
        }
        if self.max_bytes.is_some_and(|bytes| i64::try_from(bytes).is_err() || bytes == 0) {
            return invalid("max_bytes", "a size above zero");
        }
        if self.retention == RetentionPolicy::WorkQueue && self.ack_policy != AckPolicy::Explicit {
            return invalid("retention", "workqueue needs ack_policy = \"explicit\"");
        }
        Ok(())
    }

    /// The streams that hold the rows.
    #[must_use]
    pub fn streams(&self) -> Streams {
        Streams::new(&self.stream, self.streams)
    }

    /// The shards whose rows the stream of this number holds.
    pub fn shards_in(&self, number: u32) -> impl Iterator<Item = ShardId> + use<> {
        let streams = self.streams();
        self.shard_ids().filter(move |shard| streams.number_of(*shard) == number)
    }

    /// Publishers' subjects to those that are stored: the stream's own transform, or with several streams the
    /// mapping of the publishers' account.
    #[must_use]
    pub fn mapping(&self) -> SubjectTransform {
        SubjectTransform {
            src: format!("{}.*", self.prefix),
            // The number in braces counts the wildcards of `src`, whatever dots the prefix holds.
            dest: format!("{}.{{{{partition({},1)}}}}.{{{{wildcard(1)}}}}", self.prefix, self.shards),
        }
    }

    /// The mapping as nats-server's configuration takes it, with where it goes; none where the stream does it.
    #[must_use]
    pub fn mapping_config(&self) -> Option<String> {
        let SubjectTransform { src, dest } = self.mapping();
        (self.streams > 1).then(|| {
            format!(
                "# Into the publishers' account, in the configuration of every nats-server that they connect to:\n\
                 # accounts {{ NAME {{ \u{2026} }} }}, or at the top level where there are no accounts; then reload. For accounts\n\
                 # that are kept as JWTs: nsc add mapping --from '{src}' --to '{dest}'\n\
                 mappings {{\n    \"{src}\": \"{dest}\"\n}}\n"
            )
        })
    }

    /// A shard's consumer.
    #[must_use]
    pub fn consumer(&self, shard: ShardId) -> String {
        format!("{}-{shard}", self.durable)
    }

    /// What a delivery adapter of `shard` needs; `min_pinned_ttl` is the shortest TTL it can live with.
    #[must_use]
    pub fn source(&self, shard: ShardId, min_pinned_ttl: Duration) -> Source {
        Source {
            stream: self.streams().of(shard),
            consumer: self.consumer(shard),
            group: GROUP.to_owned(),
            prefix: self.prefix.clone(),
            shard,
            ack_policy: self.ack_policy,
            min_pinned_ttl,
            min_ack_pending: MIN_ACK_PENDING,
        }
    }

    /// Whether there is a stream for dead letters.
    #[must_use]
    pub fn has_dead_letters(&self) -> bool {
        !self.dead_letters.is_empty()
    }

    /// Every stream, the bucket's included.
    fn stream_configs(&self) -> Vec<StreamConfig> {
        let mut configs: Vec<_> = (0..self.streams).map(|number| self.stream_config(number)).collect();
        configs.extend(self.has_dead_letters().then(|| self.dead_letters_config()));
        configs.push(self.bucket_config());
        configs
    }

    /// The first part of the dead letters' subjects.
    #[must_use]
    pub fn dead_letter_prefix(&self) -> String {
        format!("{}-dead", self.prefix)
    }

    /// The subject under which members answer requests is `<this>.<member>`.
    #[must_use]
    pub fn member_prefix(&self) -> String {
        crate::members::member_prefix(&self.bucket, &self.stream)
    }

    fn base(&self, name: String, description: String) -> StreamConfig {
        StreamConfig {
            name,
            description,
            subjects: Vec::new(),
            retention: RetentionPolicy::Limits,
            max_consumers: -1,
            max_msgs: -1,
            max_bytes: -1,
            max_age: 0,
            max_msgs_per_subject: -1,
            max_msg_size: -1,
            discard: "new",
            storage: "file",
            num_replicas: self.replicas,
            duplicate_window: nanos(DUPLICATE_WINDOW),
            allow_direct: true,
            deny_delete: false,
            deny_purge: false,
            allow_rollup_hdrs: false,
            allow_msg_ttl: false,
            subject_transform: None,
        }
    }

    /// The rows' stream of this number.
    #[must_use]
    pub fn stream_config(&self, number: u32) -> StreamConfig {
        let one = self.streams == 1;
        let mapping = self.mapping();
        StreamConfig {
            retention: self.retention,
            max_bytes: self.max_bytes.and_then(|bytes| i64::try_from(bytes).ok()).unwrap_or(-1),
            subjects: if one {
                vec![mapping.src.clone()]
            } else {
                self.shards_in(number).map(|shard| shard_filter(&self.prefix, shard)).collect()
            },
            subject_transform: one.then_some(mapping),
            ..self.base(self.streams().name(number), "Rows on their way to ClickHouse (Holdfast)".into())
        }
    }

    /// The dead letters' stream.
    #[must_use]
    pub fn dead_letters_config(&self) -> StreamConfig {
        StreamConfig {
            subjects: vec![format!("{}.>", self.dead_letter_prefix())],
            ..self.base(self.dead_letters.clone(), "Rows that ClickHouse can never take (Holdfast)".into())
        }
    }

    /// The bucket's stream: one value a key.
    #[must_use]
    pub fn bucket_config(&self) -> StreamConfig {
        StreamConfig {
            subjects: vec![format!("$KV.{}.>", self.bucket)],
            max_msgs_per_subject: 1,
            deny_delete: true,
            allow_rollup_hdrs: true,
            // The mark that a member's record leaves when it is deleted goes by itself.
            allow_msg_ttl: true,
            ..self.base(bucket_stream(&self.bucket), "Members and ledger (Holdfast)".into())
        }
    }

    /// A shard's consumer.
    #[must_use]
    pub fn consumer_config(&self, shard: ShardId) -> ConsumerConfig {
        let acks = self.ack_policy == AckPolicy::Explicit;
        ConsumerConfig {
            name: self.consumer(shard),
            durable_name: self.consumer(shard),
            description: format!("Shard {shard} (Holdfast)"),
            deliver_policy: "all",
            ack_policy: self.ack_policy,
            ack_wait: acks.then(|| nanos(self.ack_wait)),
            max_ack_pending: acks.then_some(MAX_ACK_PENDING),
            max_deliver: -1,
            filter_subject: shard_filter(&self.prefix, shard),
            replay_policy: "instant",
            max_waiting: MAX_WAITING,
            priority_groups: vec![GROUP.to_owned()],
            priority_policy: "pinned_client",
            priority_timeout: nanos(self.pinned_ttl),
        }
    }

    fn shard_ids(&self) -> impl Iterator<Item = ShardId> + use<> {
        (0..self.shards).map(ShardId)
    }

    /// Everything as one document.
    #[must_use]
    pub fn document(&self) -> Document {
        Document {
            streams: (0..self.streams)
                .map(|number| self.stream_config(number))
                .chain(self.has_dead_letters().then(|| self.dead_letters_config()))
                .collect(),
            consumers: self
                .shard_ids()
                .map(|shard| ConsumerOf {
                    stream: self.streams().of(shard),
                    config: self.consumer_config(shard),
                })
                .collect(),
            buckets: vec![self.bucket_config()],
            mappings: match self.mapping() {
                SubjectTransform { src, dest } if self.streams > 1 => BTreeMap::from([(src, dest)]),
                _ => BTreeMap::new(),
            },
        }
    }

    /// The least permissions of a daemon, a publisher and an operator.
    #[must_use]
    pub fn permissions(&self) -> PermissionsDocument {
        let (streams, bucket) = (self.streams(), bucket_stream(&self.bucket));
        let (dead, dead_prefix) = (&self.dead_letters, self.dead_letter_prefix());
        let inbox = || Allow { allow: vec!["_INBOX.>".to_owned()] };
        // A server looks at what a subject was mapped to, not at what was sent.
        let rows = format!("{}.*{}", self.prefix, if self.streams > 1 { ".*" } else { "" });
        let mut daemon = vec![
            STREAM_NAMES.to_owned(),
            api::stream_info(&bucket),
            api::message_get(&bucket),
            format!("$KV.{}.>", self.bucket),
            format!("{}.*", self.member_prefix()),
        ];
        for stream in &streams.names().collect::<Vec<_>>() {
            let consumers = format!("$JS.API.CONSUMER.NAMES.{stream}");
            daemon.extend([api::stream_info(stream), api::message_get(stream), consumers]);
            if self.has_dead_letters() {
                // Rows that cannot be received are taken out of the stream once they are kept.
                daemon.push(api::message_delete(stream));
            }
            if self.ack_policy == AckPolicy::None {
                daemon.push(api::stream_purge(stream));
            }
        }
        if self.has_dead_letters() {
            daemon.extend([api::stream_info(dead), api::message_get(dead), format!("{dead_prefix}.>")]);
        }
        // Watching the bucket: an ordered consumer, with a name or without, made anew whenever it falls behind.
        daemon.extend([
            format!("$JS.API.CONSUMER.CREATE.{bucket}"),
            format!("$JS.API.CONSUMER.CREATE.{bucket}.>"),
            format!("$JS.API.CONSUMER.INFO.{bucket}.*"),
            format!("$JS.API.CONSUMER.DELETE.{bucket}.*"),
            format!("$JS.FC.{bucket}.>"),
            format!("$JS.FC.*.*.{bucket}.>"),
        ]);
        for shard in self.shard_ids() {
            let (stream, consumer) = (&streams.of(shard), self.consumer(shard));
            daemon.extend([
                api::consumer_info(stream, &consumer),
                api::consumer_next(stream, &consumer),
                api::consumer_reset(stream, &consumer),
                api::consumer_unpin(stream, &consumer),
            ]);
            if self.ack_policy == AckPolicy::Explicit {
                // Both forms of ADR-15: which one a server uses is its own affair.
                daemon.push(format!("{}.>", short_origin(stream, &consumer)));
                daemon.push(format!("$JS.ACK.*.*.{stream}.{consumer}.>"));
            }
        }
        let mut operator = vec![STREAM_NAMES.to_owned(), api::message_get(&bucket)];
        for config in self.stream_configs() {
            let name = &config.name;
            operator.extend([
                api::stream_info(name),
                format!("$JS.API.STREAM.CREATE.{name}"),
                format!("$JS.API.STREAM.UPDATE.{name}"),
            ]);
        }
        for stream in streams.names() {
            operator.push(format!("$JS.API.CONSUMER.NAMES.{stream}"));
        }
        if self.has_dead_letters() {
            // Read, and dropped.
            operator.extend([api::message_get(dead), api::message_delete(dead)]);
        }
        // Whether rows find their way is tried; dead letters are put through the stream again.
        operator.push(rows.clone());
        for shard in self.shard_ids() {
            let (stream, consumer) = (&streams.of(shard), self.consumer(shard));
            operator.push(api::consumer_info(stream, &consumer));
            operator.push(format!("$JS.API.CONSUMER.CREATE.{stream}.{consumer}"));
        }
        PermissionsDocument {
            daemon: Permissions {
                publish: Allow { allow: daemon },
                subscribe: Allow {
                    allow: vec!["_INBOX.>".to_owned(), format!("{}.*", self.member_prefix())],
                },
            },
            publisher: Permissions {
                publish: Allow {
                    // `holdfast publish` looks at the streams first: which they are, and what they can promise.
                    allow: std::iter::once(rows)
                        .chain(streams.names().map(|stream| api::stream_info(&stream)))
                        .collect(),
                },
                subscribe: inbox(),
            },
            operator: Permissions { publish: Allow { allow: operator }, subscribe: inbox() },
        }
    }

    /// Creates what is missing and updates what differs, touching only what the topology states. Deletes
    /// nothing. What was done, object by object; on an error the objects before it are done.
    ///
    /// # Errors
    ///
    /// See [`TopologyError`].
    pub async fn apply(
        &self,
        connection: &Connection,
        resharding: Resharding,
    ) -> Result<Vec<Applied>, TopologyError> {
        self.validate()?;
        if resharding == Resharding::Refuse {
            for name in self.other_streams(connection).await? {
                let object = stream_object(&name);
                let info = find_stream(connection, &name).await.map_err(|error| failed(&object, &error))?;
                let messages = info.map_or(0, |info| info.state.messages);
                if messages > 0 {
                    return Err(TopologyError::OtherStreams { object, messages, streams: self.streams });
                }
            }
        }
        let mut done = Vec::new();
        for config in self.stream_configs() {
            done.push(apply_stream(connection, &config, resharding).await?);
        }
        for shard in self.shard_ids() {
            let stream = self.streams().of(shard);
            done.push(apply_consumer(connection, &stream, &self.consumer_config(shard)).await?);
        }
        Ok(done)
    }

    /// Compares what is there with what should be; the worst first. Empty: all is well.
    ///
    /// # Errors
    ///
    /// When the server cannot be asked, or the topology is invalid.
    pub async fn check(&self, connection: &Connection) -> Result<Vec<Finding>, TopologyError> {
        self.validate()?;
        let mut findings = Vec::new();
        let streams = self.streams();
        let mut there = BTreeSet::new();
        for config in self.stream_configs() {
            let object = stream_object(&config.name);
            match find_stream(connection, &config.name).await.map_err(|error| failed(&object, &error))? {
                None => findings.push(missing(&object)),
                Some(info) => {
                    there.extend(streams.number(&config.name));
                    for difference in differences(&stream_map(&config), &info.config) {
                        findings.push(difference.finding(&object, STREAM_REQUIRED));
                    }
                    if info.config.get("sealed").and_then(Value::as_bool) == Some(true) {
                        findings.push(Finding {
                            severity: Severity::Required,
                            object,
                            field: "sealed".into(),
                            problem: "it is sealed and takes nothing any more".into(),
                            fix: "make another stream; a seal cannot be broken".into(),
                        });
                    }
                }
            }
        }
        for number in there {
            let stream = streams.name(number);
            for shard in self.shards_in(number) {
                let config = self.consumer_config(shard);
                let object = consumer_object(&config.name);
                let info = find_consumer(connection, &stream, &config.name)
                    .await
                    .map_err(|error| failed(&object, &error))?;
                match info {
                    None => findings.push(missing(&object)),
                    Some(info) => findings.extend(
                        differences(&as_map(&config), &info.config)
                            .iter()
                            .map(|difference| difference.finding(&object, CONSUMER_REQUIRED)),
                    ),
                }
            }
            findings.extend(self.stray_consumers(connection, number).await?);
        }
        for name in self.other_streams(connection).await? {
            findings.extend(self.other_stream(connection, &name).await);
        }
        findings.sort_by_key(|finding| finding.severity);
        Ok(findings)
    }

    /// Tries whether publishers' rows find their way into the streams. Nothing is stored: each row that is sent says
    /// that it is for a stream that cannot be, so the stream that gets it refuses it, and says who it is. (Whoever
    /// subscribes to the publishers' subjects without JetStream sees these rows: they are empty.)
    ///
    /// # Errors
    ///
    /// When the server cannot be asked, or this user may not publish rows.
    pub async fn check_publishing(&self, connection: &Connection) -> Result<Vec<Finding>, TopologyError> {
        #[derive(Deserialize)]
        struct Refusal {
            #[serde(default)]
            stream: String,
            error: Option<ApiError>,
        }
        // A mapping to one shard too many is found in all but one of two thousand cases with eight shards.
        let probes = if self.streams == 1 { 1 } else { 64 };
        let SubjectTransform { src: object, dest } = self.mapping();
        let finding = |problem: String| {
            let fix = if self.streams > 1 {
                "put the mapping that `holdfast topology print --mapping` shows into the publishers' account"
                    .to_owned()
            } else {
                format!("let no account mapping change {object}: with one stream its own transform does it")
            };
            Finding {
                severity: Severity::Required,
                object: format!("subjects {object}"),
                field: String::new(),
                problem,
                fix,
            }
        };
        for probe in 0..probes {
            let subject = subject::publish_subject(&self.prefix, &format!("holdfast-check-{probe}"));
            let mut headers = HeaderMap::new();
            // No stream's name has a space.
            headers.insert(EXPECTED_STREAM, "no stream");
            match connection.request(&subject, Some(headers), Bytes::new(), CALL_TIMEOUT).await {
                Ok(message) => match serde_json::from_slice::<Refusal>(&message.payload) {
                    Ok(Refusal { stream, error: Some(_) }) if self.streams().number(&stream).is_some() => {}
                    Ok(Refusal { stream, .. }) if !stream.is_empty() => {
                        return Ok(vec![finding(format!("the stream {} takes {subject}", cut(&stream)))]);
                    }
                    _ => {
                        return Ok(vec![finding(format!(
                            "something else than a stream answers to {subject}"
                        ))]);
                    }
                },
                Err(RequestError::NoResponders(_)) => {
                    let why = if self.streams > 1 {
                        format!("; the account does not map it to {dest}")
                    } else {
                        String::new()
                    };
                    return Ok(vec![finding(format!(
                        "no stream takes {subject}{why}; publishers get no responders"
                    ))]);
                }
                Err(error) => {
                    // The server tells of the mapped subject only, which nobody here has sent to.
                    let hint = if self.streams > 1 {
                        format!("; a user's permissions are those for {}.*.*, once it is mapped", self.prefix)
                    } else {
                        String::new()
                    };
                    let failure = format!("{}{hint}", error.failure());
                    return Err(TopologyError::Failed { object, failure });
                }
            }
        }
        Ok(Vec::new())
    }

    /// Streams that another number of streams under this name has left: their rows, if they have any, are this
    /// topology's rows, and it does not read them.
    async fn other_streams(&self, connection: &Connection) -> Result<Vec<String>, TopologyError> {
        #[derive(Deserialize)]
        struct Names {
            #[serde(default)]
            streams: Option<Vec<String>>,
        }
        #[derive(Serialize)]
        struct Page {
            subject: String,
            offset: usize,
        }
        let mut names = BTreeSet::new();
        for _ in 0..PAGES {
            // All that take subjects of ours.
            let page = Page { subject: format!("{}.>", self.prefix), offset: names.len() };
            let page: Names = connection
                .call(STREAM_NAMES, &page, CALL_TIMEOUT)
                .await
                .map_err(|error| failed("streams", &error))?;
            let before = names.len();
            names.extend(page.streams.unwrap_or_default());
            if names.len() == before {
                break;
            }
        }
        let streams = self.streams();
        names.retain(|name| {
            let is_ours = name.strip_prefix(&self.stream).is_some_and(|rest| {
                rest.is_empty() || rest.strip_prefix('-').is_some_and(|number| number.parse::<u32>().is_ok())
            });
            is_ours && streams.number(name).is_none()
        });
        Ok(names.into_iter().collect())
    }

    /// What is to be said of one of them. While it has rows that are not known to be written nobody should go on: new
    /// rows of their tables would be written before them.
    async fn other_stream(&self, connection: &Connection, name: &str) -> Option<Finding> {
        let unwritten = self.unwritten(connection, name).await;
        let (severity, problem) = match unwritten {
            Ok(None) => return None,
            Ok(Some(0)) => {
                (Severity::Recommended, "and all its rows are written; nobody reads it".to_owned())
            }
            Ok(Some(shards)) => (
                Severity::Required,
                format!("and rows of {shards} of its shards are not known to be written"),
            ),
            Err(failure) => {
                (Severity::Required, format!("and whether its rows are written cannot be seen ({failure})"))
            }
        };
        Some(Finding {
            severity,
            object: stream_object(name),
            field: String::new(),
            problem: format!("it belongs to another topology.streams than {}, {problem}", self.streams),
            fix: format!(
                "let daemons with the number of streams that it belongs to write its rows, and stop them; then \
                 `nats stream rm {name}`"
            ),
        })
    }

    /// Of how many shards the stream `name` has rows that the ledger does not call done; none if there is no such
    /// stream.
    async fn unwritten(&self, connection: &Connection, name: &str) -> Result<Option<usize>, Failure> {
        #[derive(Serialize)]
        struct Ask {
            subjects_filter: String,
        }
        #[derive(Deserialize)]
        struct Answer {
            state: Subjects,
        }
        #[derive(Deserialize)]
        struct Subjects {
            #[serde(default)]
            subjects: Option<BTreeMap<String, u64>>,
        }
        let failure = |error: CallError| error.failure();
        let Some(info) = find_stream(connection, name).await.map_err(failure)? else { return Ok(None) };
        if info.state.messages == 0 {
            return Ok(Some(0));
        }
        let ask = Ask { subjects_filter: format!("{}.*.*", self.prefix) };
        let answer = connection.call(&api::stream_info(name), &ask, CALL_TIMEOUT).await;
        let Answer { state } = answer.map_err(failure)?;
        let subjects = state.subjects.unwrap_or_default();
        let shards: BTreeSet<ShardId> = subjects
            .keys()
            .filter_map(|stored| subject::split(&self.prefix, stored).map(|(shard, _)| shard))
            .collect();
        let ledger = Ledger::new(connection.clone(), &self.bucket, name);
        // Rows under none of those subjects are nobody's; so many tables that the list is cut are not looked through.
        let mut unwritten = usize::from(subjects.values().sum::<u64>() < info.state.messages);
        for shard in shards {
            let filter = shard_filter(&self.prefix, shard);
            let last = api::stored(connection, name, &Which::last(&filter)).await.map_err(failure)?;
            let entry = ledger.read(shard).await?;
            let record = entry.and_then(|entry| Record::decode(&entry.record).ok());
            let is_done = last.is_none_or(|last| {
                record
                    .is_some_and(|record| record.stream_created == info.created && record.floor.0 >= last.seq)
            });
            unwritten += usize::from(!is_done);
        }
        Ok(Some(unwritten))
    }

    /// Consumers named like ours, of shards that no longer are: their rows wait for nobody.
    async fn stray_consumers(
        &self,
        connection: &Connection,
        number: u32,
    ) -> Result<Vec<Finding>, TopologyError> {
        #[derive(Deserialize)]
        struct Names {
            #[serde(default)]
            consumers: Option<Vec<String>>,
        }
        #[derive(Serialize)]
        struct Page {
            offset: usize,
        }
        let stream = self.streams().name(number);
        let mut names = BTreeSet::new();
        for _ in 0..PAGES {
            let subject = format!("$JS.API.CONSUMER.NAMES.{stream}");
            let page: Names = connection
                .call(&subject, &Page { offset: names.len() }, CALL_TIMEOUT)
                .await
                .map_err(|error| failed(&stream_object(&stream), &error))?;
            let before = names.len();
            names.extend(page.consumers.unwrap_or_default());
            if names.len() == before {
                break;
            }
        }
        let ours = format!("{}-", self.durable);
        let stray = names.iter().filter(|name| {
            name.strip_prefix(&ours)
                .and_then(|shard| shard.parse().ok())
                .map(ShardId)
                .is_some_and(|shard| shard.0 >= self.shards || self.streams().number_of(shard) != number)
        });
        Ok(stray
            .map(|name| Finding {
                severity: Severity::Recommended,
                object: consumer_object(name),
                field: String::new(),
                problem: if self.streams > 1 {
                    format!("a shard that the stream {stream} does not have; nobody reads it")
                } else {
                    format!("a shard above the configured {}; nobody reads it", self.shards)
                },
                fix: format!("make sure that its rows are written, then `nats consumer rm {stream} {name}`"),
            })
            .collect())
    }
}

/// Pages of names that are looked through.
const PAGES: usize = 64;

/// Which streams there are.
const STREAM_NAMES: &str = "$JS.API.STREAM.NAMES";

/// Fields without which rows could be lost, reordered or stuck.
const STREAM_REQUIRED: &[&str] = &[
    "subjects",
    "subject_transform",
    "retention",
    "max_msgs",
    "max_age",
    "max_msgs_per_subject",
    "discard",
    "deny_purge",
    "storage",
];

/// Fields without which a shard cannot be served.
const CONSUMER_REQUIRED: &[&str] = &[
    "deliver_policy",
    "ack_policy",
    "max_ack_pending",
    "max_deliver",
    "filter_subject",
    "priority_groups",
    "priority_policy",
    "priority_timeout",
];

fn stream_object(name: &str) -> String {
    match name.strip_prefix("KV_") {
        Some(bucket) => format!("bucket {bucket}"),
        None => format!("stream {name}"),
    }
}

fn consumer_object(name: &str) -> String {
    format!("consumer {name}")
}

fn failed(object: &str, error: &CallError) -> TopologyError {
    TopologyError::Failed { object: object.to_owned(), failure: error.failure().to_string() }
}

fn missing(object: &str) -> Finding {
    Finding {
        severity: Severity::Required,
        object: object.to_owned(),
        field: String::new(),
        problem: "it does not exist".into(),
        fix: "`holdfast topology apply`".into(),
    }
}

/// A configuration as the map it is on the wire.
fn as_map(config: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(config) {
        Ok(Value::Object(map)) => map,
        // These types hold strings, numbers and lists of them.
        other => unreachable!("a configuration that is no JSON object: {other:?}"),
    }
}

/// The same of a stream. A transform that should not be there is a difference, too.
fn stream_map(config: &StreamConfig) -> Map<String, Value> {
    let mut map = as_map(config);
    map.entry("subject_transform").or_insert(Value::Null);
    map
}

/// A field that is not as it should be.
struct Difference {
    field: String,
    is: Value,
    should: Value,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} -> {}", self.field, shown(&self.field, &self.is), shown(&self.field, &self.should))
    }
}

impl Difference {
    fn finding(&self, object: &str, required: &[&str]) -> Finding {
        let severity =
            if required.contains(&self.field.as_str()) { Severity::Required } else { Severity::Recommended };
        Finding {
            severity,
            object: object.to_owned(),
            field: self.field.clone(),
            problem: format!(
                "is {}, should be {}",
                shown(&self.field, &self.is),
                shown(&self.field, &self.should)
            ),
            fix: "`holdfast topology apply`, or change the configuration".into(),
        }
    }
}

/// A value for people: durations as such.
fn shown(field: &str, value: &Value) -> String {
    match (field, value.as_u64()) {
        ("max_age" | "duplicate_window" | "ack_wait" | "priority_timeout", Some(nanos)) => {
            format!("{:?}", Duration::from_nanos(nanos))
        }
        _ => cut(&value.to_string()),
    }
}

/// A field that the server leaves out has its zero value.
fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(value) => value.as_f64() == Some(0.0),
        Value::String(value) => value.is_empty(),
        Value::Array(value) => value.is_empty(),
        Value::Object(value) => value.is_empty(),
    }
}

fn differences(desired: &Map<String, Value>, existing: &Map<String, Value>) -> Vec<Difference> {
    desired
        .iter()
        // Words for people are not worth a finding.
        .filter(|(field, _)| *field != "description")
        .filter_map(|(field, should)| {
            let is = existing.get(field).cloned().unwrap_or(Value::Null);
            let same = is == *should || (is_zero(&is) && is_zero(should));
            (!same).then(|| Difference { field: field.clone(), is, should: should.clone() })
        })
        .collect()
}

/// The configuration that is there, with what the topology states put over it.
fn merged(desired: &Map<String, Value>, existing: &Map<String, Value>) -> Map<String, Value> {
    let mut config = existing.clone();
    config.extend(desired.clone());
    config
}

fn changes(differences: &[Difference]) -> Vec<String> {
    differences.iter().map(ToString::to_string).collect()
}

async fn find_stream(connection: &Connection, name: &str) -> Result<Option<StreamInfo>, CallError> {
    match connection.ask(&api::stream_info(name), CALL_TIMEOUT).await {
        Ok(info) => Ok(Some(info)),
        Err(error) if error.is(STREAM_NOT_FOUND) => Ok(None),
        Err(error) => Err(error),
    }
}

async fn find_consumer(
    connection: &Connection,
    stream: &str,
    name: &str,
) -> Result<Option<ConsumerInfo>, CallError> {
    match connection.ask(&api::consumer_info(stream, name), CALL_TIMEOUT).await {
        Ok(info) => Ok(Some(info)),
        Err(error) if error.is(CONSUMER_NOT_FOUND) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Sends a creation or an update, and says whose fault it is if it fails.
async fn write<T: serde::de::DeserializeOwned>(
    connection: &Connection,
    object: &str,
    subject: &str,
    body: &Value,
    changes: &[String],
) -> Result<T, TopologyError> {
    connection.call(subject, body, CREATE_TIMEOUT).await.map_err(|error| match &error {
        CallError::Api(api) => TopologyError::Refused {
            object: object.to_owned(),
            changes: if changes.is_empty() { "to create it".to_owned() } else { changes.join(", ") },
            words: cut(&api.description),
        },
        _ => failed(object, &error),
    })
}

async fn apply_stream(
    connection: &Connection,
    config: &StreamConfig,
    resharding: Resharding,
) -> Result<Applied, TopologyError> {
    let object = stream_object(&config.name);
    let desired = stream_map(config);
    let found = find_stream(connection, &config.name).await.map_err(|error| failed(&object, &error))?;
    let Some(found) = found else {
        let subject = format!("$JS.API.STREAM.CREATE.{}", config.name);
        let _: StreamInfo = write(connection, &object, &subject, &Value::Object(desired), &[]).await?;
        return Ok(Applied { object, action: Action::Created, changes: Vec::new() });
    };
    let differences = differences(&desired, &found.config);
    if differences.is_empty() {
        return Ok(Applied { object, action: Action::Unchanged, changes: Vec::new() });
    }
    // Which shard a row belongs to says the transform, or with several streams what each of them takes.
    let mapped = |difference: &&Difference| match difference.field.as_str() {
        "subject_transform" => true,
        "subjects" => config.subject_transform.is_none(),
        _ => false,
    };
    if let Some(mapping) = differences.iter().find(mapped)
        && found.state.messages > 0
        && resharding == Resharding::Refuse
    {
        let shown = |value: &Value| shown("", value.get("dest").unwrap_or(value));
        return Err(TopologyError::Reshard {
            object,
            messages: found.state.messages,
            from: shown(&mapping.is),
            to: shown(&mapping.should),
        });
    }
    let changes = changes(&differences);
    let subject = format!("$JS.API.STREAM.UPDATE.{}", config.name);
    let body = Value::Object(merged(&desired, &found.config));
    let _: StreamInfo = write(connection, &object, &subject, &body, &changes).await?;
    Ok(Applied { object, action: Action::Updated, changes })
}

async fn apply_consumer(
    connection: &Connection,
    stream: &str,
    config: &ConsumerConfig,
) -> Result<Applied, TopologyError> {
    let object = consumer_object(&config.name);
    let desired = as_map(config);
    let found =
        find_consumer(connection, stream, &config.name).await.map_err(|error| failed(&object, &error))?;
    let (config_map, action, changes) = match &found {
        None => (desired, "create", Vec::new()),
        Some(found) => {
            let differences = differences(&desired, &found.config);
            if differences.is_empty() {
                return Ok(Applied { object, action: Action::Unchanged, changes: Vec::new() });
            }
            (merged(&desired, &found.config), "update", changes(&differences))
        }
    };
    let subject = format!("$JS.API.CONSUMER.CREATE.{stream}.{}", config.name);
    let body = serde_json::json!({ "stream_name": stream, "config": config_map, "action": action });
    let _: ConsumerInfo = write(connection, &object, &subject, &body, &changes).await?;
    let action = if found.is_none() { Action::Created } else { Action::Updated };
    Ok(Applied { object, action, changes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_maps_tables_to_shards() {
        let topology = Topology { prefix: "eu.ingest".into(), shards: 4, ..Topology::default() };
        let config = serde_json::to_value(topology.stream_config(0)).unwrap();
        assert_eq!(config["subjects"], serde_json::json!(["eu.ingest.*"]));
        assert_eq!(config["subject_transform"]["src"], "eu.ingest.*");
        assert_eq!(config["subject_transform"]["dest"], "eu.ingest.{{partition(4,1)}}.{{wildcard(1)}}");
        assert_eq!(config["retention"], "limits");
        assert_eq!(config["discard"], "new");
    }

    #[test]
    fn shards_are_spread_over_streams() {
        let topology = Topology { streams: 3, shards: 8, prefix: "eu.ingest".into(), ..Topology::default() };
        assert_eq!(topology.validate(), Ok(()));
        let Document { streams, consumers, mappings, .. } = topology.document();
        let names: Vec<_> = streams.iter().map(|stream| stream.name.as_str()).collect();
        assert_eq!(names, ["INGEST-0", "INGEST-1", "INGEST-2", "INGEST_DEAD"]);
        assert_eq!(streams[1].subjects, ["eu.ingest.1.*", "eu.ingest.4.*", "eu.ingest.7.*"]);
        assert!(streams.iter().all(|stream| stream.subject_transform.is_none()));
        for (shard, consumer) in (0..).zip(&consumers) {
            assert_eq!(consumer.stream, format!("INGEST-{}", shard % 3));
            assert_eq!(topology.source(ShardId(shard), Duration::ZERO).stream, consumer.stream);
        }
        assert_eq!(mappings["eu.ingest.*"], "eu.ingest.{{partition(8,1)}}.{{wildcard(1)}}");
        let text = topology.mapping_config().unwrap();
        assert!(text.contains(r#""eu.ingest.*": "eu.ingest.{{partition(8,1)}}.{{wildcard(1)}}""#), "{text}");
        assert_eq!(Topology::default().mapping_config(), None);
        // Each daemon reads and trims every stream, and nothing else.
        let daemon = topology.permissions().daemon.publish.allow;
        for stream in ["INGEST-0", "INGEST-1", "INGEST-2"] {
            assert!(
                daemon.contains(&api::stream_purge(stream)) && daemon.contains(&api::message_get(stream))
            );
        }
        assert!(daemon.contains(&api::consumer_next("INGEST-1", "holdfast-7")));
        assert!(!daemon.iter().any(|subject| subject.ends_with(".INGEST")));
    }

    #[test]
    fn a_stream_has_one_name() {
        let streams = Streams::new("IN-1", 12);
        assert_eq!(streams.to_string(), "IN-1-0 to IN-1-11");
        for number in 0..12 {
            assert_eq!(streams.number(&streams.name(number)), Some(number));
        }
        for other in ["IN-1", "IN-1-12", "IN-1-01", "IN-1-+1", "IN-1-", "IN-10", "IN-1-1-1", ""] {
            assert_eq!(streams.number(other), None, "{other}");
        }
        let one = Streams::from("IN");
        assert_eq!((one.of(ShardId(5)), one.number("IN"), one.number("IN-0")), ("IN".into(), Some(0), None));
    }

    #[test]
    fn a_consumer_pins_one_client() {
        let config = serde_json::to_value(Topology::default().consumer_config(ShardId(3))).unwrap();
        assert_eq!(config["durable_name"], "holdfast-3");
        assert_eq!(config["filter_subject"], "ingest.3.*");
        assert_eq!(config["priority_policy"], "pinned_client");
        assert_eq!(config["priority_timeout"], 10_000_000_000_u64);
        assert_eq!(config.get("max_ack_pending"), None);
        let acks = Topology { ack_policy: AckPolicy::Explicit, ..Topology::default() };
        let config = acks.consumer_config(ShardId(0));
        assert_eq!((config.max_ack_pending, config.ack_wait), (Some(-1), Some(3_600_000_000_000)));
    }

    #[test]
    fn without_dead_letters_there_is_no_stream_for_them() {
        let topology = Topology { dead_letters: String::new(), ..Topology::default() };
        assert_eq!(topology.validate(), Ok(()));
        let document = topology.document();
        assert_eq!(document.streams.len(), 1);
        let text = serde_json::to_string(&(document, topology.permissions())).unwrap();
        assert!(!text.contains("-dead") && !text.contains("STREAM.INFO.\""), "{text}");
    }

    #[test]
    fn what_cannot_be_is_named() {
        for (topology, field) in [
            (Topology { stream: "A.B".into(), ..Topology::default() }, "stream"),
            (Topology { prefix: "a..b".into(), ..Topology::default() }, "prefix"),
            (Topology { prefix: "a.*".into(), ..Topology::default() }, "prefix"),
            (Topology { prefix: "$JS".into(), ..Topology::default() }, "prefix"),
            (Topology { shards: 0, ..Topology::default() }, "shards"),
            (Topology { dead_letters: "INGEST".into(), ..Topology::default() }, "dead_letters"),
            (Topology { streams: 0, ..Topology::default() }, "streams"),
            (Topology { streams: 9, ..Topology::default() }, "streams"),
            (Topology { streams: 2, dead_letters: "INGEST-1".into(), ..Topology::default() }, "dead_letters"),
            (Topology { retention: RetentionPolicy::WorkQueue, ..Topology::default() }, "retention"),
            (Topology { max_bytes: Some(u64::MAX), ..Topology::default() }, "max_bytes"),
            (Topology { pinned_ttl: Duration::ZERO, ..Topology::default() }, "pinned_ttl"),
            (Topology { ack_wait: Duration::ZERO, ..Topology::default() }, "ack_wait"),
            (Topology { ack_wait: Duration::MAX, ..Topology::default() }, "ack_wait"),
        ] {
            match topology.validate() {
                Err(TopologyError::Invalid { field: named, .. }) => assert_eq!(named, field),
                other => panic!("{field}: {other:?}"),
            }
        }
        assert_eq!(Topology::default().validate(), Ok(()));
    }

    #[test]
    fn a_field_left_out_is_zero() {
        let desired = serde_json::json!({"max_age": 0, "deny_purge": false, "name": "A", "discard": "new"});
        let existing = serde_json::json!({"name": "A", "discard": "old", "metadata": {"a": "b"}});
        let found = differences(desired.as_object().unwrap(), existing.as_object().unwrap());
        assert_eq!(changes(&found), ["discard: \"old\" -> \"new\""]);
        let merged = merged(desired.as_object().unwrap(), existing.as_object().unwrap());
        assert_eq!(merged["metadata"]["a"], "b");
        assert_eq!(merged["discard"], "new");
    }

    #[test]
    fn a_daemon_may_not_touch_other_streams() {
        let permissions = Topology::default().permissions();
        for subject in &permissions.daemon.publish.allow {
            assert!(!subject.contains("$JS.API.>") && subject != ">", "{subject}");
            if subject == "$JS.API.STREAM.MSG.DELETE.INGEST" {
                continue;
            }
            // Consumers on the bucket are how it is watched.
            let changes = subject.contains("DELETE") || subject.contains("CREATE");
            assert!(
                !changes || subject.starts_with("$JS.API.CONSUMER.") && subject.contains(".KV_HOLDFAST"),
                "{subject}"
            );
        }
        assert_eq!(permissions.publisher.publish.allow, ["ingest.*", "$JS.API.STREAM.INFO.INGEST"]);
        let acks = Topology { ack_policy: AckPolicy::Explicit, ..Topology::default() };
        let daemon = acks.permissions().daemon.publish.allow;
        for form in ["$JS.ACK.INGEST.holdfast-7.>", "$JS.ACK.*.*.INGEST.holdfast-7.>"] {
            assert!(daemon.iter().any(|subject| subject == form));
        }
        assert!(!daemon.iter().any(|subject| subject.contains("PURGE")));
    }
}
