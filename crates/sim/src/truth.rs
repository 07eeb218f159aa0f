//! What is true of every row, whatever the processes believe.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use bytes::Bytes;
use holdfast_core::row::Seq;
use holdfast_core::time::Timestamp;

/// Streams of one name are created at least so many nanoseconds apart, and rebased less often.
pub(crate) const IDENTITIES: i64 = 1_000;

/// A row that was published.
#[derive(Clone, Debug)]
pub(crate) struct Fact {
    pub(crate) number: u64,
    pub(crate) table: u32,
    pub(crate) shard: u32,
    pub(crate) created: Timestamp,
    pub(crate) seq: Seq,
    pub(crate) stored_at: Timestamp,
    /// When it was published.
    pub(crate) published_at: Duration,
    /// Its payload can never be a row, and a look at it says so.
    pub(crate) screened: bool,
    /// Its payload, to compare with.
    pub(crate) payload: Bytes,
    /// How often it is in its table.
    pub(crate) landed: u32,
    /// How often it is a dead letter.
    pub(crate) letters: u32,
    /// So often more than once it may be where it belongs: a ledger was lost or set back beyond what its table's
    /// level can make good.
    pub(crate) spare: u32,
    /// It may be both in its table and a dead letter: a ledger was lost or set back after it became a letter, and
    /// its table was altered since.
    pub(crate) may_be_both: bool,
    /// The stream lost it, or somebody removed it: it need not land any more.
    pub(crate) gone: bool,
}

impl Fact {
    /// Whether nothing is left to do for it.
    pub(crate) const fn is_done(&self) -> bool {
        self.landed > 0 || self.letters > 0 || self.gone
    }

    /// A row of its own that an identity of its stream names: rebases give a stream new ones.
    pub(crate) const fn is_of(&self, identity: Timestamp) -> bool {
        self.created.0 <= identity.0 && identity.0 < self.created.0 + IDENTITIES
    }
}

/// Every row published so far.
#[derive(Debug, Default)]
pub(crate) struct Truth {
    facts: Vec<Fact>,
    places: BTreeMap<(Timestamp, Seq), usize>,
    numbers: BTreeMap<u64, usize>,
}

impl Truth {
    pub(crate) fn published(&mut self, fact: Fact) {
        let at = self.facts.len();
        self.places.insert((fact.created, fact.seq), at);
        self.numbers.insert(fact.number, at);
        self.facts.push(fact);
    }

    /// The row of that number.
    pub(crate) fn by_number(&mut self, number: u64) -> Option<&mut Fact> {
        self.numbers.get(&number).map(|at| &mut self.facts[*at])
    }

    /// The row that is at a place in the stream now, or was the last one there.
    pub(crate) fn at(&self, created: Timestamp, seq: Seq) -> Option<&Fact> {
        self.places.get(&(created, seq)).map(|at| &self.facts[*at])
    }

    /// Rows of a stream, in order.
    pub(crate) fn range(&self, created: Timestamp, seqs: RangeInclusive<Seq>) -> impl Iterator<Item = &Fact> {
        let (first, last) = seqs.into_inner();
        let range = (first <= last).then(|| self.places.range((created, first)..=(created, last)));
        range.into_iter().flatten().map(|(_, at)| &self.facts[*at])
    }

    /// Rows that somebody removed from the stream, or that it lost.
    pub(crate) fn removed(&mut self, created: Timestamp, seqs: &[Seq]) {
        for seq in seqs {
            if let Some(at) = self.places.get(&(created, *seq)) {
                self.facts[*at].gone = true;
            }
        }
    }

    /// The whole stream is gone.
    pub(crate) fn removed_all(&mut self) {
        self.facts.iter_mut().for_each(|fact| fact.gone = true);
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Fact> {
        self.facts.iter()
    }

    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut Fact> {
        self.facts.iter_mut()
    }
}
