//! The dead letters port, and what reads them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use holdfast_core::ports::dead_letters::{Cause, Command, Letter, ParkOutcome, Port as _, Reply};
use holdfast_core::ports::delivery::PullEnd;
use holdfast_core::ports::{Attempt, FailureClass};
use holdfast_core::row::{Seq, ShardId, TableName};
use holdfast_core::time::{Instant, Timestamp};
use holdfast_nats::Connection;
use holdfast_nats::connect::Options;
use holdfast_nats::dead_letters::DeadLetters;
use holdfast_nats::letters::{Letters, ReplayError};
use holdfast_nats::topology::{Resharding, Topology};

use crate::server::{Rig, Server, one_shard, publish_raw};

const CREATED: Timestamp = Timestamp(1_700_000_000_000_000_000);
const LATER: Instant = Instant::at(Duration::from_secs(1_000));

fn port_on(connection: &Connection, topology: &Topology) -> DeadLetters {
    DeadLetters::new(connection.clone(), topology, Arc::new(|| Instant::at(Duration::from_secs(500))))
}

fn port(rig: &Rig) -> DeadLetters {
    port_on(&rig.connection, &rig.topology)
}

fn letters(rig: &Rig) -> Letters {
    Letters::new(rig.connection.clone(), &rig.topology)
}

fn letter(table: &str, seq: u64, payload: impl Into<Bytes>) -> Letter {
    Letter {
        created: CREATED,
        shard: ShardId(0),
        table: TableName::new(table),
        seq: Seq(seq),
        stored_at: Timestamp(1_700_000_000_123_456_789),
        payload: payload.into(),
        cause: Cause::Refused,
        code: Some(27),
        message: "Cannot parse\ninput: é".into(),
        attempts: 3,
    }
}

