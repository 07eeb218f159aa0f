//! Owning a shard: from the fence to its loss or the release.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::action::Actions;
use crate::ask::Ask;
use crate::batch::Limits;
use crate::budget::{Budget, Freed, Share};
use crate::commit::{Committer, Settled, Stored};
use crate::fence::reuse;
use crate::intake::{Admission, FirstRow, Intake};
use crate::lane::{Closing, Context, Lane};
use crate::look::{RETRY, usable};
use crate::notice::{Notice, ResyncReason};
use crate::ports::delivery::{Acks, Command, Inbox, InspectError, Inspection, PinId, PullEnd, Reply, Rows};
use crate::ports::{Attempt, dead_letters, ledger, store};
use crate::pull::{Ended, Puller, Purpose};
use crate::record::Record;
use crate::release::Release;
use crate::row::{Delivery, Mark, Row, Seq, TableName};
use crate::rule::{Rule, safeguard};
use crate::shard::{Env, Next, Status};
use crate::standby::{reset_from, tell_trouble};
use crate::time::Instant;

/// The floor alone is written at most this often.
const FLOOR_INTERVAL: Duration = Duration::from_millis(200);

/// Where the shard stands with its consumer.
#[derive(Debug)]
enum Position {
    /// A reset is wanted; stream and consumer are looked at before it.
    Looking { ask: Ask, row: Mark, above: Seq, reason: ResyncReason },
    /// The reset to this row is under way.
    Resetting { ask: Ask, inbox: Inbox, first: FirstRow, reason: ResyncReason },
    /// Rows are pulled.
    Flowing,
    /// A pull ended empty: did the consumer deliver more than was seen?
    Comparing { ask: Ask, row: Mark, above: Seq },
    /// No more rows are taken.
    Closed,
}

/// One tenure.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "facts that hold or not, each by itself; the state is `position`"
)]
pub(crate) struct Tenure {
    pin: PinId,
    commit: Committer,
    intake: Intake,
    /// The inbox of the next pull; a renewal may use it before the intake does.
    inbox: Inbox,
    position: Position,
    puller: Puller,
    lanes: BTreeMap<TableName, Lane>,
    budget: Budget,
    /// Rows to acknowledge: a stored record says that they are done.
    acks: Vec<(Seq, Delivery)>,
    floor_written_at: Instant,
    /// A row waits that is larger than the room there is.
    capped: bool,
    /// A row was accepted.
    began: bool,
    /// Lanes wait for others to leave the record, which is as large as the ledger takes.
    record_full: bool,
    halting: bool,
}

impl Tenure {
    /// `first`: the row to begin with, as the look before the fence showed it.
    #[expect(clippy::too_many_arguments, reason = "what the fence leaves behind, once")]
    pub(crate) fn begin(
        env: &mut Env,
        now: Instant,
        pin: PinId,
        puller: Puller,
        commit: Committer,
        first: FirstRow,
        took: Duration,
        out: &mut Actions,
    ) -> Option<Self> {
        let Stored { record, .. } = commit.stored()?;
        env.forget_targets();
        // No attempt of an earlier tenure is sent when its proof is stale, which cannot be newer than this fence.
        let fades_at = now + env.config.stale + env.config.attempt_life;
        let lanes: BTreeMap<_, _> = record
            .lanes
            .iter()
            .map(|(table, lane)| (table.clone(), Lane::inherit(table.clone(), lane, now, fades_at)))
            .collect();
        let inherited =
            record.lanes.values().filter(|lane| lane.open.is_some() || lane.parked.is_some()).count();
        let floor = record.floor_mark();
        out.notice(Notice::TenureBegan { epoch: record.epoch, floor: floor.seq, inherited, took });
        let old = env.fresh_inbox();
        let inbox = env.fresh_inbox();
        let (position, intake_inbox) = if safeguard(Rule::ResetOnNewPin) {
            (Position::Resetting { ask: Ask::at(now), inbox, first, reason: ResyncReason::NewPin }, old)
        } else {
            (Position::Flowing, inbox)
        };
        Some(Self {
            intake: Intake::new(intake_inbox, pin.clone(), floor),
            pin,
            inbox,
            position,
            puller,
            lanes,
            budget: Budget::new(env.share),
            acks: Vec::new(),
            floor_written_at: now,
            capped: false,
            began: false,
            record_full: false,
            halting: false,
            commit,
        })
    }

