use proptest::prelude::*;

use super::*;
use crate::member::Scope;
use crate::ports::ledger::Revision;
use crate::ports::members::Probe;
use crate::ports::{Attempt, Failure, FailureClass};

mod world;

use world::{World, config};

fn id(name: &str) -> MemberId {
    MemberId::new(name).unwrap()
}

/// One machine, its clock, and what it wanted.
struct Bench {
    claims: Claims,
    now: Instant,
    revision: u64,
    out: Vec<Action>,
}

impl Bench {
    fn new(name: &str, shards: u32) -> Self {
        let claims = Claims::new(config(name, 1, shards), Instant::START);
        let mut bench = Self { claims, now: Instant::START, revision: 0, out: Vec::new() };
        bench.tell(Event::Wakeup);
        bench
    }

    /// One that has heard all there is and is stored.
    fn ready(name: &str, shards: u32, others: &[Member]) -> Self {
        let mut bench = Self::new(name, shards);
        bench.store();
        let entries = others.iter().map(|other| bench.entry(other)).collect();
        bench.members(members::Reply::Snapshot(entries));
        bench
    }

    fn entry(&mut self, member: &Member) -> Entry {
        self.revision += 1;
        Entry { key: member.id.as_str().into(), revision: Revision(self.revision), record: member.encode() }
    }

    fn tell(&mut self, event: Event) {
        self.claims.handle(self.now, event, &mut self.out);
        self.claims.validate().unwrap();
        assert!(self.claims.next_wakeup().is_none_or(|due| due > self.now), "it would spin");
    }

    fn members(&mut self, reply: members::Reply) {
        self.tell(Event::Members(reply));
    }

    fn changed(&mut self, member: &Member) {
        let entry = self.entry(member);
        self.members(members::Reply::Changed(entry));
    }

    fn report(&mut self, shard: u32, report: Report) {
        self.tell(Event::Shard { shard: ShardId(shard), report });
    }

    /// Takes what was wanted out.
    fn take(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.out)
    }

    fn orders(&mut self) -> Vec<(u32, Order)> {
        let orders = self.take().into_iter().filter_map(|action| match action {
            Action::Shard { shard, order } if !matches!(order, Order::Share(_)) => Some((shard.0, order)),
            _ => None,
        });
        orders.collect()
    }

    fn claimed(&mut self) -> Vec<u32> {
        let orders = self.orders().into_iter();
        orders.filter(|(_, order)| matches!(order, Order::Claim { .. })).map(|(shard, _)| shard).collect()
    }

    /// Stores what it wants stored, and lets the watch show it. Returns the last record stored.
    fn store(&mut self) -> Option<Member> {
        let mut stored = None;
        for _ in 0..4 {
            let put =
                self.out.iter().position(|action| matches!(action, Action::Members(Command::Put { .. })));
            let Some(Action::Members(Command::Put { attempt, record, .. })) =
                put.map(|at| self.out.remove(at))
            else {
                break;
            };
            let member = Member::decode(&record).unwrap();
            self.members(members::Reply::Put { attempt, outcome: Ok(()) });
            self.changed(&member);
            stored = Some(member);
        }
        stored
    }

    /// Fails to store what it wants stored.
    fn fail(&mut self) {
        let (puts, rest): (Vec<_>, Vec<_>) = self
            .take()
            .into_iter()
            .partition(|action| matches!(action, Action::Members(Command::Put { .. })));
        self.out = rest;
        for put in puts {
            let Action::Members(Command::Put { attempt, .. }) = put else { continue };
            let failure = Failure::new(FailureClass::Unavailable, "no leader");
            self.members(members::Reply::Put { attempt, outcome: Err(failure) });
        }
    }

    /// Lets time pass; the bucket is well, the others silent.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(due) = self.claims.next_wakeup().filter(|due| *due <= until) {
            self.now = due.max(self.now);
            self.tell(Event::Wakeup);
            self.store();
        }
        self.now = until;
    }

    fn probes(&mut self) -> Vec<Attempt> {
        let (probes, rest): (Vec<_>, Vec<_>) = self
            .take()
            .into_iter()
            .partition(|action| matches!(action, Action::Members(Command::Probe { .. })));
        self.out = rest;
        let attempt = |action| match action {
            Action::Members(Command::Probe { attempt, .. }) => Some(attempt),
            _ => None,
        };
        probes.into_iter().filter_map(attempt).collect()
    }

    fn left(&self) -> Vec<Gone> {
        let why = |action: &Action| match action {
            Action::Notice(Notice::Left { why, .. }) => Some(*why),
            _ => None,
        };
        self.out.iter().filter_map(why).collect()
    }
}

fn other(name: &str, shards: impl IntoIterator<Item = u32>) -> Member {
    Member {
        version: Member::VERSION,
        id: id(name),
        session: Session(77),
        beat: 1,
        state: State::Active,
        software: "0.1.0".to_owned(),
        fingerprint: "00".to_owned(),
        shards: shards.into_iter().map(|shard| (ShardId(shard), Hold::default())).collect(),
        failed: BTreeMap::new(),
        paused: BTreeSet::new(),
    }
}

