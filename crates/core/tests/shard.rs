//! One shard from outside, word by word: what it asks, when, and what it makes of the answers.

#![expect(clippy::unchecked_time_subtraction, reason = "times are constants here")]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use holdfast_core::action::{Action, Actions, Event};
use holdfast_core::batch::Limits;
use holdfast_core::budget::Share;
use holdfast_core::fence::Start;
use holdfast_core::lane::ParkingPolicy;
use holdfast_core::notice::{Notice, Report, ResyncReason, Trouble};
use holdfast_core::ports::dead_letters::{self, Cause, Letter, ParkOutcome};
use holdfast_core::ports::delivery::{
    Acks, Command, Inbox, InspectError, Inspection, PinId, Pull, PullEnd, Reply, Rows,
};
use holdfast_core::ports::ledger::{self, Entry, Revision, WriteOutcome};
use holdfast_core::ports::store::{
    self, Class, DescribeError, Description, Found, HoldsAbove, Insert, InsertOutcome, Level, Refusal, Target,
};
use holdfast_core::ports::{Attempt, Failure, FailureClass};
use holdfast_core::record::{LaneRecord, OpenBatch, Parked, Record, Session, Writer};
use holdfast_core::row::{Delivery, Mark, Row, Seq, ShardId, TableName, Unfit, Verdict};
use holdfast_core::shard::{Config, Shard};
use holdfast_core::time::{Instant, Timestamp};

const SHARD: ShardId = ShardId(0);
const CREATED: Timestamp = Timestamp(7);
const MS: Duration = Duration::from_millis(1);
const STALE: Duration = Duration::from_secs(4);
const PATIENCE: Duration = Duration::from_secs(10);
const LIFE: Duration = Duration::from_secs(6);
const AGE: Duration = Duration::from_millis(500);

fn config() -> Config {
    Config {
        shard: SHARD,
        stream: Arc::from("S"),
        session: Session(1),
        pinned_ttl: Duration::from_secs(3),
        batch: Limits { max_rows: 4, max_bytes: 100, max_age: AGE },
        stale: STALE,
        patience: PATIENCE,
        attempt_life: LIFE,
        acks: Acks::None,
        parking: ParkingPolicy { dead_letters: true, unknown_tables: false },
        start: Some(Start::First),
        max_lanes: 2,
        max_record: 1 << 16,
    }
}

fn pin() -> PinId {
    PinId("pin".into())
}

fn target(table: &str) -> Target {
    Target { database: "db".into(), table: table.into(), level: Level::ExactlyOnce }
}

fn mark(seq: u64) -> Mark {
    Mark { seq: Seq(seq), stored_at: Timestamp(i64::try_from(seq).expect("small") + 1) }
}

fn row_of(table: &str, seq: u64, delivery: u64) -> Row {
    Row {
        seq: Seq(seq),
        delivery: Delivery(delivery),
        redelivered: false,
        stored_at: mark(seq).stored_at,
        table: TableName::new(table),
        payload: Bytes::from_static(b"0123456789"),
        verdict: Verdict::Good,
    }
}

fn row(seq: u64, delivery: u64) -> Row {
    row_of("t", seq, delivery)
}

fn refusal(class: Class, row: Option<u32>) -> Refusal {
    Refusal { class, code: Some(7), row, message: "no".to_owned() }
}

fn failure() -> Failure {
    Failure::new(FailureClass::Unavailable, "away")
}

/// A stream whose last row of all, and of the shard, is `last`, with `pending` rows to deliver.
fn seen(last: u64, pending: u64) -> Inspection {
    Inspection {
        created: CREATED,
        messages: last,
        first: Seq(1),
        last: mark(last),
        shard_last: (last > 0).then_some(Seq(last)),
        row_stored_at: None,
        next: (last > 0).then_some(Seq(1)),
        delivered: 0,
        pending,
        pinned: Some(pin()),
        unfit: None,
    }
}

fn record(floor: u64, high: u64) -> Record {
    Record {
        version: Record::VERSION,
        stream_created: CREATED,
        epoch: 3,
        writer: Writer { session: Session(9), nonce: 1 },
        rebased: 0,
        floor: Seq(floor),
        high: mark(high),
        lanes: [].into(),
    }
}

fn open(first: u64, last: u64, rows: u32) -> LaneRecord {
    let batch = holdfast_core::batch::Batch { first: Seq(first), last: Seq(last), rows, generation: 0 };
    LaneRecord {
        done: Seq(first - 1),
        open: Some(OpenBatch { batch, target: target("t") }),
        ..LaneRecord::default()
    }
}

struct Bench {
    shard: Shard,
    now: Instant,
    asked: Vec<Action>,
    told: Vec<Action>,
    revision: u64,
    stored: Option<Record>,
}

impl Bench {
    fn new(config: Config) -> Self {
        let shard = Shard::new(config);
        let mut bench =
            Self { shard, now: Instant::START, asked: vec![], told: vec![], revision: 0, stored: None };
        assert_eq!((bench.shard.status().phase, bench.shard.next_wakeup()), ("unclaimed", None));
        bench.tell(Event::Claim(Share { rows: 1_000, bytes: 1_000_000 }));
        bench
    }

    fn with(config: Config, record: Record) -> Self {
        let mut bench = Self::new(config);
        (bench.stored, bench.revision) = (Some(record), 5);
        bench
    }

    fn tell(&mut self, event: Event) {
        let mut out = Actions::default();
        self.shard.handle(self.now, event, &mut out);
        self.shard.validate().expect("consistent");
        let (told, asked): (Vec<_>, Vec<_>) =
            out.drain().partition(|action| matches!(action, Action::Notice(_) | Action::Report(_)));
        self.told.extend(told);
        self.asked.extend(asked);
    }

    fn delivery(&mut self, reply: Reply) {
        self.tell(Event::Delivery(reply));
    }

    /// Lets time pass and wakes the shard whenever it wants to be.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(due) = self.shard.next_wakeup().filter(|due| *due <= until) {
            assert!(due >= self.now || self.now == until, "{due:?} is past");
            let before = (self.now, self.asked.len(), self.told.len());
            self.now = self.now.max(due);
            self.tell(Event::Wakeup);
            if before == (self.now, self.asked.len(), self.told.len()) {
                assert!(self.shard.next_wakeup() != Some(due), "it would spin at {due:?}");
            }
        }
        self.now = until;
        let before = self.asked.len();
        self.tell(Event::Wakeup);
        // Whatever it does in time it has asked to be woken for. (A description that is only old may wait.)
        let beside = |action: &Action| !matches!(action, Action::Store(store::Command::Describe { .. }));
        assert_eq!(
            self.asked[before..].iter().find(|action| beside(action)),
            None,
            "nobody would have woken it"
        );
    }

    #[track_caller]
    fn take<T>(&mut self, what: &str, pick: impl Fn(&Action) -> Option<T>) -> T {
        let found = self.asked.iter().enumerate().find_map(|(at, action)| Some((at, pick(action)?)));
        let Some((at, found)) = found else { panic!("no {what} in {:#?}", self.asked) };
        self.asked.remove(at);
        found
    }

    /// Nothing else was asked.
    #[track_caller]
    fn quiet(&self) {
        assert!(self.asked.is_empty(), "{:#?}", self.asked);
    }

    fn has(&self, pick: impl Fn(&Action) -> bool) -> bool {
        self.asked.iter().any(pick)
    }

    fn notices(&mut self) -> Vec<Notice> {
        let told = std::mem::take(&mut self.told);
        let notices = told.into_iter().filter_map(|action| match action {
            Action::Notice(notice) => Some(notice),
            _ => None,
        });
        notices.collect()
    }

    fn reported(&mut self, report: &Report) -> bool {
        let at = self.told.iter().position(|told| matches!(told, Action::Report(it) if it == report));
        at.map(|at| self.told.remove(at)).is_some()
    }

    #[track_caller]
    fn pull(&mut self) -> Pull {
        self.take("pull", |action| match action {
            Action::Delivery(Command::Pull(pull)) => Some(pull.clone()),
            _ => None,
        })
    }

    #[track_caller]
    fn inspect(&mut self) -> (Attempt, Seq, Seq) {
        self.take("look", |action| match action {
            Action::Delivery(Command::Inspect { attempt, row, above }) => Some((*attempt, *row, *above)),
            _ => None,
        })
    }

    #[track_caller]
    fn reset(&mut self) -> (Attempt, Inbox, Seq) {
        self.take("reset", |action| match action {
            Action::Delivery(Command::Reset { attempt, inbox, from }) => Some((*attempt, *inbox, *from)),
            _ => None,
        })
    }

    #[track_caller]
    fn close(&mut self) -> Inbox {
        self.take("close", |action| match action {
            Action::Delivery(Command::Close { inbox }) => Some(*inbox),
            _ => None,
        })
    }

    #[track_caller]
    fn unpin(&mut self) -> Attempt {
        self.take("unpin", |action| match action {
            Action::Delivery(Command::Unpin { attempt }) => Some(*attempt),
            _ => None,
        })
    }

    #[track_caller]
    fn abort(&mut self) {
        self.take("abort", |action| {
            matches!(action, Action::Store(store::Command::Abort { .. })).then_some(())
        });
    }

    #[track_caller]
    fn insert(&mut self) -> Insert {
        self.take("insert", |action| match action {
            Action::Store(store::Command::Insert(insert)) => Some(insert.clone()),
            _ => None,
        })
    }

    #[track_caller]
    fn read_back(&mut self) -> (Attempt, u64, u64) {
        self.take("read-back", |action| match action {
            Action::Store(store::Command::ReadBack { attempt, first, last, .. }) => {
                Some((*attempt, first.0, last.0))
            }
            _ => None,
        })
    }

    #[track_caller]
    fn described(&mut self) -> (Attempt, TableName, Option<HoldsAbove>) {
        self.take("description", |action| match action {
            Action::Store(store::Command::Describe { attempt, table, holds, .. }) => {
                Some((*attempt, table.clone(), *holds))
            }
            _ => None,
        })
    }

    #[track_caller]
    fn letter(&mut self) -> (Attempt, Letter) {
        self.take("letter", |action| match action {
            Action::DeadLetter(dead_letters::Command::Park { attempt, letter, .. }) => {
                Some((*attempt, letter.clone()))
            }
            _ => None,
        })
    }

    #[track_caller]
    fn write(&mut self) -> (Attempt, Record) {
        self.take("write", |action| match action {
            Action::Ledger(ledger::Command::Write { attempt, record, .. }) => {
                Some((*attempt, Record::decode(record).expect("a record")))
            }
            _ => None,
        })
    }

    #[track_caller]
    fn read(&mut self) -> Attempt {
        self.take("read", |action| match action {
            Action::Ledger(ledger::Command::Read { attempt, .. }) => Some(*attempt),
            _ => None,
        })
    }

    #[track_caller]
    fn answer_read(&mut self) {
        let attempt = self.read();
        let entry = self
            .stored
            .as_ref()
            .map(|record| Entry { revision: Revision(self.revision), record: record.encode() });
        self.tell(Event::Ledger(ledger::Reply::Read { attempt, outcome: Ok(entry) }));
    }

    /// Stores what is to be written; returns it.
    #[track_caller]
    fn store(&mut self) -> Record {
        let (attempt, record) = self.write();
        self.revision += 1;
        self.stored = Some(record.clone());
        let outcome = WriteOutcome::Stored(Revision(self.revision));
        self.tell(Event::Ledger(ledger::Reply::Written { attempt, outcome }));
        record
    }

    #[track_caller]
    fn inspected(&mut self, seen: Inspection) -> (Seq, Seq) {
        let (attempt, row, above) = self.inspect();
        self.delivery(Reply::Inspected { attempt, outcome: Ok(seen) });
        (row, above)
    }

    fn rows(&mut self, inbox: Inbox, rows: impl IntoIterator<Item = Row>) {
        let rows = rows.into_iter().collect();
        self.delivery(Reply::Rows(Rows { inbox, pin: Some(pin()), rows }));
    }

    fn ended(&mut self, pull: &Pull, end: PullEnd) {
        self.delivery(Reply::Ended { attempt: pull.attempt, end });
    }

    #[track_caller]
    fn describe(&mut self) -> Option<HoldsAbove> {
        let (attempt, table, holds) = self.described();
        let outcome = Ok(Description { target: target(table.as_str()), holds: None });
        self.tell(Event::Store(store::Reply::Described { attempt, table, outcome }));
        holds
    }

    fn inserted(&mut self, insert: &Insert, outcome: InsertOutcome) {
        let (attempt, table) = (insert.attempt, insert.table.clone());
        self.tell(Event::Store(store::Reply::Inserted { attempt, table, outcome }));
    }

    fn found(&mut self, attempt: Attempt, seqs: &[u64]) {
        let seqs = seqs.iter().map(|seq| Seq(*seq)).collect();
        let outcome = Ok(Found { seqs, repeated: None });
        self.tell(Event::Store(store::Reply::ReadBack { attempt, table: TableName::new("t"), outcome }));
    }

    /// From the claim to standing by: the record is read and stream and consumer are looked at.
    fn stand_by(&mut self, seen: Inspection) -> Pull {
        self.answer_read();
        self.inspected(seen);
        if self.stored.is_none() {
            self.store();
        }
        self.pull()
    }

    /// The same, pinned, fenced and reset: the first pull for rows.
    fn own(&mut self, seen: &Inspection) -> Pull {
        let pull = self.stand_by(seen.clone());
        self.rows(pull.inbox, [row(seen.shard_last.map_or(1, |last| last.0), 1)]);
        self.answer_read();
        self.inspected(seen.clone());
        self.store();
        let (attempt, inbox, from) = self.reset();
        let floor = self.stored.as_ref().expect("stored").floor;
        assert_eq!(from, floor.next());
        self.delivery(Reply::Reset { attempt, outcome: Ok(()) });
        let pull = self.pull();
        assert_eq!(pull.inbox, inbox);
        pull
    }

    /// An owner whose table is described, without rows.
    fn owner() -> (Self, Pull) {
        let mut bench = Self::new(config());
        let pull = bench.own(&seen(20, 20));
        bench.told.clear();
        (bench, pull)
    }

    /// The intent of rows that make a batch full is stored, and the insert is on its way.
    fn full_batch(&mut self, pull: &Pull, seqs: [u64; 4]) -> Insert {
        let rows = seqs.into_iter().enumerate().map(|(n, seq)| row(seq, n as u64 + 1));
        self.rows(pull.inbox, rows.collect::<Vec<_>>());
        if self.has(|action| matches!(action, Action::Store(store::Command::Describe { .. }))) {
            self.describe();
        }
        self.store();
        self.insert()
    }
}

