//! `cargo xtask mutants`: the simulator with safeguards off, one after another.

use anyhow::{Context, Result, bail};

use crate::command::{cargo, json};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Print the mutants' names and nothing else
    #[arg(long)]
    list: bool,
    /// Only this one
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Seeds within which each must be caught
    #[arg(long, default_value_t = 500)]
    seeds: u64,
    /// The first of them
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    first: u64,
    /// Print the outcome as JSON, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let (seeds, first) = (options.seeds.to_string(), options.first.to_string());
    let mut arguments = ["--seeds", &seeds, "--first", &first].map(str::to_owned).to_vec();
    if options.list {
        arguments = vec!["--list".to_owned()];
    } else if let Some(only) = &options.only {
        arguments.extend(["--only".to_owned(), only.clone()]);
    }
    let report = report(&arguments)?;
    let mutants = report.as_array().context("a report is a list")?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else if options.list {
        for name in mutants.iter().filter_map(serde_json::Value::as_str) {
            println!("{name}");
        }
    } else {
        for mutant in mutants {
            let word = |key: &str| mutant[key].as_str().unwrap_or("-").to_owned();
            let caught = if mutant["caught"] == true { "caught" } else { "SURVIVED" };
            println!(
                "{caught:8} {:26} after {:3} seeds, by {}",
                word("name"),
                mutant["seeds_needed"],
                word("invariant")
            );
        }
    }
    if mutants.iter().any(|mutant| mutant["caught"] == false) {
        bail!("not every mutant was caught");
    }
    Ok(())
}

/// Runs the simulator's own command for mutants, and reads its report.
pub(crate) fn report(arguments: &[String]) -> Result<serde_json::Value> {
    // Built apart from everything else: its core has switches that no other build has.
    let mut command =
        cargo(["run", "--release", "--quiet", "--package", "holdfast-sim", "--features", "mutants"]);
    command.args(["--bin", "mutants", "--"]).args(arguments);
    json(command)
}
