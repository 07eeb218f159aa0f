//! Invariant 3, the other half: a row that is trimmed, or acknowledged, is done in a stored record.

use holdfast_core::record::Record;
use holdfast_core::row::Seq;
use holdfast_core::time::Timestamp;

use super::{Checked, violated};
use crate::truth::{Fact, Truth};
use crate::world::table_name;

pub(crate) const NAME: &str = "3 trim";
pub(crate) const ACK: &str = "3 ack";

/// Rows were trimmed; `record` is what the ledger says of a shard now.
pub(crate) fn removed<'a>(
    truth: &Truth,
    created: Timestamp,
    seqs: &[Seq],
    record: impl Fn(u32) -> Option<&'a Record>,
) -> Checked {
    // What was done before somebody set the shard back may be gone before that is known.
    match undone(truth, created, seqs, record).filter(|fact| fact.spare == 0) {
        None => Ok(()),
        Some(fact) => {
            violated(NAME, format!("row {} of t{} was trimmed before it was done", fact.seq, fact.table))
        }
    }
}

/// Rows are acknowledged; `record` is what the ledger says of a shard now.
pub(crate) fn acknowledged<'a>(
    truth: &Truth,
    created: Timestamp,
    seqs: &[Seq],
    record: impl Fn(u32) -> Option<&'a Record>,
) -> Checked {
    match undone(truth, created, seqs, record) {
        None => Ok(()),
        Some(fact) => {
            violated(ACK, format!("row {} of t{} was acknowledged before it was done", fact.seq, fact.table))
        }
    }
}

/// The first of these rows that the ledger does not call done.
fn undone<'a, 't>(
    truth: &'t Truth,
    created: Timestamp,
    seqs: &[Seq],
    record: impl Fn(u32) -> Option<&'a Record>,
) -> Option<&'t Fact> {
    let facts = seqs.iter().filter_map(|seq| truth.at(created, *seq));
    facts.into_iter().find(|fact| !is_done(fact, record(fact.shard)))
}

/// Whether a record calls a row done.
pub(crate) fn is_done(fact: &Fact, record: Option<&Record>) -> bool {
    record.is_some_and(|record| {
        let lane = record.lanes.get(&table_name(fact.table));
        record.stream_created == fact.created
            && fact.seq <= lane.map_or(record.floor, |lane| lane.done.max(record.floor))
    })
}
