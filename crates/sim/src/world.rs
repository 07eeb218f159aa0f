//! A run: one thread, virtual time, one source of randomness.
//!
//! A step takes the earliest event, hands it to its owner and carries what the owner wants done to where it
//! goes. Messages take a random time, so whatever may be answered in any order is.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use holdfast_core::action::{Action, Actions, Event};
use holdfast_core::budget::Share;
use holdfast_core::notice::{Notice, Report, ResyncReason, ShardFailure, Trouble};
use holdfast_core::ports::delivery::{self, Inbox, InspectError, Inspection, PullEnd, Rows};
use holdfast_core::ports::ledger::{self, WriteOutcome};
use holdfast_core::ports::store::{self, DescribeError, Insert, InsertOutcome, Level, Refusal};
use holdfast_core::ports::{Attempt, Failure, FailureClass, retention};
use holdfast_core::record::{Record, Session};
use holdfast_core::row::{Row, Seq, ShardId, TableName, Verdict};
use holdfast_core::time::Timestamp;
use holdfast_core::trim;

use crate::agenda::Agenda;
use crate::bucket::Bucket;
use crate::chance::Chance;
use crate::clickhouse::{ClickHouse, Fate, Part, PartOutcome, TableSpec};
use crate::fault::{Cut, Fault, Rates};
use crate::invariants::doubt::Doubts;
use crate::invariants::handover::Handover;
use crate::invariants::intent::{self, Intents};
use crate::invariants::order::Order;
use crate::invariants::pin::{self, Pins};
use crate::invariants::resync::Resyncs;
use crate::invariants::stops::Causes;
use crate::invariants::{Checked, Violation, lands, once, record, trim as trimmed, violated};
use crate::jetstream::{self, Client, JetStream, Message, Outgoing, PinChange};
use crate::marks::{Mark, Marks};
use crate::process::{Asker, Local, OpenPull, Process};
use crate::scenario::Scenario;
use crate::trace::{Happening, Trace};
use crate::truth::{Fact, Truth};

/// The name of a table.
pub(crate) fn table_name(index: u32) -> TableName {
    TableName::new(format!("t{index}"))
}

/// Which table a name is.
pub(crate) fn table_index(name: &TableName) -> u32 {
    name.as_str().get(1..).and_then(|digits| digits.parse().ok()).unwrap_or(u32::MAX)
}

/// Rows' sequences, for the trace.
fn seqs(rows: &[Row]) -> Vec<u64> {
    rows.iter().map(|row| row.seq.0).collect()
}

/// A process start's shard and its attempt.
type Flight = (u32, u32, ShardId, Attempt);

/// Something to come.
enum Due {
    Local {
        process: u32,
        start: u32,
        what: Local,
    },
    AtStream {
        from: Client,
        shard: ShardId,
        command: delivery::Command,
        reply_by: Option<Duration>,
    },
    /// The later parts of a look.
    AtRows {
        from: Client,
        shard: ShardId,
        attempt: Attempt,
        floor: Seq,
        seen: Box<Inspection>,
        reply_by: Option<Duration>,
    },
    AtConsumer {
        from: Client,
        shard: ShardId,
        attempt: Attempt,
        seen: Box<Inspection>,
        reply_by: Option<Duration>,
    },
    AtLedger {
        from: Client,
        asker: Asker,
        command: ledger::Command,
        reply_by: Option<Duration>,
        again: bool,
    },
    AtRetention {
        from: Client,
        command: retention::Command,
        reply_by: Option<Duration>,
    },
    AtStore {
        from: Client,
        insert: Box<Insert>,
    },
    AskStore {
        from: Client,
        shard: ShardId,
        command: store::Command,
        reply_by: Duration,
    },
    InsertTimedOut(Flight, TableName),
    StreamTick,
    StoreTick,
    Publish(usize),
    Fault(usize),
    Thaw {
        process: u32,
        start: u32,
    },
    Start {
        process: u32,
    },
    LinkUp {
        process: u32,
        start: u32,
        link: u32,
    },
    Noticed(Client),
    BrokerUp,
    StoreUp,
    ConsumerBack(u32),
    Replace {
        process: u32,
        start: u32,
    },
    Overdue {
        process: u32,
        start: u32,
    },
    EndLurking,
    Unpin(ShardId),
    PurgeUnderWay {
        shard: ShardId,
        down: Duration,
    },
    Quiet,
    Look,
}

/// A request that is late, and arrives when it can do the most harm.
enum Lurking {
    /// A reset, right behind the next reset of another tenure.
    Reset { from: Client, epoch: Option<u64>, shard: ShardId, command: delivery::Command },
    /// A write, right behind the next look of an heir at the record.
    Write { from: Client, shard: ShardId, asker: Asker, command: ledger::Command },
}

impl Lurking {
    fn due(self) -> Due {
        match self {
            Self::Reset { from, shard, command, .. } => {
                Due::AtStream { from, shard, command, reply_by: None }
            }
            Self::Write { from, asker, command, .. } => {
                Due::AtLedger { from, asker, command, reply_by: None, again: false }
            }
        }
    }
}

/// How a run ended.
pub(crate) struct Outcome {
    pub(crate) violation: Option<Violation>,
    pub(crate) simulated: Duration,
    pub(crate) events: u64,
    pub(crate) faults: u64,
    pub(crate) marks: Marks,
    pub(crate) hash: u64,
    pub(crate) happenings: Vec<(Duration, Happening)>,
}

impl Outcome {
    /// A run that came to nothing but this.
    pub(crate) fn of(violation: Violation) -> Self {
        Self {
            violation: Some(violation),
            simulated: Duration::ZERO,
            events: 0,
            faults: 0,
            marks: Marks::default(),
            hash: 0,
            happenings: Vec::new(),
        }
    }
}

/// The world of a run.
pub(crate) struct World {
    scenario: Scenario,
    chance: Chance,
    rates: Rates,
    now: Duration,
    agenda: Agenda<Due>,
    stream: JetStream,
    stream_tick: Option<Duration>,
    broker_up: bool,
    bucket: Bucket,
    store: ClickHouse,
    store_tick: Option<Duration>,
    store_up: bool,
    store_slow_until: Duration,
    store_refuses_until: Duration,
    processes: Vec<Process>,
    sessions: BTreeMap<(u32, u32), Session>,
    flights: BTreeMap<Flight, Duration>,
    /// How often a batch's token was burned: a third time would stop its lane, by design.
    burns: BTreeMap<(TableName, Timestamp, Seq), u32>,
    deliveries_to_lose: BTreeMap<ShardId, u32>,
    /// Unpins that were sent without a look before.
    blind_unpins: BTreeSet<Flight>,
    /// Shards whose owner's next reset goes astray.
    astray: BTreeSet<ShardId>,
    truth: Truth,
    intents: Intents,
    order: Order,
    pins: Pins,
    causes: Causes,
    resyncs: Resyncs,
    /// Requests that wait for the worst moment to arrive.
    lurking: Vec<Lurking>,
    largest: u64,
    quiet: bool,
    settled_at: Option<Duration>,
    marks: Marks,
    trace: Trace,
    events: u64,
    faults: u64,
    checks_core: bool,
    violation: Option<Violation>,
}

impl World {
    pub(crate) fn new(scenario: Scenario, keeps_trace: bool, checks_core: bool) -> Self {
        let tables = scenario.tables.iter().zip(0_u32..).map(|(plan, index)| TableSpec {
            name: table_name(index),
            level: plan.level,
            partitions: plan.partitions,
            window: plan.window,
            exists_from: plan.exists_from,
        });
        let store = ClickHouse::new(tables.collect::<Vec<_>>(), scenario.horizon());
        let largest = scenario.rows.iter().map(|row| row.size.max(8) as u64).max().unwrap_or_default();
        let mut world = Self {
            chance: Chance::new(scenario.seed, 2),
            rates: scenario.rates,
            now: Duration::ZERO,
            agenda: Agenda::new(),
            stream: JetStream::new(
                Timestamp(1_700_000_000_000_000_000),
                scenario.shards,
                scenario.pinned_ttl,
            ),
            stream_tick: None,
            broker_up: true,
            bucket: Bucket::default(),
            store,
            store_tick: None,
            store_up: true,
            store_slow_until: Duration::ZERO,
            store_refuses_until: Duration::ZERO,
            processes: (0..scenario.processes).map(|id| Process::new(&scenario, id)).collect(),
            sessions: BTreeMap::new(),
            flights: BTreeMap::new(),
            burns: BTreeMap::new(),
            deliveries_to_lose: BTreeMap::new(),
            blind_unpins: BTreeSet::new(),
            astray: BTreeSet::new(),
            truth: Truth::default(),
            intents: Intents::default(),
            order: Order::default(),
            pins: Pins::default(),
            causes: Causes::default(),
            resyncs: Resyncs::default(),
            lurking: Vec::new(),
            largest: largest + Row::OVERHEAD,
            quiet: false,
            settled_at: None,
            marks: Marks::default(),
            trace: Trace::new(keeps_trace),
            events: 0,
            faults: 0,
            checks_core,
            violation: None,
            scenario,
        };
        world.arrange();
        world
    }

    fn arrange(&mut self) {
        for process in 0..self.scenario.processes {
            let at = self.chance.millis(0, 400);
            self.agenda.put(at, Due::Start { process });
        }
        for (at, row) in self.scenario.rows.iter().enumerate() {
            self.agenda.put(row.at, Due::Publish(at));
        }
        for (index, (at, _)) in self.scenario.faults.iter().enumerate() {
            self.agenda.put(*at, Due::Fault(index));
        }
        self.agenda.put(self.scenario.quiet_from, Due::Quiet);
    }

    /// Runs to the end, or to the first violation.
    pub(crate) fn run(mut self) -> Outcome {
        while self.violation.is_none() {
            let Some((at, due)) = self.agenda.take() else { break };
            self.now = at;
            self.events += 1;
            self.step(due);
            if self.settled_at.is_some() && self.now >= Scenario::LENGTH {
                break;
            }
        }
        Outcome {
            violation: self.violation,
            simulated: self.now,
            events: self.events,
            faults: self.faults,
            marks: self.marks,
            hash: self.trace.hash(),
            happenings: self.trace.into_kept(),
        }
    }