#[test]
fn standing_by_pulls_one_row_under_no_pin_and_looks_when_none_comes() {
    let mut bench = Bench::new(config());
    assert_eq!(bench.shard.status().phase, "standby");
    bench.quiet_but_read();
    let pull = bench.stand_by(seen(0, 0));
    let stored = bench.stored.clone().expect("it begins a record");
    assert_eq!((stored.epoch, stored.floor, stored.high), (1, Seq(0), mark(0)));
    assert_eq!(stored.writer, Writer { session: Session(1), nonce: 1 });
    assert!(bench.reported(&Report::Ready) && !bench.reported(&Report::Ready));
    assert_eq!((pull.batch, pull.max_bytes, &pull.pin, pull.expires), (1, None, &None, MS * 900));
    assert_eq!(bench.shard.next_wakeup(), Some(bench.now + MS * 1_900));
    // It ends empty: record and consumer are looked at again, the row to compare first.
    bench.pass(MS * 900);
    bench.ended(&pull, PullEnd::Empty);
    bench.answer_read();
    assert_eq!(bench.inspected(Inspection { pinned: None, ..seen(0, 0) }), (Seq(0), Seq(0)));
    let pull = bench.pull();
    // One that brought a row that came under no pin tells nothing.
    bench.delivery(Reply::Rows(Rows { inbox: pull.inbox, pin: None, rows: vec![row(1, 1)] }));
    assert_eq!(bench.shard.status().phase, "standby");
    bench.ended(&pull, PullEnd::Full);
    let pull = bench.pull();
    // Nor do rows of an older inbox.
    bench.rows(Inbox(pull.inbox.0 - 1), [row(1, 1)]);
    assert_eq!(bench.shard.status().phase, "standby");
    // Without a final status it is dead, and its inbox with it.
    bench.pass(MS * 1_899);
    bench.quiet();
    bench.pass(MS);
    assert_eq!(bench.close(), pull.inbox);
    bench.answer_read();
    bench.inspected(seen(0, 0));
    let next = bench.pull();
    assert_eq!(next.inbox, Inbox(pull.inbox.0 + 1));
    // Nobody there twice: it is looked; once is nothing.
    bench.ended(&next, PullEnd::NoResponders);
    bench.quiet();
    bench.pass(MS * 124);
    let next = bench.pull();
    bench.ended(&next, PullEnd::NoResponders);
    let attempt = bench.read();
    // A question that fails is asked again.
    bench.tell(Event::Ledger(ledger::Reply::Read { attempt, outcome: Err(failure()) }));
    bench.pass(MS * 199);
    bench.quiet();
    bench.pass(MS);
    bench.answer_read();
    let (attempt, ..) = bench.inspect();
    bench.delivery(Reply::Inspected { attempt, outcome: Err(InspectError::Failed(failure())) });
    bench.pass(MS * 199);
    bench.quiet();
    bench.pass(MS);
    // A consumer that is gone ends it.
    let (attempt, ..) = bench.inspect();
    bench.delivery(Reply::Inspected { attempt, outcome: Err(InspectError::Gone("gone".to_owned())) });
    assert_eq!((bench.shard.status().phase, bench.shard.next_wakeup()), ("failed", None));
    assert!(bench.shard.status().failure.is_some());
}

impl Bench {
    /// Only the record is asked for.
    fn quiet_but_read(&self) {
        assert_eq!(self.asked.len(), 1);
        assert!(self.has(|action| matches!(action, Action::Ledger(ledger::Command::Read { .. }))));
    }
}

#[test]
fn a_shard_left_with_rows_and_without_an_owner_is_set_back() {
    let mut bench = Bench::with(config(), record(4, 9));
    bench.answer_read();
    let stranded = Inspection { pinned: None, ..seen(9, 0) };
    assert_eq!(bench.inspected(stranded.clone()), (Seq(9), Seq(4)));
    let (attempt, inbox, from) = bench.reset();
    assert_eq!(from, Seq(5));
    assert!(bench.notices().contains(&Notice::Resynced { reason: ResyncReason::Stranded }));
    bench.delivery(Reply::Reset { attempt, outcome: Err(failure()) });
    let pull = bench.pull();
    assert_eq!((pull.inbox, bench.reported(&Report::Ready)), (inbox, true));
    // Whoever is pinned is left alone, and so is a shard with rows to deliver.
    for other in [
        Inspection { pinned: Some(PinId("other".into())), ..seen(9, 0) },
        Inspection { pending: 2, ..stranded },
    ] {
        bench.tell(Event::OwnerGone(PinId("nobody's".into())));
        bench.answer_read();
        bench.inspected(other);
        bench.quiet();
    }
    // The pin of somebody who is gone is taken away, and nobody else's.
    bench.tell(Event::OwnerGone(PinId("theirs".into())));
    bench.answer_read();
    bench.inspected(Inspection { pinned: Some(PinId("theirs".into())), ..seen(9, 0) });
    let attempt = bench.unpin();
    bench.delivery(Reply::Unpinned { attempt, outcome: Err(failure()) });
    bench.pass(MS * 199);
    bench.quiet();
    bench.pass(MS);
    bench.answer_read();
    bench.inspected(Inspection { pinned: Some(PinId("theirs".into())), ..seen(9, 0) });
    let attempt = bench.unpin();
    bench.notices();
    bench.delivery(Reply::Unpinned { attempt, outcome: Ok(()) });
    assert_eq!(bench.notices(), [Notice::PinTakenAway]);
    // Once it is done it is done.
    bench.ended(&pull, PullEnd::Empty);
    bench.answer_read();
    bench.inspected(Inspection { pinned: Some(PinId("theirs".into())), ..seen(9, 0) });
    assert!(!bench.has(|action| matches!(action, Action::Delivery(Command::Unpin { .. }))));
}

#[test]
fn a_standby_lets_go_at_once_but_for_a_pull_that_may_bring_it_the_pin() {
    let within = Duration::from_secs(5);
    let over = |bench: &mut Bench| bench.reported(&Report::Released { clean: true });
    // Nothing is under way: it has not even looked at the consumer.
    let mut bench = Bench::new(config());
    bench.tell(Event::HandOver { within });
    assert!(over(&mut bench));
    // A row may be on its way: given up to somebody else, it waits for the end of the pull.
    let mut bench = Bench::new(config());
    let pull = bench.stand_by(seen(0, 0));
    bench.tell(Event::HandOver { within });
    assert!(!over(&mut bench));
    bench.ended(&pull, PullEnd::Empty);
    assert!(over(&mut bench));
    // A process that stops does not wait, also when it was asked for the shard before.
    for asked_before in [false, true] {
        let mut bench = Bench::new(config());
        bench.stand_by(seen(0, 0));
        if asked_before {
            bench.tell(Event::HandOver { within });
        }
        bench.tell(Event::Stop { within });
        assert!(over(&mut bench));
    }
}

