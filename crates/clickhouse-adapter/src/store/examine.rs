//! What can be found out about a refused batch beyond what ClickHouse says.

use bytes::Bytes;
use clickhouse::error::Error;
use holdfast_core::ports::store::{Insert, Target};
use holdfast_core::row::Seq;
use std::time::Duration;
use tokio::time::{Instant as Moment, timeout};

use super::{Inner, splice, transmit};
use crate::body;
use crate::config::TableConfig;
use crate::engine::{self, Family};
use crate::error::{Certainty, Class, Failure, code_of};
use crate::identifier::{IdentifierError, literal};
use crate::probe::{self, Question, Search};
use crate::settings::{self, Known};

/// The longest that is spent on finding out more about a refused batch. It counts against the insert's own limit.
const EXAMINATION: Duration = Duration::from_secs(15);

impl Inner {
    /// Finds out more about a refusal, where asking helps and costs little: whether nothing was written, and which
    /// row it is about.
    pub(super) async fn examine(
        &self,
        insert: &Insert,
        asked: &TableConfig,
        known: &Known,
        deadline: Moment,
        mut refused: Failure,
    ) -> Failure {
        if refused.refusal.class != Class::Data {
            return refused;
        }
        let deadline = deadline.min(Moment::now() + EXAMINATION);
        let left = || deadline.saturating_duration_since(Moment::now());
        if refused.certainty == Certainty::Over
            && let Ok(Ok(true)) = timeout(left(), self.left_nothing(insert, asked)).await
        {
            refused.certainty = Certainty::NothingWritten;
        }
        // Too many partitions are no single row's fault.
        let unnamed = refused.refusal.row.is_none() && !matches!(refused.refusal.code, None | Some(252));
        if unnamed && refused.nothing_written() && insert.rows.len() > 1 {
            let search = self.find_bad_row(insert, asked, known, &refused, deadline);
            if let Ok(Ok(found)) = timeout(left(), search).await {
                refused.refusal.row = found.and_then(|at| u32::try_from(at + 1).ok());
            }
        }
        refused
    }

    /// Whether an insert that ClickHouse has refused, and that is over, has certainly left nothing behind.
    async fn left_nothing(&self, insert: &Insert, asked: &TableConfig) -> Result<bool, Failure> {
        let table = self.look(&insert.target, asked).await?;
        // One block without partitions is one part: there or not, and what failed was not there yet.
        let whole = match engine::family(&table.engine).0 {
            Family::Plain | Family::Merging => table.partition_key.is_empty(),
            // These take a block only once it is complete, and have no expressions of their own.
            Family::Other => {
                matches!(table.engine.as_str(), "Memory" | "Null" | "Log" | "TinyLog" | "StripeLog")
            }
            Family::NoInserts => false,
        };
        if whole {
            return Ok(true);
        }
        // Another replica could be asked, which has not got the part yet.
        if table.replicated || !table.highest.can_read_back() {
            return Ok(false);
        }
        let (Some(first), Some(last)) = (insert.rows.first(), insert.rows.last()) else { return Ok(false) };
        let found = self.read_back(&insert.table, &insert.target, insert.created, first.seq, last.seq).await;
        let is_sent = |seq: &Seq| insert.rows.binary_search_by_key(seq, |row| row.seq).is_ok();
        Ok(found.is_ok_and(|found| !found.seqs.iter().any(is_sent)))
    }

    /// The place of the first row that the table refuses, counted from 0, found without inserting.
    async fn find_bad_row(
        &self,
        insert: &Insert,
        asked: &TableConfig,
        known: &Known,
        refused: &Failure,
        deadline: Moment,
    ) -> Result<Option<usize>, Failure> {
        let _turn = self.turn().await?;
        let started = Moment::now();
        // As the table is now: an insert does not notice that a column came that it does not name.
        let columns = self.look_up_columns_in_turn(&insert.target, known).await?;
        let expressions = self.expressions(&insert.target, known).await?;
        let named = |error: IdentifierError| Failure::before_sending(error.to_string());
        let question = Question::new(&columns.all, &expressions).map_err(named)?;
        let boundary = format!("holdfast{:032x}", rand::random::<u128>());
        let (head, tail) = probe::form(&boundary);
        let (head, tail) = (Bytes::from(head), Bytes::from(tail));
        let client = self
            .client
            .clone()
            .with_compression(clickhouse::Compression::None)
            .with_header("Content-Type", format!("multipart/form-data; boundary={boundary}"));
        let splice = splice(insert, asked, &columns);
        let limit = deadline.saturating_duration_since(Moment::now());
        let settings = settings::for_probe(known, asked.unknown_fields, limit);
        let (mut search, mut questions) = (Search::new(insert.rows.len()), 0);
        while let Some(range) = search.next() {
            questions += 1;
            let Ok(rows) = body::build(&insert.rows[range], &splice) else { return Ok(None) };
            let mut request =
                client.insert_formatted_with(question.sql.as_str()).with_setting("query_id", self.query_id());
            for (name, value) in &asked.settings {
                request = request.with_setting(name, value);
            }
            for (name, value) in &settings {
                request = request.with_setting(*name, value);
            }
            for (name, value) in &question.parameters {
                request = request.with_setting(name, value);
            }
            let parts = std::iter::once(head.clone()).chain(body::slices(&rows)).chain([tail.clone()]);
            let bad = match transmit(request, parts, deadline).await {
                Ok(()) => false,
                Err(Error::BadResponse(answer)) if code_of(&answer) == refused.refusal.code => true,
                Err(error) => return Err(error.into()),
            };
            search.tell(bad);
        }
        let found = search.found();
        tracing::debug!(
            table = %insert.table, ?found, questions, elapsed = ?started.elapsed(), "looked for the bad row"
        );
        Ok(found)
    }

    /// What is reckoned for each row of `target` beside its columns, in ClickHouse's words: keys, indices, constraints.
    async fn expressions(&self, target: &Target, known: &Known) -> Result<Vec<String>, Failure> {
        let limit = self.checked.config.query_timeout;
        let (database, table) = (literal(&target.database), literal(&target.table));
        let settings = || settings::for_description(known, limit);
        let sql = format!(
            "SELECT partition_key, sorting_key FROM system.tables WHERE database = {database} AND name = {table}"
        );
        let keys = self.rows::<(String, String)>(&sql, settings(), limit).await?;
        let mut all: Vec<String> = keys.into_iter().flat_map(|(one, two)| [one, two]).collect();
        let sql = format!(
            "SELECT expr FROM system.data_skipping_indices WHERE database = {database} AND table = {table}"
        );
        // Not every user may read these, and not every version has them.
        all.extend(self.rows::<String>(&sql, settings(), limit).await.unwrap_or_default());
        let sql = format!(
            "SELECT expression FROM system.constraints \
             WHERE database = {database} AND table = {table} AND type = 'CHECK'"
        );
        all.extend(self.rows::<String>(&sql, settings(), limit).await.unwrap_or_default());
        Ok(all)
    }
}
