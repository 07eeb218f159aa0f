//! A batch that stands in the record, or is about to.

use std::sync::Arc;
use std::time::Duration;

use crate::ask::Ask;
use crate::batch::Batch;
use crate::ports::store::Target;
use crate::record::OpenBatch;
use crate::row::{Mark, Row, Seq};
use crate::rule::{Rule, safeguard};
use crate::time::Instant;

/// The rows of an open batch.
#[derive(Clone, Debug)]
pub(crate) enum Rows {
    /// Opened by this tenure: all there.
    Whole { rows: Arc<[Row]>, before: Mark },
    /// Opened by an earlier tenure: as they come from the stream again.
    Collecting(Vec<Row>),
}

impl Rows {
    pub(crate) fn as_slice(&self) -> &[Row] {
        match self {
            Self::Whole { rows, .. } => rows,
            Self::Collecting(rows) => rows,
        }
    }
}

/// What happens next to an open batch.
#[derive(Clone, Debug)]
pub(crate) enum Stage {
    /// The write that opens it is not known to be stored.
    Intent,
    /// To be sent when due; under way.
    Send(Ask),
    /// To be read back when due; under way.
    ReadBack(Ask),
    /// Read back; what is missing must come from the stream first.
    Collect,
    /// The token is burned: the write that raises the generation is wanted, or under way.
    Raise,
    /// Needs a person.
    Stopped,
}

/// What the store was asked about a batch, and what is known from it.
#[derive(Clone, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "facts that hold or not, each by itself; the state is `stage`"
)]
pub(crate) struct Open {
    pub(crate) batch: Batch,
    pub(crate) target: Target,
    pub(crate) rows: Rows,
    pub(crate) stage: Stage,
    /// Some of its rows may be in the table without our knowing: an attempt was not answered for certain, or
    /// they stood in a batch of which that is so.
    pub(crate) doubted: bool,
    /// It begins where the table may have rows that the ledger does not know of: also rows that are gone from the
    /// stream since, and so are no batch's. What is found is compared with its own rows, not counted.
    pub(crate) suspect: bool,
    /// From then on no attempt that was not answered for certain can land any more.
    pub(crate) fades_at: Instant,
    /// When the last read-back was asked that was answered.
    pub(crate) looked_at: Instant,
    /// A send under the current token was definitely answered success.
    pub(crate) succeeded: bool,
    /// What a read-back found, or nothing yet.
    pub(crate) found: Option<Vec<Seq>>,
    /// Rows of it are gone from the stream.
    pub(crate) short: bool,
    /// Its intent has aged: the record's answer is waited for, not a time.
    pub(crate) awaits_proof: bool,
    pub(crate) tries: u32,
    /// When its first row was accepted; of an inherited batch, when the tenure began.
    pub(crate) since: Instant,
    pub(crate) first_sent: Option<Instant>,
}

impl Open {
    /// A batch of rows that are all there; its intent is to be written next.
    ///
    /// # Panics
    /// If there are no rows.
    pub(crate) fn whole(
        rows: Arc<[Row]>,
        before: Mark,
        target: Target,
        doubted: bool,
        since: Instant,
    ) -> Self {
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else { panic!("a batch has rows") };
        let batch = Batch {
            first: first.seq,
            last: last.seq,
            rows: u32::try_from(rows.len()).unwrap_or(u32::MAX),
            generation: 0,
        };
        debug_assert_eq!(batch.defect(), None);
        let mut open =
            Self::new(batch, target, Rows::Whole { rows, before }, Stage::Intent, doubted, Instant::START);
        open.since = since;
        open
    }

    /// A batch as an earlier tenure left it. `fades_at`: no attempt of that tenure can land after it.
    pub(crate) fn inherit(open: &OpenBatch, suspect: bool, now: Instant, fades_at: Instant) -> Self {
        let OpenBatch { batch, target } = open.clone();
        let stage = if target.level.can_read_back() && safeguard(Rule::ReadBackInherited) {
            Stage::ReadBack(Ask::at(now))
        } else {
            Stage::Collect
        };
        let mut open = Self::new(batch, target, Rows::Collecting(Vec::new()), stage, true, fades_at);
        open.since = now;
        open.suspect = suspect;
        open
    }

