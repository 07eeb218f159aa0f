//! Rule 6, from outside: a resync is clean. After a reset's answer every delivery comes, in number, unless
//! something was lost or the consumer was set anew since.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_core::row::ShardId;

use super::{Checked, violated};

pub(crate) const NAME: &str = "6 clean resync";

/// When each shard's deliveries were last disturbed.
#[derive(Debug, Default)]
pub(crate) struct Resyncs(BTreeMap<ShardId, Duration>);

impl Resyncs {
    /// A delivery was lost, or the consumer's position changed.
    pub(crate) fn disturbed(&mut self, now: Duration, shard: ShardId) {
        let last = self.0.entry(shard).or_default();
        *last = now.max(*last);
    }

    /// A shard resyncs, since deliveries came out of number; the last reset was answered at `answered`.
    pub(crate) fn again(&self, shard: ShardId, answered: Duration) -> Checked {
        if self.0.get(&shard).is_none_or(|disturbed| *disturbed <= answered) {
            return violated(
                NAME,
                format!("s{shard} resyncs although nothing was lost since its last reset"),
            );
        }
        Ok(())
    }
}
