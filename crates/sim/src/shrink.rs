//! A failing schedule made small: fewer faults, fewer rows, fewer processes, as long as it breaks the same
//! invariant.

use crate::campaign::run;
use crate::fault::Fault;
use crate::invariants::Violation;
use crate::scenario::Scenario;
use crate::world::Outcome;

/// Runs that shrinking may take.
const TRIES: u32 = 400;

/// A smaller scenario that breaks what `scenario` breaks, and how it does. `checks_core`: as in the run that
/// found it.
pub(crate) fn shrink(scenario: Scenario, violation: &Violation, checks_core: bool) -> Scenario {
    let mut shrinking =
        Shrinking { best: scenario, invariant: violation.invariant, checks_core, tries: TRIES };
    loop {
        let before = shrinking.size();
        shrinking.faults();
        shrinking.rates();
        shrinking.processes();
        shrinking.rows();
        if shrinking.size() == before || shrinking.tries == 0 {
            return shrinking.best;
        }
    }
}

struct Shrinking {
    best: Scenario,
    invariant: &'static str,
    checks_core: bool,
    tries: u32,
}

impl Shrinking {
    fn size(&self) -> (usize, usize, u32) {
        (self.best.faults.len(), self.best.rows.len(), self.best.processes)
    }

    /// Keeps `smaller` if it still breaks the invariant.
    fn keep_if_it_fails(&mut self, smaller: Scenario) -> bool {
        if self.tries == 0 {
            return false;
        }
        self.tries -= 1;
        let Outcome { violation, .. } = run(&smaller, false, self.checks_core);
        let fails = violation.is_some_and(|violation| violation.invariant == self.invariant);
        if fails {
            self.best = smaller;
        }
        fails
    }

    /// Leaves out runs of faults, long ones first.
    fn faults(&mut self) {
        let mut length = self.best.faults.len().div_ceil(2);
        while length > 0 {
            let mut at = 0;
            while at < self.best.faults.len() {
                let mut smaller = self.best.clone();
                let end = (at + length).min(smaller.faults.len());
                smaller.faults.drain(at..end);
                if !self.keep_if_it_fails(smaller) {
                    at += length;
                }
            }
            length /= 2;
        }
    }

    /// Nothing goes wrong in passing any more, one kind after another.
    fn rates(&mut self) {
        let kinds = self.best.rates.kinds().len();
        for kind in 0..kinds {
            let mut smaller = self.best.clone();
            let rate = smaller.rates.kinds().swap_remove(kind);
            if *rate > 0 {
                *rate = 0;
                self.keep_if_it_fails(smaller);
            }
        }
    }

    fn processes(&mut self) {
        while self.best.processes > 1 {
            let mut smaller = self.best.clone();
            smaller.processes -= 1;
            let left = smaller.processes;
            smaller.clock_rates.truncate(left as usize);
            smaller.faults.retain(|(_, fault)| fault.process().is_none_or(|process| process < left));
            if !self.keep_if_it_fails(smaller) {
                return;
            }
        }
    }

    /// Leaves out rows: the later ones first, then runs of them.
    fn rows(&mut self) {
        let mut length = self.best.rows.len() / 2;
        while length > 8 {
            let mut at = self.best.rows.len();
            while at > 0 {
                let mut smaller = self.best.clone();
                let start = at.saturating_sub(length);
                smaller.rows.drain(start..at);
                if smaller.rows.is_empty() || !self.keep_if_it_fails(smaller) {
                    at = start;
                } else {
                    at = at.min(self.best.rows.len());
                }
                if self.tries == 0 {
                    return;
                }
            }
            length /= 2;
        }
    }
}

impl Fault {
    /// The process that it happens to.
    const fn process(&self) -> Option<u32> {
        match self {
            Self::Crash { process, .. }
            | Self::HostLost { process, .. }
            | Self::Pause { process, .. }
            | Self::Stop { process, .. }
            | Self::StopAndPause { process, .. }
            | Self::CutNats { process, .. }
            | Self::CutConsumers { process, .. }
            | Self::CutMembers { process, .. }
            | Self::MemberDeleted { process }
            | Self::NameTaken { process, .. }
            | Self::PauseShard { process, .. }
            | Self::CutStore { process, .. }
            | Self::Share { process, .. } => Some(*process),
            _ => None,
        }
    }
}
