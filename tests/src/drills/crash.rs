//! SIGKILL to an owner, and how long its shards' rows wait for the heirs.

use std::time::{Duration, Instant};

use super::{Outcome, Settings};
use crate::error::Result;
use crate::fleet::{Fleet, Moment};
use crate::load::{Load, median, quantile};
use crate::rig::Rig;
use crate::wait;

const SHARDS: u32 = 8;
const RATE: u64 = 5_000;
const LONG: Duration = Duration::from_mins(2);
/// From the kill to the first row of the last of its shards, at the median over all rounds.
const MEDIAN: f64 = 1.0;

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let began = Instant::now();
    let options = settings.rig(SHARDS, 16).set("batch.max_age", "50ms").set("topology.pinned_ttl", "10s");
    let rig = Rig::start(options)?;
    let mut fleet = Fleet::new(&rig);
    fleet.start(3)?;
    fleet.settle(SHARDS, LONG)?;
    let mut load = Load::start(&rig, RATE, 256)?;
    let mut kills: Vec<(String, Moment, Vec<u32>)> = Vec::new();
    for round in 0..settings.rounds {
        fleet.settle(SHARDS, LONG)?;
        let place = round as usize % fleet.members.len();
        // Who owns something: whose shard has no table waits for rows that never come.
        let owned = wait::until("a daemon that owns a shard", LONG, || {
            fleet.members[place].owned().ok().filter(|owned| !owned.is_empty())
        })?;
        let stored = rig.stored()?;
        rig.landed(stored + RATE / 10, LONG, |_| fleet.must_run())?;
        let (name, at) = fleet.kill(place)?;
        wait::until_true(&format!("heirs for the shards {owned:?} of {name}"), LONG, || {
            owned.iter().all(|shard| fleet.owner(*shard).is_some())
        })?;
        load.must_run()?;
        fleet.start(1)?;
        kills.push((name, at, owned));
    }
    let rows = load.finish()?.len() as u64;
    rig.landed(rows, LONG, |_| fleet.must_run())?;
    let events = fleet.events()?;
    let (mut each, mut slowest) = (Vec::new(), Vec::new());
    for (name, at, owned) in &kills {
        let mut most: f64 = 0.0;
        for shard in owned {
            let heir = events.iter().find(|event| {
                event.message == "first row accepted"
                    && event.shard() == Some(*shard)
                    && event.node != *name
                    && event.at > *at
            });
            let Some(heir) = heir else {
                outcome.faults.push(format!("shard {shard} of {name} has no heir"));
                continue;
            };
            most = most.max(heir.at.since(*at));
            each.push(heir.at.since(*at));
        }
        tell(&format!("{name} killed: rows of its shards {owned:?} were taken again after {most:.3} s"));
        slowest.push(most);
    }
    let middle = median(&slowest);
    outcome.demand(middle < MEDIAN, || format!("{middle:.3} s from the kill to the heirs at the median"));
    outcome.most("median_ms", middle * 1e3);
    outcome.most("p99_ms", quantile(&slowest, 0.99) * 1e3);
    outcome.most("median_of_shards_ms", median(&each) * 1e3);
    outcome.add("kills", kills.len() as f64);
    outcome.add("rows", rows as f64);
    let verdict = outcome.judge_fleet(&rig, &mut fleet, rows)?;
    tell(&format!("{verdict}"));
    outcome.add("seconds", began.elapsed().as_secs_f64());
    Ok(outcome)
}
