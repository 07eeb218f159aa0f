//! The configuration: a TOML file, the environment, `--set`, in rising order of precedence.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use figment::providers::{Format, Toml};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use holdfast_clickhouse::{Compression, Demand, Secret, TableConfig, UnknownFields};
use holdfast_core::claims;
use holdfast_core::fence::Start;
use holdfast_core::lane::ParkingPolicy;
use holdfast_core::member::MemberId;
use holdfast_core::ports::delivery::Acks;
use holdfast_core::record::Session;
use holdfast_core::row::{Seq, TableName};
use holdfast_nats::connect::{Credentials, Options, Tls};
use holdfast_nats::topology::{AckPolicy, RetentionPolicy, Streams, Topology};
use serde::{Deserialize, Deserializer, de};

use crate::assembly::STALE;
use crate::exit::Exit;

/// Where the configuration is looked for if nobody names a file.
pub const DEFAULT_FILE: &str = "holdfast.toml";

/// Everything that can be configured. Every key is optional.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// This process.
    pub node: Node,
    /// The connection to NATS.
    pub nats: Nats,
    /// Stream, shards and bucket.
    pub topology: TopologySection,
    /// When batches are closed.
    pub batch: Batch,
    /// What the process may hold and do at once.
    pub limits: Limits,
    /// How daemons see each other.
    pub members: Members,
    /// The connection to ClickHouse.
    pub clickhouse: ClickHouse,
    /// What holds for tables with no section of their own.
    pub defaults: Table,
    /// Tables, by the token of their subject.
    pub tables: BTreeMap<String, Table>,
}

/// This process.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Node {
    /// Its name; by default host name and process id.
    pub id: String,
    /// Where health and status are served; empty: nowhere.
    pub listen: String,
}

impl Default for Node {
    fn default() -> Self {
        Self { id: String::new(), listen: "127.0.0.1:9464".into() }
    }
}

/// How daemons that share the work see each other.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Members {
    heartbeat: Span,
    lease: Span,
    probe: Span,
}

impl Members {
    /// Heartbeat, lease and probe.
    #[must_use]
    pub const fn times(&self) -> (Duration, Duration, Duration) {
        (self.heartbeat.0, self.lease.0, self.probe.0)
    }
}

impl Default for Members {
    fn default() -> Self {
        Self {
            heartbeat: Span(Duration::from_millis(500)),
            lease: Span(Duration::from_secs(5)),
            probe: Span(Duration::from_millis(200)),
        }
    }
}

/// The connection to NATS.
#[derive(Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Nats {
    #[serde(deserialize_with = "text")]
    url: String,
    credentials: Option<PathBuf>,
    #[serde(deserialize_with = "text")]
    user: String,
    #[serde(deserialize_with = "text")]
    password: String,
    password_file: Option<PathBuf>,
    #[serde(deserialize_with = "text")]
    token: String,
    token_file: Option<PathBuf>,
    #[serde(deserialize_with = "text")]
    nkey: String,
    nkey_file: Option<PathBuf>,
    tls: NatsTls,
}

/// Shows no secret.
impl fmt::Debug for Nats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nats").finish_non_exhaustive()
    }
}

