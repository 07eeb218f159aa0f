//! Invariant 3, the other half: a row that is trimmed is done in a stored record.

use holdfast_core::record::Record;
use holdfast_core::row::Seq;
use holdfast_core::time::Timestamp;

use super::{Checked, violated};
use crate::truth::Truth;
use crate::world::table_name;

pub(crate) const NAME: &str = "3 trim";

/// Rows were trimmed; `record` is what the ledger says of a shard now.
pub(crate) fn removed<'a>(
    truth: &Truth,
    created: Timestamp,
    seqs: &[Seq],
    record: impl Fn(u32) -> Option<&'a Record>,
) -> Checked {
    for seq in seqs {
        let Some(fact) = truth.at(created, *seq) else { continue };
        let done = record(fact.shard).is_some_and(|record| {
            let lane = record.lanes.get(&table_name(fact.table));
            record.stream_created == created
                && *seq <= lane.map_or(record.floor, |lane| lane.done.max(record.floor))
        });
        if !done {
            return violated(NAME, format!("row {seq} of t{} was trimmed before it was done", fact.table));
        }
    }
    Ok(())
}
