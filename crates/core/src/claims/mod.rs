//! Which shards are this process's, of however many processes there are.
//!
//! One machine a process. It writes its own record ([`crate::member`]), watches the others', works out with
//! [`crate::assign`] who should have what, and orders its shards accordingly. Nobody decides for
//! anybody else; that all come to the same answer rests on all reading the same records. Where views differ
//! for a while, two stand by for one shard, or a shard changes hands once more than it had to: the pin gives
//! a shard's rows to one of them, and the ledger keeps its history one. Nothing here can cost a row.
//!
//! **Hearing.** A process that was frozen, whose watch stalled, or that is cut off from the bucket, cannot know
//! who lives. It notices by one thing: its own heartbeat does not come back to it through the watch. What it
//! sent longer than half a lease ago being the last that came back, it is deaf: it keeps every shard that it
//! has, claims none, gives none up, and believes nobody dead. Once it hears itself again everybody's lease
//! begins anew. So no lease ever ends for a process that did not hear the bucket all the while, and nobody
//! decides by what queued up while it was frozen: that begins with heartbeats sent long ago.
//! The first time it comes back says that the record is stored, and that claiming can begin.
//!
//! **Handing over.** Who is given a shard claims it at once and stands by, whoever has it. Who has it gives
//! it up once the other's record says that it stands by: no shard waits for a member that does not know of
//! its luck yet. Only a draining member gives up without: others have been told.
//!
//! **Pauses.** An operator's wish goes to every member that lives, and each says it in its record; it lasts while one of
//! them lives. One that joins does not take it over: what it finds may have been resumed a moment ago, and would stay
//! paused for ever (the simulator found it).
//!
//! **Failures.** A shard whose consumer is gone is published as failed, and claimed by nobody while any live
//! member says so: until that one is started anew or resumed. If it leaves instead, its heirs would find the same
//! in turn, and none does: each says that the shard is not for it, until a member that has not heard of the failure,
//! one started since, owns the shard. One that fails for reasons of this process only is left to the others.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::ask::{Ask, Attempts};
use crate::budget::Share;
use crate::member::{Fault, Hold, Member, MemberId, Scope, State};
use crate::ports::delivery::PinId;
use crate::ports::members::{self, Command, Entry};
use crate::record::Session;
use crate::row::ShardId;
use crate::rule::{Rule, safeguard};
use crate::time::Instant;

mod publisher;
mod runs;
mod settle;
mod status;
mod terms;
mod view;

use publisher::Publisher;
pub use runs::{Runs, Step};
pub use status::{MemberStatus, ShardStatus, Status};
pub use terms::{Action, Config, Event, Notice, Order, Report};
use view::{Change, View};
pub use view::{Gone, MAX_MEMBERS};

/// A record of a member that crashed and never came back is deleted after so long.
const SWEEP_AFTER: Duration = Duration::from_mins(10);

/// So long the deletion of the own record is tried.
const RESIGN_PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug)]
enum Phase {
    /// Taking part.
    Running,
    /// Writing what was accepted; the others take over.
    Draining { until: Instant },
    /// Nothing is held any more: deleting the own record.
    Resigning { ask: Ask, until: Instant },
    /// Done.
    Resigned,
}

/// How one shard stands with this process.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Mine {
    /// Not at all.
    Free,
    /// Claimed, not owned.
    Standby,
    /// Owned, under a pin.
    Owned { pin: PinId, turn: u64 },
    /// Being given up.
    Leaving(Hold),
}

impl Mine {
    fn hold(&self) -> Option<Hold> {
        match self {
            Self::Free => None,
            Self::Standby => Some(Hold::default()),
            Self::Owned { pin, turn } => Some(Hold { pin: Some(pin.clone()), turn: *turn, leaving: false }),
            Self::Leaving(hold) => Some(hold.clone()),
        }
    }

