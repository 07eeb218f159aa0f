//! `cargo xtask try`: rows through the real servers, with a kill on the way, and a verdict.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use holdfast_testbed::rig::{self, Rig};
use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::drill::Topology;
use crate::interrupt;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Rows, over all tables
    #[arg(long, default_value_t = 1_000_000)]
    rows: u64,
    /// Tables
    #[arg(long, default_value_t = 16)]
    tables: usize,
    /// Shards of the stream
    #[arg(long, default_value_t = 8)]
    shards: u32,
    /// How often the daemon is killed (SIGKILL) and started again, evenly spread over the rows
    #[arg(long, default_value_t = 1)]
    kills: u32,
    #[command(flatten)]
    topology: Topology,
    /// Print the verdict as JSON, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

/// What is printed with `--json`.
#[derive(Debug, Serialize)]
struct Verdict {
    rows: u64,
    seconds: f64,
    rows_per_second: f64,
    kills: u32,
    missing: u64,
    repeated: u64,
    out_of_order: u64,
    ok: bool,
}

/// No machine needs longer for a million rows; a smaller load has as much time.
const PATIENCE: Duration = Duration::from_mins(10);

pub(crate) fn run(options: &Options) -> Result<()> {
    if options.tables == 0 || options.rows == 0 {
        bail!("--rows and --tables: at least 1");
    }
    options.topology.check()?;
    let interrupted = interrupt::watch()?;
    let say = |text: &str| {
        if !options.json {
            println!("{text}");
        }
    };
    say("starting nats-server and ClickHouse (fetched and built at the first time)");
    let rig = Rig::start(
        rig::Options { shards: options.shards, tables: options.tables, ..rig::Options::default() }
            .set("topology.ack_policy", &options.topology.ack_policy)
            .set("topology.retention", &options.topology.retention)
            .set("topology.streams", options.topology.streams),
    )?;
    let mut daemon = rig.ready_daemon("holdfast")?;
    say(&format!(
        "publishing {} rows of 256 bytes to {} tables in {} shards",
        HumanCount(options.rows),
        options.tables,
        options.shards
    ));
    let began = Instant::now();
    let mut publishing = rig.publish(0, options.rows, 256, None)?;
    let bar = ProgressBar::new(options.rows).with_style(ProgressStyle::with_template(
        "{bar:40} {human_pos}/{human_len} rows in ClickHouse, {per_sec}, {msg}",
    )?);
    bar.set_message("no kill yet");
    if options.json || !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let mut kills = 0;
    let mut published = false;
    rig.landed(options.rows, PATIENCE, |stored| {
        bar.set_position(stored);
        if interrupted.try_recv().is_ok() {
            return Err(holdfast_testbed::Error::Interrupted);
        }
        published = published || publishing.is_done()?;
        if kills < options.kills
            && stored >= options.rows / u64::from(options.kills + 1) * u64::from(kills + 1)
        {
            daemon.kill()?;
            daemon.restart()?;
            kills += 1;
            bar.set_message(format!("killed and started again {kills} time(s)"));
        }
        daemon.must_run()
    })?;
    let seconds = began.elapsed().as_secs_f64();
    bar.finish_and_clear();
    let stopped = daemon.stop(Duration::from_secs(30))?;
    let found = rig.judge(options.rows)?;
    let unproven = rig.unproven()?;
    let verdict = Verdict {
        rows: options.rows,
        seconds,
        rows_per_second: options.rows as f64 / seconds,
        kills,
        missing: found.missing,
        repeated: found.repeated,
        out_of_order: found.out_of_order,
        ok: found.ok() && unproven.is_empty() && stopped.is_success() && kills == options.kills,
    };
    if options.json {
        println!("{}", serde_json::to_string_pretty(&verdict)?);
    } else {
        println!(
            "{} rows in {:.1} s: {} rows/s, the daemon killed {} time(s)",
            HumanCount(verdict.rows),
            verdict.seconds,
            format_args!("{:.0}", verdict.rows_per_second),
            verdict.kills
        );
        println!("plain SQL on the counter: {found}");
        println!(
            "holdfast verify:          {} of {} tables proven",
            options.tables - unproven.len(),
            options.tables
        );
        println!("clean stop:               {stopped}");
    }
    if !verdict.ok {
        bail!(
            "not every row is there once and in order, or the daemon did not behave\n{}",
            unproven.join("\n")
        );
    }
    Ok(())
}
