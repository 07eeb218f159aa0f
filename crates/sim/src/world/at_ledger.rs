//! The ledger in the world: every record that is stored is checked against what is true.

use std::time::Duration;

use holdfast_core::ports::Failure;
use holdfast_core::ports::FailureClass;
use holdfast_core::ports::ledger;
use holdfast_core::ports::ledger::Revision;
use holdfast_core::ports::ledger::WriteOutcome;
use holdfast_core::record::Record;
use holdfast_core::row::ShardId;

use crate::invariants::once;
use crate::invariants::record;
use crate::invariants::violated;
use crate::jetstream::Client;
use crate::marks::Mark;
use crate::process::Asker;
use crate::process::Local;
use crate::trace::Happening;

use super::{Due, Lurking, World, table_index, unanswered_ledger};

impl World {
    pub(super) fn send_ledger(&mut self, process: u32, asker: Asker, command: ledger::Command) {
        let owner = &self.processes[process as usize];
        let client = match asker {
            Asker::Shard(shard) => owner.client_of(shard),
            Asker::Trim => owner.client(),
        };
        let reply = unanswered_ledger(&command);
        let unanswered = Local::Ledger { client: None, asker, reply };
        if let Some((at, reply_by)) = self.request(client, unanswered) {
            if matches!(command, ledger::Command::Write { .. })
                && self.chance.permille(self.rates.write_twice)
            {
                let again = at + self.chance.millis(0, 6_000);
                let command = command.clone();
                self.agenda
                    .put(again, Due::AtLedger { from: client, asker, command, reply_by: None, again: true });
            }
            if reply_by.is_none()
                && let ledger::Command::Write { shard, .. } = command
            {
                self.lurking.push(Lurking::Write { from: client, shard, asker, command });
                self.agenda.put(at, Due::EndLurking);
                return;
            }
            self.agenda.put(at, Due::AtLedger { from: client, asker, command, reply_by, again: false });
        }
    }

    pub(super) fn at_ledger(
        &mut self,
        from: Client,
        asker: Asker,
        command: &ledger::Command,
        reply_by: Option<Duration>,
        again: bool,
    ) {
        if !self.broker_up {
            let reply = unanswered_ledger(command);
            self.no_answer(from, reply_by, Some(Local::Ledger { client: None, asker, reply }));
            return;
        }
        if again {
            self.marks.hit(Mark::WriteTwice);
        }
        let refuses = matches!(command, ledger::Command::Write { .. })
            && self.chance.permille(self.rates.write_refused);
        let reply = if refuses && let ledger::Command::Write { attempt, .. } = command {
            let failure = Failure::new(FailureClass::Unavailable, "no quorum");
            ledger::Reply::Written { attempt: *attempt, outcome: WriteOutcome::Refused(failure) }
        } else {
            self.bucket.handle(command)
        };
        if let (ledger::Command::Write { shard, record, .. }, ledger::Reply::Written { outcome, .. }) =
            (command, &reply)
        {
            match outcome {
                WriteOutcome::Stored(revision) => {
                    if reply_by.is_none() && !again {
                        self.marks.hit(Mark::LateWriteStored);
                    }
                    self.recorded(from, *shard, revision.0, record);
                }
                WriteOutcome::Conflict => self.conflicted(from, *shard, record),
                WriteOutcome::Unknown(_) | WriteOutcome::Refused(_) => {}
            }
        }
        if let (ledger::Command::Read { shard, .. }, Asker::Shard(_)) = (command, asker) {
            let slot = self.processes[from.process as usize].slot_of(from, *shard);
            if slot.is_some_and(|slot| slot.phase == "taking over") {
                self.let_arrive(None, *shard);
            }
        }
        let unanswered = Local::Ledger { client: None, asker, reply: unanswered_ledger(command) };
        self.answer(from, reply_by, Local::Ledger { client: Some(from), asker, reply }, unanswered);
    }

    pub(super) fn recorded(&mut self, from: Client, shard: ShardId, revision: u64, bytes: &[u8]) {
        let record = match Record::decode(bytes) {
            Ok(record) => record,
            Err(error) => {
                self.check(violated(record::NAME, error.to_string()));
                return;
            }
        };
        self.revisions.push((self.now, Revision(revision)));
        self.note_record(from.process, shard, revision, &record);
        let session = self.sessions.get(&(from.process, from.start)).copied();
        let before = self.intents.current(shard);
        let kept = record::stored(before, &record, session);
        let complete = once::recorded(&self.truth, shard.0, before, &record, self.causes.tail_lost);
        self.check(kept);
        self.check(complete);
        self.intents.stored(self.now, shard, record);
    }

    pub(super) fn note_record(&mut self, process: u32, shard: ShardId, revision: u64, record: &Record) {
        let lanes = || record.lanes.iter().map(|(table, lane)| (table_index(table), lane));
        let open = lanes().filter_map(|(table, lane)| Some((table, lane.open.as_ref()?.batch)));
        let open =
            open.map(|(table, batch)| (table, batch.first.0, batch.last.0, batch.generation)).collect();
        let parked = lanes().filter_map(|(table, lane)| Some((table, lane.parked.as_ref()?.row.0))).collect();
        let suspect = lanes().map(|(table, lane)| (table, lane.suspect.0));
        let suspect = suspect.filter(|(_, suspect)| *suspect > 0).collect();
        let stored = Some((revision, record.epoch, record.floor.0));
        self.note(Happening::Ledger { shard: shard.0, process, stored, open, parked, suspect });
    }

    pub(super) fn conflicted(&mut self, from: Client, shard: ShardId, bytes: &[u8]) {
        self.note(Happening::Ledger {
            shard: shard.0,
            process: from.process,
            stored: None,
            open: Vec::new(),
            parked: Vec::new(),
            suspect: Vec::new(),
        });
        let Ok(record) = Record::decode(bytes) else { return };
        let Some(current) = self.intents.current(shard) else { return };
        if (current.writer, current.epoch) == (record.writer, record.epoch) {
            self.marks.hit(Mark::OwnWriteAdopted);
        } else if self.processes[from.process as usize]
            .slot_of(from, shard)
            .is_some_and(|slot| slot.phase == "taking over")
        {
            self.marks.hit(Mark::FenceConflict);
        }
    }
}
