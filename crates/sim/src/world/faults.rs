//! What goes wrong, as it happens.

use std::time::Duration;

use holdfast_core::action::Event;
use holdfast_core::budget::Share;
use holdfast_core::ports::Attempt;
use holdfast_core::ports::delivery;
use holdfast_core::ports::delivery::Inbox;
use holdfast_core::ports::store::Insert;
use holdfast_core::record::Session;
use holdfast_core::row::Seq;
use holdfast_core::row::ShardId;
use holdfast_core::time::Timestamp;
use holdfast_core::trim;

use crate::fault::Cut;
use crate::fault::Fault;
use crate::invariants::handover::Handover;
use crate::jetstream::Client;
use crate::marks::Mark;
use crate::process::Process;
use crate::scenario::Scenario;
use crate::trace::Happening;

use super::{Due, World};

impl World {
    pub(super) fn fault(&mut self, at: usize) {
        let fault = self.scenario.faults[at].1.clone();
        self.faults += 1;
        self.note(Happening::Fault(fault.to_string()));
        match fault {
            Fault::Crash { process, down } => self.crash(process, down),
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
            Fault::CutNats { process, how, lasting } => self.cut_nats(process, how, lasting),
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
                self.serve_stream();
            }
            Fault::StreamAnew => {
                self.truth.removed_all();
                let created = Timestamp(self.stream.created().0 + 1_000_000_000);
                self.stream.make_anew(created);
                self.anew_at = self.now;
                self.serve_stream();
            }
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
        }
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
        self.stream.deliver_to_nobody(shard, rows);
        self.serve_stream();
    }

    pub(super) fn cut_unseen(&mut self, shard: ShardId, lasting: Duration) {
        let Some((holder, _)) = self.stream.holder(shard) else { return };
        let Some(owner) = self.processes.get_mut(holder.process as usize) else { return };
        if !self.broker_up || !owner.up || !owner.connected || owner.client() != holder {
            return;
        }
        let until = self.now + lasting;
        owner.link += 1;
        owner.connected = false;
        let (process, start, link) = (owner.id, owner.start, owner.link);
        self.disturbed(process, until);
        self.all_disturbed();
        let floor = self.intents.current(shard).map_or(Seq::ZERO, |record| record.floor);
        let (_, rows) = self.stream.delivered(shard);
        self.stream.set_back(shard, floor.next());
        self.stream.deliver_to_nobody(shard, rows);
        self.stream.disconnect(self.now, holder);
        self.serve_stream();
        self.agenda.put(until, Due::LinkUp { process, start, link });
    }

    pub(super) fn start(&mut self, process: u32) {
        if self.processes[process as usize].up {
            return;
        }
        let session = Session(self.chance.below(u64::MAX));
        let owner = &mut self.processes[process as usize];
        owner.begin(&self.scenario, self.now, session);
        let client = owner.client();
        self.sessions.insert((process, client.start), session);
        self.note(Happening::Process { process, what: "starts" });
        if self.broker_up {
            self.stream.connect(client, vec![Inbox(0); self.scenario.shards as usize]);
        } else {
            self.processes[process as usize].connected = false;
        }
        let until = self.now;
        self.disturbed(process, until);
        for shard in 0..self.scenario.shards {
            let share = self.processes[process as usize].share;
            self.hand(process, ShardId(shard), Event::Claim(share));
        }
        self.hand_trim(process, trim::Event::Wakeup);
    }

    pub(super) fn down(&mut self, process: u32, lasting: Duration) {
        let owner = &mut self.processes[process as usize];
        let client = owner.client();
        owner.up = false;
        owner.frozen_until = None;
        owner.waiting.clear();
        owner.stopping = None;
        let noticed = self.now + self.chance.millis(0, 20);
        self.agenda.put(noticed, Due::Noticed(client));
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
        let waiting = std::mem::take(&mut owner.waiting);
        self.note(Happening::Process { process, what: "thaws" });
        for what in waiting {
            if self.violation.is_some() {
                return;
            }
            self.local(process, start, what);
        }
    }

    pub(super) fn stop(&mut self, process: u32, within: Duration, down: Duration) {
        let owner = &mut self.processes[process as usize];
        if !owner.up || owner.stopping.is_some() || owner.frozen_until.is_some() {
            return;
        }
        owner.stopping = Some(down);
        let start = owner.start;
        let deadline = self.now + owner.lasts(within);
        self.note(Happening::Process { process, what: "is to stop" });
        for shard in 0..self.scenario.shards {
            let owner = &mut self.processes[process as usize];
            if !owner.up || owner.start != start {
                return;
            }
            let slot = &mut owner.slots[shard as usize];
            if slot.phase == "taking over" {
                self.marks.hit(Mark::StoppedFencing);
            }
            slot.stopping = Some(Handover::new(deadline, slot.machine.status().accepted));
            self.hand(process, ShardId(shard), Event::Stop { within });
        }
        self.agenda.put(deadline + Duration::from_secs(5), Due::Overdue { process, start });
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
                let old = owner.client();
                owner.link += 1;
                owner.connected = false;
                let (start, link) = (owner.start, owner.link);
                let noticed = self.now + self.chance.time(Duration::ZERO, lasting * 2);
                self.agenda.put(noticed, Due::Noticed(old));
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
        let start = owner.start;
        for shard in 0..self.scenario.shards {
            let owner = &mut self.processes[process as usize];
            if !owner.up || owner.start != start {
                return;
            }
            if owner.slots[shard as usize].machine.status().held_rows > share.rows {
                self.marks.hit(Mark::ShareShrank);
            }
            self.hand(process, ShardId(shard), Event::Share(share));
        }
    }

    pub(super) fn broker_falls(&mut self, down: Duration, forgotten: usize) {
        if !self.broker_up {
            return;
        }
        self.broker_up = false;
        self.all_disturbed();
        self.stream.restart(forgotten);
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
