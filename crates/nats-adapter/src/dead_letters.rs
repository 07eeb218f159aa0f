//! The dead letters port: rows that can never be stored, kept in a stream of their own, byte for byte.
//!
//! A letter's subject is its identity: `<prefix>-dead.<created>.<shard>.<table>.<seq>`, where `created` is when
//! the rows' stream was created (nanoseconds since 1970), `table` is spelled as in [`crate::subject`], and `seq`
//! is the row's place in the rows' stream. It is stored on condition that nothing is there under this subject
//! yet, so it is kept once, however often it is sent and however long ago the first time was.
//!
//! The payload is the row's, untouched. What is known about it stands in headers:
//!
//! | header | says |
//! | --- | --- |
//! | `Holdfast-Stream`, `Holdfast-Seq` | the rows' stream, and the row's place in it |
//! | `Holdfast-Subject` | the row's subject; control characters and everything outside ASCII percent-encoded |
//! | `Holdfast-Shard` | the shard |
//! | `Holdfast-Table` | the table, percent-encoded as in [`crate::subject`]; with cause `subject` the token as it came, encoded once more |
//! | `Holdfast-Time` | when the rows' stream stored it (RFC 3339) |
//! | `Holdfast-Cause` | `subject`, `payload`, `refused` or `unknown-table` |
//! | `Holdfast-Class` | `data` for a row that the store refused, else the cause |
//! | `Holdfast-Code`, `Holdfast-Message` | the store's error code, and the reason in words, on one line |
//! | `Holdfast-Attempts` | times the row was sent to the store by the tenure that gave it up |
//!
//! **Size.** Letter and headers must fit into the server's `max_payload` together, and a row may fill that alone.
//! If they do not fit, only `Holdfast-Time` and `Holdfast-Cause` are kept beside the payload, about 130 bytes; the
//! subject still says the rest. A row that leaves less room than that is not kept, and its table waits, until
//! `max_payload` is raised.
//!
//! [`Letters`](crate::letters::Letters) reads them, puts them through the stream again, and drops them.

use std::sync::Arc;
use std::time::Duration;

use async_nats::HeaderMap;
use async_trait::async_trait;
use holdfast_core::ports::dead_letters::{Cause, Command, Letter, ParkOutcome, Port, Reply};
use holdfast_core::ports::store::Class;
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::row::{Seq, ShardId, TableName};
use holdfast_core::time::{Instant, Timestamp};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use serde::Deserialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::api::{self, StreamInfo, Which};
use crate::connect::Connection;
use crate::errors::{CallError, RequestError, STREAM_NOT_FOUND, cut};
use crate::headers;
use crate::request::{CALL_TIMEOUT, QUICK_TIMEOUT, read};
use crate::subject::{self, MAX_TOKEN};
use crate::topology::{Streams, Topology};

/// Tells the time that the core's instants are counted in.
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

pub(crate) const STREAM: &str = "Holdfast-Stream";
pub(crate) const SEQ: &str = "Holdfast-Seq";
pub(crate) const SUBJECT: &str = "Holdfast-Subject";
pub(crate) const SHARD: &str = "Holdfast-Shard";
pub(crate) const TABLE: &str = "Holdfast-Table";
pub(crate) const TIME: &str = "Holdfast-Time";
pub(crate) const CAUSE: &str = "Holdfast-Cause";
pub(crate) const CLASS: &str = "Holdfast-Class";
pub(crate) const CODE: &str = "Holdfast-Code";
pub(crate) const MESSAGE: &str = "Holdfast-Message";
pub(crate) const ATTEMPTS: &str = "Holdfast-Attempts";
const EXPECTED: &str = "Nats-Expected-Last-Subject-Sequence";

/// What is encoded in a subject shown as a header, beside everything outside ASCII.
const UNSAFE: &AsciiSet = CONTROLS;

/// What a letter's subject says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity<'a> {
    /// The identity of the rows' stream.
    pub created: Timestamp,
    /// The row's shard.
    pub shard: ShardId,
    /// The table's token; cut if it was longer than [`MAX_TOKEN`].
    pub token: &'a str,
    /// The row's place in the rows' stream.
    pub seq: Seq,
}

