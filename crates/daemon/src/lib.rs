//! The daemon and its commands.
// Printing panics where nobody reads on, as in `holdfast sim --seed 1 | head`; `output` ends quietly.
#![deny(clippy::print_stdout)]

mod assembly;
mod backlog;
pub mod check;
pub mod cli;
pub mod clock;
pub mod config;
pub mod dead_letters;
pub mod demo;
pub mod document;
pub mod driver;
pub mod exit;
pub mod ledger;
pub mod log;
pub mod metrics;
pub mod output;
pub mod pause;
mod preflight;
pub mod process;
pub mod publish;
pub mod receipt;
pub mod run;
pub mod serve;
pub mod shards;
pub mod sharing;
pub mod signals;
pub mod sim;
pub mod status;
pub mod topology;
pub mod verify;

/// The version of this software, for people.
pub const VERSION: &str = if cfg!(feature = "next-format") {
    concat!(env!("CARGO_PKG_VERSION"), "+next-format")
} else {
    env!("CARGO_PKG_VERSION")
};
