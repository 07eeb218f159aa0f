//! Trimming the stream behind what the ledger says is done (rule 3).
//!
//! One machine a process. It reads what the ledger has stored, so it trims no more than that, whoever owns
//! the shards; several processes that do so only repeat each other.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::ask::{Ask, Attempts};
use crate::notice::Notice;
use crate::ports::{Attempt, ledger, retention};
use crate::record::Record;
use crate::row::{Seq, ShardId};
use crate::rule::{Rule, safeguard};
use crate::time::{Instant, Timestamp};

/// What a trimmer needs to know.
#[derive(Clone, Debug)]
pub struct Config {
    /// The number of shards; records are read of 0 up to it.
    pub shards: u32,
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

#[derive(Debug)]
enum Step {
    /// Nothing to do until then.
    Rest(Instant),
    /// Reading the records.
    Read { asks: BTreeMap<ShardId, Ask>, floors: BTreeMap<ShardId, (Timestamp, Seq)> },
    /// Trimming.
    Trim { ask: Ask, created: Timestamp, below: Seq },
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
    held_back_by: Option<ShardId>,
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
            held_back_by: None,
        }
    }

    /// The shard whose floor is the lowest: it decides how far the stream can be trimmed.
    #[must_use]
    pub const fn held_back_by(&self) -> Option<ShardId> {
        self.held_back_by
    }

    /// Takes an event at the instant `now`, which never goes back, and says what is to be done.
    pub fn handle(&mut self, now: Instant, event: Event, out: &mut Vec<Action>) {
        match event {
            Event::Wakeup | Event::Ledger(ledger::Reply::Written { .. }) => {}
            Event::Ledger(ledger::Reply::Read { attempt, outcome }) => self.on_read(now, attempt, outcome),
            Event::Retention(retention::Reply::Trimmed { attempt, outcome }) => {
                if let Step::Trim { ask, created, below } = &self.step
                    && ask.awaits(attempt)
                {
                    match outcome {
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
    ) {
        let Step::Read { asks, floors } = &mut self.step else { return };
        let Some(shard) = asks.iter().find(|(_, ask)| ask.awaits(attempt)).map(|(shard, _)| *shard) else {
            return;
        };
        let record = match outcome {
            Ok(Some(entry)) => Record::decode(&entry.record).ok(),
            Ok(None) | Err(_) => None,
        };
        let Some(record) = record else {
            // A shard that nothing is known of holds everything back.
            self.step = Step::Rest(now + self.config.interval);
            return;
        };
        asks.remove(&shard);
        floors.insert(shard, (record.stream_created, record.floor));
        if asks.is_empty() {
            let floors = std::mem::take(floors);
            self.step = self.decide(now, &floors);
        }
    }

    fn decide(&mut self, now: Instant, floors: &BTreeMap<ShardId, (Timestamp, Seq)>) -> Step {
        let rest = Step::Rest(now + self.config.interval);
        let lowest = floors.iter().min_by_key(|(_, (_, floor))| *floor);
        let Some((shard, &(created, floor))) = lowest else { return rest };
        self.held_back_by = Some(*shard);
        if floors.values().any(|(other, _)| *other != created) {
            return rest;
        }
        let highest = floors.values().map(|(_, floor)| *floor).max().unwrap_or(floor);
        let done = if safeguard(Rule::LedgerBeforeTrim) { floor } else { highest.next() };
        self.samples.retain(|(_, other, _)| *other == created);
        self.samples.push_back((now, created, done));
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
                Step::Trim { ask: Ask::at(now), created, below }
            }
            _ => rest,
        }
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Action>) {
        if let Step::Rest(until) = self.step
            && until <= now
        {
            let asks = (0..self.config.shards).map(|shard| (ShardId(shard), Ask::at(now))).collect();
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
            Step::Trim { ask, created, below } => {
                if let Some(attempt) = ask.take(now, &mut self.attempts) {
                    let (created, below) = (*created, *below);
                    out.push(Action::Retention(retention::Command::Trim { attempt, created, below }));
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
