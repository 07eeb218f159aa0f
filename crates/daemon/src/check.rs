//! `holdfast check`: does everything fit?

use holdfast_clickhouse::{Need, Store};
use holdfast_core::ports::store::DescribeError;
use holdfast_core::row::TableName;
use holdfast_nats::Connection;
use holdfast_nats::topology::Severity;
use serde::Serialize;

use crate::cli::Json;
use crate::config::Config;
use crate::exit::Exit;
use crate::output;

#[derive(Debug, Serialize)]
struct Finding {
    severity: Severity,
    object: String,
    field: String,
    problem: String,
    fix: String,
}

#[derive(Debug, Serialize)]
struct TableLevel {
    table: String,
    target: String,
    level: Option<String>,
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
    if !report.tables.is_empty() {
        let rows = report.tables.iter().map(|table| {
            [table.table.clone(), table.target.clone(), table.level.clone().unwrap_or_else(|| "none".into())]
        });
        output::table(["TABLE", "TARGET", "DELIVERY"], rows)?;
        println!();
    }
    if report.findings.is_empty() {
        println!("Everything fits.");
        return Ok(());
    }
    let rows = report.findings.iter().map(|finding| {
        let severity = match finding.severity {
            Severity::Required => "required",
            Severity::Recommended => "recommended",
        };
        [
            severity.into(),
            finding.object.clone(),
            finding.field.clone(),
            finding.problem.clone(),
            finding.fix.clone(),
        ]
    });
    output::table(["SEVERITY", "OBJECT", "FIELD", "PROBLEM", "FIX"], rows)
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
    match config.topology()?.check(&connection).await {
        Ok(findings) => report.findings.extend(findings.into_iter().map(|finding| Finding {
            severity: finding.severity,
            object: finding.object,
            field: finding.field,
            problem: finding.problem,
            fix: finding.fix,
        })),
        Err(error) => report.findings.push(required("NATS", error, "let the daemon's user see the topology")),
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
                    table: table.to_string(),
                    target: format!("{}.{}", found.database, found.table),
                    level: found.level.map(|level| level.to_string()),
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
