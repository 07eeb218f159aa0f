//! What happens inside a process: its machines are handed events, and looked at afterwards.

use std::time::Duration;

use holdfast_core::action::Action;
use holdfast_core::action::Actions;
use holdfast_core::action::Event;
use holdfast_core::claims;
use holdfast_core::notice::Notice;
use holdfast_core::notice::Report;
use holdfast_core::notice::ResyncReason;
use holdfast_core::notice::ShardFailure;
use holdfast_core::notice::Trouble;
use holdfast_core::ports::Attempt;
use holdfast_core::ports::dead_letters::Cause;
use holdfast_core::ports::delivery;
use holdfast_core::ports::delivery::PullEnd;
use holdfast_core::ports::delivery::Rows;
use holdfast_core::ports::ledger;
use holdfast_core::ports::ledger::WriteOutcome;
use holdfast_core::ports::store;
use holdfast_core::ports::store::Class;
use holdfast_core::ports::store::Insert;
use holdfast_core::ports::store::InsertOutcome;
use holdfast_core::row::ShardId;
use holdfast_core::row::TableName;
use holdfast_core::trim;

use crate::invariants::intent;
use crate::invariants::lands;
use crate::invariants::stops;
use crate::invariants::violated;
use crate::marks::Mark;
use crate::process::Asker;
use crate::process::Local;
use crate::scenario::Scenario;
use crate::trace::Happening;

use super::{Due, Flight, World, refusal, seqs, table_index, unanswered, unanswered_instead_of};