#[test]
fn a_batch_whose_rows_are_gone_stays_open_until_the_shards_next_row() {
    let mut unfinished = record(4, 9);
    unfinished.lanes.insert(TableName::new("t"), open(5, 9, 3));
    let mut bench = Bench::with(config(), unfinished);
    bench.answer_read();
    let purged = Inspection { pinned: None, shard_last: None, next: None, ..seen(30, 0) };
    bench.inspected(Inspection { row_stored_at: Some(mark(9).stored_at), ..purged });
    // Whether it was stored is not known: the record may not pass it, whatever the stream has lost.
    assert!(!bench.has(|action| matches!(action, Action::Ledger(ledger::Command::Write { .. }))));
    assert!(bench.notices().iter().any(|told| matches!(told, Notice::Waiting { .. })));
}

#[test]
fn a_new_tenure_looks_at_every_table_anew() {
    let (mut bench, pull) = Bench::owner();
    let insert = bench.full_batch(&pull, [1, 2, 3, 4]);
    bench.inserted(&insert, InsertOutcome::Stored);
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[1, 2, 3, 4]);
    assert_eq!(bench.store().lanes.len(), 0);
    // In the same tenure what is known of the table is enough.
    bench.rows(pull.inbox, (5..=8).map(|n| row(n, n)));
    assert!(!bench.has(|action| matches!(action, Action::Store(store::Command::Describe { .. }))));
    bench.store();
    let insert = bench.insert();
    bench.inserted(&insert, InsertOutcome::Stored);
    assert_eq!(bench.store().floor, Seq(8));
    // Somebody else may have written meanwhile.
    bench.ended(&pull, PullEnd::NotPinned);
    assert!(bench.reported(&Report::Lost));
    bench.asked.retain(|action| matches!(action, Action::Ledger(_)));
    let looked = Inspection { row_stored_at: Some(mark(8).stored_at), next: Some(Seq(9)), ..seen(20, 12) };
    let pull = bench.own(&looked);
    bench.rows(pull.inbox, (9..=12).map(|n| row(n, n - 8)));
    assert_eq!(bench.describe(), Some(HoldsAbove { created: CREATED, above: Seq(8) }));
}

#[test]
fn an_idle_shards_record_follows_the_stream() {
    let mut bench = Bench::with(config(), record(4, 4));
    bench.answer_read();
    let idle = Inspection {
        shard_last: Some(Seq(4)),
        pinned: None,
        row_stored_at: Some(mark(4).stored_at),
        ..seen(30, 0)
    };
    bench.inspected(idle);
    let written = bench.store();
    assert_eq!((written.epoch, written.floor, written.high), (4, Seq(30), mark(30)));
    bench.pull();
    // Nothing has changed: no write.
    bench.tell(Event::OwnerGone(PinId("x".into())));
    bench.answer_read();
    let idle = Inspection { shard_last: Some(Seq(4)), pinned: None, ..seen(30, 0) };
    assert_eq!(bench.inspected(idle), (Seq(30), Seq(30)));
    bench.quiet();
}

#[test]
fn a_pin_is_fenced_and_kept_while_the_ledger_is_slow() {
    let mut bench = Bench::with(config(), record(4, 9));
    let pull = bench.stand_by(seen(9, 5));
    bench.pass(MS * 100);
    bench.rows(pull.inbox, [row(5, 1)]);
    assert_eq!((bench.shard.status().phase, bench.shard.status().pin), ("taking over", Some(&pin())));
    let attempt = bench.read();
    // An answer to another question is none.
    bench.tell(Event::Ledger(ledger::Reply::Read { attempt: Attempt(attempt.0 + 1), outcome: Ok(None) }));
    bench.quiet();
    bench.tell(Event::Ledger(ledger::Reply::Read { attempt, outcome: Err(failure()) }));
    bench.pass(MS * 200);
    bench.answer_read();
    assert_eq!(bench.inspect().1, Seq(9));
    // The pin is renewed a third of its time after the last pull, by a pull that delivers nothing.
    bench.pass(MS * 699);
    bench.quiet();
    bench.pass(MS);
    let renewal = bench.pull();
    assert_eq!(
        (renewal.batch, renewal.max_bytes, &renewal.pin, renewal.expires, renewal.inbox),
        (1, Some(1), &Some(pin()), MS * 100, pull.inbox)
    );
    bench.ended(&renewal, PullEnd::Empty);
    // Nobody answered the look for long: it is asked again.
    bench.asked.clear();
    bench.pass(Duration::from_secs(20));
    bench.asked.retain(|action| matches!(action, Action::Delivery(Command::Inspect { .. })));
    bench.inspected(seen(9, 5));
    let fence = bench.store();
    assert_eq!((fence.epoch, fence.floor, fence.high), (4, Seq(4), mark(9)));
    assert!(bench.reported(&Report::Owned { pin: pin() }));
    let status = bench.shard.status();
    assert_eq!(
        (status.phase, status.epoch, status.floor, status.accepted),
        ("owning", Some(4), Seq(4), Seq(4))
    );
    let (attempt, inbox, from) = bench.reset();
    assert_eq!((inbox, from), (Inbox(pull.inbox.0 + 2), Seq(5)));
    bench.delivery(Reply::Reset { attempt, outcome: Err(failure()) });
    bench.pass(MS * 199);
    bench.asked.retain(|action| matches!(action, Action::Delivery(Command::Inspect { .. })));
    bench.quiet();
    bench.pass(MS);
    bench.inspected(seen(9, 5));
    let (attempt, inbox, _) = bench.reset();
    assert_eq!(inbox, Inbox(pull.inbox.0 + 3));
    bench.notices();
    bench.delivery(Reply::Reset { attempt, outcome: Ok(()) });
    assert_eq!(bench.notices(), [Notice::Resynced { reason: ResyncReason::NewPin }]);
    assert_eq!(bench.shard.status().phase, "owning");
}

#[test]
fn whoever_loses_the_pin_while_it_fences_stands_by_again() {
    for (end, phase) in [
        (PullEnd::NotPinned, "standby"),
        (PullEnd::LeaderChanged, "standby"),
        (PullEnd::Deleted, "standby"),
        (PullEnd::Empty, "taking over"),
        (PullEnd::NoResponders, "taking over"),
    ] {
        let mut bench = Bench::with(config(), record(4, 9));
        let pull = bench.stand_by(seen(9, 5));
        bench.rows(pull.inbox, [row(5, 1)]);
        bench.ended(&pull, PullEnd::Full);
        bench.pass(MS * 1_000);
        let renewal = bench.pull();
        bench.ended(&renewal, end.clone());
        assert_eq!(bench.shard.status().phase, phase, "{end:?}");
        // Nobody there once is nothing, and twice is.
        if end == PullEnd::NoResponders {
            bench.pass(MS * 1_000);
            let renewal = bench.pull();
            bench.ended(&renewal, end);
            assert_eq!(bench.shard.status().phase, "standby");
        }
    }
}

#[test]
fn a_pull_asks_for_the_room_there_is() {
    let (bench, pull) = Bench::owner();
    // Each row is charged with 160 bytes beside its payload, twice over where its payload is not known.
    assert_eq!(
        (pull.batch, pull.max_bytes, &pull.pin, pull.expires),
        (1_000, Some(840_000), &Some(pin()), MS * 900)
    );
    assert_eq!(bench.shard.status().share, Share { rows: 1_000, bytes: 1_000_000 });
    for (share, batch, max_bytes) in [
        (Share { rows: 9_000, bytes: 10_000_000 }, 5_000, Some(9_200_000)),
        (Share { rows: 9_000, bytes: 320_000 }, 1_000, Some(160_000)),
        (Share { rows: 1, bytes: 320 }, 1, Some(160)),
        // No room for any but the largest, which comes alone.
        (Share { rows: 9, bytes: 319 }, 1, None),
    ] {
        let (mut bench, pull) = Bench::owner();
        bench.tell(Event::Share(share));
        bench.ended(&pull, PullEnd::Full);
        let pull = bench.pull();
        assert_eq!((u64::from(pull.batch), pull.max_bytes), (batch, max_bytes), "{share:?}");
    }
}

#[test]
fn at_the_cap_batches_are_closed_at_once_and_the_pin_is_renewed() {
    let (mut bench, pull) = Bench::owner();
    bench.tell(Event::Share(Share { rows: 8, bytes: 1_000_000 }));
    bench.rows(pull.inbox, (1..=3).map(|n| row(n, n)));
    bench.describe();
    bench.ended(&pull, PullEnd::Full);
    // A quarter of the share is free: decent.
    let pull = bench.pull();
    assert_eq!(pull.batch, 5);
    bench.rows(pull.inbox, [row(4, 4)]);
    let written = bench.store();
    let batch = written.lanes[&TableName::new("t")].open.as_ref().expect("half a share is a batch").batch;
    assert_eq!((batch.first, batch.last, batch.rows), (Seq(1), Seq(4), 4));
    bench.insert();
    bench.rows(pull.inbox, (5..=7).map(|n| row(n, n)));
    bench.ended(&pull, PullEnd::Full);
    // One row would fit, which is not worth a pull; and nothing is written meanwhile.
    bench.pass(MS * 999);
    bench.quiet();
    bench.pass(MS);
    let renewal = bench.pull();
    assert_eq!((renewal.max_bytes, renewal.batch), (Some(1), 1));
    bench.ended(&renewal, PullEnd::TooLarge);
    bench.pass(MS * 1_000);
    let renewal = bench.pull();
    // What a renewal meets says nothing about rows.
    assert_eq!(renewal.max_bytes, Some(1));
    bench.ended(&renewal, PullEnd::Empty);
    assert!(!bench.has(|action| matches!(action, Action::Delivery(Command::Inspect { .. }))));
    let status = bench.shard.status();
    assert_eq!((status.held_rows, status.held_bytes, status.lanes), (7, 7 * 170, 1));
    // A renewal that nobody answers for is looked into at once.
    bench.pass(MS * 1_000);
    let renewal = bench.pull();
    bench.ended(&renewal, PullEnd::NoResponders);
    bench.inspect();
}

#[test]
fn no_batch_is_larger_than_half_the_share() {
    // So that the next can be collected meanwhile.
    let (mut bench, pull) = Bench::owner();
    bench.tell(Event::Share(Share { rows: 6, bytes: 1_000_000 }));
    bench.rows(pull.inbox, [row(1, 1), row(2, 2)]);
    bench.describe();
    assert!(!bench.has(|action| matches!(action, Action::Ledger(_))));
    bench.rows(pull.inbox, [row(3, 3)]);
    assert_eq!(bench.store().lanes[&TableName::new("t")], open(1, 3, 3));
}

#[test]
fn a_row_larger_than_the_room_comes_alone_when_nothing_is_held() {
    let (mut bench, pull) = Bench::owner();
    bench.ended(&pull, PullEnd::TooLarge);
    let alone = bench.pull();
    assert_eq!((alone.batch, alone.max_bytes), (1, None));
    bench.rows(alone.inbox, [row(1, 1)]);
    bench.describe();
    bench.ended(&alone, PullEnd::Full);
    // It is held, and closed at once.
    bench.store();
    let insert = bench.insert();
    bench.quiet();
    bench.inserted(&insert, InsertOutcome::Stored);
    // What is let go makes room; a new lane's first success is looked at.
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[1]);
    assert_eq!(bench.pull().batch, 1_000);
}

