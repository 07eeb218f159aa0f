//! Commands for whoever works on Holdfast: `cargo xtask …`.

mod bench;
mod campaign;
mod command;
mod conformance;
mod drill;
mod fuzz;
mod interrupt;
mod mutants;
mod mutate;
mod planted;
mod servers;
mod test;
mod tool;
mod try_out;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Commands for whoever works on Holdfast.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Finds or fetches nats-server and ClickHouse, and says where they are
    Servers(servers::Options),
    /// Sends rows through real servers, kills the daemon on the way, and judges what arrived
    Try(try_out::Options),
    /// Runs a whole-system drill on real processes and servers
    Drill(drill::Options),
    /// Runs the simulator with safeguards off, one after another: each must be noticed
    Mutants(mutants::Options),
    /// Runs fuzz targets: random input that learns from what it reaches
    Fuzz(fuzz::Options),
    /// Changes lines of the core, a tenth of all places, one after another: tests and simulator must notice
    Mutate(mutate::Options),
    /// The long run: simulator, safeguards off, fuzz targets and random kills on real servers, in turns
    Campaign(campaign::Options),
    /// Runs the scripts that compare the models with the real servers
    Conformance(conformance::Options),
    /// Measures Holdfast beside a plain loop that does the same work
    Bench(bench::Options),
    /// Runs what CI runs, and stops at the first failure
    Test(test::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        Command::Servers(options) => servers::run(&options),
        Command::Try(options) => try_out::run(&options),
        Command::Drill(options) => drill::run(&options),
        Command::Mutants(options) => mutants::run(&options),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Mutate(options) => mutate::run(&options),
        Command::Campaign(options) => campaign::run(&options),
        Command::Conformance(options) => conformance::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Test(options) => test::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
