//! The ledger port on a key-value bucket.
//!
//! The record of shard `n` of stream `S` is the key `shard.S.n` of the bucket, that is, the last message of
//! the subject `$KV.<bucket>.shard.S.n` in the stream `KV_<bucket>`; its revision is that message's sequence.
//! A write carries the revision it expects (`Nats-Expected-Last-Subject-Sequence`, 0 for "none"), so the
//! server decides. A read asks the stream's leader: a direct get could be answered by a replica that lags.

use std::time::Duration;

use async_nats::HeaderMap;
use async_trait::async_trait;
use bytes::Bytes;
use holdfast_core::ports::ledger::{Command, Entry, Port, Reply, Revision, WriteOutcome};
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::row::ShardId;
use serde::Deserialize;

use crate::api::{self, Which};
use crate::connect::Connection;
use crate::errors::{ApiError, CallError, RequestError};
use crate::request::{QUICK_TIMEOUT, read};
use crate::topology::Streams;

pub(crate) const EXPECTED: &str = "Nats-Expected-Last-Subject-Sequence";

/// The stream behind a key-value bucket.
#[must_use]
pub fn bucket_stream(bucket: &str) -> String {
    format!("KV_{bucket}")
}

/// The subject of a shard's record.
#[must_use]
pub fn record_subject(bucket: &str, stream: &str, shard: ShardId) -> String {
    format!("$KV.{bucket}.shard.{stream}.{shard}")
}

/// The ledger port. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Ledger {
    connection: Connection,
    bucket: String,
    streams: Streams,
    timeout: Duration,
}

/// The answer to a stored publish.
#[derive(Deserialize)]
struct Stored {
    seq: u64,
}

impl Ledger {
    /// The records in `bucket` of the shards of `streams`.
    #[must_use]
    pub fn new(connection: Connection, bucket: impl Into<String>, streams: impl Into<Streams>) -> Self {
        Self { connection, bucket: bucket.into(), streams: streams.into(), timeout: QUICK_TIMEOUT }
    }

    /// The record of `shard`; none if there never was one. **A record that was deleted is an entry with no
    /// bytes**: its revision is what the next write must expect.
    ///
    /// # Errors
    ///
    /// No answer, or the server's refusal.
    pub async fn read(&self, shard: ShardId) -> Result<Option<Entry>, Failure> {
        let subject = record_subject(&self.bucket, &self.streams.of(shard), shard);
        let stream = bucket_stream(&self.bucket);
        let stored = api::stored(&self.connection, &stream, &Which::last(&subject)).await;
        let entry = stored.and_then(|stored| {
            stored
                .map(|stored| {
                    let record =
                        if is_tombstone(&stored.headers()?) { Bytes::new() } else { stored.payload()? };
                    Ok(Entry { revision: Revision(stored.seq), record })
                })
                .transpose()
        });
        entry.map_err(|error| error.failure())
    }

    /// Stores `record` if the stored revision is still `expected`.
    pub async fn write(&self, shard: ShardId, expected: Revision, record: Bytes) -> WriteOutcome {
        let subject = record_subject(&self.bucket, &self.streams.of(shard), shard);
        let mut headers = HeaderMap::new();
        headers.insert(EXPECTED, expected.0.to_string());
        match self.connection.request(&subject, Some(headers), record, self.timeout).await {
            Ok(message) => match read::<Stored>(&message.payload) {
                Ok(Stored { seq }) => WriteOutcome::Stored(Revision(seq)),
                Err(error) => refused(&error),
            },
            // No responders says that the bucket's stream is gone or has no leader now: nothing took it.
            Err(error) if error.not_received() => WriteOutcome::Refused(self.explain(&error)),
            Err(error) => WriteOutcome::Unknown(error.failure()),
        }
    }

    fn explain(&self, error: &RequestError) -> Failure {
        match error {
            RequestError::NoResponders(_) => Failure::new(
                FailureClass::Unavailable,
                format!("the bucket {} does not exist or has no leader now", self.bucket),
            ),
            other => other.failure(),
        }
    }
}

fn refused(error: &CallError) -> WriteOutcome {
    match error {
        CallError::Api(api) if api.is_conflict() => WriteOutcome::Conflict,
        CallError::Api(api) if ApiError::stored_nothing(api) => WriteOutcome::Refused(api.failure()),
        other => WriteOutcome::Unknown(other.failure()),
    }
}

/// Whether the headers say that the key was deleted or purged, by a client or by the server itself.
fn is_tombstone(headers: &[u8]) -> bool {
    String::from_utf8_lossy(headers).lines().any(|line| {
        let Some((name, value)) = line.split_once(':') else { return false };
        match name.trim() {
            "KV-Operation" => matches!(value.trim(), "DEL" | "PURGE"),
            "Nats-Marker-Reason" => true,
            _ => false,
        }
    })
}

#[async_trait]
impl Port for Ledger {
    async fn call(&self, command: Command) -> Reply {
        match command {
            Command::Read { attempt, shard } => Reply::Read { attempt, outcome: self.read(shard).await },
            Command::Write { attempt, shard, expected, record } => {
                Reply::Written { attempt, outcome: self.write(shard, expected, record).await }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn answer(payload: &[u8]) -> WriteOutcome {
        match read::<Stored>(payload) {
            Ok(Stored { seq }) => WriteOutcome::Stored(Revision(seq)),
            Err(error) => refused(&error),
        }
    }

    #[test]
    fn answers_to_a_write() {
        assert_eq!(answer(br#"{"stream":"KV_X","seq":7}"#), WriteOutcome::Stored(Revision(7)));
        // A repeat of a message id cannot happen here; it would be the same row.
        assert_eq!(
            answer(br#"{"stream":"KV_X","seq":7,"duplicate":true}"#),
            WriteOutcome::Stored(Revision(7))
        );
        for conflict in [10071, 10164] {
            let text = format!(
                r#"{{"error":{{"code":400,"err_code":{conflict},"description":"wrong last sequence: 3"}},"stream":"KV_X","seq":0}}"#
            );
            assert_eq!(answer(text.as_bytes()), WriteOutcome::Conflict);
        }
        let full = br#"{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"}}"#;
        assert!(matches!(answer(full), WriteOutcome::Refused(Failure { class: FailureClass::Full, .. })));
        let odd = br#"{"error":{"code":500,"err_code":1,"description":"?"}}"#;
        assert!(matches!(answer(odd), WriteOutcome::Unknown(_)));
    }

    #[test]
    fn tombstones_are_known() {
        assert!(is_tombstone(b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n"));
        assert!(is_tombstone(b"NATS/1.0\r\nNats-Rollup: sub\r\nKV-Operation: PURGE\r\n\r\n"));
        assert!(is_tombstone(b"NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\n\r\n"));
        assert!(!is_tombstone(b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: 4\r\n\r\n"));
        assert!(!is_tombstone(b""));
    }

    proptest! {
        #[test]
        fn hostile_answers_are_never_stored_or_refused(text in ".*") {
            prop_assume!(serde_json::from_str::<serde_json::Value>(&text).is_err());
            prop_assert!(matches!(answer(text.as_bytes()), WriteOutcome::Unknown(_)));
        }

        #[test]
        fn hostile_headers_are_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            is_tombstone(&bytes);
        }
    }
}