#[test]
fn a_batch_is_closed_by_age_by_rows_by_bytes_and_before_a_bad_row() {
    let (mut bench, pull) = Bench::owner();
    let began = bench.now;
    bench.rows(pull.inbox, [row(1, 1)]);
    assert_eq!(bench.notices()[0], Notice::FirstRow { seq: Seq(1) });
    assert_eq!(bench.describe(), Some(HoldsAbove { created: CREATED, above: Seq(0) }));
    bench.pass(MS * 100);
    bench.rows(pull.inbox, [row(2, 2)]);
    assert_eq!(bench.shard.status().oldest, Some(began));
    bench.pass(MS * 399);
    bench.quiet();
    bench.pass(MS);
    let written = bench.store();
    assert_eq!(written.lanes[&TableName::new("t")], LaneRecord { done: Seq(0), ..open(1, 2, 2) });
    assert_eq!((written.floor, written.high), (Seq(0), mark(2)));
    let insert = bench.insert();
    assert_eq!(&*insert.token.0, "S@7:1-2/2.0");
    assert_eq!((insert.created, &insert.target), (CREATED, &target("t")));
    // By the clock of the write's question.
    assert_eq!(insert.send_by, bench.now + STALE);
    assert_eq!(bench.shard.status().oldest, Some(began));
    bench.inserted(&insert, InsertOutcome::Stored);
    let (attempt, first, last) = bench.read_back();
    assert_eq!((first, last), (1, 2));
    bench.found(attempt, &[1, 2]);
    let batch = holdfast_core::batch::Batch { first: Seq(1), last: Seq(2), rows: 2, generation: 0 };
    let stored = Notice::BatchStored { table: TableName::new("t"), batch, attempts: 1, took: Duration::ZERO };
    assert!(bench.notices().contains(&stored));
    let written = bench.store();
    assert_eq!((written.floor, written.lanes.len()), (Seq(2), 0));
    assert_eq!((bench.shard.status().held_rows, bench.shard.status().lanes), (0, 0));
    // Four rows are full, and so are a hundred bytes. The table is known.
    bench.rows(pull.inbox, (3..=6).map(|n| row(n, n)));
    assert_eq!(bench.store().lanes[&TableName::new("t")], open(3, 6, 4));
    let insert = bench.insert();
    // One batch at a time, however many rows wait.
    let large = |n| Row { payload: Bytes::from(vec![b'x'; 40]), ..row(n, n) };
    bench.rows(pull.inbox, [large(7), large(8)]);
    bench.pass(AGE);
    assert!(!bench.has(|action| matches!(action, Action::Ledger(_))));
    bench.rows(pull.inbox, [large(9)]);
    bench.inserted(&insert, InsertOutcome::Stored);
    let written = bench.store();
    let lane = &written.lanes[&TableName::new("t")];
    assert_eq!(
        (lane.done, lane.open.as_ref().map(|open| (open.batch.first, open.batch.last))),
        (Seq(6), Some((Seq(7), Seq(8))))
    );
    assert_eq!(written.floor, Seq(6));
    let insert = bench.insert();
    bench.inserted(&insert, InsertOutcome::Stored);
    // What is left is neither full nor old; the write says what is done, and no more.
    assert_eq!(bench.store().lanes.len(), 0);
    // A bad row ends the batch before it.
    let bad = Row { verdict: Verdict::Bad(Unfit::Payload("bad".into())), ..row(10, 10) };
    bench.rows(pull.inbox, [bad]);
    let lane = bench.store().lanes.remove(&TableName::new("t")).expect("at work");
    assert_eq!(lane.open.map(|open| open.batch.last), Some(Seq(9)));
}

#[test]
fn a_floor_alone_is_written_now_and_then() {
    let (mut bench, pull) = Bench::owner();
    let insert = bench.full_batch(&pull, [1, 2, 3, 4]);
    // A row of another table that is in time only later holds the floor.
    bench.inserted(&insert, InsertOutcome::Stored);
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[1, 2, 3, 4]);
    assert_eq!(bench.store().floor, Seq(4));
    bench.rows(pull.inbox, [row_of("u", 5, 5)]);
    bench.describe();
    bench.rows(pull.inbox, [row(6, 6)]);
    bench.pass(AGE);
    let written = bench.store();
    assert_eq!((written.floor, written.lanes.len(), written.high), (Seq(4), 2, mark(6)));
    let (t, u) = (bench.insert(), bench.insert());
    assert_eq!((t.table.as_str(), u.table.as_str()), ("t", "u"));
    // What comes later is done first: the floor waits.
    bench.inserted(&t, InsertOutcome::Stored);
    let written = bench.store();
    assert_eq!((written.floor, written.lanes[&TableName::new("t")].done), (Seq(4), Seq(6)));
    bench.inserted(&u, InsertOutcome::Stored);
    let (attempt, table) = bench.take("read-back", |action| match action {
        Action::Store(store::Command::ReadBack { attempt, table, .. }) => Some((*attempt, table.clone())),
        _ => None,
    });
    let outcome = Ok(Found { seqs: vec![Seq(5)], repeated: None });
    bench.tell(Event::Store(store::Reply::ReadBack { attempt, table, outcome }));
    assert_eq!((bench.store().floor, bench.shard.status().lanes), (Seq(6), 0));
    // What only moves the floor waits a little after the last write.
    let again = |n| row(n, n);
    bench.rows(pull.inbox, [again(7), again(8), again(9), again(10)]);
    bench.store();
    let insert = bench.insert();
    bench.inserted(&insert, InsertOutcome::Stored);
    assert_eq!(bench.store().floor, Seq(10));
    bench.ended(&pull, PullEnd::Full);
    let pull = bench.pull();
    bench.ended(&pull, PullEnd::Empty);
    bench.inspected(Inspection { delivered: 10, shard_last: Some(Seq(10)), ..seen(30, 0) });
    bench.pass(MS * 199);
    assert!(!bench.has(|action| matches!(action, Action::Ledger(_))));
    bench.pass(MS);
    assert_eq!(bench.store().floor, Seq(30));
}

#[test]
fn a_refusal_that_passes_is_tried_again_under_the_same_token_ever_more_slowly() {
    let (mut bench, pull) = Bench::owner();
    let mut insert = bench.full_batch(&pull, [1, 2, 3, 4]);
    let token = insert.token.clone();
    bench.notices();
    for try_ in 0..4_u32 {
        bench.inserted(&insert, InsertOutcome::Again(refusal(Class::Passing, None)));
        let told = bench.notices();
        assert!(told.contains(&Notice::Refused { table: TableName::new("t"), class: Class::Passing }));
        let trouble = Trouble::Store("code 7: no".to_owned());
        let trouble_told =
            told.contains(&Notice::Trouble { table: TableName::new("t"), trouble: trouble.clone() });
        assert_eq!(trouble_told, try_ == 0, "once");
        assert_eq!(bench.shard.status().troubles, [(&TableName::new("t"), &trouble)]);
        let wait = MS * 100 * 2_u32.pow(try_);
        bench.describe();
        bench.pass(wait * 3 / 4 - MS);
        assert!(!bench.has(|action| matches!(action, Action::Store(_))), "{try_}");
        bench.pass(wait / 2 + MS * 2);
        insert = bench.insert();
        assert_eq!(insert.token, token);
        // The pin is kept meanwhile; how is another matter.
        bench.asked.clear();
    }
    bench.inserted(&insert, InsertOutcome::Stored);
    let (attempt, ..) = bench.read_back();
    bench.notices();
    bench.found(attempt, &[1, 2, 3, 4]);
    let told = bench.notices();
    assert!(told.contains(&Notice::Recovered { table: TableName::new("t") }));
    assert!(
        told.iter()
            .any(|told| matches!(told, Notice::BatchStored { attempts: 5, took, .. } if *took > MS * 1_000))
    );
}

#[test]
fn a_code_that_nobody_knows_is_tried_again_and_told_once() {
    let (mut bench, pull) = Bench::owner();
    let mut insert = bench.full_batch(&pull, [1, 2, 3, 4]);
    for (code, new) in [(7, true), (7, false), (8, true)] {
        bench.notices();
        let refusal = Refusal { code: Some(code), ..refusal(Class::Unknown, None) };
        bench.inserted(&insert, InsertOutcome::Again(refusal.clone()));
        assert_eq!(bench.notices().contains(&Notice::UnknownRefusal { refusal }), new, "{code}");
        bench.describe();
        bench.pass(MS * 600);
        insert = bench.insert();
    }
}

#[test]
fn what_is_in_doubt_is_read_back_and_only_what_is_missing_is_sent() {
    let (mut bench, pull) = Bench::owner();
    let insert = bench.full_batch(&pull, [1, 2, 3, 4]);
    bench.inserted(&insert, InsertOutcome::Doubt(refusal(Class::Doubt, None)));
    bench.pass(MS * 74);
    assert!(!bench.has(|action| matches!(action, Action::Store(store::Command::ReadBack { .. }))));
    bench.pass(MS * 52);
    let (attempt, ..) = bench.read_back();
    // A look that fails is taken again.
    let outcome = Err(refusal(Class::Passing, None));
    bench.tell(Event::Store(store::Reply::ReadBack { attempt, table: TableName::new("t"), outcome }));
    bench.pass(MS * 149);
    assert!(!bench.has(|action| matches!(action, Action::Store(store::Command::ReadBack { .. }))));
    bench.pass(MS * 102);
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[2, 3]);
    let again = bench.insert();
    assert_eq!(again.token, insert.token);
    assert_eq!(again.rows.iter().map(|row| row.seq.0).collect::<Vec<_>>(), [1, 4]);
    // A success that is followed by rows missing has burned the token; twice more, and the lane stops.
    let mut insert = again;
    for generation in 1..=3_u8 {
        bench.inserted(&insert, InsertOutcome::Stored);
        let (attempt, ..) = bench.read_back();
        bench.notices();
        bench.found(attempt, &[1, 2, 3]);
        if generation == 3 {
            break;
        }
        assert!(bench.notices().iter().any(|told| matches!(told, Notice::TokenBurned { missing: 1, batch, .. } if batch.generation == generation)));
        assert!(!bench.has(|action| matches!(action, Action::Store(store::Command::Insert(_)))));
        let written = bench.store();
        assert_eq!(
            written.lanes[&TableName::new("t")].open.as_ref().map(|open| open.batch.generation),
            Some(generation)
        );
        insert = bench.insert();
        assert_eq!(&*insert.token.0, &*format!("S@7:1-4/4.{generation}"));
        assert_eq!(insert.rows.len(), 1);
    }
    let status = bench.shard.status();
    let [(_, Trouble::Stopped(why))] = &*status.troubles else { panic!("{:?}", status.troubles) };
    assert!(why.starts_with("1 rows") && why.ends_with("under 3 tokens in turn"), "{why}");
    bench.pass(Duration::from_mins(1));
    assert!(!bench.has(|action| matches!(action, Action::Store(store::Command::Insert(_)))));
}

