//! A store, a server, and short ways to ask them.

use std::sync::Arc;
use std::time::{Duration, Instant as Moment};

use bytes::Bytes;
use holdfast_clickhouse::{Config, Store};
use holdfast_core::ports::Attempt;
use holdfast_core::ports::store::{
    Command, DescribeError, Description, Found, HoldsAbove, Insert, InsertOutcome, Level, Port, Refusal,
    Reply, Target, Token,
};
use holdfast_core::row::{Delivery, Row, Seq, ShardId, TableName, Verdict};
use holdfast_core::time::{Instant, Timestamp};
use holdfast_testbed::ClickHouse;

pub(crate) const CREATED: Timestamp = Timestamp(1_700_000_000_000_000_123);
pub(crate) const SHARD: ShardId = ShardId(3);

/// A store, and short ways to ask it.
pub(crate) struct Bed {
    pub(crate) store: Store,
}

impl Bed {
    pub(crate) fn new(url: String, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config { url, insert_timeout: Duration::from_secs(20), ..Config::default() };
        change(&mut config);
        let started = Moment::now();
        Self { store: Store::new(config, Arc::new(move || Instant::at(started.elapsed()))).unwrap() }
    }

    pub(crate) fn of(server: &ClickHouse) -> Self {
        Self::new(server.url(), |_| {})
    }

    pub(crate) async fn send(&self, insert: Insert) -> InsertOutcome {
        inserted(self.store.call(Command::Insert(insert)).await)
    }

    pub(crate) async fn put(&self, table: &str, token: &str, rows: Vec<Row>) -> InsertOutcome {
        self.send(batch_for(table, Level::ExactlyOnce, token, rows)).await
    }

    pub(crate) async fn read_back(&self, table: &str, first: u64, last: u64) -> Result<Found, Refusal> {
        self.read_back_from("default", table, first, last).await
    }

    pub(crate) async fn read_back_from(
        &self,
        database: &str,
        table: &str,
        first: u64,
        last: u64,
    ) -> Result<Found, Refusal> {
        let command = Command::ReadBack {
            attempt: Attempt(2),
            shard: SHARD,
            table: TableName::new(table),
            target: target(database, table, Level::ExactlyOnce),
            created: CREATED,
            first: Seq(first),
            last: Seq(last),
        };
        match self.store.call(command).await {
            Some(Reply::ReadBack { attempt: Attempt(2), outcome, .. }) => outcome,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn describe(&self, table: &str) -> Result<Target, DescribeError> {
        described(self.store.call(describe(table)).await).map(|description| description.target)
    }

    /// The highest row of `table` above `above`.
    pub(crate) async fn holds(&self, table: &str, above: u64) -> Result<Option<Seq>, DescribeError> {
        let mut command = describe(table);
        if let Command::Describe { holds, .. } = &mut command {
            *holds = Some(HoldsAbove { created: CREATED, above: Seq(above) });
        }
        described(self.store.call(command).await).map(|description| description.holds)
    }

    /// Starts a command and leaves it under way.
    pub(crate) fn start(&self, command: Command) -> tokio::task::JoinHandle<Option<Reply>> {
        let store = self.store.clone();
        tokio::spawn(async move { store.call(command).await })
    }
}

pub(crate) fn batch_for(table: &str, level: Level, token: &str, rows: Vec<Row>) -> Insert {
    Insert {
        attempt: Attempt(1),
        shard: SHARD,
        table: TableName::new(table),
        target: target("default", table, level),
        created: CREATED,
        token: Token(token.into()),
        rows: rows.into(),
        send_by: Instant::at(Duration::from_hours(1)),
    }
}

pub(crate) fn inserted(reply: Option<Reply>) -> InsertOutcome {
    match reply {
        Some(Reply::Inserted { attempt: Attempt(1), outcome, .. }) => outcome,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn describe(table: &str) -> Command {
    Command::Describe { attempt: Attempt(3), shard: SHARD, table: TableName::new(table), holds: None }
}

pub(crate) fn described(reply: Option<Reply>) -> Result<Description, DescribeError> {
    match reply {
        Some(Reply::Described { attempt: Attempt(3), outcome, .. }) => outcome,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn target(database: &str, table: &str, level: Level) -> Target {
    Target { database: database.into(), table: table.into(), level }
}

pub(crate) fn row(seq: u64, payload: &str) -> Row {
    Row {
        seq: Seq(seq),
        delivery: Delivery(seq),
        redelivered: false,
        stored_at: Timestamp(0),
        table: TableName::new("t"),
        payload: Bytes::copy_from_slice(payload.as_bytes()),
        verdict: Verdict::Good,
    }
}

pub(crate) fn rows(seqs: std::ops::RangeInclusive<u64>) -> Vec<Row> {
    seqs.map(|seq| row(seq, &format!(r#"{{"n":{seq},"s":"{}"}}"#, "x".repeat(40)))).collect()
}

pub(crate) fn seqs(seqs: impl IntoIterator<Item = u64>) -> Vec<Seq> {
    seqs.into_iter().map(Seq).collect()
}

pub(crate) const COLUMNS: &str = "_seq UInt64, _stream UInt64, n UInt64, s String";
pub(crate) const WINDOW: &str = "SETTINGS non_replicated_deduplication_window = 1000";

pub(crate) fn create(server: &ClickHouse, table: &str, rest: &str) {
    server.query(&format!("CREATE TABLE {table} ({COLUMNS}) ENGINE = {rest}")).unwrap();
}

pub(crate) fn plain(server: &ClickHouse, table: &str) {
    create(server, table, &format!("MergeTree ORDER BY _seq {WINDOW}"));
}

/// Makes each row inserted into `t` take `seconds`.
pub(crate) fn slow_down(server: &ClickHouse, seconds: f64) {
    server.query("CREATE TABLE slow (n UInt64) ENGINE = Null").unwrap();
    let view =
        format!("CREATE MATERIALIZED VIEW v TO slow AS SELECT n + sleepEachRow({seconds}) AS n FROM t");
    server.query(&view).unwrap();
}

pub(crate) fn again(outcome: InsertOutcome) -> Refusal {
    match outcome {
        InsertOutcome::Again(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn doubt(outcome: InsertOutcome) -> Refusal {
    match outcome {
        InsertOutcome::Doubt(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}
