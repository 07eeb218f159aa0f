//! A model of the stream of dead letters: a subject for each letter, written under "only if there is none". Where
//! another row is kept under the subject (sequences were used again) nothing is kept, and that is told.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use holdfast_core::ports::dead_letters::{Letter, ParkOutcome};
use holdfast_core::ports::{Failure, FailureClass};
use holdfast_core::row::{Seq, ShardId, TableName};
use holdfast_core::time::Timestamp;

/// What names a letter.
pub type Identity = (Timestamp, ShardId, TableName, Seq);

/// A row that is kept.
#[derive(Clone, Debug)]
struct Row {
    stored_at: Timestamp,
    payload: Bytes,
    times: u64,
}

/// The letters that are kept.
#[derive(Clone, Debug, Default)]
pub struct Letters {
    kept: BTreeMap<Identity, Row>,
    full_until: Duration,
    missing_until: Duration,
}

/// What became of a letter that arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// What its sender is told.
    pub outcome: ParkOutcome,
    /// Whether it is stored now, and was not before; or once more.
    pub stored: bool,
}

impl Letters {
    /// Nothing more is taken until then.
    pub fn full(&mut self, until: Duration) {
        self.full_until = self.full_until.max(until);
    }

    /// Somebody deleted the stream; it is made again then, with what it had. (It is asked for by name only.)
    pub fn missing(&mut self, until: Duration) {
        self.missing_until = self.missing_until.max(until);
    }

    /// All is well again.
    pub fn recover(&mut self) {
        (self.full_until, self.missing_until) = (Duration::ZERO, Duration::ZERO);
    }

    /// A letter arrives.
    pub fn park(&mut self, now: Duration, letter: &Letter, unless_there: bool) -> Kept {
        let failed = |class, why| ParkOutcome::Failed(Failure::new(class, why));
        if now < self.missing_until {
            return Kept {
                outcome: failed(FailureClass::Missing, "no stream of dead letters"),
                stored: false,
            };
        }
        let Letter { created, shard, table, seq, .. } = letter;
        let identity = (*created, *shard, table.clone(), *seq);
        if unless_there && let Some(kept) = self.kept.get(&identity) {
            let same = kept.stored_at == letter.stored_at && kept.payload == letter.payload;
            let another = || failed(FailureClass::Other, "another row is kept under this subject");
            return Kept { outcome: if same { ParkOutcome::Parked } else { another() }, stored: false };
        }
        if now < self.full_until {
            return Kept { outcome: failed(FailureClass::Full, "maximum messages exceeded"), stored: false };
        }
        let Letter { stored_at, payload, .. } = letter.clone();
        self.kept.entry(identity).or_insert(Row { stored_at, payload, times: 0 }).times += 1;
        Kept { outcome: ParkOutcome::Parked, stored: true }
    }

    /// How many letters are kept.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.kept.values().map(|row| row.times).sum()
    }
}

#[cfg(test)]
mod tests {
    use holdfast_core::ports::dead_letters::Cause;

    use super::*;

    fn letter(seq: u64) -> Letter {
        Letter {
            created: Timestamp(1),
            shard: ShardId(0),
            table: TableName::new("t"),
            seq: Seq(seq),
            stored_at: Timestamp(2),
            payload: Bytes::from_static(b"x"),
            cause: Cause::Payload,
            code: None,
            message: "no".into(),
            attempts: 0,
        }
    }

    #[test]
    fn a_letter_is_kept_once_unless_it_is_asked_for_twice() {
        let mut letters = Letters::default();
        let at = Duration::from_secs;
        assert!(letters.park(at(0), &letter(1), true).stored);
        assert_eq!(
            letters.park(at(1), &letter(1), true),
            Kept { outcome: ParkOutcome::Parked, stored: false }
        );
        let another = Letter { stored_at: Timestamp(3), ..letter(1) };
        assert!(matches!(letters.park(at(1), &another, true).outcome, ParkOutcome::Failed(_)));
        assert!(letters.park(at(2), &letter(1), false).stored);
        assert_eq!(letters.count(), 2);
        letters.full(at(10));
        assert!(matches!(letters.park(at(3), &letter(2), true).outcome, ParkOutcome::Failed(_)));
        assert_eq!(letters.park(at(3), &letter(1), true).outcome, ParkOutcome::Parked, "it is there");
        letters.missing(at(10));
        assert!(matches!(letters.park(at(3), &letter(1), true).outcome, ParkOutcome::Failed(_)));
        assert!(letters.park(at(10), &letter(2), true).stored);
    }
}
