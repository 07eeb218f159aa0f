//! Invariant 7: when faults stop, every row lands, and the ledger says so, within a stated bound.

use std::collections::BTreeMap;

use holdfast_core::record::Record;

use super::{Checked, once, violated};
use crate::truth::Truth;
use crate::world::table_name;

pub(crate) const NAME: &str = "7 lands";

/// What is still to do.
pub(crate) struct Unsettled {
    what: String,
    /// The ledger calls it done.
    lost: bool,
}

/// What is still to do, if anything is. `excused`: shards that stopped for a cause.
pub(crate) fn unsettled<'a>(
    truth: &Truth,
    record: impl Fn(u32) -> Option<&'a Record>,
    excused: impl Fn(u32) -> bool,
) -> Option<Unsettled> {
    // Behind a row that can never be inserted its table waits.
    let mut poisoned: BTreeMap<u32, bool> = BTreeMap::new();
    for fact in truth.all() {
        let behind = poisoned.entry(fact.table).or_default();
        *behind |= fact.bad && !fact.gone;
        if *behind || fact.gone || excused(fact.shard) {
            continue;
        }
        let recorded = record(fact.shard).is_some_and(|record| {
            let lane = record.lanes.get(&table_name(fact.table));
            fact.created == record.stream_created
                && fact.seq <= lane.map_or(record.floor, |lane| lane.done.max(record.floor))
        });
        if fact.landed == 0 {
            let what = format!("row {} of t{} has not landed", fact.seq, fact.table);
            return Some(Unsettled { what, lost: recorded });
        }
        if !recorded {
            return Some(Unsettled {
                what: format!("row {} of t{} is not recorded as done", fact.seq, fact.table),
                lost: false,
            });
        }
    }
    None
}

/// The bound is over.
pub(crate) fn bound(unsettled: Option<Unsettled>, stuck: &str) -> Checked {
    match unsettled {
        None => Ok(()),
        Some(Unsettled { what, lost: true }) => violated(once::LOSS, what),
        Some(Unsettled { what, .. }) => violated(NAME, format!("{what}; {stuck}")),
    }
}
