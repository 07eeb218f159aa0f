//! What people and metrics are told: words that stay what they are, since somebody searches logs for them.

use holdfast_core::claims::Gone;
use holdfast_core::member::MemberId;
use holdfast_core::notice::{ResyncReason, Trouble};
use holdfast_core::ports::dead_letters::Cause;
use holdfast_core::ports::store::{Class, DescribeError, Level, Refusal};
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::record::Session;
use holdfast_core::row::{Seq, ShardId, TableName};

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