    fn note(&mut self, happening: Happening) {
        self.trace.add(self.now, happening);
    }

    fn check(&mut self, checked: Checked) {
        if let Err(violation) = checked
            && self.violation.is_none()
        {
            let Violation { invariant, how } = violation.clone();
            self.note(Happening::Violated { invariant, how });
            self.violation = Some(violation);
        }
    }

    fn step(&mut self, due: Due) {
        match due {
            Due::Local { process, start, what } => self.local(process, start, what),
            Due::AtStream { from, shard, command, reply_by } => {
                self.at_stream(from, shard, command, reply_by)
            }
            Due::AtRows { from, shard, attempt, floor, mut seen, reply_by } => {
                if self.broker_up {
                    self.stream.look_at_rows(shard, floor, &mut seen);
                    let at = self.now + self.latency();
                    self.agenda.put(at, Due::AtConsumer { from, shard, attempt, seen, reply_by });
                } else {
                    let reply = unanswered_look(attempt);
                    self.no_answer(from, reply_by, Some(Local::Delivery { client: None, shard, reply }));
                }
            }
            Due::AtConsumer { from, shard, attempt, seen, reply_by } => {
                if self.broker_up {
                    let outcome = self.stream.look_at_consumer(self.now, shard, *seen);
                    let pin = outcome.as_ref().ok().and_then(|seen| seen.pinned.clone());
                    self.pins.looked(from.process, shard, pin);
                    self.answer_stream(
                        from,
                        shard,
                        delivery::Reply::Inspected { attempt, outcome },
                        reply_by,
                    );
                } else {
                    let reply = unanswered_look(attempt);
                    self.no_answer(from, reply_by, Some(Local::Delivery { client: None, shard, reply }));
                }
            }
            Due::AtLedger { from, asker, command, reply_by, again } => {
                self.at_ledger(from, asker, &command, reply_by, again);
            }
            Due::AtRetention { from, command, reply_by } => self.at_retention(from, &command, reply_by),
            Due::AtStore { from, insert } => self.at_store(from, *insert),
            Due::AskStore { from, shard, command, reply_by } => {
                self.ask_store(from, shard, &command, reply_by)
            }
            Due::InsertTimedOut(flight, table) => {
                if self.flights.remove(&flight).is_some() {
                    self.answer_insert(flight, table, doubt("timed out"));
                }
            }
            Due::StreamTick => {
                self.stream_tick = None;
                self.stream.tick(self.now);
                self.serve_stream();
            }
            Due::StoreTick => {
                self.store_tick = None;
                self.store.tick(self.now);
                self.serve_store();
            }
            Due::Publish(at) => self.publish(at),
            Due::Fault(at) => self.fault(at),
            Due::Thaw { process, start } => self.thaw(process, start),
            Due::Start { process } => self.start(process),
            Due::LinkUp { process, start, link } => self.local(process, start, Local::Reconnected { link }),
            Due::Noticed(client) => {
                self.stream.disconnect(self.now, client);
                self.serve_stream();
            }
            Due::BrokerUp => self.broker_returns(),
            Due::StoreUp => self.store_up = true,
            Due::ConsumerBack(shard) => {
                self.stream.create_consumer(shard as usize);
                self.note(Happening::Fault(format!("over: consumer of s{shard} made again")));
            }
            Due::Replace { process, start } => {
                if self.processes[process as usize].start == start {
                    self.crash(process, Duration::from_millis(300));
                }
            }
            Due::Overdue { process, start } => self.look_whether_stopped(process, start),
            Due::Quiet => self.fall_quiet(),
            Due::Look => self.look_whether_settled(),
            Due::Unpin(shard) => self.unpin(shard),
            Due::PurgeUnderWay { shard, down } => self.purge_under_way(shard, down),
            Due::EndLurking => {
                // The moment did not come.
                if !self.lurking.is_empty() {
                    let due = self.lurking.remove(0).due();
                    self.agenda.put(self.now, due);
                }
            }
        }
    }

    // ---- time and messages ---------------------------------------------------------------------------

    fn latency(&mut self) -> Duration {
        self.chance.time(Duration::from_micros(100), self.scenario.latency)
    }

    /// When a message that leaves the process now arrives at the stream's server; requests may overtake.
    fn outwards(&mut self, process: u32, in_order: bool) -> Duration {
        let arrives = self.now + self.latency();
        let process = &mut self.processes[process as usize];
        let mut arrives = arrives.max(process.outwards_held);
        if in_order {
            arrives = arrives.max(process.last_out);
            process.last_out = arrives;
        }
        arrives
    }

    fn inwards(&mut self, process: u32, in_order: bool) -> Duration {
        let arrives = self.now + self.latency();
        let process = &mut self.processes[process as usize];
        let mut arrives = arrives.max(process.inwards_held);
        if in_order {
            arrives = arrives.max(process.last_in);
            process.last_in = arrives;
        }
        arrives
    }

    fn disturbed(&mut self, process: u32, until: Duration) {
        self.pins.disturbed(process, until);
    }

    fn put_local(&mut self, at: Duration, process: u32, start: u32, what: Local) {
        self.agenda.put(at, Due::Local { process, start, what });
    }

    /// An answer on its way back: on time, or else `unanswered` when the caller gives up.
    fn answer(&mut self, to: Client, reply_by: Option<Duration>, reply: Local, unanswered: Local) {
        // The caller was told already that no answer came.
        let Some(reply_by) = reply_by else { return };
        let Client { process, start, .. } = to;
        if self.chance.permille(self.rates.answer_lost) {
            self.disturbed(process, reply_by);
            if !self.chance.permille(self.rates.answer_never) {
                self.put_local(reply_by, process, start, unanswered);
            }
            return;
        }
        let mut at = self.inwards(process, false);
        if self.chance.permille(self.rates.answer_late) {
            at += self.chance.millis(10, 3_000);
            self.disturbed(process, at);
        }
        if at > reply_by {
            self.put_local(reply_by, process, start, unanswered);
            return;
        }
        if self.chance.permille(self.rates.answer_twice) {
            let again = at + self.chance.millis(0, 2_000);
            self.put_local(again, process, start, reply.clone());
        }
        self.put_local(at, process, start, reply);
    }

    /// Arranges a request's arrival: when, if at all, and until when an answer counts.
    fn request(&mut self, client: Client, unanswered: Local) -> Option<(Duration, Option<Duration>)> {
        let Client { process, start, .. } = client;
        let reply_by = self.now + Scenario::CALL_TIMEOUT;
        let connected = self.processes[process as usize].connected;
        if !connected || self.chance.permille(self.rates.request_lost) {
            self.disturbed(process, reply_by);
            if !self.chance.permille(self.rates.answer_never) {
                self.put_local(reply_by, process, start, unanswered);
            }
            return None;
        }
        let mut arrives = self.outwards(process, false);
        if self.chance.permille(self.rates.request_late) {
            arrives += self.chance.millis(50, 8_000);
        }
        if arrives < reply_by {
            return Some((arrives, Some(reply_by)));
        }
        self.disturbed(process, reply_by);
        self.put_local(reply_by, process, start, unanswered);
        Some((arrives, None))
    }

    // ---- inside a process ----------------------------------------------------------------------------

    fn local(&mut self, process: u32, start: u32, what: Local) {
        let owner = &mut self.processes[process as usize];
        if !owner.up || owner.start != start {
            return;
        }
        if owner.frozen_until.is_some() {
            owner.waiting.push_back(what);
            return;
        }
        let current = owner.client();
        match what {
            Local::Wake(shard) => {
                let slot = &mut owner.slots[shard.0 as usize];
                if slot.wake.is_some_and(|at| at <= self.now) {
                    slot.wake = None;
                    self.hand(process, shard, Event::Wakeup);
                }
            }
            Local::WakeTrim => {
                if owner.trim_wake.is_some_and(|at| at <= self.now) {
                    owner.trim_wake = None;
                    self.hand_trim(process, trim::Event::Wakeup);
                }
            }
            Local::Rows { client, shard, attempt, rows } => {
                if client == current {
                    self.rows_arrive(process, shard, attempt, rows);
                }
            }
            Local::Ended { client, shard, attempt, end } => {
                if client == current && owner.slots[shard.0 as usize].pulls.remove(&attempt).is_some() {
                    if end == PullEnd::TooLarge && owner.slots[shard.0 as usize].phase == "owning" {
                        self.marks.hit(Mark::RenewedAtCap);
                    }
                    self.sink(process, shard, delivery::Reply::Ended { attempt, end });
                }
            }
            Local::Sunk { shard, reply } => self.hand(process, shard, Event::Delivery(reply)),
            Local::Delivery { client, shard, reply } => {
                if client.is_none_or(|client| client == current) {
                    self.hand(process, shard, Event::Delivery(reply));
                }
            }
            Local::Ledger { client, asker, reply } => {
                if client.is_none_or(|client| client == current) {
                    match asker {
                        Asker::Shard(shard) => {
                            let conflict = matches!(
                                &reply,
                                ledger::Reply::Written { outcome: WriteOutcome::Conflict, .. }
                            );
                            owner.slots[shard.0 as usize].conflicted |= conflict;
                            self.hand(process, shard, Event::Ledger(reply));
                        }
                        Asker::Trim => self.hand_trim(process, trim::Event::Ledger(reply)),
                    }
                }
            }
            Local::Retention(reply) => self.hand_trim(process, trim::Event::Retention(reply)),
            Local::Store { shard, reply } => {
                if let store::Reply::Inserted { attempt, table, outcome } = &reply {
                    let how = match outcome {
                        InsertOutcome::Stored => "stored",
                        InsertOutcome::Again(_) => "again",
                        InsertOutcome::Doubt(_) => "doubt",
                        InsertOutcome::Stale => "stale",
                    };
                    if matches!(outcome, InsertOutcome::Doubt(_)) {
                        owner.slots[shard.0 as usize].doubts.doubts(table);
                    }
                    let (table, attempt) = (table_index(table), attempt.0);
                    self.note(Happening::Answered { process, shard: shard.0, table, attempt, how });
                }
                if let store::Reply::ReadBack { table, outcome: Ok(_), .. } = &reply {
                    self.processes[process as usize].slots[shard.0 as usize].doubts.read_back(table);
                }
                self.hand(process, shard, Event::Store(reply));
            }
            Local::Turn { insert, aborts } => self.insert_turn(process, insert, aborts),
            Local::Reconnected { link } => {
                if owner.link == link && !owner.connected && self.broker_up {
                    owner.connected = true;
                    let closed = owner.slots.iter().map(|slot| slot.closed).collect();
                    self.stream.connect(current, closed);
                    for shard in 0..self.scenario.shards {
                        self.hand(process, ShardId(shard), Event::Delivery(delivery::Reply::Disrupted));
                    }
                }
            }
        }
    }

