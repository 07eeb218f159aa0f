//! A NATS cluster of three nodes, everything on all of them: the consumers' leaders step down, and the node of one is
//! killed, again and again under load.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Outcome, Settings};
use crate::error::Result;
use crate::fleet::{Fleet, Moment, stored_batches};
use crate::load::{Load, median, quantile};
use crate::nats::NatsCluster;
use crate::rig::Rig;
use crate::{rows, wait};

const SHARDS: u32 = 3;
const RATE: u64 = 400;
const LONG: Duration = Duration::from_mins(3);
/// While there is no leader, nobody answers.
const PATIENCE: Duration = Duration::from_millis(500);
/// Rows flow again so soon after there is a leader.
const FLOWS: f64 = 2.0;

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let began = Instant::now();
    let (steps, kills) = if settings.short { (3, 2) } else { (8, 5) };
    for round in 1..=settings.rounds {
        // The rig's own server is not used.
        let mut rig = Rig::bare(settings.rig(SHARDS, 6).set("batch.max_age", "50ms"))?;
        let mut cluster = NatsCluster::start_with(3, &rig.mapping()?)?;
        rig.set("nats.url", cluster.url());
        rig.set("topology.replicas", 3);
        rig.set("topology.dead_letters", "");
        for table in rig.tables() {
            rows::create_table(&rig.sql(), &table)?;
        }
        rig.expect(&["topology", "apply"])?;
        spread(&cluster, &rig, settings.streams)?;
        let sole = ["publish", "--table", "t0", "--generate", "64", "--count", "1", "--sole-publisher"];
        let refused = rig.holdfast(&sole)?;
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        outcome.demand(!refused.status.success() && words.contains("has 3 replicas"), || {
            format!("a sole publisher was not refused on a stream with replicas: {words}")
        });
        let mut fleet = Fleet::new(&rig);
        fleet.start(2)?;
        fleet.settle(SHARDS, LONG)?;
        let servers = cluster.nodes.iter().map(|node| node.jetstream().patience(PATIENCE)).collect();
        let mut load = Load::start_patient(&rig, servers, RATE, 256)?;
        rig.landed(RATE, LONG, |_| fleet.must_run())?;

        let mut after_step = Vec::new();
        for step in 0..steps {
            let shard = step % SHARDS;
            let moved = Moment::now();
            let stream = rig.stream(shard);
            ask(&cluster, &format!("CONSUMER.LEADER.STEPDOWN.{stream}.holdfast-{shard}"))?;
            let led = led(&cluster, &rig, Some(shard), None)?;
            after_step.push((shard, moved, led));
            tell(&format!("consumer of shard {shard}: another leader after {:.2} s", led.since(moved)));
            flows(&rig, &mut fleet, &mut load)?;
        }
        let mut after_kill = Vec::new();
        for kill in 0..kills {
            let shard = kill % SHARDS;
            let name = leader(&cluster, &consumer(&rig, shard)).unwrap_or_default();
            let place = cluster.nodes.iter().position(|node| node.name() == name).unwrap_or_default();
            let killed = Moment::now();
            cluster.nodes[place].kill()?;
            let led = led(&cluster, &rig, None, Some(&name))?;
            after_kill.push((shard, killed, led));
            tell(&format!("{name} killed: leaders of everything after {:.2} s", led.since(killed)));
            flows(&rig, &mut fleet, &mut load)?;
            cluster.nodes[place].restart()?;
            // Another one may go only when this one has caught up.
            whole(&cluster, &rig)?;
            flows(&rig, &mut fleet, &mut load)?;
        }
        let published = load.finish()?.len() as u64;
        rig.landed(published, LONG, |_| fleet.must_run())?;

        let stored = stored_batches(&fleet.events()?);
        // Of every shard: the first batch stored of what was published when there was a leader again.
        let again = |changes: &[(u32, Moment, Moment)]| -> Vec<f64> {
            let first = |(shard, _, led): &(u32, Moment, Moment)| {
                let later = stored.iter().filter(|batch| batch.shard == *shard && batch.at > *led);
                later.map(|batch| batch.at.since(*led)).min_by(f64::total_cmp)
            };
            changes.iter().filter_map(first).collect()
        };
        let elections: Vec<f64> = after_kill.iter().map(|(_, killed, led)| led.since(*killed)).collect();
        let (stepped, killed) = (again(&after_step), again(&after_kill));
        for (what, flows) in [("stepped down", &stepped), ("was killed", &killed)] {
            let most = quantile(flows, 1.0);
            outcome.demand(most <= FLOWS, || {
                format!("when a leader {what}, rows were stored again {most:.2} s after there was one")
            });
        }
        let verdict = outcome.judge_fleet(&rig, &mut fleet, published)?;
        tell(&format!(
            "round {round}: {verdict}; rows stored again {:.2} s (median) and {:.2} s (most) after {} step-downs, \
             {:.2} s and {:.2} s after {} kills, once there was a leader, which took up to {:.1} s",
            median(&stepped),
            quantile(&stepped, 1.0),
            stepped.len(),
            median(&killed),
            quantile(&killed, 1.0),
            killed.len(),
            quantile(&elections, 1.0),
        ));
        outcome.most("stepdown_median_ms", median(&stepped) * 1e3);
        outcome.most("stepdown_most_ms", quantile(&stepped, 1.0) * 1e3);
        outcome.most("kill_median_ms", median(&killed) * 1e3);
        outcome.most("kill_most_ms", quantile(&killed, 1.0) * 1e3);
        outcome.most("election_seconds", quantile(&elections, 1.0));
        outcome.add("rows", published as f64);
    }
    outcome.add("seconds", began.elapsed().as_secs_f64());
    Ok(outcome)
}

