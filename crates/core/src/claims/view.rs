//! The other members as this process sees them: their records, and who of them lives.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use super::{Config, Notice};
use crate::ask::{Ask, Attempts};
use crate::member::{Member, MemberError, MemberId, State};
use crate::ports::Attempt;
use crate::ports::ledger::Revision;
use crate::ports::members::{Command, Entry, Probe};
use crate::rule::{Rule, safeguard};
use crate::time::Instant;

/// More members than this are not looked at.
pub const MAX_MEMBERS: usize = 1_000;

/// So many requests in a row must find nobody.
const REFUSALS: u32 = 2;

/// Why a member is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Gone {
    /// It said so.
    Resigned,
    /// Its process was started anew.
    Restarted,
    /// Its heartbeat did not change for the lease.
    LeaseOver,
    /// Two requests in a row found nobody: its connection is gone.
    NoResponders,
}

impl Gone {
    /// The reason as a word, for metrics.
    #[must_use]
    pub const fn key(self) -> &'static str {
        match self {
            Self::Resigned => "resigned",
            Self::Restarted => "restarted",
            Self::LeaseOver => "lease-over",
            Self::NoResponders => "no-responders",
        }
    }
}

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Resigned => "it resigned",
            Self::Restarted => "its process was started anew",
            Self::LeaseOver => "its heartbeat stopped",
            Self::NoResponders => "its connection is gone",
        })
    }
}

/// What a change in the view is, beside that the sharing must be worked out again.
#[derive(Debug)]
pub(super) enum Change {
    /// A member that was not there, or was gone.
    Joined(MemberId),
    /// A member is gone, and this was its last record.
    Left { id: MemberId, why: Gone, record: Option<Member> },
    /// It says something else than before.
    Says,
}

#[derive(Debug)]
pub(super) enum Life {
    /// `ask` is due when it has been silent for a while; `refused`: requests in a row that found nobody.
    Live { ask: Ask, refused: u32 },
    /// It may come back: its record is still there.
    Gone { why: Gone, since: Instant },
}

#[derive(Debug)]
pub(super) struct Peer {
    /// The last record that could be read; none if a newer version's never could.
    pub(super) record: Option<Member>,
    pub(super) revision: Revision,
    /// When its heartbeat last changed, or leases began anew.
    pub(super) lease_from: Instant,
    pub(super) life: Life,
}

impl Peer {
    pub(super) fn is_live(&self) -> bool {
        matches!(self.life, Life::Live { .. })
    }
}

/// The view.
#[derive(Debug)]
pub(super) struct View {
    peers: BTreeMap<MemberId, Peer>,
    /// Keys whose records were told of as unreadable.
    unreadable: BTreeSet<Arc<str>>,
    too_many: bool,
}

impl View {
    pub(super) const fn new() -> Self {
        Self { peers: BTreeMap::new(), unreadable: BTreeSet::new(), too_many: false }
    }

    pub(super) fn peers(&self) -> impl Iterator<Item = (&MemberId, &Peer)> {
        self.peers.iter()
    }

    pub(super) fn len(&self) -> usize {
        self.peers.len()
    }

    /// The live members' records. (One of a newer version may have none that can be read.)
    pub(super) fn live(&self) -> impl Iterator<Item = &Member> {
        self.peers.values().filter(|peer| peer.is_live()).filter_map(|peer| peer.record.as_ref())
    }

    pub(super) fn live_record(&self, id: &MemberId) -> Option<&Member> {
        self.peers.get(id).filter(|peer| peer.is_live())?.record.as_ref()
    }

    /// Takes everything there is for what there is: who is not in it has resigned.
    pub(super) fn on_snapshot(
        &mut self,
        config: &Config,
        now: Instant,
        entries: Vec<Entry>,
        changes: &mut Vec<Change>,
        notices: &mut Vec<Notice>,
    ) {
        let keys: BTreeSet<Arc<str>> = entries.iter().map(|entry| entry.key.clone()).collect();
        self.unreadable.retain(|key| keys.contains(key));
        let absent: Vec<_> = self.peers.keys().filter(|id| !keys.contains(id.as_str())).cloned().collect();
        for id in absent {
            self.on_removed(id.as_str(), changes);
        }
        for entry in entries {
            // Whether such a member still lives is not known: it is asked at once.
            self.on_entry(config, now, now, entry, changes, notices);
        }
    }

