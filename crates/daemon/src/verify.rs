//! `holdfast verify`: is every row there, once, in order?
//!
//! Stored rows are compared by their sequence and stream columns with a receipt, or with what the stream
//! still holds; a row that is kept as a dead letter is not missing. **What cannot be compared counts as unproven,
//! never as proven.**
//!
//! After a rebase the same sequences can be other rows of the same stream. They are stored under another identity
//! (see [`Record::identity`]), so rows are looked for under each that there was.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::path::Path;

use holdfast_clickhouse::Store;
use holdfast_core::ports::FailureClass;
use holdfast_core::record::Record;
use holdfast_core::row::{ShardId, TableName};
use holdfast_core::time::Timestamp;
use holdfast_nats::Connection;
use holdfast_nats::ledger::Ledger;
use holdfast_nats::letters::Letters;
use holdfast_nats::topology::Topology;
use holdfast_nats::{stream, subject};
use serde::Serialize;

use crate::assembly::connect;
use crate::cli::Verify;
use crate::config::Config;
use crate::exit::Exit;
use crate::output;
use crate::receipt;

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

/// The rows that should be there.
struct Expected {
    /// By their stream's creation: the sequences, rising; one that two rows had is there twice.
    rows: BTreeMap<Timestamp, Vec<u64>>,
    /// Rows of which it is not yet known whether they should be there.
    undecided: u64,
}

/// What NATS knows of a table's rows beside the stream's own.
#[derive(Default)]
struct Known {
    /// By each stream's creation: how often its shards were rebased at most.
    rebased: BTreeMap<Timestamp, u32>,
    letters: Option<Letters>,
}

/// More rebases than this are not looked through.
const MAX_IDENTITIES: u32 = 1_000;

impl Known {
    /// The identities under which rows of the stream created at `created` can be stored.
    fn identities(&self, created: Timestamp) -> impl Iterator<Item = Timestamp> + use<> {
        let rebased = self.rebased.get(&created).map_or(0, |rebased| (*rebased).min(MAX_IDENTITIES));
        (0..=i64::from(rebased)).map(move |n| Timestamp(created.0.saturating_add(n)))
    }

    /// The rows of `table` that are dead letters, rising; a row of each identity.
    async fn letters(&self, created: Timestamp, table: &TableName) -> Result<Vec<u64>, Exit> {
        let Some(letters) = &self.letters else { return Ok(Vec::new()) };
        let mut all = Vec::new();
        for identity in self.identities(created) {
            let rows = match letters.rows(identity, table.as_str()).await {
                Ok(rows) => rows,
                // Where there is no stream for them there are none.
                Err(failure) if failure.class == FailureClass::Missing => Vec::new(),
                Err(failure) => return Err(Exit::error(failure)),
            };
            all.extend(rows.into_iter().map(|seq| seq.0));
        }
        all.sort_unstable();
        Ok(all)
    }
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
    let (expected, known) = if let Some(path) = &options.receipt {
        received(config, path, options).await?
    } else {
        let connection = connect(config).await?;
        (still_held(config, &connection, &table).await?, known(config, &connection).await?)
    };
    let mut verdict = Verdict {
        table: options.table.clone(),
        level: report.level.map(|level| level.to_string()),
        unproven: expected.undecided,
        ..Verdict::default()
    };
    if report.has_sequence && report.has_stream {
        compare(&store, &table, &expected, &known, &mut verdict).await?;
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
        ("dead letters", verdict.dead_lettered),
        ("missing", verdict.missing),
        ("repeated", verdict.repeated),
        ("out of order", verdict.out_of_order),
        ("unproven", verdict.unproven),
    ];
    let level = verdict.level.as_deref().unwrap_or("none");
    output::line(format_args!(
        "{} ({level}): {}",
        verdict.table.escape_debug(),
        if verdict.ok { "proven" } else { "NOT PROVEN" }
    ))?;
    output::table(["ROWS", ""], counts.map(|(name, count)| [name.to_owned(), count.to_string()]))
}

/// What a receipt says.
async fn received(config: &Config, path: &Path, options: &Verify) -> Result<(Expected, Known), Exit> {
    let mut rows = receipt::read(path, &options.table)?;
    if rows.is_empty() {
        return Err(Exit::error(format!("{}: the receipt is empty", path.display())));
    }
    let known = match connect(config).await {
        Ok(connection) => known(config, &connection).await?,
        // A receipt is proof without NATS, too.
        Err(exit) => {
            let why = exit.message().unwrap_or_default().to_owned();
            eprintln!("holdfast: {why}; dead letters and rebases are not looked up, and count as missing");
            Known::default()
        }
    };
    for (created, rows) in &mut rows {
        // A publisher that got one acknowledgement twice sent one row.
        if known.identities(*created).count() == 1 {
            rows.dedup();
        }
    }
    Ok((Expected { rows, undecided: 0 }, known))
}

