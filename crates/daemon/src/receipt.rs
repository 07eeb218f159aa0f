//! Receipts: which rows were stored in the stream, kept by who published them.
//!
//! A text file that can be appended to. A line `# holdfast receipt 1 CREATED STREAM` says of which stream
//! the lines after it are; each of those is a sequence, a tab and the table's subject token.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use holdfast_core::time::Timestamp;
use holdfast_nats::subject;

use crate::exit::Exit;

const HEADER: &str = "# holdfast receipt 1 ";

/// A stream that rows were stored in.
#[derive(Clone, Debug)]
pub struct Source {
    /// Its name.
    pub stream: String,
    /// When it was created.
    pub created: Timestamp,
}

/// Appends to a receipt.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    sources: Vec<Source>,
    /// The one that the next lines are of.
    current: usize,
}

impl Writer {
    /// Opens `path` for rows of these streams.
    ///
    /// # Errors
    /// If the file cannot be opened or written.
    ///
    /// # Panics
    /// Without a stream.
    pub fn open(path: &Path, sources: Vec<Source>) -> Result<Self, Exit> {
        let failed = |error| Exit::error(format!("cannot write the receipt {}: {error}", path.display()));
        let file = File::options().create(true).append(true).open(path).map_err(failed)?;
        let mut writer = Self { path: path.to_owned(), file: BufWriter::new(file), sources, current: 0 };
        writer.header()?;
        Ok(writer)
    }

    fn header(&mut self) -> Result<(), Exit> {
        let Source { stream, created } = &self.sources[self.current];
        writeln!(self.file, "{HEADER}{} {stream}", created.0).map_err(|error| self.failed(&error))
    }

    /// Appends a row of the stream at the place `source` among those of [`Self::open`].
    ///
    /// # Errors
    /// If the file cannot be written.
    ///
    /// # Panics
    /// If there is no such stream.
    pub fn row(&mut self, source: usize, table: &str, seq: u64) -> Result<(), Exit> {
        if source != self.current {
            self.current = source;
            self.header()?;
        }
        let token = subject::encode(table);
        writeln!(self.file, "{seq}\t{token}").map_err(|error| self.failed(&error))
    }

    /// Makes sure that everything is in the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn finish(mut self) -> Result<(), Exit> {
        self.file.flush().map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &std::io::Error) -> Exit {
        Exit::error(format!("cannot write the receipt {}: {error}", self.path.display()))
    }
}

/// The rows of `table` in the receipt at `path`: for each stream's creation, the sequences, rising, each as often as
/// it was acknowledged.
///
/// # Errors
/// If the file cannot be read or is no receipt; the message names the line.
pub fn read(path: &Path, table: &str) -> Result<BTreeMap<Timestamp, Vec<u64>>, Exit> {
    let failed = |error| Exit::error(format!("cannot read the receipt {}: {error}", path.display()));
    let token = subject::encode(table);
    let mut rows: BTreeMap<Timestamp, Vec<u64>> = BTreeMap::new();
    let mut created = None;
    for (number, line) in BufReader::new(File::open(path).map_err(failed)?).lines().enumerate() {
        let line = line.map_err(failed)?;
        let wrong = || Exit::error(format!("{}, line {}: this is no receipt", path.display(), number + 1));
        if let Some(header) = line.strip_prefix(HEADER) {
            let at = header.split(' ').next().and_then(|at| at.parse().ok()).ok_or_else(wrong)?;
            created = Some(Timestamp(at));
            rows.entry(Timestamp(at)).or_default();
            continue;
        }
        let created = created.ok_or_else(wrong)?;
        let (seq, of) = line.split_once('\t').ok_or_else(wrong)?;
        let seq: u64 = seq.parse().map_err(|_| wrong())?;
        if *of == *token {
            rows.entry(created).or_default().push(seq);
        }
    }
    for seqs in rows.values_mut() {
        seqs.sort_unstable();
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_appended_is_read_by_table_and_stream() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("receipt");
        let sources: Vec<_> = [7, 9].map(|at| Source { stream: "S".into(), created: Timestamp(at) }).into();
        for seqs in [[3, 4], [1, 2]] {
            let mut writer = Writer::open(&path, sources.clone()).unwrap();
            for (source, seq) in seqs.into_iter().enumerate() {
                writer.row(source, "a b", seq).unwrap();
                writer.row(source, "other", seq + 100).unwrap();
            }
            writer.finish().unwrap();
        }
        let rows = read(&path, "a b").unwrap();
        assert_eq!(rows, BTreeMap::from([(Timestamp(7), vec![1, 3]), (Timestamp(9), vec![2, 4])]));
    }

    #[test]
    fn another_file_is_refused_by_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "hello\n").unwrap();
        assert!(
            read(file.path(), "t").unwrap_err().message().unwrap().ends_with("line 1: this is no receipt")
        );
    }
}
