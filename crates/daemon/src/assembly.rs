//! Puts a daemon's parts together: connections, adapters, and the shards on them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use holdfast_clickhouse::Store;
use holdfast_clickhouse::horizon::RECEIVE_TIMEOUT;
use holdfast_core::action::Event;
use holdfast_core::notice::Report;
use holdfast_core::ports::delivery::Acks;
use holdfast_core::ports::{Failure, FailureClass, dead_letters, ledger, store};
use holdfast_core::record::Session;
use holdfast_core::row::ShardId;
use holdfast_core::shard::{self, Shard};
use holdfast_core::trim;
use holdfast_nats::Connection;
use holdfast_nats::connect::{ConnectError, Options};
use holdfast_nats::dead_letters::DeadLetters;
use holdfast_nats::delivery::{Delivery, Screen};
use holdfast_nats::ledger::Ledger;
use holdfast_nats::retention::Retention;
use holdfast_nats::topology::Topology;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{info, warn};

use crate::clock::Clock;
use crate::config::Config;
use crate::driver::{Ports, drive, drive_trim, sink};
use crate::exit::Exit;
use crate::preflight::preflight;
use crate::process::Process;
use crate::shards::Watcher;
use crate::sharing::Starter;

/// An intent is sent at most this long after the record was last known to be ours.
///
/// With an insert's own time limit it bounds how late an insert can arrive, and so how much a table's
/// deduplication window must remember.
pub(crate) const STALE: Duration = Duration::from_secs(10);

/// The record's part of what one message may carry: headers and subject need some, too.
const RECORD_SHARE: usize = 7;

/// How often the stream is trimmed behind the ledger.
const TRIM_INTERVAL: Duration = Duration::from_secs(1);

/// The pause between two attempts to connect for a shard.
const CONNECT_PAUSE: Duration = Duration::from_millis(500);

/// The ledger, with its writes counted.
struct Counted {
    ledger: Arc<Ledger>,
    process: Arc<Process>,
}

#[async_trait]
impl ledger::Port for Counted {
    async fn call(&self, command: ledger::Command) -> ledger::Reply {
        let reply = ledger::Port::call(&*self.ledger, command).await;
        if let ledger::Reply::Written { outcome, .. } = &reply {
            match outcome {
                ledger::WriteOutcome::Stored(_) => self.process.metrics.ledger_write(true),
                ledger::WriteOutcome::Conflict => self.process.metrics.ledger_write(false),
                ledger::WriteOutcome::Unknown(_) | ledger::WriteOutcome::Refused(_) => {}
            }
        }
        reply
    }
}

/// Where there are no dead letters: a row that was to become one before they were turned off waits.
struct NoDeadLetters;

#[async_trait]
impl dead_letters::Port for NoDeadLetters {
    async fn call(&self, command: dead_letters::Command) -> dead_letters::Reply {
        let dead_letters::Command::Park { attempt, letter, .. } = command;
        let why = "topology.dead_letters is \"\", and was not when the row was found to be one; set it again";
        let outcome = dead_letters::ParkOutcome::Failed(Failure::new(FailureClass::Missing, why));
        dead_letters::Reply::Parked { attempt, table: letter.table, outcome }
    }
}

/// Connects to NATS.
///
/// # Errors
/// Code 2 for what the configuration says and cannot be, 1 for a server that cannot be reached.
pub(crate) async fn connect(config: &Config) -> Result<Connection, Exit> {
    Connection::open(&config.nats()?).await.map_err(|error| match error {
        ConnectError::Address { .. } | ConnectError::CredentialsFile { .. } => Exit::usage(error),
        _ => Exit::error(error),
    })
}

/// The parts that all shards share.
pub(crate) struct Assembly {
    /// What is asked of NATS but for rows: a flood of those must not hold up the answers that writing waits for.
    pub(crate) control: Connection,
    pub(crate) topology: Topology,
    /// What is the same for every shard.
    shard: shard::Config,
    nats: Options,
    history: Duration,
    held_rows: u64,
    clock: Clock,
    process: Arc<Process>,
    ledger: Arc<dyn ledger::Port>,
    store: Arc<Store>,
    /// None: they are switched off.
    letters: Option<DeadLetters>,
    screen: Screen,
}

