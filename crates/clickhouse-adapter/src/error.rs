//! What ClickHouse's answers mean.
//!
//! An insert that was not answered with success was either certainly not carried out, and may simply be tried
//! again, or it is in doubt, and must be read back first. [`CODES`] is the one place where that is decided. A code
//! that is not in it is in doubt: a read-back costs little, a wrong "certainly not" costs a row.
//!
//! Only ClickHouse itself can say that it refuses: what a proxy or another server answers proves nothing, whatever
//! it says ([`classify_status`]).

use std::error::Error as StdError;
use std::fmt::Write as _;

use clickhouse::error::Error;
use holdfast_core::ports::store::{InsertOutcome, Refusal};

pub use holdfast_core::ports::store::Class;

/// The longest message that is kept of an answer, in bytes. ClickHouse quotes rows in its messages.
pub const MAX_MESSAGE: usize = 500;

/// What a code proves about an insert of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// It can only come before the first part is written.
    Nothing,
    /// It can come after a part was written: a block goes to its partitions one after another.
    Perhaps,
}

/// A line of [`CODES`].
#[derive(Clone, Copy, Debug)]
pub struct Code {
    /// ClickHouse's number.
    pub code: u32,
    /// ClickHouse's name for it.
    pub name: &'static str,
    /// What kind of trouble it is.
    pub class: Class,
    /// What it proves.
    pub written: Written,
    /// Why.
    pub reason: &'static str,
}

const fn line(code: u32, name: &'static str, class: Class, written: Written, reason: &'static str) -> Code {
    Code { code, name, class, written, reason }
}

