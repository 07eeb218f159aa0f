use std::time::Duration;

use bytes::Bytes;
use holdfast_core::member::MemberId;
use holdfast_core::ports::delivery::{self, Inbox, PinId, Port as _, Pull, PullEnd};
use holdfast_core::ports::members::{self, Port as _, Probe};
use holdfast_core::ports::store::{Command, Insert, InsertOutcome, Level, Port as _, Reply, Target, Token};
use holdfast_core::ports::{Attempt, ledger};
use holdfast_core::row::{Delivery as Number, Row, Seq, ShardId, TableName, Verdict};
use holdfast_core::time::{Instant, Timestamp};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::clickhouse::PartOutcome;
use crate::jetstream::payload;

const S: ShardId = ShardId(0);
const SOON: Duration = Duration::from_secs(10);

fn server(pinned_ttl: Duration, insert_time: Duration, watch: Watch) -> Server {
    let table = TableSpec {
        name: TableName::new("t"),
        level: Level::ExactlyOnce,
        partitions: 1,
        window: 1_000,
        max_partitions: 0,
        exists_from: Duration::ZERO,
    };
    let settings = Settings {
        shards: 1,
        pinned_ttl,
        policy: AckPolicy::NONE,
        tables: vec![table],
        horizon: Duration::ZERO,
        fates: Box::new(move |_| Fate::Lands { after: insert_time, pace: Duration::ZERO }),
        watch,
    };
    Server::start(settings).unwrap()
}

fn message(number: u64) -> Message {
    Message { shard: S, table: TableName::new("t"), payload: payload(number, 20), verdict: Verdict::Good }
}

fn clock() -> Clock {
    Arc::new(|| Instant::START)
}

fn nothing() -> Watch {
    Arc::new(|_| {})
}

/// Tells of every part: of whose insert, of which, and what became of it.
fn parts() -> (Watch, UnboundedReceiver<(u32, Attempt, PartOutcome)>) {
    let (seen, parts) = unbounded_channel();
    let watch: Watch = Arc::new(move |what| {
        if let Seen::Part(part) = what {
            let _ = seen.send((part.from.process, part.insert.attempt, part.outcome));
        }
    });
    (watch, parts)
}

fn pull(attempt: u64, pin: Option<&PinId>, batch: u32, expires: Duration) -> delivery::Command {
    let attempt = Attempt(attempt);
    delivery::Command::Pull(Pull {
        attempt,
        inbox: Inbox(1),
        pin: pin.cloned(),
        batch,
        max_bytes: None,
        expires,
    })
}

fn listen(process: &Process) -> (Delivery, UnboundedReceiver<delivery::Reply>) {
    let (sink, rows) = unbounded_channel();
    (process.delivery(S, Arc::new(move |reply| drop(sink.send(reply)))), rows)
}

fn join(process: &Process, name: &str) -> (MembersPort, UnboundedReceiver<members::Reply>) {
    let (sink, heard) = unbounded_channel();
    let sink: members::Sink = Arc::new(move |reply| drop(sink.send(reply)));
    (process.members(MemberId::new(name).unwrap(), Duration::from_millis(100), sink), heard)
}

async fn probe(port: &MembersPort, whom: &str) -> Probe {
    let member = MemberId::new(whom).unwrap();
    match port.call(members::Command::Probe { attempt: Attempt(2), member }).await {
        members::Reply::Probed { answer, .. } => answer,
        other => panic!("{other:?}"),
    }
}

fn insert(attempt: u64) -> Command {
    let rows = vec![Row {
        seq: Seq(1),
        delivery: Number(1),
        redelivered: false,
        stored_at: Timestamp(0),
        table: TableName::new("t"),
        payload: payload(7, 20),
        verdict: Verdict::Good,
    }];
    Command::Insert(Insert {
        attempt: Attempt(attempt),
        shard: S,
        table: TableName::new("t"),
        target: Target { database: "db".into(), table: "t".into(), level: Level::ExactlyOnce },
        created: Timestamp(5),
        token: Token("a".into()),
        rows: rows.into(),
        send_by: Instant::START + SOON,
    })
}

