//! `cargo xtask fuzz`: the targets of `fuzz/`, built by cargo-fuzz with the toolchain that builds everything else.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use holdfast_testbed::build;
use serde::Serialize;

use crate::command::call;
use crate::tool;

/// One input may take so long, in seconds. (A schedule takes some hundredths.)
const TIMEOUT: u64 = 30;
/// A target may take so many MiB.
const MEMORY: u64 = 2_048;
/// The longest input, in bytes: longer ones are not tried, and shorter ones come first.
const LONGEST: u64 = 4_096;
/// What a target exits with when it is told to end.
const INTERRUPTED: i32 = 72;
/// So many seeds of a target are kept at most, none longer than so many bytes.
const SEEDS: usize = 48;
const SHORT: u64 = 600;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The target's name; `list` prints them, `all` runs them, as many at once as there are processors
    #[arg(default_value = "all")]
    target: String,
    /// How long each runs
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// Plant a fault: switch this safeguard off (`cargo xtask mutants --list` prints them). The target must find it
    #[arg(long, value_name = "RULE")]
    without: Option<String>,
    /// Run the target on this input only, and show what it says
    #[arg(long, value_name = "FILE", conflicts_with = "seconds")]
    replay: Option<PathBuf>,
    /// Make the target's corpus as small as it can be, and keep it as seeds
    #[arg(long, conflicts_with_all = ["seconds", "replay", "without"])]
    keep: bool,
    /// Print the outcomes as JSON, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

impl Options {
    /// Every target for so long.
    pub(crate) fn all(seconds: u64) -> Self {
        let target = "all".to_owned();
        Self { target, seconds, without: None, replay: None, keep: false, json: false }
    }
}

/// What became of a target.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    /// Which target.
    pub(crate) name: String,
    /// Whether it ended as it should: without a finding, or with one where a fault was planted.
    pub(crate) ok: bool,
    /// How long it ran.
    seconds: f64,
    /// Inputs that were tried.
    pub(crate) executions: u64,
    /// Places in the code that were reached, as the fuzzer counts them.
    coverage: u64,
    /// The safeguard that was off.
    #[serde(skip_serializing_if = "Option::is_none")]
    without: Option<String>,
    /// What was found, in words.
    finding: Option<String>,
    /// The command that shows it again.
    pub(crate) replay: Option<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let names = targets()?;
    if options.target == "list" {
        for name in &names {
            println!("{name}");
        }
        return Ok(());
    }
    let chosen: Vec<String> =
        names.into_iter().filter(|name| options.target == "all" || options.target == *name).collect();
    if chosen.is_empty() {
        bail!("no target is called {}; `cargo xtask fuzz list` prints them", options.target);
    }
    let binaries = built(&chosen, options.without.is_some())?;
    if let Some(input) = &options.replay {
        let mut replay = Command::new(binaries.join(&chosen[0]));
        replay.arg(fs::canonicalize(input).with_context(|| format!("cannot find {}", input.display()))?);
        replay.envs(options.without.iter().map(|rule| ("HOLDFAST_OFF", rule)));
        return call(replay);
    }
    if options.keep {
        return chosen.iter().try_for_each(|name| keep(&binaries, name));
    }
    let outcomes = fuzz(&binaries, &chosen, options.seconds, options.without.as_deref())?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&outcomes)?);
    } else {
        for outcome in &outcomes {
            println!("{}", outcome.in_words());
        }
    }
    if outcomes.iter().any(|outcome| !outcome.ok) {
        bail!("a fuzz target did not end as it should");
    }
    Ok(())
}

impl Outcome {
    /// A line or two for people.
    pub(crate) fn in_words(&self) -> String {
        let Self { name, seconds, executions, coverage, .. } = self;
        let said = match (&self.finding, &self.without) {
            (None, None) => "nothing found".to_owned(),
            (None, Some(rule)) => format!("NOT FOUND that {rule} is off"),
            (Some(finding), None) => format!("FOUND {finding}"),
            (Some(finding), Some(rule)) => format!("found that {rule} is off: {finding}"),
        };
        let replay = self.replay.as_ref().map_or_else(String::new, |replay| format!("\n  replay: {replay}"));
        format!("{name:13} {executions:9} inputs in {seconds:5.1} s, {coverage:5} places: {said}{replay}")
    }
}

fn folder() -> PathBuf {
    build::workspace().join("fuzz")
}

/// Every target's name.
pub(crate) fn targets() -> Result<Vec<String>> {
    let files = folder().join("fuzz_targets");
    let entries = fs::read_dir(&files).with_context(|| format!("cannot read {}", files.display()))?;
    let mut names: Vec<String> = entries
        .filter_map(|entry| Some(entry.ok()?.file_name().to_str()?.strip_suffix(".rs")?.to_owned()))
        .collect();
    names.sort();
    Ok(names)
}

/// Builds targets, and says in which folder they are. With `switches`, safeguards of the core can be switched off.
pub(crate) fn built(names: &[String], switches: bool) -> Result<PathBuf> {
    // A build of its own, so that neither makes the other anew, and nothing else ever sees a switch.
    let target = folder().join(if switches { "target/switches" } else { "target" });
    let mut fuzz = Command::new(tool::CARGO_FUZZ.installed()?);
    // No sanitizer: nothing here is unsafe. What counts coverage is for nightly compilers to be named, and in all.
    fuzz.args(["build", "--sanitizer", "none", "--target-dir"]).arg(&target).env("RUSTC_BOOTSTRAP", "1");
    if switches {
        fuzz.args(["--no-default-features", "--features", "mutants"]);
    }
    // It builds one or all.
    if let [name] = names {
        fuzz.arg(name);
    }
    call(fuzz)?;
    let triples = fs::read_dir(&target).with_context(|| format!("cannot read {}", target.display()))?;
    let found = triples.filter_map(|entry| Some(entry.ok()?.path().join("release")));
    found
        .into_iter()
        .find(|folder| names.iter().all(|name| folder.join(name).is_file()))
        .context("cargo-fuzz has built no targets")
}

