//! Between the daemon and ClickHouse answers are lost, bodies are cut, requests come late, parts fail.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use holdfast_testbed::http_proxy::{Answer, Answered, Fate, HttpProxy, Kind, Record};
use holdfast_testbed::proxy::Gate;
use holdfast_testbed::rig::{Options, Rig, assert_landed, assert_stops, assert_whole};
use holdfast_testbed::{Token, rows, wait};

const LONG: Duration = Duration::from_mins(2);

fn small() -> Options {
    Options { shards: 1, tables: 1, ..Options::default() }
        .set("batch.max_age", "100ms")
        .set("defaults.delivery", "exactly-once")
}

fn proxied(options: Options) -> (Rig, HttpProxy) {
    let mut rig = Rig::start(options).unwrap();
    let proxy = rig.clickhouse_proxy().unwrap();
    (rig, proxy)
}

fn publish(rig: &Rig, first: u64, count: u64, rate: Option<u64>) {
    rig.publish(first, count, 128, rate).unwrap().finish(LONG).unwrap();
}

fn succeeded(answer: Option<Answered>) -> bool {
    answer.is_some_and(Answered::is_success)
}

/// The tokens of inserts that fit.
fn tokens(inserts: &[Record], fit: impl Fn(&Record) -> bool) -> BTreeSet<Token> {
    inserts
        .iter()
        .filter(|insert| fit(insert))
        .filter_map(|insert| Token::parse(insert.token.as_deref()?))
        .collect()
}

#[test]
fn case_4_and_5_the_answer_is_lost_or_a_lie_after_the_commit() {
    const ROWS: u64 = 20_000;
    let (rig, proxy) = proxied(small());
    proxy.set_hook(|request| {
        // Most first attempts; the retry's answer too, now and then.
        match (request.kind, request.attempt, request.number % 4) {
            (Kind::Insert, 1, 0) | (Kind::Insert, 2, 3) => Fate::LoseAnswer,
            (Kind::Insert, 1, 1) => Fate::ForwardThenAnswer(Answer::other(502, "Bad Gateway")),
            (Kind::Insert, 1, 2) => {
                let text = "Timeout exceeded: elapsed 1.1 seconds";
                Fate::ForwardThenAnswer(Answer::exception(500, 159, "TIMEOUT_EXCEEDED", text))
            }
            _ => Fate::Forward,
        }
    });
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish(&rig, 0, ROWS, Some(8_000));
    assert_landed(&rig, &mut daemon, ROWS);
    assert_stops(&mut daemon);
    let inserts = proxy.inserts();
    let lost = tokens(&inserts, |insert| succeeded(insert.server) && !succeeded(insert.client));
    assert!(lost.len() >= 3, "the fault was not hit: {} answers lost", lost.len());
    assert!(inserts.iter().all(|insert| insert.attempt < 10), "tried for ever");
    assert_whole(&rig, ROWS);
}

#[test]
fn somebody_else_s_success_is_not_believed() {
    const ROWS: u64 = 5_000;
    let (rig, proxy) = proxied(small());
    proxy.set_hook(|request| match (request.kind, request.attempt) {
        // A balancer's own page; ClickHouse never hears of the rows.
        (Kind::Insert, 1) => Fate::Answer(Answer::other(200, "<html>It works!</html>")),
        (Kind::Insert, 2) => Fate::Answer(Answer::other(204, "")),
        _ => Fate::Forward,
    });
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish(&rig, 0, ROWS, None);
    assert_landed(&rig, &mut daemon, ROWS);
    assert_stops(&mut daemon);
    assert!(proxy.count(Record::is_swallowed) > 0, "the fault was not hit");
    assert_whole(&rig, ROWS);
}

#[test]
fn case_7_a_connection_is_cut_in_the_middle_of_a_body() {
    const ROWS: u64 = 20_000;
    let (rig, proxy) = proxied(small());
    proxy.set_hook(|request| match (request.kind, request.attempt) {
        (Kind::Insert, 1) => Fate::CutBody(request.number * 1_000),
        (Kind::Insert, 2) => Fate::Cut,
        _ => Fate::Forward,
    });
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish(&rig, 0, ROWS, Some(10_000));
    assert_landed(&rig, &mut daemon, ROWS);
    assert_stops(&mut daemon);
    assert!(proxy.count(|record| record.attempt == 1) >= 3, "the fault was not hit");
    assert_whole(&rig, ROWS);
}

#[test]
fn case_3_a_batch_of_one_row_is_refused_five_times() {
    let (rig, proxy) = proxied(small());
    proxy.set_hook(|request| match request.kind {
        Kind::Insert if request.attempt <= 5 => {
            let text =
                "Too many parts (3000) in all partitions in total. Merges are processing slower than inserts";
            Fate::Answer(Answer::exception(500, 252, "TOO_MANY_PARTS", text))
        }
        _ => Fate::Forward,
    });
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish(&rig, 0, 1, None);
    assert_landed(&rig, &mut daemon, 1);
    assert_stops(&mut daemon);
    let inserts = proxy.inserts();
    let attempts: Vec<_> = inserts.iter().map(|insert| insert.attempt).collect();
    assert_eq!(attempts, [1, 2, 3, 4, 5, 6]);
    let tokens = tokens(&inserts, |_| true);
    assert_eq!(tokens.iter().map(|token| token.rows).collect::<Vec<_>>(), [1], "one token throughout");
    assert_whole(&rig, 1);
}

/// Whole rows of three partitions in turn, `v` being the partition.
fn in_partitions(from: u64, to: u64, partitions: u64) -> impl Iterator<Item = (&'static str, String)> {
    (from..to).map(move |n| ("t0", format!("{{\"n\":{n},\"pad\":\"x\",\"v\":{}}}", n % partitions)))
}

