//! Invariant 8, sharing: nobody claims a shard that is not its own while a live member holds it: a pin that is missing,
//! or rows that wait, are no sign of death.

use holdfast_core::member::MemberId;
use holdfast_core::row::ShardId;

use super::{Checked, violated};
use crate::view::View;

pub(crate) const NAME: &str = "8 stands in for the living";

/// A process claims a shard that, as far as it knows, another one should have.
pub(crate) fn claims(member: &MemberId, shard: ShardId, view: &View) -> Checked {
    match view.live().find(|other| other.id != *member && other.shards.contains_key(&shard)) {
        Some(other) => violated(NAME, format!("{member} claims s{shard}, which {} holds", other.id)),
        None => Ok(()),
    }
}
