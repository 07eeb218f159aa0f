//! What the machine is told, what it wants done, and what it needs to know.

use std::time::Duration;

use super::view::Gone;
use crate::budget::Share;
use crate::member::{Member, MemberId, Scope};
use crate::notice::{self, ShardFailure};
use crate::ports::delivery::PinId;
use crate::ports::members::{self, Command};
use crate::record::{RecordError, Session};
use crate::row::ShardId;

/// What the machine needs to know.
#[derive(Clone, Debug)]
pub struct Config {
    /// This process's name among the members.
    pub id: MemberId,
    /// A random value of this process start.
    pub session: Session,
    /// The number of shards: 0 up to it.
    pub shards: u32,
    /// How often the own record is written.
    pub heartbeat: Duration,
    /// How long a heartbeat may fail to change.
    pub lease: Duration,
    /// How often a silent member is asked.
    pub probe: Duration,
    /// Rows that the process may hold.
    pub rows: u64,
    /// Bytes that the process may hold.
    pub bytes: u64,
    /// The version of the software, for people.
    pub software: String,
    /// A hash of the configuration in hexadecimal; members that differ are told of.
    pub fingerprint: String,
}

impl Config {
    /// What makes this configuration unfit, if anything does.
    #[must_use]
    pub fn defect(&self) -> Option<String> {
        if self.shards as usize > Member::MAX_SHARDS {
            return Some(format!("more than {} shards", Member::MAX_SHARDS));
        }
        if self.heartbeat.is_zero() || self.probe.is_zero() {
            return Some("heartbeat and probe must be longer than nothing".to_owned());
        }
        if self.heartbeat.saturating_mul(4) > self.lease {
            return Some("the lease must be at least four heartbeats".to_owned());
        }
        let texts = [&self.software, &self.fingerprint];
        texts.iter().any(|text| text.len() > Member::MAX_TEXT).then(|| "a text is too long".to_owned())
    }

    /// A member that did not write for so long is asked for a sign of life.
    pub(super) fn silence(&self) -> Duration {
        self.heartbeat * 5 / 4
    }

    /// A process that did not hear its own heartbeat for longer is deaf.
    pub(super) fn hearing(&self) -> Duration {
        self.lease / 2
    }
}

/// What the machine is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The instant that `next_wakeup` named has come.
    Wakeup,
    /// The bucket or a member answered, or the watch showed something.
    Members(members::Reply),
    /// A shard tells how it fares.
    Shard {
        /// Which.
        shard: ShardId,
        /// What.
        report: Report,
    },
    /// Rows of the shard wait and its consumer's delivered position has not moved for a pinned TTL.
    Unowned {
        /// Which.
        shard: ShardId,
    },
    /// Write what was accepted, give everything up and resign.
    Stop {
        /// Past it the record is deleted, whatever the shards do.
        within: Duration,
    },
    /// The operator wants nobody to have this shard while this process lives.
    Pause(ShardId),
    /// The operator wants it tried again, after a pause or a failure. It goes to every member.
    Resume(ShardId),
}

/// How a shard fares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// It stands by for the pin.
    Ready,
    /// It is ours, under this pin.
    Owned {
        /// The pin.
        pin: PinId,
    },
    /// It is not ours any more; it stands by again.
    Lost,
    /// It was given up: by order, or it ended by itself without trouble.
    Released {
        /// Whether everything accepted is written.
        clean: bool,
    },
    /// It ended by itself.
    Failed {
        /// Why, in words.
        reason: String,
        /// For whom.
        scope: Scope,
    },
}

impl From<&notice::Report> for Report {
    fn from(report: &notice::Report) -> Self {
        match report {
            notice::Report::Ready => Self::Ready,
            notice::Report::Owned { pin } => Self::Owned { pin: pin.clone() },
            notice::Report::Lost => Self::Lost,
            notice::Report::Released { clean } => Self::Released { clean: *clean },
            notice::Report::Failed(failure) => {
                Self::Failed { reason: failure.to_string(), scope: Scope::from(failure) }
            }
        }
    }
}

/// Whether an heir would fail in turn.
impl From<&ShardFailure> for Scope {
    fn from(failure: &ShardFailure) -> Self {
        match failure {
            // A newer Holdfast can read it; another one's configuration may say where to start.
            ShardFailure::Record(RecordError::Newer(_)) | ShardFailure::StartNeeded => Self::Here,
            _ => Self::Everywhere,
        }
    }
}

/// What a shard is ordered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// It is ours to take: stand by.
    Claim {
        /// Its share of the budget.
        share: Share,
        /// The pin of an owner that is dead: if the consumer is still pinned so, unpin it at once.
        of: Option<PinId>,
    },
    /// The share has changed.
    Share(Share),
    /// Hand it over: write what was accepted, then give it up.
    GiveUp,
    /// The process stops: the same, within this time.
    Stop {
        /// Past it, rows are left unwritten and come again to the heir.
        within: Duration,
    },
    /// The owner is dead: if the consumer is still pinned so, unpin it at once.
    OwnerGone(PinId),
}

/// Something worth a line in the log or a count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A member is there, or there again.
    Joined {
        /// Who.
        member: MemberId,
    },
    /// A member is gone.
    Left {
        /// Who.
        member: MemberId,
        /// Why it is thought so.
        why: Gone,
    },
    /// A member's configuration is another one.
    ConfigurationDiffers {
        /// Whose.
        member: MemberId,
    },
    /// A member runs a newer version.
    NewerVersion {
        /// Who.
        member: MemberId,
    },
    /// A record in the bucket is no member's.
    Unreadable {
        /// Its key, made printable.
        key: String,
        /// What is wrong with it.
        why: String,
    },
    /// There are more members than are looked at.
    TooManyMembers,
    /// Another process writes this one's record: two have the same node id.
    NameTaken {
        /// The other's session.
        by: Session,
    },
    /// A dead member's shard was claimed.
    Taken {
        /// Which.
        shard: ShardId,
        /// Whose it was.
        from: MemberId,
    },
    /// Nobody has the shard although its rows wait.
    Unowned {
        /// Which.
        shard: ShardId,
    },
    /// The own heartbeat does not come back: nothing is claimed or given up until it does.
    Deaf,
    /// It came back.
    Hearing,
    /// The own record cannot be written now and is tried again.
    NotStored {
        /// Why.
        why: String,
    },
}

/// What the machine wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask the bucket or a member.
    Members(Command),
    /// Order a shard.
    Shard {
        /// Which.
        shard: ShardId,
        /// What.
        order: Order,
    },
    /// Tell people.
    Notice(Notice),
}
