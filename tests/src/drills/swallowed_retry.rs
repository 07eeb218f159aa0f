//! Retries that are answered with success and store nothing: the token is burned, and only a read-back tells.
//!
//! Twice: answered so by the proxy, and done by ClickHouse itself, whose rename of a new part is made to fail.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::{Outcome, Settings};
use crate::clickhouse::Obstacle;
use crate::error::Result;
use crate::http_proxy::{Answer, Fate, Kind, Record, Request};
use crate::rig::Rig;
use crate::token::Token;

const ROWS: u64 = 200_000;
const RATE: u64 = 20_000;
/// Tokens that the proxy swallows.
const SWALLOWED: u32 = 12;
/// Renames made to fail.
const RENAMES: u32 = 6;
const LONG: Duration = Duration::from_mins(3);

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let began = Instant::now();
    for round in 1..=settings.rounds {
        by_the_proxy(settings, round, &mut outcome, tell)?;
        by_clickhouse(settings, round, &mut outcome, tell)?;
    }
    outcome.add("rows", (2 * ROWS * u64::from(settings.rounds)) as f64);
    outcome.add("seconds", began.elapsed().as_secs_f64());
    Ok(outcome)
}

/// Rows that landed under a token of a later generation.
fn rescued(inserts: &[Record]) -> u64 {
    let tokens: BTreeSet<Token> = inserts
        .iter()
        .filter(|insert| insert.server.is_some_and(crate::http_proxy::Answered::is_success))
        .filter_map(|insert| Token::parse(insert.token.as_deref()?))
        .filter(|token| token.generation > 0)
        .collect();
    tokens.iter().map(|token| token.rows).sum()
}

fn by_the_proxy(
    settings: &Settings,
    round: u32,
    outcome: &mut Outcome,
    tell: &mut dyn FnMut(&str),
) -> Result<()> {
    let options = settings.rig(2, 4).set("batch.max_age", "200ms").set("defaults.delivery", "exactly-once");
    let mut rig = Rig::start(options)?;
    let proxy = rig.clickhouse_proxy()?;
    proxy.set_hook(swallow());
    let mut daemon = rig.ready_daemon("holdfast")?;
    rig.publish(0, ROWS, 256, Some(RATE))?.finish(LONG)?;
    rig.landed(ROWS, LONG, |_| daemon.must_run())?;
    let verdict = outcome.judge(&rig, &mut daemon, ROWS)?;
    let inserts = proxy.inserts();
    let swallowed: BTreeSet<_> = inserts
        .iter()
        .filter(|insert| insert.is_swallowed())
        .filter_map(|insert| insert.token.clone())
        .collect();
    let rescued = rescued(&inserts);
    tell(&format!(
        "round {round}, by the proxy: {verdict}; {} tokens swallowed, {rescued} rows under a later generation",
        swallowed.len()
    ));
    outcome.demand(!swallowed.is_empty(), || "no retry was swallowed: the fault was not hit".into());
    outcome.demand(rescued > 0, || "no row went under a later generation".into());
    outcome.add("swallowed_tokens", swallowed.len() as f64);
    outcome.add("rescued_rows", rescued as f64);
    Ok(())
}

/// Every third batch's first attempt fails with a doubt; whatever comes under its token later is swallowed.
fn swallow() -> impl Fn(&Request) -> Fate + Send + Sync {
    let (seen, count) = (AtomicU32::new(0), AtomicU32::new(0));
    let victims = std::sync::Mutex::new(BTreeSet::new());
    move |request| {
        let (Kind::Insert, Some(token)) = (request.kind, &request.token) else { return Fate::Forward };
        let Ok(mut victims) = victims.lock() else { return Fate::Forward };
        if victims.contains(token) {
            return Fate::Answer(Answer::success());
        }
        let first = request.attempt == 1 && Token::parse(token).is_some_and(|token| token.generation == 0);
        if first
            && seen.fetch_add(1, Ordering::SeqCst) % 3 == 2
            && count.fetch_add(1, Ordering::SeqCst) < SWALLOWED
        {
            victims.insert(Arc::clone(token));
            return Fate::Answer(Answer::rename_failed());
        }
        Fate::Forward
    }
}

fn by_clickhouse(
    settings: &Settings,
    round: u32,
    outcome: &mut Outcome,
    tell: &mut dyn FnMut(&str),
) -> Result<()> {
    let options = settings.rig(2, 4).set("batch.max_age", "200ms").set("defaults.delivery", "exactly-once");
    let mut rig = Rig::start(options)?;
    let proxy = rig.clickhouse_proxy()?;
    let mut daemon = rig.ready_daemon("holdfast")?;
    let mut publishing = rig.publish(0, ROWS, 256, Some(RATE))?;
    let mut hits = 0;
    let mut obstacle: Option<(Obstacle, Instant)> = None;
    let failed = || proxy.count(|record| record.server.is_some_and(|answer| answer.code == Some(1001)));
    rig.landed(ROWS, LONG, |stored| {
        if failed() > u64::from(hits) {
            hits += 1;
            obstacle = None;
        }
        // One that a part has passed by is no obstacle any more.
        obstacle.take_if(|(_, since)| since.elapsed() > Duration::from_secs(2));
        // Each table in turn, spread over the load.
        let due = stored >= ROWS / u64::from(RENAMES + 2) * u64::from(hits + 1);
        if obstacle.is_none() && hits < RENAMES && due {
            obstacle =
                Some((rig.clickhouse.obstruct(&format!("t{}", hits % 4), "all", 1..2)?, Instant::now()));
        }
        publishing.is_done()?;
        daemon.must_run()
    })?;
    publishing.finish(LONG)?;
    let verdict = outcome.judge(&rig, &mut daemon, ROWS)?;
    let inserts = proxy.inserts();
    // A success under the token of an attempt whose rename had failed is a swallowed retry.
    let mut burned: BTreeMap<Arc<str>, u32> = BTreeMap::new();
    for insert in &inserts {
        let (Some(token), Some(answer)) = (&insert.token, insert.server) else { continue };
        if answer.code == Some(1001) {
            burned.entry(Arc::clone(token)).or_default();
        } else if answer.is_success()
            && let Some(swallowed) = burned.get_mut(token)
        {
            *swallowed += 1;
        }
    }
    let swallowed = burned.values().filter(|swallowed| **swallowed > 0).count();
    let rescued = rescued(&inserts);
    tell(&format!(
        "round {round}, by ClickHouse: {verdict}; {hits} renames failed, {swallowed} tokens swallowed, \
         {rescued} rows under a later generation"
    ));
    outcome.demand(hits > 0 && swallowed > 0, || {
        format!("{hits} renames failed and {swallowed} retries were swallowed: the fault was not hit")
    });
    outcome.demand(rescued > 0, || "no row went under a later generation".into());
    outcome.add("renames_failed", f64::from(hits));
    outcome.add("swallowed_by_clickhouse", swallowed as f64);
    outcome.add("rescued_rows", rescued as f64);
    Ok(())
}
