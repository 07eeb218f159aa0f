//! The models and the real servers give the same answers: scripts in the vocabulary of the ports, with the answers
//! that were observed, run against both (`tests/conformance`).

mod answer;
mod bench;
mod facts;
mod lies;
mod models;
mod real;
mod run;
mod script;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};

use bench::{Honest, Result};
use models::Models;
use real::Servers;
use run::{Mismatch, PATIENCE};
use script::Script;

/// Scripts that run at once on the real servers.
const AT_ONCE: usize = 12;

/// Scripts that run at once on models that lie.
const LIED_TO_AT_ONCE: usize = 400;

/// How long one of them waits for an answer that may never come.
const SHORT_PATIENCE: Duration = Duration::from_secs(4);

/// A script that fails while the machine stood still for this long is run again.
const STANDSTILL: Duration = Duration::from_millis(250);

/// Runs of such a script.
const RUNS: usize = 4;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("conformance")
}

/// All scripts; or those whose id has what `HOLDFAST_CONFORMANCE` names in it.
fn scripts() -> Vec<Script> {
    let only = std::env::var("HOLDFAST_CONFORMANCE").unwrap_or_default();
    let mut scripts = script::read(&folder()).unwrap_or_else(|error| panic!("{error}"));
    scripts.retain(|script| script.id.contains(&only));
    assert!(!scripts.is_empty(), "no script has {only:?} in its id");
    scripts
}

/// Notes when this machine stood still: then what took time says nothing of a server.
#[derive(Clone, Default)]
struct Standstills(Arc<Mutex<Vec<Instant>>>);

impl Standstills {
    fn watch() -> Self {
        const TICK: Duration = Duration::from_millis(10);
        let standstills = Self::default();
        let noted = Arc::downgrade(&standstills.0);
        std::thread::spawn(move || {
            let mut last = Instant::now();
            loop {
                std::thread::sleep(TICK);
                let Some(noted) = noted.upgrade() else { return };
                if last.elapsed() > TICK + STANDSTILL {
                    noted.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
                }
                last = Instant::now();
            }
        });
        standstills
    }

    fn since(&self, begun: Instant) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|at| *at >= begun)
    }
}

/// Runs scripts against the models; what did not match.
async fn on_models(scripts: &[Script]) -> Vec<Mismatch> {
    let standstills = Standstills::watch();
    let runs = scripts.iter().map(|script| {
        attempts(&standstills, async || {
            let bench = Models::start(&script.setup)?;
            Ok(run::run(script, &bench, &Honest, PATIENCE).await)
        })
    });
    let mut outcomes = Vec::new();
    let mut runs = stream::iter(runs).buffered(scripts.len());
    while let Some(outcome) = runs.next().await {
        outcomes.extend(outcome);
    }
    outcomes
}

/// Runs scripts against the real servers; what did not match.
async fn on_servers(servers: &Servers, scripts: &[Script]) -> Vec<Mismatch> {
    let standstills = Standstills::watch();
    let once = async |script: &Script| {
        attempts(&standstills, async || {
            let bench = servers.bench(&script.setup).await?;
            Ok(run::run(script, &bench, &Honest, PATIENCE).await)
        })
        .await
    };
    let (alone, together): (Vec<_>, Vec<_>) = scripts.iter().partition(|script| script.restarts());
    let mut outcomes = Vec::new();
    let mut runs = stream::iter(together.into_iter().map(&once)).buffered(AT_ONCE);
    while let Some(outcome) = runs.next().await {
        outcomes.extend(outcome);
    }
    // These stop a server under everybody's feet.
    for script in alone {
        outcomes.extend(once(script).await);
    }
    outcomes
}

async fn attempts(
    standstills: &Standstills,
    run: impl AsyncFn() -> Result<std::result::Result<(), Mismatch>>,
) -> Option<Mismatch> {
    for left in (0..RUNS).rev() {
        let begun = Instant::now();
        let outcome = run().await.unwrap_or_else(|error| panic!("the servers cannot be used: {error}"));
        match outcome {
            Ok(()) => return None,
            Err(mismatch) if left == 0 || !standstills.since(begun) => return Some(mismatch),
            Err(mismatch) => println!("again, since the machine stood still: {mismatch}"),
        }
    }
    None
}

