//! What a table shows of the rows that it took: for proving, after the fact, that each is there once and in
//! order.

use clickhouse::query::RowCursor;
use holdfast_core::ports::store::{Refusal, Target};
use holdfast_core::row::TableName;
use holdfast_core::time::Timestamp;

use super::Store;
use crate::error::{Class, Failure, refusal};
use crate::identifier::{literal, quote, quote_table};
use crate::settings;

/// The rows of one stream in a table, by their sequence.
pub struct Stored(RowCursor<(u64, u64)>);

impl Stored {
    /// The next sequence, rising, and how often it is there.
    ///
    /// # Errors
    /// The server's words.
    pub async fn next(&mut self) -> Result<Option<(u64, u64)>, Refusal> {
        self.0.next().await.map_err(|error| Failure::from(error).refusal)
    }
}

impl Store {
    fn table_sql(&self, table: &TableName) -> Result<(Target, String), Refusal> {
        let (database, name) = self.0.checked.target(table);
        let quoted =
            quote_table(database, name).map_err(|error| refusal(Class::Table, &error.to_string()))?;
        let level = holdfast_core::ports::store::Level::AtLeastOnce;
        Ok((Target { database: database.into(), table: name.into(), level }, quoted))
    }

    async fn numbers<T>(&self, sql: &str) -> Result<T, Refusal>
    where
        T: clickhouse::RowOwned + clickhouse::RowRead,
    {
        let known = self.0.known().await.map_err(|failure| failure.refusal)?;
        let limit = self.0.checked.config.insert_timeout;
        let rows = self.0.rows::<T>(sql, settings::for_read_back(&known, limit), limit).await;
        let first = rows.map_err(|failure| failure.refusal)?.into_iter().next();
        first.ok_or_else(|| refusal(Class::Doubt, "an empty answer"))
    }

    /// How many rows `table` has, of whatever origin.
    ///
    /// # Errors
    /// The server's words.
    pub async fn count(&self, table: &TableName) -> Result<u64, Refusal> {
        let (_, quoted) = self.table_sql(table)?;
        self.numbers(&format!("SELECT count() FROM {quoted}")).await
    }

    /// The rows of the stream created at `created`, by their sequence. The table must have both columns.
    ///
    /// # Errors
    /// The server's words.
    pub async fn stored(&self, table: &TableName, created: Timestamp) -> Result<Stored, Refusal> {
        let (_, quoted) = self.table_sql(table)?;
        let asked = self.0.checked.asked(table);
        let named = |name: &str| quote(name).map_err(|error| refusal(Class::Table, &error.to_string()));
        let (seq, stream) = (named(&asked.sequence_column)?, named(&asked.stream_column)?);
        let sql = format!(
            "SELECT toUInt64({seq}) AS s, count() AS c FROM {quoted} WHERE {stream} = {} GROUP BY s ORDER BY s",
            created.0
        );
        let known = self.0.known().await.map_err(|failure| failure.refusal)?;
        let mut query = self.0.client.query_raw(&sql).with_setting("query_id", self.0.query_id());
        // As long as it takes: tables can be large. The socket's own limit bounds a silence.
        for (name, value) in settings::for_read_back(&known, std::time::Duration::from_hours(24)) {
            query = query.with_setting(name, value);
        }
        query.fetch::<(u64, u64)>().map(Stored).map_err(|error| Failure::from(error).refusal)
    }

    /// How many rows of `table` were inserted after a row of the same partition that they come before in the
    /// stream. `None`: the table keeps no trace of the order in which its rows came. The table must have both
    /// columns.
    ///
    /// # Errors
    /// The server's words.
    pub async fn out_of_order(&self, table: &TableName) -> Result<Option<u64>, Refusal> {
        let (target, quoted) = self.table_sql(table)?;
        let asked = self.0.checked.asked(table);
        let named = |name: &str| quote(name).map_err(|error| refusal(Class::Table, &error.to_string()));
        let (seq, stream) = (named(&asked.sequence_column)?, named(&asked.stream_column)?);
        let (engine, key): (String, String) = self
            .numbers(&format!(
                "SELECT engine_full, sorting_key FROM system.tables WHERE database = {} AND name = {}",
                literal(&target.database),
                literal(&target.table)
            ))
            .await?;
        let has = |setting: &str| {
            engine.contains(&format!("{setting} = 1")) || engine.contains(&format!("{setting} = true"))
        };
        let place = if has("enable_block_number_column") && has("enable_block_offset_column") {
            "_block_number, _block_offset"
        } else if key.is_empty() {
            // Unsorted parts keep the order of insertion, and merges join neighbours end to end. A part's name
            // is its partition, its first block, its last block, and its level.
            "toUInt64OrZero(splitByChar('_', _part)[-3]), _part_offset"
        } else {
            return Ok(None);
        };
        let sql = format!(
            "SELECT countIf(place > 1 AND (st, sq) <= (st_before, sq_before)) FROM (\
               SELECT {stream} AS st, toUInt64({seq}) AS sq, row_number() OVER w AS place, \
                 lagInFrame(st) OVER w AS st_before, lagInFrame(sq) OVER w AS sq_before \
               FROM {quoted} \
               WINDOW w AS (PARTITION BY _partition_id ORDER BY {place} \
                            ROWS BETWEEN 1 PRECEDING AND CURRENT ROW))"
        );
        self.numbers(&sql).await.map(Some)
    }
}
