//! The bench of the models: the simulator's own, in real time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use holdfast_core::member::MemberId;
use holdfast_core::ports::store::{Insert, Level, Target};
use holdfast_core::ports::{delivery, members};
use holdfast_core::row::{Seq, ShardId, TableName, Verdict};
use holdfast_core::time::{Instant, Timestamp};
use holdfast_sim::clickhouse::{Fate, TableSpec, Unfit};
use holdfast_sim::embedded::{Clock, Delivery, Process, Server, Settings};
use holdfast_sim::jetstream::{AckPolicy, Message, payload};

use crate::bench::{Bench, Client, PROBE, Result};
use crate::script::{Acks, Setup};

/// Partitions of a block that ClickHouse takes unless it is told otherwise.
const MAX_PARTITIONS: usize = 100;

const SHARD: ShardId = ShardId(0);

/// What becomes of inserts, by table.
#[derive(Default)]
struct Fates {
    /// The next one fails at this part.
    burns: BTreeMap<TableName, usize>,
    slow: Vec<TableName>,
}

pub(crate) struct Models {
    server: Server,
    processes: Mutex<BTreeMap<String, Process>>,
    links: Mutex<BTreeMap<String, Arc<Delivery>>>,
    fates: Arc<Mutex<Fates>>,
    /// The stream's last row when its state was kept.
    kept: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn clock() -> Clock {
    Arc::new(|| Instant::START)
}

impl Models {
    pub(crate) fn start(setup: &Setup) -> Result<Self> {
        let fates = Arc::new(Mutex::new(Fates::default()));
        let decides = Arc::clone(&fates);
        let acks = match setup.acks {
            Acks::None => delivery::Acks::None,
            Acks::Explicit => delivery::Acks::Explicit,
            Acks::WorkQueue => delivery::Acks::WorkQueue,
        };
        let max_pending = setup.max_ack_pending.and_then(|rows| usize::try_from(rows).ok());
        let policy = match setup.acks {
            Acks::None => AckPolicy::NONE,
            _ => AckPolicy { acks, wait: setup.ack_wait, max_pending: max_pending.unwrap_or(usize::MAX) },
        };
        let tables = setup.tables.iter().map(|table| TableSpec {
            name: TableName::new(table.name.as_str()),
            level: match (table.window, table.columns) {
                (0, _) => Level::AtLeastOnce,
                (_, false) => Level::Deduplicated,
                _ => Level::ExactlyOnce,
            },
            partitions: table.partitions,
            window: usize::try_from(table.window).unwrap_or(usize::MAX),
            max_partitions: MAX_PARTITIONS,
            exists_from: Duration::ZERO,
        });
        let settings = Settings {
            shards: 1,
            pinned_ttl: setup.pinned_ttl,
            policy,
            tables: tables.collect(),
            horizon: Duration::ZERO,
            fates: Box::new(move |insert| {
                let mut fates = lock(&decides);
                if let Some(landed) = fates.burns.remove(&insert.table) {
                    return Fate::Killed { after: Duration::ZERO, landed, burned: true };
                }
                let slow = fates.slow.contains(&insert.table);
                let after = if slow { Duration::from_secs(1) } else { Duration::ZERO };
                Fate::Lands { after, pace: Duration::ZERO }
            }),
            watch: Arc::new(|_| {}),
        };
        let server = Server::start(settings).map_err(|error| error.to_string())?;
        Ok(Self {
            server,
            processes: Mutex::default(),
            links: Mutex::default(),
            fates,
            kept: AtomicU64::new(0),
        })
    }

    fn process(&self, client: &str) -> Result<Process> {
        lock(&self.processes).get(client).cloned().ok_or_else(|| format!("there is no client {client}"))
    }
}

#[async_trait]
impl Bench for Models {
    async fn connect(&self, name: &str, sink: delivery::Sink) -> Result<Client> {
        let process = self.server.process();
        let delivery = Arc::new(process.delivery(SHARD, sink));
        lock(&self.links).insert(name.to_owned(), Arc::clone(&delivery));
        lock(&self.processes).insert(name.to_owned(), process.clone());
        Ok(Client {
            delivery,
            retention: Arc::new(process.retention()),
            ledger: Arc::new(process.ledger()),
            letters: Arc::new(process.dead_letters(clock())),
            store: Arc::new(process.store(clock())),
        })
    }

    async fn join(
        &self,
        client: &str,
        member: MemberId,
        sink: members::Sink,
        runtime: &tokio::runtime::Handle,
    ) -> Result<Arc<dyn members::Port>> {
        let process = self.process(client)?;
        let _runtime = runtime.enter();
        Ok(Arc::new(process.members(member, PROBE, sink)))
    }

