//! Invariant 8, sharing: a shard that a live member found broken for everybody is claimed by nobody.

use holdfast_core::member::{MemberId, Scope};
use holdfast_core::row::ShardId;

use super::{Checked, violated};
use crate::view::View;

pub(crate) const NAME: &str = "8 broken shard claimed";

/// A process claims a shard.
pub(crate) fn claims(member: &MemberId, shard: ShardId, view: &View) -> Checked {
    if view.failed.contains(&shard) {
        return violated(NAME, format!("{member} claims s{shard}, which has failed in its own hands"));
    }
    let broken = |other: &holdfast_core::member::Member| {
        other.id != *member && other.failed.get(&shard).is_some_and(|fault| fault.scope == Scope::Everywhere)
    };
    match view.live().find(broken) {
        Some(other) => violated(NAME, format!("{member} claims s{shard}, which {} found broken", other.id)),
        None => Ok(()),
    }
}
