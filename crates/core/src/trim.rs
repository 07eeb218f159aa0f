//! Trimming the stream behind what the ledger says is done (rule 3).
//!
//! One machine a process and stream. It reads what the ledger has stored, so it trims no more than that, whoever owns
//! the shards; several processes that do so only repeat each other.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::ask::{Ask, Attempts};
use crate::notice::Notice;
use crate::ports::{Attempt, ledger, retention};
use crate::record::Record;
use crate::row::{Mark, Seq, ShardId};
use crate::rule::{Rule, safeguard};
use crate::time::{Instant, Timestamp};

/// A floor that stands still for so long while others move is worth a word.
const HELD_BACK_AFTER: Duration = Duration::from_mins(1);

/// Samples of how far the stream was done: as many as make a history fine enough.
const MAX_SAMPLES: usize = 1_024;

/// What a trimmer needs to know.
#[derive(Clone, Debug)]
pub struct Config {
    /// The stream's shards, whose records are read.
    pub shards: Vec<ShardId>,
    /// How often the records are read.
    pub interval: Duration,
    /// How long written rows stay.
    pub history: Duration,
}

/// What a trimmer is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The instant that `next_wakeup` named has come.
    Wakeup,
    /// The ledger answered.
    Ledger(ledger::Reply),
    /// The stream answered.
    Retention(retention::Reply),
}

/// What a trimmer wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask the ledger.
    Ledger(ledger::Command),
    /// Ask the stream.
    Retention(retention::Command),
    /// Tell people.
    Notice(Notice),
}

/// What the records say: each stream's creation, floor, and highest row.
type Floors = BTreeMap<ShardId, (Timestamp, Seq, Mark)>;

#[derive(Debug)]
enum Step {
    /// Nothing to do until then.
    Rest(Instant),
    /// Reading the records.
    Read { asks: BTreeMap<ShardId, Ask>, floors: Floors },
    /// Trimming. Every record's highest row must still be what it was; each is looked at by a command of its own, of
    /// which only the last removes anything.
    Trim { ask: Ask, created: Timestamp, below: Seq, witnesses: Vec<Mark> },
}

/// The state machine that trims.
#[derive(Debug)]
pub struct Trim {
    config: Config,
    attempts: Attempts,
    step: Step,
    /// How far the stream was done at which instant, until the history is over.
    samples: VecDeque<(Instant, Timestamp, Seq)>,
    trimmed: Option<(Timestamp, Seq)>,
    /// Whose floor is the lowest, where, and since when.
    held_back: Option<(ShardId, Seq, Instant)>,
}

impl Trim {
    /// A trimmer that begins with a look at the ledger.
    #[must_use]
    pub fn new(config: Config, now: Instant) -> Self {
        Self {
            config,
            attempts: Attempts::default(),
            step: Step::Rest(now),
            samples: VecDeque::new(),
            trimmed: None,
            held_back: None,
        }
    }

    /// Takes an event at the instant `now`, which never goes back, and says what is to be done.
    pub fn handle(&mut self, now: Instant, event: Event, out: &mut Vec<Action>) {
        match event {
            Event::Wakeup | Event::Ledger(ledger::Reply::Written { .. }) => {}
            Event::Ledger(ledger::Reply::Read { attempt, outcome }) => {
                self.on_read(now, attempt, outcome, out);
            }
            Event::Retention(retention::Reply::Trimmed { attempt, outcome }) => {
                if let Step::Trim { ask, created, below, witnesses } = &mut self.step
                    && ask.awaits(attempt)
                {
                    match outcome {
                        Ok(_) if witnesses.len() > 1 => {
                            witnesses.pop();
                            *ask = Ask::at(now);
                            self.poll(now, out);
                            return;
                        }
                        Ok(rows) => {
                            self.trimmed = Some((*created, *below));
                            if rows > 0 {
                                out.push(Action::Notice(Notice::Trimmed { rows, below: *below }));
                            }
                        }
                        Err(failure) => {
                            out.push(Action::Notice(Notice::Waiting {
                                what: "trim",
                                why: failure.to_string(),
                            }));
                        }
                    }
                    self.step = Step::Rest(now + self.config.interval);
                }
            }
        }
        self.poll(now, out);
    }

