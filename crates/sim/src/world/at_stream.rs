//! The stream's server in the world: commands arrive, rows and answers leave.

use std::time::Duration;

use holdfast_core::ports::Attempt;
use holdfast_core::ports::Failure;
use holdfast_core::ports::FailureClass;
use holdfast_core::ports::delivery;
use holdfast_core::ports::delivery::Inbox;
use holdfast_core::ports::delivery::PullEnd;
use holdfast_core::ports::delivery::Rows;
use holdfast_core::ports::retention;
use holdfast_core::row::ShardId;
use holdfast_core::row::{Delivery, Seq, Unfit, Verdict};
use holdfast_core::time::Timestamp;

use crate::invariants::pin;
use crate::invariants::trim as trimmed;
use crate::invariants::violated;
use crate::jetstream;
use crate::jetstream::Client;
use crate::jetstream::Message;
use crate::jetstream::Outgoing;
use crate::jetstream::PinChange;
use crate::marks::Mark;
use crate::process::Local;
use crate::process::OpenPull;
use crate::scenario::{Fit, Scenario};
use crate::trace::{Happening, Seqs};
use crate::truth::Fact;

use super::wires::Way;
use super::{Due, Lurking, World, table_name, unanswered, unanswered_instead_of, unanswered_stream};

impl World {
    pub(super) fn send_delivery(&mut self, process: u32, shard: ShardId, command: delivery::Command) {
        let owner = &mut self.processes[process as usize];
        let client = owner.client_of(shard);
        let connected = owner.connected;
        let Some(slot) = owner.slots.get_mut(&shard) else { return };
        match command {
            delivery::Command::Pull(pull) => {
                let open = OpenPull { inbox: pull.inbox, batch: pull.batch, got: 0 };
                slot.pulls.insert(pull.attempt, open);
                if !connected {
                    if self.chance.permille(500) {
                        let failure = Failure::new(FailureClass::Unavailable, "not connected");
                        let (attempt, end) = (pull.attempt, PullEnd::Failed(failure));
                        let at = self.now + Duration::from_micros(50);
                        self.put_local(
                            at,
                            process,
                            client.start,
                            Local::Ended { client, shard, attempt, end },
                        );
                    }
                    return;
                }
                if self.chance.permille(self.rates.pull_lost) {
                    let until = self.now + pull.expires + Duration::from_secs(2);
                    self.disturbed(process, until);
                    return;
                }
                let at = self.outwards(process, Way::Ordered);
                let command = delivery::Command::Pull(pull);
                self.agenda.put(at, Due::AtStream { from: client, shard, command, reply_by: None });
            }
            delivery::Command::Close { inbox } => {
                self.close_inboxes(process, shard, inbox);
                if connected {
                    let at = self.outwards(process, Way::Ordered);
                    let command = delivery::Command::Close { inbox };
                    self.agenda.put(at, Due::AtStream { from: client, shard, command, reply_by: None });
                }
            }
            delivery::Command::Reset { attempt, inbox, from } => {
                slot.reset_sent = attempt;
                self.close_inboxes(process, shard, Inbox(inbox.0.saturating_sub(1)));
                if connected {
                    // The UNSUBs leave before the request.
                    let at = self.outwards(process, Way::Ordered);
                    let command = delivery::Command::Close { inbox: Inbox(inbox.0.saturating_sub(1)) };
                    self.agenda.put(at, Due::AtStream { from: client, shard, command, reply_by: None });
                }
                self.call_stream(client, shard, delivery::Command::Reset { attempt, inbox, from });
            }
            delivery::Command::Ack { rows } => self.send_acks(process, shard, rows),
            command @ delivery::Command::Inspect { .. } => self.call_stream(client, shard, command),
            delivery::Command::Unpin { attempt } => {
                let known = |pin: &Option<delivery::PinId>| self.pins.knows(process, shard, pin.as_ref());
                if !known(&slot.pin) && !known(&slot.orphan) {
                    self.blind_unpins.insert((process, client.start, shard, attempt));
                }
                self.call_stream(client, shard, delivery::Command::Unpin { attempt });
            }
        }
    }

