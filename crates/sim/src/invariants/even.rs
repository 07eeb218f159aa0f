//! Invariant 8, sharing: when faults have stopped, each shard is claimed by one process, and shares differ by at most
//! one.

use std::collections::BTreeMap;

use holdfast_core::row::ShardId;

use super::{Checked, violated};

pub(crate) const NAME: &str = "8 even";

/// What is not as it should be, if anything is. `kept`: what each process that runs has and keeps. `open`: the shards
/// that somebody should have.
pub(crate) fn uneven(kept: &BTreeMap<u32, Vec<ShardId>>, open: &[ShardId]) -> Option<String> {
    for shard in open {
        let by: Vec<u32> =
            kept.iter().filter(|(_, shards)| shards.contains(shard)).map(|(by, _)| *by).collect();
        if by.len() != 1 {
            return Some(format!("s{shard} is claimed by {by:?}"));
        }
    }
    let counts = || kept.values().map(|shards| shards.iter().filter(|shard| open.contains(shard)).count());
    let (most, least) = (counts().max().unwrap_or(0), counts().min().unwrap_or(0));
    (most > least + 1).then(|| format!("one process has {most} shards, another {least}"))
}

/// The bound is over.
pub(crate) fn bound(uneven: Option<String>) -> Checked {
    uneven.map_or(Ok(()), |how| violated(NAME, how))
}
