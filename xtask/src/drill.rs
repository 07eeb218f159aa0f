//! `cargo xtask drill`: one whole-system drill on real processes and servers.

use anyhow::{Result, bail};
use holdfast_testbed::drills::{self, Drill, Figures};
use serde::Serialize;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The drill's name; `list` prints them, `all` runs them one after another
    name: String,
    /// How often; each drill has a default of its own
    #[arg(long)]
    rounds: Option<u32>,
    /// Print the outcome as JSON, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Outcome {
    name: &'static str,
    rounds: u32,
    ok: bool,
    missing: u64,
    repeated: u64,
    out_of_order: u64,
    #[serde(flatten)]
    figures: Figures,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    if options.name == "list" {
        for drill in drills::ALL {
            println!("{:18} {}", drill.name, drill.about);
        }
        return Ok(());
    }
    let chosen: Vec<&Drill> =
        drills::ALL.iter().filter(|drill| options.name == "all" || options.name == drill.name).collect();
    if chosen.is_empty() {
        bail!("no drill is called {}; `cargo xtask drill list` prints them", options.name);
    }
    let mut outcomes = Vec::new();
    for drill in chosen {
        let rounds = options.rounds.unwrap_or(drill.rounds);
        let mut told = |text: &str| eprintln!("{}: {text}", drill.name);
        let outcome = (drill.run)(rounds, &mut told)?;
        let verdict = outcome.verdict;
        outcomes.push(Outcome {
            name: drill.name,
            rounds,
            ok: outcome.faults.is_empty() && verdict.ok(),
            missing: verdict.missing,
            repeated: verdict.repeated,
            out_of_order: verdict.out_of_order,
            figures: outcome.figures,
        });
        for fault in &outcome.faults {
            eprintln!("{}: FAULT: {fault}", drill.name);
        }
        if !options.json {
            println!("{}: {verdict}, {rounds} round(s)", drill.name);
            if let Some(last) = outcomes.last() {
                for (name, figure) in &last.figures {
                    println!("  {name}: {figure}");
                }
            }
        }
    }
    if options.json {
        match outcomes.as_slice() {
            [one] => println!("{}", serde_json::to_string_pretty(one)?),
            all => println!("{}", serde_json::to_string_pretty(all)?),
        }
    }
    if outcomes.iter().any(|outcome| !outcome.ok) {
        bail!("a drill did not end clean");
    }
    Ok(())
}
