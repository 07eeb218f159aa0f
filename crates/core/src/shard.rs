//! One shard, from the claim to the release: the phases and how they follow each other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::action::{Actions, Event};
use crate::ask::Attempts;
use crate::batch::Limits;
use crate::budget::Share;
use crate::fence::Start;
use crate::lane::ParkingPolicy;
use crate::notice::{Notice, Report, ShardFailure, Trouble};
use crate::ports::delivery::{self, Acks, Inbox, PinId};
use crate::ports::store::{self, Target};
use crate::record::{Session, Writer};
use crate::release::Release;
use crate::row::{Seq, ShardId, TableName};
use crate::standby::{Fencing, Standby};
use crate::state::State;
use crate::tenure::Tenure;
use crate::time::Instant;

/// What a shard needs to know.
#[derive(Clone, Debug)]
pub struct Config {
    /// Which shard.
    pub shard: ShardId,
    /// The stream's name.
    pub stream: Arc<str>,
    /// A random value of this process start.
    pub session: Session,
    /// How long the server keeps a pin without a pull.
    pub pinned_ttl: Duration,
    /// When a batch is closed.
    pub batch: Limits,
    /// An intent is sent at most this long after the record was last known to be ours.
    pub stale: Duration,
    /// Longer than any attempt at the store lives, its wait for a turn included.
    pub patience: Duration,
    /// Longer than any attempt lives at the store once it is sent: an insert's time limit, and what the server
    /// waits for a body that has stalled.
    pub attempt_life: Duration,
    /// Whether written rows are acknowledged.
    pub acks: Acks,
    /// What becomes of rows that can never be stored.
    pub parking: ParkingPolicy,
    /// Where to begin if the ledger has no record.
    pub start: Option<Start>,
    /// Tables at work at once.
    pub max_lanes: usize,
    /// The largest record, in bytes, that the ledger takes.
    pub max_record: usize,
}

impl Config {
    /// A shard pulls or renews at least this often: three chances within the pinned TTL.
    #[must_use]
    pub fn pull_interval(&self) -> Duration {
        self.pinned_ttl / 3
    }
}

/// What the phases share: the numbers they take, and what they know of tables across tenures.
#[derive(Debug)]
pub(crate) struct Env {
    pub(crate) config: Config,
    pub(crate) attempts: Attempts,
    inboxes: u64,
    tenures: u64,
    targets: BTreeMap<TableName, Target>,
    /// Codes of the store that nobody knows and that people were told of.
    pub(crate) unknown: BTreeSet<Option<u32>>,
    /// The pin of somebody who is gone, until it is known to be taken away.
    pub(crate) gone: Option<PinId>,
    pub(crate) share: Share,
    pub(crate) stop_at: Option<Instant>,
    /// Rows accepted, over all tenures.
    pub(crate) accepted_rows: u64,
    /// It ends for another member, not with the process.
    hands_over: bool,
}

impl Env {
    /// More tables than this are described again rather than remembered.
    const MAX_TARGETS: usize = 16_384;

    pub(crate) fn fresh_inbox(&mut self) -> Inbox {
        self.inboxes += 1;
        Inbox(self.inboxes)
    }

    /// Names the next tenure.
    pub(crate) fn next_writer(&mut self) -> Writer {
        self.tenures += 1;
        Writer { session: self.config.session, nonce: self.tenures }
    }

    /// Where the rows of a table at rest went.
    pub(crate) fn recall(&mut self, table: &TableName) -> Option<Target> {
        self.targets.remove(table)
    }

    /// A new tenure looks at every table anew: what another writer did meanwhile is not known.
    pub(crate) fn forget_targets(&mut self) {
        self.targets.clear();
    }

    /// Keeps in mind where the rows of a table that comes to rest went.
    pub(crate) fn remember(&mut self, table: TableName, target: Target) {
        if self.targets.len() >= Self::MAX_TARGETS {
            self.targets.clear();
        }
        self.targets.insert(table, target);
    }
}

#[derive(Debug)]
enum Phase {
    /// Nobody asked for it.
    Unclaimed,
    /// Waiting for the pin.
    Standby(Standby),
    /// Pinned; the fence is under way.
    Fencing(Fencing),
    /// The record is ours.
    Owning(Box<Tenure>),
    /// Everything is written that will be; the pin is given up.
    Releasing(Release),
    /// Given up.
    Released,
    /// Ended by itself.
    Failed(ShardFailure),
}

/// What a phase leads to.
#[derive(Debug)]
pub(crate) enum Next {
    Stay,
    /// The pin is lost, or never was ours.
    Standby,
    Fencing(Fencing),
    Owning(Box<Tenure>),
    Releasing(Release),
    Released {
        clean: bool,
    },
    Failed(ShardFailure),
}

/// The state machine of one shard.
#[derive(Debug)]
pub struct Shard {
    env: Env,
    phase: Phase,
}

