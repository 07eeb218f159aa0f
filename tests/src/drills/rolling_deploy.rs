//! Three daemons are replaced one by one under load: no row waits for long.

use std::time::{Duration, Instant};

use super::{Outcome, Settings};
use crate::error::Result;
use crate::fleet::{Fleet, stored_batches};
use crate::load::{Load, latencies, median, quantile};
use crate::rig::Rig;

const SHARDS: u32 = 8;
const RATE: u64 = 5_000;
const LONG: Duration = Duration::from_mins(2);
const STOP: Duration = Duration::from_secs(26);
const MAX_AGE: f64 = 0.2;
/// What a row may wait for longer than its batch may.
const LATE: f64 = 3.0;

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let began = Instant::now();
    for round in 1..=settings.rounds {
        let rig = Rig::start(settings.rig(SHARDS, 16).set("batch.max_age", "200ms"))?;
        let mut fleet = Fleet::new(&rig);
        fleet.start(3)?;
        fleet.settle(SHARDS, LONG)?;
        let mut load = Load::start(&rig, RATE, 256)?;
        rig.landed(RATE, LONG, |_| fleet.must_run())?;
        let deploy = Instant::now();
        for _ in 0..3 {
            let ended = fleet.stop(0, STOP)?;
            outcome.demand(ended.is_success(), || format!("SIGTERM ended with {ended}"));
            fleet.start(1)?;
            fleet.settle(SHARDS, LONG)?;
            let stored = rig.stored()?;
            rig.landed(stored + RATE, LONG, |_| fleet.must_run())?;
            load.must_run()?;
        }
        let deploy = deploy.elapsed().as_secs_f64();
        let rows = load.finish()?;
        let published = rows.len() as u64;
        rig.landed(published, LONG, |_| fleet.must_run())?;
        let verdict = outcome.judge_fleet(&rig, &mut fleet, published)?;
        let events = fleet.events()?;
        let stored = stored_batches(&events);
        let ages = latencies(&rows, &rig.tables(), &stored);
        let unseen = ages.iter().filter(|age| age.is_none()).count();
        outcome.demand(unseen == 0, || format!("{unseen} rows that no daemon called stored"));
        let worst =
            rows.iter().zip(&ages).max_by(|a, b| a.1.partial_cmp(b.1).unwrap_or(std::cmp::Ordering::Equal));
        if let Some((row, Some(age))) = worst
            && std::env::var_os("DRILL_DEBUG").is_some()
        {
            let table = &rig.tables()[row.table];
            let shard = stored.iter().find(|batch| batch.table == *table).map(|batch| batch.shard);
            for event in events.iter().filter(|event| event.shard() == shard || event.shard().is_none()) {
                let at = event.at.since(row.at);
                if (-1.5..*age + 0.3).contains(&at) {
                    tell(&format!("{at:.3} {} {} {}", event.node, event.message, event.fields));
                }
            }
            tell(&format!("worst: {table} seq {} age {age}", row.seq));
        }
        let ages: Vec<f64> = ages.into_iter().flatten().collect();
        let oldest = quantile(&ages, 1.0);
        outcome.demand(oldest <= LATE + MAX_AGE, || format!("a row waited {oldest:.2} s"));
        tell(&format!(
            "round {round}: {verdict}; deployed in {deploy:.1} s, the oldest unwritten row was {oldest:.2} s old, \
             the median {:.3} s",
            median(&ages)
        ));
        outcome.most("oldest_unwritten_seconds", oldest);
        outcome.most("p99_seconds", quantile(&ages, 0.99));
        outcome.most("deploy_seconds", deploy);
        outcome.add("rows", published as f64);
    }
    outcome.add("seconds", began.elapsed().as_secs_f64());
    Ok(outcome)
}
