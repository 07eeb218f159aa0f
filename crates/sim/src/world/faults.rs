//! What goes wrong, as it happens.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_core::action::Event;
use holdfast_core::budget::Share;
use holdfast_core::claims;
use holdfast_core::ports::Attempt;
use holdfast_core::ports::delivery;
use holdfast_core::ports::delivery::Inbox;
use holdfast_core::ports::ledger;
use holdfast_core::ports::ledger::Revision;
use holdfast_core::ports::store::Insert;
use holdfast_core::ports::store::Level;
use holdfast_core::record::Record;
use holdfast_core::record::Session;
use holdfast_core::record::Writer;
use holdfast_core::row::Mark as Place;
use holdfast_core::row::Row;
use holdfast_core::row::Seq;
use holdfast_core::row::ShardId;
use holdfast_core::time::Timestamp;
use holdfast_core::trim;

use crate::clickhouse::Unfit;
use crate::fault::Cut;
use crate::fault::Fault;
use crate::invariants::handover::Handover;
use crate::jetstream::Client;
use crate::jetstream::number_of;
use crate::marks::Mark;
use crate::process::{Local, Process};
use crate::scenario::Scenario;
use crate::trace::Happening;

use super::{Due, Lurking, World, doubt};

impl World {
    pub(super) fn fault(&mut self, at: usize) {
        let fault = self.scenario.faults[at].1.clone();
        self.faults += 1;
        self.note(Happening::Fault(fault.to_string()));
        match fault {
            Fault::Crash { process, down } => self.crash(process, down),
            Fault::HostLost { process, down, noticed } => {
                if self.processes[process as usize].up {
                    self.note(Happening::Process { process, what: "is killed" });
                    self.goes(process, down, noticed);
                }
            }
            Fault::Pause { process, lasting } => self.freeze(process, lasting),
            Fault::Stop { process, within, down } => self.stop(process, within, down),
            Fault::StopAndPause { process, within, after, lasting } => {
                self.stop(process, within, Duration::from_millis(500));
                let start = self.processes[process as usize].start;
                if self.processes[process as usize].up {
                    let at = self.now + after;
                    // Frozen a moment later, with the handover under way.
                    self.processes[process as usize].frozen_after = Some((start, lasting));
                    self.agenda.put(at, Due::Thaw { process, start });
                }
            }
            Fault::CutNats { process, how, lasting } => {
                self.cut_nats(process, how, lasting);
                self.cut_members(process, how, lasting);
            }
            Fault::CutConsumers { process, how, lasting } => self.cut_nats(process, how, lasting),
            Fault::CutMembers { process, how, lasting } => self.cut_members(process, how, lasting),
            Fault::MemberDeleted { process } => self.delete_member(process),
            Fault::MembersLost => self.make_bucket_anew(),
            Fault::NameTaken { process, shard } => self.take_name(process, ShardId(shard)),
            Fault::PauseShard { process, shard, lasting } => {
                let (owner, shard) = (&self.processes[process as usize], ShardId(shard));
                self.put_local(self.now, process, owner.start, Local::Asked(claims::Event::Pause(shard)));
                self.agenda.put(self.now + lasting, Due::Resume(shard));
            }
            Fault::CutStore { process, lasting } => {
                let until = self.now + lasting;
                let cut = &mut self.processes[process as usize].store_cut;
                *cut = (*cut).max(until);
            }
            Fault::Share { process, rows, bytes } => self.set_share(process, Share { rows, bytes }),
            Fault::BrokerRestart { down, forgotten } => self.broker_falls(down, forgotten),
            Fault::TailLost { down, rows } => {
                self.broker_falls(down, 0);
                let created = self.stream.created();
                let lost = self.stream.lose_tail(rows);
                self.truth.removed(created, &lost);
                self.order.tail_lost(self.stream.last().seq);
                self.tail_kept = self.stream.last().seq;
                self.causes.tail_lost |= !lost.is_empty();
                let seqs = lost.iter().rev().map(|seq| seq.0).collect();
                self.note(Happening::Removed { why: "a lost tail", seqs });
            }
            Fault::LeaderMoves { shard, forgotten, leaderless } => {
                if forgotten > 0 {
                    self.marks.hit(Mark::LeaderForgot);
                }
                self.resyncs.disturbed(self.now, ShardId(shard));
                self.stream.move_leader(self.now, ShardId(shard), forgotten, leaderless);
                let until = self.now + leaderless;
                (0..self.scenario.processes).for_each(|process| self.disturbed(process, until));
                self.serve_stream();
            }
            Fault::Unpin { shard } => self.unpin(ShardId(shard)),
            Fault::ResetAstray { shard } => {
                *self.deliveries_to_lose.entry(ShardId(shard)).or_default() += 1;
                self.astray.insert(ShardId(shard));
            }
            Fault::PurgedUnderWay { shard, down } => self.purge_under_way(ShardId(shard), down),
            Fault::SetBack { shard, by } => {
                let shard = ShardId(shard);
                let from = Seq(self.stream.position(shard).0.saturating_sub(by).max(1));
                let operator = Client { process: u32::MAX, start: 0, link: 0 };
                let reset = delivery::Command::Reset { attempt: Attempt(0), inbox: Inbox(0), from };
                if self.broker_up {
                    self.resyncs.disturbed(self.now, shard);
                    self.stream.handle(self.now, operator, shard, reset);
                }
                self.serve_stream();
            }
            Fault::ResetsUnwritten { lasting } => self.stream.leave_resets_unwritten(self.now + lasting),
            Fault::SetBackUnseen { shard, by } => self.set_back_unseen(ShardId(shard), by),
            Fault::CutUnseen { shard, lasting } => self.cut_unseen(ShardId(shard), lasting),
            Fault::DeliveriesLost { shard, rows } => {
                *self.deliveries_to_lose.entry(ShardId(shard)).or_default() += rows;
            }
            Fault::ConsumerDeleted { shard, lasting } => {
                self.causes.consumer_deleted = true;
                self.stream.delete_consumer(shard as usize);
                let at = self.now + lasting;
                self.agenda.put(at, Due::ConsumerBack(shard));
                self.gone.insert(ShardId(shard), self.now);
                self.look_whether_noticed(ShardId(shard));
                self.serve_stream();
            }
            Fault::StreamAnew => self.make_anew(),
            Fault::StreamAnewAstray { shard } => {
                *self.deliveries_to_lose.entry(ShardId(shard)).or_default() += 1;
                self.astray.insert(ShardId(shard));
                self.anew_astray.insert(ShardId(shard));
            }
            Fault::LedgerOlder { back } => {
                let then = self.now.saturating_sub(back);
                let at = self.revisions.partition_point(|(at, _)| *at <= then);
                let revision = at.checked_sub(1).map_or(Revision(0), |at| self.revisions[at].1);
                self.stop_everything(revision);
            }
            Fault::LedgerLost => self.stop_everything(Revision(0)),
            Fault::Purged { shard, rows } => {
                let shard = ShardId(shard);
                let here = self.stream.rows_of(shard);
                let at = here.partition_point(|seq| *seq < self.stream.position(shard));
                let back = usize::try_from(self.chance.below(rows as u64 + 1)).unwrap_or(0);
                let gone: Vec<Seq> = here.into_iter().skip(at.saturating_sub(back)).take(rows).collect();
                self.stream.remove(&gone);
                self.truth.removed(self.stream.created(), &gone);
                self.note(Happening::Removed {
                    why: "somebody",
                    seqs: gone.iter().map(|seq| seq.0).collect(),
                });
            }
            Fault::StoreKilled { down, burns } => {
                self.store_up = false;
                let running: Vec<Insert> = self.store.running().cloned().collect();
                let burns: Vec<bool> = running
                    .iter()
                    .map(|insert| self.chance.permille(burns) && self.may_burn(insert))
                    .collect();
                self.store.kill(self.now, &burns);
                self.serve_store();
                let at = self.now + down;
                self.agenda.put(at, Due::StoreUp);
            }
            Fault::StoreSlow { lasting } => self.store_slow_until = self.now + lasting,
            Fault::StoreRefuses { lasting } => self.store_refuses_until = self.now + lasting,
            Fault::StoreDenies { class, lasting } => self.store_denies = (self.now + lasting, class),
            Fault::AlteredUnderWay { shard } => self.alter(ShardId(shard), false),
            Fault::AlteredHalfway { shard } => self.alter(ShardId(shard), true),
            Fault::LettersFull { lasting } => self.letters.full(self.now + lasting),
            Fault::LettersMissing { lasting } => self.letters.missing(self.now + lasting),
            Fault::AcksLost { lasting } => self.acks_lost_until = self.now + lasting,
        }
    }

