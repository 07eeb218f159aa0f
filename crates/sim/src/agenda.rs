//! What happens next: events in the order of virtual time.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::time::Duration;

struct Entry<T> {
    at: Duration,
    number: u64,
    what: T,
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T> Eq for Entry<T> {}

impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Entry<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// Events to come. Those of one instant come in the order in which they were put in.
pub(crate) struct Agenda<T> {
    entries: BinaryHeap<Reverse<Entry<T>>>,
    numbers: u64,
}

impl<T> Agenda<T> {
    pub(crate) const fn new() -> Self {
        Self { entries: BinaryHeap::new(), numbers: 0 }
    }

    pub(crate) fn put(&mut self, at: Duration, what: T) {
        self.numbers += 1;
        self.entries.push(Reverse(Entry { at, number: self.numbers, what }));
    }

    pub(crate) fn take(&mut self) -> Option<(Duration, T)> {
        self.entries.pop().map(|Reverse(entry)| (entry.at, entry.what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_time_and_then_in_turn() {
        let mut agenda = Agenda::new();
        for (at, what) in [(5, 'c'), (1, 'a'), (5, 'd'), (2, 'b')] {
            agenda.put(Duration::from_secs(at), what);
        }
        let order: String = std::iter::from_fn(|| agenda.take()).map(|(_, what)| what).collect();
        assert_eq!(order, "abcd");
    }
}
