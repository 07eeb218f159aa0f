//! What is counted, for Prometheus.
//!
//! No label takes an unbounded set of values: a shard is one of those configured, a reason is one of an enum, and
//! tables that the configuration does not name (anyone can publish to any) share the value `other`.

use std::collections::BTreeSet;
use std::time::Duration;

use holdfast_core::notice::ResyncReason;
use holdfast_core::ports::dead_letters::Cause;
use holdfast_core::ports::store::Class;
use holdfast_core::row::TableName;
use metrics::{
    SharedString, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
    with_local_recorder,
};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};

use crate::process::Gauges;

/// The table of all that the configuration does not name. A table of this name is counted there, too.
const OTHER: &str = "other";

/// Upper bounds of what takes time, in seconds.
const SECONDS: [f64; 14] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];

/// Upper bounds of what has rows.
const ROWS: [f64; 12] = [1.0, 10.0, 100.0, 500.0, 1e3, 2.5e3, 5e3, 1e4, 2.5e4, 5e4, 1e5, 1e6];

/// How a batch came out of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is in the store.
    Stored,
    /// It was cut in two for a bad row.
    Split,
    /// It was answered as stored and is not there: sent under another token.
    Swallowed,
    /// Rows of it were removed from the stream before they were written.
    Short,
}

impl Outcome {
    const ALL: [Self; 4] = [Self::Stored, Self::Split, Self::Swallowed, Self::Short];

    const fn key(self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::Split => "split",
            Self::Swallowed => "swallowed",
            Self::Short => "short",
        }
    }
}

/// The counts of one process.
pub struct Metrics {
    recorder: PrometheusRecorder,
    tables: BTreeSet<String>,
}

impl Metrics {
    /// Counts from zero. `tables` are those that have a label value of their own.
    ///
    /// # Panics
    /// Never: there are bounds for every histogram.
    #[must_use]
    pub fn new(tables: impl IntoIterator<Item = String>) -> Self {
        let bounded = |builder: PrometheusBuilder, name: &str, bounds: &[f64]| {
            let matcher = Matcher::Full(name.to_owned());
            builder.set_buckets_for_metric(matcher, bounds).expect("there are bounds")
        };
        let mut builder = PrometheusBuilder::new();
        for name in ["holdfast_insert_seconds", "holdfast_handover_seconds", "holdfast_takeover_seconds"] {
            builder = bounded(builder, name, &SECONDS);
        }
        builder = bounded(builder, "holdfast_batch_rows", &ROWS);
        let metrics = Self { recorder: builder.build_recorder(), tables: tables.into_iter().collect() };
        metrics.with(describe);
        metrics.begin();
        metrics
    }

    fn with<T>(&self, act: impl FnOnce() -> T) -> T {
        with_local_recorder(&self.recorder, act)
    }

    fn table(&self, table: &TableName) -> SharedString {
        match self.tables.get(table.as_str()) {
            Some(known) => known.clone().into(),
            None => OTHER.into(),
        }
    }

    /// Every series that can be named beforehand exists from the start, so that its first count is an increase.
    fn begin(&self) {
        self.with(|| {
            for name in [
                "holdfast_rows_repeated_total",
                "holdfast_pins_lost_total",
                "holdfast_ledger_writes_total",
                "holdfast_ledger_conflicts_total",
            ] {
                counter!(name).increment(0);
            }
            for reason in RESETS {
                counter!("holdfast_resets_total", "reason" => reason.key()).increment(0);
            }
            for class in CLASSES {
                counter!("holdfast_insert_retries_total", "class" => class.key()).increment(0);
            }
            counter!("holdfast_handovers_total", "reason" => "shutdown").increment(0);
            for table in self.tables.iter().map(String::as_str).chain([OTHER]) {
                let table: SharedString = table.to_owned().into();
                counter!("holdfast_rows_written_total", "table" => table.clone()).increment(0);
                for outcome in Outcome::ALL {
                    counter!("holdfast_batches_total", "table" => table.clone(), "outcome" => outcome.key())
                        .increment(0);
                }
                for cause in CAUSES {
                    counter!("holdfast_rows_dead_lettered_total", "table" => table.clone(), "reason" => cause.key())
                        .increment(0);
                }
            }
        });
    }

