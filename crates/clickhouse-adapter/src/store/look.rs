//! Looking at a table.

use holdfast_core::ports::store::{Refusal, Target};

use super::{Inner, table_sql};
use crate::config::TableConfig;
use crate::describe::{Columns, Facts, Policies, Readable, TableReport, judge};
use crate::error::{Certainty, Class, Failure, refusal};
use crate::horizon::{Horizon, Pace, Partitions};
use crate::identifier::{literal, quote};
use crate::settings::{self, Known};

/// Engine, `engine_full`, partition key, sorting key, indices; the windows that hold by default.
type TableLine = (String, String, String, String, String, u64, u64, u64);

impl Inner {
    /// Looks at `target` as it is now.
    pub(super) async fn look(&self, target: &Target, asked: &TableConfig) -> Result<TableReport, Failure> {
        let _turn = self.turn().await?;
        // Asked anew with each description: a server may have been upgraded.
        let known = self.ask_known().await?;
        let columns = self.look_up_columns_in_turn(target, &known).await?;
        let pace = self.checked.pace();
        let facts = self.facts(target, asked, pace, &known, Columns::clone(&columns)).await?;
        Ok(judge(facts, asked, pace))
    }

    async fn facts(
        &self,
        target: &Target,
        asked: &TableConfig,
        pace: Pace,
        known: &Known,
        columns: Columns,
    ) -> Result<Facts, Failure> {
        let limit = self.checked.config.query_timeout;
        let (database, table) = (literal(&target.database), literal(&target.table));
        let setting = |of: &str, name: &str| {
            format!("ifNull((SELECT toUInt64OrZero(any(value)) FROM system.{of} WHERE name = '{name}'), 0)")
        };
        let sql = |indices: &str, windows: [&str; 3]| {
            format!(
                "SELECT engine, engine_full, partition_key, sorting_key, {indices}, {} \
                 FROM system.tables WHERE database = {database} AND name = {table}",
                windows.map(|window| format!("toUInt64({window})")).join(", ")
            )
        };
        let settings = || settings::for_description(known, limit);
        let whole = sql(
            &format!(
                "concat('=', ifNull((SELECT arrayStringConcat(groupArray(expr), ', ') \
                 FROM system.data_skipping_indices WHERE database = {database} AND table = {table}), ''))"
            ),
            [
                &setting("merge_tree_settings", "non_replicated_deduplication_window"),
                &setting("replicated_merge_tree_settings", "replicated_deduplication_window"),
                &setting("replicated_merge_tree_settings", "replicated_deduplication_window_seconds"),
            ],
        );
        let lines = match self.rows::<TableLine>(&whole, settings(), limit).await {
            // Not every user may read all of it. What ClickHouse itself comes with holds for the rest.
            Err(Failure { refusal: Refusal { code: Some(497), .. }, .. }) => {
                self.rows::<TableLine>(&sql("''", ["0", "10000", "3600"]), settings(), limit).await?
            }
            lines => lines?,
        };
        let line = lines.into_iter().next();
        let Some((
            engine,
            engine_full,
            partition_key,
            sorting_key,
            indices,
            plain_window,
            replicated_window,
            replicated_seconds,
        )) = line
        else {
            // Described a moment ago, and now gone, or not for this user to see.
            return Err(Failure {
                refusal: Refusal {
                    code: Some(60),
                    ..refusal(Class::Table, "the table is not in system.tables")
                },
                certainty: Certainty::NothingWritten,
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
        let readable = self.readable(target, asked, known, &columns).await?;
        let partitions = if partition_key.is_empty() {
            Partitions::None
        } else {
            // Parts as they were inserted. Those that were merged since are kept in the list for minutes.
            let sql = format!(
                "SELECT toUInt64(uniqExact(partition_id)) FROM system.parts WHERE database = {database} \
                 AND table = {table} AND level = 0 AND modification_time > now() - {}",
                Horizon::new(0, Partitions::None, pace).life.as_secs()
            );
            let seen =
                self.rows::<u64>(&sql, settings(), limit).await.ok().and_then(|rows| rows.first().copied());
            seen.filter(|seen| *seen > 0).map_or(Partitions::Unknown, Partitions::Lately)
        };
        Ok(Facts {
            database: target.database.to_string(),
            table: target.table.to_string(),
            engine,
            engine_full,
            partition_key,
            sorting_key,
            indices: indices.strip_prefix('=').map(str::to_owned),
            columns,
            plain_window,
            replicated_window,
            replicated_seconds,
            policies,
            readable,
            partitions,
        })
    }

    /// Whether the user may read Holdfast's columns of `target`, where it has them. Nothing is read.
    async fn readable(
        &self,
        target: &Target,
        asked: &TableConfig,
        known: &Known,
        columns: &Columns,
    ) -> Result<Readable, Failure> {
        if !(columns.has(&asked.sequence_column) && columns.has(&asked.stream_column)) {
            return Ok(Readable::Yes);
        }
        let name = |name: &str| quote(name).map_err(|error| Failure::before_sending(error.to_string()));
        let (sequence, stream) = (name(&asked.sequence_column)?, name(&asked.stream_column)?);
        let sql = format!(
            "SELECT toUInt64(ifNull(max({sequence}), 0)) + toUInt64(ifNull(max({stream}), 0)) FROM {} WHERE 1 = 0",
            table_sql(target)?
        );
        let limit = self.checked.config.query_timeout;
        match self.rows::<u64>(&sql, settings::for_description(known, limit), limit).await {
            Ok(_) => Ok(Readable::Yes),
            Err(Failure { refusal, .. }) if refusal.class == Class::Access && refusal.code.is_some() => {
                Ok(Readable::No(refusal.to_string()))
            }
            Err(failure) => Err(failure),
        }
    }
}
