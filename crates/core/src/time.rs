//! The core's own time. It never reads a clock: every event carries the instant at which it is handled.

use std::ops::{Add, Sub};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A moment on the driver's monotonic clock, counted from a start of its own choosing.
///
/// Only differences mean anything. A driver must never hand in an instant before an earlier one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(Duration);

impl Instant {
    /// The driver's start.
    pub const START: Self = Self(Duration::ZERO);

    /// The instant `since_start` after the driver's start.
    #[must_use]
    pub const fn at(since_start: Duration) -> Self {
        Self(since_start)
    }

    /// How long this instant is after the driver's start.
    #[must_use]
    pub const fn since_start(self) -> Duration {
        self.0
    }

    /// How long this instant is after `earlier`; zero if it is before it.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    /// Saturates at the end of time, so that a configured "for ever" is no overflow.
    fn add(self, rhs: Duration) -> Self {
        Self(self.0.saturating_add(rhs))
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, rhs: Self) -> Duration {
        self.since(rhs)
    }
}

/// A moment on a server's wall clock, in nanoseconds since 1970.
///
/// It names things (a stream by its creation, a row by when it was stored) and is compared for equality
/// only: no decision rests on the order of two wall clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub i64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instant_before_another_is_no_time_after_it() {
        let early = Instant::at(Duration::from_secs(1));
        let late = Instant::at(Duration::from_secs(3));
        assert_eq!(late - early, Duration::from_secs(2));
        assert_eq!(early - late, Duration::ZERO);
    }

    #[test]
    fn for_ever_is_no_overflow() {
        assert_eq!((Instant::at(Duration::from_secs(1)) + Duration::MAX).since_start(), Duration::MAX);
    }
}
