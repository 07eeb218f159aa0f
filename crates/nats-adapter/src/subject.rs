//! Table names in subjects: any name is exactly one subject token, and back.
//!
//! Publishers send to `<prefix>.<table>`; the stream's subject transform stores the row under
//! `<prefix>.<shard>.<table>`. A table's name is percent-encoded so that it is one token whatever it holds:
//!
//! - encoded as `%XX` (upper-case hexadecimal, byte by byte of the UTF-8 form): `%`, `.`, `*`, `>`, space,
//!   control characters and everything outside ASCII;
//! - everything else stands for itself, case included;
//! - the empty name is the single token `%`, which no other name encodes to.
//!
//! **Only this one spelling of a name is accepted.** NATS chooses the shard by a hash of the token, so two
//! spellings of one table could land in two shards, and the table would have two writers. A token that
//! decodes, but is not spelled this way, is therefore refused with the right spelling in the message.

use std::borrow::Cow;

use holdfast_core::row::{ShardId, TableName};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

/// What is encoded beside everything outside ASCII.
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'.').add(b'*').add(b'>');

/// The token of the empty name.
const EMPTY: &str = "%";

/// The longest token that [`encode_checked`] lets through, in bytes. A subject must fit into a server's
/// control line (4,096 bytes unless configured) together with the reply subject of an acknowledgement.
pub const MAX_TOKEN: usize = 1024;

/// Why a token names no table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// A `%` that two hexadecimal digits do not follow.
    #[error("the table's token has a % without two hexadecimal digits after it")]
    Malformed,
    /// The decoded bytes are no text.
    #[error("the table's token does not decode to UTF-8")]
    NotUtf8,
    /// Another spelling of a name that has exactly one.
    #[error("the table's token is not spelled as Holdfast spells it; publish to {expected}")]
    NotCanonical {
        /// The right spelling.
        expected: String,
    },
    /// The encoded name is longer than [`MAX_TOKEN`].
    #[error("the table's name takes {0} bytes in a subject, more than {MAX_TOKEN}")]
    TooLong(usize),
}

/// A table's name as one subject token.
#[must_use]
pub fn encode(table: &str) -> Cow<'_, str> {
    if table.is_empty() { Cow::Borrowed(EMPTY) } else { utf8_percent_encode(table, ENCODED).into() }
}

/// [`encode`], refusing names whose token is longer than [`MAX_TOKEN`].
///
/// # Errors
///
/// [`TokenError::TooLong`].
pub fn encode_checked(table: &str) -> Result<Cow<'_, str>, TokenError> {
    let token = encode(table);
    if token.len() > MAX_TOKEN { Err(TokenError::TooLong(token.len())) } else { Ok(token) }
}

/// The name that a token stands for.
///
/// # Errors
///
/// Any token that [`encode`] does not give: malformed, not UTF-8, or another spelling of a name.
pub fn decode(token: &str) -> Result<Cow<'_, str>, TokenError> {
    if token == EMPTY {
        return Ok(Cow::Borrowed(""));
    }
    let bytes = token.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'%' {
            let digits = bytes.get(at + 1..at + 3).ok_or(TokenError::Malformed)?;
            if !digits.iter().all(u8::is_ascii_hexdigit) {
                return Err(TokenError::Malformed);
            }
            at += 3;
        } else {
            at += 1;
        }
    }
    let name = percent_decode_str(token).decode_utf8().map_err(|_| TokenError::NotUtf8)?;
    let expected = encode(&name);
    if expected == token { Ok(name) } else { Err(TokenError::NotCanonical { expected: shown(&expected) }) }
}

/// A token cut to a length that fits a message. Tokens are ASCII once encoded.
fn shown(token: &str) -> String {
    const SHOWN: usize = 200;
    match token.get(..SHOWN) {
        Some(head) if token.len() > SHOWN => format!("{head}…"),
        _ => token.to_owned(),
    }
}

/// `<prefix>.<table>`: where a row is published.
#[must_use]
pub fn publish_subject(prefix: &str, token: &str) -> String {
    format!("{prefix}.{token}")
}

/// `<prefix>.<shard>.*`: every row of a shard, as its consumer filters.
#[must_use]
pub fn shard_filter(prefix: &str, shard: ShardId) -> String {
    format!("{prefix}.{shard}.*")
}