/// Prints what came of one side's scripts, writes it to where `HOLDFAST_CONFORMANCE_REPORT` says, and fails if one
/// did not match.
fn demand(side: &str, scripts: &[Script], mismatches: &[Mismatch], begun: Instant) {
    let of = |script: &Script| mismatches.iter().find(|mismatch| mismatch.script == script.id);
    if let Some(folder) = std::env::var_os("HOLDFAST_CONFORMANCE_REPORT") {
        let outcome = |script: &Script| {
            let mismatch = of(script).map(|Mismatch { place, step, expected, got, .. }| {
                json!({ "place": place, "step": step, "expected": expected, "got": got })
            });
            json!({ "script": script.id, "side": side, "agrees": mismatch.is_none(), "mismatch": mismatch })
        };
        let report = Value::Array(scripts.iter().map(outcome).collect()).to_string();
        std::fs::write(PathBuf::from(folder).join(format!("{side}.json")), report).expect("a report");
    }
    let (all, agree) = (scripts.len(), scripts.len() - mismatches.len());
    println!("{side}: {agree} of {all} scripts agree, {:.1?}", begun.elapsed());
    let report: Vec<_> = mismatches.iter().map(|mismatch| format!("\n{side}: {mismatch}")).collect();
    assert!(mismatches.is_empty(), "{}", report.concat());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_models_answer_as_was_observed() {
    let (scripts, begun) = (scripts(), Instant::now());
    let mismatches = on_models(&scripts).await;
    demand("models", &scripts, &mismatches, begun);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_real_servers_answer_as_was_observed() {
    let (scripts, begun) = (scripts(), Instant::now());
    let servers = Servers::start().await.unwrap_or_else(|error| panic!("{error}"));
    let mismatches = on_servers(&servers, &scripts).await;
    demand("servers", &scripts, &mismatches, begun);
}

/// Every script notices a lie, and no lie makes a script fail that has nothing to do with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_answer_makes_the_suite_fail() {
    let begun = Instant::now();
    let scripts = script::read(&folder()).unwrap_or_else(|error| panic!("{error}"));
    let (lies, standstills) = (lies::all(), Standstills::watch());
    let pairs = (0..lies.len()).flat_map(|lie| scripts.iter().map(move |script| (lie, script)));
    let runs = pairs.map(|(lie, script)| {
        let standstills = &standstills;
        async move {
            let outcome = attempts(standstills, async || {
                // Some remember what they saw of a script.
                let between = lies::all().swap_remove(lie).between;
                let bench = Models::start(&between.setup(&script.setup))?;
                Ok(run::run(script, &bench, &*between, SHORT_PATIENCE).await)
            });
            (lie, outcome.await)
        }
    });
    let mut failed: BTreeMap<usize, Vec<Mismatch>> = BTreeMap::new();
    let mut runs = stream::iter(runs).buffer_unordered(LIED_TO_AT_ONCE);
    while let Some((lie, outcome)) = runs.next().await {
        failed.entry(lie).or_default().extend(outcome);
    }
    let mut wrong = Vec::new();
    let mut noticed: BTreeSet<&str> = BTreeSet::new();
    for (at, lie) in lies.iter().enumerate() {
        let mismatches = failed.remove(&at).unwrap_or_default();
        let failed: BTreeSet<&str> = mismatches.iter().map(|mismatch| mismatch.script.as_str()).collect();
        println!("{}: {failed:?}", lie.what);
        noticed.extend(lie.noticed_by);
        let unnoticed = lie.noticed_by.iter().filter(|id| !failed.contains(**id));
        wrong.extend(unnoticed.map(|id| format!("{}: {id} did not notice", lie.what)));
        let near = |script: &Script| script.has(lie.near) || lie.between.setup(&script.setup) != script.setup;
        let near: BTreeSet<&str> =
            scripts.iter().filter(|script| near(script)).map(|script| script.id.as_str()).collect();
        let far = mismatches.iter().filter(|mismatch| !near.contains(mismatch.script.as_str()));
        wrong.extend(far.map(|mismatch| format!("{}: it has nothing to do with {mismatch}", lie.what)));
    }
    let never = scripts.iter().filter(|script| !noticed.contains(script.id.as_str()));
    wrong.extend(never.map(|script| format!("no lie has to be noticed by {}", script.id)));
    println!("{} lies, {} scripts, {:.1?}", lies.len(), scripts.len(), begun.elapsed());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