    fn on_read(
        &mut self,
        now: Instant,
        attempt: Attempt,
        outcome: Result<Option<ledger::Entry>, crate::ports::Failure>,
        out: &mut Vec<Action>,
    ) {
        let Step::Read { asks, floors } = &mut self.step else { return };
        let Some(shard) = asks.iter().find(|(_, ask)| ask.awaits(attempt)).map(|(shard, _)| *shard) else {
            return;
        };
        let record = match outcome {
            Ok(Some(entry)) if entry.record.is_empty() => Err("it was deleted".to_owned()),
            Ok(Some(entry)) => Record::decode(&entry.record).map_err(|error| error.to_string()),
            Ok(None) => Err("there is none yet".to_owned()),
            Err(failure) => Err(failure.to_string()),
        };
        let record = match record {
            Ok(record) => record,
            // A shard that nothing is known of holds everything back.
            Err(why) => {
                let why = format!("nothing is known of shard {shard} without its record: {why}");
                out.push(Action::Notice(Notice::Waiting { what: "trim", why }));
                self.step = Step::Rest(now + self.config.interval);
                return;
            }
        };
        asks.remove(&shard);
        floors.insert(shard, (record.stream_created, record.floor, record.high));
        if asks.is_empty() {
            let floors = std::mem::take(floors);
            self.step = self.decide(now, &floors, out);
        }
    }

    fn decide(&mut self, now: Instant, floors: &Floors, out: &mut Vec<Action>) -> Step {
        let rest = Step::Rest(now + self.config.interval);
        let lowest = floors.iter().min_by_key(|(_, (_, floor, _))| *floor);
        let Some((shard, &(created, floor, _))) = lowest else { return rest };
        if floors.values().any(|(other, ..)| *other != created) {
            return rest;
        }
        let highest = floors.values().map(|(_, floor, _)| *floor).max().unwrap_or(floor);
        // Not the highest of all alone: a shard whose rows came after the stream had lost its tail shows nothing of
        // one that has not noticed yet.
        let mut witnesses: Vec<Mark> = floors.values().map(|(.., high)| *high).collect();
        witnesses.sort_by_key(|witness| (witness.seq, witness.stored_at));
        witnesses.dedup();
        self.tell_what_holds_back(now, *shard, floor, highest, out);
        let done = if safeguard(Rule::LedgerBeforeTrim) { floor } else { highest.next() };
        // What was done once may be to do again: somebody has set a shard, or the whole ledger, back.
        self.samples.retain(|(_, other, then)| *other == created && *then <= done);
        // A long history is kept in coarser steps.
        let step = self.config.history / u32::try_from(MAX_SAMPLES).unwrap_or(1);
        if self.samples.back().is_none_or(|(at, ..)| now.since(*at) >= step) {
            self.samples.push_back((now, created, done));
        }
        // The last sample that is old enough decides; the ones before it are not needed any more.
        while self.samples.len() > 1 && now.since(self.samples[1].0) >= self.config.history {
            self.samples.pop_front();
        }
        match self.samples.front() {
            // The row at the floor itself stays: it shows later that the stream still is the same.
            Some(&(at, _, below))
                if now.since(at) >= self.config.history
                    && below > Seq::ZERO.next()
                    && self.trimmed.is_none_or(|trimmed| trimmed.0 != created || trimmed.1 < below) =>
            {
                Step::Trim { ask: Ask::at(now), created, below, witnesses }
            }
            _ => rest,
        }
    }

    /// The shard whose floor is the lowest decides how far the stream can be trimmed. When it has stood still for
    /// a while and others have gone on, somebody should know which it is.
    fn tell_what_holds_back(
        &mut self,
        now: Instant,
        shard: ShardId,
        floor: Seq,
        highest: Seq,
        out: &mut Vec<Action>,
    ) {
        match self.held_back {
            Some((_, known, since)) if known == floor && floor < highest => {
                if now.since(since) >= HELD_BACK_AFTER {
                    let why = format!("shard {shard} holds it back at row {floor}, others are at {highest}");
                    out.push(Action::Notice(Notice::Waiting { what: "trim the stream further", why }));
                }
            }
            _ => self.held_back = Some((shard, floor, now)),
        }
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Action>) {
        if let Step::Rest(until) = self.step
            && until <= now
        {
            let asks = self.config.shards.iter().map(|shard| (*shard, Ask::at(now))).collect();
            self.step = Step::Read { asks, floors: BTreeMap::new() };
        }
        match &mut self.step {
            Step::Rest(_) => {}
            Step::Read { asks, .. } => {
                for (shard, ask) in asks {
                    if let Some(attempt) = ask.take(now, &mut self.attempts) {
                        out.push(Action::Ledger(ledger::Command::Read { attempt, shard: *shard }));
                    }
                }
            }
            Step::Trim { ask, created, below, witnesses } => {
                if let Some(attempt) = ask.take(now, &mut self.attempts) {
                    let witness = witnesses.last().copied().unwrap_or_default();
                    let created = *created;
                    // A look removes nothing, not even what was removed before: the stream may have lost all of its
                    // rows, and have new ones there.
                    let below = if witnesses.len() > 1 { Seq::ZERO } else { *below };
                    out.push(Action::Retention(retention::Command::Trim {
                        attempt,
                        created,
                        below,
                        witness,
                    }));
                }
            }
        }
    }

