//! The reply subject of a delivered row, which says everything about the delivery.
//!
//! Two forms (NATS ADR-15): `$JS.ACK.<stream>.<consumer>.<deliveries>.<seq>.<delivery>.<time>.<pending>` and,
//! with a domain and an account hash, `$JS.ACK.<domain>.<account hash>.<stream>.…`, which may carry further
//! tokens at its end that a client must ignore.

use holdfast_core::row::{Delivery, Seq};
use holdfast_core::time::Timestamp;

/// What a row's reply subject says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckSubject<'a> {
    /// Everything before the numbers, in the form that this server uses: where acknowledgements go.
    pub origin: &'a str,
    /// The stream's name.
    pub stream: &'a str,
    /// The consumer's name.
    pub consumer: &'a str,
    /// How often this row has been delivered, this time included.
    pub deliveries: u64,
    /// The row's place in the stream.
    pub seq: Seq,
    /// The number of this delivery, from 1 after a reset.
    pub delivery: Delivery,
    /// When the stream stored the row.
    pub stored_at: Timestamp,
    /// Rows of the consumer that wait behind this one.
    pub pending: u64,
}

/// Digits only: `str::parse` would take a sign.
fn number(token: &str) -> Option<u64> {
    if token.is_empty() || token.len() > 20 {
        return None;
    }
    token.bytes().try_fold(0_u64, |sum, byte| {
        if !byte.is_ascii_digit() {
            return None;
        }
        sum.checked_mul(10)?.checked_add(u64::from(byte - b'0'))
    })
}

/// The short form's [`AckSubject::origin`], for a consumer that has delivered nothing yet. Every server takes
/// acknowledgements in this form, whichever it uses itself.
#[must_use]
pub fn short_origin(stream: &str, consumer: &str) -> String {
    format!("$JS.ACK.{stream}.{consumer}")
}

/// Where the acknowledgement of one delivery goes. Time and pending count say nothing to the server.
#[must_use]
pub fn acknowledgement(origin: &str, seq: Seq, delivery: Delivery) -> String {
    format!("{origin}.1.{seq}.{}.0.0", delivery.0)
}

impl<'a> AckSubject<'a> {
    /// Reads a reply subject; none if it is not one of a delivered row. Allocates nothing.
    #[must_use]
    pub fn parse(subject: &'a str) -> Option<Self> {
        let rest = subject.strip_prefix("$JS.ACK.")?;
        // The short form has 7 tokens here, the long one 9 or more.
        let mut tokens = [""; 9];
        let mut count = 0;
        for token in rest.split('.') {
            if let Some(slot) = tokens.get_mut(count) {
                *slot = token;
            }
            count += 1;
        }
        let at = match count {
            7 => 0,
            9.. => 2,
            _ => return None,
        };
        let [stream, consumer, deliveries, seq, delivery, time, pending] = tokens[at..].first_chunk::<7>()?;
        if stream.is_empty() || consumer.is_empty() {
            return None;
        }
        let seq = number(seq)?;
        if seq == 0 {
            return None;
        }
        // The tokens are slices of `subject`, one dot between each.
        let origin: usize =
            "$JS.ACK".len() + tokens[..at + 2].iter().map(|token| 1 + token.len()).sum::<usize>();
        Some(Self {
            origin: subject.get(..origin)?,
            stream,
            consumer,
            deliveries: number(deliveries)?,
            seq: Seq(seq),
            delivery: Delivery(number(delivery)?),
            stored_at: Timestamp(i64::try_from(number(time)?).ok()?),
            pending: number(pending)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const EXPECTED: AckSubject<'static> = AckSubject {
        origin: "$JS.ACK.INGEST.holdfast-3",
        stream: "INGEST",
        consumer: "holdfast-3",
        deliveries: 1,
        seq: Seq(42),
        delivery: Delivery(7),
        stored_at: Timestamp(1_700_000_000_123_456_789),
        pending: 9,
    };

    #[test]
    fn both_forms_are_read() {
        for (domain, rest) in [
            ("", ""),
            ("hub.ACCHASH.", ""),
            ("_.ACCHASH.", ".rAnDoM"),
            ("_.ACCHASH.", ".rAnDoM.later.versions"),
        ] {
            let origin = format!("$JS.ACK.{domain}INGEST.holdfast-3");
            let subject = format!("{origin}.1.42.7.1700000000123456789.9{rest}");
            let expected = AckSubject { origin: &origin, ..EXPECTED };
            assert_eq!(AckSubject::parse(&subject), Some(expected), "{subject}");
        }
    }

    #[test]
    fn an_acknowledgement_names_its_row() {
        for origin in ["$JS.ACK.INGEST.holdfast-3", "$JS.ACK.hub.ACCHASH.INGEST.holdfast-3"] {
            let subject = acknowledgement(origin, Seq(42), Delivery(7));
            let parsed = AckSubject::parse(&subject).unwrap();
            assert_eq!((parsed.origin, parsed.seq, parsed.delivery), (origin, Seq(42), Delivery(7)));
        }
        assert_eq!(short_origin("INGEST", "holdfast-3"), EXPECTED.origin);
    }

    #[test]
    fn everything_else_is_refused() {
        for subject in [
            "",
            "$JS.ACK",
            "$JS.ACK.",
            "$JS.ACK.S.C.1.42.7.5",
            "$JS.ACK.S.C.1.42.7.5.9.10",
            "$JS.ACK.S.C.1.0.7.5.9",
            "$JS.ACK.S.C.1.+4.7.5.9",
            "$JS.ACK.S.C.1.99999999999999999999999.7.5.9",
            "$JS.ACK.S.C.1.42.7.18446744073709551615.9",
            "$JS.ACK..C.1.42.7.5.9",
            "_INBOX.a.b",
        ] {
            assert_eq!(AckSubject::parse(subject), None, "{subject}");
        }
    }

    proptest! {
        #[test]
        fn hostile_text_is_no_panic(subject in ".*") {
            let _ = AckSubject::parse(&subject);
        }

        #[test]
        fn hostile_tokens_are_no_panic(tokens in prop::collection::vec("[0-9a-z+-]{0,22}", 0..14)) {
            let _ = AckSubject::parse(&format!("$JS.ACK.{}", tokens.join(".")));
        }

        #[test]
        fn numbers_survive(deliveries: u64, seq in 1..=u64::MAX, delivery: u64, time in 0..=i64::MAX, pending: u64) {
            let subject = format!("$JS.ACK.S.C.{deliveries}.{seq}.{delivery}.{time}.{pending}");
            let parsed = AckSubject::parse(&subject).unwrap();
            prop_assert_eq!(parsed.seq, Seq(seq));
            prop_assert_eq!(parsed.delivery, Delivery(delivery));
            prop_assert_eq!(parsed.stored_at, Timestamp(time));
            prop_assert_eq!((parsed.deliveries, parsed.pending), (deliveries, pending));
        }
    }
}