#[test]
fn what_a_table_cannot_hold_stops_its_lane() {
    for (seqs, repeated, words) in [
        (&[1, 2][..], Some(Seq(2)), "row 2 is in the table more than once"),
        (&[1, 2, 3, 4, 5], None, "the table has 5 rows between 1 and 9, the open batch 4"),
        (&[1, 7], None, "row 7 is in the table and not among its rows"),
    ] {
        let (mut bench, pull) = Bench::owner();
        let insert = bench.full_batch(&pull, [1, 2, 4, 9]);
        bench.inserted(&insert, InsertOutcome::Stored);
        let (attempt, ..) = bench.read_back();
        let outcome = Ok(Found { seqs: seqs.iter().map(|seq| Seq(*seq)).collect(), repeated });
        bench.tell(Event::Store(store::Reply::ReadBack { attempt, table: TableName::new("t"), outcome }));
        let status = bench.shard.status();
        let [(_, Trouble::Stopped(why))] = &*status.troubles else { panic!("{:?}", status.troubles) };
        assert!(why.starts_with(words), "{why}");
    }
}

#[test]
fn an_answer_that_does_not_come_is_a_doubt_when_no_attempt_lives_any_more() {
    let mut bench = Bench::new(Config { attempt_life: LIFE * 4, ..config() });
    let pull = bench.own(&seen(20, 20));
    let insert = bench.full_batch(&pull, [1, 2, 3, 4]);
    bench.pass(PATIENCE - MS);
    assert!(!bench.has(|action| matches!(action, Action::Store(_))));
    bench.pass(MS);
    let (attempt, ..) = bench.read_back();
    // Too late.
    bench.inserted(&insert, InsertOutcome::Stored);
    bench.asked.clear();
    bench.found(attempt, &[]);
    // The intent is old: it is looked up before anything is sent.
    assert!(!bench.has(|action| matches!(action, Action::Store(store::Command::Insert(_)))));
    let asked = bench.now;
    bench.pass(MS * 10);
    bench.answer_read();
    let again = bench.insert();
    assert_eq!((&again.token, again.send_by), (&insert.token, asked + STALE));
    // One that waited too long for its turn gets in line again.
    bench.inserted(&again, InsertOutcome::Stale);
    let again = bench.insert();
    // Refused for its data while the first may yet land: it waits that out, looks, and tries once more.
    bench.inserted(&again, InsertOutcome::Again(refusal(Class::Data, Some(2))));
    let split = |bench: &mut Bench| bench.notices().iter().any(|told| matches!(told, Notice::Split { .. }));
    assert!(!split(&mut bench));
    // It was sent at the beginning, and could be until its intent was old.
    let fades_at = Instant::START + STALE + LIFE * 4;
    bench.asked.clear();
    bench.pass(fades_at - bench.now - MS);
    assert!(!bench.has(|action| matches!(action, Action::Store(store::Command::ReadBack { .. }))));
    bench.pass(MS);
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[]);
    bench.answer_read();
    let again = bench.insert();
    bench.inserted(&again, InsertOutcome::Again(refusal(Class::Data, Some(2))));
    assert!(split(&mut bench));
}

#[test]
fn a_batch_that_is_refused_for_its_data_is_cut_around_the_row() {
    let (mut bench, pull) = Bench::owner();
    let insert = bench.full_batch(&pull, [1, 2, 3, 4]);
    bench.notices();
    bench.inserted(&insert, InsertOutcome::Again(refusal(Class::Data, Some(3))));
    assert!(bench.notices().iter().any(|told| matches!(told, Notice::Split { left: 2, .. })));
    let written = bench.store();
    assert_eq!(written.lanes[&TableName::new("t")], open(1, 2, 2));
    let insert = bench.insert();
    bench.inserted(&insert, InsertOutcome::Stored);
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[1, 2]);
    // The named row goes alone, at once.
    assert_eq!(bench.store().lanes[&TableName::new("t")], open(3, 3, 1));
    let insert = bench.insert();
    bench.inserted(&insert, InsertOutcome::Again(refusal(Class::Data, Some(1))));
    let written = bench.store();
    let parked =
        Parked { row: Seq(3), cause: Cause::Refused, code: Some(7), message: "no".into(), attempts: 1 };
    assert_eq!(written.lanes[&TableName::new("t")].parked, Some(parked));
    let (attempt, letter) = bench.letter();
    assert_eq!((letter.seq, letter.attempts, letter.code, letter.created), (Seq(3), 1, Some(7), CREATED));
    // Not kept now: tried again, ever more slowly, and told.
    let mut attempt = attempt;
    for (early, late) in [(74, 52), (149, 102)] {
        let outcome = ParkOutcome::Failed(Failure::new(FailureClass::Full, "full"));
        bench.tell(Event::DeadLetter(dead_letters::Reply::Parked {
            attempt,
            table: TableName::new("t"),
            outcome,
        }));
        assert!(matches!(&*bench.shard.status().troubles, [(_, Trouble::DeadLetters { seq: Seq(3), .. })]));
        bench.pass(MS * early);
        assert!(!bench.has(|action| matches!(action, Action::DeadLetter(_))));
        bench.pass(MS * late);
        attempt = bench.letter().0;
    }
    let outcome = ParkOutcome::Stale;
    bench.tell(Event::DeadLetter(dead_letters::Reply::Parked {
        attempt,
        table: TableName::new("t"),
        outcome,
    }));
    let (attempt, _) = bench.letter();
    let outcome = ParkOutcome::Parked;
    bench.tell(Event::DeadLetter(dead_letters::Reply::Parked {
        attempt,
        table: TableName::new("t"),
        outcome,
    }));
    assert!(bench.notices().iter().any(|told| matches!(told, Notice::Parked { seq: Seq(3), .. })));
    // The rest waits for its age, which counts from when it came.
    let written = bench.store();
    assert_eq!((written.floor, written.lanes.len()), (Seq(3), 0));
    bench.pass(AGE - MS * (127 + 251));
    bench.quiet();
    bench.pass(MS);
    assert_eq!(bench.store().lanes[&TableName::new("t")], open(4, 4, 1));
    let insert = bench.insert();
    bench.inserted(&insert, InsertOutcome::Stored);
    assert_eq!(bench.store().floor, Seq(4));
    assert_eq!(bench.shard.status().held_rows, 0);
}

#[test]
fn one_bad_row_is_no_reason_for_small_batches_and_a_second_is() {
    let mut bench = Bench::new(Config { batch: Limits { max_rows: 100, ..config().batch }, ..config() });
    let pull = bench.own(&seen(100, 100));
    let small = |n| Row { payload: Bytes::from_static(b"."), ..row(n, n) };
    bench.rows(pull.inbox, (1..=100).map(small));
    bench.describe();
    let mut sizes = Vec::new();
    for bad in [Some(3), None, Some(1), None, Some(2), None, Some(1), None, None, None, None] {
        bench.pass(AGE);
        let written = bench.store();
        if written.lanes[&TableName::new("t")].parked.is_some() {
            let (attempt, letter) = bench.letter();
            sizes.push(0);
            let outcome = ParkOutcome::Parked;
            bench.tell(Event::DeadLetter(dead_letters::Reply::Parked {
                attempt,
                table: letter.table,
                outcome,
            }));
            continue;
        }
        let insert = bench.insert();
        sizes.push(insert.rows.len());
        let Some(_) = bad else {
            bench.inserted(&insert, InsertOutcome::Stored);
            if bench.has(|action| matches!(action, Action::Store(store::Command::ReadBack { .. }))) {
                let (attempt, ..) = bench.read_back();
                bench.found(attempt, &insert.rows.iter().map(|row| row.seq.0).collect::<Vec<_>>());
            }
            continue;
        };
        bench.inserted(&insert, InsertOutcome::Again(refusal(Class::Data, bad)));
        bench.asked.retain(|action| matches!(action, Action::Ledger(_)));
    }
    // All but the third row; all but the fifth; then twice as many with every success.
    assert_eq!(sizes, [100, 2, 1, 0, 97, 1, 1, 0, 16, 32, 47]);
}

#[test]
fn without_a_name_it_is_halved_and_what_follows_grows_again() {
    let (mut bench, pull) = Bench::owner();
    let insert = bench.full_batch(&pull, [1, 2, 3, 4]);
    bench.rows(pull.inbox, (5..=15).map(|n| row(n, n)));
    bench.inserted(&insert, InsertOutcome::Again(refusal(Class::Data, None)));
    let mut sizes = Vec::new();
    let mut first = true;
    for _ in 0..5 {
        let written = bench.store();
        let Some(batch) = written.lanes.get(&TableName::new("t")).and_then(|lane| lane.open.as_ref()) else {
            break;
        };
        sizes.push(batch.batch.rows);
        let insert = bench.insert();
        bench.inserted(&insert, InsertOutcome::Stored);
        if std::mem::take(&mut first) {
            let (attempt, ..) = bench.read_back();
            bench.found(attempt, &[1, 2]);
        }
    }
    assert_eq!(sizes, [2, 4, 4, 4, 1]);
}

#[test]
fn a_bad_row_waits_where_there_are_no_dead_letters() {
    let parking = ParkingPolicy { dead_letters: false, unknown_tables: false };
    let mut bench = Bench::new(Config { parking, ..config() });
    let pull = bench.own(&seen(20, 20));
    let bad = Row { verdict: Verdict::Bad(Unfit::Payload("bad".into())), ..row(1, 1) };
    bench.rows(pull.inbox, [bad]);
    assert!(matches!(&*bench.shard.status().troubles, [(_, Trouble::BadRow { seq: Seq(1), .. })]));
    bench.pass(AGE * 3);
    assert!(
        !bench.has(|action| matches!(action, Action::Ledger(_) | Action::Store(_) | Action::DeadLetter(_)))
    );
    // A halt does not wait for it.
    bench.asked.clear();
    bench.tell(Event::Stop { within: Duration::from_secs(9) });
    bench.abort();
    assert_eq!(bench.shard.status().phase, "releasing");
}

