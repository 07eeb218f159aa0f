//! The store port on ClickHouse.

mod evidence;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use clickhouse::error::Error;
use clickhouse::{Client, RowOwned, RowRead};
use holdfast_core::ports::store::{
    Command, DescribeError, Found, Insert, InsertOutcome, Level, Port, Refusal, Reply, Target,
};
use holdfast_core::row::{Seq, TableName, Verdict};
use holdfast_core::time::{Instant, Timestamp};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant as Moment, timeout};

use crate::body::{self, Splice};
use crate::config::{Checked, Config, ConfigError, TableConfig, UnknownFields};
use crate::connection::{self, PingError, Server};
use crate::describe::{Column, Columns, Facts, Policies, TableReport, judge};
use crate::error::{Failure, code_of, refusal};
use crate::identifier::{literal, quote, quote_table};
use crate::settings::{self, Known};
use crate::underway::Underway;

/// Tells the core's time.
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// Where unknown fields are dropped in silence, a column that was added is only filled once it is known. So the
/// columns of such tables are looked up again when they are older than this.
const COLUMNS_AGE: Duration = Duration::from_secs(30);

/// How many tables' columns are remembered. Beyond it the first by name is forgotten, and looked up when needed.
const MAX_REMEMBERED: usize = 16_384;

/// ClickHouse as the core's store. Cheap to clone.
///
/// Nothing is connected to before the first command. Each command ends within a bound: an insert or a read-back
/// within `insert_timeout` from its turn, a description within three times `query_timeout`; an insert waits for its
/// turn until its `send_by` at most. Dropping a command's future breaks it off.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

struct Inner {
    checked: Checked,
    client: Client,
    clock: Clock,
    /// Turns for inserts, first come, first served.
    inserts: Semaphore,
    /// Turns for everything that only reads. Apart, so that full lanes do not keep a shard from finding out.
    queries: Semaphore,
    underway: Underway,
    /// With a number behind it, the id of a query: unique among all processes.
    session: String,
    next_query: AtomicU64,
    known: Mutex<Option<Arc<Known>>>,
    columns: Mutex<BTreeMap<Key, Remembered>>,
}

/// Database and table.
type Key = (Arc<str>, Arc<str>);

#[derive(Clone)]
struct Remembered {
    columns: Arc<Columns>,
    since: Moment,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store")
            .field("at", &self.0.at())
            .field("session", &self.0.session)
            .finish_non_exhaustive()
    }
}

impl Store {
    /// A store at `config`'s server; `clock` tells the time that the core's instants are counted in.
    ///
    /// # Errors
    /// What is wrong with `config`.
    pub fn new(config: Config, clock: Clock) -> Result<Self, ConfigError> {
        let checked = Checked::new(config)?;
        let client = connection::client(&checked)?;
        let turns = checked.config.inserts_in_flight.min(Semaphore::MAX_PERMITS);
        Ok(Self(Arc::new(Inner {
            client,
            clock,
            inserts: Semaphore::new(turns),
            queries: Semaphore::new(turns),
            underway: Underway::default(),
            session: format!("holdfast-{:016x}", rand::random::<u64>()),
            next_query: AtomicU64::new(0),
            known: Mutex::default(),
            columns: Mutex::default(),
            checked,
        })))
    }

    /// Whether `payload` is one row that `table` can be asked to take; see [`crate::screen()`].
    #[must_use]
    pub fn screen(&self, table: &TableName, payload: &[u8]) -> Verdict {
        let asked = self.0.checked.asked(table);
        let reserved = [asked.sequence_column.as_str(), asked.stream_column.as_str()];
        crate::screen(payload, &reserved, self.0.checked.config.max_row)
    }

