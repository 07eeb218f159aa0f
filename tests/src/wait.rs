//! Waiting for a condition, with a deadline. Nothing in the tests sleeps and hopes.

use std::thread;
use std::time::{Duration, Instant};

/// Something did not happen in time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("waited {waited:?} for {what}, which did not happen")]
pub struct TimedOut {
    /// What was waited for.
    pub what: String,
    /// How long.
    pub waited: Duration,
}

/// The pause between two looks grows from the first of these to the second.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// The looks that are left, and the pauses between them.
struct Looks<'a> {
    what: &'a str,
    began: Instant,
    within: Duration,
    pause: Duration,
}

impl<'a> Looks<'a> {
    fn new(what: &'a str, within: Duration) -> Self {
        Self { what, began: Instant::now(), within, pause: FIRST_PAUSE }
    }

    /// How long to pause before the next look.
    fn next(&mut self) -> Result<Duration, TimedOut> {
        let waited = self.began.elapsed();
        if waited >= self.within {
            return Err(TimedOut { what: self.what.to_owned(), waited });
        }
        let pause = self.pause.min(self.within.saturating_sub(waited));
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Ok(pause)
    }
}

/// Looks until `look` finds something. Looks at least once, and once more at the deadline.
///
/// # Errors
/// [`TimedOut`], naming `what`, when nothing was found `within` that time.
pub fn until<T>(what: &str, within: Duration, mut look: impl FnMut() -> Option<T>) -> Result<T, TimedOut> {
    let mut looks = Looks::new(what, within);
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        thread::sleep(looks.next()?);
    }
}

/// [`until`], for a plain condition.
///
/// # Errors
/// [`TimedOut`], naming `what`, when it did not become true `within` that time.
pub fn until_true(what: &str, within: Duration, mut look: impl FnMut() -> bool) -> Result<(), TimedOut> {
    until(what, within, || look().then_some(()))
}

/// [`until`], in a task.
///
/// # Errors
/// [`TimedOut`], naming `what`, when nothing was found `within` that time. The deadline also ends a look that
/// hangs.
pub async fn until_async<T, F>(
    what: &str,
    within: Duration,
    mut look: impl FnMut() -> F,
) -> Result<T, TimedOut>
where
    F: Future<Output = Option<T>>,
{
    let mut looks = Looks::new(what, within);
    loop {
        let left = within.saturating_sub(looks.began.elapsed()).max(FIRST_PAUSE);
        if let Ok(Some(found)) = tokio::time::timeout(left, look()).await {
            return Ok(found);
        }
        tokio::time::sleep(looks.next()?).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_is_there_at_once() {
        assert_eq!(until("seven", Duration::ZERO, || Some(7)), Ok(7));
    }

    #[test]
    fn names_what_did_not_happen() {
        let late = until_true("the end of time", Duration::from_millis(5), || false).unwrap_err();
        assert_eq!(late.what, "the end of time");
        assert!(late.waited >= Duration::from_millis(5));
    }

    #[tokio::test]
    async fn a_look_that_hangs_is_ended() {
        let late = until_async::<(), _>("nothing", Duration::from_millis(20), std::future::pending).await;
        assert!(late.is_err());
    }
}
