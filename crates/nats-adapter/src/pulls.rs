//! Which of an inbox's pulls is still open, and how each ended.
//!
//! The server says nothing when a pull is full, so rows are counted. A row does not say which pull it
//! belongs to: with one pull open that is plain; with several (the server serves them in turn) rows are put
//! to the oldest, and the final statuses, which say how many rows each pull had left, set the count right.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use holdfast_core::ports::delivery::{Pull, PullEnd};
use holdfast_core::ports::{Attempt, Failure, FailureClass};
use tokio::sync::oneshot;

/// Past its time and this margin a pull without a final status is dead (a restarted server sends none) and
/// no row is put to it any more. It stays open: whoever sent it has the timer that gives it up.
const MARGIN: Duration = Duration::from_secs(1);

/// More pulls than this are never open at once: the server's own bound, `max_waiting`.
pub(crate) const MAX_OPEN: usize = 512;

/// Pulls found full of late are remembered, for their statuses if the count was wrong.
const REMEMBERED: usize = 16;

#[derive(Debug)]
struct Open {
    attempt: Attempt,
    batch: u64,
    got: u64,
    /// Bytes left of `max_bytes`, as the server counts them.
    room: Option<u64>,
    dead_after: Instant,
    end: oneshot::Sender<PullEnd>,
}

/// A pull that ended, to be told when its rows are in the sink.
#[derive(Debug)]
pub(crate) struct Ended {
    end: PullEnd,
    to: oneshot::Sender<PullEnd>,
}

impl Ended {
    pub(crate) fn tell(self) {
        // Nobody waits: the caller gave the pull up.
        let _ = self.to.send(self.end);
    }
}

/// The open pulls of one inbox, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Pulls {
    open: VecDeque<Open>,
    full: VecDeque<Attempt>,
}

impl Pulls {
    /// Adds a pull; the receiver gets its end. If too many are open, the oldest is given up.
    pub(crate) fn add(&mut self, pull: &Pull, now: Instant) -> (oneshot::Receiver<PullEnd>, Option<Ended>) {
        let (end, receiver) = oneshot::channel();
        // Those whose caller has gone need no place.
        self.open.retain(|open| !open.end.is_closed());
        let given_up = if self.open.len() >= MAX_OPEN { self.open.pop_front() } else { None };
        self.open.push_back(Open {
            attempt: pull.attempt,
            batch: u64::from(pull.batch),
            got: 0,
            room: pull.max_bytes,
            dead_after: now.checked_add(pull.expires + MARGIN).unwrap_or(now),
            end,
        });
        let given_up = given_up.map(|open| Ended {
            end: PullEnd::Failed(Failure::new(
                FailureClass::Unanswered,
                "no final status, and too many open pulls",
            )),
            to: open.end,
        });
        (receiver, given_up)
    }

    /// Counts a row of `size` bytes as the server counts them; the pull that is over with it, if one is.
    pub(crate) fn row(&mut self, size: u64, now: Instant) -> Option<Ended> {
        let at = self
            .open
            .iter()
            .position(|open| open.dead_after >= now && open.room.is_none_or(|room| size <= room))?;
        let open = &mut self.open[at];
        open.got += 1;
        open.room = open.room.map(|room| room - size);
        if open.got >= open.batch {
            return self.fill(at);
        }
        // The server ends a pull whose bytes are used up exactly, and says nothing.
        if open.room == Some(0) {
            let open = self.open.remove(at)?;
            return Some(Ended { end: PullEnd::TooLarge, to: open.end });
        }
        None
    }

    fn fill(&mut self, at: usize) -> Option<Ended> {
        let open = self.open.remove(at)?;
        if self.full.len() >= REMEMBERED {
            self.full.pop_front();
        }
        self.full.push_back(open.attempt);
        Some(Ended { end: PullEnd::Full, to: open.end })
    }

    /// Takes a final status; `left` is what the server says was left of the pull's batch.
    pub(crate) fn status(
        &mut self,
        attempt: Attempt,
        end: PullEnd,
        left: Option<u64>,
        now: Instant,
        ended: &mut Vec<Ended>,
    ) {
        if let Some(open) =
            self.open.iter().position(|open| open.attempt == attempt).and_then(|at| self.open.remove(at))
        {
            let had = left.map_or(open.got, |left| open.batch.saturating_sub(left));
            ended.push(Ended { end, to: open.end });
            if open.got > had {
                self.credit(open.got - had, now, ended);
            } else {
                self.debit(had - open.got);
            }
        } else if let Some(at) = self.full.iter().position(|full| *full == attempt) {
            // It was not full after all: rows put to it belong to others.
            self.full.remove(at);
            self.credit(left.unwrap_or(0), now, ended);
        }
    }

    fn credit(&mut self, mut rows: u64, now: Instant, ended: &mut Vec<Ended>) {
        let mut at = 0;
        while rows > 0 && at < self.open.len() {
            let open = &mut self.open[at];
            if open.dead_after < now {
                at += 1;
                continue;
            }
            let taken = rows.min(open.batch.saturating_sub(open.got));
            open.got += taken;
            rows -= taken;
            if open.got >= open.batch {
                ended.extend(self.fill(at));
            } else {
                at += 1;
            }
        }
    }

    fn debit(&mut self, mut rows: u64) {
        for open in self.open.iter_mut().rev() {
            let taken = rows.min(open.got);
            open.got -= taken;
            rows -= taken;
        }
    }

