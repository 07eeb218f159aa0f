//! What a person sees who got something wrong: one clear line that says what to do, and the exit code.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use holdfast_testbed::frame::Verb;
use holdfast_testbed::proxy::{Direction, Fate};
use holdfast_testbed::rig::{Options, Rig};
use holdfast_testbed::{Proxy, build};

fn bare() -> Rig {
    Rig::bare(Options { shards: 2, tables: 1, ..Options::default() }).unwrap()
}

/// The line that the command ended with.
fn last_line(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned()
}

fn assert_says(output: &Output, code: i32, words: &[&str]) {
    let line = last_line(output);
    assert_eq!(output.status.code(), Some(code), "{line}");
    assert!(line.starts_with("holdfast: "), "{line}");
    for word in words {
        assert!(line.contains(word), "`{word}` is missing in: {line}");
    }
}

#[test]
fn a_misspelt_key_is_named_with_the_nearest() {
    let rig = bare();
    let output = rig.holdfast(&["run", "--set", "topology.straem=X"]).unwrap();
    assert_says(&output, 2, &["--set", "topology.straem", "did you mean `topology.stream`?"]);
    std::fs::write(rig.folder().join("bad.toml"), "[limits]\nheld_rwos = 5\n").unwrap();
    let output = rig.holdfast(&["run", "--config", "bad.toml"]).unwrap();
    assert_says(&output, 2, &["bad.toml", "limits.held_rwos", "`limits.held_rows`"]);
}