    fn stored(&self) -> &Stored {
        self.commit.stored().expect("a tenure begins with its fence")
    }

    pub(crate) const fn pin(&self) -> &PinId {
        &self.pin
    }

    pub(crate) const fn is_halting(&self) -> bool {
        self.halting
    }

    pub(crate) fn set_share(&mut self, share: Share) {
        self.budget.set_share(share);
    }

    /// Takes no more rows; what was accepted is closed into batches at once.
    pub(crate) fn halt(&mut self, env: &mut Env, out: &mut Actions) {
        if self.halting {
            return;
        }
        self.halting = true;
        if safeguard(Rule::HaltStopsIntake) {
            out.delivery(Command::Close { inbox: self.inbox });
            self.puller.forget();
            self.inbox = env.fresh_inbox();
            self.position = Position::Closed;
        }
    }

    // ---- what comes in -------------------------------------------------------------------------------

    pub(crate) fn on_ledger(
        &mut self,
        env: &mut Env,
        now: Instant,
        reply: ledger::Reply,
        out: &mut Actions,
    ) -> Next {
        let settled = match reply {
            ledger::Reply::Read { attempt, outcome } => self.commit.on_read(now, attempt, outcome),
            ledger::Reply::Written { attempt, outcome } => self.commit.on_written(now, attempt, outcome),
        };
        match settled {
            Settled::Nothing | Settled::Proven => {
                tell_trouble(&self.commit, out);
                Next::Stay
            }
            Settled::Written => {
                self.on_stored(env, now);
                Next::Stay
            }
            Settled::Over(why) => self.end(why, out),
        }
    }

    fn on_stored(&mut self, env: &mut Env, now: Instant) {
        let Some(Stored { record, .. }) = self.commit.stored() else { return };
        for (table, lane) in &mut self.lanes {
            lane.on_stored(now, record.lanes.get(table), record.floor);
        }
        let floor = record.floor;
        if env.config.acks != Acks::None {
            let mut rows = Vec::new();
            for lane in self.lanes.values_mut() {
                lane.take_acknowledged(floor, &mut rows);
            }
            self.acks.append(&mut rows);
        }
        self.lanes.retain(|table, lane| {
            let rests = lane.is_at_rest(floor);
            if rests && let Some(target) = lane.proven_target() {
                env.remember(table.clone(), target.clone());
            }
            !rests
        });
    }

    pub(crate) fn on_dead_letter(
        &mut self,
        env: &mut Env,
        now: Instant,
        reply: dead_letters::Reply,
        out: &mut Actions,
    ) {
        let dead_letters::Reply::Parked { attempt, table, outcome } = reply;
        let freed = self.with_lane(env, now, out, &table, |lane, cx| lane.on_parked(attempt, outcome, cx));
        self.let_go(freed);
    }

    pub(crate) fn on_store(&mut self, env: &mut Env, now: Instant, reply: store::Reply, out: &mut Actions) {
        let (store::Reply::Inserted { table, .. }
        | store::Reply::ReadBack { table, .. }
        | store::Reply::Described { table, .. }) = &reply;
        let table = table.clone();
        let freed = self.with_lane(env, now, out, &table, |lane, cx| match reply {
            store::Reply::Inserted { attempt, outcome, .. } => lane.on_inserted(attempt, &outcome, cx),
            store::Reply::ReadBack { attempt, outcome, .. } => lane.on_read_back(attempt, outcome, cx),
            store::Reply::Described { attempt, outcome, .. } => {
                lane.on_described(attempt, outcome, cx);
                Freed::default()
            }
        });
        self.let_go(freed);
    }

