//! Who should have what, and what follows for the shards of this process.

use std::collections::{BTreeMap, BTreeSet};

use super::{Action, Claims, Mine, Notice, Order, Vacancy};
use crate::assign::{assign, order, rank};
use crate::budget::Share;
use crate::member::{Member, MemberId, Scope, State};
use crate::row::ShardId;
use crate::rule::{Rule, safeguard};
use crate::time::Instant;

impl Claims {
    /// Works out who should have what.
    fn work_out(&mut self, now: Instant) {
        let me = self.record();
        let live: Vec<&Member> = self.view.live().chain([&me]).collect();
        let takes = |member: &&&Member| {
            member.state == State::Active
                || (member.state == State::Draining && !safeguard(Rule::DrainingGetsNothing))
        };
        let members: Vec<MemberId> = live.iter().filter(takes).map(|member| member.id.clone()).collect();
        let closed = closed(&live);
        let shards =
            (0..self.config.shards).map(ShardId).filter(|shard| !closed.contains(shard)).collect::<Vec<_>>();
        let mut barred = BTreeMap::<MemberId, BTreeSet<ShardId>>::new();
        for member in live.iter().filter(|member| !member.failed.is_empty()) {
            barred.insert(member.id.clone(), member.failed.keys().copied().collect());
        }
        // An owner sits before those that stand by, a later owner before an earlier one.
        let mut seats = BTreeMap::<ShardId, ((Option<u64>, u64), MemberId)>::new();
        for member in live.iter().filter(takes) {
            for (shard, hold) in member.shards.iter().filter(|(_, hold)| !hold.leaving) {
                let claim = (hold.pin.as_ref().map(|_| hold.turn), rank(*shard, &member.id));
                if seats.get(shard).is_none_or(|(best, _)| *best < claim) {
                    seats.insert(*shard, (claim, member.id.clone()));
                }
            }
        }
        let seats = seats.into_iter().map(|(shard, (_, id))| (shard, id)).collect();
        leave_to_newer(&live, &seats, &mut barred);
        self.plan = assign(&shards, &members, &barred, &seats);
        // A pin that somebody alive has is no dead owner's.
        let owned = |shard: &ShardId| {
            live.iter().any(|member| member.shards.get(shard).is_some_and(|hold| hold.pin.is_some()))
        };
        self.orphans.retain(|shard, _| !owned(shard));
        self.broken.retain(|shard, _| !owned(shard));
        let held: BTreeSet<ShardId> = live.iter().flat_map(|member| member.shards.keys()).copied().collect();
        self.vacant.retain(|shard, _| self.plan.contains_key(shard) && !held.contains(shard));
        for shard in self.plan.keys().filter(|shard| !held.contains(shard)) {
            self.vacant.entry(*shard).or_insert(Vacancy { since: now, is_urgent: false });
        }
        self.stale = false;
    }

    /// Claims what is ours and gives up what is another's.
    pub(super) fn settle(&mut self, now: Instant, out: &mut Vec<Action>) {
        if self.stale {
            self.work_out(now);
        }
        let mut claimed = Vec::new();
        for place in 0..self.mine.len() {
            let shard = Self::at(place);
            let home = self.plan.get(&shard);
            let is_ours = home == Some(&self.config.id);
            match &self.mine[place] {
                Mine::Free if is_ours => claimed.push(place),
                mine if mine.is_kept() && !is_ours => {
                    let stands_by = home
                        .and_then(|home| self.view.live_record(home))
                        .and_then(|record| record.shards.get(&shard))
                        .is_some_and(|hold| !hold.leaving);
                    let given = home.is_some() && !safeguard(Rule::GiveUpToStandby);
                    // Nobody's: whoever owns it all the same shows that it is not broken, whoever stands by leaves it.
                    let nobodys = home.is_none() && matches!(mine, Mine::Standby);
                    if stands_by || given || nobodys || self.is_paused(shard) {
                        self.mine[place] = mine.leaving();
                        self.order(place, Order::GiveUp, out);
                        self.stale = true;
                    }
                }
                mine if mine.is_kept() => {
                    if matches!(mine, Mine::Standby)
                        && let Some((from, pin)) = self.orphans.remove(&shard)
                    {
                        self.order(place, Order::OwnerGone(pin), out);
                        out.push(Action::Notice(Notice::Taken { shard, from }));
                    }
                }
                _ => {}
            }
        }
        claimed.extend(self.stand_in(now));
        for place in &claimed {
            self.mine[*place] = Mine::Standby;
            self.vacant.remove(&Self::at(*place));
            self.stale = true;
        }
        self.share_out(&claimed, out);
        for place in claimed {
            let shard = Self::at(place);
            let orphan = self.orphans.remove(&shard);
            let of = orphan.as_ref().map(|(_, pin)| pin.clone());
            self.order(place, Order::Claim { share: self.share, of }, out);
            if let Some((from, _)) = orphan {
                out.push(Action::Notice(Notice::Taken { shard, from }));
            }
        }
    }