/// What the streams still hold of a table, as far as the ledger says that it is written.
async fn still_held(config: &Config, connection: &Connection, table: &TableName) -> Result<Expected, Exit> {
    let topology = config.topology()?;
    let token = subject::encode(table.as_str());
    let mut expected = Expected { rows: BTreeMap::new(), undecided: 0 };
    // The records first: what they call done cannot become undone by what is read after them.
    for Records { stream, created, shards } in records(connection, &topology).await? {
        let rows = expected.rows.entry(created).or_default();
        for (shard, record) in shards {
            let done = record.map(|record| {
                record.lanes.get(table).map_or(record.floor, |lane| lane.done.max(record.floor))
            });
            let filter = subject::shard_filter(&topology.prefix, shard).replace('*', &token);
            let held = stream::sequences(connection, &stream, &filter).await.map_err(Exit::error)?;
            for seq in held {
                match done {
                    Some(done) if seq <= done => rows.push(seq.0),
                    _ => expected.undecided += 1,
                }
            }
        }
        rows.sort_unstable();
    }
    Ok(expected)
}

/// What NATS knows of rebases and dead letters.
async fn known(config: &Config, connection: &Connection) -> Result<Known, Exit> {
    let topology = config.topology()?;
    let mut rebased = BTreeMap::new();
    for Records { created, shards, .. } in records(connection, &topology).await? {
        // A table's shard is the server's choice: the highest of all is looked through.
        let highest =
            shards.iter().filter_map(|(_, record)| record.as_ref()).map(|record| record.rebased).max();
        rebased.insert(created, highest.unwrap_or(0));
    }
    let letters = config.parking().dead_letters.then(|| Letters::new(connection.clone(), &topology));
    Ok(Known { rebased, letters })
}

/// A stream, and what the ledger says of its shards; nothing of one whose record is of an earlier stream.
struct Records {
    stream: String,
    created: Timestamp,
    shards: Vec<(ShardId, Option<Record>)>,
}

async fn records(connection: &Connection, topology: &Topology) -> Result<Vec<Records>, Exit> {
    let ledger = Ledger::new(connection.clone(), &*topology.bucket, topology.streams());
    let mut all = Vec::new();
    for (number, stream) in (0..).zip(topology.streams().names()) {
        let created = stream::look(connection, &stream).await.map_err(Exit::error)?.created;
        let mut shards = Vec::new();
        for shard in topology.shards_in(number) {
            let entry = ledger.read(shard).await.map_err(Exit::error)?;
            let entry = entry.filter(|entry| !entry.record.is_empty());
            let record = entry.map(|entry| Record::decode(&entry.record)).transpose().map_err(Exit::error)?;
            shards.push((shard, record.filter(|record| record.stream_created == created)));
        }
        all.push(Records { stream, created, shards });
    }
    Ok(all)
}

async fn compare(
    store: &Store,
    table: &TableName,
    expected: &Expected,
    known: &Known,
    verdict: &mut Verdict,
) -> Result<(), Exit> {
    for (created, wanted) in &expected.rows {
        let letters = known.letters(*created, table).await?;
        let mut judge = Judge::new(wanted, &letters, verdict);
        let mut cursors = Vec::new();
        for identity in known.identities(*created) {
            let mut rows = store.stored(table, identity).await.map_err(Exit::error)?;
            let next = rows.next().await.map_err(Exit::error)?;
            cursors.push((rows, next));
        }
        // Each cursor rises: the lowest sequence of all is the next.
        while let Some(seq) = cursors.iter().filter_map(|(_, next)| next.map(|(seq, _)| seq)).min() {
            let mut rows = 0;
            for (cursor, next) in &mut cursors {
                if let Some((at, times)) = *next
                    && at == seq
                {
                    rows += 1;
                    judge.repeated(times - 1);
                    *next = cursor.next().await.map_err(Exit::error)?;
                }
            }
            judge.stored(seq, rows);
        }
        judge.end();
    }
    // Rows of other streams than those compared with.
    let all = store.count(table).await.map_err(Exit::error)?;
    verdict.unproven += all.saturating_sub(verdict.stored);
    verdict.stored = all;
    Ok(())
}

/// Compares what is stored, as it is told of it, with what should be there.
struct Judge<'a> {
    wanted: Peekable<std::slice::Iter<'a, u64>>,
    letters: Peekable<std::slice::Iter<'a, u64>>,
    verdict: &'a mut Verdict,
}

impl<'a> Judge<'a> {
    fn new(wanted: &'a [u64], letters: &'a [u64], verdict: &'a mut Verdict) -> Self {
        verdict.expected += wanted.len() as u64;
        Self { wanted: wanted.iter().peekable(), letters: letters.iter().peekable(), verdict }
    }

    /// Rows that are there once too often.
    fn repeated(&mut self, rows: u64) {
        self.verdict.stored += rows;
        self.verdict.repeated += rows;
    }

