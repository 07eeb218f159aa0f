//! One daemon is cut off from the bucket, and sees and writes no member and no record, but pulls rows as before; then
//! the other way round. Whatever the daemons believe of each other, every row is stored once and in order.

use std::thread;
use std::time::{Duration, Instant};

use super::{Outcome, Settings};
use crate::error::{Context, Result};
use crate::fleet::Fleet;
use crate::frame::Frame;
use crate::load::{Load, latencies, quantile};
use crate::proxy::{Direction, Fate, Proxy};
use crate::rig::Rig;
use crate::wait;

const SHARDS: u32 = 6;
const RATE: u64 = 3_000;
const LONG: Duration = Duration::from_mins(3);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    Bucket,
    Consumers,
}

impl Cut {
    /// Whether the frame belongs to what is cut off.
    fn has(self, direction: Direction, frame: &Frame) -> bool {
        let subject = frame.subject();
        match (self, direction) {
            (Self::Bucket, Direction::ToServer) => {
                subject.starts_with("$KV.") || (subject.starts_with("$JS.") && subject.contains("KV_"))
            }
            // What the watch shows comes to an inbox, with where to acknowledge it.
            (Self::Bucket, Direction::ToClient) => {
                frame.reply().is_some_and(|reply| reply.starts_with("$JS.ACK.KV_"))
            }
            (Self::Consumers, Direction::ToServer) => {
                subject.starts_with("$JS.API.CONSUMER.") && !subject.contains("KV_")
            }
            (Self::Consumers, Direction::ToClient) => {
                frame.reply().is_some_and(|reply| reply.starts_with("$JS.ACK.INGEST."))
            }
        }
    }
}

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let began = Instant::now();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context(|| "cannot start the proxy's threads".to_owned())?;
    for round in 1..=settings.rounds {
        for cut in [Cut::Bucket, Cut::Consumers] {
            let rig = Rig::start(settings.rig(SHARDS, 12).set("batch.max_age", "100ms"))?;
            let proxy = runtime.block_on(Proxy::start_nats(rig.nats.addr()))?;
            let mut fleet = Fleet::new(&rig);
            fleet.start(2)?;
            fleet.start_with(|builder| builder.set("nats.url", format!("nats://{}", proxy.addr())))?;
            fleet.settle(SHARDS, LONG)?;
            let load = Load::start(&rig, RATE, 256)?;
            let owned = wait::until("the third daemon to own a shard", LONG, || {
                fleet.members[2].owned().ok().filter(|owned| !owned.is_empty())
            })?;
            rig.landed(RATE, LONG, |_| fleet.must_run())?;
            proxy.set_hook(
                move |direction, frame| {
                    if cut.has(direction, frame) { Fate::Drop } else { Fate::Forward }
                },
            );
            // Long past lease and pinned TTL. The time is the drill, not a condition.
            thread::sleep(settings.time(30, 20));
            fleet.must_run()?;
            let heirs = owned.iter().filter(|shard| fleet.owner(**shard).is_some_and(|place| place != 2));
            let heirs = heirs.count();
            proxy.clear_hook();
            let back = Instant::now();
            let stored = rig.stored()?;
            rig.landed(stored + RATE, LONG, |_| fleet.must_run())?;
            fleet.settle(SHARDS, LONG)?;
            let settled = back.elapsed().as_secs_f64();
            let rows = load.finish()?;
            let published = rows.len() as u64;
            rig.landed(published, LONG, |_| fleet.must_run())?;
            let verdict = outcome.judge_fleet(&rig, &mut fleet, published)?;
            let stored = crate::fleet::stored_batches(&fleet.events()?);
            let ages: Vec<f64> = latencies(&rows, &rig.tables(), &stored).into_iter().flatten().collect();
            let (what, oldest) = match cut {
                Cut::Bucket => ("bucket", "oldest_unwritten_seconds_bucket"),
                Cut::Consumers => ("consumers", "oldest_unwritten_seconds_consumers"),
            };
            tell(&format!(
                "round {round}, without the {what}: {verdict}; {heirs} of {} shards had heirs by the end of it, \
                 shared out evenly {settled:.2} s after it; the oldest row waited {:.1} s",
                owned.len(),
                quantile(&ages, 1.0)
            ));
            outcome.most(oldest, quantile(&ages, 1.0));
            outcome.most("settled_seconds", settled);
            outcome.add("rows", published as f64);
        }
    }
    outcome.add("seconds", began.elapsed().as_secs_f64());
    Ok(outcome)
}
