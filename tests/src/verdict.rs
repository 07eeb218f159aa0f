//! What is missing, repeated or out of order in a table, by plain SQL.
//!
//! The judge shares no code with Holdfast: it counts what `SELECT` shows. A table of
//! [`rows::create_table`](crate::rows::create_table) was published `n = 0, 1, …, expected - 1` in this order. A
//! row that can never be stored has its place in the dead letters, and nowhere else.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::{Add, AddAssign};

use crate::clickhouse::Sql;
use crate::error::{Error, Result};
use crate::rows::identifier;

/// What was found in one table, or in several together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Rows that should be there.
    pub expected: u64,
    /// Rows that are.
    pub stored: u64,
    /// Rows that are in the dead letters instead.
    pub dead_lettered: u64,
    /// Published, and in neither.
    pub missing: u64,
    /// There once more than it should be, each time counted; also a row that is stored and a dead letter.
    pub repeated: u64,
    /// There, and never published.
    pub unexpected: u64,
    /// Rows that were inserted after a row that they should come before, plus rows whose sequence disagrees
    /// with the order of publishing.
    pub out_of_order: u64,
}

impl Verdict {
    /// Whether every row is there once and in its place.
    #[must_use]
    pub fn ok(&self) -> bool {
        self.missing == 0 && self.repeated == 0 && self.unexpected == 0 && self.out_of_order == 0
    }
}

impl Add for Verdict {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            expected: self.expected + other.expected,
            stored: self.stored + other.stored,
            dead_lettered: self.dead_lettered + other.dead_lettered,
            missing: self.missing + other.missing,
            repeated: self.repeated + other.repeated,
            unexpected: self.unexpected + other.unexpected,
            out_of_order: self.out_of_order + other.out_of_order,
        }
    }
}

impl AddAssign for Verdict {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl std::iter::Sum for Verdict {
    fn sum<I: Iterator<Item = Self>>(verdicts: I) -> Self {
        verdicts.fold(Self::default(), Add::add)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} of {} rows stored, {} dead letters, {} missing, {} repeated, {} unexpected, {} out of order",
            if self.ok() { "ok" } else { "WRONG" },
            self.stored,
            self.expected,
            self.dead_lettered,
            self.missing,
            self.repeated,
            self.unexpected,
            self.out_of_order
        )
    }
}

/// Judges a table that `expected` rows were published to, none of which is a dead letter.
///
/// # Errors
/// When ClickHouse refuses a query or does not answer.
pub fn judge(sql: &Sql, table: &str, expected: u64) -> Result<Verdict> {
    judge_with(sql, table, expected, &[])
}

/// [`judge`], with the counters of the dead letters.
///
/// # Errors
/// When ClickHouse refuses a query or does not answer.
pub fn judge_with(sql: &Sql, table: &str, expected: u64, dead: &[u64]) -> Result<Verdict> {
    let table = identifier(table);
    let letters: BTreeSet<u64> = dead.iter().copied().collect();
    let strays = letters.range(expected..).count() as u64;
    let list: Vec<_> = letters.iter().map(u64::to_string).collect();
    let list = format!("CAST([{}], 'Array(UInt64)')", list.join(","));
    let [stored, distinct, wanted, both, wanted_both] = numbers(
        sql,
        &format!(
            "SELECT count(), uniqExact(n), uniqExactIf(n, n < {expected}), uniqExactIf(n, has({list}, n)), \
             uniqExactIf(n, n < {expected} AND has({list}, n)) FROM {table} FORMAT TabSeparated"
        ),
    )?;
    let parked = letters.len() as u64 - strays - wanted_both;
    // In the order of insertion, which the block columns keep, the stream's sequence must rise. Every partition
    // counts its blocks by itself.
    let [inserted_late] = numbers(
        sql,
        &format!(
            "SELECT countIf(place > 1 AND (_stream, _seq) <= (stream_before, seq_before)) FROM (\
               SELECT _stream, _seq, row_number() OVER w AS place, \
                 lagInFrame(_stream) OVER w AS stream_before, lagInFrame(_seq) OVER w AS seq_before \
               FROM {table} \
               WINDOW w AS (PARTITION BY _partition_id ORDER BY _block_number, _block_offset \
                            ROWS BETWEEN 1 PRECEDING AND CURRENT ROW)) FORMAT TabSeparated"
        ),
    )?;
    // In the order of the sequence the counter must rise. A row twice is repeated, not out of order.
    let [numbered_wrong] = numbers(
        sql,
        &format!(
            "SELECT countIf(n < n_before) FROM (\
               SELECT n, lagInFrame(n) OVER (ORDER BY _stream, _seq, n \
                                             ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) AS n_before \
               FROM {table}) FORMAT TabSeparated"
        ),
    )?;
    Ok(Verdict {
        expected,
        stored,
        dead_lettered: dead.len() as u64,
        missing: expected - wanted - parked,
        repeated: stored - distinct + (dead.len() - letters.len()) as u64 + both,
        unexpected: distinct - wanted + strays,
        out_of_order: inserted_late + numbered_wrong,
    })
}

fn numbers<const N: usize>(sql: &Sql, query: &str) -> Result<[u64; N]> {
    let answer = sql.query(query)?;
    let numbers: Option<Vec<u64>> = answer.split('\t').map(|word| word.trim().parse().ok()).collect();
    numbers
        .and_then(|numbers| numbers.try_into().ok())
        .ok_or(Error::Answer { what: "a verdict's query", answer })
}
