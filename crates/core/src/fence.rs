//! The first act under a new pin: what record to fence with, or why not to start at all.

use std::collections::BTreeMap;

use crate::notice::ShardFailure;
use crate::ports::delivery::Inspection;
use crate::ports::ledger::{Entry, Revision};
use crate::record::{Record, Writer};
use crate::row::{Mark, Seq};
use crate::rule::{Rule, safeguard};
use crate::time::Timestamp;

/// Where a shard begins whose ledger has no record although the stream has rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// With the first row that is there.
    First,
    /// With the first row that comes from now on.
    New,
    /// With this row.
    Seq(Seq),
}

/// A stored record as it was read.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    pub(crate) revision: Revision,
    pub(crate) record: Option<Record>,
}

impl Loaded {
    /// Reads what the ledger gave. An empty record is one that was deleted: there is none, but its revision
    /// counts.
    pub(crate) fn new(entry: Option<Entry>) -> Result<Self, ShardFailure> {
        let Some(Entry { revision, record }) = entry else {
            return Ok(Self { revision: Revision(0), record: None });
        };
        let record = if record.is_empty() { None } else { Some(Record::decode(&record)?) };
        Ok(Self { revision, record })
    }

    /// Every row up to here is done.
    pub(crate) fn floor(&self) -> Seq {
        self.record.as_ref().map_or(Seq::ZERO, |record| record.floor)
    }

    /// The highest row that it names, to be looked up in the stream.
    pub(crate) fn high(&self) -> Mark {
        self.record.as_ref().map(|record| record.high).unwrap_or_default()
    }
}

/// The record that a new tenure fences with.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) record: Record,
    /// The stored record was of another stream of this name.
    pub(crate) made_anew: bool,
}

/// Plans the fence of the tenure `writer` over what is stored, given a look at the stream that asked about
/// the highest row of the stored record.
pub(crate) fn plan(
    loaded: &Loaded,
    seen: &Inspection,
    writer: Writer,
    start: Option<Start>,
) -> Result<Plan, ShardFailure> {
    let Some(stored) = &loaded.record else {
        return Ok(Plan { record: fresh(seen, writer, 1, 0, first_floor(seen, start)?), made_anew: false });
    };
    let epoch = stored.epoch + 1;
    if stored.stream_created != seen.created && safeguard(Rule::StreamIdentity) {
        return Ok(Plan { record: fresh(seen, writer, epoch, 0, Mark::default()), made_anew: true });
    }
    if let Some(reuse) = reuse(seen, stored.high) {
        return Err(ShardFailure::SequencesReused(reuse));
    }
    // An older one is carried on in this code's layout.
    let record = Record { version: Record::VERSION, epoch, writer, ..stored.clone() };
    Ok(Plan { record, made_anew: false })
}

/// A record that says no more than its floor.
fn fresh(seen: &Inspection, writer: Writer, epoch: u64, rebased: u32, floor: Mark) -> Record {
    Record {
        version: Record::VERSION,
        stream_created: seen.created,
        epoch,
        writer,
        rebased,
        floor: floor.seq,
        high: floor,
        lanes: BTreeMap::new(),
    }
}

/// The record that an idle shard is to have, if the stored one lags behind: `seen` shows that nobody is
/// pinned, no row waits for delivery and every row that there ever was is done.
///
/// Without it a shard that never gets a row would never have a record, or hold its floor for ever and with
/// it the trimming of the whole stream. Like every first write of a writer it raises the epoch: should
/// somebody own the shard after all, their tenure ends, and no more than that.
pub(crate) fn catch_up(
    loaded: &Loaded,
    seen: &Inspection,
    writer: Writer,
    start: Option<Start>,
) -> Result<Option<Record>, ShardFailure> {
    let Some(stored) = &loaded.record else {
        return plan(loaded, seen, writer, start).map(|plan| Some(plan.record));
    };
    let epoch = stored.epoch + 1;
    let same = stored.stream_created == seen.created;
    if same {
        if let Some(reuse) = reuse(seen, stored.high) {
            return Err(ShardFailure::SequencesReused(reuse));
        }
        if seen.last.seq <= stored.floor {
            return Ok(None);
        }
    }
    let rebased = if same { stored.rebased } else { 0 };
    Ok(Some(fresh(seen, writer, epoch, rebased, seen.last)))
}

