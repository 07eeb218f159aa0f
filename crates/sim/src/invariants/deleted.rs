//! A consumer that is gone ends its shard within a stated time, even while every lane is blocked.

use std::time::Duration;

use holdfast_core::row::ShardId;

use super::{Checked, violated};

pub(crate) const NAME: &str = "7 deleted consumer";

/// The bound, and a margin for what was under way when it was deleted.
const WITHIN: Duration = Duration::from_secs(6);

/// The consumer of a shard is gone since `gone`; a machine of it runs in a process that was not disturbed since
/// `undisturbed`.
pub(crate) fn runs(now: Duration, shard: ShardId, gone: Duration, undisturbed: Duration) -> Checked {
    if now > gone.max(undisturbed) + WITHIN {
        let lasting = now.saturating_sub(gone).as_millis();
        return violated(NAME, format!("s{shard} goes on {lasting} ms after its consumer was deleted"));
    }
    Ok(())
}
