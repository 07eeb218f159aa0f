//! Any news, in any order, any number of times, straight into the machine that shares shards out.
#![no_main]

libfuzzer_sys::fuzz_target!(init: holdfast_fuzz::plant(), |bytes: &[u8]| {
    if let Err(violation) = holdfast_sim::any_claims(&holdfast_fuzz::steps(bytes)) {
        panic!("{}: {}", violation.invariant, violation.how);
    }
});