/// The codes that are known, rising.
///
/// A body is parsed to its end before the first part is written, because a batch is one
/// block. So what comes from parsing, from looking up the table and its columns, or from letting the
/// query in at all proves that nothing was written. What comes from the writing itself proves nothing: in a
/// table with partitions an earlier one may be stored already.
pub const CODES: &[Code] = {
    use Class::{Access, Data, Doubt, Passing, Table};
    use Written::{Nothing, Perhaps};
    &[
        line(6, "CANNOT_PARSE_TEXT", Data, Nothing, "a value does not parse"),
        line(10, "NOT_FOUND_COLUMN_IN_BLOCK", Table, Perhaps, "the table was altered while the insert ran"),
        line(
            16,
            "NO_SUCH_COLUMN_IN_TABLE",
            Table,
            Nothing,
            "a named column is gone; seen before reading the body",
        ),
        line(20, "NUMBER_OF_COLUMNS_DOESNT_MATCH", Table, Nothing, "seen before reading the body"),
        line(25, "CANNOT_PARSE_ESCAPE_SEQUENCE", Data, Nothing, "a value does not parse"),
        line(26, "CANNOT_PARSE_QUOTED_STRING", Data, Nothing, "a value does not parse"),
        line(
            27,
            "CANNOT_PARSE_INPUT_ASSERTION_FAILED",
            Data,
            Nothing,
            "a value, or a setting's, does not parse",
        ),
        line(32, "ATTEMPT_TO_READ_AFTER_EOF", Data, Nothing, "a value ends too soon"),
        line(
            33,
            "CANNOT_READ_ALL_DATA",
            Passing,
            Nothing,
            "the body was cut on its way, and a cut body is not stored",
        ),
        line(36, "BAD_ARGUMENTS", Table, Perhaps, "raised in many places, an index's expression among them"),
        line(38, "CANNOT_PARSE_DATE", Data, Nothing, "a value does not parse"),
        line(
            40,
            "CHECKSUM_DOESNT_MATCH",
            Passing,
            Nothing,
            "the body was damaged on its way; it is checked before it is parsed",
        ),
        line(41, "CANNOT_PARSE_DATETIME", Data, Nothing, "a value does not parse"),
        line(44, "ILLEGAL_COLUMN", Table, Perhaps, "raised by expressions too"),
        line(
            46,
            "UNKNOWN_FUNCTION",
            Table,
            Nothing,
            "an expression of the table calls a function that is gone",
        ),
        line(
            47,
            "UNKNOWN_IDENTIFIER",
            Table,
            Nothing,
            "an expression of the table names a column that is gone",
        ),
        line(
            48,
            "NOT_IMPLEMENTED",
            Table,
            Nothing,
            "the engine takes no inserts; seen before reading the body",
        ),
        line(49, "LOGICAL_ERROR", Doubt, Perhaps, "a fault of the server, wherever it was"),
        line(53, "TYPE_MISMATCH", Data, Nothing, "a value is of another type"),
        line(60, "UNKNOWN_TABLE", Table, Nothing, "no such table; seen before reading the body"),
        line(62, "SYNTAX_ERROR", Table, Nothing, "the query was not understood"),
        line(69, "ARGUMENT_OUT_OF_BOUND", Data, Nothing, "a value is out of range"),
        line(70, "CANNOT_CONVERT_TYPE", Data, Nothing, "a value cannot be converted"),
        line(72, "CANNOT_PARSE_NUMBER", Data, Nothing, "a value does not parse"),
        line(73, "UNKNOWN_FORMAT", Table, Nothing, "the query was not understood"),
        line(81, "UNKNOWN_DATABASE", Table, Nothing, "no such database; seen before reading the body"),
        line(115, "UNKNOWN_SETTING", Table, Nothing, "a setting is not known; seen before the query"),
        line(117, "INCORRECT_DATA", Data, Nothing, "an unknown field, or a value does not parse"),
        line(128, "TOO_LARGE_ARRAY_SIZE", Data, Nothing, "a value is too large"),
        line(130, "CANNOT_READ_ARRAY_FROM_TEXT", Data, Nothing, "a value is no array"),
        line(131, "TOO_LARGE_STRING_SIZE", Data, Nothing, "a value is too large"),
        line(
            153,
            "ILLEGAL_DIVISION",
            Data,
            Nothing,
            "an expression of the table divides by a value that is zero",
        ),
        line(159, "TIMEOUT_EXCEEDED", Passing, Perhaps, "the time ran out, wherever the insert was"),
        line(160, "TOO_SLOW", Passing, Perhaps, "broken off for its speed, wherever the insert was"),
        line(
            164,
            "READONLY",
            Access,
            Nothing,
            "the user may not write, or not change a setting; seen before the query",
        ),
        line(173, "CANNOT_ALLOCATE_MEMORY", Passing, Perhaps, "wherever the insert was"),
        line(
            190,
            "SIZES_OF_ARRAYS_DONT_MATCH",
            Data,
            Nothing,
            "arrays of one nested column differ in length",
        ),
        line(191, "SET_SIZE_LIMIT_EXCEEDED", Passing, Perhaps, "raised by expressions"),
        line(192, "UNKNOWN_USER", Access, Nothing, "not let in"),
        line(193, "WRONG_PASSWORD", Access, Nothing, "not let in"),
        line(194, "REQUIRED_PASSWORD", Access, Nothing, "not let in"),
        line(195, "IP_ADDRESS_NOT_ALLOWED", Access, Nothing, "not let in"),
        line(201, "QUOTA_EXCEEDED", Passing, Perhaps, "counted while the insert runs as well"),
        line(202, "TOO_MANY_SIMULTANEOUS_QUERIES", Passing, Nothing, "not let in"),
        line(
            203,
            "NO_FREE_CONNECTION",
            Passing,
            Perhaps,
            "on the way to another server, after some of the work",
        ),
        line(
            209,
            "SOCKET_TIMEOUT",
            Passing,
            Perhaps,
            "a body that stalled, or an answer that could not be sent",
        ),
        line(210, "NETWORK_ERROR", Passing, Perhaps, "an answer that could not be sent is one too"),
        line(216, "QUERY_WITH_SAME_ID_IS_ALREADY_RUNNING", Passing, Nothing, "not let in"),
        line(218, "TABLE_IS_DROPPED", Table, Perhaps, "dropped while the insert ran"),
        line(225, "NO_ZOOKEEPER", Passing, Perhaps, "the coordination was lost, maybe between two parts"),
        line(
            236,
            "ABORTED",
            Passing,
            Perhaps,
            "the table was dropped or the server shut down under the insert",
        ),
        line(241, "MEMORY_LIMIT_EXCEEDED", Passing, Perhaps, "wherever the insert was"),
        line(
            242,
            "TABLE_IS_READ_ONLY",
            Passing,
            Perhaps,
            "a replica that lost its coordination, maybe between two parts",
        ),
        line(243, "NOT_ENOUGH_SPACE", Passing, Perhaps, "reserved a part at a time"),
        // Both of its meanings are checked before a block is written. A view's table is checked later, and says so.
        line(252, "TOO_MANY_PARTS", Passing, Nothing, "checked before a block is written"),
        line(254, "NO_ACTIVE_REPLICAS", Passing, Perhaps, "on the way to another server"),
        line(
            271,
            "CANNOT_DECOMPRESS",
            Passing,
            Nothing,
            "the body was damaged on its way, and nothing of it parsed",
        ),
        line(279, "ALL_CONNECTION_TRIES_FAILED", Passing, Perhaps, "on the way to another server"),
        line(
            285,
            "TOO_FEW_LIVE_REPLICAS",
            Passing,
            Perhaps,
            "a quorum is not there, maybe between two parts",
        ),
        line(286, "UNSATISFIED_QUORUM_FOR_PREVIOUS_WRITE", Passing, Perhaps, "maybe between two parts"),
        line(291, "DATABASE_ACCESS_DENIED", Access, Nothing, "seen before the query"),
        line(306, "TOO_DEEP_RECURSION", Data, Nothing, "a value is nested too deep"),
        line(319, "UNKNOWN_STATUS_OF_INSERT", Doubt, Perhaps, "it says so itself"),
        line(321, "VALUE_IS_OUT_OF_RANGE_OF_DATA_TYPE", Data, Nothing, "a value is out of range"),
        line(349, "CANNOT_INSERT_NULL_IN_ORDINARY_COLUMN", Data, Nothing, "a null where there is none"),
        line(354, "ZLIB_INFLATE_FAILED", Table, Nothing, "the body cannot be unpacked"),
        line(376, "CANNOT_PARSE_UUID", Data, Nothing, "a value does not parse"),
        line(394, "QUERY_WAS_CANCELLED", Passing, Perhaps, "killed, wherever the insert was"),
        line(
            395,
            "FUNCTION_THROW_IF_VALUE_IS_NON_ZERO",
            Doubt,
            Perhaps,
            "thrown by a view after its source was written",
        ),
        line(407, "DECIMAL_OVERFLOW", Data, Nothing, "a value is out of range"),
        line(432, "UNKNOWN_CODEC", Table, Nothing, "the body cannot be unpacked"),
        line(439, "CANNOT_SCHEDULE_TASK", Passing, Perhaps, "no thread, wherever the insert was"),
        line(441, "CANNOT_PARSE_DOMAIN_VALUE_FROM_STRING", Data, Nothing, "a value does not parse"),
        line(
            452,
            "SETTING_CONSTRAINT_VIOLATION",
            Access,
            Nothing,
            "the profile forbids a setting; seen before the query",
        ),
        line(467, "CANNOT_PARSE_BOOL", Data, Nothing, "a value does not parse"),
        line(469, "VIOLATED_CONSTRAINT", Data, Nothing, "checked on the block before it is written"),
        line(473, "DEADLOCK_AVOIDED", Passing, Perhaps, "a lock that another query held for too long"),
        line(497, "ACCESS_DENIED", Access, Nothing, "a grant is missing; seen before reading the body"),
        line(499, "S3_ERROR", Passing, Perhaps, "the object store, at some part"),
        line(516, "AUTHENTICATION_FAILED", Access, Nothing, "not let in"),
        line(659, "UNKNOWN_STATUS_OF_TRANSACTION", Doubt, Perhaps, "it says so itself"),
        line(675, "CANNOT_PARSE_IPV4", Data, Nothing, "a value does not parse"),
        line(676, "CANNOT_PARSE_IPV6", Data, Nothing, "a value does not parse"),
        line(691, "UNKNOWN_ELEMENT_OF_ENUM", Data, Nothing, "a value the enum does not have"),
        line(692, "TOO_MANY_MUTATIONS", Passing, Perhaps, "checked beside the parts"),
        line(
            722,
            "ASYNC_LOAD_WAIT_FAILED",
            Passing,
            Nothing,
            "the table is being loaded; seen before the query",
        ),
        line(733, "TABLE_IS_BEING_RESTARTED", Passing, Nothing, "seen before reading the body"),
        line(745, "SERVER_OVERLOADED", Passing, Perhaps, "asked while the insert runs as well"),
        line(774, "TABLE_IS_PERMANENTLY_READ_ONLY", Table, Nothing, "seen before reading the body"),
        line(999, "KEEPER_EXCEPTION", Passing, Perhaps, "the coordination failed, maybe between two parts"),
        line(1000, "POCO_EXCEPTION", Doubt, Perhaps, "a fault below the server, wherever it was"),
        line(
            1001,
            "STD_EXCEPTION",
            Doubt,
            Perhaps,
            "a file that could not be renamed: seen after the token was recorded",
        ),
        line(1002, "UNKNOWN_EXCEPTION", Doubt, Perhaps, "a fault, wherever it was"),
    ]
};

