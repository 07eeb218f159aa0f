//! What a seed means: processes, tables, rows, and everything that will go wrong.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use holdfast_core::lane::ParkingPolicy;
use holdfast_core::ports::delivery::Acks;
use holdfast_core::ports::store::{Class, Level};

use crate::chance::Chance;
use crate::fault::{Cut, Fault, Rates};
use crate::jetstream::AckPolicy;

/// How hostile a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// Nothing goes wrong.
    Calm,
    /// Everything goes wrong now and then.
    Faults,
    /// A random part of everything goes wrong, at random rates: rare combinations come up.
    Swarm,
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Calm => "calm",
            Self::Faults => "faults",
            Self::Swarm => "swarm",
        })
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Calm, Self::Faults, Self::Swarm]
            .into_iter()
            .find(|profile| profile.to_string() == text)
            .ok_or_else(|| format!("{text} is no profile: calm, faults and swarm are"))
    }
}

/// A table to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TablePlan {
    pub(crate) shard: u32,
    pub(crate) level: Level,
    pub(crate) partitions: u64,
    pub(crate) window: usize,
    /// A block of more partitions is refused; 0: none is.
    pub(crate) max_partitions: usize,
    pub(crate) exists_from: Duration,
}

/// Whether a row can be inserted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// Always.
    Good,
    /// Never, and a look at its payload says so.
    Payload,
    /// Never: its subject names no table.
    Subject,
    /// Its table refuses it within this time.
    Refused { from: Duration, until: Duration },
}

/// How the store's word on a row that it refuses can be trusted, in a thousand: it is exact, or wrong; else there is
/// none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hints {
    pub(crate) exact: u32,
    pub(crate) wrong: u32,
}

/// A row to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RowPlan {
    pub(crate) at: Duration,
    pub(crate) table: u32,
    pub(crate) size: usize,
    pub(crate) fit: Fit,
}

/// How processes share the shards out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sharing {
    pub(crate) heartbeat: Duration,
    pub(crate) lease: Duration,
    /// How long a shard that is handed over may take to write what it holds.
    pub(crate) handover: Duration,
    /// How long after the others each process starts.
    pub(crate) late: Vec<Duration>,
    /// Whether the last process has the name of the first, until faults stop.
    pub(crate) twin: bool,
    /// Whether somebody tells processes of shards whose consumers stand still.
    pub(crate) watchdog: bool,
}

/// Everything about a run that is decided before it begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) profile: Profile,
    pub(crate) processes: u32,
    pub(crate) shards: u32,
    pub(crate) tables: Vec<TablePlan>,
    pub(crate) rows: Vec<RowPlan>,
    pub(crate) faults: Vec<(Duration, Fault)>,
    pub(crate) rates: Rates,
    /// None: every process stands by for every shard, and no machine shares them out. Then pins, fences and late writers
    /// are contended all the time, by more processes than there ever are where each shard is one process's.
    pub(crate) sharing: Option<Sharing>,
    /// Each process's clock runs this much fast (or slow), in parts in a million of the true time.
    pub(crate) clock_rates: Vec<u32>,
    pub(crate) pinned_ttl: Duration,
    pub(crate) batch_rows: u32,
    pub(crate) batch_bytes: u64,
    pub(crate) batch_age: Duration,
    pub(crate) share_rows: u64,
    pub(crate) share_bytes: u64,
    pub(crate) stale: Duration,
    pub(crate) trim_interval: Duration,
    pub(crate) history: Duration,
    pub(crate) policy: AckPolicy,
    pub(crate) parking: ParkingPolicy,
    pub(crate) hints: Hints,
    /// The most that a message takes when nothing is wrong.
    pub(crate) latency: Duration,
    /// The most that an insert takes when nothing is wrong.
    pub(crate) insert_time: Duration,
    /// From then on nothing goes wrong any more.
    pub(crate) quiet_from: Duration,
}

