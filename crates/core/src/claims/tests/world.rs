//! A bucket, connections, pins and clocks, as little of them as claims can notice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::super::*;
use crate::member::Scope;
use crate::mix::mix;
use crate::ports::ledger::Revision;
use crate::ports::members::Probe;
use crate::ports::{Failure, FailureClass};

/// How long a pin outlives its owner's last pull, in milliseconds.
const PINNED_TTL: u64 = 2_000;

pub(super) fn config(id: &str, session: u64, shards: u32) -> Config {
    Config {
        id: MemberId::new(id).unwrap(),
        session: Session(session),
        shards,
        heartbeat: Duration::from_millis(500),
        lease: Duration::from_secs(5),
        probe: Duration::from_millis(200),
        rows: 64_000,
        bytes: 1 << 30,
        software: "0.1.0".to_owned(),
        fingerprint: "00".to_owned(),
    }
}

pub(super) struct Process {
    pub(super) claims: Claims,
    pub(super) name: String,
    pub(super) alive: bool,
    /// Stopped: what is for it waits.
    frozen: bool,
    backlog: Vec<Event>,
    /// Without a connection: nothing comes, nothing goes.
    cut: bool,
    watch_until: u64,
    /// Shards that stand by or are owned, and whether they are being given up.
    shards: BTreeMap<ShardId, bool>,
    unpinned: Vec<ShardId>,
}

#[derive(Clone)]
enum Item {
    Tell(usize, Event),
    Wake(usize),
    Reach(usize, Command),
    Release(usize, ShardId),
    Fail(usize, ShardId, Scope),
    Pin(ShardId),
    Lapse(ShardId, PinId),
}

pub(super) struct World {
    pub(super) now: u64,
    seed: u64,
    draws: u64,
    agenda: BTreeMap<(u64, u64), Item>,
    bucket: BTreeMap<String, (Revision, bytes::Bytes)>,
    revision: u64,
    pub(super) processes: Vec<Process>,
    shards: u32,
    pins: BTreeMap<ShardId, (usize, PinId)>,
    /// Shards without rows: nobody is ever pinned.
    idle: BTreeSet<ShardId>,
    /// Shards whose consumer is gone, and how often each was tried in vain.
    broken: BTreeMap<ShardId, usize>,
    /// Whether some processes are unfit for some shards.
    unfit: bool,
    /// When the bucket last said so of a member other than those that leave.
    claimed: BTreeMap<(ShardId, String), u64>,
    /// Trouble may have let somebody act on an old view.
    pub(super) troubled: bool,
    pub(super) given_up: usize,
    pub(super) last_order: u64,
    pub(super) notices: Vec<(usize, Notice)>,
}

impl World {
    pub(super) fn new(seed: u64, shards: u32) -> Self {
        let idle = (0..shards)
            .filter(|shard| mix(seed ^ u64::from(*shard)).is_multiple_of(4))
            .map(ShardId)
            .collect();
        Self {
            now: 0,
            seed,
            draws: 0,
            agenda: BTreeMap::new(),
            bucket: BTreeMap::new(),
            revision: 0,
            processes: Vec::new(),
            shards,
            pins: BTreeMap::new(),
            idle,
            broken: BTreeMap::new(),
            unfit: false,
            claimed: BTreeMap::new(),
            troubled: false,
            given_up: 0,
            last_order: 0,
            notices: Vec::new(),
        }
    }

    /// Some shards are broken for all, some processes are unfit for some.
    pub(super) fn with_faults(mut self) -> Self {
        let broken = (0..self.shards).filter(|shard| mix(self.seed ^ !u64::from(*shard)).is_multiple_of(5));
        self.broken = broken.map(|shard| (ShardId(shard), 0)).collect();
        self.unfit = true;
        self
    }

    fn is_unfit(&self, process: usize, shard: ShardId) -> bool {
        let name = crate::mix::hash(self.processes[process].name.as_bytes());
        self.unfit && mix(self.seed ^ name ^ mix(u64::from(shard.0))).is_multiple_of(4)
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.draws += 1;
        mix(self.seed ^ mix(self.draws)) % below
    }

    fn at(&mut self, at: u64, item: Item) {
        self.draws += 1;
        self.agenda.insert((at, self.draws), item);
    }

    fn soon(&mut self, item: Item) {
        let at = self.now + 1 + self.draw(20);
        self.at(at, item);
    }

    fn instant(&self) -> Instant {
        Instant::at(Duration::from_millis(self.now))
    }