impl Default for Nats {
    fn default() -> Self {
        Self {
            url: "nats://127.0.0.1:4222".into(),
            credentials: None,
            user: String::new(),
            password: String::new(),
            password_file: None,
            token: String::new(),
            token_file: None,
            nkey: String::new(),
            nkey_file: None,
            tls: NatsTls::default(),
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct NatsTls {
    ca: PathBuf,
    cert: PathBuf,
    key: PathBuf,
}

/// Stream, shards and bucket.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TopologySection {
    /// The stream.
    pub stream: String,
    #[serde(deserialize_with = "number")]
    streams: u32,
    start: String,
    /// What a daemon does when a shard's consumer is gone.
    pub on_lost_shard: OnLostShard,
    #[serde(deserialize_with = "number")]
    max_lanes: usize,
    prefix: String,
    /// How many shards.
    #[serde(deserialize_with = "number")]
    pub shards: u32,
    durable: String,
    bucket: String,
    dead_letters: String,
    unknown_tables: UnknownTables,
    pinned_ttl: Span,
    ack_policy: AckPolicy,
    ack_wait: Span,
    retention: RetentionPolicy,
    history: Span,
    max_bytes: Size,
    #[serde(deserialize_with = "number")]
    replicas: u32,
}

impl Default for TopologySection {
    fn default() -> Self {
        let topology = Topology::default();
        Self {
            stream: topology.stream,
            streams: topology.streams,
            start: String::new(),
            on_lost_shard: OnLostShard::Continue,
            max_lanes: 10_000,
            prefix: topology.prefix,
            shards: topology.shards,
            durable: topology.durable,
            bucket: topology.bucket,
            dead_letters: topology.dead_letters,
            unknown_tables: UnknownTables::Wait,
            pinned_ttl: Span(topology.pinned_ttl),
            ack_policy: topology.ack_policy,
            ack_wait: Span(topology.ack_wait),
            retention: topology.retention,
            history: Span(Duration::ZERO),
            max_bytes: Size(topology.max_bytes.unwrap_or_default()),
            replicas: topology.replicas,
        }
    }
}

impl TopologySection {
    /// The streams that hold the rows.
    #[must_use]
    pub fn streams(&self) -> Streams {
        Streams::new(&self.stream, self.streams)
    }
}

/// What a daemon does when a shard's consumer is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnLostShard {
    /// Its other shards run on.
    Continue,
    /// It exits with code 3.
    Exit,
}

/// What becomes of rows whose table does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum UnknownTables {
    Wait,
    DeadLetter,
}

/// When batches are closed.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Batch {
    #[serde(deserialize_with = "number")]
    max_rows: u32,
    max_bytes: Size,
    max_age: Span,
}

impl Default for Batch {
    fn default() -> Self {
        Self { max_rows: 50_000, max_bytes: Size(16 << 20), max_age: Span(Duration::from_secs(1)) }
    }
}

/// What the process may hold and do at once.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Rows held, over all shards.
    #[serde(deserialize_with = "number")]
    pub held_rows: u64,
    held_bytes: Size,
    #[serde(deserialize_with = "number")]
    inserts_in_flight: usize,
    max_row: Size,
    shutdown: Span,
    handover: Span,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            held_rows: 200_000,
            held_bytes: Size(512 << 20),
            inserts_in_flight: 8,
            max_row: Size(1 << 20),
            shutdown: Span(Duration::from_secs(25)),
            handover: Span(Duration::from_mins(1)),
        }
    }
}

/// The connection to ClickHouse.
#[derive(Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClickHouse {
    #[serde(deserialize_with = "text")]
    url: String,
    database: String,
    #[serde(deserialize_with = "text")]
    user: String,
    #[serde(deserialize_with = "text")]
    password: String,
    password_file: Option<PathBuf>,
    compression: String,
    insert_timeout: Span,
}

/// Shows no secret.
impl fmt::Debug for ClickHouse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClickHouse").finish_non_exhaustive()
    }
}

impl Default for ClickHouse {
    fn default() -> Self {
        Self {
            url: "http://127.0.0.1:8123".into(),
            database: "default".into(),
            user: "default".into(),
            password: String::new(),
            password_file: None,
            compression: "lz4".into(),
            insert_timeout: Span(Duration::from_mins(2)),
        }
    }
}

/// A table, or what holds for those with no section of their own.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Table {
    table: Option<String>,
    delivery: Option<String>,
    sequence_column: Option<String>,
    stream_column: Option<String>,
    format: Option<String>,
    unknown_fields: Option<String>,
    settings: BTreeMap<String, Text>,
}

/// A duration such as `10s` or `1m 30s`.
#[derive(Clone, Copy, Debug)]
struct Span(Duration);

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Text::deserialize(deserializer)?.0;
        humantime::parse_duration(&text).map(Self).map_err(|_| {
            de::Error::custom(format!("`{text}` is no duration; write for example 500ms, 10s or 2m"))
        })
    }
}

/// A size such as `16MiB`, in bytes.
#[derive(Clone, Copy, Debug)]
struct Size(u64);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Text::deserialize(deserializer)?.0;
        bytesize::ByteSize::from_str(&text).map(|size| Self(size.as_u64())).map_err(|_| {
            de::Error::custom(format!("`{text}` is no size; write for example 512KiB, 16MiB or 10GiB"))
        })
    }
}

