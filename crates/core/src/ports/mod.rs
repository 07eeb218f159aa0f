//! What the core asks of the outside, and what it is told.
//!
//! A port is a pair of enums and one method. The machines' actions are port commands and their events are
//! port replies, so the machines, the driver, the simulator's models and the conformance scripts speak one
//! language and nothing is translated twice.
//!
//! **Any reply may be late, lost or come in any order**, but for what a port's own page promises.

pub mod dead_letters;
pub mod delivery;
pub mod ledger;
pub mod members;
pub mod retention;
pub mod store;

use std::fmt;

use serde::Serialize;

/// The number of a command, never used twice by one machine. A reply carries its command's number; one with
/// a number that is no longer waited for is ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt(pub u64);

/// Why a server of the stream or the ledger did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// What kind of trouble it is.
    pub class: FailureClass,
    /// The server's words, cut to a sensible length, without secrets.
    pub message: String,
}

impl Failure {
    /// A failure of `class` in the words of `message`.
    pub fn new(class: FailureClass, message: impl Into<String>) -> Self {
        Self { class, message: message.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.class, self.message)
    }
}

/// The kinds of trouble with the stream's or the ledger's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureClass {
    /// No answer in time, or a broken connection: what was asked may or may not have been done.
    Unanswered,
    /// Nobody serves this now (no responders, no leader, no quorum).
    Unavailable,
    /// The stream or bucket is full.
    Full,
    /// The account, stream or server allows no more of this kind of object.
    Limit,
    /// The user is not allowed to do this.
    Denied,
    /// The stream, consumer or bucket does not exist.
    Missing,
    /// The server does not know this request; a newer one is needed.
    TooOld,
    /// Anything else: the server's words tell.
    Other,
}

impl fmt::Display for FailureClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unanswered => "no answer",
            Self::Unavailable => "not available",
            Self::Full => "full",
            Self::Limit => "limit reached",
            Self::Denied => "not authorised",
            Self::Missing => "missing",
            Self::TooOld => "server too old",
            Self::Other => "failed",
        })
    }
}
