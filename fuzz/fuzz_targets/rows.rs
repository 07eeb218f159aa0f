//! Payloads: what passes is one JSON object, as another reader has it, without the columns that Holdfast fills.
#![no_main]

use holdfast_clickhouse::screen;
use holdfast_core::row::Verdict;
use serde_json::{Map, Value};

const RESERVED: [&str; 2] = ["_seq", "_stream"];
const MAX_ROW: usize = 2_000;

libfuzzer_sys::fuzz_target!(|payload: &[u8]| {
    let passes = match screen(payload, &RESERVED, MAX_ROW) {
        Verdict::Good => true,
        Verdict::Bad(why) => {
            assert!(format!("{why:?}").len() < 400, "{why:?}");
            false
        }
    };
    let object = serde_json::from_slice::<Map<String, Value>>(payload);
    if passes {
        assert!(payload.len() <= MAX_ROW);
        match object {
            Ok(object) => assert!(!object.keys().any(|key| reserved(key)), "{object:?}"),
            // A number's range and half a character are for the table to judge: values are passed on as they are.
            // And this reader's bound of depth is one lower than ours.
            Err(error) => {
                let words = [
                    "number out of range",
                    "lone leading surrogate",
                    "unexpected end of hex escape",
                    "recursion limit exceeded",
                ];
                let error = error.to_string();
                assert!(words.iter().any(|words| error.starts_with(words)), "{error}");
            }
        }
    } else if let Ok(object) = object {
        assert!(payload.len() > MAX_ROW || object.keys().any(|key| reserved(key)), "{object:?}");
    }
});

fn reserved(key: &str) -> bool {
    RESERVED.iter().any(|reserved| reserved.eq_ignore_ascii_case(key))
}
