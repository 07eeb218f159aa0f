//! The machine that shares the shards out, in each process: its orders start and end shards' machines, whose reports go
//! back to it.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_core::action::Event;
use holdfast_core::claims::{self, Action, Gone, Notice, Order, Step};
use holdfast_core::member::{Member, MemberId, Scope, State};
use holdfast_core::notice::Report;
use holdfast_core::ports::delivery;
use holdfast_core::ports::members;
use holdfast_core::record::Session;
use holdfast_core::row::{Seq, ShardId};

use crate::invariants::handover::Handover;
use crate::invariants::{broken, budget, draining, even, heard, heir, lands, stand_in, violated};
use crate::marks::Mark;
use crate::process::{Local, Process};
use crate::trace::Happening;

use super::{Due, World};

/// How often shards that nobody has are looked for.
const LOOKS: Duration = Duration::from_millis(250);

impl World {
    /// A process has started: everything that makes it take part.
    pub(super) fn join(&mut self, process: u32) {
        let owner = &self.processes[process as usize];
        if owner.sharing.is_some() {
            if owner.connected {
                self.meet(process);
            }
            self.hand_claims(process, claims::Event::Wakeup);
            return;
        }
        // It stands by for everything.
        let (share, session) = (owner.share, self.sessions.get(&(process, owner.start)).copied());
        for shard in (0..self.scenario.shards).map(ShardId) {
            self.start_shard(process, shard, session.unwrap_or(Session(0)));
            self.hand(process, shard, Event::Claim(share));
        }
    }

    fn start_shard(&mut self, process: u32, shard: ShardId, session: Session) {
        let owner = &mut self.processes[process as usize];
        owner.run(&self.scenario, self.now, shard, session);
        let (client, connected) = (owner.client_of(shard), owner.connected);
        self.sessions.insert((process, client.start), session);
        if connected {
            self.connect(process, shard);
        }
    }

    pub(super) fn hand_claims(&mut self, process: u32, event: claims::Event) {
        let mut actions = Vec::new();
        let owner = &mut self.processes[process as usize];
        let now = owner.clock(self.now);
        let Some(sharing) = &mut owner.sharing else { return };
        sharing.claims.handle(now, event, &mut actions);
        if self.checks_core
            && let Err(defect) = sharing.claims.validate()
        {
            self.check(violated("core state", defect));
        }
        for action in actions {
            match action {
                Action::Members(command) => self.send_members(process, command),
                Action::Shard { shard, order } => self.order(process, shard, order),
                Action::Notice(notice) => self.sharing_told(process, notice),
            }
        }
        let (rows, bytes) = (self.scenario.share_rows * 2, self.scenario.share_bytes * 2);
        let owner = &self.processes[process as usize];
        let Some(sharing) = &owner.sharing else { return };
        let checked = budget::shared(sharing.view.shares.values(), rows, bytes);
        let over = sharing.claims.is_over();
        self.check(checked);
        if over {
            let owner = &self.processes[process as usize];
            let down = owner.stopping.map_or(Duration::from_millis(200), |(down, _)| down);
            self.note(Happening::Process { process, what: "has stopped" });
            self.down(process, down);
            return;
        }
        self.set_claims_wake(process);
    }

    fn set_claims_wake(&mut self, process: u32) {
        let owner = &mut self.processes[process as usize];
        let Some(next) = owner.sharing.as_ref().and_then(|sharing| sharing.claims.next_wakeup()) else {
            return;
        };
        let (due, start) = (owner.when(next), owner.start);
        let Some(sharing) = &mut owner.sharing else { return };
        sharing.spins = if due <= self.now { sharing.spins + 1 } else { 0 };
        let spins = sharing.spins > 1_000 && self.checks_core;
        let due = due.max(self.now + Duration::from_micros(10));
        if sharing.wake != Some(due) {
            sharing.wake = Some(due);
            self.put_local(due, process, start, Local::WakeClaims);
        }
        if spins {
            self.check(violated(lands::NAME, format!("p{process} wakes again and again, to no end")));
        }
    }

