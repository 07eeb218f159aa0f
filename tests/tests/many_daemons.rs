//! Several daemons on real servers: stopped, killed, frozen, paused, confused with each other.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use holdfast_testbed::frame::Verb;
use holdfast_testbed::proxy::{Direction, Fate};
use holdfast_testbed::rig::{self, Options, Rig};
use holdfast_testbed::{Fleet, Load, Proxy, wait};

/// Enough for any of these on a slow machine.
const LONG: Duration = Duration::from_mins(2);
const STOP: Duration = Duration::from_secs(26);

fn small(shards: u32, tables: usize) -> Options {
    Options { shards, tables, ..Options::default() }.set("batch.max_age", "100ms")
}

/// Ends the daemons; every row is there once and in order, by plain SQL and by `holdfast verify`.
#[track_caller]
fn assert_whole(rig: &Rig, fleet: &mut Fleet<'_>, load: Load) {
    let rows = load.finish().unwrap().len() as u64;
    rig.landed(rows, LONG, |_| fleet.must_run()).unwrap();
    for ended in fleet.stop_all(STOP).unwrap() {
        assert!(ended.is_success(), "{ended}");
    }
    rig::assert_whole(rig, rows);
}

/// Waits until rows are stored that were published after now.
#[track_caller]
fn assert_flows(rig: &Rig, fleet: &mut Fleet<'_>, rate: u64) {
    let stored = rig.stored().unwrap();
    rig.landed(stored + rate / 2, LONG, |_| fleet.must_run()).unwrap();
}

#[test]
fn one_is_stopped_one_killed_one_frozen() {
    const SHARDS: u32 = 6;
    const RATE: u64 = 3_000;
    let rig = Rig::start(small(SHARDS, 12)).unwrap();
    let mut fleet = Fleet::new(&rig);
    fleet.start(3).unwrap();
    fleet.settle(SHARDS, LONG).unwrap();
    let load = Load::start(&rig, RATE, 200).unwrap();
    assert_flows(&rig, &mut fleet, RATE);

    assert!(fleet.stop(0, STOP).unwrap().is_success());
    fleet.settle(SHARDS, LONG).unwrap();
    assert_flows(&rig, &mut fleet, RATE);

    fleet.start(1).unwrap();
    fleet.settle(SHARDS, LONG).unwrap();
    let (killed, _) = fleet.kill(0).unwrap();
    // Long before its lease of 5 s is over: nobody answers for it any more.
    fleet.settle(SHARDS, LONG).unwrap();
    assert_flows(&rig, &mut fleet, RATE);

    fleet.start(1).unwrap();
    fleet.settle(SHARDS, LONG).unwrap();
    let frozen = Instant::now();
    let sleeper = fleet.members.remove(0);
    let mut sleeper = sleeper;
    sleeper.daemon.pause().unwrap();
    // Past its lease; the others have its shards.
    fleet.settle(SHARDS, LONG).unwrap();
    assert!(frozen.elapsed() >= Duration::from_secs(4), "nobody waited for its lease");
    thread::sleep(Duration::from_secs(12).saturating_sub(frozen.elapsed()));
    sleeper.daemon.resume().unwrap();
    fleet.members.push(sleeper);
    fleet.settle(SHARDS, LONG).unwrap();
    assert_flows(&rig, &mut fleet, RATE);
    let events = fleet.events().unwrap();
    let left = |why: &str, who: Option<&str>| {
        events.iter().any(|event| {
            event.message == "a daemon has left"
                && event.fields["why"] == why
                && who.is_none_or(|who| event.fields["member"] == who)
        })
    };
    assert!(left("resigned", None) && left("lease-over", None));
    assert!(left("no-responders", Some(&killed)), "nobody noticed that {killed} was killed");
    assert_whole(&rig, &mut fleet, load);
}

#[test]
fn a_shard_is_paused_and_resumed() {
    const SHARDS: u32 = 4;
    const RATE: u64 = 2_000;
    let rig = Rig::start(small(SHARDS, 8)).unwrap();
    let mut fleet = Fleet::new(&rig);
    fleet.start(2).unwrap();
    fleet.settle(SHARDS, LONG).unwrap();
    let load = Load::start(&rig, RATE, 200).unwrap();
    assert_flows(&rig, &mut fleet, RATE);
    let shard = *fleet.members[0].owned().unwrap().first().unwrap();
    rig.expect(&["pause", &shard.to_string()]).unwrap();
    wait::until_true("nobody to have the shard", LONG, || {
        fleet.members.iter().all(|member| member.shards().is_ok_and(|shards| !shards.contains(&shard)))
    })
    .unwrap();
    let paused = |fleet: &Fleet<'_>| {
        fleet.members.iter().all(|member| {
            member.status().is_ok_and(|status| status["shards"][shard as usize]["paused"] == true)
        })
    };
    wait::until_true("every daemon to call it paused", LONG, || paused(&fleet)).unwrap();
    // The others' rows flow, its own wait.
    assert_flows(&rig, &mut fleet, RATE);
    let consumer = format!("holdfast-{shard}");
    assert_eq!(rig.jetstream().pin("INGEST", &consumer).unwrap(), None);
    let waiting = |fleet: &Fleet<'_>| {
        fleet.members.iter().all(|member| {
            let status = member.status().unwrap_or_default();
            status["shards"][shard as usize]["backlog_rows"].as_u64().is_some_and(|rows| rows > 0)
        })
    };
    wait::until_true("every daemon to tell what waits", LONG, || waiting(&fleet)).unwrap();
    // One that joins keeps to it while one of them lives.
    fleet.start(1).unwrap();
    wait::until_true("the newcomer to call it paused", LONG, || paused(&fleet)).unwrap();
    assert!(fleet.stop(0, LONG).unwrap().is_success());
    assert_flows(&rig, &mut fleet, RATE);
    assert!(paused(&fleet));
    let table = rig.tables_of(shard).unwrap().remove(0);
    rig.expect(&["resume", &table]).unwrap();
    fleet.settle(SHARDS, LONG).unwrap();
    assert_whole(&rig, &mut fleet, load);
}

