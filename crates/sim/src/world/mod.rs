//! A run: one thread, virtual time, one source of randomness.
//!
//! A step takes the earliest event, hands it to its owner and carries what the owner wants done to where it
//! goes. Messages take a random time, so whatever may be answered in any order is.

mod at_ledger;
mod at_letters;
mod at_members;
mod at_store;
mod at_stream;
mod faults;
mod processes;
mod settling;
mod sharing;
mod wires;

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::time::Duration;

use holdfast_core::claims;
use holdfast_core::ports::Attempt;
use holdfast_core::ports::Failure;
use holdfast_core::ports::FailureClass;
use holdfast_core::ports::dead_letters;
use holdfast_core::ports::delivery;
use holdfast_core::ports::delivery::InspectError;
use holdfast_core::ports::delivery::Inspection;
use holdfast_core::ports::ledger;
use holdfast_core::ports::ledger::Revision;
use holdfast_core::ports::ledger::WriteOutcome;
use holdfast_core::ports::members;
use holdfast_core::ports::retention;
use holdfast_core::ports::store;
use holdfast_core::ports::store::Class;
use holdfast_core::ports::store::DescribeError;
use holdfast_core::ports::store::Insert;
use holdfast_core::ports::store::InsertOutcome;
use holdfast_core::ports::store::Refusal;
use holdfast_core::record::Session;
use holdfast_core::row::Delivery;
use holdfast_core::row::Row;
use holdfast_core::row::Seq;
use holdfast_core::row::ShardId;
use holdfast_core::row::TableName;
use holdfast_core::time::Timestamp;

use crate::agenda::Agenda;
use crate::bucket::Bucket;
use crate::chance::Chance;
use crate::clickhouse::ClickHouse;
use crate::clickhouse::TableSpec;
use crate::clickhouse::Unfit;
use crate::fault::Rates;
use crate::invariants::Checked;
use crate::invariants::Violation;
use crate::invariants::death::Lives;
use crate::invariants::intent::Intents;
use crate::invariants::order::Order;
use crate::invariants::pin::Pins;
use crate::invariants::resync::Resyncs;
use crate::invariants::stops::Causes;
use crate::invariants::vacant::Vacancies;
use crate::jetstream::Client;
use crate::jetstream::JetStream;
use crate::letters::Letters;
use crate::marks::{Mark, Marks};
use crate::members::Members;
use crate::process::Asker;
use crate::process::Local;
use crate::process::Process;
use crate::scenario::Fit;
use crate::scenario::Scenario;
use crate::trace::Happening;
use crate::trace::Trace;
use crate::truth::Truth;

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
        row: Seq,
        above: Seq,
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
    AtAcks {
        from: Client,
        shard: ShardId,
        /// The stream that they were meant for.
        created: Timestamp,
        rows: Vec<(Seq, Delivery)>,
    },
    AtLetters {
        from: Client,
        command: Box<dead_letters::Command>,
        reply_by: Option<Duration>,
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
    /// It is time to look whether everybody has noticed that a consumer is gone.
    Deleted(ShardId),
    Replace {
        process: u32,
        start: u32,
    },
    Overdue {
        process: u32,
        start: u32,
        /// Only this shard is.
        shard: Option<ShardId>,
    },
    AtMembers {
        from: Client,
        command: Box<members::Command>,
        reply_by: Option<Duration>,
    },
    /// A member is asked whether it lives.
    AtMember {
        asked: Client,
        from: Client,
        attempt: Attempt,
        reply_by: Option<Duration>,
    },
    MemberAnswers {
        to: Client,
        attempt: Attempt,
        reply_by: Option<Duration>,
    },
    Watch(Client),
    /// Somebody says to all that a shard is to be tried again.
    Resume(ShardId),
    /// Somebody looks for shards whose rows wait and whose consumers stand still: where each stood at the last look.
    Watchdog(Vec<Option<Seq>>),
    /// It is time to look for shards that nobody has.
    Vacant,
    EndLurking,
    Unpin(ShardId),
    Anew,
    /// The ledger as it was at that revision.
    Restore(Revision),
    Rebase(u32),
    Alter {
        shard: ShardId,
        halfway: bool,
    },
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
    /// Inserts that reached the store.
    pub(crate) inserts: u64,
    /// Dead letters that are kept.
    pub(crate) letters: u64,
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
            inserts: 0,
            letters: 0,
            marks: Marks::default(),
            hash: 0,
            happenings: Vec::new(),
        }
    }
}

