//! How a command ends: a line that says what to do, and a code that scripts can rely on.

use std::fmt;
use std::process::ExitCode;

use crate::output::shown;

/// Why a command did not do what it was asked.
#[derive(Debug)]
pub struct Exit {
    code: u8,
    message: String,
}

impl Exit {
    /// Something went wrong.
    pub const ERROR: u8 = 1;
    /// The command line or the configuration is wrong.
    pub const USAGE: u8 = 2;
    /// A shard's consumer is gone.
    pub const LOST_SHARD: u8 = 3;
    /// The longest message, in characters: it may quote a value as long as a file.
    const MESSAGE: usize = 2_000;

    /// Something went wrong while doing it: code 1.
    pub fn error(message: impl fmt::Display) -> Self {
        Self::new(Self::ERROR, message)
    }

    /// The command line or the configuration is wrong: code 2.
    pub fn usage(message: impl fmt::Display) -> Self {
        Self::new(Self::USAGE, message)
    }

    /// A shard's consumer is gone: code 3.
    pub fn lost_shard(message: impl fmt::Display) -> Self {
        Self::new(Self::LOST_SHARD, message)
    }

    /// What is quoted may be anybody's words: whatever they are, the message is one line, and only shown.
    fn new(code: u8, message: impl fmt::Display) -> Self {
        Self { code, message: shown(&message.to_string(), Self::MESSAGE) }
    }

    /// What was found is not as it should be, and has been printed already: code 1 and no further word.
    #[must_use]
    pub const fn findings() -> Self {
        Self { code: Self::ERROR, message: String::new() }
    }

    /// The code of the process.
    #[must_use]
    pub fn code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }

    /// The line for the person, if there is anything left to say.
    #[must_use]
    pub fn message(&self) -> Option<&str> {
        (!self.message.is_empty()).then_some(&*self.message)
    }
}

impl From<std::io::Error> for Exit {
    fn from(error: std::io::Error) -> Self {
        // Whoever read our output has had enough of it, and wants no word about that either.
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Self::findings();
        }
        Self::error(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_quoted_the_message_is_one_short_line() {
        for exit in [Exit::error, Exit::usage, Exit::lost_shard] {
            let said = |quoted: &str| exit(format!("`{quoted}` is no address")).message().unwrap().to_owned();
            assert_eq!(said("host"), "`host` is no address");
            assert_eq!(said("a\nb\r\u{1b}[31m\u{202e}"), r"`a\nb\r\u{1b}[31m\u{202e}` is no address");
            assert!(said(&"x".repeat(1 << 20)).chars().count() <= Exit::MESSAGE + 1);
        }
    }
}