    pub(super) fn make_anew(&mut self) {
        self.truth.removed_all();
        let created = Timestamp(self.stream.created().0 + 1_000_000_000);
        self.stream.make_anew(created);
        self.serve_stream();
    }

    /// Everything is stopped, until nothing that was under way can arrive any more; then the ledger is set back.
    fn stop_everything(&mut self, to: Revision) {
        let under_way = self.scenario.horizon() + Duration::from_secs(2);
        self.closed_until = self.now + under_way + Duration::from_millis(100);
        for process in 0..self.scenario.processes {
            self.crash(process, Duration::from_millis(200));
        }
        self.agenda.put(self.now + under_way, Due::Restore(to));
    }

    pub(super) fn restore_ledger(&mut self, to: Revision) {
        self.restored = true;
        self.lurking.retain(|lurking| !matches!(lurking, Lurking::Write { .. }));
        self.bucket.restore(to);
        self.order.ledger_restored();
        self.note(Happening::Fault(format!("the ledger is as it was at {}", to.0)));
        for shard in 0..self.scenario.shards {
            let shard = ShardId(shard);
            let entry = self.bucket.entry(shard).cloned();
            let record = entry.as_ref().and_then(|entry| Record::decode(&entry.record).ok());
            if let (Some(entry), Some(record)) = (entry, &record) {
                self.note_record(u32::MAX, shard, entry.revision.0, record);
            }
            self.intents.replaced(self.now, shard, record);
        }
        let last = self.bucket.last();
        self.revisions.push((self.now, last));
        let tables = &self.scenario.tables;
        for fact in self.truth.all_mut() {
            fact.may_be_both |= fact.letters > 0;
            // What is in a table that cannot be read back may be stored again.
            let weak = tables[fact.table as usize].level != Level::ExactlyOnce;
            if weak && fact.landed > 0 {
                fact.spare = 1;
            }
        }
    }