async fn ends(delivery: &Delivery, command: delivery::Command) -> PullEnd {
    match tokio::time::timeout(SOON, delivery.call(command)).await.unwrap() {
        Some(delivery::Reply::Ended { end, .. }) => end,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn rows_come_before_the_end_and_a_pin_lapses_by_itself() {
    let server = server(Duration::from_millis(150), Duration::ZERO, nothing());
    let (first, mut rows) = listen(&server.process());
    let (second, mut others) = listen(&server.process());
    server.publish([message(1), message(2)]);
    assert_eq!(ends(&first, pull(1, None, 2, SOON)).await, PullEnd::Full);
    let Ok(delivery::Reply::Rows(came)) = rows.try_recv() else { panic!("no rows before the end") };
    assert_eq!(came.rows.iter().map(|row| row.seq.0).collect::<Vec<_>>(), vec![1, 2]);
    server.publish([message(3)]);
    // The second waits on standby until the first has not pulled for so long.
    assert_eq!(ends(&second, pull(1, None, 1, SOON)).await, PullEnd::Full);
    assert!(
        matches!(others.try_recv(), Ok(delivery::Reply::Rows(came)) if came.pin != Some(PinId("pin-1".into())))
    );
    assert_eq!(ends(&first, pull(2, came.pin.as_ref(), 2, SOON)).await, PullEnd::NotPinned);
    assert_eq!(ends(&second, pull(2, None, 1, Duration::from_millis(20))).await, PullEnd::Empty);
}

#[tokio::test]
async fn a_closed_inbox_ends_its_pulls_and_takes_no_rows() {
    let server = server(SOON, Duration::ZERO, nothing());
    let (delivery, mut rows) = listen(&server.process());
    let waiting = ends(&delivery, pull(1, None, 5, SOON));
    let closing = async {
        assert!(delivery.call(delivery::Command::Close { inbox: Inbox(1) }).await.is_none());
        server.publish([message(1)]);
    };
    assert_eq!(tokio::join!(waiting, closing).0, PullEnd::Closed);
    assert!(rows.try_recv().is_err());
    assert_eq!(ends(&delivery, pull(2, None, 5, SOON)).await, PullEnd::Closed);
}

#[tokio::test]
async fn a_broken_connection_is_told_and_its_pulls_are_dead() {
    let server = server(SOON, Duration::ZERO, nothing());
    let (delivery, mut rows) = listen(&server.process());
    let waiting = tokio::time::timeout(Duration::from_millis(50), delivery.call(pull(1, None, 5, SOON)));
    let breaking = async { delivery.break_connection() };
    assert!(tokio::join!(waiting, breaking).0.is_err(), "nobody ends it");
    assert_eq!(rows.try_recv(), Ok(delivery::Reply::Disrupted));
    server.publish([message(1)]);
    assert!(rows.try_recv().is_err());
    assert_eq!(ends(&delivery, pull(2, None, 1, SOON)).await, PullEnd::Full);
}

#[tokio::test]
async fn what_a_dead_process_had_under_way_lands_and_nothing_that_it_asks_for_is_heard() {
    let (watch, mut parts) = parts();
    let server = server(SOON, Duration::from_millis(30), watch);
    let (dead, heir) = (server.process(), server.process());
    let (store, ledger) = (dead.store(clock()), dead.ledger());
    let dying = async {
        // The insert was handed in when the future was polled first.
        assert_eq!(dead.delay_inserts(Duration::from_millis(200)), 1);
        dead.kill();
    };
    let (outcome, ()) = tokio::join!(store.call(insert(1)), dying);
    assert!(matches!(outcome, Some(Reply::Inserted { outcome: InsertOutcome::Doubt(_), .. })), "{outcome:?}");
    let read = ledger::Port::call(&ledger, ledger::Command::Read { attempt: Attempt(2), shard: S }).await;
    assert!(matches!(read, ledger::Reply::Read { outcome: Err(_), .. }), "{read:?}");
    let (attempt, table) = (Attempt(3), TableName::new("t"));
    let described = store.call(Command::Describe { attempt, shard: S, table, holds: None }).await;
    assert!(matches!(described, Some(Reply::Described { outcome: Err(_), .. })), "{described:?}");
    let outcome = heir.store(clock()).call(insert(1)).await;
    assert!(matches!(outcome, Some(Reply::Inserted { outcome: InsertOutcome::Stored, .. })), "{outcome:?}");
    let mut next = async || tokio::time::timeout(SOON, parts.recv()).await.unwrap();
    assert_eq!(next().await, Some((heir.number(), Attempt(1), PartOutcome::Stored)));
    assert_eq!(next().await, Some((dead.number(), Attempt(1), PartOutcome::Repeated)));
    assert_eq!(server.with(|models, _| models.store.contents(&TableName::new("t")).to_vec()), vec![7]);
}

#[tokio::test]
async fn a_dead_process_does_not_connect_again() {
    let server = server(SOON, Duration::ZERO, nothing());
    let (dead, other) = (server.process(), server.process());
    dead.kill();
    let (delivery, mut rows) = listen(&dead);
    server.publish([message(1)]);
    let end = ends(&delivery, pull(1, None, 1, SOON)).await;
    assert!(matches!(end, PullEnd::Failed(_)), "{end:?}");
    assert!(rows.try_recv().is_err());
    let (_port, mut heard) = join(&dead, "dead");
    let (port, _heard) = join(&other, "other");
    assert!(heard.try_recv().is_err(), "it is told who the members are");
    assert_eq!(probe(&port, "dead").await, Probe::NoResponders);
}

#[tokio::test]
async fn what_was_broken_off_is_answered_and_goes_on() {
    let (watch, mut parts) = parts();
    let server = server(SOON, Duration::from_millis(20), watch);
    let process = server.process();
    let store = process.store(clock());
    let breaking = store.call(Command::Abort { shard: S, until: Attempt(1) });
    let (outcome, none) = tokio::join!(store.call(insert(1)), breaking);
    assert!(
        matches!(outcome, Some(Reply::Inserted { outcome: InsertOutcome::Doubt(_), .. })) && none.is_none()
    );
    let again = store.call(insert(2)).await;
    assert!(matches!(again, Some(Reply::Inserted { outcome: InsertOutcome::Stored, .. })), "{again:?}");
    // The row is that of the one that was broken off; the second was dropped for its token.
    let mut next = async || tokio::time::timeout(SOON, parts.recv()).await.unwrap();
    assert_eq!(next().await, Some((process.number(), Attempt(1), PartOutcome::Stored)));
    assert_eq!(next().await, Some((process.number(), Attempt(2), PartOutcome::Repeated)));
    assert_eq!(server.with(|models, _| models.store.contents(&TableName::new("t")).len()), 1);
}

#[tokio::test]
async fn members_hear_themselves_and_each_other() {
    let server = server(SOON, Duration::ZERO, nothing());
    let member = |name: &str| MemberId::new(name).unwrap();
    let (one, two) = (server.process(), server.process());
    let (port, mut heard) = join(&one, "one");
    assert_eq!(heard.try_recv(), Ok(members::Reply::Snapshot(vec![])));
    let record = Bytes::from_static(b"here");
    let put = members::Command::Put { attempt: Attempt(1), member: member("one"), record: record.clone() };
    assert!(matches!(port.call(put).await, members::Reply::Put { outcome: Ok(()), .. }));
    assert!(matches!(heard.try_recv(), Ok(members::Reply::Changed(entry)) if entry.record == record));
    let (other, mut others) = join(&two, "two");
    assert!(matches!(others.try_recv(), Ok(members::Reply::Snapshot(all)) if all.len() == 1));
    assert_eq!(probe(&port, "two").await, Probe::Alive);
    assert_eq!(probe(&port, "three").await, Probe::NoResponders);
    two.kill();
    assert_eq!(probe(&port, "two").await, Probe::NoResponders);
    let delete = members::Command::Delete { attempt: Attempt(3), member: member("one"), only: None };
    assert!(matches!(other.call(delete.clone()).await, members::Reply::Deleted { outcome: Err(_), .. }));
    assert!(matches!(port.call(delete).await, members::Reply::Deleted { outcome: Ok(()), .. }));
    assert!(matches!(heard.try_recv(), Ok(members::Reply::Removed { .. })));
    assert!(others.try_recv().is_err(), "it is dead");
}