#[test]
fn who_does_not_answer_is_told_of() {
    let (mut bench, pull) = Bench::owner();
    bench.rows(pull.inbox, (1..=4).map(|n| row(n, n)));
    // The store, of a table that is not known yet.
    let (attempt, table, _) = bench.described();
    let outcome = Err(DescribeError::Failed(refusal(Class::Passing, None)));
    bench.tell(Event::Store(store::Reply::Described { attempt, table, outcome }));
    let trouble = Trouble::Store("code 7: no".to_owned());
    assert_eq!(bench.shard.status().troubles, [(&TableName::new("t"), &trouble)]);
    bench.pass(MS * 74);
    assert!(!bench.has(|action| matches!(action, Action::Store(_))));
    bench.pass(MS * 52);
    bench.describe();
    // What was known a minute ago is good enough while nobody can be asked.
    let slow = Limits { max_age: Duration::from_mins(2), ..config().batch };
    let mut old = Bench::new(Config { batch: slow, ..config() });
    let pull = old.own(&seen(20, 20));
    old.rows(pull.inbox, [row(1, 1)]);
    old.describe();
    old.asked.clear();
    old.pass(Duration::from_secs(61));
    let (attempt, table, _) = old.described();
    let outcome = Err(DescribeError::Failed(refusal(Class::Passing, None)));
    old.tell(Event::Store(store::Reply::Described { attempt, table, outcome }));
    assert!(old.shard.status().troubles.is_empty());
    // The ledger.
    let (attempt, _) = bench.write();
    assert_eq!(bench.shard.status().ledger_trouble, None);
    bench.tell(Event::Ledger(ledger::Reply::Written { attempt, outcome: WriteOutcome::Unknown(failure()) }));
    assert_eq!(bench.shard.status().ledger_trouble, Some(&failure()));
}

#[test]
fn rows_of_a_missing_table_wait_or_become_letters() {
    let missing = || Err(DescribeError::Missing(refusal(Class::Table, None)));
    let (mut bench, pull) = Bench::owner();
    bench.rows(pull.inbox, [row(1, 1)]);
    let (attempt, table, _) = bench.described();
    bench.tell(Event::Store(store::Reply::Described { attempt, table, outcome: missing() }));
    assert!(matches!(&*bench.shard.status().troubles, [(_, Trouble::Table(_))]));
    bench.pass(MS * 74);
    assert!(!bench.has(|action| matches!(action, Action::Store(_))));
    bench.pass(MS * 52);
    bench.notices();
    bench.describe();
    assert!(bench.notices().contains(&Notice::Recovered { table: TableName::new("t") }));
    bench.pass(AGE);
    bench.store();
    bench.insert();

    let parking = ParkingPolicy { dead_letters: true, unknown_tables: true };
    let mut bench = Bench::new(Config { parking, ..config() });
    let pull = bench.own(&seen(20, 20));
    bench.rows(pull.inbox, [row(1, 1)]);
    let (attempt, table, _) = bench.described();
    bench.tell(Event::Store(store::Reply::Described { attempt, table, outcome: missing() }));
    let written = bench.store();
    let parked = written.lanes[&TableName::new("t")].parked.as_ref().expect("it is a letter");
    assert_eq!((parked.cause, parked.row), (Cause::UnknownTable, Seq(1)));
    assert_eq!(bench.letter().1.cause, Cause::UnknownTable);
}

#[test]
fn a_table_that_knows_more_than_the_ledger_is_read_back() {
    let (mut bench, pull) = Bench::owner();
    bench.rows(pull.inbox, (1..=4).map(|n| row(n, n)));
    let (attempt, table, _) = bench.described();
    let outcome = Ok(Description { target: target("t"), holds: Some(Seq(3)) });
    bench.tell(Event::Store(store::Reply::Described { attempt, table, outcome }));
    let ahead = Notice::TableAhead { table: TableName::new("t"), done: Seq(0), holds: Seq(3) };
    assert!(bench.notices().contains(&ahead));
    let written = bench.store();
    assert_eq!(written.lanes[&TableName::new("t")].suspect, Seq(3));
    let (attempt, ..) = bench.read_back();
    // Among them are rows that are no batch's any more.
    bench.found(attempt, &[1, 2, 3]);
    let insert = bench.insert();
    assert_eq!(insert.rows.iter().map(|row| row.seq.0).collect::<Vec<_>>(), [4]);
    bench.inserted(&insert, InsertOutcome::Stored);
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[1, 2, 3, 4]);
    assert_eq!(bench.store().lanes.len(), 0);
    // Rows up to the last one that the table has: the record says nothing more of it.
    let (mut bench, pull) = Bench::owner();
    bench.rows(pull.inbox, (1..=4).map(|n| row(n, n)));
    let (attempt, table, _) = bench.described();
    let outcome = Ok(Description { target: target("t"), holds: Some(Seq(4)) });
    bench.tell(Event::Store(store::Reply::Described { attempt, table, outcome }));
    bench.store();
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[1, 2, 3, 4]);
    assert_eq!(bench.store().lanes.len(), 0);
}

#[test]
fn a_pull_that_ends_empty_is_compared_with_the_consumer() {
    let (mut bench, pull) = Bench::owner();
    bench.rows(pull.inbox, [row(1, 1), row(2, 2)]);
    bench.describe();
    bench.ended(&pull, PullEnd::Empty);
    // It brought something: nothing to compare.
    assert!(!bench.has(|action| matches!(action, Action::Delivery(Command::Inspect { .. }))));
    let pull = bench.pull();
    bench.ended(&pull, PullEnd::Empty);
    let now = Inspection { delivered: 2, ..seen(2, 0) };
    assert_eq!(bench.inspected(now.clone()), (Seq(2), Seq(0)));
    let pull = bench.pull();
    // Up to the stream's last row everything is seen, whosever it is.
    bench.ended(&pull, PullEnd::Empty);
    bench.inspected(Inspection { last: mark(50), ..now.clone() });
    assert_eq!(bench.shard.status().accepted, Seq(50));
    let pull = bench.pull();
    bench.ended(&pull, PullEnd::Empty);
    bench.notices();
    bench.inspected(Inspection { delivered: 3, last: mark(50), ..now.clone() });
    let (attempt, inbox, from) = bench.reset();
    assert_eq!((from, inbox), (Seq(1), Inbox(pull.inbox.0 + 1)));
    bench.delivery(Reply::Reset { attempt, outcome: Ok(()) });
    assert!(bench.notices().contains(&Notice::Resynced { reason: ResyncReason::Tail }));
    let pull = bench.pull();
    bench.rows(pull.inbox, [row(1, 1), row(2, 2)]);
    assert!(bench.notices().contains(&Notice::Repeats { rows: 2 }));
    // A later row of the shard that was never delivered was skipped.
    bench.ended(&pull, PullEnd::Full);
    let pull = bench.pull();
    bench.ended(&pull, PullEnd::Empty);
    bench.inspected(Inspection { last: mark(60), shard_last: Some(Seq(51)), ..now.clone() });
    let (attempt, ..) = bench.reset();
    bench.notices();
    bench.delivery(Reply::Reset { attempt, outcome: Ok(()) });
    assert!(bench.notices().contains(&Notice::Resynced { reason: ResyncReason::Skipped }));
    // What is asked for is the highest row that is known, and the first one above the stored floor.
    let mut bench = Bench::with(config(), record(4, 9));
    let pull = bench.own(&Inspection { row_stored_at: Some(mark(9).stored_at), ..seen(9, 5) });
    bench.ended(&pull, PullEnd::Empty);
    assert_eq!(bench.inspected(seen(9, 5)), (Seq(9), Seq(4)));
    // Somebody else is pinned, or the stream is another: the tenure is over.
    for other in [
        Inspection { pinned: None, last: mark(60), ..now.clone() },
        Inspection { created: Timestamp(8), last: mark(60), ..now.clone() },
        Inspection { last: mark(49), ..now },
    ] {
        let (mut bench, pull) = Bench::owner();
        bench.rows(pull.inbox, [row(1, 1), row(50, 2)]);
        bench.asked.clear();
        bench.ended(&pull, PullEnd::Full);
        if let Action::Delivery(Command::Pull(pull)) = bench.asked.pop().expect("a pull") {
            bench.ended(&pull, PullEnd::Empty);
        }
        bench.inspected(other);
        assert!(bench.reported(&Report::Lost));
        assert_eq!(bench.shard.status().phase, "standby");
    }
}

#[test]
fn deliveries_out_of_order_mean_a_resync() {
    let other = |rows: Vec<Row>| (Some(PinId("other".into())), rows);
    let ours = |rows: Vec<Row>| (Some(pin()), rows);
    for ((from, rows), reason) in [
        (other(vec![row(1, 1)]), ResyncReason::OtherPin),
        (ours(vec![row(1, 2)]), ResyncReason::Gap),
        (ours(vec![row(1, 1), row(1, 2)]), ResyncReason::WentBack),
        (ours(vec![row(2, 1)]), ResyncReason::Skipped),
    ] {
        let (mut bench, pull) = Bench::owner();
        bench.delivery(Reply::Rows(Rows { inbox: pull.inbox, pin: from, rows }));
        bench.asked.retain(|action| matches!(action, Action::Delivery(_)));
        bench.inspected(seen(20, 20));
        let (attempt, ..) = bench.reset();
        bench.notices();
        bench.delivery(Reply::Reset { attempt, outcome: Ok(()) });
        assert_eq!(bench.notices(), [Notice::Resynced { reason }]);
    }
    // So do a connection made anew, a pull without an end, and a consumer that is said to be gone.
    let disrupted: fn(&mut Bench, &Pull) = |bench, _| bench.delivery(Reply::Disrupted);
    let dead: fn(&mut Bench, &Pull) = |bench, _| bench.pass(MS * 1_900);
    let deleted: fn(&mut Bench, &Pull) = |bench, pull| bench.ended(pull, PullEnd::Deleted);
    let nobody: fn(&mut Bench, &Pull) = |bench, pull| {
        bench.ended(pull, PullEnd::NoResponders);
        assert!(!bench.has(|action| matches!(action, Action::Delivery(Command::Inspect { .. }))));
        bench.pass(MS * 126);
        let pull = bench.pull();
        bench.ended(&pull, PullEnd::NoResponders);
    };
    for (cause, reason) in [
        (disrupted, ResyncReason::Disrupted),
        (dead, ResyncReason::DeadPull),
        (deleted, ResyncReason::Disrupted),
        (nobody, ResyncReason::Disrupted),
    ] {
        let (mut bench, pull) = Bench::owner();
        cause(&mut bench, &pull);
        bench.inspected(seen(20, 20));
        let (attempt, ..) = bench.reset();
        bench.notices();
        bench.delivery(Reply::Reset { attempt, outcome: Ok(()) });
        assert_eq!(bench.notices(), [Notice::Resynced { reason }]);
    }
    for end in [PullEnd::NotPinned, PullEnd::LeaderChanged] {
        let (mut bench, pull) = Bench::owner();
        bench.ended(&pull, end);
        assert!(bench.reported(&Report::Lost));
        assert_eq!(bench.close(), pull.inbox);
        bench.abort();
    }
}