/// The world of a run.
// Whether servers are up and faults are over are facts of their own.
#[expect(clippy::struct_excessive_bools)]
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
    members: Members,
    lives: Lives,
    vacancies: Vacancies,
    /// Consumers that were deleted, and when.
    gone: BTreeMap<ShardId, Duration>,
    /// Who owned each shard last.
    owners: BTreeMap<ShardId, u32>,
    /// Who gave each shard up last, if nobody has owned it since.
    given_up: BTreeMap<ShardId, u32>,
    store: ClickHouse,
    store_tick: Option<Duration>,
    store_up: bool,
    store_slow_until: Duration,
    store_refuses_until: Duration,
    store_denies: (Duration, Class),
    letters: Letters,
    acks_lost_until: Duration,
    /// Acknowledgements that were lost.
    acks_lost: BTreeSet<(ShardId, Seq)>,
    /// The revision of the ledger that was the last one at a time.
    revisions: Vec<(Duration, Revision)>,
    /// The ledger was set back, or lost.
    restored: bool,
    /// Nobody starts a process before that.
    closed_until: Duration,
    /// The last row that was left of the stream when it lost its tail.
    tail_kept: Seq,
    /// Rows that were refused for their data.
    refused: BTreeSet<u64>,
    inserts: u64,
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
    /// Then the stream is made anew.
    anew_astray: BTreeSet<ShardId>,
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
            max_partitions: plan.max_partitions,
            exists_from: plan.exists_from,
        });
        let mut store = ClickHouse::new(tables.collect::<Vec<_>>(), scenario.horizon());
        for (number, row) in (0..).zip(&scenario.rows) {
            if let Fit::Refused { from, until } = row.fit {
                store.refuse(number, Unfit { from, until });
            }
        }
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
                scenario.policy,
            ),
            stream_tick: None,
            broker_up: true,
            bucket: Bucket::default(),
            members: Members::default(),
            lives: Lives::default(),
            vacancies: Vacancies::default(),
            gone: BTreeMap::new(),
            owners: BTreeMap::new(),
            given_up: BTreeMap::new(),
            store,
            store_tick: None,
            store_up: true,
            store_slow_until: Duration::ZERO,
            store_refuses_until: Duration::ZERO,
            store_denies: (Duration::ZERO, Class::Access),
            letters: Letters::default(),
            acks_lost_until: Duration::ZERO,
            acks_lost: BTreeSet::new(),
            revisions: Vec::new(),
            restored: false,
            closed_until: Duration::ZERO,
            tail_kept: Seq::ZERO,
            refused: BTreeSet::new(),
            inserts: 0,
            processes: (0..scenario.processes).map(|id| Process::new(&scenario, id)).collect(),
            sessions: BTreeMap::new(),
            flights: BTreeMap::new(),
            burns: BTreeMap::new(),
            deliveries_to_lose: BTreeMap::new(),
            blind_unpins: BTreeSet::new(),
            astray: BTreeSet::new(),
            anew_astray: BTreeSet::new(),
            truth: Truth::default(),
            intents: Intents::default(),
            order: Order::default(),
            pins: Pins::default(),
            causes: Causes { no_letters: !scenario.parking.dead_letters, ..Causes::default() },
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
            let late = self.scenario.sharing.as_ref().and_then(|sharing| sharing.late.get(process as usize));
            let at = at + late.copied().unwrap_or_default();
            self.agenda.put(at, Due::Start { process });
        }
        if let Some(sharing) = &self.scenario.sharing {
            let at = Duration::from_secs(1);
            self.agenda.put(at, Due::Vacant);
            if sharing.watchdog {
                self.agenda.put(at, Due::Watchdog(Vec::new()));
            }
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
            inserts: self.inserts,
            letters: self.letters.count(),
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
                self.at_stream(from, shard, command, reply_by);
            }
            Due::AtRows { from, shard, attempt, row, above, mut seen, reply_by } => {
                if self.broker_up {
                    self.stream.look_at_rows(shard, row, above, &mut seen);
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
                    if outcome.is_ok() && self.stream.miscounts(shard) {
                        self.marks.hit(Mark::Miscounted);
                    }
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
            Due::AtAcks { from, shard, created, rows } => self.acks_arrive(from, shard, created, &rows),
            Due::AtLetters { from, command, reply_by } => self.at_letters(from, &command, reply_by),
            Due::AtRetention { from, command, reply_by } => self.at_retention(from, &command, reply_by),
            Due::AtStore { from, insert } => self.at_store(from, *insert),
            Due::AskStore { from, shard, command, reply_by } => {
                self.ask_store(from, shard, &command, reply_by);
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
                self.part_members(client);
                self.serve_stream();
            }
            Due::BrokerUp => self.broker_returns(),
            Due::StoreUp => self.store_up = true,
            Due::ConsumerBack(shard) => {
                self.stream.create_consumer(shard as usize);
                self.gone.remove(&ShardId(shard));
                self.note(Happening::Fault(format!("over: consumer of s{shard} made again")));
            }
            Due::Replace { process, start } => {
                if self.processes[process as usize].start == start {
                    self.crash(process, Duration::from_millis(300));
                }
            }
            Due::Overdue { process, start, shard } => self.look_whether_stopped(process, start, shard),
            Due::AtMembers { from, command, reply_by } => self.at_members(from, &command, reply_by),
            Due::AtMember { asked, from, attempt, reply_by } => {
                self.at_member(asked, from, attempt, reply_by);
            }
            Due::MemberAnswers { to, attempt, reply_by } => self.member_answers(to, attempt, reply_by),
            Due::Watch(client) => self.watch_members(client),
            Due::Resume(shard) => self.ask_all(&claims::Event::Resume(shard)),
            Due::Watchdog(stood) => self.look_for_unowned(&stood),
            Due::Vacant => self.look_for_vacant(),
            Due::Deleted(shard) => self.look_whether_noticed(shard),
            Due::Quiet => self.fall_quiet(),
            Due::Look => self.look_whether_settled(),
            Due::Unpin(shard) => self.unpin(shard),
            Due::Anew => self.make_anew(),
            Due::Restore(revision) => self.restore_ledger(revision),
            Due::Rebase(shard) => self.rebase(shard),
            Due::Alter { shard, halfway } => self.alter(shard, halfway),
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
}

fn unanswered() -> Failure {
    Failure::new(FailureClass::Unanswered, "no answer in time")
}

fn doubt(why: &str) -> InsertOutcome {
    InsertOutcome::Doubt(refusal(Class::Doubt, None, why))
}

fn refusal(class: Class, code: Option<u32>, why: &str) -> Refusal {
    Refusal { class, code, row: None, message: why.to_owned() }
}

/// What a caller is told if a command of it is not answered; none if it needs no answer.
fn unanswered_stream(command: &delivery::Command) -> Option<delivery::Reply> {
    match *command {
        delivery::Command::Pull(_) | delivery::Command::Close { .. } | delivery::Command::Ack { .. } => None,
        delivery::Command::Reset { attempt, .. } => {
            Some(delivery::Reply::Reset { attempt, outcome: Err(unanswered()) })
        }
        delivery::Command::Unpin { attempt } => {
            Some(delivery::Reply::Unpinned { attempt, outcome: Err(unanswered()) })
        }
        delivery::Command::Inspect { attempt, .. } => Some(unanswered_look(attempt)),
    }
}

/// What a caller is told if an answer does not reach it; none if nobody waits for it.
fn unanswered_instead_of(reply: &delivery::Reply) -> Option<delivery::Reply> {
    match reply {
        delivery::Reply::Reset { attempt, .. } => {
            Some(delivery::Reply::Reset { attempt: *attempt, outcome: Err(unanswered()) })
        }
        delivery::Reply::Unpinned { attempt, .. } => {
            Some(delivery::Reply::Unpinned { attempt: *attempt, outcome: Err(unanswered()) })
        }
        delivery::Reply::Inspected { attempt, .. } => Some(unanswered_look(*attempt)),
        _ => None,
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
    let refusal = || refusal(Class::Doubt, None, "no answer");
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