    fn with_lane(
        &mut self,
        env: &mut Env,
        now: Instant,
        out: &mut Actions,
        table: &TableName,
        act: impl FnOnce(&mut Lane, &mut Context<'_>) -> Freed,
    ) -> Freed {
        let stored = self.commit.stored().expect("a tenure begins with its fence");
        let mut cx = context(stored, env, now, out);
        self.lanes.get_mut(table).map_or_else(Freed::default, |lane| act(lane, &mut cx))
    }

    fn let_go(&mut self, freed: Freed) {
        if freed.rows > 0 {
            self.capped = false;
        }
        self.budget.let_go(freed);
    }

    pub(crate) fn on_delivery(
        &mut self,
        env: &mut Env,
        now: Instant,
        reply: Reply,
        out: &mut Actions,
    ) -> Next {
        match reply {
            Reply::Rows(rows) => {
                self.on_rows(env, now, rows, out);
                Next::Stay
            }
            Reply::Ended { attempt, end } => self.on_ended(now, attempt, end, out),
            Reply::Reset { attempt, outcome } => {
                if let Position::Resetting { ask, inbox, first, reason } = &self.position
                    && ask.awaits(attempt)
                {
                    match outcome {
                        Ok(()) => {
                            self.intake.restart(*inbox, *first);
                            self.lanes.values_mut().for_each(Lane::forget_deliveries);
                            out.notice(Notice::Resynced { reason: *reason });
                            self.position = Position::Flowing;
                        }
                        // A consumer that is gone does not answer: look before asking again.
                        Err(failure) => {
                            out.notice(Notice::Waiting { what: "reset", why: failure.to_string() });
                            let reason = *reason;
                            self.resync_at(now + RETRY, reason);
                        }
                    }
                }
                Next::Stay
            }
            Reply::Inspected { attempt, outcome } => self.on_inspected(env, now, attempt, outcome, out),
            Reply::Disrupted => {
                if safeguard(Rule::DisruptionMeansResync)
                    && matches!(self.position, Position::Flowing | Position::Comparing { .. })
                {
                    self.resync_at(now, ResyncReason::Disrupted);
                }
                // A pull that was waiting at a server is gone with the connection, without a word.
                self.puller.forget();
                Next::Stay
            }
            Reply::Unpinned { .. } => Next::Stay,
        }
    }

    fn on_rows(&mut self, env: &mut Env, now: Instant, rows: Rows, out: &mut Actions) {
        let taking = matches!(self.position, Position::Flowing | Position::Comparing { .. });
        if !self.intake.listens_to(rows.inbox) || (!taking && safeguard(Rule::FreshInbox)) {
            return;
        }
        self.puller.received(rows.rows.len() as u64);
        let floor = self.stored().record.floor;
        let mut repeats = 0;
        for row in rows.rows {
            let before = self.intake.accepted();
            match self.intake.admit(rows.pin.as_ref(), &row) {
                Admission::Accept => {
                    if !std::mem::replace(&mut self.began, true) {
                        out.notice(Notice::FirstRow { seq: row.seq });
                    }
                    self.accept(env, now, row, before, floor);
                }
                Admission::Repeat => {
                    repeats += 1;
                    self.acknowledge(env, &row, floor);
                }
                Admission::Resync(reason) => {
                    self.resync_at(now, reason);
                    break;
                }
            }
        }
        if repeats > 0 {
            out.notice(Notice::Repeats { rows: repeats });
        }
    }

    fn accept(&mut self, env: &mut Env, now: Instant, row: Row, before: Mark, floor: Seq) {
        env.accepted_rows += 1;
        // Looked up by reference first: nearly every row's lane is there, and a name is shared, not copied.
        if !self.lanes.contains_key(&row.table) {
            let target = env.recall(&row.table);
            let lane = Lane::new(row.table.clone(), floor, target, now);
            self.lanes.insert(row.table.clone(), lane);
        }
        let Some(lane) = self.lanes.get_mut(&row.table) else { return };
        let mut budget = self.budget;
        budget.hold(&row);
        if env.config.acks != Acks::None {
            let (seq, delivery) = (row.seq, row.delivery);
            if seq <= lane.stored_done() || !safeguard(Rule::LedgerBeforeAck) {
                self.acks.push((seq, delivery));
            } else {
                lane.acknowledge_later(seq, delivery);
            }
        }
        if lane.accept(row, before, now) {
            self.budget = budget;
        }
    }

    /// A row came again: it is acknowledged again if it is done, or once it is.
    fn acknowledge(&mut self, env: &Env, row: &Row, floor: Seq) {
        if env.config.acks == Acks::None {
            return;
        }
        let lane = self.lanes.get_mut(&row.table);
        let done = lane.as_ref().map_or(floor, |lane| lane.stored_done().max(floor));
        if row.seq <= done {
            self.acks.push((row.seq, row.delivery));
        } else if let Some(lane) = lane.filter(|_| !row.redelivered) {
            // (A delivery that the server repeats by itself is acknowledged with the first.)
            lane.acknowledge_later(row.seq, row.delivery);
        }
    }

    fn on_ended(&mut self, now: Instant, attempt: Attempt, end: PullEnd, out: &mut Actions) -> Next {
        let Some(Ended { purpose, received, end }) = self.puller.on_ended(now, attempt, end) else {
            return Next::Stay;
        };
        let for_rows = purpose == Purpose::Rows && received == 0;
        match end {
            PullEnd::Full | PullEnd::Closed => {}
            PullEnd::Empty => {
                if for_rows
                    && matches!(self.position, Position::Flowing)
                    && safeguard(Rule::DeliveredCompared)
                {
                    self.position =
                        Position::Comparing { ask: Ask::at(now), row: self.highest(), above: self.floor() };
                }
            }
            PullEnd::TooLarge => self.capped |= for_rows,
            PullEnd::NotPinned => return self.end("another client is pinned, or none".to_owned(), out),
            PullEnd::LeaderChanged => {
                return self.end("the consumer's leader moved, and the pin with it".to_owned(), out);
            }
            PullEnd::Deleted => self.look(now),
            PullEnd::NoResponders => {
                if purpose == Purpose::Renewal || self.puller.unserved() >= 2 {
                    self.look(now);
                }
            }
            PullEnd::Failed(failure) => {
                out.notice(Notice::Waiting { what: "pull", why: failure.to_string() });
            }
        }
        Next::Stay
    }

    fn on_inspected(
        &mut self,
        env: &mut Env,
        now: Instant,
        attempt: Attempt,
        outcome: Result<Inspection, InspectError>,
        out: &mut Actions,
    ) -> Next {
        let (ask, row, above) = match &mut self.position {
            Position::Looking { ask, row, above, .. } | Position::Comparing { ask, row, above } => {
                (ask, *row, *above)
            }
            _ => return Next::Stay,
        };
        if !ask.awaits(attempt) {
            return Next::Stay;
        }
        let seen = match usable(now, ask, outcome, out) {
            Ok(Some(seen)) => seen,
            Ok(None) => return Next::Stay,
            Err(failure) => return Next::Failed(failure),
        };
        let record = &self.stored().record;
        if seen.created != record.stream_created && safeguard(Rule::StreamIdentity) {
            return self.end("the stream was made anew".to_owned(), out);
        }
        if let Some(reuse) = reuse(&seen, row) {
            // Rows that were accepted and not opened are no loss, if others have their place now. Whether
            // more than those is gone shows at the look before the next fence.
            return self.end(format!("the stream lost its tail: {reuse}"), out);
        }
        if seen.pinned.as_ref() != Some(&self.pin) {
            return self.end("the consumer is pinned to another client, or to none".to_owned(), out);
        }
        let first = FirstRow { above, next: seen.next };
        match self.position {
            Position::Looking { reason, .. } => self.reset(env, now, first, reason),
            // Deliveries are counted before they are sent: one that is missing was lost on the way, and
            // nothing follows that would show the gap.
            Position::Comparing { .. } if seen.delivered != self.intake.seen().0 => {
                self.reset(env, now, first, ResyncReason::Tail);
            }
            // Everything was delivered and seen, and still the stream has a later row: it was skipped.
            Position::Comparing { .. }
                if seen.pending == 0
                    && seen.shard_last.is_some_and(|last| last > self.intake.accepted().seq)
                    && safeguard(Rule::FirstRowExpected) =>
            {
                self.reset(env, now, first, ResyncReason::Skipped);
            }
            Position::Comparing { .. } => {
                self.position = Position::Flowing;
                if seen.pending == 0 {
                    self.intake.caught_up(seen.last);
                    self.lanes.values_mut().for_each(Lane::stream_exhausted);
                }
            }
            _ => {}
        }
        Next::Stay
    }

    // ---- what follows from it ------------------------------------------------------------------------

    fn look(&mut self, now: Instant) {
        if matches!(self.position, Position::Flowing | Position::Comparing { .. }) {
            self.resync_at(now, ResyncReason::Disrupted);
        }
    }

    fn resync_at(&mut self, at: Instant, reason: ResyncReason) {
        self.puller.forget();
        self.position =
            Position::Looking { ask: Ask::at(at), row: self.highest(), above: self.floor(), reason };
    }

    fn reset(&mut self, env: &mut Env, now: Instant, first: FirstRow, reason: ResyncReason) {
        self.puller.forget();
        self.capped = false;
        self.inbox = env.fresh_inbox();
        self.position = Position::Resetting { ask: Ask::at(now), inbox: self.inbox, first, reason };
    }

    /// Every row up to here is done, as the stored record says.
    fn floor(&self) -> Seq {
        self.stored().record.floor
    }

    /// The highest row that counts: named in the record, or accepted.
    fn highest(&self) -> Mark {
        self.intake.accepted().max(self.stored().record.high)
    }

    fn end(&mut self, why: String, out: &mut Actions) -> Next {
        out.notice(Notice::TenureEnded { why, held: self.budget.rows() });
        Next::Standby
    }

    fn closing(&self, env: &Env) -> Closing {
        let share = self.budget.share();
        let half = u32::try_from(share.rows / 2).unwrap_or(u32::MAX).max(1);
        let Limits { max_rows, max_bytes, max_age } = env.config.batch;
        let limits =
            Limits { max_rows: max_rows.min(half), max_bytes: max_bytes.min(share.bytes / 2), max_age };
        Closing { limits, at_once: self.halting || self.is_full(env), parking: env.config.parking }
    }

    /// The rows the next pull may ask for, and their bytes as the server counts them; none at the cap.
    ///
    /// A row costs its payload and [`Row::OVERHEAD`]; the server counts at least the payload. So rows and
    /// bytes are bounded such that even a pull full of the smallest rows stays within the share.
    fn room(&self, env: &Env) -> Option<(u64, u64)> {
        let share = self.budget.share();
        if self.capped || self.has_too_many_lanes(env) {
            return None;
        }
        let bytes = self.budget.room_bytes();
        let rows = self.budget.room_rows().min(Puller::MAX_BATCH).min(bytes / (2 * Row::OVERHEAD));
        // A pull for a handful of rows costs as much as one for thousands: wait for a decent room instead.
        let decent = Puller::MAX_BATCH.min(share.rows / 4).min(share.bytes / (8 * Row::OVERHEAD));
        (rows > 0 && rows >= decent).then(|| (rows, bytes - rows * Row::OVERHEAD))
    }

    /// What a pull may ask for beyond the share, since an inherited batch waits for its rows: it was closed
    /// within an earlier owner's share, which may have been larger than ours, and nothing that is held can be
    /// let go before it is whole. So its own rows do not count; what they may exceed the share by is bounded
    /// by the batches that the record has open.
    fn inherited_room(&self) -> Option<(u64, Option<u64>)> {
        let (mut missing, mut collected) = (0, Freed::default());
        for (more, held) in self.lanes.values().filter_map(Lane::collecting) {
            missing += more;
            collected = Freed { rows: collected.rows + held.rows, bytes: collected.bytes + held.bytes };
        }
        let share = self.budget.share();
        let rows = (share.rows + collected.rows).saturating_sub(self.budget.rows());
        let bytes = (share.bytes + collected.bytes).saturating_sub(self.budget.bytes());
        let rows = rows.min(bytes / (2 * Row::OVERHEAD)).min(missing);
        match rows {
            0 => None,
            // The next row is larger than the room was: alone.
            _ if self.capped => Some((1, None)),
            _ => Some((rows, Some(bytes - rows * Row::OVERHEAD))),
        }
    }

    /// Lanes that only wait for the floor to pass them hold no rows, and nothing up for them.
    fn has_too_many_lanes(&self, env: &Env) -> bool {
        let max = env.config.max_lanes;
        self.lanes.len() >= max && self.lanes.values().filter(|lane| !lane.is_idle()).count() >= max
    }

    fn is_full(&self, env: &Env) -> bool {
        self.budget.rows() > 0 && self.room(env).is_none()
    }

    fn floor_mark(&self) -> Mark {
        let stored = self.stored().record.floor_mark();
        if !safeguard(Rule::FloorBehindUnfinished) {
            return self.intake.accepted();
        }
        self.lanes
            .values()
            .filter_map(|lane| lane.floor_bound(stored))
            .chain([self.intake.accepted()])
            .min_by_key(|mark| mark.seq)
            .unwrap_or(stored)
    }

    /// The record to write next, if it differs from the stored one in anything worth a write.
    fn next_record(&mut self, env: &Env, now: Instant) -> Option<Record> {
        let closing = self.closing(env);
        let stored = self.commit.stored()?;
        let floor = self.floor_mark();
        let moved = floor.seq > stored.record.floor
            && (self.halting || now.since(self.floor_written_at) >= FLOOR_INTERVAL);
        let batches = self.lanes.values().any(|lane| lane.wants_batch(now, closing));
        if !moved && !batches && !self.lanes.values().any(Lane::wants_write) {
            return None;
        }
        let mut opened = false;
        if batches {
            let waits = !safeguard(Rule::LanesInParallel)
                && self.lanes.values().any(|lane| lane.open_until().is_some());
            // The ledger takes records up to a size; past it lanes wait for others to leave the record. The one
            // that holds the floor back may go a little further: until it is done none of them leaves.
            let mut waiting: Vec<_> =
                self.lanes.values_mut().filter(|lane| lane.wants_batch(now, closing)).collect();
            waiting.sort_by_key(|lane| lane.floor_bound(floor).map(|mark| mark.seq));
            let mut size = self.commit.size();
            let limit = env.config.max_record;
            self.record_full = false;
            for lane in waiting {
                size += lane.record_size(closing.parking);
                let holds_floor = lane.floor_bound(floor).is_some_and(|mark| mark.seq == floor.seq);
                if !waits && (size <= limit || (holds_floor && size <= limit + limit / 14)) {
                    lane.close_batch(now, closing);
                    opened = true;
                } else {
                    self.record_full = true;
                }
            }
        }
        if !moved && !opened && !self.lanes.values().any(Lane::wants_write) {
            return None;
        }
        let stored = self.commit.stored()?;
        let lanes = self
            .lanes
            .iter()
            .filter_map(|(table, lane)| Some((table.clone(), lane.to_record(floor.seq)?)))
            .collect();
        self.floor_written_at = now;
        let high =
            self.lanes.values().filter_map(Lane::open_until).fold(stored.record.high.max(floor), Mark::max);
        Some(Record { floor: floor.seq, high, lanes, ..stored.record.clone() })
    }

    pub(crate) fn poll(&mut self, env: &mut Env, now: Instant, out: &mut Actions) -> Next {
        self.poll_lanes(env, now, out);
        if !self.commit.is_busy()
            && let Some(record) = self.next_record(env, now)
        {
            self.commit.write(record, now);
        }
        if !safeguard(Rule::IntentFirst) || !safeguard(Rule::OneBatchPerLane) {
            self.poll_lanes(env, now, out);
        }
        let mut commands = Vec::new();
        self.commit.poll(now, &mut env.attempts, &mut commands);
        for command in commands {
            out.ledger(command);
        }
        if !self.acks.is_empty() {
            out.delivery(Command::Ack { rows: std::mem::take(&mut self.acks) });
        }
        self.poll_position(env, now, out);
        self.poll_pull(env, now, out);
        if self.halting { self.poll_release(env, now, out) } else { Next::Stay }
    }

    fn poll_lanes(&mut self, env: &mut Env, now: Instant, out: &mut Actions) {
        let Some(stored) = self.commit.stored() else { return };
        let mut cx = context(stored, env, now, out);
        let mut freed = Freed::default();
        let mut stale = false;
        for lane in self.lanes.values_mut() {
            let advance = lane.advance(&mut cx);
            stale |= advance.stale;
            freed += advance.freed;
        }
        self.let_go(freed);
        if stale {
            self.commit.verify(now);
        }
    }

    fn poll_position(&mut self, env: &mut Env, now: Instant, out: &mut Actions) {
        match &mut self.position {
            Position::Looking { ask, row, above, .. } | Position::Comparing { ask, row, above } => {
                if let Some(attempt) = ask.take(now, &mut env.attempts) {
                    out.delivery(Command::Inspect { attempt, row: row.seq, above: *above });
                }
            }
            Position::Resetting { ask, inbox, first, .. } => {
                if let Some(attempt) = ask.take(now, &mut env.attempts) {
                    let floor = if safeguard(Rule::ResetToStoredFloor) {
                        first.above
                    } else {
                        self.intake.accepted().seq
                    };
                    let from = reset_from(env.config.acks, floor);
                    out.delivery(Command::Reset { attempt, inbox: *inbox, from });
                }
            }
            Position::Flowing | Position::Closed => {}
        }
    }

    fn poll_pull(&mut self, env: &mut Env, now: Instant, out: &mut Actions) {
        if self.puller.dead_at().is_some_and(|at| at <= now) {
            self.puller.forget();
            if matches!(self.position, Position::Flowing) {
                self.resync_at(now, ResyncReason::DeadPull);
                self.poll_position(env, now, out);
            }
        }
        if !self.puller.may_pull(now) {
            return;
        }
        if matches!(self.position, Position::Flowing) {
            let pin = Some(self.pin.clone());
            let room = self.room(env).map(|(rows, bytes)| (rows, Some(bytes)));
            let pull = match room.or_else(|| self.inherited_room()) {
                Some((rows, bytes)) => {
                    Some(self.puller.rows(now, &mut env.attempts, self.inbox, pin, rows, bytes))
                }
                None if !safeguard(Rule::PullWithinShare) => {
                    Some(self.puller.rows(now, &mut env.attempts, self.inbox, pin, Puller::MAX_BATCH, None))
                }
                // Larger than the whole share: alone, when nothing else is held.
                None if self.budget.rows() == 0 => {
                    Some(self.puller.rows(now, &mut env.attempts, self.inbox, pin, 1, None))
                }
                None => None,
            };
            if let Some(pull) = pull {
                out.delivery(Command::Pull(pull));
                return;
            }
        }
        if now >= self.puller.renew_at() && (self.record_full || self.has_too_many_lanes(env)) {
            let why = format!(
                "{} are at work, as many as topology.max_lanes or the record allow",
                self.lanes.len()
            );
            out.notice(Notice::Waiting { what: "take rows of more tables", why });
        }
        if now >= self.puller.renew_at() && safeguard(Rule::RenewAtCap) {
            let pull = self.puller.renewal(now, &mut env.attempts, self.inbox, self.pin.clone());
            out.delivery(Command::Pull(pull));
        }
    }

    fn poll_release(&mut self, env: &mut Env, now: Instant, out: &mut Actions) -> Next {
        let late = env.stop_at.is_some_and(|at| at <= now);
        let written = self.lanes.values().all(|lane| lane.is_idle() || lane.is_stranded())
            && !self.commit.is_busy()
            && !self.lanes.values().any(Lane::wants_write);
        if !late && !written && safeguard(Rule::WrittenBeforeRelease) {
            return Next::Stay;
        }
        let clean = self.lanes.values().all(Lane::is_idle);
        if !clean {
            out.store(store::Command::Abort { shard: env.config.shard, until: env.attempts.last() });
        }
        if self.budget.rows() > 0 {
            let why = if late { "the time for stopping is up" } else { "what is left cannot be written now" };
            out.notice(Notice::TenureEnded { why: why.to_owned(), held: self.budget.rows() });
        }
        Next::Releasing(Release::new(self.pin.clone(), self.inbox, clean, now))
    }

    pub(crate) fn next_wakeup(&self, env: &Env) -> Option<Instant> {
        let closing = self.closing(env);
        let now = self.puller.renew_at();
        // While a write is under way no batch can be opened: its answer, not the time, is what comes next.
        // The same with a record that is full: some lane's answer empties it.
        let may_open = !self.commit.is_busy() && !self.record_full;
        let lanes = self.lanes.values().filter_map(|lane| lane.next_wakeup(now, closing, may_open));
        let position = match &self.position {
            Position::Looking { ask, .. }
            | Position::Comparing { ask, .. }
            | Position::Resetting { ask, .. } => Some(ask.due()),
            Position::Flowing | Position::Closed => None,
        };
        let floor = (!self.commit.is_busy() && self.floor_mark().seq > self.stored().record.floor)
            .then(|| self.floor_written_at + FLOOR_INTERVAL);
        let pull = self.puller.is_idle().then(|| {
            let wants_rows = matches!(self.position, Position::Flowing)
                && (self.room(env).is_some() || self.inherited_room().is_some() || self.budget.rows() == 0);
            if wants_rows { self.puller.may_pull_at() } else { self.puller.renew_at() }
        });
        let stop = if self.halting { env.stop_at } else { None };
        lanes
            .chain(position)
            .chain(floor)
            .chain(self.commit.next_wakeup())
            .chain(pull)
            .chain(self.puller.dead_at())
            .chain(stop)
            .min()
    }

    // ---- looking at it -------------------------------------------------------------------------------

    pub(crate) fn fill<'a>(&'a self, status: &mut Status<'a>) {
        let record = &self.stored().record;
        status.pin = Some(&self.pin);
        status.epoch = Some(record.epoch);
        status.floor = record.floor;
        status.accepted = self.intake.accepted().seq;
        status.held_rows = self.budget.rows();
        status.held_bytes = self.budget.bytes();
        status.oldest = self.lanes.values().filter_map(Lane::oldest).min();
        status.lanes = self.lanes.len();
        status.troubles =
            self.lanes.iter().filter_map(|(table, lane)| Some((table, lane.trouble()?))).collect();
        status.ledger_trouble = self.commit.trouble();
    }

