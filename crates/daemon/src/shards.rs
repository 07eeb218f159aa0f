//! What the process knows of a shard, and what people are told of it: lines in the log for what they need to see,
//! counts for the rest.
//!
//! Levels: `error` for what goes on only when a person does something, `warn` for trouble that is tried again,
//! `info` for changes, `debug` for everything else.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use holdfast_core::batch::Batch;
use holdfast_core::budget::Share;
use holdfast_core::notice::{Notice, Report, ShardFailure, Trouble};
use holdfast_core::ports::delivery::PinId;
use holdfast_core::ports::store::{Level, Target};
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::record::RecordError;
use holdfast_core::row::{ShardId, TableName};
use holdfast_core::shard::Status;
use holdfast_core::time;
use tokio::sync::mpsc::UnboundedSender;
use tracing::{debug, error, info, warn};

use crate::document::Counts;
use crate::driver::Observer;
use crate::metrics::Outcome;
use crate::output;
use crate::process::Process;

/// So many troubles of a shard are shown; the others are counted.
const SHOWN_TROUBLES: usize = 10;

/// So many tables below exactly-once of a shard are shown; the others are counted.
const SHOWN_LEVELS: usize = 100;

/// How often the same kind of trouble of one shard is logged: what is tried again five times a second is told
/// twice a minute.
const TOLD_AGAIN: Duration = Duration::from_secs(30);

/// One shard, as far as the process knows it.
#[derive(Debug)]
pub struct ShardView {
    /// The phase as a word.
    pub phase: &'static str,
    /// It has had a record to start from: rows are taken as they come.
    pub ready: bool,
    /// The pin, while there is one.
    pub pin: Option<PinId>,
    /// The tenure's epoch.
    pub epoch: Option<u64>,
    /// When the tenure began.
    pub owned_since: Option<Instant>,
    /// How long the last takeover took.
    pub takeover: Option<Duration>,
    /// Every row at or below it is done, as far as was known when the shard was ours last.
    pub floor: Option<u64>,
    /// The last row accepted, as far as was known when the shard was ours last.
    pub accepted: Option<u64>,
    /// Rows held.
    pub held_rows: u64,
    /// Bytes held.
    pub held_bytes: u64,
    /// What it may hold.
    pub share: Share,
    /// When the oldest row was accepted that is not written, on the process's clock.
    pub oldest: Option<time::Instant>,
    /// Rows that wait for delivery, if that is known.
    pub backlog_rows: Option<u64>,
    /// Tables at work.
    pub lanes: usize,
    /// Tables that do not get on, and why; the first ten.
    pub troubles: Vec<(TableName, Trouble)>,
    /// How many more there are.
    pub troubles_left_off: u64,
    /// How many there are, by the kind of their trouble.
    pub waiting_lanes: BTreeMap<&'static str, usize>,
    /// Tables that get less than exactly-once; the first hundred.
    pub weaker: BTreeMap<TableName, Target>,
    /// How many more were seen.
    pub weaker_left_off: u64,
    /// Why the ledger does not take the record.
    pub ledger_trouble: Option<Failure>,
    /// What could not be done last, why, and when that was.
    waits: Option<(&'static str, String, Instant)>,
    /// Why the shard ended by itself.
    pub failure: Option<ShardFailure>,
    /// What the machine that runs now has accepted of that, each claim being another machine.
    accepted_rows: u64,
    /// Since the process started.
    pub counts: Counts,
}

impl Default for ShardView {
    fn default() -> Self {
        Self {
            phase: "unclaimed",
            ready: false,
            pin: None,
            epoch: None,
            owned_since: None,
            takeover: None,
            floor: None,
            accepted: None,
            held_rows: 0,
            held_bytes: 0,
            share: Share { rows: 0, bytes: 0 },
            oldest: None,
            backlog_rows: None,
            lanes: 0,
            troubles: Vec::new(),
            troubles_left_off: 0,
            waiting_lanes: BTreeMap::new(),
            weaker: BTreeMap::new(),
            weaker_left_off: 0,
            ledger_trouble: None,
            waits: None,
            failure: None,
            accepted_rows: 0,
            counts: Counts::default(),
        }
    }
}

impl ShardView {
    /// Whether this process writes the shard's rows.
    #[must_use]
    pub fn is_owned(&self) -> bool {
        self.epoch.is_some()
    }

