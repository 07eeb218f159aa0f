//! How the sharing stands, for people and metrics.

use super::view::Life;
use super::{Claims, Gone, Mine, Phase};
use crate::budget::Share;
use crate::member::{Fault, MemberId, State};
use crate::ports::delivery::PinId;
use crate::record::Session;
use crate::row::ShardId;
use crate::time::Instant;

/// How the sharing stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status<'a> {
    /// The phase as a word.
    pub phase: &'static str,
    /// Whether all members' records were read and our own is stored: shards can be claimed.
    pub ready: bool,
    /// Whether our own heartbeat does not come back: nothing is claimed or given up.
    pub deaf: bool,
    /// Whether this process does for all what one has to do: it is the first of the live ones.
    pub leads: bool,
    /// Who else there is, the gone ones whose records are still there included.
    pub members: Vec<MemberStatus<'a>>,
    /// Every shard.
    pub shards: Vec<ShardStatus<'a>>,
    /// The share of every shard held.
    pub share: Share,
}

/// A member, as this process sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberStatus<'a> {
    /// Who.
    pub id: &'a MemberId,
    /// Why it is thought to be gone, if it is.
    pub gone: Option<Gone>,
    /// Its process start, if its record can be read.
    pub session: Option<Session>,
    /// Whether it takes shards, if its record can be read.
    pub state: Option<State>,
    /// The version of its software, or nothing.
    pub software: &'a str,
    /// Whether its configuration is ours.
    pub same_configuration: bool,
    /// When its heartbeat last changed.
    pub seen: Instant,
    /// How many shards it owns or stands by for.
    pub shards: usize,
}

/// A shard, as this process sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardStatus<'a> {
    /// Which.
    pub shard: ShardId,
    /// Who should have it; none if nobody may.
    pub home: Option<&'a MemberId>,
    /// How it stands with us, as a word.
    pub mine: &'static str,
    /// The pin that we own it by.
    pub pin: Option<&'a PinId>,
    /// Which others say that they own it.
    pub owners: Vec<&'a MemberId>,
    /// Which others say that they stand by for it.
    pub standbys: Vec<&'a MemberId>,
    /// Who could not have it, and why.
    pub failed: Vec<(&'a MemberId, &'a Fault)>,
    /// Whose operator wants it paused.
    pub paused: Vec<&'a MemberId>,
    /// Whether its rows are known to wait for nobody.
    pub unowned: bool,
}

impl Claims {
    /// How the sharing stands.
    #[must_use]
    pub fn status(&self) -> Status<'_> {
        Status {
            phase: match self.phase {
                Phase::Running => "running",
                Phase::Draining { .. } => "draining",
                Phase::Resigning { .. } => "resigning",
                Phase::Resigned => "resigned",
            },
            ready: self.is_ready(),
            deaf: self.hearing.deaf,
            leads: self.leads(),
            members: self.members(),
            shards: self.shards(),
            share: self.share,
        }
    }

    fn members(&self) -> Vec<MemberStatus<'_>> {
        let peers = self.view.peers();
        peers
            .map(|(id, peer)| {
                let record = peer.record.as_ref();
                MemberStatus {
                    id,
                    gone: match peer.life {
                        Life::Live { .. } => None,
                        Life::Gone { why, .. } => Some(why),
                    },
                    session: record.map(|record| record.session),
                    state: record.map(|record| record.state),
                    software: record.map_or("", |record| &record.software),
                    same_configuration: record
                        .is_none_or(|record| record.fingerprint == self.config.fingerprint),
                    seen: peer.lease_from,
                    shards: record.map_or(0, |record| record.shards.len()),
                }
            })
            .collect()
    }

    /// Goes through the members once, not once a shard: there may be a thousand of each.
    fn shards(&self) -> Vec<ShardStatus<'_>> {
        let mut shards: Vec<_> = (0..)
            .map(ShardId)
            .zip(&self.mine)
            .map(|(shard, mine)| ShardStatus {
                shard,
                home: self.plan.get(&shard),
                mine: match mine {
                    Mine::Free => "free",
                    Mine::Standby => "standby",
                    Mine::Owned { .. } => "owned",
                    Mine::Leaving(_) => "leaving",
                },
                pin: match mine {
                    Mine::Owned { pin, .. } => Some(pin),
                    Mine::Leaving(hold) => hold.pin.as_ref(),
                    Mine::Free | Mine::Standby => None,
                },
                owners: Vec::new(),
                standbys: Vec::new(),
                failed: [&self.failed, &self.broken]
                    .into_iter()
                    .filter_map(|faults| Some((&self.config.id, faults.get(&shard)?)))
                    .collect(),
                paused: self.paused.get(&shard).map(|_| &self.config.id).into_iter().collect(),
                unowned: self.vacant.get(&shard).is_some_and(|vacancy| vacancy.is_urgent),
            })
            .collect();
        for member in self.view.live() {
            for (shard, hold) in &member.shards {
                let Some(place) = self.place(*shard) else { continue };
                let who =
                    if hold.pin.is_some() { &mut shards[place].owners } else { &mut shards[place].standbys };
                who.push(&member.id);
            }
            for (shard, fault) in &member.failed {
                if let Some(place) = self.place(*shard) {
                    shards[place].failed.push((&member.id, fault));
                }
            }
            for place in member.paused.iter().filter_map(|shard| self.place(*shard)) {
                shards[place].paused.push(&member.id);
            }
        }
        shards
    }
}
