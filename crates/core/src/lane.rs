//! A table's rows inside the process that owns its shard: batches, one after another.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::action::Actions;
use crate::ask::{Ask, Attempts, backoff};
use crate::batch::{Batch, Limits};
use crate::budget::Freed;
use crate::notice::{Notice, Trouble};
use crate::ports::Attempt;
use crate::ports::store::{Command, DescribeError, Found, Insert, InsertOutcome, Refusal, Target};
use crate::record::{LaneRecord, OpenBatch};
use crate::row::{Mark, Row, Seq, ShardId, TableName, Verdict};
use crate::rule::{Rule, safeguard};
use crate::time::{Instant, Timestamp};

/// The longest wait between two tries of one lane: bounds the attempts a minute.
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// What a lane needs to know of its shard.
pub(crate) struct Context<'a> {
    pub(crate) now: Instant,
    pub(crate) shard: ShardId,
    pub(crate) stream: &'a str,
    pub(crate) created: Timestamp,
    /// The record is known to have been ours at this instant.
    pub(crate) proven_at: Instant,
    /// For how long an intent may be sent after that.
    pub(crate) stale: Duration,
    /// No attempt at the store lives longer: past it its answer is lost, and the attempt in doubt.
    pub(crate) patience: Duration,
    pub(crate) attempts: &'a mut Attempts,
    pub(crate) out: &'a mut Actions,
}

/// How soon rows are put into a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Closing {
    pub(crate) limits: Limits,
    /// Close at once, whatever the age: the shard holds all it may, or is halting.
    pub(crate) at_once: bool,
}

/// A row that waits for its batch.
#[derive(Clone, Debug)]
struct Held {
    row: Row,
    /// The row that the shard accepted before this one: the floor can go up to there.
    before: Mark,
    accepted_at: Instant,
}

/// The rows of an open batch.
#[derive(Clone, Debug)]
enum Rows {
    /// Opened by this tenure: all there.
    Whole { rows: Arc<[Row]>, before: Mark },
    /// Opened by an earlier tenure: as they come from the stream again.
    Collecting(Vec<Row>),
}

impl Rows {
    fn as_slice(&self) -> &[Row] {
        match self {
            Self::Whole { rows, .. } => rows,
            Self::Collecting(rows) => rows,
        }
    }
}

/// What happens next to an open batch.
#[derive(Clone, Debug)]
enum Stage {
    /// The write that opens it is not known to be stored.
    Intent,
    /// To be sent when due; under way.
    Send(Ask),
    /// To be read back when due; under way.
    ReadBack(Ask),
    /// Read back; what is missing must come from the stream first.
    Collect,
    /// The token is burned: the write that raises the generation is wanted, or under way.
    Raise,
    /// Needs a person.
    Stopped,
}

/// A batch that stands in the record, or is about to.
#[derive(Clone, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "facts that hold or not, each by itself; the state is `stage`"
)]
struct Open {
    batch: Batch,
    target: Target,
    rows: Rows,
    stage: Stage,
    /// Some attempt may have written something without our knowing.
    doubted: bool,
    /// A send under the current token was definitely answered success.
    succeeded: bool,
    /// What a read-back found, or nothing yet.
    found: Option<Vec<Seq>>,
    /// Rows of it are gone from the stream.
    short: bool,
    /// Its intent has aged: the record's answer is waited for, not a time.
    awaits_proof: bool,
    tries: u32,
    first_sent: Option<Instant>,
}

impl Open {
    fn is_inherited(&self) -> bool {
        matches!(self.rows, Rows::Collecting(_))
    }

    /// Whether every row is at hand that can be had.
    fn is_collected(&self) -> bool {
        self.short || self.rows.as_slice().len() as u64 >= u64::from(self.batch.rows)
    }

    fn missing(&self) -> Vec<Row> {
        let found = self.found.as_deref().unwrap_or_default();
        self.rows.as_slice().iter().filter(|row| found.binary_search(&row.seq).is_err()).cloned().collect()
    }
}

/// A table is described again after this long: its window can be taken away, its engine changed.
const DESCRIBED_FOR: Duration = Duration::from_mins(1);

/// Where a lane's rows go.
#[derive(Clone, Debug)]
struct Destination {
    /// For the next batch; none while it is not known.
    target: Option<Target>,
    /// What people were told last.
    told: Option<Target>,
    /// To be described when due; under way.
    ask: Ask,
    tries: u32,
}

