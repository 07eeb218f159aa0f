//! Many seeds, and what came of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::Serialize;

use crate::chance::Chance;
use crate::invariants::Violation;
use crate::marks::{Mark, Marks};
use crate::scenario::{Profile, Scenario};
use crate::shrink::shrink;
use crate::world::{Outcome, World};

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The first seed.
    pub first: u64,
    /// How many seeds.
    pub seeds: u64,
    /// How hostile.
    pub profile: Profile,
    /// Threads; a seed runs on one.
    pub threads: usize,
}

/// A seed that broke an invariant.
#[derive(Clone, Debug, Serialize)]
pub struct Failing {
    /// The seed.
    pub seed: u64,
    /// Which invariant.
    pub invariant: &'static str,
    /// How.
    pub how: String,
    /// When, in simulated milliseconds.
    pub at_ms: u128,
    /// What replays it.
    pub replay: String,
    /// The same with as little as possible; only the first failing seeds are made small.
    pub shrunk: Option<Shrunk>,
}

/// A failing schedule with as little as possible.
#[derive(Clone, Debug, Serialize)]
pub struct Shrunk {
    /// Processes that are left.
    pub processes: u32,
    /// Rows that are left.
    pub rows: usize,
    /// Planned faults that are left, in order.
    pub faults: Vec<String>,
    /// What goes wrong in passing, and how often in a thousand.
    pub rates: String,
    /// How it ends: the last lines of its trace.
    pub ends: Vec<String>,
    /// The whole of it.
    #[serde(skip)]
    pub trace: Trace,
}

/// So many failing seeds of a campaign are made small: they are mostly of one kind.
const SHRUNK: usize = 3;
/// So many lines of a shrunk trace are reported.
const LINES: usize = 30;

/// What a campaign found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Seeds that were run.
    pub seeds: u64,
    /// Virtual time that passed.
    pub simulated_seconds: u64,
    /// Time that passed.
    pub wall_seconds: f64,
    /// Steps.
    pub events: u64,
    /// Faults that were planned and happened, those in passing not counted.
    pub faults: u64,
    /// Inserts that reached the store.
    pub inserts: u64,
    /// Dead letters that were kept.
    pub letters: u64,
    /// What was met, and how often.
    pub marks: std::collections::BTreeMap<&'static str, u64>,
    /// What was never met.
    pub marks_missed: Vec<&'static str>,
    /// Seeds that broke an invariant.
    pub violations: Vec<Failing>,
    /// A hash over every seed's trace, in the order of the seeds.
    pub trace_hash: String,
}

/// The name under which a run that did not repeat itself is reported.
const DETERMINISM: &str = "determinism";
/// The name under which a panic of the core is reported.
pub(crate) const PANIC: &str = "panic";

/// Runs one scenario; a panic inside is a violation like any other.
pub(crate) fn run(scenario: &Scenario, keeps_trace: bool, checks_core: bool) -> Outcome {
    let run = || World::new(scenario.clone(), keeps_trace, checks_core).run();
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let how = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_default();
        Outcome::of(Violation { invariant: PANIC, how })
    })
}

#[derive(Default)]
struct Sum {
    simulated: std::time::Duration,
    events: u64,
    faults: u64,
    inserts: u64,
    letters: u64,
    marks: Marks,
    violations: Vec<Failing>,
    hashes: Vec<(u64, u64)>,
}

/// Runs seeds on several threads. `progress` is told how many are done.
///
/// # Panics
/// If a thread of it panics, which only a fault of the simulator itself can cause.
pub fn campaign(options: &Options, progress: &(dyn Fn(u64) + Sync)) -> Report {
    let began = Instant::now();
    let next = AtomicU64::new(options.first);
    let done = AtomicU64::new(0);
    let end = options.first.saturating_add(options.seeds);
    let sum = Mutex::new(Sum::default());
    std::thread::scope(|scope| {
        for _ in 0..options.threads.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        break;
                    }
                    let (outcome, violation) = run_seed(seed, options.profile);
                    let mut sum = sum.lock().expect("no thread panics while it counts");
                    sum.simulated += outcome.simulated;
                    sum.events += outcome.events;
                    sum.faults += outcome.faults;
                    sum.inserts += outcome.inserts;
                    sum.letters += outcome.letters;
                    sum.marks.add(&outcome.marks);
                    sum.hashes.push((seed, outcome.hash));
                    if let Some(Violation { invariant, how }) = violation {
                        sum.violations.push(Failing {
                            seed,
                            invariant,
                            how,
                            at_ms: outcome.simulated.as_millis(),
                            replay: format!("holdfast sim --seed {seed} --profile {}", options.profile),
                            shrunk: None,
                        });
                    }
                    drop(sum);
                    progress(done.fetch_add(1, Ordering::Relaxed) + 1);
                }
            });
        }
    });
    let mut sum = sum.into_inner().expect("no thread panics while it counts");
    sum.hashes.sort_unstable();
    sum.violations.sort_by_key(|failing| failing.seed);
    for failing in sum.violations.iter_mut().take(SHRUNK) {
        failing.shrunk = shrunk(failing.seed, options.profile);
    }
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for (seed, of_seed) in &sum.hashes {
        hash.update(&seed.to_le_bytes());
        hash.update(&of_seed.to_le_bytes());
    }
    Report {
        seeds: options.seeds,
        simulated_seconds: sum.simulated.as_secs(),
        wall_seconds: began.elapsed().as_secs_f64(),
        events: sum.events,
        faults: sum.faults,
        inserts: sum.inserts,
        letters: sum.letters,
        marks: Mark::ALL.iter().map(|mark| (mark.key(), sum.marks.count(*mark))).collect(),
        marks_missed: sum.marks.missed().into_iter().map(Mark::key).collect(),
        violations: sum.violations,
        trace_hash: format!("{:016x}", hash.digest()),
    }
}

