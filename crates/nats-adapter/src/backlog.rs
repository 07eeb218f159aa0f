//! What waits in the stream for a shard's consumer.

use holdfast_core::ports::Failure;

use crate::api::{self, ConsumerInfo};
use crate::connect::Connection;
use crate::request::CALL_TIMEOUT;

/// How a consumer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backlog {
    /// Rows that it has not delivered to anybody.
    pub rows: u64,
    /// The stream's sequence up to which it has delivered.
    pub delivered: u64,
}

/// Asks how `consumer` of `stream` stands.
///
/// # Errors
///
/// As the server says it: [`holdfast_core::ports::FailureClass::Missing`] if there is none.
pub async fn backlog(connection: &Connection, stream: &str, consumer: &str) -> Result<Backlog, Failure> {
    let subject = api::consumer_info(stream, consumer);
    let info: ConsumerInfo = connection.ask(&subject, CALL_TIMEOUT).await.map_err(|error| error.failure())?;
    Ok(Backlog { rows: info.num_pending, delivered: info.delivered.stream_seq })
}
