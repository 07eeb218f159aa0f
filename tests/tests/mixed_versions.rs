//! Two versions of the daemon side by side: this one, and a build whose formats are those of a next version.

use std::time::Duration;

use holdfast_testbed::fleet::Member;
use holdfast_testbed::rig::{Options, Rig};
use holdfast_testbed::{Fleet, Load, build, wait};
use serde_json::Value;

const LONG: Duration = Duration::from_mins(2);
const STOP: Duration = Duration::from_secs(26);
const SHARDS: u32 = 6;
const RATE: u64 = 1_500;

/// Waits until rows are stored that were published after now.
#[track_caller]
fn assert_flows(rig: &Rig, fleet: &mut Fleet<'_>) {
    let stored = rig.stored().unwrap();
    rig.landed(stored + RATE, LONG, |_| fleet.must_run()).unwrap();
}

/// How many shards' records this version finds too new.
fn newer_records(rig: &Rig) -> usize {
    let shown: Value = serde_json::from_str(&rig.expect(&["ledger", "show", "--json"]).unwrap()).unwrap();
    let is_newer = |shard: &&Value| shard["defect"].as_str().is_some_and(|why| why.contains("version 2"));
    shown.as_array().unwrap().iter().filter(is_newer).count()
}

#[track_caller]
fn assert_ready(fleet: &Fleet<'_>) {
    for member in &fleet.members {
        let is_ready = || member.get("/readyz").is_ok_and(|(status, _)| status == 200);
        wait::until_true(&format!("{} to be ready", member.name()), LONG, is_ready).unwrap();
    }
}

fn says(member: &Member, words: &str) -> bool {
    member.daemon.log().is_ok_and(|log| log.contains(words))
}

#[test]
fn a_rolling_upgrade_and_a_roll_back() {
    let next = build::next_holdfast_binary().unwrap();
    let mut rig = Rig::start(
        Options { shards: SHARDS, tables: 12, ..Options::default() }.set("batch.max_age", "100ms"),
    )
    .unwrap();
    let mut fleet = Fleet::new(&rig);
    fleet.start(2).unwrap();
    fleet.settle(SHARDS, LONG).unwrap();
    let load = Load::start(&rig, RATE, 200).unwrap();
    assert_flows(&rig, &mut fleet);
    // What some later version may write into the bucket: a member of which nothing can be read, a key of a new kind.
    for key in ["member.INGEST.stranger", "kind.INGEST.0"] {
        rig.jetstream().publish(&format!("$KV.HOLDFAST.{key}"), br#"{"version":9,"all":"new"}"#).unwrap();
    }

    // One new beside two old ones: each has its share.
    fleet.start_with(|builder| builder.binary(&next)).unwrap();
    fleet.settle(SHARDS, LONG).unwrap();
    assert_flows(&rig, &mut fleet);
    assert_ready(&fleet);
    wait::until_true("the new one's shards to have records of its version", LONG, || {
        newer_records(&rig) == 2
    })
    .unwrap();
    for old in &fleet.members[..2] {
        assert!(says(old, "a daemon has a newer version"), "{}", old.daemon.log_tail());
        let status = old.status().unwrap();
        let versions = status["members"].as_array().unwrap().iter().map(|member| &member["version"]);
        assert!(
            versions.clone().any(|version| version.as_str().unwrap().ends_with("+next-format")),
            "{status}"
        );
    }

    // The old ones are replaced.
    for _ in 0..2 {
        assert!(fleet.stop(0, STOP).unwrap().is_success());
        fleet.start_with(|builder| builder.binary(&next)).unwrap();
        fleet.settle(SHARDS, LONG).unwrap();
        assert_flows(&rig, &mut fleet);
        assert_ready(&fleet);
    }
    wait::until_true("every record to be of the new version", LONG, || {
        newer_records(&rig) == SHARDS as usize
    })
    .unwrap();

    // One of them goes back. It is of no use, and in nobody's way: it does not even try for what new ones have.
    assert!(fleet.stop(0, STOP).unwrap().is_success());
    fleet.settle(SHARDS, LONG).unwrap();
    fleet.start(1).unwrap();
    wait::until_true("the old one to have seen the others", LONG, || {
        says(&fleet.members[2], "a daemon has a newer version")
    })
    .unwrap();
    assert_ready(&fleet);
    assert_flows(&rig, &mut fleet);
    let held: Vec<_> = fleet.members.iter().map(|member| member.shards().unwrap().len()).collect();
    assert_eq!(held, [3, 3, 0]);
    assert!(!says(&fleet.members[2], "left to newer"), "{}", fleet.members[2].daemon.log_tail());

    // All go back: its shards' records are too new for the one that is left. It says so, and writes nothing.
    for _ in 0..2 {
        assert!(fleet.stop(0, STOP).unwrap().is_success());
    }
    let old = &fleet.members[0];
    wait::until_true("the old one to say why it is not ready", LONG, || {
        old.get("/readyz")
            .is_ok_and(|(status, why)| status == 503 && why.contains("the record has version 2"))
    })
    .unwrap();
    wait::until_true("it to have tried every shard", LONG, || {
        old.daemon.log().is_ok_and(|log| log.matches("left to newer daemons").count() == SHARDS as usize)
    })
    .unwrap();
    assert_eq!(newer_records(&rig), SHARDS as usize);
    let shown = rig.expect(&["ledger", "show"]).unwrap();
    assert!(shown.contains("version 2, this Holdfast knows up to 1"), "{shown}");

    // A new one goes on where they stood.
    fleet.start_with(|builder| builder.binary(&next)).unwrap();
    assert_flows(&rig, &mut fleet);
    assert_ready(&fleet);
    let held: Vec<_> = fleet.members.iter().map(|member| member.shards().unwrap().len()).collect();
    assert_eq!(held, [0, SHARDS as usize]);

    let rows = load.finish().unwrap().len() as u64;
    rig.landed(rows, LONG, |_| fleet.must_run()).unwrap();
    for ended in fleet.stop_all(STOP).unwrap() {
        assert!(ended.is_success(), "{ended}");
    }
    // Only a new one can read what the ledger says.
    rig.set_binary(next);
    let verdict = rig.judge(rows).unwrap();
    assert!(verdict.ok(), "{verdict}");
    assert_eq!(rig.unproven().unwrap(), Vec::<String>::new());
}
