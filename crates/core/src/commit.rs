//! Writing the record: one compare-and-set under way, its fate always known before the next.

use std::time::Duration;

use bytes::Bytes;

use crate::ask::{Ask, Attempts, backoff};
use crate::ports::ledger::{Command, Entry, Revision, WriteOutcome};
use crate::ports::{Attempt, Failure};
use crate::record::Record;
use crate::row::ShardId;
use crate::rule::{Rule, safeguard};
use crate::time::Instant;

/// The stored record of a tenure.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) revision: Revision,
    pub(crate) record: Record,
    /// The latest instant at which the record is known to have been this tenure's: when the question was
    /// *asked* whose answer proves it. The answer may have been read much later, by a process that was
    /// frozen in between.
    pub(crate) proven_at: Instant,
}

/// What an answer settled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// Nothing yet.
    Nothing,
    /// The write under way is stored: its record is now the stored one.
    Written,
    /// The stored record was read and is still ours.
    Proven,
    /// Another tenure has written: this one is over.
    Over(String),
}

/// A write whose fate is not known.
#[derive(Clone, Debug)]
struct Flight {
    expected: Revision,
    record: Record,
    bytes: Bytes,
    /// Attempts of this flight lie from here…
    first: Attempt,
    /// …to here.
    latest: Attempt,
    first_asked: Instant,
    tries: u32,
    write: Ask,
    /// After a conflict: what is stored?
    read: Option<Ask>,
}

/// Writes one shard's record during one tenure.
#[derive(Clone, Debug)]
pub(crate) struct Committer {
    shard: ShardId,
    stored: Option<Stored>,
    flight: Option<Flight>,
    verify: Option<Ask>,
    trouble: Option<Failure>,
    size: usize,
}

impl Committer {
    /// A committer whose first write is the fence `record`, on top of `expected`.
    pub(crate) fn fence(shard: ShardId, expected: Revision, record: Record, now: Instant) -> Self {
        let mut committer = Self { shard, stored: None, flight: None, verify: None, trouble: None, size: 0 };
        committer.fly(expected, record, now);
        committer
    }

    /// A committer that takes the stored record for its own. Only a mutant starts without a fence.
    pub(crate) fn unfenced(shard: ShardId, revision: Revision, record: Record, now: Instant) -> Self {
        let stored = Stored { revision, record, proven_at: now };
        Self { shard, stored: Some(stored), flight: None, verify: None, trouble: None, size: 0 }
    }

    /// The stored record, once the fence is stored.
    pub(crate) fn stored(&self) -> Option<&Stored> {
        self.stored.as_ref()
    }

    /// Whether a write's fate is open.
    pub(crate) fn is_busy(&self) -> bool {
        self.flight.is_some()
    }

    /// The size of the record that was written last, in bytes.
    pub(crate) const fn size(&self) -> usize {
        self.size
    }

    /// Why the ledger does not take the write under way, as far as is known.
    pub(crate) fn trouble(&self) -> Option<&Failure> {
        self.trouble.as_ref()
    }

    /// The record that is being written, or else the stored one.
    pub(crate) fn newest(&self) -> Option<&Record> {
        self.flight
            .as_ref()
            .map(|flight| &flight.record)
            .or(self.stored.as_ref().map(|stored| &stored.record))
    }

    /// Writes `record` next.
    ///
    /// # Panics
    /// If a write is under way, or the record goes back behind the stored one.
    pub(crate) fn write(&mut self, record: Record, now: Instant) {
        let stored = self.stored.as_ref().expect("a tenure begins with its fence");
        assert!(self.flight.is_none(), "one write at a time");
        debug_assert_eq!(record.regression_from(&stored.record), None);
        let expected = stored.revision;
        self.fly(expected, record, now);
    }

    fn fly(&mut self, expected: Revision, record: Record, now: Instant) {
        let bytes = record.encode();
        self.size = bytes.len();
        self.flight = Some(Flight {
            expected,
            record,
            bytes,
            first: Attempt(u64::MAX),
            latest: Attempt(0),
            first_asked: now,
            tries: 0,
            write: Ask::at(now),
            read: None,
        });
    }

    /// Asks for the stored record, unless that is under way: is it still ours?
    pub(crate) fn verify(&mut self, now: Instant) {
        if self.verify.is_none() {
            self.verify = Some(Ask::at(now));
        }
    }