    /// The same on its way out.
    fn leaving(&self) -> Self {
        match self.hold() {
            Some(hold) => Self::Leaving(Hold { leaving: true, ..hold }),
            None => Self::Free,
        }
    }

    /// Held, and not on its way out.
    const fn is_kept(&self) -> bool {
        matches!(self, Self::Standby | Self::Owned { .. })
    }
}

/// A shard that nobody alive has although somebody should.
#[derive(Clone, Copy, Debug)]
struct Vacancy {
    since: Instant,
    /// Its rows are known to wait.
    is_urgent: bool,
}

/// What the watch has shown of this process itself.
#[derive(Debug, Default)]
struct Hearing {
    /// Whether all records were read once.
    snapshot: bool,
    /// Whether our own record was ever shown: whatever is shown under our name after that and is not ours, is
    /// a rival's.
    echoed: bool,
    /// When that of it which was last shown was sent.
    last: Option<Instant>,
    /// Whether that is too long ago, and was told.
    deaf: bool,
}

/// The state machine that shares the shards out.
#[derive(Debug)]
pub struct Claims {
    config: Config,
    attempts: Attempts,
    phase: Phase,
    view: View,
    hearing: Hearing,
    publisher: Publisher,
    /// Another process that writes under our name.
    rival: Option<Session>,
    mine: Vec<Mine>,
    failed: BTreeMap<ShardId, Fault>,
    /// What members that left found broken for everybody: not for us, until somebody owns it.
    broken: BTreeMap<ShardId, Fault>,
    paused: BTreeSet<ShardId>,
    /// Pins of dead owners, until somebody makes use of them.
    orphans: BTreeMap<ShardId, (MemberId, PinId)>,
    /// Who should have what; out of date if `stale`.
    plan: BTreeMap<ShardId, MemberId>,
    stale: bool,
    /// Shards that nobody alive has although somebody should.
    vacant: BTreeMap<ShardId, Vacancy>,
    share: Share,
}

impl Claims {
    /// A process that is about to make itself known: hand in [`Event::Wakeup`] at once.
    ///
    /// # Panics
    /// If the configuration has a [`Config::defect`].
    #[must_use]
    pub fn new(config: Config, now: Instant) -> Self {
        assert_eq!(config.defect(), None);
        Self {
            attempts: Attempts::default(),
            phase: Phase::Running,
            view: View::new(),
            hearing: Hearing::default(),
            publisher: Publisher::new(now),
            rival: None,
            mine: vec![Mine::Free; config.shards as usize],
            failed: BTreeMap::new(),
            broken: BTreeMap::new(),
            paused: BTreeSet::new(),
            orphans: BTreeMap::new(),
            plan: BTreeMap::new(),
            stale: true,
            vacant: BTreeMap::new(),
            share: Share::even(config.rows, config.bytes, 1),
            config,
        }
    }

    /// Takes an event at the instant `now`, which never goes back, and says what is to be done.
    pub fn handle(&mut self, now: Instant, event: Event, out: &mut Vec<Action>) {
        if matches!(self.phase, Phase::Resigned) {
            return;
        }
        match event {
            Event::Wakeup => {}
            Event::Members(reply) => self.on_members(now, reply, out),
            Event::Shard { shard, report } => self.on_report(shard, report),
            Event::Unowned { shard } => self.on_unowned(now, shard, out),
            Event::Stop { within } => self.on_stop(now, within, out),
            Event::Pause(shard) => {
                if self.place(shard).is_some() {
                    self.stale |= self.paused.insert(shard);
                }
            }
            Event::Resume(shard) => {
                self.stale |= self.paused.remove(&shard);
                self.stale |= self.failed.remove(&shard).is_some();
                self.stale |= self.broken.remove(&shard).is_some();
            }
        }
        self.poll(now, out);
        debug_assert_eq!(self.validate(), Ok(()));
    }

    fn place(&self, shard: ShardId) -> Option<usize> {
        usize::try_from(shard.0).ok().filter(|place| *place < self.mine.len())
    }

