//! The same seed gives the same trace, byte for byte, on every machine and in every build.

use holdfast_sim::{Options, Profile, campaign, replay};

/// Changes whenever the core, a model or the drawing of schedules changes: then look at why, and write down
/// the new one. It must be the same in debug and release builds.
const SEED_1: u64 = 0x0204_8a1f_c1d5_ce0e;

#[test]
fn seed_1_is_what_it_was() {
    let trace = replay(1, Profile::Swarm);
    assert_eq!(trace.violation, None);
    assert_eq!(format!("{:016x}", trace.hash), format!("{SEED_1:016x}"));
}

#[test]
fn a_run_repeats_itself_whether_its_trace_is_kept_or_not() {
    let one = replay(2, Profile::Faults);
    let two = replay(2, Profile::Faults);
    assert_eq!(one.happenings, two.happenings);
    assert_eq!(one.hash, two.hash);
}

#[test]
fn threads_change_nothing() {
    let run = |threads| {
        let options = Options { first: 40, seeds: 6, profile: Profile::Swarm, threads };
        campaign(&options, &|_| {}).trace_hash
    };
    assert_eq!(run(1), run(3));
}
