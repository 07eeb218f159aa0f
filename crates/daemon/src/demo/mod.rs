//! `holdfast demo`: the whole thing in one process, on an embedded broker and store. Nodes join, stop, crash and freeze
//! while rows are published; then everything that arrived is compared with everything that was published.

mod judge;
mod node;
mod scene;
mod view;

use std::cell::{Cell, RefCell};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_core::ports::delivery::Acks;
use holdfast_core::ports::store::Level;
use holdfast_core::record::Session;
use holdfast_core::row::{ShardId, TableName, Verdict as Fits};
use holdfast_core::{batch, claims, lane, member, shard, trim};
use holdfast_sim::clickhouse::{Fate, TableSpec};
use holdfast_sim::embedded::{Seen, Server, Settings};
use holdfast_sim::jetstream::{AckPolicy, Message, payload};
use serde::Serialize;
use tokio::time::MissedTickBehavior;

use self::judge::{Verdict, judge};
use self::node::{Frozen, Node, Plan};
use self::scene::{Kind, Place, Scene, State, brief};
use self::view::{Rates, Titles, View};
use crate::assembly::STALE;
use crate::cli::Demo;
use crate::exit::Exit;
use crate::output::{self, count};
use crate::signals::Signals;

/// The longest run, in rows: what is stored stays in memory until it is judged.
const MOST_ROWS: u64 = 20_000_000;

/// Bytes of a row.
const ROW: usize = 100;

/// How often rows are published.
const BEAT: Duration = Duration::from_millis(5);

/// How often the picture is drawn, and how often a line tells the figures where none is drawn.
const DRAW: Duration = Duration::from_millis(100);
const TALLY: Duration = Duration::from_secs(1);

/// How long each may take: starting, storing the last rows, stopping, and the store's last inserts.
const PATIENCE: Duration = Duration::from_secs(10);

/// The longest that a node stays frozen.
const FROZEN: Duration = Duration::from_secs(6);

/// The server gives a pin up when its holder has not pulled for so long. Takeovers do not wait for it: they are told
/// whose pin it is.
const PINNED_TTL: Duration = Duration::from_secs(3);

/// The most that a development build can be expected to move: it checks every machine at every step.
const SLOW: u64 = 5_000;

/// What is printed for programs.
#[derive(Debug, Serialize)]
struct Document {
    #[serde(flatten)]
    verdict: Verdict,
    /// Shards that a node gave up and another took.
    handovers: usize,
    /// From the moment at which the old owner was told to give it up to the heir's first row.
    handover_ms: Option<u64>,
    handover_max_ms: Option<u64>,
    /// Shards of the node that crashed.
    takeovers: usize,
    /// From the crash to the heir's first row.
    takeover_ms: Option<u64>,
    takeover_max_ms: Option<u64>,
    /// Shards of the node that was frozen.
    frozen_takeovers: usize,
    /// From the moment it froze to the heir's first row.
    frozen_takeover_ms: Option<u64>,
    frozen_takeover_max_ms: Option<u64>,
    /// Inserts of a replaced owner that landed, and were dropped for their token.
    late_inserts: u64,
    late_rows: u64,
    nodes: u32,
    tables: u32,
    shards: u32,
    rate: u64,
    seconds: u64,
    heartbeat_ms: u64,
    lease_ms: u64,
    pinned_ttl_ms: u64,
    wall_seconds: f64,
    interrupted: bool,
    failures: Vec<String>,
    ok: bool,
}

/// How members notice each other: the daemon's own times, shorter in a short run.
#[derive(Clone, Copy, Debug)]
struct Times {
    heartbeat: Duration,
    lease: Duration,
    probe: Duration,
}

impl Times {
    fn of(length: Duration) -> Self {
        let heartbeat = (length / 30).clamp(Duration::from_millis(150), Duration::from_millis(500));
        Self { heartbeat, lease: heartbeat * 4, probe: heartbeat * 2 / 5 }
    }
}