    /// How long a word between two machines of a process takes.
    fn passes(&mut self) -> Duration {
        if self.chance.permille(self.rates.sink_slow) { self.chance.millis(1, 200) } else { Duration::ZERO }
    }

    fn order(&mut self, process: u32, shard: ShardId, order: Order) {
        self.note(Happening::Ordered { process, shard: shard.0, order: Box::new(order.clone()) });
        self.check_order(process, shard, &order);
        let owner = &mut self.processes[process as usize];
        let Some(sharing) = &mut owner.sharing else { return };
        match &order {
            Order::Claim { share, .. } => {
                sharing.view.shares.insert(shard, *share);
                sharing.view.claimed.insert(shard);
            }
            Order::Share(part) => {
                sharing.view.shares.insert(shard, *part);
            }
            Order::GiveUp | Order::Stop { .. } => {
                sharing.view.claimed.remove(&shard);
            }
            Order::OwnerGone(_) => {}
        }
        let step = sharing.runs.order(shard, order);
        self.take_step(process, step);
    }

    /// Checks an order against what the process was shown.
    fn check_order(&mut self, process: u32, shard: ShardId, order: &Order) {
        let owner = &self.processes[process as usize];
        let Some(sharing) = &owner.sharing else { return };
        let (member, view) = (owner.member.clone(), &sharing.view);
        let mut checks = Vec::new();
        let mut marks = Vec::new();
        match order {
            Order::Claim { .. } => {
                checks.push(heard::claims(&member, sharing.session, shard, view));
                checks.push(broken::claims(&member, shard, view));
                checks.push(draining::claims(&member, shard, owner.stopping.is_some()));
                let status = sharing.claims.status();
                let of = status.shards.iter().find(|of| of.shard == shard);
                if of.is_some_and(|of| of.home != Some(&member)) {
                    checks.push(stand_in::claims(&member, shard, view));
                    marks.push(Mark::StoodIn);
                }
                if owner.slots.contains_key(&shard) {
                    marks.push(Mark::ClaimedWhileEnding);
                }
            }
            Order::GiveUp => {
                // Who only stands by leaves no rows behind: it may leave what is broken for all.
                if owner.slots.get(&shard).is_some_and(|slot| slot.epoch.is_some()) {
                    checks.push(heir::gives_up(&member, shard, view));
                }
                let by_wish =
                    view.paused.contains(&shard) || view.live().any(|other| other.paused.contains(&shard));
                marks.push(if by_wish { Mark::PausedGivenUp } else { Mark::GivenUp });
            }
            Order::OwnerGone(_) | Order::Share(_) | Order::Stop { .. } => {}
        }
        for mark in marks {
            self.marks.hit(mark);
        }
        for checked in checks {
            self.check(checked);
        }
    }

    fn take_step(&mut self, process: u32, step: Option<Step>) {
        match step {
            Some(Step::Start { shard, first }) => {
                let session = Session(self.chance.below(u64::MAX));
                self.start_shard(process, shard, session);
                for event in first {
                    self.ordered(process, shard, event);
                }
            }
            Some(Step::Tell { shard, event }) => {
                let lasting = self.passes();
                let owner = &mut self.processes[process as usize];
                let Some(slot) = owner.slots.get(&shard) else { return };
                let life = slot.life;
                let Some(sharing) = &mut owner.sharing else { return };
                let at = sharing.orders_until.max(self.now + lasting);
                sharing.orders_until = at;
                self.put_local(at, process, life, Local::Ordered { shard, event });
            }
            None => {}
        }
    }

