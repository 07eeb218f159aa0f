//! `cargo xtask mutants`: the simulator with safeguards off, one after another.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use holdfast_testbed::build;

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
    /// Print the outcome as JSON, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    // Built apart from everything else: its core has switches that no other build has.
    let mut command = Command::new(build::cargo());
    command
        .args(["run", "--release", "--quiet", "--package", "holdfast-sim", "--features", "mutants"])
        .args(["--bin", "mutants", "--"])
        .current_dir(build::workspace())
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    if options.list {
        command.arg("--list");
    } else {
        command.args(["--seeds", &options.seeds.to_string()]);
        if let Some(only) = &options.only {
            command.args(["--only", only]);
        }
    }
    let output =
        command.spawn().context("cannot run cargo")?.wait_with_output().context("cannot wait for it")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mutants: Vec<serde_json::Value> = serde_json::from_str(&text)
        .with_context(|| format!("it ended with {} and no report", output.status))?;
    if options.json {
        print!("{text}");
    } else if options.list {
        for name in mutants.iter().filter_map(serde_json::Value::as_str) {
            println!("{name}");
        }
    } else {
        for mutant in &mutants {
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
    if !output.status.success() {
        bail!("not every mutant was caught");
    }
    Ok(())
}