    /// Sequences used again have stopped a shard: somebody gives it a new start.
    pub(super) fn rebase(&mut self, shard: u32) {
        let of = ShardId(shard);
        let stopped: Vec<u32> =
            self.processes.iter().filter(|p| p.up && p.reused.contains(&of)).map(|p| p.id).collect();
        let Some(stored) = self.intents.current(of).cloned() else { return };
        if !self.broker_up || stopped.is_empty() {
            return;
        }
        let last = self.stream.last();
        let floor = match self.chance.below(3) {
            0 => Place { seq: Seq(self.stream.look_at_stream().first.0 - 1), stored_at: Timestamp(0) },
            1 => Place { seq: self.tail_kept, stored_at: Timestamp(0) },
            _ => last,
        };
        // The tail may have been lost again, or the record is well by now: then a new start does nothing.
        if stored.rebased == 0 {
            let writer = Writer { session: Session(u64::MAX), nonce: 0 };
            let record = Record {
                version: Record::VERSION,
                stream_created: self.stream.created(),
                epoch: stored.epoch + 1,
                writer,
                rebased: stored.rebased + 1,
                floor: floor.seq,
                high: floor,
                lanes: BTreeMap::new(),
            };
            let expected = self.bucket.entry(of).map_or(Revision(0), |entry| entry.revision);
            let attempt = Attempt(0);
            let write = ledger::Command::Write { attempt, shard: of, expected, record: record.encode() };
            let _ = self.bucket.handle(&write);
            self.marks.hit(Mark::Rebased);
            let revision = self.bucket.last();
            self.revisions.push((self.now, revision));
            self.note_record(u32::MAX, of, revision.0, &record);
            self.intents.replaced(self.now, of, Some(record));
            let created = self.stream.created();
            for fact in self.truth.all_mut().filter(|fact| fact.shard == shard && fact.created == created) {
                if fact.seq <= floor.seq {
                    // Not taken, if it is not done: somebody said so.
                    fact.gone |= !fact.is_done();
                } else if fact.is_done() || fact.seq <= self.tail_kept {
                    // In its table, or on its way there; it is taken again.
                    fact.spare = 1;
                    fact.may_be_both = true;
                }
            }
        }
        if self.scenario.sharing.is_some() && self.chance.permille(500) {
            self.ask_all(&claims::Event::Resume(of));
            return;
        }
        for process in stopped {
            self.crash(process, Duration::from_millis(200));
        }
    }