/// Runs the demonstration and prints its verdict.
///
/// # Errors
/// With code 1 if a row is missing, repeated or out of order, or something that was to be shown did not happen; with
/// code 2 if it would be too long.
pub fn demo(options: &Demo) -> Result<(), Exit> {
    if options.rate.saturating_mul(options.seconds) > MOST_ROWS {
        let most = MOST_ROWS / options.rate;
        return Err(Exit::usage(format!("--rate {}: at most {most} seconds", options.rate)));
    }
    if cfg!(debug_assertions) && options.rate > SLOW {
        eprintln!(
            "holdfast: this is a development build, and slow; build it with --release, or lower --rate"
        );
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let document = runtime.block_on(run(options))?;
    if options.json.json {
        output::json(&document)?;
    }
    if document.ok { Ok(()) } else { Err(Exit::findings()) }
}

async fn run(options: &Demo) -> Result<Document, Exit> {
    let began = Instant::now();
    let mut signals = Signals::new()?;
    let length = Duration::from_secs(options.seconds);
    let times = Times::of(length);
    let scene = Arc::new(Scene::new(options.shards));
    let stage = Production::new(options, times, &scene)?;
    let titles = Titles {
        title: format!(
            "holdfast demo: {} nodes, {} shards, {} tables, {} rows/s",
            options.nodes,
            options.shards,
            options.tables,
            count(options.rate)
        ),
        times: format!(
            "heartbeat {}, lease {}, probe {}; pinned TTL {}",
            brief(times.heartbeat),
            brief(times.lease),
            brief(times.probe),
            brief(PINNED_TTL)
        ),
        length,
        rate: options.rate,
    };
    let mut view = View::new(options.json.json);
    let mut rates = Rates::default();
    if matches!(view, View::Lines { .. }) {
        output::text(&format!("{}\n{}\n", titles.title, titles.times))?;
    }
    let interrupted = {
        let showing = showing(&titles, &scene, &mut view, &mut rates);
        let playing = async {
            let interrupted = tokio::select! {
                played = stage.play(length) => { played?; false }
                () = stage.publish() => false,
                () = signals.next() => true,
            };
            let ending = stage.end();
            tokio::select! {
                () = ending => {}
                () = signals.next() => return Err(Exit::error("stopped at once; nothing was judged")),
            }
            Ok(interrupted)
        };
        tokio::select! {
            played = playing => played?,
            shown = showing => match shown? {},
        }
    };
    rates.take(&scene.stage());
    view.show(&titles, &scene.stage(), &rates)?;
    let document = stage.judge(options, times, interrupted, began.elapsed());
    if !options.json.json {
        let gap = if view.is_live() { "\n" } else { "" };
        output::text(&format!("{gap}{}", words(&document)))?;
    }
    Ok(document)
}

/// Draws for ever.
async fn showing(
    titles: &Titles,
    scene: &Scene,
    view: &mut View,
    rates: &mut Rates,
) -> Result<std::convert::Infallible, Exit> {
    let mut every = tokio::time::interval(DRAW);
    every.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut tallied = Duration::ZERO;
    loop {
        every.tick().await;
        let stage = scene.stage().clone();
        rates.take(&stage);
        view.show(titles, &stage, rates)?;
        if stage.published > 0 && stage.elapsed() >= tallied + TALLY {
            tallied = stage.elapsed();
            view.tally(&stage, rates)?;
        }
    }
}

/// Everything that takes part.
struct Production {
    server: Server,
    plan: Plan,
    scene: Arc<Scene>,
    nodes: RefCell<Vec<Node>>,
    tables: Vec<(TableName, ShardId)>,
    /// Rows published to each.
    counts: RefCell<Vec<u64>>,
    rate: u64,
    publishes: Cell<bool>,
    starts: u32,
}

impl Production {
    fn new(options: &Demo, times: Times, scene: &Arc<Scene>) -> Result<Self, Exit> {
        // As the servers would spread them, but evenly.
        let tables: Vec<(TableName, ShardId)> = (0..options.tables)
            .map(|n| (TableName::new(format!("table_{n}")), ShardId(n % options.shards)))
            .collect();
        let spec = |(name, _): &(TableName, ShardId)| TableSpec {
            name: name.clone(),
            level: Level::ExactlyOnce,
            partitions: 1,
            window: 1_000_000,
            max_partitions: 0,
            exists_from: Duration::ZERO,
        };
        let watching = Arc::clone(scene);
        let settings = Settings {
            shards: options.shards,
            pinned_ttl: PINNED_TTL,
            policy: AckPolicy::NONE,
            tables: tables.iter().map(spec).collect(),
            horizon: Duration::from_hours(1),
            // Between 10 and 30 ms: no two inserts of a shard take the same time.
            fates: Box::new(|insert| Fate::Lands {
                after: Duration::from_millis(10 + insert.attempt.0 % 21),
                pace: Duration::ZERO,
            }),
            watch: Arc::new(move |seen| {
                if let Seen::Part(part) = seen {
                    watching.part(part);
                }
            }),
        };
        let insert_time = Duration::from_mins(2);
        let plan = Plan {
            claims: claims::Config {
                id: member::MemberId::new("node").map_err(Exit::error)?,
                session: Session(0),
                shards: options.shards,
                heartbeat: times.heartbeat,
                lease: times.lease,
                probe: times.probe,
                rows: 200_000,
                bytes: 256 << 20,
                software: env!("CARGO_PKG_VERSION").to_owned(),
                fingerprint: String::new(),
            },
            shard: shard::Config {
                shard: ShardId(0),
                stream: "DEMO".into(),
                session: Session(0),
                pinned_ttl: PINNED_TTL,
                batch: batch::Limits {
                    max_rows: 50_000,
                    max_bytes: 16 << 20,
                    max_age: Duration::from_millis(200),
                },
                stale: STALE,
                patience: 2 * (insert_time + STALE),
                attempt_life: insert_time,
                acks: Acks::None,
                parking: lane::ParkingPolicy { dead_letters: true, unknown_tables: false },
                start: None,
                max_lanes: 10_000,
                max_record: 1 << 20,
            },
            trim: trim::Config {
                shards: (0..options.shards).map(ShardId).collect(),
                interval: Duration::from_secs(1),
                history: Duration::ZERO,
            },
            handover: Duration::from_mins(1),
        };
        if let Some(defect) = plan.claims.defect() {
            return Err(Exit::error(defect));
        }
        let counts = RefCell::new(vec![0; tables.len()]);
        let (scene, nodes) = (Arc::clone(scene), RefCell::default());
        let server = Server::start(settings)?;
        let (rate, publishes, starts) = (options.rate, Cell::new(false), options.nodes);
        Ok(Self { server, plan, scene, nodes, tables, counts, rate, publishes, starts })
    }

    fn start(&self, name: &str) -> Result<(), Exit> {
        let node = Node::start(name, &self.server, &self.plan, &self.scene)?;
        self.scene.set(node.place, State::Running);
        self.nodes.borrow_mut().push(node);
        Ok(())
    }

    /// Does something to the node that has most to do.
    fn to_busiest<R>(&self, what: impl FnOnce(&mut Node) -> R) -> Option<R> {
        let place = self.scene.busiest()?;
        self.nodes.borrow_mut().iter_mut().find(|node| node.place == place).map(what)
    }

    /// What happens, from the start of the first node to the last row. If nodes do not come to share the shards,
    /// that is all, and a failure of which the verdict tells.
    async fn play(&self, length: Duration) -> Result<(), Exit> {
        for number in 1..=self.starts {
            self.start(&format!("node-{number}"))?;
        }
        // Without its record a shard whose stream has rows would not know where to begin.
        if until(PATIENCE, || self.scene.is_settled()).await.is_err() {
            self.scene.fail(format!("the nodes did not come to share the shards within {}", brief(PATIENCE)));
            return Ok(());
        }
        self.scene.begin();
        self.publishes.set(true);
        let start = tokio::time::Instant::now();
        let at = |part: f64| tokio::time::sleep_until(start + length.mul_f64(part));

        at(0.13).await;
        let joins = format!("node-{}", self.starts + 1);
        self.scene.tell(Kind::Script, format!("{joins} joins"));
        self.start(&joins)?;

        at(0.28).await;
        self.to_busiest(|node| {
            self.scene.tell(Kind::Script, format!("{} is told to stop: it hands its shards over", node.name));
            self.scene.set(node.place, State::Stopping);
            node.stop(PATIENCE);
        });

        at(0.42).await;
        let crashed = self.to_busiest(|node| {
            self.scene.set(node.place, State::Crashed);
            node.kill();
            self.scene.tell(Kind::Script, format!("{} crashes", node.name));
            node.name.clone()
        });

        at(0.55).await;
        if let Some(name) = crashed {
            self.scene.tell(Kind::Script, format!("{name} is started again"));
            self.start(&name)?;
        }

        at(0.63).await;
        let freezes = (length.mul_f64(0.27)).min(FROZEN);
        let frozen = self.freeze(freezes).await;
        tokio::time::sleep(freezes).await;
        if let Some((frozen, place, name)) = frozen {
            self.scene.tell(Kind::Script, format!("{name} thaws, and goes on where it stood"));
            self.scene.set(place, State::Running);
            drop(frozen);
        }

        at(1.0).await;
        self.publishes.set(false);
        Ok(())
    }

    /// Freezes the busiest node in the moment at which it has an insert on its way, which lands when the others have
    /// its shards, shortly before the thaw.
    async fn freeze(&self, time: Duration) -> Option<(Frozen, Place, String)> {
        let place = self.scene.busiest()?;
        let life = time * 9 / 10;
        let with = |what: &dyn Fn(&Node) -> usize| {
            self.nodes.borrow().iter().find(|node| node.place == place).map_or(0, what)
        };
        // A node that has nothing to write is frozen all the same.
        let writes = until(time, || with(&|node| node.delay_inserts(life)) > 0).await.is_ok();
        let nodes = self.nodes.borrow();
        let node = nodes.iter().find(|node| node.place == place)?;
        let frozen = node.freeze();
        self.scene.set(place, State::Frozen);
        let what = if writes { "inserts on their way" } else { "nothing on its way" };
        self.scene.tell(Kind::Script, format!("{} freezes with {what}", node.name));
        Some((frozen, place, node.name.clone()))
    }

    /// Publishes for ever.
    async fn publish(&self) {
        let mut every = tokio::time::interval(BEAT);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut next, mut published) = (0, 0);
        loop {
            every.tick().await;
            if !self.publishes.get() {
                continue;
            }
            let millis = u64::try_from(self.scene.stage().elapsed().as_millis()).unwrap_or(u64::MAX);
            let due = (self.rate.saturating_mul(millis) / 1_000).saturating_sub(published);
            // A machine that cannot keep up is not buried under what it is behind with.
            let due = due.min(self.rate / 10);
            let mut messages = Vec::new();
            let mut counts = self.counts.borrow_mut();
            for _ in 0..due {
                let (table, shard) = &self.tables[next];
                let payload = payload(counts[next], ROW);
                messages.push(Message { shard: *shard, table: table.clone(), payload, verdict: Fits::Good });
                counts[next] += 1;
                next = (next + 1) % self.tables.len();
            }
            published += due;
            drop(counts);
            // Counted first: what is stored is never more than what was published.
            self.scene.stage().published = published;
            self.server.publish(messages);
        }
    }

    fn is_stored(&self) -> bool {
        let stage = self.scene.stage();
        stage.stored >= stage.published
    }

    /// Waits until everything is stored, then ends the nodes as they should end.
    async fn end(&self) {
        if until(PATIENCE, || self.is_stored()).await.is_err() {
            self.scene.fail(format!("not every row was stored within {}", brief(PATIENCE)));
        }
        let nodes = self.nodes.take();
        for node in &nodes {
            // One that was frozen when somebody interrupted went on when the script was dropped.
            if matches!(self.scene.stage().members[node.place].state, State::Running | State::Frozen) {
                self.scene.set(node.place, State::Stopping);
            }
            node.stop(PATIENCE / 2);
        }
        let end = tokio::time::Instant::now() + PATIENCE;
        for node in nodes {
            let (name, place) = (node.name.clone(), node.place);
            let _ = tokio::time::timeout_at(end, node.ended()).await;
            // Its thread stands still, or panicked.
            if !matches!(self.scene.stage().members[place].state, State::Stopped | State::Crashed) {
                self.scene.fail(format!("{name} did not end as it should"));
            }
        }
        // What is late must have come before the tables are looked at.
        let runs = || self.server.with(|models, _| models.store.running().count());
        if until(PATIENCE, || runs() == 0).await.is_err() {
            self.scene.fail(format!("inserts still run after {}", brief(PATIENCE)));
        }
    }

    fn judge(&self, options: &Demo, times: Times, interrupted: bool, took: Duration) -> Document {
        let counts = self.counts.borrow();
        let tables = self.tables.iter().zip(counts.iter());
        let verdict: Verdict = tables
            .map(|((table, _), published)| {
                let rows = self.server.with(|models, _| models.store.contents(table).to_vec());
                judge(*published, &rows)
            })
            .sum();
        let stage = self.scene.stage();
        let (moves, late) = (&stage.moves, stage.late);
        let mut failures = stage.failures.clone();
        // Of what did not begin there is no more to say.
        if !interrupted && stage.has_begun() {
            for (happened, what) in [
                (!moves.handovers.is_empty(), "no shard was handed over"),
                (!moves.takeovers.is_empty(), "no shard of the crashed node was taken over"),
                (!moves.thefts.is_empty(), "no shard of the frozen node was taken over"),
                (late.frozen > 0, "no insert of the frozen node landed late"),
            ] {
                if !happened {
                    failures.push(what.to_owned());
                }
            }
        }
        Document {
            verdict,
            handovers: moves.handovers.len(),
            handover_ms: median(&moves.handovers),
            handover_max_ms: longest(&moves.handovers),
            takeovers: moves.takeovers.len(),
            takeover_ms: median(&moves.takeovers),
            takeover_max_ms: longest(&moves.takeovers),
            frozen_takeovers: moves.thefts.len(),
            frozen_takeover_ms: median(&moves.thefts),
            frozen_takeover_max_ms: longest(&moves.thefts),
            late_inserts: late.inserts,
            late_rows: late.rows,
            nodes: options.nodes,
            tables: options.tables,
            shards: options.shards,
            rate: options.rate,
            seconds: options.seconds,
            heartbeat_ms: millis(times.heartbeat),
            lease_ms: millis(times.lease),
            pinned_ttl_ms: millis(PINNED_TTL),
            wall_seconds: took.as_secs_f64(),
            interrupted,
            ok: verdict.is_clean() && failures.is_empty(),
            failures,
        }
    }
}

