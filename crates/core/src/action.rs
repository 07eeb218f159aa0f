//! What a machine is told and what it wants done.

use std::time::Duration;

use crate::budget::Share;
use crate::notice::{Notice, Report};
use crate::ports::{dead_letters, delivery, ledger, store};

/// What a shard is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The instant that `next_wakeup` named has come.
    Wakeup,
    /// The shard is ours to take, with this share of the budget.
    Claim(Share),
    /// Whoever had this pin is gone: if the consumer is still pinned to it, it is taken away, since waiting for the
    /// pin to lapse would take a pinned TTL.
    OwnerGone(delivery::PinId),
    /// The share has changed.
    Share(Share),
    /// Another member is to have the shard: write what was accepted, give it up, and end, within this time.
    HandOver {
        /// Past it the shard is given up with rows unwritten; they come again to the heir.
        within: Duration,
    },
    /// The process stops: the same.
    Stop {
        /// Past it the shard is given up with rows unwritten; they come again to the heir.
        within: Duration,
    },
    /// The consumer answered, or rows came.
    Delivery(delivery::Reply),
    /// The ledger answered.
    Ledger(ledger::Reply),
    /// The store answered.
    Store(store::Reply),
    /// The dead letters answered.
    DeadLetter(dead_letters::Reply),
}

/// What a shard wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask the consumer.
    Delivery(delivery::Command),
    /// Ask the ledger.
    Ledger(ledger::Command),
    /// Ask the store.
    Store(store::Command),
    /// Ask the dead letters.
    DeadLetter(dead_letters::Command),
    /// Tell people.
    Notice(Notice),
    /// Tell the process.
    Report(Report),
}

/// The actions of one or more events, in order. A driver starts commands of one port in this order; it may
/// complete them in any.
#[derive(Debug, Default)]
pub struct Actions(Vec<Action>);

impl Actions {
    /// Takes them out, in order, and leaves room for the next.
    pub fn drain(&mut self) -> impl Iterator<Item = Action> + '_ {
        self.0.drain(..)
    }

    /// The actions, in order.
    #[must_use]
    pub fn as_slice(&self) -> &[Action] {
        &self.0
    }

    pub(crate) fn delivery(&mut self, command: delivery::Command) {
        self.0.push(Action::Delivery(command));
    }

    pub(crate) fn ledger(&mut self, command: ledger::Command) {
        self.0.push(Action::Ledger(command));
    }

    pub(crate) fn store(&mut self, command: store::Command) {
        self.0.push(Action::Store(command));
    }

    pub(crate) fn dead_letter(&mut self, command: dead_letters::Command) {
        self.0.push(Action::DeadLetter(command));
    }

    pub(crate) fn notice(&mut self, notice: Notice) {
        self.0.push(Action::Notice(notice));
    }

    pub(crate) fn report(&mut self, report: Report) {
        self.0.push(Action::Report(report));
    }
}