/// In the message of an error that a materialized view raised: the rows of its source may be written already.
const IN_VIEW: &str = "while pushing to view";

/// In the message of an error that an expression of the table raised. A column's default is reckoned before
/// anything is written, an index's while its part is written: of two parts, one may be stored.
///
/// Row data quoted in a message could hold these words; that only turns a certainty into a doubt.
const IN_EXPRESSION: &str = "while executing 'FUNCTION";

/// Codes with which ClickHouse refuses the value of a setting as well as a value in a row.
const ALSO_OF_SETTINGS: &[u32] = &[6, 27, 72, 467];

/// One of these is in the message of every error that comes from a row.
const FROM_ROWS: &[&str] = &["While executing ", "while executing ", "(at row "];

fn lookup(code: u32) -> Option<&'static Code> {
    CODES.binary_search_by_key(&code, |line| line.code).ok().map(|at| &CODES[at])
}

/// What kind of trouble ClickHouse's `code` with its whole `message` tells of.
#[must_use]
pub fn classify(code: u32, message: &str) -> Class {
    match lookup(code) {
        None => Class::Unknown,
        // One number for two things: the batch spans too many partitions, or the table has too many parts.
        Some(Code { code: 252, .. }) if message.contains("Too many partitions for single INSERT block") => {
            Class::Data
        }
        // Of a view, it is the view that must be mended, not the row: it was good for the table.
        Some(Code { class: Class::Data, .. }) if message.contains(IN_VIEW) => Class::Doubt,
        // The same number for a row's value and for a setting's. No row may go to the dead letters for that.
        Some(Code { class: Class::Data, code, .. })
            if ALSO_OF_SETTINGS.contains(code) && !FROM_ROWS.iter().any(|words| message.contains(words)) =>
        {
            Class::Table
        }
        Some(line) => line.class,
    }
}

