//! A shard ends by itself, and a lane stops, only for a cause.

use holdfast_core::notice::{ShardFailure, Trouble};

use super::{Checked, violated};

pub(crate) const NAME: &str = "7 stops only for cause";
/// An answer of the store that nobody knows is told once.
pub(crate) const TOLD: &str = "told once";

/// What has happened in the world that may stop a shard.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Causes {
    pub(crate) consumer_deleted: bool,
    pub(crate) tail_lost: bool,
    /// There are no dead letters.
    pub(crate) no_letters: bool,
}

impl Causes {
    /// A shard ended by itself.
    pub(crate) fn failed(self, shard: u32, failure: &ShardFailure) -> Checked {
        let cause = match failure {
            ShardFailure::ConsumerGone(_) => self.consumer_deleted,
            ShardFailure::SequencesReused(_) => self.tail_lost,
            ShardFailure::StartNeeded | ShardFailure::Record(_) => false,
        };
        if cause { Ok(()) } else { violated(NAME, format!("s{shard} ended: {failure}")) }
    }

    /// A lane has trouble.
    pub(crate) fn troubled(self, trouble: &Trouble) -> Checked {
        match trouble {
            // Other rows under the same sequences look like repeats.
            Trouble::Stopped(_) if self.tail_lost => Ok(()),
            Trouble::Stopped(why) => violated(NAME, format!("a lane stopped: {why}")),
            Trouble::BadRow { seq, why } if !self.no_letters => {
                violated(NAME, format!("a lane waits for row {seq} although there are dead letters: {why}"))
            }
            Trouble::Table(_) | Trouble::Store(_) | Trouble::DeadLetters { .. } | Trouble::BadRow { .. } => {
                Ok(())
            }
        }
    }
}