    /// A shard's machine takes an order.
    pub(super) fn ordered(&mut self, process: u32, shard: ShardId, event: Event) {
        let owner = &mut self.processes[process as usize];
        let deadline = match &event {
            Event::Stop { within } => Some(self.now + owner.lasts(*within)),
            _ => None,
        };
        let Some(slot) = owner.slots.get_mut(&shard) else { return };
        match &event {
            Event::OwnerGone(pin) => slot.orphan = Some(pin.clone()),
            Event::Share(part)
                if slot.machine.status().held_rows > part.rows
                    || slot.machine.status().held_bytes > part.bytes =>
            {
                self.marks.hit(Mark::ShareShrank);
            }
            _ => {}
        }
        if let Some(deadline) = deadline {
            if slot.phase == "taking over" {
                self.marks.hit(Mark::StoppedFencing);
            }
            slot.stopping = Some(Handover::new(deadline, slot.machine.status().accepted));
            let (start, shard) = (slot.life, Some(shard));
            self.agenda.put(deadline + Duration::from_secs(5), Due::Overdue { process, start, shard });
        }
        self.hand(process, shard, event);
    }

    /// A look for a dead owner's pin may find another one.
    pub(super) fn looked_for_orphan(&mut self, process: u32, shard: ShardId, reply: &delivery::Reply) {
        let delivery::Reply::Inspected { outcome: Ok(seen), .. } = reply else { return };
        let Some(slot) = self.processes[process as usize].slots.get_mut(&shard) else { return };
        if slot.orphan.as_ref().is_some_and(|orphan| seen.pinned.as_ref() != Some(orphan)) {
            slot.orphan = None;
            if slot.phase == "standby" && seen.pinned.is_some() {
                self.marks.hit(Mark::OrphanMoved);
            }
        }
    }

    /// A report of a shard's machine is on its way to the one that shares shards out.
    pub(super) fn carry_report(&mut self, process: u32, shard: ShardId, report: Report) {
        let lasting = self.passes();
        let owner = &mut self.processes[process as usize];
        let (start, slot) = (owner.start, owner.slots.get(&shard));
        let ended = slot.filter(|slot| slot.over).map(|slot| slot.life);
        let Some(sharing) = &mut owner.sharing else { return };
        let at = sharing.reports_until.max(self.now + lasting);
        sharing.reports_until = at;
        self.put_local(at, process, start, Local::Report { shard, report });
        if let Some(life) = ended {
            // It is told last of all.
            self.put_local(at, process, life, Local::Over { shard });
        }
    }

    pub(super) fn report(&mut self, process: u32, shard: ShardId, report: &Report) {
        let owner = &mut self.processes[process as usize];
        let Some(sharing) = &mut owner.sharing else { return };
        let told = claims::Report::from(report);
        match &told {
            claims::Report::Released { .. } => {
                sharing.view.shares.remove(&shard);
                sharing.view.claimed.remove(&shard);
            }
            claims::Report::Failed { scope, .. } => {
                sharing.view.shares.remove(&shard);
                sharing.view.claimed.remove(&shard);
                if *scope == Scope::Everywhere {
                    sharing.view.failed.insert(shard);
                }
            }
            claims::Report::Owned { .. } => {
                let last = self.owners.insert(shard, process);
                if last.is_some_and(|last| last != process) && self.given_up.remove(&shard) == last {
                    self.marks.hit(Mark::HandedOver);
                }
            }
            claims::Report::Ready | claims::Report::Lost => {}
        }
        self.hand_claims(process, claims::Event::Shard { shard, report: told });
    }

    /// A shard's machine has ended: its connection goes, and the next one may start.
    pub(super) fn over(&mut self, process: u32, shard: ShardId) {
        let owner = &mut self.processes[process as usize];
        let client = owner.client_of(shard);
        let Some(slot) = owner.slots.remove(&shard) else { return };
        if slot.stopping.is_some() {
            self.given_up.insert(shard, process);
        }
        let noticed = self.now + self.chance.millis(0, 20);
        self.agenda.put(noticed, Due::Noticed(client));
        let Some(sharing) = &mut self.processes[process as usize].sharing else { return };
        let step = sharing.runs.ended(shard);
        self.take_step(process, step);
    }

    /// Somebody asks something of the process.
    pub(super) fn ask_claims(&mut self, process: u32, event: claims::Event) {
        let owner = &mut self.processes[process as usize];
        let Some(sharing) = &mut owner.sharing else { return };
        match &event {
            claims::Event::Pause(shard) => {
                sharing.view.paused.insert(*shard);
            }
            claims::Event::Resume(shard) => {
                sharing.view.paused.remove(shard);
                sharing.view.failed.remove(shard);
                owner.reused.remove(shard);
            }
            _ => {}
        }
        self.hand_claims(process, event);
    }

