//! Invariant 2: a table's rows are in sequence order in the store.
//!
//! The parts of one batch are committed in any order, and what a repair adds comes last; so order is between
//! batches: nothing of a batch may land after a row that follows the batch.

use std::collections::BTreeMap;

use holdfast_core::row::{Row, Seq};
use holdfast_core::time::Timestamp;

use super::{Checked, violated};
use crate::jetstream::number_of;
use crate::truth::Truth;

pub(crate) const NAME: &str = "2 order";

/// The highest row of each table, by stream.
#[derive(Debug, Default)]
pub(crate) struct Order(BTreeMap<(u32, Timestamp), Seq>);

impl Order {
    /// Rows of the batch that ends at `last` were committed.
    pub(crate) fn landed(
        &mut self,
        truth: &mut Truth,
        table: u32,
        created: Timestamp,
        last: Seq,
        rows: &[Row],
    ) -> Checked {
        // A row that the stream does not have any more has no place in its order: the sequence may be
        // another row's by now.
        let mut here = |row: &&Row| truth.by_number(number_of(&row.payload)).is_none_or(|fact| !fact.gone);
        let Some(first) = rows.iter().find(&mut here) else { return Ok(()) };
        let highest = self.0.entry((table, created)).or_default();
        if *highest > last {
            return violated(NAME, format!("row {} landed in t{table} after row {highest}", first.seq));
        }
        let landed = rows.iter().filter(here).map(|row| row.seq).max();
        *highest = (*highest).max(landed.unwrap_or_default());
        Ok(())
    }

    /// The stream goes on from `last` again.
    pub(crate) fn tail_lost(&mut self, last: Seq) {
        for highest in self.0.values_mut() {
            *highest = (*highest).min(last);
        }
    }
}
