//! Reading the dead letters, putting them through the stream again, dropping them.
//!
//! Everything here is read with STREAM.MSG.GET, whose answer holds a message's headers as bytes in base64:
//! whatever somebody stored there, it is shown as far as it can be read.

use std::collections::BTreeMap;

use async_nats::HeaderMap;
use bytes::Bytes;
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::row::{Seq, ShardId, TableName};
use holdfast_core::time::Timestamp;
use serde::{Deserialize, Serialize};

use crate::api::{self, StreamInfo, Which};
use crate::connect::Connection;
use crate::dead_letters::{self as field, Identity, table_of, table_token};
use crate::errors::{CallError, RequestError, cut};
use crate::publish::{EXPECTED_STREAM, MESSAGE_ID};
use crate::request::{CALL_TIMEOUT, read};
use crate::topology::{Streams, Topology};
use crate::{headers, subject};

/// Letters that one page holds at most.
pub const MAX_PAGE: usize = 1_000;

/// Pages of a stream's list of subjects; the server puts up to 100,000 on one.
const SUBJECT_PAGES: usize = 1_000;

/// A letter, as far as it can be read. Words have no control characters and are cut to a sensible length.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Its place in the dead letters' stream: how it is named in commands.
    pub position: Seq,
    /// Its subject.
    pub subject: String,
    /// When it was kept, in nanoseconds since 1970.
    pub kept_at: Timestamp,
    /// The identity of the stream that it came from.
    pub created: Option<Timestamp>,
    /// Its shard.
    pub shard: Option<ShardId>,
    /// Its table; with cause `subject` the token that names none.
    pub table: Option<TableName>,
    /// Its place in the rows' stream.
    pub seq: Option<Seq>,
    /// When the rows' stream stored it, in nanoseconds since 1970.
    pub stored_at: Option<Timestamp>,
    /// Why it is a dead letter: `subject`, `payload`, `refused`, `unknown-table`.
    pub cause: Option<String>,
    /// The class of the store's refusal, else the cause.
    pub class: Option<String>,
    /// The store's error code.
    pub code: Option<u32>,
    /// The reason in words.
    pub message: Option<String>,
    /// Times it was sent to the store by the tenure that gave it up.
    pub attempts: Option<u32>,
    /// The payload's size in bytes.
    pub size: u64,
}

/// A letter with everything that it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// What it says.
    pub summary: Summary,
    /// Its headers, in order, as far as they are text.
    pub headers: Vec<(String, String)>,
    /// The bytes as published.
    pub payload: Bytes,
}

/// A part of the list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Page {
    /// The letters, in the order in which they were kept.
    pub letters: Vec<Summary>,
    /// Where to go on; none at the end.
    pub next: Option<Seq>,
}

/// A letter that is a row again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Replayed {
    /// Its place in the rows' stream.
    pub seq: Seq,
    /// An earlier replay had stored it already; nothing was stored now.
    pub repeated: bool,
    /// Why the letter is still there, if it is. Replayed again within the rows' stream's duplicate window (two
    /// minutes as `holdfast topology apply` sets it) it is stored no second time; later it is.
    pub left: Option<Failure>,
}

/// Why a letter was not replayed. It is still there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// There is no such letter.
    #[error("there is no dead letter {0}")]
    NotThere(Seq),
    /// It is not known which table it is for.
    #[error("dead letter {position} names no table ({why}); say which table it is for")]
    NoTable {
        /// The letter.
        position: Seq,
        /// Why.
        why: String,
    },
    /// The table's name is no subject.
    #[error(transparent)]
    Table(#[from] subject::TokenError),
    /// The letter could not be read.
    #[error("dead letter {position} could not be read: {failure}")]
    Unread {
        /// The letter.
        position: Seq,
        /// Why.
        failure: Failure,
    },
    /// The rows' stream did not take it.
    #[error("dead letter {position} is not replayed: {failure}")]
    Refused {
        /// The letter.
        position: Seq,
        /// Why.
        failure: Failure,
    },
    /// The rows' stream may have taken it.
    #[error(
        "dead letter {position} may or may not be in the stream again: {failure}. Replay it again within two \
         minutes: it is stored once"
    )]
    InDoubt {
        /// The letter.
        position: Seq,
        /// What happened.
        failure: Failure,
    },
}

/// The dead letters of a topology. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Letters {
    connection: Connection,
    /// The rows' streams and their publishers' prefix.
    rows: (Streams, String),
    stream: String,
    prefix: String,
}

#[derive(Deserialize)]
struct PubAck {
    #[serde(default)]
    stream: String,
    #[serde(default)]
    seq: u64,
    #[serde(default)]
    duplicate: bool,
}

#[derive(Serialize)]
struct DeleteRequest {
    seq: u64,
    /// The bytes are not overwritten on the disk: they were in the rows' stream as well.
    no_erase: bool,
}

#[derive(Deserialize)]
struct Deleted {
    #[serde(default)]
    success: bool,
}

