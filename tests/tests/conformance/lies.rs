//! Models that answer wrongly on purpose: the suite must notice each, by the scripts that are named.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use holdfast_core::ports::delivery::{self, PullEnd, Rows};
use holdfast_core::ports::ledger::{self, Revision, WriteOutcome};
use holdfast_core::ports::members::{self, Probe};
use holdfast_core::ports::store::{self, InsertOutcome};
use holdfast_core::ports::{dead_letters, retention};
use holdfast_core::row::{Delivery, Mark, Seq};

use crate::bench::{Between, Client};

/// A lie, and which scripts must notice.
pub(crate) struct Lie {
    pub(crate) what: &'static str,
    pub(crate) noticed_by: &'static [&'static str],
    pub(crate) between: Box<dyn Between>,
}

/// What becomes of a command.
enum Becomes<C, R> {
    /// It goes on, perhaps as another one.
    Goes(C),
    /// It is answered here.
    Ends(R),
}

use Becomes::{Ends, Goes};

type Before<C, R> = Box<dyn Fn(C) -> Becomes<C, R> + Send + Sync>;
type After<R> = Box<dyn Fn(R) -> R + Send + Sync>;

/// A port that is lied about.
struct Bent<P: ?Sized, C, R> {
    port: Arc<P>,
    before: Before<C, R>,
    after: After<R>,
}

impl<P: ?Sized, C: 'static, R: 'static> Bent<P, C, R> {
    fn before(port: Arc<P>, before: impl Fn(C) -> Becomes<C, R> + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { port, before: Box::new(before), after: Box::new(|reply| reply) })
    }

    fn after(port: Arc<P>, after: impl Fn(R) -> R + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { port, before: Box::new(Goes), after: Box::new(after) })
    }
}

macro_rules! bent {
    ($($port:ident: $reply:ty),*) => {$(
        #[async_trait]
        impl $port::Port for Bent<dyn $port::Port, $port::Command, $reply> {
            async fn call(&self, command: $port::Command) -> $reply {
                match (self.before)(command) {
                    Goes(command) => (self.after)(self.port.call(command).await),
                    Ends(reply) => reply,
                }
            }
        }
    )*};
}

bent!(
    delivery: Option<delivery::Reply>,
    store: Option<store::Reply>,
    ledger: ledger::Reply,
    members: members::Reply,
    dead_letters: dead_letters::Reply,
    retention: retention::Reply
);

struct Clients<F>(F);

impl<F: Fn(Client) -> Client + Send + Sync> Between for Clients<F> {
    fn client(&self, client: Client) -> Client {
        (self.0)(client)
    }
}

/// Makes for each client what bends the rows that come to it.
struct Sink<F>(F);

impl<F, B> Between for Sink<F>
where
    F: Fn() -> B + Send + Sync,
    B: Fn(Rows) -> Rows + Send + Sync + 'static,
{
    fn sink(&self, sink: delivery::Sink) -> delivery::Sink {
        let bend = (self.0)();
        Arc::new(move |reply| match reply {
            delivery::Reply::Rows(rows) => sink(delivery::Reply::Rows(bend(rows))),
            other => sink(other),
        })
    }
}

struct Members<F>(F);

impl<F: Fn(Arc<dyn members::Port>) -> Arc<dyn members::Port> + Send + Sync> Between for Members<F> {
    fn member(&self, member: Arc<dyn members::Port>) -> Arc<dyn members::Port> {
        (self.0)(member)
    }
}

fn deliveries(
    bend: impl Fn(delivery::Command) -> Becomes<delivery::Command, Option<delivery::Reply>>
    + Clone
    + Send
    + Sync
    + 'static,
) -> Box<dyn Between> {
    Box::new(Clients(move |client: Client| Client {
        delivery: Bent::before(client.delivery, bend.clone()),
        ..client
    }))
}

fn stores(
    bend: impl Fn(store::Command) -> Becomes<store::Command, Option<store::Reply>> + Clone + Send + Sync + 'static,
) -> Box<dyn Between> {
    Box::new(Clients(move |client: Client| Client {
        store: Bent::before(client.store, bend.clone()),
        ..client
    }))
}

