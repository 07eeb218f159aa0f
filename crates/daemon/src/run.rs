//! `holdfast run`: the daemon.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use holdfast_clickhouse::Store;
use holdfast_core::action::Event;
use holdfast_core::budget::Share;
use holdfast_core::notice::{Report, ShardFailure};
use holdfast_core::ports::store;
use holdfast_core::record::Session;
use holdfast_core::row::ShardId;
use holdfast_core::shard::{self, Shard};
use holdfast_core::trim;
use holdfast_nats::Connection;
use holdfast_nats::connect::ConnectError;
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
use crate::shards::{Shards, Watcher};

/// An intent is sent at most this long after the record was last known to be ours.
///
/// With an insert's own time limit it bounds how late an insert can arrive, and so how much a table's
/// deduplication window must remember.
const STALE: Duration = Duration::from_secs(10);

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
    let started = tokio::select! {
        started = start(config) => started?,
        _ = terminate.recv() => return Ok(()),
        _ = interrupt.recv() => return Ok(()),
    };
    let Running { mut tasks, mut reports, events, shards: _shards } = started;

    let mut waiting: BTreeSet<ShardId> = events.iter().map(|(shard, _)| *shard).collect();
    let mut running: BTreeSet<ShardId> = events.iter().map(|(shard, _)| *shard).collect();
    let mut lost = None;
    let mut misconfigured = None;
    let mut stopping = None;
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
    shards: Shards,
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
async fn start(config: &Config) -> Result<Running, Exit> {
    let topology = config.topology()?;
    let start = config.start()?;
    let clock = Clock::start();
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
    let retention = Arc::new(Retention::new(control.clone(), topology.stream.clone()));
    let session = Session(rand::random());
    let share = Share::even(config.limits.held_rows, config.held_bytes(), topology.shards);
    info!(
        node = config.node_id(),
        nats = control.servers(),
        stream = topology.stream,
        shards = topology.shards,
        session = ?session,
        "holdfast starts"
    );

    let shards = Shards::default();
    let (report, reports) = unbounded_channel();
    let mut tasks = JoinSet::new();
    let mut events = Vec::new();
    for (shard, rows) in (0..topology.shards).map(ShardId).zip(rows) {
        let config = shard::Config {
            shard,
            stream: topology.stream.as_str().into(),
            session,
            pinned_ttl: topology.pinned_ttl,
            batch: config.batch(),
            stale: STALE,
            patience: 2 * (config.insert_timeout() + STALE),
            start,
            max_lanes: config.max_lanes(),
            max_record: control.max_payload() / 8 * RECORD_SHARE,
        };
        let (sender, receiver) = queue();
        let source = topology.source(shard, 3 * config.pull_interval());
        let delivery = Delivery::new(rows, source, sink(sender.clone()), Arc::clone(&screen));
        let ports = Ports {
            delivery: Arc::new(delivery),
            ledger: Arc::<Ledger>::clone(&ledger),
            store: Arc::<Store>::clone(&store) as Arc<dyn store::Port>,
        };
        let watcher = Watcher::new(shard, shards.clone(), report.clone());
        drop(sender.send(Event::Claim(share)));
        events.push((shard, sender.clone()));
        tasks.spawn(async move {
            drive(Shard::new(config), clock, ports, receiver, sender, &watcher).await;
        });
    }
    let trim = trim::Config { shards: topology.shards, interval: TRIM_INTERVAL, history: config.history() };
    let watcher = Watcher::new(ShardId(0), shards.clone(), report);
    tasks.spawn(async move { drive_trim(trim, clock, ledger, retention, &watcher).await });
    Ok(Running { tasks, reports, events, shards })
}