/// Runs a seed; one in twenty runs twice and must do the same again.
fn run_seed(seed: u64, profile: Profile) -> (Outcome, Option<Violation>) {
    let scenario = Scenario::draw(seed, profile);
    let outcome = run(&scenario, false, true);
    let mut violation = outcome.violation.clone();
    if violation.is_none() && Chance::new(seed, 3).permille(50) {
        let again = run(&scenario, false, true);
        if again.hash != outcome.hash {
            let how = format!("the trace hashes to {:016x} and {:016x}", outcome.hash, again.hash);
            violation = Some(Violation { invariant: DETERMINISM, how });
        }
    }
    (outcome, violation)
}

/// The first seed found that breaks something, as it is: for those who want to know whether, and not how.
#[must_use]
pub fn any_failing(options: &Options) -> Option<(u64, Violation)> {
    let next = AtomicU64::new(options.first);
    let end = options.first.saturating_add(options.seeds);
    let found = Mutex::new(None);
    let is_found = || found.lock().is_ok_and(|found| found.is_some());
    std::thread::scope(|scope| {
        for _ in 0..options.threads.max(1) {
            scope.spawn(|| {
                while !is_found() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        break;
                    }
                    let violation = run(&Scenario::draw(seed, options.profile), false, true).violation;
                    if let (Some(violation), Ok(mut found)) = (violation, found.lock()) {
                        *found = Some((seed, violation));
                    }
                }
            });
        }
    });
    found.into_inner().ok().flatten()
}

/// A run in full.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The seed.
    pub seed: u64,
    /// What happened, when.
    pub happenings: Vec<(std::time::Duration, crate::trace::Happening)>,
    /// What it broke, if anything.
    pub violation: Option<Violation>,
    /// The hash over its lines.
    pub hash: u64,
}

/// Makes what a seed breaks as small as possible; none if it breaks nothing.
#[must_use]
pub fn shrunk(seed: u64, profile: Profile) -> Option<Shrunk> {
    shrunk_scenario(Scenario::draw(seed, profile))
}

/// Runs the schedule that a fuzzer's bytes mean, whichever they are.
///
/// # Errors
/// What was broken.
pub fn any_schedule(bytes: &[u8]) -> Result<(), Violation> {
    match run(&Scenario::of_bytes(bytes), false, true).violation {
        None => Ok(()),
        Some(violation) => Err(violation),
    }
}

/// Makes what such a schedule breaks as small as possible, which takes hundreds of runs; none if it breaks nothing.
#[must_use]
pub fn shrunk_schedule(bytes: &[u8]) -> Option<Shrunk> {
    shrunk_scenario(Scenario::of_bytes(bytes))
}

fn shrunk_scenario(scenario: Scenario) -> Option<Shrunk> {
    let seed = scenario.seed;
    let violation = run(&scenario, false, true).violation?;
    let small = shrink(scenario, &violation, true);
    let outcome = run(&small, true, true);
    let lines = outcome.happenings.iter().map(|(at, what)| format!("{:.6} {what}", at.as_secs_f64()));
    let lines: Vec<String> = lines.collect();
    let ends = lines[lines.len().saturating_sub(LINES)..].to_vec();
    let faults = small.faults.iter().map(|(at, fault)| format!("{:.6} {fault}", at.as_secs_f64())).collect();
    let (processes, rows, rates) = (small.processes, small.rows.len(), format!("{:?}", small.rates));
    let Outcome { happenings, violation, hash, .. } = outcome;
    let trace = Trace { seed, happenings, violation, hash };
    Some(Shrunk { processes, rows, faults, rates, ends, trace })
}

/// Runs a seed again and keeps everything that happens.
#[must_use]
pub fn replay(seed: u64, profile: Profile) -> Trace {
    let outcome = run(&Scenario::draw(seed, profile), true, true);
    Trace { seed, happenings: outcome.happenings, violation: outcome.violation, hash: outcome.hash }
}
