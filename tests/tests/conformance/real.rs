//! The bench of the real servers: one nats-server and one ClickHouse for all scripts; each script has a stream, a
//! bucket and tables of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant as Moment};

use async_nats::Subscriber;
use async_nats::client::RequestErrorKind;
use async_trait::async_trait;
use bytes::Bytes;
use holdfast_clickhouse::{Config, Store};
use holdfast_core::member::MemberId;
use holdfast_core::ports::store::{Level, Target};
use holdfast_core::ports::{delivery, members};
use holdfast_core::record::Session;
use holdfast_core::row::{Seq, ShardId, TableName, Verdict};
use holdfast_core::time::Instant;
use holdfast_nats::Connection;
use holdfast_nats::connect::Options;
use holdfast_nats::dead_letters::DeadLetters;
use holdfast_nats::delivery::Delivery;
use holdfast_nats::ledger::Ledger;
use holdfast_nats::letters::Letters;
use holdfast_nats::members::{Meeting, Members};
use holdfast_nats::publish::{self, Publisher};
use holdfast_nats::retention::Retention;
use holdfast_nats::topology::{AckPolicy, Resharding, RetentionPolicy, Topology};
use holdfast_testbed::clickhouse::Obstacle;
use holdfast_testbed::{ClickHouse, NatsCluster, NatsServer};
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::OnceCell;

use crate::bench::{Bench, Client, PROBE, Result};
use crate::script::{Acks, Setup};

const SHARD: ShardId = ShardId(0);
const SOON: Duration = Duration::from_secs(20);

/// The servers.
pub(crate) struct Servers {
    nats: Arc<Mutex<NatsServer>>,
    /// Three nodes, started when a script wants them.
    cluster: OnceCell<NatsCluster>,
    clickhouse: Arc<Mutex<ClickHouse>>,
    scripts: AtomicU32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does what blocks elsewhere.
async fn aside<T: Send + 'static, E: std::fmt::Display + Send + 'static>(
    what: impl FnOnce() -> std::result::Result<T, E> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(what).await.map_err(|error| error.to_string())?;
    done.map_err(|error| error.to_string())
}

fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Servers {
    pub(crate) async fn start() -> Result<Self> {
        let (nats, clickhouse) = tokio::try_join!(aside(NatsServer::start), aside(ClickHouse::start))?;
        let nats = Arc::new(Mutex::new(nats));
        Ok(Self {
            nats,
            cluster: OnceCell::new(),
            clickhouse: Arc::new(Mutex::new(clickhouse)),
            scripts: AtomicU32::new(0),
        })
    }

    /// What a script needs, made fresh.
    pub(crate) async fn bench(&self, setup: &Setup) -> Result<Real> {
        let number = self.scripts.fetch_add(1, Ordering::Relaxed);
        let topology = Topology {
            stream: format!("S{number}"),
            prefix: format!("s{number}"),
            shards: 1,
            bucket: format!("B{number}"),
            dead_letters: format!("S{number}_DEAD"),
            pinned_ttl: setup.pinned_ttl,
            ack_policy: if setup.acks == Acks::None { AckPolicy::None } else { AckPolicy::Explicit },
            ack_wait: setup.ack_wait,
            retention: match setup.acks {
                Acks::WorkQueue => RetentionPolicy::WorkQueue,
                _ => RetentionPolicy::Limits,
            },
            max_bytes: None,
            replicas: setup.replicas,
            ..Topology::default()
        };
        let url = if setup.replicas > 1 {
            let nodes = usize::try_from(setup.replicas).map_err(words)?;
            self.cluster.get_or_try_init(|| aside(move || NatsCluster::start(nodes))).await?.url()
        } else {
            lock(&self.nats).url()
        };
        let operator = Connection::open(&Options::new(&url, "operator")).await.map_err(words)?;
        topology.apply(&operator, Resharding::Refuse).await.map_err(words)?;
        let bench = Real {
            nats: Arc::clone(&self.nats),
            clickhouse: Arc::clone(&self.clickhouse),
            url,
            topology,
            operator,
            number,
            clients: Mutex::default(),
            partitions: setup
                .tables
                .iter()
                .map(|table| (format!("s{number}_{}", table.name), table.partitions))
                .collect(),
            spoilt: Mutex::default(),
            obstacles: Mutex::default(),
            kept: tempfile::tempdir().map_err(words)?,
            started: Moment::now(),
        };
        if let Some(rows) = setup.max_ack_pending {
            let mut config = serde_json::to_value(bench.topology.consumer_config(SHARD)).map_err(words)?;
            config["max_ack_pending"] = rows.into();
            let (stream, consumer) = (&bench.topology.stream, bench.topology.consumer(SHARD));
            let request = json!({ "stream_name": stream, "config": config });
            bench.api(&format!("CONSUMER.DURABLE.CREATE.{stream}.{consumer}"), &request).await?;
        }
        for table in &setup.tables {
            let name = bench.table(&table.name);
            let columns = if table.columns { "_seq UInt64, _stream UInt64, " } else { "" };
            let partition = match table.partitions {
                1 => String::new(),
                partitions => format!("PARTITION BY n % {partitions} "),
            };
            let window = match table.window {
                0 => String::new(),
                window => format!(" SETTINGS non_replicated_deduplication_window = {window}"),
            };
            bench
                .sql(format!(
                    "CREATE TABLE {name} ({columns}n UInt64) ENGINE = MergeTree {partition}ORDER BY tuple(){window}"
                ))
                .await?;
        }
        Ok(bench)
    }
}

/// A client's connections, and a subscription of each by which the server can be asked whether it is there.
type Links = Vec<(Connection, Subscriber)>;

/// One script's part of the servers.
pub(crate) struct Real {
    nats: Arc<Mutex<NatsServer>>,
    clickhouse: Arc<Mutex<ClickHouse>>,
    url: String,
    topology: Topology,
    operator: Connection,
    number: u32,
    clients: Mutex<BTreeMap<String, Links>>,
    /// Into how many partitions the tables' rows fall.
    partitions: BTreeMap<String, u64>,
    spoilt: Mutex<BTreeSet<u64>>,
    obstacles: Mutex<Vec<Obstacle>>,
    /// A state of the stream's.
    kept: TempDir,
    started: Moment,
}

impl Real {
    async fn api(&self, what: &str, body: &serde_json::Value) -> Result<serde_json::Value> {
        let subject = format!("$JS.API.{what}");
        let answer = self.operator.client().request(subject, body.to_string().into()).await.map_err(words)?;
        let answer: serde_json::Value = serde_json::from_slice(&answer.payload).map_err(words)?;
        if answer.get("error").is_some() { Err(answer["error"].to_string()) } else { Ok(answer) }
    }

