//! Payloads that cannot be one row, and rows that ClickHouse refuses: a row or a dead letter, one of them, once.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_testbed::rig::{Options, Rig, assert_landed, assert_stops, assert_whole};
use holdfast_testbed::{Daemon, rows, wait};
use serde_json::{Value, json};

const LONG: Duration = Duration::from_mins(2);

fn picky(options: Options) -> Rig {
    let rig = Rig::start(Options { create_tables: false, ..options }).unwrap();
    for table in rig.tables() {
        rows::create_picky_table(&rig.sql(), &table).unwrap();
    }
    rig
}

fn small() -> Options {
    Options { shards: 1, tables: 1, ..Options::default() }
        .set("batch.max_age", "100ms")
        .set("defaults.delivery", "exactly-once")
        // What an heir finds open and refused is waited out as long as its last attempt could live: 2 × (this
        // + 10 s).
        .set("clickhouse.insert_timeout", "1s")
}

fn good(n: u64) -> String {
    format!("{{\"n\":{n},\"pad\":\"x\",\"v\":1}}")
}

fn refused(n: u64) -> String {
    format!("{{\"n\":{n},\"pad\":\"x\",\"v\":\"abc\"}}")
}

fn count(rig: &Rig, table: &str) -> u64 {
    rig.sql().query(&format!("SELECT count() FROM {table}")).unwrap().trim().parse().unwrap()
}

/// Waits until the daemon's log has a line with all these words.
fn says(daemon: &mut Daemon, words: &[&str]) {
    let what = format!("the log to say {words:?}");
    wait::until_true(&what, LONG, || {
        daemon.must_run().unwrap();
        daemon.log().unwrap().lines().any(|line| words.iter().all(|word| line.contains(word)))
    })
    .unwrap_or_else(|late| panic!("{late}\n{}", daemon.log().unwrap()));
}

#[test]
fn case_50_51_and_68_each_payload_is_one_row_or_one_dead_letter() {
    let large = |n: u64, v: &str| format!("{{\"n\":{n},\"pad\":\"{}\",\"v\":{v}}}", "x".repeat(900_000));
    // What is published, and whether it is a row.
    let payloads: Vec<(Vec<u8>, bool)> = [
        (good(0), true),
        ("{\"n\":1,\"_seq\":5}".into(), false),
        ("{\"n\":2,\"\\u005fseq\":5}".into(), false),
        ("{\"n\":3,\"_stream\":5}".into(), false),
        ("{\"n\":4}{\"n\":4}".into(), false),
        ("{\"n\":5},{\"n\":5}".into(), false),
        ("[{\"n\":6}]".into(), false),
        ("[{\"n\":7},{\"n\":7}]".into(), false),
        (String::new(), false),
        ("\0".into(), false),
        (" \n ".into(), false),
        ("null".into(), false),
        ("\"text\"".into(), false),
        ("{\"n\":8".into(), false),
        (good(9) + "\n", true),
        (refused(10), false),
        ("{\"n\":11,\"no_such_field\":1}".into(), false),
        (large(12, "1"), true),
        (large(13, "\"abc\""), false),
        ("{}".into(), true),
        ("{\"n\":14,\"pad\":\"\\ud83d\\ude00 \u{1f600}\"}".into(), true),
    ]
    .into_iter()
    .map(|(text, is_row): (String, bool)| (text.into_bytes(), is_row))
    .chain([(b"{\"n\":15,\"pad\":\"\xff\xfe\"}".to_vec(), false), (good(16).into_bytes(), true)])
    .collect();
    let rig = picky(small());
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    let seqs = rig.publish_rows(payloads.iter().map(|(payload, _)| ("t0", payload))).unwrap();
    let headers_only = rig.jetstream().publish_with("ingest.t0", &["A: b"], b"").unwrap();
    assert_landed(&rig, &mut daemon, payloads.len() as u64 + 1);
    // Whatever comes twice comes soon: a row after all of them.
    let marker = rig.publish_rows([("t0", good(17))]).unwrap()[0];
    assert_landed(&rig, &mut daemon, payloads.len() as u64 + 2);

    let stored: BTreeMap<u64, u64> = rig
        .sql()
        .query("SELECT _seq, count() FROM t0 GROUP BY _seq FORMAT TabSeparated")
        .unwrap()
        .lines()
        .map(|line| line.split_once('\t').map(|(seq, n)| (seq.parse().unwrap(), n.parse().unwrap())).unwrap())
        .collect();
    let letters = rig.dead_letters().unwrap();
    let mut parked: BTreeMap<u64, Vec<&[u8]>> = BTreeMap::new();
    for letter in &letters {
        assert_eq!((letter.table.as_str(), letter.shard), ("t0", 0));
        parked.entry(letter.seq).or_default().push(&letter.payload);
    }
    for (seq, (payload, is_row)) in seqs.iter().zip(&payloads) {
        let text = String::from_utf8_lossy(&payload[..payload.len().min(60)]).into_owned();
        let rows = stored.get(seq).copied().unwrap_or_default();
        let letters = parked.get(seq).cloned().unwrap_or_default();
        assert_eq!((rows, letters.len() as u64), (u64::from(*is_row), u64::from(!*is_row)), "{text}");
        assert!(letters.iter().all(|letter| letter == payload), "other bytes: {text}");
    }
    assert_eq!(parked[&headers_only], [b""]);
    assert_eq!(stored[&marker], 1);
    assert_eq!(stored.values().sum::<u64>() + letters.len() as u64, payloads.len() as u64 + 2);

    // As the operator sees them.
    let list: Value =
        serde_json::from_str(&rig.expect(&["dead-letters", "list", "--json"]).unwrap()).unwrap();
    let list = list.as_array().or_else(|| list["letters"].as_array()).unwrap_or_else(|| panic!("{list}"));
    assert_eq!(list.len(), letters.len());
    let of = |seq: u64| list.iter().find(|letter| letter["seq"] == seq).unwrap();
    let refused = of(seqs[15]);
    assert_eq!(
        (&refused["table"], &refused["shard"], &refused["cause"]),
        (&json!("t0"), &json!(0), &json!("refused"))
    );
    assert!(refused["code"].is_u64() && refused["size"] == payloads[15].0.len(), "{refused}");
    assert!(refused["message"].as_str().unwrap().contains("abc"), "{refused}");
    assert_eq!(of(seqs[1])["cause"], "payload");
    assert!(of(seqs[1])["message"].as_str().unwrap().contains("_seq"), "{}", of(seqs[1]));
    assert_stops(&mut daemon);
}