async fn failure(port: &DeadLetters, letter: &Letter) -> holdfast_core::ports::Failure {
    match port.park(letter, LATER, true).await {
        ParkOutcome::Failed(failure) => failure,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_letter_is_kept_once_byte_for_byte() {
    let rig = Rig::new(one_shard()).await;
    let (port, letters) = (port(&rig), letters(&rig));
    let payload: Vec<u8> = (0..=255).collect();
    let letter = letter("web.clicks", 42, payload.clone());
    for attempt in 1..=3 {
        let attempt = Attempt(attempt);
        let command = Command::Park { attempt, letter: letter.clone(), send_by: LATER, unless_there: true };
        let table = letter.table.clone();
        assert_eq!(port.call(command).await, Reply::Parked { attempt, table, outcome: ParkOutcome::Parked });
    }
    assert_eq!(letters.count().await, Ok(1));
    let opened = letters.get(Seq(1)).await.unwrap().unwrap();
    assert_eq!(opened.payload, payload);
    let summary = opened.summary;
    assert_eq!(summary.subject, "ingest-dead.1700000000000000000.0.web%2Eclicks.42");
    assert_eq!(
        (summary.created, summary.shard, summary.seq),
        (Some(CREATED), Some(ShardId(0)), Some(Seq(42)))
    );
    assert_eq!(summary.table, Some(TableName::new("web.clicks")));
    assert_eq!(summary.stored_at, Some(letter.stored_at));
    assert_eq!((summary.cause.as_deref(), summary.class.as_deref()), (Some("refused"), Some("data")));
    assert_eq!((summary.code, summary.attempts, summary.size), (Some(27), Some(3), 256));
    assert_eq!(summary.message.as_deref(), Some("Cannot parse input: é"));
    assert!(opened.headers.contains(&("Holdfast-Subject".into(), "ingest.0.web%2Eclicks".into())));
    assert!(opened.headers.contains(&("Holdfast-Stream".into(), "INGEST".into())));
    // Past its time it is not sent.
    let late = Letter { seq: Seq(43), ..letter.clone() };
    let passed = Instant::at(Duration::from_secs(499));
    assert_eq!(port.park(&late, passed, true).await, ParkOutcome::Stale);
    assert_eq!(letters.count().await, Ok(1));
    // Another row in the same place is not taken for this one.
    for other in [
        Letter { payload: Bytes::from("other"), ..letter.clone() },
        Letter { stored_at: Timestamp(1), ..letter.clone() },
    ] {
        let failure = failure(&port, &other).await;
        assert_eq!(failure.class, FailureClass::Other);
        assert!(failure.message.contains("dead letter 1"), "{failure}");
    }
    // Only a mutant stores it twice.
    assert_eq!(port.park(&letter, LATER, false).await, ParkOutcome::Parked);
    assert_eq!(letters.count().await, Ok(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_hinders_is_named_with_what_to_do() {
    let rig = Rig::new(one_shard()).await;
    let (port, letters) = (port(&rig), letters(&rig));
    let mut config = serde_json::to_value(rig.topology.dead_letters_config()).unwrap();
    config["max_bytes"] = 4096.into();
    rig.api("$JS.API.STREAM.UPDATE.INGEST_DEAD", &config.to_string()).await;
    let mut seq = 0;
    let full = loop {
        seq += 1;
        match port.park(&letter("clicks", seq, vec![b'x'; 500]), LATER, true).await {
            ParkOutcome::Parked => assert!(seq < 20),
            ParkOutcome::Failed(failure) => break failure,
            ParkOutcome::Stale => panic!(),
        }
    };
    assert_eq!(full.class, FailureClass::Full, "{full}");
    assert!(full.message.contains("INGEST_DEAD") && full.message.contains("dead-letters"), "{full}");
    // One that is kept already is known to be, however full the stream is.
    let kept = letter("clicks", 1, vec![b'x'; 500]);
    assert_eq!(port.park(&kept, LATER, true).await, ParkOutcome::Parked);
    assert!(letters.drop_letter(Seq(1)).await.unwrap());
    assert_eq!(port.park(&letter("clicks", seq, vec![b'x'; 500]), LATER, true).await, ParkOutcome::Parked);
    config["max_msg_size"] = 100.into();
    config["max_bytes"] = (-1).into();
    rig.api("$JS.API.STREAM.UPDATE.INGEST_DEAD", &config.to_string()).await;
    assert_eq!(failure(&port, &letter("clicks", 99, vec![b'x'; 500])).await.class, FailureClass::Limit);
    config["subjects"] = serde_json::json!(["elsewhere.>"]);
    rig.api("$JS.API.STREAM.UPDATE.INGEST_DEAD", &config.to_string()).await;
    let elsewhere = failure(&port, &letter("clicks", 99, "{")).await;
    assert_eq!(elsewhere.class, FailureClass::Missing);
    assert!(elsewhere.message.contains("does not take"), "{elsewhere}");
    rig.api("$JS.API.STREAM.DELETE.INGEST_DEAD", "").await;
    let missing = failure(&port, &letter("clicks", 99, "{")).await;
    assert_eq!(missing.class, FailureClass::Missing);
    assert!(missing.message.contains("INGEST_DEAD does not exist; `holdfast topology apply`"), "{missing}");
    assert_eq!(letters.count().await.unwrap_err().class, FailureClass::Missing);
    assert_eq!(letters.list(None, Seq(0), 10).await.unwrap_err().class, FailureClass::Missing);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_nearly_fills_a_message_is_kept_with_few_headers() {
    let rig = Rig::new(one_shard()).await;
    let (port, letters) = (port(&rig), letters(&rig));
    let limit = rig.connection.max_payload();
    for (seq, room) in [(1, 2000), (2, 300), (3, 140)] {
        let letter = letter("clicks", seq, vec![b'x'; limit - room]);
        assert_eq!(port.park(&letter, LATER, true).await, ParkOutcome::Parked, "{room}");
        // Tried again, it is found to be there.
        assert_eq!(port.park(&letter, LATER, true).await, ParkOutcome::Parked, "{room}");
        let kept = letters.get(Seq(seq)).await.unwrap().unwrap();
        assert_eq!(kept.payload, letter.payload);
        assert_eq!(kept.summary.message.is_some(), room == 2000);
        let summary = kept.summary;
        assert_eq!((summary.seq, summary.cause.as_deref()), (Some(Seq(seq)), Some("refused")));
        assert_eq!((summary.table, summary.stored_at), (Some(letter.table), Some(letter.stored_at)));
    }
    let limited = failure(&port, &letter("clicks", 4, vec![b'x'; limit])).await;
    assert_eq!(limited.class, FailureClass::Limit);
    assert!(
        limited.message.contains("max_payload") && limited.message.contains(&limit.to_string()),
        "{limited}"
    );
    let limited = failure(&port, &letter("clicks", 4, vec![b'x'; 2 * limit])).await;
    assert_eq!(limited.class, FailureClass::Limit);
    // The connection was never at risk.
    assert_eq!(rig.connection.client().statistics().connects.load(std::sync::atomic::Ordering::Relaxed), 1);
    // The longest rows come back.
    let replayed = letters.replay(Seq(1), None).await.unwrap();
    assert_eq!((replayed.seq, replayed.left), (Seq(1), None));
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_names_are_kept_and_read_whole() {
    let rig = Rig::new(one_shard()).await;
    let (port, letters) = (port(&rig), letters(&rig));
    let long = [
        "x".repeat(3500),
        "é".repeat(600),
        ".".repeat(2000),
        String::new(),
        "a*b>c d\r\n".into(),
        "%".into(),
    ];
    for (seq, table) in (1..).zip(&long) {
        assert_eq!(port.park(&letter(table, seq, "{"), LATER, true).await, ParkOutcome::Parked);
    }
    let page = letters.list(None, Seq(0), 100).await.unwrap();
    let tables: Vec<_> = page.letters.iter().map(|letter| letter.table.clone().unwrap()).collect();
    assert_eq!(tables, long.iter().map(|name| TableName::new(name.as_str())).collect::<Vec<_>>());
    assert!(page.letters.iter().all(|letter| letter.subject.len() < 1100 && letter.seq.is_some()));
    for (seq, table) in (1..).zip(&long) {
        let page = letters.list(Some(table), Seq(0), 100).await.unwrap();
        assert_eq!(page.letters.len(), 1);
        assert_eq!(letters.rows(CREATED, table).await, Ok(vec![Seq(seq)]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_filters_and_counts() {
    let rig = Rig::new(one_shard()).await;
    let (port, letters) = (port(&rig), letters(&rig));
    for seq in 1..=25 {
        let table = if seq % 5 == 0 { "views" } else { "clicks" };
        assert_eq!(port.park(&letter(table, seq, "{"), LATER, true).await, ParkOutcome::Parked);
    }
    let (mut from, mut seen, mut pages) = (Seq(0), Vec::new(), 0);
    loop {
        let page = letters.list(None, from, 10).await.unwrap();
        pages += 1;
        seen.extend(page.letters.iter().map(|letter| letter.position));
        match page.next {
            Some(next) => from = next,
            None => break,
        }
    }
    assert_eq!((seen, pages), ((1..=25).map(Seq).collect(), 3));
    let page = letters.list(Some("views"), Seq(6), 3).await.unwrap();
    let positions: Vec<_> = page.letters.iter().map(|letter| letter.position.0).collect();
    assert_eq!((positions, page.next), (vec![10, 15, 20], Some(Seq(21))));
    assert_eq!(letters.list(Some("none"), Seq(0), 3).await.unwrap(), holdfast_nats::letters::Page::default());
    assert_eq!(letters.list(None, Seq(u64::MAX), 0).await.unwrap().letters, []);
    assert_eq!(letters.rows(CREATED, "views").await, Ok([5, 10, 15, 20, 25].map(Seq).to_vec()));
    assert_eq!(letters.rows(Timestamp(1), "views").await, Ok(vec![]));
    assert_eq!(letters.drop_letter(Seq(5)).await, Ok(true));
    assert_eq!(letters.drop_letter(Seq(5)).await, Ok(false));
    assert_eq!(letters.drop_letter(Seq(500)).await, Ok(false));
    assert_eq!(letters.drop_letter(Seq(0)).await, Ok(false));
    assert_eq!(letters.get(Seq(5)).await, Ok(None));
    assert_eq!(letters.get(Seq(0)).await, Ok(None));
    assert_eq!(letters.count().await, Ok(24));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_letter_is_a_row_again_and_gone() {
    let rig = Rig::new(one_shard()).await;
    let (port, letters) = (port(&rig), letters(&rig));
    for (seq, table, cause) in
        [(7, "web.clicks", Cause::Refused), (8, "web.clicks", Cause::Payload), (9, "a%2eb", Cause::Subject)]
    {
        let letter = Letter { cause, ..letter(table, seq, format!("{{\"n\":{seq}}}")) };
        assert_eq!(port.park(&letter, LATER, true).await, ParkOutcome::Parked);
    }
    let replayed = letters.replay(Seq(1), None).await.unwrap();
    assert_eq!((replayed.seq, replayed.repeated, replayed.left), (Seq(1), false, None));
    assert_eq!(letters.replay(Seq(1), None).await, Err(ReplayError::NotThere(Seq(1))));
    // Into another table; one that names none must be told.
    letters.replay(Seq(2), Some("two words")).await.unwrap();
    assert!(matches!(letters.replay(Seq(3), None).await, Err(ReplayError::NoTable { .. })));
    letters.replay(Seq(3), Some("a.b")).await.unwrap();
    assert_eq!(letters.count().await, Ok(0));
    let mut member = rig.member().await;
    let pull = member.pull(1, None, 3, Duration::from_secs(5));
    assert_eq!(member.run(pull).await, PullEnd::Full);
    let rows = member.rows_of_one_pin().0;
    let rows: Vec<_> = rows.iter().map(|row| (row.table.as_str(), &row.payload[..])).collect();
    let expected: [(&str, &[u8]); 3] =
        [("web.clicks", b"{\"n\":7}"), ("two words", b"{\"n\":8}"), ("a.b", b"{\"n\":9}")];
    assert_eq!(rows, expected);
    // A stream that takes nothing keeps the letter where it is.
    assert_eq!(port.park(&letter("clicks", 10, "{}"), LATER, true).await, ParkOutcome::Parked);
    rig.api("$JS.API.STREAM.DELETE.INGEST", "").await;
    assert!(matches!(letters.replay(Seq(4), None).await, Err(ReplayError::Refused { .. })));
    assert_eq!(letters.count().await, Ok(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_that_broke_off_stores_no_second_row() {
    let config = "authorization { users: [ \
        { user: all, password: secret }, \
        { user: some, password: secret, permissions: { publish: { deny: [\"$JS.API.STREAM.MSG.DELETE.>\"] } } } ] }";
    let server = Server::with_config(Some(config));
    let connect = async |user: &str| {
        let url = format!("nats://{user}:secret@{}", server.address());
        Connection::open(&Options::new(url, "test")).await.unwrap()
    };
    let (all, some) = (connect("all").await, connect("some").await);
    let topology = one_shard();
    topology.apply(&all, Resharding::Refuse).await.unwrap();
    let port = port_on(&all, &topology);
    assert_eq!(port.park(&letter("clicks", 1, "{}"), LATER, true).await, ParkOutcome::Parked);
    // As if the process had died between the row and the letter.
    let replayed = Letters::new(some, &topology).replay(Seq(1), None).await.unwrap();
    assert_eq!((replayed.seq, replayed.repeated), (Seq(1), false));
    assert_eq!(replayed.left.unwrap().class, FailureClass::Denied);
    let letters = Letters::new(all.clone(), &topology);
    let replayed = letters.replay(Seq(1), None).await.unwrap();
    assert_eq!((replayed.seq, replayed.repeated, replayed.left), (Seq(1), true, None));
    assert_eq!(letters.count().await, Ok(0));
    assert_eq!(holdfast_nats::stream::look(&all, "INGEST").await.unwrap().messages, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_put_there_is_read_as_far_as_it_goes() {
    let rig = Rig::new(one_shard()).await;
    let letters = letters(&rig);
    let blocks: [(&str, &[u8]); 6] = [
        ("ingest-dead.x", b"NATS/1.0\r\n\r\n"),
        ("ingest-dead.5.0.clicks.7", b"NATS/1.0\r\njunk without a colon\r\n\xFF\xFE: \x01\r\n\r\n"),
        ("ingest-dead.5.0.clicks.8", b"NATS/1.0\r\nHoldfast-Code: many\r\nHoldfast-Time: soon\r\nHoldfast-Message: \x1b[31mred\r\n\r\n"),
        ("ingest-dead.5.0.clicks.9", b"NATS/1.0\r\nHoldfast-Table: %zz\r\nHoldfast-Cause:\r\n\r\n"),
        ("ingest-dead.-5.99999999999.%.1", b"NATS/1.0\r\n\r\n"),
        ("ingest-dead.5.0.clicks.10", b"NATS/1.0\r\nHoldfast-Table: a%2eb\r\n\r\n"),
    ];
    for (subject, block) in blocks {
        publish_raw(&rig, subject, block, b"\x00\xFF").await;
    }
    let page = letters.list(None, Seq(0), 100).await.unwrap();
    assert_eq!(page.letters.len(), 6);
    for letter in &page.letters {
        assert_eq!(letters.get(letter.position).await.unwrap().unwrap().payload, &b"\x00\xFF"[..]);
        assert_eq!((letter.code, letter.stored_at, letter.cause.clone(), letter.size), (None, None, None, 2));
        assert!(letter.message.as_ref().is_none_or(|words| !words.contains(char::is_control)));
    }
    assert_eq!(page.letters[1].table, Some(TableName::new("clicks")));
    assert_eq!(page.letters[3].table, Some(TableName::new("%zz")));
    assert_eq!(letters.list(Some("clicks"), Seq(0), 100).await.unwrap().letters.len(), 4);
    for position in [1, 4, 5, 6] {
        let error = letters.replay(Seq(position), None).await.unwrap_err();
        assert!(matches!(error, ReplayError::NoTable { .. }), "{position}: {error}");
    }
    // One without any header still says its table.
    assert_eq!(letters.replay(Seq(2), None).await.unwrap().seq, Seq(1));
    // A letter that meets one which is no letter of Holdfast's is not taken for kept.
    let mine = Letter { created: Timestamp(5), ..letter("clicks", 8, "{") };
    assert_eq!(failure(&port(&rig), &mine).await.class, FailureClass::Other);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_is_waited_out_and_the_letter_kept_once() {
    let mut rig = Rig::new(one_shard()).await;
    let (port, letters) = (port(&rig), letters(&rig));
    assert_eq!(port.park(&letter("clicks", 1, "{"), LATER, true).await, ParkOutcome::Parked);
    rig.server.kill();
    let second = letter("clicks", 2, "{");
    let down = failure(&port, &second).await;
    assert!(matches!(down.class, FailureClass::Unavailable | FailureClass::Unanswered), "{down}");
    // Its time passes while there is no connection.
    let soon = Instant::at(Duration::from_millis(500_100));
    let moving = std::time::Instant::now();
    let clock = Arc::new(move || Instant::at(Duration::from_secs(500) + moving.elapsed()));
    let aging = DeadLetters::new(rig.connection.clone(), &rig.topology, clock);
    assert_eq!(aging.park(&letter("clicks", 3, "{"), soon, true).await, ParkOutcome::Stale);
    rig.server.start_again();
    let start = std::time::Instant::now();
    for letter in [&second, &letter("clicks", 1, "{")] {
        while port.park(letter, LATER, true).await != ParkOutcome::Parked {
            assert!(start.elapsed() < Duration::from_secs(20));
        }
    }
    assert_eq!(letters.rows(CREATED, "clicks").await, Ok(vec![Seq(1), Seq(2)]));
}