/// How a shard stands, for people, metrics and invariants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status<'a> {
    /// The state as a word.
    pub phase: &'static str,
    /// The pin, if the server gave us one.
    pub pin: Option<&'a PinId>,
    /// The tenure's epoch, while there is one.
    pub epoch: Option<u64>,
    /// Every row at or below it is done, as far as the stored record says.
    pub floor: Seq,
    /// The last row accepted.
    pub accepted: Seq,
    /// Rows accepted since the shard was claimed.
    pub accepted_rows: u64,
    /// Rows held.
    pub held_rows: u64,
    /// Bytes held.
    pub held_bytes: u64,
    /// The share of the budget.
    pub share: Share,
    /// When the oldest row was accepted that is not written.
    pub oldest: Option<Instant>,
    /// Tables at work.
    pub lanes: usize,
    /// Tables that do not get on, and why.
    pub troubles: Vec<(&'a TableName, &'a Trouble)>,
    /// Why the ledger does not take the record, if it does not.
    pub ledger_trouble: Option<&'a crate::ports::Failure>,
    /// Why the shard ended.
    pub failure: Option<&'a ShardFailure>,
}

impl Shard {
    /// A shard that nobody has asked for yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let env = Env {
            config,
            attempts: Attempts::default(),
            inboxes: 0,
            tenures: 0,
            targets: BTreeMap::new(),
            unknown: BTreeSet::new(),
            gone: None,
            share: Share { rows: Share::MIN_ROWS, bytes: 0 },
            stop_at: None,
            accepted_rows: 0,
            hands_over: false,
        };
        Self { env, phase: Phase::Unclaimed }
    }

    /// Takes an event at the instant `now`, which never goes back, and says what is to be done.
    pub fn handle(&mut self, now: Instant, event: Event, out: &mut Actions) {
        let next = match event {
            Event::Wakeup => Next::Stay,
            Event::Claim(share) => {
                self.env.share = share;
                if matches!(self.phase, Phase::Unclaimed | Phase::Released) && self.env.stop_at.is_none() {
                    Next::Standby
                } else {
                    Next::Stay
                }
            }
            Event::OwnerGone(pin) => {
                self.env.gone = Some(pin);
                if let Phase::Standby(standby) = &mut self.phase {
                    standby.owner_gone(now);
                }
                Next::Stay
            }
            Event::Share(share) => {
                self.env.share = share;
                if let Phase::Owning(tenure) = &mut self.phase {
                    tenure.set_share(share);
                }
                Next::Stay
            }
            Event::HandOver { within } => self.on_stop(now, within, true, out),
            Event::Stop { within } => self.on_stop(now, within, false, out),
            Event::Delivery(reply) => self.on_delivery(now, reply, out),
            Event::Ledger(reply) => match &mut self.phase {
                Phase::Standby(standby) => standby.on_ledger(now, reply, out),
                Phase::Fencing(fencing) => fencing.on_ledger(&mut self.env, now, reply, out),
                Phase::Owning(tenure) => tenure.on_ledger(&mut self.env, now, reply, out),
                _ => Next::Stay,
            },
            Event::Store(reply) => {
                if let Phase::Owning(tenure) = &mut self.phase {
                    tenure.on_store(&mut self.env, now, reply, out);
                }
                Next::Stay
            }
            Event::DeadLetter(reply) => {
                if let Phase::Owning(tenure) = &mut self.phase {
                    tenure.on_dead_letter(&mut self.env, now, reply, out);
                }
                Next::Stay
            }
        };
        self.enter(now, next, out);
        // A phase may lead on at once, but only forwards: Standby waits for a row, the others for answers.
        for _ in 0..4 {
            let next = match &mut self.phase {
                Phase::Standby(standby) => standby.poll(&mut self.env, now, out),
                Phase::Fencing(fencing) => fencing.poll(&mut self.env, now, out),
                Phase::Owning(tenure) => tenure.poll(&mut self.env, now, out),
                Phase::Releasing(release) => release.poll(&mut self.env, now, out),
                Phase::Unclaimed | Phase::Released | Phase::Failed(_) => Next::Stay,
            };
            if matches!(next, Next::Stay) {
                break;
            }
            self.enter(now, next, out);
        }
        debug_assert_eq!(self.validate(), Ok(()));
    }

    fn on_stop(&mut self, now: Instant, within: Duration, hands_over: bool, out: &mut Actions) -> Next {
        let before = self.state();
        // A process that stops does so whoever was to have the shard.
        self.env.hands_over = hands_over && (self.env.hands_over || self.env.stop_at.is_none());
        self.env.stop_at = Some(now + within);
        match &mut self.phase {
            // The pull that waits runs to its end. A process that stops does not wait for it: the window is short.
            Phase::Standby(standby) if self.env.hands_over && standby.may_be_pinned() => Next::Stay,
            Phase::Unclaimed | Phase::Standby(_) => Next::Released { clean: true },
            Phase::Fencing(fencing) => fencing.give_up(now),
            Phase::Owning(tenure) => {
                tenure.halt(&mut self.env, out);
                self.changed(before);
                Next::Stay
            }
            Phase::Releasing(_) | Phase::Released | Phase::Failed(_) => Next::Stay,
        }
    }

    fn on_delivery(&mut self, now: Instant, reply: delivery::Reply, out: &mut Actions) -> Next {
        match &mut self.phase {
            Phase::Standby(standby) => standby.on_delivery(&mut self.env, now, reply, out),
            Phase::Fencing(fencing) => fencing.on_delivery(&mut self.env, now, reply, out),
            Phase::Owning(tenure) => tenure.on_delivery(&mut self.env, now, reply, out),
            Phase::Releasing(release) => release.on_delivery(now, reply),
            Phase::Unclaimed | Phase::Released | Phase::Failed(_) => Next::Stay,
        }
    }

    fn enter(&mut self, now: Instant, next: Next, out: &mut Actions) {
        let phase = match next {
            Next::Stay => return,
            // What was ours ends in the open, whatever it leads to: no insert goes on, no row comes in.
            Next::Standby if self.env.stop_at.is_some() => {
                self.leave(out);
                out.report(Report::Released { clean: false });
                Phase::Released
            }
            Next::Standby => {
                self.leave(out);
                Phase::Standby(Standby::new(&mut self.env, now))
            }
            Next::Fencing(fencing) => {
                out.notice(Notice::Pinned);
                Phase::Fencing(fencing)
            }
            Next::Owning(tenure) => {
                out.report(Report::Owned { pin: tenure.pin().clone() });
                Phase::Owning(tenure)
            }
            Next::Releasing(release) => Phase::Releasing(release),
            Next::Released { clean } => {
                self.leave(out);
                out.report(Report::Released { clean });
                Phase::Released
            }
            Next::Failed(failure) => {
                self.leave(out);
                out.report(Report::Failed(failure.clone()));
                Phase::Failed(failure)
            }
        };
        let before = self.state();
        self.phase = phase;
        self.changed(before);
    }

    /// Makes sure that the state may have changed so.
    fn changed(&self, before: State) {
        let state = self.state();
        if state != before {
            debug_assert!(before.may_become(state), "{before:?} became {state:?}");
            #[cfg(feature = "mutants")]
            crate::state::see(before, state);
        }
    }

    fn state(&self) -> State {
        match &self.phase {
            Phase::Unclaimed => State::Unclaimed,
            Phase::Standby(_) => State::Standby,
            Phase::Fencing(_) => State::TakingOver,
            Phase::Owning(tenure) if !tenure.is_halting() => State::Owning,
            Phase::Owning(_) if self.env.hands_over => State::HandingOver,
            Phase::Owning(_) => State::Halting,
            Phase::Releasing(_) => State::Releasing,
            Phase::Released => State::Released,
            Phase::Failed(_) => State::Failed,
        }
    }

    fn leave(&mut self, out: &mut Actions) {
        if matches!(self.phase, Phase::Unclaimed) {
            return;
        }
        out.delivery(delivery::Command::Close { inbox: Inbox(self.env.inboxes) });
        let until = self.env.attempts.last();
        out.store(store::Command::Abort { shard: self.env.config.shard, until });
        if let Phase::Owning(_) = self.phase {
            out.report(Report::Lost);
        }
    }

    /// When to hand in [`Event::Wakeup`] if nothing else happens before.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Standby(standby) => standby.next_wakeup(&self.env),
            Phase::Fencing(fencing) => fencing.next_wakeup(),
            Phase::Owning(tenure) => tenure.next_wakeup(&self.env),
            Phase::Releasing(release) => Some(release.next_wakeup()),
            Phase::Unclaimed | Phase::Released | Phase::Failed(_) => None,
        }
    }

    /// How the shard stands.
    #[must_use]
    pub fn status(&self) -> Status<'_> {
        let mut status = Status {
            phase: self.state().key(),
            pin: None,
            epoch: None,
            floor: Seq::ZERO,
            accepted: Seq::ZERO,
            accepted_rows: self.env.accepted_rows,
            held_rows: 0,
            held_bytes: 0,
            share: self.env.share,
            oldest: None,
            lanes: 0,
            troubles: Vec::new(),
            ledger_trouble: None,
            failure: None,
        };
        match &self.phase {
            Phase::Fencing(fencing) => status.pin = Some(fencing.pin()),
            Phase::Releasing(release) => status.pin = Some(release.pin()),
            Phase::Owning(tenure) => tenure.fill(&mut status),
            Phase::Failed(failure) => status.failure = Some(failure),
            _ => {}
        }
        status
    }

    /// Checks everything that must hold between events.
    ///
    /// # Errors
    /// What contradicts itself: a fault of this code, never of its surroundings.
    pub fn validate(&self) -> Result<(), String> {
        match &self.phase {
            Phase::Owning(tenure) => tenure.validate(),
            _ => Ok(()),
        }
    }
}