    /// Ends every pull that is open.
    pub(crate) fn end_all(&mut self, end: &PullEnd) -> Vec<Ended> {
        self.open.drain(..).map(|open| Ended { end: end.clone(), to: open.end }).collect()
    }

    #[cfg(test)]
    fn open(&self) -> usize {
        self.open.len()
    }
}

#[cfg(test)]
mod tests {
    use holdfast_core::ports::delivery::Inbox;
    use proptest::prelude::*;

    use super::*;

    fn pull(attempt: u64, batch: u32, max_bytes: Option<u64>) -> Pull {
        Pull {
            attempt: Attempt(attempt),
            inbox: Inbox(1),
            pin: None,
            batch,
            max_bytes,
            expires: Duration::from_secs(1),
        }
    }

    fn tell(ended: impl IntoIterator<Item = Ended>) {
        ended.into_iter().for_each(Ended::tell);
    }

    #[test]
    fn a_pull_is_full_with_its_last_row() {
        let (mut pulls, now) = (Pulls::default(), Instant::now());
        let (mut end, _) = pulls.add(&pull(1, 2, None), now);
        tell(pulls.row(10, now));
        assert!(end.try_recv().is_err());
        tell(pulls.row(10, now));
        assert_eq!(end.try_recv(), Ok(PullEnd::Full));
        assert_eq!(pulls.open(), 0);
    }

    #[test]
    fn a_renewal_takes_no_row() {
        let (mut pulls, now) = (Pulls::default(), Instant::now());
        let (mut renewal, _) = pulls.add(&pull(1, 1, Some(1)), now);
        let (mut rows, _) = pulls.add(&pull(2, 1, None), now);
        tell(pulls.row(300, now));
        assert_eq!(rows.try_recv(), Ok(PullEnd::Full));
        let mut ended = Vec::new();
        pulls.status(Attempt(1), PullEnd::TooLarge, Some(1), now, &mut ended);
        tell(ended);
        assert_eq!(renewal.try_recv(), Ok(PullEnd::TooLarge));
    }

    #[test]
    fn bytes_used_up_exactly_end_a_pull_that_the_server_is_silent_about() {
        let (mut pulls, now) = (Pulls::default(), Instant::now());
        let (mut end, _) = pulls.add(&pull(1, 100, Some(600)), now);
        tell(pulls.row(300, now));
        tell(pulls.row(300, now));
        assert_eq!(end.try_recv(), Ok(PullEnd::TooLarge));
    }

    #[test]
    fn statuses_set_the_count_right() {
        // Two pulls of four served in turn: two rows each. The oldest is thought full, which it is not.
        let (mut pulls, now) = (Pulls::default(), Instant::now());
        let (mut first, _) = pulls.add(&pull(1, 4, None), now);
        let (mut second, _) = pulls.add(&pull(2, 4, None), now);
        for _ in 0..4 {
            tell(pulls.row(10, now));
        }
        assert_eq!(first.try_recv(), Ok(PullEnd::Full));
        // The first ends at the server with two left; the second then gets its last two and no status.
        let mut ended = Vec::new();
        pulls.status(Attempt(1), PullEnd::Empty, Some(2), now, &mut ended);
        tell(ended);
        tell(pulls.row(10, now));
        assert!(second.try_recv().is_err());
        tell(pulls.row(10, now));
        assert_eq!(second.try_recv(), Ok(PullEnd::Full));
    }

    #[test]
    fn a_dead_pull_takes_no_rows_of_the_next() {
        let (mut pulls, start) = (Pulls::default(), Instant::now());
        let (mut dead, _) = pulls.add(&pull(1, 5, None), start);
        let later = start + Duration::from_secs(10);
        let (mut next, _) = pulls.add(&pull(2, 1, None), later);
        tell(pulls.row(10, later));
        assert_eq!(next.try_recv(), Ok(PullEnd::Full));
        tell(pulls.end_all(&PullEnd::Closed));
        assert_eq!(dead.try_recv(), Ok(PullEnd::Closed));
    }

    #[test]
    fn open_pulls_are_bounded() {
        let (mut pulls, now) = (Pulls::default(), Instant::now());
        let mut ends: Vec<_> = Vec::new();
        for attempt in 0..2 * MAX_OPEN as u64 {
            let (end, given_up) = pulls.add(&pull(attempt, 1, None), now);
            tell(given_up);
            ends.push(end);
        }
        assert_eq!(pulls.open(), MAX_OPEN);
        assert!(matches!(ends[0].try_recv(), Ok(PullEnd::Failed(_))));
        drop(ends);
        pulls.add(&pull(5000, 1, None), now);
        assert_eq!(pulls.open(), 1);
    }

    proptest! {
        #[test]
        fn no_status_or_row_is_a_panic(
            steps in prop::collection::vec((0..4_u8, 0..6_u64, any::<u64>()), 0..60),
        ) {
            let (mut pulls, now) = (Pulls::default(), Instant::now());
            let mut ends = Vec::new();
            for (step, attempt, number) in steps {
                match step {
                    0 => ends.push(pulls.add(&pull(attempt, u32::try_from(number % 5).unwrap(), Some(number)), now)),
                    1 => tell(pulls.row(number % 9, now)),
                    _ => {
                        let mut ended = Vec::new();
                        let left = (step == 2).then_some(number);
                        pulls.status(Attempt(attempt), PullEnd::Empty, left, now, &mut ended);
                        tell(ended);
                    }
                }
            }
        }
    }
}
