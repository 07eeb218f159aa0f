//! What ClickHouse refuses, and which row it was.

use std::time::Instant as Moment;

use holdfast_clickhouse::error::CODES;
use holdfast_clickhouse::{Class, Compression};
use holdfast_core::ports::store::{InsertOutcome, Level, Refusal};
use holdfast_core::row::Row;
use holdfast_testbed::ClickHouse;

use crate::bed::*;

/// A batch as large as they get.
const ROWS: usize = 50_000;

/// Inserts `ROWS` rows of which the one at `place`, counted from 1, is `payload`. Says how many requests it took.
async fn spoil(
    bed: &Bed,
    table: &str,
    place: usize,
    payload: &str,
    good: impl Fn(u64) -> String,
) -> InsertOutcome {
    let mut rows: Vec<Row> = (1..=ROWS as u64).map(|seq| row(seq, &good(seq))).collect();
    rows[place - 1] = row(place as u64, payload);
    bed.put(table, &format!("{table} {place} {payload}"), rows).await
}

fn wide(seq: u64) -> String {
    format!(r#"{{"n":{seq},"s":"{}","t":"{}"}}"#, seq % 200, "x".repeat(180))
}

#[track_caller]
fn refused(outcome: InsertOutcome, code: u32, row: usize) -> Refusal {
    match outcome {
        InsertOutcome::Again(refusal) => {
            let seen = (refusal.class, refusal.code, refusal.row);
            assert_eq!(seen, (Class::Data, Some(code), u32::try_from(row).ok()), "{refusal}");
            refusal
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parser_names_the_row() {
    let server = ClickHouse::start().unwrap();
    server
        .query(&format!(
            "CREATE TABLE t (_seq UInt64, _stream UInt64, n UInt64, s String, t String, nn Nullable(UInt8), \
             e Enum8('a' = 1), u UUID, d Date, at DateTime, at64 DateTime64(3), b Bool, ip4 IPv4, ip6 IPv6, \
             a Array(UInt8), m Map(String, UInt8), p Tuple(a UInt8), x Decimal(10, 2), f FixedString(4), r Float64, \
             j JSON, CONSTRAINT c CHECK n < 1000000) ENGINE = MergeTree ORDER BY _seq {WINDOW}"
        ))
        .unwrap();
    let compressed = Bed::of(&server);
    let plain = Bed::new(server.url(), |config| config.compression = Compression::None);
    let cases = [
        (25, r#"{"s":"\ud800"}"#),
        (27, r#"{"n":"word"}"#),
        (27, r#"{"nn":"word"}"#),
        (27, r#"{"n":{"a":1}}"#),
        (27, r#"{"a":["word"]}"#),
        (27, r#"{"m":[]}"#),
        (27, r#"{"p":5}"#),
        (27, r#"{"x":"word"}"#),
        (38, r#"{"d":"word"}"#),
        (41, r#"{"at":"word"}"#),
        (41, r#"{"at":"2026-13-45 99:00:00"}"#),
        (41, r#"{"at64":"word"}"#),
        (69, r#"{"x":100000000000000000000000000}"#),
        (72, r#"{"n":"-"}"#),
        (72, r#"{"r":"word"}"#),
        (117, r#"{"unknown":1}"#),
        (117, r#"{"n":1,"n":2}"#),
        (117, r#"{"j":5}"#),
        (117, r#"{"j":{"a":1,"a":2}}"#),
        (130, r#"{"a":5}"#),
        (131, r#"{"f":"too long"}"#),
        (376, r#"{"u":"word"}"#),
        (467, r#"{"b":"word"}"#),
        (469, r#"{"n":1000001}"#),
        (675, r#"{"ip4":"word"}"#),
        (676, r#"{"ip6":"word"}"#),
        (691, r#"{"e":"word"}"#),
        // What a value says does not count.
        (117, r#"{"(at row 7)\n: While executing X. ":1}"#),
        (691, r#"{"e":"b' for enum: (at row 7)\n: While executing X. (N) (version 1)"}"#),
        (27, r#"{"n":"(at row 7)"}"#),
    ];
    let places = [1, 2, 31_234, ROWS - 1, ROWS];
    for (number, (code, payload)) in cases.into_iter().enumerate() {
        let (bed, place) =
            (if number % 2 == 0 { &plain } else { &compressed }, places[number % places.len()]);
        refused(spoil(bed, "t", place, payload, wide).await, code, place);
    }
    // Spaces and lines in a payload are no rows; the first bad row counts.
    let roomy = |seq: u64| format!("\n {{ \"n\" :\n\n {seq} }}\n \n");
    refused(spoil(&plain, "t", 40_000, r#"{"n":"word"}"#, roomy).await, 27, 40_000);
    let both = |seq: u64| if seq == 44_444 { r#"{"n":"word"}"#.to_owned() } else { wide(seq) };
    refused(spoil(&compressed, "t", 22_222, r#"{"u":"word"}"#, both).await, 376, 22_222);
    assert_eq!(server.query("SELECT count() FROM t").unwrap(), "0");
    // Null where there is none becomes the default, unless a table's settings say otherwise.
    let default = spoil(&plain, "t", 9, r#"{"n":null,"s":null,"e":null,"a":null}"#, wide).await;
    assert_eq!(default, InsertOutcome::Stored);
}

/// A table, and a payload that one of its expressions cannot take. The code, and what the table is.
const EXPRESSIONS: &[(&str, u32, &str, &str)] = &[
    ("by_default", 6, ", z UInt8 DEFAULT toUInt8(s)", "ORDER BY _seq"),
    ("materialized", 6, ", y String MATERIALIZED s, z UInt8 MATERIALIZED toUInt8(y)", "ORDER BY _seq"),
    ("alias", 6, ", y String ALIAS s, z UInt8 MATERIALIZED toUInt8(y)", "ORDER BY _seq"),
    ("divided", 153, ", z UInt8 MATERIALIZED intDiv(1, NOT startsWith(s, 'word'))", "ORDER BY _seq"),
    ("partition", 6, "", "PARTITION BY toUInt8(s) % 3 ORDER BY _seq"),
    ("sorted", 6, "", "ORDER BY (_seq, toUInt8(s))"),
    ("indexed", 6, ", INDEX i toUInt8(s) TYPE minmax", "ORDER BY _seq"),
    ("constrained", 6, ", CONSTRAINT c CHECK toUInt8(s) < 250", "ORDER BY _seq"),
    ("parted", 6, ", z UInt8 MATERIALIZED toUInt8(s)", "PARTITION BY n % 3 ORDER BY _seq"),
];

#[tokio::test(flavor = "multi_thread")]
async fn an_expression_names_no_row_and_it_is_found() {
    let server = ClickHouse::start().unwrap();
    let bed = Bed::of(&server);
    for (place, (table, code, columns, rest)) in [3, 31_234, ROWS].into_iter().cycle().zip(EXPRESSIONS) {
        server
            .query(&format!(
                "CREATE TABLE {table} (_seq UInt64, _stream UInt64, n UInt64, s String, t String{columns}) \
                 ENGINE = MergeTree {rest} {WINDOW}"
            ))
            .unwrap();
        let started = Moment::now();
        let outcome = spoil(&bed, table, place, r#"{"s":"word (at row 7)","n":1}"#, wide).await;
        println!("{table}: {:?}", started.elapsed());
        refused(outcome, *code, place);
        assert_eq!(server.query(&format!("SELECT count() FROM {table}")).unwrap(), "0");
    }
    // Tables without parts take a batch or not.
    server
        .query("CREATE TABLE log (_seq UInt64, s String, z UInt8 DEFAULT toUInt8(s)) ENGINE = Log")
        .unwrap();
    let mut batch: Vec<Row> = (1..=9).map(|seq| row(seq, r#"{"s":"1"}"#)).collect();
    batch[4].payload = r#"{"s":"word"}"#.into();
    let outcome = bed.send(batch_for("log", Level::AtLeastOnce, "a", batch)).await;
    refused(outcome, 6, 5);
    // A value that is missing and must not be.
    server.query(&format!("CREATE TABLE missing (_seq UInt64, _stream UInt64, n UInt64, s String, t String) ENGINE = MergeTree ORDER BY _seq {WINDOW}")).unwrap();
    let strict = Bed::new(server.url(), |config| {
        for name in ["input_format_force_null_for_omitted_fields", "input_format_null_as_default"] {
            let value = if name.contains("force") { "1" } else { "0" };
            config.defaults.settings.insert(name.to_owned(), value.to_owned());
        }
    });
    let started = Moment::now();
    refused(spoil(&strict, "missing", 12_345, r#"{"n":1,"t":""}"#, wide).await, 53, 12_345);
    println!("missing: {:?}", started.elapsed());
    refused(spoil(&strict, "missing", 12_345, r#"{"n":1,"t":"","s":null}"#, wide).await, 117, 12_345);
}

#[tokio::test(flavor = "multi_thread")]
async fn codes_are_called_what_clickhouse_calls_them() {
    let server = ClickHouse::start().unwrap();
    for line in CODES {
        let name = server.query(&format!("SELECT errorCodeToName({})", line.code)).unwrap();
        assert_eq!(name, line.name, "{}", line.code);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_setting_that_does_not_parse_is_no_rows_fault() {
    let server = ClickHouse::start().unwrap();
    plain(&server, "t");
    for (name, value) in [
        ("max_memory_usage", "word"),
        ("max_memory_usage", "at row 7"),
        ("max_insert_threads_min_free_memory_per_thread", "word"),
        ("input_format_null_as_default", "word"),
        ("totals_auto_threshold", "word"),
        ("date_time_input_format", "word"),
        ("no_such_setting", "1"),
    ] {
        let bed = Bed::new(server.url(), |config| {
            config.defaults.settings.insert(name.to_owned(), value.to_owned());
        });
        let refusal = match bed.put("t", "a", rows(1..=3)).await {
            InsertOutcome::Again(refusal) | InsertOutcome::Doubt(refusal) => refusal,
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!((refusal.class, refusal.row), (Class::Table, None), "{name}: {refusal}");
    }
}
