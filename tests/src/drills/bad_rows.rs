//! Rows that ClickHouse refuses: each becomes a dead letter, once, with its bytes and ClickHouse's reason; all
//! others are stored in order. Also when the daemon is killed while it looks for them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rand::RngExt;

use super::{Outcome, Settings};
use crate::daemon::Daemon;
use crate::error::Result;
use crate::http_proxy::{Fate, HttpProxy, Kind};
use crate::rig::Rig;
use crate::{rows, wait};

/// Rows of one batch, with the one bad row.
const ROWS: u64 = 50_000;
/// Inserts that one bad row among them may cost.
const INSERTS: f64 = 6.0;
/// Times that the daemon is killed while it looks for the bad row.
const KILLS: u32 = 3;
/// Rows of the mixes, over all tables.
const MIXED: u64 = 60_000;
const LONG: Duration = Duration::from_mins(3);

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let began = Instant::now();
    for round in 1..=settings.rounds {
        let place = rand::rng().random_range(0..ROWS);
        one(settings, round, place, 0, &mut outcome, tell)?;
        one(settings, round, place, KILLS, &mut outcome, tell)?;
        mixed(settings, round, &mut outcome, tell)?;
    }
    outcome.add("seconds", began.elapsed().as_secs_f64());
    Ok(outcome)
}

/// Why a row is bad.
#[derive(Clone, Copy, Debug)]
enum Bad {
    /// ClickHouse refuses its value.
    Value,
    /// ClickHouse refuses its field.
    Field,
    /// It would be two rows.
    Two,
    /// It is no object.
    Array,
    /// It has a column of Holdfast's.
    Sequence,
    /// It is no JSON.
    Cut,
}

impl Bad {
    const ALL: [Self; 6] = [Self::Value, Self::Field, Self::Two, Self::Array, Self::Sequence, Self::Cut];

    fn row(self, n: u64) -> String {
        match self {
            Self::Value => format!("{{\"n\":{n},\"pad\":\"x\",\"v\":\"not a number\"}}"),
            Self::Field => format!("{{\"n\":{n},\"pad\":\"x\",\"no_such_field\":1}}"),
            Self::Two => format!("{{\"n\":{n},\"pad\":\"x\"}}{{\"n\":{n},\"pad\":\"y\"}}"),
            Self::Array => format!("[{{\"n\":{n},\"pad\":\"x\"}}]"),
            Self::Sequence => format!("{{\"n\":{n},\"pad\":\"x\",\"\\u005fseq\":1}}"),
            Self::Cut => format!("{{\"n\":{n},\"pad\":\"x\""),
        }
    }

    /// Words that its reason must have.
    fn reason(self) -> Option<&'static str> {
        match self {
            Self::Value => Some("not a number"),
            Self::Field => Some("no_such_field"),
            _ => None,
        }
    }
}

fn good(n: u64) -> String {
    format!("{{\"n\":{n},\"pad\":\"{:0>200}\",\"v\":{}}}", n, n % 1000)
}

fn rig(settings: &Settings, shards: u32, tables: usize) -> Result<Rig> {
    let mut options = settings
        .rig(shards, tables)
        .set("topology.start", "first")
        .set("batch.max_age", "500ms")
        // What an heir finds open and refused is waited out as long as its last attempt could live: 2 × (this
        // + 10 s).
        .set("clickhouse.insert_timeout", "3s")
        .set("defaults.delivery", "exactly-once");
    options.create_tables = false;
    let rig = Rig::start(options)?;
    for table in rig.tables() {
        rows::create_picky_table(&rig.sql(), &table)?;
    }
    Ok(rig)
}

/// Each bad row's dead letter has its bytes and its reason, and there is no other.
fn compare(rig: &Rig, bad: &BTreeMap<u64, (String, Bad)>, outcome: &mut Outcome) -> Result<()> {
    let letters = rig.dead_letters()?;
    for letter in &letters {
        let Some((row, why)) = bad.get(&letter.seq) else {
            let headers = &letter.headers;
            outcome
                .faults
                .push(format!("row {} of {} is a dead letter: {headers}", letter.seq, letter.table));
            continue;
        };
        outcome.demand(letter.payload == row.as_bytes(), || {
            format!("the dead letter of row {} has other bytes than were published", letter.seq)
        });
        outcome.demand(why.reason().is_none_or(|words| letter.headers.contains(words)), || {
            format!("the dead letter of row {} does not say why ({why:?}): {}", letter.seq, letter.headers)
        });
    }
    outcome.demand(letters.len() == bad.len(), || {
        format!("{} bad rows, {} dead letters", bad.len(), letters.len())
    });
    Ok(())
}