    /// Starts a process under a name, which nobody alive may have.
    pub(super) fn start(&mut self, name: &str) {
        assert!(self.find(name).is_none());
        let session = 1 + self.processes.len() as u64;
        let claims = Claims::new(config(name, session, self.shards), self.instant());
        self.processes.push(Process {
            claims,
            name: name.to_owned(),
            alive: true,
            frozen: false,
            backlog: Vec::new(),
            cut: false,
            watch_until: self.now,
            shards: BTreeMap::new(),
            unpinned: Vec::new(),
        });
        let process = self.processes.len() - 1;
        self.soon(Item::Wake(process));
        self.snapshot(process);
    }

    pub(super) fn find(&self, name: &str) -> Option<usize> {
        self.processes.iter().position(|process| process.alive && process.name == name)
    }

    pub(super) fn kill(&mut self, process: usize) {
        self.processes[process].alive = false;
        self.lose_pins(process);
    }

    pub(super) fn stop(&mut self, process: usize) {
        let within = Duration::from_secs(25);
        self.tell(process, Event::Stop { within });
    }

    pub(super) fn freeze(&mut self, process: usize) {
        self.troubled = true;
        self.processes[process].frozen = true;
        self.lose_pins(process);
    }

    pub(super) fn cut(&mut self, process: usize) {
        self.troubled = true;
        self.processes[process].cut = true;
        self.lose_pins(process);
    }

    /// Everything that is frozen or cut goes on.
    pub(super) fn heal(&mut self) {
        for process in 0..self.processes.len() {
            let it = &mut self.processes[process];
            if std::mem::take(&mut it.frozen) {
                let backlog = std::mem::take(&mut it.backlog);
                // The timer may fire before or after what has queued up.
                if self.draw(2) == 0 {
                    self.tell(process, Event::Wakeup);
                }
                for event in backlog {
                    self.tell(process, event);
                }
                self.tell(process, Event::Wakeup);
            }
            if std::mem::take(&mut self.processes[process].cut) {
                self.snapshot(process);
            }
            for shard in std::mem::take(&mut self.processes[process].unpinned) {
                self.soon(Item::Tell(process, Event::Shard { shard, report: Report::Lost }));
            }
        }
        for shard in (0..self.shards).map(ShardId) {
            self.soon(Item::Pin(shard));
        }
    }

    fn lose_pins(&mut self, process: usize) {
        let pins: Vec<_> = self.pins.iter().filter(|(_, (owner, _))| *owner == process).collect();
        let pins: Vec<_> = pins.into_iter().map(|(shard, (_, pin))| (*shard, pin.clone())).collect();
        for (shard, pin) in pins {
            self.at(self.now + PINNED_TTL, Item::Lapse(shard, pin));
        }
    }

    fn unpin(&mut self, shard: ShardId) {
        if let Some((owner, _)) = self.pins.remove(&shard) {
            let it = &mut self.processes[owner];
            if it.frozen || it.cut {
                it.unpinned.push(shard);
            } else {
                self.soon(Item::Tell(owner, Event::Shard { shard, report: Report::Lost }));
            }
        }
        self.soon(Item::Pin(shard));
    }

    /// What the watch shows comes in order.
    fn show(&mut self, process: usize, reply: members::Reply) {
        if self.processes[process].cut {
            return;
        }
        let at = (self.now + 1 + self.draw(20)).max(self.processes[process].watch_until);
        self.processes[process].watch_until = at;
        self.at(at, Item::Tell(process, Event::Members(reply)));
    }

    fn snapshot(&mut self, process: usize) {
        let entries = self.bucket.iter().map(|(key, (revision, record))| Entry {
            key: Arc::from(key.as_str()),
            revision: *revision,
            record: record.clone(),
        });
        let entries = entries.collect();
        self.show(process, members::Reply::Snapshot(entries));
    }

    fn store(&mut self, key: &str, record: &bytes::Bytes) {
        self.revision += 1;
        self.bucket.insert(key.to_owned(), (Revision(self.revision), record.clone()));
        self.note();
        for process in 0..self.processes.len() {
            let entry = Entry { key: key.into(), revision: Revision(self.revision), record: record.clone() };
            self.show(process, members::Reply::Changed(entry));
        }
    }

    fn note(&mut self) {
        for (key, (_, record)) in &self.bucket {
            if let Ok(member) = Member::decode(record) {
                for shard in member.shards.iter().filter(|(_, hold)| !hold.leaving).map(|(shard, _)| *shard) {
                    self.claimed.insert((shard, key.clone()), self.now);
                }
            }
        }
    }

