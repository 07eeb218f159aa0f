//! `holdfast verify`: is every row there, once, in order?
//!
//! Stored rows are compared by their sequence and stream columns with a receipt, or with what the stream
//! still holds. **What cannot be compared counts as unproven, never as proven.**

use std::cmp::Ordering;
use std::collections::BTreeMap;

use holdfast_clickhouse::Store;
use holdfast_core::record::Record;
use holdfast_core::row::{ShardId, TableName};
use holdfast_core::time::Timestamp;
use holdfast_nats::ledger::Ledger;
use holdfast_nats::{stream, subject};
use serde::Serialize;

use crate::cli::Verify;
use crate::config::Config;
use crate::exit::Exit;
use crate::output;
use crate::receipt;
use crate::run::connect;

/// What was found of a table.
#[derive(Debug, Default, Serialize)]
struct Verdict {
    table: String,
    level: Option<String>,
    /// Rows that should be there.
    expected: u64,
    /// Rows that are.
    stored: u64,
    /// Expected rows that were parked as dead letters.
    dead_lettered: u64,
    /// Rows of which nothing can be said.
    unproven: u64,
    /// Expected rows that are not there.
    missing: u64,
    /// Rows that are there once too often.
    repeated: u64,
    /// Rows that were inserted after a row that they come before.
    out_of_order: u64,
    ok: bool,
}

/// The rows that should be there, by their stream's creation.
struct Expected {
    rows: BTreeMap<Timestamp, Vec<u64>>,
    /// Rows of which it is not yet known whether they should be there.
    undecided: u64,
}

/// Verifies a table and prints the verdict.
///
/// # Errors
/// With code 1 if anything is wrong or unproven, once it is printed, or if it could not be compared.
pub async fn verify(config: &Config, options: &Verify) -> Result<(), Exit> {
    let clock = crate::clock::Clock::start();
    let store =
        Store::new(config.clickhouse()?, std::sync::Arc::new(move || clock.now())).map_err(Exit::usage)?;
    let table = TableName::new(options.table.as_str());
    let report = store.report(&table).await.map_err(Exit::error)?;
    let expected = match &options.receipt {
        Some(path) => {
            let rows = receipt::read(path, &options.table)?;
            if rows.is_empty() {
                return Err(Exit::error(format!("{}: the receipt is empty", path.display())));
            }
            Expected { rows, undecided: 0 }
        }
        None => still_held(config, &table).await?,
    };
    let mut verdict = Verdict {
        table: options.table.clone(),
        level: report.level.map(|level| level.to_string()),
        unproven: expected.undecided,
        ..Verdict::default()
    };
    if report.has_sequence && report.has_stream {
        compare(&store, &table, &expected, &mut verdict).await?;
        order(&store, &table, &mut verdict).await?;
    } else {
        // Without the columns no row says which one it is.
        verdict.expected = expected.rows.values().map(|rows| rows.len() as u64).sum();
        verdict.stored = store.count(&table).await.map_err(Exit::error)?;
        verdict.unproven += verdict.expected.max(verdict.stored);
    }
    verdict.ok =
        verdict.missing == 0 && verdict.repeated == 0 && verdict.out_of_order == 0 && verdict.unproven == 0;
    if options.json.json {
        output::json(&verdict)?;
    } else {
        print(&verdict)?;
    }
    if verdict.ok { Ok(()) } else { Err(Exit::findings()) }
}

fn print(verdict: &Verdict) -> Result<(), Exit> {
    let counts = [
        ("expected", verdict.expected),
        ("stored", verdict.stored),
        ("missing", verdict.missing),
        ("repeated", verdict.repeated),
        ("out of order", verdict.out_of_order),
        ("unproven", verdict.unproven),
    ];
    let level = verdict.level.as_deref().unwrap_or("none");
    println!(
        "{} ({level}): {}",
        verdict.table.escape_debug(),
        if verdict.ok { "proven" } else { "NOT PROVEN" }
    );
    output::table(["ROWS", ""], counts.map(|(name, count)| [name.to_owned(), count.to_string()]))
}

/// What the stream still holds of a table, as far as the ledger says that it is written.
async fn still_held(config: &Config, table: &TableName) -> Result<Expected, Exit> {
    let topology = config.topology()?;
    let connection = connect(config).await?;
    let ledger = Ledger::new(connection.clone(), topology.bucket.clone(), topology.stream.clone());
    let created = stream::look(&connection, &topology.stream).await.map_err(Exit::error)?.created;
    // The record first: what it calls done cannot become undone by what is read after it.
    let mut done = BTreeMap::new();
    for shard in (0..topology.shards).map(ShardId) {
        let entry = ledger.read(shard).await.map_err(Exit::error)?;
        let Some(entry) = entry.filter(|entry| !entry.record.is_empty()) else { continue };
        let record = Record::decode(&entry.record).map_err(Exit::error)?;
        if record.stream_created == created {
            let lane = record.lanes.get(table).map_or(record.floor, |lane| lane.done.max(record.floor));
            done.insert(shard, lane);
        }
    }
    let token = subject::encode(table.as_str());
    let mut rows = Vec::new();
    let mut undecided = 0;
    for shard in (0..topology.shards).map(ShardId) {
        let filter = subject::shard_filter(&topology.prefix, shard).replace('*', &token);
        let held = stream::sequences(&connection, &topology.stream, &filter).await.map_err(Exit::error)?;
        for seq in held {
            match done.get(&shard) {
                Some(done) if seq <= *done => rows.push(seq.0),
                _ => undecided += 1,
            }
        }
    }
    rows.sort_unstable();
    Ok(Expected { rows: BTreeMap::from([(created, rows)]), undecided })
}

async fn compare(
    store: &Store,
    table: &TableName,
    expected: &Expected,
    verdict: &mut Verdict,
) -> Result<(), Exit> {
    for (created, wanted) in &expected.rows {
        verdict.expected += wanted.len() as u64;
        let mut wanted = wanted.iter().copied().peekable();
        let mut stored = store.stored(table, *created).await.map_err(Exit::error)?;
        while let Some((seq, times)) = stored.next().await.map_err(Exit::error)? {
            verdict.stored += times;
            verdict.repeated += times - 1;
            loop {
                match wanted.peek().map(|next| next.cmp(&seq)) {
                    Some(Ordering::Less) => {
                        verdict.missing += 1;
                        wanted.next();
                    }
                    Some(Ordering::Equal) => {
                        wanted.next();
                        break;
                    }
                    // Stored, and not among what it is compared with.
                    Some(Ordering::Greater) | None => {
                        verdict.unproven += 1;
                        break;
                    }
                }
            }
        }
        verdict.missing += wanted.count() as u64;
    }
    // Rows of other streams than those compared with.
    let all = store.count(table).await.map_err(Exit::error)?;
    verdict.unproven += all.saturating_sub(verdict.stored);
    verdict.stored = all;
    Ok(())
}

async fn order(store: &Store, table: &TableName, verdict: &mut Verdict) -> Result<(), Exit> {
    match store.out_of_order(table).await.map_err(Exit::error)? {
        Some(rows) => verdict.out_of_order = rows,
        // The table keeps no trace of the order in which its rows came.
        None => verdict.unproven += verdict.stored,
    }
    Ok(())
}
