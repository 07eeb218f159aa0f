//! Rows published at an even rate, each with the time at which it was.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::fleet::{Moment, StoredBatch};
use crate::jetstream::JetStream;
use crate::rig::Rig;

/// How often what is due is published.
const TICK: Duration = Duration::from_millis(2);
/// So many rows at most are published at once.
const MOST: u64 = 1_000;

/// A row of the load.
#[derive(Debug, Clone, Copy)]
pub struct Published {
    /// Its table's place among the rig's tables.
    pub table: usize,
    /// Its sequence in its table's stream.
    pub seq: u64,
    /// When it was about to be published.
    pub at: Moment,
}

/// Rows being published to all of a rig's tables in turn, until told to stop.
#[derive(Debug)]
pub struct Load {
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
    thread: Option<JoinHandle<Result<Vec<Published>>>>,
    receipt: std::path::PathBuf,
    sources: Sources,
    tables: Vec<String>,
}

/// The stream of each table, and when it was created.
#[derive(Debug)]
struct Sources(Vec<(String, i128)>);

impl Sources {
    /// Asks the first server that answers.
    fn of(subjects: &[String], servers: &[JetStream]) -> Result<Self> {
        let ask = |server: &JetStream| -> Result<Self> {
            let mut created = BTreeMap::new();
            let source = |subject: &String| {
                let stream = server.taker(subject)?;
                let at = match created.get(&stream) {
                    Some(at) => *at,
                    None => *created.entry(stream.clone()).or_insert(server.created(&stream)?),
                };
                Ok((stream, at))
            };
            subjects.iter().map(source).collect::<Result<_>>().map(Self)
        };
        let mut last = Err(Error::Answer { what: "the stream", answer: "there is no server".to_owned() });
        for server in servers {
            last = ask(server);
            if last.is_ok() {
                break;
            }
        }
        last
    }
}

impl Load {
    /// Publishes `rate` rows a second of about `bytes` each.
    ///
    /// # Errors
    /// When the stream cannot be asked about.
    pub fn start(rig: &Rig, rate: u64, bytes: usize) -> Result<Self> {
        let jetstream = rig.jetstream();
        let stop = Arc::new(AtomicBool::new(false));
        let count = Arc::new(AtomicU64::new(0));
        let tables = rig.tables();
        let subjects: Vec<_> = tables.iter().map(|table| format!("ingest.{table}")).collect();
        let sources = Sources::of(&subjects, std::slice::from_ref(&jetstream))?;
        let (told, counter) = (Arc::clone(&stop), Arc::clone(&count));
        let thread = thread::spawn(move || publish(jetstream, &subjects, rate, bytes, &told, &counter));
        Ok(Self { stop, count, thread: Some(thread), receipt: rig.receipt(), sources, tables })
    }

    /// The same through any of these servers that answers, one row at a time and each until it is stored: slower,
    /// and in order whatever becomes of the servers.
    ///
    /// # Errors
    /// When the stream cannot be asked about.
    pub fn start_patient(rig: &Rig, servers: Vec<JetStream>, rate: u64, bytes: usize) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let count = Arc::new(AtomicU64::new(0));
        let tables = rig.tables();
        let subjects: Vec<_> = tables.iter().map(|table| format!("ingest.{table}")).collect();
        let sources = Sources::of(&subjects, &servers)?;
        let (told, counter) = (Arc::clone(&stop), Arc::clone(&count));
        let thread =
            thread::spawn(move || Ok(publish_patiently(&servers, &subjects, rate, bytes, &told, &counter)));
        Ok(Self { stop, count, thread: Some(thread), receipt: rig.receipt(), sources, tables })
    }

    /// Rows stored in the stream so far.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// An error if it has ended by itself.
    ///
    /// # Errors
    /// Why it has.
    pub fn must_run(&mut self) -> Result<()> {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) { self.join().map(drop) } else { Ok(()) }
    }

    fn join(&mut self) -> Result<Vec<Published>> {
        let failed = |why: &str| Error::Answer { what: "the load", answer: why.to_owned() };
        let thread = self.thread.take().ok_or_else(|| failed("it had ended by itself"))?;
        thread.join().unwrap_or_else(|_| Err(failed("its thread panicked")))
    }

    /// Stops publishing, writes the receipt, and gives every row.
    ///
    /// # Errors
    /// When a row could not be published, or the receipt not written.
    pub fn finish(mut self) -> Result<Vec<Published>> {
        self.stop.store(true, Ordering::Relaxed);
        let rows = self.join()?;
        let mut text = String::new();
        let mut by_stream: BTreeMap<&(String, i128), Vec<&Published>> = BTreeMap::new();
        for row in &rows {
            by_stream.entry(&self.sources.0[row.table]).or_default().push(row);
        }
        for ((stream, created), rows) in by_stream {
            let _ = writeln!(text, "# holdfast receipt 1 {created} {stream}");
            for row in rows {
                let _ = writeln!(text, "{}\t{}", row.seq, self.tables[row.table]);
            }
        }
        let append =
            || File::options().create(true).append(true).open(&self.receipt)?.write_all(text.as_bytes());
        append().context(|| format!("cannot write {}", self.receipt.display()))?;
        Ok(rows)
    }
}

