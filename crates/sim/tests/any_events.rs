//! Random event sequences straight into a shard; what breaks something is made small, step by step.
//! `HOLDFAST_SEQUENCES=1000000 cargo test --release -p holdfast-sim --test any_events` runs a million.

use holdfast_sim::{Reached, any_events};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::{Config, FileFailurePersistence};

fn sequences() -> u32 {
    let asked = std::env::var("HOLDFAST_SEQUENCES").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or(if cfg!(debug_assertions) { 10_000 } else { 100_000 })
}

fn config() -> Config {
    Config {
        cases: sequences(),
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct("regressions/any_events.txt"))),
        ..Config::default()
    }
}

/// Each step's bytes.
fn steps() -> impl Strategy<Value = Vec<Vec<u8>>> {
    proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..30), 0..180)
}

#[test]
fn sequences_get_somewhere() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut sum = Reached::default();
    for _ in 0..2_000 {
        let steps = steps().new_tree(&mut runner).expect("bytes can be drawn").current();
        let reached = any_events(&steps).expect("no rule is broken");
        sum.tenures += reached.tenures;
        sum.inserts += reached.inserts;
        sum.stored += reached.stored;
        sum.split += reached.split;
        sum.letters += reached.letters;
        sum.acked += reached.acked;
        sum.released += reached.released;
    }
    println!("{sum:?}");
    assert!(sum.tenures > 1_000 && sum.inserts > 1_000 && sum.stored > 500 && sum.released > 100, "{sum:?}");
    assert!(sum.split > 20 && sum.letters > 100 && sum.acked > 100, "{sum:?}");
}

/// The diagram of states shows what can happen, and all of it.
#[cfg(feature = "mutants")]
#[test]
fn every_transition_is_taken() {
    use holdfast_core::state::{State, seen};
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let expected: std::collections::BTreeSet<_> =
        State::TRANSITIONS.iter().map(|(from, to, _)| (*from, *to)).collect();
    for _ in 0..200_000 {
        let steps = steps().new_tree(&mut runner).expect("bytes can be drawn").current();
        any_events(&steps).expect("no rule is broken");
        if seen() == expected {
            return;
        }
    }
    let never: Vec<_> = expected.difference(&seen()).copied().collect();
    panic!("never taken: {never:?}");
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_shard_keeps_the_rules_whatever_happens(steps in steps()) {
        if let Err(violation) = any_events(&steps) {
            return Err(TestCaseError::fail(format!("{violation:?}")));
        }
    }
}
