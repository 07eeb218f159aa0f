//! Where a shard writes: the ledger, the store, the dead letters.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use holdfast_core::ports::ledger::{self, WriteOutcome};
use holdfast_core::ports::store::{self, Class, Command, DescribeError, Insert, InsertOutcome, Refusal};
use holdfast_core::ports::{Attempt, dead_letters};
use holdfast_core::row::ShardId;
use tokio::sync::oneshot;

use crate::clickhouse::{Fate, Misfit};
use crate::jetstream::Client;

use super::{Clock, Process, Shared, not_connected};

impl Process {
    /// The ledger.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        Ledger { shared: Arc::clone(&self.shared), process: self.id }
    }

    /// The store, for one machine: what it breaks off is its own.
    #[must_use]
    pub fn store(&self, clock: Clock) -> Store {
        let client = self.shared.act(|state, _| self.client(state));
        Store { shared: Arc::clone(&self.shared), client, clock }
    }

    /// The dead letters.
    #[must_use]
    pub fn dead_letters(&self, clock: Clock) -> DeadLetters {
        DeadLetters { shared: Arc::clone(&self.shared), process: self.id, clock }
    }
}

/// The ledger port.
#[derive(Debug)]
pub struct Ledger {
    shared: Arc<Shared>,
    process: u32,
}

#[async_trait]
impl ledger::Port for Ledger {
    async fn call(&self, command: ledger::Command) -> ledger::Reply {
        self.shared.act(|state, _| {
            if !state.dead.contains(&self.process) {
                return state.models.bucket.handle(&command);
            }
            match command {
                ledger::Command::Read { attempt, .. } => {
                    ledger::Reply::Read { attempt, outcome: Err(not_connected()) }
                }
                ledger::Command::Write { attempt, .. } => {
                    ledger::Reply::Written { attempt, outcome: WriteOutcome::Refused(not_connected()) }
                }
            }
        })
    }
}

/// The store port.
pub struct Store {
    shared: Arc<Shared>,
    client: Client,
    clock: Clock,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("client", &self.client).finish_non_exhaustive()
    }
}

impl Store {
    /// Hands an insert in; an end that is known at once, or the way to hear of it.
    fn insert(&self, insert: Insert) -> Result<oneshot::Receiver<InsertOutcome>, InsertOutcome> {
        self.shared.act(|state, now| {
            if (self.clock)() > insert.send_by {
                return Err(InsertOutcome::Stale);
            }
            if state.dead.contains(&self.client.process) {
                return Err(InsertOutcome::Again(unheard()));
            }
            let fate = match state.models.store.misfit(now, &insert) {
                Some(misfit) => Fate::Refused { after: Duration::ZERO, refusal: words(misfit) },
                None => (state.fates)(&insert),
            };
            let (waits, ended) = oneshot::channel();
            state.inserts.insert((self.client, insert.shard, insert.attempt), waits);
            state.models.store.insert(now, self.client, insert, fate, 0);
            Ok(ended)
        })
    }

    /// Nobody waits for these any more; at the store they go on.
    fn abort(&self, shard: ShardId, until: Attempt) {
        self.shared.act(|state, _| {
            state
                .inserts
                .retain(|(from, of, attempt), _| (*from, *of) != (self.client, shard) || *attempt > until);
        });
    }
}

fn refusal(class: Class, message: &str) -> Refusal {
    Refusal { class, code: None, row: None, message: message.to_owned() }
}

/// What a dead process is told.
fn unheard() -> Refusal {
    refusal(Class::Passing, "not connected")
}

/// What a dead process is told of a question; none of what is no question.
fn unanswered(question: Command) -> Option<store::Reply> {
    Some(match question {
        Command::ReadBack { attempt, table, .. } => {
            store::Reply::ReadBack { attempt, table, outcome: Err(unheard()) }
        }
        Command::Describe { attempt, table, .. } => {
            let outcome = Err(DescribeError::Failed(unheard()));
            store::Reply::Described { attempt, table, outcome }
        }
        Command::Insert(_) | Command::Abort { .. } => return None,
    })
}

/// The store's words on a block that does not fit its table.
fn words(misfit: Misfit) -> Refusal {
    let (code, row, message) = match misfit {
        Misfit::Row(at) => (117, u32::try_from(at + 1).ok(), "a row does not fit"),
        Misfit::Partitions => (252, None, "too many partitions for a single block"),
    };
    Refusal { code: Some(code), row, ..refusal(Class::Data, message) }
}

#[async_trait]
impl store::Port for Store {
    async fn call(&self, command: Command) -> Option<store::Reply> {
        match command {
            Command::Insert(insert) => {
                let (attempt, table) = (insert.attempt, insert.table.clone());
                let outcome = match self.insert(insert) {
                    Ok(ended) => ended
                        .await
                        .unwrap_or_else(|_| InsertOutcome::Doubt(refusal(Class::Doubt, "no answer"))),
                    Err(outcome) => outcome,
                };
                Some(store::Reply::Inserted { attempt, table, outcome })
            }
            Command::Abort { shard, until } => {
                self.abort(shard, until);
                None
            }
            question => self.shared.act(|state, now| {
                if state.dead.contains(&self.client.process) {
                    unanswered(question)
                } else {
                    state.models.store.answer(now, &question)
                }
            }),
        }
    }
}

/// The dead letters' port.
pub struct DeadLetters {
    shared: Arc<Shared>,
    process: u32,
    clock: Clock,
}

impl fmt::Debug for DeadLetters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeadLetters").field("process", &self.process).finish_non_exhaustive()
    }
}

#[async_trait]
impl dead_letters::Port for DeadLetters {
    async fn call(&self, command: dead_letters::Command) -> dead_letters::Reply {
        let dead_letters::Command::Park { attempt, letter, send_by, unless_there } = command;
        let outcome = self.shared.act(|state, now| {
            if (self.clock)() > send_by {
                dead_letters::ParkOutcome::Stale
            } else if state.dead.contains(&self.process) {
                dead_letters::ParkOutcome::Failed(not_connected())
            } else {
                state.models.letters.park(now, &letter, unless_there).outcome
            }
        });
        dead_letters::Reply::Parked { attempt, table: letter.table, outcome }
    }
}
