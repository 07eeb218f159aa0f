//! SIGKILL at random moments: the daemon ten times, each server a few times, under load.

use std::thread;
use std::time::{Duration, Instant};

use rand::RngExt;
use rand::seq::SliceRandom;

use super::{Outcome, Settings};
use crate::error::Result;
use crate::rig::Rig;

/// Rows of one round.
const ROWS: u64 = 400_000;
/// Rows a second: slow enough for every kill to fall into the load.
const RATE: u64 = 20_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Daemon,
    Nats,
    ClickHouse,
}

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut kills = 0_u32;
    let began = Instant::now();
    for round in 1..=settings.rounds {
        let mut rig = Rig::start(settings.rig(8, 16).set("batch.max_age", "200ms"))?;
        let mut daemon = rig.ready_daemon("holdfast")?;
        let mut publishing = rig.publish(0, ROWS, 256, Some(RATE))?;
        let load = Duration::from_secs(ROWS / RATE);
        let mut plan =
            [[Victim::Daemon; 10].as_slice(), &[Victim::Nats; 3], &[Victim::ClickHouse; 3]].concat();
        let mut random = rand::rng();
        plan.shuffle(&mut random);
        let mut moments: Vec<Duration> = plan.iter().map(|_| load.mul_f64(random.random())).collect();
        moments.sort();
        let start = Instant::now();
        for (victim, moment) in plan.into_iter().zip(moments) {
            // The moment is the drill, not a condition.
            thread::sleep(moment.saturating_sub(start.elapsed()));
            match victim {
                Victim::Daemon => daemon.restart()?,
                Victim::Nats => {
                    rig.nats.kill()?;
                    rig.nats.restart()?;
                }
                Victim::ClickHouse => {
                    rig.clickhouse.kill()?;
                    rig.clickhouse.restart()?;
                }
            }
            kills += 1;
            // A daemon that starts while a server is down exits; whoever runs it starts it again.
            if daemon.ended()?.is_some() {
                daemon.restart()?;
            }
            publishing.is_done()?;
        }
        publishing.finish(Duration::from_mins(2))?;
        rig.landed(ROWS, Duration::from_mins(2), |_| {
            if daemon.ended()?.is_some() {
                daemon.restart()?;
            }
            Ok(())
        })?;
        let verdict = outcome.judge(&rig, &mut daemon, ROWS)?;
        tell(&format!("round {round}: {verdict}"));
    }
    outcome.figures.insert("kills", f64::from(kills));
    outcome.figures.insert("rows", (ROWS * u64::from(settings.rounds)) as f64);
    outcome.figures.insert("seconds", began.elapsed().as_secs_f64());
    Ok(outcome)
}