/// A table's rows, in order.
#[derive(Clone, Debug)]
pub(crate) struct Lane {
    table: TableName,
    /// Every row at or below it is done, as the stored record says.
    done: Seq,
    /// The last row of a batch that is in the store although no stored record says so yet.
    finished: Option<Seq>,
    open: Option<Open>,
    held: VecDeque<Held>,
    held_bytes: u64,
    destination: Destination,
    trouble: Option<Trouble>,
}

impl Lane {
    /// A lane without rows, done up to `done`.
    pub(crate) fn new(table: TableName, done: Seq, target: Option<Target>, now: Instant) -> Self {
        let ask = Ask::at(if target.is_some() { now + DESCRIBED_FOR } else { now });
        let destination = Destination { told: target.clone(), target, ask, tries: 0 };
        Self {
            table,
            done,
            finished: None,
            open: None,
            held: VecDeque::new(),
            held_bytes: 0,
            destination,
            trouble: None,
        }
    }

    /// A lane as an earlier tenure left it.
    pub(crate) fn inherit(table: TableName, record: &LaneRecord, now: Instant) -> Self {
        let mut lane = Self::new(table, record.done, None, now);
        lane.open = record.open.clone().map(|OpenBatch { batch, target }| Open {
            batch,
            stage: if target.level.can_read_back() && safeguard(Rule::ReadBackInherited) {
                Stage::ReadBack(Ask::at(now))
            } else {
                Stage::Collect
            },
            target,
            rows: Rows::Collecting(Vec::new()),
            doubted: true,
            succeeded: false,
            found: None,
            short: false,
            awaits_proof: false,
            tries: 0,
            first_sent: None,
        });
        lane
    }

    /// Every row at or below it is in the store.
    pub(crate) fn done(&self) -> Seq {
        self.finished.unwrap_or(self.done)
    }

    /// Where the lane's rows go, if that is known.
    pub(crate) fn target(&self) -> Option<&Target> {
        self.destination.target.as_ref()
    }

    /// Why it does not get on.
    pub(crate) fn trouble(&self) -> Option<&Trouble> {
        self.trouble.as_ref()
    }

    /// Nothing to write and nothing that the record must say beside its floor.
    pub(crate) fn is_at_rest(&self, floor: Seq) -> bool {
        self.open.is_none() && self.held.is_empty() && self.finished.is_none() && self.done <= floor
    }

    /// Nothing more can be done without rows from the stream or without a person: a halt does not wait.
    pub(crate) fn is_stranded(&self) -> bool {
        match &self.open {
            Some(open) => match open.stage {
                Stage::Stopped => true,
                Stage::Collect => !open.is_collected(),
                _ => false,
            },
            None => {
                self.finished.is_none()
                    && matches!(
                        self.trouble,
                        Some(Trouble::Table(_) | Trouble::BadRow { .. } | Trouble::Stopped(_))
                    )
            }
        }
    }

    /// Whether it has anything left to write.
    pub(crate) fn is_idle(&self) -> bool {
        self.open.is_none() && self.held.is_empty() && self.finished.is_none()
    }

    /// Rows held: waiting, and in the open batch.
    pub(crate) fn rows_held(&self) -> u64 {
        (self.held.len() + self.open.as_ref().map_or(0, |open| open.rows.as_slice().len())) as u64
    }

    /// The last row of a batch that this tenure opened.
    pub(crate) fn open_until(&self) -> Option<Mark> {
        match &self.open {
            Some(Open { rows: Rows::Whole { rows, .. }, .. }) => rows.last().map(Row::mark),
            _ => None,
        }
    }

    /// How many rows an inherited batch still waits for, and what it holds; none if it waits for none.
    pub(crate) fn collecting(&self) -> Option<(u64, Freed)> {
        let open = self.open.as_ref().filter(|open| open.is_inherited() && !open.is_collected())?;
        let rows = open.rows.as_slice();
        Some((u64::from(open.batch.rows) - rows.len() as u64, Freed::of(rows)))
    }

    /// How far the floor may go for this lane: none, if the lane does not hold it back. An inherited
    /// batch holds it where it is.
    pub(crate) fn floor_bound(&self, floor: Mark) -> Option<Mark> {
        match &self.open {
            Some(Open { rows: Rows::Whole { before, .. }, .. }) => Some(*before),
            Some(Open { rows: Rows::Collecting(_), .. }) => Some(floor),
            None => self.held.front().map(|held| held.before),
        }
    }