    fn send_acks(&mut self, process: u32, shard: ShardId, rows: Vec<(Seq, Delivery)>) {
        let client = self.processes[process as usize].client_of(shard);
        let record = self.intents.current(shard);
        let created = record.map_or(self.stream.created(), |record| record.stream_created);
        let seqs: Vec<Seq> = rows.iter().map(|(seq, _)| *seq).collect();
        // (An owner that does not know yet that the stream lost its tail takes other rows for those of its batch.)
        if !self.causes.tail_lost {
            let intents = &self.intents;
            let checked =
                trimmed::acknowledged(&self.truth, created, &seqs, |shard| intents.current(ShardId(shard)));
            self.check(checked);
        }
        let lost = !self.processes[process as usize].connected
            || self.now < self.acks_lost_until
            || self.chance.permille(self.rates.ack_lost);
        if lost {
            self.acks_lost.extend(seqs.into_iter().map(|seq| (shard, seq)));
            return;
        }
        let mut at = self.outwards(process, Way::Ordered);
        if self.chance.permille(self.rates.ack_late) {
            at += self.chance.millis(50, 8_000);
        }
        self.agenda.put(at, Due::AtAcks { from: client, shard, created, rows });
    }

    pub(super) fn close_inboxes(&mut self, process: u32, shard: ShardId, inbox: Inbox) {
        let owner = &mut self.processes[process as usize];
        let client = owner.client_of(shard);
        let Some(slot) = owner.slots.get_mut(&shard) else { return };
        slot.closed = slot.closed.max(inbox);
        let closed: Vec<Attempt> =
            slot.pulls.iter().filter(|(_, pull)| pull.inbox <= inbox).map(|(attempt, _)| *attempt).collect();
        for attempt in closed {
            let at = self.now + Duration::from_micros(20);
            let end = PullEnd::Closed;
            self.put_local(at, process, client.start, Local::Ended { client, shard, attempt, end });
        }
    }

    pub(super) fn call_stream(&mut self, client: Client, shard: ShardId, command: delivery::Command) {
        let Some(reply) = unanswered_stream(&command) else { return };
        let unanswered = Local::Delivery { client: None, shard, reply };
        if let Some((at, reply_by)) = self.request(client, unanswered) {
            let Some(slot) = self.processes[client.process as usize].slot_of(client, shard) else { return };
            let epoch = slot.epoch;
            let astray = slot.reset_at.is_some() && self.astray.contains(&shard);
            if matches!(command, delivery::Command::Reset { .. }) && (astray || reply_by.is_none()) {
                if astray {
                    self.astray.remove(&shard);
                    let unpinned = self.now + Duration::from_millis(300);
                    let then = if self.anew_astray.remove(&shard) { Due::Anew } else { Due::Unpin(shard) };
                    self.agenda.put(unpinned, then);
                }
                self.no_answer(
                    client,
                    reply_by,
                    unanswered_stream(&command).map(|reply| Local::Delivery { client: None, shard, reply }),
                );
                self.lurking.push(Lurking::Reset { from: client, epoch, shard, command });
                let end = at + Duration::from_secs(10);
                self.agenda.put(end, Due::EndLurking);
                return;
            }
            self.agenda.put(at, Due::AtStream { from: client, shard, command, reply_by });
        }
    }

    pub(super) fn answer_stream(
        &mut self,
        to: Client,
        shard: ShardId,
        reply: delivery::Reply,
        reply_by: Option<Duration>,
    ) {
        let unanswered = unanswered_instead_of(&reply).unwrap_or_else(|| reply.clone());
        let unanswered = Local::Delivery { client: None, shard, reply: unanswered };
        self.answer(to, reply_by, Local::Delivery { client: Some(to), shard, reply }, unanswered);
    }

    /// The server has no answer: the caller waits until its time is up.
    pub(super) fn no_answer(&mut self, to: Client, reply_by: Option<Duration>, unanswered: Option<Local>) {
        if let (Some(reply_by), Some(unanswered)) = (reply_by, unanswered) {
            self.disturbed(to.process, reply_by);
            self.put_local(reply_by, to.process, to.start, unanswered);
        }
    }

