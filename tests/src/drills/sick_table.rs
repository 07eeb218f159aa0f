//! One table is sick, first with an error of the table, then gone: its rows wait, and no other's.

use std::time::{Duration, Instant};

use super::{ATTEMPTS_A_MINUTE, Outcome, Phase, Settings};
use crate::error::{Error, Result};
use crate::http_proxy::{Answer, Fate};
use crate::rig::Rig;
use crate::rows::identifier;
use crate::wait;

const TABLES: u64 = 8;
const RATE: u64 = 8_000;
const SICK: &str = "t3";
const LONG: Duration = Duration::from_mins(3);

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let phase_length = settings.time(30, 8);
    for round in 1..=settings.rounds {
        // One shard: all tables share one pin, one ledger record and one budget with the sick one.
        let options = settings.rig(1, 8).set("batch.max_age", "200ms");
        let mut rig = Rig::start(options)?;
        let proxy = rig.clickhouse_proxy()?;
        let mut daemon = rig.ready_daemon("holdfast")?;
        let rows = RATE * (3 * phase_length.as_secs());
        let publishing = rig.publish(0, rows, 256, Some(RATE))?;
        let healthy = lag(&rig, &mut daemon, phase_length)?;

        let phase = Phase::begin();
        proxy.set_hook(|request| {
            if request.inserts_into(SICK) {
                Fate::Answer(Answer::exception(500, 242, "TABLE_IS_READ_ONLY", "Table is in readonly mode"))
            } else {
                Fate::Forward
            }
        });
        let read_only = lag(&rig, &mut daemon, phase_length)?;
        let attempts = phase.end().attempts_a_minute(&proxy);
        proxy.clear_hook();

        let name = identifier(SICK);
        rig.sql().query(&format!("RENAME TABLE {name} TO aside"))?;
        let missing = lag(&rig, &mut daemon, phase_length)?;
        rig.sql().query(&format!("RENAME TABLE aside TO {name}"))?;

        publishing.finish(LONG)?;
        rig.landed(rows, LONG, |_| daemon.must_run())?;
        let verdict = outcome.judge(&rig, &mut daemon, rows)?;
        tell(&format!(
            "round {round}: {verdict}; the others were behind by {healthy:.2} s at most while all was well, \
             {read_only:.2} s with {SICK} read-only, {missing:.2} s without it"
        ));
        for (what, behind) in [("read-only", read_only), ("missing", missing)] {
            outcome.demand(behind <= 2.0 * healthy + 1.0, || {
                format!(
                    "with {SICK} {what} the others were behind by {behind:.2} s, otherwise by {healthy:.2} s"
                )
            });
        }
        outcome.demand(verdict.dead_lettered == 0, || "rows of a sick table are dead letters".into());
        outcome.demand(attempts <= ATTEMPTS_A_MINUTE, || format!("{attempts:.0} inserts a minute of {SICK}"));
        outcome.most("lag_seconds_healthy", healthy);
        outcome.most("lag_seconds_read_only", read_only);
        outcome.most("lag_seconds_missing", missing);
        outcome.most("attempts_per_minute", attempts);
    }
    Ok(outcome)
}

/// How far the healthy tables were behind the stream at most, in seconds of the load, over so long a time.
fn lag(rig: &Rig, daemon: &mut crate::Daemon, over: Duration) -> Result<f64> {
    let healthy: Vec<_> = rig.tables().into_iter().filter(|table| table != SICK).collect();
    let highest: Vec<_> =
        healthy.iter().map(|table| format!("(SELECT max(n) + 1 FROM {})", identifier(table))).collect();
    let sql = format!("SELECT least({})", highest.join(", "));
    let each_second = RATE as f64 / TABLES as f64;
    let until = Instant::now() + over;
    let mut most: f64 = 0.0;
    let mut failed = None;
    wait::until_true("the phase to end", over + LONG, || {
        let mut look = || -> Result<()> {
            // Published by now, at the least: the stream is asked first.
            let info = rig.jetstream().stream("INGEST")?;
            let published = info["state"]["last_seq"].as_f64().unwrap_or_default() / TABLES as f64;
            let answer = rig.sql().query(&sql)?;
            let stored: f64 = answer
                .trim()
                .parse()
                .map_err(|_| Error::Answer { what: "a count of rows", answer: answer.clone() })?;
            most = most.max((published - stored) / each_second);
            daemon.must_run()
        };
        failed = look().err();
        failed.is_some() || Instant::now() >= until
    })?;
    failed.map_or(Ok(most), Err)
}
