//! A table's rows inside the process that owns its shard: batches, one after another, and letters in between.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::action::Actions;
use crate::ask::{Ask, Attempts, backoff};
use crate::batch::{Batch, Limits};
use crate::budget::Freed;
use crate::destination::{Described, Destination, MAX_BACKOFF};
use crate::letter::{Parking, Stage as LetterStage};
use crate::notice::{Notice, Trouble};
use crate::open::{Open, Rows, Stage};
use crate::ports::Attempt;
use crate::ports::dead_letters::{self, Cause, ParkOutcome};
use crate::ports::store::{
    Class, Command, DescribeError, Description, Found, HoldsAbove, Insert, InsertOutcome, Refusal, Target,
    Token,
};
use crate::record::{LaneRecord, OpenBatch, Parked};
use crate::row::{Delivery, Mark, Row, Seq, ShardId, TableName, Unfit, Verdict};
use crate::rule::{Rule, safeguard};
use crate::time::{Instant, Timestamp};

/// What a lane needs to know of its shard.
pub(crate) struct Context<'a> {
    pub(crate) now: Instant,
    pub(crate) shard: ShardId,
    pub(crate) stream: &'a str,
    /// What names the stream in tokens and columns.
    pub(crate) identity: Timestamp,
    /// The stored record's floor.
    pub(crate) floor: Mark,
    /// The record is known to have been ours at this instant.
    pub(crate) proven_at: Instant,
    /// For how long an intent may be sent after that.
    pub(crate) stale: Duration,
    /// No attempt at the store lives longer here: past it its answer is lost, and the attempt in doubt.
    pub(crate) patience: Duration,
    /// No attempt lives longer at the store once it is sent.
    pub(crate) attempt_life: Duration,
    pub(crate) parking: ParkingPolicy,
    pub(crate) attempts: &'a mut Attempts,
    /// Codes of answers that nobody knows and that people were told of.
    pub(crate) unknown: &'a mut BTreeSet<Option<u32>>,
    pub(crate) out: &'a mut Actions,
}

/// What becomes of rows that can never be stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParkingPolicy {
    /// Whether there are dead letters at all. If not, a bad row makes its table wait.
    pub dead_letters: bool,
    /// Whether rows whose table does not exist are dead letters. If not, they wait for it.
    pub unknown_tables: bool,
}

/// How soon rows are put into a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Closing {
    pub(crate) limits: Limits,
    /// Close at once, whatever the age: the shard holds all it may, or is halting.
    pub(crate) at_once: bool,
    pub(crate) parking: ParkingPolicy,
}

/// A row that waits for its batch.
#[derive(Clone, Debug)]
struct Held {
    row: Row,
    /// A place before it up to which this lane has nothing unfinished: the floor can go up to there.
    before: Mark,
    accepted_at: Instant,
}

/// What the lane is at: at most one thing, the first after `done`.
#[derive(Clone, Debug)]
enum Work {
    Batch(Open),
    Letter(Parking),
}

/// How careful the next batches are, since batches were refused for their data.
#[derive(Clone, Copy, Debug, Default)]
struct Caution {
    /// Refusals since a batch went through without care.
    refused: u32,
    /// At most this many rows in the next batch.
    max_rows: Option<u32>,
    /// This row is to stand alone: the store has named it.
    alone: Option<Seq>,
}

/// A table's rows, in order.
#[derive(Clone, Debug)]
pub(crate) struct Lane {
    table: TableName,
    /// Every row at or below it is done, as the stored record says.
    done: Seq,
    /// The last row of a batch that is in the store, or parked, although no stored record says so yet.
    finished: Option<Seq>,
    work: Option<Work>,
    held: VecDeque<Held>,
    held_bytes: u64,
    /// Rows up to here may be in the table already.
    suspect: Seq,
    /// A batch beyond all that the table held was stored in this tenure, so no history that the ledger may have lost
    /// has anything to do with the next. Until then a batch's token may have been burned in such a history, also the
    /// token of a part of what was inherited: a success is looked after.
    proven: bool,
    caution: Caution,
    destination: Destination,
    trouble: Option<Trouble>,
    /// Deliveries to acknowledge once their rows are done, in order; with acknowledgements only.
    unacked: VecDeque<(Seq, Delivery)>,
}

impl Lane {
    /// A lane without rows, done up to `done`.
    pub(crate) fn new(table: TableName, done: Seq, target: Option<Target>, now: Instant) -> Self {
        Self {
            table,
            done,
            finished: None,
            work: None,
            held: VecDeque::new(),
            held_bytes: 0,
            suspect: Seq::ZERO,
            proven: target.is_some(),
            caution: Caution::default(),
            destination: Destination::new(target, now),
            trouble: None,
            unacked: VecDeque::new(),
        }
    }

    /// A lane as an earlier tenure left it. `fades_at`: no attempt of that tenure can land after it.
    pub(crate) fn inherit(table: TableName, record: &LaneRecord, now: Instant, fades_at: Instant) -> Self {
        let mut lane = Self::new(table, record.done, None, now);
        lane.suspect = record.suspect;
        let batch = record.open.as_ref().map(|open| {
            let suspect = record.suspect > record.done;
            Work::Batch(Open::inherit(open, suspect, now, fades_at))
        });
        let letter = record.parked.clone().map(|parked| Work::Letter(Parking::inherit(parked)));
        lane.work = batch.or(letter);
        lane
    }

    /// Every row at or below it is in the store, or parked.
    pub(crate) fn done(&self) -> Seq {
        self.finished.unwrap_or(self.done)
    }