    fn at(place: usize) -> ShardId {
        ShardId(u32::try_from(place).expect("there are as many shards as the configuration says"))
    }

    fn held(&self) -> impl Iterator<Item = ShardId> {
        (0..).map(ShardId).zip(&self.mine).filter(|(_, mine)| **mine != Mine::Free).map(|(shard, _)| shard)
    }

    /// Whether anybody alive holds it or stands by for it.
    fn is_held(&self, shard: ShardId) -> bool {
        self.place(shard).is_some_and(|place| self.mine[place] != Mine::Free)
            || self.view.live().any(|member| member.shards.contains_key(&shard))
    }

    fn hears(&self, now: Instant) -> bool {
        self.hearing.last.is_some_and(|heard| now.since(heard) <= self.config.hearing())
    }

    /// Whether the others are known and we are known to them: our record came back, so it is stored.
    fn is_ready(&self) -> bool {
        self.hearing.snapshot && self.hearing.last.is_some()
    }

    /// Whether shards may be claimed and given up now.
    fn may_act(&self, now: Instant) -> bool {
        if self.is_ready() { self.hears(now) } else { !safeguard(Rule::SnapshotBeforeClaims) }
    }

    fn on_members(&mut self, now: Instant, reply: members::Reply, out: &mut Vec<Action>) {
        let (mut changes, mut notices) = (Vec::new(), Vec::new());
        match reply {
            members::Reply::Snapshot(mut entries) => {
                let own = entries.iter().position(|entry| &*entry.key == self.config.id.as_str());
                match own.map(|place| entries.swap_remove(place)) {
                    Some(entry) => self.on_own(now, &entry, &mut notices),
                    None if self.hearing.echoed => self.publisher.on_gone(),
                    None => {}
                }
                self.stale = true;
                self.view.on_snapshot(&self.config, now, entries, &mut changes, &mut notices);
                self.hearing.snapshot = true;
            }
            members::Reply::Changed(entry) if &*entry.key == self.config.id.as_str() => {
                self.on_own(now, &entry, &mut notices);
            }
            members::Reply::Changed(entry) => {
                self.view.on_changed(&self.config, now, entry, &mut changes, &mut notices);
            }
            members::Reply::Removed { key } if &*key == self.config.id.as_str() => self.publisher.on_gone(),
            members::Reply::Removed { key } => self.view.on_removed(&key, &mut changes),
            members::Reply::Put { attempt, outcome } => {
                if let Some(why) = self.publisher.on_put(&self.config, now, attempt, outcome) {
                    notices.push(Notice::NotStored { why: why.to_string() });
                }
            }
            members::Reply::Deleted { attempt, outcome } => {
                if let Phase::Resigning { ask, .. } = &mut self.phase
                    && ask.awaits(attempt)
                {
                    match outcome {
                        Ok(()) => self.phase = Phase::Resigned,
                        Err(_) => ask.again(now, self.config.probe),
                    }
                }
            }
            members::Reply::Probed { attempt, answer } => {
                // Nobody there may mean that all are on their way back to a server that was away.
                let last = self.hearing.last;
                let hears = last.is_some_and(|last| now.since(last) <= self.config.heartbeat * 2)
                    || !safeguard(Rule::LeaseWhileHearing);
                self.view.on_probed(&self.config, now, attempt, answer, hears, &mut changes);
            }
        }
        out.extend(notices.into_iter().map(Action::Notice));
        self.on_changes(changes, out);
    }

    /// Our own record came back, or one under our name that is not ours.
    fn on_own(&mut self, now: Instant, entry: &Entry, notices: &mut Vec<Notice>) {
        let record = view::read(&entry.key, &entry.record).ok().and_then(|(_, record)| record);
        let Some(record) = record else { return };
        if record.session == self.config.session {
            self.hearing.echoed = true;
            if let Some(sent) = self.publisher.sent_at(record.beat) {
                self.hear(now, sent, notices);
            }
            return;
        }
        if self.hearing.echoed {
            // It is told once a session: they may go on in turns for long.
            if self.rival != Some(record.session) {
                self.rival = Some(record.session);
                notices.push(Notice::NameTaken { by: record.session });
            }
            return;
        }
        // Our own last process start: what it was pinned by is nobody's.
        self.inherit(record, Gone::Restarted);
    }

