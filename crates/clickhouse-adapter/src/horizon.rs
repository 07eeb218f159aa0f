//! For how long a table must remember a token, and whether it does.
//!
//! An insert can be on its way, or a process frozen before it sends one, when others have inserted a lot since. Once
//! the table's window has forgotten its token, its rows would be stored a second time.

use std::time::Duration;

/// The longest that ClickHouse waits for the next bytes of a body before it drops it. Holdfast sends it with each
/// insert.
pub const RECEIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// How many partitions an insert into a table with partitions is taken to write to, where nothing is known of it:
/// those on both sides of a border.
const ASSUMED_PARTITIONS: u64 = 2;

/// What is configured about inserts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// The longest between a look at the ledger and the insert that rests on it.
    pub intent_age: Duration,
    /// The longest that an insert may take.
    pub insert_timeout: Duration,
    /// The longest that a row waits for its batch.
    pub batch_age: Duration,
}

/// What is seen of a table's partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Partitions {
    /// It has none, so an insert writes one part.
    None,
    /// Nothing was inserted lately, or the server does not say.
    Unknown,
    /// So many were written to lately, by all inserts together.
    Lately(u64),
}

/// Whether a table remembers tokens for long enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Horizon {
    /// The parts whose tokens the table remembers.
    pub window: u64,
    /// The longest from the last look at the ledger to the moment when an insert can still land.
    pub life: Duration,
    /// The parts that an insert is taken to make.
    pub parts_per_insert: u64,
    /// Whether [`Self::parts_per_insert`] is a guess: nothing was to be seen.
    pub assumed: bool,
    /// The inserts a minute that the configuration makes of a table whose batches are closed by age. One that fills
    /// its batches sooner makes more.
    pub inserts_per_minute: u64,
    /// The inserts a minute up to which the window outlasts [`Self::life`].
    pub allowed_per_minute: u64,
}

impl Horizon {
    /// The horizon of a table with a window of `window` parts.
    #[must_use]
    pub fn new(window: u64, partitions: Partitions, pace: Pace) -> Self {
        const MINUTE: u128 = Duration::from_mins(1).as_nanos();
        let life = pace.intent_age.saturating_add(pace.insert_timeout).saturating_add(RECEIVE_TIMEOUT);
        let (parts_per_insert, assumed) = match partitions {
            Partitions::None => (1, false),
            Partitions::Unknown => (ASSUMED_PARTITIONS, true),
            Partitions::Lately(seen) => (seen.max(1), false),
        };
        let narrow = |count: u128| u64::try_from(count).unwrap_or(u64::MAX);
        // The window must hold more parts than are made meanwhile.
        let spare = u128::from(window.saturating_sub(1)) * MINUTE;
        Self {
            window,
            life,
            parts_per_insert,
            assumed,
            inserts_per_minute: narrow(MINUTE.div_ceil(pace.batch_age.as_nanos().max(1))),
            allowed_per_minute: narrow(
                spare / u128::from(parts_per_insert).saturating_mul(life.as_nanos().max(1)),
            ),
        }
    }

    /// Whether the window outlasts every insert, at the pace that batches closed by age make.
    #[must_use]
    pub const fn is_enough(&self) -> bool {
        self.inserts_per_minute <= self.allowed_per_minute
    }

    /// The smallest window that does.
    #[must_use]
    pub fn needed(&self) -> u64 {
        let parts = u128::from(self.inserts_per_minute) * u128::from(self.parts_per_insert);
        let needed =
            parts.saturating_mul(self.life.as_nanos()).div_ceil(Duration::from_mins(1).as_nanos()) + 1;
        u64::try_from(needed).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PACE: Pace = Pace {
        intent_age: Duration::from_secs(10),
        insert_timeout: Duration::from_mins(2),
        batch_age: Duration::from_secs(1),
    };

    #[test]
    fn what_is_configured_by_default() {
        let horizon = Horizon::new(1_000, Partitions::None, PACE);
        assert_eq!(horizon.life, Duration::from_secs(160));
        assert_eq!((horizon.parts_per_insert, horizon.assumed), (1, false));
        assert_eq!((horizon.inserts_per_minute, horizon.allowed_per_minute), (60, 374));
        assert!(horizon.is_enough());
        assert_eq!(horizon.needed(), 161);
    }

    #[test]
    fn partitions_and_haste_use_it_up() {
        let ten = Horizon::new(1_000, Partitions::Lately(10), PACE);
        assert_eq!((ten.allowed_per_minute, ten.is_enough(), ten.needed()), (37, false, 1_601));
        let unknown = Horizon::new(100, Partitions::Unknown, PACE);
        assert_eq!((unknown.parts_per_insert, unknown.assumed, unknown.is_enough()), (2, true, false));
        let hasty = Pace { batch_age: Duration::from_millis(100), ..PACE };
        let hasty = Horizon::new(1_000, Partitions::None, hasty);
        assert_eq!((hasty.inserts_per_minute, hasty.is_enough(), hasty.needed()), (600, false, 1_601));
    }

    #[test]
    fn nothing_overflows() {
        let none =
            Pace { intent_age: Duration::MAX, insert_timeout: Duration::MAX, batch_age: Duration::ZERO };
        let horizon = Horizon::new(u64::MAX, Partitions::Lately(u64::MAX), none);
        assert_eq!((horizon.allowed_per_minute, horizon.is_enough()), (0, false));
        let _ = horizon.needed();
        assert!(!Horizon::new(0, Partitions::Lately(0), PACE).is_enough());
    }

    proptest! {
        #[test]
        fn what_is_needed_is_enough_and_no_more(
            partitions in 1_u64..1_000, age in 1_u64..100_000, timeout in 1_u64..1_000,
        ) {
            let pace = Pace {
                batch_age: Duration::from_millis(age),
                insert_timeout: Duration::from_secs(timeout),
                ..PACE
            };
            let of = |window| Horizon::new(window, Partitions::Lately(partitions), pace);
            let needed = of(1).needed();
            prop_assert!(of(needed).is_enough(), "{:?}", of(needed));
            prop_assert!(!of(needed - 1).is_enough(), "{:?}", of(needed - 1));
        }
    }
}