    /// When to hand in [`Event::Wakeup`] if nothing else happens before.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Instant> {
        match &self.step {
            Step::Rest(until) => Some(*until),
            Step::Read { asks, .. } => asks.values().map(Ask::due).min(),
            Step::Trim { ask, .. } => Some(ask.due()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::ledger::{Entry, Revision};
    use crate::record::{Session, Writer};

    const CREATED: Timestamp = Timestamp(7);

    fn record(floor: u64, high: Mark) -> Record {
        Record {
            version: Record::VERSION,
            stream_created: CREATED,
            epoch: 1,
            writer: Writer { session: Session(1), nonce: 1 },
            rebased: 0,
            floor: Seq(floor),
            high,
            lanes: BTreeMap::new(),
        }
    }

    fn mark(seq: u64, at: i64) -> Mark {
        Mark { seq: Seq(seq), stored_at: Timestamp(at) }
    }

    struct Bench {
        trim: Trim,
        now: Instant,
    }

    impl Bench {
        fn new(history: Duration) -> Self {
            let config =
                Config { shards: vec![ShardId(0), ShardId(1)], interval: Duration::from_secs(1), history };
            Self { trim: Trim::new(config, Instant::START), now: Instant::START }
        }

        /// A round: the records are read, and every trim is answered. Says what was asked to be trimmed.
        fn round(&mut self, records: &[Record; 2]) -> Vec<(Seq, Mark)> {
            let mut trims = Vec::new();
            let mut out = Vec::new();
            self.now = self.now + Duration::from_secs(1);
            self.trim.handle(self.now, Event::Wakeup, &mut out);
            while !out.is_empty() {
                for action in std::mem::take(&mut out) {
                    let event = match action {
                        Action::Ledger(ledger::Command::Read { attempt, shard }) => {
                            let record = records[shard.0 as usize].encode();
                            let entry = Entry { revision: Revision(1), record };
                            Event::Ledger(ledger::Reply::Read { attempt, outcome: Ok(Some(entry)) })
                        }
                        Action::Retention(retention::Command::Trim { attempt, below, witness, .. }) => {
                            trims.push((below, witness));
                            Event::Retention(retention::Reply::Trimmed { attempt, outcome: Ok(0) })
                        }
                        Action::Ledger(_) | Action::Notice(_) => continue,
                    };
                    self.trim.handle(self.now, event, &mut out);
                }
            }
            trims
        }
    }

    #[test]
    fn every_records_highest_row_is_looked_at_before_anything_is_removed() {
        let mut bench = Bench::new(Duration::ZERO);
        // The second shard's rows came after the stream had lost its tail: it shows nothing of the first.
        let trims = bench.round(&[record(12, mark(12, 1)), record(15, mark(15, 90))]);
        assert_eq!(trims, vec![(Seq::ZERO, mark(15, 90)), (Seq(12), mark(12, 1))]);
        let trims = bench.round(&[record(14, mark(14, 2)), record(15, mark(15, 90))]);
        assert_eq!(trims, vec![(Seq::ZERO, mark(15, 90)), (Seq(14), mark(14, 2))]);
    }

    #[test]
    fn what_was_done_once_is_not_trimmed_if_it_is_to_do_again() {
        let mut bench = Bench::new(Duration::from_secs(3));
        let high = mark(20, 1);
        for _ in 0..3 {
            assert_eq!(bench.round(&[record(20, high), record(20, high)]), vec![]);
        }
        // Somebody sets a shard back, and three seconds are over.
        assert_eq!(bench.round(&[record(4, high), record(20, high)]), vec![]);
        assert_eq!(bench.round(&[record(4, high), record(20, high)]), vec![]);
        assert_eq!(bench.round(&[record(4, high), record(20, high)]), vec![]);
        assert_eq!(bench.round(&[record(4, high), record(20, high)]), vec![(Seq(4), high)]);
    }
}
