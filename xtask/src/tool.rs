//! Programs of others that our commands use, of pinned versions, installed into the cache.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Result;
use holdfast_testbed::fetch;

use crate::command::{call, cargo};

/// A subcommand of cargo.
pub(crate) struct Tool {
    name: &'static str,
    version: &'static str,
    /// What makes it tell its version.
    asked: &'static [&'static str],
}

pub(crate) const CARGO_DENY: Tool = Tool { name: "cargo-deny", version: "0.20.2", asked: &["--version"] };
pub(crate) const CARGO_FUZZ: Tool = Tool { name: "cargo-fuzz", version: "0.13.2", asked: &["--version"] };
pub(crate) const CARGO_MUTANTS: Tool =
    Tool { name: "cargo-mutants", version: "27.1.0", asked: &["mutants", "--version"] };

impl Tool {
    /// Where it is; installed if it is not there, or is of another version.
    pub(crate) fn installed(&self) -> Result<PathBuf> {
        let root = fetch::cache_folder().join("tools");
        let binary = root.join("bin").join(self.name);
        if self.version_of(&binary).as_deref() != Some(self.version) {
            eprintln!("installing {} {} into the cache, which takes some minutes", self.name, self.version);
            // Unoptimised: it runs for a second, or has others do the work, and is built for minutes otherwise.
            let mut install = cargo(["install", "--debug", "--locked", "--quiet", self.name]);
            install.args(["--version", self.version, "--root"]).arg(&root);
            call(install)?;
        }
        Ok(binary)
    }

    fn version_of(&self, binary: &Path) -> Option<String> {
        let output = Command::new(binary).args(self.asked).stdin(Stdio::null()).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.trim().strip_prefix(self.name)?.trim().split(' ').next().map(str::to_owned)
    }
}