fn consumer(rig: &Rig, shard: u32) -> String {
    format!("CONSUMER.INFO.{}.holdfast-{shard}", rig.stream(shard))
}

/// The questions about every stream and the bucket.
fn streams(rig: &Rig) -> BTreeSet<String> {
    let rows = (0..SHARDS).map(|shard| rig.stream(shard));
    rows.chain(["KV_HOLDFAST".to_owned()]).map(|stream| format!("STREAM.INFO.{stream}")).collect()
}

/// Lets the rows' streams have leaders on different nodes, as many as there are nodes: that is what several are for.
fn spread(cluster: &NatsCluster, rig: &Rig, streams: u32) -> Result<()> {
    let leads = |stream: &str| leader(cluster, &format!("STREAM.INFO.{stream}"));
    let names: Vec<String> = (0..streams).map(|number| rig.stream(number)).collect();
    wait::until_true("leaders on different nodes", LONG, || {
        let found: Vec<Option<String>> = names.iter().map(|name| leads(name)).collect();
        let distinct: BTreeSet<&String> = found.iter().flatten().collect();
        if found.iter().all(Option::is_some) && distinct.len() == names.len().min(cluster.nodes.len()) {
            return true;
        }
        // Who is next is the servers' choice.
        let second = found.iter().enumerate().find(|(place, leader)| found[..*place].contains(leader));
        if let Some((place, Some(_))) = second {
            let _ = ask(cluster, &format!("STREAM.LEADER.STEPDOWN.{}", names[place]));
        }
        false
    })?;
    Ok(())
}

/// Asks any node that answers.
fn ask(cluster: &NatsCluster, what: &str) -> Result<Value> {
    let found = wait::until(&format!("an answer to {what}"), LONG, || {
        let up = cluster.nodes.iter().filter(|node| node.pid().is_some());
        up.map(|node| node.jetstream().patience(PATIENCE).api(what, &json!({}))).find_map(Result::ok)
    })?;
    Ok(found)
}

/// The leader of what such a question is about. Only the leader answers it.
fn leader(cluster: &NatsCluster, question: &str) -> Option<String> {
    let up = cluster.nodes.iter().filter(|node| node.pid().is_some());
    let info =
        up.map(|node| node.jetstream().patience(PATIENCE).api(question, &json!({}))).find_map(Result::ok)?;
    info["cluster"]["leader"].as_str().filter(|leader| !leader.is_empty()).map(str::to_owned)
}

/// When a shard's consumer, or all, the stream and the bucket have leaders, none of which is `gone`.
fn led(cluster: &NatsCluster, rig: &Rig, shard: Option<u32>, gone: Option<&str>) -> Result<Moment> {
    let mut questions = streams(rig);
    match shard {
        Some(shard) => drop(questions.insert(consumer(rig, shard))),
        None => questions.extend((0..SHARDS).map(|shard| consumer(rig, shard))),
    }
    let mut missing = "";
    let outcome = wait::until_true("leaders of everything", LONG, || {
        let is_led =
            |question: &String| leader(cluster, question).is_some_and(|leader| Some(leader.as_str()) != gone);
        missing = questions.iter().find(|question| !is_led(question)).map_or("", String::as_str);
        missing.is_empty()
    });
    outcome.map_err(|late| wait::TimedOut { what: format!("{}: {missing}", late.what), ..late })?;
    Ok(Moment::now())
}

/// Waits until every node has all there is of everything.
fn whole(cluster: &NatsCluster, rig: &Rig) -> Result<()> {
    let mut questions = streams(rig);
    questions.extend((0..SHARDS).map(|shard| consumer(rig, shard)));
    let is_whole = |question: &String| {
        let up = cluster.nodes.iter().filter(|node| node.pid().is_some());
        let info = up.map(|node| node.jetstream().patience(PATIENCE).api(question, &json!({})));
        let Some(info) = info.into_iter().find_map(Result::ok) else { return false };
        let replicas = info["cluster"]["replicas"].as_array().cloned().unwrap_or_default();
        replicas.len() == 2
            && replicas.iter().all(|replica| replica["current"] == true && replica["offline"] != true)
    };
    wait::until_true("every node to have caught up", LONG, || questions.iter().all(is_whole))?;
    Ok(())
}

/// Waits until rows are stored again, a second's load of them.
fn flows(rig: &Rig, fleet: &mut Fleet<'_>, load: &mut Load) -> Result<()> {
    load.must_run()?;
    let stored = rig.stored()?;
    rig.landed(stored + RATE, LONG, |_| fleet.must_run())
}
