//! `cargo xtask test`: what CI runs.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use holdfast_testbed::{build, fetch};

use crate::command::{call, cargo};
use crate::{fuzz, tool};

/// So long each fuzz target runs.
const FUZZ_SECONDS: u64 = 60;
const WASM: &str = "wasm32-unknown-unknown";

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Leave out what needs servers
    #[arg(long)]
    fast: bool,
    /// Also look into the advisory database, which must be reachable
    #[arg(long)]
    advisories: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let began = Instant::now();
    // Half a gigabyte comes while others compile.
    let fetched = (!options.fast).then(|| {
        thread::spawn(|| {
            let servers = fetch::nats_server().and_then(|nats| Ok((nats, fetch::libchdb()?)));
            (servers, Instant::now())
        })
    });
    step("format", || call(cargo(["fmt", "--all", "--", "--check"])))?;
    step("clippy", || {
        call(cargo(["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"]))?;
        // Its own build, since nothing else may ever see the core's switches.
        let package = ["--package", "holdfast-sim", "--features", "mutants", "--all-targets", "--quiet"];
        let mut clippy = cargo(["clippy"]);
        clippy.args(package).args(["--", "-D", "warnings"]);
        call(clippy)
    })?;
    step("licences, bans, sources", || deny(options.advisories))?;
    step("documentation", || {
        let mut doc = cargo(["doc", "--workspace", "--no-deps", "--quiet"]);
        doc.env("RUSTDOCFLAGS", "-D warnings");
        call(doc)
    })?;
    step("core for wasm", core_for_wasm)?;
    if options.fast {
        step("tests without servers", || {
            call(cargo(["test", "--workspace", "--exclude", "holdfast-testbed"]))?;
            let own = [
                "test",
                "--package",
                "holdfast-testbed",
                "--lib",
                "--test",
                "demo",
                "--test",
                "dependencies",
            ];
            call(cargo(own))?;
            let mut conformance = cargo(["test", "--package", "holdfast-testbed", "--test", "conformance"]);
            conformance.args(["--", "--skip", "the_real_servers"]);
            call(conformance)
        })?;
    } else {
        let mut environment = Vec::new();
        step("servers", || {
            let fetched = fetched.context("they are fetched")?.join();
            let (servers, at) = fetched.map_err(|_| anyhow!("fetching the servers panicked"))?;
            let (nats, clickhouse) = servers?;
            println!("fetched {:.1} s after the beginning", (at - began).as_secs_f64());
            environment.push(("HOLDFAST_NATS_SERVER", nats.path));
            environment.push(("HOLDFAST_LIBCHDB", clickhouse.path));
            environment.push(("HOLDFAST_CHSERVE", build::chserve_binary()?));
            environment.push(("HOLDFAST_BIN", build::holdfast_binary(true)?));
            Ok(())
        })?;
        step("tests", || {
            let mut test = cargo(["test", "--workspace"]);
            test.envs(environment.iter().map(|(name, path)| (*name, path)));
            call(test)
        })?;
    }
    step("simulator and mutants", || {
        call(cargo(["test", "--package", "holdfast-core", "--features", "mutants"]))?;
        call(cargo(["test", "--release", "--package", "holdfast-sim", "--features", "mutants"]))
    })?;
    step("fuzz targets, a minute each", || {
        call(cargo(["fmt", "--manifest-path", "fuzz/Cargo.toml", "--", "--check"]))?;
        fuzz::run(&fuzz::Options::all(FUZZ_SECONDS))
    })?;
    println!("\nall good in {}", seconds(began));
    Ok(())
}

/// Runs a step, and says how long it took.
fn step(name: &str, run: impl FnOnce() -> Result<()>) -> Result<()> {
    println!("\n==> {name}");
    let began = Instant::now();
    let outcome = run();
    println!("<== {name}: {} in {}", if outcome.is_ok() { "ok" } else { "FAILED" }, seconds(began));
    outcome
}

fn seconds(began: Instant) -> String {
    format!("{:.1} s", began.elapsed().as_secs_f64())
}

/// cargo-deny: licences, bans and sources. The advisory database is a download of its own, so it is asked for.
fn deny(advisories: bool) -> Result<()> {
    let tool = tool::CARGO_DENY.installed()?;
    for manifest in ["Cargo.toml", "fuzz/Cargo.toml"] {
        let mut command = Command::new(&tool);
        command.args([
            "--config",
            "deny.toml",
            "--manifest-path",
            manifest,
            "check",
            "--hide-inclusion-graph",
        ]);
        if advisories {
            command.arg("advisories");
        }
        command.args(["licenses", "bans", "sources"]);
        call(command)?;
    }
    Ok(())
}

/// The core has no clock, no randomness and no I/O: then it builds where there are none.
fn core_for_wasm() -> Result<()> {
    let output = Command::new("rustc")
        .args(["--print", "sysroot"])
        .current_dir(build::workspace())
        .stdin(Stdio::null())
        .output()
        .context("cannot run rustc")?;
    let sysroot = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    if !sysroot.join("lib/rustlib").join(WASM).is_dir() {
        println!("left out: the target is not installed (rustup target add {WASM})");
        return Ok(());
    }
    call(cargo(["check", "--package", "holdfast-core", "--target", WASM, "--quiet"]))
}
