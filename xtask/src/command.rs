//! Other programs, run in the workspace's root.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use holdfast_testbed::build;

/// The cargo that runs us.
pub(crate) fn cargo<const N: usize>(arguments: [&str; N]) -> Command {
    let mut command = Command::new(build::cargo());
    command.args(arguments);
    command
}

/// Runs a command in the workspace's root; an error names it when it fails.
pub(crate) fn call(mut command: Command) -> Result<()> {
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

/// Runs a command in the workspace's root and reads the JSON that it prints, however it ends.
pub(crate) fn json(mut command: Command) -> Result<serde_json::Value> {
    let output = command
        .current_dir(build::workspace())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", in_words(&command)))?;
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("it ended with {} and no report: {}", output.status, in_words(&command)))
}

/// A command as one would type it.
pub(crate) fn in_words(command: &Command) -> String {
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
