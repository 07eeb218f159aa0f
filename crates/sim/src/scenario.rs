//! What a seed means: processes, tables, rows, and everything that will go wrong.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use holdfast_core::ports::store::Level;

use crate::chance::Chance;
use crate::fault::{Cut, Fault, Rates};

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
    pub(crate) exists_from: Duration,
}

/// A row to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RowPlan {
    pub(crate) at: Duration,
    pub(crate) table: u32,
    pub(crate) size: usize,
    pub(crate) bad: bool,
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
    /// How long after its arrival an insert can still land.
    pub(crate) const INSERT_LIFE: Duration = Duration::from_secs(9);
    /// No request is later than this.
    pub(crate) const LATEST: Duration = Duration::from_secs(20);
    /// When faults have stopped, everything must have landed and be recorded within this time.
    pub(crate) const SETTLES_WITHIN: Duration = Duration::from_mins(1);
    /// No run is shorter.
    pub(crate) const LENGTH: Duration = Duration::from_mins(2);
    /// Clocks run at most this much fast or slow, in parts in a million.
    const SKEW: u32 = 50_000;

    /// Longer than any attempt at the store lives on the client's side: its wait for a turn, the answer's
    /// time, and a margin.
    pub(crate) fn patience(&self) -> Duration {
        self.stale + Self::INSERT_TIMEOUT * 2
    }

    /// How long a window must remember: an intent can be sent `stale` after it was checked, by a clock that
    /// runs slow, and lands within an insert's life of its arrival.
    pub(crate) fn horizon(&self) -> Duration {
        self.stale * 11 / 10 + self.latency + Self::INSERT_LIFE + Duration::from_secs(1)
    }

    /// The most hours that a count of seeds can mean is what it says: see simulation.md.
    pub(crate) fn draw(seed: u64, profile: Profile) -> Self {
        let chance = &mut Chance::new(seed, 1);
        let hostile = profile != Profile::Calm;
        let swarm = profile == Profile::Swarm;
        let processes = chance.between32(3, 5);
        let shards = chance.between32(2, 3);
        let quiet_from = chance.millis(80_000, 95_000);
        let tables = draw_tables(chance, shards, hostile);
        let rows = draw_rows(chance, &tables, quiet_from, hostile);
        let share_rows = chance.pick(&[24, 60, 200, 1_000]);
        let batch_rows = chance.pick(&[3, 10, 40, 200]);
        let batch_bytes = chance.pick(&[400, 4_000, 1_000_000]);
        // A hot table's backlog must fit into the time there is: tiny batches need a quick store.
        let insert_times: &[u64] =
            if batch_rows < 40 || batch_bytes < 4_000 { &[5, 50] } else { &[5, 50, 400] };
        let mut scenario = Self {
            seed,
            profile,
            processes,
            shards,
            tables,
            rows,
            faults: Vec::new(),
            rates: if hostile { Rates::draw(chance, swarm) } else { Rates::default() },
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
            latency: chance.pick(&[1, 3, 40]).into_millis(),
            insert_time: chance.pick(insert_times).into_millis(),
            quiet_from,
        };
        if hostile {
            scenario.faults = draw_faults(chance, &scenario, swarm);
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

fn draw_tables(chance: &mut Chance, shards: u32, hostile: bool) -> Vec<TablePlan> {
    let count = chance.between32(6, 12);
    let deduplicated = hostile && chance.permille(300);
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
            window: chance.pick(&[1, 4, 20, 1_000]).try_into().unwrap_or(1),
            exists_from: if hostile && chance.permille(80) {
                chance.millis(5_000, 40_000)
            } else {
                Duration::ZERO
            },
        })
        .collect()
}

fn draw_rows(chance: &mut Chance, tables: &[TablePlan], quiet_from: Duration, hostile: bool) -> Vec<RowPlan> {
    let count = chance.between(1_000, 1_500);
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
            rows.push(RowPlan { at: at.min(last), table, size, bad: false });
        }
    }
    rows.sort_by_key(|row| row.at);
    if hostile && chance.permille(60) {
        // A row that can never be inserted holds everything of its table behind it, so it comes late, and none
        // that is large comes after it: what waits must not fill the share.
        let at = rows.len() - 1 - usize::try_from(chance.below(12)).unwrap_or(0);
        rows[at].bad = true;
        rows[at..].iter_mut().for_each(|row| row.size = row.size.min(64));
    }
    rows
}

fn draw_faults(chance: &mut Chance, scenario: &Scenario, swarm: bool) -> Vec<(Duration, Fault)> {
    const KINDS: u64 = 19;
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
            17 => Fault::ResetAstray { shard },
            _ => Fault::Crash { process, down: long },
        };
        faults.push((at, fault));
    }
    // What loses rows of the stream, or a shard, comes at most once in a run: it exempts rows from proof.
    let at = chance.time(Duration::from_secs(10), ends.saturating_sub(Duration::from_secs(10)));
    let shard = chance.between32(0, scenario.shards - 1);
    let catastrophe = match chance.below(20) {
        0 | 1 => Some(Fault::StreamAnew),
        2 | 6 => Some(Fault::TailLost {
            down: chance.millis(50, 2_000),
            rows: usize::try_from(chance.between(1, 30)).unwrap_or(1),
        }),
        3 | 4 => Some(Fault::Purged { shard, rows: usize::try_from(chance.between(1, 40)).unwrap_or(1) }),
        7 | 8 => Some(Fault::PurgedUnderWay { shard, down: chance.millis(50, 2_000) }),
        5 => Some(Fault::ConsumerDeleted { shard, lasting: chance.millis(500, 8_000) }),
        _ => None,
    };
    faults.extend(catastrophe.map(|fault| (at, fault)));
    faults.sort_by_key(|(at, _)| *at);
    faults
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
