//! Invariant 8, sharing: nobody is taken for dead but for a cause.
//!
//! A member whose heartbeat is over was really silent for a good part of a lease: a process that is deaf must not take
//! its own silence for theirs. A member that nobody answers for really had no connection: one that is frozen has one.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use holdfast_core::claims::Gone;
use holdfast_core::member::MemberId;

use super::{Checked, violated};

pub(crate) const NAME: &str = "8 taken for dead";

/// Longer than any two requests take whose answers count.
const ASKING: Duration = Duration::from_secs(5);
/// Longer than any lease.
const KEPT: Duration = Duration::from_secs(30);

/// Signs of life, as the servers saw them.
#[derive(Debug, Default)]
pub(crate) struct Lives {
    /// When each member's record was written.
    written: BTreeMap<MemberId, VecDeque<Duration>>,
    /// Since when each member has had a connection, while it has one.
    connected: BTreeMap<MemberId, Duration>,
}

impl Lives {
    /// A member's record is written.
    pub(crate) fn written(&mut self, now: Duration, member: MemberId) {
        let times = self.written.entry(member).or_default();
        times.push_back(now);
        while times.front().is_some_and(|at| *at + KEPT < now) {
            times.pop_front();
        }
    }

    /// Whether a member has a connection from now on.
    pub(crate) fn connected(&mut self, now: Duration, member: MemberId, is: bool) {
        if is {
            self.connected.entry(member).or_insert(now);
        } else {
            self.connected.remove(&member);
        }
    }

    /// Somebody takes a member for dead. `lease`: by the true clock.
    pub(crate) fn taken_for_gone(
        &self,
        now: Duration,
        by: &MemberId,
        member: &MemberId,
        why: Gone,
        lease: Duration,
    ) -> Checked {
        match why {
            Gone::Resigned | Gone::Restarted => Ok(()),
            Gone::NoResponders => {
                let since = self.connected.get(member);
                if since.is_some_and(|since| *since + ASKING < now) {
                    let how =
                        format!("{by} believes that nobody answers for {member}, whose connection lives");
                    return violated(NAME, how);
                }
                Ok(())
            }
            Gone::LeaseOver => {
                let from = now.saturating_sub(lease * 11 / 10);
                let times = self.written.get(member).into_iter().flatten().copied();
                let mut last = from;
                let mut longest = Duration::ZERO;
                for at in times.filter(|at| *at > from).chain([now]) {
                    longest = longest.max(at.saturating_sub(last));
                    last = at;
                }
                if longest < lease * 2 / 5 {
                    let silent = longest.as_millis();
                    let how = format!("{by} ends the lease of {member}, which was silent for {silent} ms");
                    return violated(NAME, how);
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_ends_after_silence_and_no_sooner() {
        let id = MemberId::new("a").expect("a name");
        let secs = Duration::from_secs;
        let mut lives = Lives::default();
        let over =
            |lives: &Lives, now| lives.taken_for_gone(secs(now), &id, &id, Gone::LeaseOver, secs(5)).is_ok();
        (10..=20).for_each(|at| lives.written(secs(at), id.clone()));
        assert!(!over(&lives, 20) && !over(&lives, 21));
        assert!(over(&lives, 22));
    }
}