    /// Lets those arrive that waited for this moment.
    pub(super) fn let_arrive(&mut self, behind: Option<(u32, Option<u64>)>, of: ShardId) {
        let (arriving, lurking) = std::mem::take(&mut self.lurking).into_iter().partition(|one| match one {
            Lurking::Reset { from, epoch, shard, .. } => {
                *shard == of && behind.is_some_and(|behind| behind != (from.process, *epoch))
            }
            Lurking::Write { shard, .. } => behind.is_none() && *shard == of,
        });
        self.lurking = lurking;
        for one in Vec::<Lurking>::into_iter(arriving) {
            let at = self.now + self.chance.time(Duration::ZERO, self.scenario.latency);
            self.agenda.put(at, one.due());
        }
    }

    pub(super) fn at_stream(
        &mut self,
        from: Client,
        shard: ShardId,
        command: delivery::Command,
        reply_by: Option<Duration>,
    ) {
        let unanswered =
            unanswered_stream(&command).map(|reply| Local::Delivery { client: None, shard, reply });
        if !self.broker_up {
            self.no_answer(from, reply_by, unanswered);
            return;
        }
        match &command {
            delivery::Command::Inspect { attempt, row, above } => {
                // Three questions, of which the consumer's comes last; the world goes on in between.
                let seen = Box::new(self.stream.look_at_stream());
                let at = self.now + self.latency();
                let (attempt, row, above) = (*attempt, *row, *above);
                self.agenda.put(at, Due::AtRows { from, shard, attempt, row, above, seen, reply_by });
                return;
            }
            delivery::Command::Reset { from: seq, attempt, .. } => {
                self.note(Happening::Asked {
                    process: from.process,
                    shard: shard.0,
                    what: format!("resets to {seq}"),
                });
                if reply_by.is_none() {
                    self.marks.hit(Mark::LateReset);
                }
                // An owner's last reset, in time, is what a resync is; any other one disturbs it.
                let slot = self.processes[from.process as usize].slot_of(from, shard);
                let last = slot.is_some_and(|slot| slot.reset_sent == *attempt);
                let holds = self.stream.holder(shard).is_some_and(|(holder, _)| holder == from);
                if reply_by.is_none() || !holds || !last {
                    self.resyncs.disturbed(self.now, shard);
                }
                if self.stream.holder(shard).is_some_and(|(holder, _)| holder.process != from.process) {
                    self.marks.hit(Mark::ResetByOther);
                }
            }
            delivery::Command::Unpin { attempt } => {
                self.note(Happening::Asked {
                    process: from.process,
                    shard: shard.0,
                    what: "unpins".to_owned(),
                });
                let other =
                    self.stream.holder(shard).is_some_and(|(holder, _)| holder.process != from.process);
                if other {
                    self.marks.hit(Mark::UnpinRaced);
                }
                if other && self.blind_unpins.contains(&(from.process, from.start, shard, *attempt)) {
                    let how =
                        format!("p{} took another's pin of {shard} without having looked", from.process);
                    self.check(violated(pin::NAME, how));
                }
            }
            delivery::Command::Pull(_) | delivery::Command::Close { .. } | delivery::Command::Ack { .. } => {}
        }
        if matches!(command, delivery::Command::Reset { .. }) {
            let slot = self.processes[from.process as usize].slot_of(from, shard);
            self.let_arrive(Some((from.process, slot.and_then(|slot| slot.epoch))), shard);
        }
        let reply = self.stream.handle(self.now, from, shard, command);
        if let Some(reply) = reply {
            self.answer_stream(from, shard, reply, reply_by);
        } else {
            // A consumer that is not there does not answer a reset.
            self.no_answer(from, reply_by, unanswered);
        }
        self.serve_stream();
    }

