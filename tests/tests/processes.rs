//! Processes under the guard: how they end is told, and what they say is kept.

use std::path::Path;
use std::time::Duration;

use holdfast_testbed::guarded::{Ended, Guarded, Launch};
use holdfast_testbed::wait::until_true;
use holdfast_testbed::{Daemon, Error};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const SOON: Duration = Duration::from_secs(20);

/// A shell that runs this.
fn shell(script: &str, folder: &Path) -> Guarded {
    Guarded::start(&Launch {
        name: "a shell".to_owned(),
        program: "/bin/sh".into(),
        arguments: vec!["-c".into(), script.into()],
        environment: vec![("TOLD".to_owned(), Some("something".into())), ("HOME".to_owned(), None)],
        folder: Some(folder.to_owned()),
        log: folder.join("log"),
    })
    .unwrap()
}

#[test]
fn how_it_ends_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut exits = shell("exit 3", folder.path());
    assert_eq!(exits.wait(SOON).unwrap(), Ended::Exited(3));
    // To one that has ended, signals are nothing.
    exits.signal(Signal::SIGTERM).unwrap();
    assert_eq!(exits.kill().unwrap(), Ended::Exited(3));

    let mut killed = shell("exec sleep 1000", folder.path());
    assert_eq!(killed.ended().unwrap(), None);
    assert!(matches!(killed.wait(Duration::from_millis(20)), Err(Error::TimedOut(_))));
    assert_eq!(killed.kill().unwrap(), Ended::Signalled(9));

    let mut stopped = shell("exec sleep 1000", folder.path());
    stopped.pause().unwrap();
    assert_eq!(stopped.stop(SOON).unwrap(), Ended::Signalled(15));

    let mut stubborn = shell("trap '' TERM; echo ready; while :; do sleep 0.01; done", folder.path());
    until_true("the trap", SOON, || log(folder.path()).contains("ready")).unwrap();
    assert!(matches!(stubborn.stop(Duration::from_millis(100)), Err(Error::TimedOut(_))));
    assert_eq!(stubborn.ended().unwrap(), Some(Ended::Signalled(9)));
}

fn log(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("log")).unwrap_or_default()
}

#[test]
fn what_it_says_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut speaks = shell("pwd; echo \"$TOLD\" >&2; echo ${HOME-homeless}; exit 1", folder.path());
    speaks.wait(SOON).unwrap();
    let said = log(folder.path());
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines, [folder.path().canonicalize().unwrap().to_str().unwrap(), "something", "homeless"]);
    let error = speaks.must_run().unwrap_err().to_string();
    assert!(
        error.contains("a shell") && error.contains("exit code 1") && error.contains("homeless"),
        "{error}"
    );
}

#[test]
fn what_cannot_be_run_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let error =
        Daemon::builder("/no/such/holdfast", "ingest-1", folder.path().join("logs/log")).start().unwrap_err();
    assert!(error.to_string().contains("/no/such/holdfast"), "{error}");
}

#[test]
fn a_killed_guard_takes_its_process_along() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = shell("exec sleep 1000", folder.path());
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap();
    let guard = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap().trim().parse().unwrap();
    kill(Pid::from_raw(guard), Signal::SIGKILL).unwrap();
    assert_eq!(process.wait(SOON).unwrap(), Ended::Signalled(9));
    let stat = format!("/proc/{}/stat", process.pid());
    until_true("the end of the process", SOON, || {
        std::fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "))
    })
    .unwrap();
}

#[test]
fn a_daemon_is_started_with_its_settings_and_again() {
    let folder = tempfile::tempdir().unwrap();
    let binary = folder.path().join("holdfast");
    std::fs::write(&binary, "#!/bin/sh\necho \"$@\" \"$RUST_LOG\"\nexec sleep 1000\n").unwrap();
    std::fs::set_permissions(&binary, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut daemon = Daemon::builder(&binary, "ingest-1", folder.path().join("log"))
        .config(Path::new("a.toml"))
        .set("topology.shards", 4)
        .environment("RUST_LOG", "debug")
        .start()
        .unwrap();
    let line = "run --config a.toml --set topology.shards=4 debug\n";
    until_true("its output", SOON, || daemon.log().unwrap() == line).unwrap();
    let first = daemon.pid();
    daemon.restart().unwrap();
    assert_ne!(daemon.pid(), first);
    until_true("its output again", SOON, || daemon.log().unwrap() == line.repeat(2)).unwrap();
    daemon.terminate().unwrap();
    assert_eq!(daemon.wait(SOON).unwrap(), Ended::Signalled(15));
}