    /// The watch has shown what was sent at `sent`: everything that was stored before then is known.
    fn hear(&mut self, now: Instant, sent: Instant, notices: &mut Vec<Notice>) {
        let heard = self.hears(now);
        let before = self.hearing.last;
        self.hearing.last = before.max(Some(sent));
        let Some(before) = before else { return };
        // After trouble with the connection, the others need a moment to have theirs back.
        if sent.since(before) > self.config.heartbeat * 2 {
            self.view.restart_probes(&self.config, now);
        }
        if !heard && self.hears(now) {
            self.view.restart_leases(&self.config, now);
            self.vacant.clear();
            if std::mem::take(&mut self.hearing.deaf) {
                notices.push(Notice::Hearing);
            }
        }
    }

    fn on_changes(&mut self, changes: Vec<Change>, out: &mut Vec<Action>) {
        for change in changes {
            self.stale = true;
            match change {
                Change::Says => {}
                Change::Joined(member) => out.push(Action::Notice(Notice::Joined { member })),
                Change::Left { id, why, record } => {
                    out.push(Action::Notice(Notice::Left { member: id.clone(), why }));
                    if let Some(record) = record {
                        self.inherit(record, why);
                    }
                }
            }
        }
    }

    /// Takes over what a member that is gone leaves behind: its pins, and what it found broken.
    fn inherit(&mut self, record: Member, why: Gone) {
        for (shard, hold) in record.shards {
            if let Some(pin) = hold.pin
                && self.place(shard).is_some()
            {
                self.orphans.insert(shard, (record.id.clone(), pin));
            }
        }
        // Whoever was started anew tries again itself.
        if why == Gone::Restarted || !safeguard(Rule::FailedShardsLeft) {
            return;
        }
        for (shard, fault) in record.failed {
            if fault.scope == Scope::Everywhere && self.place(shard).is_some() {
                let reason = format!("{}: {}", record.id, fault.reason);
                self.broken.insert(shard, Fault::new(&reason, Scope::Here));
            }
        }
    }

    fn on_report(&mut self, shard: ShardId, report: Report) {
        let Some(place) = self.place(shard) else { return };
        let turn = self.next_turn(shard);
        let mine = &mut self.mine[place];
        match (report, &mut *mine) {
            // Late news of a shard that was written off.
            (Report::Ready | Report::Owned { .. } | Report::Lost, Mine::Free) | (Report::Ready, _) => return,
            (Report::Owned { pin }, Mine::Leaving(hold)) => {
                *hold = Hold { pin: Some(pin), turn, leaving: true };
            }
            (Report::Owned { pin }, _) => *mine = Mine::Owned { pin, turn },
            (Report::Lost, Mine::Leaving(hold)) => *hold = Hold { leaving: true, ..Hold::default() },
            (Report::Lost, _) => *mine = Mine::Standby,
            (Report::Released { .. }, _) => *mine = Mine::Free,
            (Report::Failed { reason, scope }, _) => {
                *mine = Mine::Free;
                self.failed.insert(shard, Fault::new(&reason, scope));
            }
        }
        self.stale = true;
    }

    /// A turn higher than that of any owner known, dead or alive.
    fn next_turn(&self, shard: ShardId) -> u64 {
        let records = self.view.peers().filter_map(|(_, peer)| peer.record.as_ref());
        let turns = records.filter_map(|record| record.shards.get(&shard)).map(|hold| hold.turn);
        turns.max().unwrap_or(0).saturating_add(1)
    }

