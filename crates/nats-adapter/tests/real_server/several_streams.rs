//! Shards spread over several streams: the account's mapping, permissions, publishing, and another number of streams.

use std::collections::BTreeMap;

use bytes::Bytes;
use holdfast_core::ports::ledger::{Revision, WriteOutcome};
use holdfast_core::record::{Record, Session, Writer};
use holdfast_core::row::{Mark, Seq, ShardId};
use holdfast_core::time::Timestamp;
use holdfast_nats::connect::Options;
use holdfast_nats::ledger::Ledger;
use holdfast_nats::publish::{self, PublishError, Publisher, Receipt};
use holdfast_nats::topology::{Action, Finding, Resharding, Severity, Topology, TopologyError};
use holdfast_nats::{Connection, stream};

use crate::server::{Rig, Server, one_shard};

fn two_streams() -> Topology {
    Topology { streams: 2, shards: 4, ..one_shard() }
}

/// A server whose account maps rows as the topology says.
fn mapped(topology: &Topology) -> Server {
    Server::with_config(topology.mapping_config().as_deref())
}

fn required(findings: &[Finding]) -> Vec<(&str, &str)> {
    let required = findings.iter().filter(|finding| finding.severity == Severity::Required);
    required.map(|finding| (finding.object.as_str(), finding.problem.as_str())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_mapping_is_noticed_and_nothing_is_stored_for_it() {
    let topology = two_streams();
    let rig = Rig::on(mapped(&topology), topology.clone()).await;
    assert_eq!(topology.check(&rig.connection).await.unwrap(), []);
    assert_eq!(topology.check_publishing(&rig.connection).await.unwrap(), []);
    for name in ["INGEST-0", "INGEST-1"] {
        assert_eq!(stream::look(&rig.connection, name).await.unwrap().last.seq, Seq(0));
    }
    let again = topology.apply(&rig.connection, Resharding::Refuse).await.unwrap();
    assert!(again.iter().all(|applied| applied.action == Action::Unchanged), "{again:?}");

    let rig = Rig::on(Server::start(), topology.clone()).await;
    let findings = topology.check_publishing(&rig.connection).await.unwrap();
    assert!(matches!(required(&findings)[..], [("subjects ingest.*", why)] if why.contains("no responders")));
    assert!(findings[0].fix.contains("topology print --mapping"));
    // A publisher sees the same.
    let options =
        publish::Options { give_up: Some(std::time::Duration::ZERO), ..publish::Options::default() };
    let mut publisher = Publisher::new(rig.connection.clone(), topology.streams(), "ingest", options);
    publisher.publish("clicks", Bytes::from("{}")).await.unwrap();
    assert!(matches!(publisher.flush().await, Err(PublishError::GaveUp { row: 0, .. })));

    // Made for more shards than there are: some tables have no stream.
    let wider = Topology { shards: 5, ..topology.clone() };
    let rig = Rig::on(mapped(&wider), topology.clone()).await;
    assert_eq!(required(&topology.check_publishing(&rig.connection).await.unwrap()).len(), 1);
    // Left behind, where the one stream maps by itself.
    let one = Topology { streams: 1, ..topology.clone() };
    let rig = Rig::on(mapped(&topology), one.clone()).await;
    let findings = one.check_publishing(&rig.connection).await.unwrap();
    assert!(findings[0].fix.contains("no account mapping"), "{findings:?}");
    let rig = Rig::on(Server::start(), one.clone()).await;
    assert_eq!(one.check_publishing(&rig.connection).await.unwrap(), []);
}

/// Publishes to so many tables in turn; each one's receipts.
async fn publish(connection: &Connection, topology: &Topology, sole: bool) -> BTreeMap<u64, Vec<Receipt>> {
    const TABLES: u64 = 7;
    const ROWS: u64 = 7_000;
    let options = publish::Options { sole, ..publish::Options::default() };
    let mut publisher = Publisher::new(connection.clone(), topology.streams(), "ingest", options);
    for row in 0..ROWS {
        publisher.publish(&format!("t{}", row % TABLES), Bytes::from("{}")).await.unwrap();
    }
    publisher.flush().await.unwrap();
    let mut receipts = BTreeMap::<u64, Vec<Receipt>>::new();
    for (row, receipt) in (0..).zip(publisher.take_receipts()) {
        assert_eq!(receipt.row, row);
        receipts.entry(row % TABLES).or_default().push(receipt);
    }
    receipts
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_has_one_stream_and_keeps_its_order() {
    let topology = two_streams();
    let rig = Rig::on(mapped(&topology), topology.clone()).await;
    for sole in [false, true] {
        let receipts = publish(&rig.connection, &topology, sole).await;
        let mut used = [0; 2];
        for of_table in receipts.values() {
            assert!(of_table.is_sorted_by(|a, b| a.seq < b.seq && a.stream == b.stream));
            used[of_table[0].stream as usize] += of_table.len();
        }
        assert!(used.iter().all(|rows| *rows > 0), "{used:?}");
    }
    // Every row stands under a shard of its stream.
    for (number, name) in (0..).zip(topology.streams().names()) {
        for shard in (0..4).map(ShardId) {
            let filter = format!("ingest.{shard}.*");
            let rows = stream::sequences(&rig.connection, &name, &filter).await.unwrap();
            assert!(
                rows.is_empty() || shard.0 % 2 == number,
                "{} rows of shard {shard} in {name}",
                rows.len()
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_printed_permissions_are_enough_for_several_streams() {
    let topology = two_streams();
    let permissions = serde_json::to_value(topology.permissions()).unwrap();
    let user =
        |name: &str| format!("{{ user: {name}, password: secret, permissions: {} }}", permissions[name]);
    let users = ["operator", "daemon", "publisher"].map(user).join(", ");
    let mapping = topology.mapping_config().unwrap();
    let server = Server::with_config(Some(&format!("authorization {{ users: [ {users} ] }}\n{mapping}")));
    let connect = async |user: &str| {
        let url = format!("nats://{user}:secret@{}", server.address());
        Connection::open(&Options::new(url, "test")).await.unwrap()
    };
    let operator = connect("operator").await;
    topology.apply(&operator, Resharding::Refuse).await.unwrap();
    assert_eq!(topology.check(&operator).await.unwrap(), []);
    assert_eq!(topology.check_publishing(&operator).await.unwrap(), []);
    // The daemon looks before it starts.
    assert_eq!(topology.check(&connect("daemon").await).await.unwrap(), []);
    let publisher = connect("publisher").await;
    assert_eq!(publish(&publisher, &topology, false).await.len(), 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_number_of_streams_is_refused_while_rows_may_be_unwritten() {
    let one = Topology { shards: 4, ..one_shard() };
    let rig = Rig::new(one.clone()).await;
    rig.publish("clicks", 3).await;
    let two = Topology { streams: 2, ..one.clone() };
    let error = two.apply(&rig.connection, Resharding::Refuse).await.unwrap_err();
    assert!(matches!(error, TopologyError::OtherStreams { messages: 3, streams: 2, .. }), "{error}");
    two.apply(&rig.connection, Resharding::Allow).await.unwrap();
    // Somebody said so, and it is not so: no daemon starts.
    let findings = two.check(&rig.connection).await.unwrap();
    assert!(
        matches!(required(&findings)[..], [("stream INGEST", why)] if why.contains("rows of 1 of its shards"))
    );

    // What the ledger calls done need not be read.
    let ledger = Ledger::new(rig.connection.clone(), "HOLDFAST", one.streams());
    let created = stream::look(&rig.connection, "INGEST").await.unwrap().created;
    let record = |floor: u64| Record {
        version: Record::VERSION,
        stream_created: created,
        epoch: 1,
        writer: Writer { session: Session(1), nonce: 1 },
        rebased: 0,
        floor: Seq(floor),
        high: Mark { seq: Seq(floor), stored_at: Timestamp(0) },
        lanes: BTreeMap::new(),
    };
    let mut revisions = [Revision(0); 4];
    for (floor, all) in [(2, false), (3, true)] {
        for (shard, revision) in (0..).map(ShardId).zip(&mut revisions) {
            match ledger.write(shard, *revision, record(floor).encode()).await {
                WriteOutcome::Stored(now) => *revision = now,
                other => panic!("{other:?}"),
            }
        }
        let findings = two.check(&rig.connection).await.unwrap();
        assert_eq!((required(&findings).is_empty(), findings.len()), (all, 1), "{findings:?}");
    }
    // Another number again: shards move between the streams that there are.
    let server = mapped(&two);
    let rig = Rig::on(server, two.clone()).await;
    publish(&rig.connection, &two, false).await;
    let three = Topology { streams: 3, ..two.clone() };
    let error = three.apply(&rig.connection, Resharding::Refuse).await.unwrap_err();
    assert!(matches!(error, TopologyError::Reshard { .. }), "{error}");
    let findings = three.check(&rig.connection).await.unwrap();
    assert!(required(&findings).iter().any(|(object, _)| *object == "stream INGEST-2"), "{findings:?}");
    // And back to one: both hold rows.
    let error = one.apply(&rig.connection, Resharding::Refuse).await.unwrap_err();
    assert!(matches!(error, TopologyError::OtherStreams { streams: 1, .. }), "{error}");
}
