//! The JetStream API: subjects, and the parts of its answers that Holdfast reads.
//!
//! Every answer is read with defaults for what is missing: a server of another version is no crash.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use holdfast_core::row::Seq;
use holdfast_core::time::Timestamp;
use serde::{Deserialize, Deserializer, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::connect::Connection;
use crate::errors::{CallError, NO_MESSAGE_FOUND};
use crate::request::CALL_TIMEOUT;

pub(crate) fn stream_info(stream: &str) -> String {
    format!("$JS.API.STREAM.INFO.{stream}")
}

pub(crate) fn stream_purge(stream: &str) -> String {
    format!("$JS.API.STREAM.PURGE.{stream}")
}

pub(crate) fn message_get(stream: &str) -> String {
    format!("$JS.API.STREAM.MSG.GET.{stream}")
}

pub(crate) fn message_delete(stream: &str) -> String {
    format!("$JS.API.STREAM.MSG.DELETE.{stream}")
}

pub(crate) fn consumer_info(stream: &str, consumer: &str) -> String {
    format!("$JS.API.CONSUMER.INFO.{stream}.{consumer}")
}

pub(crate) fn consumer_next(stream: &str, consumer: &str) -> String {
    format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}")
}

pub(crate) fn consumer_reset(stream: &str, consumer: &str) -> String {
    format!("$JS.API.CONSUMER.RESET.{stream}.{consumer}")
}

pub(crate) fn consumer_unpin(stream: &str, consumer: &str) -> String {
    format!("$JS.API.CONSUMER.UNPIN.{stream}.{consumer}")
}

/// A server's time as nanoseconds since 1970.
pub(crate) fn timestamp(text: &str) -> Option<Timestamp> {
    let time = OffsetDateTime::parse(text, &Rfc3339).ok()?;
    i64::try_from(time.unix_timestamp_nanos()).ok().map(Timestamp)
}

fn deserialize_timestamp<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
    let text = String::deserialize(deserializer)?;
    // The zero time of Go ("0001-01-01T00:00:00Z") is before what nanoseconds since 1970 can say.
    if text.starts_with("0001-") {
        return Ok(Timestamp(0));
    }
    timestamp(&text).ok_or_else(|| serde::de::Error::custom("a time that is not RFC 3339"))
}

/// Go writes an empty list as `null`.
fn null_as_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct StreamState {
    pub(crate) messages: u64,
    pub(crate) first_seq: u64,
    pub(crate) last_seq: u64,
    #[serde(deserialize_with = "deserialize_timestamp")]
    pub(crate) last_ts: Timestamp,
}

