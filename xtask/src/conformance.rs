//! `cargo xtask conformance`: the scripts of `tests/conformance`, on the models and on the real servers.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use holdfast_testbed::build;
use serde_json::Value;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Only scripts with this in their id
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Only the models: this needs no servers
    #[arg(long)]
    models: bool,
    /// Print the outcome as JSON, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let reports = tempfile::tempdir().context("cannot create a temporary folder")?;
    let sides: &[(&str, &str)] = &[
        ("models", "the_models_answer_as_was_observed"),
        ("servers", "the_real_servers_answer_as_was_observed"),
    ];
    let sides = if options.models { &sides[..1] } else { sides };
    let mut command = Command::new(build::cargo());
    command
        .args(["test", "--package", "holdfast-testbed", "--test", "conformance", "--quiet", "--"])
        .args(sides.iter().map(|(_, test)| test))
        .env("HOLDFAST_CONFORMANCE", options.only.as_deref().unwrap_or_default())
        .env("HOLDFAST_CONFORMANCE_REPORT", reports.path())
        .current_dir(build::workspace())
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let output =
        command.spawn().context("cannot run cargo")?.wait_with_output().context("cannot wait for it")?;
    let mut outcomes: Vec<Value> = Vec::new();
    for (side, _) in sides {
        let Ok(report) = std::fs::read(reports.path().join(format!("{side}.json"))) else {
            // Then it did not come so far as to compare.
            eprint!("{}", String::from_utf8_lossy(&output.stdout));
            bail!("there is no report of the {side} ({})", output.status);
        };
        outcomes.extend(serde_json::from_slice::<Vec<Value>>(&report).context("the report cannot be read")?);
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&outcomes)?);
    } else {
        for outcome in &outcomes {
            let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let verdict = if outcome["agrees"] == true { "agrees" } else { "DIFFERS" };
            println!("{verdict:8} {:8} {}", word(&outcome["side"]), word(&outcome["script"]));
            let mismatch = &outcome["mismatch"];
            for key in ["place", "step", "expected", "got"].iter().filter(|_| mismatch.is_object()) {
                println!("         {key:10} {}", word(&mismatch[key]));
            }
        }
    }
    let differ = outcomes.iter().filter(|outcome| outcome["agrees"] != true).count();
    if differ > 0 {
        bail!("{differ} of {} answers differ from those that were observed", outcomes.len());
    }
    Ok(())
}