    /// Asks the server who it is.
    ///
    /// # Errors
    /// Why it does not answer as ClickHouse, and what to look at.
    pub async fn ping(&self) -> Result<Server, PingError> {
        let inner = &self.0;
        let config = &inner.checked.config;
        let sql = format!(
            "SELECT version(), currentUser(), \
             toUInt8(ifNull((SELECT count() FROM system.databases WHERE name = {}), 0) > 0)",
            literal(&config.database)
        );
        match timeout(config.query_timeout, inner.ask::<(String, String, u8)>(&sql)).await {
            Err(_) => Err(PingError::Silent { at: inner.at(), after: config.query_timeout }),
            Ok(Err(error)) => Err(PingError::of(inner.at(), &config.user, error)),
            Ok(Ok((version, user, has))) => Ok(Server { version, user, has_database: has != 0 }),
        }
    }

    /// A table as it is, what it can promise, and what stands in its way.
    ///
    /// # Errors
    /// If it does not exist or cannot be looked at. That it cannot give what is asked of it is no error here.
    pub async fn report(&self, table: &TableName) -> Result<TableReport, DescribeError> {
        self.0.report(table).await
    }
}

#[async_trait]
impl Port for Store {
    async fn call(&self, command: Command) -> Option<Reply> {
        const GIVEN_UP: &str = "given up: the shard is no longer this process's";
        let inner = &self.0;
        match command {
            Command::Insert(insert) => {
                let outcome = inner.underway.run(insert.shard, insert.attempt, inner.insert(&insert)).await;
                let outcome = outcome.unwrap_or_else(|_| InsertOutcome::Doubt(refusal(None, GIVEN_UP)));
                Some(Reply::Inserted { attempt: insert.attempt, table: insert.table, outcome })
            }
            Command::ReadBack { attempt, shard, table, target, created, first, last } => {
                let work = inner.read_back(&table, &target, created, first, last);
                let outcome = inner.underway.run(shard, attempt, work).await;
                let outcome = outcome.unwrap_or_else(|_| Err(refusal(None, GIVEN_UP)));
                Some(Reply::ReadBack { attempt, table, outcome })
            }
            Command::Describe { attempt, shard, table } => {
                let outcome = inner.underway.run(shard, attempt, inner.describe(&table)).await;
                let outcome = outcome.unwrap_or_else(|_| Err(DescribeError::Failed(refusal(None, GIVEN_UP))));
                Some(Reply::Described { attempt, table, outcome })
            }
            Command::Abort { shard, until } => {
                inner.underway.abort(shard, until);
                None
            }
        }
    }
}

/// A line of `DESCRIBE TABLE`.
#[derive(clickhouse::Row, serde::Deserialize)]
struct Described {
    name: String,
    r#type: String,
    default_type: String,
    #[serde(rename = "default_expression")]
    _default_expression: String,
    #[serde(rename = "comment")]
    _comment: String,
    #[serde(rename = "codec_expression")]
    _codec_expression: String,
    ttl_expression: String,
}

/// Engine, `engine_full`, sorting key, indices; the windows that hold by default.
type TableLine = (String, String, String, String, u64, u64, u64);

impl Inner {
    fn at(&self) -> String {
        let url = &self.checked.url;
        format!("{}:{}", url.host_str().unwrap_or_default(), url.port_or_known_default().unwrap_or_default())
    }

    fn query_id(&self) -> String {
        format!("{}-{}", self.session, self.next_query.fetch_add(1, Ordering::Relaxed))
    }

    // --- inserting ---

    async fn insert(&self, insert: &Insert) -> InsertOutcome {
        let patience = insert.send_by.since((self.clock)());
        let Ok(Ok(_turn)) = timeout(patience, self.inserts.acquire()).await else {
            return InsertOutcome::Stale;
        };
        let started = Moment::now();
        let deadline = started + self.checked.config.insert_timeout;
        let outcome = match self.insert_in_turn(insert, deadline).await {
            Ok(outcome) => outcome,
            Err(failure) => failure.outcome(),
        };
        tracing::debug!(
            table = %insert.table, rows = insert.rows.len(), token = %insert.token.0,
            elapsed = ?started.elapsed(), ?outcome, "insert"
        );
        outcome
    }

