//! The machine that shares shards out, from outside: when it writes, whom it asks, whom it buries, what it takes.

#![expect(clippy::unchecked_time_subtraction, reason = "times are constants here")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use holdfast_core::budget::Share;
use holdfast_core::claims::{Action, Claims, Config, Event, Gone, Notice, Order, Report};
use holdfast_core::member::{Fault, Hold, Member, MemberId, Scope, State};
use holdfast_core::ports::delivery::PinId;
use holdfast_core::ports::ledger::Revision;
use holdfast_core::ports::members::{Command, Entry, Probe, Reply};
use holdfast_core::ports::{Attempt, Failure, FailureClass};
use holdfast_core::record::Session;
use holdfast_core::row::ShardId;
use holdfast_core::time::Instant;

const MS: Duration = Duration::from_millis(1);
const HEARTBEAT: Duration = Duration::from_millis(400);
const LEASE: Duration = Duration::from_secs(5);
const PROBE: Duration = Duration::from_millis(200);

fn id(name: &str) -> MemberId {
    MemberId::new(name).expect("a name")
}

fn config(shards: u32) -> Config {
    Config {
        id: id("m"),
        session: Session(1),
        shards,
        heartbeat: HEARTBEAT,
        lease: LEASE,
        probe: PROBE,
        rows: 64_000,
        bytes: 1 << 30,
        software: "0.1.0".to_owned(),
        fingerprint: "00".to_owned(),
    }
}

fn member(name: &str, shards: &[(u32, Option<&str>)]) -> Member {
    let hold = |pin: Option<&str>| Hold { pin: pin.map(|pin| PinId(pin.into())), turn: 1, leaving: false };
    Member {
        version: Member::VERSION,
        id: id(name),
        session: Session(2),
        beat: 1,
        state: State::Active,
        software: "0.1.0".to_owned(),
        fingerprint: "00".to_owned(),
        shards: shards.iter().map(|(shard, pin)| (ShardId(*shard), hold(*pin))).collect(),
        failed: BTreeMap::new(),
        paused: BTreeSet::new(),
    }
}

struct Bench {
    claims: Claims,
    now: Instant,
    revision: u64,
    out: Vec<Action>,
    notices: Vec<Notice>,
    /// Whether what it writes is stored and shown to it at once.
    heard: bool,
    written: Vec<Member>,
}

impl Bench {
    fn new(shards: u32, others: &[Member]) -> Self {
        let now = Instant::START;
        let mut bench = Self {
            claims: Claims::new(config(shards), now),
            now,
            revision: 0,
            out: vec![],
            notices: vec![],
            heard: true,
            written: vec![],
        };
        bench.tell(Event::Wakeup);
        let others = others.iter().map(|other| bench.entry(other.id.as_str(), other.encode())).collect();
        bench.tell(Event::Members(Reply::Snapshot(others)));
        bench
    }

    fn entry(&mut self, key: &str, record: Bytes) -> Entry {
        self.revision += 1;
        Entry { key: key.into(), revision: Revision(self.revision), record }
    }

    fn tell(&mut self, event: Event) {
        let mut out = Vec::new();
        self.claims.handle(self.now, event, &mut out);
        self.claims.validate().expect("consistent");
        for action in out {
            match action {
                Action::Members(Command::Put { attempt, record, .. }) if self.heard => {
                    self.put(attempt, &record);
                }
                Action::Notice(notice) => self.notices.push(notice),
                action => self.out.push(action),
            }
        }
    }

    fn put(&mut self, attempt: Attempt, record: &Bytes) {
        self.written.push(Member::decode(record).expect("ours"));
        self.tell(Event::Members(Reply::Put { attempt, outcome: Ok(()) }));
        let entry = self.entry("m", record.clone());
        self.tell(Event::Members(Reply::Changed(entry)));
    }

    fn changed(&mut self, member: &Member) {
        let entry = self.entry(member.id.as_str(), member.encode());
        self.tell(Event::Members(Reply::Changed(entry)));
    }