    async fn sql(&self, text: String) -> Result<String> {
        let sql = lock(&self.clickhouse).sql();
        aside(move || sql.query(&text)).await
    }

    fn presence(&self, client: &str) -> String {
        format!("presence.{}.{client}", self.number)
    }

    async fn open(&self, client: &str) -> Result<Connection> {
        let connection = Connection::open(&Options::new(&self.url, client)).await.map_err(words)?;
        let presence = connection.client().subscribe(self.presence(client)).await.map_err(words)?;
        lock(&self.clients).entry(client.to_owned()).or_default().push((connection.clone(), presence));
        Ok(connection)
    }

    fn clock(&self) -> impl Fn() -> Instant + Send + Sync + use<> {
        let started = self.started;
        move || Instant::at(started.elapsed())
    }

    /// Waits until every client has its connection again.
    async fn connected_again(&self) -> Result<()> {
        let clients: Vec<Connection> =
            lock(&self.clients).values().flatten().map(|(connection, _)| connection.clone()).collect();
        let until = Until::new("every client is connected again");
        for connection in clients.iter().chain([&self.operator]) {
            // By an answer, since a client may not know yet that its connection broke.
            while until.ask(connection.client(), "$JS.API.INFO".to_owned()).await != Some(Ok(())) {
                until.pause().await?;
            }
        }
        Ok(())
    }

