//! What people and metrics are told: words that stay what they are, since somebody searches logs for them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use holdfast_core::budget::Share;
use holdfast_core::claims::{Action, Claims, Config, Event, Gone, MemberStatus, Report};
use holdfast_core::member::{Fault, Hold, Member, MemberId, Scope, State};
use holdfast_core::notice::{ResyncReason, Trouble};
use holdfast_core::ports::dead_letters::Cause;
use holdfast_core::ports::delivery::PinId;
use holdfast_core::ports::ledger::Revision;
use holdfast_core::ports::members::{Command, Entry, Reply};
use holdfast_core::ports::store::{Class, DescribeError, Level, Refusal};
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::record::Session;
use holdfast_core::row::{Seq, ShardId, TableName};
use holdfast_core::time::Instant;

#[test]
fn words_for_metrics() {
    let reasons = [
        ResyncReason::NewPin,
        ResyncReason::Gap,
        ResyncReason::WentBack,
        ResyncReason::OtherPin,
        ResyncReason::Tail,
        ResyncReason::Disrupted,
        ResyncReason::DeadPull,
        ResyncReason::Skipped,
        ResyncReason::Stranded,
    ];
    assert_eq!(
        reasons.map(ResyncReason::key),
        [
            "new-pin",
            "gap",
            "went-back",
            "other-pin",
            "lost-tail",
            "disrupted",
            "dead-pull",
            "skipped",
            "stranded"
        ]
    );
    let causes = [Cause::Subject, Cause::Payload, Cause::Refused, Cause::UnknownTable];
    assert_eq!(causes.map(Cause::key), ["subject", "payload", "refused", "unknown-table"]);
    let gone = [Gone::Resigned, Gone::Restarted, Gone::LeaseOver, Gone::NoResponders];
    assert_eq!(gone.map(Gone::key), ["resigned", "restarted", "lease-over", "no-responders"]);
    let classes = [Class::Data, Class::Passing, Class::Table, Class::Access, Class::Doubt, Class::Unknown];
    let words = ["data", "passing", "table", "access", "doubt", "unknown"];
    assert_eq!(classes.map(Class::key), words);
    assert_eq!(classes.map(|class| class.to_string()), words);
}

#[test]
fn words_for_people() {
    let gone = [Gone::Resigned, Gone::Restarted, Gone::LeaseOver, Gone::NoResponders];
    assert_eq!(
        gone.map(|gone| gone.to_string()),
        ["it resigned", "its process was started anew", "its heartbeat stopped", "its connection is gone"]
    );
    let failure = Failure::new(FailureClass::Full, "maximum bytes exceeded");
    assert_eq!(failure.to_string(), "full: maximum bytes exceeded");
    let classes = [
        FailureClass::Unanswered,
        FailureClass::Unavailable,
        FailureClass::Limit,
        FailureClass::Denied,
        FailureClass::Missing,
        FailureClass::TooOld,
        FailureClass::Other,
    ];
    assert_eq!(
        classes.map(|class| class.to_string()),
        [
            "no answer",
            "not available",
            "limit reached",
            "not authorised",
            "missing",
            "server too old",
            "failed"
        ]
    );
    let levels = [Level::AtLeastOnce, Level::Deduplicated, Level::ExactlyOnce];
    assert_eq!(levels.map(|level| level.to_string()), ["at-least-once", "deduplicated", "exactly-once"]);
    let refusal = Refusal { class: Class::Data, code: Some(27), row: None, message: "no number".to_owned() };
    assert_eq!(refusal.to_string(), "code 27: no number");
    assert_eq!(DescribeError::Failed(refusal.clone()).to_string(), "code 27: no number");
    assert_eq!(Refusal { code: None, ..refusal }.to_string(), "no number");
    assert_eq!(DescribeError::Unfit("it is a view".to_owned()).to_string(), "it is a view");
    assert_eq!((Seq(7).to_string(), ShardId(3).to_string()), ("7".to_owned(), "3".to_owned()));
    let (table, member) = (TableName::new("clicks"), MemberId::new("node-1").expect("a name"));
    assert_eq!((table.to_string(), table.as_str()), ("clicks".to_owned(), "clicks"));
    assert_eq!((member.to_string(), member.as_str()), ("node-1".to_owned(), "node-1"));
    assert_eq!(format!("{:?}", Session(0xfeed)), "000000000000feed");
}

