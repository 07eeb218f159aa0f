//! Invariant 7: when faults stop, every row lands, and the ledger says so, within a stated bound.

use std::collections::BTreeMap;

use holdfast_core::record::Record;

use super::{Checked, once, trim, violated};
use crate::truth::{Fact, Truth};

pub(crate) const NAME: &str = "7 lands";

/// What is still to do.
pub(crate) struct Unsettled {
    what: String,
    /// The ledger calls it done.
    lost: bool,
}

/// What is still to do, if anything is. `excused`: shards that stopped for a cause. `poison`: a row that can never be
/// inserted, and for which there are no dead letters. `lingers`: a row of a shard that is done and still waits to be
/// acknowledged.
pub(crate) fn unsettled<'a>(
    truth: &Truth,
    record: impl Fn(u32) -> Option<&'a Record>,
    excused: impl Fn(u32) -> bool,
    poison: impl Fn(&Fact) -> bool,
    lingers: impl Fn(&Fact) -> bool,
) -> Option<Unsettled> {
    // Behind a row that can never be inserted its table waits.
    let mut poisoned: BTreeMap<u32, bool> = BTreeMap::new();
    for fact in truth.all() {
        let behind = poisoned.entry(fact.table).or_default();
        *behind |= !fact.gone && poison(fact);
        if *behind || fact.gone || excused(fact.shard) {
            continue;
        }
        let recorded = trim::is_done(fact, record(fact.shard));
        if fact.landed == 0 && fact.letters == 0 {
            let what = format!("row {} of t{} has not landed", fact.seq, fact.table);
            return Some(Unsettled { what, lost: recorded });
        }
        if recorded && lingers(fact) {
            let what = format!("row {} of t{} is done and not acknowledged", fact.seq, fact.table);
            return Some(Unsettled { what, lost: false });
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