fn owning(mut member: Member, shard: u32, pin: &str) -> Member {
    let hold = Hold { pin: Some(PinId(pin.into())), turn: 1, leaving: false };
    member.shards.insert(ShardId(shard), hold);
    member
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_lone_process_has_every_shard_as_soon_as_it_is_stored_and_has_read_the_others() {
    let mut bench = Bench::new("a", 4);
    assert_eq!(bench.orders(), vec![]);
    let mut bench = Bench::new("a", 4);
    bench.members(members::Reply::Snapshot(vec![]));
    assert!(bench.claims.status().shards.iter().all(|shard| shard.mine == "free"), "not stored yet");
    bench.store();
    assert_eq!(bench.claimed(), vec![0, 1, 2, 3]);
    let bench = Bench::ready("a", 4, &[]);
    assert_eq!(bench.now, Instant::START, "it took no time");
    assert_eq!(bench.claims.status().share, Share::even(64_000, 1 << 30, 4));
}

#[test]
fn a_newcomer_claims_its_share_at_once_and_takes_no_more() {
    let mut bench = Bench::ready("b", 4, &[other("a", 0..4)]);
    let claimed = bench.claimed();
    assert_eq!(claimed.len(), 2);
    bench.store();
    bench.changed(&other("a", (0..4).filter(|shard| !claimed.contains(shard))));
    assert_eq!(bench.orders(), vec![], "all is well");
}

#[test]
fn a_shard_is_given_up_when_the_other_stands_by_for_it_and_not_before() {
    let mut bench = Bench::ready("a", 2, &[]);
    bench.report(0, Report::Owned { pin: PinId("p".into()) });
    bench.take();
    bench.changed(&other("b", []));
    assert_eq!(bench.orders(), vec![]);
    let given =
        bench.claims.plan.iter().find(|(_, home)| **home == id("b")).map(|(shard, _)| shard.0).unwrap();
    bench.changed(&Member { beat: 2, ..other("b", [given]) });
    assert_eq!(bench.orders(), vec![(given, Order::GiveUp)]);
    let said = bench.store().unwrap_or_else(|| bench.claims.record());
    assert!(said.shards[&ShardId(given)].leaving, "until it is released the others see it as held");
    bench.report(given, Report::Released { clean: true });
    assert!(!bench.claims.record().shards.contains_key(&ShardId(given)));
    assert_eq!(bench.claims.status().share, Share::even(64_000, 1 << 30, 1));
}

#[test]
fn a_member_that_leaves_a_shard_itself_does_not_stand_by_for_it() {
    let mut bench = Bench::ready("a", 2, &[]);
    bench.take();
    let mut leaving = other("b", [0, 1]);
    for hold in leaving.shards.values_mut() {
        hold.leaving = true;
    }
    bench.changed(&leaving);
    assert_eq!(bench.orders(), vec![]);
}

#[test]
fn the_dead_ones_shards_are_claimed_with_their_pins() {
    let mut bench = Bench::ready("a", 2, &[owning(owning(other("b", []), 0, "p0"), 1, "p1")]);
    let first = bench.claimed();
    assert_eq!(first.len(), 1);
    bench.store();
    bench.members(members::Reply::Removed { key: "b".into() });
    let mut orders = bench.orders();
    orders.sort_by_key(|(shard, _)| *shard != first[0]);
    let pin = |shard: u32| PinId(format!("p{shard}").into());
    assert_eq!(orders[0], (first[0], Order::OwnerGone(pin(first[0]))));
    let second = 1 - first[0];
    assert!(
        matches!(&orders[1], (shard, Order::Claim { of: Some(of), .. }) if *shard == second && *of == pin(second))
    );
}

#[test]
fn a_process_started_anew_finds_its_own_pins_and_replaces_its_old_self_at_once() {
    let old = owning(other("a", []), 0, "mine");
    let mut bench = Bench::new("a", 1);
    let entry = bench.entry(&old);
    bench.members(members::Reply::Snapshot(vec![entry]));
    bench.store();
    let orders = bench.orders();
    assert!(matches!(&orders[..], [(0, Order::Claim { of: Some(pin), .. })] if *pin == PinId("mine".into())));

    let mut bench = Bench::ready("a", 2, &[owning(other("b", []), 0, "p")]);
    bench.take();
    bench.changed(&Member { session: Session(78), ..other("b", []) });
    assert_eq!(bench.left(), vec![Gone::Restarted]);
}

#[test]
fn silence_is_not_death_but_nobody_there_twice_is() {
    let mut bench = Bench::ready("a", 2, &[other("b", [0])]);
    let [probe] = bench.probes()[..] else { panic!("one from a snapshot is asked at once") };
    bench.members(members::Reply::Probed { attempt: probe, answer: Probe::NoResponders });
    for answer in [Probe::Silent, Probe::Silent, Probe::NoResponders, Probe::Alive, Probe::NoResponders] {
        bench.pass(Duration::from_millis(200));
        let [probe] = bench.probes()[..] else { panic!("one at a time") };
        bench.members(members::Reply::Probed { attempt: probe, answer });
        bench.members(members::Reply::Probed { attempt: probe, answer: Probe::NoResponders });
        assert_eq!(bench.left(), vec![], "a number counts once, and not in a row");
    }
    bench.pass(Duration::from_millis(200));
    let probe = bench.probes()[0];
    bench.members(members::Reply::Probed { attempt: probe, answer: Probe::NoResponders });
    assert_eq!(bench.left(), vec![Gone::NoResponders]);
    assert_eq!(bench.claimed().len(), 2);
    bench.changed(&Member { beat: 2, ..other("b", [0]) });
    assert!(bench.take().contains(&Action::Notice(Notice::Joined { member: id("b") })), "it thawed");
}

#[test]
fn whoever_left_a_record_behind_is_asked_as_soon_as_we_hear() {
    let mut bench = Bench::new("a", 2);
    let entry = bench.entry(&other("b", [0, 1]));
    bench.members(members::Reply::Snapshot(vec![entry]));
    assert_eq!(bench.probes(), vec![]);
    bench.store();
    assert_eq!(bench.probes().len(), 1);
    assert_eq!(bench.now, Instant::START);
}

#[test]
fn after_a_broken_connection_the_others_have_a_moment_to_mend_theirs() {
    let mut bench = Bench::ready("a", 2, &[other("b", [0])]);
    bench.store();
    let probe = bench.probes()[0];
    bench.members(members::Reply::Probed { attempt: probe, answer: Probe::NoResponders });
    // The server restarts: nothing that is sent reaches it for a while.
    while bench.now.since_start() < SECOND * 3 / 2 {
        bench.now = bench.claims.next_wakeup().unwrap();
        bench.tell(Event::Wakeup);
        bench.fail();
    }
    for probe in bench.probes() {
        bench.members(members::Reply::Probed { attempt: probe, answer: Probe::NoResponders });
    }
    assert_eq!(bench.left(), vec![], "nobody is there, but we are not in touch ourselves");
    while bench.store().is_none() {
        bench.now = bench.claims.next_wakeup().unwrap();
        bench.tell(Event::Wakeup);
    }
    bench.take();
    bench.pass(Duration::from_millis(624));
    assert_eq!(bench.probes(), vec![]);
    bench.pass(Duration::from_millis(1));
    assert_eq!(bench.probes().len(), 1);
    assert_eq!(bench.left(), vec![]);
}

/// The records may say it in any way that handing over goes through: the answer stays.
#[test]
fn a_shard_that_is_being_given_up_is_its_heirs() {
    for name in ["c", "d", "e", "f", "g", "h"] {
        let mut giving = owning(other("a", [1]), 0, "p");
        giving.shards.get_mut(&ShardId(0)).unwrap().leaving = true;
        let bench = Bench::ready(name, 2, &[giving, other("b", [0])]);
        assert_eq!(bench.claims.plan[&ShardId(0)], id("b"), "{name}");
        assert_eq!(bench.claims.plan[&ShardId(1)], id("a"), "{name}");
    }
}

#[test]
fn of_two_owners_the_later_one_has_the_seat() {
    for (a, b) in [(1, 2), (2, 1)] {
        let says = |name: &str, turn: u64| {
            let mut member = owning(other(name, []), 0, name);
            member.shards.get_mut(&ShardId(0)).unwrap().turn = turn;
            member
        };
        let bench = Bench::ready("c", 1, &[says("a", a), says("b", b)]);
        assert_eq!(bench.claims.plan[&ShardId(0)], id(if a > b { "a" } else { "b" }));
    }
    let mut bench = Bench::ready("a", 1, &[]);
    bench.report(0, Report::Owned { pin: PinId("p".into()) });
    assert_eq!(bench.claims.record().shards[&ShardId(0)].turn, 1);
    let mut old = owning(other("b", []), 0, "q");
    old.shards.get_mut(&ShardId(0)).unwrap().turn = 7;
    bench.changed(&old);
    bench.report(0, Report::Owned { pin: PinId("r".into()) });
    assert_eq!(bench.claims.record().shards[&ShardId(0)].turn, 8);
}

#[test]
fn a_heartbeat_that_stops_ends_the_lease_and_one_that_goes_on_does_not() {
    let mut bench = Bench::ready("a", 2, &[other("b", [0])]);
    for beat in 2..20 {
        bench.pass(SECOND / 2);
        bench.changed(&Member { beat, ..other("b", [0]) });
    }
    assert_eq!(bench.left(), vec![]);
    bench.pass(Duration::from_millis(4_999));
    assert_eq!(bench.left(), vec![]);
    bench.pass(Duration::from_millis(1));
    assert_eq!(bench.left(), vec![Gone::LeaseOver]);
}

#[test]
fn a_process_that_does_not_hear_itself_claims_nothing_keeps_all_and_buries_nobody() {
    let mut bench = Bench::ready("a", 4, &[other("b", [0, 1])]);
    bench.take();
    // The bucket does not answer: nothing is stored, nothing is shown.
    for _ in 0..200 {
        bench.now = bench.now + Duration::from_millis(100);
        bench.tell(Event::Wakeup);
        for probe in bench.probes() {
            bench.members(members::Reply::Probed { attempt: probe, answer: Probe::NoResponders });
        }
        if bench.now.since_start() < SECOND * 2 {
            bench.out.retain(|action| !matches!(action, Action::Notice(Notice::Left { .. })));
        }
    }
    assert!(bench.claims.status().deaf);
    let kept = bench.claims.held().count();
    assert!(kept >= 2);
    bench.members(members::Reply::Removed { key: "b".into() });
    assert_eq!(bench.claims.held().count(), kept, "nothing new");
    bench.tell(Event::Wakeup);
    bench.changed(&other("b", [0, 1]));
    bench.take();
    // A frozen process is the same: what it wakes to is a long time without itself.
    bench.now = bench.now + SECOND * 60;
    bench.tell(Event::Wakeup);
    assert_eq!(bench.left(), vec![]);
    bench.store();
    assert!(!bench.claims.status().deaf);
    bench.pass(SECOND * 4);
    assert_eq!(bench.left(), vec![], "leases began anew");
}

#[test]
fn what_queued_up_while_frozen_is_not_hearing() {
    let mut bench = Bench::ready("a", 2, &[other("b", [0])]);
    bench.store();
    bench.take();
    bench.pass(SECOND);
    bench.now = bench.now + SECOND / 2;
    bench.tell(Event::Wakeup);
    let sent = bench.out.iter().find_map(|action| match action {
        Action::Members(Command::Put { record, .. }) => Some(Member::decode(record).unwrap()),
        _ => None,
    });
    bench.take();
    bench.now = bench.now + SECOND * 60;
    bench.changed(&sent.unwrap());
    assert!(bench.claims.status().deaf);
    bench.members(members::Reply::Removed { key: "b".into() });
    assert_eq!(bench.claims.held().count(), 1);
    bench.store();
    assert_eq!(bench.claims.held().count(), 2, "now it hears");
}

#[test]
fn draining_is_said_at_once_and_the_record_goes_when_all_is_released() {
    let mut bench = Bench::ready("a", 2, &[]);
    bench.store();
    bench.take();
    bench.tell(Event::Stop { within: SECOND * 25 });
    let stop = Order::Stop { within: SECOND * 25 };
    let stops =
        bench.out.iter().filter(|action| matches!(action, Action::Shard { order, .. } if *order == stop));
    assert_eq!(stops.count(), 2);
    assert_eq!(bench.store().unwrap().state, State::Draining);
    bench.report(0, Report::Released { clean: true });
    bench.report(1, Report::Released { clean: true });
    let delete = |out: &[Action]| {
        out.iter().find_map(|action| match action {
            Action::Members(Command::Delete { attempt, .. }) => Some(*attempt),
            _ => None,
        })
    };
    assert_eq!(delete(&bench.out), None, "a write is on its way and would bring it back");
    bench.store();
    let attempt = delete(&bench.out).unwrap();
    bench.members(members::Reply::Deleted { attempt, outcome: Ok(()) });
    assert!(bench.claims.is_over());
    assert_eq!(bench.claims.next_wakeup(), None);
}

#[test]
fn a_stop_ends_in_time_whatever_answers() {
    let mut bench = Bench::ready("a", 2, &[]);
    bench.tell(Event::Stop { within: SECOND * 25 });
    bench.pass(SECOND * 27);
    assert!(bench.claims.is_over());
}

#[test]
fn a_draining_member_is_given_nothing_and_its_shards_are_claimed_at_once() {
    let mut bench = Bench::ready("a", 4, &[other("b", 0..4)]);
    assert_eq!(bench.claimed().len(), 2);
    bench.changed(&Member { state: State::Draining, beat: 2, ..other("b", 0..4) });
    assert_eq!(bench.claimed().len(), 2);
}

#[test]
fn a_failed_shard_is_left_by_all_and_no_heir_fails_in_turn() {
    let mut bench = Bench::ready("a", 2, &[]);
    let failed = Report::Failed { reason: "consumer deleted".to_owned(), scope: Scope::Everywhere };
    bench.report(1, failed);
    assert_eq!(bench.claims.record().failed[&ShardId(1)].reason, "consumer deleted");
    bench.take();
    bench.pass(SECOND * 60);
    assert_eq!(bench.claimed(), Vec::<u32>::new());
    bench.tell(Event::Resume(ShardId(1)));
    assert_eq!(bench.claimed(), vec![1]);

    let mut says = other("b", []);
    says.failed.insert(ShardId(1), Fault::new("consumer deleted", Scope::Everywhere));
    let mut bench = Bench::ready("a", 3, &[says.clone()]);
    assert!(!bench.claimed().contains(&1));
    let status = bench.claims.status();
    assert_eq!(status.shards[1].failed, vec![(&id("b"), &says.failed[&ShardId(1)])]);
    assert_eq!(status.shards[1].home, None);
    // It leaves, and its heir does not try.
    bench.members(members::Reply::Removed { key: "b".into() });
    let told = bench.claims.record();
    assert_eq!(told.failed[&ShardId(1)], Fault::new("b: consumer deleted", Scope::Here));
    bench.pass(SECOND * 60);
    assert!(!bench.claimed().contains(&1));
    // One that has not heard of it tries, and owns it: it is whole again for all.
    bench.changed(&other("c", [1]));
    assert_eq!(bench.claims.status().shards[1].home, Some(&id("c")));
    bench.changed(&owning(other("c", [1]), 1, "p1"));
    assert_eq!(bench.claims.record().failed, BTreeMap::new());
}

#[test]
fn a_failure_is_told_before_the_record_goes() {
    let mut bench = Bench::ready("a", 1, &[]);
    bench.store();
    bench.take();
    // A heartbeat is on its way when the shard fails and the process is stopped for it.
    bench.pass(SECOND / 2);
    let beat = bench.take();
    let reason = "consumer deleted".to_owned();
    bench.report(0, Report::Failed { reason, scope: Scope::Everywhere });
    bench.tell(Event::Stop { within: SECOND * 20 });
    bench.out.splice(..0, beat);
    let told = bench.store().unwrap();
    assert_eq!(told.failed[&ShardId(0)].reason, "consumer deleted");
    bench.pass(SECOND);
    let deletes = |action: &Action| matches!(action, Action::Members(Command::Delete { .. }));
    assert!(bench.out.iter().any(deletes), "{:?}", bench.out);
}

#[test]
fn a_shard_that_fails_here_only_is_left_to_the_others() {
    let mut says = other("b", []);
    says.failed = (0..4).map(|shard| (ShardId(shard), Fault::new("too new for it", Scope::Here))).collect();
    let mut bench = Bench::ready("a", 4, &[says]);
    assert_eq!(bench.claimed(), vec![0, 1, 2, 3]);
}

#[test]
fn a_paused_shard_is_given_up_and_taken_again_when_resumed() {
    let mut bench = Bench::ready("a", 2, &[]);
    bench.take();
    bench.tell(Event::Pause(ShardId(0)));
    assert_eq!(bench.orders(), vec![(0, Order::GiveUp)]);
    bench.report(0, Report::Released { clean: true });
    assert_eq!(bench.orders(), vec![]);
    bench.tell(Event::Resume(ShardId(0)));
    assert_eq!(bench.claimed(), vec![0]);
    bench.tell(Event::Pause(ShardId(9)));
}

#[test]
fn an_unowned_shard_is_claimed_in_turn_when_its_own_member_does_not() {
    let mut bench = Bench::ready("a", 2, &[other("b", [])]);
    let mine = bench.claimed();
    assert_eq!(mine.len(), 1);
    let theirs = 1 - mine[0];
    bench.tell(Event::Unowned { shard: ShardId(theirs) });
    assert!(bench.take().contains(&Action::Notice(Notice::Unowned { shard: ShardId(theirs) })));
    assert!(bench.claims.status().shards[theirs as usize].unowned);
    bench.pass(SECOND);
    assert_eq!(bench.claimed(), vec![theirs]);
    bench.tell(Event::Wakeup);
    assert!(!bench.claims.status().shards[theirs as usize].unowned);
}

#[test]
fn a_shard_that_its_own_member_never_claims_is_claimed_in_the_end() {
    let mut bench = Bench::ready("a", 2, &[other("b", [])]);
    let mine = bench.claimed();
    for beat in 2..11 {
        bench.pass(SECOND / 2);
        bench.changed(&Member { beat, ..other("b", []) });
    }
    assert_eq!(bench.claimed(), Vec::<u32>::new(), "b lives, but is deaf");
    bench.pass(SECOND);
    assert_eq!(bench.claimed(), vec![1 - mine[0]]);
}

#[test]
fn somebody_else_under_our_name_is_told_once() {
    let mut bench = Bench::ready("a", 1, &[]);
    bench.take();
    for beat in 1..4 {
        bench.changed(&Member { beat, ..other("a", [0]) });
    }
    let told =
        bench.take().into_iter().filter(|action| matches!(action, Action::Notice(Notice::NameTaken { .. })));
    assert_eq!(told.count(), 1);
}

#[test]
fn a_member_of_a_newer_version_lives_keeps_and_is_told_of() {
    let mut bench = Bench::ready("a", 2, &[Member { version: 9, ..other("b", [0]) }]);
    assert!(bench.take().contains(&Action::Notice(Notice::NewerVersion { member: id("b") })));
    assert_eq!(bench.claims.plan[&ShardId(0)], id("b"));
    let strange = Entry {
        key: "b".into(),
        revision: Revision(99),
        record: bytes::Bytes::from_static(br#"{"version":10,"who":"knows"}"#),
    };
    bench.members(members::Reply::Changed(strange));
    assert_eq!(bench.left(), vec![]);
    assert_eq!(bench.claims.plan[&ShardId(0)], id("b"), "what it held it holds");
}

#[test]
fn what_a_newer_member_has_is_left_to_newer_ones() {
    let newer = |name, shards: Vec<u32>| Member { version: Member::VERSION + 1, ..other(name, shards) };
    let planned = |bench: &Bench, name| bench.claims.plan.values().filter(|home| **home == id(name)).count();
    let mut bench = Bench::ready("a", 4, &[newer("b", vec![0, 1, 2, 3])]);
    assert_eq!((bench.claimed(), planned(&bench, "b")), (vec![], 4), "it could not read their records");
    bench.changed(&newer("c", vec![]));
    assert_eq!([planned(&bench, "a"), planned(&bench, "b"), planned(&bench, "c")], [0, 2, 2]);
    // The other way round it is as ever: shards go to new members, and an old one keeps its share.
    let bench = Bench::ready("b", 4, &[other("a", [0, 1, 2, 3]), newer("c", vec![])]);
    assert_eq!([planned(&bench, "a"), planned(&bench, "b"), planned(&bench, "c")], [2, 1, 1]);
    // Nobody has them any more: it is tried.
    let mut bench = Bench::ready("a", 4, &[newer("b", vec![0, 1, 2, 3])]);
    bench.take();
    bench.members(members::Reply::Removed { key: "b".into() });
    assert_eq!(bench.claimed(), vec![0, 1, 2, 3]);
}

#[test]
fn the_records_of_those_that_crashed_long_ago_are_deleted() {
    let mut bench = Bench::ready("a", 1, &[other("b", [])]);
    bench.pass(SECOND * 700);
    let deletes = bench.take().into_iter().filter(
        |action| matches!(action, Action::Members(Command::Delete { member, only: Some(Revision(_)), .. }) if *member == id("b")),
    );
    assert_eq!(deletes.count(), 1);
}

#[test]
fn a_bucket_full_of_strangers_is_survived() {
    let mut bench = Bench::new("a", 2);
    bench.store();
    let mut entries: Vec<_> = (0..MAX_MEMBERS + 50)
        .map(|nth| {
            let member = other(&format!("node-{nth}"), [0, 1, u32::MAX]);
            bench.entry(&member)
        })
        .collect();
    for key in ["", " ", "\u{7}", "a\nb", &"x".repeat(1_000)] {
        entries.push(Entry { key: key.into(), revision: Revision(1), record: bytes::Bytes::new() });
    }
    bench.members(members::Reply::Snapshot(entries));
    let out = bench.take();
    assert_eq!(
        out.iter().filter(|action| matches!(action, Action::Notice(Notice::TooManyMembers))).count(),
        1
    );
    assert_eq!(bench.claims.status().members.len(), MAX_MEMBERS);
}

#[test]
fn one_write_at_a_time_and_news_goes_into_the_next() {
    let mut bench = Bench::ready("a", 8, &[]);
    let puts = |out: &[Action]| {
        out.iter().filter(|action| matches!(action, Action::Members(Command::Put { .. }))).count()
    };
    assert_eq!(puts(&bench.out), 1, "the claims");
    for shard in 0..8 {
        bench.report(shard, Report::Owned { pin: PinId("p".into()) });
    }
    assert_eq!(puts(&bench.out), 1);
    let stored = bench.store().unwrap();
    assert!(stored.shards.values().all(|hold| hold.pin.is_some()));
    assert_eq!(puts(&bench.out), 0);
}

#[test]
fn a_write_that_fails_is_told_and_tried_again_without_haste() {
    let mut bench = Bench::new("a", 1);
    let mut tries = 0;
    while bench.now.since_start() < SECOND * 10 {
        let puts: Vec<_> = bench
            .take()
            .into_iter()
            .filter_map(|action| match action {
                Action::Members(Command::Put { attempt, .. }) => Some(attempt),
                _ => None,
            })
            .collect();
        for attempt in puts {
            tries += 1;
            let failure = Failure::new(FailureClass::Unavailable, "no leader");
            bench.members(members::Reply::Put { attempt, outcome: Err(failure) });
        }
        bench.now = bench.claims.next_wakeup().unwrap().max(bench.now);
        bench.tell(Event::Wakeup);
    }
    assert!((30..50).contains(&tries), "{tries}");
}

#[test]
fn a_rolling_deploy_moves_what_it_must() {
    let mut world = World::new(5, 64);
    for name in ["a", "b", "c", "d"] {
        world.start(name);
        world.run(3_000);
    }
    world.check_settled();
    assert_eq!(world.given_up, 32 + 21 + 16);
    for name in ["a", "b", "c", "d"] {
        let before = world.given_up;
        world.stop(world.find(name).unwrap());
        world.run(3_000);
        world.check_settled();
        assert_eq!(world.given_up, before, "what is drained is claimed, and nothing else moves");
        world.start(name);
        world.run(3_000);
        world.check_settled();
        assert_eq!(world.given_up, before + 16);
    }
}

#[test]
fn a_killed_members_shards_are_owned_again_within_a_second_and_a_half() {
    for seed in 0..20 {
        let mut world = World::new(seed, 32);
        for name in ["a", "b", "c"] {
            world.start(name);
        }
        world.run(5_000);
        world.check_settled();
        world.kill(world.find("a").unwrap());
        world.run(1_500);
        world.check_settled();
    }
}

/// What happens to the processes of a world.
#[derive(Clone, Copy, Debug)]
enum Step {
    Start(u8),
    Kill(u8),
    Stop(u8),
    Freeze(u8),
    Cut(u8),
    Heal,
    /// A process is told that a shard's rows wait, rightly or not.
    Hint(u8, u32),
}

fn steps(trouble: bool) -> impl Strategy<Value = Vec<(Step, u64)>> {
    let name = 0_u8..6;
    let calm = prop_oneof![
        4 => name.clone().prop_map(Step::Start),
        1 => name.clone().prop_map(Step::Kill),
        1 => name.clone().prop_map(Step::Stop),
        1 => (name.clone(), 0_u32..24).prop_map(|(which, shard)| Step::Hint(which, shard)),
    ];
    let step = if trouble {
        prop_oneof![
            3 => calm,
            1 => name.clone().prop_map(Step::Freeze),
            1 => name.prop_map(Step::Cut),
            2 => Just(Step::Heal),
        ]
        .boxed()
    } else {
        calm.boxed()
    };
    let pause = prop_oneof![Just(0), 0_u64..100, 0_u64..3_000, 0_u64..12_000];
    proptest::collection::vec((step, pause), 1..25)
}

/// Anything that a driver may hand in, sensible or not, and the milliseconds before it.
fn anything() -> impl Strategy<Value = (u64, Event)> {
    let shard = || (0_u32..4).prop_map(ShardId);
    let record = (0_usize..4, 0_u64..3, 0_u64..40, 0_u32..256).prop_map(|(who, session, beat, bits)| {
        let mut member = other(["a", "b", "c", "d"][who], (0..3).filter(|shard| bits & 1 << shard != 0));
        if bits & 8 != 0 {
            member = owning(member, bits % 3, "p");
        }
        if bits & 16 != 0 {
            member.shards.remove(&ShardId(1));
            member.failed.insert(ShardId(1), Fault::new("so", Scope::Everywhere));
        }
        if bits & 32 != 0 {
            member.paused.insert(ShardId(2));
        }
        if bits & 64 != 0 {
            member.state = [State::Draining, State::Resigned, State::Unknown][who % 3];
        }
        Member { session: Session(session), beat, ..member }
    });
    let bytes = prop_oneof![
        8 => record.prop_map(|member| (member.id.as_str().to_owned(), member.encode())),
        1 => ("[a-d\n]{0,2}", proptest::collection::vec(any::<u8>(), 0..20))
            .prop_map(|(key, bytes)| (key, bytes.into())),
    ];
    let entry = (bytes, 0_u64..50).prop_map(|((key, record), revision)| Entry {
        key: key.as_str().into(),
        revision: Revision(revision),
        record,
    });
    let attempt = || (0_u64..60).prop_map(Attempt);
    let outcome = || {
        let failed = || Err(Failure::new(FailureClass::Other, "no"));
        any::<bool>().prop_map(move |ok| if ok { Ok(()) } else { failed() })
    };
    let answer = prop_oneof![Just(Probe::Alive), Just(Probe::NoResponders), Just(Probe::Silent)];
    let report = prop_oneof![
        Just(Report::Ready),
        "[a-z]{1,3}".prop_map(|pin| Report::Owned { pin: PinId(pin.into()) }),
        Just(Report::Lost),
        any::<bool>().prop_map(|clean| Report::Released { clean }),
        any::<bool>().prop_map(|all| Report::Failed {
            reason: "so".to_owned(),
            scope: if all { Scope::Everywhere } else { Scope::Here },
        }),
    ];
    let event = prop_oneof![
        4 => Just(Event::Wakeup),
        6 => entry.clone().prop_map(|entry| Event::Members(members::Reply::Changed(entry))),
        1 => proptest::collection::vec(entry, 0..5)
            .prop_map(|entries| Event::Members(members::Reply::Snapshot(entries))),
        1 => "[a-e]".prop_map(|key| Event::Members(members::Reply::Removed { key: key.into() })),
        3 => (attempt(), outcome())
            .prop_map(|(attempt, outcome)| Event::Members(members::Reply::Put { attempt, outcome })),
        1 => (attempt(), outcome())
            .prop_map(|(attempt, outcome)| Event::Members(members::Reply::Deleted { attempt, outcome })),
        3 => (attempt(), answer)
            .prop_map(|(attempt, answer)| Event::Members(members::Reply::Probed { attempt, answer })),
        6 => (shard(), report).prop_map(|(shard, report)| Event::Shard { shard, report }),
        1 => shard().prop_map(|shard| Event::Unowned { shard }),
        1 => shard().prop_map(Event::Pause),
        1 => shard().prop_map(Event::Resume),
    ];
    let event = prop_oneof![
        60 => event,
        1 => (0_u64..30).prop_map(|within| Event::Stop { within: Duration::from_secs(within) }),
    ];
    (prop_oneof![Just(0), 0_u64..400, 0_u64..7_000], event)
}

/// As many worlds as somebody wants to wait for.
fn worlds() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(64)
}

fn live_through(mut world: World, steps: &[(Step, u64)]) -> World {
    for (step, pause) in steps {
        let it = match step {
            Step::Start(which)
            | Step::Kill(which)
            | Step::Stop(which)
            | Step::Freeze(which)
            | Step::Cut(which)
            | Step::Hint(which, _) => world.find(&format!("node-{which}")),
            Step::Heal => None,
        };
        match (step, it) {
            (Step::Start(which), None) => world.start(&format!("node-{which}")),
            (Step::Kill(_), Some(it)) => world.kill(it),
            (Step::Stop(_), Some(it)) => world.stop(it),
            (Step::Freeze(_), Some(it)) => world.freeze(it),
            (Step::Cut(_), Some(it)) => world.cut(it),
            (Step::Hint(_, shard), Some(it)) => world.tell(it, Event::Unowned { shard: ShardId(*shard) }),
            (Step::Heal, _) => world.heal(),
            _ => {}
        }
        world.run(*pause);
    }
    world.heal();
    world
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(worlds()))]

    #[test]
    fn when_it_is_quiet_every_shard_is_one_members(
        seed in any::<u64>(),
        shards in 1_u32..24,
        steps in steps(false),
    ) {
        let mut world = live_through(World::new(seed, shards), &steps);
        let quiet = world.now;
        world.run(6_000);
        world.check_settled();
        let settled = world.last_order;
        world.run(30_000);
        world.check_settled();
        prop_assert_eq!(world.last_order, settled, "quiet since {}", quiet);
    }

    #[test]
    fn freezes_and_cuts_are_got_over(
        seed in any::<u64>(),
        shards in 1_u32..24,
        steps in steps(true),
    ) {
        let mut world = live_through(World::new(seed, shards), &steps);
        world.run(12_000);
        world.check_settled();
        let settled = world.last_order;
        world.run(30_000);
        world.check_settled();
        prop_assert_eq!(world.last_order, settled);
    }

    #[test]
    fn whatever_is_told_nothing_breaks(events in proptest::collection::vec(anything(), 1..120)) {
        let mut bench = Bench::new("a", 3);
        for (pause, event) in events {
            bench.now = bench.now + Duration::from_millis(pause);
            bench.tell(event);
            if pause % 3 == 0 {
                bench.store();
            }
        }
    }

    #[test]
    fn what_is_broken_is_tried_once_and_what_is_unfit_goes_to_another(
        seed in any::<u64>(),
        shards in 1_u32..24,
        steps in steps(true),
    ) {
        let mut world = live_through(World::new(seed, shards).with_faults(), &steps);
        world.run(12_000);
        world.check_settled();
        let settled = world.last_order;
        world.run(30_000);
        world.check_settled();
        prop_assert_eq!(world.last_order, settled);
    }
}