#[test]
fn case_8_one_partition_of_three_fails_and_the_rest_of_the_batch_follows() {
    let mut options = small().set("topology.start", "first");
    options.create_tables = false;
    let (rig, proxy) = proxied(options);
    rows::create_partitioned_table(&rig.sql(), "t0", "v").unwrap();
    rig.publish_rows(in_partitions(0, 3_000, 3)).unwrap();
    let obstacle = Mutex::new(Some(rig.clickhouse.obstruct("t0", "1", 0..10).unwrap()));
    proxy.set_hook(move |request| {
        if request.kind == Kind::Insert && request.attempt >= 2 {
            obstacle.lock().unwrap().take();
        }
        Fate::Forward
    });
    let mut daemon = rig.daemon("holdfast").start().unwrap();
    assert_landed(&rig, &mut daemon, 3_000);
    rig.publish_rows(in_partitions(3_000, 6_000, 3)).unwrap();
    assert_landed(&rig, &mut daemon, 6_000);
    assert_stops(&mut daemon);
    let inserts = proxy.inserts();
    let failed = tokens(&inserts, |insert| insert.server.is_some_and(|answer| answer.code == Some(1001)));
    assert_eq!(failed.len(), 1, "the fault was not hit once: {inserts:?}");
    // The failed partition's rows were swallowed under the first token.
    let later = tokens(&inserts, |insert| succeeded(insert.server));
    assert!(later.iter().any(|token| token.generation == 1), "{later:?}");
    assert_whole(&rig, 6_000);
}

#[test]
fn a_batch_that_hangs_past_its_time_lands_later_and_is_dropped() {
    const ROWS: u64 = 3_000;
    let (rig, proxy) = proxied(small().set("clickhouse.insert_timeout", "2s"));
    let gate = Gate::default();
    let held = gate.clone();
    // The first attempts of the first two batches.
    let hung = Mutex::new(BTreeSet::new());
    proxy.set_hook(move |request| {
        let (Kind::Insert, 1, Some(token)) = (request.kind, request.attempt, &request.token) else {
            return Fate::Forward;
        };
        let mut hung = hung.lock().unwrap();
        if hung.len() < 2 && hung.insert(token.clone()) {
            Fate::HoldUntil(held.clone())
        } else {
            Fate::Forward
        }
    });
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish(&rig, 0, 1_000, None);
    assert_landed(&rig, &mut daemon, 1_000);
    publish(&rig, 1_000, 2_000, None);
    assert_landed(&rig, &mut daemon, ROWS);
    // Long after everything else: the tokens alone keep them out.
    gate.open();
    let late = |record: &Record| record.attempt == 1 && succeeded(record.server) && record.client.is_none();
    wait::until_true("the held batches to land", LONG, || proxy.count(late) == 2).unwrap();
    publish(&rig, ROWS, 1_000, None);
    assert_landed(&rig, &mut daemon, ROWS + 1_000);
    assert_stops(&mut daemon);
    assert_whole(&rig, ROWS + 1_000);
}

#[test]
fn case_62_a_batch_with_rows_of_150_partitions_is_split() {
    const ROWS: u64 = 6_000;
    let mut options = small().set("topology.start", "first");
    options.create_tables = false;
    let (rig, proxy) = proxied(options);
    // ClickHouse takes 100 partitions in one insert, unless told otherwise.
    rows::create_partitioned_table(&rig.sql(), "t0", "v").unwrap();
    let by_day = (0..ROWS).map(|n| ("t0", format!("{{\"n\":{n},\"pad\":\"x\",\"v\":{}}}", n / (ROWS / 150))));
    rig.publish_rows(by_day).unwrap();
    let mut daemon = rig.daemon("holdfast").start().unwrap();
    assert_landed(&rig, &mut daemon, ROWS);
    assert_stops(&mut daemon);
    let refused = proxy.count(|record| record.server.is_some_and(|answer| answer.code == Some(252)));
    assert!(refused > 0, "the fault was not hit");
    assert_eq!(rig.dead_letters().unwrap(), []);
    assert_whole(&rig, ROWS);
}

#[test]
fn case_48_and_10_an_error_that_stays_is_tried_in_moderation_and_costs_no_row() {
    let (rig, proxy) = proxied(Options { tables: 2, ..small() });
    proxy.set_hook(|request| {
        if request.inserts_into("t0") {
            let text = "Syntax error: failed at position 1";
            return Fate::Answer(Answer::exception(400, 62, "SYNTAX_ERROR", text));
        }
        if request.inserts_into("t1") && request.attempt <= 3 {
            return Fate::Answer(Answer::exception(500, 49, "LOGICAL_ERROR", "Block structure mismatch"));
        }
        Fate::Forward
    });
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish(&rig, 0, 2_000, None);
    let inserts_into_t0 = || proxy.count(|record| record.table.as_deref() == Some("t0"));
    wait::until_true("t1's rows, and some attempts at t0's", LONG, || {
        daemon.must_run().unwrap();
        rig.stored().is_ok_and(|stored| stored == 1_000) && inserts_into_t0() >= 6
    })
    .unwrap();
    let inserts = proxy.inserts();
    let attempts: Vec<_> = inserts.iter().filter(|insert| insert.table.as_deref() == Some("t0")).collect();
    // The sixth comes after 0.1 + 0.2 + 0.4 + 0.8 + 1.6 s, less or more a quarter.
    let over = attempts[5].at - attempts[0].at;
    assert!(over >= Duration::from_secs(2), "six attempts within {over:?}");
    assert_eq!(rig.dead_letters().unwrap(), []);
    proxy.clear_hook();
    assert_landed(&rig, &mut daemon, 2_000);
    assert_stops(&mut daemon);
    assert_whole(&rig, 2_000);
}
