//! Waiting for the pin, and the fence that follows it.

use crate::action::Actions;
use crate::ask::Ask;
use crate::commit::{Committer, Settled};
use crate::fence::{Loaded, Plan, catch_up, plan};
use crate::intake::FirstRow;
use crate::look::{RETRY, usable};
use crate::notice::{Notice, Report, ResyncReason};
use crate::ports::delivery::{Acks, Command, Inbox, InspectError, Inspection, PinId, PullEnd, Reply};
use crate::ports::ledger::{self, Entry};
use crate::ports::{Attempt, Failure};
use crate::pull::{Ended, Puller};
use crate::record::Record;
use crate::release::Release;
use crate::row::Seq;
use crate::rule::{Rule, safeguard};
use crate::shard::{Env, Next};
use crate::tenure::Tenure;
use crate::time::Instant;

/// What standing by is busy with.
#[derive(Debug)]
enum Step {
    /// Reading the record: ahead of the pin, and whenever a pull ended empty.
    Read(Ask),
    /// Looking at stream and consumer.
    Look(Ask, Box<Loaded>),
    /// The consumer is still pinned to somebody who is gone.
    Unpin(Ask),
    /// Nobody is pinned and nothing pending, but the record is not finished: going back to its floor makes
    /// rows pending again.
    Rewind(Ask, Inbox, Seq),
    /// The shard is idle and its record lags behind the stream, or there is none: writing one.
    CatchUp(Box<Committer>),
    /// Waiting for a row.
    Wait,
}

/// Waiting for the pin.
#[derive(Debug)]
pub(crate) struct Standby {
    inbox: Inbox,
    puller: Puller,
    step: Step,
    reported: bool,
}

impl Standby {
    pub(crate) fn new(env: &mut Env, now: Instant) -> Self {
        Self {
            inbox: env.fresh_inbox(),
            puller: Puller::new(env.config.pull_interval(), now),
            step: Step::Read(Ask::at(now)),
            reported: false,
        }
    }

    pub(crate) fn on_ledger(&mut self, now: Instant, reply: ledger::Reply, out: &mut Actions) -> Next {
        if let Step::CatchUp(committer) = &mut self.step {
            let settled = match reply {
                ledger::Reply::Read { attempt, outcome } => committer.on_read(now, attempt, outcome),
                ledger::Reply::Written { attempt, outcome } => committer.on_written(now, attempt, outcome),
            };
            match settled {
                Settled::Nothing | Settled::Proven => tell_trouble(committer, out),
                Settled::Written => self.step = Step::Wait,
                Settled::Over(_) => self.step = Step::Read(Ask::at(now)),
            }
            return Next::Stay;
        }
        let ledger::Reply::Read { attempt, outcome } = reply else { return Next::Stay };
        let Step::Read(ask) = &mut self.step else { return Next::Stay };
        if !ask.awaits(attempt) {
            return Next::Stay;
        }
        match outcome.map(Loaded::new) {
            Err(failure) => {
                ask.again(now, RETRY);
                out.notice(Notice::Waiting { what: "read the ledger", why: failure.to_string() });
            }
            Ok(Err(failure)) => return Next::Failed(failure),
            Ok(Ok(loaded)) => self.step = Step::Look(Ask::at(now), Box::new(loaded)),
        }
        Next::Stay
    }

