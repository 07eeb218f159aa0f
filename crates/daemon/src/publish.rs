//! `holdfast publish`: rows into the stream.

use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use holdfast_nats::publish::{Options, Publisher, Receipt};
use holdfast_nats::stream;
use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, BufReader};

use crate::assembly::connect;
use crate::cli::Publish;
use crate::config::Config;
use crate::exit::Exit;
use crate::output;
use crate::receipt;

#[derive(Debug, Serialize)]
struct Summary {
    rows: u64,
    bytes: u64,
    seconds: f64,
    rows_per_second: f64,
    last_seq: u64,
}

/// Publishes rows and waits until each is stored.
///
/// # Errors
/// The first row that could not be stored, and why.
pub async fn publish(config: &Config, options: &Publish) -> Result<(), Exit> {
    if options.generate.is_none() && options.table.len() > 1 {
        return Err(Exit::usage("--table: several tables go with --generate only"));
    }
    let topology = config.topology()?;
    let connection = connect(config).await?;
    let streams = topology.streams();
    let mut sources = Vec::new();
    for name in streams.names() {
        let stream = stream::look(&connection, &name).await.map_err(Exit::error)?;
        if options.sole_publisher && stream.replicas > 1 {
            return Err(Exit::usage(format!(
                "--sole-publisher: the stream {name} has {} replicas, and a server of a cluster can lose its copy of \
                 such a stream at its restart, again and again (nats-server 2.15.1: \"last msgid mismatch\"). Publish \
                 without it: each row is stored once all the same, but rows in flight while a connection breaks can be \
                 stored after later ones",
                stream.replicas
            )));
        }
        sources.push(receipt::Source { stream: name, created: stream.created });
    }
    let receipt = match &options.receipt {
        Some(path) => Some(receipt::Writer::open(path, sources)?),
        None => None,
    };
    let publishing = Options { sole: options.sole_publisher, ..Options::default() };
    let publisher = Publisher::new(connection, streams, topology.prefix.clone(), publishing);
    let mut sender = Sender {
        publisher,
        tables: &options.table,
        receipt,
        bar: bar(options)?,
        started: Instant::now(),
        rate: options.rate.filter(|rate| *rate > 0),
        generates: options.generate.is_some(),
        rows: 0,
        bytes: 0,
        last_seq: 0,
    };
    let limit = options.count.unwrap_or(u64::MAX);
    match (options.generate, &options.file) {
        (Some(size), _) => {
            let tables = options.table.len() as u64;
            for row in 0..limit {
                let payload = generated(options.first + row / tables, size);
                sender.send(usize::try_from(row % tables).unwrap_or_default(), payload).await?;
            }
        }
        (None, Some(file)) if file != Path::new("-") => {
            let file = tokio::fs::File::open(file)
                .await
                .map_err(|error| Exit::error(format!("cannot read {}: {error}", file.display())))?;
            lines(&mut sender, BufReader::with_capacity(1 << 18, file), limit).await?;
        }
        _ => lines(&mut sender, BufReader::with_capacity(1 << 18, tokio::io::stdin()), limit).await?,
    }
    let summary = sender.finish().await?;
    if options.json.json {
        return output::json(&summary);
    }
    output::line(format_args!(
        "{} rows stored in {:.1} s, {:.0} rows/s, the last as {}",
        HumanCount(summary.rows),
        summary.seconds,
        summary.rows_per_second,
        summary.last_seq
    ))
}

/// A row of `size` bytes that carries the counter `n`.
#[must_use]
pub fn generated(n: u64, size: usize) -> Bytes {
    let mut row = format!("{{\"n\":{n},\"pad\":\"");
    let pad = size.saturating_sub(row.len() + 2);
    row.extend(std::iter::repeat_n('x', pad));
    row.push_str("\"}");
    row.into()
}

