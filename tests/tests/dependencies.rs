//! Dependencies point inwards only: `daemon → {nats, clickhouse, sim} → core`, and the core does no I/O.

use std::collections::BTreeSet;
use std::process::Command;

use holdfast_testbed::build;

/// What a package is built from, without what only its tests use.
fn dependencies(package: &str, features: &[&str]) -> BTreeSet<String> {
    let output = Command::new(build::cargo())
        .args([
            "tree",
            "--package",
            package,
            "--edges",
            "normal,build",
            "--prefix",
            "none",
            "--format",
            "{p}",
        ])
        .args(features)
        .current_dir(build::workspace())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| !name.is_empty() && *name != package)
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_core_is_built_from_data_structures_only() {
    // Each of these is looked at when it is added: does it open files or sockets, read a clock, draw numbers?
    let known = BTreeSet::from(
        [
            "async-trait",
            "bytes",
            "itoa",
            "memchr",
            "proc-macro2",
            "quote",
            "serde",
            "serde_core",
            "serde_derive",
            "serde_json",
            "syn",
            "thiserror",
            "thiserror-impl",
            "unicode-ident",
            "zmij",
        ]
        .map(str::to_owned),
    );
    let unknown: Vec<_> = dependencies("holdfast-core", &[]).difference(&known).cloned().collect();
    assert!(unknown.is_empty(), "the core depends on {unknown:?}");
}

#[test]
fn adapters_know_the_core_and_not_each_other() {
    for adapter in ["holdfast-nats", "holdfast-clickhouse"] {
        let ours: Vec<_> =
            dependencies(adapter, &[]).into_iter().filter(|name| name.starts_with("holdfast")).collect();
        assert_eq!(ours, ["holdfast-core"], "{adapter}");
    }
}

#[test]
fn the_simulator_has_no_runtime() {
    assert!(!dependencies("holdfast-sim", &[]).contains("tokio"));
    assert!(dependencies("holdfast-sim", &["--features", "embedded"]).contains("tokio"));
}

#[test]
fn no_mutant_and_no_next_format_can_be_reached_in_a_daemon() {
    let output = Command::new(build::cargo())
        .args(["tree", "--package", "holdfast", "--edges", "features,normal,build", "--prefix", "none"])
        .current_dir(build::workspace())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("holdfast-core"), "{text}");
    assert!(!text.contains("mutants"), "the daemon is built with mutants");
    assert!(!text.contains("next-format"), "the daemon is built with the formats of a next version");
}
