//! What can go wrong with the testbed itself.

use std::io;
use std::path::PathBuf;

use crate::wait::TimedOut;

/// A result of the testbed.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, and what a person can do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A server could not be found or fetched. The text says what to do.
    #[error("{0}")]
    Fetch(String),
    /// A setting in the environment does not serve.
    #[error("{name}={value}: {why}")]
    Environment {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        why: String,
    },
    /// The user interrupted a fetch; nothing half-fetched was left.
    #[error("interrupted")]
    Interrupted,
    /// One of this workspace's own binaries could not be built.
    #[error("cargo build of {package} failed; run `{command}` to see why")]
    Build {
        /// The package.
        package: String,
        /// The command to run by hand.
        command: String,
    },
    /// A command that should succeed did not.
    #[error("{command}: {status}\n{said}")]
    Command {
        /// The command.
        command: String,
        /// How it ended.
        status: String,
        /// What it printed.
        said: String,
    },
    /// A process ended that should have gone on.
    #[error("{name} ended by itself ({ended}); the end of its log {}:\n{tail}", log.display())]
    Ended {
        /// Which process.
        name: String,
        /// How it ended.
        ended: String,
        /// Its log.
        log: PathBuf,
        /// The last lines of its log.
        tail: String,
    },
    /// Something did not happen in time.
    #[error(transparent)]
    TimedOut(#[from] TimedOut),
    /// ClickHouse refused a query.
    #[error("ClickHouse answered {status}: {text}")]
    Query {
        /// The HTTP status.
        status: u16,
        /// ClickHouse's own error code, when its text begins with one.
        code: Option<u32>,
        /// What it said, cut to a readable length.
        text: String,
    },
    /// A server answered something that is not its protocol.
    #[error("{what}: unexpected answer {answer:?}")]
    Answer {
        /// What was asked.
        what: &'static str,
        /// What came.
        answer: String,
    },
}

/// Names what was tried when an I/O operation fails.
pub(crate) trait Context<T> {
    /// Turns an [`io::Error`] into an [`Error`] that says what was tried.
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io { what: what(), source })
    }
}
