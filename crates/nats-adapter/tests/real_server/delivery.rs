//! The delivery port: pins, rows, resets, looks.

use std::time::{Duration, Instant};

use holdfast_core::ports::FailureClass;
use holdfast_core::ports::delivery::{InspectError, PinId, PullEnd, Reply};
use holdfast_core::row::{Delivery, Seq, ShardId, Unfit, Verdict};
use holdfast_nats::topology::{AckPolicy, Topology};

use crate::server::{Member, Rig, one_shard, publish_raw};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread")]
async fn rows_come_in_order_under_one_pin_and_before_the_end() {
    let rig = Rig::new(one_shard()).await;
    let seqs = rig.publish("clicks", 5000).await;
    let mut member = rig.member().await;
    let pull = member.pull(1, None, 5000, 10 * SECOND);
    assert_eq!(member.run(pull).await, PullEnd::Full);
    let (rows, _) = member.rows_of_one_pin();
    assert_eq!(rows.len(), 5000);
    for (n, row) in (0_u64..).zip(&rows) {
        assert_eq!(row.seq, seqs[usize::try_from(n).unwrap()]);
        assert_eq!(row.delivery, Delivery(n + 1));
        assert_eq!(row.table.as_str(), "clicks");
        assert_eq!(row.payload, format!("{{\"n\":{n}}}"));
        assert_eq!(row.verdict, Verdict::Good);
    }
    // Nothing is left: the next pull is empty at its time.
    let start = Instant::now();
    let pull = member.pull(1, None, 10, SECOND / 5);
    assert_eq!(member.run(pull).await, PullEnd::Empty);
    assert!(start.elapsed() < 2 * SECOND);
    assert_eq!(member.delivery.unreadable(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_keeps_the_pin_and_delivers_nothing() {
    let rig = Rig::new(one_shard()).await;
    rig.publish("clicks", 100).await;
    let (mut holder, mut standby) = (rig.member().await, rig.member().await);
    let pull = holder.pull(1, None, 10, SECOND);
    assert_eq!(holder.run(pull).await, PullEnd::Full);
    let (rows, pin) = holder.rows_of_one_pin();
    assert_eq!(rows.len(), 10);
    let waiting = standby.pull(1, None, 10, 4 * SECOND);
    let waiting = standby.spawn(waiting);
    let start = Instant::now();
    // Twice the pinned TTL.
    while start.elapsed() < 5 * SECOND {
        let mut renewal = holder.pull(1, Some(&pin), 1, SECOND / 10);
        renewal.max_bytes = Some(1);
        assert_eq!(holder.run(renewal).await, PullEnd::TooLarge);
        tokio::time::sleep(SECOND / 2).await;
    }
    assert_eq!(waiting.await.unwrap(), PullEnd::Empty);
    assert!(holder.told().is_empty() && standby.told().is_empty());
    let look = holder.inspect(0).await.unwrap();
    assert_eq!((look.pinned.as_ref(), look.delivered, look.pending), (Some(&pin), 10, 90));
    // And the rows go on where they stopped.
    let pull = holder.pull(1, Some(&pin), 5, SECOND);
    assert_eq!(holder.run(pull).await, PullEnd::Full);
    assert_eq!(holder.rows_of_one_pin().0[0].delivery, Delivery(11));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_starts_a_fresh_inbox_at_delivery_one() {
    let rig = Rig::new(one_shard()).await;
    rig.publish("clicks", 200).await;
    let mut member = rig.member().await;
    let pull = member.pull(1, None, 100, SECOND);
    assert_eq!(member.run(pull).await, PullEnd::Full);
    let (_, pin) = member.rows_of_one_pin();
    // An open pull on the old inbox.
    let open = member.pull(1, Some(&pin), 5000, 30 * SECOND);
    let open = member.spawn(open);
    assert!(matches!(member.next().await, Reply::Rows(_)));
    member.reset(2, 51).await.unwrap();
    assert_eq!(open.await.unwrap(), PullEnd::Closed);
    let before = member.told();
    assert!(before.iter().all(|reply| matches!(reply, Reply::Rows(rows) if rows.inbox.0 == 1)));
    let pull = member.pull(2, Some(&pin), 150, SECOND);
    assert_eq!(member.run(pull).await, PullEnd::Full);
    let (rows, same) = member.rows_of_one_pin();
    assert_eq!(same, pin);
    assert_eq!((rows[0].seq, rows[0].delivery), (Seq(51), Delivery(1)));
    assert_eq!((rows[149].seq, rows[149].delivery), (Seq(200), Delivery(150)));
    // An inbox that was closed stays closed.
    let late = member.pull(1, Some(&pin), 1, SECOND);
    assert_eq!(member.run(late).await, PullEnd::Closed);
}

#[tokio::test(flavor = "multi_thread")]
async fn resets_under_load_begin_cleanly() {
    let rig = Rig::new(one_shard()).await;
    rig.publish("clicks", 20_000).await;
    let mut member = rig.member().await;
    let pull = member.pull(1, None, 10, SECOND);
    member.run(pull).await;
    let (_, pin) = member.rows_of_one_pin();
    for round in 0..50 {
        let inbox = round + 2;
        let floor = 37 * round;
        member.reset(inbox, floor + 1).await.unwrap();
        // What was on its way to older inboxes does not reach the sink once the reset is answered.
        member.told();
        let pull = member.pull(inbox, Some(&pin), 5000, 5 * SECOND);
        let _running = member.spawn(pull);
        let Reply::Rows(rows) = member.next().await else { panic!() };
        assert_eq!(rows.inbox.0, inbox);
        assert_eq!((rows.rows[0].seq, rows.rows[0].delivery), (Seq(floor + 1), Delivery(1)), "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_pin_is_refused() {
    let rig = Rig::new(one_shard()).await;
    rig.publish("clicks", 10).await;
    let (mut holder, mut other) = (rig.member().await, rig.member().await);
    let wrong = PinId("wwwwwwwwwwwwwwwwwwwwww".into());
    // Nobody is pinned and rows wait.
    let pull = other.pull(1, Some(&wrong), 1, SECOND);
    assert_eq!(other.run(pull).await, PullEnd::NotPinned);
    let pull = holder.pull(1, None, 1, SECOND);
    assert_eq!(holder.run(pull).await, PullEnd::Full);
    let pull = other.pull(1, Some(&wrong), 1, SECOND);
    assert_eq!(other.run(pull).await, PullEnd::NotPinned);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_look_shows_the_numbers() {
    let rig = Rig::new(Topology { shards: 2, ..one_shard() }).await;
    let mut members = [
        Member::new(rig.server.connect().await, &rig.topology, ShardId(0)),
        Member::new(rig.server.connect().await, &rig.topology, ShardId(1)),
    ];
    for member in &mut members {
        let look = member.inspect(0).await.unwrap();
        assert_eq!((look.messages, look.last.seq, look.shard_last, look.pinned), (0, Seq(0), None, None));
        assert_eq!(look.unfit, None);
        assert!(look.created.0 > 1_500_000_000_000_000_000);
    }
    // Tables until both shards have rows.
    let mut last = [Seq(0); 2];
    let mut total = 0;
    for table in 0..40 {
        let seqs = rig.publish(&format!("t{table}"), 3).await;
        total += 3;
        let info = rig.api("$JS.API.CONSUMER.INFO.INGEST.holdfast-0", "").await;
        let zero = info["num_pending"].as_u64().unwrap();
        let shard = usize::from(zero == last[0].0);
        last[shard] = if shard == 0 { Seq(zero) } else { Seq(total - zero) };
        if last[0].0 > 0 && last[1].0 > 0 {
            // `last` counted rows so far; the shard that got this table ends with the stream.
            let look = members[shard].inspect(seqs[0].0).await.unwrap();
            assert_eq!(look.shard_last, seqs.last().copied());
            assert_eq!(look.last.seq, *seqs.last().unwrap());
            assert_eq!(look.pending, last[shard].0);
            assert!(look.row_stored_at.is_some());
            assert_eq!(look.next, Some(Seq(seqs[0].0 + 1)));
            let look = members[shard].look(0, 0).await.unwrap();
            assert_eq!((look.row_stored_at, look.next.is_some()), (None, true));
            let end = members[shard].look(0, seqs[2].0).await.unwrap();
            assert_eq!((end.next, end.shard_last), (None, Some(seqs[2])));
            let end = members[shard].look(0, u64::MAX).await.unwrap();
            assert_eq!(end.next, None);
            let look = members[shard].inspect(seqs[0].0).await.unwrap();
            let other = members[1 - shard].inspect(total + 1000).await.unwrap();
            assert!(other.shard_last.unwrap() < seqs[0]);
            assert_eq!(other.row_stored_at, None);
            assert_eq!((other.messages, other.first), (total, Seq(1)));
            // A look and a delivery give a row the same time.
            let member = &mut members[shard];
            let pull = member.pull(1, None, u32::try_from(look.pending).unwrap(), SECOND);
            assert_eq!(member.run(pull).await, PullEnd::Full);
            let (rows, pin) = member.rows_of_one_pin();
            let row = rows.iter().find(|row| row.seq == seqs[0]).unwrap();
            assert_eq!(look.row_stored_at, Some(row.stored_at));
            assert_eq!(rows.last().unwrap().mark(), look.last);
            let look = member.inspect(0).await.unwrap();
            assert_eq!((look.delivered, look.pending), (rows.len() as u64, 0));
            assert_eq!(look.pinned, Some(pin));
            return;
        }
    }
    panic!("40 tables all in one of two shards");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unpin_lets_the_standby_in() {
    let rig = Rig::new(Topology { pinned_ttl: 60 * SECOND, ..one_shard() }).await;
    rig.publish("clicks", 20).await;
    let (mut holder, mut standby) = (rig.member().await, rig.member().await);
    let pull = holder.pull(1, None, 10, SECOND);
    assert_eq!(holder.run(pull).await, PullEnd::Full);
    let (_, pin) = holder.rows_of_one_pin();
    let waiting = standby.pull(1, None, 10, 20 * SECOND);
    let waiting = standby.spawn(waiting);
    tokio::time::sleep(SECOND / 5).await;
    assert!(standby.told().is_empty());
    let start = Instant::now();
    holder.unpin().await.unwrap();
    assert_eq!(waiting.await.unwrap(), PullEnd::Full);
    assert!(start.elapsed() < SECOND, "{:?}", start.elapsed());
    let (rows, new) = standby.rows_of_one_pin();
    assert_ne!(new, pin);
    assert_eq!(rows[0].delivery, Delivery(11));
    let late = holder.pull(1, Some(&pin), 1, SECOND);
    assert_eq!(holder.run(late).await, PullEnd::NotPinned);
    // When nobody is pinned, or nothing waits, it succeeds too.
    holder.unpin().await.unwrap();
    holder.unpin().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_consumer_is_told() {
    let rig = Rig::new(one_shard()).await;
    let mut member = rig.member().await;
    let waiting = member.pull(1, None, 10, 20 * SECOND);
    let waiting = member.spawn(waiting);
    tokio::time::sleep(SECOND / 5).await;
    rig.api("$JS.API.CONSUMER.DELETE.INGEST.holdfast-0", "").await;
    assert_eq!(waiting.await.unwrap(), PullEnd::Deleted);
    let pull = member.pull(1, None, 10, SECOND);
    assert_eq!(member.run(pull).await, PullEnd::NoResponders);
    let Err(InspectError::Gone(why)) = member.inspect(0).await else { panic!() };
    assert!(why.contains("holdfast-0") && why.contains("topology apply"), "{why}");
    let reset = member.reset(2, 1).await.unwrap_err();
    assert_eq!(reset.class, FailureClass::Unanswered, "{reset}");
    rig.api("$JS.API.STREAM.DELETE.INGEST", "").await;
    let Err(InspectError::Gone(why)) = member.inspect(1).await else { panic!() };
    assert!(why.contains("stream INGEST"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_does_not_fit_is_told() {
    let rig = Rig::new(one_shard()).await;
    let expects_acks = Topology { ack_policy: AckPolicy::Explicit, ..rig.topology.clone() };
    let mut member = Member::new(rig.server.connect().await, &expects_acks, ShardId(0));
    let why = member.inspect(0).await.unwrap().unfit.unwrap();
    assert!(why.contains("ack policy is none, not explicit"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_table_names_come_through() {
    let rig = Rig::new(one_shard()).await;
    let tables =
        ["web.clicks", "two words", "a*b", "c>d", "100%", "naïve 表", "", "$SYS.x", "tab\tnew\nline", "CaSe"];
    for table in tables {
        rig.publish(table, 1).await;
    }
    // A token that no name is spelled as.
    for token in ["a%2eb", "%zz"] {
        let subject = format!("ingest.{token}");
        rig.connection.client().publish(subject, "{}".into()).await.unwrap();
    }
    rig.connection.client().flush().await.unwrap();
    let mut member = rig.member().await;
    let pull = member.pull(1, None, 12, 5 * SECOND);
    assert_eq!(member.run(pull).await, PullEnd::Full);
    let (rows, _) = member.rows_of_one_pin();
    for (row, table) in rows.iter().zip(tables) {
        assert_eq!((row.table.as_str(), &row.verdict), (table, &Verdict::Good));
    }
    assert_eq!(rows[10].table.as_str(), "a%2eb");
    assert!(matches!(&rows[10].verdict, Verdict::Bad(Unfit::Subject(why)) if why.contains("a%2Eb")));
    assert!(matches!(&rows[11].verdict, Verdict::Bad(Unfit::Subject(why)) if why.contains('%')));
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_bound_a_pull_to_the_last_one() {
    let rig = Rig::new(one_shard()).await;
    let client = rig.connection.client();
    for n in 0..6 {
        client.publish("ingest.clicks", format!("{{\"n\":{n}}}").into()).await.unwrap();
    }
    for n in 0..6 {
        let headers = async_nats::HeaderMap::from_iter([("X".parse().unwrap(), "1".parse().unwrap())]);
        client.publish_with_headers("ingest.clicks", headers, format!("{{\"n\":{n}}}").into()).await.unwrap();
    }
    client.flush().await.unwrap();
    let mut member = rig.member().await;
    let mut pin = None;
    // As the server counts: subject, reply subject, headers of the publisher, payload.
    let size = |seq: u64| {
        let reply = format!("$JS.ACK.INGEST.holdfast-0.1.{seq}.{seq}.1700000000123456789.{}", 12 - seq);
        let headers = if seq > 6 { "NATS/1.0\r\nX: 1\r\n\r\n" } else { "" };
        ("ingest.0.clicks".len() + reply.len() + headers.len() + "{'n':0}".len()) as u64
    };
    let three = |first: u64| (first..first + 3).map(size).sum::<u64>();
    // Used up exactly, the server ends a pull without a word; with some left that are too few, it says so.
    for max_bytes in [three(1), three(4) + 5, three(7), three(10)] {
        let mut pull = member.pull(1, pin.as_ref(), 100, 5 * SECOND);
        pull.max_bytes = Some(max_bytes);
        let start = Instant::now();
        assert_eq!(member.run(pull).await, PullEnd::TooLarge);
        assert!(start.elapsed() < 2 * SECOND, "{:?}", start.elapsed());
        let (rows, now) = member.rows_of_one_pin();
        assert_eq!(rows.len(), 3, "{max_bytes}");
        pin = Some(now);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_pulls_at_once_both_end() {
    let rig = Rig::new(one_shard()).await;
    let mut member = rig.member().await;
    let (first, second) = (member.pull(1, None, 6, 2 * SECOND), member.pull(1, None, 6, 3 * SECOND));
    let (first, second) = (member.spawn(first), member.spawn(second));
    tokio::time::sleep(SECOND / 5).await;
    rig.publish("clicks", 8).await;
    let ends = [first.await.unwrap(), second.await.unwrap()];
    // The second may be without a pin id while the first's rows took the pin; both end all the same.
    assert!(
        ends.iter().all(|end| matches!(end, PullEnd::Full | PullEnd::Empty | PullEnd::NotPinned)),
        "{ends:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publishers_headers_fool_nobody() {
    let rig = Rig::new(one_shard()).await;
    publish_raw(&rig, "ingest.clicks", b"NATS/1.0\r\nNats-Pin-Id: stolen\r\n\r\n", b"{\"a\":1}").await;
    publish_raw(&rig, "ingest.clicks", b"NATS/1.0 409 Consumer Deleted\r\n\r\n", b"{\"a\":2}").await;
    publish_raw(&rig, "ingest.clicks", b"NATS/1.0 503\r\n\r\n", b"").await;
    rig.publish("clicks", 1).await;
    let mut member = rig.member().await;
    let pull = member.pull(1, None, 4, 5 * SECOND);
    assert_eq!(member.run(pull).await, PullEnd::Full);
    let (rows, pin) = member.rows_of_one_pin();
    assert_eq!(rows.len(), 4);
    assert_ne!(&*pin.0, "stolen");
    assert!(matches!(rows[2].verdict, Verdict::Bad(_)));
    assert_eq!(member.delivery.unreadable(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_is_a_disruption_and_no_more() {
    let mut rig = Rig::new(one_shard()).await;
    rig.publish("clicks", 50).await;
    let mut member = rig.member().await;
    let pull = member.pull(1, None, 10, SECOND);
    assert_eq!(member.run(pull).await, PullEnd::Full);
    let (_, pin) = member.rows_of_one_pin();
    let open = member.pull(1, Some(&pin), 1000, 60 * SECOND);
    let open = member.spawn(open);
    assert!(matches!(member.next().await, Reply::Rows(_)));
    rig.server.kill();
    // Rows may still have been on their way; then the break, and the connection made anew.
    let mut disruptions = 0;
    let pulled_while_down = member.pull(1, Some(&pin), 1, SECOND / 2);
    while disruptions < 1 {
        disruptions += u32::from(member.next().await == Reply::Disrupted);
    }
    let PullEnd::Failed(failure) = member.run(pulled_while_down).await else { panic!() };
    assert_eq!(failure.class, FailureClass::Unavailable);
    rig.server.start_again();
    while disruptions < 2 {
        disruptions += u32::from(member.next().await == Reply::Disrupted);
    }
    // The server's waiting pulls are gone without a word; the inbox that is closed ends this one.
    assert!(!open.is_finished());
    let start = Instant::now();
    while member.reset(2, 11).await.is_err() {
        assert!(start.elapsed() < 20 * SECOND);
    }
    assert_eq!(open.await.unwrap(), PullEnd::Closed);
    let old = member.pull(2, Some(&pin), 1, SECOND);
    assert_eq!(member.run(old).await, PullEnd::NotPinned);
    member.told();
    let pull = member.pull(2, None, 40, 5 * SECOND);
    assert_eq!(member.run(pull).await, PullEnd::Full);
    let (rows, _) = member.rows_of_one_pin();
    assert_eq!((rows[0].seq, rows[0].delivery), (Seq(11), Delivery(1)));
    assert_eq!(rows.last().unwrap().seq, Seq(50));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures; run it with --release --ignored --nocapture"]
async fn rows_per_second() {
    let rig = Rig::new(one_shard()).await;
    let row = bytes::Bytes::from(format!("{{\"n\":1,\"text\":\"{}\"}}", "x".repeat(230)));
    let rows = 400_000_u32;
    let mut publisher = rig.publisher(holdfast_nats::publish::Options::default());
    let start = Instant::now();
    for _ in 0..rows {
        publisher.publish("clicks", row.clone()).await.unwrap();
    }
    publisher.flush().await.unwrap();
    println!("published {:.0} rows/s", f64::from(rows) / start.elapsed().as_secs_f64());
    let mut member = rig.member().await;
    let start = Instant::now();
    let mut pin = None;
    let (mut seen, mut vectors) = (0, 0);
    while seen < rows {
        let pull = member.pull(1, pin.as_ref(), 5000, 5 * SECOND);
        assert_eq!(member.run(pull).await, PullEnd::Full);
        for rows in member.rows() {
            seen += u32::try_from(rows.rows.len()).unwrap();
            vectors += 1;
            pin = rows.pin;
        }
    }
    println!(
        "delivered {:.0} rows/s, {:.0} rows a vector",
        f64::from(rows) / start.elapsed().as_secs_f64(),
        f64::from(rows) / f64::from(vectors)
    );
}
