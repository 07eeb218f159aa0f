//! Whole-system drills: real daemons, real servers, real signals, with figures.

mod bad_rows;
mod blocked_owner;
mod clickhouse_outage;
mod crash;
mod deleted_durable;
mod deleted_stream;
mod frozen;
mod handover;
mod nats_cluster;
mod random_kills;
mod rolling_deploy;
mod rotated_password;
mod sick_table;
mod split_views;
mod stuck_shard;
mod swallowed_retry;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::daemon::Daemon;
use crate::error::Result;
use crate::fleet::Fleet;
use crate::http_proxy::{Answered, HttpProxy, Record};
use crate::rig::{Options, Rig};
use crate::verdict::Verdict;

/// A drill's own figures, by name.
pub type Figures = BTreeMap<&'static str, f64>;

/// How a drill is done.
#[derive(Debug, Clone)]
pub struct Settings {
    /// How often.
    pub rounds: u32,
    /// Phases of seconds instead of minutes: for CI.
    pub short: bool,
    /// `none` or `explicit`.
    pub ack_policy: String,
    /// `limits` or `workqueue`.
    pub retention: String,
    /// Streams that the shards are spread over.
    pub streams: u32,
}

/// Drills that are about one stream, and take no other number of them.
pub const ONE_STREAM: &[&str] =
    &["blocked-owner", "deleted-durable", "deleted-stream", "sick-table", "split-views"];

impl Settings {
    /// A rig's options under these settings.
    fn rig(&self, shards: u32, tables: usize) -> Options {
        Options { shards, tables, ..Options::default() }
            .set("topology.ack_policy", &self.ack_policy)
            .set("topology.retention", &self.retention)
            .set("topology.streams", self.streams)
    }

    /// A time, or a shorter one.
    fn time(&self, long: u64, short: u64) -> Duration {
        Duration::from_secs(if self.short { short } else { long })
    }
}

/// How a drill ended.
#[derive(Debug, Default)]
pub struct Outcome {
    /// What plain SQL says of the rows, over all rounds.
    pub verdict: Verdict,
    /// What else was not as it should be.
    pub faults: Vec<String>,
    /// Its own figures.
    pub figures: Figures,
}

impl Outcome {
    /// Notes what is not as it should be.
    fn demand(&mut self, holds: bool, fault: impl FnOnce() -> String) {
        if !holds {
            self.faults.push(fault());
        }
    }

    /// Adds to a figure.
    fn add(&mut self, name: &'static str, figure: f64) {
        *self.figures.entry(name).or_default() += figure;
    }

    /// Keeps the highest of a figure.
    fn most(&mut self, name: &'static str, figure: f64) {
        let most = self.figures.entry(name).or_default();
        *most = most.max(figure);
    }

    /// Ends a round: a clean stop, and both judges.
    fn judge(&mut self, rig: &Rig, daemon: &mut Daemon, published: u64) -> Result<Verdict> {
        let stopped = daemon.stop(Duration::from_secs(30))?;
        self.demand(stopped.is_success(), || format!("the daemon's clean stop ended with {stopped}"));
        let verdict = rig.judge(published)?;
        self.verdict += verdict;
        self.faults.extend(rig.unproven()?);
        Ok(verdict)
    }

    /// [`judge`](Self::judge), for several daemons.
    fn judge_fleet(&mut self, rig: &Rig, fleet: &mut Fleet<'_>, published: u64) -> Result<Verdict> {
        for ended in fleet.stop_all(Duration::from_secs(30))? {
            self.demand(ended.is_success(), || format!("a daemon's clean stop ended with {ended}"));
        }
        let verdict = rig.judge(published)?;
        self.verdict += verdict;
        self.faults.extend(rig.unproven()?);
        Ok(verdict)
    }
}

/// A stretch of time, to count requests in.
#[derive(Debug, Clone, Copy)]
struct Phase {
    from: Instant,
    until: Instant,
}

impl Phase {
    fn begin() -> Self {
        let now = Instant::now();
        Self { from: now, until: now }
    }

    fn end(mut self) -> Self {
        self.until = Instant::now();
        self
    }

    fn has(&self, record: &Record) -> bool {
        (self.from..self.until).contains(&record.at)
    }

    /// The most refused inserts a minute that any one table was tried with. A phase counts as half a minute at
    /// least: the first tries follow each other fast.
    fn attempts_a_minute(&self, proxy: &HttpProxy) -> f64 {
        let mut attempts: BTreeMap<String, u32> = BTreeMap::new();
        let refused = |record: &Record| !record.client.is_some_and(Answered::is_success);
        for record in proxy.inserts().iter().filter(|record| self.has(record) && refused(record)) {
            *attempts.entry(record.table.as_deref().unwrap_or_default().to_owned()).or_default() += 1;
        }
        let most = attempts.values().copied().max().unwrap_or_default();
        f64::from(most) / self.minutes()
    }

