//! With explicit acks: rows are acked when they are done, and nothing rests on an ack.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_testbed::http_proxy::{self, Kind};
use holdfast_testbed::proxy::{Direction, Fate, Gate};
use holdfast_testbed::rig::{Options, Rig, assert_landed, assert_stops, assert_whole};
use holdfast_testbed::{Proxy, wait};

const LONG: Duration = Duration::from_mins(2);
const ACK_WAIT: Duration = Duration::from_secs(2);

fn small() -> Options {
    Options { shards: 1, tables: 2, ..Options::default() }
        .set("batch.max_age", "100ms")
        .set("topology.ack_policy", "explicit")
        .set("topology.ack_wait", "2s")
        .set("topology.pinned_ttl", "3s")
}

fn publish(rig: &Rig, first: u64, count: u64) {
    rig.publish(first, count, 128, None).unwrap().finish(LONG).unwrap();
}

/// Waits until the consumer has nothing left to ack.
fn acked(rig: &Rig, rows: u64) {
    wait::until_true("every row to be acked", LONG, || {
        let info = rig.jetstream().consumer("INGEST", "holdfast-0").unwrap();
        info["ack_floor"]["stream_seq"].as_u64() == Some(rows) && info["num_ack_pending"] == 0
    })
    .unwrap();
}

/// Holds every insert until the gate is opened.
fn hold_inserts(clickhouse: &http_proxy::HttpProxy) -> Gate {
    let gate = Gate::default();
    let held = gate.clone();
    clickhouse.set_hook(move |request| match request.kind {
        Kind::Insert if !held.is_open() => http_proxy::Fate::HoldUntil(held.clone()),
        _ => http_proxy::Fate::Forward,
    });
    gate
}