/// A text; a bare number or truth value is taken as it is written.
#[derive(Clone, Debug)]
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Text;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a number")
            }
            fn visit_str<E>(self, text: &str) -> Result<Text, E> {
                Ok(Text(text.to_owned()))
            }
            fn visit_u64<E>(self, number: u64) -> Result<Text, E> {
                Ok(Text(number.to_string()))
            }
            fn visit_i64<E>(self, number: i64) -> Result<Text, E> {
                Ok(Text(number.to_string()))
            }
            fn visit_f64<E>(self, number: f64) -> Result<Text, E> {
                Ok(Text(number.to_string()))
            }
            fn visit_bool<E>(self, truth: bool) -> Result<Text, E> {
                Ok(Text(truth.to_string()))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// A text, also where it looks like a number: a password may.
fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Text::deserialize(deserializer).map(|text| text.0)
}

/// Environment and `--set` give texts; a file gives numbers.
fn number<'de, D: Deserializer<'de>, T: FromStr>(deserializer: D) -> Result<T, D::Error> {
    let text = Text::deserialize(deserializer)?.0;
    text.replace('_', "").parse().map_err(|_| {
        de::Error::custom(format!("`{text}` is no whole number in the range that is allowed here"))
    })
}

/// `a.b=c` pairs, every value a text.
struct Pairs {
    source: &'static str,
    pairs: Vec<(Vec<String>, String)>,
}

impl Provider for Pairs {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.source)
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        let mut root = Dict::new();
        for (path, value) in &self.pairs {
            set(&mut root, path, value);
        }
        Ok(Map::from([(Profile::Default, root)]))
    }
}

fn set(dict: &mut Dict, path: &[String], value: &str) {
    match path {
        [] => {}
        [key] => {
            dict.insert(key.clone(), Value::from(value));
        }
        [key, rest @ ..] => {
            let mut inner = match dict.remove(key) {
                Some(Value::Dict(_, inner)) => inner,
                _ => Dict::new(),
            };
            set(&mut inner, rest, value);
            dict.insert(key.clone(), Value::from(inner));
        }
    }
}

impl Config {
    /// Reads the configuration.
    ///
    /// # Errors
    /// One line that names the key and its place, with the nearest known key for an unknown one; code 2.
    pub fn load(file: Option<&Path>, sets: &[String]) -> Result<Self, Exit> {
        let mut figment = Figment::new();
        let default = Path::new(DEFAULT_FILE);
        match file {
            Some(file) => {
                // A file that was named must be there; figment would read a missing one as empty.
                let text = std::fs::read_to_string(file)
                    .map_err(|error| Exit::usage(format!("cannot read {}: {error}", file.display())))?;
                figment = figment.merge(Toml::string(&text));
            }
            None if default.exists() => figment = figment.merge(Toml::file_exact(default)),
            None => {}
        }
        let environment = std::env::vars_os()
            .filter_map(|(key, value)| {
                let (key, value) = (key.into_string().ok()?, value.into_string().ok()?);
                let key = key.strip_prefix("HOLDFAST_")?.to_ascii_lowercase();
                // Others (HOLDFAST_CACHE…) are not configuration.
                key.contains("__").then(|| (key.split("__").map(str::to_owned).collect(), value))
            })
            .collect();
        let pairs = sets
            .iter()
            .map(|set| {
                let (key, value) = set
                    .split_once('=')
                    .ok_or_else(|| Exit::usage(format!("--set {set}: write --set section.key=value")))?;
                Ok((
                    key.trim().split('.').map(str::to_owned).collect(),
                    value.trim().trim_matches('"').to_owned(),
                ))
            })
            .collect::<Result<_, Exit>>()?;
        let named = file.map_or(DEFAULT_FILE.to_owned(), |file| file.display().to_string());
        Self::extract(
            &figment
                .merge(Pairs { source: "the environment", pairs: environment })
                .merge(Pairs { source: "--set", pairs }),
            &named,
        )
    }

