//! What the process knows of its shards: one line in the log for what people need to see, counts for the
//! rest.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use holdfast_core::notice::{Notice, Report, ShardFailure, Trouble};
use holdfast_core::row::ShardId;
use holdfast_core::shard::Status;
use serde::Serialize;
use tokio::sync::mpsc::UnboundedSender;
use tracing::{debug, error, info, warn};

use crate::driver::Observer;

/// One shard, as `/status` shows it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ShardView {
    /// The phase as a word.
    pub phase: String,
    /// The pin, while there is one.
    pub pin: Option<String>,
    /// The tenure's epoch.
    pub epoch: Option<u64>,
    /// Every row at or below it is done.
    pub floor: u64,
    /// The last row accepted.
    pub accepted: u64,
    /// Rows held.
    pub held_rows: u64,
    /// Bytes held.
    pub held_bytes: u64,
    /// Tables at work.
    pub lanes: usize,
    /// Tables that do not get on, and why; the first ten.
    pub troubles: BTreeMap<String, String>,
    /// Why the ledger does not take the record.
    pub ledger: Option<String>,
    /// Why the shard ended.
    pub failure: Option<String>,
    /// Since the process started.
    pub counts: Counts,
}

/// What a shard did since the process started.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Counts {
    /// Rows in batches that were stored.
    pub rows_written: u64,
    /// Batches stored.
    pub batches: u64,
    /// Attempts beyond the first.
    pub retries: u64,
    /// Rows delivered again and dropped.
    pub rows_repeated: u64,
    /// Resets of the consumer.
    pub resets: u64,
    /// Tenures begun.
    pub tenures: u64,
    /// Tenures lost.
    pub tenures_lost: u64,
    /// Tokens that were burned without their rows.
    pub tokens_burned: u64,
}

/// All shards of this process.
#[derive(Clone, Debug, Default)]
pub struct Shards(Arc<Mutex<BTreeMap<ShardId, ShardView>>>);

impl Shards {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ShardId, ShardView>> {
        // Views are replaced field by field: whatever a panicking holder left is still a view.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How they all stand.
    #[must_use]
    pub fn snapshot(&self) -> BTreeMap<ShardId, ShardView> {
        self.lock().clone()
    }
}

/// Watches one shard, or the trimmer.
pub struct Watcher {
    shard: ShardId,
    shards: Shards,
    reports: UnboundedSender<(ShardId, Report)>,
    /// When which trouble was logged last: what is tried again five times a second is told twice a minute.
    told: Mutex<BTreeMap<&'static str, Instant>>,
}

/// How often the same kind of trouble of one shard is logged.
const TOLD_AGAIN: Duration = Duration::from_secs(30);

impl Watcher {
    /// Watches `shard`, and hands its reports on.
    #[must_use]
    pub const fn new(shard: ShardId, shards: Shards, reports: UnboundedSender<(ShardId, Report)>) -> Self {
        Self { shard, shards, reports, told: Mutex::new(BTreeMap::new()) }
    }

    fn is_news(&self, what: &'static str) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let news = told.get(what).is_none_or(|at| now.duration_since(*at) >= TOLD_AGAIN);
        if news {
            told.insert(what, now);
        }
        news
    }

    fn count(&self, count: impl FnOnce(&mut Counts)) {
        count(&mut self.shards.lock().entry(self.shard).or_default().counts);
    }
}

impl Observer for Watcher {
    fn notice(&self, notice: &Notice) {
        let shard = self.shard.0;
        match notice {
            Notice::Pinned => debug!(shard, "pinned"),
            Notice::TenureBegan { epoch, floor, inherited, took } => {
                self.count(|counts| counts.tenures += 1);
                info!(shard, epoch, %floor, inherited, ms = took.as_millis(), "shard taken over");
            }
            Notice::TenureEnded { why, held } => {
                self.count(|counts| counts.tenures_lost += 1);
                warn!(shard, held, why, "tenure over; rows that were held come again");
            }
            Notice::Resynced { reason } => {
                self.count(|counts| counts.resets += 1);
                debug!(shard, reason = reason.key(), "consumer reset");
            }
            Notice::Repeats { rows } => {
                self.count(|counts| counts.rows_repeated += rows);
                debug!(shard, rows, "rows delivered again and dropped");
            }
            Notice::BatchStored { table, batch, attempts, took } => {
                self.count(|counts| {
                    counts.batches += 1;
                    counts.rows_written += u64::from(batch.rows);
                    counts.retries += u64::from(attempts.saturating_sub(1));
                });
                debug!(shard, %table, ?batch, attempts, ms = took.as_millis(), "batch stored");
            }
            Notice::Described { table, target } => {
                let into = format!("{}.{}", target.database, target.table);
                info!(shard, %table, into, level = %target.level, "table described");
            }
            Notice::Trouble { table, trouble } => match trouble {
                Trouble::Stopped(_) | Trouble::BadRow { .. } => {
                    error!(shard, %table, kind = trouble.key(), "{trouble}");
                }
                Trouble::Table(_) | Trouble::Store(_) => {
                    warn!(shard, %table, kind = trouble.key(), "{trouble}; tried again, its rows wait");
                }
            },
            Notice::Recovered { table } => info!(shard, %table, "table goes on"),
            Notice::TokenBurned { table, batch, missing } => {
                self.count(|counts| counts.tokens_burned += 1);
                warn!(shard, %table, ?batch, missing, "rows answered as stored are missing; sent under a new token");
            }
            Notice::RowsRemoved { table, batch, lost } => {
                error!(shard, %table, ?batch, lost, "rows of an open batch were removed from the stream and are lost");
            }
            Notice::StreamMadeAnew => {
                warn!(shard, "the stream was made anew under its old name; starting with its first row");
            }
            Notice::Waiting { what, why } => {
                if self.is_news(what) {
                    warn!(shard, "cannot {what} now ({why}); tried again");
                }
            }
            Notice::Trimmed { rows, below } => debug!(rows, %below, "stream trimmed"),
        }
    }

    fn report(&self, report: &Report) {
        let shard = self.shard.0;
        match report {
            Report::Ready | Report::Owned | Report::Lost => {}
            Report::Released { clean: true } => info!(shard, "shard released"),
            Report::Released { clean: false } => {
                warn!(shard, "shard released with rows unwritten; they come again at the next start");
            }
            // Of all shards alike, and told once at the end.
            Report::Failed(ShardFailure::StartNeeded) => debug!(shard, "no record and no start"),
            Report::Failed(failure) => error!(shard, "shard ended: {failure}"),
        }
        drop(self.reports.send((self.shard, report.clone())));
    }

    fn status(&self, status: &Status<'_>) {
        let mut shards = self.shards.lock();
        let view = shards.entry(self.shard).or_default();
        if view.phase != status.phase {
            status.phase.clone_into(&mut view.phase);
        }
        if view.pin.as_deref() != status.pin.map(|pin| &*pin.0) {
            view.pin = status.pin.map(|pin| pin.0.to_string());
        }
        view.epoch = status.epoch;
        view.floor = status.floor.0;
        view.accepted = status.accepted.0;
        view.held_rows = status.held_rows;
        view.held_bytes = status.held_bytes;
        view.lanes = status.lanes;
        if !(view.troubles.is_empty() && status.troubles.is_empty()) {
            view.troubles = status
                .troubles
                .iter()
                .take(10)
                .map(|(table, trouble)| (table.to_string(), trouble.to_string()))
                .collect();
        }
        view.ledger = status.ledger_trouble.map(ToString::to_string);
        view.failure = status.failure.map(ShardFailure::to_string);
    }
}
