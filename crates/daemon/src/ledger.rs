//! `holdfast ledger`: what the ledger says, and a new start for a shard whose record no longer fits its stream.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};

use holdfast_core::ports::ledger::{Revision, WriteOutcome};
use holdfast_core::record::{LaneRecord, OpenBatch, Parked, Record, Session, Writer};
use holdfast_core::row::{Mark, Seq, ShardId};
use holdfast_core::time::Timestamp;
use holdfast_nats::ledger::Ledger;
use holdfast_nats::stream;
use serde::{Deserialize, Serialize};

use crate::assembly::connect;
use crate::cli::LedgerCommand;
use crate::config::Config;
use crate::exit::Exit;
use crate::output;

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
    let ledger = Ledger::new(connection.clone(), topology.bucket.clone(), topology.streams());
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
            let now = stream::look(&connection, &topology.streams().of(shard)).await.map_err(Exit::error)?;
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
            let stored = Remains::of(entry.as_ref().map_or(&[][..], |entry| &entry.record));
            confirm(shard, stored.as_ref(), floor.seq, *yes)?;
            let stored = stored.unwrap_or_default();
            let same = stored.stream_created == now.created || stored.stream_created == Timestamp(0);
            let record = Record {
                version: Record::VERSION,
                stream_created: now.created,
                // Raised, so that whoever owns the shard now loses it and starts from here.
                epoch: stored.epoch + 1,
                writer: Writer { session: Session(rand::random()), nonce: 0 },
                // The same sequences may be other rows from here on: another identity keeps them apart.
                rebased: if same { stored.rebased + 1 } else { 0 },
                floor: floor.seq,
                high: floor,
                lanes: BTreeMap::new(),
            };
            let expected = entry.map_or(Revision(0), |entry| entry.revision);
            match ledger.write(shard, expected, record.encode()).await {
                WriteOutcome::Stored(_) => output::line(format_args!(
                    "shard {shard} starts with row {} now; restart its daemon",
                    floor.seq.next()
                )),
                WriteOutcome::Conflict => Err(Exit::error(
                    "the record has changed meanwhile: stop the daemon that owns the shard, and try again",
                )),
                WriteOutcome::Unknown(failure) | WriteOutcome::Refused(failure) => Err(Exit::error(failure)),
            }
        }
    }
}

/// What is left of a record that a rebase goes on from, however broken it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Remains {
    stream_created: Timestamp,
    epoch: u64,
    rebased: u32,
    floor: Seq,
}

impl Remains {
    fn of(record: &[u8]) -> Option<Self> {
        serde_json::from_slice(record).ok()
    }
}

fn show(all: &[Shown]) -> Result<(), Exit> {
    let mut rows = Vec::new();
    for Shown { shard, record, defect } in all {
        let Some(record) = record else {
            let why = defect.as_deref().map_or("no record".to_owned(), |why| output::shown(why, 300));
            rows.push([shard.to_string(), String::new(), String::new(), why]);
            continue;
        };
        let mut more = format!("epoch {} of {:?}", record.epoch, record.writer.session);
        if record.version < Record::VERSION {
            let _ = write!(more, ", as version {} wrote it", record.version);
        }
        match record.rebased {
            0 => {}
            1 => more.push_str(", rebased once"),
            times => {
                let _ = write!(more, ", rebased {times} times");
            }
        }
        rows.push([shard.to_string(), String::new(), record.floor.to_string(), more]);
        rows.extend(record.lanes.iter().map(|(table, lane)| {
            [String::new(), output::shown(table.as_str(), 40), lane.done.to_string(), describe(lane)]
        }));
    }
    output::table([">SHARD", "TABLE", ">DONE UP TO", "OPEN, PARKED, SUSPECT"], rows)
}

/// What a lane has beside what is done.
fn describe(lane: &LaneRecord) -> String {
    let mut words = Vec::new();
    if let Some(OpenBatch { batch, target }) = &lane.open {
        let again =
            if batch.generation > 0 { format!(", generation {}", batch.generation) } else { String::new() };
        let into = output::shown(&format!("{}.{}", target.database, target.table), 80);
        words.push(format!(
            "batch {}-{}, {} rows{again}, into {into} ({})",
            batch.first, batch.last, batch.rows, target.level
        ));
    }
    if let Some(Parked { row, cause, code, message, .. }) = &lane.parked {
        let code = code.map_or(String::new(), |code| format!(", code {code}"));
        words.push(format!(
            "row {row} is a dead letter ({}{code}: {})",
            cause.key(),
            output::shown(message, 200)
        ));
    }
    if lane.suspect > lane.done {
        words.push(format!("rows up to {} may be stored already", lane.suspect));
    }
    words.join("; ")
}

fn confirm(shard: ShardId, stored: Option<&Remains>, floor: Seq, yes: bool) -> Result<(), Exit> {
    let was = stored.map_or("has no record that can be read".to_owned(), |record| {
        format!("is done up to row {} of the stream created at {}", record.floor, record.stream_created.0)
    });
    eprintln!("shard {shard} {was}.");
    eprintln!(
        "Afterwards it starts with row {}, as if its stream were another one: rows before that are not",
        floor.next()
    );
    eprintln!(
        "taken, and rows from there on that are in their tables already are stored again. If the stream is"
    );
    eprintln!("sound and only the ledger was lost, set topology.start instead.");
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

#[cfg(test)]
mod tests {
    use holdfast_core::batch::Batch;
    use holdfast_core::ports::dead_letters::Cause;
    use holdfast_core::ports::store::{Level, Target};

    use super::*;

    #[test]
    fn a_rebase_goes_on_from_whatever_is_left() {
        let remains =
            Remains::of(br#"{"version": 9, "stream_created": 5, "epoch": 7, "rebased": 2, "x": []}"#);
        assert_eq!(
            remains,
            Some(Remains { stream_created: Timestamp(5), epoch: 7, rebased: 2, floor: Seq(0) })
        );
        assert_eq!(Remains::of(b""), None);
        assert_eq!(Remains::of(b"\xff{"), None);
    }

    #[test]
    fn a_lane_is_told_in_words() {
        let target = Target { database: "d".into(), table: "\u{1b}t".into(), level: Level::ExactlyOnce };
        let batch = Batch { first: Seq(11), last: Seq(15), rows: 4, generation: 1 };
        let mut lane = LaneRecord {
            done: Seq(10),
            open: Some(OpenBatch { batch, target }),
            parked: None,
            suspect: Seq(20),
        };
        assert_eq!(
            describe(&lane),
            "batch 11-15, 4 rows, generation 1, into d.\\u{1b}t (exactly-once); rows up to 20 may be stored already"
        );
        lane.open = None;
        lane.suspect = Seq(0);
        let message = Parked::message("no\nnumber");
        lane.parked =
            Some(Parked { row: Seq(11), cause: Cause::Refused, code: Some(27), message, attempts: 1 });
        assert_eq!(describe(&lane), "row 11 is a dead letter (refused, code 27: no\\nnumber)");
    }
}