    pub(crate) fn on_delivery(
        &mut self,
        env: &mut Env,
        now: Instant,
        reply: Reply,
        out: &mut Actions,
    ) -> Next {
        match reply {
            Reply::Rows(rows) => {
                if rows.inbox != self.inbox {
                    return Next::Stay;
                }
                // The row itself is let go: it comes again after the reset that every new pin begins with.
                let Some(pin) = rows.pin else { return Next::Stay };
                if env.stop_at.is_some() {
                    return Next::Releasing(Release::new(pin, self.inbox, true, now));
                }
                let puller =
                    std::mem::replace(&mut self.puller, Puller::new(env.config.pull_interval(), now));
                Next::Fencing(Fencing::new(pin, self.inbox, puller, now))
            }
            Reply::Ended { attempt, end } => self.on_ended(env, now, attempt, end, out),
            Reply::Inspected { attempt, outcome } => self.on_inspected(env, now, attempt, outcome, out),
            Reply::Reset { attempt, outcome } => {
                // Whether it was done shows at the next look.
                if let Err(failure) = outcome {
                    out.notice(Notice::Waiting { what: "reset", why: failure.to_string() });
                }
                if let Step::Rewind(ask, ..) = &self.step
                    && ask.awaits(attempt)
                {
                    self.step = Step::Wait;
                }
                Next::Stay
            }
            Reply::Disrupted => {
                self.renew_inbox(env, out);
                Next::Stay
            }
            Reply::Unpinned { attempt, outcome } => {
                if let Step::Unpin(ask) = &self.step
                    && ask.awaits(attempt)
                {
                    // It may have been done without an answer: look again before doing it twice.
                    self.step = match outcome {
                        Ok(()) => {
                            env.gone = None;
                            out.notice(Notice::PinTakenAway);
                            Step::Wait
                        }
                        Err(_) => Step::Read(Ask::at(now + RETRY)),
                    };
                }
                Next::Stay
            }
        }
    }

    /// Whoever had a pin is gone: the consumer is looked at.
    pub(crate) fn owner_gone(&mut self, now: Instant) {
        if matches!(self.step, Step::Wait) {
            self.step = Step::Read(Ask::at(now));
        }
    }

    /// Whether a row may be on its way to us, and the pin with it: nobody else would know of that pin, and the shard's
    /// rows would wait until it lapses.
    pub(crate) const fn may_be_pinned(&self) -> bool {
        !self.puller.is_idle()
    }

    fn on_ended(
        &mut self,
        env: &mut Env,
        now: Instant,
        attempt: Attempt,
        end: PullEnd,
        out: &mut Actions,
    ) -> Next {
        let Some(Ended { received, end, .. }) = self.puller.on_ended(now, attempt, end) else {
            return Next::Stay;
        };
        let look = match end {
            PullEnd::Empty => received == 0,
            PullEnd::Deleted => true,
            PullEnd::NoResponders => self.puller.unserved() >= 2,
            PullEnd::Failed(failure) => {
                out.notice(Notice::Waiting { what: "pull", why: failure.to_string() });
                false
            }
            PullEnd::LeaderChanged => {
                self.renew_inbox(env, out);
                false
            }
            PullEnd::Full | PullEnd::TooLarge | PullEnd::NotPinned | PullEnd::Closed => false,
        };
        if look && matches!(self.step, Step::Wait) {
            self.step = Step::Read(Ask::at(now));
        }
        Next::Stay
    }

    fn on_inspected(
        &mut self,
        env: &mut Env,
        now: Instant,
        attempt: Attempt,
        outcome: Result<Inspection, InspectError>,
        out: &mut Actions,
    ) -> Next {
        let Step::Look(ask, loaded) = &mut self.step else { return Next::Stay };
        if !ask.awaits(attempt) {
            return Next::Stay;
        }
        let seen = match usable(now, ask, outcome, out) {
            Ok(Some(seen)) => seen,
            Ok(None) => return Next::Stay,
            Err(failure) => return Next::Failed(failure),
        };
        if let Some(gone) = &env.gone {
            // UNPIN names no pin and would take somebody else's.
            if seen.pinned.as_ref() == Some(gone) || !safeguard(Rule::LookBeforeUnpin) {
                self.step = Step::Unpin(Ask::at(now));
                return Next::Stay;
            }
            env.gone = None;
        }
        let idle = seen.pinned.is_none() && seen.pending == 0;
        let unfinished = is_unfinished(loaded.record.as_ref(), &seen);
        if loaded.record.is_none() || (idle && !unfinished) {
            let record = match catch_up(loaded, &seen, env.next_writer(), env.config.start) {
                Ok(record) => record,
                Err(failure) => return Next::Failed(failure),
            };
            self.step = record.map_or(Step::Wait, |record| {
                Step::CatchUp(Box::new(Committer::fence(env.config.shard, loaded.revision, record, now)))
            });
            return Next::Stay;
        }
        if idle && seen.shard_last.is_none() {
            // No row, no pin, no tenure: a reset brings nothing. It is settled with the shard's next row.
            let why = "the rows of its open batch were removed from the stream; the next row of the shard settles it";
            out.notice(Notice::Waiting { what: "finish a shard without rows", why: why.to_owned() });
        }
        self.step = if idle && safeguard(Rule::ResetWhenStranded) {
            let floor = loaded.record.as_ref().filter(|record| record.stream_created == seen.created);
            let from = reset_from(env.config.acks, floor.map_or(Seq::ZERO, |record| record.floor));
            let inbox = env.fresh_inbox();
            self.inbox = inbox;
            self.puller.forget();
            out.notice(Notice::Resynced { reason: ResyncReason::Stranded });
            Step::Rewind(Ask::at(now), inbox, from)
        } else {
            Step::Wait
        };
        Next::Stay
    }