fn bar(options: &Publish) -> Result<ProgressBar, Exit> {
    let length = match (&options.generate, &options.file) {
        (Some(_), _) => options.count,
        (None, Some(file)) if file != Path::new("-") => {
            let size = std::fs::metadata(file)
                .map_err(|error| Exit::error(format!("cannot read {}: {error}", file.display())))?
                .len();
            Some(size)
        }
        _ => None,
    };
    let bar = length.map_or_else(ProgressBar::no_length, ProgressBar::new);
    if options.json.json || !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let template = match (options.generate.is_some(), length.is_some()) {
        (true, _) => "{bar:40} {human_pos}/{human_len} rows, {per_sec}, {eta} left",
        (false, true) => "{bar:40} {bytes}/{total_bytes}, {msg} rows, {eta} left",
        (false, false) => "{spinner} {msg} rows, {bytes}, {elapsed}",
    };
    let style = ProgressStyle::with_template(template).map_err(Exit::error)?;
    Ok(bar.with_style(style))
}

/// Rows from lines of text; empty lines are no rows.
async fn lines(
    sender: &mut Sender<'_>,
    mut input: impl AsyncBufRead + Unpin,
    limit: u64,
) -> Result<(), Exit> {
    let mut line = Vec::new();
    while sender.rows < limit {
        line.clear();
        if input.read_until(b'\n', &mut line).await? == 0 {
            break;
        }
        sender.bar.inc(line.len() as u64);
        let row = line.trim_ascii();
        if !row.is_empty() {
            sender.send(0, Bytes::copy_from_slice(row)).await?;
        }
    }
    Ok(())
}

struct Sender<'a> {
    publisher: Publisher,
    tables: &'a [String],
    receipt: Option<receipt::Writer>,
    bar: ProgressBar,
    started: Instant,
    rate: Option<u64>,
    generates: bool,
    rows: u64,
    bytes: u64,
    last_seq: u64,
}

impl Sender<'_> {
    async fn send(&mut self, table: usize, payload: Bytes) -> Result<(), Exit> {
        if let Some(rate) = self.rate {
            let due = self.started + Duration::from_secs_f64(self.rows as f64 / rate as f64);
            if due > Instant::now() + Duration::from_millis(1) {
                tokio::time::sleep_until(due.into()).await;
            }
        }
        self.bytes += payload.len() as u64;
        if let Err(error) = self.publisher.publish(&self.tables[table], payload).await {
            // What is stored is noted even if the rest failed.
            self.settled()?;
            if let Some(receipt) = self.receipt.take() {
                receipt.finish()?;
            }
            return Err(Exit::error(error));
        }
        self.rows += 1;
        if self.rows.is_multiple_of(1_000) {
            self.settled()?;
        }
        Ok(())
    }

    /// Notes what is known to be stored.
    fn settled(&mut self) -> Result<(), Exit> {
        let tables = self.tables.len() as u64;
        let mut receipts = self.publisher.take_receipts();
        // Stream by stream, so that each is named once.
        receipts.sort_by_key(|receipt| receipt.stream);
        for Receipt { row, seq, stream } in receipts {
            self.last_seq = self.last_seq.max(seq.0);
            if let Some(receipt) = &mut self.receipt {
                let table = &self.tables[usize::try_from(row % tables).unwrap_or_default()];
                receipt.row(usize::try_from(stream).unwrap_or_default(), table, seq.0)?;
            }
        }
        // A generated load counts rows, a file its bytes.
        if self.generates {
            self.bar.set_position(self.rows);
        } else {
            self.bar.set_message(HumanCount(self.rows).to_string());
        }
        Ok(())
    }

    async fn finish(mut self) -> Result<Summary, Exit> {
        let flushed = self.publisher.flush().await;
        // What is stored is noted even if the rest failed.
        self.settled()?;
        self.bar.finish_and_clear();
        if let Some(receipt) = self.receipt {
            receipt.finish()?;
        }
        flushed.map_err(Exit::error)?;
        let seconds = self.started.elapsed().as_secs_f64();
        Ok(Summary {
            rows: self.rows,
            bytes: self.bytes,
            seconds,
            rows_per_second: self.rows as f64 / seconds.max(1e-9),
            last_seq: self.last_seq,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generated_row_has_its_size_and_is_json() {
        for size in [32, 64, 256] {
            let row = generated(123_456, size);
            assert_eq!(row.len(), size);
            let value: serde_json::Value = serde_json::from_slice(&row).unwrap();
            assert_eq!(value["n"], 123_456);
        }
    }
}
