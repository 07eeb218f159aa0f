//! How fast payloads are screened and bodies built, on one core.
//!
//! `cargo run --release -p holdfast-clickhouse --example speed`

use std::hint::black_box;
use std::time::Instant;

use bytes::Bytes;
use holdfast_clickhouse::body::{Splice, build};
use holdfast_clickhouse::screen;
use holdfast_core::row::{Delivery, Row, Seq, TableName, Verdict};
use holdfast_core::time::Timestamp;

/// So many bytes of payloads, or a batch of rows if they are small.
const BYTES: usize = 32 << 20;
const ROWS: usize = 50_000;
const ROUNDS: u32 = 20;

fn payload(seq: u64, len: usize) -> String {
    let head = format!(
        r#"{{"id":{seq},"at":"2026-07-11 10:00:00","user":"user-{}","price":{}.5,"ok":true,"tags":["a","b"],"text":""#,
        seq % 1000,
        seq % 97
    );
    let fill = len.saturating_sub(head.len() + 2);
    format!("{head}{}\"}}", "x".repeat(fill))
}

#[expect(clippy::cast_precision_loss, reason = "figures for a reader")]
fn report(what: &str, rows: &[Row], mut once: impl FnMut()) {
    once();
    // The best of several rounds: whatever else runs on the machine only adds.
    let best = (0..ROUNDS)
        .map(|_| {
            let started = Instant::now();
            once();
            started.elapsed()
        })
        .min()
        .unwrap_or_default();
    let nanos = best.as_nanos() as f64;
    let bytes: usize = rows.iter().map(|row| row.payload.len()).sum();
    println!("{what:<24} {:>10.1} ns/row {:>6.2} GB/s", nanos / rows.len() as f64, bytes as f64 / nanos);
}

fn main() {
    for len in [128, 250, 1024, 900 << 10] {
        let table = TableName::new("t");
        let rows: Vec<Row> = (1..=ROWS.min(BYTES / len) as u64)
            .map(|seq| Row {
                seq: Seq(seq + 1_000_000_000),
                delivery: Delivery(seq),
                redelivered: false,
                stored_at: Timestamp(0),
                table: table.clone(),
                payload: Bytes::from(payload(seq, len)),
                verdict: Verdict::Good,
            })
            .collect();
        report(&format!("screen, {len} bytes"), &rows, || {
            for row in &rows {
                assert_eq!(black_box(screen(&row.payload, &["_seq", "_stream"], 1 << 20)), Verdict::Good);
            }
        });
        let splice = Splice::new(Some("_seq"), Some("_stream"), Timestamp(1_700_000_000_000_000_123));
        report(&format!("body, {len} bytes"), &rows, || {
            black_box(build(&rows, &splice).is_ok());
        });
    }
}
