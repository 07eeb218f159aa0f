//! Which row of a refused batch is the bad one, where ClickHouse does not say?
//!
//! A parser names the row. An expression of the table (a column's default, a key, an index) does not, nor does a
//! missing value that is taken for NULL. Then the rows are sent along with a question that reads them as an insert
//! would, and reckons the table's expressions over them: an external table of a `SELECT`, which writes nothing and
//! needs no grant of its own. Halving finds the first row that makes it fail, in about as many bytes as the batch
//! has. What is found is a hint.

use std::fmt::Write as _;
use std::ops::Range;

use crate::describe::Column;
use crate::identifier::{IdentifierError, quote};

/// The external table's name.
const ROWS: &str = "holdfast_rows";

/// The question, and the parameters that go with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) sql: String,
    pub(crate) parameters: [(String, String); 2],
}

impl Question {
    /// Reads rows as a table with `columns` would, and reckons what it reckons for each. All expressions are the
    /// server's own words about its table, which it would follow for an insert just so.
    pub(crate) fn new(columns: &[Column], expressions: &[String]) -> Result<Self, IdentifierError> {
        let (mut structure, mut with, mut reckoned) = (String::new(), String::new(), Vec::new());
        for column in columns {
            let name = quote(&column.name)?;
            if column.takes_values() {
                let _ = write!(structure, "{}{name} {}", comma(&structure), column.data_type);
            }
            let value = format!("CAST(({}) AS {})", column.expression, column.data_type);
            match column.kind.as_str() {
                _ if column.expression.is_empty() => {}
                "DEFAULT" => reckoned.push(value),
                // Other expressions may be built on these.
                "MATERIALIZED" | "ALIAS" => {
                    let _ = write!(with, "{}{value} AS {name}", comma(&with));
                    if column.kind == "MATERIALIZED" {
                        reckoned.push(name);
                    }
                }
                _ => {}
            }
        }
        reckoned
            .extend(expressions.iter().filter(|own| !own.trim().is_empty()).map(|own| format!("({own})")));
        let with = if with.is_empty() { with } else { format!("WITH {with} ") };
        let what = if reckoned.is_empty() {
            "count()".to_owned()
        } else {
            format!("sum(ignore({}))", reckoned.join(", "))
        };
        Ok(Self {
            sql: format!("{with}SELECT {what} FROM {ROWS} FORMAT Null"),
            parameters: [
                (format!("{ROWS}_structure"), structure),
                (format!("{ROWS}_format"), "JSONEachRow".to_owned()),
            ],
        })
    }
}

const fn comma(list: &str) -> &'static str {
    if list.is_empty() { "" } else { ", " }
}

/// What stands before and behind the rows in a form.
pub(crate) fn form(boundary: &str) -> (String, String) {
    (
        format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"{ROWS}\"; filename=\"{ROWS}\"\r\n\r\n"
        ),
        format!("\r\n--{boundary}--\r\n"),
    )
}

/// A search for the first bad row of several, by halving.
#[derive(Debug)]
pub(crate) struct Search {
    rows: usize,
    from: usize,
    to: usize,
    /// A question about the very row that is left has been answered.
    ended: bool,
}

impl Search {
    /// Of `rows` rows one is bad, or so it is said.
    pub(crate) const fn new(rows: usize) -> Self {
        Self { rows, from: 0, to: rows, ended: rows == 0 }
    }

    /// The rows to be asked about next, or none if the search has ended.
    pub(crate) const fn next(&self) -> Option<Range<usize>> {
        match self.to - self.from {
            // Only what is left: no question has failed yet.
            1 if !self.ended && self.to == self.rows => Some(self.from..self.to),
            0 | 1 => None,
            len => Some(self.from..self.from + len / 2),
        }
    }

    /// Whether there is a bad row among those that were to be asked about.
    pub(crate) const fn tell(&mut self, bad: bool) {
        let Some(Range { end, .. }) = self.next() else { return };
        self.ended = end - self.from == 1 && end == self.rows;
        if bad {
            self.to = end;
        } else {
            self.from = end;
        }
    }

    /// The place of the first bad row, counted from 0, once the search has ended; none if there is none.
    pub(crate) fn found(&self) -> Option<usize> {
        (self.to - self.from == 1 && self.next().is_none()).then_some(self.from)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn column(name: &str, data_type: &str, kind: &str, expression: &str) -> Column {
        Column {
            name: name.into(),
            data_type: data_type.into(),
            kind: kind.into(),
            expression: expression.into(),
            ttl: String::new(),
        }
    }

    #[test]
    fn a_question_reckons_what_an_insert_does() {
        let columns = [
            column("s", "String", "", ""),
            column("a`b", "UInt8", "DEFAULT", "toUInt8(s)"),
            column("m", "UInt16", "MATERIALIZED", "`a\\`b` + 1"),
            column("x", "UInt16", "ALIAS", "m + 1"),
            column("e", "String", "EPHEMERAL", ""),
        ];
        let question = Question::new(&columns, &["m % 3".to_owned(), String::new()]).unwrap();
        assert_eq!(
            question.sql,
            "WITH CAST((`a\\`b` + 1) AS UInt16) AS `m`, CAST((m + 1) AS UInt16) AS `x` \
             SELECT sum(ignore(CAST((toUInt8(s)) AS UInt8), `m`, (m % 3))) FROM holdfast_rows FORMAT Null"
        );
        assert_eq!(question.parameters[0].1, "`s` String, `a\\`b` UInt8, `e` String");
        let plain = Question::new(&columns[..1], &[]).unwrap();
        assert_eq!(plain.sql, "SELECT count() FROM holdfast_rows FORMAT Null");
    }

    fn search(rows: usize, bad: &[usize]) -> (Option<usize>, usize, usize) {
        let (mut asked, mut sent) = (0, 0);
        let mut search = Search::new(rows);
        while let Some(range) = search.next() {
            assert_eq!(search.found(), None);
            asked += 1;
            sent += range.len();
            search.tell(bad.iter().any(|bad| range.contains(bad)));
        }
        (search.found(), asked, sent)
    }

    #[test]
    fn a_search_ends() {
        assert_eq!(search(0, &[]), (None, 0, 0));
        assert_eq!(search(1, &[0]), (Some(0), 1, 1));
        assert_eq!(search(1, &[]), (None, 1, 1));
        assert_eq!(search(2, &[1]).0, Some(1));
        assert_eq!(search(50_000, &[]).0, None);
    }

    proptest! {
        #[test]
        fn the_first_bad_row_is_found(rows in 1_usize..100_000, bad in proptest::collection::vec(any::<prop::sample::Index>(), 1..4)) {
            let mut bad: Vec<usize> = bad.into_iter().map(|bad| bad.index(rows)).collect();
            bad.sort_unstable();
            let (found, asked, sent) = search(rows, &bad);
            prop_assert_eq!(found, Some(bad[0]));
            prop_assert!(asked <= 18 && sent <= rows + 1, "{} questions, {} rows", asked, sent);
        }
    }
}
