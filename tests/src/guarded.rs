//! A process that can be signalled and never outlives us.
//!
//! The process runs under `chserve guard`, whose standard input we hold open. However we end, by returning, by
//! a panic or by SIGKILL, that input closes and the guard kills the process, even one that is stopped.

use std::ffi::OsString;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

use crate::build;
use crate::error::{Context, Error, Result};
use crate::wait;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It exited with this code.
    Exited(i32),
    /// This signal ended it.
    Signalled(i32),
}

impl Ended {
    /// Whether it exited with code 0.
    #[must_use]
    pub fn is_success(self) -> bool {
        self == Self::Exited(0)
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit code {code}"),
            Self::Signalled(number) => match Signal::try_from(*number) {
                Ok(signal) => write!(f, "{signal}"),
                Err(_) => write!(f, "signal {number}"),
            },
        }
    }
}

/// What to run.
#[derive(Debug, Clone)]
pub struct Launch {
    /// What it is called in errors.
    pub name: String,
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Added to our own environment; `None` takes a variable away.
    pub environment: Vec<(String, Option<OsString>)>,
    /// Where it runs; our own folder if not given.
    pub folder: Option<PathBuf>,
    /// Its standard output and error are appended to this file.
    pub log: PathBuf,
}

/// A running process, or one that has ended. Dropping it kills it and waits until it is gone.
#[derive(Debug)]
pub struct Guarded {
    name: String,
    log: PathBuf,
    guard: Child,
    /// What the guard says: the process id, and at last how it ended.
    says: BufReader<ChildStdout>,
    pid: Pid,
    ended: Option<Ended>,
    stopped: bool,
}

/// How long SIGKILL may take to be carried out.
const KILL_WITHIN: Duration = Duration::from_secs(10);

impl Guarded {
    /// Starts it.
    ///
    /// # Errors
    /// When the guard cannot be built, or the program cannot be run.
    pub fn start(launch: &Launch) -> Result<Self> {
        let log = append(&launch.log)?;
        let mut command = Command::new(build::chserve_binary()?);
        command
            .args(["guard", "--"])
            .arg(&launch.program)
            .args(&launch.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            // A Ctrl-C at the terminal is for us: we end the others in order.
            .process_group(0);
        for (name, value) in &launch.environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        if let Some(folder) = &launch.folder {
            command.current_dir(folder);
        }
        let mut guard = command.spawn().context(|| format!("cannot start {}", launch.name))?;
        let Some(stdout) = guard.stdout.take() else {
            unreachable!("standard output was asked for as a pipe")
        };
        let mut says = BufReader::new(stdout);
        let mut line = String::new();
        says.read_line(&mut line).context(|| format!("cannot hear from the guard of {}", launch.name))?;
        let Some(pid) = line.strip_prefix("pid ").and_then(|pid| pid.trim_end().parse().ok()) else {
            let ended = guard.wait().context(|| format!("cannot wait for {}", launch.name))?;
            return Err(Error::Ended {
                name: launch.name.clone(),
                ended: ended.to_string(),
                log: launch.log.clone(),
                tail: tail(&launch.log),
            });
        };
        Ok(Self {
            name: launch.name.clone(),
            log: launch.log.clone(),
            guard,
            says,
            pid: Pid::from_raw(pid),
            ended: None,
            stopped: false,
        })
    }

    /// The process id of the program itself, not of its guard.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.as_raw().unsigned_abs()
    }

    /// The file with its standard output and error.
    #[must_use]
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// When the guard cannot be waited for.
    pub fn ended(&mut self) -> Result<Option<Ended>> {
        if self.ended.is_none()
            && let Some(_) = self.guard.try_wait().context(|| format!("cannot wait for {}", self.name))?
        {
            let mut rest = String::new();
            let _ = self.says.read_to_string(&mut rest);
            // A guard that was killed itself says nothing; the kernel has killed the program then.
            let ended = rest.lines().find_map(last_word).unwrap_or(Ended::Signalled(Signal::SIGKILL as i32));
            self.ended = Some(ended);
        }
        Ok(self.ended)
    }

