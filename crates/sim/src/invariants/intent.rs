//! Invariant 3: no insert leaves a process whose tenure is over in the ledger without its batch standing in
//! `open` at its last check, and a check is not older than the stated time.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_core::ports::store::{Insert, Token};
use holdfast_core::record::{Record, Session};
use holdfast_core::row::{Seq, ShardId};
use holdfast_core::time::Timestamp;

use super::{Checked, violated};

pub(crate) const NAME: &str = "3 intent";

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
    record: Record,
    until: Option<Duration>,
}

/// Every record that was ever stored.
#[derive(Debug, Default)]
pub(crate) struct Intents {
    noted: BTreeMap<ShardId, Vec<Noted>>,
    /// The epoch in which the batch that begins with a row was opened.
    opened: BTreeMap<(ShardId, Timestamp, Seq), u64>,
}

impl Intents {
    pub(crate) fn stored(&mut self, now: Duration, shard: ShardId, record: Record) {
        for open in record.lanes.values().filter_map(|lane| lane.open.as_ref()) {
            self.opened.entry((shard, record.stream_created, open.batch.first)).or_insert(record.epoch);
        }
        let noted = self.noted.entry(shard).or_default();
        if let Some(last) = noted.last_mut() {
            last.until = Some(now);
        }
        noted.push(Noted { record, until: None });
    }

    /// The record that is stored now.
    pub(crate) fn current(&self, shard: ShardId) -> Option<&Record> {
        self.noted.get(&shard)?.last().map(|noted| &noted.record)
    }

    /// Whether the batch that begins with `first` was opened in another epoch than this record's.
    pub(crate) fn is_inherited(&self, shard: ShardId, record: &Record, first: Seq) -> bool {
        let opened = self.opened.get(&(shard, record.stream_created, first));
        opened.is_some_and(|epoch| *epoch != record.epoch)
    }

    /// Rows of batches that are open in the stored record and were opened in another epoch.
    pub(crate) fn inherited_rows(&self, shard: ShardId) -> u64 {
        let Some(record) = self.current(shard) else { return 0 };
        let open = record.lanes.values().filter_map(|lane| lane.open.as_ref());
        let inherited = open.filter(|open| self.is_inherited(shard, record, open.batch.first));
        inherited.map(|open| u64::from(open.batch.rows)).sum()
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
                && record.stream_created == insert.created
                && open.is_some_and(|open| {
                    (open.batch.first, open.batch.last, open.batch.generation)
                        == (bounds.first, bounds.last, bounds.generation)
                        && open.target == insert.target
                })
        };
        let history = self.noted.get(&insert.shard).map_or(&[][..], Vec::as_slice);
        let Some(noted) = history.iter().rev().find(|noted| stands(&noted.record)) else {
            return violated(
                NAME,
                format!("{} was sent, and no record of its tenure opens it", insert.token.0),
            );
        };
        match noted.until {
            Some(until) if now > until + stale => {
                let age = now.saturating_sub(until).as_millis();
                violated(
                    NAME,
                    format!("{} was sent {age} ms after the record stopped saying so", insert.token.0),
                )
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
