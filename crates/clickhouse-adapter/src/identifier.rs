//! Names and texts in SQL.
//!
//! A table's name can come from a subject, that is, from whoever may publish. It is data until it has passed
//! [`quote`]; nothing else in this crate puts a name into SQL.

use thiserror::Error;

/// Why a name cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum IdentifierError {
    /// ClickHouse has no empty names.
    #[error("a name is empty")]
    Empty,
    /// `database.table` in a configuration, with a backtick that has no partner.
    #[error(
        "{0:?} has a backtick without its partner; write `database`.`table`, with a backtick inside a name doubled"
    )]
    Unbalanced(String),
}

/// `name` as one quoted identifier of ClickHouse's SQL.
///
/// # Errors
/// [`IdentifierError::Empty`] for an empty name.
pub fn quote(name: &str) -> Result<String, IdentifierError> {
    if name.is_empty() {
        return Err(IdentifierError::Empty);
    }
    Ok(enclose(name, '`'))
}

/// `database` and `table` as one quoted compound identifier.
///
/// # Errors
/// [`IdentifierError::Empty`] if one of them is empty.
pub fn quote_table(database: &str, table: &str) -> Result<String, IdentifierError> {
    Ok(format!("{}.{}", quote(database)?, quote(table)?))
}

/// `text` as a string literal.
#[must_use]
pub fn literal(text: &str) -> String {
    enclose(text, '\'')
}

/// Both kinds of quotes know the same escapes. Control characters would be taken raw as well; they are escaped
/// so that a query in a log stays on one line.
fn enclose(text: &str, quote: char) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '`' => out.push_str("\\`"),
            '\'' => out.push_str("\\'"),
            '\0' => out.push_str("\\0"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// Splits a configured `database.table`, or a bare `table` that goes to `default_database`.
///
/// The first dot outside of backticks separates; a name that holds a dot is written in backticks, and a backtick
/// inside them doubled.
///
/// # Errors
/// If a name is empty or a backtick has no partner.
pub fn parse_target(text: &str, default_database: &str) -> Result<(String, String), IdentifierError> {
    let (first, rest) = take_name(text)?;
    let (database, table) = match rest {
        None => (default_database.to_owned(), first),
        // Only the first dot separates: what follows an unquoted database is the table, dots and all.
        Some(rest) if rest.starts_with('`') => match take_name(rest)? {
            (table, None) => (first, table),
            (_, Some(_)) => return Err(IdentifierError::Unbalanced(text.to_owned())),
        },
        Some(rest) => (first, rest.to_owned()),
    };
    if database.is_empty() || table.is_empty() {
        return Err(IdentifierError::Empty);
    }
    Ok((database, table))
}

/// Takes one name, and what follows the dot behind it if there is one.
fn take_name(text: &str) -> Result<(String, Option<&str>), IdentifierError> {
    let Some(mut rest) = text.strip_prefix('`') else {
        return Ok(match text.split_once('.') {
            Some((name, rest)) => (name.to_owned(), Some(rest)),
            None => (text.to_owned(), None),
        });
    };
    let unbalanced = || IdentifierError::Unbalanced(text.to_owned());
    let mut name = String::new();
    loop {
        let (before, after) = rest.split_once('`').ok_or_else(unbalanced)?;
        name.push_str(before);
        if let Some(after) = after.strip_prefix('`') {
            name.push('`');
            rest = after;
        } else if let Some(after) = after.strip_prefix('.') {
            return Ok((name, Some(after)));
        } else if after.is_empty() {
            return Ok((name, None));
        } else {
            return Err(unbalanced());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reads a quoted text as ClickHouse's lexer does: up to the first quote that is not escaped. Returns what
    /// it means and what is left behind it.
    fn read(quoted: &str) -> Option<(String, &str)> {
        let quote = quoted.chars().next()?;
        let mut means = String::new();
        let mut chars = quoted.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' => means.push(match chars.next()?.1 {
                    '0' => '\0',
                    'n' => '\n',
                    'r' => '\r',
                    't' => '\t',
                    c @ ('\\' | '`' | '\'') => c,
                    c => panic!("escape \\{c} is never written"),
                }),
                c if c == quote => return Some((means, &quoted[at + c.len_utf8()..])),
                c => means.push(c),
            }
        }
        None
    }

    proptest! {
        #[test]
        fn whatever_the_name_the_quoted_text_is_one_identifier(name in any::<String>().prop_filter("empty", |n| !n.is_empty())) {
            let quoted = quote(&name).unwrap();
            prop_assert_eq!(read(&quoted), Some((name, "")));
        }

        #[test]
        fn names_of_hostile_characters_are_one_identifier(name in "[`'\"\\\\.; \n\t\0-]{1,12}") {
            for quoted in [quote(&name).unwrap(), literal(&name)] {
                prop_assert_eq!(read(&quoted), Some((name.clone(), "")));
            }
        }

        #[test]
        fn a_target_in_backticks_is_what_it_was(database in ".{1,8}", table in ".{1,8}") {
            let double = |name: &str| format!("`{}`", name.replace('`', "``"));
            let text = format!("{}.{}", double(&database), double(&table));
            prop_assert_eq!(parse_target(&text, "default").unwrap(), (database, table));
        }
    }

    #[test]
    fn there_is_no_empty_name() {
        assert_eq!(quote(""), Err(IdentifierError::Empty));
        assert_eq!(quote_table("", "t"), Err(IdentifierError::Empty));
        assert_eq!(quote_table("d", ""), Err(IdentifierError::Empty));
        for text in ["", ".t", "d.", "``.t", "d.``"] {
            assert_eq!(parse_target(text, "default"), Err(IdentifierError::Empty), "{text:?}");
        }
    }

    #[test]
    fn targets() {
        let parse = |text| parse_target(text, "home").unwrap();
        let pair = |d: &str, t: &str| (d.to_owned(), t.to_owned());
        assert_eq!(parse("clicks"), pair("home", "clicks"));
        assert_eq!(parse("web.clicks"), pair("web", "clicks"));
        assert_eq!(parse("web.clicks.v2"), pair("web", "clicks.v2"));
        assert_eq!(parse("`web.eu`.clicks"), pair("web.eu", "clicks"));
        assert_eq!(parse("`a``b`"), pair("home", "a`b"));
        for text in ["`a", "`a`b", "a.`b", "a.`b`c", "`a`.`b`.`c`"] {
            assert!(matches!(parse_target(text, "home"), Err(IdentifierError::Unbalanced(_))), "{text}");
        }
    }
}
