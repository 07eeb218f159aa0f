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
use crate::{planted, tool};

/// One input may take so long, in seconds. (A schedule takes some hundredths.)
const TIMEOUT: u64 = 30;
/// A target may take so many MiB.
const MEMORY: u64 = 2_048;
/// The longest input, in bytes: longer ones are not tried, and shorter ones come first.
const LONGEST: u64 = 4_096;
/// What a target exits with when it is told to end.
const INTERRUPTED: i32 = 72;
/// Targets whose faults are safeguards that can be switched off. The others have one each, see [`planted`].
pub(crate) const MACHINES: [&str; 3] = ["claims", "events", "schedule"];
/// Asks `schedule` to make small what it finds.
const SHRINK: &str = "HOLDFAST_SHRINK";
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
    #[arg(long, value_name = "RULE", conflicts_with = "planted")]
    without: Option<String>,
    /// Plant the fault of `fuzz/planted/NAME.diff` in a copy of the tree. The target must find it (`all`: those that
    /// have one)
    #[arg(long)]
    planted: bool,
    /// Run the target on this input only, and show what it says
    #[arg(long, value_name = "FILE", conflicts_with = "seconds")]
    replay: Option<PathBuf>,
    /// Make the target's corpus as small as it can be, and keep it as seeds
    #[arg(long, conflicts_with_all = ["seconds", "replay", "without", "planted"])]
    keep: bool,
    /// Print the outcomes as JSON, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

impl Options {
    /// Every target for so long.
    pub(crate) fn all(seconds: u64) -> Self {
        let target = "all".to_owned();
        Self { target, seconds, without: None, planted: false, replay: None, keep: false, json: false }
    }
}

/// What is wrong with the code on purpose.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    None,
    /// This safeguard is switched off.
    Off(String),
    /// Each target's own, see [`planted`].
    Planted,
}

impl Fault {
    fn flags(&self) -> String {
        match self {
            Self::None => String::new(),
            Self::Off(rule) => format!(" --without {rule}"),
            Self::Planted => " --planted".to_owned(),
        }
    }

    fn in_words(&self) -> Option<String> {
        match self {
            Self::None => None,
            Self::Off(rule) => Some(format!("{rule} is off")),
            Self::Planted => Some("the planted fault".to_owned()),
        }
    }

    /// For the targets to read.
    fn environment(&self) -> Option<(&'static str, &str)> {
        if let Self::Off(rule) = self { Some(("HOLDFAST_OFF", rule)) } else { None }
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
    /// What is wrong on purpose.
    #[serde(skip_serializing_if = "Option::is_none")]
    fault: Option<String>,
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
    let mut chosen: Vec<String> =
        names.into_iter().filter(|name| options.target == "all" || options.target == *name).collect();
    if chosen.is_empty() {
        bail!("no target is called {}; `cargo xtask fuzz list` prints them", options.target);
    }
    let fault = match &options.without {
        Some(rule) => Fault::Off(rule.clone()),
        None if options.planted => Fault::Planted,
        None => Fault::None,
    };
    match &fault {
        Fault::None => {}
        Fault::Off(_) => chosen.retain(|name| MACHINES.contains(&name.as_str())),
        Fault::Planted => chosen.retain(|name| planted::fault(name).is_some()),
    }
    if chosen.is_empty() {
        bail!(
            "{} has no such fault: --without RULE is for {}, --planted for the others",
            options.target,
            MACHINES.join(", ")
        );
    }
    let binaries = built(&chosen, &fault)?;
    if let Some(input) = &options.replay {
        let [name] = &*chosen else { bail!("whose input is it? `cargo xtask fuzz NAME --replay FILE`") };
        let mut replay = Command::new(binaries.join(name));
        replay.env(SHRINK, "1");
        replay.arg(fs::canonicalize(input).with_context(|| format!("cannot find {}", input.display()))?);
        replay.envs(fault.environment());
        return call(replay);
    }
    if options.keep {
        return chosen.iter().try_for_each(|name| keep(&binaries, name));
    }
    let outcomes = fuzz(&binaries, &chosen, options.seconds, &fault)?;
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
        let said = match (&self.finding, &self.fault) {
            (None, None) => "nothing found".to_owned(),
            (None, Some(fault)) => format!("NOT FOUND: {fault}"),
            (Some(finding), None) => format!("FOUND {finding}"),
            (Some(finding), Some(fault)) => format!("found ({fault}): {finding}"),
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

/// Builds targets, and says in which folder they are.
pub(crate) fn built(names: &[String], fault: &Fault) -> Result<PathBuf> {
    // A build of its own for each kind, so that none makes the others anew, and nothing else ever sees a fault.
    let (tree, target) = match fault {
        Fault::None => (folder(), "target"),
        Fault::Off(_) => (folder(), "target/switches"),
        Fault::Planted => (planted::tree(names)?.join("fuzz"), "target/planted"),
    };
    let target = folder().join(target);
    let mut fuzz = Command::new(tool::CARGO_FUZZ.installed()?);
    // No sanitizer: nothing here is unsafe. What counts coverage is for nightly compilers to be named, and in all.
    fuzz.args(["build", "--sanitizer", "none", "--target-dir"]).arg(&target).env("RUSTC_BOOTSTRAP", "1");
    fuzz.arg("--fuzz-dir").arg(tree);
    if matches!(fault, Fault::Off(_)) {
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
pub(crate) fn fuzz(binaries: &Path, names: &[String], seconds: u64, fault: &Fault) -> Result<Vec<Outcome>> {
    let left = Mutex::new(names.iter().collect::<VecDeque<_>>());
    let outcomes = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, std::num::NonZero::get) {
            scope.spawn(|| {
                loop {
                    let next = left.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    let Some(name) = next else { break };
                    eprintln!("{name}: {seconds} s");
                    let outcome = one(binaries, name, seconds, fault);
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

fn one(binaries: &Path, name: &str, seconds: u64, fault: &Fault) -> Result<Outcome> {
    let folder = folder();
    // What is learnt of broken code is kept apart, and what is found in it.
    let broken = if matches!(fault, Fault::None) { "" } else { "-broken" };
    let own = format!("{name}{broken}");
    let (artifacts, corpus) = (folder.join("artifacts").join(&own), folder.join("corpus").join(own));
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
        .envs(fault.environment())
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
    // It is the input that is at fault, or nothing was found.
    if let (Some(finding), None) = (&finding, input) {
        bail!("{name} did not run: {finding}; see {}", log.display());
    }
    if let (Fault::Off(rule), Some(file)) = (fault, input) {
        let mut sound = Command::new(binaries.join(name));
        sound.arg(file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if !sound.status().with_context(|| format!("cannot run {name}"))?.success() {
            bail!("{name} fails on {file} with {rule} in force, too: that is a finding");
        }
    }
    let replay = input
        .filter(|_| finding.is_some())
        .map(|file| format!("cargo xtask fuzz {name}{} --replay {file}", fault.flags()));
    Ok(Outcome {
        name: name.to_owned(),
        ok: finding.is_some() != matches!(fault, Fault::None),
        seconds: taken.as_secs_f64(),
        executions: last_number(&text, "stat::number_of_executed_units:").unwrap_or_default(),
        coverage: last_number(&text, " cov: ").unwrap_or_default(),
        fault: fault.in_words(),
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
