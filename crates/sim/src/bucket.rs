//! A model of the ledger's bucket: one record a shard, compare-and-set on a revision.
//!
//! The bucket is a stream, so revisions are its sequences: they rise across all keys. A write is applied when
//! it arrives; an answer that is lost afterwards, or a request that arrives twice, is the network's doing. The
//! second of two equal requests conflicts with the first.

use std::collections::BTreeMap;

use bytes::Bytes;
use holdfast_core::ports::ledger::{Command, Entry, Reply, Revision, WriteOutcome};
use holdfast_core::row::ShardId;

/// The bucket.
#[derive(Clone, Debug, Default)]
pub struct Bucket {
    revision: u64,
    records: BTreeMap<ShardId, Entry>,
    /// Every record that was ever stored.
    log: Vec<(Revision, ShardId, Bytes)>,
}

impl Bucket {
    /// Takes a command and answers it.
    pub fn handle(&mut self, command: &Command) -> Reply {
        match command {
            Command::Read { attempt, shard } => {
                Reply::Read { attempt: *attempt, outcome: Ok(self.records.get(shard).cloned()) }
            }
            Command::Write { attempt, shard, expected, record } => {
                Reply::Written { attempt: *attempt, outcome: self.write(*shard, *expected, record) }
            }
        }
    }

    fn write(&mut self, shard: ShardId, expected: Revision, record: &Bytes) -> WriteOutcome {
        let stored = self.records.get(&shard).map_or(Revision(0), |entry| entry.revision);
        if stored != expected {
            return WriteOutcome::Conflict;
        }
        self.revision += 1;
        let revision = Revision(self.revision);
        self.log.push((revision, shard, record.clone()));
        self.records.insert(shard, Entry { revision, record: record.clone() });
        WriteOutcome::Stored(revision)
    }

    /// Somebody restores it as it was at a revision; 0: nothing of it is left. Revisions rise on: what is still on
    /// its way to the old bucket conflicts.
    pub fn restore(&mut self, to: Revision) {
        self.records.clear();
        let kept: BTreeMap<ShardId, Bytes> = self
            .log
            .iter()
            .filter(|(revision, ..)| *revision <= to)
            .map(|(_, shard, record)| (*shard, record.clone()))
            .collect();
        for (shard, record) in kept {
            let _ = self.write(shard, Revision(0), &record);
        }
    }

    /// The last revision that was given out.
    #[must_use]
    pub const fn last(&self) -> Revision {
        Revision(self.revision)
    }

    /// What is stored of a shard.
    #[must_use]
    pub fn entry(&self, shard: ShardId) -> Option<&Entry> {
        self.records.get(&shard)
    }
}

#[cfg(test)]
mod tests {
    use holdfast_core::ports::Attempt;

    use super::*;

    #[test]
    fn a_restored_bucket_is_as_it_was() {
        let mut bucket = Bucket::default();
        let mut write = |shard: u32, expected, record| {
            bucket.write(ShardId(shard), Revision(expected), &Bytes::from_static(record));
        };
        write(0, 0, b"a");
        write(1, 0, b"b");
        write(0, 1, b"c");
        bucket.restore(Revision(2));
        assert_eq!(bucket.entry(ShardId(0)).map(|entry| &entry.record[..]), Some(&b"a"[..]));
        assert_eq!(bucket.entry(ShardId(1)).map(|entry| &entry.record[..]), Some(&b"b"[..]));
        bucket.restore(Revision(0));
        assert!(bucket.entry(ShardId(0)).is_none());
    }

    #[test]
    fn a_write_needs_the_revision_that_is_stored() {
        let mut bucket = Bucket::default();
        let mut write = |shard: u32, expected| {
            let command = Command::Write {
                attempt: Attempt(1),
                shard: ShardId(shard),
                expected: Revision(expected),
                record: Bytes::from_static(b"x"),
            };
            match bucket.handle(&command) {
                Reply::Written { outcome, .. } => outcome,
                Reply::Read { .. } => unreachable!("a write was asked"),
            }
        };
        assert_eq!(write(0, 0), WriteOutcome::Stored(Revision(1)));
        assert_eq!(write(0, 0), WriteOutcome::Conflict, "the same request arriving twice");
        assert_eq!(write(1, 0), WriteOutcome::Stored(Revision(2)), "revisions rise across keys");
        assert_eq!(write(0, 1), WriteOutcome::Stored(Revision(3)));
    }
}