    pub(super) fn acks_arrive(
        &mut self,
        from: Client,
        shard: ShardId,
        created: Timestamp,
        rows: &[(Seq, Delivery)],
    ) {
        // Known and not closed: an acknowledgement names a stream by its name alone. One that comes late may hit a row
        // of another stream of that name.
        if !self.broker_up || created != self.stream.created() {
            return;
        }
        let counted: Vec<Seq> =
            rows.iter().map(|(seq, _)| *seq).filter(|seq| self.stream.ack(shard, *seq)).collect();
        let numbers: Vec<u64> = counted.iter().map(|seq| seq.0).collect();
        if counted.is_empty() {
            return;
        }
        self.note(Happening::Asked {
            process: from.process,
            shard: shard.0,
            what: format!("acknowledges {}", Seqs(&numbers)),
        });
        if self.scenario.policy.acks == delivery::Acks::WorkQueue {
            let intents = &self.intents;
            let checked = trimmed::acknowledged(&self.truth, created, &counted, |shard| {
                intents.current(ShardId(shard))
            });
            self.check(checked);
        }
        self.stream.handle(self.now, from, shard, delivery::Command::Ack { rows: Vec::new() });
        self.serve_stream();
    }

    /// Carries away what the stream's server wants sent, and looks at its pins.
    pub(super) fn serve_stream(&mut self) {
        for change in self.stream.take_pin_changes() {
            match change {
                PinChange::Taken { shard, by, .. } => {
                    self.note(Happening::Pin { shard: shard.0, process: by.process, what: "is given" });
                }
                PinChange::Lapsed { shard, of, pin } => {
                    self.marks.hit(Mark::PinLapsed);
                    self.note(Happening::Pin { shard: shard.0, process: of.process, what: "lapses" });
                    let owner = &self.processes[of.process as usize];
                    let slot = owner.slot_of(of, shard);
                    let owns = owner.up
                        && owner.frozen_until.is_none()
                        && slot.is_some_and(|slot| slot.machine.status().pin == Some(&pin));
                    let ttl = self.scenario.pinned_ttl;
                    let checked = self.pins.lapsed(self.now, shard, of.process, owns, ttl);
                    self.check(checked);
                }
            }
        }
        for outgoing in self.stream.take_outgoing() {
            match outgoing {
                Outgoing::Rows { to, shard, attempt, rows } => self.deliver(to, shard, attempt, rows),
                Outgoing::Ended { to, shard, attempt, end } => {
                    if self.chance.permille(self.rates.status_lost) {
                        let until = self.now + Duration::from_secs(2) + self.scenario.pinned_ttl;
                        self.disturbed(to.process, until);
                        continue;
                    }
                    let at = self.inwards(to.process, Way::Ordered);
                    self.put_local(
                        at,
                        to.process,
                        to.start,
                        Local::Ended { client: to, shard, attempt, end },
                    );
                }
            }
        }
        if let Some(due) = self.stream.next_wakeup()
            && self.stream_tick.is_none_or(|at| at > due)
        {
            self.stream_tick = Some(due);
            self.agenda.put(due.max(self.now), Due::StreamTick);
        }
    }

    pub(super) fn deliver(&mut self, to: Client, shard: ShardId, attempt: Attempt, rows: Rows) {
        let Rows { inbox, pin, mut rows } = rows;
        let planned = self.deliveries_to_lose.get(&shard).copied().unwrap_or_default();
        let before = rows.len();
        for row in rows.iter().filter(|row| row.redelivered) {
            if self.acks_lost.contains(&(shard, row.seq)) {
                self.marks.hit(Mark::AckLostAgain);
            }
            let fact = self.truth.at(self.stream.created(), row.seq);
            if fact.is_some_and(|fact| !trimmed::is_done(fact, self.intents.current(shard))) {
                self.marks.hit(Mark::RedeliveredHeld);
            }
        }
        if planned > 0 {
            let lost = rows.len().min(planned as usize);
            rows.drain(..lost);
            self.deliveries_to_lose.insert(shard, planned - u32::try_from(lost).unwrap_or(planned));
        } else if self.chance.permille(self.rates.rows_lost) {
            let chance = &mut self.chance;
            rows.retain(|_| !chance.permille(500));
        }
        let owner = &self.processes[to.process as usize];
        if !owner.up || !owner.connected || owner.client_of(shard) != to {
            // A pull of a connection that is gone took them, perhaps between a reset and its answer.
            self.resyncs.disturbed(self.now + Scenario::CALL_TIMEOUT, shard);
        }
        if rows.len() < before {
            self.marks.hit(Mark::RowsLost);
            self.resyncs.disturbed(self.now, shard);
            let until = self.now + self.scenario.pinned_ttl + Duration::from_secs(2);
            self.disturbed(to.process, until);
        }
        // What was sent in one go may arrive in pieces.
        while !rows.is_empty() {
            let piece = if self.chance.permille(100) {
                self.chance.between(1, rows.len() as u64)
            } else {
                rows.len() as u64
            };
            let piece = usize::try_from(piece).unwrap_or(1);
            let rest = rows.split_off(piece);
            let at = self.inwards(to.process, Way::Ordered);
            let rows = Rows { inbox, pin: pin.clone(), rows: std::mem::replace(&mut rows, rest) };
            self.put_local(at, to.process, to.start, Local::Rows { client: to, shard, attempt, rows });
        }
    }

