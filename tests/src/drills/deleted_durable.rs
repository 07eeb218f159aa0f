//! A shard's consumer is deleted while every insert hangs: its owner names it soon, the other shards run on, no
//! heir fails in turn. Then it is made again, and the shard goes on where it was.

use std::time::{Duration, Instant};

use serde_json::json;

use super::{Outcome, Settings};
use crate::error::Result;
use crate::fleet::{Fleet, Moment};
use crate::guarded::Ended;
use crate::http_proxy::{Fate, Kind};
use crate::load::Load;
use crate::rig::Rig;
use crate::rows::identifier;
use crate::wait;

const SHARDS: u32 = 6;
const RATE: u64 = 4_000;
const LONG: Duration = Duration::from_mins(2);
/// From the deletion to its name in the log.
const NAMED: f64 = 5.0;
/// Budget of a daemon: its shards' shares are soon full, so that nothing is pulled any more.
const HELD: u64 = 4_000;
/// What a daemon exits with that lost a shard.
const LOST: Ended = Ended::Exited(3);

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let began = Instant::now();
    for round in 1..=settings.rounds {
        goes_on(settings, round, &mut outcome, tell)?;
        exits(settings, round, &mut outcome, tell)?;
    }
    outcome.add("seconds", began.elapsed().as_secs_f64());
    Ok(outcome)
}

fn goes_on(settings: &Settings, round: u32, outcome: &mut Outcome, tell: &mut dyn FnMut(&str)) -> Result<()> {
    let options = settings.rig(SHARDS, 12).set("batch.max_age", "50ms").set("limits.held_rows", HELD);
    let mut rig = Rig::start(options)?;
    let proxy = rig.clickhouse_proxy()?;
    let mut fleet = Fleet::new(&rig);
    fleet.start(3)?;
    fleet.settle(SHARDS, LONG)?;
    let load = Load::start(&rig, RATE, 256)?;
    rig.landed(RATE, LONG, |_| fleet.must_run())?;
    let (place, shard) = wait::until("an owner", LONG, || {
        let owned = |place: usize| Some((place, fleet.members[place].owned().ok()?.first().copied()?));
        (0..fleet.members.len()).find_map(owned)
    })?;
    proxy.set_hook(|request| if request.kind == Kind::Insert { Fate::Silence } else { Fate::Forward });
    fleet.blocked(place, shard, LONG)?;
    let owner = fleet.members[place].name().to_owned();
    let deleted = Moment::now();
    rig.jetstream().api(&format!("CONSUMER.DELETE.INGEST.holdfast-{shard}"), &json!({}))?;
    let named = wait::until("the shard's end in its owner's log", LONG, || {
        let events = fleet.members[place].events().ok()?;
        let ended = |event: &&crate::fleet::Event| {
            event.shard() == Some(shard) && event.message.starts_with("shard ended")
        };
        events.iter().find(ended).cloned()
    })?;
    let late = named.at.since(deleted);
    outcome.demand(late <= NAMED, || format!("the deleted consumer was named after {late:.2} s"));
    let name = format!("holdfast-{shard}");
    outcome.demand(named.message.contains(&name), || format!("the log does not name it: {}", named.message));
    // Every daemon says why it is not ready.
    let told = |member: &crate::fleet::Member| {
        member.get("/readyz").is_ok_and(|(status, body)| status == 503 && body.contains(&name))
    };
    let outcome_of_readiness =
        wait::until_true("/readyz of each daemon to name the consumer", Duration::from_secs(5), || {
            fleet.members.iter().all(told)
        });
    if let Err(late) = outcome_of_readiness {
        outcome.faults.push(late.to_string());
    }
    // The others run on: all of their rows land while the shard is lost.
    proxy.clear_hook();
    proxy.cut();
    let lost = rig.tables_of(shard)?;
    let others: Vec<_> = rig.tables().into_iter().filter(|table| !lost.contains(table)).collect();
    let published = load.finish()?;
    let tables = rig.tables();
    let expected = published.iter().filter(|row| others.contains(&tables[row.table])).count() as u64;
    let counts: Vec<_> =
        others.iter().map(|table| format!("(SELECT count() FROM {})", identifier(table))).collect();
    let sql = format!("SELECT {}", counts.join(" + "));
    wait::until_true("the other shards' rows", LONG, || {
        rig.sql().query(&sql).is_ok_and(|count| count.trim().parse() == Ok(expected))
    })?;
    fleet.must_run()?;
    let failures: Vec<String> = fleet
        .events()?
        .into_iter()
        .filter(|event| event.message.starts_with("shard ended"))
        .map(|event| event.node)
        .collect();
    outcome.demand(failures == [owner.clone()], || format!("the shard failed at {failures:?} in turn"));
    // Made again and resumed, it goes on where it was.
    rig.expect(&["topology", "apply"])?;
    rig.expect(&["resume", &shard.to_string()])?;
    let rows = published.len() as u64;
    rig.landed(rows, LONG, |_| fleet.must_run())?;
    let verdict = outcome.judge_fleet(&rig, &mut fleet, rows)?;
    tell(&format!(
        "round {round}: {verdict}; {owner} named {name} after {late:.3} s, {} of {} tables were on it",
        lost.len(),
        tables.len()
    ));
    outcome.most("named_seconds", late);
    outcome.add("rows", rows as f64);
    Ok(())
}