    pub(super) fn on_changed(
        &mut self,
        config: &Config,
        now: Instant,
        entry: Entry,
        changes: &mut Vec<Change>,
        notices: &mut Vec<Notice>,
    ) {
        self.on_entry(config, now, now + config.silence(), entry, changes, notices);
    }

    fn on_entry(
        &mut self,
        config: &Config,
        now: Instant,
        ask_at: Instant,
        entry: Entry,
        changes: &mut Vec<Change>,
        notices: &mut Vec<Notice>,
    ) {
        let Entry { key, revision, record } = entry;
        let (id, record) = match read(&key, &record) {
            Ok(read) => read,
            Err(why) => {
                if self.unreadable.len() < MAX_MEMBERS && self.unreadable.insert(key.clone()) {
                    notices.push(Notice::Unreadable { key: printable(&key), why });
                }
                return;
            }
        };
        if id == config.id {
            return;
        }
        if record.as_ref().is_some_and(|record| record.state == State::Resigned) {
            self.on_removed(&key, changes);
            return;
        }
        let known = self.peers.get(&id);
        if known.is_some_and(|peer| peer.revision == revision) {
            return;
        }
        let version = |record: Option<&Member>| record.map_or(u32::MAX, |record| record.version);
        let was_newer = known.is_some_and(|peer| version(peer.record.as_ref()) > Member::VERSION);
        if version(record.as_ref()) > Member::VERSION && !was_newer {
            notices.push(Notice::NewerVersion { member: id.clone() });
        }
        let fingerprint = record.as_ref().map(|record| &record.fingerprint);
        let told = known.and_then(|peer| peer.record.as_ref()).map(|record| &record.fingerprint);
        if fingerprint.is_some_and(|print| *print != config.fingerprint && told != Some(print)) {
            notices.push(Notice::ConfigurationDiffers { member: id.clone() });
        }
        let life = Life::Live { ask: Ask::at(ask_at), refused: 0 };
        let Some(peer) = self.peers.get_mut(&id) else {
            if self.make_room(notices) {
                self.peers.insert(id.clone(), Peer { record, revision, lease_from: now, life });
                changes.push(Change::Joined(id));
            }
            return;
        };
        let session = |record: &Option<Member>| record.as_ref().map(|record| record.session);
        if !peer.is_live() {
            changes.push(Change::Joined(id));
        } else if record.is_some() && peer.record.is_some() && session(&record) != session(&peer.record) {
            changes.push(Change::Left { id: id.clone(), why: Gone::Restarted, record: peer.record.clone() });
            changes.push(Change::Joined(id));
        } else if let (Some(was), Some(is)) = (&peer.record, &record)
            && !was.says_the_same_as(is)
        {
            changes.push(Change::Says);
        } else if peer.record.is_none() && record.is_some() {
            changes.push(Change::Says);
        }
        // What cannot be read takes nothing back.
        let record = record.or_else(|| peer.record.take());
        *peer = Peer { record, revision, lease_from: now, life };
    }

    /// Makes room for one more, at the cost of who is gone for longest.
    fn make_room(&mut self, notices: &mut Vec<Notice>) -> bool {
        if self.peers.len() < MAX_MEMBERS {
            return true;
        }
        let gone = self.peers.iter().filter_map(|(id, peer)| match peer.life {
            Life::Gone { since, .. } => Some((since, id.clone())),
            Life::Live { .. } => None,
        });
        if let Some((_, id)) = gone.min() {
            self.peers.remove(&id);
            return true;
        }
        if !self.too_many {
            self.too_many = true;
            notices.push(Notice::TooManyMembers);
        }
        false
    }

    pub(super) fn on_removed(&mut self, key: &str, changes: &mut Vec<Change>) {
        self.unreadable.remove(key);
        let Ok(id) = MemberId::new(key) else { return };
        let Some(peer) = self.peers.remove(&id) else { return };
        if peer.is_live() {
            changes.push(Change::Left { id, why: Gone::Resigned, record: peer.record });
        }
    }

