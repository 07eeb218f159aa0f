//! What bad rows cost: inserts, of a backlog that would go in one.

use std::time::Duration;

use holdfast_core::lane::ParkingPolicy;
use holdfast_core::ports::store::Level;

use crate::campaign::run;
use crate::fault::Rates;
use crate::jetstream::AckPolicy;
use crate::scenario::{Fit, Hints, Profile, RowPlan, Scenario, TablePlan};

const ROWS: usize = 50_000;
const EXACT: Hints = Hints { exact: 1_000, wrong: 0 };
const NONE: Hints = Hints { exact: 0, wrong: 0 };
const WRONG: Hints = Hints { exact: 0, wrong: 1_000 };

/// One process, one table, all rows there when it begins, and nothing goes wrong but that these rows are refused.
fn backlog(bad: &[usize], hints: Hints, max_partitions: usize) -> Scenario {
    let row = |at: usize| {
        let refused = Fit::Refused { from: Duration::ZERO, until: Duration::MAX };
        let fit = if bad.contains(&at) { refused } else { Fit::Good };
        RowPlan { at: Duration::ZERO, table: 0, size: 40, fit }
    };
    let table = TablePlan {
        shard: 0,
        level: Level::ExactlyOnce,
        partitions: if max_partitions > 0 { 4_096 } else { 1 },
        window: 1_000,
        max_partitions,
        exists_from: Duration::ZERO,
    };
    let millis = Duration::from_millis;
    Scenario {
        seed: 1,
        profile: Profile::Calm,
        processes: 1,
        shards: 1,
        tables: vec![table],
        rows: (0..ROWS).map(row).collect(),
        faults: Vec::new(),
        rates: Rates::default(),
        sharing: None,
        clock_rates: vec![1_000_000],
        pinned_ttl: Duration::from_secs(5),
        batch_rows: 50_000,
        batch_bytes: 1 << 30,
        batch_age: Duration::from_secs(2),
        share_rows: 200_000,
        share_bytes: 1 << 30,
        stale: Duration::from_secs(4),
        trim_interval: Duration::from_secs(5),
        history: Duration::ZERO,
        policy: AckPolicy::NONE,
        parking: ParkingPolicy { dead_letters: true, unknown_tables: false },
        hints,
        latency: millis(1),
        insert_time: millis(20),
        quiet_from: Duration::from_mins(1),
    }
}

/// Inserts and letters that it took.
fn cost(bad: &[usize], hints: Hints, max_partitions: usize) -> (u64, u64) {
    let outcome = run(&backlog(bad, hints, max_partitions), false, false);
    assert_eq!(outcome.violation, None);
    println!("{} bad: {} inserts, {} letters", bad.len(), outcome.inserts, outcome.letters);
    (outcome.inserts, outcome.letters)
}

#[test]
fn a_good_backlog_is_one_insert() {
    assert_eq!(cost(&[], EXACT, 0), (1, 0));
}

#[test]
fn one_bad_row_that_is_named_costs_few_inserts_wherever_it_is() {
    for at in [0, 1, 7, 25_000, 49_998, 49_999] {
        let (inserts, letters) = cost(&[at], EXACT, 0);
        assert_eq!(letters, 1);
        assert!(inserts <= 6, "row {at} cost {inserts} inserts");
    }
}

#[test]
fn bad_rows_that_are_named_cost_a_few_inserts_each() {
    let spread: Vec<usize> = (0..20).map(|n| n * 2_477 + 13).collect();
    let run: Vec<usize> = (30_000..30_020).collect();
    for bad in [spread, run] {
        let (inserts, letters) = cost(&bad, EXACT, 0);
        assert_eq!(letters, 20);
        assert!(inserts <= 6 * 20, "20 bad rows cost {inserts} inserts");
    }
}

#[test]
fn a_bad_row_that_is_not_named_costs_a_logarithm() {
    let (inserts, letters) = cost(&[31_234], NONE, 0);
    assert_eq!(letters, 1);
    assert!(inserts <= 3 * 17, "{inserts} inserts");
}

#[test]
fn wrong_names_cost_no_more_than_none() {
    let (inserts, letters) = cost(&[31_234], WRONG, 0);
    assert_eq!(letters, 1);
    assert!(inserts <= 6 * 17, "{inserts} inserts");
}

#[test]
fn a_backlog_with_too_many_partitions_goes_in_smaller_blocks() {
    // Rows of neighbouring numbers are of different partitions: no block of more than 1,024 rows is taken.
    let (inserts, letters) = cost(&[], EXACT, 1_024);
    assert_eq!(letters, 0);
    assert!(inserts <= 2 * 50_000 / 1_024 + 80, "{inserts} inserts");
}
