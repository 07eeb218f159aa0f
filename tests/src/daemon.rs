//! `holdfast` itself, as a process.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::error::{Context, Result};
use crate::guarded::{Ended, Guarded, Launch};

/// How a daemon is started.
#[derive(Debug, Clone)]
pub struct Builder {
    binary: PathBuf,
    name: String,
    log: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(String, Option<OsString>)>,
    folder: Option<PathBuf>,
}

impl Builder {
    /// Another build of it.
    #[must_use]
    pub fn binary(mut self, binary: impl Into<PathBuf>) -> Self {
        self.binary = binary.into();
        self
    }

    /// `--config FILE`.
    #[must_use]
    pub fn config(self, file: &Path) -> Self {
        self.argument("--config").argument(file)
    }

    /// `--set key=value`.
    #[must_use]
    pub fn set(self, key: &str, value: impl std::fmt::Display) -> Self {
        self.argument("--set").argument(format!("{key}={value}"))
    }

    /// Any other argument.
    #[must_use]
    pub fn argument(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// A variable of its environment.
    #[must_use]
    pub fn environment(mut self, name: impl Into<String>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), Some(value.into())));
        self
    }

    /// Where it runs: a `holdfast.toml` there is read.
    #[must_use]
    pub fn folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Starts it. Returns at once: what the daemon does then is the test's business.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(self) -> Result<Daemon> {
        if let Some(folder) = self.log.parent() {
            std::fs::create_dir_all(folder).context(|| format!("cannot create {}", folder.display()))?;
        }
        let process = Guarded::start(&Launch {
            name: self.name.clone(),
            program: self.binary.clone(),
            arguments: self.arguments.clone(),
            environment: self.environment.clone(),
            folder: self.folder.clone(),
            log: self.log.clone(),
        })?;
        Ok(Daemon { start: self, process })
    }
}

/// A running daemon. Dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    start: Builder,
    process: Guarded,
}

impl Daemon {
    /// How to start `holdfast run`. `name` is what it is called in errors, `log` the file that its output is
    /// appended to. Take the binary from [`holdfast_binary`](crate::build::holdfast_binary).
    #[must_use]
    pub fn builder(binary: impl Into<PathBuf>, name: impl Into<String>, log: impl Into<PathBuf>) -> Builder {
        Builder {
            binary: binary.into(),
            name: name.into(),
            log: log.into(),
            arguments: vec!["run".into()],
            environment: Vec::new(),
            folder: None,
        }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Its resident memory now, in bytes; 0 when it has ended.
    #[must_use]
    pub fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
        status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok())
            .unwrap_or_default()
            * 1024
    }

    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.start.name
    }

    /// The file with its output.
    #[must_use]
    pub fn log_path(&self) -> &Path {
        self.process.log_path()
    }

    /// What it has logged so far.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn log(&self) -> Result<String> {
        let path = self.log_path();
        let bytes = std::fs::read(path).context(|| format!("cannot read {}", path.display()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The end of its log, for a failed test.
    #[must_use]
    pub fn log_tail(&self) -> String {
        const LINES: usize = 60;
        let log = self.log().unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn ended(&mut self) -> Result<Option<Ended>> {
        self.process.ended()
    }

    /// An error with the end of its log when it has ended.
    ///
    /// # Errors
    /// [`Error::Ended`](crate::Error::Ended) when it has.
    pub fn must_run(&mut self) -> Result<()> {
        self.process.must_run()
    }

    /// SIGKILL; returns when it is gone.
    ///
    /// # Errors
    /// When it does not go.
    pub fn kill(&mut self) -> Result<Ended> {
        self.process.kill()
    }

    /// SIGTERM; returns at once.
    ///
    /// # Errors
    /// When the signal cannot be sent.
    pub fn terminate(&mut self) -> Result<()> {
        self.process.signal(Signal::SIGTERM)
    }

    /// SIGTERM; returns when it is gone. Killed when it is still there after `within`, which is an error.
    ///
    /// # Errors
    /// When it had to be killed.
    pub fn stop(&mut self, within: Duration) -> Result<Ended> {
        self.process.stop(within)
    }

    /// SIGSTOP: frozen, its connections open.
    ///
    /// # Errors
    /// When the signal cannot be sent.
    pub fn pause(&mut self) -> Result<()> {
        self.process.pause()
    }

    /// SIGCONT.
    ///
    /// # Errors
    /// When the signal cannot be sent.
    pub fn resume(&mut self) -> Result<()> {
        self.process.resume()
    }

    /// Any signal.
    ///
    /// # Errors
    /// When the signal cannot be sent.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// Waits until it ends by itself.
    ///
    /// # Errors
    /// When it is still there after `within`.
    pub fn wait(&mut self, within: Duration) -> Result<Ended> {
        self.process.wait(within)
    }

    /// Starts it again with the same arguments. Kills it first if it runs.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn restart(&mut self) -> Result<()> {
        self.process.kill()?;
        self.process = self.start.clone().start()?.process;
        Ok(())
    }
}