#[test]
fn two_daemons_of_one_name_say_so_and_lose_nothing() {
    const SHARDS: u32 = 4;
    const RATE: u64 = 2_000;
    let rig = Rig::start(small(SHARDS, 8)).unwrap();
    let mut fleet = Fleet::new(&rig);
    fleet.start_with(|builder| builder.set("node.id", "twin")).unwrap();
    fleet.settle(SHARDS, LONG).unwrap();
    let load = Load::start(&rig, RATE, 200).unwrap();
    assert_flows(&rig, &mut fleet, RATE);
    fleet.start_with(|builder| builder.set("node.id", "twin")).unwrap();
    wait::until_true("a word about the name", LONG, || {
        fleet.members.iter().any(|member| {
            member.daemon.log().is_ok_and(|log| log.contains("another daemon has this one's node.id"))
        })
    })
    .unwrap();
    assert_flows(&rig, &mut fleet, RATE);
    // The second of them goes, and with it the record of both.
    assert!(fleet.stop(1, STOP).unwrap().is_success());
    fleet.settle(SHARDS, LONG).unwrap();
    assert_whole(&rig, &mut fleet, load);
}

#[test]
fn shares_differ_by_at_most_one() {
    const SHARDS: u32 = 64;
    let rig = Rig::start(small(SHARDS, 4)).unwrap();
    let mut fleet = Fleet::new(&rig);
    for count in [1, 2, 3, 5, 8] {
        let more = count - u32::try_from(fleet.members.len()).unwrap();
        fleet.start(more).unwrap();
        fleet.settle(SHARDS, LONG).unwrap();
    }
    let load = Load::start(&rig, 1_000, 200).unwrap();
    assert_flows(&rig, &mut fleet, 1_000);
    // And on the way down.
    for _ in [8, 7, 6, 5, 4] {
        assert!(fleet.stop(0, STOP).unwrap().is_success());
        fleet.settle(SHARDS, LONG).unwrap();
    }
    assert_whole(&rig, &mut fleet, load);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_idle_shards_cost_next_to_nothing() {
    const SHARDS: u32 = 100;
    const LENGTH: Duration = Duration::from_secs(20);
    let options = small(SHARDS, 1).set("topology.pinned_ttl", "10s");
    let mut rig = tokio::task::spawn_blocking(|| Rig::start(options)).await.unwrap().unwrap();
    let proxy = Proxy::start_nats(rig.nats.addr()).await.unwrap();
    rig.nats_through(proxy.addr());
    let pulls: Arc<Mutex<BTreeMap<String, u64>>> = Arc::default();
    let (counting, counted) = (Arc::new(AtomicU64::new(0)), Arc::clone(&pulls));
    let on = Arc::clone(&counting);
    proxy.set_hook(move |direction, frame| {
        if on.load(Ordering::SeqCst) == 1
            && direction == Direction::ToServer
            && matches!(frame.verb(), Verb::Pub | Verb::HPub)
            && let Some(consumer) = frame.subject().strip_prefix("$JS.API.CONSUMER.MSG.NEXT.INGEST.")
        {
            *counted.lock().unwrap().entry(consumer.to_owned()).or_default() += 1;
        }
        Fate::Forward
    });
    let mut fleet = Fleet::new(&rig);
    fleet.start_with(|builder| builder.environment("RUST_LOG", "info")).unwrap();
    fleet.settle(SHARDS, LONG).unwrap();
    // What a start costs is over when every shard has its record and has pulled.
    wait::until_true("the daemon to be ready", LONG, || {
        fleet.members[0].get("/readyz").is_ok_and(|(status, _)| status == 200)
    })
    .unwrap();
    counting.store(1, Ordering::SeqCst);
    let before = fleet.members[0].processor_time();
    // The time is what is measured over.
    tokio::time::sleep(LENGTH).await;
    let used = fleet.members[0].processor_time() - before;
    counting.store(0, Ordering::SeqCst);
    let pulls = std::mem::take(&mut *pulls.lock().unwrap());
    // One for each third of the pinned TTL: six and a bit in the time, and what falls on its edge.
    let most = pulls.values().copied().max().unwrap_or_default();
    assert!(pulls.len() == SHARDS as usize && most <= 8, "pulls of each shard in 20 s: {pulls:?}");
    assert!(used < 0.02 * LENGTH.as_secs_f64(), "{used:.2} s of processor time in {LENGTH:?}");
    assert!(fleet.stop_all(STOP).unwrap().iter().all(|ended| ended.is_success()));
}
