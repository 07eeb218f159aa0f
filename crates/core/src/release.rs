//! Giving the pin back, if it is still ours.

use std::time::Duration;

use crate::action::Actions;
use crate::ask::Ask;
use crate::ports::delivery::{Command, Inbox, PinId, Reply};
use crate::pull::Puller;
use crate::row::Seq;
use crate::rule::{Rule, safeguard};
use crate::shard::{Env, Next};
use crate::time::Instant;

#[derive(Debug)]
enum Step {
    /// Is the pin still ours? UNPIN names no pin and would take somebody else's.
    Look(Ask),
    Unpin(Ask),
}

/// Everything is written that will be.
#[derive(Debug)]
pub(crate) struct Release {
    pin: PinId,
    inbox: Inbox,
    clean: bool,
    puller: Option<Puller>,
    step: Step,
    deadline: Instant,
}

impl Release {
    /// The pin lapses by itself; waiting longer than this for the server would serve nobody.
    const PATIENCE: Duration = Duration::from_secs(2);

    pub(crate) fn new(pin: PinId, inbox: Inbox, clean: bool, now: Instant) -> Self {
        let step = if safeguard(Rule::LookBeforeUnpin) {
            Step::Look(Ask::at(now))
        } else {
            Step::Unpin(Ask::at(now))
        };
        Self { pin, inbox, clean, puller: None, step, deadline: now + Self::PATIENCE }
    }

    /// The pin that is given up.
    pub(crate) const fn pin(&self) -> &PinId {
        &self.pin
    }

    pub(crate) fn on_delivery(&mut self, now: Instant, reply: Reply) -> Next {
        match (&mut self.step, reply) {
            (Step::Look(ask), Reply::Inspected { attempt, outcome }) if ask.awaits(attempt) => {
                match outcome {
                    Ok(seen) if seen.pinned.as_ref() == Some(&self.pin) => {
                        self.step = Step::Unpin(Ask::at(now));
                        Next::Stay
                    }
                    Ok(_) => Next::Released { clean: self.clean },
                    Err(_) => {
                        ask.again(now, Duration::from_millis(100));
                        Next::Stay
                    }
                }
            }
            (Step::Unpin(ask), Reply::Unpinned { attempt, outcome }) if ask.awaits(attempt) => {
                if outcome.is_ok() {
                    return Next::Released { clean: self.clean };
                }
                // It may have been done: look again before doing it twice.
                self.step = Step::Look(Ask::at(now + Duration::from_millis(100)));
                Next::Stay
            }
            _ => Next::Stay,
        }
    }

    pub(crate) fn poll(&mut self, env: &mut Env, now: Instant, out: &mut Actions) -> Next {
        if now >= self.deadline {
            return Next::Released { clean: self.clean };
        }
        // The pin is kept until the unpin's answer, so that nobody starts before the record is final.
        let interval = env.config.pull_interval();
        let puller = self.puller.get_or_insert_with(|| Puller::new(interval, now));
        if puller.dead_at().is_some_and(|at| at <= now) {
            puller.forget();
        }
        if puller.is_idle() && now >= puller.renew_at() {
            let pull = puller.renewal(now, &mut env.attempts, self.inbox, self.pin.clone());
            out.delivery(Command::Pull(pull));
        }
        match &mut self.step {
            Step::Look(ask) => {
                if let Some(attempt) = ask.take(now, &mut env.attempts) {
                    out.delivery(Command::Inspect { attempt, row: Seq::ZERO, above: Seq::ZERO });
                }
            }
            Step::Unpin(ask) => {
                if let Some(attempt) = ask.take(now, &mut env.attempts) {
                    out.delivery(Command::Unpin { attempt });
                }
            }
        }
        Next::Stay
    }

    pub(crate) fn next_wakeup(&self) -> Instant {
        let (Step::Look(ask) | Step::Unpin(ask)) = &self.step;
        let renewal =
            self.puller.as_ref().map(|puller| puller.dead_at().unwrap_or_else(|| puller.renew_at()));
        ask.due().min(self.deadline).min(renewal.unwrap_or(self.deadline))
    }
}