    /// What cannot be done at the moment and is tried again.
    #[must_use]
    pub fn waiting(&self, now: Instant) -> Option<String> {
        let (what, why, at) = self.waits.as_ref()?;
        (now.saturating_duration_since(*at) < TOLD_AGAIN).then(|| format!("cannot {what} now ({why})"))
    }

    /// For how many seconds the oldest row has waited that is accepted and not written; none: nobody here knows,
    /// since the shard is not ours.
    #[must_use]
    pub fn oldest_unwritten(&self, now: time::Instant) -> Option<f64> {
        self.is_owned().then(|| self.oldest.map_or(0.0, |at| now.since(at).as_secs_f64()))
    }

    fn described(&mut self, table: &TableName, target: &Target) {
        if target.level == Level::ExactlyOnce {
            self.weaker.remove(table);
        } else if self.weaker.len() < SHOWN_LEVELS || self.weaker.contains_key(table) {
            self.weaker.insert(table.clone(), target.clone());
        } else {
            self.weaker_left_off += 1;
        }
    }

    fn take(&mut self, status: &Status<'_>) {
        self.phase = status.phase;
        if self.pin.as_ref() != status.pin {
            self.pin = status.pin.cloned();
        }
        if status.epoch.is_none() {
            self.owned_since = None;
        }
        self.epoch = status.epoch;
        if status.epoch.is_some() {
            self.floor = Some(status.floor.0);
            self.accepted = Some(status.accepted.0);
        }
        let before = if status.accepted_rows < self.accepted_rows { 0 } else { self.accepted_rows };
        self.counts.rows_accepted += status.accepted_rows - before;
        self.accepted_rows = status.accepted_rows;
        self.held_rows = status.held_rows;
        self.held_bytes = status.held_bytes;
        self.share = status.share;
        self.oldest = status.oldest;
        self.lanes = status.lanes;
        if !(self.waiting_lanes.is_empty() && status.troubles.is_empty()) {
            self.take_troubles(&status.troubles);
        }
        if self.ledger_trouble.as_ref() != status.ledger_trouble {
            self.ledger_trouble = status.ledger_trouble.cloned();
        }
        if self.failure.as_ref() != status.failure {
            self.failure = status.failure.cloned();
        }
    }

    fn take_troubles(&mut self, troubles: &[(&TableName, &Trouble)]) {
        self.waiting_lanes.clear();
        for (_, trouble) in troubles {
            *self.waiting_lanes.entry(trouble.key()).or_default() += 1;
        }
        let (shown, others) = troubles.split_at(troubles.len().min(SHOWN_TROUBLES));
        self.troubles_left_off = others.len() as u64;
        // This runs after each round of events: nothing is copied that is known.
        let known = self.troubles.iter().map(|(table, trouble)| (table, trouble));
        if !known.eq(shown.iter().copied()) {
            self.troubles =
                shown.iter().map(|(table, trouble)| ((*table).clone(), (*trouble).clone())).collect();
        }
    }
}

/// Watches one shard, or the trimmer.
pub struct Watcher {
    /// None: the trimmer.
    shard: Option<ShardId>,
    process: Arc<Process>,
    reports: UnboundedSender<(ShardId, Report)>,
    /// When which trouble was logged last, and how often it was kept quiet since.
    told: Mutex<BTreeMap<&'static str, (Instant, u64)>>,
}

impl Watcher {
    /// Watches `shard`, and hands its reports on.
    #[must_use]
    pub const fn new(
        shard: ShardId,
        process: Arc<Process>,
        reports: UnboundedSender<(ShardId, Report)>,
    ) -> Self {
        Self { shard: Some(shard), process, reports, told: Mutex::new(BTreeMap::new()) }
    }