    /// An error when it has ended, with the end of its log.
    ///
    /// # Errors
    /// [`Error::Ended`] when it has.
    pub fn must_run(&mut self) -> Result<()> {
        match self.ended()? {
            None => Ok(()),
            Some(ended) => Err(Error::Ended {
                name: self.name.clone(),
                ended: ended.to_string(),
                log: self.log.clone(),
                tail: tail(&self.log),
            }),
        }
    }

    /// Sends a signal to it. Nothing happens when it has ended.
    ///
    /// # Errors
    /// When the signal cannot be sent.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if self.ended()?.is_some() {
            return Ok(());
        }
        match signal::kill(self.pid, signal) {
            // It ended a moment ago.
            Ok(()) | Err(nix::errno::Errno::ESRCH) => Ok(()),
            Err(error) => Err(error.into()).context(|| format!("cannot send {signal} to {}", self.name)),
        }
    }

    /// SIGKILL; returns when it is gone.
    ///
    /// # Errors
    /// When it is still there after ten seconds.
    pub fn kill(&mut self) -> Result<Ended> {
        self.signal(Signal::SIGKILL)?;
        self.wait(KILL_WITHIN)
    }

    /// SIGTERM; returns when it is gone. Killed when it is still there after `within`, which is an error.
    ///
    /// # Errors
    /// When it had to be killed.
    pub fn stop(&mut self, within: Duration) -> Result<Ended> {
        self.signal(Signal::SIGTERM)?;
        // A stopped process takes no SIGTERM.
        self.resume()?;
        match self.wait(within) {
            Ok(ended) => Ok(ended),
            Err(late) => {
                self.kill()?;
                Err(late)
            }
        }
    }

    /// SIGSTOP: it stands still, its connections stay open. Returns when it does.
    ///
    /// # Errors
    /// When the signal cannot be sent, or is not carried out.
    pub fn pause(&mut self) -> Result<()> {
        self.signal(Signal::SIGSTOP)?;
        self.stopped = true;
        let stat = format!("/proc/{}/stat", self.pid);
        wait::until_true(&format!("{} to stand still", self.name), KILL_WITHIN, || {
            // `pid (name) state …`, and the name may have anything in it. No such file: it has ended.
            std::fs::read_to_string(&stat).map_or(true, |line| {
                line.rsplit(") ").next().is_some_and(|rest| !rest.starts_with(['R', 'S', 'D']))
            })
        })?;
        Ok(())
    }

    /// SIGCONT: it goes on after [`pause`](Self::pause).
    ///
    /// # Errors
    /// When the signal cannot be sent.
    pub fn resume(&mut self) -> Result<()> {
        if self.stopped {
            self.signal(Signal::SIGCONT)?;
            self.stopped = false;
        }
        Ok(())
    }

    /// Waits until it ends.
    ///
    /// # Errors
    /// [`Error::TimedOut`] when it is still there after `within`.
    pub fn wait(&mut self, within: Duration) -> Result<Ended> {
        let what = format!("the end of {} (log {})", self.name, self.log.display());
        wait::until(&what, within, || self.ended().transpose())?
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // Whatever goes wrong here, the guard's input closes right after, and it kills the program.
        let _ = self.kill();
        drop(self.guard.stdin.take());
        let _ = self.guard.wait();
    }
}

/// What the guard says at last.
fn last_word(line: &str) -> Option<Ended> {
    let (how, number) = line.split_once(' ')?;
    let number = number.parse().ok()?;
    match how {
        "exited" => Some(Ended::Exited(number)),
        "signalled" => Some(Ended::Signalled(number)),
        _ => None,
    }
}

fn append(path: &Path) -> Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .context(|| format!("cannot open {}", path.display()))
}

/// The last lines of a log, for an error.
pub(crate) fn tail(path: &Path) -> String {
    const LINES: usize = 15;
    let text = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guard_s_last_word() {
        assert_eq!(last_word("exited 3"), Some(Ended::Exited(3)));
        assert_eq!(last_word("signalled 9"), Some(Ended::Signalled(9)));
        assert_eq!(last_word("exited"), None);
        assert_eq!(last_word("pid 9"), None);
        assert_eq!(Ended::Signalled(9).to_string(), "SIGKILL");
    }
}