/// Whether `code` with its whole `message` proves that nothing was written.
#[must_use]
pub fn proves_nothing_written(code: u32, message: &str) -> bool {
    lookup(code).is_some_and(|line| line.written == Written::Nothing)
        && !message.contains(IN_VIEW)
        && !message.contains(IN_EXPRESSION)
}

/// What kind of trouble the status of an answer tells of that is not ClickHouse's: a proxy's, or some other
/// server's. It never proves anything about an insert.
#[must_use]
pub fn classify_status(status: u16) -> Class {
    match status {
        401 | 403 | 407 => Class::Access,
        // Somebody else's page, a redirect, a body that a proxy finds too large: until somebody changes something.
        200..=399 | 413 => Class::Table,
        _ => Class::Doubt,
    }
}

/// The code at the head of an answer: `Code: 60. DB::Exception: …`.
#[must_use]
pub fn code_of(answer: &str) -> Option<u32> {
    let answer = answer.trim_start();
    let answer = answer.strip_prefix("std::exception. ").unwrap_or(answer);
    let digits = answer.strip_prefix("Code: ")?;
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

/// The number of the row, counted from 1, that a refusal of a batch's data names.
///
/// Parsers end their message with `(at row N)` and the format's name, a constraint is `violated at row N`; both
/// are exact, whether a body is parsed by one thread or by several. Expressions of the table name no row. Values
/// that the message quotes may hold the same words, so they count only where ClickHouse itself puts them.
#[must_use]
pub fn row_of(code: u32, answer: &str) -> Option<u32> {
    let number = |text: &str| {
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        text[..end].parse().ok().filter(|row| *row > 0)
    };
    if code == 469 {
        // The constraint's name comes before it; its expression and the values that violate it come after it.
        return number(answer.split_once(" is violated at row ")?.1);
    }
    let (_, tail) = answer.rsplit_once("(at row ")?;
    // A value stands in quotes: one that closes behind it was opened before it.
    if tail.contains(['\'', '"']) { None } else { number(tail) }
}

/// What is certain about an insert that was not answered with success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Certainty {
    /// Nothing was written.
    NothingWritten,
    /// ClickHouse has refused it, so it is over; whether a part of it was written before can be looked up.
    Over,
    /// It may have been written, or be written yet.
    Unknown,
}