    /// A row of an insert that is on its way ceases to fit its table. The insert's fate is not known to its sender:
    /// it takes long, or (`halfway`) has left some of its parts.
    pub(super) fn alter(&mut self, shard: ShardId, halfway: bool) {
        let fits = |insert: &&Insert| {
            let parts = self.store.parts_of(insert);
            let flight = self
                .flights
                .iter()
                .find(|((_, _, of, attempt), _)| (*of, *attempt) == (shard, insert.attempt));
            insert.shard == shard
                && flight.is_some()
                && insert.rows.len() > 1
                && insert.target.level == Level::ExactlyOnce
                && (parts > 1 || !halfway)
        };
        let Some(insert) = self.store.running().find(fits).cloned() else {
            // Not now: when the next one is on its way.
            let again = self.now + Duration::from_millis(20);
            if !self.quiet {
                self.agenda.put(again, Due::Alter { shard, halfway });
            }
            return;
        };
        let rows: Vec<Row> = if halfway {
            let parts = self.store.parts_of(&insert) as u64;
            let landed = usize::try_from(self.chance.between(1, parts - 1)).unwrap_or(1);
            self.store.fail_at(self.now, shard, insert.attempt, landed)
        } else {
            self.store.linger(shard, Scenario::INSERT_LIFE * 2 / 3);
            let flight =
                self.flights.keys().find(|flight| (flight.2, flight.3) == (shard, insert.attempt)).copied();
            if let Some(flight) = flight {
                self.flights.remove(&flight);
                self.answer_insert(flight, insert.table.clone(), doubt("the connection broke"));
            }
            insert.rows.to_vec()
        };
        if !rows.is_empty() {
            let at = usize::try_from(self.chance.below(rows.len() as u64)).unwrap_or(0);
            let until = if self.chance.permille(700) {
                Duration::MAX
            } else {
                self.now + self.chance.millis(500, 9_000)
            };
            let number = number_of(&rows[at].payload);
            self.store.refuse(number, Unfit { from: self.now, until });
            self.note(Happening::Fault(format!("row {} does not fit its table any more", rows[at].seq)));
        }
        self.serve_store();
    }

    pub(super) fn unpin(&mut self, shard: ShardId) {
        if self.broker_up {
            // Whoever had it may not know yet.
            let _ = self.stream.unpin(self.now, shard);
            self.serve_stream();
        }
    }

    pub(super) fn purge_under_way(&mut self, shard: ShardId, down: Duration) {
        let here = self.stream.rows_of(shard);
        let fits = |insert: &&Insert| {
            insert.shard == shard
                && insert.rows.len() > 1
                && insert.rows.iter().all(|row| here.contains(&row.seq))
        };
        let Some(insert) = self.store.running().find(fits).cloned() else {
            // Not now: when the next one is on its way.
            let again = self.now + Duration::from_millis(20);
            if !self.quiet {
                self.agenda.put(again, Due::PurgeUnderWay { shard, down });
            }
            return;
        };
        let gone: Vec<Seq> = insert.rows.iter().map(|row| row.seq).take(insert.rows.len() / 2).collect();
        self.store.linger(shard, Scenario::INSERT_LIFE / 2);
        self.stream.remove(&gone);
        self.truth.removed(self.stream.created(), &gone);
        self.note(Happening::Removed { why: "somebody", seqs: gone.iter().map(|seq| seq.0).collect() });
        if let Some((holder, _)) = self.stream.holder(shard) {
            self.crash(holder.process, down);
        }
    }

    pub(super) fn all_disturbed(&mut self) {
        for shard in 0..self.scenario.shards {
            self.resyncs.disturbed(self.now, ShardId(shard));
        }
    }

    pub(super) fn set_back_unseen(&mut self, shard: ShardId, by: u64) {
        if !self.broker_up {
            return;
        }
        let (first, rows) = self.stream.delivered(shard);
        let Some(first) = first else { return };
        // Known and not closed: where rows of this numbering have left the stream, others are missed.
        let last = self.stream.position(shard);
        let here = self.stream.rows_of(shard).into_iter().filter(|seq| (first..last).contains(seq));
        if here.count() != rows {
            return;
        }
        self.resyncs.disturbed(self.now, shard);
        self.stream.set_back(shard, Seq(first.0.saturating_sub(by).max(1)));
        self.stream.deliver_to_nobody(self.now, shard, rows);
        self.serve_stream();
    }

