//! `cargo xtask mutate`: cargo-mutants on the core, a tenth of all mutants at a time, with the simulator as a judge.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use holdfast_testbed::build;
use serde::Serialize;

use crate::command::{call, cargo, in_words};
use crate::tool;

/// What judges a mutant. Not `determinism`: it knows that the core has changed, and not whether it is wrong.
const JUDGES: [&str; 8] = [
    "--lib",
    "--test=shard",
    "--test=sharing",
    "--test=told",
    "--test=trim",
    "--test=any_claims",
    "--test=any_events",
    "--test=judge",
];
/// How much of the viable mutants must be caught, in a hundred.
const ENOUGH: f64 = 90.0;
/// The most memory that anything may use, in KiB: some mutants would take all there is.
const MEMORY: &str = "12000000";

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Which tenth of all mutants: 0 to 9. Each has some of every part of the core
    #[arg(long, value_name = "N", required_unless_present = "only")]
    tenth: Option<u32>,
    /// Only those whose name (`--list`) this regular expression is found in: to see a new test catch them
    #[arg(long, value_name = "REGEX", conflicts_with = "tenth")]
    only: Option<String>,
    /// Into how many parts all mutants are cut, if not tenths
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    of: u32,
    /// Seeds that the simulator runs for each
    #[arg(long, value_name = "N", default_value_t = 200)]
    seeds: u64,
    /// Print the mutants and nothing else
    #[arg(long)]
    list: bool,
    /// Print the outcome as JSON, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

/// What is printed with `--json`.
#[derive(Debug, Serialize)]
struct Outcome {
    /// Which of how many parts, or which expression.
    part: String,
    seconds: f64,
    mutants: usize,
    /// Those that compile.
    viable: usize,
    caught: usize,
    /// Of those: by never coming to an end.
    timeouts: usize,
    caught_percent: f64,
    missed: Vec<String>,
    ok: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let of = options.of;
    let tool = tool::CARGO_MUTANTS.installed()?;
    let bounded = |program: &Path| {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -v \"$0\" && exec \"$@\"", MEMORY]).arg(program);
        command
    };
    let mut mutants = bounded(&tool);
    mutants.args(["mutants", "--no-config", "--package", "holdfast-core"]);
    let part = match (&options.only, options.tenth) {
        (Some(expression), _) => {
            mutants.args(["--re", expression]);
            format!("/{expression}/")
        }
        (None, Some(tenth)) if tenth < of => {
            mutants.args(["--sharding", "round-robin", "--shard", &format!("{tenth}/{of}")]);
            format!("part {tenth} of {of}")
        }
        _ => bail!("--tenth: there are 0 to {}", of - 1),
    };
    // What is shown to people who look for a fault; what is not in this build; what says nothing else in it.
    mutants.args([
        "--exclude-re",
        r"impl .*Debug for|switch::|guard !safeguard\([^)]*\) with false|guard safeguard\([^)]*\) with true",
    ]);
    if options.list {
        return call({
            mutants.arg("--list");
            mutants
        });
    }
    // One folder for all of them: what does not change is built once.
    let target = build::workspace().join("target/mutants");
    let environment = [
        ("HOLDFAST_SEEDS", options.seeds.to_string()),
        ("HOLDFAST_SEQUENCES", "3000".to_owned()),
        // How a mutant fails is nobody's concern.
        ("PROPTEST_MAX_SHRINK_ITERS", "0".to_owned()),
        ("CARGO_TARGET_DIR", target.display().to_string()),
    ];
    // But for what the last run has left of ours: cargo would take a mutant for the core.
    let mut clean = cargo(["clean", "--quiet", "--profile", "mutate"]);
    clean.args(["--package", "holdfast-core", "--package", "holdfast-sim"]).envs(environment.clone());
    call(clean)?;
    eprintln!("the judges must let the core pass as it is");
    let judge = || {
        let mut judge = bounded(Path::new(&build::cargo()));
        judge.args(["test", "--quiet", "--profile", "mutate", "--package", "holdfast-core"]);
        judge.args(["--package", "holdfast-sim"]).args(JUDGES);
        judge.envs(environment.clone()).stdout(Stdio::null());
        judge
    };
    let mut building = judge();
    building.arg("--no-run");
    call(building)?;
    let judged = Instant::now();
    call(judge())?;
    let timeout = (judged.elapsed().as_secs() * 5).max(60);

    let began = Instant::now();
    let results =
        target.join(options.tenth.map_or("only".to_owned(), |tenth| format!("part-{tenth}-of-{of}")));
    fs::create_dir_all(&results).with_context(|| format!("cannot make {}", results.display()))?;
    mutants.args(["--test-package", "holdfast-core,holdfast-sim", "--profile", "mutate"]);
    mutants.args(JUDGES.map(|judge| format!("--cargo-arg={judge}")));
    mutants.args([
        "--gitignore",
        "true",
        // Its own would leave out the simulator.
        "--baseline",
        "skip",
        "--timeout",
        &timeout.to_string(),
        "--jobs",
        "1",
    ]);
    mutants.args(["--colors", "never", "--output"]).arg(&results).envs(environment.clone());
    // Its own words would be in the way of ours.
    mutants.current_dir(build::workspace()).stdin(Stdio::null()).stdout(std::io::stderr());
    let status = mutants.status().with_context(|| format!("cannot run {}", in_words(&mutants)))?;
    // 2 and 3: some were missed, or ran for too long.
    if !matches!(status.code(), Some(0 | 2 | 3)) {
        bail!("this failed ({status}): {}", in_words(&mutants));
    }
    let outcome = outcome(part, &results.join("mutants.out/outcomes.json"), began)?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&outcome)?);
    } else {
        for name in &outcome.missed {
            println!("MISSED {name}");
        }
        println!(
            "{}: {} of {} viable mutants caught, {:.1} % ({} by never ending), in {:.0} s",
            outcome.part,
            outcome.caught,
            outcome.viable,
            outcome.caught_percent,
            outcome.timeouts,
            outcome.seconds
        );
    }
    if !outcome.ok {
        bail!("less than {ENOUGH} % of the viable mutants were caught");
    }
    Ok(())
}

fn outcome(part: String, file: &Path, began: Instant) -> Result<Outcome> {
    let text = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let report: serde_json::Value = serde_json::from_slice(&text)?;
    let outcomes = report["outcomes"].as_array().context("cargo-mutants' report has changed")?;
    let of = |summary: &str| {
        outcomes
            .iter()
            .filter(|outcome| outcome["summary"] == summary)
            .map(|outcome| outcome["scenario"]["Mutant"]["name"].as_str().unwrap_or("?").to_owned())
            .collect::<Vec<_>>()
    };
    let (mut missed, timeouts, unviable) = (of("MissedMutant"), of("Timeout").len(), of("Unviable").len());
    missed.sort();
    let caught = of("CaughtMutant").len() + timeouts;
    let viable = caught + missed.len();
    if viable == 0 {
        bail!("none of them compiles: nothing was judged");
    }
    let caught_percent = caught as f64 * 100.0 / viable as f64;
    Ok(Outcome {
        part,
        seconds: began.elapsed().as_secs_f64(),
        mutants: viable + unviable,
        viable,
        caught,
        timeouts,
        caught_percent,
        missed,
        ok: caught_percent >= ENOUGH,
    })
}
