//! This workspace's own binaries, built on demand.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use crate::error::{Context, Error, Result};

/// The root of this workspace.
#[must_use]
pub fn workspace() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_owned()
}

/// The cargo that runs us, or the one on the PATH.
#[must_use]
pub fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// The `holdfast` binary: the one that `HOLDFAST_BIN` names, or else built.
///
/// # Errors
/// When `HOLDFAST_BIN` names no file, or the build fails.
pub fn holdfast_binary(release: bool) -> Result<PathBuf> {
    binary("HOLDFAST_BIN", "holdfast", release)
}

/// `holdfast` with the formats of a next version, built for development.
///
/// # Errors
/// When the build fails.
pub fn next_holdfast_binary() -> Result<PathBuf> {
    build("holdfast", "holdfast-next", false, &["next-format"])
}

/// The launcher and guard of development servers: the one that `HOLDFAST_CHSERVE` names, or else built.
///
/// # Errors
/// When `HOLDFAST_CHSERVE` names no file, or the build fails.
pub fn chserve_binary() -> Result<PathBuf> {
    binary("HOLDFAST_CHSERVE", "chserve", true)
}

/// One of the testbed's own programs, built for release.
///
/// # Errors
/// When the build fails.
pub fn testbed_binary(name: &str) -> Result<PathBuf> {
    build("holdfast-testbed", name, true, &[])
}

/// A path from the environment, if it is set and not empty.
pub(crate) fn file_named_by(name: &'static str) -> Result<Option<PathBuf>> {
    let Some(value) = std::env::var_os(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let path = PathBuf::from(&value);
    if path.is_file() {
        // Relative to where we are, not to where we start processes.
        return std::path::absolute(&path).map(Some).context(|| format!("cannot find {}", path.display()));
    }
    let value = value.to_string_lossy().into_owned();
    Err(Error::Environment { name, value, why: "no such file".to_owned() })
}

fn binary(variable: &'static str, package: &str, release: bool) -> Result<PathBuf> {
    // Built once a process: cargo takes a lock and some hundred milliseconds to find that nothing is to do.
    static BUILT: Mutex<BTreeMap<(String, bool), PathBuf>> = Mutex::new(BTreeMap::new());

    if let Some(path) = file_named_by(variable)? {
        return Ok(path);
    }
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(path) = built.get(&(package.to_owned(), release)) {
        return Ok(path.clone());
    }
    let path = build(package, package, release, &[])?;
    built.insert((package.to_owned(), release), path.clone());
    Ok(path)
}

/// Builds a package's binary. Asks cargo where it put it, since that depends on the target
/// folder that the user chose.
fn build(package: &str, name: &str, release: bool, features: &[&str]) -> Result<PathBuf> {
    let mut arguments = vec!["build", "--package", package, "--bin", name];
    for feature in features {
        arguments.extend(["--features", feature]);
    }
    if release {
        arguments.push("--release");
    }
    let output = Command::new(cargo())
        .args(&arguments)
        .args(["--quiet", "--message-format", "json-render-diagnostics"])
        .current_dir(workspace())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context(|| "cannot run cargo".to_owned())?;
    let failed =
        || Error::Build { package: package.to_owned(), command: format!("cargo {}", arguments.join(" ")) };
    if !output.status.success() {
        return Err(failed());
    }
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .ok_or_else(failed)
}
