//! The simulator's one source of randomness.

use std::time::Duration;

use bytes::{Buf as _, Bytes};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// What a seed decides. Every draw is the same on every machine: no floats, no `usize`, no distributions of
/// a library that may change them.
#[derive(Clone, Debug)]
pub(crate) struct Chance {
    rng: ChaCha8Rng,
    /// A fuzzer's, which decide in place of the seed as long as there are some.
    bytes: Bytes,
}

impl Chance {
    /// The draws of `seed`. Different `strand`s of one seed have nothing to do with each other, so that
    /// drawing more of one leaves the others as they were.
    pub(crate) fn new(seed: u64, strand: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(strand);
        Self { rng, bytes: Bytes::new() }
    }

    /// What a fuzzer's bytes decide, and what is always the same when they are used up.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        Self { bytes: Bytes::copy_from_slice(bytes), ..Self::new(0, 0) }
    }

    /// Draws what is much and weighs little. A fuzzer's bytes are too few for it: two decide all of it.
    pub(crate) fn in_bulk<T>(&mut self, draw: impl FnOnce(&mut Self) -> T) -> T {
        if self.bytes.is_empty() { draw(self) } else { draw(&mut Self::new(self.below(1 << 16), 0)) }
    }

    /// 64 bits that count from above: what a fuzzer changes a little changes little.
    fn next(&mut self, n: u64) -> u64 {
        // As few bytes as tell `n` apart, and times no finer than they need be.
        let many = match n {
            0..=0x100 => 1,
            0x101..=0x1_0000 => 2,
            _ => 3,
        };
        if self.bytes.len() < many {
            self.bytes.clear();
            return self.rng.next_u64();
        }
        self.bytes.get_uint(many) << (64 - 8 * many)
    }

    /// A number below `n`, or 0 if there is none.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        // The high half of the product: as even as 64 bits allow, and one draw for each answer.
        let wide = u128::from(self.next(n)) * u128::from(n);
        u64::try_from(wide >> 64).unwrap_or_default()
    }

    /// A number from `low` to `high`, both included.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// The same as an index type.
    pub(crate) fn between32(&mut self, low: u32, high: u32) -> u32 {
        u32::try_from(self.between(u64::from(low), u64::from(high))).unwrap_or(low)
    }

    /// Yes, `permille` times in a thousand.
    pub(crate) fn permille(&mut self, permille: u32) -> bool {
        permille > 0 && self.below(1_000) < u64::from(permille)
    }

    /// A time from `low` to `high`.
    pub(crate) fn time(&mut self, low: Duration, high: Duration) -> Duration {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.between(nanos(low), nanos(high)))
    }

    /// A time from `low` to `high` milliseconds.
    pub(crate) fn millis(&mut self, low: u64, high: u64) -> Duration {
        self.time(Duration::from_millis(low), Duration::from_millis(high))
    }

    /// One of `choices`.
    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        let at = self.below(choices.len() as u64);
        choices[usize::try_from(at).unwrap_or_default()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_within_bounds_and_reach_them() {
        let mut chance = Chance::new(7, 0);
        let drawn: Vec<u64> = (0..1_000).map(|_| chance.between(3, 6)).collect();
        assert!((3..=6).all(|n| drawn.contains(&n)));
        assert!(drawn.iter().all(|n| (3..=6).contains(n)));
        assert_eq!(chance.below(0), 0);
        assert!(!chance.permille(0) && chance.permille(1_000));
    }

    #[test]
    fn bytes_decide_as_long_as_there_are_some() {
        let mut chance = Chance::of_bytes(&[0, 255, 128, 128, 0]);
        assert_eq!((chance.below(6), chance.below(6), chance.below(6), chance.below(1_000)), (0, 5, 3, 500));
        let mut spent = Chance::new(0, 0);
        assert_eq!(chance.below(1_000), spent.below(1_000));
        let bulk = |bytes| Chance::of_bytes(bytes).in_bulk(|chance| chance.below(1_000_000));
        assert_ne!(bulk(&[1, 2, 3]), bulk(&[1, 3, 3]));
        assert_eq!(bulk(&[]), Chance::new(0, 0).below(1_000_000));
    }

    #[test]
    fn a_seed_draws_the_same_for_ever() {
        let mut chance = Chance::new(1, 0);
        assert_eq!(
            [chance.below(1_000), chance.below(1_000)],
            [Chance::new(1, 0).below(1_000), {
                let mut again = Chance::new(1, 0);
                again.below(1_000);
                again.below(1_000)
            }]
        );
        assert_ne!(Chance::new(1, 0).below(u64::MAX), Chance::new(1, 1).below(u64::MAX));
    }
}