/// Splits `<prefix>.<shard>.<table>` into shard and table token. The prefix may hold dots.
#[must_use]
pub fn split<'a>(prefix: &str, subject: &'a str) -> Option<(ShardId, &'a str)> {
    let rest = subject.strip_prefix(prefix)?.strip_prefix('.')?;
    let (shard, token) = rest.split_once('.')?;
    if token.is_empty() || token.contains('.') || shard.is_empty() {
        return None;
    }
    // `str::parse` would take a sign and leading zeros, which no subject transform writes.
    if !shard.bytes().all(|b| b.is_ascii_digit()) || (shard.len() > 1 && shard.starts_with('0')) {
        return None;
    }
    Some((ShardId(shard.parse().ok()?), token))
}

/// The table of a token, or the token itself and why it names none.
///
/// # Errors
///
/// See [`decode`]; the name beside the reason is the token as it came.
pub fn table_of(token: &str) -> Result<TableName, (TableName, TokenError)> {
    match decode(token) {
        Ok(name) => Ok(TableName::new(name.as_ref())),
        Err(error) => Err((TableName::new(token), error)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_and_their_tokens() {
        for (name, token) in [
            ("clicks", "clicks"),
            ("Web-Clicks_2", "Web-Clicks_2"),
            ("web.clicks", "web%2Eclicks"),
            ("two words", "two%20words"),
            ("a*b>c", "a%2Ab%3Ec"),
            ("100%", "100%25"),
            ("%", "%25"),
            ("naïve", "na%C3%AFve"),
            ("表", "%E8%A1%A8"),
            ("tab\tnew\n", "tab%09new%0A"),
            ("\u{7f}", "%7F"),
            ("$JS.API", "$JS%2EAPI"),
            ("", "%"),
        ] {
            assert_eq!(encode(name), token);
            assert_eq!(decode(token).as_deref(), Ok(name));
        }
    }

    #[test]
    fn other_spellings_are_refused_with_the_right_one() {
        for (token, expected) in
            [("a%2eb", "a%2Eb"), ("%61", "a"), ("naïve", "na%C3%AFve"), ("a%2Db", "a-b"), ("", "%")]
        {
            assert_eq!(decode(token), Err(TokenError::NotCanonical { expected: expected.into() }));
        }
    }

    #[test]
    fn malformed_tokens_are_refused() {
        for token in ["%4", "%%", "a%", "%zz", "%+1", "%é"] {
            assert_eq!(decode(token), Err(TokenError::Malformed), "{token}");
        }
        assert_eq!(decode("%FF"), Err(TokenError::NotUtf8));
        assert_eq!(encode_checked(&".".repeat(400)), Err(TokenError::TooLong(1200)));
    }

    #[test]
    fn subjects_split_into_shard_and_token() {
        assert_eq!(split("ingest", "ingest.3.clicks"), Some((ShardId(3), "clicks")));
        assert_eq!(split("eu.ingest", "eu.ingest.12.a%2Eb"), Some((ShardId(12), "a%2Eb")));
        for subject in [
            "ingest",
            "ingest.",
            "ingest.3",
            "ingest.3.",
            "ingest..a",
            "ingest.x.a",
            "ingest.3.a.b",
            "ingestx.3.a",
            "ingest.+3.a",
            "ingest.03.a",
            "ingest.99999999999.a",
            "other.3.a",
        ] {
            assert_eq!(split("ingest", subject), None, "{subject}");
        }
    }

    proptest! {
        #[test]
        fn every_name_survives(name in any::<String>()) {
            let token = encode(&name).into_owned();
            prop_assert!(!token.is_empty());
            prop_assert!(token.bytes().all(|b| b.is_ascii_graphic() && !b".*>".contains(&b)));
            let decoded = decode(&token);
            prop_assert_eq!(decoded.as_deref(), Ok(name.as_str()));
        }

        #[test]
        fn every_token_has_an_answer(token in ".*") {
            // One spelling a name: what decodes encodes to the same token.
            if let Ok(name) = decode(&token) {
                prop_assert_eq!(encode(&name), token.as_str());
            }
        }

        #[test]
        fn every_subject_has_an_answer(prefix in "[a-z.]{0,6}", subject in ".*") {
            let _ = split(&prefix, &subject);
        }

        #[test]
        fn rows_find_their_shard_and_table(prefix in "[a-z]{1,4}(\\.[a-z]{1,4}){0,2}", shard: u32, name in any::<String>()) {
            let token = encode(&name).into_owned();
            let subject = format!("{prefix}.{shard}.{token}");
            prop_assert_eq!(split(&prefix, &subject), Some((ShardId(shard), token.as_str())));
        }
    }
}
