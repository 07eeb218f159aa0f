//! Faults for the fuzz targets to find: `fuzz/planted/NAME.diff`, brought into a copy of the tree.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use holdfast_testbed::build;

use crate::command::in_words;

/// The fault of a target, if it has one. (The state machines have switches for theirs.)
pub(crate) fn fault(target: &str) -> Option<PathBuf> {
    let file = build::workspace().join("fuzz/planted").join(format!("{target}.diff"));
    file.is_file().then_some(file)
}

/// A copy of the tree with the faults of these targets, and nothing else that is different.
pub(crate) fn tree(targets: &[String]) -> Result<PathBuf> {
    let workspace = build::workspace();
    let copy = workspace.join("target/planted");
    if copy.is_dir() {
        fs::remove_dir_all(&copy).with_context(|| format!("cannot remove {}", copy.display()))?;
    }
    let mut list = Command::new("git");
    list.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(&workspace);
    let output =
        list.stdin(Stdio::null()).output().with_context(|| format!("cannot run {}", in_words(&list)))?;
    if !output.status.success() {
        bail!("this is no checkout of git: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let files = String::from_utf8(output.stdout).context("a file's name is no text")?;
    for file in files.split_terminator('\0') {
        let (from, to) = (workspace.join(file), copy.join(file));
        // One that was removed and not yet committed.
        if !from.is_file() {
            continue;
        }
        let folder = to.parent().context("a file is in a folder")?;
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        fs::copy(&from, &to).with_context(|| format!("cannot copy {file}"))?;
    }
    for target in targets {
        let fault = fault(target).with_context(|| {
            format!("no fault is kept for {target}; name a safeguard to switch off: --without RULE")
        })?;
        let mut apply = apply(&fault);
        // The copy is in a checkout, and not of it.
        apply.env("GIT_CEILING_DIRECTORIES", workspace.join("target")).current_dir(&copy);
        if !apply.status().with_context(|| format!("cannot run {}", in_words(&apply)))?.success() {
            bail!("{} does not fit the code any more: plant it anew", fault.display());
        }
    }
    Ok(copy)
}

fn apply(fault: &Path) -> Command {
    let mut apply = Command::new("git");
    apply.args(["apply", "-p0"]).arg(fault).stdin(Stdio::null());
    apply
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz;

    #[test]
    fn every_target_has_a_fault_to_find_that_fits_the_code() {
        for target in fuzz::targets().unwrap() {
            let fault = fault(&target);
            assert_eq!(fault.is_some(), !fuzz::MACHINES.contains(&target.as_str()), "{target}");
            let Some(fault) = fault else { continue };
            let mut apply = apply(&fault);
            apply.arg("--check").current_dir(build::workspace());
            assert!(apply.status().unwrap().success(), "{} does not fit", fault.display());
        }
    }
}