/// Why an insert, read-back or description was not carried out.
pub(crate) struct Failure {
    pub(crate) refusal: Refusal,
    pub(crate) certainty: Certainty,
}

impl Failure {
    fn new(certainty: Certainty, refusal: Refusal) -> Self {
        Self { refusal, certainty }
    }

    /// Something that went wrong on this side, before anything was sent, and may go well the next time.
    pub(crate) fn before_sending(message: impl AsRef<str>) -> Self {
        Self::new(Certainty::NothingWritten, refusal(Class::Passing, message.as_ref()))
    }

    /// Something about the table that keeps rows from being sent, until somebody changes it.
    pub(crate) fn of_table(message: impl AsRef<str>) -> Self {
        Self::new(Certainty::NothingWritten, refusal(Class::Table, message.as_ref()))
    }

    /// Row `row` of those to be sent, counted from 1, cannot be.
    pub(crate) fn of_row(row: Option<u32>, message: impl AsRef<str>) -> Self {
        Self::new(Certainty::NothingWritten, Refusal { row, ..refusal(Class::Data, message.as_ref()) })
    }

    /// The server may have been at work, and nobody knows how it ended.
    pub(crate) fn in_doubt(message: impl AsRef<str>) -> Self {
        Self::new(Certainty::Unknown, refusal(Class::Doubt, message.as_ref()))
    }

    /// Somebody has answered with `status`, and it was not ClickHouse, or not with success.
    pub(crate) fn of_somebody_else(status: u16, message: impl AsRef<str>) -> Self {
        Self::new(Certainty::Unknown, refusal(classify_status(status), message.as_ref()))
    }

    /// What ClickHouse answered.
    fn answered(code: u32, answer: &str) -> Self {
        let class = classify(code, answer);
        let row = if class == Class::Data { row_of(code, answer) } else { None };
        let certainty = if proves_nothing_written(code, answer) {
            Certainty::NothingWritten
        } else if class == Class::Data {
            Certainty::Over
        } else {
            Certainty::Unknown
        };
        Self::new(certainty, Refusal { class, code: Some(code), row, message: cut(answer) })
    }

    pub(crate) fn nothing_written(&self) -> bool {
        self.certainty == Certainty::NothingWritten
    }

    pub(crate) fn outcome(self) -> InsertOutcome {
        if self.nothing_written() {
            InsertOutcome::Again(self.refusal)
        } else {
            InsertOutcome::Doubt(self.refusal)
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match &error {
            Error::BadResponse(answer) => match code_of(answer) {
                Some(code) => Self::answered(code, answer),
                None => Self::in_doubt(answer),
            },
            // The request could not even be put together.
            Error::InvalidParams(_) => Self::before_sending(chain(&error)),
            Error::Network(source) if never_connected(source.as_ref()) => {
                Self::before_sending(format!("cannot connect: {}", chain(source.as_ref())))
            }
            _ => Self::in_doubt(chain(&error)),
        }
    }
}

/// Whether no connection came about. Then no byte of the request left this process.
fn never_connected(source: &(dyn StdError + Send + Sync + 'static)) -> bool {
    source
        .downcast_ref::<hyper_util::client::legacy::Error>()
        .is_some_and(hyper_util::client::legacy::Error::is_connect)
}

/// The error and what lies behind it: the interesting part is at the end ("Connection refused").
fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        // The crate's own errors repeat their source's words.
        if !text.contains(&more) {
            let _ = write!(text, ": {more}");
        }
        source = error.source();
    }
    text
}

/// A refusal in our own words.
pub(crate) fn refusal(class: Class, message: &str) -> Refusal {
    Refusal { class, code: None, row: None, message: cut(message) }
}

