//! The store port on ClickHouse.

mod evidence;
mod examine;
mod look;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use clickhouse::error::Error;
use clickhouse::insert_formatted::InsertFormatted;
use clickhouse::{Client, RowOwned, RowRead};
use holdfast_core::ports::store::{
    Command, DescribeError, Description, Found, HoldsAbove, Insert, InsertOutcome, Level, Port, Refusal,
    Reply, Target,
};
use holdfast_core::row::{Seq, TableName, Verdict};
use holdfast_core::time::{Instant, Timestamp};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant as Moment, timeout};

use crate::body::{self, Splice};
use crate::config::{Checked, Config, ConfigError, TableConfig, UnknownFields};
use crate::connection::{self, PingError, Server};
use crate::describe::{Column, Columns, TableReport};
use crate::error::{Certainty, Class, Failure, refusal};
use crate::identifier::{literal, quote, quote_table};
use crate::settings::{self, Known};
use crate::underway::Underway;
use crate::witness::{Expected, Seen, Witness};

/// Tells the core's time.
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// Where unknown fields are dropped in silence, a column that was added is only filled once it is known. So the
/// columns of such tables are looked up again when they are older than this.
const COLUMNS_AGE: Duration = Duration::from_secs(30);

/// How many tables' columns are remembered. Beyond it the first by name is forgotten, and looked up when needed.
const MAX_REMEMBERED: usize = 16_384;

/// ClickHouse as the core's store. Cheap to clone.
///
/// Nothing is connected to before the first command. Each command ends within a bound: an insert within
/// `insert_timeout` from its turn, for which it waits until its `send_by` at most; a read-back, or a description that
/// also looks for rows, within `insert_timeout` and eight times `query_timeout`; any other description within eight
/// times `query_timeout`. Dropping a command's future breaks it off.
#[derive(Clone)]
pub struct Store(Arc<Inner>, Underway);