    pub(super) fn cut_unseen(&mut self, shard: ShardId, lasting: Duration) {
        let Some((holder, _)) = self.stream.holder(shard) else { return };
        let Some(owner) = self.processes.get_mut(holder.process as usize) else { return };
        if !self.broker_up || !owner.up || !owner.connected || owner.client_of(shard) != holder {
            return;
        }
        let until = self.now + lasting;
        let clients = owner.clients();
        owner.link += 1;
        owner.connected = false;
        let (process, start, link) = (owner.id, owner.start, owner.link);
        self.disturbed(process, until);
        self.all_disturbed();
        let floor = self.intents.current(shard).map_or(Seq::ZERO, |record| record.floor);
        let (_, rows) = self.stream.delivered(shard);
        self.stream.set_back(shard, floor.next());
        self.stream.deliver_to_nobody(self.now, shard, rows);
        for client in clients {
            self.stream.disconnect(self.now, client);
            self.part_members(client);
        }
        self.serve_stream();
        self.agenda.put(until, Due::LinkUp { process, start, link });
    }

    pub(super) fn start(&mut self, process: u32) {
        if self.processes[process as usize].up {
            return;
        }
        if self.quiet && self.scenario.twin() == Some(process) {
            return;
        }
        if self.now < self.closed_until {
            self.agenda.put(self.closed_until, Due::Start { process });
            return;
        }
        let session = Session(self.chance.below(u64::MAX));
        let owner = &mut self.processes[process as usize];
        owner.begin(&self.scenario, self.now, session);
        let client = owner.client();
        self.sessions.insert((process, client.start), session);
        self.note(Happening::Process { process, what: "starts" });
        self.processes[process as usize].connected = self.broker_up;
        self.disturbed(process, self.now);
        self.join(process);
        self.hand_trim(process, trim::Event::Wakeup);
    }

    pub(super) fn down(&mut self, process: u32, lasting: Duration) {
        let noticed = self.chance.millis(0, 20);
        self.goes(process, lasting, noticed);
    }

    /// A process is gone; the servers notice after a while.
    fn goes(&mut self, process: u32, lasting: Duration, noticed: Duration) {
        let owner = &mut self.processes[process as usize];
        let clients = owner.clients();
        owner.up = false;
        owner.frozen_until = None;
        owner.waiting.clear();
        owner.stopping = None;
        let noticed = self.now + noticed;
        for client in clients {
            self.agenda.put(noticed, Due::Noticed(client));
        }
        let again = self.now + lasting;
        self.agenda.put(again, Due::Start { process });
    }

    pub(super) fn crash(&mut self, process: u32, down: Duration) {
        if self.processes[process as usize].up {
            self.note(Happening::Process { process, what: "is killed" });
            self.down(process, down);
        }
    }

    pub(super) fn freeze(&mut self, process: u32, lasting: Duration) {
        let until = self.now + lasting;
        let owner = &mut self.processes[process as usize];
        if !owner.up {
            return;
        }
        owner.frozen_until = Some(owner.frozen_until.unwrap_or_default().max(until));
        let start = owner.start;
        self.note(Happening::Process { process, what: "is frozen" });
        self.disturbed(process, until);
        self.agenda.put(until, Due::Thaw { process, start });
    }

    pub(super) fn thaw(&mut self, process: u32, start: u32) {
        let owner = &mut self.processes[process as usize];
        if owner.start != start || !owner.up {
            return;
        }
        if let Some((of, lasting)) = owner.frozen_after.take()
            && of == start
        {
            self.freeze(process, lasting);
            return;
        }
        if owner.frozen_until.is_none_or(|until| until > self.now) {
            return;
        }
        owner.frozen_until = None;
        owner.running_since = self.now;
        let dead = owner.member.clone();
        let sharing =
            self.processes.iter().filter(|other| other.up).filter_map(|other| other.sharing.as_ref());
        if sharing.into_iter().any(|sharing| sharing.view.takes_for_gone(&dead)) {
            self.marks.hit(Mark::ThawedGone);
        }
        let owner = &mut self.processes[process as usize];
        let waiting = std::mem::take(&mut owner.waiting);
        self.note(Happening::Process { process, what: "thaws" });
        for (life, what) in waiting {
            if self.violation.is_some() {
                return;
            }
            self.local(process, life, what);
        }
    }

