//! What judges a change of the core that nobody meant: `cargo xtask mutate`. `HOLDFAST_SEEDS` says how many seeds
//! it takes; without, a few.

use holdfast_sim::{Options, Profile, any_failing};

#[test]
fn no_seed_breaks_anything() {
    let seeds = std::env::var("HOLDFAST_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(10);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    // The first is a shorter way to what breaks everything.
    for (profile, seeds) in [(Profile::Calm, 2), (Profile::Swarm, seeds)] {
        assert_eq!(any_failing(&Options { first: 0, seeds, profile, threads }), None);
    }
}
