//! Is a payload exactly one row?
//!
//! ClickHouse reads `JSONEachRow` generously: a payload can be no row at all, or many (`{..}{..}`, an array), and
//! of a key given twice the first wins or the insert fails, depending on settings. So each payload is looked at
//! on delivery, before any batch is opened: one look, no copies, always on.

use std::fmt;
use std::sync::Arc;

use holdfast_core::row::{Unfit, Verdict};
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

/// How deep objects and arrays may be nested, the row's own braces included.
pub const MAX_DEPTH: usize = 128;

/// Whether `payload` is exactly one row that ClickHouse can be asked to take.
///
/// It is when it is one JSON object and nothing else but JSON whitespace, valid UTF-8, at most `max_row` bytes
/// long and nested at most [`MAX_DEPTH`] deep, and none of the keys at its top level is one of `reserved`: the
/// columns that Holdfast fills itself. Keys are compared as they decode, so an escaped spelling is no way around,
/// and without regard to ASCII case: whether ClickHouse takes `_SEQ` for `_seq` is up to settings, and where it
/// does not, it drops the value in silence.
///
/// Numbers are not looked at beyond their grammar: the bytes reach ClickHouse unchanged, whatever their size.
/// Other keys may repeat. The reason never quotes the payload.
#[must_use]
pub fn screen(payload: &[u8], reserved: &[&str], max_row: usize) -> Verdict {
    match look(payload, reserved, max_row) {
        Ok(()) => Verdict::Good,
        Err(reason) => Verdict::Bad(Unfit::Payload(reason)),
    }
}

fn look(payload: &[u8], reserved: &[&str], max_row: usize) -> Result<(), Arc<str>> {
    if payload.len() > max_row {
        return Err(format!("{} bytes, more than the limit of {max_row} for a row", payload.len()).into());
    }
    let text = std::str::from_utf8(payload)
        .map_err(|error| format!("not valid UTF-8 after byte {}", error.valid_up_to()))?;
    match text.bytes().find(|&byte| !is_space(byte)) {
        None => return Err("empty".into()),
        Some(b'{') => {}
        // Said here and not by the parser, whose message would quote a string or a number.
        Some(_) => return Err("not a JSON object".into()),
    }
    // The parser skips values without recursion, so nothing but this bounds their depth.
    if too_deep(payload) {
        return Err(format!("nested more than {MAX_DEPTH} deep").into());
    }
    let mut json = serde_json::Deserializer::from_str(text);
    json.deserialize_map(Keys { reserved }).map_err(|error| format!("not a row: {error}"))?;
    json.end().map_err(|error| format!("more than one JSON object: {error}"))?;
    Ok(())
}

const fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

/// Counting brackets is many times faster than following strings and bounds the depth from above; only a payload
/// with many brackets is looked at closely.
fn too_deep(payload: &[u8]) -> bool {
    let opened: usize = payload
        .chunks(usize::from(u8::MAX))
        .map(|chunk| {
            // `{` and `[` differ in one bit. A byte holds the count of a chunk, which lets the loop be vectorised.
            usize::from(chunk.iter().fold(0_u8, |sum, &byte| sum.wrapping_add(u8::from(byte | 0x20 == b'{'))))
        })
        .sum();
    opened > MAX_DEPTH && depth(payload) > MAX_DEPTH
}

/// The greatest depth of `payload`, strings left out.
fn depth(payload: &[u8]) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let mut bytes = payload.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'{' | b'[' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'"' => {
                while let Some(byte) = bytes.next() {
                    match byte {
                        b'\\' => drop(bytes.next()),
                        b'"' => break,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    deepest
}

/// Walks the keys of the top level; the values are only skipped.
struct Keys<'r> {
    reserved: &'r [&'r str],
}

impl<'de> Visitor<'de> for Keys<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_key_seed(Key { reserved: self.reserved })?.is_some() {
            map.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }
}

