//! The settings that Holdfast's promises rest on.
//!
//! A user's profile can force any setting, and many change what becomes of rows without a word. So each insert and
//! each read-back carries its own. A setting that the server does not know is left out: an older server has not
//! got what it would turn off.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::config::UnknownFields;

/// A setting with the value it is pinned to.
type Pin = (&'static str, &'static str);

/// Pinned for every insert: one body is one block, parsed to its end before it is written, under its token.
const INSERT: &[Pin] = &[
    // Several blocks are not atomic, and a token names one block.
    ("min_insert_block_size_rows", "10000000"),
    ("min_insert_block_size_bytes", "4294967296"),
    ("max_insert_block_size", "10000000"),
    ("max_insert_block_size_rows", "10000000"),
    ("max_insert_block_size_bytes", "0"),
    ("use_strict_insert_block_limits", "0"),
    ("max_insert_threads", "1"),
    // Collected with other inserts, and the answer may come before anything is stored.
    ("async_insert", "0"),
    ("insert_deduplicate", "1"),
    ("deduplicate_insert", "enable"),
    // Bad rows would be left out in silence.
    ("input_format_allow_errors_num", "0"),
    ("input_format_allow_errors_ratio", "0"),
    // A body that stalls is dropped after this: the horizon of a token rests on it.
    ("http_receive_timeout", "30"),
    ("insert_allow_materialized_columns", "0"),
];

/// Pinned for every read-back: it sees each row of the table, once.
const READ_BACK: &[Pin] = &[
    ("select_sequential_consistency", "1"),
    ("enable_parallel_replicas", "0"),
    ("max_parallel_replicas", "1"),
    ("final", "0"),
    // A row that landed and was deleted since has landed.
    ("apply_deleted_mask", "0"),
    // An answer from before the insert.
    ("use_query_cache", "0"),
    ("additional_table_filters", "{}"),
    ("additional_result_filter", ""),
    ("limit", "0"),
    ("offset", "0"),
    ("extremes", "0"),
    // A limit must be an error, never a shorter answer.
    ("read_overflow_mode", "throw"),
    ("read_overflow_mode_leaf", "throw"),
    ("group_by_overflow_mode", "throw"),
    ("sort_overflow_mode", "throw"),
    ("result_overflow_mode", "throw"),
    ("max_result_rows", "0"),
    ("max_result_bytes", "0"),
    ("max_rows_to_group_by", "0"),
    ("force_primary_key", "0"),
    ("force_index_by_date", "0"),
    ("force_optimize_projection", "0"),
];

/// Pinned for every query whatever it is for.
const EVERY: &[Pin] = &[
    // `break` would turn a timeout into an answer.
    ("timeout_overflow_mode", "throw"),
    ("timeout_overflow_mode_leaf", "throw"),
    // Answers 200 before the query has failed.
    ("send_progress_in_http_headers", "0"),
    ("http_write_exception_in_output_format", "0"),
    ("output_format_binary_encode_types_in_binary_format", "0"),
    ("describe_compact_output", "0"),
    ("describe_include_subcolumns", "0"),
    ("describe_include_virtual_columns", "0"),
];

/// For the question which settings there are. A profile with the query cache refuses any about system tables.
pub(crate) const FOR_ASKING: &[Pin] = &[
    ("use_query_cache", "0"),
    ("limit", "0"),
    ("offset", "0"),
    ("output_format_binary_encode_types_in_binary_format", "0"),
];

/// Pinned to a value of the moment.
const COMPUTED: &[&str] =
    &["insert_deduplication_token", "input_format_skip_unknown_fields", "max_execution_time"];

/// Parameters of the HTTP interface that share their namespace with settings.
const PARAMETERS: &[&str] = &[
    "query",
    "query_id",
    "database",
    "user",
    "password",
    "quota_key",
    "role",
    "session_id",
    "session_timeout",
    "session_check",
    "default_format",
    "compress",
    "decompress",
    "buffer_size",
    "wait_end_of_query",
    "stacktrace",
    "client_protocol_version",
    "close_session",
    "profile",
    "readonly",
];

