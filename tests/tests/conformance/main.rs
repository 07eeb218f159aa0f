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

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};

use bench::{Between, Honest, Result};
use models::Models;
use real::Servers;
use run::Mismatch;
use script::Script;

/// Scripts that run at once on the real servers.
const AT_ONCE: usize = 12;

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
async fn on_models(scripts: &[Script], between: &dyn Between) -> Vec<Mismatch> {
    let standstills = Standstills::watch();
    let runs = scripts.iter().map(|script| {
        attempts(&standstills, async || {
            let bench = Models::start(&script.setup)?;
            Ok(run::run(script, &bench, between).await)
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
            Ok(run::run(script, &bench, &Honest).await)
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
    let mismatches = on_models(&scripts, &Honest).await;
    demand("models", &scripts, &mismatches, begun);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_real_servers_answer_as_was_observed() {
    let (scripts, begun) = (scripts(), Instant::now());
    let servers = Servers::start().await.unwrap_or_else(|error| panic!("{error}"));
    let mismatches = on_servers(&servers, &scripts).await;
    demand("servers", &scripts, &mismatches, begun);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_answer_makes_the_suite_fail() {
    let scripts = script::read(&folder()).unwrap_or_else(|error| panic!("{error}"));
    let lies = lies::all();
    let scripts = &scripts;
    let runs = lies.iter().map(|lie| async move {
        let failed = on_models(scripts, &*lie.between).await;
        (lie, failed.into_iter().map(|mismatch| mismatch.script).collect::<BTreeSet<_>>())
    });
    let outcomes: Vec<_> = futures_util::future::join_all(runs).await;
    for (lie, failed) in outcomes {
        println!("{}: {failed:?}", lie.what);
        let unnoticed: Vec<_> = lie.noticed_by.iter().filter(|script| !failed.contains(**script)).collect();
        assert!(unnoticed.is_empty(), "{}: {unnoticed:?} did not notice", lie.what);
        assert!(failed.len() < scripts.len(), "{}: it fails whatever has nothing to do with it", lie.what);
    }
}