    /// Leases of live members begin anew: while this process was deaf it could not have heard them.
    pub(super) fn restart_leases(&mut self, config: &Config, now: Instant) {
        for peer in self.peers.values_mut().filter(|peer| peer.is_live()) {
            peer.lease_from = now;
        }
        self.restart_probes(config, now);
    }

    /// Nobody is asked for a while, and what was answered so far is forgotten.
    pub(super) fn restart_probes(&mut self, config: &Config, now: Instant) {
        for peer in self.peers.values_mut() {
            if let Life::Live { ask, refused } = &mut peer.life {
                (*ask, *refused) = (Ask::at(now + config.silence()), 0);
            }
        }
    }

    pub(super) fn expire(&mut self, config: &Config, now: Instant, changes: &mut Vec<Change>) {
        for (id, peer) in &mut self.peers {
            if peer.is_live() && now >= peer.lease_from + config.lease {
                changes.push(Change::Left {
                    id: id.clone(),
                    why: Gone::LeaseOver,
                    record: peer.record.clone(),
                });
                peer.life = Life::Gone { why: Gone::LeaseOver, since: now };
            }
        }
    }

    /// Asks the silent ones.
    pub(super) fn ask(
        &mut self,
        config: &Config,
        now: Instant,
        attempts: &mut Attempts,
        out: &mut Vec<Command>,
    ) {
        for (id, peer) in &mut self.peers {
            if let Life::Live { ask, .. } = &mut peer.life
                && let Some(attempt) = ask.take_patient(now, attempts, config.lease)
            {
                out.push(Command::Probe { attempt, member: id.clone() });
            }
        }
    }

    /// `hears`: whether this process is itself in touch just now; else that nobody is there proves nothing.
    pub(super) fn on_probed(
        &mut self,
        config: &Config,
        now: Instant,
        attempt: Attempt,
        answer: Probe,
        hears: bool,
        changes: &mut Vec<Change>,
    ) {
        for (id, peer) in &mut self.peers {
            let Life::Live { ask, refused } = &mut peer.life else { continue };
            if !ask.awaits(attempt) {
                continue;
            }
            ask.again(now, config.probe);
            let nobody = match answer {
                Probe::Alive => false,
                Probe::NoResponders => hears,
                Probe::Silent => !safeguard(Rule::SilenceIsNotDeath),
            };
            *refused = if nobody { *refused + 1 } else { 0 };
            if *refused >= REFUSALS {
                let record = peer.record.clone();
                changes.push(Change::Left { id: id.clone(), why: Gone::NoResponders, record });
                peer.life = Life::Gone { why: Gone::NoResponders, since: now };
            }
            return;
        }
    }

    /// Takes the members that are gone for `after` and not yet taken within it, for their keys to be deleted.
    pub(super) fn sweep(&mut self, now: Instant, after: std::time::Duration) -> Vec<(MemberId, Revision)> {
        let mut swept = Vec::new();
        for (id, peer) in &mut self.peers {
            if let Life::Gone { since, .. } = &mut peer.life
                && now >= *since + after
            {
                *since = now;
                swept.push((id.clone(), peer.revision));
            }
        }
        swept
    }

    /// When somebody is to be asked, a lease ends, or a key is to be swept.
    pub(super) fn next_wakeup(&self, config: &Config, sweep: std::time::Duration) -> Option<Instant> {
        let wakeup = |peer: &Peer| match &peer.life {
            Life::Live { ask, .. } => ask.due().min(peer.lease_from + config.lease),
            Life::Gone { since, .. } => *since + sweep,
        };
        self.peers.values().map(wakeup).min()
    }
}

/// Whose record it is, and the record if its version leaves one to read.
pub(super) fn read(key: &str, bytes: &[u8]) -> Result<(MemberId, Option<Member>), String> {
    let id = MemberId::new(key).map_err(|error| error.to_string())?;
    match Member::decode(bytes) {
        Ok(record) if record.id == id => Ok((id, Some(record))),
        Ok(record) => Err(format!("the record is of {}", record.id)),
        Err(MemberError::Newer(_)) => Ok((id, None)),
        Err(error @ MemberError::Broken(_)) => Err(error.to_string()),
    }
}

/// A key as it can be shown: it may be anything.
fn printable(key: &str) -> String {
    key.chars().take(MemberId::MAX).flat_map(char::escape_default).collect()
}
