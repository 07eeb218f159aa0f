//! What the process knows of itself: its shards, what it counted, and whether it is ready.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use holdfast_core::claims;
use holdfast_core::member::{MemberId, State};
use holdfast_core::ports::store::{Level, Target};
use holdfast_core::record::Session;
use holdfast_core::row::{ShardId, TableName};
use holdfast_nats::topology::Streams;

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

/// How the shards are shared out, as this process sees it.
#[derive(Debug, Default)]
struct Sharing {
    ready: bool,
    deaf: bool,
    members: Vec<OtherMember>,
    shards: Vec<SharedShard>,
}

#[derive(Debug)]
struct OtherMember {
    node: String,
    session: String,
    version: String,
    phase: &'static str,
    same_configuration: bool,
    gone: Option<&'static str>,
}

#[derive(Debug)]
struct SharedShard {
    mine: &'static str,
    home: Option<String>,
    owners: Vec<String>,
    standbys: Vec<String>,
    failed: Vec<(String, String)>,
    paused: bool,
    unowned: bool,
}

impl Sharing {
    fn take(&mut self, status: &claims::Status<'_>) {
        let names = |members: &[&MemberId]| members.iter().map(ToString::to_string).collect();
        self.ready = status.ready;
        self.deaf = status.deaf;
        self.members = status
            .members
            .iter()
            .map(|member| OtherMember {
                node: member.id.to_string(),
                session: member.session.map(|session| format!("{session:?}")).unwrap_or_default(),
                version: member.software.to_owned(),
                phase: match member.state {
                    _ if member.gone.is_some() => "gone",
                    Some(State::Active) => "running",
                    Some(State::Draining | State::Resigned) => "stopping",
                    Some(State::Unknown) | None => "unknown",
                },
                same_configuration: member.same_configuration,
                gone: member.gone.map(claims::Gone::key),
            })
            .collect();
        self.shards = status
            .shards
            .iter()
            .map(|shard| SharedShard {
                mine: shard.mine,
                home: shard.home.map(ToString::to_string),
                owners: names(&shard.owners),
                standbys: names(&shard.standbys),
                failed: shard
                    .failed
                    .iter()
                    .map(|(id, fault)| (id.to_string(), fault.reason.clone()))
                    .collect(),
                paused: !shard.paused.is_empty(),
                unowned: shard.unowned,
            })
            .collect();
    }
}

/// One daemon.
pub struct Process {
    node: String,
    session: Session,
    streams: Streams,
    held_rows: u64,
    held_bytes: u64,
    clock: Clock,
    started: Instant,
    stage: Mutex<Stage>,
    shards: Vec<Mutex<ShardView>>,
    told: Mutex<Told>,
    sharing: Mutex<Sharing>,
    /// What is counted.
    pub metrics: Metrics,
}

