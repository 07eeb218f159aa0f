//! The body of an insert.

use bytes::{BufMut, Bytes, BytesMut};
use holdfast_core::row::{Row, Seq};
use holdfast_core::time::Timestamp;
use thiserror::Error;

/// How much of a body is handed to the connection at a time, in bytes.
pub const SLICE: usize = 256 << 10;

/// A row that cannot stand in a body. Screening lets none through.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("row {0} is not a JSON object")]
pub struct NotAnObject(pub Seq);

/// What is written in front of each row's own fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Splice {
    /// `"_seq":`, or nothing.
    sequence: Vec<u8>,
    /// `"_stream":456`, or nothing. The same for every row of a batch.
    stream: Vec<u8>,
}

impl Splice {
    /// Writes the row's sequence under the name `sequence` and `created` under the name `stream`, where given.
    #[must_use]
    pub fn new(sequence: Option<&str>, stream: Option<&str>, created: Timestamp) -> Self {
        Self {
            sequence: sequence.map(key).unwrap_or_default(),
            stream: stream
                .map(|name| {
                    let mut text = key(name);
                    text.extend_from_slice(created.0.to_string().as_bytes());
                    text
                })
                .unwrap_or_default(),
        }
    }

    /// The most bytes that are added to a row: both columns, the longest sequence, two commas and a line's end.
    fn most(&self) -> usize {
        self.sequence.len() + 20 + self.stream.len() + 3
    }
}

/// `"name":`, escaped as JSON is.
fn key(name: &str) -> Vec<u8> {
    let mut text = serde_json::Value::from(name).to_string().into_bytes();
    text.push(b':');
    text
}

/// The whole body: a line for each row, the row's payload with `splice` in front of its own fields.
///
/// Each payload is copied once, into one allocation of the right size.
///
/// # Errors
/// [`NotAnObject`] if a payload does not begin with `{`: it must not be sent, for ClickHouse would take an empty
/// line for no row and an array for several.
pub fn build(rows: &[Row], splice: &Splice) -> Result<Bytes, NotAnObject> {
    let size = rows.iter().map(|row| row.payload.len() + splice.most()).sum();
    let mut body = BytesMut::with_capacity(size);
    let mut digits = Digits::default();
    for row in rows {
        let payload = &row.payload[..];
        let open = payload.iter().position(|&byte| !is_space(byte)).filter(|&at| payload[at] == b'{');
        let Some(open) = open else { return Err(NotAnObject(row.seq)) };
        let rest = &payload[open + 1..];
        body.put_u8(b'{');
        if !splice.sequence.is_empty() {
            body.put_slice(&splice.sequence);
            body.put_slice(digits.of(row.seq.0));
            if !splice.stream.is_empty() {
                body.put_u8(b',');
            }
        }
        body.put_slice(&splice.stream);
        let spliced = !splice.sequence.is_empty() || !splice.stream.is_empty();
        let has_fields = rest.iter().find(|&&byte| !is_space(byte)) != Some(&b'}');
        if spliced && has_fields {
            body.put_u8(b',');
        }
        body.put_slice(rest);
        body.put_u8(b'\n');
    }
    debug_assert!(body.len() <= size, "the size was reckoned too small");
    Ok(body.freeze())
}

/// The body in slices of [`SLICE`] bytes. They share its memory.
pub fn slices(body: &Bytes) -> impl Iterator<Item = Bytes> + '_ {
    (0..body.len()).step_by(SLICE).map(|at| body.slice(at..body.len().min(at + SLICE)))
}

const fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

/// A sequence in decimal, without an allocation.
#[derive(Default)]
struct Digits {
    buffer: [u8; 20],
}