    async fn apply(&self) -> Result<()> {
        self.topology.apply(&self.operator, Resharding::Refuse).await.map(drop).map_err(words)
    }
}

/// Where a stream is in nats-server's store.
fn stream_folder(nats: &NatsServer, stream: &str) -> PathBuf {
    nats.folder().join("store/jetstream/$G/streams").join(stream)
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Asks the server something until it has done what it does by itself: `Ok(true)`.
struct Until {
    what: &'static str,
    begun: Moment,
}

impl Until {
    fn new(what: &'static str) -> Self {
        Self { what, begun: Moment::now() }
    }

    /// What the server answers; none if it does not, or not soon.
    async fn ask(
        &self,
        client: async_nats::Client,
        subject: String,
    ) -> Option<std::result::Result<(), RequestErrorKind>> {
        let asked = client.request(subject, Bytes::new());
        let answer = tokio::time::timeout(Duration::from_millis(200), asked).await.ok()?;
        Some(answer.map(drop).map_err(|error| error.kind()))
    }

    async fn pause(&self) -> Result<()> {
        if self.begun.elapsed() > SOON {
            return Err(format!("{}: not within {SOON:?}", self.what));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        Ok(())
    }
}

#[async_trait]
impl Bench for Real {
    async fn connect(&self, name: &str, sink: delivery::Sink) -> Result<Client> {
        let connection = self.open(name).await?;
        let source = self.topology.source(SHARD, Duration::from_secs(1));
        let delivery = Delivery::new(connection.clone(), source, sink, Arc::new(|_, _| Verdict::Good));
        let (stream, bucket) = (&self.topology.stream, &self.topology.bucket);
        let config = Config { url: lock(&self.clickhouse).url(), ..Config::default() };
        Ok(Client {
            delivery: Arc::new(delivery),
            retention: Arc::new(Retention::new(connection.clone(), stream)),
            ledger: Arc::new(Ledger::new(connection.clone(), bucket, stream)),
            letters: Arc::new(DeadLetters::new(connection, &self.topology, Arc::new(self.clock()))),
            store: Arc::new(Store::new(config, Arc::new(self.clock())).map_err(words)?),
        })
    }

    async fn join(
        &self,
        client: &str,
        member: MemberId,
        sink: members::Sink,
        runtime: &tokio::runtime::Handle,
    ) -> Result<Arc<dyn members::Port>> {
        let meeting = Meeting {
            bucket: self.topology.bucket.clone(),
            stream: self.topology.stream.clone(),
            member,
            session: Session(1),
            probe: PROBE,
        };
        // Everything of the member's lives on its own runtime, the connection too.
        let options = Options::new(&self.url, client);
        let presence = self.presence(client);
        let joined = runtime.spawn(async move {
            let connection = Connection::open(&options).await.map_err(words)?;
            let presence = connection.client().subscribe(presence).await.map_err(words)?;
            let member = Members::start(connection.clone(), meeting, sink, Arc::new(|_| {})).await;
            Ok::<_, String>((connection, presence, member.map_err(words)?))
        });
        let (connection, presence, member) = joined.await.map_err(words)??;
        lock(&self.clients).entry(client.to_owned()).or_default().push((connection, presence));
        Ok(Arc::new(member))
    }

    async fn kill(&self, client: &str) -> Result<()> {
        drop(lock(&self.clients).remove(client));
        let until = Until::new("the server notes that the client is gone");
        // One that is still there does not answer.
        while until.ask(self.operator.client(), self.presence(client)).await
            != Some(Err(RequestErrorKind::NoResponders))
        {
            until.pause().await?;
        }
        Ok(())
    }

    async fn publish(&self, rows: u64, size: usize) -> Result<Seq> {
        let options = publish::Options::default();
        let (stream, prefix) = (&self.topology.stream, &self.topology.prefix);
        let mut publisher = Publisher::new(self.operator.clone(), stream, prefix, options);
        for _ in 0..rows {
            publisher.publish("t", Bytes::from(vec![b'x'; size])).await.map_err(words)?;
        }
        publisher.flush().await.map_err(words)?;
        publisher.take_receipts().last().map(|receipt| receipt.seq).ok_or_else(|| "no rows".to_owned())
    }

    async fn remove(&self, rows: &[u64]) -> Result<()> {
        for row in rows {
            let request = json!({ "seq": row, "no_erase": true });
            self.api(&format!("STREAM.MSG.DELETE.{}", self.topology.stream), &request).await?;
        }
        Ok(())
    }

    async fn delete_consumer(&self) -> Result<()> {
        let what = format!("CONSUMER.DELETE.{}.{}", self.topology.stream, self.topology.consumer(SHARD));
        self.api(&what, &json!({})).await.map(drop)
    }

    async fn create_consumer(&self) -> Result<()> {
        self.apply().await
    }

    async fn make_stream_anew(&self) -> Result<()> {
        self.api(&format!("STREAM.DELETE.{}", self.topology.stream), &json!({})).await?;
        self.apply().await
    }

    async fn unacked(&self) -> Result<u64> {
        let what = format!("CONSUMER.INFO.{}.{}", self.topology.stream, self.topology.consumer(SHARD));
        let info = self.api(&what, &json!({})).await?;
        info["num_ack_pending"].as_u64().ok_or_else(|| info.to_string())
    }

    async fn letters(&self) -> Result<u64> {
        Letters::new(self.operator.clone(), &self.topology).count().await.map_err(words)
    }

    async fn delete_letters(&self) -> Result<()> {
        self.api(&format!("STREAM.DELETE.{}", self.topology.dead_letters), &json!({})).await.map(drop)
    }

    async fn fill_letters(&self) -> Result<()> {
        let mut config = serde_json::to_value(self.topology.dead_letters_config()).map_err(words)?;
        config["max_msgs"] = self.letters().await?.into();
        self.api(&format!("STREAM.UPDATE.{}", self.topology.dead_letters), &config).await.map(drop)
    }

    async fn keep_state(&self) -> Result<()> {
        let (nats, stream, kept) =
            (Arc::clone(&self.nats), self.topology.stream.clone(), self.kept.path().to_owned());
        aside(move || {
            let mut nats = lock(&nats);
            nats.stop().map_err(words)?;
            copy(&stream_folder(&nats, &stream), &kept).map_err(words)?;
            nats.restart().map_err(words)
        })
        .await?;
        self.connected_again().await
    }

    async fn lose_tail(&self) -> Result<()> {
        let (nats, stream, kept) =
            (Arc::clone(&self.nats), self.topology.stream.clone(), self.kept.path().to_owned());
        aside(move || {
            let mut nats = lock(&nats);
            nats.kill().map_err(words)?;
            let folder = stream_folder(&nats, &stream);
            std::fs::remove_dir_all(&folder).map_err(words)?;
            copy(&kept, &folder).map_err(words)?;
            nats.restart().map_err(words)
        })
        .await?;
        self.connected_again().await
    }

    async fn move_leader(&self) -> Result<()> {
        let (stream, consumer) = (&self.topology.stream, self.topology.consumer(SHARD));
        let what = format!("CONSUMER.LEADER.STEPDOWN.{stream}.{consumer}");
        self.api(&what, &json!({})).await?;
        let until = Until::new("the consumer has a leader");
        while self.unacked().await.is_err() {
            until.pause().await?;
        }
        Ok(())
    }

    async fn restart_broker(&self) -> Result<()> {
        let nats = Arc::clone(&self.nats);
        aside(move || lock(&nats).restart()).await?;
        self.connected_again().await
    }

    fn table(&self, name: &str) -> TableName {
        TableName::new(format!("s{}_{name}", self.number))
    }

    fn target(&self, name: &str, level: Level) -> Target {
        Target { database: "default".into(), table: self.table(name).as_str().into(), level }
    }

    fn payload(&self, number: u64) -> Bytes {
        let unknown = if lock(&self.spoilt).contains(&number) { r#","x":1"# } else { "" };
        format!(r#"{{"n":{number}{unknown}}}"#).into()
    }

    fn spoil(&self, number: u64) {
        lock(&self.spoilt).insert(number);
    }

    async fn mend(&self, table: &str) -> Result<()> {
        self.sql(format!("ALTER TABLE {} ADD COLUMN x UInt8", self.table(table))).await.map(drop)
    }

    async fn burn(&self, table: &str, partition: Option<u64>) -> Result<()> {
        let (clickhouse, table) = (Arc::clone(&self.clickhouse), self.table(table));
        let partition = partition.map_or_else(|| "all".to_owned(), |partition| partition.to_string());
        // The part's number is one of those that the insert takes, and those that follow are to be free.
        let parts = self.partitions.get(table.as_str()).copied().unwrap_or(1);
        let obstacle =
            aside(move || lock(&clickhouse).obstruct(table.as_str(), &partition, 0..parts)).await?;
        lock(&self.obstacles).push(obstacle);
        Ok(())
    }

    async fn slow(&self, table: &str) -> Result<()> {
        // A constraint is looked at before anything is written; a view would take its time afterwards.
        let table = self.table(table);
        self.sql(format!("ALTER TABLE {table} ADD CONSTRAINT slow CHECK sleep(1) = 0")).await.map(drop)
    }

    async fn inserting(&self, table: &str) -> Result<u64> {
        let table = self.table(table);
        let running = "SELECT count() FROM system.processes WHERE query_kind = 'Insert'";
        let count = self.sql(format!("{running} AND position(query, '{table}') > 0")).await?;
        count.trim().parse().map_err(words)
    }

    async fn contents(&self, table: &str) -> Result<Vec<u64>> {
        let table = self.table(table);
        let text = self.sql(format!("SELECT n FROM {table} SETTINGS max_threads = 1")).await?;
        text.lines().map(|line| line.parse().map_err(words)).collect()
    }

    async fn restart_store(&self) -> Result<()> {
        let clickhouse = Arc::clone(&self.clickhouse);
        aside(move || lock(&clickhouse).restart()).await
    }
}