    fn rows_arrive(&mut self, process: u32, shard: ShardId, attempt: Attempt, rows: Rows) {
        let slot = &mut self.processes[process as usize].slots[shard.0 as usize];
        let heard = rows.inbox > slot.closed;
        let delivery = rows.rows.first().map_or(0, |row| row.delivery.0);
        let full = slot.pulls.get_mut(&attempt).is_some_and(|pull| {
            pull.got += u32::try_from(rows.rows.len()).unwrap_or(u32::MAX);
            pull.got >= pull.batch
        });
        if full {
            slot.pulls.remove(&attempt);
        }
        self.note(Happening::Delivered { process, shard: shard.0, seqs: seqs(&rows.rows), delivery, heard });
        if !heard {
            self.marks.hit(Mark::ClosedInbox);
            return;
        }
        self.sink(process, shard, delivery::Reply::Rows(rows));
        if full {
            self.sink(process, shard, delivery::Reply::Ended { attempt, end: PullEnd::Full });
        }
    }

    /// The adapter puts a reply into the sink. The shard takes it out in order, but answers may overtake it.
    fn sink(&mut self, process: u32, shard: ShardId, reply: delivery::Reply) {
        let lingers = if self.chance.permille(self.rates.sink_slow) {
            self.chance.millis(1, 400)
        } else {
            Duration::ZERO
        };
        let owner = &mut self.processes[process as usize];
        let slot = &mut owner.slots[shard.0 as usize];
        let at = slot.sink_until.max(self.now + lingers);
        if at <= self.now {
            self.hand(process, shard, Event::Delivery(reply));
            return;
        }
        slot.sink_until = at;
        let start = owner.start;
        self.disturbed(process, at);
        self.put_local(at, process, start, Local::Sunk { shard, reply });
    }

    fn insert_turn(&mut self, process: u32, insert: Insert, aborts: u32) {
        let owner = &self.processes[process as usize];
        let shard = insert.shard;
        let slot = &owner.slots[shard.0 as usize];
        if slot.aborts != aborts {
            return;
        }
        let flight = (process, owner.start, shard, insert.attempt);
        if owner.clock(self.now) > insert.send_by {
            self.marks.hit(Mark::SentLateDropped);
            self.answer_insert(flight, insert.table, InsertOutcome::Stale);
            return;
        }
        let stale = owner.lasts(self.scenario.stale);
        let sent = self.intents.sent(self.now, owner.session, slot.epoch, &insert, stale);
        let client = owner.client();
        let cut = owner.store_cut > self.now;
        self.note(Happening::Sent {
            process,
            shard: shard.0,
            table: table_index(&insert.table),
            attempt: insert.attempt.0,
            token: insert.token.0.to_string(),
            seqs: seqs(&insert.rows),
        });
        self.check(sent);
        if (cut || !self.store_up) && self.chance.permille(500) {
            let refusal = Refusal { code: None, message: "connection refused".to_owned() };
            self.answer_insert(flight, insert.table, InsertOutcome::Again(refusal));
            return;
        }
        let reply_by = self.now + Scenario::INSERT_TIMEOUT;
        self.flights.insert(flight, reply_by);
        self.agenda.put(reply_by, Due::InsertTimedOut(flight, insert.table.clone()));
        if cut || !self.store_up || self.chance.permille(self.rates.insert_cut) {
            return;
        }
        let at = self.now + self.latency();
        self.agenda.put(at, Due::AtStore { from: client, insert: Box::new(insert) });
    }

    /// Tells a process how its insert ended.
    fn answer_insert(&mut self, flight: Flight, table: TableName, outcome: InsertOutcome) {
        let (process, start, shard, attempt) = flight;
        let at = self.now + self.latency();
        let reply = store::Reply::Inserted { attempt, table, outcome };
        self.put_local(at, process, start, Local::Store { shard, reply });
    }

    fn hand(&mut self, process: u32, shard: ShardId, event: Event) {
        let mut actions = Actions::default();
        let owner = &mut self.processes[process as usize];
        let now = owner.clock(self.now);
        let slot = &mut owner.slots[shard.0 as usize];
        slot.machine.handle(now, event, &mut actions);
        if self.checks_core
            && let Err(defect) = slot.machine.validate()
        {
            self.check(violated("core state", defect));
        }
        self.watch(process, shard, &actions);
        for action in actions.drain() {
            match action {
                Action::Delivery(command) => self.send_delivery(process, shard, command),
                Action::Ledger(command) => self.send_ledger(process, Asker::Shard(shard), command),
                Action::Store(command) => self.send_store(process, shard, command),
                Action::Notice(notice) => self.told(process, shard, notice),
                Action::Report(report) => self.reported(process, shard, report),
            }
        }
        self.set_wake(process, shard);
    }

    fn set_wake(&mut self, process: u32, shard: ShardId) {
        let owner = &mut self.processes[process as usize];
        if !owner.up {
            return;
        }
        let start = owner.start;
        let slot = &owner.slots[shard.0 as usize];
        let Some(next) = slot.machine.next_wakeup() else {
            owner.slots[shard.0 as usize].wake = None;
            return;
        };
        let due = owner.when(next);
        let soonest = self.now + Duration::from_micros(10);
        let slot = &mut owner.slots[shard.0 as usize];
        slot.spins = if due <= self.now { slot.spins + 1 } else { 0 };
        let spins = slot.spins > 5_000 && self.checks_core;
        let due = due.max(soonest);
        if slot.wake != Some(due) {
            slot.wake = Some(due);
            self.put_local(due, process, start, Local::Wake(shard));
        }
        if spins {
            self.check(violated(
                lands::NAME,
                format!("p{process} s{shard} wakes again and again, to no end"),
            ));
        }
    }

    /// Looks at a shard after an event: budget, phase, halts.
    fn watch(&mut self, process: u32, shard: ShardId, actions: &Actions) {
        let owner = &mut self.processes[process as usize];
        let slot = &mut owner.slots[shard.0 as usize];
        let status = slot.machine.status();
        let held = (status.held_rows, status.held_bytes);
        let (phase, epoch, accepted) = (status.phase, status.epoch, status.accepted);
        let owns = status.pin.is_some() && phase != "taking over";
        // What an earlier tenure left open can only be finished with rows from the stream.
        let inherited = self.intents.inherited_rows(shard);
        let troubled = !status.troubles.is_empty() || status.ledger_trouble.is_some() || inherited > 0;
        let pin = status.pin.filter(|pin| slot.pin.as_ref() != Some(pin)).cloned();
        let share = status.share;
        let mut checks = Vec::new();
        let asks = |action: &Action| matches!(action, Action::Ledger(ledger::Command::Read { .. }));
        if phase == "owning" && slot.phase == "owning" && actions.as_slice().iter().any(asks) {
            // An owner reads its record for two reasons, and after a conflict is the other.
            if !std::mem::take(&mut slot.conflicted) {
                self.marks.hit(Mark::StaleIntentRead);
            }
        }
        for action in actions.as_slice() {
            if let Action::Delivery(delivery::Command::Pull(pull)) = action
                && owns
                && pull.max_bytes != Some(1)
            {
                checks.push(slot.budget.pulled(pull, share, held, self.largest, inherited));
                if pull.max_bytes.is_none() {
                    self.marks.hit(Mark::LargeRowAlone);
                }
            }
        }
        checks.push(slot.budget.held(held));
        if let Some(stopping) = &slot.stopping {
            if phase == "halting" {
                checks.push(stopping.halting(accepted));
            }
            if phase == "releasing" && matches!(slot.phase, "halting" | "owning") {
                // What it held before this event: whatever lets go of rows leads to a write first.
                checks.push(stopping.released(self.now, slot.held, slot.troubled));
                if self.now >= stopping.deadline() {
                    self.marks.hit(Mark::LateRelease);
                }
            }
        }
        let changed = (slot.phase, slot.epoch) != (phase, epoch);
        if phase == "releasing" && slot.phase != "releasing" {
            // From here on only a look that follows says whose the pin is.
            self.pins.looked(process, shard, None);
        }
        (slot.phase, slot.epoch) = (phase, epoch);
        slot.troubled = troubled;
        slot.held = held.0;
        if phase != "owning" {
            slot.reset_at = None;
        }
        if let Some(pin) = pin {
            slot.pin = Some(pin);
        }
        if changed {
            self.note(Happening::Phase { process, shard: shard.0, phase, epoch });
        }
        for checked in checks {
            self.check(checked);
        }
    }

