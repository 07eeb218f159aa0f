//! Invariant 3: no insert leaves a process whose tenure is over in the ledger without its batch standing in
//! `open` at its last check, and a check is not older than the stated time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use holdfast_core::ports::dead_letters::Letter;
use holdfast_core::ports::store::{Insert, Token};
use holdfast_core::record::{LaneRecord, Record, Session};
use holdfast_core::row::{Seq, ShardId, TableName};
use holdfast_core::time::Timestamp;

use super::{Checked, violated};

pub(crate) const NAME: &str = "3 intent";
/// A batch was split while an attempt at it could still land.
pub(crate) const SPLIT: &str = "9 split";

/// The numbers in a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) first: Seq,
    pub(crate) last: Seq,
    pub(crate) generation: u8,
}

/// Reads a token: `stream@created:first-last/rows.generation`.
pub(crate) fn bounds(token: &Token) -> Option<Bounds> {
    let numbers = token.0.rsplit_once(':')?.1;
    let (first, rest) = numbers.split_once('-')?;
    let (last, rest) = rest.split_once('/')?;
    let generation = rest.split_once('.')?.1;
    let generation = generation.split('#').next()?;
    Some(Bounds {
        first: Seq(first.parse().ok()?),
        last: Seq(last.parse().ok()?),
        generation: generation.parse().ok()?,
    })
}

#[derive(Debug)]
struct Noted {
    /// None: there was none.
    record: Option<Record>,
    until: Option<Duration>,
}

/// Every record that was ever stored.
#[derive(Debug, Default)]
pub(crate) struct Intents {
    noted: BTreeMap<ShardId, Vec<Noted>>,
    /// The epoch in which the batch that begins with a row was opened.
    opened: BTreeMap<(ShardId, Timestamp, Seq), u64>,
    /// Batches that were cut in two, by shard, identity, first and last row.
    split: BTreeSet<(ShardId, Timestamp, Seq, Seq)>,
}

impl Intents {
    pub(crate) fn stored(&mut self, now: Duration, shard: ShardId, record: Record) {
        let identity = record.identity();
        for lane in record.lanes.values() {
            let open = lane.open.as_ref().map(|open| open.batch.first);
            for first in open.into_iter().chain(lane.parked.as_ref().map(|parked| parked.row)) {
                self.opened.entry((shard, identity, first)).or_insert(record.epoch);
            }
        }
        let before = self.current(shard).filter(|before| before.identity() == identity);
        let cut: Vec<(Seq, Seq)> = before.map_or(Vec::new(), |before| {
            let cut = |(table, lane): (&TableName, &LaneRecord)| {
                let open = lane.open.as_ref()?.batch;
                let now = record.lanes.get(table)?;
                // (Its first rows may be gone from the stream: then its first part begins later.)
                let part =
                    now.open.as_ref().map(|now| (now.batch.first, now.batch.last)).is_some_and(|now| {
                        (open.first..=open.last).contains(&now.0) && now != (open.first, open.last)
                    });
                let within = |row: Seq| (open.first..=open.last).contains(&row);
                let parked = now.parked.as_ref().is_some_and(|now| within(now.row));
                (part || parked).then_some((open.first, open.last))
            };
            before.lanes.iter().filter_map(cut).collect()
        });
        self.split.extend(cut.into_iter().map(|(first, last)| (shard, identity, first, last)));
        self.note(now, shard, Some(record));
    }

    /// Somebody has put another record there, or none: no process did.
    pub(crate) fn replaced(&mut self, now: Duration, shard: ShardId, record: Option<Record>) {
        self.split.retain(|(of, ..)| *of != shard);
        self.note(now, shard, record);
    }

    fn note(&mut self, now: Duration, shard: ShardId, record: Option<Record>) {
        let noted = self.noted.entry(shard).or_default();
        if let Some(last) = noted.last_mut() {
            last.until = Some(now);
        }
        noted.push(Noted { record, until: None });
    }

    /// Whether a batch was cut in two.
    pub(crate) fn was_split(&self, shard: ShardId, identity: Timestamp, first: Seq, last: Seq) -> bool {
        self.split.contains(&(shard, identity, first, last))
    }