/// Why `name` cannot be set for a table, or `None` if it can.
pub(crate) fn reserved(name: &str) -> Option<&'static str> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    if name.is_empty() || !name.bytes().all(plain) {
        return Some("it is no name of a setting");
    }
    if INSERT.iter().chain(READ_BACK).chain(EVERY).any(|(pinned, _)| *pinned == name) {
        return Some("delivery rests on its value, so Holdfast sends it with every insert or read-back");
    }
    match name {
        "input_format_skip_unknown_fields" => Some("use unknown_fields = \"reject\" or \"ignore\""),
        "insert_deduplication_token" => Some("each batch has a token of its own"),
        "max_execution_time" => Some("use clickhouse.insert_timeout"),
        _ if PARAMETERS.contains(&name) || name.starts_with("param_") => {
            Some("it is a parameter of the HTTP interface, not a setting")
        }
        _ => None,
    }
}

/// Every setting that may be sent. Which of them a server knows is asked once.
pub(crate) fn all() -> impl Iterator<Item = &'static str> {
    INSERT.iter().chain(READ_BACK).chain(EVERY).map(|(name, _)| *name).chain(COMPUTED.iter().copied())
}

/// The settings that a server knows, of [`all`].
pub(crate) type Known = BTreeSet<String>;

pub(crate) fn for_insert(
    known: &Known,
    token: &str,
    unknown_fields: UnknownFields,
    timeout: Duration,
) -> Vec<(&'static str, String)> {
    let mut settings = pinned(known, INSERT.iter().chain(EVERY));
    settings.push(("insert_deduplication_token", token.to_owned()));
    settings.push(("input_format_skip_unknown_fields", skip(unknown_fields)));
    settings.push(("max_execution_time", seconds(timeout)));
    settings
}

pub(crate) fn for_read_back(known: &Known, timeout: Duration) -> Vec<(&'static str, String)> {
    let mut settings = pinned(known, READ_BACK.iter().chain(EVERY));
    settings.push(("max_execution_time", seconds(timeout)));
    settings
}

/// For a question that reads rows as an insert does.
pub(crate) fn for_probe(
    known: &Known,
    unknown_fields: UnknownFields,
    timeout: Duration,
) -> Vec<(&'static str, String)> {
    let mut settings = for_read_back(known, timeout);
    settings.extend(pinned(known, INSERT.iter().filter(|(name, _)| name.starts_with("input_format_"))));
    settings.push(("input_format_skip_unknown_fields", skip(unknown_fields)));
    settings
}

/// For questions about tables. `limit`, filters and the cache matter to them as well.
pub(crate) fn for_description(known: &Known, timeout: Duration) -> Vec<(&'static str, String)> {
    for_read_back(known, timeout)
}

fn skip(unknown_fields: UnknownFields) -> String {
    match unknown_fields {
        UnknownFields::Reject => "0",
        UnknownFields::Ignore => "1",
    }
    .to_owned()
}

fn pinned<'a>(known: &Known, pins: impl Iterator<Item = &'a Pin>) -> Vec<(&'static str, String)> {
    pins.filter(|(name, _)| known.contains(*name)).map(|&(name, value)| (name, value.to_owned())).collect()
}

/// Whole seconds, rounded up: 0 would mean no limit.
fn seconds(timeout: Duration) -> String {
    (timeout.as_secs() + u64::from(timeout.subsec_nanos() > 0)).max(1).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pinned_is_reserved() {
        for name in all() {
            assert!(reserved(name).is_some(), "{name}");
        }
        for name in ["date_time_input_format", "insert_quorum", "max_partitions_per_insert_block"] {
            assert_eq!(reserved(name), None, "{name}");
        }
    }

    #[test]
    fn the_horizon_reckons_with_what_is_sent() {
        let seconds = crate::horizon::RECEIVE_TIMEOUT.as_secs().to_string();
        assert!(INSERT.contains(&("http_receive_timeout", seconds.as_str())));
    }

    #[test]
    fn a_server_is_sent_what_it_knows() {
        let known = Known::from(["async_insert".to_owned()]);
        let sent = for_insert(&known, "t", UnknownFields::Reject, Duration::from_millis(1500));
        assert!(sent.contains(&("async_insert", "0".to_owned())));
        assert!(!sent.iter().any(|(name, _)| *name == "deduplicate_insert"));
        assert!(sent.contains(&("max_execution_time", "2".to_owned())));
        assert!(sent.contains(&("insert_deduplication_token", "t".to_owned())));
    }
}