    /// Takes an accepted row. `before` is the row that the shard accepted before it.
    ///
    /// Returns the row's weight if it is held now; none if it was done before and is dropped.
    pub(crate) fn accept(&mut self, row: Row, before: Mark, now: Instant) -> bool {
        if row.seq <= self.done() && safeguard(Rule::DoneRowsDropped) {
            return false;
        }
        if let Some(open) = &mut self.open {
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
        self.held_bytes += row.payload.len() as u64;
        self.held.push_back(Held { row, before, accepted_at: now });
        true
    }

    /// Every row of the shard that the stream still has was accepted: what an inherited batch lacks now
    /// will not come any more.
    pub(crate) fn stream_exhausted(&mut self) {
        if let Some(open) = &mut self.open
            && open.is_inherited()
            && !open.is_collected()
        {
            open.short = true;
        }
    }

    /// Whether rows wait that may go into a batch now.
    pub(crate) fn wants_batch(&self, now: Instant, closing: Closing) -> bool {
        self.open.is_none() && self.closing_at(now, closing).is_some_and(|at| at <= now)
    }

    /// When the rows that wait are to be closed into a batch: none, if there are none, or they cannot be.
    fn closing_at(&self, now: Instant, closing: Closing) -> Option<Instant> {
        self.target()?;
        let first = self.held.front().filter(|held| held.row.verdict == Verdict::Good)?;
        let full = self.held.len() as u64 >= u64::from(closing.limits.max_rows)
            || self.held_bytes >= closing.limits.max_bytes;
        // A bad row ends the batch before it, and will not become good by waiting.
        let cut = self.held.back().is_some_and(|held| held.row.verdict != Verdict::Good);
        Some(if full || cut || closing.at_once { now } else { first.accepted_at + closing.limits.max_age })
    }

    /// Closes a batch of the rows that wait, if it is time. Its intent is to be written next.
    pub(crate) fn close_batch(&mut self, now: Instant, closing: Closing) {
        if !self.wants_batch(now, closing) {
            return;
        }
        let Some(target) = self.target().cloned() else { return };
        let Some(before) = self.held.front().map(|held| held.before) else { return };
        let mut rows = Vec::new();
        let mut bytes = 0;
        while let Some(next) = self.held.front() {
            let size = next.row.payload.len() as u64;
            let fits = rows.is_empty()
                || (rows.len() < closing.limits.max_rows as usize
                    && bytes + size <= closing.limits.max_bytes);
            if !fits || next.row.verdict != Verdict::Good {
                break;
            }
            let Some(next) = self.held.pop_front() else { break };
            bytes += size;
            rows.push(next.row);
        }
        self.held_bytes -= bytes;
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return };
        let batch = Batch {
            first: first.seq,
            last: last.seq,
            rows: u32::try_from(rows.len()).unwrap_or(u32::MAX),
            generation: 0,
        };
        debug_assert_eq!(batch.defect(), None);
        debug_assert!(batch.first > self.done());
        self.open = Some(Open {
            batch,
            target,
            rows: Rows::Whole { rows: rows.into(), before },
            stage: if safeguard(Rule::IntentFirst)
                && (safeguard(Rule::OneBatchPerLane) || self.finished.is_none())
            {
                Stage::Intent
            } else {
                Stage::Send(Ask::at(now))
            },
            doubted: false,
            succeeded: false,
            found: None,
            short: false,
            awaits_proof: false,
            tries: 0,
            first_sent: None,
        });
    }

    /// Whether the record lacks something of this lane.
    pub(crate) fn wants_write(&self) -> bool {
        self.finished.is_some()
            || self.open.as_ref().is_some_and(|open| matches!(open.stage, Stage::Intent | Stage::Raise))
    }

    /// What the record is to say of this lane, given the floor that it will have.
    pub(crate) fn to_record(&self, floor: Seq) -> Option<LaneRecord> {
        let open = self.open.as_ref().map(|open| {
            let mut batch = open.batch;
            if matches!(open.stage, Stage::Raise) {
                batch.generation += 1;
            }
            OpenBatch { batch, target: open.target.clone() }
        });
        let done = self.done();
        (open.is_some() || done > floor).then_some(LaneRecord { done, open })
    }