    fn told(&mut self, process: u32, shard: ShardId, notice: Notice) {
        if let Notice::Resynced { reason } = &notice {
            let slot = &mut self.processes[process as usize].slots[shard.0 as usize];
            let before = slot.reset_at.replace(self.now);
            if let (Some(before), ResyncReason::Gap | ResyncReason::WentBack | ResyncReason::OtherPin) =
                (before, reason)
            {
                let checked = self.resyncs.again(shard, before);
                self.check(checked);
            }
        }
        let mark = match &notice {
            Notice::Resynced { reason } => match reason {
                ResyncReason::Gap => Some(Mark::Gap),
                ResyncReason::WentBack => Some(Mark::WentBack),
                ResyncReason::Tail => Some(Mark::LostTail),
                ResyncReason::Disrupted => Some(Mark::Disrupted),
                ResyncReason::DeadPull => Some(Mark::DeadPull),
                ResyncReason::Stranded => Some(Mark::Stranded),
                ResyncReason::NewPin | ResyncReason::OtherPin => None,
            },
            Notice::Repeats { .. } => Some(Mark::Repeats),
            Notice::TokenBurned { .. } => Some(Mark::GenerationRaised),
            Notice::RowsRemoved { .. } => Some(Mark::RowsRemoved),
            Notice::StreamMadeAnew => Some(Mark::StreamAnew),
            Notice::Trouble { trouble: Trouble::Table(_), .. } => Some(Mark::TableMissing),
            Notice::Trouble { trouble: Trouble::BadRow { .. }, .. } => Some(Mark::BadRow),
            Notice::TenureEnded { why, .. } if why.starts_with("another tenure") => {
                if self.processes[process as usize].running_since + Duration::from_millis(500) > self.now {
                    self.marks.hit(Mark::ThawedFenced);
                }
                Some(Mark::ConflictEndedTenure)
            }
            _ => None,
        };
        if let Some(mark) = mark {
            self.marks.hit(mark);
        }
        if let Notice::BatchStored { batch, attempts, .. } = &notice {
            let record = self.intents.current(shard);
            let inherited =
                record.is_some_and(|record| self.intents.is_inherited(shard, record, batch.first));
            if inherited {
                self.marks.hit(if *attempts == 0 { Mark::InheritedComplete } else { Mark::InheritedSent });
            }
        }
        if let Notice::Trouble { trouble, .. } = &notice {
            let checked = self.causes.troubled(trouble);
            self.check(checked);
        }
        self.note(Happening::Told { process, shard: shard.0, notice: Box::new(notice) });
    }

    fn reported(&mut self, process: u32, shard: ShardId, report: Report) {
        let owner = &mut self.processes[process as usize];
        let slot = &mut owner.slots[shard.0 as usize];
        match &report {
            Report::Released { clean } => {
                slot.over = true;
                if *clean {
                    self.marks.hit(Mark::CleanRelease);
                }
            }
            Report::Failed(failure) => {
                slot.over = true;
                match failure {
                    ShardFailure::ConsumerGone(_) => {
                        slot.lost_consumer = true;
                        self.marks.hit(Mark::ConsumerGone);
                        // Somebody sees it, makes the consumer again and starts the process anew.
                        let start = owner.start;
                        let at = self.now + self.chance.millis(9_000, 12_000);
                        self.agenda.put(at, Due::Replace { process, start });
                    }
                    ShardFailure::SequencesReused(_) => {
                        slot.reused = true;
                        self.marks.hit(Mark::SequencesReused);
                    }
                    ShardFailure::StartNeeded | ShardFailure::Record(_) => {}
                }
                let checked = self.causes.failed(shard.0, failure);
                self.check(checked);
            }
            Report::Ready | Report::Owned | Report::Lost => {}
        }
        self.note(Happening::Reported { process, shard: shard.0, report: Box::new(report) });
        let owner = &self.processes[process as usize];
        if let Some(down) = owner.stopping
            && owner.slots.iter().all(|slot| slot.over)
        {
            self.note(Happening::Process { process, what: "has stopped" });
            self.down(process, down);
        }
    }

    fn hand_trim(&mut self, process: u32, event: trim::Event) {
        let owner = &mut self.processes[process as usize];
        let now = owner.clock(self.now);
        let mut actions = Vec::new();
        owner.trim.handle(now, event, &mut actions);
        let next = owner.trim.next_wakeup().map(|next| owner.when(next));
        let start = owner.start;
        for action in actions {
            match action {
                trim::Action::Ledger(command) => self.send_ledger(process, Asker::Trim, command),
                trim::Action::Retention(command) => self.send_retention(process, command),
                trim::Action::Notice(_) => {}
            }
        }
        if let Some(due) = next {
            let due = due.max(self.now + Duration::from_micros(10));
            self.processes[process as usize].trim_wake = Some(due);
            self.put_local(due, process, start, Local::WakeTrim);
        }
    }

    // ---- the stream's server -------------------------------------------------------------------------

    fn send_delivery(&mut self, process: u32, shard: ShardId, command: delivery::Command) {
        let owner = &mut self.processes[process as usize];
        let client = owner.client();
        let connected = owner.connected;
        let slot = &mut owner.slots[shard.0 as usize];
        match command {
            delivery::Command::Pull(pull) => {
                let open = OpenPull { inbox: pull.inbox, batch: pull.batch, got: 0 };
                slot.pulls.insert(pull.attempt, open);
                if !connected {
                    if self.chance.permille(500) {
                        let failure = Failure::new(FailureClass::Unavailable, "not connected");
                        let (attempt, end) = (pull.attempt, PullEnd::Failed(failure));
                        let at = self.now + Duration::from_micros(50);
                        self.put_local(
                            at,
                            process,
                            client.start,
                            Local::Ended { client, shard, attempt, end },
                        );
                    }
                    return;
                }
                if self.chance.permille(self.rates.pull_lost) {
                    let until = self.now + pull.expires + Duration::from_secs(2);
                    self.disturbed(process, until);
                    return;
                }
                let at = self.outwards(process, true);
                let command = delivery::Command::Pull(pull);
                self.agenda.put(at, Due::AtStream { from: client, shard, command, reply_by: None });
            }
            delivery::Command::Close { inbox } => {
                self.close_inboxes(process, shard, inbox);
                if connected {
                    let at = self.outwards(process, true);
                    let command = delivery::Command::Close { inbox };
                    self.agenda.put(at, Due::AtStream { from: client, shard, command, reply_by: None });
                }
            }
            delivery::Command::Reset { attempt, inbox, from } => {
                self.close_inboxes(process, shard, Inbox(inbox.0.saturating_sub(1)));
                if connected {
                    // The UNSUBs leave before the request.
                    let at = self.outwards(process, true);
                    let command = delivery::Command::Close { inbox: Inbox(inbox.0.saturating_sub(1)) };
                    self.agenda.put(at, Due::AtStream { from: client, shard, command, reply_by: None });
                }
                self.call_stream(client, shard, delivery::Command::Reset { attempt, inbox, from });
            }
            command @ delivery::Command::Inspect { .. } => self.call_stream(client, shard, command),
            delivery::Command::Unpin { attempt } => {
                if !self.pins.knows(process, shard, slot.pin.as_ref()) {
                    self.blind_unpins.insert((process, client.start, shard, attempt));
                }
                self.call_stream(client, shard, delivery::Command::Unpin { attempt });
            }
        }
    }

    fn close_inboxes(&mut self, process: u32, shard: ShardId, inbox: Inbox) {
        let owner = &mut self.processes[process as usize];
        let client = owner.client();
        let slot = &mut owner.slots[shard.0 as usize];
        slot.closed = slot.closed.max(inbox);
        let closed: Vec<Attempt> =
            slot.pulls.iter().filter(|(_, pull)| pull.inbox <= inbox).map(|(attempt, _)| *attempt).collect();
        for attempt in closed {
            let at = self.now + Duration::from_micros(20);
            let end = PullEnd::Closed;
            self.put_local(at, process, client.start, Local::Ended { client, shard, attempt, end });
        }
    }

    fn call_stream(&mut self, client: Client, shard: ShardId, command: delivery::Command) {
        let Some(reply) = unanswered_stream(&command) else { return };
        let unanswered = Local::Delivery { client: None, shard, reply };
        if let Some((at, reply_by)) = self.request(client, unanswered) {
            let slot = &self.processes[client.process as usize].slots[shard.0 as usize];
            let epoch = slot.epoch;
            let astray = slot.reset_at.is_some() && self.astray.contains(&shard);
            if matches!(command, delivery::Command::Reset { .. }) && (astray || reply_by.is_none()) {
                if astray {
                    self.astray.remove(&shard);
                    let unpinned = self.now + Duration::from_millis(300);
                    self.agenda.put(unpinned, Due::Unpin(shard));
                }
                self.no_answer(
                    client,
                    reply_by,
                    unanswered_stream(&command).map(|reply| Local::Delivery { client: None, shard, reply }),
                );
                self.lurking.push(Lurking::Reset { from: client, epoch, shard, command });
                let end = at + Duration::from_secs(10);
                self.agenda.put(end, Due::EndLurking);
                return;
            }
            self.agenda.put(at, Due::AtStream { from: client, shard, command, reply_by });
        }
    }

    fn answer_stream(
        &mut self,
        to: Client,
        shard: ShardId,
        reply: delivery::Reply,
        reply_by: Option<Duration>,
    ) {
        let unanswered = match &reply {
            delivery::Reply::Reset { attempt, .. } => {
                delivery::Reply::Reset { attempt: *attempt, outcome: Err(unanswered()) }
            }
            delivery::Reply::Unpinned { attempt, .. } => {
                delivery::Reply::Unpinned { attempt: *attempt, outcome: Err(unanswered()) }
            }
            delivery::Reply::Inspected { attempt, .. } => unanswered_look(*attempt),
            other => other.clone(),
        };
        let unanswered = Local::Delivery { client: None, shard, reply: unanswered };
        self.answer(to, reply_by, Local::Delivery { client: Some(to), shard, reply }, unanswered);
    }

    /// The server has no answer: the caller waits until its time is up.
    fn no_answer(&mut self, to: Client, reply_by: Option<Duration>, unanswered: Option<Local>) {
        if let (Some(reply_by), Some(unanswered)) = (reply_by, unanswered) {
            self.disturbed(to.process, reply_by);
            self.put_local(reply_by, to.process, to.start, unanswered);
        }
    }

    /// Lets those arrive that waited for this moment.
    fn let_arrive(&mut self, behind: Option<(u32, Option<u64>)>, of: ShardId) {
        let (arriving, lurking) = std::mem::take(&mut self.lurking).into_iter().partition(|one| match one {
            Lurking::Reset { from, epoch, shard, .. } => {
                *shard == of && behind.is_some_and(|behind| behind != (from.process, *epoch))
            }
            Lurking::Write { shard, .. } => behind.is_none() && *shard == of,
        });
        self.lurking = lurking;
        for one in Vec::<Lurking>::into_iter(arriving) {
            let at = self.now + self.chance.time(Duration::ZERO, self.scenario.latency);
            self.agenda.put(at, one.due());
        }
    }