impl Scenario {
    /// How long a client waits for the store's answer.
    pub(crate) const INSERT_TIMEOUT: Duration = Duration::from_secs(3);
    /// How long a client waits for an answer of the stream's server.
    pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(2);
    /// How often a silent member is asked for a sign of life.
    pub(crate) const PROBE: Duration = Duration::from_millis(200);
    /// How long a member may take to answer.
    pub(crate) const PROBE_TIMEOUT: Duration = Duration::from_millis(300);
    /// How long after its arrival an insert can still land.
    pub(crate) const INSERT_LIFE: Duration = Duration::from_secs(9);
    /// When faults have stopped, everything must have landed and be recorded within this time.
    pub(crate) const SETTLES_WITHIN: Duration = Duration::from_mins(1);
    /// No run is shorter.
    pub(crate) const LENGTH: Duration = Duration::from_mins(2);
    /// Clocks run at most this much fast or slow, in parts in a million.
    const SKEW: u32 = 50_000;

    /// The process that has the first one's name.
    pub(crate) fn twin(&self) -> Option<u32> {
        let last = self.processes - 1;
        self.sharing.as_ref().filter(|sharing| sharing.twin && last > 0).map(|_| last)
    }

    /// Longer than any attempt at the store lives on the client's side: its wait for a turn, the answer's
    /// time, and a margin.
    pub(crate) fn patience(&self) -> Duration {
        self.stale + Self::INSERT_TIMEOUT * 2
    }

    /// Longer than an attempt lives once it is sent, by a clock that runs fast; and longer by what one that runs slow
    /// may add to the time in which it is sent.
    pub(crate) fn attempt_life(&self) -> Duration {
        (Self::INSERT_LIFE + self.latency) * 12 / 10 + self.stale / 5 + Duration::from_secs(1)
    }

    /// How long a window must remember: an intent can be sent `stale` after it was checked, by a clock that
    /// runs slow, and lands within an insert's life of its arrival.
    pub(crate) fn horizon(&self) -> Duration {
        self.stale * 11 / 10 + self.latency + Self::INSERT_LIFE + Duration::from_secs(1)
    }

    /// The most hours that a count of seeds can mean is what it says: see simulation.md.
    pub(crate) fn draw(seed: u64, profile: Profile) -> Self {
        Self::drawn(&mut Chance::new(seed, 1), seed, profile)
    }

    /// What a fuzzer's bytes mean: a schedule like any other, with fewer rows, so that more are tried.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        let chance = &mut Chance::of_bytes(bytes);
        let seed = chance.below(1 << 16);
        let mut scenario = Self::drawn(chance, seed, Profile::Swarm);
        let rows = std::mem::take(&mut scenario.rows);
        scenario.rows = rows.into_iter().step_by(4).collect();
        scenario
    }

    fn drawn(chance: &mut Chance, seed: u64, profile: Profile) -> Self {
        let hostile = profile != Profile::Calm;
        let swarm = profile == Profile::Swarm;
        let processes = chance.between32(3, 5);
        let shards = chance.between32(2, 3);
        let quiet_from = chance.millis(80_000, 95_000);
        let batch_rows = chance.pick(&[3, 10, 40, 200]);
        let batch_bytes = chance.pick(&[400, 4_000, 1_000_000]);
        // A hot table's backlog must fit into the time there is: tiny batches need a quick store, and so do bad rows.
        let insert_times: &[u64] =
            if batch_rows < 40 || batch_bytes < 4_000 { &[5, 50] } else { &[5, 50, 400] };
        let insert_time = chance.pick(insert_times).into_millis();
        let quick = insert_time < Duration::from_millis(400);
        let latency = chance.pick(&[1, 3, 40]).into_millis();
        let many = batch_rows > 3 && insert_time + latency < Duration::from_millis(40);
        let tables = draw_tables(chance, shards, hostile, many);
        let parking = ParkingPolicy {
            dead_letters: !hostile || chance.permille(880),
            unknown_tables: hostile && chance.permille(300),
        };
        let rows = chance
            .in_bulk(|chance| draw_rows(chance, &tables, quiet_from, hostile, parking.dead_letters, quick));
        let share_rows = chance.pick(&[24, 60, 200, 1_000]);
        let mut scenario = Self {
            seed,
            profile,
            processes,
            shards,
            tables,
            rows,
            faults: Vec::new(),
            rates: if hostile { Rates::draw(chance, swarm) } else { Rates::default() },
            sharing: None,
            clock_rates: (0..processes)
                .map(|_| {
                    if hostile {
                        1_000_000 - Self::SKEW + chance.between32(0, 2 * Self::SKEW)
                    } else {
                        1_000_000
                    }
                })
                .collect(),
            pinned_ttl: Duration::from_secs(chance.pick(&[2, 3, 5])),
            batch_rows,
            batch_bytes,
            batch_age: chance.pick(&[50, 300, 1_000]).into_millis(),
            share_rows,
            share_bytes: chance.pick(&[share_rows * 400, share_rows * 1_000, 4_000_000]),
            stale: chance.pick(&[2_000, 4_000]).into_millis(),
            trim_interval: chance.millis(700, 5_000),
            history: chance.pick(&[0, 0, 3_000]).into_millis(),
            policy: draw_policy(chance, hostile),
            parking,
            hints: draw_hints(chance, hostile),
            latency,
            insert_time,
            quiet_from,
        };
        if hostile {
            scenario.faults = draw_faults(chance, &scenario, swarm);
        }
        // A strand of its own: what is drawn for it leaves everything else as it was.
        let chance = &mut Chance::new(seed, 4);
        if chance.permille(700) {
            share_out(chance, &mut scenario, hostile, swarm);
        }
        let chance = &mut Chance::new(seed, 5);
        if hostile && chance.permille(400) {
            let at = chance.time(Duration::ZERO, quiet_from);
            let lasting = chance.time(at, quiet_from).saturating_sub(at);
            scenario.faults.push((at, Fault::ResetsUnwritten { lasting }));
            scenario.faults.sort_by_key(|(at, _)| *at);
        }
        scenario
    }
}