#[derive(Debug, Deserialize)]
pub(crate) struct StreamInfo {
    #[serde(deserialize_with = "deserialize_timestamp")]
    pub(crate) created: Timestamp,
    pub(crate) state: StreamState,
    /// Kept whole, so that an update changes only what it means to.
    pub(crate) config: serde_json::Map<String, serde_json::Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SequenceInfo {
    pub(crate) consumer_seq: u64,
    pub(crate) stream_seq: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PriorityGroup {
    pub(crate) group: String,
    pub(crate) pinned_client_id: Option<String>,
}

/// What Holdfast needs to know of a consumer's configuration. Times in nanoseconds.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ConsumerFit {
    pub(crate) deliver_subject: Option<String>,
    pub(crate) deliver_policy: String,
    pub(crate) ack_policy: String,
    /// No bound: -1.
    pub(crate) max_ack_pending: i64,
    /// No bound: -1.
    pub(crate) max_deliver: i64,
    pub(crate) filter_subject: Option<String>,
    #[serde(deserialize_with = "null_as_default")]
    pub(crate) filter_subjects: Vec<String>,
    pub(crate) headers_only: bool,
    pub(crate) priority_policy: Option<String>,
    pub(crate) priority_timeout: u64,
    #[serde(deserialize_with = "null_as_default")]
    pub(crate) priority_groups: Vec<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ConsumerInfo {
    pub(crate) config: serde_json::Map<String, serde_json::Value>,
    #[serde(default)]
    pub(crate) delivered: SequenceInfo,
    #[serde(default)]
    pub(crate) num_pending: u64,
    #[serde(default, deserialize_with = "null_as_default")]
    pub(crate) priority_groups: Vec<PriorityGroup>,
}

impl ConsumerInfo {
    pub(crate) fn fit(&self) -> Result<ConsumerFit, CallError> {
        serde_json::from_value(serde_json::Value::Object(self.config.clone()))
            .map_err(|error| CallError::Unreadable(crate::errors::cut(&error.to_string())))
    }
}

/// Which stored message.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Which<'a> {
    /// The one with this sequence.
    Seq { seq: u64 },
    /// The last under a subject, which may have wildcards.
    Last { last_by_subj: &'a str },
    /// The first under a subject at or above this sequence.
    Next { seq: u64, next_by_subj: &'a str },
}

impl<'a> Which<'a> {
    pub(crate) const fn seq(seq: Seq) -> Self {
        Self::Seq { seq: seq.0 }
    }

    pub(crate) const fn last(subject: &'a str) -> Self {
        Self::Last { last_by_subj: subject }
    }

    /// The first under `subject` above `above`.
    pub(crate) const fn next(above: Seq, subject: &'a str) -> Self {
        Self::Next { seq: above.0.saturating_add(1), next_by_subj: subject }
    }
}

/// A stored message.
#[derive(Debug, Deserialize)]
pub(crate) struct Stored {
    #[serde(default)]
    pub(crate) subject: String,
    pub(crate) seq: u64,
    #[serde(deserialize_with = "deserialize_timestamp")]
    pub(crate) time: Timestamp,
    #[serde(default)]
    hdrs: Option<String>,
    #[serde(default)]
    data: Option<String>,
}

#[derive(Deserialize)]
struct GetAnswer {
    message: Stored,
}

fn decode(text: Option<&str>) -> Result<Bytes, CallError> {
    let Some(text) = text else { return Ok(Bytes::new()) };
    STANDARD
        .decode(text)
        .map(Bytes::from)
        .map_err(|_| CallError::Unreadable("a message that is not base64".to_owned()))
}

impl Stored {
    pub(crate) fn payload(&self) -> Result<Bytes, CallError> {
        decode(self.data.as_deref())
    }

    /// The message's headers as they stand on the wire.
    pub(crate) fn headers(&self) -> Result<Bytes, CallError> {
        decode(self.hdrs.as_deref())
    }
}

/// Reads a message from the stream's leader; none if it is not there.
pub(crate) async fn stored(
    connection: &Connection,
    stream: &str,
    which: &Which<'_>,
) -> Result<Option<Stored>, CallError> {
    match connection.call::<GetAnswer>(&message_get(stream), which, CALL_TIMEOUT).await {
        Ok(answer) => Ok(Some(answer.message)),
        Err(error) if error.is(NO_MESSAGE_FOUND) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::request::read;

    #[test]
    fn times_keep_their_nanoseconds() {
        assert_eq!(timestamp("2023-11-14T22:13:20.123456789Z"), Some(Timestamp(1_700_000_000_123_456_789)));
        assert_eq!(timestamp("2023-11-14T23:13:20+01:00"), Some(Timestamp(1_700_000_000_000_000_000)));
        assert_eq!(timestamp("yesterday"), None);
    }

    #[test]
    fn answers_with_holes_are_read() {
        let info: StreamInfo = read(
            br#"{"created":"2023-11-14T22:13:20Z","config":{},"state":{"messages":0,"last_ts":"0001-01-01T00:00:00Z"}}"#,
        )
        .unwrap();
        assert_eq!(info.state.last_ts, Timestamp(0));
        let info: ConsumerInfo =
            read(br#"{"config":{"priority_groups":null,"ack_policy":"none"},"priority_groups":null}"#)
                .unwrap();
        assert_eq!(info.fit().unwrap().ack_policy, "none");
        let error = read::<ConsumerInfo>(br#"{"error":{"code":404,"err_code":10014,"description":"no"}}"#);
        assert!(error.unwrap_err().is(crate::errors::CONSUMER_NOT_FOUND));
    }

    proptest! {
        #[test]
        fn hostile_answers_are_errors(bytes in prop::collection::vec(any::<u8>(), 0..200), text in ".*") {
            let _ = read::<StreamInfo>(&bytes);
            let _ = read::<ConsumerInfo>(text.as_bytes());
            let _ = timestamp(&text);
        }
    }
}