/// Figures of this moment.
#[derive(Clone, Debug, Default)]
pub struct Gauges {
    /// Shards owned.
    pub owned: u32,
    /// Shards that ended by themselves, or that nobody has although their rows wait.
    pub unowned: u32,
    /// Daemons that share the shards.
    pub members: u32,
    /// Rows accepted since the process started, if that is known of every shard.
    pub rows_accepted: u64,
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
            streams: config.topology.streams(),
            held_rows: config.limits.held_rows,
            held_bytes: config.held_bytes(),
            clock,
            started: Instant::now(),
            stage: Mutex::new(Stage::Starting),
            shards: (0..config.topology.shards).map(|_| Mutex::default()).collect(),
            told: Mutex::default(),
            sharing: Mutex::default(),
            metrics: Metrics::new(config.tables.keys().cloned()),
        }
    }

    /// The random value of this start.
    #[must_use]
    pub const fn session(&self) -> Session {
        self.session
    }

    /// Where it is.
    pub fn stage(&self) -> MutexGuard<'_, Stage> {
        lock(&self.stage)
    }

    /// Takes how the sharing stands.
    pub fn share(&self, status: &claims::Status<'_>) {
        lock(&self.sharing).take(status);
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
        let sharing = lock(&self.sharing);
        if !sharing.ready {
            return vec!["starting: the members' records are being read".to_owned()];
        }
        if sharing.deaf {
            causes.push("the own heartbeat does not come back from the bucket".to_owned());
        }
        for (number, shard) in self.shards.iter().enumerate() {
            let view = lock(shard);
            let shared = sharing.shards.get(number);
            let is_mine = shared.is_some_and(|shared| shared.mine != "free");
            // Whoever could not have it, somebody else can: one of a newer version, say.
            let homeless = shared.is_none_or(|shared| shared.home.is_none());
            let failed = shared.and_then(|shared| shared.failed.first()).filter(|_| homeless);
            if let Some(failure) = view.failure.as_ref().filter(|_| is_mine || homeless) {
                causes.push(format!("shard {number} ended: {failure}"));
            } else if let Some((who, why)) = failed {
                causes.push(format!("shard {number} ended at {who}: {why}"));
            } else if is_mine && !view.ready {
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
        let mut gauges = Gauges::default();
        let sharing = lock(&self.sharing);
        for (number, shard) in self.shards.iter().enumerate() {
            let view = lock(shard);
            gauges.owned += u32::from(view.is_owned());
            // Ended here or elsewhere, or nobody's although its rows wait; not what somebody else can have.
            let shared = sharing.shards.get(number);
            let homeless = shared.is_none_or(|shared| shared.home.is_none());
            let ended = view.failure.is_some() || shared.is_some_and(|shared| !shared.failed.is_empty());
            let unowned = (ended && homeless) || shared.is_some_and(|shared| shared.unowned);
            gauges.unowned += u32::from(unowned);
            gauges.rows_accepted += view.counts.rows_accepted;
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
        let others = sharing.members.iter().filter(|member| member.gone.is_none()).count();
        gauges.members = u32::try_from(others + 1).unwrap_or(u32::MAX);
        gauges
    }

    /// The shards that are owned here, and those that no member is known to have.
    #[must_use]
    pub fn to_look_at(&self) -> (BTreeSet<ShardId>, BTreeSet<ShardId>) {
        let sharing = lock(&self.sharing);
        let shards = || (0..).map(ShardId).zip(&self.shards);
        let ours = shards().filter(|(_, view)| lock(view).is_owned()).map(|(shard, _)| shard).collect();
        let nobodys = (0..).map(ShardId).zip(&sharing.shards).filter(|(_, shard)| {
            shard.mine == "free" && shard.owners.is_empty() && shard.standbys.is_empty()
        });
        let nobodys = if sharing.ready { nobodys.map(|(shard, _)| shard).collect() } else { BTreeSet::new() };
        (ours, nobodys)
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
        let mut document = Document { stream: self.streams.to_string(), ..Document::default() };
        let mut weaker = BTreeMap::new();
        let causes = self.causes();
        let sharing = lock(&self.sharing);
        for (number, shard) in (0..).zip(&self.shards) {
            let view = lock(shard);
            document.weaker_tables_left_off += view.weaker_left_off;
            weaker.extend(view.weaker.iter().map(|(table, target)| (table.clone(), target.clone())));
            document.shards.push(Shard {
                shard: number,
                stream: self.streams.of(ShardId(number)),
                owner: match sharing.shards.get(number as usize) {
                    _ if view.is_owned() => Some(self.node.clone()),
                    Some(shared) => shared.owners.first().cloned(),
                    None => None,
                },
                home: sharing.shards.get(number as usize).and_then(|shared| shared.home.clone()),
                standbys: sharing
                    .shards
                    .get(number as usize)
                    .map(|shared| shared.standbys.clone())
                    .unwrap_or_default(),
                paused: sharing.shards.get(number as usize).is_some_and(|shared| shared.paused),
                phase: match sharing.shards.get(number as usize) {
                    Some(shared) if shared.mine == "free" && view.failure.is_none() => "elsewhere".to_owned(),
                    _ => view.phase.to_owned(),
                },
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
        document.members.push(Member {
            node: self.node.clone(),
            session: format!("{:?}", self.session),
            version: crate::VERSION.to_owned(),
            phase: lock(&self.stage).word().to_owned(),
            ready: causes.is_empty(),
            causes,
            uptime_seconds: seconds(now, self.started),
            shards_owned: document
                .shards
                .iter()
                .filter(|shard| shard.owner.as_ref() == Some(&self.node))
                .map(|shard| shard.shard)
                .collect(),
            same_configuration: true,
            held_rows: document.shards.iter().map(|shard| shard.held_rows).sum(),
            held_rows_limit: self.held_rows,
            held_bytes: document.shards.iter().map(|shard| shard.held_bytes).sum(),
            held_bytes_limit: self.held_bytes,
        });
        for other in &sharing.members {
            let owned = |shard: &&Shard| shard.owner.as_ref() == Some(&other.node);
            document.members.push(Member {
                node: other.node.clone(),
                session: other.session.clone(),
                version: other.version.clone(),
                phase: other.phase.to_owned(),
                ready: other.gone.is_none(),
                causes: other.gone.map(str::to_owned).into_iter().collect(),
                shards_owned: document.shards.iter().filter(owned).map(|shard| shard.shard).collect(),
                same_configuration: other.same_configuration,
                ..Member::default()
            });
        }
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