trait IntoMillis {
    fn into_millis(self) -> Duration;
}

impl IntoMillis for u64 {
    fn into_millis(self) -> Duration {
        Duration::from_millis(self)
    }
}

fn draw_policy(chance: &mut Chance, hostile: bool) -> AckPolicy {
    let acks = chance.pick(&[Acks::None, Acks::None, Acks::None, Acks::Explicit, Acks::WorkQueue]);
    if !hostile || acks == Acks::None {
        return AckPolicy { acks, ..AckPolicy::NONE };
    }
    let wait = chance.pick(&[1_500, 6_000, 30_000]).into_millis();
    AckPolicy { acks, wait, max_pending: chance.pick(&[60, 1_000, 20_000]) }
}

fn draw_hints(chance: &mut Chance, hostile: bool) -> Hints {
    let (exact, wrong) = if hostile {
        chance.pick(&[(1_000, 0), (1_000, 0), (0, 0), (700, 200), (0, 1_000)])
    } else {
        (1_000, 0)
    };
    Hints { exact, wrong }
}

fn draw_tables(chance: &mut Chance, shards: u32, hostile: bool, many: bool) -> Vec<TablePlan> {
    let count = chance.between32(6, 12);
    let deduplicated = hostile && chance.permille(300);
    let narrow = hostile && many && chance.permille(250);
    (0..count)
        .map(|n| TablePlan {
            // The first ones make sure that every shard has some.
            shard: if n < shards { n } else { chance.between32(0, shards - 1) },
            level: if deduplicated && chance.permille(250) {
                Level::Deduplicated
            } else {
                Level::ExactlyOnce
            },
            partitions: chance.pick(&[1, 1, 2, 3, 6]),
            window: usize::try_from(chance.pick(&[1_u64, 4, 20, 1_000])).unwrap_or(1),
            max_partitions: if narrow { chance.pick(&[0, 0, 3, 4]) } else { 0 },
            exists_from: if hostile && chance.permille(80) {
                chance.millis(5_000, 40_000)
            } else {
                Duration::ZERO
            },
        })
        .collect()
}

