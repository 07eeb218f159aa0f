//! The ledger and retention ports.

use std::time::{Duration, Instant};

use bytes::Bytes;
use holdfast_core::ports::FailureClass;
use holdfast_core::ports::ledger::{Revision, WriteOutcome};
use holdfast_core::row::{Mark, Seq, ShardId};
use holdfast_core::time::Timestamp;
use holdfast_nats::ledger::{Ledger, record_subject};
use holdfast_nats::retention::Retention;

use crate::server::{Rig, one_shard};

const SHARD: ShardId = ShardId(3);

fn ledger(rig: &Rig) -> Ledger {
    Ledger::new(rig.connection.clone(), &rig.topology.bucket, &rig.topology.stream)
}

#[tokio::test(flavor = "multi_thread")]
async fn records_change_by_compare_and_set_only() {
    let rig = Rig::new(one_shard()).await;
    let ledger = ledger(&rig);
    assert_eq!(ledger.read(SHARD).await.unwrap(), None);
    assert_eq!(ledger.write(SHARD, Revision(7), Bytes::from("x")).await, WriteOutcome::Conflict);
    let WriteOutcome::Stored(first) = ledger.write(SHARD, Revision(0), Bytes::from("one")).await else {
        panic!()
    };
    assert_eq!(ledger.write(SHARD, Revision(0), Bytes::from("other")).await, WriteOutcome::Conflict);
    // Another shard's record is another revision.
    let other = ledger.write(ShardId(4), Revision(0), Bytes::from("four")).await;
    assert!(matches!(other, WriteOutcome::Stored(_)));
    let WriteOutcome::Stored(second) = ledger.write(SHARD, first, Bytes::from("two")).await else { panic!() };
    assert!(second > first);
    assert_eq!(ledger.write(SHARD, first, Bytes::from("late")).await, WriteOutcome::Conflict);
    let entry = ledger.read(SHARD).await.unwrap().unwrap();
    assert_eq!((entry.revision, entry.record), (second, Bytes::from("two")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_record_is_an_empty_one_with_its_revision() {
    let rig = Rig::new(one_shard()).await;
    let ledger = ledger(&rig);
    ledger.write(SHARD, Revision(0), Bytes::from("one")).await;
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("KV-Operation", "DEL");
    let subject = record_subject(&rig.topology.bucket, &rig.topology.stream, SHARD);
    let client = rig.connection.client();
    client.request_with_headers(subject, headers, Bytes::from("words")).await.unwrap();
    let entry = ledger.read(SHARD).await.unwrap().unwrap();
    assert_eq!(entry.record, Bytes::new());
    assert_eq!(ledger.write(SHARD, Revision(0), Bytes::from("two")).await, WriteOutcome::Conflict);
    let again = ledger.write(SHARD, entry.revision, Bytes::from("two")).await;
    assert!(matches!(again, WriteOutcome::Stored(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_bucket_and_a_stopped_server_are_told_apart() {
    let mut rig = Rig::new(one_shard()).await;
    let missing = Ledger::new(rig.connection.clone(), "NONE", "INGEST");
    let WriteOutcome::Refused(failure) = missing.write(SHARD, Revision(0), Bytes::new()).await else {
        panic!()
    };
    assert_eq!(failure.class, FailureClass::Unavailable);
    assert_eq!(missing.read(SHARD).await.unwrap_err().class, FailureClass::Missing);
    let ledger = ledger(&rig);
    let WriteOutcome::Stored(revision) = ledger.write(SHARD, Revision(0), Bytes::from("one")).await else {
        panic!()
    };
    rig.server.kill();
    let start = Instant::now();
    let outcome = ledger.write(SHARD, revision, Bytes::from("two")).await;
    assert!(matches!(outcome, WriteOutcome::Unknown(_) | WriteOutcome::Refused(_)), "{outcome:?}");
    assert!(start.elapsed() < Duration::from_secs(4));
    let failure = ledger.read(SHARD).await.unwrap_err();
    assert_eq!(failure.class, FailureClass::Unavailable, "{failure}");
    rig.server.start_again();
    let start = Instant::now();
    let entry = loop {
        match ledger.read(SHARD).await {
            Ok(entry) => break entry.unwrap(),
            Err(failure) => assert!(start.elapsed() < Duration::from_secs(20), "{failure}"),
        }
    };
    // The write that was lost may still have been in the client's queue; the server decided.
    assert!(entry.record == "one" || entry.record == "two");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trim_keeps_the_row_at_its_bound() {
    let rig = Rig::new(one_shard()).await;
    rig.publish("clicks", 100).await;
    let mut member = rig.member().await;
    let created = member.inspect(0).await.unwrap().created;
    let retention = Retention::new(rig.connection.clone(), &rig.topology.stream);
    assert_eq!(retention.trim(created, Seq(0), Mark::default()).await, Ok(0));
    assert_eq!(retention.trim(created, Seq(1), Mark::default()).await, Ok(0));
    assert_eq!(retention.trim(created, Seq(61), Mark::default()).await, Ok(60));
    assert_eq!(retention.trim(created, Seq(61), Mark::default()).await, Ok(0));
    let look = member.inspect(61).await.unwrap();
    assert_eq!((look.messages, look.first), (40, Seq(61)));
    assert!(look.row_stored_at.is_some());
    // Another stream's rows are not touched, nor a stream that ends before the bound.
    let other = retention.trim(Timestamp(created.0 + 1), Seq(90), Mark::default()).await.unwrap_err();
    assert_eq!(other.class, FailureClass::Missing);
    assert!(retention.trim(created, Seq(101), Mark::default()).await.is_err());
    // Nor one that uses sequences again: it ends before a row that was there, or has another one in its place.
    let gone = Mark { seq: Seq(101), stored_at: Timestamp(1) };
    let other = Mark { seq: Seq(100), stored_at: Timestamp(1) };
    for witness in [gone, other] {
        let refused = retention.trim(created, Seq(90), witness).await.unwrap_err();
        assert!(refused.message.contains("uses sequences again"), "{refused}");
    }
    assert_eq!(member.inspect(0).await.unwrap().messages, 40);
    let same = Mark { seq: Seq(100), stored_at: look.last.stored_at };
    assert_eq!(retention.trim(created, Seq(90), same).await, Ok(29));
}
