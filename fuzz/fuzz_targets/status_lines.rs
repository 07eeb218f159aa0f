//! Status lines of pulls: each has one meaning, whatever its case, and no server's words fill a log.
#![no_main]

use holdfast_core::ports::delivery::PullEnd;
use holdfast_nats::status::pull_end;

libfuzzer_sys::fuzz_target!(|input: (u16, &str)| {
    let (code, words) = input;
    let end = pull_end(code, words);
    assert_eq!(end.is_none(), (100..200).contains(&code), "a status ends a pull or is a heartbeat");
    // What is decided by the code alone, and what a conflict only can be.
    let is = |this: &PullEnd| end.as_ref() == Some(this);
    assert_eq!(is(&PullEnd::NotPinned), code == 423);
    assert_eq!(is(&PullEnd::NoResponders), code == 503);
    assert_eq!(is(&PullEnd::Empty), code == 404 || code == 408);
    for conflict in [PullEnd::TooLarge, PullEnd::Full, PullEnd::LeaderChanged, PullEnd::Deleted] {
        assert!(code == 409 || !is(&conflict));
    }
    let shouted = pull_end(code, &words.to_ascii_uppercase());
    match (end, shouted) {
        (Some(PullEnd::Failed(said)), Some(PullEnd::Failed(shouted))) => {
            assert_eq!(said.class, shouted.class);
            let shown = said.message.chars().count();
            assert!(shown < 400, "{shown} characters");
            assert!(said.message.contains(&code.to_string()));
        }
        (said, shouted) => assert_eq!(said, shouted),
    }
});
