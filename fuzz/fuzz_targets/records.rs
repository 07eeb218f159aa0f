//! Records in the bucket, a shard's and a member's: what is accepted is sound, and is written as it was read.
#![no_main]

use holdfast_core::member::Member;
use holdfast_core::record::{OpenBatch, Record};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(record) = Record::decode(bytes) {
        assert_eq!(record.version, Record::VERSION);
        assert!(record.floor <= record.high.seq);
        assert!(record.identity() >= record.stream_created);
        for lane in record.lanes.values() {
            let written = lane.done.max(record.floor);
            assert!(lane.done <= record.high.seq && (lane.open.is_none() || lane.parked.is_none()));
            if let Some(OpenBatch { batch, .. }) = &lane.open {
                assert!(batch.first > written && batch.first <= batch.last && batch.last <= record.high.seq);
                assert!(batch.rows > 0 && u64::from(batch.rows) - 1 <= batch.last.0 - batch.first.0);
            }
            if let Some(parked) = &lane.parked {
                assert!(parked.row > written && parked.row <= record.high.seq);
            }
        }
        assert_eq!(Record::decode(&record.encode()), Ok(record));
    }
    if let Ok(member) = Member::decode(bytes) {
        assert!(member.failed.keys().all(|shard| !member.shards.contains_key(shard)));
        assert!(member.version >= 1 && member.shards.len() <= Member::MAX_SHARDS);
        assert!(member.software.len() <= Member::MAX_TEXT && member.fingerprint.len() <= Member::MAX_TEXT);
        assert_eq!(Member::decode(&member.encode()), Ok(member));
    }
});
