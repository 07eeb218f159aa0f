//! The machine that trims, from outside: when it reads, what it asks to be removed, and what it tells.

use std::time::Duration;

use holdfast_core::notice::Notice;
use holdfast_core::ports::ledger::{self, Entry, Revision};
use holdfast_core::ports::{Attempt, Failure, FailureClass, retention};
use holdfast_core::record::{Record, Session, Writer};
use holdfast_core::row::{Mark, Seq, ShardId};
use holdfast_core::time::{Instant, Timestamp};
use holdfast_core::trim::{Action, Config, Event, Trim};

const SECOND: Duration = Duration::from_secs(1);

fn record(created: i64, floor: u64) -> Record {
    Record {
        version: Record::VERSION,
        stream_created: Timestamp(created),
        epoch: 1,
        writer: Writer { session: Session(1), nonce: 1 },
        rebased: 0,
        floor: Seq(floor),
        high: Mark { seq: Seq(50), stored_at: Timestamp(51) },
        lanes: [].into(),
    }
}

struct Bench {
    trim: Trim,
    now: Instant,
    out: Vec<Action>,
}

impl Bench {
    fn new(history: Duration) -> Self {
        let config = Config { shards: vec![ShardId(0), ShardId(1)], interval: SECOND, history };
        let trim = Trim::new(config, Instant::START);
        assert_eq!(trim.next_wakeup(), Some(Instant::START));
        let mut bench = Self { trim, now: Instant::START, out: vec![] };
        bench.tell(Event::Wakeup);
        bench
    }

    fn tell(&mut self, event: Event) {
        self.trim.handle(self.now, event, &mut self.out);
    }

    fn reads(&mut self) -> Vec<(Attempt, ShardId)> {
        let out = std::mem::take(&mut self.out);
        let reads = out.into_iter().filter_map(|action| match action {
            Action::Ledger(ledger::Command::Read { attempt, shard }) => Some((attempt, shard)),
            _ => None,
        });
        reads.collect()
    }

    /// Answers both reads; says what is to be trimmed, and how.
    fn read(&mut self, records: [Record; 2]) -> Option<(Attempt, Seq)> {
        let reads = self.reads();
        assert_eq!(reads.iter().map(|(_, shard)| shard.0).collect::<Vec<_>>(), [0, 1]);
        for ((attempt, _), record) in reads.into_iter().zip(records) {
            let entry = Entry { revision: Revision(1), record: record.encode() };
            self.tell(Event::Ledger(ledger::Reply::Read { attempt, outcome: Ok(Some(entry)) }));
        }
        let trim = self.out.iter().position(|action| matches!(action, Action::Retention(_)));
        trim.map(|at| match self.out.remove(at) {
            Action::Retention(retention::Command::Trim { attempt, below, witness, created }) => {
                assert_eq!((witness.seq, created), (Seq(50), Timestamp(7)));
                (attempt, below)
            }
            other => panic!("{other:?}"),
        })
    }

    fn trimmed(&mut self, attempt: Attempt, outcome: Result<u64, Failure>) {
        self.tell(Event::Retention(retention::Reply::Trimmed { attempt, outcome }));
    }

    /// Until the next round, which must be an interval away.
    fn rest(&mut self) {
        assert_eq!(self.trim.next_wakeup(), Some(self.now + SECOND));
        self.now = self.now + SECOND;
        self.tell(Event::Wakeup);
    }

    fn notices(&mut self) -> Vec<Notice> {
        let notices = self.out.drain(..).filter_map(|action| match action {
            Action::Notice(notice) => Some(notice),
            _ => None,
        });
        notices.collect()
    }
}

fn both(floor: u64) -> [Record; 2] {
    [record(7, floor), record(7, floor + 5)]
}

