//! One process of a run: its machines, its clock, and the adapters' own state on its side of the wires.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use holdfast_core::batch::Limits;
use holdfast_core::budget::Share;
use holdfast_core::ports::delivery::{self, Inbox, PullEnd, Rows};
use holdfast_core::ports::{Attempt, dead_letters, ledger, retention, store};
use holdfast_core::record::Session;
use holdfast_core::row::{Seq, ShardId};
use holdfast_core::shard::{Config, Shard};
use holdfast_core::time::Instant;
use holdfast_core::trim::{self, Trim};

use crate::invariants::budget::Budget;
use crate::invariants::doubt::Doubts;
use crate::invariants::handover::Handover;
use crate::jetstream::Client;
use crate::scenario::Scenario;

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
}

/// A pull as the client's side knows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenPull {
    pub(crate) inbox: Inbox,
    pub(crate) batch: u32,
    pub(crate) got: u32,
}

/// A shard of a process.
// Each is a fact of its own that an invariant asks for; no state machine hides in them.
#[expect(clippy::struct_excessive_bools)]
#[derive(Debug)]
pub(crate) struct Slot {
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
    /// It ended because its consumer was gone.
    pub(crate) lost_consumer: bool,
    /// Sequences used again ended it.
    pub(crate) reused: bool,
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
}

/// A process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) id: u32,
    pub(crate) up: bool,
    /// Which start this is.
    pub(crate) start: u32,
    /// Which connection of this start this is.
    pub(crate) link: u32,
    pub(crate) connected: bool,
    pub(crate) session: Session,
    /// In parts in a million of the true time.
    clock_rate: u32,
    pub(crate) slots: Vec<Slot>,
    pub(crate) trim: Trim,
    pub(crate) trim_wake: Option<Duration>,
    pub(crate) frozen_until: Option<Duration>,
    /// It is to be frozen at its next thaw: which start of it, and for how long.
    pub(crate) frozen_after: Option<(u32, Duration)>,
    /// What happened while it was frozen.
    pub(crate) waiting: VecDeque<Local>,
    /// Nothing reaches it from the stream's server until then.
    pub(crate) inwards_held: Duration,
    /// Nothing of it reaches the stream's server until then.
    pub(crate) outwards_held: Duration,
    /// A connection keeps order: the last arrival that was arranged, in each direction.
    pub(crate) last_in: Duration,
    pub(crate) last_out: Duration,
    /// The store cannot be reached until then.
    pub(crate) store_cut: Duration,
    /// It is running since then.
    pub(crate) running_since: Duration,
    /// How long it stays down when it has stopped.
    pub(crate) stopping: Option<Duration>,
    pub(crate) share: Share,
}

impl Process {
    pub(crate) fn new(scenario: &Scenario, id: u32) -> Self {
        let clock_rate = scenario.clock_rates.get(id as usize).copied().unwrap_or(1_000_000);
        Self {
            id,
            up: false,
            start: 0,
            link: 0,
            connected: false,
            session: Session(0),
            clock_rate,
            slots: Vec::new(),
            trim: Trim::new(trim_config(scenario), Instant::START),
            trim_wake: None,
            frozen_until: None,
            frozen_after: None,
            waiting: VecDeque::new(),
            inwards_held: Duration::ZERO,
            outwards_held: Duration::ZERO,
            last_in: Duration::ZERO,
            last_out: Duration::ZERO,
            store_cut: Duration::ZERO,
            running_since: Duration::ZERO,
            stopping: None,
            share: share(scenario),
        }
    }

    /// Starts it, as `session`.
    pub(crate) fn begin(&mut self, scenario: &Scenario, now: Duration, session: Session) {
        self.up = true;
        self.start += 1;
        self.link = 1;
        self.connected = true;
        self.session = session;
        self.frozen_until = None;
        self.waiting.clear();
        self.running_since = now;
        self.stopping = None;
        self.share = share(scenario);
        self.trim = Trim::new(trim_config(scenario), self.clock(now));
        self.trim_wake = None;
        self.slots = (0..scenario.shards)
            .map(|shard| Slot {
                machine: Shard::new(config(scenario, ShardId(shard), session)),
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
                lost_consumer: false,
                reused: false,
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
            })
            .collect();
    }

    pub(crate) const fn client(&self) -> Client {
        Client { process: self.id, start: self.start, link: self.link }
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

fn trim_config(scenario: &Scenario) -> trim::Config {
    trim::Config { shards: scenario.shards, interval: scenario.trim_interval, history: scenario.history }
}