    async fn kill(&self, client: &str) -> Result<()> {
        self.process(client)?.kill();
        lock(&self.links).remove(client);
        Ok(())
    }

    async fn publish(&self, rows: u64, size: usize) -> Result<Seq> {
        let message = |number| Message {
            shard: SHARD,
            table: TableName::new("t"),
            payload: payload(number, size),
            verdict: Verdict::Good,
        };
        Ok(self.server.publish((1..=rows).map(message)))
    }

    async fn remove(&self, rows: &[u64]) -> Result<()> {
        let rows: Vec<Seq> = rows.iter().copied().map(Seq).collect();
        self.server.with(|models, _| models.stream.remove(&rows));
        Ok(())
    }

    async fn delete_consumer(&self) -> Result<()> {
        self.server.with(|models, _| models.stream.delete_consumer(0));
        Ok(())
    }

    async fn create_consumer(&self) -> Result<()> {
        self.server.with(|models, _| models.stream.create_consumer(0));
        Ok(())
    }

    async fn make_stream_anew(&self) -> Result<()> {
        let Timestamp(created) = self.server.created();
        self.server.with(|models, _| models.stream.make_anew(Timestamp(created + 1)));
        Ok(())
    }

    async fn unacked(&self) -> Result<u64> {
        Ok(self.server.with(|models, _| models.stream.unacked(SHARD).count() as u64))
    }

    async fn letters(&self) -> Result<u64> {
        Ok(self.server.with(|models, _| models.letters.count()))
    }

    async fn delete_letters(&self) -> Result<()> {
        self.server.with(|models, _| models.letters.missing(Duration::MAX));
        Ok(())
    }

    async fn fill_letters(&self) -> Result<()> {
        self.server.with(|models, _| models.letters.full(Duration::MAX));
        Ok(())
    }

    async fn keep_state(&self) -> Result<()> {
        let last = self.server.with(|models, _| models.stream.last().seq);
        self.kept.store(last.0, Ordering::Relaxed);
        self.restart_broker().await
    }

    async fn lose_tail(&self) -> Result<()> {
        let kept = self.kept.load(Ordering::Relaxed);
        self.server.with(|models, _| {
            let lost = models.stream.last().seq.0.saturating_sub(kept);
            models.stream.lose_tail(usize::try_from(lost).unwrap_or(usize::MAX));
        });
        self.restart_broker().await
    }

    async fn move_leader(&self) -> Result<()> {
        self.server.with(|models, now| models.stream.move_leader(now, SHARD, 0, Duration::ZERO));
        Ok(())
    }

    async fn restart_broker(&self) -> Result<()> {
        self.server.with(|models, _| models.stream.restart(0));
        lock(&self.links).values().for_each(|link| link.break_connection());
        Ok(())
    }

    fn table(&self, name: &str) -> TableName {
        TableName::new(name)
    }

    fn target(&self, name: &str, level: Level) -> Target {
        Target { database: "db".into(), table: name.into(), level }
    }

    fn payload(&self, number: u64) -> Bytes {
        payload(number, 8)
    }

    fn spoil(&self, number: u64) {
        let until = Duration::MAX;
        self.server.with(|models, from| models.store.refuse(number, Unfit { from, until }));
    }

    async fn mend(&self, _table: &str) -> Result<()> {
        self.server.with(|models, now| models.store.accept_all(now));
        Ok(())
    }

    async fn burn(&self, table: &str, partition: Option<u64>) -> Result<()> {
        let landed = usize::try_from(partition.unwrap_or(0)).unwrap_or(usize::MAX);
        lock(&self.fates).burns.insert(TableName::new(table), landed);
        Ok(())
    }

    async fn slow(&self, table: &str) -> Result<()> {
        lock(&self.fates).slow.push(TableName::new(table));
        Ok(())
    }

    async fn inserting(&self, table: &str) -> Result<u64> {
        let into = |insert: &&Insert| insert.table.as_str() == table;
        Ok(self.server.with(|models, _| models.store.running().filter(into).count() as u64))
    }

    async fn contents(&self, table: &str) -> Result<Vec<u64>> {
        Ok(self.server.with(|models, _| models.store.contents(&TableName::new(table)).to_vec()))
    }

    async fn restart_store(&self) -> Result<()> {
        self.server.with(|models, now| models.store.kill(now, &[]));
        Ok(())
    }
}