    /// An operator asks something of every process.
    pub(super) fn ask_all(&mut self, event: &claims::Event) {
        for process in 0..self.scenario.processes {
            let start = self.processes[process as usize].start;
            let at = self.now + self.latency();
            self.put_local(at, process, start, Local::Asked(event.clone()));
        }
    }

    pub(super) fn members_tell(&mut self, process: u32, reply: members::Reply) {
        let owner = &mut self.processes[process as usize];
        let member = owner.member.clone();
        let Some(sharing) = &mut owner.sharing else { return };
        sharing.view.shown(&member, &reply);
        match &reply {
            members::Reply::Snapshot(_) if sharing.view.snapshots > 1 => self.marks.hit(Mark::WatchedAnew),
            members::Reply::Removed { key } if **key == *member.as_str() => {
                self.marks.hit(Mark::OwnRecordDeleted);
            }
            _ => {}
        }
        self.hand_claims(process, claims::Event::Members(reply));
    }

    fn sharing_told(&mut self, process: u32, notice: Notice) {
        let owner = &mut self.processes[process as usize];
        let member = owner.member.clone();
        let lease = self.scenario.sharing.as_ref().map_or(Duration::ZERO, |sharing| sharing.lease);
        let lease = owner.lasts(lease);
        let Some(sharing) = &mut owner.sharing else { return };
        sharing.view.said(&notice);
        match &notice {
            Notice::Left { member: other, why } => {
                let checked = self.lives.taken_for_gone(self.now, &member, other, *why, lease);
                self.check(checked);
                let it = self.processes.iter().find(|process| process.member == *other);
                if it.is_some_and(|it| it.up && it.frozen_until.is_some())
                    && matches!(why, Gone::LeaseOver | Gone::NoResponders)
                {
                    self.marks.hit(Mark::FrozenTakenForDead);
                }
                match why {
                    Gone::NoResponders => self.marks.hit(Mark::NobodyAnswered),
                    Gone::Restarted => self.marks.hit(Mark::Restarted),
                    Gone::LeaseOver | Gone::Resigned => {}
                }
            }
            Notice::Deaf => self.marks.hit(Mark::Deaf),
            Notice::NameTaken { .. } => self.marks.hit(Mark::NameTaken),
            Notice::Taken { .. } => self.marks.hit(Mark::OrphanClaimed),
            Notice::Unowned { .. } => self.marks.hit(Mark::Unowned),
            _ => {}
        }
        self.note(Happening::Shared { process, notice: Box::new(notice) });
    }

    /// Looks for shards that nobody has, and for such that two believe to be theirs.
    pub(super) fn look_for_vacant(&mut self) {
        let mut checks = Vec::new();
        for shard in (0..self.scenario.shards).map(ShardId) {
            let claimers = self.claimers(shard);
            let believes = |process: &&&Process| {
                let status = process.sharing.as_ref().map(|sharing| sharing.claims.status());
                status.is_some_and(|status| {
                    status.shards.iter().any(|of| of.shard == shard && of.home == Some(&process.member))
                })
            };
            let split = claimers.len() > 1 && claimers.iter().filter(believes).count() > 1;
            let vacant = claimers.is_empty() && self.is_seen_vacant(shard);
            if split {
                self.marks.hit(Mark::SplitView);
            }
            checks.push(self.vacancies.look(self.now, shard, vacant));
        }
        for checked in checks {
            self.check(checked);
        }
        self.agenda.put(self.now + LOOKS, Due::Vacant);
    }