    fn renew_inbox(&mut self, env: &mut Env, out: &mut Actions) {
        out.delivery(Command::Close { inbox: self.inbox });
        self.puller.forget();
        self.inbox = env.fresh_inbox();
    }

    pub(crate) fn poll(&mut self, env: &mut Env, now: Instant, out: &mut Actions) -> Next {
        if self.puller.dead_at().is_some_and(|at| at <= now) {
            self.renew_inbox(env, out);
            if matches!(self.step, Step::Wait) {
                self.step = Step::Read(Ask::at(now));
            }
        }
        if let Some(stop_at) = env.stop_at {
            let over = !self.may_be_pinned() || stop_at <= now;
            return if over { Next::Released { clean: true } } else { Next::Stay };
        }
        if matches!(self.step, Step::Wait) && !self.reported {
            self.reported = true;
            out.report(Report::Ready);
        }
        match &mut self.step {
            Step::Read(ask) => {
                if let Some(attempt) = ask.take(now, &mut env.attempts) {
                    out.ledger(ledger::Command::Read { attempt, shard: env.config.shard });
                }
            }
            Step::Look(ask, loaded) => {
                if let Some(attempt) = ask.take(now, &mut env.attempts) {
                    out.delivery(Command::Inspect { attempt, row: loaded.high().seq, above: loaded.floor() });
                }
            }
            Step::Unpin(ask) => {
                if let Some(attempt) = ask.take(now, &mut env.attempts) {
                    out.delivery(Command::Unpin { attempt });
                }
            }
            Step::Rewind(ask, inbox, from) => {
                if let Some(attempt) = ask.take(now, &mut env.attempts) {
                    out.delivery(Command::Reset { attempt, inbox: *inbox, from: *from });
                }
            }
            Step::CatchUp(committer) => {
                let mut commands = Vec::new();
                committer.poll(now, &mut env.attempts, &mut commands);
                for command in commands {
                    out.ledger(command);
                }
            }
            Step::Wait if self.puller.may_pull(now) => {
                // One row is enough to be pinned by, and it is let go.
                let pull = self.puller.rows(now, &mut env.attempts, self.inbox, None, 1, None);
                out.delivery(Command::Pull(pull));
            }
            Step::Wait => {}
        }
        Next::Stay
    }

    pub(crate) fn next_wakeup(&self, env: &Env) -> Option<Instant> {
        let step = match &self.step {
            _ if env.stop_at.is_some() => env.stop_at,
            Step::Read(ask) | Step::Look(ask, _) | Step::Unpin(ask) | Step::Rewind(ask, ..) => {
                Some(ask.due())
            }
            Step::CatchUp(committer) => committer.next_wakeup(),
            Step::Wait if self.puller.is_idle() => Some(self.puller.may_pull_at()),
            Step::Wait => None,
        };
        step.into_iter().chain(self.puller.dead_at()).min()
    }
}

/// Where a reset goes, given the stored floor: never higher than the row after it. Where acknowledged rows leave
/// the stream, to its beginning: what is still there below the floor is done, and its acknowledgement was lost.
pub(crate) fn reset_from(acks: Acks, floor: Seq) -> Seq {
    if acks == Acks::WorkQueue { Seq::ZERO.next() } else { floor.next() }
}

