//! What the process knows of itself: its shards, what it counted, and whether it is ready.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use holdfast_core::ports::store::{Level, Target};
use holdfast_core::record::Session;
use holdfast_core::row::{ShardId, TableName};

use crate::clock::Clock;
use crate::config::Config;
use crate::document::{Document, Member, Shard, Trouble, WeakerTable};
use crate::metrics::Metrics;
use crate::shards::ShardView;

/// Words about tables are said once each, for at most so many tables.
const MAX_TOLD: usize = 16_384;

/// Where the process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It connects and looks whether everything is there.
    Starting,
    /// Its shards run.
    Running,
    /// It was told to stop, and writes what it holds.
    Stopping,
}

impl Stage {
    const fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Stopping => "stopping",
        }
    }
}

/// What people were told already.
#[derive(Debug, Default)]
struct Told {
    levels: BTreeMap<TableName, Level>,
    codes: BTreeSet<Option<u32>>,
}

/// One daemon.
pub struct Process {
    node: String,
    session: Session,
    stream: String,
    held_rows: u64,
    held_bytes: u64,
    clock: Clock,
    started: Instant,
    stage: Mutex<Stage>,
    shards: Vec<Mutex<ShardView>>,
    told: Mutex<Told>,
    /// What is counted.
    pub metrics: Metrics,
}

/// Figures of this moment.
#[derive(Clone, Debug, Default)]
pub struct Gauges {
    /// Shards owned.
    pub owned: u32,
    /// Shards that ended by themselves.
    pub unowned: u32,
    /// Rows accepted since the process started, if that is known of every shard.
    pub rows_accepted: Option<u64>,
    /// Tables that do not get on, by the kind of their trouble.
    pub waiting: BTreeMap<&'static str, usize>,
    /// Shard by shard.
    pub shards: Vec<ShardGauges>,
}

/// Figures of a shard.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShardGauges {
    /// Rows held.
    pub held_rows: u64,
    /// Bytes held.
    pub held_bytes: u64,
    /// Rows that wait for delivery, if that is known.
    pub backlog_rows: Option<u64>,
    /// Age of the oldest row held, if that is known.
    pub oldest_unwritten_seconds: Option<f64>,
}

