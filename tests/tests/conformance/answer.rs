//! Answers in the scripts' words, and whether they are the ones that a script expects.
//!
//! What a server makes up (pins, revisions, times) has a name in a script. A name stands for the first value that
//! it meets, and from then on for nothing else; no other name stands for that value.

use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Pin,
    /// Revisions rise: whichever is met first is lower than those that follow.
    Revision,
    /// When a stream was made.
    Created,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    Text(String),
    Named(Kind, String),
}

impl Token {
    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }
}

/// Several words.
pub(crate) fn words(text: &str) -> Vec<Token> {
    text.split_whitespace().map(Token::text).collect()
}

/// What names stand for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names(BTreeMap<String, (Kind, String)>);

impl Names {
    /// What a name stands for.
    pub(crate) fn value(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|(_, value)| value.as_str())
    }

    /// Whether `answer` is what is expected; then its new names stand for something.
    pub(crate) fn take(&mut self, expected: &[String], answer: &[Token]) -> bool {
        let mut names = self.clone();
        let fits = expected.len() == answer.len()
            && expected.iter().zip(answer).all(|(expected, token)| names.fits(expected, token));
        if fits {
            *self = names;
        }
        fits
    }

    fn fits(&mut self, expected: &str, token: &Token) -> bool {
        match token {
            Token::Text(text) => text == expected || within(expected, text),
            Token::Named(kind, value) => {
                if let Some(known) = self.0.get(expected) {
                    return *known == (*kind, value.clone());
                }
                let is_name = expected.starts_with(|c: char| c.is_ascii_uppercase());
                let others = || self.0.values().filter(|(other, _)| other == kind).map(|(_, value)| value);
                if !is_name || others().any(|other| other == value) || !rises(*kind, value, others()) {
                    return false;
                }
                self.0.insert(expected.to_owned(), (*kind, value.clone()));
                true
            }
        }
    }

    /// An answer in words.
    pub(crate) fn show(&self, answer: &[Token]) -> String {
        let show = |token: &Token| match token {
            Token::Text(text) => text.clone(),
            Token::Named(kind, value) => {
                let known = self.0.iter().find(|(_, known)| **known == (*kind, value.clone()));
                known.map_or_else(|| format!("(a new {kind:?}: {value})"), |(name, _)| name.clone())
            }
        };
        let words: Vec<_> = answer.iter().map(show).collect();
        if words.is_empty() { "(no answer)".to_owned() } else { words.join(" ") }
    }
}

fn rises<'a>(kind: Kind, value: &str, mut others: impl Iterator<Item = &'a String>) -> bool {
    let number = |text: &str| text.parse::<u64>().unwrap_or_default();
    kind != Kind::Revision || others.all(|other| number(other) < number(value))
}

/// Whether a number is in a range such as `0..3`, both ends included.
fn within(range: &str, text: &str) -> bool {
    let Some((from, to)) = range.split_once("..") else { return false };
    match (from.parse::<u64>(), to.parse::<u64>(), text.parse::<u64>()) {
        (Ok(from), Ok(to), Ok(number)) => (from..=to).contains(&number),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(kind: Kind, value: &str) -> Token {
        Token::Named(kind, value.to_owned())
    }

    fn take(names: &mut Names, expected: &str, answer: &[Token]) -> bool {
        let expected: Vec<_> = expected.split_whitespace().map(str::to_owned).collect();
        names.take(&expected, answer)
    }

    #[test]
    fn a_name_stands_for_one_value_and_a_value_has_one_name() {
        let mut names = Names::default();
        assert!(take(&mut names, "P", &[named(Kind::Pin, "x")]));
        assert!(take(&mut names, "P", &[named(Kind::Pin, "x")]));
        assert!(!take(&mut names, "P", &[named(Kind::Pin, "y")]));
        assert!(!take(&mut names, "Q", &[named(Kind::Pin, "x")]));
        assert!(take(&mut names, "Q", &[named(Kind::Pin, "y")]));
        assert!(!take(&mut names, "nobody", &[named(Kind::Pin, "z")]));
        assert!(!take(&mut names, "P", &words("x")));
    }

    #[test]
    fn revisions_rise_and_numbers_may_be_in_a_range() {
        let mut names = Names::default();
        assert!(take(&mut names, "stored R1", &[Token::text("stored"), named(Kind::Revision, "9")]));
        assert!(!take(&mut names, "R2", &[named(Kind::Revision, "8")]));
        assert!(take(&mut names, "R2", &[named(Kind::Revision, "10")]));
        assert!(take(&mut names, "delivered 0..3", &words("delivered 3")));
        assert!(!take(&mut names, "delivered 0..3", &words("delivered 4")));
        assert!(!take(&mut names, "delivered 3", &words("delivered 3 more")));
    }
}
