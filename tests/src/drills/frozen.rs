//! An owner is frozen with an insert on its way, past its lease and its pins, and thaws when others have its
//! shards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Outcome, Settings};
use crate::error::Result;
use crate::fleet::{Fleet, Moment};
use crate::http_proxy::{Fate, HttpProxy, Kind};
use crate::load::{Load, quantile};
use crate::proxy::Gate;
use crate::rig::Rig;
use crate::wait;

const SHARDS: u32 = 6;
const RATE: u64 = 3_000;
const LONG: Duration = Duration::from_mins(2);
/// How long it stands still: far past the lease of 5 s and the pinned TTL of 10 s.
const FROZEN: Duration = Duration::from_secs(30);

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let began = Instant::now();
    for round in 1..=settings.rounds {
        // The insert that is on its way lands before the heirs look, or long after they have sent the batch again.
        let after = round % 2 == 0;
        let rig = Rig::start(settings.rig(SHARDS, 12).set("batch.max_age", "50ms"))?;
        let proxy = HttpProxy::start(rig.clickhouse.addr())?;
        let mut fleet = Fleet::new(&rig);
        fleet.start(2)?;
        fleet.start_with(|builder| builder.set("clickhouse.url", format!("http://{}", proxy.addr())))?;
        let victim = 2;
        fleet.settle(SHARDS, LONG)?;
        let load = Load::start(&rig, RATE, 256)?;
        let owned = wait::until("the third daemon to own a shard", LONG, || {
            fleet.members[victim].owned().ok().filter(|owned| !owned.is_empty())
        })?;
        rig.landed(RATE, LONG, |_| fleet.must_run())?;

        let gate = Gate::default();
        let (held, caught) = (gate.clone(), Arc::new(AtomicBool::new(false)));
        let seen = Arc::clone(&caught);
        proxy.set_hook(move |request| match request.kind {
            Kind::Insert => {
                seen.store(true, Ordering::SeqCst);
                Fate::HoldUntil(held.clone())
            }
            Kind::Other => Fate::Forward,
        });
        wait::until_true("an insert on its way", LONG, || caught.load(Ordering::SeqCst))?;
        fleet.members[victim].daemon.pause()?;
        let (frozen, since) = (Instant::now(), Moment::now());
        if !after {
            gate.open();
        }
        wait::until_true(&format!("heirs for the shards {owned:?}"), FROZEN, || {
            let heirs = &fleet.members[..victim];
            owned
                .iter()
                .all(|shard| heirs.iter().any(|heir| heir.owned().is_ok_and(|all| all.contains(shard))))
        })?;
        // The time is the drill, not a condition.
        thread::sleep(FROZEN.saturating_sub(frozen.elapsed()));
        let thawed = Moment::now();
        fleet.members[victim].daemon.resume()?;
        if after {
            // Whatever it sends on its own from now on meets the old insert, too.
            wait::until_true("a word of the thawed daemon", LONG, || {
                fleet.members[victim].events().is_ok_and(|events| {
                    events.iter().any(|event| event.at > thawed && event.message.starts_with("tenure over"))
                })
            })?;
        }
        gate.open();
        proxy.clear_hook();
        let back = Instant::now();
        fleet.settle(SHARDS, LONG)?;
        let back = back.elapsed().as_secs_f64();
        let stored = rig.stored()?;
        rig.landed(stored + 2 * RATE, LONG, |_| fleet.must_run())?;
        let rows = load.finish()?.len() as u64;
        rig.landed(rows, LONG, |_| fleet.must_run())?;

        let events = fleet.events()?;
        let name = fleet.members[victim].name().to_owned();
        let takeovers: Vec<f64> = owned
            .iter()
            .filter_map(|shard| {
                let heir = events.iter().find(|event| {
                    event.message == "first row accepted"
                        && event.shard() == Some(*shard)
                        && event.node != name
                        && event.at > since
                })?;
                Some(heir.at.since(since))
            })
            .collect();
        outcome.demand(takeovers.len() == owned.len(), || "a shard of the frozen daemon had no heir".into());
        let gave_up = events.iter().filter(|event| {
            event.node == name && event.at > thawed && event.message.starts_with("tenure over")
        });
        let gave_up: Vec<f64> = gave_up.map(|event| event.at.since(thawed)).collect();
        outcome.demand(gave_up.len() >= owned.len(), || {
            format!("the thawed daemon gave {} of its {} shards up by itself", gave_up.len(), owned.len())
        });
        let again = fleet.members[victim].shards()?;
        outcome.demand(!again.is_empty(), || "the thawed daemon got no shard again".into());
        let verdict = outcome.judge_fleet(&rig, &mut fleet, rows)?;
        tell(&format!(
            "round {round}, the insert {}: {verdict}; heirs after {:.2} s, given up {:.3} s after the thaw, a \
             member again {back:.2} s after it",
            if after { "lands after the thaw" } else { "lands at once" },
            quantile(&takeovers, 1.0),
            quantile(&gave_up, 1.0),
        ));
        outcome.most("takeover_seconds", quantile(&takeovers, 1.0));
        outcome.most("gave_up_seconds", quantile(&gave_up, 1.0));
        outcome.most("member_again_seconds", back);
        outcome.add("rows", rows as f64);
    }
    outcome.add("seconds", began.elapsed().as_secs_f64());
    Ok(outcome)
}