    /// Whether this process found it unfit for itself, or was told so by one that left.
    fn is_barred(&self, shard: ShardId) -> bool {
        self.failed.contains_key(&shard) || self.broken.contains_key(&shard)
    }

    fn is_paused(&self, shard: ShardId) -> bool {
        self.paused.contains(&shard) || self.view.live().any(|member| member.paused.contains(&shard))
    }

    /// Vacant shards whose own member evidently does not see that it should have them, and for which it is our
    /// turn to stand in.
    fn stand_in(&mut self, now: Instant) -> Vec<usize> {
        let due = self.vacant.keys().filter(|shard| self.stand_in_at(**shard).is_some_and(|at| at <= now));
        due.filter_map(|shard| self.place(*shard)).collect()
    }

    /// When this process stands in for a vacant shard's own member: after a lease if it is the first in the
    /// shard's order, after two heartbeats if the shard's rows are known to wait; a lease later for each before
    /// it. Any that stands by has a seat then, so that the answer of all takes it into account.
    pub(super) fn stand_in_at(&self, shard: ShardId) -> Option<Instant> {
        let Vacancy { since, is_urgent } = *self.vacant.get(&shard)?;
        let home = self.plan.get(&shard)?;
        if *home == self.config.id || self.is_barred(shard) {
            return None;
        }
        let able = |member: &&Member| member.state == State::Active && !member.failed.contains_key(&shard);
        let others = self.view.live().filter(able).map(|member| member.id.clone());
        let members: Vec<_> = others.filter(|id| id != home).chain([self.config.id.clone()]).collect();
        let before = order(shard, &members).iter().position(|id| *id == self.config.id)?;
        let grace = if is_urgent { self.config.heartbeat * 2 } else { self.config.lease };
        Some(since + grace + self.config.lease.saturating_mul(u32::try_from(before).ok()?))
    }

    /// Tells every shard its share if that has changed; those of `fresh` are told with their claim.
    fn share_out(&mut self, fresh: &[usize], out: &mut Vec<Action>) {
        let held: Vec<_> = self.held().filter_map(|shard| self.place(shard)).collect();
        let count = if safeguard(Rule::SharesOfOneBudget) { held.len() } else { 1 };
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let share = Share::even(self.config.rows, self.config.bytes, count);
        if share != self.share {
            self.share = share;
            for place in held.into_iter().filter(|place| !fresh.contains(place)) {
                self.order(place, Order::Share(share), out);
            }
        }
    }
}

/// Bars members from shards that one of a newer version has: their records may be of that version, and unreadable to
/// them.
fn leave_to_newer(
    live: &[&Member],
    seats: &BTreeMap<ShardId, MemberId>,
    barred: &mut BTreeMap<MemberId, BTreeSet<ShardId>>,
) {
    let versions: BTreeMap<&MemberId, u32> = live.iter().map(|member| (&member.id, member.version)).collect();
    for (id, version) in &versions {
        let newer = |seat: &MemberId| versions.get(seat).is_some_and(|other| other > version);
        let mut theirs = seats.iter().filter(|(_, seat)| newer(seat)).map(|(shard, _)| *shard).peekable();
        if theirs.peek().is_some() {
            barred.entry((*id).clone()).or_default().extend(theirs);
        }
    }
}

/// What nobody should have: somebody found it broken for all, or wants it paused.
fn closed(live: &[&Member]) -> BTreeSet<ShardId> {
    let failed = live.iter().flat_map(|member| &member.failed);
    let broken =
        failed.filter(|(_, fault)| fault.scope == Scope::Everywhere && safeguard(Rule::FailedShardsLeft));
    let paused = live.iter().flat_map(|member| &member.paused);
    broken.map(|(shard, _)| *shard).chain(paused.copied()).collect()
}