    /// Watches the trimmer.
    #[must_use]
    pub const fn of_trimmer(process: Arc<Process>, reports: UnboundedSender<(ShardId, Report)>) -> Self {
        Self { shard: None, process, reports, told: Mutex::new(BTreeMap::new()) }
    }

    /// Whether `what` is to be logged now, and if so how often it was not since the last time.
    fn is_news(&self, what: &'static str) -> Option<u64> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        match told.get_mut(what) {
            Some((at, quiet)) if now.duration_since(*at) < TOLD_AGAIN => {
                *quiet += 1;
                None
            }
            known => {
                let quiet = known.map_or(0, |(_, quiet)| *quiet);
                told.insert(what, (now, 0));
                Some(quiet)
            }
        }
    }

    fn view(&self, act: impl FnOnce(&mut ShardView)) {
        if let Some(shard) = self.shard {
            self.process.with(shard, act);
        }
    }

    fn count(&self, count: impl FnOnce(&mut Counts)) {
        self.view(|view| count(&mut view.counts));
    }

    fn described(&self, table: &TableName, target: &Target) {
        let shard = self.shard.unwrap_or_default().0;
        self.view(|view| view.described(table, target));
        let (into, level) = (format!("{}.{}", target.database, target.table), target.level);
        if level != Level::ExactlyOnce && self.process.is_news_of_level(table, level) {
            let promise = match level {
                Level::Deduplicated => {
                    "a ClickHouse killed within its commit can swallow a retried batch; `holdfast check` says why"
                }
                _ => "rows can be stored twice after trouble; `holdfast check` says why",
            };
            warn!(shard, %table, into, %level, "the table gets less than exactly-once: {promise}");
        } else {
            info!(shard, %table, into, %level, "table described");
        }
    }

    fn trouble(&self, table: &TableName, trouble: &Trouble) {
        let shard = self.shard.unwrap_or_default().0;
        let kind = trouble.key();
        match trouble {
            Trouble::Stopped(_) | Trouble::BadRow { .. } => error!(shard, %table, kind, "{trouble}"),
            Trouble::Table(_) => {
                error!(shard, %table, kind, "{trouble}; its rows wait until somebody changes that");
            }
            Trouble::DeadLetters { failure, .. } if is_for_a_person(failure.class) => {
                error!(shard, %table, kind, "{trouble}, until somebody changes that");
            }
            Trouble::DeadLetters { .. } => warn!(shard, %table, kind, "{trouble}; tried again"),
            Trouble::Store(_) => warn!(shard, %table, kind, "{trouble}; tried again, its rows wait"),
        }
    }
}

/// Whether such a failure lasts until somebody does something about it.
const fn is_for_a_person(class: FailureClass) -> bool {
    match class {
        FailureClass::Full
        | FailureClass::Limit
        | FailureClass::Denied
        | FailureClass::Missing
        | FailureClass::TooOld => true,
        FailureClass::Unanswered | FailureClass::Unavailable | FailureClass::Other => false,
    }
}