#[test]
fn troubles_are_told_once_a_kind() {
    let store = |why: &str| Trouble::Store(why.to_owned());
    let table = |why: &str| Trouble::Table(why.to_owned());
    let letters = |class, seq| Trouble::DeadLetters { seq: Seq(seq), failure: Failure::new(class, "x") };
    let bad = |seq| Trouble::BadRow { seq: Seq(seq), why: "no number".to_owned() };
    // Figures of one code change, and a letter's row.
    assert!(store("code 241: 1 MiB").is_like(&store("code 241: 2 MiB")));
    assert!(table("code 60: a").is_like(&table("code 60: b")));
    assert!(letters(FailureClass::Full, 1).is_like(&letters(FailureClass::Full, 2)));
    assert!(bad(1).is_like(&bad(1)));
    for (one, other) in [
        (store("code 241: 1 MiB"), store("code 252: 1 MiB")),
        (store("code 60: a"), table("code 60: a")),
        (letters(FailureClass::Full, 1), letters(FailureClass::Missing, 1)),
        (bad(1), bad(2)),
        (bad(1), Trouble::Stopped("no number".to_owned())),
    ] {
        assert!(!one.is_like(&other), "{one:?} {other:?}");
    }
    let all = [table("a"), store("b"), bad(9), letters(FailureClass::Full, 9), Trouble::Stopped("c".into())];
    assert_eq!(all.each_ref().map(Trouble::key), ["table", "store", "bad-row", "dead-letters", "stopped"]);
    assert_eq!(
        all.map(|trouble| trouble.to_string()),
        [
            "a",
            "b",
            "row 9 can never be inserted (no number); its table waits, no row is lost",
            "row 9 is a dead letter and cannot be kept as one (full: x); its table waits",
            "stopped: c"
        ]
    );
}

fn id(name: &str) -> MemberId {
    MemberId::new(name).expect("a name")
}

fn entry(member: &Member, revision: u64) -> Entry {
    Entry { key: member.id.as_str().into(), revision: Revision(revision), record: member.encode() }
}

/// A member with a configuration of its own that owns shard 0, stands by for shard 1, found shard 2 broken for itself
/// and wants shard 3 paused.
fn other() -> Member {
    let pin = PinId("theirs".into());
    Member {
        version: Member::VERSION,
        id: id("other"),
        session: Session(2),
        beat: 1,
        state: State::Active,
        software: "9.9".to_owned(),
        fingerprint: "ff".to_owned(),
        shards: BTreeMap::from([
            (ShardId(0), Hold { pin: Some(pin), turn: 1, leaving: false }),
            (ShardId(1), Hold::default()),
        ]),
        failed: BTreeMap::from([(ShardId(2), Fault::new("too new", Scope::Here))]),
        paused: BTreeSet::from([ShardId(3)]),
    }
}

/// A process that has stored its record, heard it, and read `others`.
fn ready(others: &[Member]) -> (Claims, Vec<Action>) {
    let config = Config {
        id: id("us"),
        session: Session(1),
        shards: 5,
        heartbeat: Duration::from_millis(500),
        lease: Duration::from_secs(5),
        probe: Duration::from_millis(200),
        rows: 64_000,
        bytes: 1 << 30,
        software: "0.1.0".to_owned(),
        fingerprint: "00".to_owned(),
    };
    let (now, mut out) = (Instant::START, Vec::new());
    let mut claims = Claims::new(config, now);
    assert!(!claims.status().ready && claims.status().members.is_empty());
    claims.handle(now, Event::Wakeup, &mut out);
    let Some(Action::Members(Command::Put { attempt, record, .. })) = out.pop() else { panic!("{out:?}") };
    claims.handle(now, Event::Members(Reply::Put { attempt, outcome: Ok(()) }), &mut out);
    let own = Member::decode(&record).expect("our own record is one");
    claims.handle(now, Event::Members(Reply::Changed(entry(&own, 1))), &mut out);
    let others = others.iter().zip(2..).map(|(other, revision)| entry(other, revision)).collect();
    claims.handle(now, Event::Members(Reply::Snapshot(others)), &mut out);
    (claims, out)
}

