//! Any events, in any order, any number of times, straight into one shard: it must never panic and never break
//! the rules, whatever its surroundings do.
//!
//! Bytes decide, a few for each step; so the same code serves property tests and fuzzers, and a step that is left
//! out leaves the others as they were. The ledger is a real one (an answer may lie
//! only by leaving open whether a write was stored, as a lost answer does). Everything else answers what it
//! likes: rows of any number from any inbox under any pin, answers to questions long settled, twice, or never.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use holdfast_core::action::{Action, Actions, Event};
use holdfast_core::batch::Limits;
use holdfast_core::budget::Share;
use holdfast_core::fence::Start;
use holdfast_core::lane::ParkingPolicy;
use holdfast_core::notice::{Notice, Report};
use holdfast_core::ports::dead_letters::{self, Command::Park, ParkOutcome};
use holdfast_core::ports::delivery::{
    Acks, Command, Inbox, InspectError, Inspection, PinId, PullEnd, Reply, Rows,
};
use holdfast_core::ports::ledger::{self, WriteOutcome};
use holdfast_core::ports::store::{
    self, Class, DescribeError, Description, Found, InsertOutcome, Level, Refusal, Target,
};
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::record::{Record, Session, Writer};
use holdfast_core::row::{Delivery, Mark, Row, Seq, ShardId, Unfit, Verdict};
use holdfast_core::shard::{Config, Shard};
use holdfast_core::time::{Instant, Timestamp};

use crate::bucket::Bucket;
use crate::choices::Choices;
use crate::invariants::doubt::Doubts;
use crate::invariants::intent::Intents;
use crate::invariants::{Violation, record, trim, violated};
use crate::jetstream::payload;
use crate::world::table_name;

const SHARD: ShardId = ShardId(0);
const OURS: Session = Session(1);
const OTHERS: Session = Session(2);
const CREATED: Timestamp = Timestamp(7);
const STALE: Duration = Duration::from_secs(4);
/// Commands older than this many are not answered any more.
const REMEMBERED: usize = 24;

struct Rig<'a> {
    bytes: Choices<'a>,
    acks: Acks,
    now: Duration,
    shard: Shard,
    bucket: Bucket,
    intents: Intents,
    doubts: Doubts,
    /// The last commands, answered or not.
    commands: VecDeque<Action>,
    /// Those that were not answered yet.
    open: VecDeque<Action>,
    kindly: bool,
    inbox: u64,
    delivery: u64,
    seq: u64,
    reached: Reached,
}

/// How far a sequence got: one that never gets anywhere proves nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reached {
    /// Tenures that began.
    pub tenures: u32,
    /// Inserts that were sent.
    pub inserts: u32,
    /// Batches that were closed.
    pub stored: u32,
    /// Batches that were split.
    pub split: u32,
    /// Letters that were sent.
    pub letters: u32,
    /// Rows that were acknowledged.
    pub acked: u32,
    /// Shards given up.
    pub released: u32,
}

/// Lets `steps` decide what happens to a shard, one after another; the first one decides how it is configured.
///
/// # Errors
/// The rule that was broken.
pub fn any_events(steps: &[impl AsRef<[u8]>]) -> Result<Reached, Violation> {
    let mut steps = steps.iter().map(AsRef::as_ref);
    let mut bytes = Choices(steps.next().unwrap_or_default());
    let acks = [Acks::None, Acks::Explicit, Acks::WorkQueue][usize::from(bytes.below(3))];
    let kinds = bytes.below(8);
    let parking = ParkingPolicy { dead_letters: kinds != 0, unknown_tables: kinds > 4 };
    let config = Config {
        shard: SHARD,
        stream: Arc::from("ANY"),
        session: OURS,
        pinned_ttl: Duration::from_secs(3),
        batch: Limits { max_rows: 3, max_bytes: 200, max_age: Duration::from_millis(300) },
        stale: STALE,
        patience: Duration::from_secs(10),
        attempt_life: Duration::from_secs(6),
        acks,
        parking,
        start: Some(Start::First),
        max_lanes: 3,
        max_record: 1 << 16,
    };
    let mut rig = Rig {
        bytes,
        acks,
        now: Duration::ZERO,
        shard: Shard::new(config),
        bucket: Bucket::default(),
        intents: Intents::default(),
        doubts: Doubts::default(),
        commands: VecDeque::new(),
        open: VecDeque::new(),
        kindly: false,
        inbox: 0,
        delivery: 0,
        seq: 0,
        reached: Reached::default(),
    };
    for (number, step) in steps.enumerate() {
        rig.bytes = Choices(step);
        // Mostly claimed at once: else few sequences got far.
        if number == 0 && rig.bytes.below(64) != 63 {
            rig.hand(Event::Claim(Share { rows: 8, bytes: 4_000 }))?;
        }
        rig.step()?;
    }
    Ok(rig.reached)
}

