//! A look at the stream itself: who it is, and which rows of a table it still holds.

use async_nats::jetstream;
use async_nats::jetstream::consumer::{DeliverPolicy, pull};
use futures_util::StreamExt;
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::row::{Mark, Seq, ShardId};
use holdfast_core::time::Timestamp;

use crate::ack_subject::AckSubject;
use crate::api::{self, StreamInfo, Which};
use crate::connect::Connection;
use crate::errors::cut;
use crate::request::CALL_TIMEOUT;
use crate::subject;

/// A stream as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// When it was created: with its name, its identity.
    pub created: Timestamp,
    /// Rows in it.
    pub messages: u64,
    /// Its first row that is still there.
    pub first: Seq,
    /// Its last row.
    pub last: Mark,
    /// Copies of every row.
    pub replicas: u64,
}

/// Looks at `stream`.
///
/// # Errors
///
/// The server's words: above all that there is no such stream, or no answer.
pub async fn look(connection: &Connection, stream: &str) -> Result<Stream, Failure> {
    let info: StreamInfo =
        connection.ask(&api::stream_info(stream), CALL_TIMEOUT).await.map_err(|error| {
            let Failure { class, message } = error.failure();
            let hint =
                if class == FailureClass::Missing { "; `holdfast topology apply` creates it" } else { "" };
            Failure::new(class, format!("stream {stream}: {message}{hint}"))
        })?;
    Ok(Stream {
        created: info.created,
        messages: info.state.messages,
        first: Seq(info.state.first_seq),
        last: Mark { seq: Seq(info.state.last_seq), stored_at: info.state.last_ts },
        replicas: info.config.get("num_replicas").and_then(serde_json::Value::as_u64).unwrap_or(1),
    })
}

/// The shard that `table`'s rows go to, as the last one in `stream` shows; none if it holds no row of it. (Which one it
/// is, is the server's own affair.)
///
/// # Errors
///
/// The server's words.
pub async fn shard_of(
    connection: &Connection,
    stream: &str,
    prefix: &str,
    table: &str,
) -> Result<Option<ShardId>, Failure> {
    let filter = format!("{prefix}.*.{}", subject::encode(table));
    let row =
        api::stored(connection, stream, &Which::last(&filter)).await.map_err(|error| error.failure())?;
    Ok(row.and_then(|row| Some(subject::split(prefix, &row.subject)?.0)))
}

/// The sequences of the rows under `filter` that are in `stream` now, rising.
///
/// # Errors
///
/// The client's words.
pub async fn sequences(connection: &Connection, stream: &str, filter: &str) -> Result<Vec<Seq>, Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::new(FailureClass::Other, cut(&error.to_string()));
    let context = jetstream::new(connection.client());
    let handle = context.get_stream_no_info(stream).await.map_err(|error| failed(&error))?;
    let config = pull::OrderedConfig {
        filter_subject: filter.to_owned(),
        deliver_policy: DeliverPolicy::All,
        headers_only: true,
        ..pull::OrderedConfig::default()
    };
    let mut consumer = handle.create_consumer(config).await.map_err(|error| failed(&error))?;
    if consumer.info().await.map_err(|error| failed(&error))?.num_pending == 0 {
        return Ok(Vec::new());
    }
    let mut messages = consumer.messages().await.map_err(|error| failed(&error))?;
    let mut seqs = Vec::new();
    while let Some(message) = messages.next().await {
        let message = message.map_err(|error| failed(&error))?;
        let Some(ack) = message.reply.as_deref().and_then(AckSubject::parse) else { continue };
        seqs.push(ack.seq);
        if ack.pending == 0 {
            break;
        }
    }
    Ok(seqs)
}