    /// Every row at or below it is done, as the stored record says.
    pub(crate) const fn stored_done(&self) -> Seq {
        self.done
    }

    /// Where the lane's rows go, if that is known.
    pub(crate) fn target(&self) -> Option<&Target> {
        self.destination.target()
    }

    /// The same, if nothing that the ledger may have lost has anything to do with the lane's next batch: then the next
    /// lane of the table may begin with it.
    pub(crate) fn proven_target(&self) -> Option<&Target> {
        self.target().filter(|_| self.proven)
    }

    /// Why it does not get on.
    pub(crate) fn trouble(&self) -> Option<&Trouble> {
        self.trouble.as_ref()
    }

    fn open(&self) -> Option<&Open> {
        match &self.work {
            Some(Work::Batch(open)) => Some(open),
            _ => None,
        }
    }

    fn open_mut(&mut self) -> Option<&mut Open> {
        match &mut self.work {
            Some(Work::Batch(open)) => Some(open),
            _ => None,
        }
    }

    /// Nothing to write and nothing that the record must say beside its floor.
    pub(crate) fn is_at_rest(&self, floor: Seq) -> bool {
        self.is_idle() && self.done <= floor && self.suspect <= floor
    }

    /// Nothing more can be done without rows from the stream or without a person: a halt does not wait.
    pub(crate) fn is_stranded(&self) -> bool {
        let helpless =
            matches!(self.trouble, Some(Trouble::Table(_) | Trouble::BadRow { .. } | Trouble::Stopped(_)));
        match &self.work {
            Some(Work::Batch(open)) => match &open.stage {
                Stage::Stopped => true,
                Stage::Collect => !open.is_collected(),
                // Refused until somebody changes something; not while an attempt is under way.
                Stage::Send(ask) | Stage::ReadBack(ask) => helpless && ask.rests(),
                Stage::Intent | Stage::Raise => false,
            },
            Some(Work::Letter(letter)) => {
                matches!(letter.stage, LetterStage::Collect | LetterStage::Stopped(_))
            }
            None => self.finished.is_none() && helpless,
        }
    }

    /// Whether it has nothing left to write.
    pub(crate) fn is_idle(&self) -> bool {
        self.work.is_none() && self.held.is_empty() && self.finished.is_none()
    }

    /// Rows held: waiting, and in the open batch or letter.
    pub(crate) fn rows_held(&self) -> u64 {
        let at_work = match &self.work {
            Some(Work::Batch(open)) => open.rows.as_slice().len(),
            Some(Work::Letter(letter)) => usize::from(letter.row.is_some()),
            None => 0,
        };
        (self.held.len() + at_work) as u64
    }

    /// The last row of a batch or letter that this tenure opened.
    pub(crate) fn open_until(&self) -> Option<Mark> {
        match &self.work {
            Some(Work::Batch(Open { rows: Rows::Whole { rows, .. }, .. })) => rows.last().map(Row::mark),
            Some(Work::Letter(Parking { row, .. })) => row.as_ref().map(Row::mark),
            _ => None,
        }
    }