    /// Looks for shards of which rows wait while their consumers stand still, and tells every process of them.
    pub(super) fn look_for_unowned(&mut self, stood: &[Option<Seq>]) {
        let stands = |shard: ShardId| {
            let (position, rows) = (self.stream.position(shard), self.stream.rows_of(shard));
            (self.broker_up && rows.last().is_some_and(|last| *last >= position)).then_some(position)
        };
        let now: Vec<Option<Seq>> = (0..self.scenario.shards).map(ShardId).map(stands).collect();
        for (shard, (then, now)) in (0..).map(ShardId).zip(stood.iter().zip(&now)) {
            if now.is_some() && then == now {
                self.ask_all(&claims::Event::Unowned { shard });
            }
        }
        self.agenda.put(self.now + self.scenario.pinned_ttl, Due::Watchdog(now));
    }

    /// Who claims a shard and has not given it up.
    fn claimers(&self, shard: ShardId) -> Vec<&Process> {
        let claims = |process: &&Process| {
            process.up
                && process.sharing.as_ref().is_some_and(|sharing| sharing.view.claimed.contains(&shard))
        };
        self.processes.iter().filter(claims).collect()
    }

    /// Whether somebody should have the shard, as far as anybody says.
    fn is_open(&self, shard: ShardId) -> bool {
        let closes = |process: &Process| {
            process.up
                && process.sharing.as_ref().is_some_and(|sharing| {
                    sharing.view.failed.contains(&shard) || sharing.view.paused.contains(&shard)
                })
        };
        !self.processes.iter().any(closes)
    }

    /// Whether all processes that run see each other as they are, see that nobody has this shard, and one could take
    /// it.
    fn is_seen_vacant(&self, shard: ShardId) -> bool {
        let up = || self.processes.iter().filter(|process| process.up);
        let is_clear = |process: &Process| {
            let soon = self.now + Duration::from_millis(200);
            let held = process.members_inwards_held.max(process.members_outwards_held);
            let sharing = process.sharing.as_ref();
            process.frozen_until.is_none()
                && process.connected
                && held <= self.now
                && process.members_last_in <= soon
                && sharing.is_some_and(|sharing| {
                    !sharing.view.deaf && sharing.view.echoed.contains(&sharing.session)
                })
        };
        if !self.broker_up || !self.is_open(shard) || !up().all(is_clear) {
            return false;
        }
        let state = |process: &Process| {
            if process.stopping.is_some() { State::Draining } else { State::Active }
        };
        let active = || up().filter(|process| state(process) == State::Active);
        // Whoever still writes what it accepted may be the one who is to claim it when that is done.
        if active().next().is_none() || active().any(|process| process.slots.contains_key(&shard)) {
            return false;
        }
        up().all(|process| {
            let Some(sharing) = &process.sharing else { return false };
            let live: BTreeMap<MemberId, Member> =
                sharing.view.live().map(|member| (member.id.clone(), member)).collect();
            let others = || up().filter(|other| other.id != process.id);
            let sees = |other: &Process| {
                live.get(&other.member).is_some_and(|member| {
                    let hold = member.shards.get(&shard);
                    let session = other.sharing.as_ref().map(|sharing| sharing.session);
                    Some(member.session) == session
                        && member.state == state(other)
                        && hold.is_none_or(|hold| hold.leaving)
                        && !member.failed.contains_key(&shard)
                        && !member.paused.contains(&shard)
                })
            };
            // What one that left found broken is for nobody who saw it leave.
            let status = sharing.claims.status();
            let own = status.shards.iter().filter(|of| of.shard == shard).flat_map(|of| &of.failed);
            if own.into_iter().any(|(id, _)| **id == process.member) {
                return false;
            }
            let strangers = live.keys().filter(|id| **id != process.member).count();
            strangers == others().count() && others().all(sees)
        })
    }

    /// What is not shared out as it should be, if anything is.
    pub(super) fn uneven(&self) -> Option<String> {
        self.scenario.sharing.as_ref()?;
        let open: Vec<ShardId> =
            (0..self.scenario.shards).map(ShardId).filter(|shard| self.is_open(*shard)).collect();
        let up = self.processes.iter().filter(|process| process.up && process.stopping.is_none());
        let kept = up.filter_map(|process| {
            let claimed = process.sharing.as_ref()?.view.claimed.iter().copied();
            Some((process.id, claimed.collect()))
        });
        even::uneven(&kept.collect(), &open)
    }
}
