//! `holdfast demo` as a person or a script runs it: no server, one document, and an end.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use holdfast_testbed::build;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

fn demo(arguments: &[&str]) -> Child {
    let binary = build::holdfast_binary(true).unwrap();
    let mut command = Command::new(binary);
    command.arg("demo").args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

#[test]
fn a_short_demonstration_prints_one_document_and_is_clean() {
    let output = demo(&["--json", "--seconds", "5", "--rate", "5000"]).wait_with_output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(output.status.success(), "{document:#} {words}");
    assert_eq!(words, "");
    assert_eq!((&document["ok"], &document["interrupted"]), (&Value::Bool(true), &Value::Bool(false)));
    assert_eq!(document["published"], document["stored"]);
    assert!(document["published"].as_u64().unwrap() > 20_000, "{document:#}");
    for none in ["missing", "repeated", "out_of_order"] {
        assert_eq!(document[none], 0, "{document:#}");
    }
    for some in ["handover_ms", "takeover_ms", "frozen_takeover_ms"] {
        assert!(document[some].is_u64(), "{document:#}");
    }
}

#[test]
fn an_interrupt_ends_it_with_a_verdict_on_what_was_done() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let mut child = demo(&["--seconds", "600", "--rate", "1000"]);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(
            lines.any(|line| line.contains(" rows published, ")),
            "it ended before it was in the middle of it"
        );
        kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
        let last = lines.inspect(|line| assert!(!line.contains('\x1b'), "{line}")).last().unwrap();
        assert!(last.starts_with("interrupted; ok so far"), "{signal}: {last}");
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn what_cannot_be_shown_is_said() {
    for (arguments, word) in [
        (vec!["--nodes", "1"], "--nodes"),
        (vec!["--rate", "1000000", "--seconds", "600"], "--rate 1000000: at most 20 seconds"),
    ] {
        let output = demo(&arguments).wait_with_output().unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words}");
        assert!(words.contains(word), "{words}");
    }
}
