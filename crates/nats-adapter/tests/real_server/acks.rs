//! Acknowledgements: what they do on the server, and what late ones do not.

use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use holdfast_core::ports::delivery::{Command, Port as _, PullEnd};
use holdfast_core::row::{Delivery, Row, Seq, ShardId};
use holdfast_nats::topology::{AckPolicy, MIN_ACK_PENDING, RetentionPolicy, Topology};

use crate::server::{Member, Rig, Server, one_shard};

const SECOND: Duration = Duration::from_secs(1);

/// Starts a server's consumers in the long form of ADR-15.
const LONG_FORM: &str = "feature_flags { js_ack_fc_v2: true }";

fn acking(retention: RetentionPolicy) -> Topology {
    Topology { ack_policy: AckPolicy::Explicit, retention, ..one_shard() }
}

fn numbers(rows: &[Row]) -> Vec<(u64, u64)> {
    rows.iter().map(|row| (row.seq.0, row.delivery.0)).collect()
}

/// What the consumer says: unacknowledged rows, rows waiting, and the rows of the stream.
async fn counts(rig: &Rig) -> (u64, u64, u64) {
    let consumer = rig.api("$JS.API.CONSUMER.INFO.INGEST.holdfast-0", "").await;
    let stream = rig.api("$JS.API.STREAM.INFO.INGEST", "").await;
    let number = |value: &serde_json::Value| value.as_u64().unwrap();
    (
        number(&consumer["num_ack_pending"]),
        number(&consumer["num_pending"]),
        number(&stream["state"]["messages"]),
    )
}