    /// Reads the configuration from a file's text alone.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn of_text(text: &str) -> Result<Self, Exit> {
        Self::extract(&Figment::from(Toml::string(text)), DEFAULT_FILE)
    }

    fn extract(figment: &Figment, named: &str) -> Result<Self, Exit> {
        let config: Self = figment.extract().map_err(|error| Exit::usage(explain(&error, named)))?;
        config.check()?;
        Ok(config)
    }

    /// What can be checked without a server.
    fn check(&self) -> Result<(), Exit> {
        self.topology()?;
        self.start()?;
        if self.topology.streams > 1 && matches!(self.start()?, Some(Start::Seq(_))) {
            return Err(Exit::usage(
                "topology.start: \"seq:N\" names a row of one stream, and there are several; write \"first\" or \
                 \"new\", or give each shard its start with `holdfast ledger rebase`",
            ));
        }
        if self.topology.unknown_tables == UnknownTables::DeadLetter && self.topology.dead_letters.is_empty()
        {
            return Err(Exit::usage(
                "topology.unknown_tables: \"dead-letter\" needs a stream for them; set topology.dead_letters",
            ));
        }
        if self.topology.ack_policy == AckPolicy::Explicit && !self.topology.history.0.is_zero() {
            return Err(Exit::usage(
                "topology.history: written rows are trimmed, and kept for a while, with ack_policy \"none\" only; \
                 with \"explicit\" the stream's own retention decides",
            ));
        }
        self.listen()?;
        if self.members.probe.0 > self.members.lease.0 {
            return Err(Exit::usage("members.lease: longer than members.probe"));
        }
        self.claims(Session(0))?;
        if self.limits.handover.0.is_zero() {
            return Err(Exit::usage("limits.handover: longer than zero"));
        }
        // An insert is one block, and a block has these limits: see the settings that are sent with it.
        if self.batch.max_rows > 10_000_000 || self.batch.max_bytes.0 > 2 << 30 {
            return Err(Exit::usage("batch: at most 10000000 rows and 2GiB, so that an insert is one block"));
        }
        for (key, value, least) in [
            ("batch.max_rows", u64::from(self.batch.max_rows), 1),
            ("batch.max_bytes", self.batch.max_bytes.0, 1),
            ("limits.held_rows", self.limits.held_rows, 1),
            ("limits.held_bytes", self.limits.held_bytes.0, 1 << 20),
            ("limits.inserts_in_flight", self.limits.inserts_in_flight as u64, 1),
            ("limits.max_row", self.limits.max_row.0, 1),
            ("topology.max_lanes", self.topology.max_lanes as u64, 1),
        ] {
            if value < least {
                return Err(Exit::usage(format!("{key}: {value} is too small, at least {least}")));
            }
        }
        if self.limits.shutdown.0 < Duration::from_secs(1) {
            return Err(Exit::usage("limits.shutdown: at least 1s, so that accepted rows can be written"));
        }
        self.clickhouse()?;
        Ok(())
    }

    /// How long a shard that is handed over may take to write what it holds.
    #[must_use]
    pub const fn handover(&self) -> Duration {
        self.limits.handover.0
    }

    /// A hash of what all daemons of a stream should have alike, in hexadecimal. No secret goes into it.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        let alike = format!(
            "{:?}{:?}{:?}{:?}{:?}",
            self.topology, self.batch, self.clickhouse, self.defaults, self.tables
        );
        format!("{:016x}", holdfast_core::mix::hash(alike.as_bytes()))
    }

    /// This process's name.
    #[must_use]
    pub fn node_id(&self) -> String {
        if !self.node.id.is_empty() {
            return self.node.id.clone();
        }
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        // Nobody chose it for us: what cannot be in a name is left out.
        let host: String = host.chars().filter(|c| c.is_ascii_alphanumeric() || "-_.".contains(*c)).collect();
        let host = if host.is_empty() { "node" } else { &host };
        format!("{host}-{}", std::process::id())
    }

    /// What the machine that shares the shards out needs to know.
    ///
    /// # Errors
    /// A name or times that it cannot work with; code 2.
    pub fn claims(&self, session: Session) -> Result<claims::Config, Exit> {
        let id = self.node_id();
        let id =
            MemberId::new(id.as_str()).map_err(|error| Exit::usage(format!("node.id: {id:?}: {error}")))?;
        let (heartbeat, lease, probe) = self.members.times();
        let machine = claims::Config {
            id,
            session,
            shards: self.topology.shards,
            heartbeat,
            lease,
            probe,
            rows: self.limits.held_rows,
            bytes: self.held_bytes(),
            software: crate::VERSION.to_owned(),
            fingerprint: self.fingerprint(),
        };
        match machine.defect() {
            Some(defect) => Err(Exit::usage(format!("members, or topology.shards: {defect}"))),
            None => Ok(machine),
        }
    }

    /// Where health, metrics and status are served; none: nowhere.
    ///
    /// # Errors
    /// A text that is no address; code 2.
    pub fn listen(&self) -> Result<Option<&str>, Exit> {
        let listen = self.node.listen.as_str();
        if listen.is_empty() {
            return Ok(None);
        }
        let port = listen.rsplit_once(':').filter(|(host, _)| !host.is_empty());
        match port.map(|(_, port)| port.parse::<u16>()) {
            Some(Ok(_)) => Ok(Some(listen)),
            _ => Err(Exit::usage(format!(
                "node.listen: `{listen}` is no address; write for example \"127.0.0.1:9464\", or \"\" for none"
            ))),
        }
    }

    /// Whether written rows are acknowledged, and what that does.
    #[must_use]
    pub const fn acks(&self) -> Acks {
        match (self.topology.ack_policy, self.topology.retention) {
            (AckPolicy::None, _) => Acks::None,
            (AckPolicy::Explicit, RetentionPolicy::Limits) => Acks::Explicit,
            (AckPolicy::Explicit, RetentionPolicy::WorkQueue) => Acks::WorkQueue,
        }
    }

    /// What becomes of rows that can never be stored.
    #[must_use]
    pub fn parking(&self) -> ParkingPolicy {
        ParkingPolicy {
            dead_letters: !self.topology.dead_letters.is_empty(),
            unknown_tables: self.topology.unknown_tables == UnknownTables::DeadLetter,
        }
    }

    /// The objects on the NATS server.
    ///
    /// # Errors
    /// An impossible value, named by its key; code 2.
    pub fn topology(&self) -> Result<Topology, Exit> {
        let section = &self.topology;
        let topology = Topology {
            stream: section.stream.clone(),
            streams: section.streams,
            prefix: section.prefix.clone(),
            shards: section.shards,
            durable: section.durable.clone(),
            bucket: section.bucket.clone(),
            dead_letters: section.dead_letters.clone(),
            pinned_ttl: section.pinned_ttl.0,
            ack_policy: section.ack_policy,
            ack_wait: section.ack_wait.0,
            retention: section.retention,
            max_bytes: (section.max_bytes.0 > 0).then_some(section.max_bytes.0),
            replicas: section.replicas,
        };
        topology.validate().map_err(Exit::usage)?;
        Ok(topology)
    }

    /// Where a shard without a record begins, if somebody said so.
    ///
    /// # Errors
    /// A text that names no place; code 2.
    pub fn start(&self) -> Result<Option<Start>, Exit> {
        match self.topology.start.as_str() {
            "" => Ok(None),
            "first" => Ok(Some(Start::First)),
            "new" => Ok(Some(Start::New)),
            other => other
                .strip_prefix("seq:")
                .and_then(|seq| seq.parse().ok())
                .map(|seq| Some(Start::Seq(Seq(seq))))
                .ok_or_else(|| {
                    Exit::usage(format!(
                        "topology.start: `{other}` names no place; write \"first\", \"new\" or \"seq:N\""
                    ))
                }),
        }
    }

    /// How to connect to NATS.
    ///
    /// # Errors
    /// A secret's file that cannot be read; code 2.
    pub fn nats(&self) -> Result<Options, Exit> {
        let nats = &self.nats;
        let password = secret("nats.password", &nats.password, nats.password_file.as_deref())?;
        let token = secret("nats.token", &nats.token, nats.token_file.as_deref())?;
        let nkey = secret("nats.nkey", &nats.nkey, nats.nkey_file.as_deref())?;
        let credentials = if let Some(file) = &nats.credentials {
            Credentials::File(file.clone())
        } else if !nats.user.is_empty() {
            Credentials::Password { user: nats.user.clone(), password }
        } else if !token.is_empty() {
            Credentials::Token(token)
        } else if !nkey.is_empty() {
            Credentials::Nkey(nkey)
        } else {
            Credentials::None
        };
        let some = |path: &PathBuf| (!path.as_os_str().is_empty()).then(|| path.clone());
        let client = match (some(&nats.tls.cert), some(&nats.tls.key)) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => return Err(Exit::usage("nats.tls: cert and key go together")),
        };
        let mut options = Options::new(nats.url.clone(), self.node_id());
        options.credentials = credentials;
        options.tls = Tls { ca: some(&nats.tls.ca), client };
        options.timeout = Duration::from_secs(5);
        Ok(options)
    }

    /// How to use ClickHouse.
    ///
    /// # Errors
    /// An impossible value or a secret's file that cannot be read; code 2.
    pub fn clickhouse(&self) -> Result<holdfast_clickhouse::Config, Exit> {
        let section = &self.clickhouse;
        let password = secret("clickhouse.password", &section.password, section.password_file.as_deref())?;
        let defaults = table("defaults", &self.defaults, &TableConfig::default())?;
        if defaults.target.is_some() {
            return Err(Exit::usage("defaults.table: a table has a name of its own; set it in [tables.…]"));
        }
        let tables = self
            .tables
            .iter()
            .map(|(name, section)| {
                Ok((TableName::new(name.as_str()), table(&format!("tables.{name}"), section, &defaults)?))
            })
            .collect::<Result<_, Exit>>()?;
        let config = holdfast_clickhouse::Config {
            url: section.url.clone(),
            database: section.database.clone(),
            user: section.user.clone(),
            password: Secret::new(password),
            compression: Compression::from_str(&section.compression)
                .map_err(|error| Exit::usage(format!("clickhouse.{error}")))?,
            insert_timeout: section.insert_timeout.0,
            batch_age: self.batch.max_age.0,
            intent_age: STALE,
            inserts_in_flight: self.limits.inserts_in_flight,
            max_row: usize::try_from(self.limits.max_row.0).unwrap_or(usize::MAX),
            defaults,
            tables,
            ..holdfast_clickhouse::Config::default()
        };
        let clock: holdfast_clickhouse::Clock = std::sync::Arc::new(|| holdfast_core::time::Instant::START);
        holdfast_clickhouse::Store::new(config.clone(), clock).map_err(Exit::usage)?;
        Ok(config)
    }

    /// When a batch is closed.
    #[must_use]
    pub fn batch(&self) -> holdfast_core::batch::Limits {
        holdfast_core::batch::Limits {
            max_rows: self.batch.max_rows,
            max_bytes: self.batch.max_bytes.0,
            max_age: self.batch.max_age.0,
        }
    }

    /// Tables at work at once in one shard.
    #[must_use]
    pub const fn max_lanes(&self) -> usize {
        self.topology.max_lanes
    }

    /// How long written rows stay in the stream.
    #[must_use]
    pub const fn history(&self) -> Duration {
        self.topology.history.0
    }

    /// Bytes held, over all shards.
    #[must_use]
    pub const fn held_bytes(&self) -> u64 {
        self.limits.held_bytes.0
    }

    /// How long a clean stop may take.
    #[must_use]
    pub const fn shutdown(&self) -> Duration {
        self.limits.shutdown.0
    }

    /// How long an insert may take.
    #[must_use]
    pub const fn insert_timeout(&self) -> Duration {
        self.clickhouse.insert_timeout.0
    }
}

