//! Random news straight into the machine that shares shards out; what breaks something is made small, step by step.
//! `HOLDFAST_SEQUENCES=1000000 cargo test --release -p holdfast-sim --test any_claims` runs a million.

use holdfast_sim::{Settled, any_claims};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::{Config, FileFailurePersistence};

fn sequences() -> u32 {
    let asked = std::env::var("HOLDFAST_SEQUENCES").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or(if cfg!(debug_assertions) { 5_000 } else { 50_000 })
}

fn config() -> Config {
    Config {
        cases: sequences(),
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct("regressions/any_claims.txt"))),
        ..Config::default()
    }
}

/// Each step's bytes.
fn steps() -> impl Strategy<Value = Vec<Vec<u8>>> {
    proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..14), 0..120)
}

#[test]
fn sequences_get_somewhere() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut sum = Settled::default();
    for _ in 0..2_000 {
        let steps = steps().new_tree(&mut runner).expect("bytes can be drawn").current();
        let settled = any_claims(&steps).expect("no rule is broken");
        sum.claimed += settled.claimed;
        sum.given_up += settled.given_up;
        sum.orphans += settled.orphans;
        sum.left += settled.left;
        sum.deaf += settled.deaf;
        sum.resigned += settled.resigned;
    }
    println!("{sum:?}");
    assert!(sum.claimed > 2_000 && sum.given_up > 500 && sum.orphans > 200, "{sum:?}");
    assert!(sum.left > 1_000 && sum.deaf > 500 && sum.resigned > 100, "{sum:?}");
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn claims_keep_the_rules_whatever_is_told(steps in steps()) {
        if let Err(violation) = any_claims(&steps) {
            return Err(TestCaseError::fail(format!("{violation:?}")));
        }
    }
}
