//! A row on its way to the dead letters.

use crate::ask::Ask;
use crate::record::Parked;
use crate::row::{Mark, Row, Seq};

/// What happens next to it.
#[derive(Clone, Debug)]
pub(crate) enum Stage {
    /// The write that says so is not known to be stored.
    Intent,
    /// Decided by an earlier tenure; the row must come from the stream first.
    Collect,
    /// To be published when due; under way.
    Publish(Ask),
    /// Decided by an earlier tenure, and the row is gone from the stream: there is nothing to keep.
    Gone,
    /// Decided by an earlier tenure, and this row of its table came before it: needs a person.
    Stopped(Seq),
}

/// A row that is parked, or about to be. The decision stands in the record before anything is published, so
/// that an heir never stores what is a dead letter already.
#[derive(Clone, Debug)]
pub(crate) struct Parking {
    pub(crate) parked: Parked,
    /// None until it has come from the stream again.
    pub(crate) row: Option<Row>,
    /// Up to here the floor may go; none: where it is.
    pub(crate) before: Option<Mark>,
    pub(crate) stage: Stage,
    /// Its intent has aged: the record's answer is waited for, not a time.
    pub(crate) awaits_proof: bool,
    pub(crate) tries: u32,
}

impl Parking {
    /// A row that is at hand; the decision is to be written next.
    pub(crate) fn decide(row: Row, before: Option<Mark>, parked: Parked) -> Self {
        Self { parked, row: Some(row), before, stage: Stage::Intent, awaits_proof: false, tries: 0 }
    }

    /// A decision of an earlier tenure.
    pub(crate) fn inherit(parked: Parked) -> Self {
        Self { parked, row: None, before: None, stage: Stage::Collect, awaits_proof: false, tries: 0 }
    }
}