    pub(super) fn publish(&mut self, at: usize) {
        if !self.broker_up {
            let again = self.now + Duration::from_millis(100);
            self.agenda.put(again, Due::Publish(at));
            return;
        }
        let plan = &self.scenario.rows[at];
        let shard = self.scenario.tables[plan.table as usize].shard;
        let number = at as u64;
        let verdict = match plan.fit {
            Fit::Good | Fit::Refused { .. } => Verdict::Good,
            Fit::Payload => Verdict::Bad(Unfit::Payload("not an object".into())),
            Fit::Subject => Verdict::Bad(Unfit::Subject("no table".into())),
        };
        let screened = verdict != Verdict::Good;
        let payload = jetstream::payload(number, plan.size);
        let message = Message {
            shard: ShardId(shard),
            table: table_name(plan.table),
            payload: payload.clone(),
            verdict,
        };
        let table = plan.table;
        let stored_at =
            Timestamp(1_700_000_000_000_000_000 + i64::try_from(self.now.as_nanos()).unwrap_or(0) + 1);
        let seq = self.stream.last().seq.next();
        let created = self.stream.created();
        self.truth.published(Fact {
            number,
            table,
            shard,
            created,
            seq,
            stored_at,
            published_at: self.now,
            screened,
            payload,
            landed: 0,
            letters: 0,
            spare: 0,
            may_be_both: false,
            gone: false,
        });
        self.note(Happening::Published { row: number, table, shard, seq: seq.0 });
        self.stream.publish(self.now, message, stored_at);
        self.serve_stream();
    }

    pub(super) fn send_retention(&mut self, process: u32, command: retention::Command) {
        let retention::Command::Trim { attempt, .. } = command;
        let client = self.processes[process as usize].client();
        let outcome = Err(unanswered());
        let unanswered = Local::Retention(retention::Reply::Trimmed { attempt, outcome });
        if let Some((at, reply_by)) = self.request(client, unanswered) {
            self.agenda.put(at, Due::AtRetention { from: client, command, reply_by });
        }
    }

    pub(super) fn at_retention(
        &mut self,
        from: Client,
        command: &retention::Command,
        reply_by: Option<Duration>,
    ) {
        let retention::Command::Trim { attempt, .. } = *command;
        let unanswered = Local::Retention(retention::Reply::Trimmed { attempt, outcome: Err(unanswered()) });
        if !self.broker_up {
            self.no_answer(from, reply_by, Some(unanswered));
            return;
        }
        let (reply, removed) = self.stream.trim(command);
        if !removed.is_empty() {
            self.marks.hit(Mark::Trimmed);
            let created = self.stream.created();
            let intents = &self.intents;
            let checked =
                trimmed::removed(&self.truth, created, &removed, |shard| intents.current(ShardId(shard)));
            self.check(checked);
            let seqs = removed.iter().map(|seq| seq.0).collect();
            self.note(Happening::Removed { why: "a trim", seqs });
        }
        self.answer(from, reply_by, Local::Retention(reply), unanswered);
    }
}