    pub(crate) fn validate(&self) -> Result<(), String> {
        let record = &self.stored().record;
        if let Some(defect) = record.defect() {
            return Err(defect);
        }
        let floor = self.commit.newest().map_or(record.floor, |newest| newest.floor);
        if self.intake.accepted().seq < record.floor {
            return Err(format!(
                "accepted {} is below the floor {}",
                self.intake.accepted().seq,
                record.floor
            ));
        }
        for (table, lane) in &self.lanes {
            if let Some(defect) = lane.defect(floor) {
                return Err(format!("table {table}: {defect}"));
            }
        }
        let held: u64 = self.lanes.values().map(Lane::rows_held).sum();
        if held != self.budget.rows() {
            return Err(format!("{held} rows are held, {} are counted", self.budget.rows()));
        }
        Ok(())
    }
}

/// What a lane needs to know of its shard.
fn context<'a>(stored: &Stored, env: &'a mut Env, now: Instant, out: &'a mut Actions) -> Context<'a> {
    Context {
        now,
        shard: env.config.shard,
        stream: &env.config.stream,
        identity: stored.record.identity(),
        floor: stored.record.floor_mark(),
        proven_at: stored.proven_at,
        stale: env.config.stale,
        patience: env.config.patience,
        attempt_life: env.config.attempt_life,
        parking: env.config.parking,
        unknown: &mut env.unknown,
        attempts: &mut env.attempts,
        out,
    }
}