/// A lock whatever became of its last holder: views are replaced field by field, and stay views.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Process {
    /// A process that starts.
    #[must_use]
    pub fn new(config: &Config, session: Session, clock: Clock) -> Self {
        Self {
            node: config.node_id(),
            session,
            stream: config.topology.stream.clone(),
            held_rows: config.limits.held_rows,
            held_bytes: config.held_bytes(),
            clock,
            started: Instant::now(),
            stage: Mutex::new(Stage::Starting),
            shards: (0..config.topology.shards).map(|_| Mutex::default()).collect(),
            told: Mutex::default(),
            metrics: Metrics::new(config.tables.keys().cloned()),
        }
    }

    /// The random value of this start.
    #[must_use]
    pub const fn session(&self) -> Session {
        self.session
    }

    /// Says where it is.
    pub fn enter(&self, stage: Stage) {
        *lock(&self.stage) = stage;
    }

    /// Looks at, or changes, what is known of `shard`.
    ///
    /// # Panics
    /// If there is no such shard.
    pub fn with<T>(&self, shard: ShardId, act: impl FnOnce(&mut ShardView) -> T) -> T {
        act(&mut lock(&self.shards[shard.0 as usize]))
    }

    /// Whether people are to be told that `table` gets `level` only: once for each.
    pub fn is_news_of_level(&self, table: &TableName, level: Level) -> bool {
        let mut told = lock(&self.told);
        if told.levels.get(table) == Some(&level) || told.levels.len() >= MAX_TOLD {
            return false;
        }
        told.levels.insert(table.clone(), level);
        true
    }

    /// Whether people are to be told of an answer of the store that nobody knows: once for each code.
    pub fn is_news_of_code(&self, code: Option<u32>) -> bool {
        let mut told = lock(&self.told);
        told.codes.len() < 1_000 && told.codes.insert(code)
    }

    /// Why the process is not ready to take rows; none: it is.
    #[must_use]
    pub fn causes(&self) -> Vec<String> {
        match *lock(&self.stage) {
            Stage::Starting => return vec!["starting: NATS is being looked at".to_owned()],
            Stage::Stopping => return vec!["stopping: no more rows are taken".to_owned()],
            Stage::Running => {}
        }
        let mut causes = Vec::new();
        let mut unready = Vec::new();
        let mut why = None;
        for (number, shard) in self.shards.iter().enumerate() {
            let view = lock(shard);
            if let Some(failure) = &view.failure {
                causes.push(format!("shard {number} ended: {failure}"));
            } else if !view.ready {
                unready.push(number.to_string());
                why = why.or_else(|| view.waiting(Instant::now()));
            }
        }
        if !unready.is_empty() {
            let why = why.map_or(String::new(), |why| format!(": {why}"));
            causes.push(format!("not taken yet: shard {}{why}", unready.join(", ")));
        }
        causes
    }

    /// The figures of this moment.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        let now = self.clock.now();
        let mut gauges = Gauges { rows_accepted: Some(0), ..Gauges::default() };
        for shard in &self.shards {
            let view = lock(shard);
            gauges.owned += u32::from(view.is_owned());
            gauges.unowned += u32::from(view.failure.is_some());
            let accepted = gauges.rows_accepted.zip(view.counts.rows_accepted);
            gauges.rows_accepted = accepted.map(|(sum, rows)| sum + rows);
            for (kind, lanes) in &view.waiting_lanes {
                *gauges.waiting.entry(kind).or_default() += lanes;
            }
            gauges.shards.push(ShardGauges {
                held_rows: view.held_rows,
                held_bytes: view.held_bytes,
                backlog_rows: view.backlog_rows,
                oldest_unwritten_seconds: view.oldest_unwritten(now),
            });
        }
        gauges
    }

    /// What Prometheus is told.
    #[must_use]
    pub fn render_metrics(&self) -> String {
        self.metrics.render(&self.gauges())
    }

    /// What `/status` says.
    #[must_use]
    pub fn document(&self) -> Document {
        let now = Instant::now();
        let mut document = Document { stream: self.stream.clone(), ..Document::default() };
        let mut weaker = BTreeMap::new();
        for (number, shard) in (0..).zip(&self.shards) {
            let view = lock(shard);
            document.weaker_tables_left_off += view.weaker_left_off;
            weaker.extend(view.weaker.iter().map(|(table, target)| (table.clone(), target.clone())));
            document.shards.push(Shard {
                shard: number,
                owner: view.is_owned().then(|| self.node.clone()),
                phase: view.phase.to_owned(),
                pin: view.pin.as_ref().map(|pin| pin.0.to_string()),
                epoch: view.epoch,
                owned_seconds: view.owned_since.map(|since| seconds(now, since)),
                takeover_ms: view.takeover.map(|took| u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
                floor: view.floor,
                accepted: view.accepted,
                held_rows: view.held_rows,
                held_bytes: view.held_bytes,
                share_rows: view.share.rows,
                share_bytes: view.share.bytes,
                backlog_rows: view.backlog_rows,
                oldest_unwritten_seconds: view.oldest_unwritten(self.clock.now()),
                lanes: view.lanes as u64,
                troubles: view
                    .troubles
                    .iter()
                    .map(|(table, trouble)| Trouble {
                        table: table.as_str().to_owned(),
                        kind: trouble.key().to_owned(),
                        why: trouble.to_string(),
                    })
                    .collect(),
                troubles_left_off: view.troubles_left_off,
                waiting: view.waiting(now),
                ledger_trouble: view.ledger_trouble.as_ref().map(ToString::to_string),
                failure: view.failure.as_ref().map(ToString::to_string),
                counts: view.counts,
            });
        }
        document.weaker_tables = weaker.iter().map(|(table, target)| weaker_table(table, target)).collect();
        let causes = self.causes();
        document.members.push(Member {
            node: self.node.clone(),
            session: format!("{:?}", self.session),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            phase: lock(&self.stage).word().to_owned(),
            ready: causes.is_empty(),
            causes,
            uptime_seconds: seconds(now, self.started),
            shards_owned: document
                .shards
                .iter()
                .filter(|shard| shard.owner.is_some())
                .map(|shard| shard.shard)
                .collect(),
            held_rows: document.shards.iter().map(|shard| shard.held_rows).sum(),
            held_rows_limit: self.held_rows,
            held_bytes: document.shards.iter().map(|shard| shard.held_bytes).sum(),
            held_bytes_limit: self.held_bytes,
        });
        document
    }
}

fn weaker_table(table: &TableName, target: &Target) -> WeakerTable {
    WeakerTable {
        table: table.as_str().to_owned(),
        target: format!("{}.{}", target.database, target.table),
        level: target.level.to_string(),
    }
}

fn seconds(now: Instant, since: Instant) -> u64 {
    now.saturating_duration_since(since).as_secs()
}

/// How often [`Metrics::upkeep`] is due.
pub const UPKEEP: Duration = Duration::from_secs(5);
