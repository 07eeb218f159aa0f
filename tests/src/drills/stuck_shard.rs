//! One table's inserts hang: rows of every other shard are stored as soon as they are without.

use std::thread;
use std::time::{Duration, Instant};

use super::{Outcome, Settings};
use crate::error::Result;
use crate::fleet::{Fleet, Moment, stored_batches};
use crate::http_proxy::Fate;
use crate::load::{Load, latencies, median, quantile};
use crate::proxy::Gate;
use crate::rig::Rig;
use crate::wait;

const SHARDS: u32 = 8;
const RATE: u64 = 4_000;
const STUCK: &str = "t3";
const LONG: Duration = Duration::from_mins(3);
/// Runs with and without; the medians of their 99th percentiles are compared.
const RUNS: usize = 5;
/// What the one may exceed the other by.
const RATIO: f64 = 1.10;

/// A stretch of the load that is measured.
struct Run {
    stuck: bool,
    from: Moment,
    until: Moment,
}

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let began = Instant::now();
    let length = settings.time(12, 4);
    for round in 1..=settings.rounds {
        let mut rig = Rig::start(settings.rig(SHARDS, 16).set("batch.max_age", "200ms"))?;
        let proxy = rig.clickhouse_proxy()?;
        let mut fleet = Fleet::new(&rig);
        // One daemon: the shards share a process, a budget, the inserts in flight.
        fleet.start(1)?;
        fleet.settle(SHARDS, LONG)?;
        let mut load = Load::start(&rig, RATE, 256)?;
        rig.landed(2 * RATE, LONG, |_| fleet.must_run())?;
        let mut runs = Vec::new();
        for number in 0..2 * RUNS {
            let stuck = number % 2 == 1;
            let gate = Gate::default();
            if stuck {
                let held = gate.clone();
                proxy.set_hook(move |request| {
                    if request.inserts_into(STUCK) { Fate::HoldUntil(held.clone()) } else { Fate::Forward }
                });
                // Time for its share to fill up: from then on the shard pulls nothing.
                thread::sleep(length / 4);
            }
            let from = Moment::now();
            // The time is the drill, not a condition.
            thread::sleep(length);
            runs.push(Run { stuck, from, until: Moment::now() });
            gate.open();
            proxy.clear_hook();
            load.must_run()?;
            let published = load.count();
            rig.landed(published, LONG, |_| fleet.must_run())?;
        }
        let rows = load.finish()?;
        let published = rows.len() as u64;
        rig.landed(published, LONG, |_| fleet.must_run())?;
        let verdict = outcome.judge_fleet(&rig, &mut fleet, published)?;
        let stored = stored_batches(&fleet.events()?);
        let tables = rig.tables();
        let home = |table: &str| stored.iter().find(|batch| batch.table == table).map(|batch| batch.shard);
        let stuck_shard = home(STUCK);
        let others: Vec<bool> = tables.iter().map(|table| home(table) != stuck_shard).collect();
        let ages = latencies(&rows, &tables, &stored);
        let of_run = |run: &Run| {
            let of_run: Vec<f64> = rows
                .iter()
                .zip(&ages)
                .filter(|(row, _)| {
                    others[row.table] && row.at.since(run.from) >= 0.0 && run.until.since(row.at) >= 0.0
                })
                .filter_map(|(_, age)| *age)
                .collect();
            quantile(&of_run, 0.99)
        };
        let p99 =
            |stuck: bool| runs.iter().filter(|run| run.stuck == stuck).map(of_run).collect::<Vec<f64>>();
        let (healthy, stuck) = (p99(false), p99(true));
        let (without, with) = (median(&healthy), median(&stuck));
        let ratio = with / without;
        outcome.demand(ratio <= RATIO, || {
            format!(
                "with {STUCK} stuck the others' p99 is {with:.3} s, without {without:.3} s: {ratio:.2} times"
            )
        });
        tell(&format!(
            "round {round}: {verdict}; p99 of the other shards {:.0} ms with {STUCK} stuck ({}), {:.0} ms without ({})",
            with * 1e3,
            figures(&stuck),
            without * 1e3,
            figures(&healthy)
        ));
        outcome.most("p99_stuck_ms", with * 1e3);
        outcome.most("p99_healthy_ms", without * 1e3);
        outcome.most("ratio", ratio);
        outcome.add("rows", published as f64);
        wait::until_true("the proxy to have seen the stuck table", LONG, || {
            proxy.count(|record| record.table.as_deref() == Some(STUCK)) > 0
        })?;
    }
    outcome.add("seconds", began.elapsed().as_secs_f64());
    Ok(outcome)
}

fn figures(values: &[f64]) -> String {
    let words: Vec<_> = values.iter().map(|value| format!("{:.0}", value * 1e3)).collect();
    words.join(" ")
}
