//! `holdfast check`: does everything fit?

use std::fmt::Write as _;

use holdfast_clickhouse::{Horizon, Need, Store};
use holdfast_core::ports::store::{DescribeError, Level};
use holdfast_core::row::TableName;
use holdfast_nats::Connection;
use holdfast_nats::topology::{Severity, TopologyError};
use serde::Serialize;

use crate::cli::Json;
use crate::config::Config;
use crate::exit::Exit;
use crate::output::{self, Width, count, shown};

#[derive(Debug, Serialize)]
struct Finding {
    severity: Severity,
    object: String,
    field: String,
    problem: String,
    fix: String,
}

/// What a table gets.
#[derive(Debug, Serialize)]
struct TableLevel {
    table: String,
    target: String,
    /// None: it takes no rows as it is configured.
    level: Option<Level>,
    /// The highest that it allows.
    highest: Level,
    /// What that means for its rows.
    promise: &'static str,
    /// None: it does not deduplicate.
    horizon: Option<Reach>,
}

/// How far a table's window reaches.
#[derive(Clone, Copy, Debug, Serialize)]
struct Reach {
    /// Parts whose tokens it remembers.
    window: u64,
    /// The longest after which an insert can still land.
    life_seconds: u64,
    /// Parts that an insert makes.
    parts_per_insert: u64,
    /// That is a guess.
    assumed: bool,
    /// Inserts that the configuration makes of a table whose batches are closed by age.
    inserts_per_minute: u64,
    /// Inserts up to which the window outlasts every insert.
    allowed_per_minute: u64,
}

