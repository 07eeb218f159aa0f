//! Inserts hang for longer than the pinned TTL, while a rival pulls for the pin: the owner keeps it, also while it
//! is halted, until it gives it up itself.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Outcome, Settings};
use crate::error::Result;
use crate::fleet::{Fleet, Moment};
use crate::http_proxy::{Fate, HttpProxy, Kind};
use crate::jetstream::{JetStream, Pulled};
use crate::load::Load;
use crate::proxy::Gate;
use crate::rig::Rig;
use crate::wait;

const RATE: u64 = 5_000;
/// Full within half a second, so that the pin must be kept without pulling rows.
const HELD: u64 = 2_000;
/// Longer than the pinned TTL of 10 s.
const HANG: Duration = Duration::from_secs(13);
const LONG: Duration = Duration::from_mins(2);
const STREAM: &str = "INGEST";
const CONSUMER: &str = "holdfast-0";
const GROUP: &str = "holdfast";

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let began = Instant::now();
    for round in 1..=settings.rounds {
        let options = settings
            .rig(1, 4)
            .set("batch.max_age", "50ms")
            .set("topology.pinned_ttl", "10s")
            .set("limits.held_rows", HELD);
        let mut rig = Rig::start(options)?;
        let proxy = rig.clickhouse_proxy()?;
        let mut fleet = Fleet::new(&rig);
        fleet.start(1)?;
        fleet.settle(1, LONG)?;
        let load = Load::start(&rig, RATE, 256)?;
        rig.landed(RATE, LONG, |_| fleet.must_run())?;
        let pin = rig.jetstream().pin(STREAM, CONSUMER)?;

        let gate = hang(&proxy)?;
        let rival = Rival::start(rig.jetstream());
        let seen = watch(&rig, &fleet, HANG)?;
        let row = rival.stop()?;
        outcome.demand(seen.pins.len() == 1 && seen.pins.contains(&pin), || {
            format!("the pin was {pin:?}; with hanging inserts it was {:?}", seen.pins)
        });
        outcome.demand(row.is_none(), || format!("the rival got a row under the pin {row:?}"));
        outcome.demand(seen.most_rows <= seen.share_rows, || {
            format!("{} rows held, with a share of {}", seen.most_rows, seen.share_rows)
        });
        outcome.demand(seen.most_bytes <= seen.share_bytes + (1 << 20), || {
            format!("{} bytes held, with a share of {}", seen.most_bytes, seen.share_bytes)
        });
        gate.open();
        let stored = rig.stored()?;
        rig.landed(stored + RATE, LONG, |_| fleet.must_run())?;

        // Told to stop while inserts hang: the pin stays until everything that was accepted is written.
        let gate = hang(&proxy)?;
        let pin = rig.jetstream().pin(STREAM, CONSUMER)?;
        fleet.members[0].daemon.terminate()?;
        let rival = Rival::start(rig.jetstream());
        let halted = watch(&rig, &fleet, HANG)?;
        outcome.demand(halted.pins.len() == 1 && halted.pins.contains(&pin), || {
            format!("the pin was {pin:?}; while the daemon drains it was {:?}", halted.pins)
        });
        gate.open();
        let ended = fleet.wait(0, Duration::from_secs(26))?;
        outcome.demand(ended.is_success(), || format!("SIGTERM ended with {ended}"));
        let row = wait::until("the rival to be pinned", LONG, || rival.row());
        let row = row.ok();
        rival.stop()?;
        let events = fleet.events()?;
        let released = events.iter().find(|event| event.message == "shard released").map(|event| event.at);
        // The line is written once the server has answered the unpin, which serves the rival at once.
        let early = row.as_ref().zip(released).map(|((at, _), released)| released.since(*at));
        outcome.demand(early.is_some_and(|early| early < 0.1), || {
            format!("the rival's first row came {early:?} s before the shard was released")
        });
        fleet.start(1)?;
        let rows = load.finish()?.len() as u64;
        rig.landed(rows, LONG, |_| fleet.must_run())?;
        let verdict = outcome.judge_fleet(&rig, &mut fleet, rows)?;
        tell(&format!(
            "round {round}: {verdict}; one pin for {} s of hanging inserts and for {} s of draining; {} of {} rows \
             held at most",
            HANG.as_secs(),
            HANG.as_secs(),
            seen.most_rows,
            seen.share_rows
        ));
        outcome.most("most_held_rows", seen.most_rows as f64);
        outcome.most("share_rows", seen.share_rows as f64);
        outcome.most("pins", seen.pins.len().max(halted.pins.len()) as f64);
        outcome.add("rows", rows as f64);
    }
    outcome.add("seconds", began.elapsed().as_secs_f64());
    Ok(outcome)
}

