//! Daemons come and go under load: every shard changes hands again and again, with quick inserts and with slow
//! ones.

use std::time::{Duration, Instant};

use super::{Outcome, Settings};
use crate::error::Result;
use crate::fleet::{Fleet, changes};
use crate::http_proxy::{Fate, Kind};
use crate::load::{Load, latencies, median, quantile};
use crate::rig::Rig;
use crate::wait;

const SHARDS: u32 = 8;
const RATE: u64 = 5_000;
const LONG: Duration = Duration::from_mins(3);
/// A daemon that is stopped must end within its limit.
const STOP: Duration = Duration::from_secs(26);
/// From the old owner's last insert to the heir's first row.
const MEDIAN: f64 = 0.25;
const P99: f64 = 1.0;
/// How long an insert takes in the second part.
const SLOW: Duration = Duration::from_secs(6);

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let began = Instant::now();
    for round in 1..=settings.rounds {
        let gaps = part(settings, None, settings.time(120, 20), &mut outcome, round, tell)?;
        let (middle, most) = (median(&gaps), quantile(&gaps, 0.99));
        outcome.demand(middle < MEDIAN, || format!("a handover takes {middle:.3} s at the median"));
        outcome.demand(most < P99, || format!("a handover takes {most:.3} s at the 99th percentile"));
        outcome.add("handovers", gaps.len() as f64);
        outcome.most("median_ms", middle * 1e3);
        outcome.most("p99_ms", most * 1e3);
        outcome.most("most_ms", quantile(&gaps, 1.0) * 1e3);
        let gaps = part(settings, Some(SLOW), settings.time(90, 40), &mut outcome, round, tell)?;
        outcome.add("handovers_slow_inserts", gaps.len() as f64);
        outcome.most("median_slow_inserts_ms", median(&gaps) * 1e3);
        outcome.most("p99_slow_inserts_ms", quantile(&gaps, 0.99) * 1e3);
    }
    outcome.add("seconds", began.elapsed().as_secs_f64());
    Ok(outcome)
}

/// A load for so long; every gap from an old owner's last insert to its heir's first row, in seconds.
fn part(
    settings: &Settings,
    slow: Option<Duration>,
    length: Duration,
    outcome: &mut Outcome,
    round: u32,
    tell: &mut dyn FnMut(&str),
) -> Result<Vec<f64>> {
    let mut rig = Rig::start(settings.rig(SHARDS, 16).set("batch.max_age", "50ms"))?;
    let proxy = slow.map(|_| rig.clickhouse_proxy()).transpose()?;
    if let (Some(proxy), Some(slow)) = (&proxy, slow) {
        proxy.set_hook(move |request| match request.kind {
            Kind::Insert => Fate::HoldFor(slow),
            Kind::Other => Fate::Forward,
        });
    }
    let mut fleet = Fleet::new(&rig);
    fleet.start(3)?;
    fleet.settle(SHARDS, LONG)?;
    let mut load = Load::start(&rig, RATE, 256)?;
    let until = Instant::now() + length;
    let mut stops = 0_u32;
    let mut longest: f64 = 0.0;
    while Instant::now() < until {
        let stored = rig.stored()?;
        rig.landed(stored + 1, LONG, |_| fleet.must_run())?;
        let stopped = Instant::now();
        // The oldest goes, as in a rolling update.
        let ended = fleet.stop(0, STOP)?;
        longest = longest.max(stopped.elapsed().as_secs_f64());
        outcome.demand(ended.is_success(), || format!("SIGTERM ended with {ended}"));
        stops += 1;
        fleet.settle(SHARDS, LONG)?;
        fleet.start(1)?;
        fleet.settle(SHARDS, LONG)?;
        load.must_run()?;
    }
    let rows = load.finish()?;
    let published = rows.len() as u64;
    wait::until_true("all rows", LONG, || rig.stored().is_ok_and(|stored| stored >= published))?;
    let verdict = outcome.judge_fleet(&rig, &mut fleet, published)?;
    let events = fleet.events()?;
    let changes = changes(&events);
    let gaps: Vec<f64> = changes.iter().map(crate::fleet::Change::gap).collect();
    let stored = crate::fleet::stored_batches(&events);
    let late: Vec<f64> = latencies(&rows, &rig.tables(), &stored).into_iter().flatten().collect();
    let what = slow.map_or("quick inserts".to_owned(), |slow| format!("inserts of {} s", slow.as_secs()));
    tell(&format!(
        "round {round}, {what}: {verdict}; {stops} stops (the longest took {longest:.2} s), {} handovers: \
         median {:.0} ms, p99 {:.0} ms, most {:.0} ms; rows stored after {:.3} s (median), {:.3} s (p99), {:.2} s (most)",
        gaps.len(),
        median(&gaps) * 1e3,
        quantile(&gaps, 0.99) * 1e3,
        quantile(&gaps, 1.0) * 1e3,
        median(&late),
        quantile(&late, 0.99),
        quantile(&late, 1.0),
    ));
    outcome.add("rows", published as f64);
    outcome.add("stops", f64::from(stops));
    Ok(gaps)
}
