//! The stream is deleted while every insert hangs: each shard's owner names it soon and goes on running, or exits
//! where it is told to. What was never stored is gone with the stream; what is stored must be a beginning of each
//! table, once and in order.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{Outcome, Settings};
use crate::error::{Error, Result};
use crate::fleet::{Fleet, Moment};
use crate::guarded::Ended;
use crate::http_proxy::{Fate, Kind};
use crate::rig::Rig;
use crate::rows::identifier;
use crate::verdict::{self, Verdict};
use crate::wait;

const SHARDS: u32 = 6;
const LONG: Duration = Duration::from_mins(2);
const NAMED: f64 = 5.0;
/// What a daemon exits with that lost a shard.
const LOST: Ended = Ended::Exited(3);
const HELD: u64 = 4_000;
/// Rows that are stored before everything hangs, and rows that are in the stream when it goes.
const STORED: u64 = 12_000;
const WAITING: u64 = 60_000;

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let began = Instant::now();
    for round in 1..=settings.rounds {
        for exits in [false, true] {
            one(settings, round, exits, &mut outcome, tell)?;
        }
    }
    outcome.add("seconds", began.elapsed().as_secs_f64());
    Ok(outcome)
}

fn one(
    settings: &Settings,
    round: u32,
    exits: bool,
    outcome: &mut Outcome,
    tell: &mut dyn FnMut(&str),
) -> Result<()> {
    let options = settings
        .rig(SHARDS, 12)
        .set("batch.max_age", "50ms")
        .set("limits.held_rows", HELD)
        .set("limits.shutdown", "6s")
        .set("topology.on_lost_shard", if exits { "exit" } else { "continue" });
    let mut rig = Rig::start(options)?;
    let proxy = rig.clickhouse_proxy()?;
    let mut fleet = Fleet::new(&rig);
    fleet.start(3)?;
    fleet.settle(SHARDS, LONG)?;
    rig.publish(0, STORED, 256, None)?.finish(LONG)?;
    rig.landed(STORED, LONG, |_| fleet.must_run())?;
    proxy.set_hook(|request| if request.kind == Kind::Insert { Fate::Silence } else { Fate::Forward });
    rig.publish(STORED / rig.tables().len() as u64, WAITING, 256, None)?.finish(LONG)?;
    let owned: Vec<BTreeSet<u32>> = fleet
        .members
        .iter()
        .map(|member| Ok(member.owned()?.into_iter().collect()))
        .collect::<Result<_>>()?;
    for (place, owned) in owned.iter().enumerate() {
        owned.iter().try_for_each(|shard| fleet.blocked(place, *shard, LONG))?;
    }
    let deleted = Moment::now();
    rig.jetstream().api("STREAM.DELETE.INGEST", &json!({}))?;
    // Mostly by its owner; where that is giving it up meanwhile, since others lost theirs, by the heir.
    let named = || -> Option<f64> {
        let events = fleet.events().ok()?;
        let ended = |shard: &u32| {
            let ended = events
                .iter()
                .find(|event| event.shard() == Some(*shard) && event.message.starts_with("shard ended"));
            ended.map(|event| event.at.since(deleted))
        };
        let mut named = owned.iter().flatten().map(ended);
        if exits {
            // The first is enough: from then on the daemon gives up everything.
            return named.flatten().min_by(f64::total_cmp);
        }
        named.try_fold(0.0, |last: f64, late| Some(last.max(late?)))
    };
    let late = wait::until("every owned shard's end in a log", LONG, named)?;
    outcome.demand(late <= NAMED, || format!("the deleted stream was named after {late:.2} s"));
    let mut after = 0.0;
    if exits {
        for member in &mut fleet.members {
            let ended = member.daemon.wait(LONG)?;
            outcome.demand(ended == LOST, || format!("with on_lost_shard = exit it ended with {ended}"));
        }
        after = Moment::now().since(deleted);
    } else {
        let told = |member: &crate::fleet::Member| {
            member.get("/readyz").is_ok_and(|(status, body)| status == 503 && body.contains("INGEST"))
        };
        let all =
            wait::until_true("/readyz of each daemon to name the stream", Duration::from_secs(5), || {
                fleet.members.iter().all(told)
            });
        if let Err(late) = all {
            outcome.faults.push(late.to_string());
        }
        fleet.must_run()?;
        let failures = fleet.events()?.into_iter().filter(|event| event.message.starts_with("shard ended"));
        let mut failed: Vec<u32> = failures.filter_map(|event| event.shard()).collect();
        failed.sort_unstable();
        let once = failed.windows(2).all(|pair| pair[0] != pair[1]);
        outcome.demand(once, || format!("shards failed at more than one daemon: {failed:?}"));
    }
    proxy.clear_hook();
    proxy.cut();
    if exits {
        while !fleet.members.is_empty() {
            fleet.kill(0)?;
        }
    } else {
        for ended in fleet.stop_all(Duration::from_secs(30))? {
            outcome.demand(ended.is_success(), || format!("SIGTERM ended with {ended}"));
        }
    }
    let verdict = beginnings(&rig)?;
    outcome.verdict += verdict;
    tell(&format!(
        "round {round}{}: {verdict}; every shard named after {late:.3} s",
        if exits {
            format!(", with on_lost_shard = exit: all exited after {after:.2} s")
        } else {
            String::new()
        }
    ));
    outcome.most("named_seconds", late);
    outcome.most("exit_seconds", after);
    Ok(())
}

/// Judges each table against the rows up to the last that it has.
fn beginnings(rig: &Rig) -> Result<Verdict> {
    let of = |table: String| {
        let answer = rig.sql().query(&format!("SELECT max(n) + 1 FROM {}", identifier(&table)))?;
        let expected = answer
            .trim()
            .parse()
            .map_err(|_| Error::Answer { what: "a count of rows", answer: answer.clone() })?;
        verdict::judge(&rig.sql(), &table, expected)
    };
    rig.tables().into_iter().map(of).sum()
}
