//! A shard's record in the ledger: the truth about what is written.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::batch::Batch;
use crate::format;
use crate::ports::dead_letters::Cause;
use crate::ports::store::Target;
use crate::row::{Mark, Seq, TableName};
use crate::time::Timestamp;

/// A random value of a process start. Written in hexadecimal, since JSON readers round large numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Session(pub u64);

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Session {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{self:?}"))
    }
}

impl<'de> Deserialize<'de> for Session {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map(Self).map_err(serde::de::Error::custom)
    }
}

/// Who wrote a record: one tenure of one process start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Writer {
    /// The process start.
    pub session: Session,
    /// The tenure within it, counted from 1.
    pub nonce: u64,
}

/// The batch of a lane that may have been sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenBatch {
    /// Its numbers.
    pub batch: Batch,
    /// Where it goes.
    pub target: Target,
}

/// A row that is a dead letter: decided, and kept in the dead letters now or soon. Nobody stores it any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parked {
    /// Which row, the first after `done`.
    pub row: Seq,
    /// Why.
    pub cause: Cause,
    /// The store's error code, if it gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<u32>,
    /// The reason in words, at most [`Parked::MAX_MESSAGE`] bytes.
    pub message: Arc<str>,
    /// Times it was sent to the store.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub attempts: u32,
}

// The signature is serde's.
#[expect(clippy::trivially_copy_pass_by_ref)]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Parked {
    /// The longest reason that a record keeps, in bytes: many lanes share one record.
    pub const MAX_MESSAGE: usize = 300;

    /// `why`, cut at a character.
    #[must_use]
    pub fn message(why: &str) -> Arc<str> {
        why[..why.floor_char_boundary(Self::MAX_MESSAGE)].into()
    }
}

/// A lane at work.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaneRecord {
    /// Every row of the table at or below it is in the store, or in the dead letters.
    pub done: Seq,
    /// The one batch after `done` that may have been sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<OpenBatch>,
    /// The one row after `done` that is a dead letter. Never together with an open batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parked: Option<Parked>,
    /// Rows after `done`, up to here, may be in the table already: they stood in a batch that was in doubt before
    /// it was split, or the table has rows that the ledger does not know of. They are read back before they are
    /// sent. Not above `done`: there are none.
    #[serde(default, skip_serializing_if = "Seq::is_zero")]
    pub suspect: Seq,
}

/// A shard's record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The layout, [`Record::VERSION`].
    pub version: u32,
    /// The stream's creation: rows of another stream of the same name have nothing to do with this record.
    pub stream_created: Timestamp,
    /// Raised by every tenure's first write.
    pub epoch: u64,
    /// The tenure that wrote it.
    pub writer: Writer,
    /// How often a person has set a new start within this stream, because its sequences were used again. Part of
    /// its identity from then on.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rebased: u32,
    /// Every row of the shard at or below it is done.
    pub floor: Seq,
    /// The highest row that this record has ever called written or to be written, and when the stream stored
    /// it. A stream that lost its tail and uses sequences again has another row there, or none: while it is
    /// the same, so is everything below it. (The floor alone would not do: batches are open above it.)
    pub high: Mark,
    /// Lanes with an open batch, or whose `done` is above the floor. All others are done up to the floor.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lanes: BTreeMap<TableName, LaneRecord>,
}

/// Why a stored record cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// A newer Holdfast wrote it.
    #[error("the record has version {0}, this Holdfast knows up to {known}: run a newer Holdfast here", known = Record::VERSION)]
    Newer(u32),
    /// It is not a record, or its numbers contradict each other.
    #[error("the record cannot be used ({0}): inspect it with `holdfast ledger show`")]
    Broken(String),
}

impl Record {
    /// The layout that this code writes.
    pub const VERSION: u32 = format::VERSION;

    /// What names the stream in tokens, in the stream column and in dead letters: its creation time, made another
    /// by every rebase, since the same sequences are other rows then. (Two streams of one name are never created
    /// within so few nanoseconds.)
    #[must_use]
    pub fn identity(&self) -> Timestamp {
        Timestamp(self.stream_created.0.saturating_add(i64::from(self.rebased)))
    }