#[tokio::test(flavor = "multi_thread")]
async fn case_60_rows_blocked_past_ack_wait_stay_in_order_under_one_pin() {
    const ROWS: u64 = 20_000;
    // The cap is a tenth of what is published: the daemon is full and renews its pin without taking rows.
    let mut rig = Rig::start(small().set("limits.held_rows", 2_000)).unwrap();
    let clickhouse = rig.clickhouse_proxy().unwrap();
    let nats = Proxy::start_nats(rig.nats.addr()).await.unwrap();
    rig.nats_through(nats.addr());
    let pins: Arc<Mutex<BTreeSet<String>>> = Arc::default();
    let seen = Arc::clone(&pins);
    nats.set_hook(move |direction, frame| {
        if direction == Direction::ToClient
            && let Some(pin) = frame.header("Nats-Pin-Id")
        {
            seen.lock().unwrap().insert(pin.to_owned());
        }
        Fate::Forward
    });
    let gate = hold_inserts(&clickhouse);
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish(&rig, 0, ROWS);
    let info = rig.jetstream().consumer("INGEST", "holdfast-0").unwrap();
    assert_eq!(info["config"]["ack_wait"], 2_000_000_000_u64, "{info}");
    let delivered = || {
        let info = rig.jetstream().consumer("INGEST", "holdfast-0").unwrap();
        info["num_ack_pending"].as_u64().unwrap_or_default()
    };
    wait::until_true("the daemon to be full", LONG, || delivered() >= 1_000).unwrap();
    // Past ack_wait, and past the pinned TTL: the time is the test.
    std::thread::sleep(4 * ACK_WAIT);
    daemon.must_run().unwrap();
    assert_eq!(rig.stored().unwrap(), 0);
    gate.open();
    assert_landed(&rig, &mut daemon, ROWS);
    acked(&rig, ROWS);
    assert_stops(&mut daemon);
    assert_eq!(pins.lock().unwrap().len(), 1, "{}", daemon.log().unwrap());
    assert_whole(&rig, ROWS);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_delivered_again_among_new_ones_are_taken_once() {
    const ROWS: u64 = 40_000;
    let mut rig = Rig::start(small()).unwrap();
    let clickhouse = rig.clickhouse_proxy().unwrap();
    let nats = Proxy::start_nats(rig.nats.addr()).await.unwrap();
    rig.nats_through(nats.addr());
    let again = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&again);
    nats.set_hook(move |direction, frame| {
        // `$JS.ACK.<stream>.<consumer>.<times delivered>.…`
        let delivered = frame.reply().and_then(|reply| reply.strip_prefix("$JS.ACK.INGEST.holdfast-0."));
        if direction == Direction::ToClient && delivered.is_some_and(|rest| !rest.starts_with("1.")) {
            count.fetch_add(1, Ordering::SeqCst);
        }
        Fate::Forward
    });
    let gate = hold_inserts(&clickhouse);
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    // Far below the cap: the daemon goes on pulling, and gets what it holds already once more.
    let publishing = rig.publish(0, ROWS, 128, Some(5_000)).unwrap();
    wait::until_true("rows to be delivered again", LONG, || {
        daemon.must_run().unwrap();
        again.load(Ordering::SeqCst) >= 1_000
    })
    .unwrap();
    gate.open();
    publishing.finish(LONG).unwrap();
    assert_landed(&rig, &mut daemon, ROWS);
    acked(&rig, ROWS);
    assert_stops(&mut daemon);
    assert_whole(&rig, ROWS);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_13_acks_are_lost_and_the_process_restarts() {
    let mut rig = Rig::start(small()).unwrap();
    let nats = Proxy::start_nats(rig.nats.addr()).await.unwrap();
    rig.nats_through(nats.addr());
    let losing = Arc::new(AtomicBool::new(true));
    let lost = Arc::new(AtomicU64::new(0));
    let (on, count) = (Arc::clone(&losing), Arc::clone(&lost));
    nats.set_hook(move |direction, frame| {
        let ack = direction == Direction::ToServer && frame.subject().starts_with("$JS.ACK.");
        if ack && on.load(Ordering::SeqCst) {
            count.fetch_add(1, Ordering::SeqCst);
            return Fate::Drop;
        }
        Fate::Forward
    });
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish(&rig, 0, 4_000);
    assert_landed(&rig, &mut daemon, 4_000);
    wait::until_true("acks to be lost", LONG, || lost.load(Ordering::SeqCst) > 0).unwrap();
    daemon.kill().unwrap();
    losing.store(false, Ordering::SeqCst);
    daemon.restart().unwrap();
    publish(&rig, 2_000, 2_000);
    assert_landed(&rig, &mut daemon, 6_000);
    acked(&rig, 6_000);
    assert_stops(&mut daemon);
    assert_whole(&rig, 6_000);
}

#[test]
fn case_27_and_29_rows_taken_by_a_process_that_died_come_again_in_order() {
    let mut rig = Rig::start(small()).unwrap();
    let clickhouse = rig.clickhouse_proxy().unwrap();
    clickhouse.silent(true);
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish(&rig, 0, 20);
    wait::until_true("the rows to be taken", LONG, || {
        rig.jetstream().consumer("INGEST", "holdfast-0").unwrap()["num_ack_pending"] == 20
    })
    .unwrap();
    daemon.kill().unwrap();
    clickhouse.silent(false);
    publish(&rig, 10, 1_000);
    // Past ack_wait the server holds the twenty to be nobody's: the time is the test.
    std::thread::sleep(2 * ACK_WAIT);
    daemon.restart().unwrap();
    assert_landed(&rig, &mut daemon, 1_020);
    acked(&rig, 1_020);
    assert_stops(&mut daemon);
    assert_whole(&rig, 1_020);
}

#[test]
fn a_work_queue_is_empty_when_all_is_written() {
    const ROWS: u64 = 30_000;
    let rig = Rig::start(Options { shards: 2, tables: 4, ..small() }.set("topology.retention", "workqueue"))
        .unwrap();
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    let mut publishing = rig.publish(0, ROWS, 128, Some(10_000)).unwrap();
    let mut kills = 0;
    rig.landed(ROWS, LONG, |stored| {
        if stored > ROWS / 4 * (kills + 1) && kills < 3 {
            daemon.restart()?;
            kills += 1;
        }
        publishing.is_done()?;
        daemon.must_run()
    })
    .unwrap();
    publishing.finish(LONG).unwrap();
    wait::until_true("the stream to be empty", LONG, || rig.jetstream().messages("INGEST").unwrap() == 0)
        .unwrap();
    assert_stops(&mut daemon);
    assert_whole(&rig, ROWS);
}