    fn at_stream(
        &mut self,
        from: Client,
        shard: ShardId,
        command: delivery::Command,
        reply_by: Option<Duration>,
    ) {
        let unanswered =
            unanswered_stream(&command).map(|reply| Local::Delivery { client: None, shard, reply });
        if !self.broker_up {
            self.no_answer(from, reply_by, unanswered);
            return;
        }
        match &command {
            delivery::Command::Inspect { attempt, floor } => {
                // Three questions, of which the consumer's comes last; the world goes on in between.
                let seen = Box::new(self.stream.look_at_stream());
                let at = self.now + self.latency();
                let (attempt, floor) = (*attempt, *floor);
                self.agenda.put(at, Due::AtRows { from, shard, attempt, floor, seen, reply_by });
                return;
            }
            delivery::Command::Reset { from: seq, .. } => {
                self.note(Happening::Asked {
                    process: from.process,
                    shard: shard.0,
                    what: format!("resets to {seq}"),
                });
                if reply_by.is_none() {
                    self.marks.hit(Mark::LateReset);
                }
                self.resyncs.disturbed(self.now, shard);
                if self.stream.holder(shard).is_some_and(|(holder, _)| holder.process != from.process) {
                    self.marks.hit(Mark::ResetByOther);
                }
            }
            delivery::Command::Unpin { attempt } => {
                self.note(Happening::Asked {
                    process: from.process,
                    shard: shard.0,
                    what: "unpins".to_owned(),
                });
                let other =
                    self.stream.holder(shard).is_some_and(|(holder, _)| holder.process != from.process);
                if other {
                    self.marks.hit(Mark::UnpinRaced);
                }
                if other && self.blind_unpins.contains(&(from.process, from.start, shard, *attempt)) {
                    let how =
                        format!("p{} took another's pin of {shard} without having looked", from.process);
                    self.check(violated(pin::NAME, how));
                }
            }
            delivery::Command::Pull(_) | delivery::Command::Close { .. } => {}
        }
        if matches!(command, delivery::Command::Reset { .. }) {
            let slot = self.processes[from.process as usize].slots.get(shard.0 as usize);
            self.let_arrive(Some((from.process, slot.and_then(|slot| slot.epoch))), shard);
        }
        let reply = self.stream.handle(self.now, from, shard, command);
        if let Some(reply) = reply {
            self.answer_stream(from, shard, reply, reply_by);
        } else {
            // A consumer that is not there does not answer a reset.
            self.no_answer(from, reply_by, unanswered);
        }
        self.serve_stream();
    }

    /// Carries away what the stream's server wants sent, and looks at its pins.
    fn serve_stream(&mut self) {
        for change in self.stream.take_pin_changes() {
            match change {
                PinChange::Taken { shard, by, .. } => {
                    self.note(Happening::Pin { shard: shard.0, process: by.process, what: "is given" });
                }
                PinChange::Lapsed { shard, of, pin } => {
                    self.marks.hit(Mark::PinLapsed);
                    self.note(Happening::Pin { shard: shard.0, process: of.process, what: "lapses" });
                    let owner = &self.processes[of.process as usize];
                    let owns = owner.up
                        && owner.start == of.start
                        && owner.frozen_until.is_none()
                        && owner.slots[shard.0 as usize].machine.status().pin == Some(&pin);
                    let ttl = self.scenario.pinned_ttl;
                    let checked = self.pins.lapsed(self.now, shard, of.process, owns, ttl);
                    self.check(checked);
                }
            }
        }
        for outgoing in self.stream.take_outgoing() {
            match outgoing {
                Outgoing::Rows { to, shard, attempt, rows } => self.deliver(to, shard, attempt, rows),
                Outgoing::Ended { to, shard, attempt, end } => {
                    if self.chance.permille(self.rates.status_lost) {
                        let until = self.now + Duration::from_secs(2) + self.scenario.pinned_ttl;
                        self.disturbed(to.process, until);
                        continue;
                    }
                    let at = self.inwards(to.process, true);
                    self.put_local(
                        at,
                        to.process,
                        to.start,
                        Local::Ended { client: to, shard, attempt, end },
                    );
                }
            }
        }
        if let Some(due) = self.stream.next_wakeup()
            && self.stream_tick.is_none_or(|at| at > due)
        {
            self.stream_tick = Some(due);
            self.agenda.put(due.max(self.now), Due::StreamTick);
        }
    }

    fn deliver(&mut self, to: Client, shard: ShardId, attempt: Attempt, rows: Rows) {
        let Rows { inbox, pin, mut rows } = rows;
        let planned = self.deliveries_to_lose.get(&shard).copied().unwrap_or_default();
        let before = rows.len();
        if planned > 0 {
            let lost = rows.len().min(planned as usize);
            rows.drain(..lost);
            self.deliveries_to_lose.insert(shard, planned - u32::try_from(lost).unwrap_or(planned));
        } else if self.chance.permille(self.rates.rows_lost) {
            let chance = &mut self.chance;
            rows.retain(|_| !chance.permille(500));
        }
        if rows.len() < before {
            self.marks.hit(Mark::RowsLost);
            self.resyncs.disturbed(self.now, shard);
            let until = self.now + self.scenario.pinned_ttl + Duration::from_secs(2);
            self.disturbed(to.process, until);
        }
        // What was sent in one go may arrive in pieces.
        while !rows.is_empty() {
            let piece = if self.chance.permille(100) {
                self.chance.between(1, rows.len() as u64)
            } else {
                rows.len() as u64
            };
            let piece = usize::try_from(piece).unwrap_or(1);
            let rest = rows.split_off(piece);
            let at = self.inwards(to.process, true);
            let rows = Rows { inbox, pin: pin.clone(), rows: std::mem::replace(&mut rows, rest) };
            self.put_local(at, to.process, to.start, Local::Rows { client: to, shard, attempt, rows });
        }
    }

    fn publish(&mut self, at: usize) {
        if !self.broker_up {
            let again = self.now + Duration::from_millis(100);
            self.agenda.put(again, Due::Publish(at));
            return;
        }
        let plan = &self.scenario.rows[at];
        let shard = self.scenario.tables[plan.table as usize].shard;
        let number = at as u64;
        let verdict = if plan.bad { Verdict::Bad("not an object".into()) } else { Verdict::Good };
        let message = Message {
            shard: ShardId(shard),
            table: table_name(plan.table),
            payload: jetstream::payload(number, plan.size),
            verdict,
        };
        let (table, bad) = (plan.table, plan.bad);
        let stored_at =
            Timestamp(1_700_000_000_000_000_000 + i64::try_from(self.now.as_nanos()).unwrap_or(0) + 1);
        let seq = self.stream.last().seq.next();
        let created = self.stream.created();
        self.truth.published(Fact {
            number,
            table,
            shard,
            created,
            seq,
            stored_at,
            bad,
            landed: 0,
            gone: false,
        });
        self.note(Happening::Published { row: number, table, shard, seq: seq.0 });
        self.stream.publish(self.now, message, stored_at);
        self.serve_stream();
    }

    fn send_retention(&mut self, process: u32, command: retention::Command) {
        let retention::Command::Trim { attempt, .. } = command;
        let client = self.processes[process as usize].client();
        let outcome = Err(unanswered());
        let unanswered = Local::Retention(retention::Reply::Trimmed { attempt, outcome });
        if let Some((at, reply_by)) = self.request(client, unanswered) {
            self.agenda.put(at, Due::AtRetention { from: client, command, reply_by });
        }
    }

    fn at_retention(&mut self, from: Client, command: &retention::Command, reply_by: Option<Duration>) {
        let retention::Command::Trim { attempt, .. } = *command;
        let unanswered = Local::Retention(retention::Reply::Trimmed { attempt, outcome: Err(unanswered()) });
        if !self.broker_up {
            self.no_answer(from, reply_by, Some(unanswered));
            return;
        }
        let (reply, removed) = self.stream.trim(command);
        if !removed.is_empty() {
            self.marks.hit(Mark::Trimmed);
            let created = self.stream.created();
            let intents = &self.intents;
            let checked =
                trimmed::removed(&self.truth, created, &removed, |shard| intents.current(ShardId(shard)));
            self.check(checked);
            let seqs = removed.iter().map(|seq| seq.0).collect();
            self.note(Happening::Removed { why: "a trim", seqs });
        }
        self.answer(from, reply_by, Local::Retention(reply), unanswered);
    }

    // ---- the ledger ----------------------------------------------------------------------------------

    fn send_ledger(&mut self, process: u32, asker: Asker, command: ledger::Command) {
        let client = self.processes[process as usize].client();
        let reply = unanswered_ledger(&command);
        let unanswered = Local::Ledger { client: None, asker, reply };
        if let Some((at, reply_by)) = self.request(client, unanswered) {
            if matches!(command, ledger::Command::Write { .. })
                && self.chance.permille(self.rates.write_twice)
            {
                let again = at + self.chance.millis(0, 6_000);
                let command = command.clone();
                self.agenda
                    .put(again, Due::AtLedger { from: client, asker, command, reply_by: None, again: true });
            }
            if reply_by.is_none()
                && let ledger::Command::Write { shard, .. } = command
            {
                self.lurking.push(Lurking::Write { from: client, shard, asker, command });
                self.agenda.put(at, Due::EndLurking);
                return;
            }
            self.agenda.put(at, Due::AtLedger { from: client, asker, command, reply_by, again: false });
        }
    }

