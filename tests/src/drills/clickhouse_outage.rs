//! No ClickHouse for three minutes of a full load: it takes requests and never answers; it refuses; it is gone.
//! In each phase the daemon is told to stop, and must do so within its limit.

use std::time::{Duration, Instant};

use super::{ATTEMPTS_A_MINUTE, Outcome, Phase, REQUESTS_A_MINUTE, Settings};
use crate::daemon::Daemon;
use crate::error::Result;
use crate::http_proxy::HttpProxy;
use crate::rig::Rig;
use crate::wait;

const TABLES: usize = 8;
const RATE: u64 = 20_000;
/// What the daemon may hold.
const BUDGET_MIB: u64 = 64;
const LONG: Duration = Duration::from_mins(5);

#[derive(Clone, Copy, Debug)]
enum Without {
    Answer,
    Port,
    Process,
}

impl Without {
    const ALL: [Self; 3] = [Self::Answer, Self::Port, Self::Process];

    fn begin(self, rig: &mut Rig, proxy: &HttpProxy) -> Result<()> {
        match self {
            Self::Answer => proxy.silent(true),
            Self::Port => {
                proxy.refuse(true)?;
                proxy.cut();
            }
            Self::Process => rig.clickhouse.kill()?,
        }
        Ok(())
    }

    fn end(self, rig: &mut Rig, proxy: &HttpProxy) -> Result<()> {
        match self {
            Self::Answer => proxy.silent(false),
            Self::Port => proxy.refuse(false)?,
            Self::Process => rig.clickhouse.restart()?,
        }
        Ok(())
    }
}

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let length = settings.time(60, 12);
    let limit = settings.time(20, 5);
    for round in 1..=settings.rounds {
        let options = settings
            .rig(4, TABLES)
            .set("batch.max_age", "200ms")
            .set("limits.held_bytes", format!("{BUDGET_MIB}MiB"))
            .set("limits.held_rows", 10_000_000)
            .set("limits.shutdown", format!("{}s", limit.as_secs()))
            .set("clickhouse.insert_timeout", format!("{}s", settings.time(15, 4).as_secs()));
        let mut rig = Rig::start(options)?;
        let proxy = rig.clickhouse_proxy()?;
        let mut daemon = rig.ready_daemon("holdfast")?;
        let rows = RATE * (3 * length.as_secs() + 10);
        let mut publishing = rig.publish(0, rows, 256, Some(RATE))?;
        rig.landed(RATE * 2, LONG, |_| daemon.must_run())?;
        let rest = daemon.resident();
        let mut most = rest;
        let began = Instant::now();
        let mut phases = Vec::new();
        for without in Without::ALL {
            let phase = Phase::begin();
            without.begin(&mut rig, &proxy)?;
            let half = Instant::now() + length / 2;
            hold(&mut daemon, half, &mut most)?;
            let stopped = Instant::now();
            let ended = daemon.stop(limit + Duration::from_secs(5))?;
            let took = stopped.elapsed();
            outcome.demand(ended.is_success() && took <= limit + Duration::from_secs(1), || {
                format!(
                    "without {without:?}: SIGTERM ended with {ended} after {took:?}; the limit is {limit:?}"
                )
            });
            outcome.most("stop_seconds", took.as_secs_f64());
            daemon.restart()?;
            hold(&mut daemon, half.max(Instant::now()) + length / 2, &mut most)?;
            phases.push((without, phase.end()));
            without.end(&mut rig, &proxy)?;
            tell(&format!(
                "round {round}, without {without:?} for {:.0} s: stopped in {:.1} s, {} MiB resident at most",
                length.as_secs_f64(),
                took.as_secs_f64(),
                most >> 20
            ));
            publishing.is_done()?;
            // So that the next phase falls into a load that flows: something new is stored.
            let stored = rig.settled()?;
            rig.landed(stored + 1, LONG, |_| daemon.must_run())?;
        }
        let back = Instant::now();
        publishing.finish(LONG)?;
        rig.landed(rows, LONG, |_| {
            most = most.max(daemon.resident());
            daemon.must_run()
        })?;
        let caught_up = back.elapsed();
        let verdict = outcome.judge(&rig, &mut daemon, rows)?;
        for (without, phase) in &phases {
            let attempts = phase.attempts_a_minute(&proxy);
            // Two processes in each phase, each with first attempts of its own.
            outcome.demand(attempts <= 2.0 * ATTEMPTS_A_MINUTE, || {
                format!("without {without:?}: {attempts:.0} inserts a minute of one table")
            });
            let requests = phase.requests_a_minute(&proxy, TABLES);
            outcome.demand(requests <= 2.0 * REQUESTS_A_MINUTE, || {
                format!("without {without:?}: {requests:.0} requests a minute and table")
            });
            outcome.most("attempts_per_minute", attempts);
            outcome.most("requests_per_minute", requests);
        }
        let grown = most.saturating_sub(rest) >> 20;
        // What is held, the bodies of the batches under way made from it, and the client's buffers.
        outcome.demand(grown < 2 * BUDGET_MIB + 32, || {
            format!("{grown} MiB more than before the outage, with a budget of {BUDGET_MIB} MiB")
        });
        tell(&format!(
            "round {round}: {verdict}; {} MiB resident at most ({} before), all landed {:.1} s after",
            most >> 20,
            rest >> 20,
            caught_up.as_secs_f64()
        ));
        outcome.most("resident_mib", (most >> 20) as f64);
        outcome.most("resident_mib_before", (rest >> 20) as f64);
        outcome.most("caught_up_seconds", caught_up.as_secs_f64());
        outcome.add("rows", rows as f64);
        outcome.add("seconds", began.elapsed().as_secs_f64());
    }
    Ok(outcome)
}

/// Watches the daemon's memory until then; the time is the drill, not a condition.
fn hold(daemon: &mut Daemon, until: Instant, most: &mut u64) -> Result<()> {
    let mut failed = None;
    wait::until_true("the phase to end", until.saturating_duration_since(Instant::now()) + LONG, || {
        *most = (*most).max(daemon.resident());
        failed = daemon.must_run().err();
        failed.is_some() || Instant::now() >= until
    })?;
    failed.map_or(Ok(()), Err)
}