impl From<Horizon> for Reach {
    fn from(horizon: Horizon) -> Self {
        Self {
            window: horizon.window,
            life_seconds: horizon.life.as_secs(),
            parts_per_insert: horizon.parts_per_insert,
            assumed: horizon.assumed,
            inserts_per_minute: horizon.inserts_per_minute,
            allowed_per_minute: horizon.allowed_per_minute,
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    ok: bool,
    findings: Vec<Finding>,
    tables: Vec<TableLevel>,
}

/// Checks NATS, ClickHouse and every configured table, and prints what was found.
///
/// # Errors
/// With code 1 if something required is missing, once it is printed.
pub async fn check(config: &Config, json: Json) -> Result<(), Exit> {
    let mut report = Report { ok: false, findings: Vec::new(), tables: Vec::new() };
    check_nats(config, &mut report).await?;
    check_clickhouse(config, &mut report).await?;
    if !config.parking().dead_letters {
        report.findings.push(Finding {
            severity: Severity::Recommended,
            object: "configuration".to_owned(),
            field: "topology.dead_letters".to_owned(),
            problem: "it is \"\": a row that can never be stored makes its table wait for a person"
                .to_owned(),
            fix: "name a stream for such rows, and run `holdfast topology apply`".to_owned(),
        });
    }
    report.findings.sort_by_key(|finding| finding.severity);
    report.ok = report.findings.iter().all(|finding| finding.severity != Severity::Required);
    if json.json {
        output::json(&report)?;
    } else {
        print(&report)?;
    }
    if report.ok { Ok(()) } else { Err(Exit::findings()) }
}

fn print(report: &Report) -> Result<(), Exit> {
    let mut text = String::new();
    let width = Width::of_output();
    let columns = width.columns().unwrap_or(110);
    if !report.tables.is_empty() {
        let rows = report.tables.iter().map(|table| {
            let reach =
                |of: fn(Reach) -> u64| table.horizon.map_or("–".to_owned(), |reach| count(of(reach)));
            [
                shown(&table.table, 30),
                shown(&table.target, 40),
                table.level.map_or("none".to_owned(), |level| level.to_string()),
                reach(|reach| reach.window),
                reach(|reach| reach.allowed_per_minute),
            ]
        });
        text += &output::render(["TABLE", "TARGET", "DELIVERY", ">WINDOW", ">INSERTS/MIN"], rows, width);
        for table in &report.tables {
            if let Some(level) = table.level.filter(|level| *level < Level::ExactlyOnce) {
                let weaker = format!("{} is {level}: {}.", shown(&table.table, 30), table.promise);
                for line in output::wrapped(&weaker, columns) {
                    let _ = writeln!(text, "{line}");
                }
            }
        }
        if let Some(reach) = report.tables.iter().find_map(|table| table.horizon) {
            let explained = format!(
                "An insert can land up to {} s late. INSERTS/MIN is up to how many inserts a minute the window \
                 remembers them all for so long; a table whose batches are closed by age gets {}.",
                reach.life_seconds, reach.inserts_per_minute
            );
            for line in output::wrapped(&explained, columns) {
                let _ = writeln!(text, "{line}");
            }
        }
        text.push('\n');
    }
    if report.findings.is_empty() {
        text += "Everything fits.\n";
        return output::text(&text);
    }
    // One under another, so that what mends it can be copied as it stands.
    for finding in &report.findings {
        let severity = match finding.severity {
            Severity::Required => "required",
            Severity::Recommended => "recommended",
        };
        let field =
            if finding.field.is_empty() { String::new() } else { format!(", {}", shown(&finding.field, 60)) };
        let _ = writeln!(text, "{severity}: {}{field}", shown(&finding.object, 60));
        for line in output::wrapped(&output::reason(&finding.problem, 500), columns.saturating_sub(4)) {
            let _ = writeln!(text, "    {line}");
        }
        let _ = writeln!(text, "  → {}", shown(&finding.fix, 500));
    }
    let required = report.findings.iter().filter(|finding| finding.severity == Severity::Required).count();
    let _ = writeln!(text, "\n{required} required, {} recommended", report.findings.len() - required);
    output::text(&text)
}

fn required(object: &str, problem: impl std::fmt::Display, fix: &str) -> Finding {
    Finding {
        severity: Severity::Required,
        object: object.to_owned(),
        field: String::new(),
        problem: problem.to_string(),
        fix: fix.to_owned(),
    }
}

async fn check_nats(config: &Config, report: &mut Report) -> Result<(), Exit> {
    let connection = match Connection::open(&config.nats()?).await {
        Ok(connection) => connection,
        Err(error) => {
            report.findings.push(required(
                "NATS",
                error,
                "set nats.url and the credentials, or start the server",
            ));
            return Ok(());
        }
    };
    let topology = config.topology()?;
    let found = async {
        let mut findings = topology.check(&connection).await?;
        // Where something is missing that rows go through they do not arrive, and that is said already.
        if findings.iter().all(|finding| finding.severity != Severity::Required) {
            findings.extend(topology.check_publishing(&connection).await?);
        }
        Ok::<_, TopologyError>(findings)
    };
    match found.await {
        Ok(findings) => report.findings.extend(findings.into_iter().map(|finding| Finding {
            severity: finding.severity,
            object: finding.object,
            field: finding.field,
            problem: finding.problem,
            fix: finding.fix,
        })),
        Err(error) => report.findings.push(required(
            "NATS",
            error,
            "give this user the operator's permissions: `holdfast topology print --permissions`",
        )),
    }
    Ok(())
}

async fn check_clickhouse(config: &Config, report: &mut Report) -> Result<(), Exit> {
    let clock = crate::clock::Clock::start();
    let store =
        Store::new(config.clickhouse()?, std::sync::Arc::new(move || clock.now())).map_err(Exit::usage)?;
    match store.ping().await {
        Ok(server) if !server.has_database => report.findings.push(required(
            "ClickHouse",
            "the configured database does not exist, or the user may not see it",
            "create it, or set clickhouse.database",
        )),
        Ok(_) => {}
        Err(error) => {
            report.findings.push(required(
                "ClickHouse",
                error,
                "set clickhouse.url and the user, or start the server",
            ));
            return Ok(());
        }
    }
    for name in config.tables.keys() {
        let table = TableName::new(name.as_str());
        let object = format!("table {table}");
        match store.report(&table).await {
            Ok(found) => {
                report.findings.extend(found.findings.iter().map(|finding| Finding {
                    severity: match finding.need {
                        Need::Required => Severity::Required,
                        Need::Recommended => Severity::Recommended,
                    },
                    object: object.clone(),
                    field: finding.field.clone(),
                    problem: finding.problem.clone(),
                    fix: finding.fix.clone(),
                }));
                report.tables.push(TableLevel {
                    table: table.as_str().to_owned(),
                    target: format!("{}.{}", found.database, found.table),
                    level: found.level,
                    highest: found.highest,
                    promise: found.promise(),
                    horizon: found.horizon.map(Reach::from),
                });
            }
            Err(error) => {
                let fix = match error {
                    DescribeError::Missing(_) => "create it, or correct its section in the configuration",
                    _ => "let the daemon's user see it",
                };
                report.findings.push(required(&object, error, fix));
            }
        }
    }
    Ok(())
}
