//! A schedule of faults and rows, through the simulator: no invariant broken. On request what breaks one is made small.
#![no_main]

use holdfast_fuzz::SHRINK;

libfuzzer_sys::fuzz_target!(init: holdfast_fuzz::plant(), |bytes: &[u8]| {
    if let Err(violation) = holdfast_sim::any_schedule(bytes) {
        let said = format!("{}: {}", violation.invariant, violation.how);
        // Not while fuzzing: it takes hundreds of runs, and an input may take one limit of time only.
        if std::env::var_os(SHRINK).is_some() {
            eprintln!("{said}");
            let small = holdfast_sim::shrunk_schedule(bytes);
            eprintln!("{}", serde_json::to_string_pretty(&small).expect("plain data"));
        }
        panic!("{said}");
    }
});
