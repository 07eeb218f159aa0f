//! `topology.streams = 2` on real servers: rows find their stream by the account's mapping, and every stream is written
//! and trimmed for itself.

use std::time::Duration;

use holdfast_testbed::rig::{Options, Rig, assert_landed, assert_stops, assert_whole};
use holdfast_testbed::{Fleet, Load, wait};
use serde_json::Value;

const LONG: Duration = Duration::from_mins(2);
const STOP: Duration = Duration::from_secs(26);
const SHARDS: u32 = 4;

fn two_streams(tables: usize) -> Options {
    Options { shards: SHARDS, tables, ..Options::default() }
        .set("topology.streams", 2)
        .set("batch.max_age", "100ms")
}

/// Waits until rows are stored that were published after now.
#[track_caller]
fn assert_flows(rig: &Rig, fleet: &mut Fleet<'_>, rows: u64) {
    let stored = rig.stored().unwrap();
    rig.landed(stored + rows, LONG, |_| fleet.must_run()).unwrap();
}

/// The first and the last sequence of a stream.
fn ends(rig: &Rig, stream: &str) -> (u64, u64) {
    let info = rig.jetstream().stream(stream).unwrap();
    let seq = |name: &str| info["state"][name].as_u64().unwrap();
    (seq("first_seq"), seq("last_seq"))
}

#[test]
fn two_daemons_write_both_streams_and_one_is_killed() {
    const RATE: u64 = 3_000;
    let rig = Rig::start(two_streams(16)).unwrap();
    rig.expect(&["check"]).unwrap();
    let mut fleet = Fleet::new(&rig);
    fleet.start(2).unwrap();
    fleet.settle(SHARDS, LONG).unwrap();
    let load = Load::start(&rig, RATE, 200).unwrap();
    assert_flows(&rig, &mut fleet, RATE);
    fleet.kill(0).unwrap();
    fleet.settle(SHARDS, LONG).unwrap();
    assert_flows(&rig, &mut fleet, RATE);
    fleet.start(1).unwrap();
    fleet.settle(SHARDS, LONG).unwrap();

    // Nobody writes one shard: its stream is not trimmed any more, the other one is.
    let shard = *fleet.members[0].owned().unwrap().first().unwrap();
    let (held, free) = (rig.stream(shard), rig.stream(shard + 1));
    rig.expect(&["pause", &shard.to_string()]).unwrap();
    wait::until_true("nobody to have the shard", LONG, || {
        fleet.members.iter().all(|member| member.shards().is_ok_and(|shards| !shards.contains(&shard)))
    })
    .unwrap();
    // A shard without a table would hold nothing back for long: all of them have some.
    let (before, free_before) = (ends(&rig, &held), ends(&rig, &free));
    wait::until_true("the other stream to be trimmed", LONG, || ends(&rig, &free).0 > free_before.1).unwrap();
    assert!(ends(&rig, &held).0 <= before.1, "{held} was trimmed past a shard that nobody writes");
    rig.expect(&["resume", &shard.to_string()]).unwrap();
    wait::until_true("that stream to be trimmed again", LONG, || ends(&rig, &held).0 > before.1).unwrap();
    fleet.settle(SHARDS, LONG).unwrap();

    let rows = load.finish().unwrap().len() as u64;
    rig.landed(rows, LONG, |_| fleet.must_run()).unwrap();
    for ended in fleet.stop_all(STOP).unwrap() {
        assert!(ended.is_success(), "{ended}");
    }
    assert_whole(&rig, rows);
}

#[test]
fn every_command_knows_its_stream() {
    let mut rig = Rig::start(two_streams(6)).unwrap();
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    rig.publish(0, 6_000, 128, None).unwrap().finish(LONG).unwrap();
    assert_landed(&rig, &mut daemon, 6_000);
    assert_whole(&rig, 6_000);

    // Each record is of its own stream.
    let created = |stream: &str| rig.jetstream().created(stream).unwrap();
    let records: Value = serde_json::from_str(&rig.expect(&["ledger", "show", "--json"]).unwrap()).unwrap();
    for shard in 0..SHARDS {
        let at = records[shard as usize]["record"]["stream_created"].as_i64().unwrap();
        assert_eq!(i128::from(at), created(&rig.stream(shard)), "shard {shard}");
    }

    // A row that the table cannot take, until it can: through the mapping and into its stream again.
    rig.jetstream().publish("ingest.t3", br#"{"n":1000,"pad":"x","more":1}"#).unwrap();
    assert_landed(&rig, &mut daemon, 6_001);
    let letters = rig.dead_letters().unwrap();
    let stream = rig.jetstream().taker("ingest.t3").unwrap();
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].created, created(&stream).to_string());
    assert_eq!(rig.stream(letters[0].shard), stream);
    assert!(letters[0].headers.contains(&stream), "{}", letters[0].headers);
    rig.sql().query("ALTER TABLE t3 ADD COLUMN more UInt8 DEFAULT 0").unwrap();
    rig.expect(&["dead-letters", "replay", "--all", "--yes"]).unwrap();
    wait::until_true("the row to be stored", LONG, || {
        rig.sql().query("SELECT count() FROM t3 WHERE more = 1").is_ok_and(|rows| rows.trim() == "1")
    })
    .unwrap();
    assert_eq!(rig.dead_letters().unwrap(), []);
    assert_stops(&mut daemon);

    // Another number of streams is neither applied nor run.
    rig.set("topology.streams", 1);
    let refused = |arguments: &[&str], words: &[&str]| {
        let output = rig.holdfast(arguments).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && words.iter().all(|word| said.contains(word)), "{said}");
    };
    refused(&["topology", "apply"], &["stream INGEST-0", "topology.streams = 1", "resharding"]);
    refused(&["run"], &["stream INGEST: it does not exist"]);
    // Once everything is written it can be changed; what is left of the old streams is named.
    rig.expect(&["topology", "apply", "--allow-resharding"]).unwrap();
    let report = rig.holdfast(&["check", "--json"]).unwrap();
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let said = |object: &str, severity: &str, words: &str| {
        findings.iter().any(|finding| {
            finding["object"] == object
                && finding["severity"] == severity
                && finding["problem"].as_str().is_some_and(|problem| problem.contains(words))
        })
    };
    for stream in ["stream INGEST-0", "stream INGEST-1"] {
        assert!(said(stream, "recommended", "all its rows are written"), "{findings:#?}");
    }
    // The mapping is still there, and the old streams take what it maps.
    assert!(said("subjects ingest.*", "required", "the stream INGEST-"), "{findings:#?}");
}