fn renewal(pull: &delivery::Pull) -> bool {
    pull.max_bytes == Some(1)
}

pub(crate) fn all() -> Vec<Lie> {
    use delivery::{Command, Reply};

    vec![
        Lie {
            what: "a renewal renews nothing",
            noticed_by: &["nats.renewal.rows-pending"],
            between: deliveries(|command| match command {
                Command::Pull(pull) if renewal(&pull) => {
                    Ends(Some(Reply::Ended { attempt: pull.attempt, end: PullEnd::TooLarge }))
                }
                other => Goes(other),
            }),
        },
        Lie {
            what: "a renewal takes a row",
            noticed_by: &["nats.renewal.rows-pending", "nats.renewal.takes-no-pin"],
            between: deliveries(|command| match command {
                Command::Pull(pull) if renewal(&pull) => {
                    Goes(Command::Pull(delivery::Pull { max_bytes: None, ..pull }))
                }
                other => Goes(other),
            }),
        },
        Lie {
            what: "a pull under a pin that is not held is served",
            noticed_by: &["nats.pin.wrong-id"],
            between: deliveries(|command| match command {
                Command::Pull(pull) => Goes(Command::Pull(delivery::Pull { pin: None, ..pull })),
                other => Goes(other),
            }),
        },
        Lie {
            what: "a reset leaves the numbering alone",
            noticed_by: &["nats.reset.numbers-anew"],
            between: Box::new(Sink(|| {
                let count = AtomicU64::new(0);
                move |mut rows: Rows| {
                    for row in &mut rows.rows {
                        row.delivery = Delivery(count.fetch_add(1, Ordering::Relaxed) + 1);
                    }
                    rows
                }
            })),
        },
        Lie {
            what: "a reset goes to the row after",
            noticed_by: &["nats.reset.numbers-anew", "nats.reset.serves-who-waits"],
            between: deliveries(|command| match command {
                Command::Reset { attempt, inbox, from } => {
                    Goes(Command::Reset { attempt, inbox, from: Seq(from.0 + 1) })
                }
                other => Goes(other),
            }),
        },
        Lie {
            what: "an unpin unpins nobody",
            noticed_by: &["nats.unpin.lets-in"],
            between: deliveries(|command| match command {
                Command::Unpin { attempt } => Ends(Some(Reply::Unpinned { attempt, outcome: Ok(()) })),
                other => Goes(other),
            }),
        },
        Lie {
            what: "acknowledgements go nowhere",
            noticed_by: &["nats.ack.removes", "nats.ack.work-queue"],
            between: deliveries(|command| match command {
                Command::Ack { .. } => Ends(None),
                other => Goes(other),
            }),
        },
        Lie {
            what: "a row that comes again looks like one that did not",
            noticed_by: &["nats.ack.again", "nats.ack.held-back"],
            between: Box::new(Sink(|| {
                |mut rows: Rows| {
                    rows.rows.iter_mut().for_each(|row| row.redelivered = false);
                    rows
                }
            })),
        },
        Lie {
            what: "nothing is ever pending",
            noticed_by: &["nats.look.numbers", "nats.reset.numbers-anew"],
            between: Box::new(Clients(|client: Client| {
                let none = |reply| match reply {
                    Some(Reply::Inspected { attempt, outcome: Ok(seen) }) => {
                        let outcome = Ok(delivery::Inspection { pending: 0, ..seen });
                        Some(Reply::Inspected { attempt, outcome })
                    }
                    other => other,
                };
                Client { delivery: Bent::after(client.delivery, none), ..client }
            })),
        },
        Lie {
            what: "a deleted consumer's pulls are empty",
            noticed_by: &["nats.consumer.deleted"],
            between: Box::new(Clients(|client: Client| {
                let empty = |reply| match reply {
                    Some(Reply::Ended { attempt, end: PullEnd::Deleted | PullEnd::NoResponders }) => {
                        Some(Reply::Ended { attempt, end: PullEnd::Empty })
                    }
                    other => other,
                };
                Client { delivery: Bent::after(client.delivery, empty), ..client }
            })),
        },
        Lie {
            what: "a conflict is stored",
            noticed_by: &["nats.ledger.compare-and-set"],
            between: Box::new(Clients(|client: Client| {
                let stored = |reply| match reply {
                    ledger::Reply::Written { attempt, outcome: WriteOutcome::Conflict } => {
                        ledger::Reply::Written { attempt, outcome: WriteOutcome::Stored(Revision(99)) }
                    }
                    other => other,
                };
                Client { ledger: Bent::after(client.ledger, stored), ..client }
            })),
        },
        Lie {
            what: "a frozen member is gone",
            noticed_by: &["nats.members.probe"],
            between: Box::new(Members(|member| -> Arc<dyn members::Port> {
                Bent::after(member, |reply| match reply {
                    members::Reply::Probed { attempt, answer: Probe::Silent } => {
                        members::Reply::Probed { attempt, answer: Probe::NoResponders }
                    }
                    other => other,
                })
            })),
        },
        Lie {
            what: "a dead letter is kept each time",
            noticed_by: &["nats.letters.kept-once"],
            between: Box::new(Clients(|client: Client| {
                let each = |dead_letters::Command::Park { attempt, letter, send_by, .. }| {
                    Goes(dead_letters::Command::Park { attempt, letter, send_by, unless_there: false })
                };
                Client { letters: Bent::before(client.letters, each), ..client }
            })),
        },
        Lie {
            what: "whatever the witness, the stream is trimmed",
            noticed_by: &["nats.trim.spares"],
            between: Box::new(Clients(|client: Client| {
                let blind = |command: retention::Command| {
                    let retention::Command::Trim { attempt, created, below, .. } = command;
                    Goes(retention::Command::Trim { attempt, created, below, witness: Mark::default() })
                };
                Client { retention: Bent::before(client.retention, blind), ..client }
            })),
        },
        Lie {
            what: "a token is forgotten at once",
            noticed_by: &["clickhouse.token.decides", "clickhouse.token.partly-stored"],
            between: stores(|command| match command {
                store::Command::Insert(insert) => {
                    let token = format!("{}-{}", insert.token.0, insert.attempt.0);
                    Goes(store::Command::Insert(store::Insert {
                        token: store::Token(token.into()),
                        ..insert
                    }))
                }
                other => Goes(other),
            }),
        },
        Lie {
            what: "a token is never forgotten",
            noticed_by: &["clickhouse.window.oldest-goes", "clickhouse.window.counts-parts"],
            between: Box::new(Clients(|client: Client| {
                let seen = Mutex::new(BTreeSet::new());
                let known = move |command| match command {
                    store::Command::Insert(insert) => {
                        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                        if seen.insert((insert.table.clone(), insert.token.clone())) {
                            return Goes(store::Command::Insert(insert));
                        }
                        let (attempt, table) = (insert.attempt, insert.table);
                        Ends(Some(store::Reply::Inserted { attempt, table, outcome: InsertOutcome::Stored }))
                    }
                    other => Goes(other),
                };
                Client { store: Bent::before(client.store, known), ..client }
            })),
        },
        Lie {
            what: "a read-back looks at every stream's rows",
            noticed_by: &["clickhouse.read-back.stream"],
            between: stores(|command| match command {
                store::Command::ReadBack { attempt, shard, table, target, first, last, .. } => {
                    let created = crate::run::STREAM;
                    Goes(store::Command::ReadBack { attempt, shard, table, target, created, first, last })
                }
                other => Goes(other),
            }),
        },
        Lie {
            what: "whatever becomes of an insert, it is stored",
            noticed_by: &[
                "clickhouse.refused.row",
                "clickhouse.swallowed.one-part",
                "clickhouse.refused.no-table",
            ],
            between: Box::new(Clients(|client: Client| {
                let stored = |reply| match reply {
                    Some(store::Reply::Inserted { attempt, table, .. }) => {
                        Some(store::Reply::Inserted { attempt, table, outcome: InsertOutcome::Stored })
                    }
                    other => other,
                };
                Client { store: Bent::after(client.store, stored), ..client }
            })),
        },
    ]
}