/// Whether rows of the shard were delivered to somebody who did not finish them.
fn is_unfinished(record: Option<&Record>, seen: &Inspection) -> bool {
    match record.filter(|record| record.stream_created == seen.created) {
        Some(record) => record.has_open() || seen.shard_last.is_some_and(|last| record.floor < last),
        None => seen.shard_last.is_some(),
    }
}

/// Tells why the ledger does not take a write, if it does not.
pub(crate) fn tell_trouble(committer: &Committer, out: &mut Actions) {
    if let Some(failure) = committer.trouble() {
        out.notice(Notice::Waiting { what: "write the ledger", why: failure.to_string() });
    }
}

/// What fencing is busy with.
#[derive(Debug)]
enum FenceStep {
    Read(Ask),
    Look(Ask, Box<Loaded>),
    /// The fence is written; then the consumer is reset to this row, as the look showed it.
    Write(Box<Committer>, FirstRow),
}

/// Pinned, but the record is not ours yet.
#[derive(Debug)]
pub(crate) struct Fencing {
    pin: PinId,
    inbox: Inbox,
    puller: Puller,
    since: Instant,
    step: FenceStep,
}

impl Fencing {
    fn new(pin: PinId, inbox: Inbox, mut puller: Puller, now: Instant) -> Self {
        puller.forget();
        Self { pin, inbox, puller, since: now, step: FenceStep::Read(Ask::at(now)) }
    }

    pub(crate) fn pin(&self) -> &PinId {
        &self.pin
    }

    /// Gives the pin back without having written anything.
    pub(crate) fn give_up(&mut self, now: Instant) -> Next {
        Next::Releasing(Release::new(self.pin.clone(), self.inbox, true, now))
    }

    pub(crate) fn on_ledger(
        &mut self,
        env: &mut Env,
        now: Instant,
        reply: ledger::Reply,
        out: &mut Actions,
    ) -> Next {
        match (&mut self.step, reply) {
            (FenceStep::Read(ask), ledger::Reply::Read { attempt, outcome }) if ask.awaits(attempt) => {
                self.on_read(now, outcome, out)
            }
            (FenceStep::Write(committer, _), reply) => {
                let settled = match reply {
                    ledger::Reply::Read { attempt, outcome } => committer.on_read(now, attempt, outcome),
                    ledger::Reply::Written { attempt, outcome } => {
                        committer.on_written(now, attempt, outcome)
                    }
                };
                match settled {
                    Settled::Nothing | Settled::Proven => {
                        tell_trouble(committer, out);
                        Next::Stay
                    }
                    Settled::Written => self.begin(env, now, out),
                    // Somebody else fenced first; the pin is still ours, so it is tried again.
                    Settled::Over(_) => {
                        self.step = FenceStep::Read(Ask::at(now));
                        Next::Stay
                    }
                }
            }
            _ => Next::Stay,
        }
    }

    fn on_read(&mut self, now: Instant, outcome: Result<Option<Entry>, Failure>, out: &mut Actions) -> Next {
        match outcome.map(Loaded::new) {
            Err(failure) => {
                if let FenceStep::Read(ask) = &mut self.step {
                    ask.again(now, RETRY);
                }
                out.notice(Notice::Waiting { what: "read the ledger", why: failure.to_string() });
                Next::Stay
            }
            Ok(Err(failure)) => Next::Failed(failure),
            Ok(Ok(loaded)) => {
                self.step = FenceStep::Look(Ask::at(now), Box::new(loaded));
                Next::Stay
            }
        }
    }

    fn begin(&mut self, env: &mut Env, now: Instant, out: &mut Actions) -> Next {
        let FenceStep::Write(committer, first) = &self.step else { return Next::Stay };
        let puller = std::mem::replace(&mut self.puller, Puller::new(env.config.pull_interval(), now));
        let took = now.since(self.since);
        let (committer, first) = (committer.as_ref().clone(), *first);
        let tenure = Tenure::begin(env, now, self.pin.clone(), puller, committer, first, took, out);
        tenure.map_or(Next::Standby, |tenure| Next::Owning(Box::new(tenure)))
    }

