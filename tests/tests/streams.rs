//! A stream that is made anew, loses its tail, or has lost its ledger.

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_testbed::guarded::Ended;
use holdfast_testbed::rig::{Options, Rig, assert_landed, assert_stops, assert_whole};
use holdfast_testbed::{Daemon, wait};
use serde_json::json;

const LONG: Duration = Duration::from_mins(2);

fn small() -> Options {
    Options { shards: 1, tables: 2, ..Options::default() }
        .set("batch.max_age", "200ms")
        .set("defaults.delivery", "exactly-once")
}

fn publish(rig: &Rig, first: u64, count: u64) {
    rig.publish(first, count, 128, None).unwrap().finish(LONG).unwrap();
}

fn delete(rig: &Rig, stream: &str) {
    rig.jetstream().api(&format!("STREAM.DELETE.{stream}"), &json!({})).unwrap();
}

#[test]
fn a_stream_made_anew_while_the_daemon_runs() {
    let rig = Rig::start(small().set("topology.on_lost_shard", "exit")).unwrap();
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish(&rig, 0, 2_000);
    assert_landed(&rig, &mut daemon, 2_000);
    delete(&rig, "INGEST");
    rig.expect(&["topology", "apply"]).unwrap();
    // More rows than before: their sequences are beyond the old stream's, too.
    publish(&rig, 1_000, 6_000);
    let mut starts = 0;
    rig.landed(8_000, LONG, |_| {
        // It says that the shard's consumer is gone, and whoever runs it starts it again.
        if let Some(ended) = daemon.ended()? {
            assert_eq!(ended, Ended::Exited(3), "{}", daemon.log()?);
            assert!(starts < 2, "{}", daemon.log()?);
            starts += 1;
            daemon.restart()?;
        }
        Ok(())
    })
    .unwrap();
    assert_stops(&mut daemon);
    assert_whole(&rig, 8_000);
}

#[test]
fn a_stream_made_anew_while_no_daemon_runs() {
    let rig = Rig::start(small()).unwrap();
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish(&rig, 0, 2_000);
    assert_landed(&rig, &mut daemon, 2_000);
    // With a batch open, too: killed, not stopped.
    daemon.kill().unwrap();
    delete(&rig, "INGEST");
    rig.expect(&["topology", "apply"]).unwrap();
    // As many as before: every sequence, and every batch, is one that the old stream had.
    publish(&rig, 1_000, 2_000);
    daemon.restart().unwrap();
    assert_landed(&rig, &mut daemon, 4_000);
    publish(&rig, 2_000, 2_000);
    assert_landed(&rig, &mut daemon, 6_000);
    assert_stops(&mut daemon);
    assert_whole(&rig, 6_000);
}