    fn at_ledger(
        &mut self,
        from: Client,
        asker: Asker,
        command: &ledger::Command,
        reply_by: Option<Duration>,
        again: bool,
    ) {
        if !self.broker_up {
            let reply = unanswered_ledger(command);
            self.no_answer(from, reply_by, Some(Local::Ledger { client: None, asker, reply }));
            return;
        }
        if again {
            self.marks.hit(Mark::WriteTwice);
        }
        let refuses = matches!(command, ledger::Command::Write { .. })
            && self.chance.permille(self.rates.write_refused);
        let reply = if refuses && let ledger::Command::Write { attempt, .. } = command {
            let failure = Failure::new(FailureClass::Unavailable, "no quorum");
            ledger::Reply::Written { attempt: *attempt, outcome: WriteOutcome::Refused(failure) }
        } else {
            self.bucket.handle(command)
        };
        if let (ledger::Command::Write { shard, record, .. }, ledger::Reply::Written { outcome, .. }) =
            (command, &reply)
        {
            match outcome {
                WriteOutcome::Stored(revision) => {
                    if reply_by.is_none() && !again {
                        self.marks.hit(Mark::LateWriteStored);
                    }
                    self.recorded(from, *shard, revision.0, record);
                }
                WriteOutcome::Conflict => self.conflicted(from, *shard, record),
                WriteOutcome::Unknown(_) | WriteOutcome::Refused(_) => {}
            }
        }
        if let (ledger::Command::Read { shard, .. }, Asker::Shard(_)) = (command, asker) {
            let slot = self.processes[from.process as usize].slots.get(shard.0 as usize);
            if slot.is_some_and(|slot| slot.phase == "taking over") {
                self.let_arrive(None, *shard);
            }
        }
        let unanswered = Local::Ledger { client: None, asker, reply: unanswered_ledger(command) };
        self.answer(from, reply_by, Local::Ledger { client: Some(from), asker, reply }, unanswered);
    }

    fn recorded(&mut self, from: Client, shard: ShardId, revision: u64, bytes: &[u8]) {
        let record = match Record::decode(bytes) {
            Ok(record) => record,
            Err(error) => {
                self.check(violated(record::NAME, error.to_string()));
                return;
            }
        };
        let open = record
            .lanes
            .iter()
            .filter_map(|(table, lane)| Some((table, lane.open.as_ref()?.batch)))
            .map(|(table, batch)| (table_index(table), batch.first.0, batch.last.0, batch.generation))
            .collect();
        let stored = Some((revision, record.epoch, record.floor.0));
        self.note(Happening::Ledger { shard: shard.0, process: from.process, stored, open });
        let session = self.sessions.get(&(from.process, from.start)).copied();
        let before = self.intents.current(shard);
        let kept = record::stored(before, &record, session);
        let complete = once::recorded(&self.truth, shard.0, before, &record, self.causes.tail_lost);
        self.check(kept);
        self.check(complete);
        self.intents.stored(self.now, shard, record);
    }

    fn conflicted(&mut self, from: Client, shard: ShardId, bytes: &[u8]) {
        self.note(Happening::Ledger {
            shard: shard.0,
            process: from.process,
            stored: None,
            open: Vec::new(),
        });
        let Ok(record) = Record::decode(bytes) else { return };
        let Some(current) = self.intents.current(shard) else { return };
        if (current.writer, current.epoch) == (record.writer, record.epoch) {
            self.marks.hit(Mark::OwnWriteAdopted);
        } else if self.processes[from.process as usize]
            .slots
            .get(shard.0 as usize)
            .is_some_and(|slot| slot.phase == "taking over")
        {
            self.marks.hit(Mark::FenceConflict);
        }
    }

    // ---- the store -----------------------------------------------------------------------------------

    fn send_store(&mut self, process: u32, shard: ShardId, command: store::Command) {
        let owner = &mut self.processes[process as usize];
        let client = owner.client();
        match command {
            store::Command::Insert(insert) => {
                let slot = &mut owner.slots[shard.0 as usize];
                let aborts = slot.aborts;
                let checked = slot.doubts.sends(&insert);
                self.check(checked);
                let at = if self.chance.permille(self.rates.insert_queued) {
                    self.now + self.chance.time(Duration::ZERO, self.scenario.stale * 3 / 2)
                } else {
                    self.now + self.chance.time(Duration::ZERO, Duration::from_micros(300))
                };
                self.put_local(at, process, client.start, Local::Turn { insert, aborts });
            }
            store::Command::Abort { .. } => {
                let slot = &mut owner.slots[shard.0 as usize];
                slot.aborts += 1;
                slot.doubts = Doubts::default();
                let ours = |flight: &Flight| (flight.0, flight.1, flight.2) == (process, client.start, shard);
                self.flights.retain(|flight, _| !ours(flight));
            }
            command => {
                let reply_by = self.now + Scenario::INSERT_TIMEOUT;
                if owner.store_cut > self.now
                    || !self.store_up
                    || self.chance.permille(self.rates.question_failed)
                {
                    let at = if self.chance.permille(500) {
                        reply_by
                    } else {
                        self.now + Duration::from_millis(1)
                    };
                    if let Some(reply) = unanswered_store(&command) {
                        self.put_local(at, process, client.start, Local::Store { shard, reply });
                    }
                    return;
                }
                let at = self.now + self.latency();
                self.agenda.put(at, Due::AskStore { from: client, shard, command, reply_by });
            }
        }
    }

    fn ask_store(&mut self, from: Client, shard: ShardId, command: &store::Command, reply_by: Duration) {
        let reply =
            if self.store_up { self.store.answer(self.now, command) } else { unanswered_store(command) };
        let (Some(reply), Some(unanswered)) = (reply, unanswered_store(command)) else { return };
        let late = self.chance.permille(self.rates.answer_late);
        let mut at = self.now + self.latency();
        if late {
            at += self.chance.millis(10, 4_000);
        }
        let reply = if at > reply_by { unanswered } else { reply };
        self.put_local(at.min(reply_by), from.process, from.start, Local::Store { shard, reply });
    }

    fn at_store(&mut self, from: Client, insert: Insert) {
        if !self.store_up {
            return;
        }
        let fate = self.draw_fate(&insert);
        let rotated = usize::try_from(self.chance.below(8)).unwrap_or(0);
        self.store.insert(self.now, from, insert, fate, rotated);
        self.serve_store();
    }

    fn draw_fate(&mut self, insert: &Insert) -> Fate {
        let quick = self.chance.time(Duration::from_millis(1), self.scenario.insert_time);
        let code = |code: u32, message: &str| Refusal { code: Some(code), message: message.to_owned() };
        if self.now < self.store_refuses_until || self.chance.permille(self.rates.insert_refused) {
            let refusal = if self.chance.permille(500) {
                code(252, "too many parts")
            } else {
                code(241, "memory limit exceeded")
            };
            return Fate::Refused { after: quick, refusal };
        }
        let parts = self.store.parts_of(insert) as u64;
        if self.chance.permille(self.rates.insert_killed) {
            let landed = usize::try_from(self.chance.below(parts + 1)).unwrap_or(0);
            return Fate::Killed { after: quick, landed, burned: false };
        }
        if self.chance.permille(self.rates.insert_burned) && self.may_burn(insert) {
            let landed = usize::try_from(self.chance.below(parts)).unwrap_or(0);
            return Fate::Killed { after: quick, landed, burned: true };
        }
        let slow = self.now < self.store_slow_until || self.chance.permille(self.rates.insert_slow);
        let most = Scenario::INSERT_LIFE;
        let after = if slow { self.chance.time(quick, most * 2 / 3) } else { quick };
        let left = (most - after) / u32::try_from(parts.max(1)).unwrap_or(1);
        let pace = if slow { self.chance.time(Duration::ZERO, left) } else { self.chance.millis(0, 3) };
        Fate::Lands { after, pace }
    }

    /// Whether a token of the batch may be burned (once more).
    fn may_burn(&mut self, insert: &Insert) -> bool {
        // A table that cannot be read back cannot be repaired: its level says so.
        let Some(bounds) = intent::bounds(&insert.token) else { return false };
        if insert.target.level != Level::ExactlyOnce {
            return false;
        }
        let times = self.burns.entry((insert.table.clone(), insert.created, bounds.first)).or_default();
        *times += 1;
        *times <= 2
    }

    fn serve_store(&mut self) {
        for part in self.store.take_parts() {
            self.part(&part);
        }
        for (from, insert, outcome) in self.store.take_replies() {
            let flight = (from.process, from.start, insert.shard, insert.attempt);
            if !self.flights.contains_key(&flight) {
                continue;
            }
            if self.chance.permille(self.rates.insert_unanswered)
                || self.processes[from.process as usize].store_cut > self.now
            {
                // The client finds out when its time is up.
                continue;
            }
            self.flights.remove(&flight);
            self.answer_insert(flight, insert.table, outcome);
        }
        if let Some(due) = self.store.next_wakeup()
            && self.store_tick.is_none_or(|at| at > due)
        {
            self.store_tick = Some(due);
            self.agenda.put(due.max(self.now), Due::StoreTick);
        }
    }

    fn part(&mut self, part: &Part) {
        let Part { from, insert, rows, outcome } = part;
        let table = table_index(&insert.table);
        let what = match outcome {
            PartOutcome::Stored => "stores",
            PartOutcome::Repeated => "repeats",
            PartOutcome::Swallowed => "swallows",
            PartOutcome::Burned => "burns",
        };
        self.note(Happening::Part {
            process: from.process,
            shard: insert.shard.0,
            table,
            attempt: insert.attempt.0,
            what,
            seqs: seqs(rows),
        });
        match outcome {
            PartOutcome::Repeated => self.marks.hit(Mark::RepeatDropped),
            PartOutcome::Swallowed => self.marks.hit(Mark::RetrySwallowed),
            PartOutcome::Burned => {}
            PartOutcome::Stored => {
                let session = self.sessions.get(&(from.process, from.start)).copied();
                let owner = self.intents.current(insert.shard).map(|record| record.writer.session);
                if owner != session {
                    self.marks.hit(Mark::ZombieLanded);
                }
                let flight = (from.process, from.start, insert.shard, insert.attempt);
                if !self.flights.contains_key(&flight) {
                    self.marks.hit(Mark::LandedAfterTimeout);
                }
                if rows.len() < insert.rows.len() {
                    self.marks.hit(Mark::PartlyStored);
                }
                let level = insert.target.level;
                let counted = once::landed(&mut self.truth, table, level, insert.created, rows);
                self.check(counted);
                if let Some(bounds) = intent::bounds(&insert.token) {
                    let ordered =
                        self.order.landed(&mut self.truth, table, insert.created, bounds.last, rows);
                    self.check(ordered);
                }
            }
        }
    }

