//! Models that answer wrongly on purpose: the suite must notice each, by the scripts that are named.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use holdfast_core::ports::dead_letters::ParkOutcome;
use holdfast_core::ports::delivery::{self, Inspection, PinId, Pull, PullEnd, Rows};
use holdfast_core::ports::ledger::{self, Revision, WriteOutcome};
use holdfast_core::ports::members::{self, Probe};
use holdfast_core::ports::store::{self, Description, InsertOutcome, Level};
use holdfast_core::ports::{Failure, FailureClass, dead_letters, retention};
use holdfast_core::row::{Delivery, Mark, Seq, TableName};
use holdfast_core::time::Timestamp;

use crate::bench::{Between, Client};
use crate::script::{Acks, Setup};

/// A lie, which scripts must notice, and which of the others may.
pub(crate) struct Lie {
    pub(crate) what: &'static str,
    pub(crate) noticed_by: &'static [&'static str],
    /// It changes nothing for a script that has none of these texts in its steps, and whose setup it leaves alone.
    pub(crate) near: &'static [&'static str],
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

/// Bends what the models are made like.
struct Made<F>(F);

impl<F: Fn(&mut Setup) + Send + Sync> Between for Made<F> {
    fn setup(&self, setup: &Setup) -> Setup {
        let mut setup = setup.clone();
        (self.0)(&mut setup);
        setup
    }
}

