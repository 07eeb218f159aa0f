//! What one would write without Holdfast: async-nats's `messages()` on a plain durable, inserts one after
//! another with the same crate, explicit acks, no ledger. At least once. Benchmarks compare with it.
//!
//! `plain-loop NATS CLICKHOUSE STREAM TABLE ROWS`

use std::process::ExitCode;

use async_nats::jetstream;
use async_nats::jetstream::consumer::{AckPolicy, pull};
use clickhouse::{Client, Compression};
use futures_util::StreamExt;

/// Rows of one pull.
const PULL: usize = 5_000;
/// Rows of one insert, as many as Holdfast's batches have.
const BATCH: usize = 50_000;
/// Bytes given to the client at once.
const SLICE: usize = 256 * 1024;

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [nats, clickhouse, stream, table, rows] = arguments.as_slice() else {
        eprintln!("usage: plain-loop NATS CLICKHOUSE STREAM TABLE ROWS");
        return ExitCode::from(2);
    };
    let Ok(rows) = rows.parse() else {
        eprintln!("ROWS: a number");
        return ExitCode::from(2);
    };
    match move_rows(nats, clickhouse, stream, table, rows).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("plain-loop: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn move_rows(
    nats: &str,
    url: &str,
    stream: &str,
    table: &str,
    rows: usize,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let context = jetstream::new(async_nats::connect(nats).await?);
    let consumer = context
        .get_stream(stream)
        .await?
        .create_consumer(pull::Config {
            durable_name: Some("plain".into()),
            ack_policy: AckPolicy::Explicit,
            max_ack_pending: i64::try_from(2 * BATCH)?,
            ..pull::Config::default()
        })
        .await?;
    let mut messages = consumer.stream().max_messages_per_batch(PULL).messages().await?;
    let client = Client::default().with_url(url).with_compression(Compression::None);
    let sql = format!("INSERT INTO `{table}` FORMAT JSONEachRow");
    let mut stored = 0;
    while stored < rows {
        let wanted = BATCH.min(rows - stored);
        let mut batch = Vec::with_capacity(wanted);
        let mut body = Vec::new();
        while batch.len() < wanted {
            let message = messages.next().await.ok_or("the messages ended")??;
            body.extend_from_slice(&message.payload);
            body.push(b'\n');
            batch.push(message);
        }
        let mut insert = client
            .insert_formatted_with(sql.as_str())
            .with_setting("async_insert", "0")
            .with_setting("min_insert_block_size_rows", "10000000")
            .with_setting("min_insert_block_size_bytes", "4294967296")
            .with_setting("max_insert_block_size", "10000000");
        let body = bytes::Bytes::from(body);
        for start in (0..body.len()).step_by(SLICE) {
            insert.send(body.slice(start..body.len().min(start + SLICE))).await?;
        }
        insert.end().await?;
        for message in &batch {
            message.ack().await?;
        }
        stored += batch.len();
    }
    Ok(())
}
