//! Writing the own record: at every heartbeat, at once when it says something new, one write in flight.

use std::collections::VecDeque;

use super::Config;
use crate::ask::Attempts;
use crate::member::Member;
use crate::ports::members::Command;
use crate::ports::{Attempt, Failure};
use crate::time::Instant;

#[derive(Debug)]
struct Flight {
    attempt: Attempt,
    record: Member,
    /// Past it no answer is waited for any more.
    until: Instant,
}

/// The writer of the own record.
#[derive(Debug)]
pub(super) struct Publisher {
    beat: u64,
    flight: Option<Flight>,
    /// What was last known to be stored; none if that is in doubt.
    stored: Option<Member>,
    /// Whether it ever was.
    was_stored: bool,
    /// Somebody deleted it.
    is_gone: bool,
    sent_at: Instant,
    /// When the last beats were sent, as many as can be on their way back.
    beats: VecDeque<(u64, Instant)>,
    /// After a failure: not before then, whatever there is to say.
    retry_at: Option<Instant>,
}

impl Publisher {
    pub(super) const fn new(now: Instant) -> Self {
        Self {
            beats: VecDeque::new(),
            beat: 0,
            flight: None,
            stored: None,
            was_stored: false,
            is_gone: false,
            sent_at: now,
            retry_at: None,
        }
    }

    /// When this beat was sent, if that is not long ago.
    pub(super) fn sent_at(&self, beat: u64) -> Option<Instant> {
        self.beats.iter().find(|(sent, _)| *sent == beat).map(|(_, at)| *at)
    }

    /// Somebody deleted the record: it is written at once. (One that was overwritten waits for its heartbeat: a
    /// process with the same name would answer at once in turn.)
    pub(super) fn on_gone(&mut self) {
        self.is_gone = true;
    }

    /// Whether the stored record is known to say this.
    pub(super) fn has_stored(&self, record: &Member) -> bool {
        self.stored.as_ref().is_some_and(|stored| stored.says_the_same_as(record))
    }

    /// When no write can be on its way any more.
    pub(super) fn quiet_at(&self) -> Instant {
        self.flight.as_ref().map_or(Instant::START, |flight| flight.until)
    }

    pub(super) fn is_quiet(&self, now: Instant) -> bool {
        now >= self.quiet_at()
    }

    pub(super) fn on_put(
        &mut self,
        config: &Config,
        now: Instant,
        attempt: Attempt,
        outcome: Result<(), Failure>,
    ) -> Option<Failure> {
        let flight = self.flight.take_if(|flight| flight.attempt == attempt)?;
        match outcome {
            Ok(()) => {
                self.stored = Some(flight.record);
                self.was_stored = true;
                None
            }
            Err(failure) => {
                self.stored = None;
                self.retry_at = Some(now + config.heartbeat / 2);
                Some(failure)
            }
        }
    }

    pub(super) fn poll(
        &mut self,
        config: &Config,
        now: Instant,
        attempts: &mut Attempts,
        record: Member,
    ) -> Option<Command> {
        if !self.is_quiet(now) || self.retry_at.is_some_and(|at| now < at) {
            return None;
        }
        let is_news =
            self.is_gone || if self.stored.is_some() { !self.has_stored(&record) } else { !self.was_stored };
        if !is_news && self.retry_at.is_none() && now < self.sent_at + config.heartbeat {
            return None;
        }
        self.is_gone = false;
        self.beat += 1;
        self.beats.truncate(31);
        self.beats.push_front((self.beat, now));
        let record = Member { beat: self.beat, ..record };
        let attempt = attempts.next();
        let command = Command::Put { attempt, member: config.id.clone(), record: record.encode() };
        self.flight = Some(Flight { attempt, record, until: now + config.lease / 2 });
        (self.sent_at, self.retry_at) = (now, None);
        Some(command)
    }

    /// When to poll if nothing new is to be said.
    pub(super) fn next_wakeup(&self, config: &Config) -> Instant {
        match (&self.flight, self.retry_at) {
            (Some(flight), _) => flight.until,
            (None, Some(at)) => at,
            (None, None) if self.beat == 0 => self.sent_at,
            (None, None) => self.sent_at + config.heartbeat,
        }
    }
}