impl World {
    /// `life`: of the machine or the process that it is for.
    pub(super) fn local(&mut self, process: u32, life: u32, what: Local) {
        let owner = &mut self.processes[process as usize];
        let lives = match what.shard() {
            Some(shard) => owner.slots.get(&shard).is_some_and(|slot| slot.life == life),
            None => owner.start == life,
        };
        if !owner.up || !lives {
            return;
        }
        if owner.frozen_until.is_some() {
            owner.waiting.push_back((life, what));
            return;
        }
        let current = what.shard().map_or_else(|| owner.client(), |shard| owner.client_of(shard));
        match what {
            Local::Wake(shard) => {
                let Some(slot) = owner.slots.get_mut(&shard) else { return };
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
                let Some(slot) = owner.slots.get_mut(&shard) else { return };
                if client == current && slot.pulls.remove(&attempt).is_some() {
                    if end == PullEnd::TooLarge && slot.phase == "owning" {
                        self.marks.hit(Mark::RenewedAtCap);
                    }
                    self.sink(process, shard, delivery::Reply::Ended { attempt, end });
                }
            }
            Local::Sunk { shard, reply } => {
                if let Some(slot) = owner.slots.get_mut(&shard) {
                    slot.sinking -= 1;
                }
                self.hand(process, shard, Event::Delivery(reply));
            }
            Local::Delivery { client, shard, reply } => {
                if client.is_none_or(|client| client == current) {
                    self.looked_for_orphan(process, shard, &reply);
                    self.hand(process, shard, Event::Delivery(reply));
                } else if let Some(reply) = unanswered_instead_of(&reply) {
                    self.answer_broke_off(process, life, Local::Delivery { client: None, shard, reply });
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
                            if let Some(slot) = owner.slots.get_mut(&shard) {
                                slot.conflicted |= conflict;
                            }
                            self.hand(process, shard, Event::Ledger(reply));
                        }
                        Asker::Trim => self.hand_trim(process, trim::Event::Ledger(reply)),
                    }
                } else {
                    let reply = match reply {
                        ledger::Reply::Read { attempt, .. } => {
                            ledger::Reply::Read { attempt, outcome: Err(unanswered()) }
                        }
                        ledger::Reply::Written { attempt, .. } => {
                            ledger::Reply::Written { attempt, outcome: WriteOutcome::Unknown(unanswered()) }
                        }
                    };
                    self.answer_broke_off(process, life, Local::Ledger { client: None, asker, reply });
                }
            }
            Local::Retention(reply) => self.hand_trim(process, trim::Event::Retention(reply)),
            Local::Store { shard, reply } => {
                let Some(slot) = owner.slots.get_mut(&shard) else { return };
                if let store::Reply::ReadBack { table, outcome: Ok(_), .. } = &reply {
                    slot.doubts.read_back(table);
                }
                if let store::Reply::Inserted { attempt, table, outcome } = &reply {
                    let how = match outcome {
                        InsertOutcome::Stored => "stored",
                        InsertOutcome::Again(_) => "again",
                        InsertOutcome::Doubt(_) => "doubt",
                        InsertOutcome::Stale => "stale",
                    };
                    let in_doubt = matches!(outcome, InsertOutcome::Doubt(_));
                    let doubts = &mut slot.doubts;
                    doubts.answered(table, *attempt, in_doubt);
                    doubts.refused(
                        table,
                        match outcome {
                            InsertOutcome::Again(refusal) => Some(refusal.class),
                            _ => None,
                        },
                    );
                    let (table, attempt) = (table_index(table), attempt.0);
                    self.note(Happening::Answered { process, shard: shard.0, table, attempt, how });
                }
                self.hand(process, shard, Event::Store(reply));
            }
            Local::Turn { insert } => self.insert_turn(process, insert),
            Local::Post { command } => self.letter_turn(process, command),
            Local::DeadLetter { shard, reply } => self.hand(process, shard, Event::DeadLetter(reply)),
            Local::Reconnected { link } => {
                if owner.link == link && !owner.connected && self.broker_up {
                    owner.connected = true;
                    self.meet(process);
                    let shards: Vec<ShardId> =
                        self.processes[process as usize].slots.keys().copied().collect();
                    for shard in shards {
                        self.connect(process, shard);
                        self.hand(process, shard, Event::Delivery(delivery::Reply::Disrupted));
                    }
                }
            }
            Local::WakeClaims => {
                let Some(sharing) = &mut owner.sharing else { return };
                if sharing.wake.is_some_and(|at| at <= self.now) {
                    sharing.wake = None;
                    self.hand_claims(process, claims::Event::Wakeup);
                }
            }
            Local::Members { client, reply } => {
                if client.is_none_or(|client| client == current) {
                    self.members_tell(process, reply);
                }
            }
            Local::Ordered { shard, event } => self.ordered(process, shard, event),
            Local::Report { shard, report } => self.report(process, shard, &report),
            Local::Over { shard } => self.over(process, shard),
            Local::Asked(event) => self.ask_claims(process, event),
        }
    }

    /// A shard's machine has a connection.
    pub(super) fn connect(&mut self, process: u32, shard: ShardId) {
        let owner = &self.processes[process as usize];
        let Some(slot) = owner.slots.get(&shard) else { return };
        self.stream.connect(owner.client_of(shard), vec![slot.closed; self.scenario.shards as usize]);
    }

    pub(super) fn rows_arrive(&mut self, process: u32, shard: ShardId, attempt: Attempt, rows: Rows) {
        let Some(slot) = self.processes[process as usize].slots.get_mut(&shard) else { return };
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
    pub(super) fn sink(&mut self, process: u32, shard: ShardId, reply: delivery::Reply) {
        let lingers = if self.chance.permille(self.rates.sink_slow) {
            self.chance.millis(1, 400)
        } else {
            Duration::ZERO
        };
        let owner = &mut self.processes[process as usize];
        let Some(slot) = owner.slots.get_mut(&shard) else { return };
        let at = slot.sink_until.max(self.now + lingers);
        // Behind what still waits, even if its time has come: a frozen process takes it all out at once.
        if at <= self.now && slot.sinking == 0 {
            self.hand(process, shard, Event::Delivery(reply));
            return;
        }
        slot.sink_until = at;
        slot.sinking += 1;
        let life = slot.life;
        self.disturbed(process, at);
        self.put_local(at, process, life, Local::Sunk { shard, reply });
    }

    /// An answer was on its way when its connection broke: its caller waits on, and in vain.
    fn answer_broke_off(&mut self, process: u32, life: u32, unanswered: Local) {
        let at = self.now + Scenario::CALL_TIMEOUT;
        self.disturbed(process, at);
        self.put_local(at, process, life, unanswered);
    }

    pub(super) fn insert_turn(&mut self, process: u32, insert: Insert) {
        let owner = &self.processes[process as usize];
        let shard = insert.shard;
        let Some(slot) = owner.slots.get(&shard) else { return };
        if insert.attempt <= slot.aborted_until {
            return;
        }
        let flight = (process, slot.life, shard, insert.attempt);
        if owner.clock(self.now) > insert.send_by {
            self.marks.hit(Mark::SentLateDropped);
            self.answer_insert(flight, insert.table, InsertOutcome::Stale);
            return;
        }
        let stale = owner.lasts(self.scenario.stale);
        let sent = self.intents.sent(self.now, slot.session, slot.epoch, &insert, stale);
        let client = owner.client_of(shard);
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
            let refused = refusal(Class::Passing, None, "connection refused");
            self.answer_insert(flight, insert.table, InsertOutcome::Again(refused));
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
    pub(super) fn answer_insert(&mut self, flight: Flight, table: TableName, outcome: InsertOutcome) {
        let (process, start, shard, attempt) = flight;
        let at = self.now + self.latency();
        let reply = store::Reply::Inserted { attempt, table, outcome };
        self.put_local(at, process, start, Local::Store { shard, reply });
    }

    pub(super) fn hand(&mut self, process: u32, shard: ShardId, event: Event) {
        let mut actions = Actions::default();
        let owner = &mut self.processes[process as usize];
        let now = owner.clock(self.now);
        let Some(slot) = owner.slots.get_mut(&shard) else { return };
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
                Action::DeadLetter(command) => self.send_letter(process, command),
                Action::Notice(notice) => self.told(process, shard, notice),
                Action::Report(report) => self.reported(process, shard, report),
            }
        }
        self.set_wake(process, shard);
    }

    pub(super) fn set_wake(&mut self, process: u32, shard: ShardId) {
        let owner = &mut self.processes[process as usize];
        if !owner.up {
            return;
        }
        let Some(next) = owner.slots.get(&shard).map(|slot| slot.machine.next_wakeup()) else { return };
        let due = next.map(|next| owner.when(next));
        let soonest = self.now + Duration::from_micros(10);
        let Some(slot) = owner.slots.get_mut(&shard) else { return };
        let Some(due) = due else {
            slot.wake = None;
            return;
        };
        slot.spins = if due <= self.now { slot.spins + 1 } else { 0 };
        let spins = slot.spins > 5_000 && self.checks_core;
        let due = due.max(soonest);
        if slot.wake != Some(due) {
            slot.wake = Some(due);
            let life = slot.life;
            self.put_local(due, process, life, Local::Wake(shard));
        }
        if spins {
            self.check(violated(
                lands::NAME,
                format!("p{process} s{shard} wakes again and again, to no end"),
            ));
        }
    }

    /// Looks at a shard after an event: budget, phase, halts.
    pub(super) fn watch(&mut self, process: u32, shard: ShardId, actions: &Actions) {
        let owner = &mut self.processes[process as usize];
        let Some(slot) = owner.slots.get_mut(&shard) else { return };
        let status = slot.machine.status();
        let held = (status.held_rows, status.held_bytes);
        let (phase, epoch, accepted) = (status.phase, status.epoch, status.accepted);
        let owns = status.pin.is_some() && phase != "taking over";
        // What an earlier tenure left open can only be finished with rows from the stream.
        let inherited = self.intents.inherited_rows(shard);
        let stuck = |action: &Action| matches!(action, Action::Notice(Notice::Trouble { .. }));
        let stuck_now = actions.as_slice().iter().any(stuck);
        let troubled = !status.troubles.is_empty() || status.ledger_trouble.is_some() || inherited > 0;
        let pin = status.pin.filter(|pin| slot.pin.as_ref() != Some(pin)).cloned();
        let budget = status.share;
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
                checks.push(slot.budget.pulled(pull, budget, held, self.largest, inherited));
                if pull.max_bytes.is_none() {
                    self.marks.hit(Mark::LargeRowAlone);
                }
            }
        }
        checks.push(slot.budget.held(held));
        if let Some(stopping) = &slot.stopping {
            if matches!(phase, "halting" | "handing over") {
                checks.push(stopping.halting(accepted));
            }
            if phase == "releasing" && matches!(slot.phase, "halting" | "handing over" | "owning") {
                // What it held before this event: whatever lets go of rows leads to a write first.
                checks.push(stopping.released(self.now, slot.held, slot.troubled || stuck_now));
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

    pub(super) fn told(&mut self, process: u32, shard: ShardId, notice: Notice) {
        if let Notice::Resynced { reason } = &notice {
            let Some(slot) = self.processes[process as usize].slots.get_mut(&shard) else { return };
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
                ResyncReason::Skipped => Some(Mark::Skipped),
                ResyncReason::NewPin | ResyncReason::OtherPin => None,
            },
            Notice::Repeats { .. } => Some(Mark::Repeats),
            Notice::TokenBurned { .. } => Some(Mark::GenerationRaised),
            Notice::RowsRemoved { .. } => Some(Mark::RowsRemoved),
            Notice::StreamMadeAnew => Some(Mark::StreamAnew),
            Notice::PinTakenAway => Some(Mark::OrphanUnpinned),
            Notice::TableAhead { .. } => Some(Mark::TableAhead),
            Notice::UnknownRefusal { .. } => Some(Mark::UnknownRefusal),
            Notice::LetterLost { .. } => Some(Mark::LetterLost),
            Notice::Parked { cause, .. } => Some(match cause {
                Cause::Subject => Mark::ParkedSubject,
                Cause::Payload => Mark::ParkedPayload,
                Cause::Refused => Mark::ParkedRefused,
                Cause::UnknownTable => Mark::ParkedUnknownTable,
            }),
            Notice::Split { table, batch, .. } => {
                let record = self.intents.current(shard);
                if record.is_some_and(|record| self.intents.is_inherited(shard, record, batch.first)) {
                    self.marks.hit(Mark::SplitInherited);
                }
                let Some(slot) = self.processes[process as usize].slots.get(&shard) else { return };
                let doubts = &slot.doubts;
                let checked = doubts.splits(table);
                let last = doubts.last(table).and_then(intent::bounds);
                self.check(checked);
                if last.is_some_and(|last| (last.first, last.last) == (batch.first, batch.last)) {
                    self.marks.hit(Mark::SplitWaitedOut);
                }
                Some(Mark::Split)
            }
            Notice::Trouble { trouble: Trouble::DeadLetters { .. }, .. } => Some(Mark::LettersRefused),
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
        if let Notice::UnknownRefusal { refusal } = &notice
            && let Some(slot) = self.processes[process as usize].slots.get_mut(&shard)
            && !slot.unknown.insert(refusal.code)
        {
            self.check(violated(stops::TOLD, format!("{refusal} was told again")));
        }
        if let Notice::Trouble { trouble, .. } = &notice {
            let checked = self.causes.troubled(trouble);
            self.check(checked);
        }
        self.note(Happening::Told { process, shard: shard.0, notice: Box::new(notice) });
    }

    pub(super) fn reported(&mut self, process: u32, shard: ShardId, report: Report) {
        let owner = &mut self.processes[process as usize];
        let Some(slot) = owner.slots.get_mut(&shard) else { return };
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
                        self.marks.hit(Mark::ConsumerGone);
                        // Somebody sees it, makes the consumer again, and starts the process anew or says so.
                        let start = owner.start;
                        let resumes = owner.sharing.is_some() && self.chance.permille(500);
                        let at = self.now + self.chance.millis(9_000, 12_000);
                        let due = if resumes { Due::Resume(shard) } else { Due::Replace { process, start } };
                        self.agenda.put(at, due);
                    }
                    ShardFailure::SequencesReused(_) => {
                        owner.reused.insert(shard);
                        if self.chance.permille(700) {
                            let at = self.now + self.chance.millis(500, 8_000);
                            self.agenda.put(at, Due::Rebase(shard.0));
                        }
                        self.marks.hit(Mark::SequencesReused);
                    }
                    ShardFailure::StartNeeded | ShardFailure::Record(_) => {}
                }
                let checked = self.causes.failed(shard.0, failure);
                self.check(checked);
            }
            Report::Ready | Report::Owned { .. } | Report::Lost => {}
        }
        self.note(Happening::Reported { process, shard: shard.0, report: Box::new(report.clone()) });
        self.carry_report(process, shard, report);
        let owner = &self.processes[process as usize];
        if let Some((down, _)) = owner.stopping
            && owner.sharing.is_none()
            && owner.slots.values().all(|slot| slot.over)
        {
            self.note(Happening::Process { process, what: "has stopped" });
            self.down(process, down);
        }
    }

    pub(super) fn hand_trim(&mut self, process: u32, event: trim::Event) {
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
}
