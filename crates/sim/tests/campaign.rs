//! Short campaigns of every profile, and the seeds that once found something.

use std::fs;

use holdfast_sim::{Options, Profile, Report, any_schedule, campaign};

fn run(first: u64, seeds: u64, profile: Profile) -> Report {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    campaign(&Options { first, seeds, profile, threads }, &|_| {})
}

fn must_hold(report: &Report) {
    assert!(report.violations.is_empty(), "{:#?}", report.violations);
}

#[test]
fn nothing_breaks_in_the_calm() {
    must_hold(&run(0, 10, Profile::Calm));
}

#[test]
fn nothing_breaks_with_every_fault_at_once() {
    must_hold(&run(0, 20, Profile::Faults));
}

#[test]
fn nothing_breaks_in_the_swarm() {
    let report = run(0, 40, Profile::Swarm);
    must_hold(&report);
    assert!(report.simulated_seconds >= 40 * 120 && report.faults >= 40 * 5);
}

/// Each line of the file is a seed, its profile and what it found. (What a seed means changes with the drawing
/// of schedules; they stay as a part of every run.)
#[test]
fn what_once_broke_something_does_not_any_more() {
    for line in include_str!("../regressions/seeds.txt").lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        let seed = words.next().and_then(|word| word.parse().ok()).expect("a seed");
        let profile = words.next().and_then(|word| word.parse().ok()).expect("a profile");
        must_hold(&run(seed, 1, profile));
    }
}

/// Each file is an input of the fuzz target `schedule`, named after what it found.
#[test]
fn no_schedule_that_once_broke_something_does_any_more() {
    let kept = fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/regressions/schedules")).expect("a folder");
    let mut files: Vec<_> = kept.map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    assert!(!files.is_empty());
    for file in files {
        let bytes = fs::read(&file).expect("a file");
        if let Err(violation) = any_schedule(&bytes) {
            panic!("{}: {}: {}", file.display(), violation.invariant, violation.how);
        }
    }
}