    /// At most this many bytes of the record are this lane's.
    pub(crate) fn record_size(&self) -> usize {
        let target = self.target().map_or(0, |target| target.database.len() + target.table.len());
        // JSON may spell one byte in six.
        256 + 6 * (self.table.as_str().len() + target)
    }

    /// A record is known to be stored; `record` is what it says of this lane, with its floor.
    pub(crate) fn on_stored(&mut self, now: Instant, record: Option<&LaneRecord>, floor: Seq) {
        let done = record.map_or(floor, |lane| lane.done);
        self.done = self.done.max(done);
        if self.finished.is_some_and(|finished| finished <= self.done) {
            self.finished = None;
        }
        let Some(open) = &mut self.open else { return };
        let Some(stored) = record.and_then(|lane| lane.open.as_ref()) else { return };
        match open.stage {
            Stage::Intent if stored.batch == open.batch => open.stage = Stage::Send(Ask::at(now)),
            Stage::Raise if stored.batch.generation == open.batch.generation + 1 => {
                open.batch.generation += 1;
                open.succeeded = false;
                open.stage = Stage::Send(Ask::at(now));
            }
            _ => {}
        }
    }

    /// Does what is due: describes, reads back, sends. Says whether the record must be read again first.
    pub(crate) fn advance(&mut self, cx: &mut Context<'_>) -> Advance {
        if self.wants_description()
            && let Some(attempt) = self.destination.ask.take(cx.now, cx.attempts)
        {
            let table = self.table.clone();
            cx.out.store(Command::Describe { attempt, shard: cx.shard, table });
        }
        if let Some(held) = self.held.front()
            && self.open.is_none()
            && let Verdict::Bad(why) = &held.row.verdict
        {
            let trouble = Trouble::BadRow { seq: held.row.seq, why: why.to_string() };
            self.set_trouble(trouble, cx);
        }
        let mut progress = Advance::default();
        loop {
            let Some(open) = &mut self.open else { return progress };
            match &mut open.stage {
                Stage::Intent | Stage::Raise | Stage::Stopped => return progress,
                Stage::ReadBack(ask) => {
                    // The store bounds the life of a read-back; this only outlives a lost answer.
                    let Some(attempt) = ask.take_patient(cx.now, cx.attempts, cx.patience) else {
                        return progress;
                    };
                    cx.out.store(Command::ReadBack {
                        attempt,
                        shard: cx.shard,
                        table: self.table.clone(),
                        target: open.target.clone(),
                        created: cx.created,
                        first: open.batch.first,
                        last: open.batch.last,
                    });
                    return progress;
                }
                Stage::Collect => {
                    if !open.is_collected() {
                        return progress;
                    }
                    open.stage = Stage::Send(Ask::at(cx.now));
                }
                Stage::Send(ask) => {
                    if ask.due() > cx.now {
                        return progress;
                    }
                    if ask.timed_out(cx.now) {
                        open.doubted = true;
                        if open.target.level.can_read_back() {
                            open.stage = Stage::ReadBack(Ask::at(cx.now));
                            continue;
                        }
                    }
                    if open.rows.as_slice().len() as u64 > u64::from(open.batch.rows)
                        && safeguard(Rule::SameBounds)
                    {
                        let why = "the stream has more rows of the open batch than were sent";
                        open.stage = Stage::Stopped;
                        self.set_trouble(Trouble::Stopped(why.to_owned()), cx);
                        return progress;
                    }
                    let missing: Arc<[Row]> = match (&open.rows, &open.found) {
                        (Rows::Whole { rows, .. }, None) => Arc::clone(rows),
                        _ => open.missing().into(),
                    };
                    if missing.is_empty() {
                        progress.freed = self.finish(cx);
                        continue;
                    }
                    open.awaits_proof =
                        cx.now.since(cx.proven_at) >= cx.stale && safeguard(Rule::StaleIntentRead);
                    if open.awaits_proof {
                        progress.stale = true;
                        return progress;
                    }
                    let Stage::Send(ask) = &mut open.stage else { return progress };
                    let Some(attempt) = ask.take_patient(cx.now, cx.attempts, cx.patience) else {
                        return progress;
                    };
                    let mut tokened = open.batch;
                    if open.short && !safeguard(Rule::PurgedKeepsToken) {
                        tokened.rows = u32::try_from(open.rows.as_slice().len()).unwrap_or(u32::MAX);
                    }
                    let token = tokened.token(cx.stream, cx.created);
                    let token = if safeguard(Rule::SameToken) {
                        token
                    } else {
                        crate::ports::store::Token(format!("{}#{}", token.0, attempt.0).into())
                    };
                    open.tries += 1;
                    open.first_sent.get_or_insert(cx.now);
                    let send_by = if safeguard(Rule::StaleIntentRead) {
                        cx.proven_at + cx.stale
                    } else {
                        Instant::at(Duration::MAX)
                    };
                    cx.out.store(Command::Insert(Insert {
                        attempt,
                        shard: cx.shard,
                        table: self.table.clone(),
                        target: open.target.clone(),
                        created: cx.created,
                        token,
                        rows: missing,
                        send_by,
                    }));
                    return progress;
                }
            }
        }
    }

