//! `holdfast run`: the daemon.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::future::try_join_all;
use holdfast_clickhouse::Store;
use holdfast_clickhouse::horizon::RECEIVE_TIMEOUT;
use holdfast_core::action::Event;
use holdfast_core::budget::Share;
use holdfast_core::notice::{Report, ShardFailure};
use holdfast_core::ports::delivery::Acks;
use holdfast_core::ports::{Failure, FailureClass, dead_letters, ledger, store};
use holdfast_core::record::Session;
use holdfast_core::row::ShardId;
use holdfast_core::shard::{self, Shard};
use holdfast_core::trim;
use holdfast_nats::Connection;
use holdfast_nats::connect::ConnectError;
use holdfast_nats::dead_letters::DeadLetters;
use holdfast_nats::delivery::{Delivery, Screen};
use holdfast_nats::ledger::Ledger;
use holdfast_nats::retention::Retention;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::unbounded_channel;
use tokio::task::JoinSet;
use tracing::{info, warn};

use crate::clock::Clock;
use crate::config::{Config, OnLostShard};
use crate::driver::{Ports, drive, drive_trim, queue, sink};
use crate::exit::Exit;
use crate::preflight::preflight;
use crate::process::{Process, Stage, UPKEEP};
use crate::serve;
use crate::shards::Watcher;

/// An intent is sent at most this long after the record was last known to be ours.
///
/// With an insert's own time limit it bounds how late an insert can arrive, and so how much a table's
/// deduplication window must remember.
pub(crate) const STALE: Duration = Duration::from_secs(10);

/// The record's part of what one message may carry: headers and subject need some, too.
const RECORD_SHARE: usize = 7;

/// How often the stream is trimmed behind the ledger.
const TRIM_INTERVAL: Duration = Duration::from_secs(1);

/// What is kept back of the time for stopping: giving back the pin takes two requests.
const RELEASE_TIME: Duration = Duration::from_secs(2);

