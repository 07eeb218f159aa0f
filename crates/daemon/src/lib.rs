//! The daemon and its commands.

pub mod check;
pub mod cli;
pub mod clock;
pub mod config;
pub mod driver;
pub mod exit;
pub mod ledger;
pub mod log;
pub mod output;
mod preflight;
pub mod publish;
pub mod receipt;
pub mod run;
pub mod shards;
pub mod sim;
pub mod topology;
pub mod verify;