    /// Rows of an insert are stored: of a batch that was split none may be, any more.
    pub(crate) fn landed(&self, insert: &Insert) -> Checked {
        let Some(Bounds { first, last, .. }) = bounds(&insert.token) else { return Ok(()) };
        if self.split.contains(&(insert.shard, insert.created, first, last)) {
            return violated(SPLIT, format!("{} landed after it was split", insert.token.0));
        }
        Ok(())
    }

    /// The record that is stored now.
    pub(crate) fn current(&self, shard: ShardId) -> Option<&Record> {
        self.noted.get(&shard)?.last()?.record.as_ref()
    }

    /// Whether the batch that begins with `first` was opened in another epoch than this record's.
    pub(crate) fn is_inherited(&self, shard: ShardId, record: &Record, first: Seq) -> bool {
        let opened = self.opened.get(&(shard, record.identity(), first));
        opened.is_some_and(|epoch| *epoch != record.epoch)
    }

    /// Rows of batches that are open in the stored record and were opened in another epoch.
    pub(crate) fn inherited_rows(&self, shard: ShardId) -> u64 {
        let Some(record) = self.current(shard) else { return 0 };
        let open = record.lanes.values().filter_map(|lane| lane.open.as_ref());
        let inherited = open.filter(|open| self.is_inherited(shard, record, open.batch.first));
        let rows: u64 = inherited.map(|open| u64::from(open.batch.rows)).sum();
        let parked = record.lanes.values().filter_map(|lane| lane.parked.as_ref());
        rows + parked.filter(|parked| self.is_inherited(shard, record, parked.row)).count() as u64
    }

    /// A letter leaves the process start `session`.
    pub(crate) fn posted(
        &self,
        now: Duration,
        session: Session,
        letter: &Letter,
        stale: Duration,
    ) -> Checked {
        let stands = |record: &Record| {
            let parked = record.lanes.get(&letter.table).and_then(|lane| lane.parked.as_ref());
            record.writer.session == session
                && record.identity() == letter.created
                && parked.is_some_and(|parked| parked.row == letter.seq && parked.cause == letter.cause)
        };
        let what = || format!("the letter of row {}", letter.seq);
        self.stood(now, letter.shard, stands, stale, &what)
    }

    /// An insert leaves the process start `session`, whose tenure has `epoch`.
    pub(crate) fn sent(
        &self,
        now: Duration,
        session: Session,
        epoch: Option<u64>,
        insert: &Insert,
        stale: Duration,
    ) -> Checked {
        let Some(bounds) = bounds(&insert.token) else {
            return violated(NAME, format!("{} is no batch's token", insert.token.0));
        };
        let stands = |record: &Record| {
            let open = record.lanes.get(&insert.table).and_then(|lane| lane.open.as_ref());
            record.writer.session == session
                && epoch.is_none_or(|epoch| record.epoch == epoch)
                && record.identity() == insert.created
                && open.is_some_and(|open| {
                    (open.batch.first, open.batch.last, open.batch.generation)
                        == (bounds.first, bounds.last, bounds.generation)
                        && open.target == insert.target
                })
        };
        self.stood(now, insert.shard, stands, stale, &|| insert.token.0.to_string())
    }

    fn stood(
        &self,
        now: Duration,
        shard: ShardId,
        stands: impl Fn(&Record) -> bool,
        stale: Duration,
        what: &dyn Fn() -> String,
    ) -> Checked {
        let history = self.noted.get(&shard).map_or(&[][..], Vec::as_slice);
        let Some(noted) = history.iter().rev().find(|noted| noted.record.as_ref().is_some_and(&stands))
        else {
            return violated(NAME, format!("{} was sent, and no record of its tenure opens it", what()));
        };
        match noted.until {
            Some(until) if now > until + stale => {
                let age = now.saturating_sub(until).as_millis();
                violated(NAME, format!("{} was sent {age} ms after the record stopped saying so", what()))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read() {
        let read = bounds(&Token("S@9:12-40/9.1".into())).unwrap();
        assert_eq!(read, Bounds { first: Seq(12), last: Seq(40), generation: 1 });
        assert_eq!(bounds(&Token("S@9:12-40/9.1#77".into())).unwrap(), read);
        assert_eq!(bounds(&Token("nonsense".into())), None);
    }
}
