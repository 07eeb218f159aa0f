//! `cargo xtask drill`: one whole-system drill on real processes and servers.

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::{Result, bail};
use holdfast_testbed::drills::{self, Drill, Figures, Settings};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The drill's name; `list` prints them, `all` runs them one after another
    name: String,
    /// How often; each drill has a default of its own
    #[arg(long)]
    rounds: Option<u32>,
    /// Phases of seconds instead of minutes
    #[arg(long)]
    short: bool,
    #[command(flatten)]
    topology: Topology,
    /// Print the outcome as JSON, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

/// How rows leave the stream.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Topology {
    /// Whether rows are acked to the stream
    #[arg(long, default_value = "none", value_parser = ["none", "explicit"])]
    pub(crate) ack_policy: String,
    /// When the stream forgets rows by itself; workqueue needs explicit acks
    #[arg(long, default_value = "limits", value_parser = ["limits", "workqueue"])]
    pub(crate) retention: String,
    /// Streams that the shards are spread over
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3))]
    pub(crate) streams: u32,
}

impl Topology {
    pub(crate) fn check(&self) -> Result<()> {
        if self.retention == "workqueue" && self.ack_policy != "explicit" {
            bail!("--retention workqueue needs --ack-policy explicit");
        }
        Ok(())
    }
}

#[derive(Debug, Serialize)]
struct Outcome {
    name: &'static str,
    rounds: u32,
    ok: bool,
    dead_lettered: u64,
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
    options.topology.check()?;
    if options.topology.streams > 1
        && let Some(one) = chosen.iter().find(|drill| drills::ONE_STREAM.contains(&drill.name))
    {
        bail!("{} is about one stream: it takes no --streams", one.name);
    }
    let mut outcomes = Vec::new();
    for drill in chosen {
        let rounds = options.rounds.unwrap_or(drill.rounds);
        let settings = Settings {
            rounds,
            short: options.short,
            ack_policy: options.topology.ack_policy.clone(),
            retention: options.topology.retention.clone(),
            streams: options.topology.streams,
        };
        let spinner = spinner(drill, rounds)?;
        let outcome = (drill.run)(&settings, &mut |text: &str| {
            // Written past the spinner, also where none is drawn.
            spinner.suspend(|| eprintln!("{}: {text}", drill.name));
        });
        spinner.finish_and_clear();
        let outcome = outcome?;
        let verdict = outcome.verdict;
        outcomes.push(Outcome {
            name: drill.name,
            rounds,
            ok: outcome.faults.is_empty() && verdict.ok(),
            dead_lettered: verdict.dead_lettered,
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

/// Shows that a drill is under way, where somebody watches.
fn spinner(drill: &Drill, rounds: u32) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{spinner} {msg}, {elapsed}")?;
    let spinner = ProgressBar::new_spinner()
        .with_style(style)
        .with_message(format!("{}: {} ({rounds} round(s))", drill.name, drill.about));
    if std::io::stderr().is_terminal() {
        spinner.enable_steady_tick(Duration::from_millis(200));
    } else {
        spinner.set_draw_target(ProgressDrawTarget::hidden());
    }
    Ok(spinner)
}
