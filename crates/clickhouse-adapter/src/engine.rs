//! What a table's `engine_full` says: its settings, and whether rows expire.
//!
//! `MergeTree PARTITION BY d ORDER BY k TTL d + toIntervalDay(1) SETTINGS index_granularity = 8192`

/// A piece of `engine_full` outside of brackets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    /// A word or a number.
    Word(&'a str),
    /// A quoted text, quotes included.
    Text(&'a str),
    /// Anything else, one character at a time.
    Sign(char),
}

/// The pieces outside of brackets: inside of them nothing matters here.
fn tokens(text: &str) -> Vec<Token<'_>> {
    let word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.');
    let mut tokens = Vec::new();
    let mut depth = 0_usize;
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let (token, len) = match c {
            '\'' | '"' | '`' => {
                let len = quoted_len(rest, c);
                (Some(Token::Text(&rest[..len])), len)
            }
            c if word(c) => {
                let len = rest.find(|c| !word(c)).unwrap_or(rest.len());
                (Some(Token::Word(&rest[..len])), len)
            }
            c => {
                match c {
                    '(' | '[' => depth += 1,
                    ')' | ']' => depth = depth.saturating_sub(1),
                    _ => {}
                }
                ((!c.is_whitespace() && !"()[]".contains(c)).then_some(Token::Sign(c)), c.len_utf8())
            }
        };
        if depth == 0 {
            tokens.extend(token);
        }
        rest = &rest[len..];
    }
    tokens
}

/// The length of the quoted text at the start of `text`. A quote inside is escaped with a backslash or doubled; a
/// doubled one reads as two texts, which does no harm here.
fn quoted_len(text: &str, quote: char) -> usize {
    let mut chars = text.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        if c == '\\' {
            chars.next();
        } else if c == quote {
            return at + 1;
        }
    }
    text.len()
}

/// The value of `setting` in a table's `engine_full`, or `None` where the server's default holds.
pub(crate) fn setting(engine_full: &str, setting: &str) -> Option<u64> {
    let tokens = tokens(engine_full);
    let from = tokens.iter().rposition(|token| *token == Token::Word("SETTINGS"))?;
    tokens[from..].windows(3).find_map(|three| match three {
        [Token::Word(name), Token::Sign('='), Token::Word(value)] if *name == setting => value.parse().ok(),
        [Token::Word(name), Token::Sign('='), Token::Text(value)] if *name == setting => {
            value.trim_matches('\'').parse().ok()
        }
        _ => None,
    })
}

/// Whether rows of the table disappear or are merged with time. A TTL that only moves or recompresses does no harm.
pub(crate) fn rows_expire(engine_full: &str) -> bool {
    let tokens = tokens(engine_full);
    let Some(from) = tokens.iter().position(|token| *token == Token::Word("TTL")) else { return false };
    let to = tokens.iter().rposition(|token| *token == Token::Word("SETTINGS")).filter(|&to| to > from);
    tokens[from + 1..to.unwrap_or(tokens.len())].split(|token| *token == Token::Sign(',')).any(|rule| {
        !rule.contains(&Token::Word("RECOMPRESS"))
            && !rule.windows(2).any(|two| matches!(two, [Token::Word("TO"), Token::Word("DISK" | "VOLUME")]))
    })
}

/// What an engine does with rows and tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// Keeps every row.
    Plain,
    /// Replaces, sums or otherwise merges rows.
    Merging,
    /// Not a MergeTree: tokens are ignored.
    Other,
    /// Takes no inserts at all.
    NoInserts,
}

/// The family of `engine`, and whether it is replicated.
pub(crate) fn family(engine: &str) -> (Family, bool) {
    if matches!(engine, "View" | "LiveView" | "Dictionary") {
        return (Family::NoInserts, false);
    }
    let (kind, replicated) = match engine.strip_prefix("Replicated").or_else(|| engine.strip_prefix("Shared"))
    {
        Some(kind) => (kind, true),
        None => (engine, false),
    };
    match kind.strip_suffix("MergeTree") {
        Some("") => (Family::Plain, replicated),
        Some(
            "Replacing"
            | "Summing"
            | "Aggregating"
            | "Collapsing"
            | "VersionedCollapsing"
            | "Coalescing"
            | "Graphite",
        ) => (Family::Merging, replicated),
        _ => (Family::Other, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_found() {
        let full = "MergeTree PARTITION BY toYYYYMM(d) ORDER BY k SETTINGS non_replicated_deduplication_window = 100, index_granularity = 8192";
        assert_eq!(setting(full, "non_replicated_deduplication_window"), Some(100));
        assert_eq!(setting(full, "index_granularity"), Some(8192));
        assert_eq!(setting(full, "deduplication_window"), None);
        assert_eq!(setting("MergeTree ORDER BY tuple()", "index_granularity"), None);
        assert_eq!(setting("MergeTree ORDER BY k SETTINGS disk = 'a, x = 3', x = '7'", "x"), Some(7));
        assert_eq!(setting("MergeTree ORDER BY (`SETTINGS`, x = 5) SETTINGS x = 6", "x"), Some(6));
        assert_eq!(setting("MergeTree ORDER BY f('\\' SETTINGS x = 5')", "x"), None);
    }

    #[test]
    fn expiry_is_told_from_moving() {
        for (full, expires) in [
            ("MergeTree ORDER BY k", false),
            ("MergeTree ORDER BY k TTL d + toIntervalDay(1) SETTINGS index_granularity = 8192", true),
            ("MergeTree ORDER BY k TTL d + toIntervalDay(1) TO DISK 'cold'", false),
            ("MergeTree ORDER BY k TTL d + toIntervalDay(1) TO VOLUME 'cold', d + toIntervalDay(9)", true),
            ("MergeTree ORDER BY k TTL d + toIntervalYear(1) RECOMPRESS CODEC(ZSTD(1))", false),
            ("MergeTree ORDER BY k TTL d + toIntervalDay(1) GROUP BY k SET x = max(x)", true),
            ("MergeTree ORDER BY k TTL d + toIntervalDay(1) WHERE x = 'TO DISK'", true),
            ("MergeTree ORDER BY (k, `TTL`) SETTINGS storage_policy = 'TTL'", false),
        ] {
            assert_eq!(rows_expire(full), expires, "{full}");
        }
    }

    #[test]
    fn families() {
        assert_eq!(family("MergeTree"), (Family::Plain, false));
        assert_eq!(family("ReplicatedMergeTree"), (Family::Plain, true));
        assert_eq!(family("SharedReplacingMergeTree"), (Family::Merging, true));
        assert_eq!(family("VersionedCollapsingMergeTree"), (Family::Merging, false));
        for engine in
            ["Memory", "Log", "Distributed", "Null", "MaterializedView", "OddMergeTree", "Buffer", ""]
        {
            assert_eq!(family(engine), (Family::Other, false), "{engine}");
        }
        assert_eq!(family("View"), (Family::NoInserts, false));
    }
}