/// One bad row in one batch.
fn one(
    settings: &Settings,
    round: u32,
    place: u64,
    kills: u32,
    outcome: &mut Outcome,
    tell: &mut dyn FnMut(&str),
) -> Result<()> {
    let mut rig = rig(settings, 1, 1)?;
    let proxy = rig.clickhouse_proxy()?;
    let row = |n| if n == place { Bad::Value.row(n) } else { good(n) };
    let seqs = rig.publish_rows((0..ROWS).map(|n| ("t0", row(n))))?;
    let at = usize::try_from(place).unwrap_or_default();
    let bad = BTreeMap::from([(seqs[at], (row(place), Bad::Value))]);
    let mut daemon = rig.daemon("holdfast").start()?;
    let killed = kill_while_looking(&proxy, &mut daemon, &rig, kills)?;
    rig.landed(ROWS, LONG, |_| daemon.must_run())?;
    let verdict = outcome.judge(&rig, &mut daemon, ROWS)?;
    compare(&rig, &bad, outcome)?;
    let inserts = proxy.inserts();
    tell(&format!(
        "round {round}, row {place} of {ROWS} is bad, {killed} kills: {verdict}; {} inserts",
        inserts.len()
    ));
    if kills == 0 {
        outcome.most("inserts_for_one_bad_row", inserts.len() as f64);
        outcome.demand(inserts.len() as f64 <= INSERTS, || {
            format!("{} inserts for one bad row; at most {INSERTS}", inserts.len())
        });
    } else {
        outcome.add("kills", f64::from(killed));
        outcome.most("inserts_for_one_bad_row_with_kills", inserts.len() as f64);
    }
    Ok(())
}

/// SIGKILL at random moments after each insert that the proxy sees, and a new start.
fn kill_while_looking(proxy: &HttpProxy, daemon: &mut Daemon, rig: &Rig, kills: u32) -> Result<u32> {
    let seen = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&seen);
    proxy.set_hook(move |request| {
        if request.kind == Kind::Insert {
            counter.fetch_add(1, Ordering::SeqCst);
        }
        Fate::Forward
    });
    let mut done = 0;
    while done < kills {
        let before = seen.load(Ordering::SeqCst);
        let began = wait::until("the next insert, or the end", LONG, || {
            if rig.settled().is_ok_and(|settled| settled >= ROWS) {
                return Some(false);
            }
            (seen.load(Ordering::SeqCst) > before).then_some(true)
        })?;
        if !began {
            break;
        }
        // The moment is the drill, not a condition.
        std::thread::sleep(Duration::from_micros(rand::rng().random_range(0..150_000)));
        daemon.restart()?;
        done += 1;
    }
    Ok(done)
}

/// Many bad rows of all kinds, in runs and one by one, in several tables, with kills.
fn mixed(settings: &Settings, round: u32, outcome: &mut Outcome, tell: &mut dyn FnMut(&str)) -> Result<()> {
    const TABLES: u64 = 4;
    let mut rig = rig(settings, 2, 4)?;
    let proxy = rig.clickhouse_proxy()?;
    let mut random = rand::rng();
    // Each table in turn; a table's counter is the row's place in it.
    let mut run_of_bad = 0;
    let mut kinds = Vec::new();
    for _ in 0..MIXED {
        if run_of_bad == 0 && random.random_ratio(1, 1_000) {
            run_of_bad = random.random_range(1..6);
        }
        kinds.push((run_of_bad > 0).then(|| Bad::ALL[random.random_range(0..Bad::ALL.len())]));
        run_of_bad = u32::saturating_sub(run_of_bad, 1);
    }
    let tables = rig.tables();
    let payloads: Vec<String> = kinds
        .iter()
        .zip(0..)
        .map(|(kind, place): (_, u64)| {
            kind.map_or_else(|| good(place / TABLES), |bad| bad.row(place / TABLES))
        })
        .collect();
    let seqs = rig.publish_rows(
        payloads.iter().enumerate().map(|(place, row)| (tables[place % tables.len()].as_str(), row)),
    )?;
    let bad: BTreeMap<_, _> = kinds
        .iter()
        .zip(&payloads)
        .zip(&seqs)
        .filter_map(|((kind, row), seq)| Some((*seq, (row.clone(), (*kind)?))))
        .collect();
    let refused = bad.values().filter(|(_, why)| why.reason().is_some()).count();
    let mut daemon = rig.daemon("holdfast").start()?;
    let mut kills = 0_u32;
    let mut next = MIXED / 5;
    rig.landed(MIXED, LONG, |settled| {
        if kills < 2 && settled >= next {
            daemon.restart()?;
            kills += 1;
            next += MIXED / 3;
        }
        daemon.must_run()
    })?;
    let verdict = outcome.judge(&rig, &mut daemon, MIXED)?;
    compare(&rig, &bad, outcome)?;
    let inserts = proxy.inserts().len() as f64;
    tell(&format!(
        "round {round}, {} bad rows of {MIXED}, {refused} of them for ClickHouse to refuse, {kills} kills: \
         {verdict}; {inserts} inserts",
        bad.len()
    ));
    outcome.add("bad_rows", bad.len() as f64);
    outcome.add("kills", f64::from(kills));
    outcome.most("inserts_per_refused_row_in_mixes", inserts / (refused as f64).max(1.0));
    Ok(())
}