/// Waits until something is so, at most this long.
async fn until(time: Duration, mut is_so: impl FnMut() -> bool) -> Result<(), ()> {
    let end = Instant::now() + time;
    while !is_so() {
        if Instant::now() >= end {
            return Err(());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn median(times: &[Duration]) -> Option<u64> {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() / 2).copied().map(millis)
}

fn longest(times: &[Duration]) -> Option<u64> {
    times.iter().max().copied().map(millis)
}

/// The verdict in words.
fn words(document: &Document) -> String {
    let verdict = &document.verdict;
    let mut text = String::new();
    let _ = writeln!(text, "published  {} rows to {} tables", count(verdict.published), document.tables);
    let _ = writeln!(
        text,
        "stored     {} rows: {} missing, {} repeated, {} out of order{}",
        count(verdict.stored),
        count(verdict.missing),
        count(verdict.repeated),
        count(verdict.out_of_order),
        match verdict.unexpected {
            0 => String::new(),
            unexpected => format!(", {} that nobody published", count(unexpected)),
        }
    );
    let mut moved = |what: &str, shards: usize, median: Option<u64>, longest: Option<u64>, from: &str| {
        if let (Some(median), Some(longest)) = (median, longest) {
            let (median, longest) = (Duration::from_millis(median), Duration::from_millis(longest));
            let (median, longest) = (brief(median), brief(longest));
            let _ = writeln!(text, "{what:<10} {shards} shards: median {median}, longest {longest} ({from})");
        }
    };
    let d = document;
    moved("handovers", d.handovers, d.handover_ms, d.handover_max_ms, "order → heir's first row");
    moved("crash", d.takeovers, d.takeover_ms, d.takeover_max_ms, "crash → heir's first row");
    moved(
        "freeze",
        d.frozen_takeovers,
        d.frozen_takeover_ms,
        d.frozen_takeover_max_ms,
        "freeze → heir's first row",
    );
    if d.late_inserts > 0 {
        let (inserts, rows) = (count(d.late_inserts), count(d.late_rows));
        let _ = writeln!(
            text,
            "late       inserts of a replaced owner: {inserts} ({rows} rows), dropped by their tokens"
        );
    }
    for failure in &d.failures {
        let _ = writeln!(text, "FAILED     {failure}");
    }
    let _ = match (d.ok, d.interrupted) {
        (true, false) => writeln!(text, "ok: every row is there once, in order"),
        (true, true) => writeln!(text, "interrupted; ok so far: every row is there once, in order"),
        (false, _) => writeln!(text, "NOT OK"),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_the_daemons_and_shorter_in_a_short_run() {
        let of = |seconds| Times::of(Duration::from_secs(seconds));
        let millis = Duration::from_millis;
        assert_eq!((of(15).heartbeat, of(15).lease, of(15).probe), (millis(500), millis(2_000), millis(200)));
        assert_eq!(of(600).heartbeat, millis(500));
        assert_eq!((of(6).heartbeat, of(6).lease), (millis(200), millis(800)));
    }

    #[test]
    fn a_median_is_of_the_middle() {
        let of =
            |times: &[u64]| median(&times.iter().copied().map(Duration::from_millis).collect::<Vec<_>>());
        assert_eq!((of(&[]), of(&[7]), of(&[9, 1, 5])), (None, Some(7), Some(5)));
    }

    /// Nobody there shares the shards.
    #[test]
    fn what_does_not_begin_is_judged_too_and_says_why() {
        let json = crate::cli::Json { json: true };
        let options = Demo { nodes: 0, tables: 1, shards: 1, rate: 100, seconds: 5, json };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut document = runtime.block_on(run(&options)).unwrap();
        assert!(!document.ok);
        assert_eq!(document.failures, ["the nodes did not come to share the shards within 10 s"]);
        assert!(!words(&document).contains("nobody published"), "{}", words(&document));
        document.verdict.unexpected = 2;
        let text = words(&document);
        assert!(text.contains("0 repeated, 0 out of order, 2 that nobody published\n"), "{text}");
    }

    /// A short run of the whole: real threads, real time, everything that can happen.
    #[test]
    fn a_short_demonstration_is_clean() {
        let options = Demo {
            nodes: 3,
            tables: 8,
            shards: 4,
            rate: 2_000,
            seconds: 5,
            json: crate::cli::Json { json: true },
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let document = runtime.block_on(run(&options)).unwrap();
        assert!(document.ok, "{document:?}");
        assert!(document.verdict.published > 9_000, "{document:?}");
        assert!(
            document.handovers > 0 && document.takeovers > 0 && document.frozen_takeovers > 0,
            "{document:?}"
        );
        let json = serde_json::to_value(&document).unwrap();
        for field in
            ["published", "stored", "missing", "repeated", "out_of_order", "handover_ms", "takeover_ms", "ok"]
        {
            assert!(!json[field].is_null(), "{field} is not in {json}");
        }
    }
}