#[test]
fn who_reads_no_further_hears_no_complaint() {
    let mut trace = Command::new(build::holdfast_binary(true).unwrap());
    trace.args(["sim", "--seed", "1"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = trace.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut first = String::new();
    lines.read_line(&mut first).unwrap();
    assert!(first.ends_with(" starts\n"), "{first}");
    // Far more follows than a pipe holds.
    drop(lines);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn a_wrong_url_is_told() {
    let rig = bare();
    // The rig's own address comes first; the last one counts.
    let output = rig.holdfast(&["run", "--config", "none.toml"]).unwrap();
    assert_says(&output, 2, &["none.toml"]);
    std::fs::write(rig.folder().join("x.toml"), "").unwrap();
    let mut wrong = Rig::bare(Options { shards: 2, tables: 1, ..Options::default() }).unwrap();
    wrong.set("nats.url", "nats://127.0.0.1:1");
    assert_says(&wrong.holdfast(&["run"]).unwrap(), 1, &["127.0.0.1:1"]);
    wrong.set("nats.url", "http//nonsense here");
    assert_says(&wrong.holdfast(&["run"]).unwrap(), 2, &["nats://"]);
    wrong.set("nats.url", wrong.nats.url());
    wrong.set("clickhouse.url", "no url");
    assert_says(&wrong.holdfast(&["run"]).unwrap(), 2, &["clickhouse.url"]);
}

#[test]
fn a_missing_stream_is_told_with_the_command_that_makes_it() {
    let rig = bare();
    assert_says(&rig.holdfast(&["run"]).unwrap(), 1, &["stream INGEST", "holdfast topology apply"]);
    assert_says(
        &rig.holdfast(&["publish", "--table", "t0", "--generate", "64", "--count", "1"]).unwrap(),
        1,
        &["INGEST", "holdfast topology apply"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_too_old_is_told_with_the_version_that_is_needed() {
    let mut rig = tokio::task::spawn_blocking(bare).await.unwrap();
    let proxy = Proxy::start_nats(rig.nats.addr()).await.unwrap();
    proxy.set_hook(|direction, frame| {
        if direction == Direction::ToClient && frame.verb() == Verb::Info {
            let raw = String::from_utf8_lossy(frame.raw())
                .replace("\"version\":\"2.15.1\"", "\"version\":\"2.10.7\"");
            return Fate::Replace(raw.into_bytes().into());
        }
        Fate::Forward
    });
    rig.set("nats.url", format!("nats://{}", proxy.addr()));
    assert_says(&rig.holdfast(&["run"]).unwrap(), 1, &["2.10.7", "2.14"]);
}

#[test]
fn rows_without_a_start_are_not_guessed_at() {
    let rig = Rig::start(Options { shards: 2, tables: 1, ..Options::default() }).unwrap();
    rig.publish(0, 10, 64, None).unwrap().finish(Duration::from_secs(30)).unwrap();
    assert_says(
        &rig.holdfast(&["run"]).unwrap(),
        2,
        &["topology.start", "\"first\"", "\"new\"", "\"seq:N\""],
    );
    let mut daemon = rig.daemon("holdfast").set("topology.start", "first").start().unwrap();
    rig.landed(10, Duration::from_mins(1), |_| daemon.must_run()).unwrap();
    assert!(daemon.stop(Duration::from_secs(26)).unwrap().is_success());
    assert!(rig.judge(10).unwrap().ok());
}

#[test]
fn check_names_what_is_missing_and_passes_when_it_is_there() {
    let mut rig = bare();
    let output = rig.holdfast(&["check", "--json"]).unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["ok"], false);
    assert!(
        report["findings"].as_array().unwrap().iter().any(|finding| finding["object"] == "stream INGEST")
    );
    rig.expect(&["topology", "apply"]).unwrap();
    holdfast_testbed::rows::create_table(&rig.sql(), "t0").unwrap();
    rig.set("tables.t0.delivery", "exactly-once");
    let report: serde_json::Value = serde_json::from_str(&rig.expect(&["check", "--json"]).unwrap()).unwrap();
    assert_eq!(report["ok"], true, "{report}");
    assert_eq!(report["tables"][0]["level"], "exactly-once", "{report}");
}

#[test]
fn the_topology_is_printed_and_applied_twice_without_a_change() {
    let rig = bare();
    let printed: serde_json::Value =
        serde_json::from_str(&rig.expect(&["topology", "print"]).unwrap()).unwrap();
    assert!(printed.to_string().contains("pinned_client"), "{printed}");
    rig.expect(&["topology", "apply"]).unwrap();
    let again: serde_json::Value =
        serde_json::from_str(&rig.expect(&["topology", "apply", "--json"]).unwrap()).unwrap();
    assert!(again.as_array().unwrap().iter().all(|done| done["action"] == "unchanged"), "{again}");
}

#[test]
fn a_rebased_shard_starts_where_it_was_told() {
    let rig = Rig::start(Options { shards: 2, tables: 1, ..Options::default() }).unwrap();
    rig.publish(0, 10, 64, None).unwrap().finish(Duration::from_secs(30)).unwrap();
    // Nobody to ask, and nobody said yes.
    assert_says(
        &rig.holdfast(&["ledger", "rebase", "--shard", "0", "--to", "first"]).unwrap(),
        2,
        &["--yes"],
    );
    assert_says(
        &rig.holdfast(&["ledger", "rebase", "--shard", "2", "--to", "first", "--yes"]).unwrap(),
        2,
        &["2 shards"],
    );
    assert_says(
        &rig.holdfast(&["ledger", "rebase", "--shard", "0", "--to", "seq:99", "--yes"]).unwrap(),
        2,
        &["end at 10"],
    );
    for shard in ["0", "1"] {
        rig.expect(&["ledger", "rebase", "--shard", shard, "--to", "first", "--yes"]).unwrap();
    }
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    rig.landed(10, Duration::from_mins(1), |_| daemon.must_run()).unwrap();
    assert!(daemon.stop(Duration::from_secs(26)).unwrap().is_success());
    assert!(rig.judge(10).unwrap().ok());
    let shown: serde_json::Value =
        serde_json::from_str(&rig.expect(&["ledger", "show", "--json"]).unwrap()).unwrap();
    let floors: Vec<_> =
        shown.as_array().unwrap().iter().map(|shown| shown["record"]["floor"].as_u64()).collect();
    assert!(floors.contains(&Some(10)), "{shown}");
}