    /// A batch is in the store.
    pub fn stored(&self, table: &TableName, rows: u32, took: Duration) {
        let table = self.table(table);
        self.with(|| {
            counter!("holdfast_rows_written_total", "table" => table.clone()).increment(u64::from(rows));
            histogram!("holdfast_insert_seconds").record(took);
            histogram!("holdfast_batch_rows").record(rows);
        });
        self.batch_label(table, Outcome::Stored);
    }

    /// A batch came out in another way.
    pub fn batch(&self, table: &TableName, outcome: Outcome) {
        self.batch_label(self.table(table), outcome);
    }

    fn batch_label(&self, table: SharedString, outcome: Outcome) {
        self.with(|| {
            counter!("holdfast_batches_total", "table" => table, "outcome" => outcome.key()).increment(1);
        });
    }

    /// The store refused an attempt, or did not answer it.
    pub fn refused(&self, class: Class) {
        self.with(|| counter!("holdfast_insert_retries_total", "class" => class.key()).increment(1));
    }

    /// A row is kept as a dead letter.
    pub fn dead_lettered(&self, table: &TableName, cause: Cause) {
        let table = self.table(table);
        self.with(|| {
            counter!("holdfast_rows_dead_lettered_total", "table" => table, "reason" => cause.key())
                .increment(1);
        });
    }

    /// Rows were delivered again and dropped.
    pub fn repeated(&self, rows: u64) {
        self.with(|| counter!("holdfast_rows_repeated_total").increment(rows));
    }

    /// The consumer was reset.
    pub fn reset(&self, reason: ResyncReason) {
        self.with(|| counter!("holdfast_resets_total", "reason" => reason.key()).increment(1));
    }

    /// A shard was taken over, so long after its pin.
    pub fn taken_over(&self, took: Duration) {
        self.with(|| histogram!("holdfast_takeover_seconds").record(took));
    }

    /// A tenure ended although nobody wanted it to.
    pub fn pin_lost(&self) {
        self.with(|| counter!("holdfast_pins_lost_total").increment(1));
    }

    /// A shard was given up because of `reason`, so long after that was wanted.
    pub fn handed_over(&self, reason: &'static str, took: Duration) {
        self.with(|| {
            counter!("holdfast_handovers_total", "reason" => reason).increment(1);
            histogram!("holdfast_handover_seconds").record(took);
        });
    }

    /// The ledger took a write, or another revision was there.
    pub fn ledger_write(&self, stored: bool) {
        let name = if stored { "holdfast_ledger_writes_total" } else { "holdfast_ledger_conflicts_total" };
        self.with(|| counter!(name).increment(1));
    }

    /// Everything, in Prometheus's text format.
    #[must_use]
    pub fn render(&self, gauges: &Gauges) -> String {
        self.with(|| {
            gauge!("holdfast_shards_owned").set(f64::from(gauges.owned));
            gauge!("holdfast_shards_unowned").set(f64::from(gauges.unowned));
            gauge!("holdfast_members").set(f64::from(gauges.members));
            counter!("holdfast_rows_accepted_total").absolute(gauges.rows_accepted);
            for reason in WAITS {
                let lanes = gauges.waiting.get(reason).copied().unwrap_or(0);
                gauge!("holdfast_lanes_waiting", "reason" => reason).set(lanes as f64);
            }
            for (shard, view) in gauges.shards.iter().enumerate() {
                let shard: SharedString = shard.to_string().into();
                gauge!("holdfast_held_rows", "shard" => shard.clone()).set(view.held_rows as f64);
                gauge!("holdfast_held_bytes", "shard" => shard.clone()).set(view.held_bytes as f64);
                // What is not known has no value, rather than the last one.
                let known = |value: Option<f64>| value.unwrap_or(f64::NAN);
                gauge!("holdfast_backlog_rows", "shard" => shard.clone())
                    .set(known(view.backlog_rows.map(|rows| rows as f64)));
                gauge!("holdfast_oldest_unwritten_seconds", "shard" => shard)
                    .set(known(view.oldest_unwritten_seconds));
            }
        });
        self.recorder.handle().render()
    }

