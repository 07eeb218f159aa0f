//! A network between the daemon and nats-server that loses, delays and cuts.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_testbed::Proxy;
use holdfast_testbed::frame::Frame;
use holdfast_testbed::proxy::{Direction, Fate, Gate};
use holdfast_testbed::rig::{Options, Rig};

const LONG: Duration = Duration::from_mins(3);

fn small() -> Options {
    Options { shards: 1, tables: 2, ..Options::default() }
        .set("batch.max_age", "100ms")
        .set("topology.pinned_ttl", "3s")
}

/// A rig whose daemons reach NATS through a proxy.
async fn proxied(options: Options) -> (Rig, Proxy) {
    let mut rig = tokio::task::spawn_blocking(|| Rig::start(options)).await.unwrap().unwrap();
    let proxy = Proxy::start_nats(rig.nats.addr()).await.unwrap();
    rig.nats_through(proxy.addr());
    (rig, proxy)
}

fn assert_whole(rig: &Rig, rows: u64) {
    let verdict = rig.judge(rows).unwrap();
    assert!(verdict.ok(), "{verdict}");
    assert_eq!(rig.unproven().unwrap(), Vec::<String>::new());
}

fn is_row(frame: &Frame) -> bool {
    frame.subject().starts_with("ingest.0.")
        && frame.reply().is_some_and(|reply| reply.starts_with("$JS.ACK."))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_delivery_of_a_burst_is_lost() {
    let (rig, proxy) = proxied(small()).await;
    let dropped = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&dropped);
    proxy.set_hook(move |direction, frame| {
        // Nothing waits behind it, so no later delivery shows the gap.
        let last = direction == Direction::ToClient
            && is_row(frame)
            && frame.reply().is_some_and(|reply| reply.ends_with(".0"));
        if last && counter.fetch_add(1, Ordering::SeqCst) < 3 { Fate::Drop } else { Fate::Forward }
    });
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    for burst in 0..5 {
        rig.publish(burst * 100, 200, 100, None).unwrap().finish(LONG).unwrap();
        rig.landed(200 * (burst + 1), LONG, |_| daemon.must_run()).unwrap();
    }
    assert!(dropped.load(Ordering::SeqCst) >= 3, "the fault was not hit");
    assert!(daemon.stop(Duration::from_secs(26)).unwrap().is_success());
    assert_whole(&rig, 1_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_arrives_after_the_next_tenure_has_begun() {
    let (rig, proxy) = proxied(small()).await;
    let gate = Gate::default();
    let resets = Arc::new(AtomicU64::new(0));
    let (held, counter) = (gate.clone(), Arc::clone(&resets));
    proxy.set_hook(move |direction, frame| {
        let reset =
            direction == Direction::ToServer && frame.subject().starts_with("$JS.API.CONSUMER.RESET.");
        if reset && counter.fetch_add(1, Ordering::SeqCst) == 0 {
            Fate::Hold(held.clone())
        } else {
            Fate::Forward
        }
    });
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    rig.publish(0, 2_000, 100, None).unwrap().finish(LONG).unwrap();
    rig.landed(2_000, LONG, |_| daemon.must_run()).unwrap();
    // An operator takes the pin away: the next row begins another tenure, with a reset of its own.
    let client = async_nats::connect(rig.nats.url()).await.unwrap();
    client
        .request("$JS.API.CONSUMER.UNPIN.INGEST.holdfast-0", r#"{"group":"holdfast"}"#.into())
        .await
        .unwrap();
    rig.publish(1_000, 2_000, 100, None).unwrap().finish(LONG).unwrap();
    rig.landed(4_000, LONG, |_| daemon.must_run()).unwrap();
    let before = resets.load(Ordering::SeqCst);
    assert!(before >= 2, "no second reset: no second tenure");
    gate.open();
    rig.publish(2_000, 20_000, 100, Some(10_000)).unwrap().finish(LONG).unwrap();
    rig.landed(24_000, LONG, |_| daemon.must_run()).unwrap();
    assert!(daemon.stop(Duration::from_secs(26)).unwrap().is_success());
    assert_whole(&rig, 24_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_connection_is_cut_every_second() {
    const ROWS: u64 = 60_000;
    let (rig, proxy) = proxied(Options { shards: 4, tables: 8, ..small() }).await;
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    proxy.cut_every(Some(Duration::from_secs(1)));
    let publishing = rig.publish(0, ROWS, 256, Some(6_000)).unwrap();
    publishing.finish(LONG).unwrap();
    // Still cut while the rest lands.
    rig.landed(ROWS, LONG, |_| daemon.must_run()).unwrap();
    assert!(proxy.accepted() > 10, "the connection was cut {} times only", proxy.accepted());
    proxy.cut_every(None);
    assert!(daemon.stop(Duration::from_secs(26)).unwrap().is_success());
    assert_whole(&rig, ROWS);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_next_batch_is_sent_before_the_ledger_answers() {
    let (rig, proxy) = proxied(Options { tables: 1, ..small() }).await;
    let gate = Gate::default();
    let held = gate.clone();
    let answers: Arc<Mutex<BTreeSet<String>>> = Arc::default();
    proxy.set_hook(move |direction, frame| {
        let mut answers = answers.lock().unwrap();
        match direction {
            Direction::ToServer if frame.subject() == "$KV.HOLDFAST.shard.INGEST.0" => {
                // The first write that calls a row done, and all after it, get no answer.
                let record: serde_json::Value = serde_json::from_slice(frame.payload()).unwrap();
                if record["floor"].as_u64().unwrap() > 0
                    && let Some(reply) = frame.reply()
                {
                    answers.insert(reply.to_owned());
                }
                Fate::Forward
            }
            Direction::ToClient if answers.contains(frame.subject()) => Fate::Hold(held.clone()),
            _ => Fate::Forward,
        }
    });
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    rig.publish(0, 100, 100, None).unwrap().finish(LONG).unwrap();
    rig.landed(100, LONG, |_| daemon.must_run()).unwrap();
    rig.publish(100, 100, 100, None).unwrap().finish(LONG).unwrap();
    for _ in 0..30 {
        assert_eq!(
            rig.stored().unwrap(),
            100,
            "a second batch was sent before the first was known to be recorded"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    gate.open();
    rig.landed(200, LONG, |_| daemon.must_run()).unwrap();
    assert!(daemon.stop(Duration::from_secs(26)).unwrap().is_success());
    assert_whole(&rig, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_trimmed_before_the_ledger_is_read_and_then_up_to_the_floor() {
    let (rig, proxy) = proxied(small()).await;
    let gate = Gate::default();
    let held = gate.clone();
    let holding = Arc::new(AtomicU64::new(0));
    let (on, reads) = (Arc::clone(&holding), Mutex::<BTreeSet<String>>::default());
    proxy.set_hook(move |direction, frame| {
        let mut reads = reads.lock().unwrap();
        match direction {
            Direction::ToServer if frame.subject() == "$JS.API.STREAM.MSG.GET.KV_HOLDFAST" => {
                if on.load(Ordering::SeqCst) == 1 {
                    reads.extend(frame.reply().map(str::to_owned));
                }
                Fate::Forward
            }
            Direction::ToClient if reads.contains(frame.subject()) => Fate::Hold(held.clone()),
            _ => Fate::Forward,
        }
    });
    let mut daemon = rig.ready_daemon("holdfast").unwrap();
    // The first row begins the tenure, which reads the record. From then on only the trimmer reads it.
    rig.publish(0, 2, 100, None).unwrap().finish(LONG).unwrap();
    rig.landed(2, LONG, |_| daemon.must_run()).unwrap();
    holding.store(1, Ordering::SeqCst);
    rig.publish(1, 1_000, 100, None).unwrap().finish(LONG).unwrap();
    rig.landed(1_002, LONG, |_| daemon.must_run()).unwrap();
    let client = async_nats::connect(rig.nats.url()).await.unwrap();
    let mut stream = async_nats::jetstream::new(client).get_stream("INGEST").await.unwrap();
    // All is written, and the ledger has it: three of the trimmer's intervals long its answers do not come.
    for _ in 0..30 {
        assert!(
            stream.info().await.unwrap().state.messages >= 1_000,
            "trimmed without an answer of the ledger"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    holding.store(0, Ordering::SeqCst);
    gate.open();
    let info = &mut stream;
    let mut left = u64::MAX;
    for _ in 0..400 {
        left = info.info().await.unwrap().state.messages;
        if left == 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // The row at the floor stays: it shows later that the stream still is the same.
    assert_eq!(left, 1);
    assert_eq!(info.info().await.unwrap().state.last_sequence, 1_002);
    assert!(daemon.stop(Duration::from_secs(26)).unwrap().is_success());
}