impl Observer for Watcher {
    fn notice(&self, notice: &Notice) {
        let shard = self.shard.unwrap_or_default().0;
        let metrics = &self.process.metrics;
        match notice {
            Notice::Pinned => debug!(shard, "pinned"),
            Notice::PinTakenAway => info!(shard, "the pin of a member that is gone was taken away"),
            Notice::TenureBegan { epoch, floor, inherited, took } => {
                self.view(|view| {
                    view.counts.tenures += 1;
                    view.owned_since = Some(Instant::now());
                    view.takeover = Some(*took);
                    view.waits = None;
                    // A tenure describes its tables anew.
                    view.weaker.clear();
                    view.weaker_left_off = 0;
                });
                metrics.taken_over(*took);
                info!(shard, epoch, %floor, inherited, ms = took.as_millis(), "shard taken over");
            }
            Notice::FirstRow { seq } => debug!(shard, %seq, "first row accepted"),
            Notice::TenureEnded { why, held } => {
                self.count(|counts| counts.tenures_lost += 1);
                metrics.pin_lost();
                warn!(shard, held, why, "tenure over; rows that were held come again");
            }
            Notice::Resynced { reason } => {
                self.count(|counts| counts.resets += 1);
                metrics.reset(*reason);
                debug!(shard, reason = reason.key(), "consumer reset");
            }
            Notice::Repeats { rows } => {
                self.count(|counts| counts.rows_repeated += rows);
                metrics.repeated(*rows);
                debug!(shard, rows, "rows delivered again and dropped");
            }
            Notice::BatchStored { table, batch, attempts, took } => {
                self.count(|counts| {
                    counts.batches += 1;
                    counts.rows_written += u64::from(batch.rows);
                    counts.retries += u64::from(attempts.saturating_sub(1));
                });
                metrics.stored(table, batch.rows, *took);
                let Batch { first, last, rows, generation } = batch;
                let ms = took.as_millis();
                debug!(shard, %table, %first, %last, rows, generation, attempts, ms, "batch stored");
            }
            Notice::Described { table, target } => self.described(table, target),
            Notice::Trouble { table, trouble } => self.trouble(table, trouble),
            Notice::Recovered { table } => info!(shard, %table, "table goes on"),
            Notice::TokenBurned { table, batch, missing } => {
                self.count(|counts| counts.tokens_burned += 1);
                metrics.batch(table, Outcome::Swallowed);
                warn!(shard, %table, ?batch, missing, "rows answered as stored are missing; sent under a new token");
            }
            Notice::RowsRemoved { table, batch, lost } => {
                self.count(|counts| counts.rows_removed += lost);
                metrics.batch(table, Outcome::Short);
                error!(shard, %table, ?batch, lost, "rows of an open batch were removed from the stream and are lost");
            }
            Notice::Refused { table, class } => {
                metrics.refused(*class);
                debug!(shard, %table, class = class.key(), "attempt refused");
            }
            Notice::UnknownRefusal { refusal } => {
                if self.process.is_news_of_code(refusal.code) {
                    warn!(
                        shard,
                        "ClickHouse gave an answer that Holdfast does not know ({refusal}); taken for one that \
                         passes, and tried again. Please report it"
                    );
                }
            }
            Notice::Split { table, batch, left } => {
                self.count(|counts| counts.splits += 1);
                metrics.batch(table, Outcome::Split);
                debug!(shard, %table, ?batch, left, "batch refused for a row of it, and cut in two");
            }
            Notice::Parked { table, seq, cause, code, why } => {
                self.count(|counts| counts.rows_dead_lettered += 1);
                metrics.dead_lettered(table, *cause);
                let (cause, why) = (cause.key(), output::reason(why, 300));
                // One line stands for those since the last: a flood of bad rows must not become one of lines.
                if let Some(quiet) = self.is_news("park") {
                    warn!(
                        shard, %table, %seq, cause, code, %why, quiet,
                        "row kept as a dead letter; see `holdfast dead-letters list`"
                    );
                } else {
                    debug!(shard, %table, %seq, cause, code, %why, "row kept as a dead letter");
                }
            }
            Notice::LetterLost { table, seq } => {
                self.count(|counts| counts.rows_removed += 1);
                error!(
                    shard, %table, %seq,
                    "a row that was to be a dead letter was removed from the stream; unless it is kept already it is lost"
                );
            }
            Notice::TableAhead { table, done, holds } => {
                warn!(
                    shard, %table, %done, %holds,
                    "the table has rows that the ledger does not know of: it was lost, or restored older. They are \
                     read back before anything is sent"
                );
            }
            Notice::StreamMadeAnew => {
                warn!(shard, "the stream was made anew under its old name; starting with its first row");
            }
            Notice::Waiting { what, why } => {
                self.view(|view| view.waits = Some((what, why.clone(), Instant::now())));
                if self.shard.is_none() {
                    // Before the shards have their records there is nothing to trim by.
                    if self.process.causes().is_empty() && self.is_news(what).is_some() {
                        warn!("cannot {what} now ({why}); tried again");
                    }
                } else if self.is_news(what).is_some() {
                    warn!(shard, "cannot {what} now ({why}); tried again");
                }
            }
            Notice::Trimmed { rows, below } => debug!(rows, %below, "stream trimmed"),
        }
    }

