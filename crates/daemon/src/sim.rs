//! `holdfast sim`: the simulator, many seeds or one.

use std::fs;
use std::io::IsTerminal;
use std::num::NonZero;

use holdfast_sim::{Options, Report, campaign, replay, shrunk, timeline};
use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::cli::Sim;
use crate::exit::Exit;
use crate::output;

/// What is printed of a single seed.
#[derive(Debug, Serialize)]
struct Replayed {
    seed: u64,
    lines: usize,
    trace_hash: String,
    violation: Option<String>,
}

/// Runs the simulator and prints what it found.
///
/// # Errors
/// With code 1 if an invariant was broken or a coverage mark never met, once it is printed.
pub fn sim(options: &Sim) -> Result<(), Exit> {
    match options.seed {
        Some(seed) => one(seed, options),
        None => many(options),
    }
}

fn one(seed: u64, options: &Sim) -> Result<(), Exit> {
    let mut trace = replay(seed, options.profile);
    if options.shrink {
        match shrunk(seed, options.profile) {
            Some(small) => trace = small.trace,
            None => eprintln!("seed {seed} breaks nothing; there is nothing to shrink"),
        }
    }
    if let Some(file) = &options.timeline {
        let failed = |error| Exit::error(format!("cannot write {}: {error}", file.display()));
        fs::write(file, timeline(&trace)).map_err(failed)?;
        eprintln!("the run is drawn in {}", file.display());
    }
    let violation = trace.violation.as_ref().map(|found| format!("{}: {}", found.invariant, found.how));
    if options.json.json {
        output::json(&Replayed {
            seed,
            lines: trace.happenings.len(),
            trace_hash: format!("{:016x}", trace.hash),
            violation: violation.clone(),
        })?;
    } else {
        if options.timeline.is_none() {
            for (at, what) in &trace.happenings {
                output::line(format_args!("{:.6} {what}", at.as_secs_f64()))?;
            }
        }
        output::line(format_args!(
            "seed {seed}, profile {}: trace hash {:016x}",
            options.profile, trace.hash
        ))?;
        match &violation {
            Some(violation) => output::line(format_args!("BROKEN {violation}"))?,
            None => output::line("no invariant broken")?,
        }
    }
    if violation.is_some() { Err(Exit::findings()) } else { Ok(()) }
}

fn many(options: &Sim) -> Result<(), Exit> {
    if options.timeline.is_some() {
        return Err(Exit::usage("--timeline draws one run: name it with --seed N"));
    }
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let bar = ProgressBar::new(options.seeds).with_style(
        ProgressStyle::with_template("{bar:40} {human_pos}/{human_len} seeds, {per_sec}, {eta} left")
            .map_err(Exit::error)?,
    );
    if options.json.json || !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let run = Options { first: options.first, seeds: options.seeds, profile: options.profile, threads };
    let report = campaign(&run, &|done| bar.set_position(done));
    bar.finish_and_clear();
    if options.json.json {
        output::json(&report)?;
    } else {
        print(&report, options)?;
    }
    let missed = !report.marks_missed.is_empty() && options.judges_marks();
    if report.violations.is_empty() && !missed { Ok(()) } else { Err(Exit::findings()) }
}

fn print(report: &Report, options: &Sim) -> Result<(), Exit> {
    output::line(format_args!(
        "{} seeds, profile {}: {} simulated seconds in {:.1} s, {} events, {} faults, trace hash {}",
        HumanCount(report.seeds),
        options.profile,
        HumanCount(report.simulated_seconds),
        report.wall_seconds,
        HumanCount(report.events),
        HumanCount(report.faults),
        report.trace_hash
    ))?;
    output::line("")?;
    let marks = report.marks.iter().map(|(mark, times)| [(*mark).to_owned(), times.to_string()]);
    output::table(["MARK", "TIMES"], marks)?;
    output::line("")?;
    if !report.marks_missed.is_empty() {
        let verdict = if options.judges_marks() { "NEVER MET" } else { "not met by so few seeds" };
        output::line(format_args!("{verdict}: {}", report.marks_missed.join(", ")))?;
    }
    for failing in &report.violations {
        output::line(format_args!("BROKEN {} at {} ms: {}", failing.invariant, failing.at_ms, failing.how))?;
        output::line(format_args!("  replay: {}", failing.replay))?;
        if let Some(small) = &failing.shrunk {
            output::line(format_args!(
                "  the same with {} processes, {} rows and these faults:",
                small.processes, small.rows
            ))?;
            for fault in &small.faults {
                output::line(format_args!("    {fault}"))?;
            }
            for line in &small.ends {
                output::line(format_args!("    {line}"))?;
            }
        }
    }
    if report.violations.is_empty() {
        output::line("No invariant broken.")?;
    }
    Ok(())
}
