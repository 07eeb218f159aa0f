//! The store in the world: what becomes of an insert is drawn here, and every part is checked.

use std::time::Duration;

use holdfast_core::ports::store;
use holdfast_core::ports::store::Class;
use holdfast_core::ports::store::DescribeError;
use holdfast_core::ports::store::Insert;
use holdfast_core::ports::store::Level;
use holdfast_core::ports::store::Refusal;
use holdfast_core::row::ShardId;

use crate::clickhouse::Fate;
use crate::clickhouse::Misfit;
use crate::clickhouse::Part;
use crate::clickhouse::PartOutcome;
use crate::invariants::doubt::Doubts;
use crate::invariants::intent;
use crate::invariants::once;
use crate::jetstream::Client;
use crate::jetstream::number_of;
use crate::marks::Mark;
use crate::process::Local;
use crate::scenario::Hints;
use crate::scenario::Scenario;
use crate::trace::Happening;

use super::{Due, Flight, World, refusal, seqs, table_index, unanswered_store};

/// The same answer to a question, but that it was refused.
fn refused_store(reply: store::Reply, refusal: &Refusal) -> store::Reply {
    match reply {
        store::Reply::ReadBack { attempt, table, .. } => {
            store::Reply::ReadBack { attempt, table, outcome: Err(refusal.clone()) }
        }
        store::Reply::Described { attempt, table, .. } => {
            let outcome = Err(DescribeError::Failed(refusal.clone()));
            store::Reply::Described { attempt, table, outcome }
        }
        other @ store::Reply::Inserted { .. } => other,
    }
}