    fn report(&mut self, shard: u32, report: Report) {
        self.tell(Event::Shard { shard: ShardId(shard), report });
    }

    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(due) = self.claims.next_wakeup().filter(|due| *due <= until) {
            assert!(due > self.now, "it would spin");
            self.now = due;
            self.tell(Event::Wakeup);
        }
        self.now = until;
    }

    /// Everything asked and ordered, and takes it out.
    fn take(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.out)
    }

    fn orders(&mut self) -> Vec<(u32, Order)> {
        let orders = self.take().into_iter().filter_map(|action| match action {
            Action::Shard { shard, order } => Some((shard.0, order)),
            _ => None,
        });
        orders.collect()
    }

    fn claimed(&mut self) -> Vec<u32> {
        let orders = self.orders().into_iter().filter(|(_, order)| matches!(order, Order::Claim { .. }));
        orders.map(|(shard, _)| shard).collect()
    }

    fn probes(&mut self) -> Vec<(Attempt, MemberId)> {
        let probes = self.take().into_iter().filter_map(|action| match action {
            Action::Members(Command::Probe { attempt, member }) => Some((attempt, member)),
            _ => None,
        });
        probes.collect()
    }

    fn probe(&mut self) -> Attempt {
        let probes = self.probes();
        let [(attempt, _)] = &*probes else { panic!("{probes:?}") };
        *attempt
    }

    fn probed(&mut self, attempt: Attempt, answer: Probe) {
        self.tell(Event::Members(Reply::Probed { attempt, answer }));
    }

    fn told(&mut self, notice: &Notice) -> bool {
        let at = self.notices.iter().position(|told| told == notice);
        at.map(|at| self.notices.remove(at)).is_some()
    }
}

fn even(shards: u32) -> Share {
    Share::even(64_000, 1 << 30, shards)
}

