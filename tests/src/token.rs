//! The deduplication tokens of Holdfast's inserts, read by the tests that watch them.

/// `STREAM@CREATED:FIRST-LAST/ROWS.GENERATION`
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token {
    /// The batch's first row.
    pub first: u64,
    /// Its last.
    pub last: u64,
    /// How many of the table there are in between, both included.
    pub rows: u64,
    /// 0, unless an earlier token was burned.
    pub generation: u32,
}

impl Token {
    /// Reads a token; `None` if it is none of Holdfast's.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (_, batch) = text.rsplit_once(':')?;
        let (rows, generation) = batch.rsplit_once('.')?;
        let (range, rows) = rows.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        Some(Self {
            first: first.parse().ok()?,
            last: last.parse().ok()?,
            rows: rows.parse().ok()?,
            generation: generation.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens() {
        let token = Token::parse("INGEST@1700000000123:17-40/9.1");
        assert_eq!(token, Some(Token { first: 17, last: 40, rows: 9, generation: 1 }));
        assert_eq!(Token::parse("some other"), None);
    }
}
