//! A schedule of faults and rows, through the simulator: no invariant broken. What is broken is made small.
#![no_main]

libfuzzer_sys::fuzz_target!(init: holdfast_fuzz::plant(), |bytes: &[u8]| {
    if let Err((violation, small)) = holdfast_sim::any_schedule(bytes) {
        if let Some(small) = small {
            eprintln!("{}", serde_json::to_string_pretty(&small).expect("plain data"));
        }
        panic!("{}: {}", violation.invariant, violation.how);
    }
});
