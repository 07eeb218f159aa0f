//! Subjects of rows: whatever is read of one is what would be written for it.
#![no_main]

use holdfast_core::row::ShardId;
use holdfast_nats::subject::{decode, encode, publish_subject, shard_filter, split, table_of};

libfuzzer_sys::fuzz_target!(|text: &str| {
    let (prefix, subject) = text.split_once('\n').unwrap_or(("ingest", text));
    if let Some((shard, token)) = split(prefix, subject) {
        let filter = shard_filter(prefix, shard);
        let of_shard = filter.strip_suffix('*').expect("a filter ends in a wildcard");
        assert_eq!(format!("{of_shard}{token}"), subject, "one subject for a shard and a token");
        assert!(!token.is_empty() && !token.contains('.'));
    }
    // The same text as a token: one spelling a name.
    match decode(subject) {
        Ok(name) => {
            assert_eq!(encode(&name), subject);
            assert_eq!(table_of(subject).expect("it decodes").as_str(), name);
        }
        Err(_) => assert_eq!(table_of(subject).expect_err("it does not decode").0.as_str(), subject),
    }
    // And as a name: its token is one token, and no wildcard.
    let token = encode(subject);
    assert!(
        !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic() && !b".*>".contains(&byte))
    );
    assert_eq!(decode(&token).expect("what is encoded decodes"), subject);
    assert_eq!(publish_subject(prefix, &token).strip_prefix(prefix), Some(&*format!(".{token}")));
    // Whatever shard a server's transform puts it into, it is found there.
    let shard = u32::try_from(subject.len()).map_or(0, |length| length.wrapping_mul(2_654_435_761));
    for shard in [shard % 10, shard % 1_000, shard] {
        assert_eq!(split(prefix, &format!("{prefix}.{shard}.{token}")), Some((ShardId(shard), &*token)));
    }
});