fn table(key: &str, section: &Table, base: &TableConfig) -> Result<TableConfig, Exit> {
    let bad = |error: &dyn fmt::Display| Exit::usage(format!("{key}.{error}"));
    if let Some(format) = &section.format
        && format != "JSONEachRow"
    {
        return Err(Exit::usage(format!("{key}.format: `{format}` is not known; only \"JSONEachRow\" is")));
    }
    let mut settings = base.settings.clone();
    settings.extend(section.settings.iter().map(|(name, value)| (name.clone(), value.0.clone())));
    Ok(TableConfig {
        target: section.table.clone(),
        delivery: match &section.delivery {
            Some(text) => Demand::from_str(text).map_err(|error| bad(&error))?,
            None => base.delivery,
        },
        sequence_column: section.sequence_column.clone().unwrap_or_else(|| base.sequence_column.clone()),
        stream_column: section.stream_column.clone().unwrap_or_else(|| base.stream_column.clone()),
        unknown_fields: match &section.unknown_fields {
            Some(text) => UnknownFields::from_str(text).map_err(|error| bad(&error))?,
            None => base.unknown_fields,
        },
        settings,
    })
}

fn secret(key: &str, given: &str, file: Option<&Path>) -> Result<String, Exit> {
    match file {
        None => Ok(given.to_owned()),
        Some(_) if !given.is_empty() => {
            Err(Exit::usage(format!("{key} and {key}_file are both set; keep one")))
        }
        Some(path) => std::fs::read_to_string(path)
            .map(|text| text.trim_end_matches(['\r', '\n']).to_owned())
            .map_err(|error| Exit::usage(format!("{key}_file: cannot read {}: {error}", path.display()))),
    }
}