#[test]
fn everything_is_claimed_with_even_shares_and_news_is_written_at_once() {
    let mut bench = Bench::new(3, &[]);
    let claim = |shard| (shard, Order::Claim { share: even(3), of: None });
    assert_eq!(bench.orders(), [claim(0), claim(1), claim(2)]);
    let last = bench.written.last().expect("written");
    assert_eq!(last.shards.keys().map(|shard| shard.0).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(last.shards.values().all(|hold| *hold == Hold::default()));
    let written = bench.written.len();
    bench.report(1, Report::Ready);
    assert_eq!(bench.written.len(), written, "that is no news");
    bench.report(1, Report::Owned { pin: PinId("p".into()) });
    let hold = Hold { pin: Some(PinId("p".into())), turn: 1, leaving: false };
    assert_eq!(bench.written.last().map(|last| &last.shards[&ShardId(1)]), Some(&hold));
    bench.report(1, Report::Lost);
    assert_eq!(bench.written.last().map(|last| &last.shards[&ShardId(1)]), Some(&Hold::default()));
    // Released though nobody asked: it is claimed again.
    bench.report(2, Report::Released { clean: true });
    assert_eq!(bench.claimed(), [2]);
    // Whose consumer is gone is nobody's, and the others' shares are larger.
    bench.report(0, Report::Failed { reason: "gone".to_owned(), scope: Scope::Everywhere });
    assert_eq!(bench.orders(), [(1, Order::Share(even(2))), (2, Order::Share(even(2)))]);
    assert_eq!(bench.written.last().map(|last| last.failed.len()), Some(1));
    bench.tell(Event::Resume(ShardId(0)));
    assert_eq!(bench.claimed(), [0]);
    // Shards that are none.
    for shard in [3, 4, u32::MAX] {
        bench.tell(Event::Pause(ShardId(shard)));
        bench.tell(Event::Unowned { shard: ShardId(shard) });
        bench.report(shard, Report::Owned { pin: PinId("p".into()) });
        assert_eq!(bench.take(), []);
    }
}

#[test]
fn a_pin_that_fits_no_record_is_not_told() {
    let mut bench = Bench::new(1, &[]);
    for (length, told) in [(Member::MAX_TEXT, true), (Member::MAX_TEXT + 1, false)] {
        bench.report(0, Report::Owned { pin: PinId("p".repeat(length).into()) });
        let hold = bench.written.last().and_then(|last| last.shards.get(&ShardId(0)));
        assert_eq!(hold.map(|hold| (hold.pin.is_some(), hold.turn)), Some((told, u64::from(told))));
    }
}

#[test]
fn the_record_is_written_every_heartbeat_and_again_after_a_failure() {
    let mut bench = Bench::new(1, &[]);
    bench.pass(HEARTBEAT);
    let beats = |bench: &Bench| bench.written.iter().map(|member| member.beat).collect::<Vec<_>>();
    let before = beats(&bench);
    assert!(before.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{before:?}");
    bench.pass(HEARTBEAT - MS);
    assert_eq!(beats(&bench), before);
    bench.pass(MS);
    assert_eq!(beats(&bench).len(), before.len() + 1);
    // One that is not answered holds the next up for half a lease.
    bench.take();
    bench.heard = false;
    bench.pass(HEARTBEAT);
    assert_eq!(bench.take().len(), 1);
    bench.pass(LEASE / 2 - MS);
    assert!(!bench.take().iter().any(|action| matches!(action, Action::Members(Command::Put { .. }))));
    bench.pass(MS);
    let Some(Action::Members(Command::Put { attempt, .. })) = bench.take().pop() else { panic!("no put") };
    // One that failed is tried again after half a heartbeat.
    let failed = Failure::new(FailureClass::Unavailable, "no leader");
    bench.tell(Event::Members(Reply::Put { attempt, outcome: Err(failed) }));
    assert!(bench.told(&Notice::NotStored { why: "not available: no leader".to_owned() }));
    bench.pass(HEARTBEAT / 2 - MS);
    assert_eq!(bench.take(), []);
    bench.heard = true;
    let before = bench.written.len();
    bench.pass(MS);
    assert_eq!(bench.written.len(), before + 1);
    // One that somebody deleted is written at once.
    bench.tell(Event::Members(Reply::Removed { key: "m".into() }));
    assert_eq!(bench.written.len(), before + 2);
    bench.tell(Event::Members(Reply::Snapshot(vec![])));
    assert_eq!(bench.written.len(), before + 3);
}

#[test]
fn a_silent_member_is_asked_and_buried_by_two_refusals_or_its_lease() {
    let owner = || member("a", &[(0, Some("pin")), (1, None)]);
    let mut bench = Bench::new(2, &[owner()]);
    // Whether one that was there before still lives is asked at once.
    let attempt = bench.probe();
    bench.probed(attempt, Probe::Alive);
    bench.pass(PROBE - MS);
    assert_eq!(bench.probes(), []);
    bench.pass(MS);
    bench.probe();
    // A heartbeat: it is left alone for a heartbeat and a quarter.
    bench.changed(&Member { beat: 2, ..owner() });
    bench.pass(HEARTBEAT * 5 / 4 - MS);
    assert_eq!(bench.probes(), []);
    bench.pass(MS);
    let attempt = bench.probe();
    bench.probed(attempt, Probe::NoResponders);
    bench.pass(PROBE);
    let attempt = bench.probe();
    // Silence is not death, and begins the count anew.
    bench.probed(attempt, Probe::Silent);
    for last in [false, true] {
        bench.pass(PROBE);
        let attempt = bench.probe();
        assert!(bench.claims.status().members[0].gone.is_none());
        bench.take();
        bench.probed(attempt, Probe::NoResponders);
        assert_eq!(bench.claims.status().members[0].gone.is_some(), last);
    }
    assert!(bench.told(&Notice::Left { member: id("a"), why: Gone::NoResponders }));
    let orders = bench.orders();
    let of = Some(PinId("pin".into()));
    assert!(orders.contains(&(0, Order::Claim { share: even(2), of })), "{orders:?}");
    assert!(bench.told(&Notice::Taken { shard: ShardId(0), from: id("a") }));
    // It is there again.
    bench.changed(&Member { beat: 3, ..owner() });
    assert!(bench.told(&Notice::Joined { member: id("a") }));
    // Its lease.
    let mut bench = Bench::new(2, &[owner()]);
    let attempt = bench.probe();
    bench.pass(LEASE - MS);
    assert_eq!(bench.claims.status().members[0].gone, None);
    bench.pass(MS);
    assert_eq!(bench.claims.status().members[0].gone, Some(Gone::LeaseOver));
    bench.probed(attempt, Probe::Alive);
    // Gone for ten minutes, its record goes; once in ten minutes.
    bench.take();
    bench.pass(Duration::from_mins(10) - MS);
    assert_eq!(bench.take(), []);
    bench.pass(MS);
    let swept = bench.take();
    let [Action::Members(Command::Delete { member, only: Some(Revision(2)), .. })] = &*swept else {
        panic!("{swept:?}")
    };
    assert_eq!(*member, id("a"));
    bench.pass(Duration::from_mins(10) - MS);
    assert_eq!(bench.take(), []);
    bench.pass(MS);
    assert_eq!(bench.take().len(), 1);
    // It was started anew, or said that it goes.
    let mut bench = Bench::new(2, &[owner()]);
    bench.changed(&Member { session: Session(3), shards: BTreeMap::new(), ..owner() });
    assert!(bench.told(&Notice::Left { member: id("a"), why: Gone::Restarted }));
    bench.changed(&Member { session: Session(3), state: State::Resigned, ..owner() });
    assert!(bench.told(&Notice::Left { member: id("a"), why: Gone::Resigned }));
    assert_eq!(bench.claims.status().members, []);
}

#[test]
fn who_does_not_hear_himself_does_nothing_and_begins_anew_when_he_does() {
    let mut bench = Bench::new(2, &[member("a", &[(0, Some("pin"))])]);
    bench.take();
    bench.heard = false;
    bench.pass(LEASE / 2);
    assert!(!bench.claims.status().deaf);
    bench.take();
    bench.pass(MS);
    assert!(bench.told(&Notice::Deaf) && bench.claims.status().deaf);
    // Nobody is buried, and nobody asked.
    bench.pass(LEASE * 3);
    assert_eq!((bench.probes(), bench.claims.status().members[0].gone), (vec![], None));
    bench.heard = true;
    bench.pass(LEASE);
    assert!(bench.told(&Notice::Hearing));
    // Leases began anew when it heard itself again, not before.
    let seen = bench.claims.status().members[0].seen;
    assert!(seen > Instant::START + LEASE * 3, "{seen:?}");
    bench.notices.clear();
    bench.pass(seen + LEASE - bench.now);
    assert_eq!(bench.claims.status().members[0].gone, Some(Gone::LeaseOver));
}

#[test]
fn shards_go_to_who_stands_by_for_them() {
    let mut bench = Bench::new(2, &[]);
    bench.take();
    bench.report(0, Report::Owned { pin: PinId("p".into()) });
    bench.report(1, Report::Owned { pin: PinId("q".into()) });
    // It is to have one, and does not know yet.
    bench.changed(&member("a", &[]));
    assert_eq!(bench.orders(), []);
    // It knows.
    let mut newcomer = member("a", &[(0, None), (1, None)]);
    bench.changed(&newcomer);
    let orders = bench.orders();
    let [(given, Order::GiveUp)] = &*orders else { panic!("{orders:?}") };
    let kept = 1 - given;
    let hold = bench.written.last().map(|last| last.shards[&ShardId(*given)].clone()).expect("ours still");
    assert!(hold.leaving && hold.pin.is_some());
    bench.report(*given, Report::Released { clean: true });
    assert_eq!(bench.orders(), [(kept, Order::Share(even(1)))]);
    // What it found broken for itself is ours again.
    newcomer.shards.clear();
    newcomer.failed.insert(ShardId(*given), Fault::new("too new", Scope::Here));
    bench.changed(&newcomer);
    assert_eq!(bench.claimed(), [*given]);
    // What it wants paused is given up though nobody takes it.
    newcomer.failed.clear();
    newcomer.paused.insert(ShardId(kept));
    bench.changed(&newcomer);
    let orders = bench.orders();
    assert!(orders.contains(&(kept, Order::GiveUp)), "{orders:?}");
}

#[test]
fn a_shard_that_its_own_member_does_not_take_is_taken_in_turn() {
    // Another is to have one of two, and never stands by for it.
    let idle = member("a", &[]);
    for (hint, grace) in [(false, LEASE), (true, HEARTBEAT * 2)] {
        let mut bench = Bench::new(2, std::slice::from_ref(&idle));
        let [ours] = &*bench.claimed() else { panic!("one of two is ours") };
        let theirs = 1 - ours;
        let mut beat = 1;
        let mut alive = |bench: &mut Bench| {
            beat += 1;
            bench.changed(&Member { beat, ..idle.clone() });
        };
        if hint {
            bench.tell(Event::Unowned { shard: ShardId(theirs) });
            assert!(bench.told(&Notice::Unowned { shard: ShardId(theirs) }));
            bench.tell(Event::Unowned { shard: ShardId(theirs) });
            assert!(!bench.told(&Notice::Unowned { shard: ShardId(theirs) }), "once");
            assert!(bench.claims.status().shards[theirs as usize].unowned);
        }
        let mut waited = Duration::ZERO;
        while waited + HEARTBEAT < grace {
            bench.pass(HEARTBEAT);
            alive(&mut bench);
            waited += HEARTBEAT;
        }
        bench.pass(grace - waited - MS);
        assert_eq!(bench.claimed(), [0; 0]);
        bench.pass(MS);
        assert_eq!(bench.claimed(), [theirs]);
    }
}

#[test]
fn strangers_are_told_of_once_and_never_too_many() {
    let mut bench = Bench::new(1, &[]);
    let strange = |key: &str, record: &[u8], bench: &mut Bench| {
        let entry = bench.entry(key, Bytes::copy_from_slice(record));
        bench.tell(Event::Members(Reply::Changed(entry)));
    };
    bench.notices.clear();
    strange("x", b"junk", &mut bench);
    strange("x", b"more junk", &mut bench);
    assert_eq!(bench.notices.len(), 1);
    assert!(matches!(&bench.notices[0], Notice::Unreadable { key, .. } if key == "x"));
    // Gone and there again it is told of again.
    bench.tell(Event::Members(Reply::Removed { key: "x".into() }));
    strange("x", b"junk", &mut bench);
    assert_eq!(bench.notices.len(), 2);
    // Another's record, a key that is no name, and a version that leaves nothing to read.
    bench.notices.clear();
    strange("b", &member("a", &[]).encode(), &mut bench);
    strange("a b\n", b"{}", &mut bench);
    strange("c", br#"{"version":9}"#, &mut bench);
    strange("c", br#"{"version":9} "#, &mut bench);
    let told = std::mem::take(&mut bench.notices);
    assert!(matches!(&told[0], Notice::Unreadable { key, why } if key == "b" && why == "the record is of a"));
    assert!(matches!(&told[1], Notice::Unreadable { key, .. } if key == "a b\\n"));
    assert_eq!(told[2], Notice::NewerVersion { member: id("c") });
    assert_eq!(told[3], Notice::Joined { member: id("c") });
    assert_eq!(told.len(), 4);
    // Another configuration is told of when it is news.
    let other =
        |fingerprint: &str, beat| Member { fingerprint: fingerprint.to_owned(), beat, ..member("d", &[]) };
    for (fingerprint, told) in [("00", false), ("ff", true), ("ff", false), ("fe", true), ("00", false)] {
        let beat = bench.revision;
        bench.changed(&other(fingerprint, beat));
        assert_eq!(bench.told(&Notice::ConfigurationDiffers { member: id("d") }), told, "{fingerprint}");
    }
    // Our name is somebody else's, too.
    let rival = |session| Member { session: Session(session), ..member("m", &[]) };
    bench.notices.clear();
    bench.changed(&rival(7));
    bench.changed(&rival(7));
    bench.changed(&rival(8));
    let taken = |by| Notice::NameTaken { by: Session(by) };
    assert_eq!(bench.notices, [taken(7), taken(8)]);
}