    fn on_unowned(&mut self, now: Instant, shard: ShardId, out: &mut Vec<Action>) {
        let held = self.is_held(shard) && safeguard(Rule::HeldIsNotUnowned);
        if held || !self.plan.contains_key(&shard) {
            return;
        }
        let vacancy = self.vacant.entry(shard).or_insert(Vacancy { since: now, is_urgent: false });
        if !vacancy.is_urgent {
            *vacancy = Vacancy { since: now, is_urgent: true };
            out.push(Action::Notice(Notice::Unowned { shard }));
        }
    }

    fn on_stop(&mut self, now: Instant, within: Duration, out: &mut Vec<Action>) {
        let until = now + within;
        match &mut self.phase {
            Phase::Running => self.phase = Phase::Draining { until },
            Phase::Draining { until: earlier } => *earlier = until.min(*earlier),
            Phase::Resigning { .. } | Phase::Resigned => return,
        }
        for place in 0..self.mine.len() {
            if self.mine[place] != Mine::Free {
                self.mine[place] = self.mine[place].leaving();
                self.order(place, Order::Stop { within }, out);
            }
        }
    }

    fn order(&self, place: usize, order: Order, out: &mut Vec<Action>) {
        debug_assert!(place < self.mine.len());
        out.push(Action::Shard { shard: Self::at(place), order });
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Action>) {
        let hears = self.hears(now);
        if self.hearing.last.is_some() && !hears && !self.hearing.deaf {
            self.hearing.deaf = true;
            out.push(Action::Notice(Notice::Deaf));
        }
        if hears || !safeguard(Rule::LeaseWhileHearing) {
            let (mut changes, mut commands) = (Vec::new(), Vec::new());
            self.view.expire(&self.config, now, &mut changes);
            self.on_changes(changes, out);
            self.view.ask(&self.config, now, &mut self.attempts, &mut commands);
            out.extend(commands.into_iter().map(Action::Members));
            self.sweep(now, out);
        }
        if matches!(self.phase, Phase::Running) && self.may_act(now) {
            self.settle(now, out);
        }
        self.publish(now, out);
        self.resign(now, out);
    }

    /// Deletes the records of those that crashed long ago: else members with a new name at every start would
    /// fill the bucket. The first of the live does it for all. One that thaws meanwhile writes itself anew.
    fn sweep(&mut self, now: Instant, out: &mut Vec<Action>) {
        let leads = self.leads();
        for (member, revision) in self.view.sweep(now, SWEEP_AFTER) {
            if leads {
                let attempt = self.attempts.next();
                out.push(Action::Members(Command::Delete { attempt, member, only: Some(revision) }));
            }
        }
    }

    /// Whether this process is the first of the live ones. Where views differ there may be two, or none for a while.
    fn leads(&self) -> bool {
        let first = self.view.live().map(|member| &member.id).min();
        matches!(self.phase, Phase::Running)
            && self.is_ready()
            && first.is_none_or(|first| *first > self.config.id)
    }

    fn publish(&mut self, now: Instant, out: &mut Vec<Action>) {
        if matches!(self.phase, Phase::Running | Phase::Draining { .. }) {
            let record = self.record();
            out.extend(
                self.publisher.poll(&self.config, now, &mut self.attempts, record).map(Action::Members),
            );
        }
    }

    fn resign(&mut self, now: Instant, out: &mut Vec<Action>) {
        if let Phase::Draining { until } = self.phase
            && (now >= until || (self.held().next().is_none() && self.has_told_failures()))
        {
            self.phase = Phase::Resigning { ask: Ask::at(now), until: now + RESIGN_PATIENCE };
        }
        if let Phase::Resigning { ask, until } = &mut self.phase {
            if now >= *until {
                self.phase = Phase::Resigned;
            // A write on its way would bring the record back.
            } else if self.publisher.is_quiet(now)
                && let Some(attempt) = ask.take(now, &mut self.attempts)
            {
                let member = self.config.id.clone();
                out.push(Action::Members(Command::Delete { attempt, member, only: None }));
            }
        }
    }