    /// Whether somebody waits for it: not a row that can never be inserted.
    fn wants_description(&self) -> bool {
        self.open.is_some() || self.held.front().is_some_and(|held| held.row.verdict == Verdict::Good)
    }

    /// When [`Self::advance`] or, if a batch may be opened at all, [`Self::close_batch`] has something to do.
    pub(crate) fn next_wakeup(&self, now: Instant, closing: Closing, may_open: bool) -> Option<Instant> {
        // A description that is only old waits for something else to happen.
        let describe =
            (self.target().is_none() && self.wants_description()).then(|| self.destination.ask.due());
        let next = match &self.open {
            Some(open) => match &open.stage {
                Stage::Send(_) if open.awaits_proof => None,
                Stage::Send(ask) | Stage::ReadBack(ask) => Some(ask.due()),
                _ => None,
            },
            None => self.closing_at(now, closing).filter(|_| may_open),
        };
        describe.into_iter().chain(next).min()
    }

    /// Takes the answer to an insert.
    pub(crate) fn on_inserted(
        &mut self,
        attempt: Attempt,
        outcome: &InsertOutcome,
        cx: &mut Context<'_>,
    ) -> Freed {
        let Some(open) = &mut self.open else { return Freed::default() };
        let Stage::Send(ask) = &mut open.stage else { return Freed::default() };
        if !ask.awaits(attempt) {
            return Freed::default();
        }
        let can_read_back = open.target.level.can_read_back();
        let wait = backoff(open.tries, MAX_BACKOFF, attempt.0);
        match outcome {
            InsertOutcome::Stored
                if open.doubted && can_read_back && safeguard(Rule::ReadBackAfterSuccess) =>
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
            InsertOutcome::Again(refusal) | InsertOutcome::Doubt(refusal) => {
                open.doubted |= matches!(outcome, InsertOutcome::Doubt(_));
                if open.doubted && can_read_back && safeguard(Rule::ReadBackInDoubt) {
                    open.stage = Stage::ReadBack(Ask::at(cx.now + wait));
                } else {
                    ask.again(cx.now, wait);
                }
                self.refused(refusal, cx);
                Freed::default()
            }
        }
    }

