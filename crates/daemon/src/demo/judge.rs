//! What arrived, compared with what was published. The judge knows two things of a table: how many rows were published
//! to it, numbered in their order, and what its rows are in the order in which they were written.

use std::iter::Sum;

use serde::Serialize;

/// What was found in the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Verdict {
    /// Rows that were published.
    pub(super) published: u64,
    /// Rows that are in the tables.
    pub(super) stored: u64,
    /// Published, and in no table.
    pub(super) missing: u64,
    /// There once more than it should be, each time counted.
    pub(super) repeated: u64,
    /// There, and never published.
    pub(super) unexpected: u64,
    /// Written for the first time after a row that was published later.
    pub(super) out_of_order: u64,
}

impl Verdict {
    /// Whether every row is there once and in its place.
    #[must_use]
    pub(super) const fn is_clean(&self) -> bool {
        self.missing == 0 && self.repeated == 0 && self.unexpected == 0 && self.out_of_order == 0
    }
}

impl Sum for Verdict {
    fn sum<I: Iterator<Item = Self>>(verdicts: I) -> Self {
        verdicts.fold(Self::default(), |a, b| Self {
            published: a.published + b.published,
            stored: a.stored + b.stored,
            missing: a.missing + b.missing,
            repeated: a.repeated + b.repeated,
            unexpected: a.unexpected + b.unexpected,
            out_of_order: a.out_of_order + b.out_of_order,
        })
    }
}

/// Judges a table that the rows 0, 1, … up to `published` were published to in this order, and that has these rows,
/// in the order in which they were written.
#[must_use]
pub(super) fn judge(published: u64, rows: &[u64]) -> Verdict {
    let mut verdict = Verdict { published, stored: rows.len() as u64, ..Verdict::default() };
    let mut there = vec![false; usize::try_from(published).unwrap_or(usize::MAX)];
    let mut highest = None;
    for row in rows {
        match usize::try_from(*row).ok().and_then(|at| there.get_mut(at)) {
            None => verdict.unexpected += 1,
            Some(true) => verdict.repeated += 1,
            Some(first) => {
                *first = true;
                verdict.out_of_order += u64::from(highest.is_some_and(|highest| *row < highest));
                highest = highest.max(Some(*row));
            }
        }
    }
    verdict.missing = there.iter().filter(|there| !**there).count() as u64;
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_right_is_clean() {
        let verdict = judge(4, &[0, 1, 2, 3]);
        assert_eq!(verdict, Verdict { published: 4, stored: 4, ..Verdict::default() });
        assert!(verdict.is_clean());
        assert!(judge(0, &[]).is_clean());
    }

    #[test]
    fn every_kind_of_wrong_is_found() {
        let clean = Verdict { published: 4, ..Verdict::default() };
        for (rows, wrong) in [
            (vec![0, 1, 3], Verdict { stored: 3, missing: 1, ..clean }),
            (vec![], Verdict { missing: 4, ..clean }),
            (vec![0, 1, 1, 2, 3], Verdict { stored: 5, repeated: 1, ..clean }),
            // A repeat that comes late is no disorder: the row was there in time.
            (vec![0, 1, 2, 3, 0], Verdict { stored: 5, repeated: 1, ..clean }),
            (vec![0, 2, 1, 3], Verdict { stored: 4, out_of_order: 1, ..clean }),
            (vec![3, 0, 1, 2], Verdict { stored: 4, out_of_order: 3, ..clean }),
            (vec![0, 1, 2, 3, u64::MAX], Verdict { stored: 5, unexpected: 1, ..clean }),
            (vec![0, 3, 3, 1], Verdict { stored: 4, missing: 1, repeated: 1, out_of_order: 1, ..clean }),
        ] {
            assert_eq!(judge(4, &rows), wrong, "{rows:?}");
            assert!(!judge(4, &rows).is_clean());
        }
    }

    #[test]
    fn tables_are_judged_together() {
        let all: Verdict = [judge(2, &[0, 1]), judge(2, &[1, 0])].into_iter().sum();
        assert_eq!((all.published, all.stored, all.out_of_order), (4, 4, 1));
    }
}