impl Assembly {
    /// Connects, looks whether everything is there, and puts the shared parts together.
    pub(crate) async fn new(config: &Config, clock: Clock, process: &Arc<Process>) -> Result<Self, Exit> {
        let topology = config.topology()?;
        let start = config.start()?;
        let control = connect(config).await?;
        preflight(&topology, &control).await?;
        let store = Store::new(config.clickhouse()?, Arc::new(move || clock.now())).map_err(Exit::usage)?;
        let store = Arc::new(store);
        // Rows wait for ClickHouse, however long; but somebody who mistyped its address should know at once.
        tokio::spawn({
            let store = Arc::clone(&store);
            async move {
                match store.ping().await {
                    Ok(server) => info!(version = server.version, "ClickHouse answers"),
                    Err(error) => warn!("{error}; rows wait for it"),
                }
            }
        });
        let screen: Screen = {
            let store = Arc::clone(&store);
            Arc::new(move |table, payload| store.screen(table, payload))
        };
        let ledger = Arc::new(Ledger::new(control.clone(), topology.bucket.clone(), topology.streams()));
        let ledger: Arc<dyn ledger::Port> = Arc::new(Counted { ledger, process: Arc::clone(process) });
        let letters = config
            .parking()
            .dead_letters
            .then(|| DeadLetters::new(control.clone(), &topology, Arc::new(move || clock.now())));
        info!(
            node = config.node_id(),
            nats = control.servers(),
            stream = %topology.streams(),
            shards = topology.shards,
            session = ?process.session(),
            acks = ?config.acks(),
            dead_letters = topology.dead_letters,
            "holdfast starts"
        );
        let shard = shard::Config {
            shard: ShardId(0),
            stream: "".into(),
            session: process.session(),
            pinned_ttl: topology.pinned_ttl,
            batch: config.batch(),
            stale: STALE,
            patience: 2 * (config.insert_timeout() + STALE),
            attempt_life: config.insert_timeout() + RECEIVE_TIMEOUT,
            acks: config.acks(),
            parking: config.parking(),
            start,
            max_lanes: config.max_lanes(),
            max_record: control.max_payload() / 8 * RECORD_SHARE,
        };
        Ok(Self {
            control,
            topology,
            shard,
            nats: config.nats()?,
            history: config.history(),
            held_rows: config.limits.held_rows,
            clock,
            process: Arc::clone(process),
            ledger,
            store,
            letters,
            screen,
        })
    }

    /// Starts to trim each stream while `leads` says so: one daemon is enough. Nothing with acknowledgements: there the
    /// streams' own retention decides what stays. It ends when what is returned is dropped.
    pub(crate) fn trim(
        &self,
        leads: &watch::Receiver<bool>,
        reports: &UnboundedSender<(ShardId, Report)>,
    ) -> JoinSet<()> {
        let mut trimmers = JoinSet::new();
        if self.shard.acks != Acks::None {
            return trimmers;
        }
        for (number, stream) in (0..).zip(self.topology.streams().names()) {
            // A stream's rows are trimmed by the records of its own shards.
            let shards = self.topology.shards_in(number).collect();
            let trim = trim::Config { shards, interval: TRIM_INTERVAL, history: self.history };
            let retention = Arc::new(Retention::new(self.control.clone(), stream));
            let watcher = Watcher::of_trimmer(Arc::clone(&self.process), reports.clone());
            let (clock, ledger, leads) = (self.clock, Arc::clone(&self.ledger), leads.clone());
            trimmers.spawn(async move { drive_trim(trim, clock, ledger, retention, leads, &watcher).await });
        }
        trimmers
    }
}

impl Starter for Assembly {
    fn start(
        &self,
        shard: ShardId,
        mut events: UnboundedReceiver<Event>,
        own: UnboundedSender<Event>,
        reports: UnboundedSender<(ShardId, Report)>,
    ) -> BoxFuture<'static, ()> {
        // A session for each claim: what a shard writes is told apart from what its forerunner in this process wrote.
        let config = shard::Config {
            shard,
            stream: self.topology.streams().of(shard).into(),
            session: Session(rand::random()),
            ..self.shard.clone()
        };
        let mut source = self.topology.source(shard, 3 * config.pull_interval());
        let (nats, clock, screen) = (self.nats.clone(), self.clock, Arc::clone(&self.screen));
        source.min_ack_pending = source.min_ack_pending.max(2 * self.held_rows);
        let (ledger, letters) = (Arc::clone(&self.ledger), self.letters.clone());
        let store: Arc<dyn store::Port> = Arc::new(self.store.for_machine());
        let watcher = Watcher::new(shard, Arc::clone(&self.process), reports.clone());
        Box::pin(async move {
            // A connection for each shard's rows: a message that breaks one must not stop another shard.
            let mut early = Vec::new();
            let rows = loop {
                let connected = tokio::select! {
                    connected = Connection::open(&nats) => connected,
                    event = events.recv() => match event {
                        None | Some(Event::HandOver { .. } | Event::Stop { .. }) => {
                            drop(reports.send((shard, Report::Released { clean: true })));
                            return;
                        }
                        Some(event) => {
                            early.push(event);
                            continue;
                        }
                    },
                };
                match connected {
                    Ok(connection) => break connection,
                    Err(error) => {
                        warn!(
                            shard = shard.0,
                            "cannot connect for the shard's rows now ({error}); tried again"
                        );
                        tokio::time::sleep(CONNECT_PAUSE).await;
                    }
                }
            };
            for event in early {
                drop(own.send(event));
            }
            let delivery = Delivery::new(rows, source, sink(own.clone()), screen);
            let dead_letters: Arc<dyn dead_letters::Port> = match letters {
                Some(letters) => {
                    delivery.remove_unreceivable(letters.clone());
                    Arc::new(letters)
                }
                None => Arc::new(NoDeadLetters),
            };
            let ports = Ports { delivery: Arc::new(delivery), ledger, store, dead_letters };
            drive(Shard::new(config), clock, ports, events, own, &watcher).await;
        })
    }
}
