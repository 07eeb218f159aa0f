//! One pull at a time, and the pin that pulling keeps.

use std::time::Duration;

use crate::ask::{Attempts, backoff};
use crate::ports::Attempt;
use crate::ports::delivery::{Inbox, PinId, Pull, PullEnd};
use crate::time::Instant;

/// What a pull is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To bring rows.
    Rows,
    /// To keep the pin, and bring nothing.
    Renewal,
}

/// A pull under way.
#[derive(Clone, Debug)]
struct UnderWay {
    attempt: Attempt,
    purpose: Purpose,
    /// Without a final status by then it is dead.
    dead_at: Instant,
    received: u64,
}

/// How a pull that was under way ended, and what it had brought.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub(crate) purpose: Purpose,
    pub(crate) received: u64,
    pub(crate) end: PullEnd,
}

/// Keeps at most one pull under way.
#[derive(Clone, Debug)]
pub(crate) struct Puller {
    interval: Duration,
    under_way: Option<UnderWay>,
    last_sent: Instant,
    not_before: Instant,
    /// Pulls in a row that nobody answered for.
    unserved: u32,
    /// Pulls that the server refused, or that could not be sent.
    failed: u32,
}

impl Puller {
    /// How long past its expiry a pull's final status may take.
    const MARGIN: Duration = Duration::from_secs(1);
    /// The most rows of one pull: at this size one pull at a time keeps the server busy.
    pub(crate) const MAX_BATCH: u64 = 5_000;

    /// `interval`: a third of the pinned TTL.
    pub(crate) const fn new(interval: Duration, now: Instant) -> Self {
        Self { interval, under_way: None, last_sent: now, not_before: now, unserved: 0, failed: 0 }
    }

    pub(crate) const fn is_idle(&self) -> bool {
        self.under_way.is_none()
    }

    pub(crate) const fn unserved(&self) -> u32 {
        self.unserved
    }

    /// Whether a pull may be sent now.
    pub(crate) fn may_pull(&self, now: Instant) -> bool {
        self.under_way.is_none() && now >= self.not_before
    }

    /// When a pull may be sent next.
    pub(crate) const fn may_pull_at(&self) -> Instant {
        self.not_before
    }

    /// When the pin must be renewed if nothing is pulled before.
    pub(crate) fn renew_at(&self) -> Instant {
        (self.last_sent + self.interval).max(self.not_before)
    }

    /// When the pull under way is dead.
    pub(crate) fn dead_at(&self) -> Option<Instant> {
        self.under_way.as_ref().map(|pull| pull.dead_at)
    }

    /// A pull for rows. It ends a little before the next one is due, so that pulls follow each other at
    /// least every third of the pinned TTL.
    pub(crate) fn rows(
        &mut self,
        now: Instant,
        attempts: &mut Attempts,
        inbox: Inbox,
        pin: Option<PinId>,
        batch: u64,
        max_bytes: Option<u64>,
    ) -> Pull {
        let expires = self.interval * 9 / 10;
        let batch = u32::try_from(batch.min(Self::MAX_BATCH)).unwrap_or(1);
        self.send(
            now,
            attempts,
            Purpose::Rows,
            Pull { attempt: Attempt(0), inbox, pin, batch, max_bytes, expires },
        )
    }

    /// A pull that renews the pin and delivers nothing (a row of at most one byte cannot be sent).
    pub(crate) fn renewal(
        &mut self,
        now: Instant,
        attempts: &mut Attempts,
        inbox: Inbox,
        pin: PinId,
    ) -> Pull {
        let expires = Duration::from_millis(100).min(self.interval);
        let pull = Pull { attempt: Attempt(0), inbox, pin: Some(pin), batch: 1, max_bytes: Some(1), expires };
        self.send(now, attempts, Purpose::Renewal, pull)
    }

    fn send(&mut self, now: Instant, attempts: &mut Attempts, purpose: Purpose, mut pull: Pull) -> Pull {
        debug_assert!(self.under_way.is_none(), "one pull at a time");
        pull.attempt = attempts.next();
        let dead_at = now + pull.expires + Self::MARGIN;
        self.under_way = Some(UnderWay { attempt: pull.attempt, purpose, dead_at, received: 0 });
        self.last_sent = now;
        pull
    }

    /// Rows came for the pull under way.
    pub(crate) fn received(&mut self, rows: u64) {
        if let Some(pull) = &mut self.under_way {
            pull.received += rows;
        }
    }

    /// Takes the end of a pull, if it is the one under way.
    pub(crate) fn on_ended(&mut self, now: Instant, attempt: Attempt, end: PullEnd) -> Option<Ended> {
        let pull = self.under_way.take_if(|pull| pull.attempt == attempt)?;
        match end {
            PullEnd::NoResponders | PullEnd::Failed(_) | PullEnd::LeaderChanged | PullEnd::NotPinned => {
                self.unserved += u32::from(end == PullEnd::NoResponders);
                self.failed += u32::from(matches!(end, PullEnd::Failed(_)));
                // Nothing to wait for when the server has just told of a change.
                let wait = match end {
                    PullEnd::NoResponders | PullEnd::Failed(_) => {
                        backoff((self.unserved + self.failed).max(1), Duration::from_secs(1), attempt.0)
                    }
                    _ => Duration::from_millis(5),
                };
                self.not_before = now + wait;
            }
            _ => (self.unserved, self.failed) = (0, 0),
        }
        Some(Ended { purpose: pull.purpose, received: pull.received, end })
    }

    /// The pull under way is given up: its inbox is closed, or it is dead.
    pub(crate) fn forget(&mut self) {
        self.under_way = None;
    }
}