#[test]
fn how_the_sharing_stands() {
    let (mut claims, _) = ready(&[other()]);
    let mut out = Vec::new();
    claims.handle(
        Instant::START,
        Event::Shard { shard: ShardId(2), report: Report::Owned { pin: PinId("ours".into()) } },
        &mut out,
    );
    let status = claims.status();
    assert_eq!((status.phase, status.ready, status.deaf, status.leads), ("running", true, false, false));
    let (other, us) = (id("other"), id("us"));
    assert_eq!(
        status.members,
        [MemberStatus {
            id: &other,
            gone: None,
            session: Some(Session(2)),
            state: Some(State::Active),
            software: "9.9",
            same_configuration: false,
            seen: Instant::START,
            shards: 2,
        }]
    );
    let shard = |place: usize| &status.shards[place];
    assert_eq!(status.shards.len(), 5);
    assert_eq!((shard(0).mine, &*shard(0).owners, shard(0).standbys.len()), ("free", &[&other][..], 0));
    assert_eq!((shard(1).mine, shard(1).owners.len(), &*shard(1).standbys), ("free", 0, &[&other][..]));
    assert_eq!((shard(2).mine, shard(2).home), ("owned", Some(&us)));
    assert_eq!(shard(2).pin.map(|pin| &*pin.0), Some("ours"));
    assert_eq!(shard(2).failed, [(&other, &Fault::new("too new", Scope::Here))]);
    assert_eq!((&*shard(3).paused, shard(3).home, shard(3).mine), (&[&other][..], None, "free"));
    assert_eq!((shard(4).mine, shard(4).pin, shard(4).unowned), ("standby", None, false));
    assert_eq!(status.share, Share::even(64_000, 1 << 30, 2));
}

#[test]
fn the_first_of_those_that_live_leads() {
    for (other_id, leads) in [("other", false), ("zebra", true)] {
        let (claims, _) = ready(&[Member { id: id(other_id), ..other() }]);
        assert_eq!(claims.status().leads, leads, "{other_id}");
    }
}

#[test]
fn how_a_process_leaves() {
    let (mut claims, mut out) = ready(&[]);
    assert!(claims.status().leads);
    let now = Instant::START;
    claims.handle(now, Event::Pause(ShardId(4)), &mut out);
    let failed = Report::Failed { reason: "gone".to_owned(), scope: Scope::Everywhere };
    claims.handle(now, Event::Shard { shard: ShardId(3), report: failed }, &mut out);
    claims.handle(
        now,
        Event::Shard { shard: ShardId(0), report: Report::Owned { pin: PinId("ours".into()) } },
        &mut out,
    );
    claims.handle(now, Event::Stop { within: Duration::from_secs(9) }, &mut out);
    let status = claims.status();
    assert_eq!((status.phase, status.leads), ("draining", false));
    assert_eq!((status.shards[0].mine, status.shards[0].pin.map(|pin| &*pin.0)), ("leaving", Some("ours")));
    assert_eq!((status.shards[1].mine, status.shards[1].pin), ("leaving", None));
    assert_eq!(status.shards[3].failed, [(&id("us"), &Fault::new("gone", Scope::Everywhere))]);
    assert_eq!((&*status.shards[4].paused, status.shards[4].mine), (&[&id("us")][..], "leaving"));
    for shard in [0, 1, 2, 4].map(ShardId) {
        claims.handle(now, Event::Shard { shard, report: Report::Released { clean: true } }, &mut out);
    }
    // The others must know what failed before the record goes.
    assert_eq!(claims.status().phase, "draining");
    while let Some(at) = out.iter().position(|action| matches!(action, Action::Members(Command::Put { .. })))
    {
        let Action::Members(Command::Put { attempt, .. }) = out.remove(at) else { break };
        claims.handle(now, Event::Members(Reply::Put { attempt, outcome: Ok(()) }), &mut out);
    }
    // The deletion of its record is not answered.
    assert_eq!(claims.status().phase, "resigning");
    claims.handle(now + Duration::from_secs(3), Event::Wakeup, &mut out);
    assert_eq!((claims.status().phase, claims.is_over(), claims.next_wakeup()), ("resigned", true, None));
}

#[test]
fn a_configuration_that_cannot_work_is_told() {
    let fit = Config {
        id: id("us"),
        session: Session(1),
        shards: 1_024,
        heartbeat: Duration::from_millis(500),
        lease: Duration::from_secs(2),
        probe: Duration::from_millis(200),
        rows: 64_000,
        bytes: 1 << 30,
        software: "x".repeat(Member::MAX_TEXT),
        fingerprint: "00".to_owned(),
    };
    assert_eq!(fit.defect(), None);
    let long = "x".repeat(Member::MAX_TEXT + 1);
    for unfit in [
        Config { shards: 1_025, ..fit.clone() },
        Config { heartbeat: Duration::ZERO, ..fit.clone() },
        Config { probe: Duration::ZERO, ..fit.clone() },
        Config { lease: Duration::from_millis(1_999), ..fit.clone() },
        Config { software: long.clone(), ..fit.clone() },
        Config { fingerprint: long, ..fit.clone() },
    ] {
        assert!(unfit.defect().is_some(), "{unfit:?}");
    }
}
