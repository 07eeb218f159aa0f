//! `holdfast ledger`: what the ledger says, and a new start for a shard whose record no longer fits its stream.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};

use holdfast_core::ports::ledger::{Revision, WriteOutcome};
use holdfast_core::record::{Record, Session, Writer};
use holdfast_core::row::{Mark, Seq, ShardId};
use holdfast_core::time::Timestamp;
use holdfast_nats::ledger::Ledger;
use holdfast_nats::stream;
use serde::Serialize;

use crate::cli::LedgerCommand;
use crate::config::Config;
use crate::exit::Exit;
use crate::output;
use crate::run::connect;

#[derive(Debug, Serialize)]
struct Shown {
    shard: ShardId,
    /// None: there is no record.
    record: Option<Record>,
    /// Why the stored bytes are no record.
    #[serde(skip_serializing_if = "Option::is_none")]
    defect: Option<String>,
}

/// Shows or rebases records.
///
/// # Errors
/// What the server refused, or that nobody confirmed.
pub async fn ledger(config: &Config, command: &LedgerCommand) -> Result<(), Exit> {
    let topology = config.topology()?;
    let connection = connect(config).await?;
    let ledger = Ledger::new(connection.clone(), topology.bucket.clone(), topology.stream.clone());
    let known = |shard: u32| {
        if shard < topology.shards {
            Ok(ShardId(shard))
        } else {
            Err(Exit::usage(format!("shard {shard}: there are {} shards, from 0", topology.shards)))
        }
    };
    match command {
        LedgerCommand::Show { shard, json } => {
            let shards: Vec<_> = match shard {
                Some(shard) => vec![known(*shard)?],
                None => (0..topology.shards).map(ShardId).collect(),
            };
            let mut all = Vec::new();
            for shard in shards {
                let entry = ledger.read(shard).await.map_err(Exit::error)?;
                let entry = entry.filter(|entry| !entry.record.is_empty());
                let (record, defect) = match entry.map(|entry| Record::decode(&entry.record)) {
                    None => (None, None),
                    Some(Ok(record)) => (Some(record), None),
                    Some(Err(error)) => (None, Some(error.to_string())),
                };
                all.push(Shown { shard, record, defect });
            }
            if json.json { output::json(&all) } else { show(&all) }
        }
        LedgerCommand::Rebase { shard, to, yes } => {
            let shard = known(*shard)?;
            let now = stream::look(&connection, &topology.stream).await.map_err(Exit::error)?;
            let floor = match to.as_str() {
                "first" => Mark { seq: Seq(now.first.0.saturating_sub(1)), stored_at: Timestamp(0) },
                "new" => now.last,
                other => match other.strip_prefix("seq:").and_then(|seq| seq.parse::<u64>().ok()) {
                    Some(seq) if seq >= 1 && seq <= now.last.seq.0 + 1 => {
                        Mark { seq: Seq(seq - 1), stored_at: Timestamp(0) }
                    }
                    Some(seq) => {
                        let last = now.last.seq;
                        return Err(Exit::usage(format!("--to seq:{seq}: the stream's rows end at {last}")));
                    }
                    None => {
                        return Err(Exit::usage(format!(
                            "--to {other}: write first, new or seq:N (the first row to take)"
                        )));
                    }
                },
            };
            let entry = ledger.read(shard).await.map_err(Exit::error)?;
            let stored = entry.as_ref().and_then(|entry| Record::decode(&entry.record).ok());
            confirm(shard, stored.as_ref(), floor.seq, *yes)?;
            // Raised, so that whoever owns the shard now loses it and starts from here.
            let record = Record {
                version: Record::VERSION,
                stream_created: now.created,
                epoch: stored.map_or(1, |stored| stored.epoch + 1),
                writer: Writer { session: Session(rand::random()), nonce: 0 },
                floor: floor.seq,
                high: floor,
                lanes: BTreeMap::new(),
            };
            let expected = entry.map_or(Revision(0), |entry| entry.revision);
            match ledger.write(shard, expected, record.encode()).await {
                WriteOutcome::Stored(_) => {
                    println!("shard {shard} starts with row {} now; restart its daemon", floor.seq.next());
                    Ok(())
                }
                WriteOutcome::Conflict => Err(Exit::error(
                    "the record has changed meanwhile: stop the daemon that owns the shard, and try again",
                )),
                WriteOutcome::Unknown(failure) | WriteOutcome::Refused(failure) => Err(Exit::error(failure)),
            }
        }
    }
}

fn show(all: &[Shown]) -> Result<(), Exit> {
    let mut rows = Vec::new();
    for Shown { shard, record, defect } in all {
        let Some(record) = record else {
            let why = defect.clone().unwrap_or_else(|| "no record".into());
            rows.push([shard.to_string(), why, String::new(), String::new(), String::new()]);
            continue;
        };
        let writer = format!("epoch {} of {:?}", record.epoch, record.writer.session);
        rows.push([
            shard.to_string(),
            writer,
            format!("done up to {}", record.floor),
            String::new(),
            String::new(),
        ]);
        for (table, lane) in &record.lanes {
            let open = lane.open.as_ref().map_or(String::new(), |open| {
                let batch = &open.batch;
                let target = format!("{}.{}", open.target.database, open.target.table);
                format!("{}-{}, {} rows, into {target}", batch.first, batch.last, batch.rows)
            });
            rows.push([
                String::new(),
                String::new(),
                format!("done up to {}", lane.done),
                table.to_string(),
                open,
            ]);
        }
    }
    output::table(["SHARD", "WRITER", "ROWS", "TABLE", "OPEN BATCH"], rows)
}

fn confirm(shard: ShardId, stored: Option<&Record>, floor: Seq, yes: bool) -> Result<(), Exit> {
    let was = stored.map_or("has no record".to_owned(), |record| {
        format!("is done up to row {} of the stream created at {}", record.floor, record.stream_created.0)
    });
    eprintln!("shard {shard} {was}.");
    eprintln!(
        "Afterwards it starts with row {}: rows before that are not taken, rows after it that are in their",
        floor.next()
    );
    eprintln!("tables already are stored again.");
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        return Err(Exit::usage("nobody to ask here: say --yes"));
    }
    eprint!("Type the shard's number to go on: ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    if answer.trim() == shard.to_string() { Ok(()) } else { Err(Exit::error("left as it was")) }
}
