//! `cargo xtask test`: what CI runs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use holdfast_testbed::{build, fetch};

const CARGO_DENY: &str = "0.20.2";
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
            call(cargo(["test", "--package", "holdfast-testbed", "--lib"]))
        })?;
    } else {
        let mut environment = Vec::new();
        step("servers", || {
            environment.push(("HOLDFAST_NATS_SERVER", fetch::nats_server()?.path));
            environment.push(("HOLDFAST_LIBCHDB", fetch::libchdb()?.path));
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

fn cargo<const N: usize>(arguments: [&str; N]) -> Command {
    let mut command = Command::new(build::cargo());
    command.args(arguments);
    command
}

/// Runs a command in the workspace's root; an error names it when it fails.
fn call(mut command: Command) -> Result<()> {
    let status = command
        .current_dir(build::workspace())
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("cannot run {}", in_words(&command)))?;
    if !status.success() {
        bail!("this failed ({status}): {}", in_words(&command));
    }
    Ok(())
}

/// A command as one would type it.
fn in_words(command: &Command) -> String {
    let name = |program: &Path| program.file_name().map_or_else(OsString::new, OsString::from);
    let variables = command.get_envs().filter_map(|(key, value)| Some((key, value?)));
    let words = std::iter::once(name(Path::new(command.get_program())))
        .chain(command.get_args().map(OsString::from))
        .map(|word| word.to_string_lossy().into_owned());
    variables
        .map(|(key, value)| format!("{}='{}'", key.to_string_lossy(), value.to_string_lossy()))
        .chain(words)
        .collect::<Vec<_>>()
        .join(" ")
}

/// cargo-deny: licences, bans and sources. The advisory database is a download of its own, so it is asked for.
fn deny(advisories: bool) -> Result<()> {
    let mut command = Command::new(cargo_deny()?);
    command.args(["check", "--hide-inclusion-graph"]);
    if advisories {
        command.arg("advisories");
    }
    command.args(["licenses", "bans", "sources"]);
    call(command)
}

/// cargo-deny of the pinned version, installed into the cache if it is not there.
fn cargo_deny() -> Result<PathBuf> {
    let root = fetch::cache_folder().join("tools");
    let binary = root.join("bin/cargo-deny");
    let version = |binary: &Path| {
        let output = Command::new(binary).arg("--version").stdin(Stdio::null()).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.trim().strip_prefix("cargo-deny ").map(str::to_owned)
    };
    if version(&binary).as_deref() != Some(CARGO_DENY) {
        println!("installing cargo-deny {CARGO_DENY} into the cache, which takes some minutes");
        let mut install =
            // Unoptimised: it runs for a second, and is built for minutes otherwise.
            cargo(["install", "--debug", "--locked", "--quiet", "cargo-deny", "--version", CARGO_DENY, "--root"]);
        install.arg(&root);
        call(install)?;
    }
    Ok(binary)
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