    /// The next sequence that is stored, as so many different rows.
    fn stored(&mut self, seq: u64, rows: u64) {
        self.not_stored_below(Some(seq));
        self.verdict.stored += rows;
        let letters = take_equal(&mut self.letters, seq);
        let wanted = take_equal(&mut self.wanted, seq);
        // One row is in its table or in the dead letters.
        let both = (rows + letters).saturating_sub(wanted);
        if letters > 0 && wanted > 0 {
            self.verdict.repeated += both.min(letters);
            self.verdict.dead_lettered += letters.min(wanted.saturating_sub(rows));
        } else {
            // Stored, and not among what it is compared with.
            self.verdict.unproven += rows.saturating_sub(wanted);
        }
        self.verdict.missing += wanted.saturating_sub(rows + letters);
    }

    fn end(mut self) {
        self.not_stored_below(None);
    }

    /// No row before `limit` is stored but those that were told.
    fn not_stored_below(&mut self, limit: Option<u64>) {
        while let Some(&seq) = self.wanted.next_if(|seq| limit.is_none_or(|limit| **seq < limit)) {
            // Letters of rows that nobody asks for are none of our business.
            while self.letters.next_if(|letter| **letter < seq).is_some() {}
            if self.letters.next_if(|letter| **letter == seq).is_some() {
                self.verdict.dead_lettered += 1;
            } else {
                self.verdict.missing += 1;
            }
        }
        while self.letters.next_if(|letter| limit.is_none_or(|limit| **letter < limit)).is_some() {}
    }
}

fn take_equal(rows: &mut Peekable<std::slice::Iter<'_, u64>>, seq: u64) -> u64 {
    let mut times = 0;
    while rows.next_if(|row| **row == seq).is_some() {
        times += 1;
    }
    times
}

async fn order(store: &Store, table: &TableName, verdict: &mut Verdict) -> Result<(), Exit> {
    match store.out_of_order(table).await.map_err(Exit::error)? {
        Some(rows) => verdict.out_of_order = rows,
        // The table keeps no trace of the order in which its rows came.
        None => verdict.unproven += verdict.stored,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `expected, stored, dead_lettered, unproven, missing, repeated`
    fn judged(wanted: &[u64], letters: &[u64], stored: &[(u64, u64)]) -> [u64; 6] {
        let mut verdict = Verdict::default();
        let mut judge = Judge::new(wanted, letters, &mut verdict);
        for (seq, rows) in stored {
            judge.stored(*seq, *rows);
        }
        judge.end();
        let Verdict { expected, stored, dead_lettered, unproven, missing, repeated, .. } = verdict;
        [expected, stored, dead_lettered, unproven, missing, repeated]
    }

    #[test]
    fn each_row_is_stored_or_a_dead_letter() {
        assert_eq!(judged(&[1, 2, 3], &[2], &[(1, 1), (3, 1)]), [3, 2, 1, 0, 0, 0]);
        assert_eq!(judged(&[1, 2, 3], &[], &[(1, 1), (3, 1)]), [3, 2, 0, 0, 1, 0]);
        assert_eq!(judged(&[1, 2, 3], &[3, 9], &[(1, 1)]), [3, 1, 1, 0, 1, 0]);
        assert_eq!(judged(&[], &[1, 2], &[]), [0; 6]);
    }

    #[test]
    fn what_is_in_both_places_is_there_twice() {
        assert_eq!(judged(&[1, 2], &[2], &[(1, 1), (2, 1)]), [2, 2, 0, 0, 0, 1]);
    }

    #[test]
    fn what_nobody_sent_is_unproven() {
        assert_eq!(judged(&[2], &[], &[(1, 1), (2, 1), (5, 1)]), [1, 3, 0, 2, 0, 0]);
    }

    #[test]
    fn a_sequence_used_again_is_two_rows() {
        // Sent twice and stored under two identities; stored under one; a letter under one.
        assert_eq!(judged(&[4, 4], &[], &[(4, 2)]), [2, 2, 0, 0, 0, 0]);
        assert_eq!(judged(&[4, 4], &[], &[(4, 1)]), [2, 1, 0, 0, 1, 0]);
        assert_eq!(judged(&[4, 4], &[4], &[(4, 1)]), [2, 1, 1, 0, 0, 0]);
        assert_eq!(judged(&[4], &[], &[(4, 2)]), [1, 2, 0, 1, 0, 0]);
    }

    #[test]
    fn rows_are_looked_for_under_every_identity() {
        let known = Known { rebased: BTreeMap::from([(Timestamp(100), 2)]), letters: None };
        let of = |created| known.identities(Timestamp(created)).map(|at| at.0).collect::<Vec<_>>();
        assert_eq!(of(100), [100, 101, 102]);
        assert_eq!(of(50), [50]);
    }
}
