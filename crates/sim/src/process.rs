//! One process of a run: its machines, its clock, and the adapters' own state on its side of the wires.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use holdfast_core::action::Event;
use holdfast_core::batch::Limits;
use holdfast_core::budget::Share;
use holdfast_core::claims::{self, Claims, Runs};
use holdfast_core::member::MemberId;
use holdfast_core::notice::Report;
use holdfast_core::ports::delivery::{self, Inbox, PullEnd, Rows};
use holdfast_core::ports::{Attempt, dead_letters, ledger, members, retention, store};
use holdfast_core::record::Session;
use holdfast_core::row::{Seq, ShardId};
use holdfast_core::shard::{Config, Shard};
use holdfast_core::time::Instant;
use holdfast_core::trim::{self, Trim};

use crate::invariants::budget::Budget;
use crate::invariants::doubt::Doubts;
use crate::invariants::handover::Handover;
use crate::jetstream::Client;
use crate::scenario::{self, Scenario};
use crate::view::View;

/// Which machine of a process asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    Shard(ShardId),
    Trim,
}

/// Something that happens inside a process, as soon as it runs.
#[derive(Clone, Debug)]
pub(crate) enum Local {
    Wake(ShardId),
    WakeTrim,
    Rows {
        client: Client,
        shard: ShardId,
        attempt: Attempt,
        rows: Rows,
    },
    Ended {
        client: Client,
        shard: ShardId,
        attempt: Attempt,
        end: PullEnd,
    },
    /// What the adapter has put into the sink is handled.
    Sunk {
        shard: ShardId,
        reply: delivery::Reply,
    },
    /// An answer of the stream's server; one that came over a connection that has broken since is lost.
    Delivery {
        client: Option<Client>,
        shard: ShardId,
        reply: delivery::Reply,
    },
    Ledger {
        client: Option<Client>,
        asker: Asker,
        reply: ledger::Reply,
    },
    Retention(retention::Reply),
    Store {
        shard: ShardId,
        reply: store::Reply,
    },
    /// An insert's turn has come.
    Turn {
        insert: store::Insert,
    },
    DeadLetter {
        shard: ShardId,
        reply: dead_letters::Reply,
    },
    /// A letter's turn has come.
    Post {
        command: dead_letters::Command,
    },
    Reconnected {
        link: u32,
    },
    WakeClaims,
    /// The members' bucket answers or is shown, or another member answers.
    Members {
        client: Option<Client>,
        reply: members::Reply,
    },
    /// The machine that shares shards out tells a shard's machine something.
    Ordered {
        shard: ShardId,
        event: Event,
    },
    /// A shard's machine reports to the one that shares shards out.
    Report {
        shard: ShardId,
        report: Report,
    },
    /// A shard's machine has ended.
    Over {
        shard: ShardId,
    },
    /// The process is asked for something.
    Asked(claims::Event),
}

impl Local {
    /// The shard whose machine it is for; none if it is for the process.
    pub(crate) const fn shard(&self) -> Option<ShardId> {
        match self {
            Self::Wake(shard)
            | Self::Rows { shard, .. }
            | Self::Ended { shard, .. }
            | Self::Sunk { shard, .. }
            | Self::Delivery { shard, .. }
            | Self::Ledger { asker: Asker::Shard(shard), .. }
            | Self::Store { shard, .. }
            | Self::DeadLetter { shard, .. }
            | Self::Ordered { shard, .. }
            | Self::Over { shard } => Some(*shard),
            Self::Turn { insert } => Some(insert.shard),
            Self::Post { command: dead_letters::Command::Park { letter, .. } } => Some(letter.shard),
            Self::WakeTrim
            | Self::Ledger { asker: Asker::Trim, .. }
            | Self::Retention(_)
            | Self::Reconnected { .. }
            | Self::WakeClaims
            | Self::Members { .. }
            | Self::Report { .. }
            | Self::Asked(_) => None,
        }
    }
}

/// A pull as the client's side knows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenPull {
    pub(crate) inbox: Inbox,
    pub(crate) batch: u32,
    pub(crate) got: u32,
}

/// A shard of a process, for as long as one machine of it runs.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Which start it is, of all machines of this process and of the process itself.
    pub(crate) life: u32,
    pub(crate) since: Duration,
    pub(crate) session: Session,
    pub(crate) machine: Shard,
    pub(crate) wake: Option<Duration>,
    /// Wakeups in a row that changed nothing in time.
    pub(crate) spins: u32,
    /// The newest inbox that is closed.
    pub(crate) closed: Inbox,
    pub(crate) pulls: BTreeMap<Attempt, OpenPull>,
    /// The shard broke off its commands to the store up to this one.
    pub(crate) aborted_until: Attempt,
    pub(crate) phase: &'static str,
    pub(crate) epoch: Option<u64>,
    pub(crate) budget: Budget,
    pub(crate) stopping: Option<Handover>,
    /// It has ended, one way or another.
    pub(crate) over: bool,
    /// Something kept it from writing when it was last looked at.
    pub(crate) troubled: bool,
    /// Rows held when it was last looked at.
    pub(crate) held: u64,
    /// Codes of the store that nobody knows and that it told of.
    pub(crate) unknown: BTreeSet<Option<u32>>,
    /// Its batches in doubt.
    pub(crate) doubts: Doubts,
    /// When the last reset of this tenure was answered.
    pub(crate) reset_at: Option<Duration>,
    /// The last reset that was sent.
    pub(crate) reset_sent: Attempt,
    /// When the last of what the adapter has put into the sink is handled.
    pub(crate) sink_until: Duration,
    /// How much of it waits.
    pub(crate) sinking: u32,
    /// A write of it conflicted.
    pub(crate) conflicted: bool,
    /// The last pin that it had.
    pub(crate) pin: Option<delivery::PinId>,
    /// The pin of a dead owner that it was told of, until it has found another one, or none.
    pub(crate) orphan: Option<delivery::PinId>,
}