    // ---- what goes wrong -----------------------------------------------------------------------------

    fn fault(&mut self, at: usize) {
        let fault = self.scenario.faults[at].1.clone();
        self.faults += 1;
        self.note(Happening::Fault(fault.to_string()));
        match fault {
            Fault::Crash { process, down } => self.crash(process, down),
            Fault::Pause { process, lasting } => self.freeze(process, lasting),
            Fault::Stop { process, within, down } => self.stop(process, within, down),
            Fault::StopAndPause { process, within, after, lasting } => {
                self.stop(process, within, Duration::from_millis(500));
                let start = self.processes[process as usize].start;
                if self.processes[process as usize].up {
                    let at = self.now + after;
                    // Frozen a moment later, with the handover under way.
                    self.processes[process as usize].frozen_after = Some((start, lasting));
                    self.agenda.put(at, Due::Thaw { process, start });
                }
            }
            Fault::CutNats { process, how, lasting } => self.cut_nats(process, how, lasting),
            Fault::CutStore { process, lasting } => {
                let until = self.now + lasting;
                let cut = &mut self.processes[process as usize].store_cut;
                *cut = (*cut).max(until);
            }
            Fault::Share { process, rows, bytes } => self.set_share(process, Share { rows, bytes }),
            Fault::BrokerRestart { down, forgotten } => self.broker_falls(down, forgotten),
            Fault::TailLost { down, rows } => {
                self.broker_falls(down, 0);
                let created = self.stream.created();
                let lost = self.stream.lose_tail(rows);
                self.truth.removed(created, &lost);
                self.order.tail_lost(self.stream.last().seq);
                self.causes.tail_lost |= !lost.is_empty();
                let seqs = lost.iter().rev().map(|seq| seq.0).collect();
                self.note(Happening::Removed { why: "a lost tail", seqs });
            }
            Fault::LeaderMoves { shard, forgotten, leaderless } => {
                if forgotten > 0 {
                    self.marks.hit(Mark::LeaderForgot);
                }
                self.resyncs.disturbed(self.now, ShardId(shard));
                self.stream.move_leader(self.now, ShardId(shard), forgotten, leaderless);
                let until = self.now + leaderless;
                (0..self.scenario.processes).for_each(|process| self.disturbed(process, until));
                self.serve_stream();
            }
            Fault::Unpin { shard } => self.unpin(ShardId(shard)),
            Fault::ResetAstray { shard } => {
                *self.deliveries_to_lose.entry(ShardId(shard)).or_default() += 1;
                self.astray.insert(ShardId(shard));
            }
            Fault::PurgedUnderWay { shard, down } => self.purge_under_way(ShardId(shard), down),
            Fault::SetBack { shard, by } => {
                let shard = ShardId(shard);
                let from = Seq(self.stream.position(shard).0.saturating_sub(by).max(1));
                let operator = Client { process: u32::MAX, start: 0, link: 0 };
                let reset = delivery::Command::Reset { attempt: Attempt(0), inbox: Inbox(0), from };
                if self.broker_up {
                    self.resyncs.disturbed(self.now, shard);
                    self.stream.handle(self.now, operator, shard, reset);
                }
                self.serve_stream();
            }
            Fault::SetBackUnseen { shard, by } => self.set_back_unseen(ShardId(shard), by),
            Fault::CutUnseen { shard, lasting } => self.cut_unseen(ShardId(shard), lasting),
            Fault::DeliveriesLost { shard, rows } => {
                *self.deliveries_to_lose.entry(ShardId(shard)).or_default() += rows;
            }
            Fault::ConsumerDeleted { shard, lasting } => {
                self.causes.consumer_deleted = true;
                self.stream.delete_consumer(shard as usize);
                let at = self.now + lasting;
                self.agenda.put(at, Due::ConsumerBack(shard));
                self.serve_stream();
            }
            Fault::StreamAnew => {
                self.truth.removed_all();
                let created = Timestamp(self.stream.created().0 + 1_000_000_000);
                self.stream.make_anew(created);
                self.serve_stream();
            }
            Fault::Purged { shard, rows } => {
                let shard = ShardId(shard);
                let here = self.stream.rows_of(shard);
                let at = here.partition_point(|seq| *seq < self.stream.position(shard));
                let back = usize::try_from(self.chance.below(rows as u64 + 1)).unwrap_or(0);
                let gone: Vec<Seq> = here.into_iter().skip(at.saturating_sub(back)).take(rows).collect();
                self.stream.remove(&gone);
                self.truth.removed(self.stream.created(), &gone);
                self.note(Happening::Removed {
                    why: "somebody",
                    seqs: gone.iter().map(|seq| seq.0).collect(),
                });
            }
            Fault::StoreKilled { down, burns } => {
                self.store_up = false;
                let running: Vec<Insert> = self.store.running().cloned().collect();
                let burns: Vec<bool> = running
                    .iter()
                    .map(|insert| self.chance.permille(burns) && self.may_burn(insert))
                    .collect();
                self.store.kill(self.now, &burns);
                self.serve_store();
                let at = self.now + down;
                self.agenda.put(at, Due::StoreUp);
            }
            Fault::StoreSlow { lasting } => self.store_slow_until = self.now + lasting,
            Fault::StoreRefuses { lasting } => self.store_refuses_until = self.now + lasting,
        }
    }

    fn unpin(&mut self, shard: ShardId) {
        if self.broker_up {
            // Whoever had it may not know yet.
            let _ = self.stream.unpin(self.now, shard);
            self.serve_stream();
        }
    }

    fn purge_under_way(&mut self, shard: ShardId, down: Duration) {
        let here = self.stream.rows_of(shard);
        let fits = |insert: &&Insert| {
            insert.shard == shard
                && insert.rows.len() > 1
                && insert.rows.iter().all(|row| here.contains(&row.seq))
        };
        let Some(insert) = self.store.running().find(fits).cloned() else {
            // Not now: when the next one is on its way.
            let again = self.now + Duration::from_millis(20);
            if !self.quiet {
                self.agenda.put(again, Due::PurgeUnderWay { shard, down });
            }
            return;
        };
        let gone: Vec<Seq> = insert.rows.iter().map(|row| row.seq).take(insert.rows.len() / 2).collect();
        self.store.linger(shard, Scenario::INSERT_LIFE / 2);
        self.stream.remove(&gone);
        self.truth.removed(self.stream.created(), &gone);
        self.note(Happening::Removed { why: "somebody", seqs: gone.iter().map(|seq| seq.0).collect() });
        if let Some((holder, _)) = self.stream.holder(shard) {
            self.crash(holder.process, down);
        }
    }

    fn all_disturbed(&mut self) {
        for shard in 0..self.scenario.shards {
            self.resyncs.disturbed(self.now, ShardId(shard));
        }
    }

    fn set_back_unseen(&mut self, shard: ShardId, by: u64) {
        if !self.broker_up {
            return;
        }
        let (first, rows) = self.stream.delivered(shard);
        let Some(first) = first else { return };
        // Known and not closed: where rows of this numbering have left the stream, others are missed.
        let last = self.stream.position(shard);
        let here = self.stream.rows_of(shard).into_iter().filter(|seq| (first..last).contains(seq));
        if here.count() != rows {
            return;
        }
        self.resyncs.disturbed(self.now, shard);
        self.stream.set_back(shard, Seq(first.0.saturating_sub(by).max(1)));
        self.stream.deliver_to_nobody(shard, rows);
        self.serve_stream();
    }

    fn cut_unseen(&mut self, shard: ShardId, lasting: Duration) {
        let Some((holder, _)) = self.stream.holder(shard) else { return };
        let Some(owner) = self.processes.get_mut(holder.process as usize) else { return };
        if !self.broker_up || !owner.up || !owner.connected || owner.client() != holder {
            return;
        }
        let until = self.now + lasting;
        owner.link += 1;
        owner.connected = false;
        let (process, start, link) = (owner.id, owner.start, owner.link);
        self.disturbed(process, until);
        self.all_disturbed();
        let floor = self.intents.current(shard).map_or(Seq::ZERO, |record| record.floor);
        let (_, rows) = self.stream.delivered(shard);
        self.stream.set_back(shard, floor.next());
        self.stream.deliver_to_nobody(shard, rows);
        self.stream.disconnect(self.now, holder);
        self.serve_stream();
        self.agenda.put(until, Due::LinkUp { process, start, link });
    }

    fn start(&mut self, process: u32) {
        if self.processes[process as usize].up {
            return;
        }
        let session = Session(self.chance.below(u64::MAX));
        let owner = &mut self.processes[process as usize];
        owner.begin(&self.scenario, self.now, session);
        let client = owner.client();
        self.sessions.insert((process, client.start), session);
        self.note(Happening::Process { process, what: "starts" });
        if self.broker_up {
            self.stream.connect(client, vec![Inbox(0); self.scenario.shards as usize]);
        } else {
            self.processes[process as usize].connected = false;
        }
        let until = self.now;
        self.disturbed(process, until);
        for shard in 0..self.scenario.shards {
            let share = self.processes[process as usize].share;
            self.hand(process, ShardId(shard), Event::Claim(share));
        }
        self.hand_trim(process, trim::Event::Wakeup);
    }

    fn down(&mut self, process: u32, lasting: Duration) {
        let owner = &mut self.processes[process as usize];
        let client = owner.client();
        owner.up = false;
        owner.frozen_until = None;
        owner.waiting.clear();
        owner.stopping = None;
        let noticed = self.now + self.chance.millis(0, 20);
        self.agenda.put(noticed, Due::Noticed(client));
        let again = self.now + lasting;
        self.agenda.put(again, Due::Start { process });
    }