    /// The floor as a place, recognisable if it is the highest row that is named.
    #[must_use]
    pub fn floor_mark(&self) -> Mark {
        let stored_at = if self.floor == self.high.seq { self.high.stored_at } else { Timestamp(0) };
        Mark { seq: self.floor, stored_at }
    }

    /// The record's bytes, always the same for the same record.
    ///
    /// # Panics
    /// Never: every part of a record has a JSON form.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        debug_assert_eq!(self.defect(), None, "{self:?}");
        debug_assert_eq!(self.version, Self::VERSION, "what is written has the writer's version");
        format::encode(self)
    }

    /// Reads a stored record. Whatever the bytes are, nothing worse than an error comes of them.
    ///
    /// # Errors
    /// [`RecordError::Newer`] for a layout of a later version, [`RecordError::Broken`] for anything else
    /// that is not a consistent record.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let broken = |error: serde_json::Error| RecordError::Broken(error.to_string());
        let Version { version } = serde_json::from_slice(bytes).map_err(broken)?;
        if version > Self::VERSION {
            return Err(RecordError::Newer(version));
        }
        let record: Self = format::decode(bytes).map_err(broken)?;
        match record.defect() {
            None => Ok(record),
            Some(defect) => Err(RecordError::Broken(defect)),
        }
    }

    /// What contradicts itself in this record, if anything does (invariant 6).
    #[must_use]
    pub fn defect(&self) -> Option<String> {
        if self.version == 0 {
            return Some("there is no version 0".to_owned());
        }
        if self.floor > self.high.seq {
            return Some("the floor is above the highest row".to_owned());
        }
        for (table, lane) in &self.lanes {
            let open = lane.open.as_ref().map_or(lane.done, |open| open.batch.last);
            let parked = lane.parked.as_ref().map_or(lane.done, |parked| parked.row);
            let top = open.max(parked).max(lane.done);
            if top > self.high.seq {
                return Some(format!("table {table}: row {top} is above the highest row"));
            }
            if let Some(parked) = &lane.parked {
                if lane.open.is_some() {
                    return Some(format!("table {table}: a batch is open and a row is parked"));
                }
                if parked.row <= lane.done || parked.row <= self.floor {
                    return Some(format!("table {table}: the parked row is at or below `done` or the floor"));
                }
                if parked.message.len() > Parked::MAX_MESSAGE {
                    return Some(format!("table {table}: the parked row's reason is too long"));
                }
            }
            let Some(OpenBatch { batch, .. }) = &lane.open else { continue };
            if let Some(defect) = batch.defect() {
                return Some(format!("table {table}: {defect}"));
            }
            if batch.first <= lane.done {
                return Some(format!("table {table}: the open batch starts at or below `done`"));
            }
            if batch.first <= self.floor {
                return Some(format!("table {table}: the open batch starts at or below the floor"));
            }
        }
        None
    }

    /// Whether a batch may have been sent, or a letter, that is not known to be done.
    #[must_use]
    pub fn has_open(&self) -> bool {
        self.lanes.values().any(|lane| lane.open.is_some() || lane.parked.is_some())
    }

    /// What has gone back from `earlier` to this record, if anything has. Nothing may, within a stream.
    #[must_use]
    pub fn regression_from(&self, earlier: &Self) -> Option<String> {
        if self.stream_created != earlier.stream_created {
            return None;
        }
        if self.floor < earlier.floor {
            return Some(format!("the floor went back from {} to {}", earlier.floor, self.floor));
        }
        earlier.lanes.iter().find_map(|(table, lane)| {
            let done = self.lanes.get(table).map_or(self.floor, |now| now.done);
            (done < lane.done).then(|| format!("table {table}: done went back from {} to {done}", lane.done))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ports::store::Level;

    #[test]
    fn the_floor_is_recognisable_where_it_is_the_highest_row() {
        let record = sample();
        assert_eq!(record.floor_mark(), Mark { seq: Seq(10), stored_at: Timestamp(0) });
        let all_done = Record { floor: record.high.seq, ..record };
        assert_eq!(all_done.floor_mark(), all_done.high);
    }

    fn sample() -> Record {
        let target = Target { database: "web".into(), table: "clicks".into(), level: Level::ExactlyOnce };
        let batch = Batch { first: Seq(12), last: Seq(40), rows: 9, generation: 0 };
        Record {
            version: Record::VERSION,
            stream_created: Timestamp(1_700_000_000_000_000_001),
            epoch: 3,
            writer: Writer { session: Session(u64::MAX), nonce: 2 },
            rebased: 0,
            floor: Seq(10),
            high: Mark { seq: Seq(40), stored_at: Timestamp(1_700_000_000_000_000_009) },
            lanes: BTreeMap::from([
                (
                    TableName::new("clicks"),
                    LaneRecord {
                        done: Seq(11),
                        open: Some(OpenBatch { batch, target }),
                        ..LaneRecord::default()
                    },
                ),
                (TableName::new("a b\u{7}*"), LaneRecord { done: Seq(17), ..LaneRecord::default() }),
            ]),
        }
    }

    #[test]
    fn a_record_comes_back_as_it_was() {
        assert_eq!(Record::decode(&sample().encode()), Ok(sample()));
    }

    #[test]
    fn the_layout_is_what_is_written_down() {
        let text = String::from_utf8(sample().encode().to_vec()).unwrap();
        assert_eq!(
            text,
            r#"{"version":1,"stream_created":1700000000000000001,"epoch":3,"writer":{"session":"ffffffffffffffff","nonce":2},"floor":10,"high":{"seq":40,"stored_at":1700000000000000009},"lanes":{"a b\u0007*":{"done":17},"clicks":{"done":11,"open":{"batch":{"first":12,"last":40,"rows":9},"target":{"database":"web","table":"clicks","level":"exactly-once"}}}}}"#
        );
    }

    #[test]
    fn a_newer_layout_is_told_apart_from_a_broken_one() {
        assert_eq!(Record::decode(br#"{"version":2,"new":true}"#), Err(RecordError::Newer(2)));
        assert!(matches!(Record::decode(b""), Err(RecordError::Broken(_))));
        assert!(matches!(Record::decode(br#"{"version":1}"#), Err(RecordError::Broken(_))));
    }

    #[test]
    fn contradictions_are_refused() {
        let text = String::from_utf8(sample().encode().to_vec()).unwrap();
        for (from, to) in [
            (r#""done":11"#, r#""done":12"#),
            (r#""floor":10"#, r#""floor":12"#),
            (r#""rows":9"#, r#""rows":90"#),
            (r#""version":1"#, r#""version":0"#),
        ] {
            assert_ne!(text, text.replace(from, to));
            let decoded = Record::decode(text.replace(from, to).as_bytes());
            assert!(matches!(decoded, Err(RecordError::Broken(_))), "{decoded:?}");
        }
    }

    #[test]
    fn a_reason_has_a_bound() {
        let parked = Parked {
            row: Seq(20),
            cause: Cause::Payload,
            code: None,
            message: "no object".into(),
            attempts: 0,
        };
        let mut record = sample();
        let lane = LaneRecord { done: Seq(17), parked: Some(parked), ..LaneRecord::default() };
        record.lanes.insert(TableName::new("parks"), lane);
        let text = String::from_utf8(record.encode().to_vec()).unwrap();
        for (length, fits) in [(Parked::MAX_MESSAGE, true), (Parked::MAX_MESSAGE + 1, false), (1_000, false)]
        {
            let longer = text.replace("no object", &"x".repeat(length));
            assert_eq!(Record::decode(longer.as_bytes()).is_ok(), fits, "{length}");
        }
    }

    #[test]
    fn going_back_is_noticed() {
        let mut later = sample();
        later.lanes.clear();
        assert!(later.regression_from(&sample()).is_some());
        later.floor = Seq(40);
        assert_eq!(later.regression_from(&sample()), None);
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_record_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = Record::decode(&bytes);
        }

        #[test]
        fn a_damaged_record_is_consistent_or_refused(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut bytes = sample().encode().to_vec();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok(record) = Record::decode(&bytes) {
                prop_assert_eq!(record.defect(), None);
            }
        }
    }
}