impl Slot {
    fn new(config: Config, life: u32, since: Duration) -> Self {
        Self {
            life,
            since,
            session: config.session,
            machine: Shard::new(config),
            wake: None,
            spins: 0,
            closed: Inbox(0),
            pulls: BTreeMap::new(),
            aborted_until: Attempt(0),
            phase: "unclaimed",
            epoch: None,
            budget: Budget::default(),
            stopping: None,
            over: false,
            troubled: false,
            held: 0,
            unknown: BTreeSet::new(),
            doubts: Doubts::default(),
            reset_at: None,
            reset_sent: Attempt(0),
            sink_until: Duration::ZERO,
            sinking: 0,
            conflicted: false,
            pin: None,
            orphan: None,
        }
    }
}

/// The machine that shares the shards out, where there is one.
#[derive(Debug)]
pub(crate) struct Sharing {
    pub(crate) claims: Claims,
    pub(crate) runs: Runs,
    pub(crate) wake: Option<Duration>,
    /// Wakeups in a row that changed nothing in time.
    pub(crate) spins: u32,
    pub(crate) session: Session,
    /// What it was shown, and what it said.
    pub(crate) view: View,
    /// Orders and reports keep their order: when the last one on its way arrives.
    pub(crate) orders_until: Duration,
    pub(crate) reports_until: Duration,
}

/// A process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) id: u32,
    /// Its name among the members.
    pub(crate) member: MemberId,
    pub(crate) up: bool,
    /// The last of its starts, its shards' included.
    lives: u32,
    /// Which start this is.
    pub(crate) start: u32,
    /// Which connection of this start this is.
    pub(crate) link: u32,
    pub(crate) connected: bool,
    /// In parts in a million of the true time.
    clock_rate: u32,
    pub(crate) slots: BTreeMap<ShardId, Slot>,
    /// None: it stands by for every shard.
    pub(crate) sharing: Option<Sharing>,
    /// Shards that sequences used again have ended.
    pub(crate) reused: BTreeSet<ShardId>,
    pub(crate) trim: Trim,
    pub(crate) trim_wake: Option<Duration>,
    pub(crate) frozen_until: Option<Duration>,
    /// It is to be frozen at its next thaw: which start of it, and for how long.
    pub(crate) frozen_after: Option<(u32, Duration)>,
    /// What happened while it was frozen.
    pub(crate) waiting: VecDeque<(u32, Local)>,
    /// Nothing reaches it from the stream's server until then.
    pub(crate) inwards_held: Duration,
    /// Nothing of it reaches the stream's server until then.
    pub(crate) outwards_held: Duration,
    /// A connection keeps order: the last arrival that was arranged, in each direction.
    pub(crate) last_in: Duration,
    pub(crate) last_out: Duration,
    /// The same for its way to the members' bucket, which is another connection.
    pub(crate) members_inwards_held: Duration,
    pub(crate) members_outwards_held: Duration,
    pub(crate) members_last_in: Duration,
    /// The store cannot be reached until then.
    pub(crate) store_cut: Duration,
    /// It is running since then.
    pub(crate) running_since: Duration,
    /// How long it stays down when it has stopped, and when it is to have.
    pub(crate) stopping: Option<(Duration, Duration)>,
    pub(crate) share: Share,
}

impl Process {
    pub(crate) fn new(scenario: &Scenario, id: u32) -> Self {
        let clock_rate = scenario.clock_rates.get(id as usize).copied().unwrap_or(1_000_000);
        Self {
            id,
            member: member(scenario, id),
            up: false,
            lives: 0,
            start: 0,
            link: 0,
            connected: false,
            clock_rate,
            slots: BTreeMap::new(),
            sharing: None,
            reused: BTreeSet::new(),
            trim: Trim::new(trim_config(scenario), Instant::START),
            trim_wake: None,
            frozen_until: None,
            frozen_after: None,
            waiting: VecDeque::new(),
            inwards_held: Duration::ZERO,
            outwards_held: Duration::ZERO,
            last_in: Duration::ZERO,
            last_out: Duration::ZERO,
            members_inwards_held: Duration::ZERO,
            members_outwards_held: Duration::ZERO,
            members_last_in: Duration::ZERO,
            store_cut: Duration::ZERO,
            running_since: Duration::ZERO,
            stopping: None,
            share: share(scenario),
        }
    }