impl World {
    pub(super) fn send_store(&mut self, process: u32, shard: ShardId, command: store::Command) {
        let owner = &mut self.processes[process as usize];
        let client = owner.client_of(shard);
        match command {
            store::Command::Insert(insert) => {
                let Some(slot) = owner.slots.get_mut(&shard) else { return };
                let checked = slot.doubts.sends(&insert);
                self.check(checked);
                let at = if self.chance.permille(self.rates.insert_queued) {
                    self.now + self.chance.time(Duration::ZERO, self.scenario.stale * 3 / 2)
                } else {
                    self.now + self.chance.time(Duration::ZERO, Duration::from_micros(300))
                };
                self.put_local(at, process, client.start, Local::Turn { insert });
            }
            store::Command::Abort { until, .. } => {
                let Some(slot) = owner.slots.get_mut(&shard) else { return };
                slot.aborted_until = slot.aborted_until.max(until);
                slot.doubts = Doubts::default();
                let ours = |flight: &Flight| {
                    (flight.0, flight.1, flight.2) == (process, client.start, shard) && flight.3 <= until
                };
                self.flights.retain(|flight, _| !ours(flight));
            }
            command => {
                if let store::Command::ReadBack { table, first, .. } = &command
                    && let Some(lane) = self.intents.current(shard).and_then(|record| record.lanes.get(table))
                    && lane.suspect >= *first
                {
                    let mark =
                        if self.restored { Mark::SuspectAfterRestore } else { Mark::SuspectAfterSplit };
                    self.marks.hit(mark);
                }
                let owner = &mut self.processes[process as usize];
                if let store::Command::ReadBack { table, .. } = &command
                    && let Some(slot) = owner.slots.get_mut(&shard)
                {
                    slot.doubts.asks(table);
                }
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

    pub(super) fn ask_store(
        &mut self,
        from: Client,
        shard: ShardId,
        command: &store::Command,
        reply_by: Duration,
    ) {
        let denied = self.denied();
        let reply = match (&denied, unanswered_store(command)) {
            (_, unanswered) if !self.store_up => unanswered,
            (Some(refusal), Some(reply)) => Some(refused_store(reply, refusal)),
            _ => self.store.answer(self.now, command),
        };
        let (Some(reply), Some(unanswered)) = (reply, unanswered_store(command)) else { return };
        let late = self.chance.permille(self.rates.answer_late);
        let mut at = self.now + self.latency();
        if late {
            at += self.chance.millis(10, 4_000);
        }
        let reply = if at > reply_by { unanswered } else { reply };
        self.put_local(at.min(reply_by), from.process, from.start, Local::Store { shard, reply });
    }

    pub(super) fn at_store(&mut self, from: Client, insert: Insert) {
        if !self.store_up {
            return;
        }
        self.inserts += 1;
        let fate = self.draw_fate(&insert);
        let rotated = usize::try_from(self.chance.below(8)).unwrap_or(0);
        self.store.insert(self.now, from, insert, fate, rotated);
        self.serve_store();
    }

    pub(super) fn draw_fate(&mut self, insert: &Insert) -> Fate {
        let quick = self.chance.time(Duration::from_millis(1), self.scenario.insert_time);
        if let Some(refusal) = self.denied() {
            return Fate::Refused { after: quick, refusal };
        }
        if self.now < self.store_refuses_until || self.chance.permille(self.rates.insert_refused) {
            let refusal = if self.chance.permille(500) {
                refusal(Class::Passing, Some(252), "too many parts")
            } else {
                refusal(Class::Passing, Some(241), "memory limit exceeded")
            };
            return Fate::Refused { after: quick, refusal };
        }
        if let Some(misfit) = self.store.misfit(self.now, insert) {
            if self.chance.permille(self.rates.insert_killed) {
                return Fate::Killed { after: quick, landed: 0, burned: false };
            }
            return Fate::Refused { after: quick, refusal: self.misfits(insert, misfit) };
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
        let left = most.saturating_sub(after) / u32::try_from(parts.max(1)).unwrap_or(1);
        let pace = if slow { self.chance.time(Duration::ZERO, left) } else { self.chance.millis(0, 3) };
        Fate::Lands { after, pace }
    }

    /// What everybody is told while the store lets nobody in, or nothing works.
    pub(super) fn denied(&self) -> Option<Refusal> {
        let (until, class) = self.store_denies;
        (self.now < until).then(|| match class {
            Class::Access => refusal(class, Some(516), "authentication failed"),
            Class::Table => refusal(class, Some(16), "no such column"),
            _ => refusal(class, Some(4_711), "what is this"),
        })
    }

    /// The store's words on a block that does not fit its table.
    fn misfits(&mut self, insert: &Insert, misfit: Misfit) -> Refusal {
        let at = match misfit {
            Misfit::Row(at) => at,
            Misfit::Partitions => {
                self.marks.hit(Mark::TooManyPartitions);
                return refusal(Class::Data, Some(252), "too many partitions for a single block");
            }
        };
        if let Some(row) = insert.rows.get(at) {
            self.refused.insert(number_of(&row.payload));
        }
        let Hints { exact, wrong } = self.scenario.hints;
        let place = |at: usize| u32::try_from(at + 1).ok();
        let row = match self.chance.below(1_000) {
            drawn if drawn < u64::from(exact) => place(at),
            drawn if drawn < u64::from(exact + wrong) => {
                let other = usize::try_from(self.chance.below(insert.rows.len() as u64 + 1)).unwrap_or(0);
                if other != at {
                    self.marks.hit(Mark::WrongHint);
                }
                place(other)
            }
            _ => None,
        };
        Refusal { row, ..refusal(Class::Data, Some(117), "a row does not fit") }
    }

    /// Whether a token of the batch may be burned (once more).
    pub(super) fn may_burn(&mut self, insert: &Insert) -> bool {
        // A table that cannot be read back cannot be repaired: its level says so.
        let Some(bounds) = intent::bounds(&insert.token) else { return false };
        if insert.target.level != Level::ExactlyOnce {
            return false;
        }
        let times = self.burns.entry((insert.table.clone(), insert.created, bounds.first)).or_default();
        *times += 1;
        *times <= 2
    }

    pub(super) fn serve_store(&mut self) {
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

    pub(super) fn part(&mut self, part: &Part) {
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
                let checked = self.intents.landed(insert);
                self.check(checked);
                if rows.iter().any(|row| self.refused.contains(&number_of(&row.payload))) {
                    self.marks.hit(Mark::Mended);
                }
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
                    let (intents, shard, created) = (&self.intents, insert.shard, insert.created);
                    let split = |first, last| intents.was_split(shard, created, first, last);
                    let ordered = self.order.landed(&mut self.truth, table, created, bounds, rows, split);
                    self.check(ordered);
                }
            }
        }
    }
}
