//! Safeguards switched off, one after another: a proof that notices nothing proves nothing.
//!
//! A mutant counts as caught only by an invariant. A run in which the core itself panics is passed over: its
//! own assertions are no part of the proof.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use holdfast_core::rule::{Rule, switch_off};
use serde::Serialize;

use crate::campaign::{PANIC, run};
use crate::invariants::Violation;
use crate::scenario::{Profile, Scenario};

/// What became of a mutant.
#[derive(Clone, Debug, Serialize)]
pub struct Mutant {
    /// The rule that was switched off.
    pub name: &'static str,
    /// What the rule says.
    pub rule: &'static str,
    /// Whether an invariant noticed.
    pub caught: bool,
    /// Seeds until it was noticed, or all that were tried.
    pub seeds_needed: u64,
    /// The seed that showed it.
    pub seed: Option<u64>,
    /// Which invariant noticed.
    pub invariant: Option<&'static str>,
    /// How it showed.
    pub how: Option<String>,
    /// Seeds in which the core panicked before any invariant noticed.
    pub panics: u64,
}

/// Every mutant's name.
#[must_use]
pub fn names() -> Vec<&'static str> {
    Rule::ALL.iter().map(|rule| rule.key()).collect()
}

/// Runs mutants, each on up to `seeds` seeds from `first`; all of them, or the one that is named. `progress` is
/// told of each that is done.
pub fn mutants(
    only: Option<&str>,
    first: u64,
    seeds: u64,
    threads: usize,
    progress: &mut dyn FnMut(&Mutant),
) -> Vec<Mutant> {
    let chosen = Rule::ALL.iter().copied().filter(|rule| only.is_none_or(|only| only == rule.key()));
    chosen
        .map(|rule| {
            let mutant = hunt(rule, first, seeds, threads);
            progress(&mutant);
            mutant
        })
        .collect()
}

/// The lowest seed that shows what is lost without `rule`.
fn hunt(rule: Rule, first: u64, seeds: u64, threads: usize) -> Mutant {
    let next = AtomicU64::new(first);
    let panics = AtomicU64::new(0);
    let found = AtomicBool::new(false);
    let end = first.saturating_add(seeds);
    let hunt = || {
        switch_off(Some(rule));
        let mut caught: Option<(u64, Violation)> = None;
        while !found.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                break;
            }
            match run(&Scenario::draw(seed, Profile::Swarm), false, false).violation {
                Some(violation) if violation.invariant == PANIC => {
                    panics.fetch_add(1, Ordering::Relaxed);
                }
                Some(violation) => {
                    found.store(true, Ordering::Relaxed);
                    caught = Some((seed, violation));
                }
                None => {}
            }
        }
        switch_off(None);
        caught
    };
    let caught = std::thread::scope(|scope| {
        let hunters: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(hunt)).collect();
        // Seeds are given out in order, so the lowest of what was found when the hunt ended is the first.
        let caught = hunters.into_iter().filter_map(|hunter| hunter.join().ok().flatten());
        caught.min_by_key(|(seed, _)| *seed)
    });
    let (seed, violation) = caught.unzip();
    Mutant {
        name: rule.key(),
        rule: rule.summary(),
        caught: seed.is_some(),
        seeds_needed: seed.map_or(seeds, |seed| seed - first + 1),
        seed,
        invariant: violation.as_ref().map(|violation| violation.invariant),
        how: violation.map(|violation| violation.how),
        panics: panics.into_inner(),
    }
}