/// With `on_lost_shard = "exit"` the owner exits, and the others have its other shards.
fn exits(settings: &Settings, round: u32, outcome: &mut Outcome, tell: &mut dyn FnMut(&str)) -> Result<()> {
    let options = settings
        .rig(SHARDS, 12)
        .set("batch.max_age", "50ms")
        .set("limits.held_rows", HELD)
        .set("limits.shutdown", "6s")
        .set("topology.on_lost_shard", "exit");
    let mut rig = Rig::start(options)?;
    let proxy = rig.clickhouse_proxy()?;
    let mut fleet = Fleet::new(&rig);
    fleet.start(2)?;
    fleet.settle(SHARDS, LONG)?;
    let load = Load::start(&rig, RATE, 256)?;
    rig.landed(RATE, LONG, |_| fleet.must_run())?;
    let shard = wait::until("an owner", LONG, || fleet.members[0].owned().ok()?.first().copied())?;
    proxy.set_hook(|request| if request.kind == Kind::Insert { Fate::Silence } else { Fate::Forward });
    fleet.blocked(0, shard, LONG)?;
    let deleted = Instant::now();
    rig.jetstream().api(&format!("CONSUMER.DELETE.INGEST.holdfast-{shard}"), &json!({}))?;
    let ended = fleet.members[0].daemon.wait(LONG)?;
    let after = deleted.elapsed().as_secs_f64();
    outcome.demand(ended == LOST, || format!("with on_lost_shard = exit the daemon ended with {ended}"));
    proxy.clear_hook();
    proxy.cut();
    fleet.kill(0)?;
    let rows = load.finish()?.len() as u64;
    // Its heir has its other shards, and leaves the lost one alone.
    wait::until_true("the heir to own the other shards", LONG, || {
        fleet.members[0].owned().is_ok_and(|owned| owned.len() + 1 == SHARDS as usize)
    })?;
    fleet.must_run()?;
    // Made again and resumed, it goes on at the heir.
    rig.expect(&["topology", "apply"])?;
    rig.expect(&["resume", &shard.to_string()])?;
    rig.landed(rows, LONG, |_| fleet.must_run())?;
    let ends = fleet.events()?.iter().filter(|event| event.message.starts_with("shard ended")).count();
    outcome.demand(ends == 1, || format!("{ends} daemons failed, one after another"));
    let verdict = outcome.judge_fleet(&rig, &mut fleet, rows)?;
    tell(&format!(
        "round {round}, with on_lost_shard = exit: {verdict}; {ended} after {after:.2} s, no heir failed in turn"
    ));
    outcome.most("exit_seconds", after);
    outcome.add("rows", rows as f64);
    Ok(())
}