    async fn insert_in_turn(&self, insert: &Insert, deadline: Moment) -> Result<InsertOutcome, Failure> {
        let asked = self.checked.asked(&insert.table);
        let known = self.known().await?;
        let mut columns = self.columns(&insert.target, asked).await?;
        let refused = match self.send(insert, asked, &known, &columns, deadline).await {
            Err(failure) => failure,
            sent => return sent,
        };
        self.forget_after(&insert.target, &refused);
        // "No such column" and "unknown field" can mean that the table has changed since its columns were looked
        // up. Nothing was written, so it is tried again at once if so: nobody should judge the rows by old columns.
        if !(refused.nothing_written && matches!(refused.refusal.code, Some(16 | 20 | 117))) {
            return Err(refused);
        }
        let before = columns;
        match self.look_up_columns(&insert.target).await {
            Ok(now) if now != before => columns = now,
            _ => return Err(refused),
        }
        tracing::info!(table = %insert.table, "the table's columns have changed; inserting by the new ones");
        self.send(insert, asked, &known, &columns, deadline).await
    }

    /// One attempt. `Err` tells whether it is certain that nothing was written.
    async fn send(
        &self,
        insert: &Insert,
        asked: &TableConfig,
        known: &Known,
        columns: &Columns,
        deadline: Moment,
    ) -> Result<InsertOutcome, Failure> {
        let sequence = Some(asked.sequence_column.as_str()).filter(|name| columns.has(name));
        let stream = Some(asked.stream_column.as_str()).filter(|name| columns.has(name));
        if insert.target.level == Level::ExactlyOnce && (sequence.is_none() || stream.is_none()) {
            return Err(Failure::before_sending(format!(
                "{}.{} no longer has both {:?} and {:?} as columns that Holdfast can fill; without them the batch \
                 could not be read back",
                insert.target.database, insert.target.table, asked.sequence_column, asked.stream_column
            )));
        }
        let splice = Splice::new(sequence, stream, insert.created);
        let body =
            body::build(&insert.rows, &splice).map_err(|error| Failure::before_sending(error.to_string()))?;
        let sql = insert_sql(&insert.target, columns)?;
        // The last look at the clock, with nothing between it and the first byte that waits for anybody.
        if (self.clock)() > insert.send_by {
            return Ok(InsertOutcome::Stale);
        }
        let limit = self.checked.config.insert_timeout;
        let mut request = self.client.insert_formatted_with(sql).with_setting("query_id", self.query_id());
        for (name, value) in &asked.settings {
            request = request.with_setting(name, value);
        }
        for (name, value) in settings::for_insert(known, &insert.token.0, asked.unknown_fields, limit) {
            request = request.with_setting(name, value);
        }
        let timed_out = |error| match error {
            Error::TimedOut => Failure::in_doubt(format!("no answer within {limit:?}")),
            error => Failure::from(error),
        };
        for slice in body::slices(&body) {
            let left = Some(deadline.saturating_duration_since(Moment::now()));
            request = request.with_timeouts(left, left);
            // A request that is dropped before its end is cut, and a cut body is not stored.
            request.send(slice).await.map_err(timed_out)?;
        }
        let left = Some(deadline.saturating_duration_since(Moment::now()));
        request.with_timeouts(left, left).end().await.map_err(timed_out)?;
        Ok(InsertOutcome::Stored)
    }

    // --- reading back ---

