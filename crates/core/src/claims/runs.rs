//! Which shards' machines run, and what orders mean to them.
//!
//! Each claim is another machine ([`crate::shard::Shard`]) with a session of its own. One that was told to end may take
//! its time; if its shard is claimed again meanwhile, the next machine is started when it has ended: there is never
//! more than one of a shard in a process.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Order;
use crate::action::Event;
use crate::row::ShardId;

/// What is to be done with a shard's machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Start one, and hand it these.
    Start {
        /// Of which shard.
        shard: ShardId,
        /// What it is told first, in order.
        first: Vec<Event>,
    },
    /// Tell the one that runs.
    Tell {
        /// Of which shard.
        shard: ShardId,
        /// What.
        event: Event,
    },
}

/// The shards whose machines run in this process.
#[derive(Debug)]
pub struct Runs {
    /// How long a shard that is handed over may take to write what it holds.
    handover: Duration,
    /// With those that were told to end and were claimed again since: what the next machine is told first.
    running: BTreeMap<ShardId, Option<Vec<Event>>>,
}

impl Runs {
    /// Nothing runs yet. A shard that is handed over may take `handover` to write what it holds.
    #[must_use]
    pub const fn new(handover: Duration) -> Self {
        Self { handover, running: BTreeMap::new() }
    }

    /// Takes an order.
    #[must_use]
    pub fn order(&mut self, shard: ShardId, order: Order) -> Option<Step> {
        match order {
            Order::Claim { share, of } => {
                let mut first = vec![Event::Claim(share)];
                first.extend(of.map(Event::OwnerGone));
                if let Some(again) = self.running.get_mut(&shard) {
                    *again = Some(first);
                    return None;
                }
                self.running.insert(shard, None);
                Some(Step::Start { shard, first })
            }
            Order::Share(part) => self.tell(shard, Event::Share(part)),
            Order::OwnerGone(pin) => self.tell(shard, Event::OwnerGone(pin)),
            Order::GiveUp => self.end(shard, Event::HandOver { within: self.handover }),
            Order::Stop { within } => self.end(shard, Event::Stop { within }),
        }
    }

    fn tell(&mut self, shard: ShardId, event: Event) -> Option<Step> {
        match self.running.get_mut(&shard)? {
            Some(first) => {
                first.push(event);
                None
            }
            None => Some(Step::Tell { shard, event }),
        }
    }

    fn end(&mut self, shard: ShardId, event: Event) -> Option<Step> {
        // Claimed again and given up again before it had ended: nothing is left to start.
        *self.running.get_mut(&shard)? = None;
        Some(Step::Tell { shard, event })
    }

    /// A shard's machine has ended.
    #[must_use]
    pub fn ended(&mut self, shard: ShardId) -> Option<Step> {
        let first = self.running.remove(&shard)??;
        self.running.insert(shard, None);
        Some(Step::Start { shard, first })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Share;
    use crate::ports::delivery::PinId;

    const SHARD: ShardId = ShardId(3);

    fn claim(rows: u64, of: Option<&str>) -> Order {
        Order::Claim { share: Share { rows, bytes: 1 }, of: of.map(|pin| PinId(pin.into())) }
    }

    #[test]
    fn a_shard_that_is_claimed_while_it_ends_is_started_when_it_has() {
        let mut runs = Runs::new(Duration::from_secs(9));
        let start = |rows| Step::Start { shard: SHARD, first: vec![Event::Claim(Share { rows, bytes: 1 })] };
        assert_eq!(runs.order(SHARD, claim(1, None)), Some(start(1)));
        let stop = Step::Tell { shard: SHARD, event: Event::HandOver { within: Duration::from_secs(9) } };
        assert_eq!(runs.order(SHARD, Order::GiveUp), Some(stop.clone()));
        // The claim that counts is the last one, with everything that was said since.
        assert_eq!(runs.order(SHARD, claim(2, Some("p"))), None);
        assert_eq!(runs.order(SHARD, Order::GiveUp), Some(stop));
        assert_eq!(runs.order(SHARD, claim(3, Some("q"))), None);
        assert_eq!(runs.order(SHARD, Order::Share(Share { rows: 4, bytes: 1 })), None);
        let first = vec![
            Event::Claim(Share { rows: 3, bytes: 1 }),
            Event::OwnerGone(PinId("q".into())),
            Event::Share(Share { rows: 4, bytes: 1 }),
        ];
        assert_eq!(runs.ended(SHARD), Some(Step::Start { shard: SHARD, first }));
        assert_eq!(runs.ended(SHARD), None);
        assert_eq!(runs.order(SHARD, Order::GiveUp), None, "nothing runs");
        assert_eq!(runs.order(SHARD, claim(5, None)), Some(start(5)));
    }
}