    /// When the oldest row that is not written was accepted.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.open().map(|open| open.since).or_else(|| self.held.front().map(|held| held.accepted_at))
    }

    /// How many rows an inherited batch or letter still waits for, and what it holds; none if it waits for none.
    pub(crate) fn collecting(&self) -> Option<(u64, Freed)> {
        match &self.work {
            Some(Work::Batch(open)) if open.is_inherited() && !open.is_collected() => {
                let rows = open.rows.as_slice();
                Some((u64::from(open.batch.rows) - rows.len() as u64, Freed::of(rows)))
            }
            Some(Work::Letter(Parking { stage: LetterStage::Collect, .. })) => Some((1, Freed::default())),
            _ => None,
        }
    }

    /// How far the floor may go for this lane: none, if the lane does not hold it back. What an earlier tenure
    /// left open holds it where it is.
    pub(crate) fn floor_bound(&self, floor: Mark) -> Option<Mark> {
        match &self.work {
            Some(Work::Batch(Open { rows: Rows::Whole { before, .. }, .. })) => Some(*before),
            Some(Work::Batch(Open { rows: Rows::Collecting(_), .. })) => Some(floor),
            Some(Work::Letter(letter)) => Some(letter.before.unwrap_or(floor)),
            None => self.held.front().map(|held| held.before),
        }
    }

    /// Takes an accepted row. `before` is the row that the shard accepted before it.
    ///
    /// Says whether it is held now; if not, it was done before and is dropped.
    pub(crate) fn accept(&mut self, row: Row, before: Mark, now: Instant) -> bool {
        if row.seq <= self.done() && safeguard(Rule::DoneRowsDropped) {
            return false;
        }
        match &mut self.work {
            Some(Work::Batch(open)) => {
                let bounds = open.batch;
                if let Rows::Collecting(rows) = &mut open.rows {
                    let belongs = row.seq <= bounds.last
                        || (!safeguard(Rule::SameBounds) && (rows.len() as u64) < u64::from(bounds.rows) + 1);
                    if belongs {
                        rows.push(row);
                        return true;
                    }
                    // A later row came, so no more of the batch will.
                    if (rows.len() as u64) < u64::from(bounds.rows) {
                        open.short = true;
                    }
                }
            }
            Some(Work::Letter(Parking { parked, stage: LetterStage::Stopped(_), .. }))
                if row.seq <= parked.row =>
            {
                return false;
            }
            Some(Work::Letter(letter)) if matches!(letter.stage, LetterStage::Collect) => {
                if row.seq == letter.parked.row {
                    letter.row = Some(row);
                    letter.stage = LetterStage::Publish(Ask::at(now));
                    return true;
                }
                if row.seq < letter.parked.row {
                    // Nobody has it, and `done` is to pass it: that must not happen in silence.
                    letter.stage = LetterStage::Stopped(row.seq);
                    return false;
                }
                letter.stage = LetterStage::Gone;
            }
            _ => {}
        }
        self.held_bytes += row.payload.len() as u64;
        self.held.push_back(Held { row, before, accepted_at: now });
        true
    }

    /// Every row of the shard that the stream still has was accepted: what an inherited batch lacks now
    /// will not come any more.
    pub(crate) fn stream_exhausted(&mut self) {
        match &mut self.work {
            Some(Work::Batch(open)) if open.is_inherited() && !open.is_collected() => open.short = true,
            Some(Work::Letter(letter)) if matches!(letter.stage, LetterStage::Collect) => {
                letter.stage = LetterStage::Gone;
            }
            _ => {}
        }
    }

    // ---- acknowledgements ----------------------------------------------------------------------------

    /// A delivery of a row that is not done: it is acknowledged when it is.
    pub(crate) fn acknowledge_later(&mut self, seq: Seq, delivery: Delivery) {
        debug_assert!(self.unacked.back().is_none_or(|(last, _)| *last < seq));
        self.unacked.push_back((seq, delivery));
    }

    /// The consumer was reset: every row that is not acknowledged comes again.
    pub(crate) fn forget_deliveries(&mut self) {
        self.unacked.clear();
    }

    /// The deliveries whose rows the stored record calls done.
    pub(crate) fn take_acknowledged(&mut self, floor: Seq, into: &mut Vec<(Seq, Delivery)>) {
        let done = if safeguard(Rule::LedgerBeforeAck) { self.done.max(floor) } else { Seq(u64::MAX) };
        while let Some(acked) = self.unacked.pop_front_if(|(seq, _)| *seq <= done) {
            into.push(acked);
        }
    }

    // ---- opening -------------------------------------------------------------------------------------

    /// Why the first row that waits is a dead letter, if it is one.
    fn first_cause(&self, parking: ParkingPolicy) -> Option<(Cause, &str)> {
        if !parking.dead_letters {
            return None;
        }
        let first = self.held.front()?;
        match &first.row.verdict {
            Verdict::Bad(Unfit::Subject(why)) => Some((Cause::Subject, why)),
            Verdict::Bad(Unfit::Payload(why)) => Some((Cause::Payload, why)),
            Verdict::Good if parking.unknown_tables => {
                Some((Cause::UnknownTable, self.destination.missing(first.accepted_at)?))
            }
            Verdict::Good => None,
        }
    }

    /// Whether rows wait that may go into a batch, or a letter, now.
    pub(crate) fn wants_batch(&self, now: Instant, closing: Closing) -> bool {
        self.work.is_none() && self.closing_at(now, closing).is_some_and(|at| at <= now)
    }

    /// When the rows that wait are to be closed into a batch: none, if there are none, or they cannot be.
    fn closing_at(&self, now: Instant, closing: Closing) -> Option<Instant> {
        if self.first_cause(closing.parking).is_some() {
            return Some(now);
        }
        self.target()?;
        let first = self.held.front().filter(|held| held.row.verdict == Verdict::Good)?;
        let full = self.held.len() as u64 >= u64::from(self.max_rows(closing))
            || self.held_bytes >= closing.limits.max_bytes;
        // A bad row ends the batch before it, and will not become good by waiting. What was split has waited.
        let cut = self.caution.alone.is_some()
            || self.caution.max_rows.is_some()
            || self.held.back().is_some_and(|held| held.row.verdict != Verdict::Good);
        Some(if full || cut || closing.at_once { now } else { first.accepted_at + closing.limits.max_age })
    }

    fn max_rows(&self, closing: Closing) -> u32 {
        let limit = closing.limits.max_rows;
        self.caution.max_rows.map_or(limit, |rows| rows.clamp(1, limit))
    }

    /// Closes a batch of the rows that wait, or begins to park the first, if it is time. The intent is to be
    /// written next.
    pub(crate) fn close_batch(&mut self, now: Instant, closing: Closing) {
        if !self.wants_batch(now, closing) {
            return;
        }
        if let Some((cause, why)) = self.first_cause(closing.parking) {
            let message = Parked::message(why);
            let Some(held) = self.held.pop_front() else { return };
            self.held_bytes -= held.row.payload.len() as u64;
            let parked = Parked { row: held.row.seq, cause, code: None, message, attempts: 0 };
            self.park(held.row, Some(held.before), parked, now);
            return;
        }
        let Some(target) = self.target().cloned() else { return };
        let Some((before, since)) = self.held.front().map(|held| (held.before, held.accepted_at)) else {
            return;
        };
        let max_rows = self.max_rows(closing) as usize;
        let mut rows: Vec<Row> = Vec::new();
        let mut bytes = 0;
        while let Some(next) = self.held.front() {
            let (seq, size) = (next.row.seq, next.row.payload.len() as u64);
            let alone = self.caution.alone;
            let fits = rows.first().is_none_or(|first| {
                rows.len() < max_rows
                    && bytes + size <= closing.limits.max_bytes
                    && alone.is_none_or(|alone| seq != alone && first.seq != alone)
            });
            if !fits || next.row.verdict != Verdict::Good {
                break;
            }
            let Some(next) = self.held.pop_front() else { break };
            bytes += size;
            rows.push(next.row);
        }
        self.held_bytes -= bytes;
        let Some(first) = rows.first().map(|row| row.seq) else { return };
        debug_assert!(first > self.done());
        if self.caution.alone == Some(first) {
            self.caution.alone = None;
        }
        let suspect = first <= self.suspect;
        let mut open = Open::whole(rows.into(), before, target, suspect, since);
        open.suspect = suspect;
        if !safeguard(Rule::IntentFirst) || (!safeguard(Rule::OneBatchPerLane) && self.finished.is_some()) {
            open.begin(now);
        }
        self.work = Some(Work::Batch(open));
    }

    fn park(&mut self, row: Row, before: Option<Mark>, parked: Parked, now: Instant) {
        let mut parking = Parking::decide(row, before, parked);
        if !safeguard(Rule::ParkThroughLedger) {
            parking.stage = LetterStage::Publish(Ask::at(now));
        }
        self.work = Some(Work::Letter(parking));
    }

    // ---- the record ----------------------------------------------------------------------------------

    /// Whether the record lacks something of this lane.
    pub(crate) fn wants_write(&self) -> bool {
        self.finished.is_some()
            || match &self.work {
                Some(Work::Batch(open)) => matches!(open.stage, Stage::Intent | Stage::Raise),
                Some(Work::Letter(letter)) => matches!(letter.stage, LetterStage::Intent),
                None => false,
            }
    }

    /// What the record is to say of this lane, given the floor that it will have.
    pub(crate) fn to_record(&self, floor: Seq) -> Option<LaneRecord> {
        let mut record = LaneRecord { done: self.done(), ..LaneRecord::default() };
        if self.suspect > record.done.max(floor) {
            record.suspect = self.suspect;
        }
        match &self.work {
            Some(Work::Batch(open)) => {
                let mut batch = open.batch;
                if matches!(open.stage, Stage::Raise) {
                    batch.generation += 1;
                }
                record.open = Some(OpenBatch { batch, target: open.target.clone() });
            }
            Some(Work::Letter(letter)) => record.parked = Some(letter.parked.clone()),
            None => {}
        }
        let says = self.work.is_some() || record.done > floor || record.suspect > Seq::ZERO;
        says.then_some(record)
    }

    /// At most this many bytes of the record are this lane's.
    pub(crate) fn record_size(&self, parking: ParkingPolicy) -> usize {
        let target = self.target().map_or(0, |target| target.database.len() + target.table.len());
        let reason = if self.first_cause(parking).is_some() { Parked::MAX_MESSAGE } else { 0 };
        // JSON may spell one byte in six.
        320 + 6 * (self.table.as_str().len() + target + reason)
    }

    /// A record is known to be stored; `record` is what it says of this lane, with its floor.
    pub(crate) fn on_stored(&mut self, now: Instant, record: Option<&LaneRecord>, floor: Seq) {
        let done = record.map_or(floor, |lane| lane.done);
        self.done = self.done.max(done);
        if self.finished.is_some_and(|finished| finished <= self.done) {
            self.finished = None;
        }
        match &mut self.work {
            Some(Work::Batch(open)) => {
                let Some(stored) = record.and_then(|lane| lane.open.as_ref()) else { return };
                match open.stage {
                    Stage::Intent if stored.batch == open.batch => open.begin(now),
                    Stage::Raise if stored.batch.generation == open.batch.generation + 1 => {
                        open.batch.generation += 1;
                        open.succeeded = false;
                        open.stage = Stage::Send(Ask::at(now));
                    }
                    _ => {}
                }
            }
            Some(Work::Letter(letter)) => {
                let stored = record.and_then(|lane| lane.parked.as_ref());
                if matches!(letter.stage, LetterStage::Intent)
                    && stored.is_some_and(|parked| parked.row == letter.parked.row)
                {
                    letter.stage = LetterStage::Publish(Ask::at(now));
                }
            }
            None => {}
        }
    }

    // ---- acting --------------------------------------------------------------------------------------

    /// Does what is due: describes, reads back, sends, parks. Says whether the record must be read again first.
    pub(crate) fn advance(&mut self, cx: &mut Context<'_>) -> Advance {
        self.describe(cx);
        if let Some(held) = self.held.front()
            && self.work.is_none()
            && !cx.parking.dead_letters
            && let Verdict::Bad(Unfit::Subject(why) | Unfit::Payload(why)) = &held.row.verdict
        {
            let trouble = Trouble::BadRow { seq: held.row.seq, why: why.to_string() };
            self.set_trouble(trouble, cx);
        }
        let mut progress = Advance::default();
        while self.step(cx, &mut progress) {}
        progress
    }

    /// Does one thing; says whether more may follow at once.
    fn step(&mut self, cx: &mut Context<'_>, progress: &mut Advance) -> bool {
        match &mut self.work {
            None => false,
            Some(Work::Letter(_)) => self.step_letter(cx, progress),
            Some(Work::Batch(open)) => match &mut open.stage {
                Stage::Intent | Stage::Raise | Stage::Stopped => false,
                Stage::ReadBack(ask) => {
                    // The store bounds the life of a read-back; this only outlives a lost answer.
                    if let Some(attempt) = ask.take_patient(cx.now, cx.attempts, cx.patience) {
                        cx.out.store(Command::ReadBack {
                            attempt,
                            shard: cx.shard,
                            table: self.table.clone(),
                            target: open.target.clone(),
                            created: cx.identity,
                            first: open.batch.first,
                            last: open.batch.last,
                        });
                    }
                    false
                }
                Stage::Collect => {
                    let collected = open.is_collected();
                    if collected {
                        open.stage = Stage::Send(Ask::at(cx.now));
                    }
                    collected
                }
                Stage::Send(ask) if ask.due() > cx.now => false,
                Stage::Send(_) => self.send(cx, progress),
            },
        }
    }

    /// Sends the open batch, or what is missing of it, now that it is due.
    fn send(&mut self, cx: &mut Context<'_>, progress: &mut Advance) -> bool {
        let Some(Work::Batch(open)) = &mut self.work else { return false };
        let Stage::Send(ask) = &mut open.stage else { return false };
        if ask.timed_out(cx.now) {
            open.doubted = true;
            open.fades_at = open.fades_at.max(ask.asked_at() + cx.stale + cx.attempt_life);
            if open.target.level.can_read_back() {
                open.stage = Stage::ReadBack(Ask::at(cx.now));
                return true;
            }
        }
        if open.rows.as_slice().len() as u64 > u64::from(open.batch.rows) && safeguard(Rule::SameBounds) {
            self.stop("the stream has more rows of the open batch than were sent".to_owned(), cx);
            return false;
        }
        let rows: Arc<[Row]> = match (&open.rows, &open.found) {
            (Rows::Whole { rows, .. }, None) => Arc::clone(rows),
            _ => open.missing().into(),
        };
        if rows.is_empty() {
            progress.freed += self.finish(cx);
            return true;
        }
        open.awaits_proof = is_stale(cx);
        if open.awaits_proof {
            progress.stale = true;
            return false;
        }
        let Stage::Send(ask) = &mut open.stage else { return false };
        let Some(attempt) = ask.take_patient(cx.now, cx.attempts, cx.patience) else { return false };
        let mut tokened = open.batch;
        if open.short && !safeguard(Rule::PurgedKeepsToken) {
            tokened.rows = u32::try_from(open.rows.as_slice().len()).unwrap_or(u32::MAX);
        }
        let mut token = tokened.token(cx.stream, cx.identity);
        if !safeguard(Rule::SameToken) {
            token = Token(format!("{}#{}", token.0, attempt.0).into());
        }
        open.tries += 1;
        open.first_sent.get_or_insert(cx.now);
        cx.out.store(Command::Insert(Insert {
            attempt,
            shard: cx.shard,
            table: self.table.clone(),
            target: open.target.clone(),
            created: cx.identity,
            token,
            rows,
            send_by: send_by(cx),
        }));
        false
    }

    fn step_letter(&mut self, cx: &mut Context<'_>, progress: &mut Advance) -> bool {
        let Some(Work::Letter(letter)) = &mut self.work else { return false };
        match &mut letter.stage {
            LetterStage::Intent | LetterStage::Collect => false,
            LetterStage::Stopped(first) => {
                let why =
                    format!("row {first} is not done and comes before the dead letter {}", letter.parked.row);
                self.set_trouble(Trouble::Stopped(why), cx);
                false
            }
            LetterStage::Gone => {
                cx.out.notice(Notice::LetterLost { table: self.table.clone(), seq: letter.parked.row });
                progress.freed += self.finish(cx);
                true
            }
            LetterStage::Publish(ask) => {
                if ask.due() > cx.now {
                    return false;
                }
                letter.awaits_proof = is_stale(cx);
                if letter.awaits_proof {
                    progress.stale = true;
                    return false;
                }
                let Some(row) = &letter.row else { return false };
                let Some(attempt) = ask.take(cx.now, cx.attempts) else { return false };
                letter.tries += 1;
                let Parked { cause, code, message, attempts, .. } = letter.parked.clone();
                cx.out.dead_letter(dead_letters::Command::Park {
                    attempt,
                    letter: dead_letters::Letter {
                        created: cx.identity,
                        shard: cx.shard,
                        table: self.table.clone(),
                        seq: row.seq,
                        stored_at: row.stored_at,
                        payload: row.payload.clone(),
                        cause,
                        code,
                        message,
                        attempts,
                    },
                    send_by: send_by(cx),
                    unless_there: safeguard(Rule::LetterOnce),
                });
                // A mutant goes on without waiting for the answer.
                if !safeguard(Rule::LetterBeforeDone) {
                    progress.freed += self.finish(cx);
                    return true;
                }
                false
            }
        }
    }

    fn describe(&mut self, cx: &mut Context<'_>) {
        if !self.wants_description() {
            return;
        }
        let Some(attempt) = self.destination.ask.take(cx.now, cx.attempts) else { return };
        let known = self.open().map_or(self.done(), |open| open.batch.last).max(self.suspect);
        let look = !self.destination.examined && safeguard(Rule::TableExamined);
        let holds = look.then_some(HoldsAbove { created: cx.identity, above: known });
        cx.out.store(Command::Describe { attempt, shard: cx.shard, table: self.table.clone(), holds });
    }

    /// Whether somebody waits for it: not a row that can never be inserted.
    fn wants_description(&self) -> bool {
        self.open().is_some() || self.held.front().is_some_and(|held| held.row.verdict == Verdict::Good)
    }

    /// When [`Self::advance`] or, if a batch may be opened at all, [`Self::close_batch`] has something to do.
    pub(crate) fn next_wakeup(&self, now: Instant, closing: Closing, may_open: bool) -> Option<Instant> {
        // A description that is only old waits for something else to happen.
        let describe =
            (self.target().is_none() && self.wants_description()).then(|| self.destination.ask.due());
        let next = match &self.work {
            Some(Work::Batch(open)) => match &open.stage {
                Stage::Send(_) if open.awaits_proof => None,
                Stage::Send(ask) | Stage::ReadBack(ask) => Some(ask.due()),
                _ => None,
            },
            Some(Work::Letter(letter)) => match &letter.stage {
                LetterStage::Publish(_) if letter.awaits_proof => None,
                LetterStage::Publish(ask) => Some(ask.due()),
                _ => None,
            },
            None => self.closing_at(now, closing).filter(|_| may_open),
        };
        describe.into_iter().chain(next).min()
    }

    // ---- answers -------------------------------------------------------------------------------------

    /// Takes the answer to an insert.
    pub(crate) fn on_inserted(
        &mut self,
        attempt: Attempt,
        outcome: &InsertOutcome,
        cx: &mut Context<'_>,
    ) -> Freed {
        let proven = self.proven;
        let Some(open) = self.open_mut() else { return Freed::default() };
        let Stage::Send(ask) = &mut open.stage else { return Freed::default() };
        if !ask.awaits(attempt) {
            return Freed::default();
        }
        let asked_at = ask.asked_at();
        let can_read_back = open.target.level.can_read_back();
        let wait = backoff(open.tries, MAX_BACKOFF, attempt.0);
        match outcome {
            InsertOutcome::Stored
                if (open.doubted || !proven) && can_read_back && safeguard(Rule::ReadBackAfterSuccess) =>
            {
                open.succeeded = true;
                open.stage = Stage::ReadBack(Ask::at(cx.now));
                Freed::default()
            }
            InsertOutcome::Stored => self.finish(cx),
            // It was never sent: what it is worth is looked up, and it gets in line again.
            InsertOutcome::Stale => {
                ask.again(cx.now, Duration::ZERO);
                Freed::default()
            }
            InsertOutcome::Again(refusal) if refusal.class == Class::Data => {
                // What an attempt that is still about may yet store must not be in two batches.
                let certain = open.is_certain(asked_at) || !safeguard(Rule::SplitWhenAnswered);
                self.tell_refusal(refusal, cx);
                if certain {
                    return self.refused_for_good(refusal, wait, cx);
                }
                let due = (cx.now + wait).max(open_fades_at(self.open()));
                self.look_again_at(due);
                self.set_trouble(Trouble::Store(refusal.to_string()), cx);
                Freed::default()
            }
            InsertOutcome::Again(refusal) | InsertOutcome::Doubt(refusal) => {
                if matches!(outcome, InsertOutcome::Doubt(_)) {
                    open.doubted = true;
                    open.fades_at = open.fades_at.max(asked_at + cx.stale + cx.attempt_life);
                }
                if open.doubted && can_read_back && safeguard(Rule::ReadBackInDoubt) {
                    open.stage = Stage::ReadBack(Ask::at(cx.now + wait));
                } else {
                    ask.again(cx.now, wait);
                }
                self.tell_refusal(refusal, cx);
                self.refused(refusal, cx);
                Freed::default()
            }
        }
    }

    /// The batch goes on at `due`: with a look where there can be one.
    fn look_again_at(&mut self, due: Instant) {
        let Some(open) = self.open_mut() else { return };
        open.stage = if open.target.level.can_read_back() {
            Stage::ReadBack(Ask::at(due))
        } else {
            Stage::Send(Ask::at(due))
        };
    }

    /// The store refuses the open batch for its data, and no attempt at it can land any more: it is cut in two,
    /// until the bad row stands alone.
    fn refused_for_good(&mut self, refusal: &Refusal, wait: Duration, cx: &mut Context<'_>) -> Freed {
        let Some(Work::Batch(open)) = self.work.take() else { return Freed::default() };
        let rows = open.rows.as_slice();
        let before = match &open.rows {
            Rows::Whole { before, .. } => Some(*before),
            Rows::Collecting(_) => None,
        };
        if let [row] = rows {
            let why = refusal.to_string();
            if !cx.parking.dead_letters {
                let trouble = Trouble::BadRow { seq: row.seq, why };
                self.work = Some(Work::Batch(open));
                self.look_again_at(cx.now + wait);
                self.set_trouble(trouble, cx);
                return Freed::default();
            }
            let parked = Parked {
                row: row.seq,
                cause: Cause::Refused,
                code: refusal.code,
                message: Parked::message(&refusal.message),
                attempts: open.tries,
            };
            self.park(row.clone(), before, parked, cx.now);
            return Freed::default();
        }
        let sent: Vec<Row> = if open.found.is_some() { open.missing() } else { rows.to_vec() };
        let cut = open.cut(&sent, refusal.row);
        let found_some = open.found.as_ref().is_some_and(|found| !found.is_empty());
        if found_some {
            // Whatever becomes of the parts, by whomever: some of their rows are in the table.
            self.suspect = self.suspect.max(open.batch.last);
        }
        cx.out.notice(Notice::Split { table: self.table.clone(), batch: open.batch, left: cut.left });
        self.caution.refused += 1;
        self.caution.alone = cut.alone;
        // One bad row is no reason to go on in small steps; a second soon after it is.
        if !cut.named {
            self.caution.max_rows = Some(u32::try_from(rows.len() - cut.left).unwrap_or(u32::MAX));
        } else if self.caution.refused > 1 {
            self.caution.max_rows = Some(u32::try_from(cut.left * 4).unwrap_or(u32::MAX).max(16));
        }
        let (left, right) = rows.split_at(cut.left);
        let mut last = left.last().map(Row::mark).unwrap_or_default();
        let mut back = Vec::with_capacity(right.len());
        for row in right {
            self.held_bytes += row.payload.len() as u64;
            back.push(Held { row: row.clone(), before: last, accepted_at: open.since });
            last = row.mark();
        }
        for held in back.into_iter().rev() {
            self.held.push_front(held);
        }
        // Of an inherited batch it is not known how far the floor could go: it stays where it is meanwhile.
        let before = before.unwrap_or(cx.floor);
        let mut part = Open::whole(left.into(), before, open.target.clone(), found_some, open.since);
        part.first_sent = open.first_sent;
        part.suspect = found_some;
        if !safeguard(Rule::SplitThroughLedger) {
            part.begin(cx.now);
        }
        self.work = Some(Work::Batch(part));
        Freed::default()
    }

    /// Takes the answer to a read-back.
    pub(crate) fn on_read_back(
        &mut self,
        attempt: Attempt,
        outcome: Result<Found, Refusal>,
        cx: &mut Context<'_>,
    ) -> Freed {
        let Some(open) = self.open_mut() else { return Freed::default() };
        let Stage::ReadBack(ask) = &mut open.stage else { return Freed::default() };
        if !ask.awaits(attempt) {
            return Freed::default();
        }
        let mut found = match outcome {
            Err(refusal) => {
                open.tries += 1;
                ask.again(cx.now, backoff(open.tries, MAX_BACKOFF, attempt.0));
                self.tell_refusal(&refusal, cx);
                self.refused(&refusal, cx);
                return Freed::default();
            }
            Ok(found) => found,
        };
        open.looked_at = ask.asked_at();
        // What is found may be rows that are gone: it says nothing until the batch's own rows are there.
        let blind = open.suspect && !open.is_collected();
        if open.suspect && !blind {
            open.keep_own(&mut found.seqs);
        }
        if let Some(why) = contradiction(open, &found, blind) {
            self.stop(why, cx);
            return Freed::default();
        }
        if !blind && found.seqs.len() as u64 == u64::from(open.batch.rows) {
            return self.finish(cx);
        }
        open.found = Some(found.seqs);
        if !open.is_collected() {
            open.stage = Stage::Collect;
            return Freed::default();
        }
        let missing = open.missing().len();
        // A success, and a look begun after it: what is missing now was swallowed, and its token is burned.
        if missing > 0 && (open.succeeded || !safeguard(Rule::GenerationWhenBurned)) {
            if open.batch.generation >= Batch::MAX_GENERATION {
                let why = format!(
                    "{missing} rows were answered as stored and are missing, under {} tokens in turn",
                    Batch::MAX_GENERATION + 1
                );
                self.stop(why, cx);
                return Freed::default();
            }
            open.stage = Stage::Raise;
            let batch = Batch { generation: open.batch.generation + 1, ..open.batch };
            cx.out.notice(Notice::TokenBurned { table: self.table.clone(), batch, missing });
            return Freed::default();
        }
        // Send is where a batch with nothing missing ends, too.
        open.stage = Stage::Send(Ask::at(cx.now));
        Freed::default()
    }

    /// Takes the answer to a letter.
    pub(crate) fn on_parked(
        &mut self,
        attempt: Attempt,
        outcome: ParkOutcome,
        cx: &mut Context<'_>,
    ) -> Freed {
        let Some(Work::Letter(letter)) = &mut self.work else { return Freed::default() };
        let LetterStage::Publish(ask) = &mut letter.stage else { return Freed::default() };
        if !ask.awaits(attempt) {
            return Freed::default();
        }
        match outcome {
            ParkOutcome::Parked => {
                let Parked { row: seq, cause, code, message, .. } = letter.parked.clone();
                cx.out.notice(Notice::Parked { table: self.table.clone(), seq, cause, code, why: message });
                self.finish(cx)
            }
            ParkOutcome::Stale => {
                ask.again(cx.now, Duration::ZERO);
                Freed::default()
            }
            ParkOutcome::Failed(failure) => {
                ask.again(cx.now, backoff(letter.tries, MAX_BACKOFF, attempt.0));
                let seq = letter.parked.row;
                self.set_trouble(Trouble::DeadLetters { seq, failure }, cx);
                Freed::default()
            }
        }
    }

    /// Takes the answer to a description.
    pub(crate) fn on_described(
        &mut self,
        attempt: Attempt,
        outcome: Result<Description, DescribeError>,
        cx: &mut Context<'_>,
    ) {
        match self.destination.on_described(cx.now, attempt, outcome) {
            Described::Nothing => {}
            Described::Known { news, holds } => {
                if let Some(target) = news {
                    cx.out.notice(Notice::Described { table: self.table.clone(), target });
                }
                if let Some(holds) = holds.filter(|holds| *holds > self.suspect) {
                    let done = self.done();
                    cx.out.notice(Notice::TableAhead { table: self.table.clone(), done, holds });
                    self.suspect = holds;
                }
                if matches!(self.trouble, Some(Trouble::Table(_))) {
                    self.clear_trouble(cx);
                }
            }
            Described::Refused(error) => {
                let trouble = match error {
                    DescribeError::Failed(refusal) => refusal_trouble(&refusal),
                    other => Trouble::Table(other.to_string()),
                };
                self.set_trouble(trouble, cx);
            }
        }
    }

    // ---- what follows --------------------------------------------------------------------------------

    /// The batch is in the store, or the letter kept. Its rows need not be held any more: should the write that
    /// says so fail, the tenure is over and the heir decides.
    fn finish(&mut self, cx: &mut Context<'_>) -> Freed {
        let Some(work) = self.work.take() else { return Freed::default() };
        let freed = match work {
            Work::Letter(letter) => {
                self.finished = Some(letter.parked.row);
                Freed::of(&letter.row)
            }
            Work::Batch(open) => {
                let rows = open.rows.as_slice();
                if open.short {
                    let found = open.found.as_deref().unwrap_or_default();
                    let here = found.len()
                        + rows.iter().filter(|row| found.binary_search(&row.seq).is_err()).count();
                    let lost = u64::from(open.batch.rows).saturating_sub(here as u64);
                    if lost > 0 {
                        let (table, batch) = (self.table.clone(), open.batch);
                        cx.out.notice(Notice::RowsRemoved { table, batch, lost });
                    }
                }
                self.finished = Some(open.batch.last);
                // What the ledger has lost is no longer than the one batch that was open, and that is no suspect.
                self.proven |= !open.is_inherited() && !open.suspect;
                self.relax();
                cx.out.notice(Notice::BatchStored {
                    table: self.table.clone(),
                    batch: open.batch,
                    attempts: open.tries,
                    took: open.took(cx.now),
                });
                Freed::of(rows)
            }
        };
        self.clear_trouble(cx);
        freed
    }

    /// A batch went through: the next may be larger.
    fn relax(&mut self) {
        match &mut self.caution {
            Caution { alone: Some(_), .. } => {}
            Caution { max_rows: Some(rows), .. } if *rows < 1 << 20 => *rows *= 2,
            caution => *caution = Caution::default(),
        }
    }

    fn stop(&mut self, why: String, cx: &mut Context<'_>) {
        if let Some(open) = self.open_mut() {
            open.stage = Stage::Stopped;
        }
        self.set_trouble(Trouble::Stopped(why), cx);
    }

    /// Counts a refusal, and tells of an answer that nobody knows.
    fn tell_refusal(&self, refusal: &Refusal, cx: &mut Context<'_>) {
        cx.out.notice(Notice::Refused { table: self.table.clone(), class: refusal.class });
        if refusal.class == Class::Unknown && cx.unknown.len() < 1_000 && cx.unknown.insert(refusal.code) {
            cx.out.notice(Notice::UnknownRefusal { refusal: refusal.clone() });
        }
    }

    fn refused(&mut self, refusal: &Refusal, cx: &mut Context<'_>) {
        self.destination.doubt(cx.now);
        self.set_trouble(refusal_trouble(refusal), cx);
    }

    fn set_trouble(&mut self, trouble: Trouble, cx: &mut Context<'_>) {
        if !self.trouble.as_ref().is_some_and(|known| known.is_like(&trouble)) {
            cx.out.notice(Notice::Trouble { table: self.table.clone(), trouble: trouble.clone() });
            self.trouble = Some(trouble);
        }
    }

    fn clear_trouble(&mut self, cx: &mut Context<'_>) {
        if self.trouble.take().is_some() {
            cx.out.notice(Notice::Recovered { table: self.table.clone() });
        }
    }

    /// What of this lane contradicts itself, if anything does.
    pub(crate) fn defect(&self, floor: Seq) -> Option<String> {
        if self.finished.is_some_and(|finished| finished <= self.done) {
            return Some("a batch finished at or below done".to_owned());
        }
        let mut last = self.done();
        let first = match &self.work {
            Some(Work::Batch(open)) => {
                if let Some(defect) = open.defect() {
                    return Some(defect);
                }
                Some((open.batch.first, open.batch.last))
            }
            Some(Work::Letter(letter)) => Some((letter.parked.row, letter.parked.row)),
            None => None,
        };
        if let Some((first, end)) = first {
            if first <= last || first <= floor {
                return Some(format!("what is open starts with {first}, at or below done or floor"));
            }
            last = end;
        }
        for held in &self.held {
            if held.row.seq <= last {
                return Some(format!("row {} waits behind row {last}", held.row.seq));
            }
            last = held.row.seq;
        }
        let bytes: u64 = self.held.iter().map(|held| held.row.payload.len() as u64).sum();
        (bytes != self.held_bytes).then(|| format!("{bytes} bytes wait, {} are counted", self.held_bytes))
    }
}