/// At most [`MAX_MESSAGE`] bytes of `message`, on one line and without control characters: it goes to logs and
/// terminals, and may quote what anyone published.
#[must_use]
pub fn cut(message: &str) -> String {
    const MARK: &str = "…";
    let mut out = String::new();
    for c in message.trim().chars() {
        let c = if c.is_control() { ' ' } else { c };
        if out.len() + c.len_utf8() + MARK.len() > MAX_MESSAGE {
            out.push_str(MARK);
            break;
        }
        if c != ' ' || !out.ends_with(' ') {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn codes_rise_and_doubt_proves_nothing() {
        assert!(CODES.windows(2).all(|pair| pair[0].code < pair[1].code));
        for line in CODES {
            assert!(line.class != Class::Doubt || line.written == Written::Perhaps, "{}", line.name);
            assert!(line.class != Class::Data || line.written == Written::Nothing, "{}", line.name);
            assert!(!line.reason.is_empty() && !line.name.is_empty());
        }
    }

    #[test]
    fn the_head_of_an_answer_tells_the_code() {
        assert_eq!(code_of("Code: 60. DB::Exception: Table d.t does not exist"), Some(60));
        assert_eq!(
            code_of("std::exception. Code: 1001, type: std::filesystem::filesystem_error"),
            Some(1001)
        );
        assert_eq!(code_of("Code: 252"), Some(252));
        assert_eq!(code_of("\nCode: 7. x"), Some(7));
        for answer in ["", "502 Bad Gateway", "Code: ", "Code: x", "Code: 99999999999", "a Code: 60"] {
            assert_eq!(code_of(answer), None, "{answer}");
        }
    }

    #[test]
    fn the_row_is_where_clickhouse_puts_it() {
        const TAIL: &str = "\n: While executing ParallelParsingBlockInputFormat. (NAME) (version 26.7.2.1)";
        for (code, answer, row) in [
            (27, format!("Cannot parse input: expected '\"' before: 'x\"}}': (while reading the value of key n): (at row 700){TAIL}"), Some(700)),
            (27, "Cannot parse input: expected ',' before: 'x': (at row 2)\n".to_owned(), Some(2)),
            (117, format!("Unknown field found while parsing JSONEachRow format: zz: (at row 7)\n(at row 9): (at row 4294967295){TAIL}"), Some(u32::MAX)),
            (691, format!("Unknown element 'b' for enum: (at row 7): While executing X.' for enum: (at row 8){TAIL}"), Some(8)),
            (675, format!("Cannot parse IPv4 x\"}} (at row 7){{\": (while reading the value of key i): (at row 9){TAIL}"), Some(9)),
            (469, "Constraint `c` for table d.t (64771c03) is violated at row 700. Expression: (s != 'is violated at row 7. (at row 8)'). Column values: s = ' is violated at row 9'. (VIOLATED_CONSTRAINT)".to_owned(), Some(700)),
            // An expression names none, whatever the value says that it quotes.
            (6, "Cannot parse string 'x (at row 7)' as UInt8: while executing 'FUNCTION toUInt8(s : 3)'. (CANNOT_PARSE_TEXT)".to_owned(), None),
            (41, "Cannot parse \"(at row 7)\": while executing 'FUNCTION f(s : 3)'.".to_owned(), None),
            (53, "Cannot insert NULL value into a column `(at row 7)` of type 'String': While executing X.".to_owned(), None),
            (252, "Too many partitions for single INSERT block (more than 100).".to_owned(), None),
            (27, "(at row 0)".to_owned(), None),
            (27, "(at row 4294967296)".to_owned(), None),
            (27, "(at row -1)".to_owned(), None),
            (27, "(at row )".to_owned(), None),
            (27, "(at row ".to_owned(), None),
            (27, "at row 5".to_owned(), None),
            (469, "is violated".to_owned(), None),
            (469, " is violated at row x (at row 5)".to_owned(), None),
            (27, String::new(), None),
        ] {
            assert_eq!(row_of(code, &answer), row, "{answer}");
        }
    }

    #[test]
    fn nothing_that_is_not_clickhouses_is_a_rows_fault() {
        for status in 0..=999 {
            let class = classify_status(status);
            assert!(matches!(class, Class::Access | Class::Table | Class::Doubt), "{status}: {class}");
            let outcome = Failure::of_somebody_else(status, "Code: 27. (at row 7)").outcome();
            assert!(
                matches!(outcome, InsertOutcome::Doubt(Refusal { row: None, code: None, .. })),
                "{status}"
            );
        }
    }

    #[test]
    fn rights_and_quotas_are_never_a_rows_fault() {
        for code in [164, 192, 193, 194, 195, 201, 291, 452, 497, 516] {
            let class = classify(code, "(at row 7)\n: While executing X.");
            assert!(matches!(class, Class::Access | Class::Passing), "{code}: {class}");
        }
    }

    fn outcome(answer: &str) -> InsertOutcome {
        Failure::from(Error::BadResponse(answer.to_owned())).outcome()
    }

    #[test]
    fn only_what_is_certain_is_tried_again() {
        for answer in [
            "Code: 27. DB::Exception: Cannot parse input: expected '\"' before: 'x\"}': (at row 2)\n: While executing ParallelParsingBlockInputFormat.",
            "Code: 60. DB::Exception: Table default.nope does not exist.",
            "Code: 202. DB::Exception: Too many simultaneous queries.",
            "Code: 516. DB::Exception: default: Authentication failed",
            "Code: 252. DB::Exception: Too many parts (3000 with average size of 1.00 KiB) in table 'd.t'.",
        ] {
            assert!(matches!(outcome(answer), InsertOutcome::Again(_)), "{answer}");
        }
        for answer in [
            "Code: 241. DB::Exception: Memory limit exceeded",
            "std::exception. Code: 1001, type: x",
            "Code: 4711. DB::Exception: of a newer server",
            "502 Bad Gateway",
            "",
            // The source of the view is written when these come.
            "Code: 6. DB::Exception: Cannot parse string 'x' as UInt32: while pushing to view default.mv.",
            "Code: 252. DB::Exception: Too many parts (1) in table 'd.tv': while pushing to view default.mv.",
            // From an index on the second partition of the block.
            "Code: 6. DB::Exception: Cannot parse string 'x' as UInt32: while executing 'FUNCTION toUInt32(s : 1)'.",
        ] {
            assert!(matches!(outcome(answer), InsertOutcome::Doubt(_)), "{answer}");
        }
    }

    #[test]
    fn classes() {
        assert_eq!(
            classify(252, "Too many partitions for single INSERT block (more than 100)."),
            Class::Data
        );
        assert_eq!(classify(252, "Too many parts (3000 …)"), Class::Passing);
        assert_eq!(classify(117, "Unknown field"), Class::Data);
        assert_eq!(classify(117, "Unknown field: while pushing to view d.v"), Class::Doubt);
        // A setting's value, a row's value, and what an expression makes of a row's.
        assert_eq!(classify(27, "Cannot parse input: expected 'eof' before: 'x'. (NAME)"), Class::Table);
        assert_eq!(classify(467, "Cannot parse bool from string 'x'. (NAME)"), Class::Table);
        assert_eq!(classify(27, "Cannot parse input: 'x': (at row 2)"), Class::Data);
        assert_eq!(classify(72, "Cannot read: (at row 2)\n: While executing X. (NAME)"), Class::Data);
        assert_eq!(classify(6, "Cannot parse string 'x': while executing 'FUNCTION f(s : 1)'."), Class::Data);
        assert_eq!(classify(497, ""), Class::Access);
        assert_eq!(classify(4711, ""), Class::Unknown);
    }

    #[test]
    fn an_unanswered_insert_is_in_doubt() {
        assert!(!Failure::from(Error::TimedOut).nothing_written());
        assert!(!Failure::from(Error::Network("connection reset".into())).nothing_written());
        assert!(Failure::from(Error::InvalidParams("a header".into())).nothing_written());
    }

    proptest! {
        #[test]
        fn whatever_is_answered_is_read(code in any::<u32>(), answer in ".*(at row )?[0-9)]{0,12}.*") {
            let _ = (row_of(code, &answer), code_of(&answer), classify(code, &answer));
            let _ = Failure::from(Error::BadResponse(format!("Code: {code}. {answer}"))).outcome();
        }

        #[test]
        fn a_message_is_cut_and_harmless(message in "[a-z\u{e9}\u{1F980}\n\u{1b} ]{0,700}") {
            let cut = cut(&message);
            prop_assert!(cut.len() <= MAX_MESSAGE);
            prop_assert!(!cut.contains(char::is_control));
        }
    }
}
