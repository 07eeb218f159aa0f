//! Invariant 7, the second half: a handover takes no longer than stated, takes no more rows, and writes what
//! was accepted while there is time for it.

use std::time::Duration;

use holdfast_core::row::Seq;

use super::{Checked, violated};

pub(crate) const NAME: &str = "7 handover";

/// The most that giving the pin back may take after the deadline.
const UNPIN: Duration = Duration::from_secs(2);

/// A shard that was told to stop.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handover {
    deadline: Duration,
    accepted: Seq,
}

impl Handover {
    /// It was told to stop by `deadline`, having accepted this far.
    pub(crate) const fn new(deadline: Duration, accepted: Seq) -> Self {
        Self { deadline, accepted }
    }

    /// The deadline for having written, by the true clock.
    pub(crate) const fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The shard halts, having accepted this far.
    pub(crate) fn halting(&self, accepted: Seq) -> Checked {
        if accepted > self.accepted {
            let how = format!(
                "rows up to {accepted} were taken, {} was the last one before the halt",
                self.accepted
            );
            return violated(NAME, how);
        }
        Ok(())
    }

    /// Its writing is over, with this many rows held.
    pub(crate) fn released(&self, now: Duration, held: u64, troubled: bool) -> Checked {
        if held > 0 && !troubled && now + Duration::from_millis(1) < self.deadline {
            return violated(
                NAME,
                format!("{held} rows were given up although there was time to write them"),
            );
        }
        Ok(())
    }

    /// It has not ended yet. `thawed`: how long it has been running without a pause.
    pub(crate) fn pending(&self, now: Duration, running_for: Duration) -> Checked {
        let margin = UNPIN * 2;
        if now > self.deadline + margin && running_for > margin {
            return violated(NAME, "a shard was not given up in time");
        }
        Ok(())
    }
}
