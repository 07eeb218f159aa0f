//! Invariant 8, sharing: a shard is given up by its owner only when a live member's record says that it stands by for it, or
//! somebody wants it paused.

use holdfast_core::member::MemberId;
use holdfast_core::row::ShardId;

use super::{Checked, violated};
use crate::view::View;

pub(crate) const NAME: &str = "8 given up to nobody";

/// A process that owns a shard and does not stop gives it up.
pub(crate) fn gives_up(member: &MemberId, shard: ShardId, view: &View) -> Checked {
    let stands_by = |other: &holdfast_core::member::Member| {
        other.id != *member && other.shards.get(&shard).is_some_and(|hold| !hold.leaving)
    };
    let paused = |other: &holdfast_core::member::Member| other.paused.contains(&shard);
    if view.paused.contains(&shard) || view.live().any(|other| stands_by(&other) || paused(&other)) {
        return Ok(());
    }
    violated(NAME, format!("{member} gives s{shard} up, and nobody that it knows of stands by for it"))
}