    pub(super) fn stop(&mut self, process: u32, within: Duration, down: Duration) {
        let owner = &mut self.processes[process as usize];
        if !owner.up || owner.stopping.is_some() || owner.frozen_until.is_some() {
            return;
        }
        let deadline = self.now + owner.lasts(within);
        owner.stopping = Some((down, deadline));
        let (start, shares) = (owner.start, owner.sharing.is_some());
        self.note(Happening::Process { process, what: "is to stop" });
        let overdue = Due::Overdue { process, start, shard: None };
        self.agenda.put(deadline + Duration::from_secs(5), overdue);
        if shares {
            self.hand_claims(process, claims::Event::Stop { within });
            return;
        }
        for shard in (0..self.scenario.shards).map(ShardId) {
            let owner = &mut self.processes[process as usize];
            if !owner.up || owner.start != start {
                return;
            }
            let Some(slot) = owner.slots.get_mut(&shard) else { continue };
            if slot.phase == "taking over" {
                self.marks.hit(Mark::StoppedFencing);
            }
            slot.stopping = Some(Handover::new(deadline, slot.machine.status().accepted));
            self.hand(process, shard, Event::Stop { within });
        }
    }

    /// The way to the members' bucket is cut. (A connection that breaks is both's.)
    fn cut_members(&mut self, process: u32, how: Cut, lasting: Duration) {
        let until = self.now + lasting;
        let owner = &mut self.processes[process as usize];
        if matches!(how, Cut::Held | Cut::HeldInwards) {
            owner.members_inwards_held = owner.members_inwards_held.max(until);
        }
        if matches!(how, Cut::Held | Cut::HeldOutwards) {
            owner.members_outwards_held = owner.members_outwards_held.max(until);
        }
    }

    pub(super) fn cut_nats(&mut self, process: u32, how: Cut, lasting: Duration) {
        let until = self.now + lasting;
        self.disturbed(process, until);
        self.all_disturbed();
        let owner = &mut self.processes[process as usize];
        match how {
            Cut::Held => {
                owner.inwards_held = owner.inwards_held.max(until);
                owner.outwards_held = owner.outwards_held.max(until);
            }
            Cut::HeldInwards => owner.inwards_held = owner.inwards_held.max(until),
            Cut::HeldOutwards => owner.outwards_held = owner.outwards_held.max(until),
            Cut::Broken => {
                if !owner.up {
                    return;
                }
                let old = owner.clients();
                owner.link += 1;
                owner.connected = false;
                let (start, link) = (owner.start, owner.link);
                let noticed = self.now + self.chance.time(Duration::ZERO, lasting * 2);
                for old in old {
                    self.agenda.put(noticed, Due::Noticed(old));
                }
                self.agenda.put(until, Due::LinkUp { process, start, link });
            }
        }
    }

    pub(super) fn set_share(&mut self, process: u32, share: Share) {
        let owner = &mut self.processes[process as usize];
        if !owner.up || owner.frozen_until.is_some() {
            return;
        }
        owner.share = share;
        // Where shards are shared out, so is the budget.
        if owner.sharing.is_some() {
            return;
        }
        let start = owner.start;
        for shard in (0..self.scenario.shards).map(ShardId) {
            let owner = &mut self.processes[process as usize];
            if !owner.up || owner.start != start {
                return;
            }
            let Some(slot) = owner.slots.get(&shard) else { continue };
            if slot.machine.status().held_rows > share.rows {
                self.marks.hit(Mark::ShareShrank);
            }
            self.hand(process, shard, Event::Share(share));
        }
    }

    pub(super) fn broker_falls(&mut self, down: Duration, forgotten: usize) {
        if !self.broker_up {
            return;
        }
        self.broker_up = false;
        self.all_disturbed();
        self.stream.restart(forgotten);
        self.members.restart();
        for process in &self.processes {
            self.lives.connected(self.now, process.member.clone(), false);
        }
        let until = self.now + down + Duration::from_secs(1);
        for process in 0..self.scenario.processes {
            self.disturbed(process, until);
            let owner = &mut self.processes[process as usize];
            owner.link += 1;
            owner.connected = false;
        }
        let at = self.now + down;
        self.agenda.put(at, Due::BrokerUp);
    }

    pub(super) fn broker_returns(&mut self) {
        self.broker_up = true;
        self.note(Happening::Fault("over: the server is back".to_owned()));
        for process in 0..self.scenario.processes {
            let at = self.now + self.chance.millis(5, 600);
            let Process { start, link, .. } = self.processes[process as usize];
            self.agenda.put(at, Due::LinkUp { process, start, link });
        }
    }
}
