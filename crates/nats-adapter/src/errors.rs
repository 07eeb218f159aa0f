//! One table from JetStream's error codes to what Holdfast makes of them.
//!
//! The codes are those of nats-server's `errors.json`; the classes are the core's.

use holdfast_core::ports::{Failure, FailureClass};
use serde::Deserialize;

/// The error part of a JetStream API answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ApiError {
    /// Like an HTTP status.
    pub code: u16,
    /// What exactly: the code of nats-server's `errors.json`.
    pub err_code: u32,
    /// The server's words.
    pub description: String,
}

/// Wrong last sequence: another revision is stored.
pub const WRONG_LAST_SEQUENCE: u32 = 10071;
/// Another message is the stream's last than the one expected.
pub const WRONG_LAST_MESSAGE_ID: u32 = 10070;
/// The same, as newer servers say it in a form that names no sequence.
pub const WRONG_LAST_SEQUENCE_CONSTANT: u32 = 10164;
/// The generic "could not store"; the words tell whether a limit is the reason.
pub const STORE_FAILED: u32 = 10077;
/// No such message.
pub const NO_MESSAGE_FOUND: u32 = 10037;
/// No such consumer.
pub const CONSUMER_NOT_FOUND: u32 = 10014;
/// No such stream.
pub const STREAM_NOT_FOUND: u32 = 10059;

/// `err_code`, its class, and why. Codes that are not here are classed by their HTTP-like code.
const TABLE: &[(u32, FailureClass, &str)] = &[
    (10002, FailureClass::Limit, "resource limits exceeded for account"),
    (10003, FailureClass::Other, "bad request"),
    (10004, FailureClass::Unavailable, "incomplete results: a part of the cluster did not answer"),
    (10005, FailureClass::Unavailable, "no suitable peers for placement"),
    (10007, FailureClass::Unavailable, "not assigned to this server (the cluster is still settling)"),
    (10008, FailureClass::Unavailable, "JetStream system temporarily unavailable"),
    (10009, FailureClass::Unavailable, "not the leader (the cluster is still settling)"),
    (CONSUMER_NOT_FOUND, FailureClass::Missing, "consumer not found"),
    (10023, FailureClass::Unavailable, "insufficient resources"),
    (10026, FailureClass::Limit, "maximum consumers limit reached"),
    (10027, FailureClass::Limit, "maximum number of streams reached"),
    (10028, FailureClass::Full, "insufficient memory"),
    (10035, FailureClass::Denied, "account not found"),
    (NO_MESSAGE_FOUND, FailureClass::Missing, "no message found"),
    (10039, FailureClass::Denied, "JetStream not enabled for the account"),
    (10043, FailureClass::Missing, "sequence not found"),
    (10047, FailureClass::Full, "insufficient storage"),
    (10054, FailureClass::Limit, "message larger than the stream takes"),
    (STREAM_NOT_FOUND, FailureClass::Missing, "stream not found"),
    (
        WRONG_LAST_MESSAGE_ID,
        FailureClass::Unavailable,
        "the row before is not the stream's last: it was lost, or somebody else publishes",
    ),
    (10076, FailureClass::Unavailable, "JetStream not enabled"),
    (10097, FailureClass::Limit, "consumer configuration over the limits of the stream or account"),
    (10110, FailureClass::Denied, "purge not permitted by the stream"),
    (10122, FailureClass::Limit, "the stream's byte limit is above the account's"),
    (10167, FailureClass::Unavailable, "too many requests"),
];

impl ApiError {
    /// Whether another revision is stored than the one expected.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        matches!(self.err_code, WRONG_LAST_SEQUENCE | WRONG_LAST_SEQUENCE_CONSTANT)
    }

    /// Whether this is certain to mean that a publish stored nothing. A failure inside the store is not:
    /// the row may be on disk although the server could not finish.
    #[must_use]
    pub fn stored_nothing(&self) -> bool {
        match self.err_code {
            STORE_FAILED => self.class() == FailureClass::Full,
            code if TABLE.iter().any(|(known, ..)| *known == code) => true,
            _ => (400..500).contains(&self.code),
        }
    }

    /// The core's class.
    #[must_use]
    pub fn class(&self) -> FailureClass {
        if self.err_code == STORE_FAILED {
            // "maximum bytes exceeded", "maximum messages exceeded", … or the disk's own words.
            let words = self.description.to_ascii_lowercase();
            let full = words.contains("maximum") || words.contains("no space left");
            return if full { FailureClass::Full } else { FailureClass::Other };
        }
        if let Some((_, class, _)) = TABLE.iter().find(|(code, ..)| *code == self.err_code) {
            return *class;
        }
        match self.code {
            401 | 403 => FailureClass::Denied,
            404 => FailureClass::Missing,
            408 | 504 => FailureClass::Unanswered,
            503 => FailureClass::Unavailable,
            _ => FailureClass::Other,
        }
    }

    /// The core's failure, in the server's words.
    #[must_use]
    pub fn failure(&self) -> Failure {
        let words = if self.description.is_empty() { "no description" } else { &self.description };
        Failure::new(self.class(), format!("{} (JetStream error {})", cut(words), self.err_code))
    }
}

