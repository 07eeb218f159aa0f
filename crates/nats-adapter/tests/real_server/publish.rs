//! The publisher.

use std::time::Duration;

use bytes::Bytes;
use holdfast_core::ports::FailureClass;
use holdfast_core::row::{Mark, Seq};
use holdfast_nats::publish::{Options, PublishError};
use holdfast_nats::retention::Retention;
use holdfast_nats::topology::Topology;

use crate::server::{Rig, one_shard};

#[tokio::test(flavor = "multi_thread")]
async fn receipts_come_in_the_order_of_the_rows() {
    let rig = Rig::new(one_shard()).await;
    let seqs = rig.publish("clicks", 10_000).await;
    assert_eq!(seqs, (1..=10_000).map(Seq).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_stream_is_waited_for_or_given_up() {
    let rig = Rig::new(Topology { max_bytes: Some(64 * 1024), ..one_shard() }).await;
    let row = Bytes::from(vec![b'x'; 1024]);
    let give_up = Options { window: 20, give_up: Some(Duration::from_millis(500)), ..Options::default() };
    let mut publisher = rig.publisher(give_up);
    let error = loop {
        if let Err(error) = publisher.publish("clicks", row.clone()).await {
            break error;
        }
    };
    let PublishError::GaveUp { row: missing, failure, .. } = error else { panic!("{error}") };
    assert_eq!(failure.class, FailureClass::Full);
    let stored = publisher.take_receipts();
    assert_eq!(stored.len() as u64, missing);
    // With patience, and room made meanwhile, every row is stored once.
    let mut publisher = rig.publisher(Options { window: 20, give_up: None, ..Options::default() });
    let retention = Retention::new(rig.connection.clone(), &rig.topology.stream);
    let created = rig.member().await.inspect(0).await.unwrap().created;
    let last = stored.last().unwrap().seq;
    let trim = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(400)).await;
        retention.trim(created, last, Mark::default()).await
    });
    for _ in 0..30 {
        publisher.publish("clicks", row.clone()).await.unwrap();
    }
    publisher.flush().await.unwrap();
    trim.await.unwrap().unwrap();
    let mut seqs: Vec<_> = publisher.take_receipts().iter().map(|receipt| receipt.seq).collect();
    seqs.sort();
    assert_eq!(seqs, (1..=30).map(|n| Seq(last.0 + n)).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_in_doubt_are_sent_again_and_stored_once() {
    let mut rig = Rig::new(one_shard()).await;
    let mut publisher = rig.publisher(Options { ack_timeout: Duration::from_secs(1), ..Options::default() });
    for n in 0..1500 {
        publisher.publish("clicks", Bytes::from(format!("{{\"n\":{n}}}"))).await.unwrap();
    }
    rig.server.kill();
    rig.server.start_again();
    publisher.flush().await.unwrap();
    let receipts = publisher.take_receipts();
    assert_eq!(receipts.len(), 1500);
    assert!(receipts.iter().zip(0..).all(|(receipt, row)| receipt.row == row));
    let look = rig.member().await.inspect(0).await.unwrap();
    assert_eq!((look.messages, look.last.seq), (1500, Seq(1500)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_never_fits_is_refused() {
    let rig = Rig::new(one_shard()).await;
    let mut publisher = rig.publisher(Options::default());
    let large = Bytes::from(vec![b'x'; 2 << 20]);
    assert!(matches!(publisher.publish("clicks", large).await, Err(PublishError::TooLarge { row: 0, .. })));
    assert!(matches!(publisher.publish(&"é".repeat(500), Bytes::new()).await, Err(PublishError::Table(_))));
    publisher.publish("clicks", Bytes::from("{}")).await.unwrap();
    publisher.flush().await.unwrap();
    assert_eq!(publisher.take_receipts().len(), 1);
}