    fn report(&self, report: &Report) {
        let Some(id) = self.shard else { return };
        let shard = id.0;
        match report {
            Report::Ready | Report::Owned { .. } => self.view(|view| view.ready = true),
            Report::Lost => {}
            Report::Released { clean: true } => info!(shard, "shard released"),
            Report::Released { clean: false } => {
                warn!(shard, "shard released with rows unwritten; they come again at the next start");
            }
            // Of all shards alike, and told once at the end.
            Report::Failed(ShardFailure::StartNeeded) => debug!(shard, "no record and no start"),
            Report::Failed(failure @ ShardFailure::Record(RecordError::Newer(_))) => {
                warn!(shard, "the shard is left to newer daemons: {failure}");
            }
            Report::Failed(failure) => error!(shard, "shard ended: {failure}"),
        }
        drop(self.reports.send((id, report.clone())));
    }

    fn status(&self, status: &Status<'_>) {
        self.view(|view| view.take(status));
    }
}

#[cfg(test)]
mod tests {
    use holdfast_core::row::Seq;

    use super::*;

    fn status<'a>(troubles: Vec<(&'a TableName, &'a Trouble)>) -> Status<'a> {
        Status {
            phase: "owning",
            pin: None,
            epoch: Some(3),
            floor: Seq(10),
            accepted: Seq(20),
            accepted_rows: 7,
            held_rows: 5,
            held_bytes: 500,
            share: Share { rows: 1_000, bytes: 1 << 20 },
            oldest: None,
            lanes: troubles.len(),
            troubles,
            ledger_trouble: None,
            failure: None,
        }
    }

    #[test]
    fn troubles_are_shown_up_to_a_bound_and_all_are_counted() {
        let tables: Vec<_> = (0..30).map(|n| TableName::new(format!("t{n}"))).collect();
        let trouble = Trouble::Store("code 999: later".to_owned());
        let mut view = ShardView::default();
        view.take(&status(tables.iter().map(|table| (table, &trouble)).collect()));
        assert_eq!((view.troubles.len(), view.troubles_left_off), (SHOWN_TROUBLES, 20));
        assert_eq!(view.waiting_lanes, BTreeMap::from([("store", 30)]));
        view.take(&status(Vec::new()));
        assert_eq!((view.troubles.len(), view.troubles_left_off, view.waiting_lanes.len()), (0, 0, 0));
    }

    #[test]
    fn tables_below_exactly_once_are_shown_up_to_a_bound() {
        let target = |level| Target { database: "d".into(), table: "t".into(), level };
        let mut view = ShardView::default();
        for n in 0..SHOWN_LEVELS + 5 {
            view.described(&TableName::new(format!("t{n}")), &target(Level::Deduplicated));
        }
        assert_eq!((view.weaker.len(), view.weaker_left_off), (SHOWN_LEVELS, 5));
        view.described(&TableName::new("t1"), &target(Level::ExactlyOnce));
        assert_eq!(view.weaker.len(), SHOWN_LEVELS - 1);
    }

    #[test]
    fn what_a_lost_shard_knew_of_its_rows_stays() {
        let mut view = ShardView::default();
        view.take(&status(Vec::new()));
        view.take(&Status { epoch: None, floor: Seq(0), accepted: Seq(0), ..status(Vec::new()) });
        assert_eq!((view.is_owned(), view.floor, view.accepted), (false, Some(10), Some(20)));
    }
}
