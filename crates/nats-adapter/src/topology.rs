//! The stream, consumers and buckets that Holdfast needs: what they should be, making them so, and checking.
//!
//! Publishers send to `<prefix>.<table>`. The stream's subject transform stores each row under
//! `<prefix>.<shard>.<table>`, the shard by NATS's own partition function, and each shard has one durable
//! pull consumer whose priority policy pins one client.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use holdfast_core::row::ShardId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::ack_subject::short_origin;
use crate::api::{self, ConsumerInfo, StreamInfo};
use crate::connect::Connection;
use crate::delivery::Source;
use crate::errors::{CONSUMER_NOT_FOUND, CallError, STREAM_NOT_FOUND, cut};
use crate::ledger::bucket_stream;
use crate::request::CALL_TIMEOUT;
use crate::subject::shard_filter;

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

/// What the topology is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The stream's name.
    pub stream: String,
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
    /// The stream's size limit in bytes; at it publishers are refused. None: no limit.
    pub max_bytes: Option<u64>,
    /// Copies of every row and record in a cluster.
    pub replicas: u32,
}

impl Default for Topology {
    /// The configuration's defaults.
    fn default() -> Self {
        Self {
            stream: "INGEST".into(),
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
        /// The transform that is there.
        from: String,
        /// The transform that should be.
        to: String,
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
        if self.dead_letters == self.stream {
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

    /// A shard's consumer.
    #[must_use]
    pub fn consumer(&self, shard: ShardId) -> String {
        format!("{}-{shard}", self.durable)
    }

    /// What a delivery adapter of `shard` needs; `min_pinned_ttl` is the shortest TTL it can live with.
    #[must_use]
    pub fn source(&self, shard: ShardId, min_pinned_ttl: Duration) -> Source {
        Source {
            stream: self.stream.clone(),
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
        let mut configs = vec![self.stream_config()];
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

    /// The rows' stream.
    #[must_use]
    pub fn stream_config(&self) -> StreamConfig {
        let rows = format!("{}.*", self.prefix);
        StreamConfig {
            retention: self.retention,
            max_bytes: self.max_bytes.and_then(|bytes| i64::try_from(bytes).ok()).unwrap_or(-1),
            subject_transform: Some(SubjectTransform {
                src: rows.clone(),
                // The number in braces counts the wildcards of `src`, whatever dots the prefix holds.
                dest: format!("{}.{{{{partition({},1)}}}}.{{{{wildcard(1)}}}}", self.prefix, self.shards),
            }),
            subjects: vec![rows],
            ..self.base(self.stream.clone(), "Rows on their way to ClickHouse (Holdfast)".into())
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
            streams: [self.stream_config()]
                .into_iter()
                .chain(self.has_dead_letters().then(|| self.dead_letters_config()))
                .collect(),
            consumers: self
                .shard_ids()
                .map(|shard| ConsumerOf { stream: self.stream.clone(), config: self.consumer_config(shard) })
                .collect(),
            buckets: vec![self.bucket_config()],
        }
    }

    /// The least permissions of a daemon, a publisher and an operator.
    #[must_use]
    pub fn permissions(&self) -> PermissionsDocument {
        let (stream, bucket) = (&self.stream, bucket_stream(&self.bucket));
        let (dead, dead_prefix) = (&self.dead_letters, self.dead_letter_prefix());
        let inbox = || Allow { allow: vec!["_INBOX.>".to_owned()] };
        let mut daemon = vec![
            api::stream_info(stream),
            api::message_get(stream),
            api::stream_info(&bucket),
            api::message_get(&bucket),
            format!("$KV.{}.>", self.bucket),
            format!("{}.*", self.member_prefix()),
        ];
        if self.has_dead_letters() {
            daemon.extend([api::stream_info(dead), api::message_get(dead), format!("{dead_prefix}.>")]);
            // Rows that cannot be received are taken out of the stream once they are kept.
            daemon.push(api::message_delete(stream));
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
        if self.ack_policy == AckPolicy::None {
            daemon.push(api::stream_purge(stream));
        }
        for shard in self.shard_ids() {
            let consumer = self.consumer(shard);
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
        let mut operator = Vec::new();
        for config in self.stream_configs() {
            let name = &config.name;
            operator.extend([
                api::stream_info(name),
                format!("$JS.API.STREAM.CREATE.{name}"),
                format!("$JS.API.STREAM.UPDATE.{name}"),
            ]);
        }
        operator.push(format!("$JS.API.CONSUMER.NAMES.{stream}"));
        if self.has_dead_letters() {
            // Read, dropped, and put through the stream again.
            operator.extend([
                api::message_get(dead),
                api::message_delete(dead),
                format!("{}.*", self.prefix),
            ]);
        }
        for shard in self.shard_ids() {
            let consumer = self.consumer(shard);
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
                publish: Allow { allow: vec![format!("{}.*", self.prefix)] },
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
        let mut done = Vec::new();
        for config in self.stream_configs() {
            done.push(apply_stream(connection, &config, resharding).await?);
        }
        for shard in self.shard_ids() {
            done.push(apply_consumer(connection, &self.stream, &self.consumer_config(shard)).await?);
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
        let mut has_stream = false;
        for config in self.stream_configs() {
            let object = stream_object(&config.name);
            match find_stream(connection, &config.name).await.map_err(|error| failed(&object, &error))? {
                None => findings.push(missing(&object)),
                Some(info) => {
                    has_stream |= config.name == self.stream;
                    let desired = as_map(&config);
                    for difference in differences(&desired, &info.config) {
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
        if has_stream {
            for shard in self.shard_ids() {
                let config = self.consumer_config(shard);
                let object = consumer_object(&config.name);
                let info = find_consumer(connection, &self.stream, &config.name)
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
            findings.extend(self.stray_consumers(connection).await?);
        }
        findings.sort_by_key(|finding| finding.severity);
        Ok(findings)
    }

    /// Consumers named like ours, of shards that no longer are: their rows wait for nobody.
    async fn stray_consumers(&self, connection: &Connection) -> Result<Vec<Finding>, TopologyError> {
        #[derive(Deserialize)]
        struct Names {
            #[serde(default)]
            consumers: Option<Vec<String>>,
        }
        #[derive(Serialize)]
        struct Page {
            offset: usize,
        }
        const PAGES: usize = 64;
        let mut names = BTreeSet::new();
        for _ in 0..PAGES {
            let subject = format!("$JS.API.CONSUMER.NAMES.{}", self.stream);
            let page: Names = connection
                .call(&subject, &Page { offset: names.len() }, CALL_TIMEOUT)
                .await
                .map_err(|error| failed(&stream_object(&self.stream), &error))?;
            let before = names.len();
            names.extend(page.consumers.unwrap_or_default());
            if names.len() == before {
                break;
            }
        }
        let ours = format!("{}-", self.durable);
        let stray = names.iter().filter(|name| {
            name.strip_prefix(&ours)
                .and_then(|shard| shard.parse::<u32>().ok())
                .is_some_and(|shard| shard >= self.shards)
        });
        Ok(stray
            .map(|name| Finding {
                severity: Severity::Recommended,
                object: consumer_object(name),
                field: String::new(),
                problem: format!("a shard above the configured {}; nobody reads it", self.shards),
                fix: format!(
                    "make sure that its rows are written, then `nats consumer rm {} {name}`",
                    self.stream
                ),
            })
            .collect())
    }
}

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
    let desired = as_map(config);
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
    if let Some(transform) = differences.iter().find(|difference| difference.field == "subject_transform")
        && found.state.messages > 0
        && resharding == Resharding::Refuse
    {
        return Err(TopologyError::Reshard {
            object,
            messages: found.state.messages,
            from: shown("", &transform.is["dest"]),
            to: shown("", &transform.should["dest"]),
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
        let config = serde_json::to_value(topology.stream_config()).unwrap();
        assert_eq!(config["subjects"], serde_json::json!(["eu.ingest.*"]));
        assert_eq!(config["subject_transform"]["src"], "eu.ingest.*");
        assert_eq!(config["subject_transform"]["dest"], "eu.ingest.{{partition(4,1)}}.{{wildcard(1)}}");
        assert_eq!(config["retention"], "limits");
        assert_eq!(config["discard"], "new");
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
        assert_eq!(permissions.publisher.publish.allow, ["ingest.*"]);
        let acks = Topology { ack_policy: AckPolicy::Explicit, ..Topology::default() };
        let daemon = acks.permissions().daemon.publish.allow;
        for form in ["$JS.ACK.INGEST.holdfast-7.>", "$JS.ACK.*.*.INGEST.holdfast-7.>"] {
            assert!(daemon.iter().any(|subject| subject == form));
        }
        assert!(!daemon.iter().any(|subject| subject.contains("PURGE")));
    }
}