/// A server's words, cut to a length that fits a log line, without control characters.
#[must_use]
pub fn cut(words: &str) -> String {
    const SHOWN: usize = 300;
    let mut text: String = words.chars().take(SHOWN).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if words.chars().nth(SHOWN).is_some() {
        text.push('…');
    }
    text
}

/// Why a request brought no usable answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// There was no connection, so it was not sent.
    #[error("not sent: no connection to the NATS server")]
    NotConnected,
    /// It cannot be sent as it is.
    #[error("not sent: {0}")]
    NotSent(String),
    /// Nobody listens on its subject.
    #[error("no responders on {0}")]
    NoResponders(String),
    /// The server does not let this user publish to its subject.
    #[error("the NATS user may not publish to {0}")]
    Denied(String),
    /// The connection broke before an answer.
    #[error("the connection to the NATS server broke before the answer")]
    Broken,
    /// No answer in time.
    #[error("no answer from {subject} within {millis} ms")]
    TimedOut {
        /// Where the request went.
        subject: String,
        /// How long was waited.
        millis: u128,
    },
}

impl RequestError {
    /// Whether it is certain that nobody received the request.
    #[must_use]
    pub const fn not_received(&self) -> bool {
        matches!(self, Self::NotConnected | Self::NotSent(_) | Self::NoResponders(_) | Self::Denied(_))
    }

    /// The core's failure.
    #[must_use]
    pub fn failure(&self) -> Failure {
        let class = match self {
            Self::NotConnected | Self::NoResponders(_) => FailureClass::Unavailable,
            Self::NotSent(_) => FailureClass::Other,
            Self::Denied(_) => FailureClass::Denied,
            Self::Broken | Self::TimedOut { .. } => FailureClass::Unanswered,
        };
        Failure::new(class, self.to_string())
    }
}

/// Why a JetStream API call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No answer.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The server refused.
    #[error("{} (JetStream error {})", cut(&.0.description), .0.err_code)]
    Api(ApiError),
    /// The answer is not what the API promises.
    #[error("an answer that cannot be read: {0}")]
    Unreadable(String),
}

impl CallError {
    /// The core's failure.
    #[must_use]
    pub fn failure(&self) -> Failure {
        match self {
            Self::Request(error) => error.failure(),
            Self::Api(error) => error.failure(),
            Self::Unreadable(_) => Failure::new(FailureClass::Other, self.to_string()),
        }
    }

    /// Whether the server answered with this `err_code`.
    #[must_use]
    pub fn is(&self, err_code: u32) -> bool {
        matches!(self, Self::Api(error) if error.err_code == err_code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: u16, err_code: u32, description: &str) -> ApiError {
        ApiError { code, err_code, description: description.into() }
    }

    #[test]
    fn codes_and_their_classes() {
        for (case, class) in [
            (error(404, 10014, "consumer not found"), FailureClass::Missing),
            (error(404, 10059, "stream not found"), FailureClass::Missing),
            (error(503, 10077, "maximum bytes exceeded"), FailureClass::Full),
            (error(503, 10077, "write: no space left on device"), FailureClass::Full),
            (error(503, 10077, "some disk error"), FailureClass::Other),
            (error(500, 10047, "insufficient storage resources available"), FailureClass::Full),
            (error(503, 10008, "JetStream system temporarily unavailable"), FailureClass::Unavailable),
            (error(503, 0, "who knows"), FailureClass::Unavailable),
            (error(403, 19999, "forbidden"), FailureClass::Denied),
            (error(418, 19999, "teapot"), FailureClass::Other),
        ] {
            assert_eq!(case.class(), class, "{case:?}");
        }
    }

    #[test]
    fn a_failure_inside_the_store_leaves_the_fate_open() {
        assert!(error(503, 10077, "maximum messages exceeded").stored_nothing());
        assert!(error(400, 19999, "expected stream does not match").stored_nothing());
        assert!(!error(503, 10077, "input/output error").stored_nothing());
        assert!(!error(500, 19999, "raft trouble").stored_nothing());
    }

    #[test]
    fn conflicts_are_told_apart() {
        assert!(error(400, 10071, "wrong last sequence: 5").is_conflict());
        assert!(error(400, 10164, "wrong last sequence").is_conflict());
        assert!(!error(400, 10070, "wrong last msg ID: x").is_conflict());
    }

    #[test]
    fn the_table_names_each_code_once() {
        let mut codes: Vec<u32> = TABLE.iter().map(|(code, ..)| *code).collect();
        codes.dedup();
        assert!(codes.is_sorted());
        assert_eq!(codes.len(), TABLE.len());
    }

    #[test]
    fn long_words_are_cut() {
        assert!(cut(&"é".repeat(5000)).len() < 700);
        assert_eq!(cut("a\nb"), "a b");
    }
}
