//! Any events, in any order, any number of times, straight into a shard: no panic, no rule broken.
#![no_main]

libfuzzer_sys::fuzz_target!(init: holdfast_fuzz::plant(), |bytes: &[u8]| {
    if let Err(violation) = holdfast_sim::any_events(&holdfast_fuzz::steps(bytes)) {
        panic!("{}: {}", violation.invariant, violation.how);
    }
});