impl Rig<'_> {
    fn step(&mut self) -> Result<(), Violation> {
        self.kindly = false;
        let event = match self.bytes.below(20) {
            0..=9 => return self.answer_kindly(),
            10 | 11 => return self.answer(),
            12 => Event::Delivery(Reply::Rows(self.rows())),
            13..=15 => {
                if let Some(next) = self.shard.next_wakeup() {
                    self.now = self.now.max(next.since_start());
                }
                Event::Wakeup
            }
            16 => {
                self.now += Duration::from_millis(u64::from(self.bytes.next()) * 40);
                Event::Wakeup
            }
            17 => return self.other_writer(),
            18 => Event::Share(Share { rows: u64::from(self.bytes.below(20)), bytes: 4_000 }),
            _ => match self.bytes.below(32) {
                0 => Event::Stop { within: Duration::from_secs(2) },
                1 => Event::Claim(Share { rows: 8, bytes: 4_000 }),
                2..=5 => Event::Delivery(Reply::Disrupted),
                6 => Event::HandOver { within: Duration::from_secs(2) },
                _ => Event::Wakeup,
            },
        };
        self.hand(event)
    }

    /// A choice; of a kind surrounding the last one, which is where nothing goes wrong.
    fn whim(&mut self, n: u8) -> u8 {
        if self.kindly { n - 1 } else { self.bytes.below(n) }
    }

    /// Answers the oldest open question as it would be answered on a good day: else no sequence got far.
    fn answer_kindly(&mut self) -> Result<(), Violation> {
        self.kindly = true;
        let Some(command) = self.open.pop_front() else { return self.hand(Event::Wakeup) };
        if let Action::Delivery(Command::Pull(pull)) = &command
            && pull.max_bytes != Some(1)
        {
            self.inbox = pull.inbox.0;
            let rows = self.rows();
            let end = Reply::Ended { attempt: pull.attempt, end: PullEnd::Full };
            self.hand(Event::Delivery(Reply::Rows(rows)))?;
            return self.hand(Event::Delivery(end));
        }
        self.reply_to(command)
    }

    /// Mostly the rows that are due next, so that things get going; else any.
    fn rows(&mut self) -> Rows {
        let any = self.whim(6) == 0;
        let rows = (0..=self.bytes.below(4))
            .map(|_| {
                if any {
                    self.seq = u64::from(self.whim(40));
                    self.delivery = u64::from(self.whim(40));
                } else {
                    self.seq += 1 + u64::from(self.bytes.below(2));
                    self.delivery += 1;
                }
                let redelivered = self.acks != Acks::None && self.whim(12) == 1;
                let verdict = match (self.whim(40), self.seq) {
                    (1, _) => Verdict::Bad(Unfit::Payload("bad".into())),
                    (_, seq) if seq % 11 == 5 => Verdict::Bad(Unfit::Payload("bad".into())),
                    (_, seq) if seq % 17 == 7 => Verdict::Bad(Unfit::Subject("bad".into())),
                    _ => Verdict::Good,
                };
                Row {
                    seq: Seq(self.seq.max(1)),
                    delivery: Delivery(self.delivery),
                    redelivered,
                    stored_at: Timestamp(i64::try_from(self.seq).unwrap_or(0) + 1),
                    table: table_name(u32::from(self.bytes.below(3))),
                    payload: payload(self.seq, 20),
                    verdict,
                }
            })
            .collect();
        let inbox = if self.whim(8) == 1 { self.inbox.saturating_sub(1) } else { self.inbox };
        let pin = (self.whim(16) != 1).then(|| self.pin());
        Rows { inbox: Inbox(inbox), pin, rows }
    }

    fn pin(&mut self) -> PinId {
        PinId(if self.whim(12) == 1 { "other".into() } else { "pin".into() })
    }

    /// Somebody else fences, or the stream's record is deleted.
    fn other_writer(&mut self) -> Result<(), Violation> {
        if self.whim(4) != 0 {
            return Ok(());
        }
        let Some(entry) = self.bucket.entry(SHARD) else { return Ok(()) };
        let (expected, stored) = (entry.revision, Record::decode(&entry.record));
        let Ok(stored) = stored else { return Ok(()) };
        let writer = Writer { session: OTHERS, nonce: stored.epoch + 1 };
        let record = Record { epoch: stored.epoch + 1, writer, ..stored };
        let write = ledger::Command::Write {
            attempt: holdfast_core::ports::Attempt(0),
            shard: SHARD,
            expected,
            record: record.encode(),
        };
        self.ledger(&write).map(|_| ())
    }

    /// The ledger takes a command, and what it stores is checked.
    fn ledger(&mut self, command: &ledger::Command) -> Result<ledger::Reply, Violation> {
        let reply = self.bucket.handle(command);
        if let (
            ledger::Command::Write { record: bytes, .. },
            ledger::Reply::Written { outcome: WriteOutcome::Stored(_), .. },
        ) = (command, &reply)
        {
            match Record::decode(bytes) {
                Ok(stored) => {
                    record::stored(self.intents.current(SHARD), &stored, None)?;
                    self.intents.stored(self.now, SHARD, stored);
                }
                Err(error) => violated(record::NAME, error.to_string())?,
            }
        }
        Ok(reply)
    }

    /// Answers one of the last commands, whether it was answered before or not.
    fn answer(&mut self) -> Result<(), Violation> {
        if self.commands.is_empty() {
            return Ok(());
        }
        // Mostly the newest ones.
        let back = usize::from(self.bytes.next() % 8) * usize::from(self.bytes.next() % 4);
        let at = (self.commands.len() - 1).saturating_sub(back);
        let command = self.commands[at].clone();
        self.reply_to(command)
    }

    fn reply_to(&mut self, command: Action) -> Result<(), Violation> {
        let event = match command {
            Action::Delivery(command) => {
                let Some(reply) = self.delivery(command) else { return Ok(()) };
                Event::Delivery(reply)
            }
            Action::Ledger(command) => Event::Ledger(self.ledger_reply(&command)?),
            Action::Store(command) => {
                let Some(reply) = self.store(command) else { return Ok(()) };
                if let store::Reply::Inserted { attempt, table, outcome } = &reply {
                    self.doubts.answered(table, *attempt, matches!(outcome, InsertOutcome::Doubt(_)));
                }
                if let store::Reply::ReadBack { table, outcome: Ok(_), .. } = &reply {
                    self.doubts.read_back(table);
                }
                Event::Store(reply)
            }
            Action::DeadLetter(Park { attempt, letter, .. }) => {
                let failed = || Failure::new(FailureClass::Full, "full");
                let outcome = match self.whim(5) {
                    0 => ParkOutcome::Stale,
                    1 => ParkOutcome::Failed(failed()),
                    _ => ParkOutcome::Parked,
                };
                Event::DeadLetter(dead_letters::Reply::Parked { attempt, table: letter.table, outcome })
            }
            Action::Notice(_) | Action::Report(_) => return Ok(()),
        };
        self.hand(event)
    }

    fn ledger_reply(&mut self, command: &ledger::Command) -> Result<ledger::Reply, Violation> {
        let failure = || Failure::new(FailureClass::Unanswered, "no answer");
        match (self.whim(6), command) {
            (0, ledger::Command::Read { attempt, .. }) => {
                Ok(ledger::Reply::Read { attempt: *attempt, outcome: Err(failure()) })
            }
            (0, ledger::Command::Write { attempt, .. }) => {
                let outcome = WriteOutcome::Refused(failure());
                Ok(ledger::Reply::Written { attempt: *attempt, outcome })
            }
            (1, ledger::Command::Write { attempt, .. }) => {
                // Stored, or not: nobody says.
                if self.whim(2) == 0 {
                    self.ledger(command)?;
                }
                let outcome = WriteOutcome::Unknown(failure());
                Ok(ledger::Reply::Written { attempt: *attempt, outcome })
            }
            _ => self.ledger(command),
        }
    }

    fn delivery(&mut self, command: Command) -> Option<Reply> {
        let failed = || Failure::new(FailureClass::Unavailable, "failed");
        match command {
            Command::Pull(pull) => {
                let end = match self.whim(12) {
                    0 => PullEnd::NotPinned,
                    1 => PullEnd::TooLarge,
                    2 => PullEnd::LeaderChanged,
                    3 => PullEnd::NoResponders,
                    4 => PullEnd::Closed,
                    5 => PullEnd::Failed(failed()),
                    6 | 7 => PullEnd::Full,
                    _ => PullEnd::Empty,
                };
                Some(Reply::Ended { attempt: pull.attempt, end })
            }
            Command::Close { .. } | Command::Ack { .. } => None,
            Command::Reset { attempt, from, .. } => {
                let outcome = if self.whim(6) == 0 { Err(failed()) } else { Ok(()) };
                if outcome.is_ok() {
                    self.delivery = 0;
                    self.seq = from.0.saturating_sub(1);
                }
                Some(Reply::Reset { attempt, outcome })
            }
            Command::Inspect { attempt, above, .. } => {
                let outcome = match self.whim(12) {
                    0 => Err(InspectError::Failed(failed())),
                    1 if self.bytes.below(8) == 7 => Err(InspectError::Gone("deleted".to_owned())),
                    _ => Ok(self.inspection(above)),
                };
                Some(Reply::Inspected { attempt, outcome })
            }
            Command::Unpin { attempt } => {
                let outcome = if self.whim(3) == 0 { Err(failed()) } else { Ok(()) };
                Some(Reply::Unpinned { attempt, outcome })
            }
        }
    }

    fn inspection(&mut self, above: Seq) -> Inspection {
        let last = self.seq.max(u64::from(self.whim(60))).max(40);
        let pinned = (self.whim(10) != 1).then(|| self.pin());
        Inspection {
            created: if self.whim(60) == 1 { Timestamp(8) } else { CREATED },
            messages: last,
            first: Seq(1),
            last: Mark { seq: Seq(last), stored_at: Timestamp(i64::try_from(last).unwrap_or(0) + 1) },
            shard_last: match self.whim(4) {
                0 => None,
                1 => Some(Seq(last)),
                _ => Some(Seq(self.seq)),
            },
            row_stored_at: None,
            // The first row after a reset is one of the next two.
            next: (self.whim(6) != 1).then(|| Seq(above.0 + 2)),
            delivered: if self.whim(3) == 0 { self.delivery + 1 } else { self.delivery },
            pending: u64::from(self.whim(3)),
            pinned,
            unfit: None,
        }
    }

    fn store(&mut self, command: store::Command) -> Option<store::Reply> {
        let classes =
            [Class::Data, Class::Passing, Class::Table, Class::Access, Class::Unknown, Class::Doubt];
        let class = if self.kindly { Class::Passing } else { classes[usize::from(self.bytes.below(6))] };
        let row = (!self.kindly).then(|| u32::from(self.bytes.below(5))).filter(|row| *row < 4);
        let refusal = || Refusal { class, code: Some(7), row, message: "no".to_owned() };
        match command {
            store::Command::Insert(insert) => {
                let outcome = match self.whim(6) {
                    0 => InsertOutcome::Again(refusal()),
                    // As a kind surrounding refuses a row whose number says so.
                    _ if self.kindly && insert.rows.iter().any(|row| row.seq.0 % 13 == 0) => {
                        InsertOutcome::Again(Refusal { class: Class::Data, row: None, ..refusal() })
                    }
                    1 => InsertOutcome::Doubt(refusal()),
                    2 => InsertOutcome::Stale,
                    _ => InsertOutcome::Stored,
                };
                Some(store::Reply::Inserted { attempt: insert.attempt, table: insert.table, outcome })
            }
            store::Command::ReadBack { attempt, table, first, last, .. } => {
                let outcome = match self.whim(6) {
                    0 => Err(refusal()),
                    1 => Ok(Found::default()),
                    2 => Ok(Found { seqs: vec![first], repeated: None }),
                    3 => Ok(Found { seqs: vec![first, last], repeated: Some(last) }),
                    _ => Ok(Found { seqs: (first.0..=last.0).map(Seq).collect(), repeated: None }),
                };
                Some(store::Reply::ReadBack { attempt, table, outcome })
            }
            store::Command::Describe { attempt, table, holds, .. } => {
                let level = if self.whim(4) == 0 { Level::Deduplicated } else { Level::ExactlyOnce };
                let outcome = match self.whim(5) {
                    0 => Err(DescribeError::Missing(refusal())),
                    1 => Err(DescribeError::Failed(refusal())),
                    _ => {
                        let target = Target { database: "db".into(), table: table.as_str().into(), level };
                        let ahead = holds.filter(|_| self.whim(4) == 1);
                        Ok(Description { target, holds: ahead.map(|holds| Seq(holds.above.0 + 3)) })
                    }
                };
                Some(store::Reply::Described { attempt, table, outcome })
            }
            store::Command::Abort { .. } => None,
        }
    }

    /// Whatever is acknowledged is done, as the stored record says, whichever table it is of.
    fn acked(&mut self, rows: &[(Seq, Delivery)]) -> Result<(), Violation> {
        let Some(record) = self.intents.current(SHARD) else {
            return violated(trim::ACK, "without a record");
        };
        let done = record.lanes.values().map(|lane| lane.done).max().unwrap_or_default().max(record.floor);
        self.reached.acked += u32::try_from(rows.len()).unwrap_or(u32::MAX);
        match rows.iter().find(|(seq, _)| *seq > done) {
            Some((seq, _)) => violated(trim::ACK, format!("row {seq} was acknowledged, {done} is done")),
            None => Ok(()),
        }
    }

    fn hand(&mut self, event: Event) -> Result<(), Violation> {
        let (mut actions, now) = (Actions::default(), Instant::at(self.now));
        let due = matches!(event, Event::Wakeup).then(|| self.shard.next_wakeup());
        self.shard.handle(now, event, &mut actions);
        if let Err(defect) = self.shard.validate() {
            violated("core state", defect)?;
        }
        let actions: Vec<Action> = actions.drain().collect();
        if let Some(Some(due)) = due
            && due <= now
            && actions.is_empty()
            && self.shard.next_wakeup() == Some(due)
        {
            violated("shard's wakeup", "it would spin")?;
        }
        let epoch = self.shard.status().epoch;
        for action in actions {
            match &action {
                Action::Store(store::Command::Insert(insert)) => {
                    self.intents.sent(self.now, OURS, epoch, insert, STALE)?;
                    self.doubts.sends(insert)?;
                    self.reached.inserts += 1;
                }
                Action::Store(store::Command::ReadBack { table, .. }) => self.doubts.asks(table),
                Action::DeadLetter(Park { letter, .. }) => {
                    self.intents.posted(self.now, OURS, letter, STALE)?;
                    self.reached.letters += 1;
                }
                Action::Delivery(Command::Ack { rows }) => {
                    self.acked(rows)?;
                }
                Action::Notice(Notice::Split { .. }) => self.reached.split += 1,
                Action::Store(store::Command::Abort { .. }) => self.doubts = Doubts::default(),
                Action::Delivery(Command::Reset { from, .. }) => {
                    let floor = self.intents.current(SHARD).map_or(Seq::ZERO, |record| record.floor);
                    // Of another stream of this name the first row is wanted; all else goes to the floor at most.
                    if *from > floor.next() {
                        violated("6 reset", format!("reset to {from} above the stored floor {floor}"))?;
                    }
                }
                Action::Delivery(Command::Pull(pull)) => self.inbox = pull.inbox.0,
                Action::Notice(Notice::TenureBegan { .. }) => self.reached.tenures += 1,
                Action::Notice(Notice::BatchStored { .. }) => self.reached.stored += 1,
                Action::Report(Report::Released { .. }) => self.reached.released += 1,
                _ => {}
            }
            if !matches!(action, Action::Notice(_) | Action::Report(_)) {
                self.open.push_back(action.clone());
                self.commands.push_back(action);
                for queue in [&mut self.commands, &mut self.open] {
                    if queue.len() > REMEMBERED {
                        queue.pop_front();
                    }
                }
            }
        }
        Ok(())
    }
}