    /// Runs for so long.
    pub(super) fn run(&mut self, milliseconds: u64) {
        let until = self.now + milliseconds;
        while let Some(((at, _), item)) = self.agenda.pop_first() {
            if at > until {
                self.draws += 1;
                self.agenda.insert((at, self.draws), item);
                break;
            }
            self.now = at;
            match item {
                Item::Tell(process, event) => self.tell(process, event),
                Item::Wake(process) => {
                    let due = self.processes[process].claims.next_wakeup();
                    if due.is_none_or(|due| due <= self.instant()) {
                        self.tell(process, Event::Wakeup);
                    }
                }
                Item::Reach(process, command) => self.reach(process, command),
                Item::Release(process, shard) => {
                    if self.processes[process].alive {
                        self.processes[process].shards.remove(&shard);
                        if self.pins.get(&shard).is_some_and(|(owner, _)| *owner == process) {
                            self.pins.remove(&shard);
                        }
                        self.soon(Item::Pin(shard));
                        let report = Report::Released { clean: true };
                        self.tell(process, Event::Shard { shard, report });
                    }
                }
                Item::Fail(process, shard, scope) => {
                    if self.processes[process].alive
                        && self.processes[process].shards.remove(&shard).is_some()
                    {
                        let report = Report::Failed { reason: "it is so".to_owned(), scope };
                        self.tell(process, Event::Shard { shard, report });
                    }
                }
                Item::Pin(shard) => self.pin(shard),
                Item::Lapse(shard, pin) => {
                    if self.pins.get(&shard).is_some_and(|(owner, held)| *held == pin && !self.pulls(*owner))
                    {
                        self.unpin(shard);
                    }
                }
            }
        }
        self.now = until;
    }

    fn pulls(&self, process: usize) -> bool {
        let it = &self.processes[process];
        it.alive && !it.frozen && !it.cut
    }

    fn pin(&mut self, shard: ShardId) {
        if self.idle.contains(&shard) || self.pins.contains_key(&shard) {
            return;
        }
        if self.broken.contains_key(&shard) {
            return;
        }
        let standbys = (0..self.processes.len()).filter(|process| {
            self.pulls(*process)
                && !self.is_unfit(*process, shard)
                && self.processes[*process].shards.get(&shard) == Some(&false)
        });
        let standbys: Vec<_> = standbys.collect();
        if standbys.is_empty() {
            return;
        }
        let owner = standbys[usize::try_from(self.draw(standbys.len() as u64)).unwrap()];
        let pin = PinId(format!("pin-{}", self.draws).into());
        self.pins.insert(shard, (owner, pin.clone()));
        self.soon(Item::Tell(owner, Event::Shard { shard, report: Report::Owned { pin } }));
    }

    fn reach(&mut self, process: usize, command: Command) {
        if !self.processes[process].alive {
            return;
        }
        let cut = self.processes[process].cut;
        let lost = || Failure::new(FailureClass::Unanswered, "no connection");
        let reply = match command {
            Command::Put { attempt, member, record } => {
                if !cut {
                    self.store(member.as_str(), &record);
                }
                members::Reply::Put { attempt, outcome: if cut { Err(lost()) } else { Ok(()) } }
            }
            Command::Delete { attempt, member, only } => {
                let known = self.bucket.get(member.as_str()).map(|(revision, _)| *revision);
                if !cut && (only.is_none() || only == known) && self.bucket.remove(member.as_str()).is_some()
                {
                    for process in 0..self.processes.len() {
                        self.show(process, members::Reply::Removed { key: member.as_str().into() });
                    }
                }
                members::Reply::Deleted { attempt, outcome: if cut { Err(lost()) } else { Ok(()) } }
            }
            Command::Probe { attempt, member } => {
                let asked = self.find(member.as_str()).map(|process| &self.processes[process]);
                let answer = match asked {
                    _ if cut => Probe::Silent,
                    None => Probe::NoResponders,
                    Some(asked) if asked.cut => Probe::NoResponders,
                    Some(asked) if asked.frozen => Probe::Silent,
                    Some(_) => Probe::Alive,
                };
                members::Reply::Probed { attempt, answer }
            }
        };
        self.soon(Item::Tell(process, Event::Members(reply)));
    }