/// What the operator does that begins with this word is not done.
struct Nothing(&'static str);

impl Between for Nothing {
    fn operates(&self, words: &[&str]) -> bool {
        words[0] != self.0
    }
}

/// Bends, or keeps back, what a member hears.
struct Hearsay<F>(F);

impl<F: Fn(members::Reply) -> Option<members::Reply> + Clone + Send + Sync + 'static> Between for Hearsay<F> {
    fn member_sink(&self, sink: members::Sink) -> members::Sink {
        let bend = self.0.clone();
        Arc::new(move |reply| bend(reply).into_iter().for_each(|reply| sink(reply)))
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

fn looks(bend: impl Fn(&mut Inspection) + Clone + Send + Sync + 'static) -> Box<dyn Between> {
    Box::new(Clients(move |client: Client| {
        let bend = bend.clone();
        let after = move |mut reply| {
            if let Some(delivery::Reply::Inspected { outcome: Ok(seen), .. }) = &mut reply {
                bend(seen);
            }
            reply
        };
        Client { delivery: Bent::after(client.delivery, after), ..client }
    }))
}

/// Bends pulls; none of the renewals.
fn pulls(bend: impl Fn(&mut Pull) + Clone + Send + Sync + 'static) -> Box<dyn Between> {
    deliveries(move |mut command| {
        if let delivery::Command::Pull(pull) = &mut command
            && !renewal(pull)
        {
            bend(pull);
        }
        Goes(command)
    })
}

fn descriptions(bend: impl Fn(&mut Description) + Clone + Send + Sync + 'static) -> Box<dyn Between> {
    Box::new(Clients(move |client: Client| {
        let bend = bend.clone();
        let after = move |mut reply| {
            if let Some(store::Reply::Described { outcome: Ok(found), .. }) = &mut reply {
                bend(found);
            }
            reply
        };
        Client { store: Bent::after(client.store, after), ..client }
    }))
}

fn trims(
    bend: impl Fn(retention::Command) -> Becomes<retention::Command, retention::Reply>
    + Clone
    + Send
    + Sync
    + 'static,
) -> Box<dyn Between> {
    Box::new(Clients(move |client: Client| Client {
        retention: Bent::before(client.retention, bend.clone()),
        ..client
    }))
}

/// A pull's end takes its pin along.
struct PinEnds(Arc<dyn delivery::Port>);

#[async_trait]
impl delivery::Port for PinEnds {
    async fn call(&self, command: delivery::Command) -> Option<delivery::Reply> {
        let reply = self.0.call(command).await;
        if let Some(delivery::Reply::Ended { attempt, .. }) = reply {
            self.0.call(delivery::Command::Unpin { attempt }).await;
        }
        reply
    }
}

/// One pull at a time: the others wait until it is over.
struct OneByOne {
    port: Arc<dyn delivery::Port>,
    turn: Arc<tokio::sync::Mutex<()>>,
}

#[async_trait]
impl delivery::Port for OneByOne {
    async fn call(&self, command: delivery::Command) -> Option<delivery::Reply> {
        let pull = matches!(command, delivery::Command::Pull(_));
        let _turn = if pull { Some(self.turn.lock().await) } else { None };
        self.port.call(command).await
    }
}

fn renewal(pull: &delivery::Pull) -> bool {
    pull.max_bytes == Some(1)
}

/// Longer than any script.
const LONG: Duration = Duration::from_hours(1);

/// All of them, made for one script.
pub(crate) fn all() -> Vec<Lie> {
    use delivery::{Command, Reply};

    vec![
        Lie {
            what: "a renewal renews nothing",
            noticed_by: &["nats.renewal.rows-pending", "nats.renewal.no-rows", "nats.renewal.nobody-pinned"],
            near: &["bytes 1"],
            between: deliveries(|command| match command {
                Command::Pull(pull) if renewal(&pull) => {
                    Ends(Some(Reply::Ended { attempt: pull.attempt, end: PullEnd::TooLarge }))
                }
                other => Goes(other),
            }),
        },
        Lie {
            what: "a renewal takes a row",
            noticed_by: &["nats.renewal.rows-pending", "nats.renewal.takes-no-pin", "nats.renewal.row-comes"],
            near: &["bytes 1"],
            between: deliveries(|command| match command {
                Command::Pull(pull) if renewal(&pull) => {
                    Goes(Command::Pull(delivery::Pull { max_bytes: None, ..pull }))
                }
                other => Goes(other),
            }),
        },
        Lie {
            what: "a pull under a pin that is not held is served",
            noticed_by: &["nats.pin.wrong-id", "nats.pin.nobody-and-rows", "nats.pin.nobody-and-no-rows"],
            near: &["under "],
            between: deliveries(|command| match command {
                Command::Pull(pull) => Goes(Command::Pull(delivery::Pull { pin: None, ..pull })),
                other => Goes(other),
            }),
        },
        Lie {
            what: "the numbering goes on for ever",
            noticed_by: &["nats.reset.numbers-anew", "nats.consumer.created-again", "nats.stream.made-anew"],
            near: &["reset", "create consumer", "stream anew"],
            between: {
                let count = Arc::new(AtomicU64::new(0));
                Box::new(Sink(move || {
                    let count = Arc::clone(&count);
                    move |mut rows: Rows| {
                        for row in &mut rows.rows {
                            row.delivery = Delivery(count.fetch_add(1, Ordering::Relaxed) + 1);
                        }
                        rows
                    }
                }))
            },
        },
        Lie {
            what: "a reset goes to the row after",
            noticed_by: &[
                "nats.reset.numbers-anew",
                "nats.reset.serves-who-waits",
                "nats.reset.serves-standby",
                "nats.reset.beyond-the-end",
                "nats.restart.pin-lost",
            ],
            near: &["reset"],
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
            near: &["unpin"],
            between: deliveries(|command| match command {
                Command::Unpin { attempt } => Ends(Some(Reply::Unpinned { attempt, outcome: Ok(()) })),
                other => Goes(other),
            }),
        },
        Lie {
            what: "acknowledgements go nowhere",
            noticed_by: &["nats.ack.removes", "nats.ack.work-queue", "nats.ack.by-row"],
            near: &[": ack"],
            between: deliveries(|command| match command {
                Command::Ack { .. } => Ends(None),
                other => Goes(other),
            }),
        },
        Lie {
            what: "a row that comes again looks like one that did not",
            noticed_by: &["nats.ack.again", "nats.ack.held-back"],
            near: &["!"],
            between: Box::new(Sink(|| {
                |mut rows: Rows| {
                    rows.rows.iter_mut().for_each(|row| row.redelivered = false);
                    rows
                }
            })),
        },
        Lie {
            what: "nothing is ever pending",
            noticed_by: &["nats.look.numbers", "nats.reset.numbers-anew", "nats.reset.rows-gone"],
            near: &["pending"],
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
            near: &["deleted", "no-responders"],
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
            noticed_by: &["nats.ledger.compare-and-set", "nats.ledger.twice"],
            near: &["conflict"],
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
            near: &["silent"],
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
            near: &["park"],
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
            near: &["trim"],
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
            noticed_by: &[
                "clickhouse.token.decides",
                "clickhouse.token.partly-stored",
                "clickhouse.token.at-once",
                "clickhouse.insert.goes-on",
                "clickhouse.restart.tokens-kept",
                "clickhouse.token.no-columns",
                "clickhouse.swallowed.one-part",
                "clickhouse.swallowed.of-several",
            ],
            near: &["insert"],
            between: {
                let count = Arc::new(AtomicU64::new(0));
                stores(move |command| match command {
                    store::Command::Insert(insert) => {
                        let token = format!("{}-{}", insert.token.0, count.fetch_add(1, Ordering::Relaxed));
                        let token = store::Token(token.into());
                        Goes(store::Command::Insert(store::Insert { token, ..insert }))
                    }
                    other => Goes(other),
                })
            },
        },
        Lie {
            what: "a token is never forgotten",
            noticed_by: &[
                "clickhouse.window.oldest-goes",
                "clickhouse.window.counts-parts",
                "clickhouse.token.no-window",
                "clickhouse.refused.and-mended",
            ],
            near: &["insert"],
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
            near: &["of another"],
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
                "clickhouse.swallowed.of-several",
                "clickhouse.refused.no-table",
                "clickhouse.refused.and-mended",
                "clickhouse.refused.partitions",
            ],
            near: &["refused", "doubt"],
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
        Lie {
            what: "a pin never lapses",
            noticed_by: &[
                "nats.pin.lapses",
                "nats.pin.deliveries-do-not-renew",
                "nats.pin.acks-do-not-renew",
            ],
            near: &[],
            between: Box::new(Made(|setup: &mut Setup| setup.pinned_ttl = LONG)),
        },
        Lie {
            what: "a pin lapses too soon",
            noticed_by: &["nats.renewal.rows-pending", "nats.renewal.no-rows", "nats.ack.bound-renewal"],
            near: &[],
            between: Box::new(Made(|setup: &mut Setup| setup.pinned_ttl /= 8)),
        },
        Lie {
            what: "no row comes again",
            noticed_by: &["nats.ack.again", "nats.ack.again-before-new", "nats.ack.bound-again"],
            near: &[],
            between: Box::new(Made(|setup: &mut Setup| setup.ack_wait = LONG)),
        },
        Lie {
            what: "a row comes again at once",
            noticed_by: &["nats.ack.next-holder"],
            near: &[],
            between: Box::new(Made(|setup: &mut Setup| {
                if setup.acks != Acks::None {
                    setup.ack_wait = Duration::from_millis(50);
                }
            })),
        },
        Lie {
            what: "any number of rows may wait to be acknowledged",
            noticed_by: &["nats.ack.bound", "nats.ack.bound-renewal", "nats.ack.bound-again"],
            near: &[],
            between: Box::new(Made(|setup: &mut Setup| setup.max_ack_pending = None)),
        },
        Lie {
            what: "an acknowledged row stays in a work queue",
            noticed_by: &["nats.ack.work-queue", "nats.ack.late-work-queue"],
            near: &[],
            between: Box::new(Made(|setup: &mut Setup| {
                if setup.acks == Acks::WorkQueue {
                    setup.acks = Acks::Explicit;
                }
            })),
        },
        Lie {
            what: "an acknowledged row leaves any stream",
            noticed_by: &["nats.ack.removes", "nats.ack.reset-brings"],
            near: &[],
            between: Box::new(Made(|setup: &mut Setup| {
                if setup.acks == Acks::Explicit {
                    setup.acks = Acks::WorkQueue;
                }
            })),
        },
        Lie {
            what: "an acknowledgement counts for its delivery",
            noticed_by: &["nats.ack.by-row"],
            near: &[": ack"],
            between: deliveries(|command| match command {
                Command::Ack { mut rows } => {
                    rows.retain(|(seq, delivery)| seq.0 == delivery.0);
                    Goes(Command::Ack { rows })
                }
                other => Goes(other),
            }),
        },
        Lie {
            what: "a reset is answered and not done",
            noticed_by: &[
                "nats.reset.numbers-anew",
                "nats.ack.reset-forgets",
                "nats.ack.reset-brings",
                "nats.ack.late-work-queue",
                "nats.consumer.deleted-and-asked",
            ],
            near: &["reset"],
            between: deliveries(|command| match command {
                Command::Reset { attempt, .. } => Ends(Some(Reply::Reset { attempt, outcome: Ok(()) })),
                other => Goes(other),
            }),
        },
        Lie {
            what: "an unpin is refused",
            noticed_by: &["nats.unpin.lets-in", "nats.unpin.nobody"],
            near: &["unpin"],
            between: deliveries(|command| match command {
                Command::Unpin { attempt } => {
                    let outcome = Err(Failure::new(FailureClass::Missing, "nobody is pinned"));
                    Ends(Some(Reply::Unpinned { attempt, outcome }))
                }
                other => Goes(other),
            }),
        },
        Lie {
            what: "somebody is always pinned",
            noticed_by: &[
                "nats.pin.first-row",
                "nats.pin.nobody-and-rows",
                "nats.renewal.takes-no-pin",
                "nats.consumer.created-again",
                "nats.restart.pin-lost",
                "nats.leader.moves",
            ],
            near: &["pinned nobody"],
            between: looks(|seen| {
                seen.pinned.get_or_insert_with(|| PinId("somebody".into()));
            }),
        },
        Lie {
            what: "a pin goes with its pull",
            noticed_by: &["nats.pin.standby", "nats.pin.longest-waiting", "nats.pull.full"],
            near: &[": pull", "begin-pull"],
            between: Box::new(Clients(|client: Client| Client {
                delivery: Arc::new(PinEnds(client.delivery)),
                ..client
            })),
        },
        Lie {
            what: "pulls are served one by one",
            noticed_by: &["nats.pin.turns", "nats.pull.in-turn"],
            near: &["begin-pull"],
            between: {
                let turn = Arc::new(tokio::sync::Mutex::new(()));
                Box::new(Clients(move |client: Client| {
                    let (port, turn) = (client.delivery, Arc::clone(&turn));
                    Client { delivery: Arc::new(OneByOne { port, turn }), ..client }
                }))
            },
        },
        Lie {
            what: "a pull gets a row more than it asked for",
            noticed_by: &["nats.pull.full", "nats.pull.waits"],
            near: &[": pull", "begin-pull"],
            between: pulls(|pull| pull.batch += 1),
        },
        Lie {
            what: "a pull's time is over soon",
            noticed_by: &["nats.pull.empty", "nats.pull.waits", "nats.pin.standby"],
            near: &[": pull", "begin-pull"],
            between: pulls(|pull| pull.expires = Duration::from_millis(10)),
        },
        Lie {
            what: "a pull takes any number of bytes",
            noticed_by: &["nats.pull.max-bytes", "nats.pull.max-bytes-standby"],
            near: &["bytes 2500"],
            between: pulls(|pull| pull.max_bytes = None),
        },
        Lie {
            what: "a closed inbox stays open",
            noticed_by: &["nats.pull.inbox-closed"],
            near: &[": close"],
            between: deliveries(|command| match command {
                Command::Close { .. } => Ends(None),
                other => Goes(other),
            }),
        },
        Lie {
            what: "a client that was killed lives on",
            noticed_by: &["nats.pull.client-gone", "nats.members.probe"],
            near: &["kill"],
            between: Box::new(Nothing("kill")),
        },
        Lie {
            what: "a restart changes nothing",
            noticed_by: &["nats.restart.pin-lost", "nats.restart.pulls-gone"],
            near: &["restart"],
            between: Box::new(Nothing("restart")),
        },
        Lie {
            what: "a leader that moves just ends pulls",
            noticed_by: &["nats.leader.moves"],
            near: &["leader-changed"],
            between: Box::new(Clients(|client: Client| {
                let empty = |reply| match reply {
                    Some(Reply::Ended { attempt, end: PullEnd::LeaderChanged }) => {
                        Some(Reply::Ended { attempt, end: PullEnd::Empty })
                    }
                    other => other,
                };
                Client { delivery: Bent::after(client.delivery, empty), ..client }
            })),
        },
        Lie {
            what: "every stream was made at the same time",
            noticed_by: &["nats.stream.made-anew"],
            near: &["created", "trim"],
            between: looks(|seen| seen.created = Timestamp(1)),
        },
        Lie {
            what: "the stream's last row is the shard's",
            noticed_by: &["nats.look.rows-removed", "nats.look.all-removed"],
            near: &["shard-last"],
            between: looks(|seen| seen.shard_last = Some(seen.last.seq)),
        },
        Lie {
            what: "every row is there",
            noticed_by: &["nats.look.rows-removed", "nats.restart.tail-lost"],
            near: &["there", "trim"],
            between: looks(|seen| {
                seen.row_stored_at.get_or_insert_default();
            }),
        },
        Lie {
            what: "a trim of nothing is not looked at",
            noticed_by: &["nats.trim.spares"],
            near: &["trim"],
            between: trims(|command: retention::Command| {
                let retention::Command::Trim { attempt, below, .. } = command;
                match below {
                    Seq::ZERO => Ends(retention::Reply::Trimmed { attempt, outcome: Ok(0) }),
                    _ => Goes(command),
                }
            }),
        },
        Lie {
            what: "a trim is answered and not done",
            noticed_by: &["nats.trim.below", "nats.trim.spares", "nats.restart.tail-lost"],
            near: &["trim"],
            between: trims(|retention::Command::Trim { attempt, .. }| {
                Ends(retention::Reply::Trimmed { attempt, outcome: Ok(0) })
            }),
        },
        Lie {
            what: "a trim takes the row that it names",
            noticed_by: &["nats.trim.below"],
            near: &["trim"],
            between: trims(|retention::Command::Trim { attempt, created, below, witness }| {
                Goes(retention::Command::Trim { attempt, created, below: Seq(below.0 + 1), witness })
            }),
        },
        Lie {
            what: "revisions fall",
            noticed_by: &["nats.ledger.compare-and-set", "nats.ledger.revisions-rise", "nats.ledger.twice"],
            near: &[": write"],
            between: Box::new(Clients(|client: Client| {
                let turned = |Revision(number)| Revision(if number == 0 { 0 } else { 1_000_000 - number });
                let before = move |mut command| {
                    if let ledger::Command::Write { expected, .. } = &mut command {
                        *expected = turned(*expected);
                    }
                    Goes(command)
                };
                let after = move |mut reply| {
                    match &mut reply {
                        ledger::Reply::Written { outcome: WriteOutcome::Stored(revision), .. } => {
                            *revision = turned(*revision);
                        }
                        ledger::Reply::Read { outcome: Ok(Some(entry)), .. } => {
                            entry.revision = turned(entry.revision);
                        }
                        _ => {}
                    }
                    reply
                };
                let (before, after) = (Box::new(before), Box::new(after));
                Client { ledger: Arc::new(Bent { port: client.ledger, before, after }), ..client }
            })),
        },
        Lie {
            what: "a watch begins with nothing",
            noticed_by: &["nats.members.watch"],
            near: &["hears"],
            between: Box::new(Hearsay(|reply| match reply {
                members::Reply::Snapshot(_) => Some(members::Reply::Snapshot(Vec::new())),
                other => Some(other),
            })),
        },
        Lie {
            what: "a removal is not told",
            noticed_by: &["nats.members.watch", "nats.members.remove-if"],
            near: &["hears"],
            between: Box::new(Hearsay(|reply| match reply {
                members::Reply::Removed { .. } => None,
                other => Some(other),
            })),
        },
        Lie {
            what: "a removal minds no revision",
            noticed_by: &["nats.members.remove-if"],
            near: &[" if "],
            between: Box::new(Members(|member| -> Arc<dyn members::Port> {
                Bent::before(member, |command| match command {
                    members::Command::Delete { attempt, member, .. } => {
                        Goes(members::Command::Delete { attempt, member, only: None })
                    }
                    other => Goes(other),
                })
            })),
        },
        Lie {
            what: "whatever becomes of a letter, it is kept",
            noticed_by: &["nats.letters.no-stream", "nats.letters.full", "nats.letters.another-row"],
            near: &["park"],
            between: Box::new(Clients(|client: Client| {
                let kept = |dead_letters::Reply::Parked { attempt, table, .. }| dead_letters::Reply::Parked {
                    attempt,
                    table,
                    outcome: ParkOutcome::Parked,
                };
                Client { letters: Bent::after(client.letters, kept), ..client }
            })),
        },
        Lie {
            what: "whatever the table, exactly once",
            noticed_by: &["clickhouse.token.no-window", "clickhouse.token.no-columns"],
            near: &["describe"],
            between: descriptions(|found| found.target.level = Level::ExactlyOnce),
        },
        Lie {
            what: "a description finds no row",
            noticed_by: &["clickhouse.describe.holds"],
            near: &["holds"],
            between: descriptions(|found| found.holds = None),
        },
        Lie {
            what: "no row is there twice",
            noticed_by: &["clickhouse.read-back.repeated"],
            near: &["repeated"],
            between: Box::new(Clients(|client: Client| {
                let once = |mut reply| {
                    if let Some(store::Reply::ReadBack { outcome: Ok(found), .. }) = &mut reply {
                        found.repeated = None;
                    }
                    reply
                };
                Client { store: Bent::after(client.store, once), ..client }
            })),
        },
        Lie {
            what: "rows are stored in the order of their sequences",
            noticed_by: &["clickhouse.order.of-insertion"],
            near: &["insert"],
            between: stores(|command| match command {
                store::Command::Insert(insert) => {
                    let mut rows = insert.rows.to_vec();
                    rows.sort_by_key(|row| row.seq);
                    Goes(store::Command::Insert(store::Insert { rows: rows.into(), ..insert }))
                }
                other => Goes(other),
            }),
        },
        Lie {
            what: "a table's tokens are every table's",
            noticed_by: &["clickhouse.token.of-a-table"],
            near: &["insert"],
            between: {
                let first = Arc::new(Mutex::new(BTreeMap::<store::Token, TableName>::new()));
                stores(move |command| match command {
                    store::Command::Insert(insert) => {
                        let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
                        if *first.entry(insert.token.clone()).or_insert(insert.table.clone()) == insert.table
                        {
                            return Goes(store::Command::Insert(insert));
                        }
                        let (attempt, table) = (insert.attempt, insert.table);
                        Ends(Some(store::Reply::Inserted { attempt, table, outcome: InsertOutcome::Stored }))
                    }
                    other => Goes(other),
                })
            },
        },
        Lie {
            what: "who gives an insert up waits for it",
            noticed_by: &["clickhouse.insert.goes-on"],
            near: &["abort"],
            between: stores(|command| match command {
                store::Command::Abort { .. } => Ends(None),
                other => Goes(other),
            }),
        },
    ]
}
