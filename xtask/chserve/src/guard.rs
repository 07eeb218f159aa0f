//! Runs a command that must not outlive whoever started it.
//!
//! A test that is killed with SIGKILL runs no destructors. So it starts its servers under a guard and holds
//! the other end of the guard's standard input: when that closes, for whatever reason, the guard kills the
//! command. That works for a command that is stopped (SIGSTOP) too, which could not watch anything itself.
//! When the guard itself is killed the kernel kills the command (`PR_SET_PDEATHSIG`).
//!
//! Why not `PR_SET_PDEATHSIG` alone, in the test: it fires when the *thread* that spawned the command ends,
//! and a test's threads come and go. The guard spawns from its main thread, which ends with the process.
//!
//! On standard output, for the one who started it: `pid N` first, so that signals can be sent to the command
//! itself; `exited CODE` or `signalled NUMBER` last. The command's own standard output and error both go to
//! the guard's standard error.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, getpid, getppid};

/// Runs `program` until it ends, or until standard input closes.
///
/// # Errors
/// When the command cannot be started or waited for.
pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<ExitCode, String> {
    let output = io::stderr()
        .as_fd()
        .try_clone_to_owned()
        .map_err(|error| format!("cannot share standard error: {error}"))?;
    let guard = getpid();
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(output);
    // SAFETY: runs in the child between fork and exec, where only async-signal-safe calls are allowed:
    // prctl and getppid are plain system calls, and nothing here allocates.
    unsafe {
        command.pre_exec(move || {
            prctl::set_pdeathsig(Signal::SIGKILL)?;
            // The guard may have died before the line above took effect.
            if getppid() == guard { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
        });
    }
    let mut child = command.spawn().map_err(|error| format!("cannot run {program}: {error}"))?;
    let pid = Pid::from_raw(i32::try_from(child.id()).map_err(|_| "a process id out of range".to_owned())?);
    say(&format!("pid {pid}"));

    // True once the command has ended and its process id may soon be somebody else's.
    let ended = Arc::new(Mutex::new(false));
    let seen = Arc::clone(&ended);
    thread::spawn(move || {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        let ended = seen.lock().unwrap_or_else(PoisonError::into_inner);
        if !*ended {
            let _ = kill(pid, Signal::SIGKILL);
        }
    });

    // Waits without reaping, so that the id stays the command's own until `ended` says so.
    waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)
        .map_err(|error| format!("cannot wait for {program}: {error}"))?;
    *ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
    let status = child.wait().map_err(|error| format!("cannot wait for {program}: {error}"))?;

    let code = match (status.code(), status.signal()) {
        (Some(code), _) => {
            say(&format!("exited {code}"));
            code
        }
        (None, signal) => {
            let signal = signal.unwrap_or_default();
            say(&format!("signalled {signal}"));
            128 + signal
        }
    };
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// Whoever reads this may be gone already; the command still has to be waited for.
fn say(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}