    /// Starts it, as `session`.
    pub(crate) fn begin(&mut self, scenario: &Scenario, now: Duration, session: Session) {
        self.up = true;
        self.lives += 1;
        self.start = self.lives;
        self.link = 1;
        self.connected = true;
        self.frozen_until = None;
        self.waiting.clear();
        self.running_since = now;
        self.stopping = None;
        self.share = share(scenario);
        self.trim = Trim::new(trim_config(scenario), self.clock(now));
        self.trim_wake = None;
        self.slots.clear();
        self.reused.clear();
        let (id, clock) = (self.member.clone(), self.clock(now));
        self.sharing = scenario.sharing.as_ref().map(|sharing| Sharing {
            claims: Claims::new(claims_config(scenario, sharing, id, session), clock),
            runs: Runs::new(sharing.handover),
            wake: None,
            spins: 0,
            session,
            view: View::default(),
            orders_until: Duration::ZERO,
            reports_until: Duration::ZERO,
        });
    }

    /// Starts the machine of a shard, as `session`.
    pub(crate) fn run(&mut self, scenario: &Scenario, now: Duration, shard: ShardId, session: Session) {
        self.lives += 1;
        let slot = Slot::new(config(scenario, shard, session), self.lives, now);
        self.slots.insert(shard, slot);
    }

    /// Its connection to everything but the consumers.
    pub(crate) const fn client(&self) -> Client {
        Client { process: self.id, start: self.start, link: self.link }
    }

    /// The connection of a shard's machine. One that has ended has none that anything could come over.
    pub(crate) fn client_of(&self, shard: ShardId) -> Client {
        let start = self.slots.get(&shard).map_or(0, |slot| slot.life);
        Client { process: self.id, start, link: self.link }
    }

    /// All its connections.
    pub(crate) fn clients(&self) -> Vec<Client> {
        self.slots.keys().map(|shard| self.client_of(*shard)).chain([self.client()]).collect()
    }

    /// The machine of a shard, if it is the one that a client spoke for.
    pub(crate) fn slot_of(&self, client: Client, shard: ShardId) -> Option<&Slot> {
        self.slots.get(&shard).filter(|slot| slot.life == client.start)
    }

    /// What its monotonic clock shows.
    pub(crate) fn clock(&self, now: Duration) -> Instant {
        let shown = now.as_nanos() * u128::from(self.clock_rate) / 1_000_000;
        Instant::at(nanos(shown))
    }

    /// When its clock will show `instant`.
    pub(crate) fn when(&self, instant: Instant) -> Duration {
        let shown = instant.since_start().as_nanos();
        nanos((shown * 1_000_000).div_ceil(u128::from(self.clock_rate)))
    }

    /// A time by its clock, as it truly lasts.
    pub(crate) fn lasts(&self, time: Duration) -> Duration {
        nanos((time.as_nanos() * 1_000_000).div_ceil(u128::from(self.clock_rate)))
    }
}

fn nanos(nanos: u128) -> Duration {
    u64::try_from(nanos).map_or(Duration::MAX, Duration::from_nanos)
}

/// A process's name among the members. A twin has the first one's.
fn member(scenario: &Scenario, process: u32) -> MemberId {
    let process = if scenario.twin() == Some(process) { 0 } else { process };
    MemberId::new(format!("p{process}")).expect("letters and digits are a name")
}

/// The share that a shard begins with.
pub(crate) const fn share(scenario: &Scenario) -> Share {
    Share { rows: scenario.share_rows, bytes: scenario.share_bytes }
}

fn config(scenario: &Scenario, shard: ShardId, session: Session) -> Config {
    Config {
        shard,
        stream: Arc::from("SIM"),
        session,
        pinned_ttl: scenario.pinned_ttl,
        batch: Limits {
            max_rows: scenario.batch_rows,
            max_bytes: scenario.batch_bytes,
            max_age: scenario.batch_age,
        },
        stale: scenario.stale,
        patience: scenario.patience(),
        attempt_life: scenario.attempt_life(),
        acks: scenario.policy.acks,
        parking: scenario.parking,
        // Whoever runs a daemon on a stream that has rows must say it once; every row is to land.
        start: Some(holdfast_core::fence::Start::Seq(Seq(1))),
        max_lanes: 10_000,
        max_record: 1 << 20,
    }
}

fn claims_config(
    scenario: &Scenario,
    sharing: &scenario::Sharing,
    id: MemberId,
    session: Session,
) -> claims::Config {
    claims::Config {
        id,
        session,
        shards: scenario.shards,
        heartbeat: sharing.heartbeat,
        lease: sharing.lease,
        probe: Scenario::PROBE,
        rows: scenario.share_rows * 2,
        bytes: scenario.share_bytes * 2,
        software: "sim".to_owned(),
        fingerprint: "00".to_owned(),
    }
}

fn trim_config(scenario: &Scenario) -> trim::Config {
    let shards = (0..scenario.shards).map(ShardId).collect();
    trim::Config { shards, interval: scenario.trim_interval, history: scenario.history }
}
