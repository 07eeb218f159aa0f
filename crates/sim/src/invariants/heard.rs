//! Invariant 8, sharing: nobody claims a shard before it was shown every member's record, its own stored one included.

use holdfast_core::member::MemberId;
use holdfast_core::record::Session;
use holdfast_core::row::ShardId;

use super::{Checked, violated};
use crate::view::View;

pub(crate) const NAME: &str = "8 claims unheard";

/// A process claims a shard.
pub(crate) fn claims(member: &MemberId, session: Session, shard: ShardId, view: &View) -> Checked {
    if view.snapshots == 0 {
        return violated(NAME, format!("{member} claims s{shard} and does not know who else there is"));
    }
    if !view.echoed.contains(&session) {
        return violated(NAME, format!("{member} claims s{shard} and nobody knows of it"));
    }
    Ok(())
}