fn publish(
    jetstream: JetStream,
    subjects: &[String],
    rate: u64,
    bytes: usize,
    stop: &AtomicBool,
    count: &AtomicU64,
) -> Result<Vec<Published>> {
    let mut publisher = jetstream.publisher()?;
    let mut rows: Vec<Published> = Vec::new();
    let began = Instant::now();
    let pad = "x".repeat(bytes.saturating_sub(30));
    let tables = subjects.len() as u64;
    while !stop.load(Ordering::Relaxed) {
        let sent = rows.len() as u64;
        let due =
            u64::try_from(began.elapsed().as_micros() * u128::from(rate) / 1_000_000).unwrap_or(u64::MAX);
        let until = due.min(sent + MOST);
        if until == sent {
            // The rate is the load, not a condition.
            thread::sleep(TICK);
            continue;
        }
        let at = Moment::now();
        let table = |place: u64| usize::try_from(place % tables).unwrap_or_default();
        let seqs = publisher.publish_all((sent..until).map(|place| {
            (subjects[table(place)].as_str(), format!("{{\"n\":{},\"pad\":\"{pad}\"}}", place / tables))
        }))?;
        rows.extend((sent..until).zip(seqs).map(|(place, seq)| Published { table: table(place), seq, at }));
        count.store(until, Ordering::Relaxed);
    }
    Ok(rows)
}

fn publish_patiently(
    servers: &[JetStream],
    subjects: &[String],
    rate: u64,
    bytes: usize,
    stop: &AtomicBool,
    count: &AtomicU64,
) -> Vec<Published> {
    let began = Instant::now();
    let mut publisher = None;
    let mut rows: Vec<Published> = Vec::new();
    let mut server = 0;
    let pad = "x".repeat(bytes.saturating_sub(30));
    // The row that is under way is finished in any case.
    while !stop.load(Ordering::Relaxed) {
        let place = rows.len();
        if began.elapsed().as_secs_f64() * rate as f64 <= place as f64 {
            thread::sleep(TICK);
            continue;
        }
        let table = place % subjects.len();
        let payload = format!("{{\"n\":{},\"pad\":\"{pad}\"}}", place / subjects.len());
        // Stored once, however often it is sent.
        let id = format!("Nats-Msg-Id: {place}");
        let at = Moment::now();
        let seq = loop {
            let stored = match &mut publisher {
                None => servers[server].publisher().map(|connected| {
                    publisher = Some(connected);
                    None
                }),
                Some(publisher) => {
                    publisher.publish_with(&subjects[table], &[id.as_str()], payload.as_bytes()).map(Some)
                }
            };
            match stored {
                Ok(Some(seq)) => break seq,
                Ok(None) => {}
                Err(_) => {
                    publisher = None;
                    server = (server + 1) % servers.len();
                    thread::sleep(TICK);
                }
            }
        };
        rows.push(Published { table, seq, at });
        count.store(rows.len() as u64, Ordering::Relaxed);
    }
    rows
}

/// How long each row took from just before it was published until its insert was answered, in seconds; none for a
/// row that no log calls stored.
#[must_use]
pub fn latencies(rows: &[Published], tables: &[String], stored: &[StoredBatch]) -> Vec<Option<f64>> {
    let mut batches: BTreeMap<&str, BTreeMap<u64, (u64, Moment)>> = BTreeMap::new();
    for batch in stored {
        let of_table = batches.entry(&batch.table).or_default();
        // Called stored twice: an answer that could not be recorded, and the heir's look.
        let known = of_table.entry(batch.first).or_insert((batch.last, batch.at));
        *known = (known.0.max(batch.last), known.1.min(batch.at));
    }
    rows.iter()
        .map(|row| {
            let (_, (last, at)) = batches.get(tables[row.table].as_str())?.range(..=row.seq).next_back()?;
            (*last >= row.seq).then(|| at.since(row.at))
        })
        .collect()
}

/// The value below which this part of `values` lies; 0 without any.
#[must_use]
pub fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    // How many of them lie below it, counted rather than reckoned: no rounding of a product.
    let place = (0..sorted.len()).take_while(|place| (*place as f64) < part * sorted.len() as f64).count();
    sorted.get(place.saturating_sub(1)).copied().unwrap_or_default()
}

/// [`quantile`] a half.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_as_late_as_its_batch() {
        let at = |seconds| Moment::from_epoch(Duration::from_secs(seconds));
        let row = |seq, seconds| Published { table: 0, seq, at: at(seconds) };
        let batch = |first, last, seconds| StoredBatch {
            node: "n".into(),
            shard: 0,
            table: "t0".into(),
            first,
            last,
            at: at(seconds),
        };
        let stored = [batch(1, 4, 10), batch(7, 9, 20), batch(1, 4, 30)];
        let found = latencies(&[row(1, 5), row(4, 9), row(6, 9), row(7, 9)], &["t0".to_owned()], &stored);
        assert_eq!(found, [Some(5.0), Some(1.0), None, Some(11.0)]);
    }

    #[test]
    fn quantiles() {
        let values = [5.0, 1.0, 3.0, 2.0, 4.0];
        assert_eq!((median(&values), quantile(&values, 0.99), quantile(&[], 0.5)), (3.0, 5.0, 0.0));
    }
}