/// Runs the daemon until it is told to stop, or has nothing left to do.
///
/// # Errors
/// What kept it from starting, or ended it, in one line; see [`Exit`] for the codes.
pub async fn run(config: &Config) -> Result<(), Exit> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let clock = Clock::start();
    let process = Arc::new(Process::new(config, Session(rand::random()), clock));
    // Before anything else, so that an address that is taken is said at once, and a start that takes its time seen.
    let _servants = attend(config, &process).await?;
    let started = tokio::select! {
        started = start(config, clock, &process) => started?,
        _ = terminate.recv() => return Ok(()),
        _ = interrupt.recv() => return Ok(()),
    };
    let Running { mut tasks, mut reports, events } = started;
    process.enter(Stage::Running);

    let mut waiting: BTreeSet<ShardId> = events.iter().map(|(shard, _)| *shard).collect();
    let mut running: BTreeSet<ShardId> = events.iter().map(|(shard, _)| *shard).collect();
    let mut lost = None;
    let mut misconfigured = None;
    let mut stopping = None;
    let mut stopped_at = Instant::now();
    let mut unwritten = false;
    while !running.is_empty() || (stopping.is_none() && lost.is_some()) {
        let kill = async {
            match stopping {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let stop = tokio::select! {
            Some((shard, report)) = reports.recv() => match report {
                Report::Ready | Report::Owned => {
                    if waiting.remove(&shard) && waiting.is_empty() {
                        info!("ready: every shard has its record, and rows are taken as they come");
                    }
                    false
                }
                Report::Lost => false,
                Report::Released { clean } => {
                    unwritten |= !clean;
                    running.remove(&shard);
                    process.metrics.handed_over("shutdown", stopped_at.elapsed());
                    false
                }
                Report::Failed(failure) => {
                    running.remove(&shard);
                    let exit = config.topology.on_lost_shard == OnLostShard::Exit;
                    let start_needed = failure == ShardFailure::StartNeeded;
                    if start_needed {
                        misconfigured.get_or_insert(failure.to_string());
                    } else {
                        lost.get_or_insert((matches!(failure, ShardFailure::ConsumerGone(_)), format!("shard {shard}: {failure}")));
                    }
                    stopping.is_none() && (exit || start_needed)
                }
            },
            Some(Err(error)) = tasks.join_next() => {
                // A shard that panicked leaves nothing behind but what the ledger says; somebody starts us again.
                return Err(Exit::error(format!("a shard's task failed, which is a fault of Holdfast: {error}")));
            }
            _ = terminate.recv() => {
                if stopping.is_some() {
                    return Err(Exit::error("stopped at once; rows that were held come again at the next start"));
                }
                true
            }
            _ = interrupt.recv() => {
                if stopping.is_some() {
                    return Err(Exit::error("stopped at once; rows that were held come again at the next start"));
                }
                true
            }
            () = kill => {
                unwritten = true;
                break;
            }
        };
        if stop && stopping.is_none() {
            info!(shards = running.len(), "stopping: writing what was accepted");
            process.enter(Stage::Stopping);
            stopped_at = Instant::now();
            stopping = Some(tokio::time::Instant::now() + config.shutdown());
            let within = config.shutdown().saturating_sub(RELEASE_TIME).max(Duration::from_millis(200));
            for (_, events) in &events {
                drop(events.send(Event::Stop { within }));
            }
        }
    }
    tasks.shutdown().await;
    if let Some(why) = misconfigured {
        return Err(Exit::usage(why));
    }
    match lost {
        Some((true, why)) if config.topology.on_lost_shard == OnLostShard::Exit => Err(Exit::lost_shard(why)),
        Some((false, why)) if config.topology.on_lost_shard == OnLostShard::Exit => Err(Exit::error(why)),
        _ => {
            if unwritten {
                warn!("stopped with rows unwritten; they are in the stream and come again at the next start");
            } else {
                info!("stopped");
            }
            Ok(())
        }
    }
}

struct Running {
    tasks: JoinSet<()>,
    reports: tokio::sync::mpsc::UnboundedReceiver<(ShardId, Report)>,
    events: Vec<(ShardId, tokio::sync::mpsc::UnboundedSender<Event>)>,
}

/// Serves health, metrics and status; ends with what it returns.
async fn attend(config: &Config, process: &Arc<Process>) -> Result<JoinSet<()>, Exit> {
    let mut servants = JoinSet::new();
    if let Some(listen) = config.listen()? {
        let listener = serve::bind(listen).await?;
        info!(url = format!("http://{}/", listener.local_addr()?), "status, health and metrics are served");
        servants.spawn(serve::serve(listener, Arc::clone(process)));
    }
    let process = Arc::clone(process);
    servants.spawn(async move {
        loop {
            tokio::time::sleep(UPKEEP).await;
            process.metrics.upkeep();
        }
    });
    Ok(servants)
}

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

/// Connects, looks whether everything is there, and claims every shard.
async fn start(config: &Config, clock: Clock, process: &Arc<Process>) -> Result<Running, Exit> {
    let topology = config.topology()?;
    let start = config.start()?;
    let connect = async || connect(config).await;
    // A connection for writing, and one for each shard's rows: a flood of rows must not hold up the answers
    // that writing waits for, and a message that breaks a connection must not stop another shard.
    let control = connect().await?;
    preflight(&topology, &control).await?;
    let rows = try_join_all((0..topology.shards).map(|_| connect())).await?;

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
    let ledger = Arc::new(Ledger::new(control.clone(), topology.bucket.clone(), topology.stream.clone()));
    let ledger: Arc<dyn ledger::Port> = Arc::new(Counted { ledger, process: Arc::clone(process) });
    let letters = config
        .parking()
        .dead_letters
        .then(|| DeadLetters::new(control.clone(), &topology, Arc::new(move || clock.now())));
    let held_rows = config.limits.held_rows;
    let share = Share::even(config.limits.held_rows, config.held_bytes(), topology.shards);
    info!(
        node = config.node_id(),
        nats = control.servers(),
        stream = topology.stream,
        shards = topology.shards,
        session = ?process.session(),
        acks = ?config.acks(),
        dead_letters = topology.dead_letters,
        "holdfast starts"
    );

    let (report, reports) = unbounded_channel();
    let mut tasks = JoinSet::new();
    let mut events = Vec::new();
    for (shard, rows) in (0..topology.shards).map(ShardId).zip(rows) {
        let config = shard::Config {
            shard,
            stream: topology.stream.as_str().into(),
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
        let (sender, receiver) = queue();
        let mut source = topology.source(shard, 3 * config.pull_interval());
        source.min_ack_pending = source.min_ack_pending.max(2 * held_rows);
        let delivery = Delivery::new(rows, source, sink(sender.clone()), Arc::clone(&screen));
        let dead_letters: Arc<dyn dead_letters::Port> = match &letters {
            Some(letters) => {
                delivery.remove_unreceivable(letters.clone());
                Arc::new(letters.clone())
            }
            None => Arc::new(NoDeadLetters),
        };
        let ports = Ports {
            delivery: Arc::new(delivery),
            ledger: Arc::clone(&ledger),
            store: Arc::<Store>::clone(&store) as Arc<dyn store::Port>,
            dead_letters,
        };
        let watcher = Watcher::new(shard, Arc::clone(process), report.clone());
        drop(sender.send(Event::Claim(share)));
        events.push((shard, sender.clone()));
        tasks.spawn(async move {
            drive(Shard::new(config), clock, ports, receiver, sender, &watcher).await;
        });
    }
    // With acknowledgements the stream's own retention decides what stays.
    if config.acks() == Acks::None {
        let trim =
            trim::Config { shards: topology.shards, interval: TRIM_INTERVAL, history: config.history() };
        let retention = Arc::new(Retention::new(control.clone(), topology.stream.clone()));
        let watcher = Watcher::of_trimmer(Arc::clone(process), report);
        tasks.spawn(async move { drive_trim(trim, clock, ledger, retention, &watcher).await });
    }
    Ok(Running { tasks, reports, events })
}
