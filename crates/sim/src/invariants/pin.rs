//! Invariant 5: an owner that pulls keeps its pin while the network and the server are well.
//!
//! So a pin never lapses under an owner that runs and was not disturbed, and nobody takes another's pin
//! without having looked.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_core::ports::delivery::PinId;
use holdfast_core::row::ShardId;

use super::{Checked, violated};

pub(crate) const NAME: &str = "5 pin";

/// Until when each process is excused, and what each saw when it last looked.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    disturbed_until: BTreeMap<u32, Duration>,
    saw: BTreeMap<(u32, ShardId), Option<PinId>>,
}

impl Pins {
    /// Something keeps `process` from pulling in time, until then.
    pub(crate) fn disturbed(&mut self, process: u32, until: Duration) {
        let known = self.disturbed_until.entry(process).or_default();
        *known = (*known).max(until);
    }

    /// Since when nothing keeps a process from pulling.
    pub(crate) fn undisturbed(&self, process: u32) -> Duration {
        self.disturbed_until.get(&process).copied().unwrap_or_default()
    }

    /// A pin lapsed. `owns`: its holder runs and believes to have it.
    pub(crate) fn lapsed(
        &self,
        now: Duration,
        shard: ShardId,
        process: u32,
        owns: bool,
        pinned_ttl: Duration,
    ) -> Checked {
        // Whatever disturbed it must be over for long enough to have pulled again.
        let excused = self.disturbed_until.get(&process).is_some_and(|until| now < *until + pinned_ttl * 2);
        if owns && !excused {
            return violated(NAME, format!("p{process} let its pin of s{shard} lapse, undisturbed"));
        }
        Ok(())
    }

    /// The consumer showed `pin` to a process.
    pub(crate) fn looked(&mut self, process: u32, shard: ShardId, pin: Option<PinId>) {
        self.saw.insert((process, shard), pin);
    }

    /// Whether the last look of a process showed that the pin `own` is pinned.
    pub(crate) fn knows(&self, process: u32, shard: ShardId, own: Option<&PinId>) -> bool {
        own.is_some() && self.saw.get(&(process, shard)).and_then(Option::as_ref) == own
    }
}