    fn new(batch: Batch, target: Target, rows: Rows, stage: Stage, doubted: bool, fades_at: Instant) -> Self {
        Self {
            batch,
            target,
            rows,
            stage,
            doubted,
            suspect: false,
            fades_at,
            looked_at: Instant::START,
            succeeded: false,
            found: None,
            short: false,
            awaits_proof: false,
            tries: 0,
            since: Instant::START,
            first_sent: None,
        }
    }

    pub(crate) fn is_inherited(&self) -> bool {
        matches!(self.rows, Rows::Collecting(_))
    }

    /// Whether every row is at hand that can be had.
    pub(crate) fn is_collected(&self) -> bool {
        self.short || self.rows.as_slice().len() as u64 >= u64::from(self.batch.rows)
    }

    /// Its rows that no read-back has found.
    pub(crate) fn missing(&self) -> Vec<Row> {
        let found = self.found.as_deref().unwrap_or_default();
        self.rows.as_slice().iter().filter(|row| found.binary_search(&row.seq).is_err()).cloned().collect()
    }

    /// Whether an answer to an attempt that was asked at `asked_at` is the last word: no attempt in doubt could land
    /// since, nor since it was looked whether one had.
    pub(crate) fn is_certain(&self, asked_at: Instant) -> bool {
        let looked = !self.target.level.can_read_back() || self.looked_at >= self.fades_at;
        !self.doubted || (asked_at >= self.fades_at && looked)
    }

    /// Leaves of what a read-back found what is its own.
    pub(crate) fn keep_own(&self, found: &mut Vec<Seq>) {
        let rows = self.rows.as_slice();
        found.retain(|seq| rows.binary_search_by_key(seq, |row| row.seq).is_ok());
    }

    /// The intent is stored: what comes first.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.stage = if self.doubted && self.target.level.can_read_back() && safeguard(Rule::SuspectsReadBack)
        {
            Stage::ReadBack(Ask::at(now))
        } else {
            Stage::Send(Ask::at(now))
        };
    }

    /// Where to cut a batch that the store refuses for its data, and the row that is to stand alone then.
    ///
    /// `hint` is the store's own word, the place among the rows that were sent, counted from 1. Without it the
    /// batch is halved.
    pub(crate) fn cut(&self, sent: &[Row], hint: Option<u32>) -> Cut {
        let rows = self.rows.as_slice();
        let named = hint
            .and_then(|place| sent.get((place as usize).checked_sub(1)?))
            .and_then(|bad| rows.binary_search_by_key(&bad.seq, |row| row.seq).ok());
        match named {
            Some(0) => Cut { left: 1, alone: None, named: true },
            Some(at) => Cut { left: at, alone: Some(rows[at].seq), named: true },
            None => Cut { left: rows.len() / 2, alone: None, named: false },
        }
    }

    /// How long it took from the first attempt.
    pub(crate) fn took(&self, now: Instant) -> Duration {
        self.first_sent.map_or(Duration::ZERO, |sent| now.since(sent))
    }

    /// What contradicts itself, if anything does.
    pub(crate) fn defect(&self) -> Option<String> {
        let rows = self.rows.as_slice();
        if rows.windows(2).any(|pair| pair[0].seq >= pair[1].seq) {
            return Some("the open batch is out of order".to_owned());
        }
        let (first, last) = (rows.first()?, rows.last()?);
        let bounds = (self.batch.first, self.batch.last, self.batch.rows as usize);
        (!self.is_inherited() && (first.seq, last.seq, rows.len()) != bounds)
            .then(|| "the open batch is not its numbers".to_owned())
    }
}

