//! What was parked, read from the stream itself.

use crate::error::{Error, Result};
use crate::jetstream::JetStream;

/// A row in the dead letters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetter {
    /// When the row's stream was created, as the subject spells it.
    pub created: String,
    /// The row's shard.
    pub shard: u32,
    /// The row's table, as its subject spells it.
    pub table: String,
    /// The row's sequence in its stream.
    pub seq: u64,
    /// Its bytes.
    pub payload: Vec<u8>,
    /// The headers, in which the reason is (`NATS/1.0 …`).
    pub headers: String,
}

impl DeadLetter {
    /// The counter of a generated row, found also in bytes that are no JSON any more.
    #[must_use]
    pub fn counter(&self) -> Option<u64> {
        let key = b"\"n\":";
        let at = self.payload.windows(key.len()).position(|window| window == key)? + key.len();
        let digits: Vec<u8> =
            self.payload[at..].iter().copied().take_while(u8::is_ascii_digit).take(20).collect();
        String::from_utf8(digits).ok()?.parse().ok()
    }
}

/// All dead letters of a stream of them, in their order; none if there is no such stream.
///
/// # Errors
/// When the server does not answer, or a subject is not a dead letter's.
pub fn read(js: &JetStream, stream: &str) -> Result<Vec<DeadLetter>> {
    js.read(stream)?
        .into_iter()
        .map(|stored| {
            parse(&stored.subject)
                .map(|(created, shard, table, seq)| DeadLetter {
                    created,
                    shard,
                    table,
                    seq,
                    payload: stored.payload,
                    headers: stored.headers,
                })
                .ok_or(Error::Answer { what: "a dead letter's subject", answer: stored.subject })
        })
        .collect()
}

/// `….<stream created>.<shard>.<table>.<seq>`
fn parse(subject: &str) -> Option<(String, u32, String, u64)> {
    let mut parts = subject.rsplit('.');
    let seq = parts.next()?.parse().ok()?;
    let table = parts.next()?.to_owned();
    let shard = parts.next()?.parse().ok()?;
    let created = parts.next()?.to_owned();
    Some((created, shard, table, seq))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_and_counters() {
        let (created, shard, table, seq) = parse("eu.ingest-dead.1700000000.3.t%2E1.42").unwrap();
        assert_eq!((created.as_str(), shard, table.as_str(), seq), ("1700000000", 3, "t%2E1", 42));
        assert_eq!(parse("a.b"), None);
        let letter = |payload: &[u8]| DeadLetter {
            created,
            shard,
            table,
            seq,
            payload: payload.to_vec(),
            headers: String::new(),
        };
        assert_eq!(letter(b"[{\"n\":17,\xff").counter(), Some(17));
    }
}