/// Waits until [`counts`] says so. Acknowledgements have no answer.
async fn until(rig: &Rig, expected: (u64, u64, u64)) {
    let start = Instant::now();
    loop {
        let counts = counts(rig).await;
        if counts == expected {
            return;
        }
        assert!(start.elapsed() < 5 * SECOND, "{counts:?}, expected {expected:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Long enough for an acknowledgement that was sent to have done whatever it does.
async fn settled(member: &Member) {
    member.connection.client().flush().await.unwrap();
    tokio::time::sleep(SECOND / 5).await;
}

async fn ack(member: &Member, rows: impl IntoIterator<Item = (u64, u64)>) {
    let rows = rows.into_iter().map(|(seq, delivery)| (Seq(seq), Delivery(delivery))).collect();
    assert_eq!(member.delivery.call(Command::Ack { rows }).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acknowledged_row_is_not_pending_in_either_form() {
    for config in [None, Some(LONG_FORM)] {
        let rig = Rig::on(Server::with_config(config), acking(RetentionPolicy::Limits)).await;
        rig.publish("clicks", 10).await;
        let mut member = rig.member().await;
        let pull = member.pull(1, None, 10, SECOND);
        assert_eq!(member.run(pull).await, PullEnd::Full);
        until(&rig, (10, 0, 10)).await;
        ack(&member, [(3, 3), (1, 1), (7, 7)]).await;
        until(&rig, (7, 0, 10)).await;
        // The short form, from a member that has seen no delivery, is taken by both.
        let other = rig.member().await;
        ack(&other, [(2, 2), (10, 10)]).await;
        assert_eq!(other.delivery.unsent_acks(), 0);
        until(&rig, (5, 0, 10)).await;
        assert_eq!((member.delivery.unsent_acks(), member.delivery.denied_acks()), (0, 0));
        // Which form this server uses.
        member.unpin().await.unwrap();
        rig.publish("clicks", 1).await;
        let client = rig.connection.client();
        let inbox = client.new_inbox();
        let mut rows = client.subscribe(inbox.clone()).await.unwrap();
        let (next, pull) =
            ("$JS.API.CONSUMER.MSG.NEXT.INGEST.holdfast-0", r#"{"batch":1,"group":"holdfast"}"#);
        client.publish_with_reply(next, inbox, pull.into()).await.unwrap();
        let row = rows.next().await.unwrap();
        let tokens = row.reply.unwrap().split('.').count();
        assert_eq!(tokens, if config.is_some() { 11 } else { 9 });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_forgets_what_was_pending_and_old_numbers_do_no_harm() {
    for (retention, config) in [
        (RetentionPolicy::Limits, None),
        (RetentionPolicy::WorkQueue, None),
        (RetentionPolicy::Limits, Some(LONG_FORM)),
    ] {
        let rig = Rig::on(Server::with_config(config), acking(retention)).await;
        rig.publish("clicks", 10).await;
        let mut member = rig.member().await;
        let pull = member.pull(1, None, 10, SECOND);
        assert_eq!(member.run(pull).await, PullEnd::Full);
        let (_, pin) = member.rows_of_one_pin();
        until(&rig, (10, 0, 10)).await;
        member.reset(2, 1).await.unwrap();
        assert_eq!(counts(&rig).await, (0, 10, 10));
        // Acknowledgements of deliveries before the reset, on their way while it was answered: the consumer has
        // not delivered these rows, as it counts now.
        ack(&member, (1..=10).map(|n| (n, n))).await;
        settled(&member).await;
        assert_eq!(counts(&rig).await, (0, 10, 10));
        let pull = member.pull(2, Some(&pin), 3, SECOND);
        assert_eq!(member.run(pull).await, PullEnd::Full);
        let rows = member.rows_of_one_pin().0;
        assert_eq!(numbers(&rows), [(1, 1), (2, 2), (3, 3)]);
        assert!(rows.iter().all(|row| !row.redelivered));
        // By row, whatever the number: (2, 77) is row 2, (9, 3) is row 9, which is not delivered yet.
        ack(&member, [(2, 77), (9, 3)]).await;
        let kept = if retention == RetentionPolicy::WorkQueue { 9 } else { 10 };
        until(&rig, (2, 7, kept)).await;
        settled(&member).await;
        assert_eq!(counts(&rig).await, (2, 7, kept));
        let pull = member.pull(2, Some(&pin), 7, SECOND);
        assert_eq!(member.run(pull).await, PullEnd::Full);
        let rows = member.rows_of_one_pin().0;
        assert_eq!(numbers(&rows), (4..=10).map(|n| (n, n)).collect::<Vec<_>>());
        assert!(rows.iter().all(|row| !row.redelivered));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_work_queue_forgets_what_is_acknowledged_and_brings_the_rest() {
    let rig = Rig::new(acking(RetentionPolicy::WorkQueue)).await;
    rig.publish("clicks", 20).await;
    let mut member = rig.member().await;
    let pull = member.pull(1, None, 12, SECOND);
    assert_eq!(member.run(pull).await, PullEnd::Full);
    let (_, pin) = member.rows_of_one_pin();
    ack(&member, (2..=12).step_by(2).map(|n| (n, n))).await;
    until(&rig, (6, 8, 14)).await;
    member.reset(2, 1).await.unwrap();
    let pull = member.pull(2, Some(&pin), 14, SECOND);
    assert_eq!(member.run(pull).await, PullEnd::Full);
    let rows = member.rows_of_one_pin().0;
    let expected: Vec<_> = (1..=11).step_by(2).chain(13..=20).zip(1..).collect();
    assert_eq!(numbers(&rows), expected);
    assert!(rows.iter().all(|row| !row.redelivered));
    // The first row above a place is the first that is still there.
    let look = member.look(1, 1).await.unwrap();
    assert_eq!((look.next, look.shard_last), (Some(Seq(3)), Some(Seq(20))));
    assert_eq!(look.unfit, None);
    ack(&member, expected).await;
    until(&rig, (0, 0, 0)).await;
    let look = member.look(1, 0).await.unwrap();
    assert_eq!((look.row_stored_at, look.next, look.messages), (None, None, 0));
    // Once more, and rows that never were: nothing to forget.
    ack(&member, [(20, 14), (21, 15), (u64::MAX, u64::MAX), (0, 0)]).await;
    settled(&member).await;
    let seqs = rig.publish("clicks", 1).await;
    let pull = member.pull(2, Some(&pin), 1, SECOND);
    assert_eq!(member.run(pull).await, PullEnd::Full);
    let rows = member.rows_of_one_pin().0;
    assert_eq!((rows[0].seq, rows[0].delivery), (seqs[0], Delivery(15)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_not_acknowledged_in_time_comes_again_in_number() {
    for retention in [RetentionPolicy::Limits, RetentionPolicy::WorkQueue] {
        let rig = Rig::new(Topology { ack_wait: SECOND, ..acking(retention) }).await;
        rig.publish("clicks", 5).await;
        let mut member = rig.member().await;
        let pull = member.pull(1, None, 5, SECOND);
        assert_eq!(member.run(pull).await, PullEnd::Full);
        let (rows, pin) = member.rows_of_one_pin();
        assert!(rows.iter().all(|row| !row.redelivered));
        ack(&member, [(2, 2), (4, 4)]).await;
        tokio::time::sleep(SECOND * 3 / 2).await;
        rig.publish("clicks", 2).await;
        let pull = member.pull(1, Some(&pin), 5, 3 * SECOND);
        assert_eq!(member.run(pull).await, PullEnd::Full);
        let rows = member.rows_of_one_pin().0;
        let deliveries: Vec<_> = rows.iter().map(|row| row.delivery.0).collect();
        assert_eq!(deliveries, [6, 7, 8, 9, 10]);
        let again: Vec<_> = rows.iter().filter(|row| row.redelivered).map(|row| row.seq.0).collect();
        let new: Vec<_> = rows.iter().filter(|row| !row.redelivered).map(|row| row.seq.0).collect();
        assert_eq!((again, new), (vec![1, 3, 5], vec![6, 7]));
        // A reset counts from nothing.
        member.reset(2, 1).await.unwrap();
        let pull = member.pull(2, Some(&pin), 5, SECOND);
        assert_eq!(member.run(pull).await, PullEnd::Full);
        let rows = member.rows_of_one_pin().0;
        assert!(rows.iter().all(|row| !row.redelivered), "{:?}", numbers(&rows));
        assert_eq!(rows[0].delivery, Delivery(1));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_number_of_unacknowledged_rows_stops_a_shard() {
    let rig = Rig::new(acking(RetentionPolicy::WorkQueue)).await;
    // Above the server's own default bound of 1,000.
    rig.publish("clicks", 5000).await;
    let mut member = rig.member().await;
    let pull = member.pull(1, None, 5000, 5 * SECOND);
    assert_eq!(member.run(pull).await, PullEnd::Full);
    until(&rig, (5000, 0, 5000)).await;
    // Somebody sets one: the shard's look tells before it is reached.
    let mut config = serde_json::to_value(rig.topology.consumer_config(ShardId(0))).unwrap();
    config["max_ack_pending"] = 1000.into();
    let body = serde_json::json!({ "stream_name": "INGEST", "config": config, "action": "update" });
    let done = rig.api("$JS.API.CONSUMER.CREATE.INGEST.holdfast-0", &body.to_string()).await;
    assert_eq!(done["config"]["max_ack_pending"], 1000, "{done}");
    let why = member.inspect(0).await.unwrap().unfit.unwrap();
    assert!(why.contains("1000") && why.contains(&MIN_ACK_PENDING.to_string()), "{why}");
    let findings = rig.topology.check(&rig.connection).await.unwrap();
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(findings[0].field, "max_ack_pending");
    rig.topology.apply(&rig.connection, holdfast_nats::topology::Resharding::Refuse).await.unwrap();
    assert_eq!(member.inspect(0).await.unwrap().unfit, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledgements_do_not_hold_up_pulls() {
    let rig = Rig::new(acking(RetentionPolicy::WorkQueue)).await;
    rig.publish("clicks", 40_000).await;
    let mut member = rig.member().await;
    let pull = member.pull(1, None, 20_000, 10 * SECOND);
    assert_eq!(member.run(pull).await, PullEnd::Full);
    let (rows, pin) = member.rows_of_one_pin();
    let start = Instant::now();
    let pull = member.pull(1, Some(&pin), 1, 5 * SECOND);
    let pulled = async {
        let end = member.run(pull).await;
        (end, start.elapsed())
    };
    let acked = async {
        ack(&member, numbers(&rows)).await;
        start.elapsed()
    };
    // The acknowledgements are started first.
    let (acked, (end, pulled)) = tokio::join!(acked, pulled);
    println!("20,000 acknowledgements handed over in {acked:?}; a pull beside them took {pulled:?}");
    assert_eq!(end, PullEnd::Full);
    assert!(pulled < SECOND, "{pulled:?}");
    until(&rig, (1, 19_999, 20_000)).await;
    println!("done by the server after {:?}", start.elapsed());
    // Without a connection nothing is kept for later.
    let mut server = rig.server;
    server.kill();
    let start = Instant::now();
    while member.connection.is_connected() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    ack(&member, [(20_001, 20_001)]).await;
    assert!(start.elapsed() < 5 * SECOND);
    assert_eq!(member.delivery.unsent_acks(), 1);
}