    /// To be called every few seconds: what was recorded is put into its buckets, whether or not anybody asks.
    pub fn upkeep(&self) {
        self.recorder.handle().run_upkeep();
    }
}

const RESETS: [ResyncReason; 9] = [
    ResyncReason::NewPin,
    ResyncReason::Gap,
    ResyncReason::WentBack,
    ResyncReason::OtherPin,
    ResyncReason::Tail,
    ResyncReason::Disrupted,
    ResyncReason::DeadPull,
    ResyncReason::Skipped,
    ResyncReason::Stranded,
];

/// The kinds of trouble that a lane can wait for.
const WAITS: [&str; 5] = ["table", "store", "bad-row", "dead-letters", "stopped"];

const CLASSES: [Class; 6] =
    [Class::Data, Class::Passing, Class::Table, Class::Access, Class::Doubt, Class::Unknown];

const CAUSES: [Cause; 4] = [Cause::Subject, Cause::Payload, Cause::Refused, Cause::UnknownTable];

fn describe() {
    describe_gauge!("holdfast_shards_owned", "Shards that this process owns.");
    describe_gauge!(
        "holdfast_shards_unowned",
        "Shards that ended by themselves, or that nobody has although their rows wait."
    );
    describe_gauge!("holdfast_members", "Daemons that share the shards, this one included.");
    describe_counter!("holdfast_rows_accepted_total", "Rows accepted from the stream, repeats not counted.");
    describe_counter!("holdfast_rows_written_total", "Rows of batches that are in ClickHouse.");
    describe_counter!("holdfast_rows_repeated_total", "Rows delivered again and dropped.");
    describe_counter!("holdfast_rows_dead_lettered_total", "Rows kept as dead letters.");
    describe_counter!("holdfast_batches_total", "Batches by how they came out.");
    describe_histogram!("holdfast_insert_seconds", "From a batch's first attempt to its answer.");
    describe_histogram!("holdfast_batch_rows", "Rows of batches that are in ClickHouse.");
    describe_gauge!("holdfast_held_rows", "Rows held in memory.");
    describe_gauge!("holdfast_held_bytes", "Bytes held in memory, each row's overhead included.");
    describe_gauge!("holdfast_backlog_rows", "Rows of the shard that wait for delivery; NaN: not known.");
    describe_gauge!(
        "holdfast_oldest_unwritten_seconds",
        "How long the oldest row waits that is accepted and not written; 0: none waits; NaN: not known."
    );
    describe_counter!("holdfast_handovers_total", "Shards given up on purpose.");
    describe_histogram!("holdfast_handover_seconds", "From the wish to give a shard up to its release.");
    describe_histogram!("holdfast_takeover_seconds", "From a pin to the stored fence.");
    describe_counter!("holdfast_resets_total", "Resets of a consumer to the recorded floor.");
    describe_counter!("holdfast_pins_lost_total", "Tenures that ended although nobody wanted it.");
    describe_counter!("holdfast_ledger_writes_total", "Records that the ledger took.");
    describe_counter!(
        "holdfast_ledger_conflicts_total",
        "Records that it refused since another revision was there."
    );
    describe_counter!("holdfast_insert_retries_total", "Attempts that ClickHouse refused or did not answer.");
    describe_gauge!("holdfast_lanes_waiting", "Tables that do not get on.");
}