/// What each rule is for shows without it.
#[cfg(feature = "mutants")]
#[test]
fn every_rule_is_missed() {
    let shown: [(Rule, fn()); 6] = [
        (
            Rule::SnapshotBeforeClaims,
            a_lone_process_has_every_shard_as_soon_as_it_is_stored_and_has_read_the_others,
        ),
        (Rule::SilenceIsNotDeath, silence_is_not_death_but_nobody_there_twice_is),
        (
            Rule::LeaseWhileHearing,
            a_process_that_does_not_hear_itself_claims_nothing_keeps_all_and_buries_nobody,
        ),
        (Rule::FailedShardsLeft, a_failed_shard_is_left_by_all_and_no_heir_fails_in_turn),
        (Rule::DrainingGetsNothing, a_draining_member_is_given_nothing_and_its_shards_are_claimed_at_once),
        (Rule::GiveUpToStandby, a_shard_is_given_up_when_the_other_stands_by_for_it_and_not_before),
    ];
    for (rule, scenario) in shown {
        crate::rule::switch_off(Some(rule));
        let outcome = std::panic::catch_unwind(scenario);
        crate::rule::switch_off(None);
        assert!(outcome.is_err(), "nothing shows without {}", rule.key());
    }
}

#[test]
fn a_machine_that_contradicts_itself_says_so() {
    let ready = || Bench::ready("a", 2, &[other("b", [1])]).claims;
    let says = |claims: &Claims, words: &str| {
        let said = claims.validate().unwrap_err();
        assert!(said.contains(words), "{said}");
    };
    assert_eq!(ready().validate(), Ok(()));
    let mut both = ready();
    both.mine[0] = Mine::Standby;
    assert_eq!(both.validate(), Ok(()));
    both.failed.insert(ShardId(0), Fault::new("gone", Scope::Here));
    says(&both, "our own record: shard 0 is held and failed");

    let mut early = Bench::new("a", 2).claims;
    assert_eq!(early.validate(), Ok(()));
    early.mine[1] = Mine::Standby;
    says(&early, "before the others are known");

    let mut draining = ready();
    draining.mine[0] = Mine::Leaving(Hold { leaving: true, ..Hold::default() });
    draining.phase = Phase::Draining { until: Instant::START };
    assert_eq!(draining.validate(), Ok(()));
    for kept in [Mine::Standby, Mine::Owned { pin: PinId("p".into()), turn: 1 }] {
        draining.mine[0] = kept;
        says(&draining, "kept while draining");
    }

    let mut planned = ready();
    planned.stale = false;
    planned.plan.insert(ShardId(0), id("b"));
    planned.plan.insert(ShardId(1), id("a"));
    assert_eq!(planned.validate(), Ok(()));
    planned.plan.insert(ShardId(1), id("c"));
    says(&planned, "c is planned for and gone");
    planned.stale = true;
    assert_eq!(planned.validate(), Ok(()), "it is to be worked out anew");
}

#[test]
fn a_full_house_is_no_contradiction() {
    let others: Vec<Member> = (0..MAX_MEMBERS).map(|nth| other(&format!("m{nth}"), [])).collect();
    let bench = Bench::ready("a", 2, &others);
    assert_eq!(bench.claims.view.len(), MAX_MEMBERS);
}

#[test]
fn what_is_being_given_up_says_so_whatever_is_known_of_its_pin() {
    let mut bench = Bench::ready("a", 1, &[]);
    let leaving = |pin: &str| Hold { pin: Some(PinId(pin.into())), turn: 1, leaving: true };
    let given_up = Hold { leaving: true, ..Hold::default() };
    bench.claims.mine[0] = Mine::Leaving(leaving("p"));
    assert_eq!(bench.claims.record().shards[&ShardId(0)], leaving("p"));
    bench.report(0, Report::Lost);
    assert_eq!(bench.claims.record().shards[&ShardId(0)], given_up);
    // A pin that no record has room for is left out, and nothing else.
    bench.claims.mine[0] = Mine::Leaving(leaving(&"p".repeat(Member::MAX_TEXT + 1)));
    assert_eq!(bench.claims.record().shards[&ShardId(0)], given_up);
}
