//! The store against the real engine.

mod answers;
mod bed;
mod refusals;
mod rights;

use std::collections::BTreeMap;
use std::time::{Duration, Instant as Moment};

use holdfast_clickhouse::{
    Class, Compression, Config, Demand, Need, PingError, Secret, TableConfig, UnknownFields, identifier,
};
use holdfast_core::ports::Attempt;
use holdfast_core::ports::store::{Command, DescribeError, Found, Insert, InsertOutcome, Level, Port};
use holdfast_core::row::{Seq, ShardId, TableName};
use holdfast_core::time::{Instant, Timestamp};
use holdfast_testbed::{ClickHouse, Proxy};

use crate::bed::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_lands_once_in_one_part_with_its_columns() {
    let server = ClickHouse::start().unwrap();
    for (table, compression) in [("lz", Compression::Lz4), ("un", Compression::None)] {
        plain(&server, table);
        let bed = Bed::new(server.url(), |config| config.compression = compression);
        for _ in 0..2 {
            assert_eq!(bed.put(table, "token 1", rows(10..=60_009)).await, InsertOutcome::Stored);
        }
        let sql = "SELECT count(), min(_seq), max(_seq), any(_stream), countIf(_seq = n) FROM";
        let seen = server.query(&format!("{sql} {table}")).unwrap();
        assert_eq!(seen, format!("60000\t10\t60009\t{}\t60000", CREATED.0));
        let parts = server.query(&format!("SELECT uniqExact(_part) FROM {table}")).unwrap();
        assert_eq!(parts, "1", "one batch is one block");
        let started = Moment::now();
        let found = bed.read_back(table, 1, 100_000).await.unwrap();
        println!("read-back of 60,000 rows: {:?}", started.elapsed());
        assert_eq!(found, Found { seqs: seqs(10..=60_009), repeated: None });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_back_sees_what_is_there() {
    // Whatever a profile does to queries: it must not hide, repeat or keep an old answer.
    let mut builder = ClickHouse::builder();
    for setting in [
        "limit=1",
        "use_query_cache=1",
        // Else the cache refuses what the server is started and found with.
        "query_cache_nondeterministic_function_handling=ignore",
        "query_cache_system_table_handling=ignore",
        "max_result_rows=2",
        "final=1",
    ] {
        builder = builder.argument(format!("--{setting}"));
    }
    let server = builder.start().unwrap();
    plain(&server, "t");
    let bed = Bed::of(&server);
    assert_eq!(bed.read_back("t", 1, 10).await.unwrap(), Found::default());
    assert_eq!(bed.put("t", "a", rows(1..=3)).await, InsertOutcome::Stored);
    assert_eq!(bed.put("t", "b", rows(3..=5)).await, InsertOutcome::Stored);
    let found = bed.read_back("t", 1, 10).await.unwrap();
    assert_eq!(found, Found { seqs: seqs(1..=5), repeated: Some(Seq(3)) });
    assert_eq!(bed.read_back("t", 2, 2).await.unwrap(), Found { seqs: seqs([2]), repeated: None });
    // Rows of another stream with the same sequences are others.
    let other = Insert { created: Timestamp(7), ..batch_for("t", Level::ExactlyOnce, "c", rows(6..=9)) };
    assert_eq!(bed.send(other).await, InsertOutcome::Stored);
    assert_eq!(bed.read_back("t", 4, 9).await.unwrap(), Found { seqs: seqs(4..=5), repeated: None });
    // What was deleted since has landed all the same.
    server.query("DELETE FROM t WHERE _seq = 4").unwrap();
    assert_eq!(bed.read_back("t", 4, 9).await.unwrap().seqs, seqs(4..=5));
    assert_eq!(bed.describe("t").await, Ok(target("default", "t", Level::ExactlyOnce)));
    assert!(bed.store.ping().await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_profile_cannot_change_what_an_insert_means() {
    let mut builder = ClickHouse::builder();
    for setting in [
        "async_insert=1",
        "wait_for_async_insert=0",
        "input_format_allow_errors_num=100",
        "input_format_skip_unknown_fields=1",
        "deduplicate_insert=disable",
        "min_insert_block_size_rows=100",
        "min_insert_block_size_bytes=100",
        "max_insert_block_size=100",
    ] {
        builder = builder.argument(format!("--{setting}"));
    }
    let server = builder.start().unwrap();
    let profile = "SELECT value FROM system.settings WHERE name = 'deduplicate_insert'";
    assert_eq!(server.query(profile).unwrap(), "disable", "the profile reaches queries");
    plain(&server, "t");
    let bed = Bed::of(&server);
    for _ in 0..2 {
        assert_eq!(bed.put("t", "a", rows(1..=5_000)).await, InsertOutcome::Stored);
    }
    let count = "SELECT count(), uniqExact(_part) FROM t";
    assert_eq!(server.query(count).unwrap(), "5000\t1");
    let mut bad = rows(5_001..=6_000);
    bad[950] = row(5_951, r#"{"n":"no number"}"#);
    assert_eq!(again(bed.put("t", "b", bad).await).code, Some(27));
    let unknown = vec![row(6_001, r#"{"n":1,"nn":2}"#)];
    assert_eq!(again(bed.put("t", "c", unknown.clone()).await).code, Some(117));
    assert_eq!(server.query(count).unwrap(), "5000\t1");
    // Unless it is asked for.
    let lax = Bed::new(server.url(), |config| config.defaults.unknown_fields = UnknownFields::Ignore);
    assert_eq!(lax.put("t", "d", unknown).await, InsertOutcome::Stored);
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_names_are_names() {
    let server = ClickHouse::start().unwrap();
    server.query("CREATE DATABASE d").unwrap();
    server.query("CREATE TABLE d.x (a UInt8) ENGINE = MergeTree ORDER BY a").unwrap();
    for (name, others) in [
        "a`; DROP TABLE x",
        "b'; DROP TABLE x; --",
        "c\\",
        "d\\`",
        "e.f",
        "g?h{i}",
        "\u{fc}n\u{ef}c\u{f6}d\u{e9} \u{1F980}",
        "l\nm\tn\ro",
        "\"p\"",
        "%71 & ?q=1#r",
        "SELECT",
    ]
    .into_iter()
    .zip(2..)
    {
        let sequence = format!("{name} seq");
        let (quoted, column) = (identifier::quote(name).unwrap(), identifier::quote(&sequence).unwrap());
        server
            .query(&format!(
                "CREATE TABLE d.{quoted} ({column} UInt64, {quoted} UInt64, n UInt64, s String) \
                 ENGINE = MergeTree ORDER BY n {WINDOW}"
            ))
            .unwrap_or_else(|error| panic!("{name:?}: {error}"));
        let bed = Bed::new(server.url(), |config| {
            "d".clone_into(&mut config.database);
            config.defaults.sequence_column.clone_from(&sequence);
            name.clone_into(&mut config.defaults.stream_column);
        });
        let place = target("d", name, Level::ExactlyOnce);
        assert_eq!(bed.describe(name).await.as_ref(), Ok(&place), "{name:?}");
        let insert = Insert { target: place, ..batch_for(name, Level::ExactlyOnce, name, rows(1..=3)) };
        assert_eq!(bed.send(insert).await, InsertOutcome::Stored, "{name:?}");
        assert_eq!(bed.read_back_from("d", name, 1, 9).await.unwrap().seqs, seqs(1..=3), "{name:?}");
        let literal = identifier::literal(name);
        let count = |condition: String| {
            server.query(&format!("SELECT count() FROM system.tables WHERE {condition}")).unwrap()
        };
        assert_eq!(count(format!("name = {literal}")), "1", "{name:?}");
        assert_eq!(count("database = 'd'".to_owned()), others.to_string(), "nothing else came or went");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn several_partitions_are_completed_by_a_retry() {
    let server = ClickHouse::start().unwrap();
    create(&server, "t", &format!("MergeTree PARTITION BY n % 3 ORDER BY _seq {WINDOW}"));
    create(&server, "half", &format!("MergeTree PARTITION BY n % 3 ORDER BY _seq {WINDOW}"));
    let bed = Bed::of(&server);
    assert_eq!(bed.put("t", "a", rows(1..=30)).await, InsertOutcome::Stored);
    assert_eq!(bed.put("t", "a", rows(1..=30)).await, InsertOutcome::Stored);
    assert_eq!(bed.read_back("t", 1, 30).await.unwrap(), Found { seqs: seqs(1..=30), repeated: None });
    // A part of the batch under its token, as a server leaves it that was killed in between.
    let third = rows(1..=30).into_iter().step_by(3).collect();
    assert_eq!(bed.put("half", "a", third).await, InsertOutcome::Stored);
    assert_eq!(bed.put("half", "a", rows(1..=30)).await, InsertOutcome::Stored);
    assert_eq!(bed.read_back("half", 1, 30).await.unwrap(), Found { seqs: seqs(1..=30), repeated: None });
    // Too many partitions are seen before anything is written.
    create(&server, "many", &format!("MergeTree PARTITION BY n ORDER BY _seq {WINDOW}"));
    assert_eq!(again(bed.put("many", "a", rows(1..=150)).await).code, Some(252));
    assert_eq!(bed.read_back("many", 1, 150).await.unwrap(), Found::default());
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_behind_the_parsing_are_in_doubt() {
    let server = ClickHouse::start().unwrap();
    plain(&server, "source");
    server.query("CREATE TABLE into (n UInt64, s UInt8) ENGINE = MergeTree ORDER BY n").unwrap();
    server.query("CREATE MATERIALIZED VIEW v TO into AS SELECT n, toUInt8(s) AS s FROM source").unwrap();
    let bed = Bed::of(&server);
    let refusal = doubt(bed.put("source", "a", rows(1..=3)).await);
    assert!(refusal.message.contains("view"), "{refusal}");
    // An index is reckoned when its part is written: of two partitions, one may be stored.
    server
        .query(
            "CREATE TABLE indexed (_seq UInt64, _stream UInt64, n UInt64, s String, INDEX i toUInt8(s) TYPE minmax) \
             ENGINE = MergeTree PARTITION BY n ORDER BY _seq SETTINGS non_replicated_deduplication_window = 9",
        )
        .unwrap();
    // Of three: the second is begun before the first is committed.
    let payloads = [r#"{"n":1,"s":"1"}"#, r#"{"n":2,"s":"2"}"#, r#"{"n":3,"s":"x"}"#];
    let batch =
        |from: usize| (1..).zip(payloads).skip(from).map(|(seq, payload)| row(seq, payload)).collect();
    let refusal = doubt(bed.put("indexed", "a", batch(0)).await);
    assert_eq!((refusal.class, refusal.code, refusal.row), (Class::Data, Some(6), None));
    assert_eq!(bed.read_back("indexed", 1, 9).await.unwrap().seqs, seqs([1]));
    // It is over, so a look makes it certain that nothing of what was sent then is there.
    let refusal = again(bed.put("indexed", "a", batch(1)).await);
    assert_eq!((refusal.class, refusal.code, refusal.row), (Class::Data, Some(6), Some(2)));
    // But not where there is nothing to look at.
    server
        .query(
            "CREATE TABLE merging (_seq UInt64, _stream UInt64, n UInt64, s String, INDEX i toUInt8(s) TYPE minmax) \
             ENGINE = ReplacingMergeTree PARTITION BY n ORDER BY _seq SETTINGS non_replicated_deduplication_window = 9",
        )
        .unwrap();
    let batch = batch_for("merging", Level::Deduplicated, "a", batch(1));
    assert_eq!(doubt(bed.send(batch).await).class, Class::Data);
    // A constraint is checked before.
    server.query("ALTER TABLE indexed ADD CONSTRAINT c CHECK n < 100").unwrap();
    assert_eq!(again(bed.put("indexed", "b", vec![row(1, r#"{"n":100,"s":"1"}"#)]).await).code, Some(469));
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_that_come_change_and_go() {
    let server = ClickHouse::start().unwrap();
    let bed = Bed::new(server.url(), |config| {
        let table = TableConfig { target: Some("nowhere.t".into()), ..TableConfig::default() };
        config.tables.insert(TableName::new("elsewhere"), table);
    });
    for (table, code) in [("t", 60), ("elsewhere", 81)] {
        match bed.describe(table).await {
            Err(DescribeError::Missing(refusal)) => assert_eq!(refusal.code, Some(code)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(again(bed.put("t", "a", rows(1..=3)).await).code, Some(60));
    plain(&server, "t");
    assert_eq!(bed.describe("t").await, Ok(target("default", "t", Level::ExactlyOnce)));
    assert_eq!(bed.put("t", "a", rows(1..=3)).await, InsertOutcome::Stored);
    // A column that came since is filled at once, one that went is not waited for.
    server.query("ALTER TABLE t ADD COLUMN new String").unwrap();
    assert_eq!(bed.put("t", "b", vec![row(4, r#"{"new":"here"}"#)]).await, InsertOutcome::Stored);
    assert_eq!(server.query("SELECT new FROM t WHERE _seq = 4").unwrap(), "here");
    server.query("ALTER TABLE t DROP COLUMN new").unwrap();
    assert_eq!(bed.put("t", "c", rows(5..=6)).await, InsertOutcome::Stored);
    assert_eq!(again(bed.put("t", "d", vec![row(7, r#"{"new":"gone"}"#)]).await).code, Some(117));
    // Without its columns an exactly-once batch is not sent.
    server.query("ALTER TABLE t DROP COLUMN _stream").unwrap();
    let refusal = again(bed.put("t", "e", rows(7..=9)).await);
    assert!(refusal.message.contains("\"_stream\""), "{refusal}");
    assert_eq!(server.query("SELECT count() FROM t").unwrap(), "6");
    assert_eq!(bed.describe("t").await, Ok(target("default", "t", Level::Deduplicated)));
    let weaker = batch_for("t", Level::Deduplicated, "e", rows(7..=9));
    assert_eq!(bed.send(weaker).await, InsertOutcome::Stored);
    server.query("DROP TABLE t SYNC").unwrap();
    let weaker = batch_for("t", Level::Deduplicated, "f", rows(10..=11));
    assert_eq!(again(bed.send(weaker).await).code, Some(60));
    assert!(bed.read_back("t", 1, 9).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_promises_what_it_can() {
    let server = ClickHouse::start().unwrap();
    let expiring = "MergeTree ORDER BY _seq TTL toDate('2100-01-01') + INTERVAL n DAY";
    for (table, engine, level) in [
        ("good", format!("MergeTree ORDER BY _seq {WINDOW}"), Level::ExactlyOnce),
        ("no_window", "MergeTree ORDER BY _seq".to_owned(), Level::AtLeastOnce),
        ("replacing", format!("ReplacingMergeTree ORDER BY _seq {WINDOW}"), Level::Deduplicated),
        ("summing", format!("SummingMergeTree ORDER BY _seq {WINDOW}"), Level::Deduplicated),
        ("ttl", format!("{expiring} {WINDOW}"), Level::Deduplicated),
        ("recompressed", format!("{expiring} RECOMPRESS CODEC(ZSTD(1)) {WINDOW}"), Level::ExactlyOnce),
        ("memory", "Memory".to_owned(), Level::AtLeastOnce),
        ("log", "Log".to_owned(), Level::AtLeastOnce),
        ("nowhere", "Null".to_owned(), Level::AtLeastOnce),
    ] {
        create(&server, table, &engine);
        let bed = Bed::of(&server);
        assert_eq!(bed.describe(table).await, Ok(target("default", table, level)), "{table}");
        let strict = Bed::new(server.url(), |c| c.defaults.delivery = Demand::Exactly(Level::ExactlyOnce));
        match strict.describe(table).await {
            Ok(_) => assert_eq!(level, Level::ExactlyOnce),
            Err(DescribeError::Unfit(why)) => {
                assert!(level < Level::ExactlyOnce && why.contains("To mend it"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        // At the level it promises, it takes rows.
        let insert = batch_for(table, level, "a", rows(1..=3));
        assert_eq!(bed.send(insert).await, InsertOutcome::Stored, "{table}");
    }
    server.query("CREATE VIEW v AS SELECT 1 AS n").unwrap();
    assert!(matches!(Bed::of(&server).describe("v").await, Err(DescribeError::Unfit(_))));
    assert!(matches!(Bed::of(&server).describe("").await, Err(DescribeError::Unfit(_))));

    // What is told to mend it mends it.
    server.query("CREATE TABLE bare (n UInt64, s String) ENGINE = MergeTree ORDER BY n").unwrap();
    let bed = Bed::of(&server);
    let report = async || bed.store.report(&TableName::new("bare")).await.unwrap();
    let bare = report().await;
    assert_eq!((bare.window, bare.level, bare.findings.len()), (0, Some(Level::AtLeastOnce), 3));
    for finding in &bare.findings {
        assert_eq!(finding.need, Need::Recommended);
        server.query(&finding.fix).unwrap();
    }
    let mended = report().await;
    assert_eq!((mended.window, mended.level), (10_000, Some(Level::ExactlyOnce)));
    for finding in &mended.findings {
        assert_eq!(finding.field, "index");
        server.query(&finding.fix).unwrap();
    }
    assert_eq!(report().await.findings, []);
    assert_eq!(bed.put("bare", "a", rows(1..=3)).await, InsertOutcome::Stored);
    assert_eq!(bed.read_back("bare", 1, 3).await.unwrap().seqs, seqs(1..=3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_takes_settings_of_its_own() {
    let server = ClickHouse::start().unwrap();
    server
        .query(&format!(
            "CREATE TABLE t (_seq UInt64, at DateTime('UTC'), e UInt8 EPHEMERAL, x UInt8 DEFAULT e + 1, \
             m UInt8 MATERIALIZED 5) ENGINE = MergeTree ORDER BY _seq {WINDOW}"
        ))
        .unwrap();
    let bed = Bed::new(server.url(), |config| {
        let (name, value) = ("date_time_input_format".to_owned(), "best_effort".to_owned());
        config.defaults.settings = BTreeMap::from([(name, value)]);
    });
    let batch = vec![row(1, r#"{"at":"2026-07-11T10:00:00.5+02:00","e":6}"#)];
    assert_eq!(bed.send(batch_for("t", Level::Deduplicated, "a", batch)).await, InsertOutcome::Stored);
    assert_eq!(server.query("SELECT _seq, at, x, m FROM t").unwrap(), "1\t2026-07-11 08:00:00\t7\t5");
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_there_is_certain_and_a_broken_connection_is_not() {
    let mut server = ClickHouse::start().unwrap();
    plain(&server, "t");
    let bed = Bed::of(&server);
    assert_eq!(bed.put("t", "a", rows(1..=3)).await, InsertOutcome::Stored);
    server.kill().unwrap();
    let refusal = again(bed.put("t", "b", rows(4..=6)).await);
    assert!(refusal.message.contains("cannot connect"), "{refusal}");
    assert!(bed.read_back("t", 1, 9).await.is_err());
    assert!(matches!(bed.describe("t").await, Err(DescribeError::Failed(_))));
    server.restart().unwrap();
    // Killed while the insert waits for its answer.
    slow_down(&server, 0.9);
    let waiting = bed.start(Command::Insert(batch_for("t", Level::ExactlyOnce, "b", rows(4..=6))));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!waiting.is_finished());
    server.kill().unwrap();
    doubt(inserted(waiting.await.unwrap()));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_wait_ends() {
    let server = ClickHouse::start().unwrap();
    plain(&server, "t");
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let bed = Bed::new(format!("http://{}", proxy.addr()), |config| {
        config.insert_timeout = Duration::from_secs(2);
        config.query_timeout = Duration::from_secs(1);
        config.inserts_in_flight = 1;
        config.compression = Compression::None;
    });
    assert_eq!(bed.put("t", "a", rows(1..=3)).await, InsertOutcome::Stored);
    // Connections are accepted, and nothing more: for a small body and for one that fills every buffer.
    proxy.black_hole(true);
    for size in [3, 200_000] {
        // The settings are known by now; a broken connection would have them asked again.
        let started = Moment::now();
        let refusal = doubt(bed.put("t", "b", rows(4..=3 + size)).await);
        let took = started.elapsed();
        assert!(refusal.message.contains("no answer within 2s"), "{refusal}");
        assert!(took > Duration::from_millis(1_500) && took < Duration::from_secs(4), "{took:?}");
        proxy.black_hole(false);
        assert!(bed.describe("t").await.is_ok());
        proxy.black_hole(true);
    }
    // One insert at a time: the second waits for its turn until its `send_by`, and is not sent.
    let first = bed.start(Command::Insert(batch_for("t", Level::ExactlyOnce, "c", rows(4..=6))));
    tokio::time::sleep(Duration::from_millis(200)).await;
    let started = Moment::now();
    let mut second = batch_for("t", Level::ExactlyOnce, "d", rows(7..=9));
    second.send_by = Instant::START;
    assert_eq!(bed.send(second).await, InsertOutcome::Stale);
    assert!(started.elapsed() < Duration::from_millis(500));
    doubt(inserted(first.await.unwrap()));
    assert!(matches!(bed.describe("t").await, Err(DescribeError::Failed(_))));
    assert!(bed.read_back("t", 1, 9).await.is_err());
    assert!(matches!(bed.store.ping().await, Err(PingError::Silent { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_servers_own_limit_ends_an_insert() {
    let server = ClickHouse::start().unwrap();
    plain(&server, "t");
    slow_down(&server, 0.5);
    let bed = Bed::new(server.url(), |config| config.insert_timeout = Duration::from_secs(1));
    let refusal = doubt(bed.put("t", "a", rows(1..=5)).await);
    println!("{refusal}");
    let running = || server.query("SELECT count() FROM system.processes WHERE query LIKE 'INSERT%'").unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(running(), "0", "it does not go on for the 2.5 s it would take");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_given_up_gets_its_answers() {
    let server = ClickHouse::start().unwrap();
    plain(&server, "t");
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let bed = Bed::new(format!("http://{}", proxy.addr()), |_| {});
    assert!(bed.describe("t").await.is_ok());
    proxy.black_hole(true);
    let ours = bed.start(Command::Insert(batch_for("t", Level::ExactlyOnce, "a", rows(1..=200_000))));
    let asked = bed.start(describe("t"));
    let mut other = batch_for("t", Level::ExactlyOnce, "b", rows(200_001..=200_003));
    other.shard = ShardId(4);
    let other = bed.start(Command::Insert(other));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(bed.store.call(Command::Abort { shard: SHARD, until: Attempt(3) }).await, None);
    assert!(doubt(inserted(ours.await.unwrap())).message.contains("given up"));
    assert!(matches!(described(asked.await.unwrap()), Err(DescribeError::Failed(_))));
    assert!(!other.is_finished());
    proxy.black_hole(false);
    assert_eq!(inserted(other.await.unwrap()), InsertOutcome::Stored);
    // What it still had to start is broken off, too.
    assert!(doubt(bed.put("t", "a", rows(1..=3)).await).message.contains("given up"));
    // The body that was cut is not stored, and an heir may go on.
    let bed = Bed::of(&server);
    assert_eq!(bed.put("t", "c", rows(300_001..=300_002)).await, InsertOutcome::Stored);
    let found = bed.read_back("t", 1, 400_000).await.unwrap();
    assert_eq!(found.seqs, seqs((200_001..=200_003).chain(300_001..=300_002)));
}

#[tokio::test(flavor = "multi_thread")]
async fn ping_tells_what_is_wrong() {
    let server = ClickHouse::start().unwrap();
    let answer = Bed::of(&server).store.ping().await.unwrap();
    assert_eq!((answer.user.as_str(), answer.has_database), ("default", true), "{answer:?}");
    let elsewhere = Bed::new(server.url(), |config| config.database = "nowhere".into());
    assert!(!elsewhere.store.ping().await.unwrap().has_database);

    let secret = |config: &mut Config| config.password = Secret::new("hunter2");
    let denied = Bed::new(server.url(), |config| {
        secret(config);
        config.user = "nobody".into();
    });
    let error = denied.store.ping().await.unwrap_err();
    assert!(matches!(error, PingError::Denied { .. }), "{error}");
    assert!(!error.to_string().contains("hunter2") && !format!("{error:?}").contains("hunter2"));
    let refusal = again(denied.put("t", "a", rows(1..=3)).await);
    assert!(
        matches!(refusal.code, Some(192 | 193 | 516)) && !refusal.message.contains("hunter2"),
        "{refusal}"
    );

    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let nobody = Bed::new(format!("http://{free}"), secret).store.ping().await.unwrap_err();
    assert!(matches!(&nobody, PingError::Unreachable { .. }), "{nobody}");
    // TLS to a port without it: no connection comes about.
    let https = Bed::new(server.url().replace("http", "https"), secret);
    let error = https.store.ping().await.unwrap_err();
    assert!(matches!(error, PingError::Unreachable { .. }), "{error}");
    again(https.put("t", "a", rows(1..=3)).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_the_record_does_not_know_are_found() {
    let server = ClickHouse::start().unwrap();
    plain(&server, "t");
    create(&server, "weaker", "MergeTree ORDER BY _seq");
    let bed = Bed::of(&server);
    assert_eq!(bed.holds("t", 0).await, Ok(None));
    for table in ["t", "weaker"] {
        assert_eq!(bed.put(table, "a", rows(1..=50)).await, InsertOutcome::Stored);
    }
    assert_eq!(bed.holds("t", 0).await, Ok(Some(Seq(50))));
    assert_eq!(bed.holds("t", 49).await, Ok(Some(Seq(50))));
    for above in [50, 51, u64::MAX] {
        assert_eq!(bed.holds("t", above).await, Ok(None));
    }
    assert_eq!(bed.holds("weaker", 0).await, Ok(None), "it cannot be read back");
    // Another stream's rows are others.
    let other = Insert { created: Timestamp(7), ..batch_for("t", Level::ExactlyOnce, "b", rows(60..=70)) };
    assert_eq!(bed.send(other).await, InsertOutcome::Stored);
    assert_eq!(bed.holds("t", 10).await, Ok(Some(Seq(50))));
    // Whatever the columns are called, and whether they can be null.
    let column = |name: &str| identifier::quote(name).unwrap();
    let (sequence, stream) = ("a` OR 1=1 --", "b' \\ `");
    server
        .query(&format!(
            "CREATE TABLE odd ({} Nullable(Int64), {} Nullable(UInt128), n UInt64, s String) \
             ENGINE = MergeTree ORDER BY n {WINDOW}",
            column(sequence),
            column(stream)
        ))
        .unwrap();
    let odd = Bed::new(server.url(), |config| {
        sequence.clone_into(&mut config.defaults.sequence_column);
        stream.clone_into(&mut config.defaults.stream_column);
    });
    assert_eq!(odd.holds("odd", 0).await, Ok(None));
    assert_eq!(odd.put("odd", "a", rows(7..=9)).await, InsertOutcome::Stored);
    assert_eq!(odd.holds("odd", 7).await, Ok(Some(Seq(9))));
}

/// The figures stand beside `Inner::highest`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement of a minute"]
async fn what_it_costs_to_look_for_rows_in_a_large_table() {
    let server = ClickHouse::start().unwrap();
    let bed = Bed::of(&server);
    for (table, order, index) in [
        ("sorted", "ORDER BY _seq", ""),
        ("unsorted", "ORDER BY tuple()", ""),
        ("scattered", "ORDER BY cityHash64(n)", ""),
        ("indexed", "ORDER BY cityHash64(n)", ", INDEX i _seq TYPE minmax"),
    ] {
        server
            .query(&format!("CREATE TABLE {table} ({COLUMNS}{index}) ENGINE = MergeTree {order} {WINDOW}"))
            .unwrap();
        for block in 0..10_u64 {
            server
                .query(&format!(
                    "INSERT INTO {table} SELECT number + 1, {}, number, repeat('x', 40) FROM numbers({}, 1000000)",
                    CREATED.0,
                    block * 1_000_000
                ))
                .unwrap();
        }
        for (what, above) in [("from 0", 0), ("near the end", 9_990_000), ("at the end", 10_000_000)] {
            let took = |started: Moment| started.elapsed();
            let plain = Moment::now();
            bed.describe(table).await.unwrap();
            let plain = took(plain);
            let started = Moment::now();
            let found = bed.holds(table, above).await.unwrap();
            let took = took(started);
            println!(
                "{table:>10}, {what:<12}: {:>8.1?} more than {plain:.1?}; {found:?}",
                took.saturating_sub(plain)
            );
        }
    }
}