/// Good rows, a bad one, good rows in `t0`; good rows in `t1`. Those of `t0` after the bad one must wait.
fn publish_around_a_bad_row(rig: &Rig) {
    let before = (0..100).map(|n| ("t0", good(n)));
    let after = (101..200).map(|n| ("t0", good(n)));
    let other = (0..200).map(|n| ("t1", good(n)));
    rig.publish_rows(before.chain([("t0", refused(100))]).chain(after).chain(other)).unwrap();
}

fn two_tables() -> Options {
    Options { tables: 2, ..small() }
}

/// The table of the bad row stands before it, the other one flows.
fn assert_waits(rig: &Rig, daemon: &mut Daemon) {
    assert_landed(rig, daemon, 300);
    assert_eq!((count(rig, "t0"), count(rig, "t1")), (100, 200));
    publish_more(rig);
    assert_landed(rig, daemon, 310);
    assert_eq!((count(rig, "t0"), count(rig, "t1")), (100, 210));
}

fn publish_more(rig: &Rig) {
    rig.publish_rows((200..210).flat_map(|n| [("t0", good(n)), ("t1", good(n))])).unwrap();
}

#[test]
fn a_missing_dead_letter_stream_makes_its_table_wait_and_says_so() {
    let rig = picky(two_tables());
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    rig.jetstream().api("STREAM.DELETE.INGEST_DEAD", &json!({})).unwrap();
    publish_around_a_bad_row(&rig);
    says(&mut daemon, &["table=t0", "dead letter"]);
    assert_waits(&rig, &mut daemon);
    rig.expect(&["topology", "apply"]).unwrap();
    assert_landed(&rig, &mut daemon, 420);
    assert_stops(&mut daemon);
    assert_eq!(rig.dead_letters().unwrap().len(), 1);
    assert_whole(&rig, 420);
}

#[test]
fn a_full_dead_letter_stream_makes_its_table_wait_and_says_so() {
    let rig = picky(two_tables());
    let js = rig.jetstream();
    let limit = |messages: i64| {
        let mut config = js.stream("INGEST_DEAD").unwrap()["config"].clone();
        config["max_msgs"] = messages.into();
        config["discard"] = "new".into();
        js.api("STREAM.UPDATE.INGEST_DEAD", &config).unwrap();
    };
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    limit(1);
    // Somebody else's letter fills it.
    js.publish("ingest-dead.0.0.other.1", b"").unwrap();
    publish_around_a_bad_row(&rig);
    says(&mut daemon, &["table=t0", "dead letter"]);
    // One of the 301 is not the daemon's.
    assert_landed(&rig, &mut daemon, 301);
    assert_eq!((count(&rig, "t0"), count(&rig, "t1")), (100, 200));
    limit(-1);
    publish_more(&rig);
    assert_landed(&rig, &mut daemon, 421);
    assert_stops(&mut daemon);
    let letters = rig.dead_letters().unwrap();
    assert_eq!(letters.len(), 2);
    assert_eq!(letters[1].payload, refused(100).as_bytes());
    assert_whole(&rig, 420);
}

#[test]
fn case_47_with_dead_letters_switched_off_the_table_of_a_bad_row_waits() {
    let mut rig = picky(two_tables());
    rig.set("topology.dead_letters", "");
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    publish_around_a_bad_row(&rig);
    says(&mut daemon, &["table=t0", "can never be inserted"]);
    assert_waits(&rig, &mut daemon);
    assert_stops(&mut daemon);
    // Switched on again, it goes on where it stood.
    rig.set("topology.dead_letters", "INGEST_DEAD");
    let mut daemon = rig.ready_daemon("again").unwrap();
    assert_landed(&rig, &mut daemon, 420);
    assert_stops(&mut daemon);
    assert_eq!(rig.dead_letters().unwrap().len(), 1);
    assert_whole(&rig, 420);
}

#[test]
fn a_crash_between_letter_and_ledger_keeps_one_letter() {
    // Killed again and again while rows of both kinds come: no letter twice, none missing.
    let rig = picky(two_tables());
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    let rows: Vec<_> = (0..2_000)
        .flat_map(|n| {
            let row = |n| if n % 50 == 7 { refused(n) } else { good(n) };
            [("t0", row(n)), ("t1", row(n))]
        })
        .collect();
    let mut published = 0;
    for part in rows.chunks(2_000) {
        rig.publish_rows(part.iter().map(|(table, row)| (*table, row))).unwrap();
        published += part.len() as u64;
        let enough = published - 1_700;
        assert_landed(&rig, &mut daemon, enough);
        daemon.restart().unwrap();
    }
    assert_landed(&rig, &mut daemon, published);
    assert_stops(&mut daemon);
    assert_eq!(rig.dead_letters().unwrap().len(), 80);
    assert_whole(&rig, published);
}
