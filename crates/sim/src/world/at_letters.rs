//! Dead letters in the world: every one that is kept is checked against what is true.

use std::time::Duration;

use holdfast_core::ports::dead_letters::{Command, ParkOutcome, Reply};
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::row::ShardId;

use crate::invariants::once;
use crate::jetstream::Client;
use crate::letters::Kept;
use crate::marks::Mark;
use crate::process::Local;
use crate::trace::Happening;

use super::{Due, World, table_index, unanswered};

impl World {
    /// A shard wants a letter kept: it waits for its turn.
    pub(super) fn send_letter(&mut self, process: u32, command: Command) {
        let Command::Park { letter, .. } = &command;
        let life = self.processes[process as usize].client_of(letter.shard).start;
        let at = if self.chance.permille(self.rates.letter_queued) {
            self.now + self.chance.time(Duration::ZERO, self.scenario.stale * 3 / 2)
        } else {
            self.now + self.chance.time(Duration::ZERO, Duration::from_micros(300))
        };
        self.put_local(at, process, life, Local::Post { command });
    }

    pub(super) fn letter_turn(&mut self, process: u32, command: Command) {
        let Command::Park { attempt, letter, send_by, .. } = &command;
        let owner = &self.processes[process as usize];
        let Some(slot) = owner.slots.get(&letter.shard) else { return };
        let reply = |outcome| {
            let reply = Reply::Parked { attempt: *attempt, table: letter.table.clone(), outcome };
            Local::DeadLetter { shard: letter.shard, reply }
        };
        if owner.clock(self.now) > *send_by {
            self.marks.hit(Mark::SentLateDropped);
            let at = self.now + Duration::from_micros(50);
            self.put_local(at, process, slot.life, reply(ParkOutcome::Stale));
            return;
        }
        let stale = owner.lasts(self.scenario.stale);
        let posted = self.intents.posted(self.now, slot.session, letter, stale);
        let (client, shard) = (owner.client_of(letter.shard), letter.shard);
        let record = self.intents.current(shard);
        if record.is_some_and(|record| self.intents.is_inherited(shard, record, letter.seq)) {
            self.marks.hit(Mark::LetterInherited);
        }
        let unanswered = reply(ParkOutcome::Failed(unanswered()));
        self.note_letter(client, &command, "is sent");
        self.check(posted);
        if let Some((at, reply_by)) = self.request(client, unanswered) {
            self.agenda.put(at, Due::AtLetters { from: client, command: Box::new(command), reply_by });
        }
    }

    pub(super) fn at_letters(&mut self, from: Client, command: &Command, reply_by: Option<Duration>) {
        let Command::Park { attempt, letter, unless_there, .. } = command;
        let reply = |outcome| {
            let reply = Reply::Parked { attempt: *attempt, table: letter.table.clone(), outcome };
            Local::DeadLetter { shard: letter.shard, reply }
        };
        if !self.broker_up {
            self.no_answer(from, reply_by, Some(reply(ParkOutcome::Failed(unanswered()))));
            return;
        }
        let Kept { outcome, stored } = if self.chance.permille(self.rates.letter_refused) {
            let failure = Failure::new(FailureClass::Unavailable, "no quorum");
            Kept { outcome: ParkOutcome::Failed(failure), stored: false }
        } else {
            self.letters.park(self.now, letter, *unless_there)
        };
        let session = self.sessions.get(&(from.process, from.start)).copied();
        let owner = self.intents.current(letter.shard).map(|record| record.writer.session);
        if stored {
            self.note_letter(from, command, "is kept");
            if owner != session {
                self.marks.hit(Mark::LetterByZombie);
            }
            let (store, now) = (&self.store, self.now);
            let checked = once::lettered(
                &mut self.truth,
                letter,
                |fact| store.was_unfit(fact.number, fact.published_at, now),
                |fact| store.exists_from(&letter.table).is_none_or(|from| from > fact.published_at),
            );
            self.check(checked);
        } else if outcome == ParkOutcome::Parked {
            self.note_letter(from, command, "is there");
            self.marks.hit(if owner == session { Mark::LetterAnswerLost } else { Mark::LetterAgainByZombie });
        } else {
            self.note_letter(from, command, "is refused");
        }
        self.answer(from, reply_by, reply(outcome), reply(ParkOutcome::Failed(unanswered())));
    }

    fn note_letter(&mut self, from: Client, command: &Command, what: &'static str) {
        let Command::Park { attempt, letter, .. } = command;
        self.note(Happening::Letter {
            process: from.process,
            shard: letter.shard.0,
            table: table_index(&letter.table),
            attempt: attempt.0,
            seq: letter.seq.0,
            what,
        });
    }

    /// What is not done for want of dead letters: a row that can never be inserted, if there are none.
    pub(super) fn poisons(&self, fact: &crate::truth::Fact) -> bool {
        let unfit = fact.screened || self.store.was_unfit(fact.number, self.now, self.now);
        unfit && !self.scenario.parking.dead_letters
    }

    /// A row that is done still waits to be acknowledged.
    pub(super) fn lingers(&self, fact: &crate::truth::Fact) -> bool {
        use holdfast_core::ports::delivery::Acks;
        match self.scenario.policy.acks {
            Acks::None => false,
            Acks::Explicit => self.stream.unacked(ShardId(fact.shard)).any(|seq| seq == fact.seq),
            Acks::WorkQueue => self.stream.has(fact.seq),
        }
    }
}