    /// How many requests of any kind failed a minute, for each of so many tables.
    fn requests_a_minute(&self, proxy: &HttpProxy, tables: usize) -> f64 {
        let failed =
            proxy.count(|record| self.has(record) && !record.client.is_some_and(Answered::is_success));
        failed as f64 / tables as f64 / self.minutes()
    }

    fn minutes(&self) -> f64 {
        (self.until - self.from).as_secs_f64().max(30.0) / 60.0
    }
}

/// Requests a minute and table of any kind that failed: attempts, read-backs, questions about the table.
const REQUESTS_A_MINUTE: f64 = 120.0;

/// Attempts a minute that a lane may make while it is refused: after the first few, one in five seconds, less
/// or more a quarter, and a margin.
const ATTEMPTS_A_MINUTE: f64 = 30.0;

/// Does a drill; tells a line now and then.
pub type Run = fn(&Settings, &mut dyn FnMut(&str)) -> Result<Outcome>;

/// A drill.
#[derive(Debug)]
pub struct Drill {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it does.
    pub about: &'static str,
    /// How often it is done unless told otherwise.
    pub rounds: u32,
    /// Does it.
    pub run: Run,
}

/// All of them.
pub const ALL: &[Drill] = &[
    Drill {
        name: "random-kills",
        about: "SIGKILL to daemon, nats-server and ClickHouse at random moments of a load, and restarts",
        rounds: 3,
        run: random_kills::run,
    },
    Drill {
        name: "swallowed-retry",
        about: "inserts that ClickHouse fails and then answers with success for ever, storing nothing",
        rounds: 2,
        run: swallowed_retry::run,
    },
    Drill {
        name: "bad-rows",
        about: "rows that ClickHouse refuses among those it takes, and SIGKILLs while they are looked for",
        rounds: 3,
        run: bad_rows::run,
    },
    Drill {
        name: "rotated-password",
        about: "ClickHouse refuses the daemon's password for a minute of a load",
        rounds: 1,
        run: rotated_password::run,
    },
    Drill {
        name: "clickhouse-outage",
        about: "three minutes of a full load without ClickHouse: silent, refusing, gone; SIGTERM in each",
        rounds: 1,
        run: clickhouse_outage::run,
    },
    Drill {
        name: "sick-table",
        about: "one table is gone, or refuses every row; the others' rows must not wait for it",
        rounds: 1,
        run: sick_table::run,
    },
    Drill {
        name: "crash",
        about: "SIGKILL to one of three daemons under load: how soon the heirs take rows",
        rounds: 20,
        run: crash::run,
    },
    Drill {
        name: "handover",
        about: "three daemons under load; one is stopped and one started, again and again",
        rounds: 1,
        run: handover::run,
    },
    Drill {
        name: "rolling-deploy",
        about: "three daemons under load are replaced one by one: no row waits for long",
        rounds: 3,
        run: rolling_deploy::run,
    },
    Drill {
        name: "frozen",
        about: "SIGSTOP to an owner with an insert on its way, and SIGCONT when others have its shards",
        rounds: 2,
        run: frozen::run,
    },
    Drill {
        name: "blocked-owner",
        about: "inserts hang for longer than the pinned TTL, with a rival for the pin: it stays until released",
        rounds: 1,
        run: blocked_owner::run,
    },
    Drill {
        name: "stuck-shard",
        about: "one table's inserts hang; rows of the other shards must be stored as soon as without",
        rounds: 1,
        run: stuck_shard::run,
    },
    Drill {
        name: "split-views",
        about: "a daemon is cut off from the bucket but not from the consumers, and the other way round",
        rounds: 2,
        run: split_views::run,
    },
    Drill {
        name: "nats-cluster",
        about: "a cluster of three: consumers' leaders step down, and their nodes are killed, under load",
        rounds: 1,
        run: nats_cluster::run,
    },
    Drill {
        name: "deleted-stream",
        about: "the stream is deleted while every insert hangs: every shard is named soon",
        rounds: 1,
        run: deleted_stream::run,
    },
    Drill {
        name: "deleted-durable",
        about: "a shard's consumer is deleted while every insert hangs: named soon, by nobody in turn",
        rounds: 1,
        run: deleted_durable::run,
    },
];
