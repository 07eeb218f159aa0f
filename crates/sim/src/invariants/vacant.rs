//! Invariant 8, sharing: while all processes that run see each other as they are, no shard that is fit for anybody goes
//! without a claimer for longer than a moment.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_core::row::ShardId;

use super::{Checked, violated};

pub(crate) const NAME: &str = "8 vacant";

/// What may take as long: orders on their way, and records that say so.
const MOMENT: Duration = Duration::from_millis(2_500);

/// Since when shards are vacant although there is nothing in the way.
#[derive(Debug, Default)]
pub(crate) struct Vacancies(BTreeMap<ShardId, Duration>);

impl Vacancies {
    /// A shard as it is now. `vacant`: nobody has it, everybody sees that, and somebody could take it.
    pub(crate) fn look(&mut self, now: Duration, shard: ShardId, vacant: bool) -> Checked {
        if !vacant {
            self.0.remove(&shard);
            return Ok(());
        }
        let since = *self.0.entry(shard).or_insert(now);
        if now > since + MOMENT {
            let lasting = now.saturating_sub(since).as_millis();
            return violated(NAME, format!("nobody has claimed s{shard} for {lasting} ms, and all see that"));
        }
        Ok(())
    }
}