#[test]
fn a_lost_ledger_repeats_no_row_of_an_exactly_once_table() {
    let rig = Rig::start(small().set("topology.history", "1h").set("topology.start", "first")).unwrap();
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    for part in 0..4 {
        publish(&rig, part * 500, 1_000);
        assert_landed(&rig, &mut daemon, (part + 1) * 1_000);
    }
    assert_stops(&mut daemon);
    delete(&rig, "KV_HOLDFAST");
    rig.expect(&["topology", "apply"]).unwrap();
    publish(&rig, 2_000, 3_000);
    daemon.restart().unwrap();
    assert_landed(&rig, &mut daemon, 7_000);
    assert_stops(&mut daemon);
    assert_whole(&rig, 7_000);
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// The folder of the rows' stream in nats-server's store; the ledger has another.
fn stream_folder(rig: &Rig) -> PathBuf {
    rig.nats.folder().join("store/jetstream/$G/streams/INGEST")
}

/// What a power loss does: nats-server comes back with an older state of the stream.
fn lose_tail(rig: &mut Rig, older: &Path) {
    rig.nats.stop().unwrap();
    let folder = stream_folder(rig);
    std::fs::remove_dir_all(&folder).unwrap();
    copy(older, &folder);
    rig.nats.restart().unwrap();
}

/// Every `n` below `rows` is there once, and rises in the order of insertion. The sequences do not: they were
/// used twice.
fn assert_counters(rig: &Rig, rows: u64) {
    for table in rig.tables() {
        let found = rig
            .sql()
            .query(&format!(
                "SELECT count(), uniqExact(n), max(n) + 1, \
                 (SELECT countIf(n < before) FROM (SELECT n, lagInFrame(n) OVER (ORDER BY _block_number, \
                 _block_offset ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) AS before FROM {table})) \
                 FROM {table} FORMAT TabSeparated"
            ))
            .unwrap();
        assert_eq!(found, format!("{rows}\t{rows}\t{rows}\t0"), "{table}");
    }
}

fn says_reused(daemon: &mut Daemon) {
    wait::until_true("the shard to say that sequences were used again", LONG, || {
        daemon.log().unwrap().lines().any(|line| {
            line.contains("ledger rebase") && (line.contains("sequences") || line.contains("tail"))
        })
    })
    .unwrap_or_else(|late| panic!("{late}\n{}", daemon.log().unwrap()));
}

#[test]
fn a_lost_tail_stops_the_shard_and_a_rebase_takes_the_rows_that_reuse_sequences() {
    // One table, and rows that wait until the daemon starts: each part is one batch. So the batch of the new
    // rows has the numbers, and would have the token, of one that ClickHouse has already.
    let options = Options { tables: 1, ..small() };
    let mut rig = Rig::start(options.set("batch.max_age", "1s").set("topology.history", "1h")).unwrap();
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish(&rig, 0, 1_000);
    assert_landed(&rig, &mut daemon, 1_000);
    assert_stops(&mut daemon);
    rig.nats.stop().unwrap();
    let older = rig.folder().join("older");
    copy(&stream_folder(&rig), &older);
    rig.nats.restart().unwrap();
    publish(&rig, 1_000, 1_000);
    daemon.restart().unwrap();
    assert_landed(&rig, &mut daemon, 2_000);
    assert_stops(&mut daemon);
    lose_tail(&mut rig, &older);
    publish(&rig, 2_000, 1_000);
    assert_eq!(rig.jetstream().stream("INGEST").unwrap()["state"]["last_seq"], 2_000);

    daemon.restart().unwrap();
    says_reused(&mut daemon);
    assert_eq!(rig.stored().unwrap(), 2_000);
    daemon.kill().unwrap();
    rig.expect(&["ledger", "rebase", "--shard", "0", "--to", "seq:1001", "--yes"]).unwrap();
    daemon.restart().unwrap();
    assert_landed(&rig, &mut daemon, 3_000);
    publish(&rig, 3_000, 1_000);
    assert_landed(&rig, &mut daemon, 4_000);
    assert_stops(&mut daemon);
    assert_counters(&rig, 4_000);
}

#[test]
fn a_tail_lost_while_the_daemon_runs_stops_the_shard() {
    let mut rig = Rig::start(small().set("topology.history", "1h")).unwrap();
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish(&rig, 0, 1_000);
    assert_landed(&rig, &mut daemon, 1_000);
    rig.nats.stop().unwrap();
    let older = rig.folder().join("older");
    copy(&stream_folder(&rig), &older);
    rig.nats.restart().unwrap();
    publish(&rig, 500, 1_000);
    assert_landed(&rig, &mut daemon, 2_000);
    lose_tail(&mut rig, &older);
    // Past the end that was: nothing but their time tells these rows from those that were lost.
    publish(&rig, 1_000, 3_000);
    says_reused(&mut daemon);
    assert_eq!(rig.stored().unwrap(), 2_000, "rows were taken though some before them may be dropped");
    daemon.stop(Duration::from_secs(26)).unwrap();
    rig.expect(&["ledger", "rebase", "--shard", "0", "--to", "seq:1001", "--yes"]).unwrap();
    daemon.restart().unwrap();
    assert_landed(&rig, &mut daemon, 5_000);
    assert_stops(&mut daemon);
    assert_counters(&rig, 2_500);
}