#[test]
fn the_lowest_floor_decides_and_the_same_is_not_trimmed_twice() {
    let mut bench = Bench::new(Duration::ZERO);
    let (attempt, below) = bench.read(both(10)).expect("there is something to trim");
    assert_eq!((below, bench.trim.next_wakeup()), (Seq(10), Some(bench.now + Duration::from_secs(20))));
    bench.trimmed(Attempt(attempt.0 + 9), Ok(3));
    assert_eq!(bench.notices(), []);
    bench.trimmed(attempt, Ok(9));
    assert_eq!(bench.notices(), [Notice::Trimmed { rows: 9, below: Seq(10) }]);
    bench.rest();
    assert_eq!(bench.read(both(10)), None);
    bench.rest();
    // What removed nothing is not told; what failed is tried with the next round.
    let (attempt, below) = bench.read(both(11)).expect("the floor has moved");
    assert_eq!(below, Seq(11));
    bench.trimmed(attempt, Err(Failure::new(FailureClass::Unavailable, "away")));
    assert_eq!(bench.notices().len(), 1);
    bench.rest();
    let (attempt, _) = bench.read(both(11)).expect("again");
    bench.trimmed(attempt, Ok(0));
    assert_eq!(bench.notices(), []);
    bench.rest();
    // A floor of one keeps every row; two streams are no one's.
    let mut bench = Bench::new(Duration::ZERO);
    for records in [both(0), both(1), [record(7, 9), record(8, 9)]] {
        assert_eq!(bench.read(records), None);
        bench.rest();
    }
    assert_eq!(bench.read(both(2)).map(|(_, below)| below), Some(Seq(2)));
}

#[test]
fn nothing_is_trimmed_while_a_record_is_unknown() {
    for outcome in [
        Ok(None),
        Err(Failure::new(FailureClass::Unanswered, "no answer")),
        Ok(Some(Entry { revision: Revision(1), record: bytes::Bytes::from_static(b"junk") })),
    ] {
        let mut bench = Bench::new(Duration::ZERO);
        let (attempt, _) = bench.reads()[1];
        bench.tell(Event::Ledger(ledger::Reply::Read { attempt, outcome }));
        let told = bench.notices();
        assert!(matches!(&*told, [Notice::Waiting { what: "trim", .. }]), "{told:?}");
        bench.rest();
        assert_eq!(bench.reads().len(), 2);
    }
    // A question without an answer is asked again.
    let mut bench = Bench::new(Duration::ZERO);
    bench.reads();
    let due = bench.trim.next_wakeup().expect("it waits");
    assert_eq!(due, Instant::START + Duration::from_secs(20));
    bench.now = due;
    bench.tell(Event::Wakeup);
    assert_eq!(bench.reads().len(), 2);
}

#[test]
fn written_rows_stay_for_the_history() {
    let mut bench = Bench::new(SECOND * 3);
    let mut trimmed = Vec::new();
    for round in 0..8_u64 {
        if let Some((attempt, below)) = bench.read(both(10 + round)) {
            trimmed.push((round, below.0));
            bench.trimmed(attempt, Ok(1));
        }
        bench.out.clear();
        bench.rest();
    }
    assert_eq!(trimmed, [(3, 10), (4, 11), (5, 12), (6, 13), (7, 14)]);
}

#[test]
fn what_holds_the_trim_back_is_told_after_a_minute() {
    let mut bench = Bench::new(Duration::ZERO);
    let mut told = Vec::new();
    for round in 0..62_u64 {
        if let Some((attempt, _)) = bench.read([record(7, 10), record(7, 40)]) {
            bench.trimmed(attempt, Ok(0));
        }
        if bench.notices().iter().any(|notice| matches!(notice, Notice::Waiting { why, .. } if why.contains("shard 0 holds it back at row 10, others are at 40"))) {
            told.push(round);
        }
        bench.rest();
    }
    assert_eq!(told, [60, 61]);
    // All stand still together: nobody holds anything back.
    let mut bench = Bench::new(Duration::ZERO);
    for _ in 0..70 {
        if let Some((attempt, _)) = bench.read([record(7, 10), record(7, 10)]) {
            bench.trimmed(attempt, Ok(0));
        }
        assert_eq!(bench.notices(), []);
        bench.rest();
    }
}