/// Compares a key in place: borrowed from the payload, or decoded into the parser's own buffer.
struct Key<'r> {
    reserved: &'r [&'r str],
}

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: de::Error>(self, key: &str) -> Result<(), E> {
        match self.reserved.iter().find(|reserved| reserved.eq_ignore_ascii_case(key)) {
            None => Ok(()),
            Some(reserved) => {
                Err(E::custom(format_args!("it holds the column {reserved:?}, which Holdfast fills")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RESERVED: &[&str] = &["_seq", "_stream"];
    const MAX: usize = 1 << 20;

    fn good(payload: impl AsRef<[u8]>) {
        let payload = payload.as_ref();
        assert_eq!(screen(payload, RESERVED, MAX), Verdict::Good, "{}", String::from_utf8_lossy(payload));
    }

    fn bad(payload: impl AsRef<[u8]>, reason: &str) {
        let payload = payload.as_ref();
        match screen(payload, RESERVED, MAX) {
            Verdict::Bad(Unfit::Payload(why)) if why.contains(reason) => {}
            other => panic!("{}: {other:?}", String::from_utf8_lossy(payload)),
        }
    }

    #[test]
    fn one_object_is_a_row() {
        good("{}");
        good(r#"{"a":1}"#);
        good(" \t\r\n{ \"a\" : [1, {\"b\": null}] } \n\n");
        good(r#"{"a":1,"a":2}"#);
        good(r#"{"seq":1,"__seq":2,"_seq ":3,"nested":{"_seq":4}}"#);
        good(r#"{"a":"}{","b":"\"","c":"\\"}"#);
        good("{\"\u{e9}\":\"\u{1F980}\",\"b\":\"\\ud83e\\udd80\"}");
    }

    #[test]
    fn anything_else_is_none() {
        bad("", "empty");
        bad(" \n", "empty");
        bad([0], "not a JSON object");
        bad("\u{feff}{}", "not a JSON object");
        for payload in ["null", "1", "\"secret\"", "[]", r#"[{"a":1}]"#, "true"] {
            bad(payload, "not a JSON object");
        }
        for payload in [r#"{"a":1}{"a":2}"#, "{},{}", "{}\n{}", "{}x", "{}\0", "{}}"] {
            bad(payload, "more than one");
        }
        for payload in
            ["{", r#"{"a"}"#, r#"{"a":}"#, r#"{"a":1,}"#, "{a:1}", "{'a':1}", r#"{"a":01}"#, r#"{"a":NaN}"#]
        {
            bad(payload, "not a row");
        }
        bad("{\"a\":\"line\nbreak\"}", "not a row");
        bad(b"{\"a\":\"\xff\"}", "not valid UTF-8 after byte 6");
        bad(b"{\"a\":\"\xed\xa0\x80\"}", "not valid UTF-8");
    }

    #[test]
    fn the_reason_quotes_nothing() {
        for payload in
            [r#""hunter2""#, r#"{"a":hunter2}"#, r#"{"hunter2" 1}"#, "[\"hunter2\"]", r#"{"a":1} hunter2"#]
        {
            let Verdict::Bad(Unfit::Payload(why)) = screen(payload.as_bytes(), RESERVED, MAX) else {
                panic!("{payload}")
            };
            assert!(!why.contains("hunter2"), "{why}");
        }
    }

    #[test]
    fn numbers_are_not_judged() {
        good(r#"{"a":1e999,"b":-1e-999,"c":100000000000000000000000000,"d":9007199254740993}"#);
        good(format!(r#"{{"a":0.{}}}"#, "9".repeat(10_000)));
    }

    #[test]
    fn columns_that_holdfast_fills_are_reserved_however_they_are_spelled() {
        for key in
            ["_seq", "_stream", "_SEQ", "_Stream", r"\u005fseq", r"_s\u0065q", r"\u005F\u0053\u0045\u0051"]
        {
            bad(format!(r#"{{"a":1,"{key}":1}}"#), "which Holdfast fills");
        }
        assert_eq!(screen(br#"{"_seq":1}"#, &[], MAX), Verdict::Good);
    }

    #[test]
    fn size_is_bounded() {
        let of = |len: usize| format!(r#"{{"a":"{}"}}"#, "x".repeat(len - 8));
        good(of(900 << 10));
        good(of(MAX));
        bad(of(MAX + 1), "1048577 bytes, more than the limit of 1048576");
        // What is wrong at the far end of a large one is seen.
        bad(format!("{}{{}}", of(900 << 10)), "more than one");
        bad(format!("[{}]", of(900 << 10)), "not a JSON object");
        bad(&of(900 << 10)[..899 << 10], "not a row");
        let mut raw = of(900 << 10).into_bytes();
        raw[900_000] = 0xff;
        bad(raw, "not valid UTF-8 after byte 900000");
        let large = of(900 << 10);
        bad(format!("{},\"\\u005fseq\":1}}", &large[..large.len() - 1]), "which Holdfast fills");
    }

    #[test]
    fn depth_is_bounded() {
        let nested = |depth: usize| format!(r#"{{"a":{}{}}}"#, "[".repeat(depth - 1), "]".repeat(depth - 1));
        good(nested(MAX_DEPTH));
        bad(nested(MAX_DEPTH + 1), "nested more than 128 deep");
        bad(nested(400_000), "nested more than 128 deep");
        bad("{\"a\":".repeat(100_000), "nested more than 128 deep");
        // Many brackets, none deep.
        good(format!(r#"{{"a":[{}[]],"b":"{}\"{{"}}"#, "[],".repeat(1_000), "[".repeat(1_000)));
    }

    proptest! {
        #[test]
        fn whatever_arrives_there_is_a_verdict(payload in any::<Vec<u8>>()) {
            let _ = screen(&payload, RESERVED, MAX);
        }

        /// The judge is a parser of its own: whatever it takes for one object is one for `serde_json`, and the
        /// other way round.
        #[test]
        fn it_agrees_with_a_full_parse(payload in r#"[ \n]?\{("(a|_seq|\\u0061)":(1|"x\}"|\[\{\}\]|null),?){0,3}\}[ x{}]?"#) {
            let parsed = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&payload);
            let one_row = parsed.is_ok_and(|object| !object.contains_key("_seq"));
            prop_assert_eq!(screen(payload.as_bytes(), RESERVED, MAX) == Verdict::Good, one_row);
        }
    }
}
