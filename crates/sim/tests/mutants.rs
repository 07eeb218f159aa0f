//! Every safeguard is needed: switched off, an invariant notices within 500 seeds. Run with
//! `cargo test --release -p holdfast-sim --features mutants --test mutants`.

#[cfg(all(feature = "mutants", not(debug_assertions)))]
#[test]
fn every_mutant_is_caught() {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let report = holdfast_sim::mutants(None, 0, 500, threads, &mut |_| {});
    assert!(report.len() >= 24);
    let survivors: Vec<_> = report.iter().filter(|mutant| !mutant.caught).collect();
    assert!(survivors.is_empty(), "{survivors:#?}");
    assert!(
        report
            .iter()
            .all(|mutant| { mutant.invariant.is_some_and(|name| holdfast_sim::INVARIANTS.contains(&name)) })
    );
}

/// Where no feature asks for it there is no switch: that every rule is in force is known to the compiler.
#[cfg(not(feature = "mutants"))]
#[test]
fn without_the_feature_there_is_no_switch() {
    use holdfast_core::rule::{Rule, safeguard};
    const { assert!(safeguard(Rule::IntentFirst) && safeguard(Rule::FenceOnNewPin)) };
}

/// No package of the workspace but this one can turn the switches on.
#[test]
fn no_other_package_asks_for_the_switches() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let workspace = std::fs::read_to_string(root.join("Cargo.toml")).expect("the workspace has a manifest");
    let members = workspace.split_once("members = [").and_then(|(_, rest)| rest.split_once(']'));
    let (members, _) = members.expect("the workspace names its members");
    let members: Vec<&str> =
        members.split('"').skip(1).step_by(2).filter(|member| *member != "crates/sim").collect();
    assert!(members.contains(&"crates/core") && members.contains(&"crates/daemon"));
    for member in members.iter().chain(&["."]) {
        let manifest = std::fs::read_to_string(root.join(member).join("Cargo.toml")).expect("a manifest");
        // The core declares the feature; nobody may name it besides.
        let asks =
            |line: &&str| line.contains("mutants") && !(*member == "crates/core" && *line == "mutants = []");
        assert_eq!(manifest.lines().find(asks), None, "{member}");
    }
}