fn draw_rows(
    chance: &mut Chance,
    tables: &[TablePlan],
    quiet_from: Duration,
    hostile: bool,
    dead_letters: bool,
    quick: bool,
) -> Vec<RowPlan> {
    let count = chance.between(1_000, 1_500);
    let levels: Vec<Level> = tables.iter().map(|table| table.level).collect();
    let tables = u32::try_from(tables.len()).unwrap_or(1);
    // Most rows go to a few hot tables; the last ones are idle but for a row now and then.
    let hot = chance.between32(1, tables);
    let heat = chance.between32(500, 950);
    let large = if hostile && chance.permille(400) { chance.between32(1, 6) } else { 0 };
    let last = quiet_from.saturating_sub(Duration::from_secs(2));
    let steady = chance.permille(300);
    let mut rows = Vec::new();
    while (rows.len() as u64) < count {
        let at = chance.time(Duration::from_millis(500), last);
        // Publishers send in bursts, or one by one.
        let burst = if steady { 1 } else { chance.pick(&[1, 1, 3, 10, 60]) };
        let spread = chance.millis(0, 1_500);
        for _ in 0..burst {
            let table = if chance.permille(heat) {
                chance.between32(0, hot - 1)
            } else {
                chance.between32(0, tables - 1)
            };
            let size =
                if chance.permille(large) { chance.between(2_000, 60_000) } else { chance.between(8, 200) };
            let at = at + chance.time(Duration::ZERO, spread);
            let size = usize::try_from(size).unwrap_or(8);
            rows.push(RowPlan { at: at.min(last), table, size, fit: Fit::Good });
        }
    }
    rows.sort_by_key(|row| row.at);
    if !hostile {
        return rows;
    }
    if dead_letters {
        spoil(chance, &mut rows, last, quick);
        // Known and not closed: what was in doubt in a table that cannot be read back, and is refused when it is tried
        // again, since the table was altered, may be there already.
        for row in &mut rows {
            let weak = levels[row.table as usize] != Level::ExactlyOnce;
            if weak && matches!(row.fit, Fit::Refused { from, .. } if from > row.at) {
                row.fit = refused_for_ever(row);
            }
        }
    } else if chance.permille(600) {
        // A row that can never be inserted holds everything of its table behind it, so it comes late, and none
        // that is large comes after it: what waits must not fill the share.
        let at = rows.len() - 1 - usize::try_from(chance.below(12)).unwrap_or(0);
        rows[at].fit = if chance.permille(500) { Fit::Payload } else { refused_for_ever(&rows[at]) };
        rows[at..].iter_mut().for_each(|row| row.size = row.size.min(64));
        // One that is mended holds nothing for good.
        let at = usize::try_from(chance.below(rows.len() as u64 / 2)).unwrap_or(0);
        let until = rows[at].at + chance.millis(500, 9_000);
        rows[at].fit = Fit::Refused { from: Duration::ZERO, until };
    }
    rows
}

const fn refused_for_ever(row: &RowPlan) -> Fit {
    Fit::Refused { from: row.at, until: Duration::MAX }
}

/// Makes rows bad: one here and there, or everything that a publisher with another schema sends for a while.
fn spoil(chance: &mut Chance, rows: &mut [RowPlan], last: Duration, quick: bool) {
    let singly = chance.pick(if quick { &[0, 0, 2, 8, 25] } else { &[0, 2] });
    for row in rows.iter_mut() {
        if chance.permille(singly) {
            row.fit = draw_fit(chance, row, last);
        }
    }
    if chance.permille(400) {
        let at = usize::try_from(chance.below(rows.len() as u64)).unwrap_or(0);
        let table = rows[at].table;
        let many = usize::try_from(chance.between(2, 15)).unwrap_or(2);
        let fit = draw_fit(chance, &rows[at], last);
        rows[at..].iter_mut().filter(|row| row.table == table).take(many).for_each(|row| row.fit = fit);
    }
}

fn draw_fit(chance: &mut Chance, row: &RowPlan, last: Duration) -> Fit {
    match chance.below(8) {
        0 => Fit::Payload,
        1 => Fit::Subject,
        2..=4 => refused_for_ever(row),
        // Mended after a while.
        5 | 6 => Fit::Refused { from: Duration::ZERO, until: row.at + chance.millis(20, 9_000) },
        // Broken after a while.
        _ => {
            let from = row.at + chance.millis(5, 3_000);
            let until = if chance.permille(500) { from + chance.millis(100, 9_000) } else { Duration::MAX };
            Fit::Refused { from: from.min(last), until }
        }
    }
}

