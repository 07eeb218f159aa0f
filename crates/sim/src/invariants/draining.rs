//! Invariant 8, sharing: a process that is told to stop claims nothing, and ends within the time that it was given.

use std::time::Duration;

use holdfast_core::member::MemberId;
use holdfast_core::row::ShardId;

use super::{Checked, violated};

pub(crate) const NAME: &str = "8 draining";

/// The most that resigning may take after the deadline.
const RESIGNS: Duration = Duration::from_secs(3);

/// A process claims a shard.
pub(crate) fn claims(member: &MemberId, shard: ShardId, stops: bool) -> Checked {
    if stops { violated(NAME, format!("{member} is to stop and claims s{shard}")) } else { Ok(()) }
}

/// A process was told to stop by `deadline` and still runs, without a pause for so long.
pub(crate) fn pending(now: Duration, deadline: Duration, running_for: Duration) -> Checked {
    if now > deadline + RESIGNS && running_for > RESIGNS {
        return violated(NAME, "a process did not end in time");
    }
    Ok(())
}