struct Inner {
    checked: Checked,
    client: Client,
    /// Sees whether it is ClickHouse that answers.
    witness: Witness,
    clock: Clock,
    /// Turns for inserts, first come, first served.
    inserts: Semaphore,
    /// Turns for everything that only reads. Apart, so that full lanes do not keep a shard from finding out.
    queries: Semaphore,
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
        let witness = Witness::default();
        let client = connection::client(&checked, &witness)?;
        let turns = checked.config.inserts_in_flight.min(Semaphore::MAX_PERMITS);
        let inner = Inner {
            client,
            witness,
            clock,
            inserts: Semaphore::new(turns),
            queries: Semaphore::new(turns),
            session: format!("holdfast-{:016x}", rand::random::<u64>()),
            next_query: AtomicU64::new(0),
            known: Mutex::default(),
            columns: Mutex::default(),
            checked,
        };
        Ok(Self(Arc::new(inner), Underway::default()))
    }

    /// The same store for another machine. Attempts are numbered by each machine for itself: what one breaks off must
    /// not be the other's, which may be the next machine of the same shard and begin with the same numbers.
    #[must_use]
    pub fn for_machine(&self) -> Self {
        Self(Arc::clone(&self.0), Underway::default())
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
        // The limit in there is not to come first: it would not tell silence from other trouble.
        let asked = inner.ask::<(String, String, u8)>(&sql, config.query_timeout.saturating_mul(2));
        match timeout(config.query_timeout, asked).await {
            Err(_) => Err(PingError::Silent { at: inner.at(), after: config.query_timeout }),
            Ok(Err(failure)) => Err(PingError::of(inner.at(), &config.user, failure)),
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
        let (inner, underway) = (&self.0, &self.1);
        match command {
            Command::Insert(insert) => {
                let outcome = underway.run(insert.shard, insert.attempt, inner.insert(&insert)).await;
                let outcome =
                    outcome.unwrap_or_else(|_| InsertOutcome::Doubt(refusal(Class::Doubt, GIVEN_UP)));
                Some(Reply::Inserted { attempt: insert.attempt, table: insert.table, outcome })
            }
            Command::ReadBack { attempt, shard, table, target, created, first, last } => {
                let work = inner.read_back(&table, &target, created, first, last);
                let outcome = underway.run(shard, attempt, work).await;
                let outcome = outcome.unwrap_or_else(|_| Err(refusal(Class::Doubt, GIVEN_UP)));
                Some(Reply::ReadBack { attempt, table, outcome })
            }
            Command::Describe { attempt, shard, table, holds } => {
                let outcome = underway.run(shard, attempt, inner.describe(&table, holds)).await;
                let outcome =
                    outcome.unwrap_or_else(|_| Err(DescribeError::Failed(refusal(Class::Doubt, GIVEN_UP))));
                Some(Reply::Described { attempt, table, outcome })
            }
            Command::Abort { shard, until } => {
                underway.abort(shard, until);
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
    default_expression: String,
    #[serde(rename = "comment")]
    _comment: String,
    #[serde(rename = "codec_expression")]
    _codec_expression: String,
    ttl_expression: String,
}

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
        let known = self.known().await.map_err(before_the_insert)?;
        let mut columns = self.columns(&insert.target, asked).await.map_err(before_the_insert)?;
        let mut refused = match self.send(insert, asked, &known, &columns, deadline).await {
            Err(failure) => failure,
            sent => return sent,
        };
        self.forget_after(&insert.target, &refused);
        // "No such column" and "unknown field" can mean that the table has changed since its columns were looked
        // up. Nothing was written, so it is tried again at once if so: nobody should judge the rows by old columns.
        if refused.nothing_written()
            && matches!(refused.refusal.code, Some(16 | 20 | 117))
            && let Ok(now) = self.look_up_columns(&insert.target).await
            && now != columns
        {
            tracing::info!(table = %insert.table, "the table's columns have changed; inserting by the new ones");
            columns = now;
            refused = match self.send(insert, asked, &known, &columns, deadline).await {
                Err(failure) => failure,
                sent => return sent,
            };
        }
        Err(self.examine(insert, asked, &known, deadline, refused).await)
    }

    /// One attempt. `Err` tells how certain it is that nothing was written.
    async fn send(
        &self,
        insert: &Insert,
        asked: &TableConfig,
        known: &Known,
        columns: &Columns,
        deadline: Moment,
    ) -> Result<InsertOutcome, Failure> {
        let splice = splice(insert, asked, columns);
        let both = columns.has(&asked.sequence_column) && columns.has(&asked.stream_column);
        if insert.target.level == Level::ExactlyOnce && !both {
            return Err(Failure::of_table(format!(
                "{}.{} no longer has both {:?} and {:?} as columns that Holdfast can fill; without them the batch \
                 could not be read back",
                insert.target.database, insert.target.table, asked.sequence_column, asked.stream_column
            )));
        }
        let body = body::build(&insert.rows, &splice).map_err(|error| {
            let place = insert.rows.iter().zip(1..).find(|(row, _)| row.seq == error.0);
            Failure::of_row(place.map(|(_, place)| place), error.to_string())
        })?;
        let sql = insert_sql(&insert.target, columns)?;
        // The last look at the clock, with nothing between it and the first byte that waits for anybody.
        if (self.clock)() > insert.send_by {
            return Ok(InsertOutcome::Stale);
        }
        let limit = self.checked.config.insert_timeout;
        let id = self.query_id();
        let answer = self.witness.expect(&id);
        let mut request = self.client.insert_formatted_with(sql).with_setting("query_id", id);
        for (name, value) in &asked.settings {
            request = request.with_setting(name, value);
        }
        for (name, value) in settings::for_insert(known, &insert.token.0, asked.unknown_fields, limit) {
            request = request.with_setting(name, value);
        }
        transmit(request, body::slices(&body), deadline)
            .await
            .map_err(|error| failed(error, &answer, limit))?;
        match answer.seen() {
            Some(Seen { clickhouse: true, .. }) => Ok(InsertOutcome::Stored),
            Some(Seen { status, .. }) => Err(of_somebody_else(status, "success")),
            None => Err(Failure::in_doubt("an answer without a head")),
        }
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
        // A table that was altered since the batch was opened may hide rows that are there. What is not seen is sent
        // again, so it must not be taken for missing.
        let now = self.look(target, self.checked.asked(table)).await.map_err(|failure| failure.refusal)?;
        if !now.highest.can_read_back() {
            let why = now.findings.first().map_or("it was altered", |finding| &finding.problem);
            let message = format!("{}.{} can no longer be read back: {why}", target.database, target.table);
            return Err(refusal(Class::Table, &message));
        }
        let repeated = rows.iter().find(|(_, count)| *count > 1).map(|(seq, _)| Seq(*seq));
        Ok(Found { seqs: rows.into_iter().map(|(seq, _)| Seq(seq)).collect(), repeated })
    }

    // --- describing ---

    async fn describe(
        &self,
        table: &TableName,
        holds: Option<HoldsAbove>,
    ) -> Result<Description, DescribeError> {
        let report = self.report(table).await?;
        let Some(level) = report.level else { return Err(DescribeError::Unfit(report.why_unfit())) };
        let target = Target { database: report.database.into(), table: report.table.into(), level };
        let holds = match holds.filter(|_| level.can_read_back()) {
            Some(asked) => {
                let found = self.highest(table, &target, asked).await;
                found.map_err(|failure| DescribeError::Failed(failure.refusal))?
            }
            None => None,
        };
        Ok(Description { target, holds })
    }

    /// The highest row of `target` above the one asked about.
    ///
    /// Once for each lane and tenure. In a table of ten million rows it took 4 to 260 ms on two busy cores, whatever
    /// the table was sorted by and whether `sequence_column` has an index or not: ClickHouse reads two columns of
    /// numbers, and skips the parts whose highest is below by their statistics. Asked above the end, as is usual, an
    /// index makes it 8 ms instead of 20 to 170.
    async fn highest(
        &self,
        table: &TableName,
        target: &Target,
        asked: HoldsAbove,
    ) -> Result<Option<Seq>, Failure> {
        let _turn = self.turn().await?;
        let known = self.known().await?;
        let limit = self.checked.config.insert_timeout;
        let sql = holds_sql(target, self.checked.asked(table), asked)?;
        // The highest and how many: of none, the highest is 0.
        let rows = self.rows::<(u64, u64)>(&sql, settings::for_read_back(&known, limit), limit).await?;
        Ok(rows.first().filter(|(_, count)| *count > 0).map(|(highest, _)| Seq(*highest)))
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
        self.look(&target, self.checked.asked(table)).await.map_err(|Failure { refusal, .. }| {
            // Unknown table, unknown database.
            if matches!(refusal.code, Some(60 | 81)) {
                DescribeError::Missing(refusal)
            } else {
                DescribeError::Failed(refusal)
            }
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
                expression: row.default_expression,
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
            None => self.ask_known().await,
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
        let names = self.ask::<String>(&sql, self.checked.config.query_timeout).await?;
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
    async fn ask<T>(&self, sql: &str, limit: Duration) -> Result<T, Failure>
    where
        T: RowOwned + RowRead,
    {
        let pinned = settings::FOR_ASKING.iter().map(|&(name, value)| (name, value.to_owned())).collect();
        let rows = match self.rows::<T>(sql, pinned, limit).await {
            // An old server: it has not got what would be turned off.
            Err(failure) if failure.refusal.code == Some(115) => self.rows::<T>(sql, Vec::new(), limit).await,
            answer => answer,
        };
        rows?.into_iter().next().ok_or_else(|| Failure::in_doubt("an answer without a row"))
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
        let id = self.query_id();
        let answer = self.witness.expect(&id);
        let mut query = self.client.query_raw(sql).with_setting("query_id", id);
        for (name, value) in settings {
            query = query.with_setting(name, value);
        }
        match timeout(limit, query.fetch_all::<T>()).await {
            Ok(Ok(rows)) => match answer.seen() {
                Some(Seen { clickhouse: true, .. }) => Ok(rows),
                // An empty page is no empty table.
                Some(Seen { status, .. }) => Err(of_somebody_else(status, "an answer")),
                None => Err(Failure::in_doubt("an answer without a head")),
            },
            Ok(Err(error)) => {
                let failure = failed(error, &answer, limit);
                if failure.refusal.code == Some(115) {
                    *lock(&self.known) = None;
                }
                Err(failure)
            }
            Err(_) => Err(Failure::in_doubt(format!("no answer within {limit:?}"))),
        }
    }
}

/// Sends `parts` as the body of `request` and waits for its end, until `deadline`.
async fn transmit(
    mut request: InsertFormatted,
    parts: impl Iterator<Item = Bytes>,
    deadline: Moment,
) -> Result<(), Error> {
    for part in parts {
        let left = Some(deadline.saturating_duration_since(Moment::now()));
        request = request.with_timeouts(left, left);
        // A request that is dropped before its end is cut, and a cut body is not stored.
        request.send(part).await?;
    }
    let left = Some(deadline.saturating_duration_since(Moment::now()));
    request.with_timeouts(left, left).end().await
}

/// What went wrong, given what was seen of the answer.
fn failed(error: Error, answer: &Expected, limit: Duration) -> Failure {
    match (error, answer.seen()) {
        (Error::TimedOut, _) => Failure::in_doubt(format!("no answer within {limit:?}")),
        (Error::BadResponse(text), Some(Seen { status, clickhouse: false })) => {
            of_somebody_else(status, &text)
        }
        (error, _) => Failure::from(error),
    }
}

/// An answer with `status` that is not ClickHouse's, whatever it says.
fn of_somebody_else(status: u16, text: &str) -> Failure {
    let advice = match status {
        200..=299 => {
            "; something answers in ClickHouse's place, or takes its X-ClickHouse-Query-Id header away"
        }
        300..=399 => "; clickhouse.url must name the server itself",
        413 => {
            "; what stands before ClickHouse takes no body this large: raise its limit, or lower batch.max_bytes"
        }
        _ => "",
    };
    Failure::of_somebody_else(status, format!("HTTP status {status}, not from ClickHouse{advice}: {text}"))
}

/// Something that went wrong while an insert was prepared: whatever it was, no row was sent.
fn before_the_insert(mut failure: Failure) -> Failure {
    failure.certainty = Certainty::NothingWritten;
    if failure.refusal.class == Class::Doubt {
        failure.refusal.class = Class::Passing;
    }
    failure
}

fn splice(insert: &Insert, asked: &TableConfig, columns: &Columns) -> Splice {
    let sequence = Some(asked.sequence_column.as_str()).filter(|name| columns.has(name));
    let stream = Some(asked.stream_column.as_str()).filter(|name| columns.has(name));
    Splice::new(sequence, stream, insert.created)
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

fn holds_sql(target: &Target, asked: &TableConfig, holds: HoldsAbove) -> Result<String, Failure> {
    let column = |name: &str| quote(name).map_err(|error| Failure::before_sending(error.to_string()));
    let (sequence, stream) = (column(&asked.sequence_column)?, column(&asked.stream_column)?);
    Ok(format!(
        "SELECT toUInt64(ifNull(max({sequence}), 0)), toUInt64(count()) FROM {} \
         WHERE {stream} = {} AND {sequence} > {}",
        table_sql(target)?,
        holds.created.0,
        holds.above,
    ))
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

#[cfg(test)]
mod tests {
    use holdfast_core::ports::Attempt;
    use holdfast_core::row::ShardId;
    use holdfast_core::time::Instant;

    use super::*;

    #[tokio::test]
    async fn what_one_machine_breaks_off_is_not_the_next_machines() {
        // Nobody listens there: a command that is not broken off says so.
        let config = Config { url: "http://127.0.0.1:9".to_owned(), ..Config::default() };
        let store = Store::new(config, Arc::new(|| Instant::START)).unwrap();
        let ask = || Command::Describe {
            attempt: Attempt(1),
            shard: ShardId(0),
            table: TableName::new("t"),
            holds: None,
        };
        let told = async |store: &Store| match store.call(ask()).await {
            Some(Reply::Described { outcome: Err(DescribeError::Failed(refusal)), .. }) => refusal.message,
            other => panic!("{other:?}"),
        };
        assert!(store.call(Command::Abort { shard: ShardId(0), until: Attempt(1_000) }).await.is_none());
        assert!(told(&store).await.starts_with("given up"));
        assert!(!told(&store.for_machine()).await.starts_with("given up"));
    }
}