    /// Sends what is due.
    pub(crate) fn poll(&mut self, now: Instant, attempts: &mut Attempts, out: &mut Vec<Command>) {
        let shard = self.shard;
        if let Some(flight) = &mut self.flight {
            if let Some(read) = &mut flight.read {
                if let Some(attempt) = read.take(now, attempts) {
                    out.push(Command::Read { attempt, shard });
                }
            } else if let Some(attempt) = flight.write.take(now, attempts) {
                if flight.tries == 0 {
                    flight.first = attempt;
                    flight.first_asked = now;
                }
                flight.latest = attempt;
                flight.tries += 1;
                // Byte for byte the same, at the same expected revision: whichever arrives first is stored,
                // the others conflict.
                let (expected, record) = (flight.expected, flight.bytes.clone());
                out.push(Command::Write { attempt, shard, expected, record });
            }
        }
        if let Some(attempt) = self.verify.as_mut().and_then(|verify| verify.take(now, attempts)) {
            out.push(Command::Read { attempt, shard });
        }
    }

    /// When [`Self::poll`] has something to send.
    pub(crate) fn next_wakeup(&self) -> Option<Instant> {
        let flight = self.flight.as_ref().map(|flight| flight.read.as_ref().unwrap_or(&flight.write).due());
        let verify = self.verify.as_ref().map(Ask::due);
        flight.into_iter().chain(verify).min()
    }

    /// Takes the answer to a write.
    pub(crate) fn on_written(&mut self, now: Instant, attempt: Attempt, outcome: WriteOutcome) -> Settled {
        let Some(flight) = &mut self.flight else { return Settled::Nothing };
        if attempt < flight.first || attempt > flight.latest {
            return Settled::Nothing;
        }
        match outcome {
            // Even of an attempt that was given up: it says that these bytes are stored.
            WriteOutcome::Stored(revision) => {
                let proven_at = flight.first_asked;
                self.land(revision, proven_at);
                Settled::Written
            }
            WriteOutcome::Conflict => {
                if flight.read.is_none() {
                    flight.read = Some(Ask::at(now));
                }
                Settled::Nothing
            }
            WriteOutcome::Unknown(failure) | WriteOutcome::Refused(failure) => {
                if flight.write.awaits(attempt) {
                    let delay = backoff(flight.tries, Duration::from_secs(2), attempt.0);
                    flight.write.again(now, delay);
                    self.trouble = Some(failure);
                }
                Settled::Nothing
            }
        }
    }

    /// Takes the answer to a read.
    pub(crate) fn on_read(
        &mut self,
        now: Instant,
        attempt: Attempt,
        outcome: Result<Option<Entry>, Failure>,
    ) -> Settled {
        let conflict = self.flight.as_ref().and_then(|flight| flight.read.as_ref());
        if conflict.is_some_and(|read| read.awaits(attempt)) {
            return self.on_conflict_read(now, outcome);
        }
        let Some(verify) = self.verify.as_mut().filter(|verify| verify.awaits(attempt)) else {
            return Settled::Nothing;
        };
        let asked_at = verify.asked_at();
        match outcome {
            Err(failure) => {
                verify.again(now, Duration::from_millis(200));
                self.trouble = Some(failure);
                Settled::Nothing
            }
            Ok(entry) => {
                self.verify = None;
                let Some(stored) = &mut self.stored else { return Settled::Nothing };
                match own(entry, &stored.record) {
                    Ok(_) => {
                        stored.proven_at = stored.proven_at.max(asked_at);
                        Settled::Proven
                    }
                    Err(why) => Settled::Over(why),
                }
            }
        }
    }

    fn on_conflict_read(&mut self, now: Instant, outcome: Result<Option<Entry>, Failure>) -> Settled {
        let Some(flight) = &mut self.flight else { return Settled::Nothing };
        let Some(read) = &mut flight.read else { return Settled::Nothing };
        let asked_at = read.asked_at();
        let entry = match outcome {
            Ok(entry) => entry,
            Err(failure) => {
                read.again(now, Duration::from_millis(200));
                self.trouble = Some(failure);
                return Settled::Nothing;
            }
        };
        let revision = entry.as_ref().map_or(Revision(0), |entry| entry.revision);
        match own(entry, &flight.record) {
            Ok(stored) if stored == flight.record || !safeguard(Rule::AdoptOwnTenureOnly) => {
                self.land(revision, asked_at);
                Settled::Written
            }
            // This tenure's, and not what is being written: an answer from before the conflict. Whoever
            // conflicted shows at the next look.
            Ok(_) => {
                read.again(now, Duration::from_millis(200));
                Settled::Nothing
            }
            Err(_) if !safeguard(Rule::ConflictEndsTenure) => {
                let record = flight.record.clone();
                self.fly(revision, record, now);
                Settled::Nothing
            }
            Err(why) => {
                self.flight = None;
                Settled::Over(why)
            }
        }
    }