    async fn read_back(
        &self,
        table: &TableName,
        target: &Target,
        created: Timestamp,
        first: Seq,
        last: Seq,
    ) -> Result<Found, Refusal> {
        let work = async {
            let asked = self.checked.asked(table);
            let _turn = self.turn().await?;
            let known = self.known().await?;
            let limit = self.checked.config.insert_timeout;
            let sql = read_back_sql(target, asked, created, first, last)?;
            let settings = settings::for_read_back(&known, limit);
            self.rows::<(u64, u64)>(&sql, settings, limit).await
        };
        let rows: Vec<(u64, u64)> = work.await.map_err(|failure| failure.refusal)?;
        let repeated = rows.iter().find(|(_, count)| *count > 1).map(|(seq, _)| Seq(*seq));
        Ok(Found { seqs: rows.into_iter().map(|(seq, _)| Seq(seq)).collect(), repeated })
    }

    // --- describing ---

    async fn describe(&self, table: &TableName) -> Result<Target, DescribeError> {
        let report = self.report(table).await?;
        match report.level {
            None => Err(DescribeError::Unfit(report.why_unfit())),
            Some(level) => Ok(Target { database: report.database.into(), table: report.table.into(), level }),
        }
    }

    async fn report(&self, table: &TableName) -> Result<TableReport, DescribeError> {
        let (database, name) = self.checked.target(table);
        if database.is_empty() || name.is_empty() {
            return Err(DescribeError::Unfit("a table without a name".to_owned()));
        }
        if let Some(other) = self.checked.taken_by(table) {
            return Err(DescribeError::Unfit(format!(
                "tables.{other} goes to {database}.{name} already, and a table has one writer; give {table} a section \
                 with a table of its own"
            )));
        }
        let target = Target { database: database.into(), table: name.into(), level: Level::AtLeastOnce };
        let facts = async {
            let _turn = self.turn().await?;
            // Asked anew with each description: a server may have been upgraded.
            let known = self.ask_known().await?;
            let columns = self.look_up_columns_in_turn(&target, &known).await?;
            self.facts(&target, &known, Columns::clone(&columns)).await
        };
        match facts.await {
            Ok(facts) => Ok(judge(facts, self.checked.asked(table))),
            Err(Failure { refusal, .. }) => {
                // Unknown table, unknown database.
                if matches!(refusal.code, Some(60 | 81)) {
                    Err(DescribeError::Missing(refusal))
                } else {
                    Err(DescribeError::Failed(refusal))
                }
            }
        }
    }

    async fn facts(&self, target: &Target, known: &Known, columns: Columns) -> Result<Facts, Failure> {
        let limit = self.checked.config.query_timeout;
        let (database, table) = (literal(&target.database), literal(&target.table));
        let setting = |of: &str, name: &str| {
            format!("ifNull((SELECT toUInt64OrZero(any(value)) FROM system.{of} WHERE name = '{name}'), 0)")
        };
        let sql = format!(
            "SELECT engine, engine_full, sorting_key, \
             ifNull((SELECT arrayStringConcat(groupArray(expr), ', ') FROM system.data_skipping_indices \
             WHERE database = {database} AND table = {table}), ''), {}, {}, {} \
             FROM system.tables WHERE database = {database} AND name = {table}",
            setting("merge_tree_settings", "non_replicated_deduplication_window"),
            setting("replicated_merge_tree_settings", "replicated_deduplication_window"),
            setting("replicated_merge_tree_settings", "replicated_deduplication_window_seconds"),
        );
        let settings = || settings::for_description(known, limit);
        let line = self.rows::<TableLine>(&sql, settings(), limit).await?.into_iter().next();
        let Some((
            engine,
            engine_full,
            sorting_key,
            indices,
            plain_window,
            replicated_window,
            replicated_seconds,
        )) = line
        else {
            // Described a moment ago, and now gone, or not for this user to see.
            return Err(Failure {
                refusal: refusal(Some(60), "the table is not in system.tables"),
                nothing_written: true,
            });
        };
        let sql = format!(
            "WITH arrayConcat([currentUser()], enabledRoles()) AS holdfast_me \
             SELECT arrayStringConcat(groupArray(name), ', ') FROM system.row_policies \
             WHERE database IN ('', {database}) AND table IN ('', {table}) \
             AND ifNull(select_filter, '1') NOT IN ('1', 'true') \
             AND ((apply_to_all AND NOT hasAny(apply_to_except, holdfast_me)) OR hasAny(apply_to_list, holdfast_me))"
        );
        // It takes a grant of its own to ask this; without it, it stays unknown.
        let policies = match self.rows::<String>(&sql, settings(), limit).await {
            Ok(names) => Policies::Known(names.into_iter().next().unwrap_or_default()),
            Err(Failure { refusal: Refusal { code: Some(_), .. }, .. }) => Policies::Unknown,
            Err(failure) => return Err(failure),
        };
        Ok(Facts {
            database: target.database.to_string(),
            table: target.table.to_string(),
            engine,
            engine_full,
            sorting_key,
            indices,
            columns,
            plain_window,
            replicated_window,
            replicated_seconds,
            policies,
        })
    }