impl Digits {
    fn of(&mut self, mut value: u64) -> &[u8] {
        let mut at = self.buffer.len();
        loop {
            at -= 1;
            // Less than ten always fits.
            self.buffer[at] = b'0' + u8::try_from(value % 10).unwrap_or_default();
            value /= 10;
            if value == 0 {
                return &self.buffer[at..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use holdfast_core::row::{Delivery, TableName, Verdict};
    use proptest::prelude::*;

    use super::*;

    fn row(seq: u64, payload: &str) -> Row {
        Row {
            seq: Seq(seq),
            delivery: Delivery(1),
            redelivered: false,
            stored_at: Timestamp(0),
            table: TableName::new("t"),
            payload: Bytes::copy_from_slice(payload.as_bytes()),
            verdict: Verdict::Good,
        }
    }

    fn body(payloads: &[&str], splice: &Splice) -> String {
        let rows: Vec<Row> = payloads.iter().zip(7..).map(|(payload, seq)| row(seq, payload)).collect();
        String::from_utf8(build(&rows, splice).unwrap().to_vec()).unwrap()
    }

    #[test]
    fn columns_stand_in_front_of_the_rows_own_fields() {
        let splice = Splice::new(Some("_seq"), Some("_stream"), Timestamp(456));
        assert_eq!(
            body(&[r#"{"a":1}"#, "{}", " \n{ \"a\" : 2 }\n", "{ \n}"], &splice),
            concat!(
                r#"{"_seq":7,"_stream":456,"a":1}"#,
                "\n",
                r#"{"_seq":8,"_stream":456}"#,
                "\n",
                "{\"_seq\":9,\"_stream\":456, \"a\" : 2 }\n\n",
                "{\"_seq\":10,\"_stream\":456 \n}\n",
            )
        );
    }

    #[test]
    fn one_column_or_none() {
        let rows = [r#"{"a":1}"#, "{}"];
        let only = |sequence, stream| body(&rows, &Splice::new(sequence, stream, Timestamp(-1)));
        assert_eq!(only(Some("s"), None), "{\"s\":7,\"a\":1}\n{\"s\":8}\n");
        assert_eq!(only(None, Some("c")), "{\"c\":-1,\"a\":1}\n{\"c\":-1}\n");
        assert_eq!(only(None, None), "{\"a\":1}\n{}\n");
    }

    #[test]
    fn names_are_escaped() {
        assert_eq!(
            body(&["{}"], &Splice::new(Some("a\"\\\n\u{e9}"), None, Timestamp(0))),
            "{\"a\\\"\\\\\\n\u{e9}\":7}\n"
        );
    }

    #[test]
    fn what_is_no_object_is_not_sent() {
        for payload in ["", " ", "[]", "1", "x{}"] {
            for splice in [Splice::default(), Splice::new(Some("s"), None, Timestamp(0))] {
                assert_eq!(
                    build(&[row(3, "{}"), row(9, payload)], &splice),
                    Err(NotAnObject(Seq(9))),
                    "{payload:?}"
                );
            }
        }
    }

    #[test]
    fn slices_are_the_body() {
        for len in [0, 1, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE] {
            let whole = Bytes::from(vec![b'x'; len]);
            let parts: Vec<Bytes> = slices(&whole).collect();
            assert_eq!(parts.concat(), whole);
            assert!(parts.iter().all(|part| !part.is_empty() && part.len() <= SLICE));
            assert!(
                parts.iter().all(|part| whole.as_ptr_range().contains(&part.as_ptr())),
                "shared, not copied"
            );
        }
    }

    proptest! {
        #[test]
        fn a_spliced_row_is_the_row_with_two_more_fields(
            fields in proptest::collection::btree_map("[a-z]{1,4}", any::<i32>(), 0..4),
            seq in any::<u64>(), created in any::<i64>(), name in ".{1,6}", space in "[ \n\t]{0,2}",
        ) {
            let text = serde_json::to_string(&fields).unwrap();
            let payload = format!("{space}{{{space}{}{space}", &text[1..]);
            let splice = Splice::new(Some(&name), Some("_stream"), Timestamp(created));
            let body = build(&[row(seq, &payload)], &splice).unwrap();
            let mut wanted = serde_json::json!(fields);
            wanted[&name] = seq.into();
            wanted["_stream"] = created.into();
            prop_assume!(!fields.contains_key(&name));
            prop_assert_eq!(serde_json::from_slice::<serde_json::Value>(&body).unwrap(), wanted);
        }
    }
}
