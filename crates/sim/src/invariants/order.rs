//! Invariant 2: a table's rows are in sequence order in the store.
//!
//! The parts of one batch are committed in any order, and what a repair adds comes last; so order is between
//! batches: nothing of a batch may land after a row that follows the batch. (A batch of which some rows had landed
//! and that was split has landed in part before its parts do.)

use std::collections::BTreeMap;

use holdfast_core::row::{Row, Seq};
use holdfast_core::time::Timestamp;

use super::intent::Bounds;
use super::{Checked, violated};
use crate::jetstream::number_of;
use crate::truth::Truth;

pub(crate) const NAME: &str = "2 order";

/// What has landed in each table, by stream.
#[derive(Debug, Default)]
pub(crate) struct Order(BTreeMap<(u32, Timestamp), Landed>);

#[derive(Debug, Default)]
struct Landed {
    highest: Seq,
    /// The highest row of each batch, by its first and last row.
    batches: BTreeMap<(Seq, Seq), Seq>,
}

impl Order {
    /// Rows of a batch were committed. `was_split`: whether a batch of these bounds was.
    pub(crate) fn landed(
        &mut self,
        truth: &mut Truth,
        table: u32,
        created: Timestamp,
        batch: Bounds,
        rows: &[Row],
        was_split: impl Fn(Seq, Seq) -> bool,
    ) -> Checked {
        // A row that the stream does not have any more has no place in its order: the sequence may be
        // another row's by now. Nor has one that may be there again, since its table cannot be read back.
        let mut here = |row: &&Row| {
            truth.by_number(number_of(&row.payload)).is_none_or(|fact| !fact.gone && fact.spare == 0)
        };
        let Some(first) = rows.iter().find(&mut here) else { return Ok(()) };
        let landed = self.0.entry((table, created)).or_default();
        if landed.highest > batch.last {
            // What landed of a batch that this one is a part of came before it for a reason.
            let parent = |(first, last): &(Seq, Seq)| {
                (*first..=*last).contains(&batch.first) && was_split(*first, *last)
            };
            let later = landed.batches.iter().filter(|(_, highest)| **highest > batch.last);
            if let Some((_, highest)) = later.into_iter().find(|(bounds, _)| !parent(bounds)) {
                return violated(NAME, format!("row {} landed in t{table} after row {highest}", first.seq));
            }
        }
        let highest = rows.iter().filter(here).map(|row| row.seq).max().unwrap_or_default();
        landed.highest = landed.highest.max(highest);
        let known = landed.batches.entry((batch.first, batch.last)).or_default();
        *known = (*known).max(highest);
        Ok(())
    }

    /// The stream goes on from `last` again.
    pub(crate) fn tail_lost(&mut self, last: Seq) {
        for landed in self.0.values_mut() {
            landed.highest = landed.highest.min(last);
            landed.batches.values_mut().for_each(|highest| *highest = (*highest).min(last));
        }
    }

    /// The ledger was set back: what landed before is not in its order any more.
    pub(crate) fn ledger_restored(&mut self) {
        self.0.clear();
    }
}
