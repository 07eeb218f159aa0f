//! The retention port: trimming written rows from a stream by purging up to a sequence.

use async_trait::async_trait;
use holdfast_core::ports::retention::{Command, Port, Reply};
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::row::{Mark, Seq};
use holdfast_core::time::Timestamp;
use serde::{Deserialize, Serialize};

use crate::api::{self, StreamInfo, Which};
use crate::connect::Connection;
use crate::request::CALL_TIMEOUT;

/// The retention port on one stream. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Retention {
    connection: Connection,
    stream: String,
}

#[derive(Serialize)]
struct PurgeRequest {
    /// Rows below this sequence go.
    seq: u64,
}

#[derive(Deserialize)]
struct Purged {
    #[serde(default)]
    purged: u64,
}

impl Retention {
    /// Trims `stream`.
    #[must_use]
    pub fn new(connection: Connection, stream: impl Into<String>) -> Self {
        Self { connection, stream: stream.into() }
    }

    /// Removes every row below `below`, if the stream still is the one created at `created` and still has
    /// `witness`, the highest row that a record names; how many went. With a `below` of 0 it only looks.
    ///
    /// # Errors
    ///
    /// [`FailureClass::Missing`] if the stream is gone or was made anew: nothing was removed. Everything else
    /// as the server says it; unanswered means that the rows may be gone.
    pub async fn trim(&self, created: Timestamp, below: Seq, witness: Mark) -> Result<u64, Failure> {
        let info: StreamInfo = self
            .connection
            .ask(&api::stream_info(&self.stream), CALL_TIMEOUT)
            .await
            .map_err(|error| error.failure())?;
        if info.created != created {
            return Err(Failure::new(
                FailureClass::Missing,
                format!("the stream {} was made anew; nothing was trimmed", self.stream),
            ));
        }
        // A purge up to a sequence beyond the end would set the stream's next sequence.
        let reused = |how: String| {
            let what =
                format!("the stream {} uses sequences again ({how}); nothing was trimmed", self.stream);
            Err(Failure::new(FailureClass::Other, what))
        };
        let highest = below.max(witness.seq);
        if info.state.last_seq < highest.0 {
            return reused(format!("it ends at {}, and row {highest} was there", info.state.last_seq));
        }
        if witness.stored_at != Timestamp(0)
            && let Some(row) = api::stored(&self.connection, &self.stream, &Which::seq(witness.seq))
                .await
                .map_err(|error| error.failure())?
            && row.time != witness.stored_at
        {
            return reused(format!("row {} is another one than it was", witness.seq));
        }
        // The server reads a purge up to sequence 0 as one of everything, and below the first row is nothing.
        if below.0 <= 1 || info.state.first_seq >= below.0 {
            return Ok(0);
        }
        let purged: Purged = self
            .connection
            .call(&api::stream_purge(&self.stream), &PurgeRequest { seq: below.0 }, CALL_TIMEOUT)
            .await
            .map_err(|error| error.failure())?;
        Ok(purged.purged)
    }
}

#[async_trait]
impl Port for Retention {
    async fn call(&self, command: Command) -> Reply {
        let Command::Trim { attempt, created, below, witness } = command;
        Reply::Trimmed { attempt, outcome: self.trim(created, below, witness).await }
    }
}
