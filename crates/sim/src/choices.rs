//! Choices that somebody else makes: a property test, which then finds the fewest that break something, or a fuzzer.

/// Reads choices from bytes; zeros when they are used up.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Choices<'a>(pub(crate) &'a [u8]);

impl Choices<'_> {
    pub(crate) fn next(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub(crate) fn below(&mut self, n: u8) -> u8 {
        self.next() % n
    }
}
