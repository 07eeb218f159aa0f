//! Commands for whoever works on Holdfast: `cargo xtask …`.

mod interrupt;
mod servers;
mod test;

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
    /// Runs what CI runs, and stops at the first failure
    Test(test::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        Command::Servers(options) => servers::run(&options),
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
