//! What a process was shown of the members, and what it said of them: the sharing machine's surroundings, as seen from
//! outside.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use holdfast_core::budget::Share;
use holdfast_core::claims::Notice;
use holdfast_core::member::{Member, MemberId};
use holdfast_core::ports::members::Reply;
use holdfast_core::record::Session;
use holdfast_core::row::ShardId;

/// What a process start was shown and what it said.
#[derive(Debug, Default)]
pub(crate) struct View {
    /// Every record there is, as far as the watch has shown.
    records: BTreeMap<Arc<str>, Bytes>,
    /// Members that it takes for gone although their records are there.
    gone: BTreeSet<MemberId>,
    /// Sessions whose records were shown under its name.
    pub(crate) echoed: BTreeSet<Session>,
    /// How often it was shown everything.
    pub(crate) snapshots: u32,
    /// It says that it does not hear itself.
    pub(crate) deaf: bool,
    /// Shards that failed for everybody in its hands, and were not resumed since.
    pub(crate) failed: BTreeSet<ShardId>,
    /// Shards that its operator has paused.
    pub(crate) paused: BTreeSet<ShardId>,
    /// Shards that it claimed and has not given up since.
    pub(crate) claimed: BTreeSet<ShardId>,
    /// The share that each shard it holds was last told.
    pub(crate) shares: BTreeMap<ShardId, Share>,
}

impl View {
    /// The watch shows `member` something, or a command of it is answered.
    pub(crate) fn shown(&mut self, member: &MemberId, reply: &Reply) {
        match reply {
            Reply::Snapshot(entries) => {
                self.snapshots += 1;
                let records = entries.iter().map(|entry| (Arc::clone(&entry.key), entry.record.clone()));
                self.records = records.collect();
            }
            Reply::Changed(entry) => {
                self.records.insert(Arc::clone(&entry.key), entry.record.clone());
            }
            Reply::Removed { key } => {
                self.records.remove(key);
            }
            Reply::Put { .. } | Reply::Deleted { .. } | Reply::Probed { .. } => {}
        }
        if matches!(reply, Reply::Snapshot(_))
            || matches!(reply, Reply::Changed(entry) if *entry.key == *member.as_str())
        {
            self.echoed.extend(self.record(member).map(|record| record.session));
        }
        let records = &self.records;
        self.gone.retain(|member| records.contains_key(member.as_str()));
    }

    /// It says something.
    pub(crate) fn said(&mut self, notice: &Notice) {
        match notice {
            Notice::Joined { member } => {
                self.gone.remove(member);
            }
            Notice::Left { member, .. } if self.records.contains_key(member.as_str()) => {
                self.gone.insert(member.clone());
            }
            Notice::Deaf => self.deaf = true,
            Notice::Hearing => self.deaf = false,
            _ => {}
        }
    }

    /// The record under a name, as it was last shown.
    pub(crate) fn record(&self, member: &MemberId) -> Option<Member> {
        Member::decode(self.records.get(member.as_str())?).ok()
    }

    /// The records of those that it was shown and does not take for gone.
    pub(crate) fn live(&self) -> impl Iterator<Item = Member> {
        let records = self.records.values().filter_map(|record| Member::decode(record).ok());
        records.filter(|member| !self.gone.contains(&member.id))
    }

    /// Whether it takes a member for gone.
    pub(crate) fn takes_for_gone(&self, member: &MemberId) -> bool {
        self.gone.contains(member)
    }
}