    /// The columns of `target`, looked up unless they are known well enough.
    async fn columns(&self, target: &Target, asked: &TableConfig) -> Result<Arc<Columns>, Failure> {
        let remembered = lock(&self.columns).get(&key(target)).cloned();
        match remembered {
            Some(Remembered { columns, since })
                if asked.unknown_fields == UnknownFields::Reject || since.elapsed() < COLUMNS_AGE =>
            {
                Ok(columns)
            }
            _ => self.look_up_columns(target).await,
        }
    }

    async fn look_up_columns(&self, target: &Target) -> Result<Arc<Columns>, Failure> {
        let _turn = self.turn().await?;
        let known = self.known().await?;
        self.look_up_columns_in_turn(target, &known).await
    }

    async fn look_up_columns_in_turn(&self, target: &Target, known: &Known) -> Result<Arc<Columns>, Failure> {
        let limit = self.checked.config.query_timeout;
        let name = table_sql(target)?;
        let sql = format!("DESCRIBE TABLE {name}");
        let settings = settings::for_description(known, limit);
        let rows = self.rows::<Described>(&sql, settings, limit).await?;
        let all = rows
            .into_iter()
            .map(|row| Column {
                name: row.name,
                data_type: row.r#type,
                kind: row.default_type,
                ttl: row.ttl_expression,
            })
            .collect();
        let columns = Arc::new(Columns { all });
        let mut remembered = lock(&self.columns);
        if remembered.len() >= MAX_REMEMBERED && !remembered.contains_key(&key(target)) {
            remembered.pop_first();
        }
        remembered.insert(key(target), Remembered { columns: columns.clone(), since: Moment::now() });
        Ok(columns)
    }

    /// What an answer says about what is remembered.
    fn forget_after(&self, target: &Target, failure: &Failure) {
        match failure.refusal.code {
            // The table has changed or gone.
            Some(10 | 16 | 20 | 47 | 60 | 81 | 117 | 218) => drop(lock(&self.columns).remove(&key(target))),
            // Another version of the server: this one does not know a setting, or it was restarted.
            None | Some(115) => *lock(&self.known) = None,
            _ => {}
        }
    }

    // --- asking ---

