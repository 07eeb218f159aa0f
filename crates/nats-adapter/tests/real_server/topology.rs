//! The topology: applied, checked, permitted.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use holdfast_core::ports::FailureClass;
use holdfast_core::ports::dead_letters::{Cause, Letter, ParkOutcome};
use holdfast_core::ports::delivery::{Command, Port as _, PullEnd};
use holdfast_core::ports::ledger::{Revision, WriteOutcome};
use holdfast_core::row::{Delivery, Mark, Seq, ShardId, TableName};
use holdfast_core::time::Instant;
use holdfast_nats::Connection;
use holdfast_nats::connect::{ConnectError, Options};
use holdfast_nats::dead_letters::DeadLetters;
use holdfast_nats::ledger::Ledger;
use holdfast_nats::letters::Letters;
use holdfast_nats::publish::{self, PublishError, Publisher};
use holdfast_nats::retention::Retention;
use holdfast_nats::topology::{
    AckPolicy, Action, Resharding, RetentionPolicy, Severity, Topology, TopologyError,
};

use crate::server::{Member, Rig, Server, one_shard};

#[tokio::test(flavor = "multi_thread")]
async fn applied_twice_is_unchanged() {
    for topology in [
        Topology::default(),
        Topology { prefix: "eu.ingest".into(), ack_policy: AckPolicy::Explicit, ..Topology::default() },
        Topology {
            ack_policy: AckPolicy::Explicit,
            retention: RetentionPolicy::WorkQueue,
            max_bytes: None,
            ..Topology::default()
        },
    ] {
        let server = Server::start();
        let connection = server.connect().await;
        let first = topology.apply(&connection, Resharding::Refuse).await.unwrap();
        assert_eq!(first.len(), 11);
        assert!(first.iter().all(|applied| applied.action == Action::Created), "{first:?}");
        let second = topology.apply(&connection, Resharding::Refuse).await.unwrap();
        assert!(second.iter().all(|applied| applied.action == Action::Unchanged), "{second:?}");
        assert_eq!(topology.check(&connection).await.unwrap(), []);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn findings_say_what_is_wrong_and_apply_repairs_it() {
    let rig = Rig::new(Topology { shards: 3, ..one_shard() }).await;
    rig.api("$JS.API.CONSUMER.DELETE.INGEST.holdfast-1", "").await;
    rig.api("$JS.API.STREAM.DELETE.INGEST_DEAD", "").await;
    let wider =
        Topology { max_bytes: Some(1 << 30), pinned_ttl: Duration::from_secs(5), ..rig.topology.clone() };
    let findings = wider.check(&rig.connection).await.unwrap();
    let said: Vec<_> = findings.iter().map(|f| (f.severity, f.object.as_str(), f.field.as_str())).collect();
    assert!(said.contains(&(Severity::Required, "consumer holdfast-1", "")), "{said:?}");
    assert!(said.contains(&(Severity::Required, "stream INGEST_DEAD", "")), "{said:?}");
    assert!(said.contains(&(Severity::Required, "consumer holdfast-0", "priority_timeout")), "{said:?}");
    assert!(said.contains(&(Severity::Recommended, "stream INGEST", "max_bytes")), "{said:?}");
    assert!(said.is_sorted_by_key(|(severity, ..)| *severity));
    let done = wider.apply(&rig.connection, Resharding::Refuse).await.unwrap();
    assert!(
        done.iter().any(|a| a.object == "consumer holdfast-0"
            && a.action == Action::Updated
            && a.changes == ["priority_timeout: 2s -> 5s"]),
        "{done:?}"
    );
    assert_eq!(wider.check(&rig.connection).await.unwrap(), []);
    // A shard that is no more.
    let fewer = Topology { shards: 2, ..wider };
    fewer.apply(&rig.connection, Resharding::Refuse).await.unwrap();
    let findings = fewer.check(&rig.connection).await.unwrap();
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(findings[0].object, "consumer holdfast-2");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_change_is_an_error_that_says_so() {
    let rig = Rig::new(one_shard()).await;
    rig.publish("clicks", 1).await;
    let more = Topology { shards: 2, ..rig.topology.clone() };
    let error = more.apply(&rig.connection, Resharding::Refuse).await.unwrap_err();
    assert!(matches!(error, TopologyError::Reshard { messages: 1, .. }), "{error}");
    more.apply(&rig.connection, Resharding::Allow).await.unwrap();
    let acks = Topology { ack_policy: AckPolicy::Explicit, ..more };
    let error = acks.apply(&rig.connection, Resharding::Refuse).await.unwrap_err().to_string();
    assert!(error.contains("consumer holdfast-0") && error.contains("ack_policy"), "{error}");
}

/// A server on which each role of `topology` has exactly the printed permissions.
fn with_permissions(topology: &Topology, more: &str) -> Server {
    let permissions = serde_json::to_value(topology.permissions()).unwrap();
    let user =
        |name: &str| format!("{{ user: {name}, password: secret, permissions: {} }}", permissions[name]);
    let users = ["operator", "daemon", "publisher"].map(user).join(", ");
    let anyone = "{ user: anyone, password: secret }";
    Server::with_config(Some(&format!("authorization {{ users: [ {users}, {anyone} ] }}\n{more}")))
}

async fn connect(server: &Server, user: &str) -> Connection {
    let url = format!("nats://{user}:secret@{}", server.address());
    Connection::open(&Options::new(url, "test")).await.unwrap()
}

/// Users with exactly the printed permissions can do what they must, and are told what they may not.
#[tokio::test(flavor = "multi_thread")]
async fn the_printed_permissions_are_enough() {
    let topology = one_shard();
    let server = with_permissions(&topology, "");
    let connect = async |user: &str| connect(&server, user).await;
    let operator = connect("operator").await;
    topology.apply(&operator, Resharding::Refuse).await.unwrap();
    assert_eq!(topology.check(&operator).await.unwrap(), []);

    let connection = connect("publisher").await;
    let mut publisher = Publisher::new(connection.clone(), "INGEST", "ingest", publish::Options::default());
    for _ in 0..10 {
        publisher.publish("clicks", Bytes::from("{}")).await.unwrap();
    }
    publisher.flush().await.unwrap();

    let daemon = connect("daemon").await;
    assert_eq!(topology.check(&daemon).await.unwrap(), [], "what it does before it starts");
    let mut member = Member::new(daemon.clone(), &topology, ShardId(0));
    let pull = member.pull(1, None, 10, Duration::from_secs(5));
    assert_eq!(member.run(pull).await, PullEnd::Full);
    member.reset(2, 5).await.unwrap();
    let look = member.inspect(4).await.unwrap();
    assert_eq!((look.unfit, look.shard_last), (None, Some(Seq(10))));
    member.unpin().await.unwrap();
    let ledger = Ledger::new(daemon.clone(), "HOLDFAST", "INGEST");
    assert_eq!(ledger.read(ShardId(0)).await, Ok(None));
    let stored = ledger.write(ShardId(0), Revision(0), Bytes::from("r")).await;
    assert!(matches!(stored, WriteOutcome::Stored(_)), "{stored:?}");
    let retention = Retention::new(daemon.clone(), "INGEST");
    assert_eq!(retention.trim(look.created, Seq(3), Mark::default()).await, Ok(2));
    let letter = Letter {
        created: look.created,
        shard: ShardId(0),
        table: TableName::new("clicks"),
        seq: Seq(3),
        stored_at: look.created,
        payload: Bytes::from("{}"),
        cause: Cause::Payload,
        code: None,
        message: "".into(),
        attempts: 0,
    };
    let (start, letters) = (Instant::START, Letters::new(operator.clone(), &topology));
    let port = DeadLetters::new(daemon.clone(), &topology, Arc::new(move || start));
    for _ in 0..2 {
        assert_eq!(port.park(&letter, start, true).await, ParkOutcome::Parked);
    }
    let page = letters.list(Some("clicks"), Seq(0), 10).await.unwrap();
    assert_eq!(page.letters.len(), 1);
    assert_eq!(letters.rows(look.created, "clicks").await, Ok(vec![Seq(3)]));
    let replayed = letters.replay(Seq(1), None).await.unwrap();
    assert_eq!((replayed.left, letters.count().await), (None, Ok(0)));
    // The daemon keeps letters; it does not drop them.
    let denied = Letters::new(daemon.clone(), &topology).drop_letter(Seq(1)).await.unwrap_err();
    assert_eq!(denied.class, FailureClass::Denied);
    watch_the_bucket(&daemon).await;

    // The publisher is no daemon, and is told at once.
    let start = std::time::Instant::now();
    let ledger = Ledger::new(connection.clone(), "HOLDFAST", "INGEST");
    let WriteOutcome::Refused(failure) = ledger.write(ShardId(0), Revision(1), Bytes::new()).await else {
        panic!()
    };
    assert_eq!(failure.class, FailureClass::Denied);
    let mut member = Member::new(connection.clone(), &topology, ShardId(0));
    let pull = member.pull(1, None, 1, Duration::from_secs(5));
    let PullEnd::Failed(failure) = member.run(pull).await else { panic!() };
    assert_eq!(failure.class, FailureClass::Denied);
    let mut elsewhere = Publisher::new(connection, "INGEST", "other", publish::Options::default());
    elsewhere.publish("clicks", Bytes::from("{}")).await.unwrap();
    assert!(matches!(elsewhere.flush().await, Err(PublishError::Refused { row: 0, .. })));
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

/// As members do: keys that come and go are seen, with the client's own means.
async fn watch_the_bucket(daemon: &Connection) {
    let errors = daemon.client().statistics();
    let context = async_nats::jetstream::new(daemon.client().clone());
    let bucket = context.get_key_value("HOLDFAST").await.unwrap();
    bucket.put("member.a", "1".into()).await.unwrap();
    let mut watch = bucket.watch_with_history("member.>").await.unwrap();
    let first = watch.next().await.unwrap().unwrap();
    assert_eq!((first.key.as_str(), first.revision > 0), ("member.a", true));
    bucket.put("member.b", "2".into()).await.unwrap();
    assert_eq!(watch.next().await.unwrap().unwrap().key, "member.b");
    bucket.delete("member.a").await.unwrap();
    let gone = watch.next().await.unwrap().unwrap();
    assert_eq!(
        (gone.key.as_str(), gone.operation),
        ("member.a", async_nats::jetstream::kv::Operation::Delete)
    );
    let keys: BTreeSet<_> = bucket.keys().await.unwrap().map(Result::unwrap).collect().await;
    assert_eq!(keys, ["member.b", "shard.INGEST.0"].map(str::to_owned).into());
    assert_eq!(errors.connects.load(std::sync::atomic::Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledgements_are_permitted_in_both_forms_and_missed_when_not() {
    let topology =
        Topology { ack_policy: AckPolicy::Explicit, retention: RetentionPolicy::WorkQueue, ..one_shard() };
    for form in ["", "feature_flags { js_ack_fc_v2: true }"] {
        let server = with_permissions(&topology, form);
        topology.apply(&connect(&server, "operator").await, Resharding::Refuse).await.unwrap();
        let anyone = connect(&server, "anyone").await;
        let mut publisher = Publisher::new(anyone.clone(), "INGEST", "ingest", publish::Options::default());
        for _ in 0..10 {
            publisher.publish("clicks", Bytes::from("{}")).await.unwrap();
        }
        publisher.flush().await.unwrap();
        let mut member = Member::new(connect(&server, "daemon").await, &topology, ShardId(0));
        let pull = member.pull(1, None, 10, Duration::from_secs(5));
        assert_eq!(member.run(pull).await, PullEnd::Full);
        let rows = |count: u64| (1..=count).map(|n| (Seq(n), Delivery(n))).collect();
        // Whoever may not is not stopped, but told.
        let other = Member::new(connect(&server, "publisher").await, &topology, ShardId(0));
        other.delivery.call(Command::Ack { rows: rows(3) }).await;
        let start = std::time::Instant::now();
        while other.delivery.denied_acks() < 3 {
            assert!(start.elapsed() < Duration::from_secs(5));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(holdfast_nats::stream::look(&anyone, "INGEST").await.unwrap().messages, 10);
        member.delivery.call(Command::Ack { rows: rows(10) }).await;
        while holdfast_nats::stream::look(&anyone, "INGEST").await.unwrap().messages > 0 {
            assert!(start.elapsed() < Duration::from_secs(5));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(member.delivery.denied_acks(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_cannot_be_is_one_clear_line() {
    let config = "authorization { user: joe, password: right }";
    let server = Server::with_config(Some(config));
    let url = format!("nats://joe:wr0ng@{}", server.address());
    let error = Connection::open(&Options::new(url, "test")).await.unwrap_err();
    assert!(matches!(error, ConnectError::Denied { .. }), "{error}");
    assert!(!error.to_string().contains("wr0ng") && !error.to_string().contains('\n'), "{error}");
    let mut options = Options::new("nats://joe:s3cret@127.0.0.1:1", "test");
    options.timeout = Duration::from_millis(700);
    let start = std::time::Instant::now();
    let error = Connection::open(&options).await.unwrap_err();
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
    assert!(!error.to_string().contains("s3cret"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(3));
}