#[test]
fn an_inherited_batch_is_read_back_collected_and_completed() {
    let mut inherited = record(0, 9);
    inherited.lanes.insert(TableName::new("t"), open(3, 9, 3));
    let looked = || Inspection { row_stored_at: Some(mark(9).stored_at), ..seen(9, 9) };
    // It is there.
    let mut bench = Bench::with(config(), inherited.clone());
    bench.own(&looked());
    assert!(
        bench.notices().iter().any(|told| matches!(told, Notice::TenureBegan { epoch: 4, inherited: 1, .. }))
    );
    let (attempt, first, last) = bench.read_back();
    assert_eq!((first, last), (3, 9));
    bench.found(attempt, &[3, 5, 9]);
    assert!(bench.notices().iter().any(|told| matches!(told, Notice::BatchStored { attempts: 0, .. })));
    assert_eq!(bench.store().lanes[&TableName::new("t")].done, Seq(9));
    // A part is there: the rest is sent once all of it has come.
    let mut bench = Bench::with(config(), inherited.clone());
    let pull = bench.own(&looked());
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[5]);
    bench.rows(pull.inbox, [row_of("u", 1, 1), row(3, 2), row(5, 3)]);
    assert!(!bench.has(|action| matches!(action, Action::Store(store::Command::Insert(_)))));
    bench.rows(pull.inbox, [row(9, 4), row(10, 5)]);
    let insert = bench.insert();
    assert_eq!(&*insert.token.0, "S@7:3-9/3.0");
    assert_eq!(insert.rows.iter().map(|row| row.seq.0).collect::<Vec<_>>(), [3, 9]);
    bench.inserted(&insert, InsertOutcome::Stored);
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[3, 5, 9]);
    bench.store();
    // A row beyond it comes first: rows are gone, and what is left goes under the old token.
    let mut bench = Bench::with(config(), inherited.clone());
    let pull = bench.own(&looked());
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[]);
    bench.rows(pull.inbox, [row_of("u", 1, 1), row(9, 2), row(10, 3)]);
    let insert = bench.insert();
    assert_eq!((&*insert.token.0, insert.rows.len()), ("S@7:3-9/3.0", 1));
    bench.inserted(&insert, InsertOutcome::Stored);
    let (attempt, ..) = bench.read_back();
    bench.notices();
    bench.found(attempt, &[9]);
    assert!(bench.notices().iter().any(|told| matches!(told, Notice::RowsRemoved { lost: 2, .. })));
    // One that is gone is in the table: nothing is lost.
    let mut bench = Bench::with(config(), inherited.clone());
    let pull = bench.own(&looked());
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[5]);
    bench.rows(pull.inbox, [row_of("u", 1, 1), row(3, 2), row(9, 3), row(10, 4)]);
    let insert = bench.insert();
    bench.inserted(&insert, InsertOutcome::Stored);
    let (attempt, ..) = bench.read_back();
    bench.notices();
    bench.found(attempt, &[3, 5, 9]);
    let told = bench.notices();
    assert!(told.iter().any(|told| matches!(told, Notice::BatchStored { .. })));
    assert!(!told.iter().any(|told| matches!(told, Notice::RowsRemoved { .. })));
    // The same when nothing comes any more.
    let mut bench = Bench::with(config(), inherited.clone());
    let pull = bench.own(&looked());
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[3]);
    bench.ended(&pull, PullEnd::Empty);
    bench.notices();
    bench.inspected(Inspection { shard_last: None, next: None, pending: 0, ..looked() });
    assert!(bench.notices().iter().any(|told| matches!(told, Notice::RowsRemoved { lost: 2, .. })));
    // Not while rows wait.
    let mut bench = Bench::with(config(), inherited);
    let pull = bench.own(&looked());
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[3]);
    bench.ended(&pull, PullEnd::Empty);
    bench.notices();
    bench.inspected(looked());
    assert!(!bench.notices().iter().any(|told| matches!(told, Notice::RowsRemoved { .. })));
}

#[test]
fn an_inherited_batch_where_the_table_knew_more_is_compared_with_its_own_rows() {
    for (suspect, stops) in [(9, false), (2, true)] {
        let mut inherited = record(0, 9);
        let lane = LaneRecord { suspect: Seq(suspect), ..open(3, 9, 3) };
        inherited.lanes.insert(TableName::new("t"), lane);
        let mut bench = Bench::with(config(), inherited);
        let pull = bench.own(&Inspection { row_stored_at: Some(mark(9).stored_at), ..seen(9, 9) });
        let (attempt, ..) = bench.read_back();
        // One row more than the batch has: it may be one that is gone from the stream since, or a contradiction.
        bench.found(attempt, &[3, 4, 5, 9]);
        assert_eq!(matches!(&*bench.shard.status().troubles, [(_, Trouble::Stopped(_))]), stops);
        bench.notices();
        bench.rows(pull.inbox, [row_of("u", 1, 1), row(3, 2), row(5, 3), row(9, 4)]);
        let stored = bench.notices().iter().any(|told| matches!(told, Notice::BatchStored { .. }));
        assert_eq!(stored, !stops);
    }
}

#[test]
fn that_a_table_knew_more_is_kept_while_none_of_its_rows_come() {
    let mut inherited = record(0, 9);
    let lane = LaneRecord { suspect: Seq(9), ..LaneRecord::default() };
    inherited.lanes.insert(TableName::new("t"), lane);
    let mut bench = Bench::with(config(), inherited);
    let pull = bench.own(&Inspection { row_stored_at: Some(mark(9).stored_at), ..seen(9, 9) });
    bench.rows(pull.inbox, [row_of("u", 1, 1)]);
    bench.describe();
    bench.pass(AGE);
    let written = bench.store();
    assert!(written.lanes[&TableName::new("u")].open.is_some());
    assert_eq!(written.lanes[&TableName::new("t")].suspect, Seq(9));
}

/// Its token may have been burned in a history that the ledger has lost.
#[test]
fn a_part_of_an_inherited_batch_is_looked_after_although_it_was_answered_stored() {
    let mut inherited = record(0, 9);
    inherited.lanes.insert(TableName::new("t"), open(3, 9, 3));
    let mut bench = Bench::with(config(), inherited);
    let pull = bench.own(&Inspection { row_stored_at: Some(mark(9).stored_at), ..seen(9, 9) });
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[]);
    bench.rows(pull.inbox, [row_of("u", 1, 1), row(3, 2), row(5, 3), row(9, 4)]);
    let insert = bench.insert();
    bench.inserted(&insert, InsertOutcome::Again(refusal(Class::Data, Some(3))));
    // Until no attempt of the tenure before can land any more it is not cut.
    bench.asked.clear();
    bench.pass(STALE + LIFE);
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[]);
    bench.answer_read();
    let insert = bench.insert();
    bench.inserted(&insert, InsertOutcome::Again(refusal(Class::Data, Some(3))));
    assert_eq!(bench.store().lanes[&TableName::new("t")], open(3, 5, 2));
    let insert = bench.insert();
    assert_eq!(&*insert.token.0, "S@7:3-5/2.0");
    bench.inserted(&insert, InsertOutcome::Stored);
    let (attempt, first, last) = bench.read_back();
    assert_eq!((first, last), (3, 5));
    bench.notices();
    bench.found(attempt, &[5]);
    let told = bench.notices();
    assert!(told.iter().any(|told| matches!(told, Notice::TokenBurned { missing: 1, .. })));
}

#[test]
fn what_is_inherited_is_collected_beyond_the_share() {
    let mut inherited = record(0, 9);
    inherited.lanes.insert(TableName::new("t"), open(1, 9, 6));
    let own = |share| {
        let looked = Inspection { row_stored_at: Some(mark(9).stored_at), ..seen(9, 9) };
        let mut bench = Bench::with(config(), inherited.clone());
        let pull = bench.own(&looked);
        bench.tell(Event::Share(share));
        (bench, pull)
    };
    // The share is full of a batch that an owner with a larger one closed: its rows do not count.
    let (mut bench, pull) = own(Share { rows: 4, bytes: 1_000_000 });
    bench.rows(pull.inbox, [row(1, 1), row_of("u", 2, 2), row(3, 3), row(4, 4), row(5, 5)]);
    bench.ended(&pull, PullEnd::Full);
    let pull = bench.pull();
    // Two of six are missing; five rows of 170 bytes are held, one of them of another table.
    assert_eq!((pull.batch, pull.max_bytes), (2, Some(1_000_000 - 170 - 2 * 160)));
    bench.ended(&pull, PullEnd::TooLarge);
    let alone = bench.pull();
    assert_eq!((alone.batch, alone.max_bytes), (1, None));
    // One that nobody answers is tried again soon.
    bench.ended(&alone, PullEnd::NoResponders);
    bench.pass(MS * 124);
    let alone = bench.pull();
    assert_eq!((alone.batch, alone.max_bytes), (1, None));
    // Once it is whole there is no reason to go beyond the share.
    bench.rows(alone.inbox, [row(6, 6), row(9, 7)]);
    bench.ended(&alone, PullEnd::Full);
    assert!(!bench.has(|action| matches!(action, Action::Delivery(Command::Pull(_)))));
    // What others hold counts: there is room for one row.
    let (mut bench, pull) = own(Share { rows: 4, bytes: 1_000_000 });
    bench.rows(pull.inbox, [row(1, 1), row_of("u", 2, 2), row_of("u", 3, 3), row_of("u", 4, 4)]);
    bench.ended(&pull, PullEnd::Full);
    assert_eq!(bench.pull().batch, 1);
    // So do bytes, twice over for rows that are not known yet.
    let (mut bench, pull) = own(Share { rows: 1_000, bytes: 1_280 });
    bench.rows(pull.inbox, (1..=3).map(|n| row(n, n)).chain((6..=9).map(|n| row_of("u", n, n - 2))));
    bench.ended(&pull, PullEnd::Full);
    let pull = bench.pull();
    assert_eq!((pull.batch, pull.max_bytes), (1, Some(1_280 - 4 * 170 - 160)));
    // An inherited letter waits for one row.
    let parked = Parked { row: Seq(9), cause: Cause::Refused, code: None, message: "no".into(), attempts: 2 };
    let mut inherited = record(0, 9);
    let lane = LaneRecord { done: Seq(2), parked: Some(parked), ..LaneRecord::default() };
    inherited.lanes.insert(TableName::new("t"), lane);
    let mut bench = Bench::with(config(), inherited);
    let pull = bench.own(&Inspection { row_stored_at: Some(mark(9).stored_at), ..seen(9, 9) });
    bench.tell(Event::Share(Share { rows: 8, bytes: 1_000_000 }));
    bench.rows(pull.inbox, (1..=7).map(|n| row_of("u", n, n)));
    bench.ended(&pull, PullEnd::Full);
    assert_eq!(bench.pull().batch, 1);
}

