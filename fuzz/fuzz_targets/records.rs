//! Records in the bucket, a shard's and a member's: what is accepted is sound, and is written as it was read.
#![no_main]

use holdfast_core::member::Member;
use holdfast_core::record::Record;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(record) = Record::decode(bytes) {
        assert_eq!(record.defect(), None);
        assert_eq!(record.version, Record::VERSION);
        assert!(record.floor <= record.high.seq && record.floor_mark().seq == record.floor);
        assert_eq!(record.regression_from(&record), None);
        assert!(record.identity() >= record.stream_created);
        assert_eq!(Record::decode(&record.encode()), Ok(record));
    }
    if let Ok(member) = Member::decode(bytes) {
        assert_eq!(member.defect(), None);
        assert!(member.says_the_same_as(&member));
        assert_eq!(Member::decode(&member.encode()), Ok(member));
    }
});