fn draw_faults(chance: &mut Chance, scenario: &Scenario, swarm: bool) -> Vec<(Duration, Fault)> {
    const KINDS: u64 = 26;
    let allowed: Vec<u64> = (0..KINDS).filter(|_| !swarm || chance.permille(500)).collect();
    let allowed = if allowed.is_empty() { vec![0, 1, 2] } else { allowed };
    let count = chance.between(5, 24);
    let ends = scenario.quiet_from;
    let mut faults = Vec::new();
    for _ in 0..count {
        let at = chance.time(Duration::from_secs(2), ends.saturating_sub(Duration::from_secs(1)));
        let rest = ends.saturating_sub(at);
        let process = chance.between32(0, scenario.processes - 1);
        let shard = chance.between32(0, scenario.shards - 1);
        let mut lasting = |low: u64, high: u64| chance.millis(low, high).min(rest);
        let short = lasting(50, 3_000);
        let long = lasting(500, 12_000);
        let frozen = lasting(200, 34_000);
        let fault = match chance.pick(&allowed) {
            0 => Fault::Crash { process, down: short },
            1 => Fault::Pause { process, lasting: frozen },
            2 => Fault::Stop { process, within: chance.millis(200, 8_000), down: short },
            3 => {
                let how = chance.pick(&[Cut::Held, Cut::HeldInwards, Cut::HeldOutwards, Cut::Broken]);
                Fault::CutNats { process, how, lasting: long }
            }
            4 => Fault::CutStore { process, lasting: long },
            5 => {
                let rows = chance.pick(&[16, 40, 120]);
                Fault::Share { process, rows, bytes: rows * chance.pick(&[300, 1_000]) }
            }
            6 => {
                let forgotten = usize::try_from(chance.below(5)).unwrap_or(0);
                Fault::BrokerRestart { down: chance.millis(50, 2_000).min(rest), forgotten }
            }
            7 => {
                let forgotten = usize::try_from(chance.below(8)).unwrap_or(0);
                let leaderless = if chance.permille(500) { Duration::ZERO } else { short };
                Fault::LeaderMoves { shard, forgotten, leaderless }
            }
            8 => Fault::Unpin { shard },
            9 => Fault::SetBack { shard, by: chance.between(1, 60) },
            10 => Fault::DeliveriesLost { shard, rows: chance.between32(1, 6) },
            11 => Fault::StoreKilled { down: short, burns: chance.pick(&[0, 300, 1_000]) },
            12 => Fault::StoreSlow { lasting: long },
            13 => Fault::StoreRefuses { lasting: long },
            14 => {
                let after = chance.millis(0, 100);
                let within = chance.millis(1_000, 8_000);
                Fault::StopAndPause { process, within, after, lasting: frozen }
            }
            15 => Fault::SetBackUnseen { shard, by: chance.between(1, 60) },
            16 => Fault::CutUnseen { shard, lasting: chance.millis(50, 700).min(rest) },
            17 | 25 => Fault::ResetAstray { shard },
            19 => {
                let class = chance.pick(&[Class::Access, Class::Access, Class::Table, Class::Unknown]);
                Fault::StoreDenies { class, lasting: long }
            }
            20 | 21 if !scenario.parking.dead_letters => Fault::DeliveriesLost { shard, rows: 1 },
            20 => Fault::AlteredUnderWay { shard },
            21 => Fault::AlteredHalfway { shard },
            22 => Fault::LettersFull { lasting: long },
            23 => Fault::LettersMissing { lasting: short },
            24 => Fault::AcksLost { lasting: long },
            _ => Fault::Crash { process, down: long },
        };
        faults.push((at, fault));
    }
    // What loses rows of the stream, or a shard, comes at most once in a run: it exempts rows from proof.
    let at = chance.time(Duration::from_secs(10), ends.saturating_sub(Duration::from_secs(10)));
    let shard = chance.between32(0, scenario.shards - 1);
    // Known and not closed: where done rows leave the stream, none is left to show that sequences are used again.
    let keeps_rows = scenario.policy.acks != Acks::WorkQueue;
    let catastrophe = match chance.below(26) {
        0 | 1 => Some(Fault::StreamAnew),
        2 | 6 | 9 if keeps_rows => Some(Fault::TailLost {
            down: chance.millis(50, 2_000),
            rows: usize::try_from(chance.between(1, 30)).unwrap_or(1),
        }),
        3 | 4 => Some(Fault::Purged { shard, rows: usize::try_from(chance.between(1, 40)).unwrap_or(1) }),
        7 | 8 => Some(Fault::PurgedUnderWay { shard, down: chance.millis(50, 2_000) }),
        20 | 21 => Some(Fault::StreamAnewAstray { shard }),
        22 | 23 => Some(Fault::LedgerOlder { back: chance.millis(500, 25_000) }),
        24 | 25 => Some(Fault::LedgerLost),
        5 | 10 => Some(Fault::ConsumerDeleted { shard, lasting: chance.millis(500, 16_000) }),
        _ => None,
    };
    faults.extend(catastrophe.map(|fault| (at, fault)));
    faults.sort_by_key(|(at, _)| *at);
    faults
}

