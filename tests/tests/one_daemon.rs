//! One daemon on real servers: stopped, frozen, killed, kept waiting.

use std::time::{Duration, Instant};

use holdfast_testbed::rig::{Options, Rig};
use holdfast_testbed::{rows, wait};

/// Enough for any of these loads on a slow machine.
const LONG: Duration = Duration::from_mins(3);

fn small() -> Options {
    Options { shards: 4, tables: 8, ..Options::default() }.set("batch.max_age", "200ms")
}

/// Every row is there once and in order, by plain SQL and by `holdfast verify`.
fn assert_whole(rig: &Rig, rows: u64) {
    let verdict = rig.judge(rows).unwrap();
    assert!(verdict.ok(), "{verdict}");
    assert_eq!(rig.unproven().unwrap(), Vec::<String>::new());
}

#[test]
fn sigterm_under_load_ends_cleanly_and_the_next_start_goes_on() {
    const ROWS: u64 = 100_000;
    let rig = Rig::start(small()).unwrap();
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    let publishing = rig.publish(0, ROWS, 256, Some(25_000)).unwrap();
    for part in 1..=3 {
        rig.landed(ROWS / 4 * part, LONG, |_| daemon.must_run()).unwrap();
        let asked = Instant::now();
        let ended = daemon.stop(Duration::from_secs(26)).unwrap();
        assert!(ended.is_success(), "{ended}: {}", daemon.log().unwrap());
        assert!(asked.elapsed() < Duration::from_secs(25), "{:?}", asked.elapsed());
        let log = daemon.log().unwrap();
        assert!(!log.contains("rows unwritten"), "{log}");
        daemon.restart().unwrap();
    }
    publishing.finish(LONG).unwrap();
    rig.landed(ROWS, LONG, |_| daemon.must_run()).unwrap();
    assert!(daemon.stop(Duration::from_secs(26)).unwrap().is_success());
    // A clean stop leaves nothing in doubt: no batch was inherited by the starts that followed.
    let log = daemon.log().unwrap();
    assert!(log.contains("shard taken over") && !log.contains("inherited=1"), "{log}");
    assert_whole(&rig, ROWS);
}

#[test]
fn case_24_a_stop_does_not_wait_for_the_age() {
    const ROWS: u64 = 1_000;
    let rig = Rig::start(small().set("batch.max_age", "60s")).unwrap();
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    rig.publish(0, ROWS, 100, None).unwrap().finish(LONG).unwrap();
    // Accepted, and far from old enough for a batch.
    wait::until_true("the daemon to hold the rows", LONG, || {
        daemon.log().unwrap().contains("table described")
    })
    .unwrap();
    let asked = Instant::now();
    assert!(daemon.stop(Duration::from_secs(26)).unwrap().is_success());
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
    daemon.restart().unwrap();
    // Whatever the stop had not taken in is written by the next stop at the latest.
    wait::until_true("the daemon to be ready again", LONG, || {
        daemon.log().unwrap().matches("ready: every shard").count() == 2
    })
    .unwrap();
    assert!(daemon.stop(Duration::from_secs(26)).unwrap().is_success());
    rig.landed(1, LONG, |_| Ok(())).unwrap();
    let verdict = rig.judge(ROWS).unwrap();
    assert_eq!((verdict.repeated, verdict.out_of_order), (0, 0), "{verdict}");
}

#[test]
fn frozen_past_the_pinned_ttl_it_goes_on_by_itself() {
    const ROWS: u64 = 150_000;
    let rig = Rig::start(small()).unwrap();
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    let publishing = rig.publish(0, ROWS, 256, Some(15_000)).unwrap();
    rig.landed(ROWS / 10, LONG, |_| daemon.must_run()).unwrap();
    daemon.pause().unwrap();
    let frozen = Instant::now();
    // Past the pinned TTL of 10 s: the server forgets the pins meanwhile.
    let thaw = Duration::from_secs(15);
    publishing.finish(LONG).unwrap();
    std::thread::sleep(thaw.saturating_sub(frozen.elapsed()));
    daemon.resume().unwrap();
    rig.landed(ROWS, LONG, |_| daemon.must_run()).unwrap();
    assert!(daemon.log().unwrap().contains("tenure over"), "the pins were not lost: the test froze nothing");
    assert!(daemon.stop(Duration::from_secs(26)).unwrap().is_success());
    assert_whole(&rig, ROWS);
}

#[test]
fn case_18_rows_wait_for_their_table_while_others_flow() {
    const ROWS: u64 = 8_000;
    let rig = Rig::start(Options { create_tables: false, ..small() }).unwrap();
    let (late, early) = ("t0", &rig.tables()[1..]);
    for table in early {
        rows::create_table(&rig.sql(), table).unwrap();
    }
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    rig.publish(0, ROWS, 256, None).unwrap().finish(LONG).unwrap();
    let counts = |tables: &[String]| -> u64 {
        tables
            .iter()
            .map(|table| {
                rig.sql()
                    .query(&format!("SELECT count() FROM {table}"))
                    .unwrap()
                    .trim()
                    .parse::<u64>()
                    .unwrap()
            })
            .sum()
    };
    wait::until_true("the other tables' rows", LONG, || counts(early) == ROWS / 8 * 7).unwrap();
    wait::until_true("a word about the missing table", LONG, || {
        let log = daemon.log().unwrap();
        log.lines().any(|line| line.contains("table=t0") && line.contains("its rows wait"))
    })
    .unwrap();
    daemon.must_run().unwrap();
    rows::create_table(&rig.sql(), late).unwrap();
    rig.landed(ROWS, LONG, |_| daemon.must_run()).unwrap();
    assert!(daemon.stop(Duration::from_secs(26)).unwrap().is_success());
    assert_whole(&rig, ROWS);
}

#[test]
fn memory_stays_within_the_budget_while_clickhouse_is_stopped() {
    const ROWS: u64 = 400_000;
    const BUDGET: u64 = 48 << 20;
    let mut rig =
        Rig::start(small().set("limits.held_bytes", "48MiB").set("limits.held_rows", 10_000_000)).unwrap();
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    rig.publish(0, 8, 256, None).unwrap().finish(LONG).unwrap();
    rig.landed(8, LONG, |_| daemon.must_run()).unwrap();
    let before = daemon.resident();
    rig.clickhouse.pause().unwrap();
    let mut publishing = rig.publish(1, ROWS, 1024, None).unwrap();
    let mut most = 0;
    wait::until_true("all rows to be in the stream", LONG, || {
        most = most.max(daemon.resident());
        publishing.is_done().unwrap()
    })
    .unwrap();
    // The share is full long before; the highest value of some seconds more counts, too.
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        most = most.max(daemon.resident());
        std::thread::sleep(Duration::from_millis(50));
    }
    // What is held, the bodies of the batches under way made from it, and the client's buffers.
    assert!(most - before < 2 * BUDGET + (32 << 20), "{} MiB more than at rest", (most - before) >> 20);
    rig.clickhouse.resume().unwrap();
    rig.landed(ROWS + 8, LONG, |_| daemon.must_run()).unwrap();
    assert!(daemon.stop(Duration::from_secs(26)).unwrap().is_success());
    assert_whole(&rig, ROWS + 8);
}