/// Runs targets, as many at once as there are processors.
pub(crate) fn fuzz(
    binaries: &Path,
    names: &[String],
    seconds: u64,
    without: Option<&str>,
) -> Result<Vec<Outcome>> {
    let left = Mutex::new(names.iter().collect::<VecDeque<_>>());
    let outcomes = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, std::num::NonZero::get) {
            scope.spawn(|| {
                loop {
                    let next = left.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    let Some(name) = next else { break };
                    eprintln!("{name}: {seconds} s");
                    let outcome = one(binaries, name, seconds, without);
                    outcomes.lock().unwrap_or_else(PoisonError::into_inner).push(outcome);
                }
            });
        }
    });
    let mut outcomes = outcomes
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    outcomes.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(outcomes)
}

fn one(binaries: &Path, name: &str, seconds: u64, without: Option<&str>) -> Result<Outcome> {
    let folder = folder();
    let artifacts = folder.join("artifacts").join(name);
    // What is learnt of a broken core is kept apart.
    let corpus =
        folder.join("corpus").join(without.map_or_else(|| name.to_owned(), |_| format!("{name}-broken")));
    for folder in [&artifacts, &corpus] {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let log = artifacts.join("log");
    let output = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut fuzzer = Command::new(binaries.join(name));
    fuzzer
        .args([&corpus, &folder.join("seeds").join(name)].into_iter().filter(|folder| folder.is_dir()))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg(format!("-max_total_time={seconds}"))
        .args([
            format!("-timeout={TIMEOUT}"),
            format!("-rss_limit_mb={MEMORY}"),
            format!("-max_len={LONGEST}"),
        ])
        .args(["-print_final_stats=1", "-use_value_profile=1"])
        .envs(without.map(|rule| ("HOLDFAST_OFF", rule)))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(output);
    let began = Instant::now();
    let mut child = fuzzer.spawn().with_context(|| format!("cannot run {name}"))?;
    let status = child.wait().with_context(|| format!("cannot wait for {name}"))?;
    let taken = began.elapsed();
    // libFuzzer's own word for a signal from somebody.
    if status.code() == Some(INTERRUPTED) {
        bail!("{name} was interrupted");
    }
    let text = fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
    let text = String::from_utf8_lossy(&text);
    let finding =
        (!status.success()).then(|| finding(&text).unwrap_or_else(|| format!("it ended with {status}")));
    let input = text.lines().find_map(|line| line.split_once("Test unit written to ")).map(|(_, file)| file);
    let replay = input.filter(|_| finding.is_some()).map(|file| {
        let without = without.map_or_else(String::new, |rule| format!(" --without {rule}"));
        format!("cargo xtask fuzz {name}{without} --replay {file}")
    });
    Ok(Outcome {
        name: name.to_owned(),
        ok: finding.is_some() == without.is_some(),
        seconds: taken.as_secs_f64(),
        executions: last_number(&text, "stat::number_of_executed_units:").unwrap_or_default(),
        coverage: last_number(&text, " cov: ").unwrap_or_default(),
        without: without.map(str::to_owned),
        finding,
        replay,
    })
}

/// What the target said when it broke off.
fn finding(log: &str) -> Option<String> {
    let mut lines = log.lines();
    if lines.any(|line| line.contains("panicked at ")) {
        return lines.next().map(str::to_owned);
    }
    let word = log.lines().find_map(|line| line.split_once("ERROR: libFuzzer: ").map(|(_, word)| word));
    word.map(str::to_owned)
}

fn last_number(log: &str, key: &str) -> Option<u64> {
    let (_, rest) = log.rsplit_once(key)?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Brings what was learnt into the seeds: the fewest inputs that reach everything.
fn keep(binaries: &Path, name: &str) -> Result<()> {
    let (seeds, corpus) = (folder().join("seeds").join(name), folder().join("corpus").join(name));
    let fresh = folder().join("corpus").join(format!("{name}-fewest"));
    if fresh.is_dir() {
        fs::remove_dir_all(&fresh)?;
    }
    fs::create_dir_all(&fresh)?;
    let mut merge = Command::new(binaries.join(name));
    merge.args(["-merge=1", "-verbosity=0", &format!("-max_len={SHORT}")]).arg(&fresh);
    merge.args([&seeds, &corpus].into_iter().filter(|folder| folder.is_dir()));
    call(merge)?;
    if seeds.is_dir() {
        fs::remove_dir_all(&seeds)?;
    }
    fs::create_dir_all(&seeds)?;
    // Of all sizes, but few: a repository is no place for thousands of files.
    let mut files = fs::read_dir(&fresh)?
        .map(|entry| entry.and_then(|entry| Ok((entry.metadata()?.len(), entry.path()))))
        .collect::<std::io::Result<Vec<_>>>()?;
    files.sort();
    let every = files.len().div_ceil(SEEDS).max(1);
    let kept: Vec<_> = files.iter().step_by(every).collect();
    for (_, file) in &kept {
        fs::copy(file, seeds.join(file.file_name().context("a file has a name")?))?;
    }
    println!("{name}: {} seeds, {} bytes", kept.len(), kept.iter().map(|(size, _)| size).sum::<u64>());
    Ok(())
}
