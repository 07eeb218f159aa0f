//! The states of a shard, and which may follow which.
//!
//! The diagram in ARCHITECTURE.md is [`State::TRANSITIONS`], kept equal by a test. A transition that is not listed is a
//! fault of this code: debug builds and the simulator panic on it. That each one listed is taken is shown by the
//! test of random events.

/// How a shard stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Nobody asked for it.
    Unclaimed,
    /// Waiting for the pin.
    Standby,
    /// Pinned; the first write under the pin is under way.
    TakingOver,
    /// Its rows are ours to write.
    Owning,
    /// Another member's now: what was accepted is written.
    HandingOver,
    /// The process stops: what was accepted is written.
    Halting,
    /// The pin is being given up.
    Releasing,
    /// Given up.
    Released,
    /// Ended by itself.
    Failed,
}

use State::{Failed, Halting, HandingOver, Owning, Released, Releasing, Standby, TakingOver, Unclaimed};

impl State {
    /// Every transition there is, and what leads to it.
    pub const TRANSITIONS: &[(Self, Self, &str)] = &[
        (Unclaimed, Standby, "claimed"),
        (Unclaimed, Released, "stopped"),
        (Standby, TakingOver, "first row under a pin"),
        (Standby, Releasing, "first row under a pin, another member's by now"),
        (Standby, Released, "another member's, stopped"),
        (Standby, Failed, "consumer gone, record unusable"),
        (TakingOver, Owning, "fence stored"),
        (TakingOver, Standby, "pin lost"),
        (TakingOver, Releasing, "stopped"),
        (TakingOver, Failed, "consumer gone, record unusable"),
        (Owning, HandingOver, "another member's"),
        (Owning, Halting, "stopped"),
        (Owning, Standby, "pin lost, another tenure wrote"),
        (Owning, Failed, "consumer gone, sequences used again"),
        (HandingOver, Halting, "stopped"),
        (HandingOver, Releasing, "all written, time is up"),
        (HandingOver, Released, "pin lost"),
        (Halting, Releasing, "all written, time is up"),
        (Halting, Released, "pin lost"),
        (Releasing, Released, "pin given up, lost, time is up"),
    ];

    /// The state in a word or two, as people and `status` say it.
    #[must_use]
    pub const fn key(self) -> &'static str {
        match self {
            Unclaimed => "unclaimed",
            Standby => "standby",
            TakingOver => "taking over",
            Owning => "owning",
            HandingOver => "handing over",
            Halting => "halting",
            Releasing => "releasing",
            Released => "released",
            Failed => "failed",
        }
    }

    /// Whether `next` may follow.
    #[must_use]
    pub fn may_become(self, next: Self) -> bool {
        Self::TRANSITIONS.iter().any(|(from, to, _)| (*from, *to) == (self, next))
    }
}

#[cfg(feature = "mutants")]
mod seen {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    use super::State;

    std::thread_local! {
        static SEEN: RefCell<BTreeSet<(State, State)>> = const { RefCell::new(BTreeSet::new()) };
    }

    /// The transitions that shards took on this thread so far.
    #[must_use]
    pub fn seen() -> BTreeSet<(State, State)> {
        SEEN.with_borrow(Clone::clone)
    }

    pub(crate) fn see(from: State, to: State) {
        SEEN.with_borrow_mut(|seen| seen.insert((from, to)));
    }
}

#[cfg(feature = "mutants")]
pub(crate) use seen::see;
#[cfg(feature = "mutants")]
pub use seen::seen;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_diagram_is_the_code() {
        let page = include_str!("../../../ARCHITECTURE.md");
        let (_, diagram) = page.split_once("```mermaid\nstateDiagram-v2\n").expect("a diagram of states");
        let (diagram, _) = diagram.split_once("```").expect("its end");
        let name = |state: State| state.key().replace(' ', "_");
        let lines = State::TRANSITIONS.iter();
        let lines = lines.map(|(from, to, why)| format!("    {} --> {}: {why}\n", name(*from), name(*to)));
        let expected: Vec<String> = lines.collect();
        let expected = expected.concat();
        assert_eq!(diagram, expected);
        let all: [State; 9] =
            [Unclaimed, Standby, TakingOver, Owning, HandingOver, Halting, Releasing, Released, Failed];
        let pairs = all.iter().flat_map(|from| all.iter().map(move |to| (from, to)));
        let may = pairs.filter(|(from, to)| from.may_become(**to)).count();
        assert_eq!(may, State::TRANSITIONS.len(), "each is listed once, and nothing else may be");
    }
}