    pub(super) fn tell(&mut self, process: usize, event: Event) {
        let now = self.instant();
        let it = &mut self.processes[process];
        if !it.alive {
            return;
        }
        if it.frozen {
            it.backlog.push(event);
            return;
        }
        let mut out = Vec::new();
        it.claims.handle(now, event, &mut out);
        it.claims.validate().unwrap();
        if it.claims.is_over() {
            self.processes[process].alive = false;
        } else if let Some(due) = self.processes[process].claims.next_wakeup() {
            assert!(due > now, "it would spin");
            // Rounded up: a millisecond is the shortest time here.
            let due = u64::try_from((due.since_start() + Duration::from_micros(999)).as_millis()).unwrap();
            self.at(due.max(self.now), Item::Wake(process));
        }
        for action in out {
            self.act(process, action);
        }
    }

    fn act(&mut self, process: usize, action: Action) {
        let (shard, order) = match action {
            Action::Notice(notice) => {
                self.notices.push((process, notice));
                return;
            }
            Action::Members(command) => {
                self.soon(Item::Reach(process, command));
                return;
            }
            Action::Shard { shard, order } => (shard, order),
        };
        if !matches!(order, Order::Share(_)) {
            self.last_order = self.now;
        }
        let dead = match order {
            Order::Share(_) => None,
            Order::Claim { of, .. } => {
                let before = self.processes[process].shards.insert(shard, false);
                assert_eq!(before, None, "claimed twice");
                if let Some(tries) = self.broken.get_mut(&shard) {
                    *tries += 1;
                    self.soon(Item::Fail(process, shard, Scope::Everywhere));
                } else if self.is_unfit(process, shard) {
                    self.soon(Item::Fail(process, shard, Scope::Here));
                }
                self.soon(Item::Pin(shard));
                of
            }
            Order::OwnerGone(pin) => Some(pin),
            Order::GiveUp => {
                self.given_up += 1;
                self.note();
                let name = self.processes[process].name.clone();
                let patience = if self.troubled { 60_000 } else { 200 };
                let heir = self
                    .claimed
                    .iter()
                    .any(|((other, id), at)| *other == shard && *id != name && at + patience >= self.now);
                let owns = self.pins.get(&shard).is_some_and(|(owner, _)| *owner == process);
                assert!(heir || !owns, "{name} gives up shard {shard} that nobody else claims");
                self.give_up(process, shard);
                None
            }
            Order::Stop { .. } => {
                self.give_up(process, shard);
                None
            }
        };
        if dead.is_some_and(|dead| self.pins.get(&shard).is_some_and(|(_, pin)| *pin == dead)) {
            self.unpin(shard);
        }
    }

    fn give_up(&mut self, process: usize, shard: ShardId) {
        self.processes[process].shards.insert(shard, true);
        let at = self.now + 10 + self.draw(300);
        self.at(at, Item::Release(process, shard));
    }

    pub(super) fn live(&self) -> Vec<usize> {
        (0..self.processes.len()).filter(|process| self.processes[*process].alive).collect()
    }

    pub(super) fn held(&self, process: usize) -> usize {
        self.processes[process].shards.len()
    }

    /// Every shard is claimed by exactly one live member, evenly, and every one with rows is owned by it.
    pub(super) fn check_settled(&self) {
        let live = self.live();
        if live.is_empty() {
            return;
        }
        for shard in (0..self.shards).map(ShardId) {
            let claim: Vec<_> =
                live.iter().filter(|process| self.processes[**process].shards.contains_key(&shard)).collect();
            if self.broken.contains_key(&shard) || live.iter().all(|process| self.is_unfit(*process, shard)) {
                assert!(claim.is_empty(), "shard {shard} is claimed by {claim:?} in vain");
                continue;
            }
            assert_eq!(claim.len(), 1, "shard {shard} is claimed by {claim:?}");
            assert!(!self.is_unfit(*claim[0], shard));
            let owner = self.pins.get(&shard).map(|(owner, _)| owner);
            assert_eq!(owner, Some(claim[0]).filter(|_| !self.idle.contains(&shard)), "shard {shard}");
        }
        if !self.troubled {
            // Those that say so can die, and some may start at once: else nobody tries what failed already.
            let most = self.processes.len();
            assert!(self.broken.values().all(|tries| *tries <= most), "{:?} {most}", self.broken);
        }
        let loads: Vec<_> = live.iter().map(|process| self.held(*process)).collect();
        let spread = loads.iter().max().unwrap() - loads.iter().min().unwrap();
        assert!(spread <= 1 || self.unfit, "{loads:?}");
        for process in live {
            let status = self.processes[process].claims.status();
            assert!(status.ready && !status.deaf);
            assert_eq!(status.shards.iter().filter(|shard| shard.mine != "free").count(), self.held(process));
            let share = Share::even(64_000, 1 << 30, u32::try_from(self.held(process)).unwrap());
            assert!(self.held(process) == 0 || status.share == share);
        }
    }
}