/// One line for a person: which key, where, and what would be right.
fn explain(error: &figment::Error, file: &str) -> String {
    let Some(error) = error.clone().into_iter().next() else { return error.to_string() };
    let source = error.metadata.as_ref().map_or(file, |metadata| match &*metadata.name {
        "the environment" => "the environment",
        "--set" => "--set",
        _ => file,
    });
    let path = error.path.join(".");
    match &error.kind {
        figment::error::Kind::UnknownField(field, known) => {
            // figment's path of an unknown key ends in the key, or in the table that holds it.
            let table = path.strip_suffix(field.as_str()).unwrap_or(&path).trim_end_matches('.');
            let prefix = if table.is_empty() { String::new() } else { format!("{table}.") };
            let nearest = known
                .iter()
                .map(|known| (strsim::damerau_levenshtein(field, known), known))
                .min()
                .filter(|(distance, known)| *distance <= known.len().max(3) / 2 + 1);
            match nearest {
                Some((_, nearest)) => {
                    format!("{source}: unknown key `{prefix}{field}`; did you mean `{prefix}{nearest}`?")
                }
                None => format!("{source}: unknown key `{prefix}{field}`; known are {}", known.join(", ")),
            }
        }
        // The parser shows the line itself, which may hold a secret.
        figment::error::Kind::Message(words) if words.contains('\n') => {
            let words: Vec<_> =
                words.lines().filter(|line| !line.contains('|') && !line.trim().is_empty()).collect();
            format!("{source}: {}", words.join(": "))
        }
        kind if path.is_empty() => format!("{source}: {kind}"),
        kind => format!("{source}: {path}: {kind}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Config, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Config::load(Some(file.path()), &[])
            .map_err(|exit| exit.message().unwrap().replace(&file.path().display().to_string(), "FILE"))
    }

    #[test]
    fn nothing_configured_is_the_documented_default() {
        let config = load("").unwrap();
        assert_eq!(config.topology().unwrap(), Topology::default());
        assert_eq!(config.batch().max_rows, 50_000);
        assert_eq!(config.held_bytes(), 512 << 20);
        assert_eq!(config.shutdown(), Duration::from_secs(25));
    }

    #[test]
    fn a_misspelt_key_is_named_with_the_nearest_known_one() {
        assert_eq!(
            load("[topology]\nstraem = \"X\"").unwrap_err(),
            "FILE: unknown key `topology.straem`; did you mean `topology.stream`?"
        );
        assert_eq!(
            load("[tables.clicks]\ndelivry = \"best\"").unwrap_err(),
            "FILE: unknown key `tables.clicks.delivry`; did you mean `tables.clicks.delivery`?"
        );
        assert_eq!(load("[nat]\nurl = \"x\"").unwrap_err(), "FILE: unknown key `nat`; did you mean `nats`?");
    }

    #[test]
    fn a_wrong_value_is_named_with_what_would_be_right() {
        let error = load("[batch]\nmax_age = \"soon\"").unwrap_err();
        assert_eq!(error, "FILE: batch.max_age: `soon` is no duration; write for example 500ms, 10s or 2m");
        assert!(load("[topology]\nstart = \"middle\"").unwrap_err().contains("\"first\""));
        assert!(load("[topology]\nshards = -1").unwrap_err().contains("topology.shards"));
        assert!(load("[clickhouse]\ncompression = \"zip\"").unwrap_err().contains("lz4"));
        assert!(load("[tables.a]\nformat = \"CSV\"").unwrap_err().contains("JSONEachRow"));
    }

    #[test]
    fn set_overrides_the_file_and_numbers_may_be_texts() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "[topology]\nshards = 4\n[tables.a]\nsettings = { x = 1 }").unwrap();
        let sets = ["topology.shards=16".to_owned(), "limits.held_rows=1_000".to_owned()];
        let config =
            Config::load(Some(file.path()), &sets).map_err(|exit| exit.message().map(str::to_owned)).unwrap();
        assert_eq!((config.topology.shards, config.limits.held_rows), (16, 1_000));
    }

    #[test]
    fn secrets_are_not_shown() {
        let config =
            load("[nats]\nuser = \"u\"\npassword = \"hunter2\"\n[clickhouse]\npassword = \"hunter2\"")
                .unwrap();
        assert!(!format!("{config:?} {:?} {:?}", config.nats(), config.clickhouse()).contains("hunter2"));
    }

    #[test]
    fn a_line_with_a_secret_is_not_shown() {
        for text in [
            "[nats]\npassword = hunter2",
            "[nats]\npassword = [\"hunter2\"]",
            "[nats]\npassword = hunter2 = 3",
        ] {
            let error = load(text).unwrap_err();
            assert!(!error.contains("hunter2") && error.lines().count() == 1, "{error}");
        }
        assert!(load("[nats]\nuser = \"u\"\npassword = 12345").is_ok());
    }

    #[test]
    fn acks_need_an_ack_policy_and_are_trimmed_by_nobody() {
        let acks = |text: &str| load(text).map(|config| config.acks());
        assert_eq!(acks(""), Ok(Acks::None));
        assert_eq!(acks("[topology]\nack_policy = \"explicit\""), Ok(Acks::Explicit));
        let queue = "[topology]\nack_policy = \"explicit\"\nretention = \"workqueue\"\nack_wait = \"10m\"";
        assert_eq!(acks(queue), Ok(Acks::WorkQueue));
        assert_eq!(load(queue).unwrap().topology().unwrap().ack_wait, Duration::from_mins(10));
        let error = acks("[topology]\nretention = \"workqueue\"").unwrap_err();
        assert!(error.contains("explicit"), "{error}");
        let error = acks("[topology]\nack_policy = \"explicit\"\nhistory = \"1h\"").unwrap_err();
        assert!(error.starts_with("topology.history"), "{error}");
    }

    #[test]
    fn what_becomes_of_bad_rows_is_said_once() {
        let parking = |text: &str| load(text).map(|config| config.parking());
        let kept = ParkingPolicy { dead_letters: true, unknown_tables: false };
        assert_eq!(parking(""), Ok(kept));
        assert_eq!(parking("[topology]\ndead_letters = \"\""), Ok(ParkingPolicy::default()));
        assert_eq!(
            parking("[topology]\nunknown_tables = \"dead-letter\""),
            Ok(ParkingPolicy { unknown_tables: true, ..kept })
        );
        let error = parking("[topology]\nunknown_tables = \"dead-letter\"\ndead_letters = \"\"").unwrap_err();
        assert!(error.contains("topology.dead_letters"), "{error}");
    }

    #[test]
    fn an_address_to_listen_on_has_a_port() {
        for good in ["127.0.0.1:9464", "[::1]:9464", "localhost:0", "0.0.0.0:80"] {
            let config = load(&format!("[node]\nlisten = \"{good}\"")).unwrap();
            assert_eq!(config.listen().ok().flatten(), Some(good));
        }
        assert_eq!(load("[node]\nlisten = \"\"").unwrap().listen().ok(), Some(None));
        for bad in ["9464", ":9464", "127.0.0.1", "127.0.0.1:99999", "http://x", r"two\nlines"] {
            let error = load(&format!("[node]\nlisten = \"{bad}\"")).unwrap_err();
            assert!(error.starts_with("node.listen") && error.contains(bad), "{error}");
        }
    }

    #[test]
    fn members_have_a_name_and_times_that_can_work() {
        let members = |text: &str| load(&format!("[members]\n{text}")).unwrap_err();
        assert!(members("heartbeat = \"2s\"").contains("at least four heartbeats"));
        assert!(members("heartbeat = \"0s\"").contains("longer than nothing"));
        assert!(members("probe = \"6s\"").starts_with("members.lease"));
        assert!(load("[members]\nheartbeat = \"1s\"\nlease = \"4s\"").is_ok());
        assert!(load("[node]\nid = \"a b\"").unwrap_err().starts_with("node.id: \"a b\""));
        assert!(load("[node]\nid = \"ingest-1\"").is_ok());
    }

    #[test]
    fn a_file_that_was_named_must_be_there() {
        let error = Config::load(Some(Path::new("no-such.toml")), &[]).unwrap_err();
        assert!(error.message().unwrap().starts_with("cannot read no-such.toml"));
    }
}
