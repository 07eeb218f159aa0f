//! `cargo xtask bench`: Holdfast beside a plain loop that does the same work, in one run on one machine.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_testbed::build;
use holdfast_testbed::rig::{self, Rig};
use serde::Serialize;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Only this one; without it all are measured
    #[arg(long)]
    only: Option<String>,
    /// Rows of each run
    #[arg(long, default_value_t = 1_000_000)]
    rows: u64,
    /// Runs of each side, in turns; the median counts
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Print the figures as JSON, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

/// One comparison.
#[derive(Debug, Serialize)]
struct Measured {
    name: &'static str,
    holdfast: f64,
    plain: f64,
    ratio: f64,
    unit: &'static str,
    runs: usize,
}

/// What is compared: the name, and the daemon's ack policy. The plain loop always acks each row: without acks it
/// could not go on where it was.
const ALL: [(&str, &str); 2] = [("one-shard-none", "none"), ("one-shard-explicit", "explicit")];

pub(crate) fn run(options: &Options) -> Result<()> {
    let chosen: Vec<_> =
        ALL.iter().filter(|(name, _)| options.only.as_deref().is_none_or(|only| only == *name)).collect();
    if let Some(only) = &options.only
        && chosen.is_empty()
    {
        bail!("no benchmark is called {only}; there are {}", ALL.map(|(name, _)| name).join(", "));
    }
    let runs = options.runs.max(1);
    let mut measured = Vec::new();
    for &(name, ack_policy) in chosen {
        let mut holdfast = Vec::new();
        let mut plain = Vec::new();
        for round in 1..=runs {
            holdfast.push(measure_holdfast(options.rows, ack_policy).context("holdfast")?);
            plain.push(measure_plain(options.rows).context("the plain loop")?);
            eprintln!(
                "{name}, run {round}: holdfast {:.0} rows/s, plain {:.0} rows/s",
                holdfast[round - 1],
                plain[round - 1]
            );
        }
        let (holdfast, plain) = (median(&mut holdfast), median(&mut plain));
        measured.push(Measured { name, holdfast, plain, ratio: holdfast / plain, unit: "rows/s", runs });
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&measured)?);
    } else {
        for Measured { name, holdfast, plain, ratio, unit, .. } in &measured {
            println!("{name}: holdfast {holdfast:.0} {unit}, plain {plain:.0} {unit}, ratio {ratio:.2}");
        }
    }
    Ok(())
}

fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// One shard, one table, rows of 256 bytes that wait in the stream already.
fn loaded(rows: u64, ack_policy: &str) -> Result<Rig> {
    let options = rig::Options { shards: 1, tables: 1, ..rig::Options::default() };
    let rig = Rig::start(options.set("topology.start", "first").set("topology.ack_policy", ack_policy))?;
    rig.publish(0, rows, 256, None)?.finish(Duration::from_mins(5))?;
    Ok(rig)
}

fn measure_holdfast(rows: u64, ack_policy: &str) -> Result<f64> {
    let rig = loaded(rows, ack_policy)?;
    let began = Instant::now();
    let mut daemon = rig.daemon("holdfast").start()?;
    rig.landed(rows, Duration::from_mins(5), |_| daemon.must_run())?;
    let seconds = began.elapsed().as_secs_f64();
    daemon.stop(Duration::from_secs(30))?;
    let verdict = rig.judge(rows)?;
    if !verdict.ok() {
        bail!("{verdict}");
    }
    Ok(rows as f64 / seconds)
}

fn measure_plain(rows: u64) -> Result<f64> {
    let rig = loaded(rows, "none")?;
    let binary = build::testbed_binary("plain-loop")?;
    let began = Instant::now();
    let mut child = Command::new(binary)
        .args([rig.nats.url(), rig.clickhouse.url(), "INGEST".into(), "t0".into(), rows.to_string()])
        .spawn()
        .context("cannot start it")?;
    let landed = rig.landed(rows, Duration::from_mins(5), |_| Ok(()));
    let seconds = began.elapsed().as_secs_f64();
    let status = child.wait().context("cannot wait for it")?;
    landed?;
    if !status.success() {
        bail!("it ended with {status}");
    }
    Ok(rows as f64 / seconds)
}