fn refusal_trouble(refusal: &Refusal) -> Trouble {
    match refusal.class {
        Class::Table | Class::Access => Trouble::Table(refusal.to_string()),
        _ => Trouble::Store(refusal.to_string()),
    }
}

/// Whether the intent must be looked up before anything is sent for it.
fn is_stale(cx: &Context<'_>) -> bool {
    cx.now.since(cx.proven_at) >= cx.stale && safeguard(Rule::StaleIntentRead)
}

fn send_by(cx: &Context<'_>) -> Instant {
    if safeguard(Rule::StaleIntentRead) { cx.proven_at + cx.stale } else { Instant::at(Duration::MAX) }
}

fn open_fades_at(open: Option<&Open>) -> Instant {
    open.map_or(Instant::START, |open| open.fades_at)
}

/// What a read-back found that cannot be, if it did. `blind`: whose rows they are is not known yet.
fn contradiction(open: &Open, found: &Found, blind: bool) -> Option<String> {
    if let Some(seq) = found.repeated {
        return Some(format!("row {seq} is in the table more than once"));
    }
    if blind {
        return None;
    }
    if found.seqs.len() as u64 > u64::from(open.batch.rows) {
        return Some(format!(
            "the table has {} rows between {} and {}, the open batch {}",
            found.seqs.len(),
            open.batch.first,
            open.batch.last,
            open.batch.rows
        ));
    }
    let Rows::Whole { rows, .. } = &open.rows else { return None };
    let foreign = found.seqs.iter().find(|seq| rows.binary_search_by_key(seq, |row| &row.seq).is_err())?;
    Some(format!(
        "row {foreign} is in the table and not among its rows: does another table's configuration name it?"
    ))
}

/// What [`Lane::advance`] did beside its actions.
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct Advance {
    /// The record must be read again before anything may be sent.
    pub(crate) stale: bool,
    /// Rows that need not be held any more.
    pub(crate) freed: Freed,
}

#[cfg(test)]
mod tests;
