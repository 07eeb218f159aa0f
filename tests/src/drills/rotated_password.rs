//! The daemon's password is refused for a minute, under load: nothing is a dead letter, and all lands after.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{ATTEMPTS_A_MINUTE, Outcome, Phase, REQUESTS_A_MINUTE, Settings};
use crate::error::Result;
use crate::http_proxy::{Answer, Fate};
use crate::rig::Rig;
use crate::wait;

const TABLES: usize = 8;
const RATE: u64 = 4_000;
const LONG: Duration = Duration::from_mins(3);

/// What ClickHouse answers when a user may not do something. The codes have the status that ClickHouse gives them.
fn refusals() -> [Answer; 4] {
    let denied =
        "default: Not enough privileges. To execute this query, it's necessary to have the grant INSERT";
    [
        Answer::wrong_password(),
        Answer::exception(401, 194, "REQUIRED_PASSWORD", "Authentication failed: password is required"),
        Answer::exception(403, 192, "UNKNOWN_USER", "There is no user `default` in user directories"),
        Answer::exception(403, 497, "ACCESS_DENIED", denied),
    ]
}

pub(super) fn run(settings: &Settings, tell: &mut dyn FnMut(&str)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let refused_for = settings.time(60, 12);
    for round in 1..=settings.rounds {
        let mut rig = Rig::start(settings.rig(4, TABLES).set("batch.max_age", "200ms"))?;
        let proxy = rig.clickhouse_proxy()?;
        rig.set("clickhouse.password", "old secret");
        let mut daemon = rig.ready_daemon("holdfast")?;
        // The development server knows no passwords, and commands go to it past the proxy.
        rig.set("clickhouse.password", "");
        let rows = RATE * (refused_for.as_secs() + 10);
        let publishing = rig.publish(0, rows, 256, Some(RATE))?;
        rig.landed(RATE * 2, LONG, |_| daemon.must_run())?;

        let phase = Phase::begin();
        let answers = refusals();
        // Half of the time the wrong password, the rest of it the others.
        let order: Vec<_> = [0, 0, 0, 1, 2, 3].iter().map(|at| answers[*at].clone()).collect();
        let step = Arc::new(AtomicUsize::new(0));
        let steps = u32::try_from(order.len()).unwrap_or(1);
        let now = Arc::clone(&step);
        proxy.set_hook(move |_| Fate::Answer(order[now.load(Ordering::SeqCst) % order.len()].clone()));
        let began = Instant::now();
        wait::until_true("the password to be right again", refused_for + Duration::from_secs(5), || {
            let passed = began.elapsed().as_secs_f64() / refused_for.as_secs_f64() * f64::from(steps);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a step's number")]
            step.store((passed as usize).min(steps as usize - 1), Ordering::SeqCst);
            daemon.must_run().is_err() || began.elapsed() >= refused_for
        })?;
        daemon.must_run()?;
        let parked = rig.dead_letters()?.len();
        let phase = phase.end();
        proxy.clear_hook();
        let back = Instant::now();

        publishing.finish(LONG)?;
        rig.landed(rows, LONG, |_| daemon.must_run())?;
        let caught_up = back.elapsed();
        let attempts = phase.attempts_a_minute(&proxy);
        let requests = phase.requests_a_minute(&proxy, TABLES);
        let log = daemon.log()?;
        let verdict = outcome.judge(&rig, &mut daemon, rows)?;
        tell(&format!(
            "round {round}: {verdict}; while refused {attempts:.0} inserts a minute of the busiest table, \
             {requests:.0} requests a minute and table; all landed {:.1} s after",
            caught_up.as_secs_f64()
        ));
        outcome.demand(parked == 0 && verdict.dead_lettered == 0, || {
            format!("{} rows are dead letters", verdict.dead_lettered)
        });
        outcome.demand(requests > 0.0, || "nothing was refused: the fault was not hit".into());
        outcome.demand(attempts <= ATTEMPTS_A_MINUTE, || {
            format!("{attempts:.0} inserts a minute of one table while refused; at most {ATTEMPTS_A_MINUTE}")
        });
        outcome.demand(requests <= REQUESTS_A_MINUTE, || {
            format!("{requests:.0} requests a minute and table while refused; at most {REQUESTS_A_MINUTE}")
        });
        outcome.demand(log.contains("516"), || "the log does not name the code".into());
        outcome.demand(!log.contains("old secret"), || "the password is in the log".into());
        outcome.most("attempts_per_minute", attempts);
        outcome.most("requests_per_minute", requests);
        outcome.most("caught_up_seconds", caught_up.as_secs_f64());
        outcome.add("rows", rows as f64);
        outcome.add("dead_letters", verdict.dead_lettered as f64);
    }
    Ok(outcome)
}