    fn crash(&mut self, process: u32, down: Duration) {
        if self.processes[process as usize].up {
            self.note(Happening::Process { process, what: "is killed" });
            self.down(process, down);
        }
    }

    fn freeze(&mut self, process: u32, lasting: Duration) {
        let until = self.now + lasting;
        let owner = &mut self.processes[process as usize];
        if !owner.up {
            return;
        }
        owner.frozen_until = Some(owner.frozen_until.unwrap_or_default().max(until));
        let start = owner.start;
        self.note(Happening::Process { process, what: "is frozen" });
        self.disturbed(process, until);
        self.agenda.put(until, Due::Thaw { process, start });
    }

    fn thaw(&mut self, process: u32, start: u32) {
        let owner = &mut self.processes[process as usize];
        if owner.start != start || !owner.up {
            return;
        }
        if let Some((of, lasting)) = owner.frozen_after.take()
            && of == start
        {
            self.freeze(process, lasting);
            return;
        }
        if owner.frozen_until.is_none_or(|until| until > self.now) {
            return;
        }
        owner.frozen_until = None;
        owner.running_since = self.now;
        let waiting = std::mem::take(&mut owner.waiting);
        self.note(Happening::Process { process, what: "thaws" });
        for what in waiting {
            if self.violation.is_some() {
                return;
            }
            self.local(process, start, what);
        }
    }

    fn stop(&mut self, process: u32, within: Duration, down: Duration) {
        let owner = &mut self.processes[process as usize];
        if !owner.up || owner.stopping.is_some() || owner.frozen_until.is_some() {
            return;
        }
        owner.stopping = Some(down);
        let start = owner.start;
        let deadline = self.now + owner.lasts(within);
        self.note(Happening::Process { process, what: "is to stop" });
        for shard in 0..self.scenario.shards {
            let owner = &mut self.processes[process as usize];
            if !owner.up || owner.start != start {
                return;
            }
            let slot = &mut owner.slots[shard as usize];
            if slot.phase == "taking over" {
                self.marks.hit(Mark::StoppedFencing);
            }
            slot.stopping = Some(Handover::new(deadline, slot.machine.status().accepted));
            self.hand(process, ShardId(shard), Event::Stop { within });
        }
        self.agenda.put(deadline + Duration::from_secs(5), Due::Overdue { process, start });
    }

    fn cut_nats(&mut self, process: u32, how: Cut, lasting: Duration) {
        let until = self.now + lasting;
        self.disturbed(process, until);
        self.all_disturbed();
        let owner = &mut self.processes[process as usize];
        match how {
            Cut::Held => {
                owner.inwards_held = owner.inwards_held.max(until);
                owner.outwards_held = owner.outwards_held.max(until);
            }
            Cut::HeldInwards => owner.inwards_held = owner.inwards_held.max(until),
            Cut::HeldOutwards => owner.outwards_held = owner.outwards_held.max(until),
            Cut::Broken => {
                if !owner.up {
                    return;
                }
                let old = owner.client();
                owner.link += 1;
                owner.connected = false;
                let (start, link) = (owner.start, owner.link);
                let noticed = self.now + self.chance.time(Duration::ZERO, lasting * 2);
                self.agenda.put(noticed, Due::Noticed(old));
                self.agenda.put(until, Due::LinkUp { process, start, link });
            }
        }
    }

    fn set_share(&mut self, process: u32, share: Share) {
        let owner = &mut self.processes[process as usize];
        if !owner.up || owner.frozen_until.is_some() {
            return;
        }
        owner.share = share;
        let start = owner.start;
        for shard in 0..self.scenario.shards {
            let owner = &mut self.processes[process as usize];
            if !owner.up || owner.start != start {
                return;
            }
            if owner.slots[shard as usize].machine.status().held_rows > share.rows {
                self.marks.hit(Mark::ShareShrank);
            }
            self.hand(process, ShardId(shard), Event::Share(share));
        }
    }

    fn broker_falls(&mut self, down: Duration, forgotten: usize) {
        if !self.broker_up {
            return;
        }
        self.broker_up = false;
        self.all_disturbed();
        self.stream.restart(forgotten);
        let until = self.now + down + Duration::from_secs(1);
        for process in 0..self.scenario.processes {
            self.disturbed(process, until);
            let owner = &mut self.processes[process as usize];
            owner.link += 1;
            owner.connected = false;
        }
        let at = self.now + down;
        self.agenda.put(at, Due::BrokerUp);
    }

    fn broker_returns(&mut self) {
        self.broker_up = true;
        self.note(Happening::Fault("over: the server is back".to_owned()));
        for process in 0..self.scenario.processes {
            let at = self.now + self.chance.millis(5, 600);
            let Process { start, link, .. } = self.processes[process as usize];
            self.agenda.put(at, Due::LinkUp { process, start, link });
        }
    }

    // ---- the end -------------------------------------------------------------------------------------

    fn fall_quiet(&mut self) {
        self.quiet = true;
        self.rates = Rates::default();
        self.deliveries_to_lose.clear();
        self.store_slow_until = Duration::ZERO;
        self.store_refuses_until = Duration::ZERO;
        self.note(Happening::Fault("over: everything".to_owned()));
        let share = crate::process::share(&self.scenario);
        for process in 0..self.scenario.processes {
            let owner = &mut self.processes[process as usize];
            owner.store_cut = Duration::ZERO;
            owner.frozen_after = None;
            let (now, start) = (self.now, owner.start);
            if owner.frozen_until.is_some() {
                owner.frozen_until = Some(now);
                self.thaw(process, start);
            }
            self.set_share(process, share);
            self.agenda.put(now, Due::Start { process });
        }
        let at = self.now + Duration::from_secs(1);
        self.agenda.put(at, Due::Look);
    }

    fn look_whether_settled(&mut self) {
        let processes = &self.processes;
        let tail_lost = self.causes.tail_lost;
        let excused = |shard: u32| {
            let stopped = |process: &Process| !process.up || process.slots[shard as usize].reused;
            tail_lost && processes.iter().all(stopped)
        };
        let intents = &self.intents;
        let unsettled = lands::unsettled(&self.truth, |shard| intents.current(ShardId(shard)), excused);
        if unsettled.is_none() {
            self.settled_at.get_or_insert(self.now);
        } else if self.now > self.scenario.quiet_from + Scenario::SETTLES_WITHIN {
            let stuck = self.describe();
            self.check(lands::bound(unsettled, &stuck));
            return;
        }
        let at = self.now + Duration::from_secs(1);
        self.agenda.put(at, Due::Look);
    }

    /// A process was told to stop, and should have by now, unless it was frozen.
    fn look_whether_stopped(&mut self, process: u32, start: u32) {
        let owner = &self.processes[process as usize];
        if !owner.up || owner.start != start {
            return;
        }
        let running_for = self.now.saturating_sub(owner.running_since);
        if owner.frozen_until.is_some() || running_for < Duration::from_secs(5) {
            self.agenda.put(self.now + Duration::from_secs(5), Due::Overdue { process, start });
            return;
        }
        let pending = owner.slots.iter().filter(|slot| !slot.over).filter_map(|slot| slot.stopping);
        let checks: Vec<Checked> = pending.map(|stopping| stopping.pending(self.now, running_for)).collect();
        checks.into_iter().for_each(|checked| self.check(checked));
    }

    /// How the shards stand, for a report of one that is stuck.
    fn describe(&self) -> String {
        let mut text = String::new();
        for owner in self.processes.iter().filter(|owner| owner.up) {
            for (slot, shard) in owner.slots.iter().zip(0..) {
                let status = slot.machine.status();
                let troubles: Vec<String> =
                    status.troubles.iter().map(|(table, trouble)| format!("{table}: {trouble}")).collect();
                text += &format!(
                    "p{} s{shard} is {}, floor {}, accepted {}, held {}, troubles [{}]; ",
                    owner.id,
                    status.phase,
                    status.floor,
                    status.accepted,
                    status.held_rows,
                    troubles.join(", ")
                );
            }
        }
        text
    }
}

fn unanswered() -> Failure {
    Failure::new(FailureClass::Unanswered, "no answer in time")
}

fn doubt(why: &str) -> InsertOutcome {
    InsertOutcome::Doubt(Refusal { code: None, message: why.to_owned() })
}

/// What a caller is told if a command of it is not answered; none if it needs no answer.
fn unanswered_stream(command: &delivery::Command) -> Option<delivery::Reply> {
    match *command {
        delivery::Command::Pull(_) | delivery::Command::Close { .. } => None,
        delivery::Command::Reset { attempt, .. } => {
            Some(delivery::Reply::Reset { attempt, outcome: Err(unanswered()) })
        }
        delivery::Command::Unpin { attempt } => {
            Some(delivery::Reply::Unpinned { attempt, outcome: Err(unanswered()) })
        }
        delivery::Command::Inspect { attempt, .. } => Some(unanswered_look(attempt)),
    }
}

fn unanswered_look(attempt: Attempt) -> delivery::Reply {
    delivery::Reply::Inspected { attempt, outcome: Err(InspectError::Failed(unanswered())) }
}

fn unanswered_ledger(command: &ledger::Command) -> ledger::Reply {
    match command {
        ledger::Command::Read { attempt, .. } => {
            ledger::Reply::Read { attempt: *attempt, outcome: Err(unanswered()) }
        }
        ledger::Command::Write { attempt, .. } => {
            ledger::Reply::Written { attempt: *attempt, outcome: WriteOutcome::Unknown(unanswered()) }
        }
    }
}

fn unanswered_store(command: &store::Command) -> Option<store::Reply> {
    let refusal = || Refusal { code: None, message: "no answer".to_owned() };
    match command {
        store::Command::ReadBack { attempt, table, .. } => {
            Some(store::Reply::ReadBack { attempt: *attempt, table: table.clone(), outcome: Err(refusal()) })
        }
        store::Command::Describe { attempt, table, .. } => Some(store::Reply::Described {
            attempt: *attempt,
            table: table.clone(),
            outcome: Err(DescribeError::Failed(refusal())),
        }),
        store::Command::Insert(_) | store::Command::Abort { .. } => None,
    }
}