    fn land(&mut self, revision: Revision, proven_at: Instant) {
        let Some(flight) = self.flight.take() else { return };
        let proven_at = self.stored.as_ref().map_or(proven_at, |stored| stored.proven_at.max(proven_at));
        self.stored = Some(Stored { revision, record: flight.record, proven_at });
        self.trouble = None;
    }
}

/// Whether a stored record is of the same tenure as `ours`, or else whose it is.
fn own(entry: Option<Entry>, ours: &Record) -> Result<Record, String> {
    let Some(entry) = entry else { return Err("the record was deleted".to_owned()) };
    let stored = Record::decode(&entry.record).map_err(|error| error.to_string())?;
    let same = if safeguard(Rule::AdoptOwnTenureOnly) {
        stored.writer == ours.writer && stored.epoch == ours.epoch
    } else {
        stored.writer.session == ours.writer.session
    };
    if same && stored.stream_created == ours.stream_created {
        Ok(stored)
    } else {
        Err(format!("another tenure wrote the record: {:?} in epoch {}", stored.writer, stored.epoch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::FailureClass;
    use crate::record::{Session, Writer};
    use crate::row::Seq;
    use crate::time::Timestamp;

    fn record(nonce: u64, floor: u64) -> Record {
        Record {
            version: Record::VERSION,
            stream_created: Timestamp(7),
            epoch: nonce,
            writer: Writer { session: Session(1), nonce },
            rebased: 0,
            floor: Seq(floor),
            high: crate::row::Mark { seq: Seq(floor), stored_at: Timestamp(0) },
            lanes: std::collections::BTreeMap::new(),
        }
    }

    struct Bench {
        committer: Committer,
        attempts: Attempts,
        now: Instant,
    }

    impl Bench {
        fn fenced() -> Self {
            let now = Instant::START;
            let committer = Committer::fence(ShardId(0), Revision(4), record(1, 0), now);
            let mut bench = Self { committer, attempts: Attempts::default(), now };
            let (attempt, ..) = bench.sent_write();
            assert_eq!(
                bench.committer.on_written(now, attempt, WriteOutcome::Stored(Revision(5))),
                Settled::Written
            );
            bench
        }

        fn sent(&mut self) -> Vec<Command> {
            let mut out = Vec::new();
            self.committer.poll(self.now, &mut self.attempts, &mut out);
            out
        }

        fn sent_write(&mut self) -> (Attempt, Revision, Bytes) {
            match self.sent().as_slice() {
                [Command::Write { attempt, expected, record, .. }] => (*attempt, *expected, record.clone()),
                other => panic!("expected one write, got {other:?}"),
            }
        }

        fn sent_read(&mut self) -> Attempt {
            match self.sent().as_slice() {
                [Command::Read { attempt, .. }] => *attempt,
                other => panic!("expected one read, got {other:?}"),
            }
        }

        fn pass(&mut self, time: Duration) {
            self.now = self.now + time;
        }
    }

    fn lost() -> WriteOutcome {
        WriteOutcome::Unknown(Failure::new(FailureClass::Unanswered, "no answer"))
    }

    #[test]
    fn a_write_without_an_answer_is_sent_again_byte_for_byte() {
        let mut bench = Bench::fenced();
        bench.committer.write(record(1, 9), bench.now);
        let (attempt, expected, bytes) = bench.sent_write();
        assert_eq!(bench.committer.on_written(bench.now, attempt, lost()), Settled::Nothing);
        bench.pass(Duration::from_secs(1));
        assert_eq!(bench.sent_write(), (Attempt(attempt.0 + 1), expected, bytes));
    }

    #[test]
    fn a_conflict_with_our_own_lost_write_adopts_it() {
        let mut bench = Bench::fenced();
        bench.committer.write(record(1, 9), bench.now);
        let (attempt, ..) = bench.sent_write();
        bench.committer.on_written(bench.now, attempt, lost());
        bench.pass(Duration::from_secs(1));
        let (attempt, _, bytes) = bench.sent_write();
        bench.committer.on_written(bench.now, attempt, WriteOutcome::Conflict);
        let read = bench.sent_read();
        let entry = Entry { revision: Revision(6), record: bytes };
        assert_eq!(bench.committer.on_read(bench.now, read, Ok(Some(entry))), Settled::Written);
        assert_eq!(bench.committer.stored().unwrap().record.floor, Seq(9));
        assert_eq!(bench.committer.stored().unwrap().revision, Revision(6));
    }

    #[test]
    fn an_answer_from_before_the_conflict_is_not_taken_for_what_is_being_written() {
        let mut bench = Bench::fenced();
        bench.committer.write(record(1, 9), bench.now);
        let (attempt, ..) = bench.sent_write();
        bench.committer.on_written(bench.now, attempt, WriteOutcome::Conflict);
        let read = bench.sent_read();
        let earlier = Entry { revision: Revision(5), record: record(1, 0).encode() };
        assert_eq!(bench.committer.on_read(bench.now, read, Ok(Some(earlier))), Settled::Nothing);
        assert!(bench.committer.is_busy());
        assert_eq!(bench.committer.stored().unwrap().record.floor, Seq(0));
        // It is asked again, and a look that fails, too.
        bench.pass(Duration::from_millis(199));
        assert_eq!(bench.sent(), []);
        bench.pass(Duration::from_millis(1));
        let read = bench.sent_read();
        let away = Failure::new(FailureClass::Unavailable, "away");
        assert_eq!(bench.committer.on_read(bench.now, read, Err(away.clone())), Settled::Nothing);
        assert_eq!(bench.committer.trouble(), Some(&away));
        bench.pass(Duration::from_millis(200));
        let read = bench.sent_read();
        let ours = Entry { revision: Revision(6), record: record(1, 9).encode() };
        assert_eq!(bench.committer.on_read(bench.now, read, Ok(Some(ours))), Settled::Written);
        assert_eq!((bench.committer.is_busy(), bench.committer.trouble()), (false, None));
    }

    #[test]
    fn an_earlier_tenure_of_this_very_process_is_not_adopted() {
        let mut bench = Bench::fenced();
        bench.committer.write(record(1, 9), bench.now);
        let (attempt, ..) = bench.sent_write();
        bench.committer.on_written(bench.now, attempt, WriteOutcome::Conflict);
        let read = bench.sent_read();
        let other = Entry { revision: Revision(6), record: record(2, 3).encode() };
        assert!(matches!(bench.committer.on_read(bench.now, read, Ok(Some(other))), Settled::Over(_)));
    }

    #[test]
    fn a_late_success_of_a_given_up_attempt_counts() {
        let mut bench = Bench::fenced();
        bench.committer.write(record(1, 9), bench.now);
        let (first, ..) = bench.sent_write();
        bench.pass(Duration::from_secs(30));
        let (second, ..) = bench.sent_write();
        assert_ne!(first, second);
        let settled = bench.committer.on_written(bench.now, first, WriteOutcome::Stored(Revision(6)));
        assert_eq!(settled, Settled::Written);
        assert_eq!(bench.committer.on_written(bench.now, second, WriteOutcome::Conflict), Settled::Nothing);
        assert!(!bench.committer.is_busy());
    }

    #[test]
    fn a_proof_is_as_old_as_its_question() {
        let mut bench = Bench::fenced();
        bench.committer.verify(bench.now);
        let read = bench.sent_read();
        let asked_at = bench.now;
        bench.pass(Duration::from_secs(9));
        let entry = Entry { revision: Revision(5), record: record(1, 0).encode() };
        assert_eq!(bench.committer.on_read(bench.now, read, Ok(Some(entry))), Settled::Proven);
        assert_eq!(bench.committer.stored().unwrap().proven_at, asked_at);
    }

    #[test]
    fn a_record_of_another_shards_owner_ends_the_tenure_on_verification() {
        let mut bench = Bench::fenced();
        bench.committer.verify(bench.now);
        let read = bench.sent_read();
        assert!(matches!(bench.committer.on_read(bench.now, read, Ok(None)), Settled::Over(_)));
    }
}