    pub(crate) fn on_delivery(
        &mut self,
        env: &mut Env,
        now: Instant,
        reply: Reply,
        out: &mut Actions,
    ) -> Next {
        match reply {
            Reply::Ended { attempt, end } => {
                let Some(ended) = self.puller.on_ended(now, attempt, end) else { return Next::Stay };
                match ended.end {
                    PullEnd::NotPinned | PullEnd::LeaderChanged | PullEnd::Deleted => Next::Standby,
                    PullEnd::NoResponders if self.puller.unserved() >= 2 => Next::Standby,
                    _ => Next::Stay,
                }
            }
            Reply::Inspected { attempt, outcome } => self.on_inspected(env, now, attempt, outcome, out),
            Reply::Disrupted => {
                self.puller.forget();
                Next::Stay
            }
            Reply::Rows(_) | Reply::Reset { .. } | Reply::Unpinned { .. } => Next::Stay,
        }
    }

    fn on_inspected(
        &mut self,
        env: &mut Env,
        now: Instant,
        attempt: Attempt,
        outcome: Result<Inspection, InspectError>,
        out: &mut Actions,
    ) -> Next {
        let FenceStep::Look(ask, loaded) = &mut self.step else { return Next::Stay };
        if !ask.awaits(attempt) {
            return Next::Stay;
        }
        let seen = match usable(now, ask, outcome, out) {
            Ok(Some(seen)) => seen,
            Ok(None) => return Next::Stay,
            Err(failure) => return Next::Failed(failure),
        };
        if seen.pinned.as_ref() != Some(&self.pin) {
            return Next::Standby;
        }
        let Plan { record, made_anew } = match plan(loaded, &seen, env.next_writer(), env.config.start) {
            Ok(plan) => plan,
            Err(failure) => return Next::Failed(failure),
        };
        if made_anew {
            out.notice(Notice::StreamMadeAnew);
        }
        if !safeguard(Rule::FenceOnNewPin)
            && let Some(stored) = loaded.record.clone()
        {
            let committer = Committer::unfenced(env.config.shard, loaded.revision, stored, now);
            self.step =
                FenceStep::Write(Box::new(committer), FirstRow { above: loaded.floor(), next: seen.next });
            return self.begin(env, now, out);
        }
        // The look asked about the stored floor; a fresh record may start elsewhere.
        let above = record.floor;
        let first = FirstRow { above, next: seen.next.filter(|_| above == loaded.floor()) };
        let committer = Committer::fence(env.config.shard, loaded.revision, record, now);
        self.step = FenceStep::Write(Box::new(committer), first);
        Next::Stay
    }

    pub(crate) fn poll(&mut self, env: &mut Env, now: Instant, out: &mut Actions) -> Next {
        if self.puller.dead_at().is_some_and(|at| at <= now) {
            self.puller.forget();
        }
        // A slow ledger must not cost the pin.
        if self.puller.is_idle() && now >= self.puller.renew_at() {
            let pull = self.puller.renewal(now, &mut env.attempts, self.inbox, self.pin.clone());
            out.delivery(Command::Pull(pull));
        }
        match &mut self.step {
            FenceStep::Read(ask) => {
                if let Some(attempt) = ask.take(now, &mut env.attempts) {
                    out.ledger(ledger::Command::Read { attempt, shard: env.config.shard });
                }
            }
            FenceStep::Look(ask, loaded) => {
                if let Some(attempt) = ask.take(now, &mut env.attempts) {
                    out.delivery(Command::Inspect { attempt, row: loaded.high().seq, above: loaded.floor() });
                }
            }
            FenceStep::Write(committer, _) => {
                let mut commands = Vec::new();
                committer.poll(now, &mut env.attempts, &mut commands);
                for command in commands {
                    out.ledger(command);
                }
            }
        }
        Next::Stay
    }

    pub(crate) fn next_wakeup(&self) -> Option<Instant> {
        let step = match &self.step {
            FenceStep::Read(ask) | FenceStep::Look(ask, _) => Some(ask.due()),
            FenceStep::Write(committer, _) => committer.next_wakeup(),
        };
        let renew = self.puller.is_idle().then(|| self.puller.renew_at());
        step.into_iter().chain(self.puller.dead_at()).chain(renew).min()
    }
}
