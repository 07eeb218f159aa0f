//! The process's clock, as the core counts time.

use std::time::Instant as Monotonic;

use holdfast_core::time::Instant;

/// A monotonic clock that starts when it is made. It goes on while the process is frozen.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Monotonic);

impl Clock {
    /// Starts a clock.
    #[must_use]
    pub fn start() -> Self {
        Self(Monotonic::now())
    }

    /// The time now.
    #[must_use]
    pub fn now(&self) -> Instant {
        Instant::at(self.0.elapsed())
    }

    /// The same moment on tokio's clock.
    #[must_use]
    pub fn to_tokio(&self, instant: Instant) -> tokio::time::Instant {
        // A deadline too far away for the clock is as good as a day from now: the driver looks again then.
        let day = std::time::Duration::from_hours(24);
        let ahead = instant.since(self.now()).min(day);
        tokio::time::Instant::now() + ahead
    }
}
