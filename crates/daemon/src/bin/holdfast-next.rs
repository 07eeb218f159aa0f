//! `holdfast` as a next version of it would be: see `holdfast_core::format`. Never part of a release.

use std::process::ExitCode;

#[path = "../main.rs"]
mod binary;

fn main() -> ExitCode {
    binary::main()
}