/// Where a batch is cut in two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// So many rows stay in the open batch.
    pub(crate) left: usize,
    /// The first row of the rest, if it is the one that the store names: it goes next, alone.
    pub(crate) alone: Option<Seq>,
    /// Whether the store has named a row at all.
    pub(crate) named: bool,
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::ports::store::Level;
    use crate::row::{Delivery, TableName, Verdict};
    use crate::time::Timestamp;

    fn row(seq: u64) -> Row {
        Row {
            seq: Seq(seq),
            delivery: Delivery(seq),
            redelivered: false,
            stored_at: Timestamp(1),
            table: TableName::new("t"),
            payload: Bytes::new(),
            verdict: Verdict::Good,
        }
    }

    fn open(level: Level) -> Open {
        let target = Target { database: "db".into(), table: "t".into(), level };
        let rows: Vec<Row> = [3, 5, 8].into_iter().map(row).collect();
        Open::whole(rows.into(), Mark::default(), target, false, Instant::START)
    }

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    #[test]
    fn an_answer_is_the_last_word_when_doubts_have_faded_and_it_was_looked_since() {
        let mut batch = open(Level::ExactlyOnce);
        assert!(batch.is_certain(at(1)));
        batch.doubted = true;
        batch.fades_at = at(10);
        batch.looked_at = at(4);
        assert!(!batch.is_certain(at(9)), "the doubted attempt may still land");
        assert!(!batch.is_certain(at(11)), "it may have landed since it was looked");
        batch.looked_at = at(10);
        assert!(batch.is_certain(at(11)));
        let mut blind = open(Level::Deduplicated);
        (blind.doubted, blind.fades_at) = (true, at(10));
        assert!(!blind.is_certain(at(9)) && blind.is_certain(at(10)));
    }

    #[test]
    fn a_named_row_stands_alone_and_without_a_name_a_batch_is_halved() {
        let batch = open(Level::ExactlyOnce);
        let sent = [row(3), row(8)];
        let cut = |hint| batch.cut(&sent, hint);
        assert_eq!(cut(Some(1)), Cut { left: 1, alone: None, named: true });
        assert_eq!(cut(Some(2)), Cut { left: 2, alone: Some(Seq(8)), named: true });
        for nonsense in [None, Some(0), Some(3)] {
            assert_eq!(cut(nonsense), Cut { left: 1, alone: None, named: false });
        }
    }

    #[test]
    fn what_is_open_is_what_its_numbers_say() {
        let sound = open(Level::ExactlyOnce);
        assert_eq!(sound.defect(), None);
        let with = |seqs: &[u64]| {
            let rows: Vec<Row> = seqs.iter().copied().map(row).collect();
            Open { rows: Rows::Whole { rows: rows.into(), before: Mark::default() }, ..sound.clone() }
        };
        for unordered in [[3, 3, 8], [5, 3, 8], [3, 8, 8]] {
            assert_eq!(with(&unordered).defect().as_deref(), Some("the open batch is out of order"));
        }
        for other in [&[4, 5, 8][..], &[3, 5, 7], &[3, 8], &[3, 5, 6, 8]] {
            assert_eq!(with(other).defect().as_deref(), Some("the open batch is not its numbers"));
        }
        // One that is collected is not whole yet.
        let collecting = |seqs: &[u64]| Open {
            rows: Rows::Collecting(seqs.iter().copied().map(row).collect()),
            ..sound.clone()
        };
        assert_eq!(collecting(&[]).defect(), None);
        assert_eq!(collecting(&[5]).defect(), None);
        assert!(collecting(&[5, 3]).defect().is_some());
    }

    #[test]
    fn only_its_own_rows_count_as_found() {
        let mut found = vec![Seq(3), Seq(4), Seq(8)];
        open(Level::ExactlyOnce).keep_own(&mut found);
        assert_eq!(found, vec![Seq(3), Seq(8)]);
    }
}