#[test]
fn an_inherited_letter_is_published_once_its_row_has_come() {
    let parked = Parked { row: Seq(5), cause: Cause::Refused, code: None, message: "no".into(), attempts: 2 };
    let mut inherited = record(0, 5);
    let lane = LaneRecord { done: Seq(2), parked: Some(parked), ..LaneRecord::default() };
    inherited.lanes.insert(TableName::new("t"), lane);
    let looked = || Inspection { row_stored_at: Some(mark(5).stored_at), ..seen(9, 9) };
    let own = || {
        let mut bench = Bench::with(config(), inherited.clone());
        let pull = bench.own(&looked());
        bench.notices();
        (bench, pull)
    };
    let (mut bench, pull) = own();
    bench.rows(pull.inbox, [row(1, 1), row(5, 2)]);
    let (attempt, letter) = bench.letter();
    assert_eq!((letter.seq, letter.attempts, &*letter.message), (Seq(5), 2, "no"));
    let outcome = ParkOutcome::Parked;
    bench.tell(Event::DeadLetter(dead_letters::Reply::Parked {
        attempt,
        table: TableName::new("t"),
        outcome,
    }));
    assert_eq!(bench.store().lanes.get(&TableName::new("t")).map_or(Seq(5), |lane| lane.done), Seq(5));
    // It is gone from the stream.
    let (mut bench, pull) = own();
    bench.rows(pull.inbox, [row(1, 1), row(6, 2)]);
    assert!(bench.notices().contains(&Notice::LetterLost { table: TableName::new("t"), seq: Seq(5) }));
    // A row before it that is not done needs a person.
    let (mut bench, pull) = own();
    bench.rows(pull.inbox, [row(1, 1), row(4, 2)]);
    assert!(matches!(&*bench.shard.status().troubles, [(_, Trouble::Stopped(_))]));
}

#[test]
fn a_stop_writes_what_was_accepted_and_gives_the_pin_back() {
    let (mut bench, pull) = Bench::owner();
    bench.rows(pull.inbox, [row(1, 1)]);
    bench.describe();
    bench.tell(Event::Stop { within: Duration::from_secs(9) });
    assert_eq!((bench.close(), bench.shard.status().phase), (pull.inbox, "halting"));
    // Nothing more comes in, and nothing waits for its age.
    bench.rows(pull.inbox, [row(2, 2)]);
    assert_eq!(bench.shard.status().held_rows, 1);
    assert_eq!(bench.store().lanes[&TableName::new("t")], open(1, 1, 1));
    let insert = bench.insert();
    bench.quiet();
    bench.inserted(&insert, InsertOutcome::Stored);
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[1]);
    assert_eq!(bench.store().floor, Seq(1));
    // Whose is the pin? The look may fail, and the unpin.
    let (attempt, ..) = bench.inspect();
    bench.delivery(Reply::Inspected { attempt, outcome: Err(InspectError::Failed(failure())) });
    bench.pass(MS * 99);
    bench.quiet();
    bench.pass(MS);
    bench.inspected(seen(20, 0));
    let attempt = bench.unpin();
    bench.delivery(Reply::Unpinned { attempt, outcome: Err(failure()) });
    bench.pass(MS * 99);
    bench.quiet();
    bench.pass(MS);
    bench.inspected(seen(20, 0));
    let attempt = bench.unpin();
    bench.delivery(Reply::Unpinned { attempt, outcome: Ok(()) });
    assert!(bench.reported(&Report::Released { clean: true }));
    assert_eq!((bench.shard.status().phase, bench.shard.next_wakeup()), ("released", None));
    // Somebody else's pin is left alone.
    let (mut bench, _) = Bench::owner();
    bench.tell(Event::Stop { within: Duration::from_secs(9) });
    bench.inspected(Inspection { pinned: None, ..seen(20, 0) });
    assert!(bench.reported(&Report::Released { clean: true }));
    // Nobody answers: the pin lapses by itself, and is kept until then.
    let (mut bench, _) = Bench::owner();
    bench.tell(Event::Stop { within: Duration::from_secs(9) });
    bench.asked.clear();
    bench.pass(MS * 999);
    bench.quiet();
    bench.pass(MS);
    assert_eq!(bench.pull().max_bytes, Some(1));
    bench.pass(MS * 999);
    assert!(!bench.reported(&Report::Released { clean: true }));
    bench.pass(MS);
    assert!(bench.reported(&Report::Released { clean: true }));
}

#[test]
fn a_stop_ends_in_time_whatever_is_unwritten() {
    let (mut bench, pull) = Bench::owner();
    bench.full_batch(&pull, [1, 2, 3, 4]);
    bench.tell(Event::Stop { within: Duration::from_secs(2) });
    bench.pass(MS * 1_999);
    assert_eq!(bench.shard.status().phase, "halting");
    bench.notices();
    bench.pass(MS);
    bench.abort();
    assert_eq!(bench.shard.status().phase, "releasing");
    let why = "the time for stopping is up".to_owned();
    assert!(bench.notices().contains(&Notice::TenureEnded { why, held: 4 }));
    bench.asked.retain(|action| matches!(action, Action::Delivery(Command::Inspect { .. })));
    bench.inspected(Inspection { pinned: None, ..seen(20, 0) });
    assert!(bench.reported(&Report::Released { clean: false }));
    // Before there is anything to write it is released at once; a claim after a stop is none.
    let mut bench = Bench::new(config());
    bench.tell(Event::Stop { within: Duration::from_secs(2) });
    assert!(bench.reported(&Report::Released { clean: true }));
    bench.asked.clear();
    bench.tell(Event::Claim(Share { rows: 1_000, bytes: 1_000 }));
    assert_eq!(bench.shard.status().phase, "released");
}

#[test]
fn rows_are_acknowledged_when_the_record_calls_them_done() {
    let acked = |bench: &mut Bench| {
        bench.take("acks", |action| match action {
            Action::Delivery(Command::Ack { rows }) => Some(rows.clone()),
            _ => None,
        })
    };
    let mut bench = Bench::new(Config { acks: Acks::Explicit, ..config() });
    let pull = bench.own(&seen(20, 20));
    let insert = bench.full_batch(&pull, [1, 2, 3, 4]);
    bench.inserted(&insert, InsertOutcome::Stored);
    let (attempt, ..) = bench.read_back();
    bench.found(attempt, &[1, 2, 3, 4]);
    assert!(!bench.has(|action| matches!(action, Action::Delivery(Command::Ack { .. }))));
    bench.store();
    let pair = |seq, delivery| (Seq(seq), Delivery(delivery));
    assert_eq!(acked(&mut bench), [pair(1, 1), pair(2, 2), pair(3, 3), pair(4, 4)]);
    // The server's own repeat is acknowledged again if it is done, and else with the first.
    let again = |seq, delivery| Row { redelivered: true, ..row(seq, delivery) };
    bench.rows(pull.inbox, [row(5, 5), again(4, 6), again(5, 7)]);
    assert_eq!(acked(&mut bench), [pair(4, 6)]);
    bench.pass(AGE);
    bench.store();
    let insert = bench.insert();
    bench.inserted(&insert, InsertOutcome::Stored);
    bench.store();
    assert_eq!(acked(&mut bench), [pair(5, 5)]);
    // One that was done before it came is acknowledged at once.
    let mut ahead = record(4, 9);
    ahead.lanes.insert(TableName::new("t"), LaneRecord { done: Seq(6), ..LaneRecord::default() });
    let mut bench = Bench::with(Config { acks: Acks::Explicit, ..config() }, ahead);
    let looked = Inspection { row_stored_at: Some(mark(9).stored_at), next: Some(Seq(5)), ..seen(9, 5) };
    let pull = bench.own(&looked);
    bench.rows(pull.inbox, [row_of("u", 5, 1), row(6, 2)]);
    assert_eq!(acked(&mut bench), [pair(6, 2)]);
    // Where acknowledged rows leave the stream a reset goes to its beginning.
    let mut bench = Bench::with(Config { acks: Acks::WorkQueue, ..config() }, record(4, 4));
    let pull = bench.stand_by(Inspection { row_stored_at: None, ..seen(9, 5) });
    bench.rows(pull.inbox, [row(5, 1)]);
    bench.answer_read();
    bench.inspected(seen(9, 5));
    bench.store();
    assert_eq!(bench.reset().2, Seq(1));
}

#[test]
fn a_record_grows_up_to_what_the_ledger_takes_and_a_little_more_for_whoever_holds_the_floor() {
    let opens = |tables: &[&str], max_record: usize| {
        let mut bench = Bench::new(Config { max_record, max_lanes: 9, ..config() });
        let pull = bench.own(&seen(20, 20));
        let size = bench.stored.as_ref().expect("fenced").encode().len();
        for (seq, table) in (1..).zip(tables) {
            bench.rows(pull.inbox, [row_of(table, seq, seq)]);
            bench.describe();
        }
        bench.asked.clear();
        bench.pass(AGE);
        let written = bench.has(|action| matches!(action, Action::Ledger(_))).then(|| bench.store());
        (size, written.map_or(0, |written| written.lanes.len()))
    };
    // A lane is taken for 320 bytes and six for each byte of the names of its table, here and there.
    let (size, opened) = opens(&["t"], 1 << 16);
    assert_eq!(opened, 1);
    let needed = size + 320 + 6 * (1 + "db".len() + 1);
    assert_eq!(opens(&["t"], needed).1, 1);
    // It holds the floor: a fourteenth more.
    let least = needed - needed / 15;
    assert_eq!((opens(&["t"], least).1, opens(&["t"], least - 1).1), (1, 0));
    // The one behind it does not.
    let two = needed + 344;
    assert_eq!((opens(&["t", "u"], two).1, opens(&["t", "u"], two - 1).1), (2, 1));
}

#[test]
fn no_more_tables_than_allowed_are_at_work_at_once() {
    let (mut bench, pull) = Bench::owner();
    bench.rows(pull.inbox, [row_of("a", 1, 1), row_of("b", 2, 2)]);
    bench.describe();
    bench.describe();
    bench.ended(&pull, PullEnd::Full);
    // Both are closed at once, and the pin is kept without rows.
    assert_eq!(bench.store().lanes.len(), 1);
    assert_eq!(bench.store().lanes.len(), 2);
    let (a, b) = (bench.insert(), bench.insert());
    bench.pass(MS * 999);
    bench.quiet();
    bench.notices();
    bench.pass(MS);
    let renewal = bench.pull();
    assert_eq!(renewal.max_bytes, Some(1));
    let waits = Notice::Waiting {
        what: "take rows of more tables",
        why: "2 are at work, as many as topology.max_lanes or the record allow".to_owned(),
    };
    assert!(bench.notices().contains(&waits));
    // One that has nothing left to write only waits for the floor to pass it: it is not at work.
    bench.inserted(&b, InsertOutcome::Stored);
    let (attempt, ..) = bench.read_back();
    let outcome = Ok(Found { seqs: vec![Seq(2)], repeated: None });
    bench.tell(Event::Store(store::Reply::ReadBack { attempt, table: b.table, outcome }));
    let written = bench.store();
    assert_eq!((written.floor, written.lanes.len(), a.rows.len()), (Seq(0), 2, 1));
    bench.ended(&renewal, PullEnd::Empty);
    assert_eq!(bench.pull().batch, 999);
}