impl<'a> Identity<'a> {
    /// Reads a letter's subject; none if it is not one.
    #[must_use]
    pub fn parse(prefix: &str, subject: &'a str) -> Option<Self> {
        let rest = subject.strip_prefix(prefix)?.strip_prefix('.')?;
        let mut tokens = rest.split('.');
        let (created, shard, token, seq) = (tokens.next()?, tokens.next()?, tokens.next()?, tokens.next()?);
        if tokens.next().is_some() || token.is_empty() {
            return None;
        }
        Some(Self {
            created: Timestamp(created.parse().ok()?),
            shard: ShardId(shard.parse().ok()?),
            token,
            seq: Seq(seq.parse().ok()?),
        })
    }
}

/// A table's token as letters' subjects hold it: never longer than [`MAX_TOKEN`]. A subject of any length would
/// break the server's limit on a protocol line, and with it the connection; stream, shard and sequence tell two
/// letters apart without it.
#[must_use]
pub fn table_token(table: &str) -> String {
    let token = subject::encode(table);
    if token.len() <= MAX_TOKEN {
        return token.into_owned();
    }
    // Tokens are ASCII. Not between a % and its digits.
    let mut end = MAX_TOKEN;
    if let Some(percent) = token[..end].rfind('%').filter(|percent| percent + 3 > end) {
        end = percent;
    }
    token[..end].to_owned()
}

/// A letter's subject.
#[must_use]
pub fn letter_subject(prefix: &str, created: Timestamp, shard: ShardId, table: &str, seq: Seq) -> String {
    format!("{prefix}.{}.{shard}.{}.{seq}", created.0, table_token(table))
}

/// A server's time as RFC 3339.
fn rfc3339(time: Timestamp) -> Option<String> {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(time.0)).ok()?.format(&Rfc3339).ok()
}

/// A letter's headers: all of them, or those without which it would say too little.
fn describe(stream: &str, prefix: &str, letter: &Letter, unless_there: bool, all: bool) -> HeaderMap {
    let mut map = HeaderMap::new();
    // No value holds a line break: names are encoded, the rest is cut or made of digits.
    let mut insert = |name: &'static str, value: String| {
        if !value.is_empty() {
            map.insert(name, value);
        }
    };
    if unless_there {
        insert(EXPECTED, "0".into());
    }
    insert(CAUSE, letter.cause.key().into());
    insert(TIME, rfc3339(letter.stored_at).unwrap_or_default());
    let table = subject::encode(letter.table.as_str());
    if all || table.len() > MAX_TOKEN {
        insert(TABLE, table.clone().into_owned());
    }
    if all {
        // Only a token that names no table stands in the row's subject as it is.
        let token = if letter.cause == Cause::Subject { letter.table.as_str() } else { &table };
        let subject = format!("{prefix}.{}.{token}", letter.shard);
        insert(SUBJECT, utf8_percent_encode(&subject, UNSAFE).to_string());
        insert(STREAM, stream.to_owned());
        insert(SEQ, letter.seq.to_string());
        insert(SHARD, letter.shard.to_string());
        let class = if letter.cause == Cause::Refused { Class::Data.key() } else { letter.cause.key() };
        insert(CLASS, class.into());
        insert(CODE, letter.code.map(|code| code.to_string()).unwrap_or_default());
        insert(MESSAGE, cut(letter.message.trim()));
        insert(ATTEMPTS, letter.attempts.to_string());
    }
    map
}

/// The headers' size on the wire, in bytes.
fn size(map: &HeaderMap) -> usize {
    let lines: usize = map
        .iter()
        .flat_map(|(name, values)| values.iter().map(move |value| (name, value)))
        .map(|(name, value)| AsRef::<str>::as_ref(name).len() + value.as_str().len() + ": \r\n".len())
        .sum();
    "NATS/1.0\r\n\r\n".len() + lines
}