/// Lets a machine share the shards out, and what is in its way happen.
fn share_out(chance: &mut Chance, scenario: &mut Scenario, hostile: bool, swarm: bool) {
    let heartbeat = chance.pick(&[500, 1_000]).into_millis();
    let lease = heartbeat * chance.pick(&[4, 5, 8]);
    let handover = chance.pick(&[2_000, 8_000, 20_000]).into_millis();
    let late = (0..scenario.processes).map(|_| {
        let is_late = hostile && chance.permille(250);
        if is_late { chance.millis(1_000, 50_000) } else { Duration::ZERO }
    });
    let late = late.collect();
    let watchdog = chance.permille(500);
    let twin = hostile && chance.permille(60);
    scenario.sharing = Some(Sharing { heartbeat, lease, handover, late, twin, watchdog });
    if !hostile {
        return;
    }
    let mut rate = |most| if swarm && chance.permille(500) { 0 } else { chance.between32(1, most) };
    (scenario.rates.watch_slow, scenario.rates.watch_lost) = (rate(20), rate(10));
    let faults = draw_sharing_faults(chance, scenario, swarm);
    scenario.faults.extend(faults);
    scenario.faults.sort_by_key(|(at, _)| *at);
}

fn draw_sharing_faults(chance: &mut Chance, scenario: &Scenario, swarm: bool) -> Vec<(Duration, Fault)> {
    const KINDS: u64 = 10;
    let allowed: Vec<u64> = (0..KINDS).filter(|_| !swarm || chance.permille(500)).collect();
    let count = if allowed.is_empty() { 0 } else { chance.between(0, 10) };
    let ends = scenario.quiet_from;
    let draw = |_| {
        let at = chance.time(Duration::from_secs(2), ends.saturating_sub(Duration::from_secs(1)));
        let rest = ends.saturating_sub(at);
        let process = chance.between32(0, scenario.processes - 1);
        let shard = chance.between32(0, scenario.shards - 1);
        let how = chance.pick(&[Cut::Held, Cut::HeldInwards, Cut::HeldOutwards]);
        let lasting = chance.millis(300, 14_000).min(rest);
        let down = chance.millis(1_000, 40_000);
        let within = chance.millis(500, 12_000);
        let fault = match chance.pick(&allowed) {
            0 => Fault::CutMembers { process, how, lasting },
            1 => Fault::CutConsumers { process, how, lasting },
            2 => Fault::MemberDeleted { process },
            3 => Fault::MembersLost,
            4 => Fault::NameTaken { process, shard },
            5 => Fault::PauseShard { process, shard, lasting },
            6 => Fault::Stop { process, within, down },
            7 => Fault::Pause { process, lasting },
            8 => Fault::HostLost { process, down, noticed: lasting },
            _ => Fault::Crash { process, down: lasting },
        };
        (at, fault)
    };
    (0..count).map(draw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_of_the_standard_campaign_is_hostile_enough() {
        for seed in 0..200 {
            let scenario = Scenario::draw(seed, Profile::Swarm);
            assert!(scenario.processes >= 3 && scenario.shards >= 2);
            assert!(scenario.tables.len() >= 6 && scenario.rows.len() >= 1_000);
            assert!(scenario.faults.len() >= 5);
            assert!(scenario.rows.iter().all(|row| row.at < scenario.quiet_from));
            assert!((0..scenario.shards).all(|n| scenario.tables.iter().any(|table| table.shard == n)));
        }
    }

    #[test]
    fn nothing_goes_wrong_in_the_calm() {
        let calm = Scenario::draw(3, Profile::Calm);
        assert!(calm.faults.is_empty() && calm.rates == Rates::default());
    }
}