/// Every insert hangs from now on, and one does already.
fn hang(proxy: &HttpProxy) -> Result<Gate> {
    let gate = Gate::default();
    let caught = Arc::new(AtomicBool::new(false));
    let (held, seen) = (gate.clone(), Arc::clone(&caught));
    proxy.set_hook(move |request| match request.kind {
        Kind::Insert => {
            seen.store(true, Ordering::SeqCst);
            Fate::HoldUntil(held.clone())
        }
        Kind::Other => Fate::Forward,
    });
    wait::until_true("an insert that hangs", LONG, || caught.load(Ordering::SeqCst))?;
    Ok(gate)
}

#[derive(Default)]
struct Seen {
    pins: BTreeSet<Option<String>>,
    most_rows: u64,
    share_rows: u64,
    most_bytes: u64,
    share_bytes: u64,
}

/// Looks at the pin and at what the daemon holds, for so long.
fn watch(rig: &Rig, fleet: &Fleet<'_>, length: Duration) -> Result<Seen> {
    let mut seen = Seen::default();
    let until = Instant::now() + length;
    while Instant::now() < until {
        seen.pins.insert(rig.jetstream().pin(STREAM, CONSUMER)?);
        let status = fleet.members[0].status()?;
        let figure = |name: &str| status["shards"][0][name].as_u64().unwrap_or_default();
        seen.most_rows = seen.most_rows.max(figure("held_rows"));
        seen.most_bytes = seen.most_bytes.max(figure("held_bytes"));
        (seen.share_rows, seen.share_bytes) = (figure("share_rows"), figure("share_bytes"));
        thread::sleep(Duration::from_millis(50));
    }
    Ok(seen)
}

/// When a rival got a row, and under which pin.
type Rivalled = (Moment, Option<String>);

/// Pulls without a pin id, again and again.
struct Rival {
    stop: Arc<AtomicBool>,
    row: Arc<std::sync::Mutex<Option<Rivalled>>>,
    thread: thread::JoinHandle<Result<()>>,
}

impl Rival {
    fn start(jetstream: JetStream) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let row = Arc::new(std::sync::Mutex::new(None));
        let (told, found) = (Arc::clone(&stop), Arc::clone(&row));
        let thread = thread::spawn(move || {
            while !told.load(Ordering::SeqCst) {
                let pulled = jetstream.pull_unpinned(STREAM, CONSUMER, GROUP, Duration::from_millis(400))?;
                if let Pulled::Row { pin } = pulled {
                    *found.lock().unwrap_or_else(std::sync::PoisonError::into_inner) =
                        Some((Moment::now(), pin));
                    break;
                }
            }
            Ok(())
        });
        Self { stop, row, thread }
    }

    /// When it got a row, and under which pin.
    fn row(&self) -> Option<(Moment, Option<String>)> {
        self.row.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Returns when no pull of its waits any more.
    fn stop(self) -> Result<Option<(Moment, Option<String>)>> {
        self.stop.store(true, Ordering::SeqCst);
        let row = Arc::clone(&self.row);
        self.thread.join().unwrap_or(Ok(()))?;
        let row = row.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        Ok(row)
    }
}
