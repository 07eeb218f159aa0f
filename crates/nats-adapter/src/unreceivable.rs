//! Rows that the client cannot receive: kept as dead letters and taken out of the stream.
//!
//! nats-server stores whatever bytes a publisher calls headers, and almost any bytes as a subject. The client takes
//! a row whose header block it cannot read for a broken connection, and makes a new one; of one sort of block it
//! panics. Either way the same row comes again with the next pull, for ever: its shard stands still.
//!
//! Such a row can be read all the same: STREAM.MSG.GET brings its headers as bytes in base64. So whenever a
//! shard's connection breaks, the rows behind the last one that arrived are looked at in that way. One that
//! cannot be received is kept as a dead letter, under the identity that every dead letter has, and then removed
//! from the stream. Nobody can have accepted it, so it stands in no batch and no record, and to take it out is
//! to trim a row that is done: for the shard it never was there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use holdfast_core::ports::dead_letters::{Cause, Letter, ParkOutcome};
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::row::{Seq, ShardId, TableName};
use holdfast_core::time::Instant;

use crate::api::{self, StreamInfo, Which};
use crate::connect::Connection;
use crate::dead_letters::DeadLetters;
use crate::errors::cut;
use crate::request::CALL_TIMEOUT;
use crate::{headers, letters, subject};

/// What had arrived when the connection broke is given this long to reach the sink.
const SETTLE: Duration = Duration::from_millis(20);

/// Rows that are looked at behind the last one that arrived, and again behind each that was removed.
const LOOK: u32 = 256;

/// Why the client cannot receive a row, if it cannot.
fn why(subject: &str, block: &[u8]) -> Option<&'static str> {
    // The client splits a protocol line at any white space of Unicode; the server only at its own. The JSON form of a
    // subject that is no UTF-8 has replacement characters. No table's token has either.
    if subject.contains(|c: char| c.is_whitespace() || c == char::REPLACEMENT_CHARACTER) {
        return Some("its subject holds white space or is no UTF-8");
    }
    headers::unreadable(block)
}

/// One shard's.
#[derive(Debug)]
pub(crate) struct Unreceivable {
    pub(crate) connection: Connection,
    pub(crate) dead_letters: DeadLetters,
    pub(crate) stream: String,
    pub(crate) prefix: String,
    pub(crate) shard: ShardId,
    pub(crate) busy: AtomicBool,
    pub(crate) removed: AtomicU64,
}

impl Unreceivable {
    /// Looks, in a task of its own, behind the higher of `above` and what `reached` is soon after; one look at a
    /// time. Does not block.
    pub(crate) fn look(self: &Arc<Self>, above: Seq, reached: Arc<AtomicU64>) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.busy.swap(true, Ordering::AcqRel) {
            return;
        }
        let this = Arc::clone(self);
        runtime.spawn(async move {
            tokio::time::sleep(SETTLE).await;
            if let Err(failure) = this.clear(above.max(Seq(reached.load(Ordering::Relaxed)))).await {
                tracing::warn!(shard = %this.shard, %failure, "cannot look for rows that cannot be received");
            }
            this.busy.store(false, Ordering::Release);
        });
    }

    async fn clear(&self, above: Seq) -> Result<(), Failure> {
        let filter = subject::shard_filter(&self.prefix, self.shard);
        let stored = async |which: Which<'_>| api::stored(&self.connection, &self.stream, &which).await;
        let mut above = above;
        let mut left = LOOK;
        while left > 0 {
            left -= 1;
            let Some(row) = stored(Which::next(above, &filter)).await.map_err(|error| error.failure())?
            else {
                break;
            };
            above = Seq(row.seq.max(above.0.saturating_add(1)));
            let block = row.headers().map_err(|error| error.failure())?;
            let Some(why) = why(&row.subject, &block) else { continue };
            self.remove(&row, why).await?;
            left = LOOK;
        }
        Ok(())
    }

    async fn remove(&self, row: &api::Stored, why: &str) -> Result<(), Failure> {
        let seq = Seq(row.seq);
        let info: StreamInfo = self
            .connection
            .ask(&api::stream_info(&self.stream), CALL_TIMEOUT)
            .await
            .map_err(|error| error.failure())?;
        let (table, cause) = match subject::split(&self.prefix, &row.subject) {
            Some((_, token)) => match subject::table_of(token) {
                Ok(table) => (table, Cause::Payload),
                Err((token, _)) => (token, Cause::Subject),
            },
            None => (TableName::new(row.subject.as_str()), Cause::Subject),
        };
        let letter = Letter {
            created: info.created,
            shard: self.shard,
            table,
            seq,
            stored_at: row.time,
            payload: row.payload().map_err(|error| error.failure())?,
            cause,
            code: None,
            message: format!("no NATS client of this kind can receive it: {why}").into(),
            attempts: 0,
        };
        // No intent that could age: nobody can have this row.
        match self.dead_letters.park(&letter, Instant::at(Duration::MAX), true).await {
            ParkOutcome::Parked => {}
            ParkOutcome::Failed(failure) => return Err(failure),
            ParkOutcome::Stale => return Err(Failure::new(FailureClass::Other, "a clock at its end")),
        }
        // The last look, right before: the stream may have been made anew meanwhile.
        let now = api::stored(&self.connection, &self.stream, &Which::seq(seq)).await;
        let same = now.map_err(|error| error.failure())?.is_some_and(|now| now.time == row.time);
        let gone = same && letters::delete(&self.connection, &self.stream, seq).await?;
        if gone {
            self.removed.fetch_add(1, Ordering::Relaxed);
            tracing::error!(
                shard = %self.shard, %seq, subject = %cut(&row.subject), why,
                "a row that cannot be received is kept as a dead letter and taken out of the stream"
            );
        }
        Ok(())
    }
}