#[derive(Serialize)]
struct SubjectsRequest<'a> {
    subjects_filter: &'a str,
    offset: usize,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Subjects {
    state: SubjectsState,
    total: usize,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct SubjectsState {
    subjects: Option<BTreeMap<String, u64>>,
}

/// Removes a message; whether it was there.
pub(crate) async fn delete(connection: &Connection, stream: &str, seq: Seq) -> Result<bool, Failure> {
    let request = DeleteRequest { seq: seq.0, no_erase: true };
    match connection.call::<Deleted>(&api::message_delete(stream), &request, CALL_TIMEOUT).await {
        Ok(Deleted { success: true }) => Ok(true),
        Ok(_) => Err(Failure::new(FailureClass::Other, "the server does not say that the message is gone")),
        // The server has several words for a message that is not there; looking is one.
        Err(error @ CallError::Api(_)) => match api::stored(connection, stream, &Which::seq(seq)).await {
            Ok(None) => Ok(false),
            _ => Err(error.failure()),
        },
        Err(error) => Err(error.failure()),
    }
}

impl Letters {
    /// `topology`'s dead letters.
    #[must_use]
    pub fn new(connection: Connection, topology: &Topology) -> Self {
        Self {
            connection,
            rows: (topology.streams(), topology.prefix.clone()),
            stream: topology.dead_letters.clone(),
            prefix: topology.dead_letter_prefix(),
        }
    }

    fn failed(&self, error: &CallError) -> Failure {
        let Failure { class, message } = error.failure();
        let hint = if class == FailureClass::Missing { "; `holdfast topology apply` creates it" } else { "" };
        Failure::new(class, format!("the dead letters' stream {}: {message}{hint}", self.stream))
    }

    /// How many letters there are.
    ///
    /// # Errors
    ///
    /// No answer, or the server's refusal: above all that there is no such stream.
    pub async fn count(&self) -> Result<u64, Failure> {
        let info = self.connection.ask::<StreamInfo>(&api::stream_info(&self.stream), CALL_TIMEOUT).await;
        info.map(|info| info.state.messages).map_err(|error| self.failed(&error))
    }

    /// Letters at or after `from`, of `table` if one is named, at most `limit` ([`MAX_PAGE`] at most, one at
    /// least). One request each. What others put into the stream is listed too, but not under a table.
    ///
    /// # Errors
    ///
    /// As [`Letters::count`].
    pub async fn list(&self, table: Option<&str>, from: Seq, limit: usize) -> Result<Page, Failure> {
        let filter = match table {
            Some(table) => format!("{}.*.*.{}.*", self.prefix, table_token(table)),
            None => format!("{}.>", self.prefix),
        };
        let mut page = Page::default();
        let mut above = Seq(from.0.saturating_sub(1));
        while page.letters.len() < limit.clamp(1, MAX_PAGE) {
            let found = api::stored(&self.connection, &self.stream, &Which::next(above, &filter)).await;
            let Some(stored) = found.map_err(|error| self.failed(&error))? else { return Ok(page) };
            above = Seq(stored.seq.max(above.0.saturating_add(1)));
            page.letters.push(self.open(&stored).map_err(|error| self.failed(&error))?.summary);
        }
        page.next = Some(above.next());
        Ok(page)
    }

    /// The letter at `position`; none if there is none.
    ///
    /// # Errors
    ///
    /// As [`Letters::count`].
    pub async fn get(&self, position: Seq) -> Result<Option<Opened>, Failure> {
        if position == Seq::ZERO {
            return Ok(None);
        }
        let stored = api::stored(&self.connection, &self.stream, &Which::seq(position)).await;
        let stored = stored.map_err(|error| self.failed(&error))?;
        stored.map(|stored| self.open(&stored)).transpose().map_err(|error| self.failed(&error))
    }

    /// Rows of `table` from the stream created at `created` that are kept as letters, rising. Asks for the list
    /// of subjects only, so it is quick.
    ///
    /// # Errors
    ///
    /// As [`Letters::count`].
    pub async fn rows(&self, created: Timestamp, table: &str) -> Result<Vec<Seq>, Failure> {
        let filter = format!("{}.{}.*.{}.*", self.prefix, created.0, table_token(table));
        let mut rows = Vec::new();
        let mut offset = 0;
        for _ in 0..SUBJECT_PAGES {
            let request = SubjectsRequest { subjects_filter: &filter, offset };
            let answer: Result<Subjects, _> =
                self.connection.call(&api::stream_info(&self.stream), &request, CALL_TIMEOUT).await;
            let Subjects { state, total } = answer.map_err(|error| self.failed(&error))?;
            let subjects = state.subjects.unwrap_or_default();
            offset += subjects.len();
            rows.extend(
                subjects.keys().filter_map(|subject| Identity::parse(&self.prefix, subject).map(|id| id.seq)),
            );
            if subjects.is_empty() || offset >= total {
                break;
            }
        }
        rows.sort_unstable();
        Ok(rows)
    }

    /// Puts the letter at `position` through the stream again, as a new row at its end, and removes the letter
    /// once that is stored; into `table` if one is named, else where it came from.
    ///
    /// A crash in between leaves the letter, never loses it. Replaying it again is safe within the stream's
    /// duplicate window: the row carries a message id made of the letter's place.
    ///
    /// # Errors
    ///
    /// See [`ReplayError`].
    pub async fn replay(&self, position: Seq, table: Option<&str>) -> Result<Replayed, ReplayError> {
        let letter = self.get(position).await.map_err(|failure| ReplayError::Unread { position, failure })?;
        let letter = letter.ok_or(ReplayError::NotThere(position))?;
        let token = match table {
            Some(table) => subject::encode_checked(table)?.into_owned(),
            None => self.token(&letter)?,
        };
        let (streams, prefix) = &self.rows;
        let mut headers = HeaderMap::new();
        // Which of several it goes to is the account's mapping's affair.
        if streams.count() == 1 {
            headers.insert(EXPECTED_STREAM, streams.name(0));
        }
        headers.insert(MESSAGE_ID, format!("holdfast-replay-{position}-{}", letter.summary.kept_at.0));
        let subject = subject::publish_subject(prefix, &token);
        let answer =
            self.connection.request(&subject, Some(headers), letter.payload.clone(), CALL_TIMEOUT).await;
        let refused = |failure| Err(ReplayError::Refused { position, failure });
        let in_doubt = |failure| Err(ReplayError::InDoubt { position, failure });
        let ack = match answer {
            Ok(message) => match read::<PubAck>(&message.payload) {
                Ok(ack) => ack,
                Err(CallError::Api(error)) if error.stored_nothing() => return refused(error.failure()),
                Err(error) => return in_doubt(error.failure()),
            },
            Err(RequestError::NoResponders(_)) => {
                return refused(Failure::new(
                    FailureClass::Unavailable,
                    format!("no stream takes {}", cut(&subject)),
                ));
            }
            Err(error) if error.not_received() => return refused(error.failure()),
            Err(error) => return in_doubt(error.failure()),
        };
        if ack.seq == 0 || streams.number(&ack.stream).is_none() {
            let words = format!("an acknowledgement of the stream {}, not of {streams}", cut(&ack.stream));
            return in_doubt(Failure::new(FailureClass::Other, words));
        }
        let left = self.drop_letter(position).await.err();
        Ok(Replayed { seq: Seq(ack.seq), repeated: ack.duplicate, left })
    }

    /// The token of the table that a letter came from.
    fn token(&self, letter: &Opened) -> Result<String, ReplayError> {
        let position = letter.summary.position;
        let no_table = |why: &str| ReplayError::NoTable { position, why: why.to_owned() };
        let Some(identity) = Identity::parse(&self.prefix, &letter.summary.subject) else {
            return Err(no_table("it was not put there by Holdfast"));
        };
        if letter.summary.cause.as_deref() == Some("subject") {
            return Err(no_table("its own subject names none"));
        }
        // The header has the whole name, the subject one that may be cut.
        let whole =
            letter.headers.iter().find(|(name, _)| name == field::TABLE).map(|(_, token)| token.as_str());
        let token = whole.unwrap_or(identity.token);
        match subject::decode(token) {
            Ok(table) => Ok(subject::encode_checked(&table)?.into_owned()),
            Err(error) => Err(no_table(&error.to_string())),
        }
    }

    /// Removes the letter at `position`; whether it was there.
    ///
    /// # Errors
    ///
    /// As [`Letters::count`]; unanswered means that it may be gone.
    pub async fn drop_letter(&self, position: Seq) -> Result<bool, Failure> {
        if position == Seq::ZERO {
            return Ok(false);
        }
        delete(&self.connection, &self.stream, position).await.map_err(|failure| {
            Failure::new(
                failure.class,
                format!("the dead letters' stream {}: {}", self.stream, failure.message),
            )
        })
    }

    fn open(&self, stored: &api::Stored) -> Result<Opened, CallError> {
        let (payload, block) = (stored.payload()?, stored.headers()?);
        let headers: Vec<_> = headers::fields(&block).collect();
        let text = |name: &str| headers::value(&block, name).filter(|value| !value.is_empty());
        let words = |name: &str| text(name).map(|value| cut(&value));
        let identity = Identity::parse(&self.prefix, &stored.subject);
        let table = match text(field::TABLE) {
            Some(token) => Some(table_of(&token)),
            None => identity.map(|identity| table_of(identity.token)),
        };
        let summary = Summary {
            position: Seq(stored.seq),
            subject: stored.subject.clone(),
            kept_at: stored.time,
            created: identity.map(|identity| identity.created),
            shard: identity.map(|identity| identity.shard),
            table,
            seq: identity.map(|identity| identity.seq),
            stored_at: text(field::TIME).and_then(|time| api::timestamp(&time)),
            cause: words(field::CAUSE),
            class: words(field::CLASS),
            code: text(field::CODE).and_then(|code| code.parse().ok()),
            message: words(field::MESSAGE),
            attempts: text(field::ATTEMPTS).and_then(|attempts| attempts.parse().ok()),
            size: payload.len() as u64,
        };
        Ok(Opened { summary, headers, payload })
    }
}