    /// Waits for a turn to ask something.
    async fn turn(&self) -> Result<SemaphorePermit<'_>, Failure> {
        match timeout(self.checked.config.query_timeout, self.queries.acquire()).await {
            Ok(Ok(turn)) => Ok(turn),
            _ => Err(Failure::before_sending("too many queries under way; waited for a turn in vain")),
        }
    }

    /// Which of our settings the server knows.
    async fn known(&self) -> Result<Arc<Known>, Failure> {
        let known = lock(&self.known).clone();
        match known {
            Some(known) => Ok(known),
            // Reads only: whatever goes wrong with it, no row was sent.
            None => self.ask_known().await.map_err(|failure| Failure { nothing_written: true, ..failure }),
        }
    }

    async fn ask_known(&self) -> Result<Arc<Known>, Failure> {
        let mut names = String::new();
        for name in settings::all() {
            let _ = write!(names, "{}{}", if names.is_empty() { "" } else { ", " }, literal(name));
        }
        // One row, so that a profile's `limit` cannot shorten it.
        let sql = format!(
            "SELECT arrayStringConcat(groupArray(name), ',') FROM system.settings WHERE name IN ({names})"
        );
        let limit = self.checked.config.query_timeout;
        let names = match timeout(limit, self.ask::<String>(&sql)).await {
            Ok(answer) => answer?,
            Err(_) => return Err(Failure::in_doubt(format!("no answer within {limit:?}"))),
        };
        let known: Known = names.split(',').map(str::to_owned).collect();
        // Every version has this one. An answer without it is no answer to rely on.
        if !known.contains("min_insert_block_size_rows") {
            return Err(Failure::before_sending(
                "the server's list of settings (system.settings) is not complete",
            ));
        }
        let known = Arc::new(known);
        *lock(&self.known) = Some(known.clone());
        Ok(known)
    }

    /// Asks what is asked before it is known which settings the server knows.
    async fn ask<T>(&self, sql: &str) -> Result<T, Error>
    where
        T: RowOwned + RowRead,
    {
        let query = || self.client.query_raw(sql).with_setting("query_id", self.query_id());
        let pinned = settings::FOR_ASKING
            .iter()
            .fold(query(), |query, &(name, value)| query.with_setting(name, value));
        match pinned.fetch_one::<T>().await {
            // An old server: it has not got what would be turned off.
            Err(Error::BadResponse(answer)) if code_of(&answer) == Some(115) => {
                query().fetch_one::<T>().await
            }
            answer => answer,
        }
    }

    async fn rows<T>(
        &self,
        sql: &str,
        settings: Vec<(&'static str, String)>,
        limit: Duration,
    ) -> Result<Vec<T>, Failure>
    where
        T: RowOwned + RowRead,
    {
        let mut query = self.client.query_raw(sql).with_setting("query_id", self.query_id());
        for (name, value) in settings {
            query = query.with_setting(name, value);
        }
        match timeout(limit, query.fetch_all::<T>()).await {
            Ok(Ok(rows)) => Ok(rows),
            Ok(Err(error)) => {
                let failure = Failure::from(error);
                if failure.refusal.code == Some(115) {
                    *lock(&self.known) = None;
                }
                Err(failure)
            }
            Err(_) => Err(Failure::in_doubt(format!("no answer within {limit:?}"))),
        }
    }
}

fn key(target: &Target) -> Key {
    (target.database.clone(), target.table.clone())
}

/// A poisoned lock guards nothing that could be half-done here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn table_sql(target: &Target) -> Result<String, Failure> {
    quote_table(&target.database, &target.table).map_err(|error| Failure::before_sending(error.to_string()))
}

fn insert_sql(target: &Target, columns: &Columns) -> Result<String, Failure> {
    let list = columns.list().map_err(|error| Failure::before_sending(error.to_string()))?;
    Ok(format!("INSERT INTO {} ({list}) FORMAT JSONEachRow", table_sql(target)?))
}

fn read_back_sql(
    target: &Target,
    asked: &TableConfig,
    created: Timestamp,
    first: Seq,
    last: Seq,
) -> Result<String, Failure> {
    let column = |name: &str| quote(name).map_err(|error| Failure::before_sending(error.to_string()));
    let (sequence, stream) = (column(&asked.sequence_column)?, column(&asked.stream_column)?);
    // No aliases: a column of the table could have the same name, and which of them wins is up to settings.
    Ok(format!(
        "SELECT toUInt64(assumeNotNull({sequence})), toUInt64(count()) FROM {} \
         WHERE {stream} = {} AND {sequence} BETWEEN {first} AND {last} \
         GROUP BY toUInt64(assumeNotNull({sequence})) ORDER BY toUInt64(assumeNotNull({sequence}))",
        table_sql(target)?,
        created.0,
    ))
}
