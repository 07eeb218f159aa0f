//! The `holdfast` binary.

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use holdfast::cli::{Cli, Command};
use holdfast::config::Config;
use holdfast::exit::Exit;
use holdfast::{check, dead_letters, demo, ledger, log, pause, publish, run, sim, status, topology, verify};

pub(crate) fn main() -> ExitCode {
    let cli = Cli::parse();
    log::start(cli.log_format);
    match carry_out(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(exit) => {
            if let Some(message) = exit.message() {
                eprintln!("holdfast: {message}");
            }
            exit.code()
        }
    }
}

fn carry_out(cli: &Cli) -> Result<(), Exit> {
    if let Command::Completions { shell } = cli.command {
        clap_complete::generate(shell, &mut Cli::command(), "holdfast", &mut std::io::stdout());
        return Ok(());
    }
    if let Command::Sim(options) = &cli.command {
        return sim::sim(options);
    }
    if let Command::Demo(options) = &cli.command {
        return demo::demo(options);
    }
    let config = Config::load(cli.source.config.as_deref(), &cli.source.set)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        match &cli.command {
            Command::Run => run::run(&config).await,
            Command::Topology(command) => topology::topology(&config, command).await,
            Command::Check(json) => check::check(&config, *json).await,
            Command::Status(options) => status::status(&config, options).await,
            Command::DeadLetters(command) => dead_letters::dead_letters(&config, command).await,
            Command::Publish(options) => publish::publish(&config, options).await,
            Command::Verify(options) => verify::verify(&config, options).await,
            Command::Ledger(command) => ledger::ledger(&config, command).await,
            Command::Pause { what } => pause::pause(&config, what).await,
            Command::Resume { what } => pause::resume(&config, what).await,
            Command::Demo(_) | Command::Sim(_) | Command::Completions { .. } => Ok(()),
        }
    });
    // A blocked read of standard input must not hold up the exit.
    runtime.shutdown_background();
    result
}
