//! A question that is asked until it is answered, and how long to wait between tries.

use std::time::Duration;

use crate::mix::mix;
use crate::ports::Attempt;
use crate::time::Instant;

/// Gives out attempt numbers, each once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attempts(u64);

impl Attempts {
    /// The last number given out.
    pub(crate) const fn last(&self) -> Attempt {
        Attempt(self.0)
    }

    pub(crate) fn next(&mut self) -> Attempt {
        self.0 += 1;
        Attempt(self.0)
    }
}

/// One question: under way, or to be asked (again) at a known instant.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    under_way: Option<Attempt>,
    asked_at: Instant,
    due: Instant,
}

impl Ask {
    /// Longer than any adapter waits for an answer: past it the adapter itself is not believed any more.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// To be asked at `due`.
    pub(crate) const fn at(due: Instant) -> Self {
        Self { under_way: None, asked_at: due, due }
    }

    /// When it wants to be asked (again).
    pub(crate) const fn due(&self) -> Instant {
        self.due
    }

    /// When it was last asked.
    pub(crate) const fn asked_at(&self) -> Instant {
        self.asked_at
    }

    /// Takes a number for asking now, if it is time.
    pub(crate) fn take(&mut self, now: Instant, attempts: &mut Attempts) -> Option<Attempt> {
        self.take_patient(now, attempts, Self::PATIENCE)
    }

    /// The same for a question that may take longer.
    pub(crate) fn take_patient(
        &mut self,
        now: Instant,
        attempts: &mut Attempts,
        patience: Duration,
    ) -> Option<Attempt> {
        if now < self.due {
            return None;
        }
        let attempt = attempts.next();
        *self = Self { under_way: Some(attempt), asked_at: now, due: now + patience };
        Some(attempt)
    }

    /// Whether an answer with this number is the one waited for.
    pub(crate) fn awaits(&self, attempt: Attempt) -> bool {
        self.under_way == Some(attempt)
    }

    /// Whether no answer is waited for.
    pub(crate) const fn rests(&self) -> bool {
        self.under_way.is_none()
    }

    /// Whether it was asked and no answer came by its deadline.
    pub(crate) fn timed_out(&self, now: Instant) -> bool {
        self.under_way.is_some() && now >= self.due
    }

    /// It was answered, but must be asked again after `delay`.
    pub(crate) fn again(&mut self, now: Instant, delay: Duration) {
        self.under_way = None;
        self.due = now + delay;
    }
}

/// The wait before try number `tries` (from 1): doubling from 100 ms up to `cap`, spread by a quarter so
/// that what failed together does not come back together. `salt` decides the spread: the core draws no
/// random numbers.
pub(crate) fn backoff(tries: u32, cap: Duration, salt: u64) -> Duration {
    let doubled = Duration::from_millis(100).saturating_mul(1_u32 << tries.saturating_sub(1).min(20));
    let base = doubled.min(cap);
    let spread = u32::try_from(mix(salt) % 251).unwrap_or_default();
    base * (750 + spread * 2) / 1_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_cap_and_are_spread() {
        let cap = Duration::from_secs(5);
        for salt in 0..1_000 {
            let first = backoff(1, cap, salt).as_millis();
            assert!((75..=125).contains(&first), "{first}");
            let late = backoff(40, cap, salt);
            assert!(late >= cap * 3 / 4 && late <= cap * 5 / 4, "{late:?}");
        }
        assert_ne!(backoff(3, cap, 1), backoff(3, cap, 2));
    }

    #[test]
    fn a_question_is_asked_again_only_when_due_and_old_answers_do_not_count() {
        let mut attempts = Attempts::default();
        let start = Instant::START;
        let mut ask = Ask::at(start);
        let first = ask.take(start, &mut attempts).unwrap();
        assert!(ask.take(start, &mut attempts).is_none());
        let second = ask.take(ask.due(), &mut attempts).unwrap();
        assert!(!ask.awaits(first) && ask.awaits(second));
    }
}
