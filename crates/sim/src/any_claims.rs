//! Any news, in any order, any number of times, straight into the machine that shares shards out: it must never
//! panic, never contradict itself and never order what cannot be, whatever the bucket, the others and its own shards
//! say.
//!
//! Bytes decide, as in [`crate::any_events`]. Only two things are as they should be: what comes back as our own
//! record is one that we wrote, and time does not go back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use holdfast_core::claims::{Action, Claims, Config, Event, Notice, Order, Report};
use holdfast_core::member::{Fault, Hold, Member, MemberId, Scope, State};
use holdfast_core::ports::delivery::PinId;
use holdfast_core::ports::ledger::Revision;
use holdfast_core::ports::members::{Command, Entry, Probe, Reply};
use holdfast_core::ports::{Attempt, Failure, FailureClass};
use holdfast_core::record::Session;
use holdfast_core::row::ShardId;
use holdfast_core::time::Instant;

use crate::choices::Choices;
use crate::invariants::{Checked, Violation, violated};

const OURS: Session = Session(9);
const NAMES: [&str; 4] = ["b", "a", "c", "d"];
const LEASE: Duration = Duration::from_secs(5);
/// Commands older than this many are not answered any more.
const REMEMBERED: usize = 24;

/// The name under which an order is reported that should not have been given.
const ORDERS: &str = "claims' orders";
/// The same of a record of our own.
const RECORD: &str = "claims' record";

/// How far a sequence got: one that never gets anywhere proves nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settled {
    /// Shards that were claimed.
    pub claimed: u32,
    /// Shards that were given up to somebody else.
    pub given_up: u32,
    /// Pins of dead owners that were told of.
    pub orphans: u32,
    /// Members that were thought to be gone.
    pub left: u32,
    /// Times the process did not hear itself.
    pub deaf: u32,
    /// Times it resigned.
    pub resigned: u32,
}

struct Rig<'a> {
    bytes: Choices<'a>,
    now: Duration,
    config: Config,
    claims: Claims,
    bucket: BTreeMap<Arc<str>, Bytes>,
    revision: u64,
    /// What was ordered and asked last, answered or not.
    commands: VecDeque<Action>,
    /// What was not answered yet.
    open: VecDeque<Action>,
    held: BTreeSet<ShardId>,
    /// Those of them whose rows came to us, as they told last.
    owned: BTreeSet<ShardId>,
    /// What our own shards say, and our own operator.
    failed: BTreeSet<ShardId>,
    paused: BTreeSet<ShardId>,
    /// What somebody else was said to stand by for or to own, or somebody wants paused, at any time.
    wanted: BTreeSet<ShardId>,
    /// When each of our records was sent, by its beat.
    sent: BTreeMap<u64, Duration>,
    heard: Option<Duration>,
    snapshot: bool,
    stopping: bool,
    settled: Settled,
}

/// Lets `steps` decide what the machine is told, one after another; the first one decides how it is configured.
///
/// # Errors
/// The rule that was broken.
///
/// # Panics
/// If the machine does: a fault of it, like a broken rule.
pub fn any_claims(steps: &[impl AsRef<[u8]>]) -> Result<Settled, Violation> {
    let mut steps = steps.iter().map(AsRef::as_ref);
    let mut bytes = Choices(steps.next().unwrap_or_default());
    let config = Config {
        id: MemberId::new(NAMES[0]).expect("a letter is a name"),
        session: OURS,
        shards: 1 + u32::from(bytes.below(6)),
        heartbeat: Duration::from_millis(500),
        lease: LEASE,
        probe: Duration::from_millis(200),
        rows: 64_000,
        bytes: 1 << 30,
        software: "0.1.0".to_owned(),
        fingerprint: "00".to_owned(),
    };
    let mut rig = Rig {
        bytes,
        now: Duration::ZERO,
        claims: Claims::new(config.clone(), Instant::START),
        config,
        bucket: BTreeMap::new(),
        revision: 0,
        commands: VecDeque::new(),
        open: VecDeque::new(),
        held: BTreeSet::new(),
        owned: BTreeSet::new(),
        failed: BTreeSet::new(),
        paused: BTreeSet::new(),
        wanted: BTreeSet::new(),
        sent: BTreeMap::new(),
        heard: None,
        snapshot: false,
        stopping: false,
        settled: Settled::default(),
    };
    rig.hand(Event::Wakeup)?;
    if rig.bytes.below(4) != 0 {
        rig.settle_in()?;
    }
    for step in steps {
        rig.bytes = Choices(step);
        rig.step()?;
    }
    Ok(rig.settled)
}