/// The dead letters port. Cheap to clone.
#[derive(Clone)]
pub struct DeadLetters {
    connection: Connection,
    /// The rows' streams and their publishers' prefix.
    rows: (Streams, String),
    /// The letters' stream and its prefix.
    stream: String,
    prefix: String,
    clock: Clock,
    timeout: Duration,
}

impl std::fmt::Debug for DeadLetters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeadLetters").field("stream", &self.stream).finish_non_exhaustive()
    }
}

/// The answer to a stored publish.
#[derive(Deserialize)]
struct Stored {
    #[serde(default)]
    stream: String,
    seq: u64,
}

impl DeadLetters {
    /// Keeps `topology`'s dead letters; `clock` tells the time that the core's instants are counted in.
    #[must_use]
    pub fn new(connection: Connection, topology: &Topology, clock: Clock) -> Self {
        Self {
            connection,
            rows: (topology.streams(), topology.prefix.clone()),
            stream: topology.dead_letters.clone(),
            prefix: topology.dead_letter_prefix(),
            clock,
            timeout: QUICK_TIMEOUT,
        }
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Keeps `letter`, unless it is kept already (if `unless_there`); not sent after `send_by`. Trying again is
    /// safe whatever came of the last time.
    pub async fn park(&self, letter: &Letter, send_by: Instant, unless_there: bool) -> ParkOutcome {
        let subject =
            letter_subject(&self.prefix, letter.created, letter.shard, letter.table.as_str(), letter.seq);
        let Some(headers) = self.headers(letter, unless_there) else {
            return ParkOutcome::Failed(Failure::new(
                FailureClass::Limit,
                format!(
                    "the row's {} bytes leave no room for a dead letter's headers within the NATS server's \
                     max_payload of {} bytes; raise max_payload by 4096 (a reload of the server is enough)",
                    letter.payload.len(),
                    self.connection.max_payload()
                ),
            ));
        };
        // What waits in the client's queue for a reconnect would be sent long after its time.
        let patience = self.timeout.min(send_by.since((self.clock)()));
        let connected = self.connection.connected(patience).await;
        // The last look at the clock: behind it there is only the client's queue, and a connection to empty it.
        if (self.clock)() > send_by {
            return ParkOutcome::Stale;
        }
        if !connected {
            return ParkOutcome::Failed(RequestError::NotConnected.failure());
        }
        let sending = self.connection.send(subject.as_str().into(), Some(headers), letter.payload.clone());
        let answer = match tokio::time::timeout(self.timeout, sending).await {
            Ok(Ok(pending)) => pending.wait(&subject, self.timeout).await,
            Ok(Err(error)) => Err(error),
            Err(_) => {
                Err(RequestError::TimedOut { subject: cut(&subject), millis: self.timeout.as_millis() })
            }
        };
        let answer = match answer {
            Ok(message) => read::<Stored>(&message.payload),
            Err(error) => Err(CallError::Request(error)),
        };
        match answer {
            Ok(stored) if stored.seq > 0 && stored.stream == self.stream => ParkOutcome::Parked,
            Ok(stored) if stored.stream != self.stream => ParkOutcome::Failed(Failure::new(
                FailureClass::Other,
                format!("the stream {} took a dead letter, not {}", cut(&stored.stream), self.stream),
            )),
            Ok(_) => ParkOutcome::Failed(Failure::new(FailureClass::Other, "an answer without a sequence")),
            Err(CallError::Api(error)) if error.is_conflict() => self.is_kept(&subject, letter).await,
            Err(error) => ParkOutcome::Failed(self.explain(&error).await),
        }
    }

    fn headers(&self, letter: &Letter, unless_there: bool) -> Option<HeaderMap> {
        let room = self.connection.max_payload().checked_sub(letter.payload.len())?;
        let (streams, prefix) = &self.rows;
        let stream = streams.of(letter.shard);
        [true, false]
            .map(|all| describe(&stream, prefix, letter, unless_there, all))
            .into_iter()
            .find(|headers| size(headers) <= room)
    }

    /// The server says that something is there under this subject: looks that it is this very letter. It is
    /// another one if the rows' stream lost its tail and used the sequence again.
    async fn is_kept(&self, subject: &str, letter: &Letter) -> ParkOutcome {
        let failed = |words: String| ParkOutcome::Failed(Failure::new(FailureClass::Other, words));
        let stored = match api::stored(&self.connection, &self.stream, &Which::last(subject)).await {
            Ok(Some(stored)) => stored,
            Ok(None) => return failed(format!("{subject} was there and is gone; tried again")),
            Err(error) => return ParkOutcome::Failed(self.explain(&error).await),
        };
        let (payload, raw) = match (stored.payload(), stored.headers()) {
            (Ok(payload), Ok(headers)) => (payload, headers),
            (Err(error), _) | (_, Err(error)) => return ParkOutcome::Failed(error.failure()),
        };
        let time = headers::value(&raw, TIME);
        if payload == letter.payload && (time.is_none() || time == rfc3339(letter.stored_at)) {
            return ParkOutcome::Parked;
        }
        failed(format!(
            "another row is kept as dead letter {} of the stream {}, under the same subject: the rows' stream used \
             its sequence again. Replay or drop that letter; this one is tried again",
            stored.seq, self.stream
        ))
    }

    /// A failure in words that say what to do.
    async fn explain(&self, error: &CallError) -> Failure {
        let stream = &self.stream;
        let Failure { class, message } = error.failure();
        let missing = |why: &str| {
            Failure::new(
                FailureClass::Missing,
                format!("the dead letters' stream {stream} {why}; `holdfast topology apply` sets it right"),
            )
        };
        if matches!(error, CallError::Request(RequestError::NoResponders(_))) {
            // Nobody takes the subject: no stream, another stream than it should be, or no leader now.
            let info = api::stream_info(stream);
            return match self.connection.ask::<StreamInfo>(&info, CALL_TIMEOUT).await {
                Ok(_) => missing("does not take the letters' subjects"),
                Err(error) if error.is(STREAM_NOT_FOUND) => missing("does not exist"),
                Err(_) => Failure::new(class, format!("the dead letters' stream {stream}: {message}")),
            };
        }
        let hint = match class {
            FailureClass::Missing => return missing("does not exist"),
            FailureClass::Full => {
                "; `holdfast dead-letters replay` or `drop`, or a larger max_bytes, makes room"
            }
            FailureClass::Limit => "; the limits of the stream or the account are too small for this letter",
            FailureClass::Denied => "; `holdfast topology print --permissions` shows what the daemon needs",
            _ => "",
        };
        Failure::new(class, format!("the dead letters' stream {stream}: {message}{hint}"))
    }
}

#[async_trait]
impl Port for DeadLetters {
    async fn call(&self, command: Command) -> Reply {
        let Command::Park { attempt, letter, send_by, unless_there } = command;
        let outcome = self.park(&letter, send_by, unless_there).await;
        Reply::Parked { attempt, table: letter.table, outcome }
    }
}

/// The table that a token names, as far as it can be read: what [`table_token`] cut stays a token.
pub(crate) fn table_of(token: &str) -> TableName {
    subject::table_of(token).unwrap_or_else(|(token, _)| token)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;

    fn letter(table: &str, cause: Cause) -> Letter {
        Letter {
            created: Timestamp(1_700_000_000_000_000_000),
            shard: ShardId(3),
            table: TableName::new(table),
            seq: Seq(42),
            stored_at: Timestamp(1_700_000_000_123_456_789),
            payload: Bytes::from("{"),
            cause,
            code: Some(27),
            message: "  no\r\nHoldfast-Cause: forged\u{7f} ".into(),
            attempts: 2,
        }
    }

    fn get(map: &HeaderMap, name: &str) -> Option<String> {
        map.get(name).map(|value| value.as_str().to_owned())
    }

    #[test]
    fn a_subject_is_the_identity() {
        let subject = letter_subject("ingest-dead", Timestamp(5), ShardId(3), "web.clicks", Seq(42));
        assert_eq!(subject, "ingest-dead.5.3.web%2Eclicks.42");
        let identity =
            Identity { created: Timestamp(5), shard: ShardId(3), token: "web%2Eclicks", seq: Seq(42) };
        assert_eq!(Identity::parse("ingest-dead", &subject), Some(identity));
        for other in [
            "ingest-dead",
            "ingest-dead.",
            "ingest-dead.5.3.a",
            "ingest-dead.5.3.a.x",
            "x.5.3.a.4",
            "ingest-dead.5.3.a.4.b",
            "ingest-dead.5.3..4",
        ] {
            assert_eq!(Identity::parse("ingest-dead", other), None, "{other}");
        }
    }

    #[test]
    fn long_names_are_cut_between_characters() {
        for name in [
            "x".repeat(5000),
            "é".repeat(2000),
            format!("x{}", ".".repeat(2000)),
            format!("xx{}", ".".repeat(2000)),
        ] {
            let token = table_token(&name);
            assert!(token.len() <= MAX_TOKEN && token.len() > MAX_TOKEN - 3);
            assert!(subject::encode(&name).starts_with(&token));
            assert!(!token.ends_with('%') && token.rfind('%').is_none_or(|at| at + 3 <= token.len()));
        }
        assert_eq!(table_token(""), "%");
    }

    #[test]
    fn headers_are_one_line_each() {
        let map = describe("INGEST", "ingest", &letter("web.clicks", Cause::Refused), true, true);
        for (name, value) in [
            (STREAM, "INGEST"),
            (SEQ, "42"),
            (SUBJECT, "ingest.3.web%2Eclicks"),
            (SHARD, "3"),
            (TABLE, "web%2Eclicks"),
            (TIME, "2023-11-14T22:13:20.123456789Z"),
            (CAUSE, "refused"),
            (CLASS, "data"),
            (CODE, "27"),
            (MESSAGE, "no  Holdfast-Cause: forged"),
            (ATTEMPTS, "2"),
            (EXPECTED, "0"),
        ] {
            assert_eq!(get(&map, name).as_deref().map(str::trim_end), Some(value), "{name}");
        }
        // A token that names no table stands in the subject as it came.
        let map = describe("INGEST", "ingest", &letter("a%2eb\u{1}é", Cause::Subject), false, true);
        assert_eq!(get(&map, SUBJECT).unwrap(), "ingest.3.a%2eb%01%C3%A9");
        assert_eq!(get(&map, TABLE).unwrap(), "a%252eb%01%C3%A9");
        assert_eq!((get(&map, CLASS).unwrap(), get(&map, EXPECTED)), ("subject".into(), None));
        let few = describe("INGEST", "ingest", &letter("clicks", Cause::UnknownTable), true, false);
        assert!(size(&few) <= 135, "{}", size(&few));
    }

    proptest! {
        #[test]
        fn any_letter_has_safe_headers(table in any::<String>(), message in any::<String>(), time: i64) {
            for cause in [Cause::Subject, Cause::Payload] {
                let letter = Letter { message: message.as_str().into(), stored_at: Timestamp(time), ..letter(&table, cause) };
                let map = describe("INGEST", "ingest", &letter, true, true);
                let safe = |name: &str, value: &str| {
                    !value.contains(char::is_control) && (name == MESSAGE || value.is_ascii())
                };
                let all_safe = map
                    .iter()
                    .all(|(name, values)| values.iter().all(|value| safe(name.as_ref(), value.as_str())));
                prop_assert!(all_safe);
                let subject = letter_subject("ingest-dead", letter.created, letter.shard, &table, letter.seq);
                prop_assert!(subject.bytes().all(|byte| byte.is_ascii_graphic()));
                let identity = Identity::parse("ingest-dead", &subject).unwrap();
                prop_assert_eq!(identity.seq, letter.seq);
                if subject.len() < MAX_TOKEN {
                    prop_assert_eq!(table_of(identity.token), letter.table);
                }
            }
        }

        #[test]
        fn any_subject_has_an_answer(subject in ".*", token in ".*") {
            let _ = Identity::parse("ingest-dead", &subject);
            let _ = Identity::parse("", &subject);
            let _ = table_of(&token);
        }
    }
}