fn first_floor(seen: &Inspection, start: Option<Start>) -> Result<Mark, ShardFailure> {
    let below = |seq: Seq| Mark { seq: Seq(seq.0.saturating_sub(1)), stored_at: Timestamp(0) };
    match start {
        // A stream without rows leaves nothing to guess.
        _ if seen.messages == 0 => Ok(seen.last),
        None => Err(ShardFailure::StartNeeded),
        Some(Start::First) => Ok(below(seen.first)),
        Some(Start::New) => Ok(seen.last),
        // Past the end the consumer would skip rows in silence until it got there.
        Some(Start::Seq(seq)) => Ok(below(seq.min(seen.last.seq.next()))),
    }
}

/// What shows that the stream uses sequences again up to `asked`, the row that the look asked about, if
/// anything does.
pub(crate) fn reuse(seen: &Inspection, asked: Mark) -> Option<String> {
    if !safeguard(Rule::ReuseStopsShard) {
        return None;
    }
    if seen.last.seq < asked.seq {
        return Some(format!("its last row is {}, and row {} was there", seen.last.seq, asked.seq));
    }
    let known = asked.stored_at != Timestamp(0);
    match seen.row_stored_at {
        Some(now) if known && now != asked.stored_at => {
            Some(format!("row {} is another one than it was", asked.seq))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Session;

    const WRITER: Writer = Writer { session: Session(9), nonce: 1 };

    fn seen() -> Inspection {
        Inspection {
            created: Timestamp(5),
            messages: 100,
            first: Seq(11),
            last: Mark { seq: Seq(110), stored_at: Timestamp(900) },
            next: None,
            shard_last: Some(Seq(108)),
            row_stored_at: Some(Timestamp(700)),
            delivered: 0,
            pending: 0,
            pinned: None,
            unfit: None,
        }
    }

    fn stored() -> Record {
        Record {
            version: Record::VERSION,
            stream_created: Timestamp(5),
            epoch: 4,
            writer: Writer { session: Session(1), nonce: 1 },
            rebased: 0,
            floor: Seq(60),
            high: Mark { seq: Seq(60), stored_at: Timestamp(700) },
            lanes: BTreeMap::new(),
        }
    }

    fn planned(
        record: Option<Record>,
        seen: &Inspection,
        start: Option<Start>,
    ) -> Result<Record, ShardFailure> {
        plan(&Loaded { revision: Revision(3), record }, seen, WRITER, start).map(|plan| plan.record)
    }

    #[test]
    fn a_stored_record_is_carried_on_in_the_next_epoch() {
        let record = planned(Some(Record { version: 0, ..stored() }), &seen(), None).unwrap();
        assert_eq!(record.version, Record::VERSION, "also of an older layout");
        assert_eq!((record.epoch, record.writer, record.floor), (5, WRITER, Seq(60)));
    }

    #[test]
    fn nobody_guesses_where_to_start() {
        assert_eq!(planned(None, &seen(), None), Err(ShardFailure::StartNeeded));
        assert_eq!(planned(None, &seen(), Some(Start::First)).unwrap().floor, Seq(10));
        assert_eq!(planned(None, &seen(), Some(Start::New)).unwrap().floor, Seq(110));
        assert_eq!(planned(None, &seen(), Some(Start::Seq(Seq(50)))).unwrap().floor, Seq(49));
        assert_eq!(planned(None, &seen(), Some(Start::Seq(Seq(5_000)))).unwrap().floor, Seq(110));
        let empty = Inspection { messages: 0, ..seen() };
        assert_eq!(planned(None, &empty, None).unwrap().floor, Seq(110));
    }

    #[test]
    fn a_stream_made_anew_starts_afresh() {
        let anew = Inspection { created: Timestamp(6), ..seen() };
        let record = planned(Some(stored()), &anew, None).unwrap();
        assert_eq!((record.epoch, record.floor, record.stream_created), (5, Seq(0), Timestamp(6)));
    }

    #[test]
    fn sequences_used_again_stop_the_shard() {
        let lost_tail = Inspection { last: Mark { seq: Seq(59), stored_at: Timestamp(600) }, ..seen() };
        assert!(matches!(planned(Some(stored()), &lost_tail, None), Err(ShardFailure::SequencesReused(_))));
        let other_row = Inspection { row_stored_at: Some(Timestamp(701)), ..seen() };
        assert!(matches!(planned(Some(stored()), &other_row, None), Err(ShardFailure::SequencesReused(_))));
        let trimmed = Inspection { row_stored_at: None, ..seen() };
        assert!(planned(Some(stored()), &trimmed, None).is_ok());
    }
}