impl Rig<'_> {
    /// A beginning without trouble: else no sequence gets far.
    fn settle_in(&mut self) -> Checked {
        self.answer_kindly()?;
        let snapshot = self.snapshot();
        self.hand(snapshot)
    }

    fn step(&mut self) -> Checked {
        let event = match self.bytes.below(24) {
            0..=7 => return self.answer_kindly(),
            8 | 9 => return self.answer(),
            10..=12 => {
                if let Some(next) = self.claims.next_wakeup() {
                    self.now = self.now.max(next.since_start());
                }
                Event::Wakeup
            }
            13 => {
                self.now += Duration::from_millis(u64::from(self.bytes.next()) * 40);
                Event::Wakeup
            }
            14..=18 => self.other(),
            19 => self.snapshot(),
            20 => {
                let key: Arc<str> = NAMES[usize::from(self.bytes.below(4))].into();
                self.bucket.remove(&key);
                Event::Members(Reply::Removed { key })
            }
            21 => {
                let report = self.report();
                Event::Shard { shard: self.shard(), report }
            }
            22 => Event::Unowned { shard: self.shard() },
            _ => match self.bytes.below(16) {
                0 => Event::Stop { within: Duration::from_secs(u64::from(self.bytes.below(4)) * 10) },
                1..=4 => Event::Pause(self.shard()),
                5..=10 => Event::Resume(self.shard()),
                _ => self.junk(),
            },
        };
        self.hand(event)
    }

    /// One of ours, or just none.
    fn shard(&mut self) -> ShardId {
        ShardId(u32::from(self.bytes.below(7)))
    }

    fn entry(&mut self, key: &str, record: Bytes) -> Entry {
        self.revision += 1;
        self.bucket.insert(key.into(), record.clone());
        Entry { key: key.into(), revision: Revision(self.revision), record }
    }

    /// Somebody else writes a record: another member, or another process under our name.
    fn other(&mut self) -> Event {
        let who = match self.bytes.below(16) {
            0 => 0,
            n => 1 + usize::from(n % 3),
        };
        let bits = self.bytes.next();
        let mut member = Member {
            version: if bits & 0xF0 == 0xF0 { 2 } else { Member::VERSION },
            id: MemberId::new(NAMES[who]).expect("a letter is a name"),
            session: Session(u64::from(self.bytes.below(2))),
            beat: self.revision,
            state: match self.bytes.below(8) {
                0 => State::Draining,
                1 => State::Resigned,
                2 => State::Unknown,
                _ => State::Active,
            },
            software: String::new(),
            fingerprint: (bits & 1).to_string(),
            shards: BTreeMap::new(),
            failed: BTreeMap::new(),
            paused: BTreeSet::new(),
        };
        let holds = self.bytes.next();
        for shard in (0..7_u32).filter(|shard| holds >> shard & 1 == 1).map(ShardId) {
            let how = self.bytes.next();
            match how % 10 {
                0 => drop(member.failed.insert(shard, Fault::new("so", Scope::Everywhere))),
                1 => drop(member.failed.insert(shard, Fault::new("so", Scope::Here))),
                2 => drop(member.paused.insert(shard)),
                _ => {
                    let pin = (how & 16 != 0).then(|| PinId(format!("{}{shard}", member.id).into()));
                    let turn = u64::from(how >> 5);
                    member.shards.insert(shard, Hold { pin, turn, leaving: how & 0b1100 == 0 });
                }
            }
        }
        Event::Members(Reply::Changed(self.entry(NAMES[who], member.encode())))
    }

    /// What is no record under what is no key, or under a member's.
    fn junk(&mut self) -> Event {
        let key = ["a", "c", "e\n", ""][usize::from(self.bytes.below(4))];
        let record = self.bytes.0.to_vec().into();
        Event::Members(Reply::Changed(self.entry(key, record)))
    }

    /// All that is in the bucket, or less.
    fn snapshot(&mut self) -> Event {
        let whole = self.bytes.below(4) != 1;
        let entries = self.bucket.clone().into_iter().filter(|_| whole || self.bytes.below(2) == 0);
        let entries: Vec<_> = entries.collect();
        let entries = entries.into_iter().map(|(key, record)| {
            self.revision += 1;
            Entry { key, revision: Revision(self.revision), record }
        });
        Event::Members(Reply::Snapshot(entries.collect()))
    }

    fn report(&mut self) -> Report {
        match self.bytes.below(8) {
            0 => Report::Ready,
            1 => Report::Owned { pin: PinId("x".repeat(usize::from(self.bytes.next())).into()) },
            2 | 3 => Report::Lost,
            4 => Report::Released { clean: false },
            5 => Report::Failed { reason: "so".to_owned(), scope: Scope::Everywhere },
            6 => Report::Failed { reason: "so".to_owned(), scope: Scope::Here },
            _ => Report::Owned { pin: PinId("pin".into()) },
        }
    }

    /// Answers what was asked first as it would be answered on a good day.
    fn answer_kindly(&mut self) -> Checked {
        match self.open.pop_front() {
            None => self.hand(Event::Wakeup),
            Some(Action::Members(Command::Put { attempt, record, .. })) => {
                let entry = self.entry(NAMES[0], record);
                self.hand(Event::Members(Reply::Put { attempt, outcome: Ok(()) }))?;
                self.hand(Event::Members(Reply::Changed(entry)))
            }
            Some(Action::Members(Command::Delete { attempt, member, .. })) => {
                let key: Arc<str> = member.as_str().into();
                self.bucket.remove(&key);
                self.hand(Event::Members(Reply::Deleted { attempt, outcome: Ok(()) }))?;
                self.hand(Event::Members(Reply::Removed { key }))
            }
            Some(Action::Members(Command::Probe { attempt, .. })) => self.probed(attempt, Probe::Alive),
            Some(Action::Shard { shard, order }) => match order {
                Order::Claim { .. } | Order::OwnerGone(_) => {
                    self.hand(Event::Shard { shard, report: Report::Ready })?;
                    self.hand(Event::Shard { shard, report: Report::Owned { pin: PinId("pin".into()) } })
                }
                Order::GiveUp | Order::Stop { .. } => {
                    self.hand(Event::Shard { shard, report: Report::Released { clean: true } })
                }
                Order::Share(_) => Ok(()),
            },
            Some(Action::Notice(_)) => Ok(()),
        }
    }

    /// Answers one of the last commands in any way, whether it was answered before or not.
    fn answer(&mut self) -> Checked {
        if self.commands.is_empty() {
            return Ok(());
        }
        let back = usize::from(self.bytes.next() % 8) * usize::from(self.bytes.next() % 4);
        let command = self.commands[(self.commands.len() - 1).saturating_sub(back)].clone();
        let failed = || Err(Failure::new(FailureClass::Unavailable, "no leader"));
        match command {
            Action::Members(Command::Put { attempt, record, .. }) => {
                let how = self.bytes.below(8);
                if how & 1 != 0 {
                    let entry = self.entry(NAMES[0], record);
                    if how & 2 != 0 {
                        self.hand(Event::Members(Reply::Changed(entry)))?;
                    }
                }
                let outcome = if how & 4 == 0 { failed() } else { Ok(()) };
                self.hand(Event::Members(Reply::Put { attempt, outcome }))
            }
            Action::Members(Command::Delete { attempt, .. }) => {
                self.hand(Event::Members(Reply::Deleted { attempt, outcome: failed() }))
            }
            Action::Members(Command::Probe { attempt, .. }) => {
                let answer = [Probe::NoResponders, Probe::Silent, Probe::Alive];
                let answer = answer[usize::from(self.bytes.below(3))];
                self.probed(attempt, answer)
            }
            Action::Shard { shard, .. } => {
                let report = self.report();
                self.hand(Event::Shard { shard, report })
            }
            Action::Notice(_) => Ok(()),
        }
    }

    fn probed(&mut self, attempt: Attempt, answer: Probe) -> Checked {
        self.hand(Event::Members(Reply::Probed { attempt, answer }))
    }

    /// What can be known from outside by what the machine is told.
    fn learn(&mut self, event: &Event) {
        match event {
            Event::Members(Reply::Snapshot(entries)) => {
                for entry in entries {
                    self.read(entry);
                }
                self.snapshot = true;
            }
            Event::Members(Reply::Changed(entry)) => self.read(entry),
            Event::Shard { shard, report: Report::Owned { .. } } => drop(self.owned.insert(*shard)),
            Event::Shard { shard, report: Report::Lost } => drop(self.owned.remove(shard)),
            Event::Shard { shard, report: Report::Released { .. } } => drop(self.held.remove(shard)),
            Event::Shard { shard, report: Report::Failed { .. } } => {
                self.held.remove(shard);
                self.failed.insert(*shard);
            }
            Event::Pause(shard) => {
                self.paused.insert(*shard);
                self.wanted.insert(*shard);
            }
            Event::Resume(shard) => {
                self.paused.remove(shard);
                self.failed.remove(shard);
            }
            Event::Stop { .. } => self.stopping = true,
            _ => {}
        }
    }

    fn read(&mut self, entry: &Entry) {
        let Ok(member) = Member::decode(&entry.record) else { return };
        if member.id == self.config.id && member.session == OURS {
            self.heard = self.heard.max(self.sent.get(&member.beat).copied());
        } else if member.id != self.config.id {
            let stands_by = member.shards.iter().filter(|(_, hold)| !hold.leaving).map(|(shard, _)| *shard);
            self.wanted.extend(stands_by.chain(member.paused));
        }
    }

    fn hand(&mut self, event: Event) -> Checked {
        self.learn(&event);
        let was_over = self.claims.is_over();
        let mut actions = Vec::new();
        let now = Instant::at(self.now);
        self.claims.handle(now, event, &mut actions);
        if let Err(defect) = self.claims.validate() {
            violated("core state", defect)?;
        }
        match self.claims.next_wakeup() {
            Some(due) if due <= now => violated("claims' wakeup", "it would spin")?,
            None if !self.claims.is_over() => violated("claims' wakeup", "it would sleep for ever")?,
            _ => {}
        }
        if was_over && !actions.is_empty() {
            violated(ORDERS, "after its end")?;
        }
        self.settled.resigned += u32::from(self.claims.is_over() && !was_over);
        // All at once: a record is written after the orders of the same event.
        for action in &actions {
            if let Action::Shard { shard, order } = action {
                self.ordered(*shard, order)?;
            }
        }
        for action in actions {
            match &action {
                Action::Members(command) => self.asked(command)?,
                Action::Shard { .. } => {}
                Action::Notice(notice) => {
                    self.settled.left += u32::from(matches!(notice, Notice::Left { .. }));
                    self.settled.deaf += u32::from(matches!(notice, Notice::Deaf));
                    continue;
                }
            }
            self.open.push_back(action.clone());
            self.commands.push_back(action);
            for queue in [&mut self.commands, &mut self.open] {
                if queue.len() > REMEMBERED {
                    queue.pop_front();
                }
            }
        }
        Ok(())
    }

    /// Whether what we wrote came back, and was written lately.
    fn hears(&self) -> bool {
        self.snapshot && self.heard.is_some_and(|heard| self.now.saturating_sub(heard) <= LEASE / 2)
    }

    fn ordered(&mut self, shard: ShardId, order: &Order) -> Checked {
        let wrong = |why: &str| violated(ORDERS, format!("{order:?} to shard {shard} {why}"));
        if shard.0 >= self.config.shards {
            wrong("that is none")?;
        }
        if matches!(order, Order::Claim { .. } | Order::GiveUp) && (!self.hears() || self.stopping) {
            wrong("by a process that does not hear itself, or stops")?;
        }
        if matches!(order, Order::Claim { .. }) {
            if !self.held.insert(shard) {
                wrong("that is held")?;
            }
            if self.failed.contains(&shard) || self.paused.contains(&shard) {
                wrong("that failed here or is paused")?;
            }
        } else if !self.held.contains(&shard) {
            wrong("that is not held")?;
        }
        match order {
            Order::Claim { of, .. } => {
                self.owned.remove(&shard);
                self.settled.claimed += 1;
                self.settled.orphans += u32::from(of.is_some());
            }
            Order::OwnerGone(_) => self.settled.orphans += 1,
            // Who only stands by may leave what is broken for all.
            Order::GiveUp if self.owned.contains(&shard) && !self.wanted.contains(&shard) => {
                wrong("that nobody else stands by for")?;
            }
            Order::GiveUp => self.settled.given_up += 1,
            Order::Stop { .. } if !self.stopping => wrong("without a reason")?,
            Order::Stop { .. } | Order::Share(_) => {}
        }
        Ok(())
    }

    fn asked(&mut self, command: &Command) -> Checked {
        match command {
            Command::Put { member, record, .. } => {
                let record = match Member::decode(record) {
                    Ok(record) => record,
                    Err(error) => return violated(RECORD, error.to_string()),
                };
                if *member != self.config.id || record.id != self.config.id || record.session != OURS {
                    violated(RECORD, "is not ours")?;
                }
                if self.sent.last_key_value().is_some_and(|(beat, _)| *beat >= record.beat) {
                    violated(RECORD, "does not count on")?;
                }
                if (record.state == State::Draining) != self.stopping {
                    violated(RECORD, format!("says {:?}", record.state))?;
                }
                if !record.shards.keys().eq(&self.held) {
                    violated(RECORD, format!("says {:?}, held are {:?}", record.shards, self.held))?;
                }
                self.sent.insert(record.beat, self.now);
                Ok(())
            }
            Command::Delete { member, only, .. } if *member == self.config.id => {
                if self.stopping {
                    Ok(())
                } else {
                    violated(ORDERS, format!("our own record goes, {only:?}"))
                }
            }
            Command::Delete { only: None, member, .. } => {
                violated(ORDERS, format!("the record of {member} goes, whichever it is"))
            }
            Command::Probe { member, .. } if *member == self.config.id => violated(ORDERS, "asks itself"),
            Command::Delete { .. } | Command::Probe { .. } => Ok(()),
        }
    }
}
