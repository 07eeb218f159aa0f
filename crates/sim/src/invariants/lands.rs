//! Invariant 7: when faults stop, every row lands, and the ledger says so, within a stated bound.

use std::collections::BTreeMap;

use holdfast_core::record::Record;

use super::{Checked, once, violated};
use crate::truth::Truth;
use crate::world::table_name;

pub(crate) const NAME: &str = "7 lands";

/// What is still to do, if anything is. `excused`: shards that stopped for a cause.
pub(crate) fn unsettled<'a>(
    truth: &Truth,
    record: impl Fn(u32) -> Option<&'a Record>,
    excused: impl Fn(u32) -> bool,
) -> Option<String> {
    // Behind a row that can never be inserted its table waits.
    let mut poisoned: BTreeMap<u32, bool> = BTreeMap::new();
    for fact in truth.all() {
        let behind = poisoned.entry(fact.table).or_default();
        *behind |= fact.bad && !fact.gone;
        if *behind || fact.gone || excused(fact.shard) {
            continue;
        }
        if fact.landed == 0 {
            return Some(format!("row {} of t{} has not landed", fact.seq, fact.table));
        }
        let recorded = record(fact.shard).is_some_and(|record| {
            let lane = record.lanes.get(&table_name(fact.table));
            fact.created != record.stream_created
                || fact.seq <= lane.map_or(record.floor, |lane| lane.done.max(record.floor))
        });
        if !recorded {
            return Some(format!("row {} of t{} is not recorded as done", fact.seq, fact.table));
        }
    }
    None
}

/// The bound is over.
pub(crate) fn bound(unsettled: Option<String>, stuck: String) -> Checked {
    match unsettled {
        None => Ok(()),
        // The ledger passed it over, or it is still on its way.
        Some(what) if stuck.is_empty() => violated(once::LOSS, what),
        Some(what) => violated(NAME, format!("{what}; {stuck}")),
    }
}