    /// Whether the others know what failed here: else they would try it when the record is gone.
    fn has_told_failures(&self) -> bool {
        self.failed.is_empty() || self.publisher.has_stored(&self.record())
    }

    /// What the own record should say, but for the beat.
    fn record(&self) -> Member {
        let holds =
            (0..).map(ShardId).zip(&self.mine).filter_map(|(shard, mine)| Some((shard, mine.hold()?)));
        let mut shards: BTreeMap<_, _> = holds.collect();
        for hold in shards.values_mut() {
            // Longer than any pin there is: better untold than a record that nobody reads.
            if hold.pin.as_ref().is_some_and(|pin| pin.0.len() > Member::MAX_TEXT) {
                *hold = Hold { leaving: hold.leaving, ..Hold::default() };
            }
        }
        let mut failed = self.failed.clone();
        for (shard, fault) in &self.broken {
            if !shards.contains_key(shard) {
                failed.entry(*shard).or_insert_with(|| fault.clone());
            }
        }
        Member {
            version: Member::VERSION,
            id: self.config.id.clone(),
            session: self.config.session,
            beat: 0,
            state: if matches!(self.phase, Phase::Running) { State::Active } else { State::Draining },
            software: self.config.software.clone(),
            fingerprint: self.config.fingerprint.clone(),
            shards,
            failed,
            paused: self.paused.clone(),
        }
    }

    /// When to hand in [`Event::Wakeup`] if nothing else happens before; none once everything is over.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Instant> {
        let phase = match &self.phase {
            Phase::Resigned => return None,
            Phase::Running => None,
            Phase::Draining { until } => Some(*until),
            Phase::Resigning { ask, until } => {
                return Some(ask.due().max(self.publisher.quiet_at()).min(*until));
            }
        };
        let hearing = self
            .hearing
            .last
            .filter(|_| !self.hearing.deaf)
            .map(|heard| heard + self.config.hearing() + Duration::from_nanos(1));
        let listens =
            (!self.hearing.deaf && self.hearing.last.is_some()) || !safeguard(Rule::LeaseWhileHearing);
        let view = listens.then(|| self.view.next_wakeup(&self.config, SWEEP_AFTER)).flatten();
        let acts = listens && self.is_ready() && matches!(self.phase, Phase::Running);
        let vacant = self.vacant.keys().filter(|_| acts).filter_map(|shard| self.stand_in_at(*shard));
        let publish = Some(self.publisher.next_wakeup(&self.config));
        [phase, hearing, view, publish].into_iter().flatten().chain(vacant).min()
    }

    /// Whether this process has resigned, or tried to for long enough: it can end.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Resigned)
    }

    /// Checks everything that must hold between events.
    ///
    /// # Errors
    /// What contradicts itself: a fault of this code, never of its surroundings.
    pub fn validate(&self) -> Result<(), String> {
        if let Some(defect) = self.record().defect() {
            return Err(format!("our own record: {defect}"));
        }
        if self.view.len() > MAX_MEMBERS {
            return Err(format!("{} members", self.view.len()));
        }
        if !self.is_ready() && safeguard(Rule::SnapshotBeforeClaims) && self.held().next().is_some() {
            return Err("a shard is held before the others are known".to_owned());
        }
        if self.view.peers().any(|(id, _)| *id == self.config.id) {
            return Err("we are our own peer".to_owned());
        }
        if matches!(self.phase, Phase::Draining { .. }) && self.mine.iter().any(Mine::is_kept) {
            return Err("a shard is kept while draining".to_owned());
        }
        let strange = |id: &&MemberId| **id != self.config.id && self.view.live_record(id).is_none();
        if let Some(id) = self.plan.values().find(strange).filter(|_| !self.stale) {
            return Err(format!("{id} is planned for and gone"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