    /// Takes the answer to a read-back.
    pub(crate) fn on_read_back(
        &mut self,
        attempt: Attempt,
        outcome: Result<Found, Refusal>,
        cx: &mut Context<'_>,
    ) -> Freed {
        let Some(open) = &mut self.open else { return Freed::default() };
        let Stage::ReadBack(ask) = &mut open.stage else { return Freed::default() };
        if !ask.awaits(attempt) {
            return Freed::default();
        }
        let found = match outcome {
            Err(refusal) => {
                open.tries += 1;
                ask.again(cx.now, backoff(open.tries, MAX_BACKOFF, attempt.0));
                self.refused(&refusal, cx);
                return Freed::default();
            }
            Ok(found) => found,
        };
        let surplus = found.seqs.len() as u64 > u64::from(open.batch.rows);
        if let Some(seq) = found.repeated {
            let why = format!("row {seq} is in the table more than once");
            open.stage = Stage::Stopped;
            self.set_trouble(Trouble::Stopped(why), cx);
            return Freed::default();
        }
        if surplus {
            let why = format!(
                "the table has {} rows between {} and {}, the open batch {}",
                found.seqs.len(),
                open.batch.first,
                open.batch.last,
                open.batch.rows
            );
            open.stage = Stage::Stopped;
            self.set_trouble(Trouble::Stopped(why), cx);
            return Freed::default();
        }
        if let Rows::Whole { rows, .. } = &open.rows {
            let foreign =
                found.seqs.iter().find(|seq| rows.binary_search_by_key(seq, |row| &row.seq).is_err());
            if let Some(seq) = foreign {
                let why = format!(
                    "row {seq} is in the table and not among its rows: does another table's configuration name it?"
                );
                open.stage = Stage::Stopped;
                self.set_trouble(Trouble::Stopped(why), cx);
                return Freed::default();
            }
        }
        if found.seqs.len() as u64 == u64::from(open.batch.rows) {
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
                open.stage = Stage::Stopped;
                self.set_trouble(Trouble::Stopped(why), cx);
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

    /// Takes the answer to a description.
    pub(crate) fn on_described(
        &mut self,
        attempt: Attempt,
        outcome: Result<Target, DescribeError>,
        cx: &mut Context<'_>,
    ) {
        let Destination { target, told, ask, tries } = &mut self.destination;
        if !ask.awaits(attempt) {
            return;
        }
        match outcome {
            Ok(found) => {
                *tries = 0;
                ask.again(cx.now, DESCRIBED_FOR);
                if told.as_ref() != Some(&found) {
                    cx.out.notice(Notice::Described { table: self.table.clone(), target: found.clone() });
                    *told = Some(found.clone());
                }
                *target = Some(found);
                if matches!(self.trouble, Some(Trouble::Table(_))) {
                    self.clear_trouble(cx);
                }
            }
            Err(error) => {
                *tries += 1;
                ask.again(cx.now, backoff(*tries, MAX_BACKOFF, attempt.0));
                let trouble = match error {
                    // What was known a minute ago is good enough until somebody can be asked again.
                    DescribeError::Failed(_) if target.is_some() => return,
                    DescribeError::Failed(refusal) => Trouble::Store(refusal.to_string()),
                    other => {
                        *target = None;
                        Trouble::Table(other.to_string())
                    }
                };
                self.set_trouble(trouble, cx);
            }
        }
    }

    /// The batch is in the store. Its rows need not be held any more: should the write that says so fail,
    /// the tenure is over and the heir decides.
    fn finish(&mut self, cx: &mut Context<'_>) -> Freed {
        let Some(open) = self.open.take() else { return Freed::default() };
        let rows = open.rows.as_slice();
        let freed = Freed::of(rows);
        if open.short {
            let found = open.found.as_deref().unwrap_or_default();
            let here = found.len() + rows.iter().filter(|row| found.binary_search(&row.seq).is_err()).count();
            let lost = u64::from(open.batch.rows).saturating_sub(here as u64);
            if lost > 0 {
                cx.out.notice(Notice::RowsRemoved { table: self.table.clone(), batch: open.batch, lost });
            }
        }
        self.finished = Some(open.batch.last);
        cx.out.notice(Notice::BatchStored {
            table: self.table.clone(),
            batch: open.batch,
            attempts: open.tries,
            took: open.first_sent.map_or(Duration::ZERO, |sent| cx.now.since(sent)),
        });
        self.clear_trouble(cx);
        freed
    }

    fn refused(&mut self, refusal: &Refusal, cx: &mut Context<'_>) {
        // The table may be another one by now (made anew, a column added): the next batch asks.
        if self.destination.target.take().is_some() {
            self.destination.ask = Ask::at(cx.now);
        }
        self.set_trouble(Trouble::Store(refusal.to_string()), cx);
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
        if let Some(open) = &self.open {
            if open.batch.first <= last || open.batch.first <= floor {
                return Some(format!("the open batch {:?} starts at or below done or floor", open.batch));
            }
            let rows = open.rows.as_slice();
            if rows.windows(2).any(|pair| pair[0].seq >= pair[1].seq) {
                return Some("the open batch is out of order".to_owned());
            }
            if let (Rows::Whole { .. }, Some(first), Some(end)) = (&open.rows, rows.first(), rows.last())
                && (first.seq, end.seq, rows.len())
                    != (open.batch.first, open.batch.last, open.batch.rows as usize)
            {
                return Some("the open batch is not its numbers".to_owned());
            }
            last = open.batch.last;
        }
        for held in &self.held {
            if held.row.seq <= last {
                return Some(format!("row {} waits behind row {last}", held.row.seq));
            }
            last = held.row.seq;
        }
        None
    }
}

/// What [`Lane::advance`] did beside its actions.
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct Advance {
    /// The record must be read again before the batch may be sent.
    pub(crate) stale: bool,
    /// Rows that need not be held any more.
    pub(crate) freed: Freed,
}
