//! What a table can promise, read from the table.

use std::fmt::Write as _;

use holdfast_core::ports::store::Level;

use crate::config::{Demand, TableConfig};
use crate::engine::{self, Family};
use crate::horizon::{Horizon, Pace, Partitions};
use crate::identifier;

/// A window that is recommended where there is none: parts that a table remembers.
const RECOMMENDED_WINDOW: u64 = 10_000;

/// A column of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// Its name, unquoted.
    pub name: String,
    /// Its type as ClickHouse writes it.
    pub data_type: String,
    /// `""`, `DEFAULT`, `MATERIALIZED`, `ALIAS` or `EPHEMERAL`.
    pub kind: String,
    /// The expression behind its kind, or `""`.
    pub expression: String,
    /// The expression after which its values expire, or `""`.
    pub ttl: String,
}

impl Column {
    /// Whether an insert may give it a value.
    #[must_use]
    pub fn takes_values(&self) -> bool {
        !matches!(self.kind.as_str(), "MATERIALIZED" | "ALIAS")
    }

    /// Whether it keeps every sequence and every time in nanoseconds as it is.
    fn keeps_numbers(&self) -> bool {
        let inner = self.data_type.strip_prefix("Nullable(").and_then(|t| t.strip_suffix(')'));
        matches!(
            inner.unwrap_or(&self.data_type),
            "UInt64" | "Int64" | "UInt128" | "Int128" | "UInt256" | "Int256"
        )
    }

    /// Whether Holdfast can write its numbers to it and read them back.
    fn is_for_us(&self) -> bool {
        matches!(self.kind.as_str(), "" | "DEFAULT") && self.keeps_numbers() && self.ttl.is_empty()
    }
}

/// The columns of a table, and which of them Holdfast fills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Columns {
    pub(crate) all: Vec<Column>,
}

impl Columns {
    fn find(&self, name: &str) -> Option<&Column> {
        self.all.iter().find(|column| column.name == name)
    }

    /// Whether the table has `name` in a form that Holdfast can fill.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.find(name).is_some_and(Column::is_for_us)
    }

    /// The list of columns that an insert names.
    ///
    /// All that take values, so that an insert fails, and does not lose values, when a column has gone meanwhile.
    pub(crate) fn list(&self) -> Result<String, identifier::IdentifierError> {
        let mut list = String::new();
        for column in self.all.iter().filter(|column| column.takes_values()) {
            if !list.is_empty() {
                list.push_str(", ");
            }
            list.push_str(&identifier::quote(&column.name)?);
        }
        Ok(list)
    }
}

/// Whether a finding stands in the way of what is configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// The table cannot be used as configured.
    Required,
    /// It can, but more would be promised, or things would go better.
    Recommended,
}

/// Something about a table that could be better.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Whether it must be mended.
    pub need: Need,
    /// What it is about: the engine, a column, a setting.
    pub field: String,
    /// What is wrong.
    pub problem: String,
    /// How to mend it; where possible the very statement.
    pub fix: String,
}

/// What row policies hide from the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Policies {
    /// The names of the policies that filter what the user reads; none: nothing is hidden.
    Known(String),
    /// The user may not ask.
    Unknown,
}

/// Whether the user may read Holdfast's columns of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Readable {
    /// It may, or there is nothing to read.
    Yes,
    /// It may not, in the server's words.
    No(String),
}

/// What the server says about a table.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) database: String,
    pub(crate) table: String,
    pub(crate) engine: String,
    pub(crate) engine_full: String,
    pub(crate) partition_key: String,
    pub(crate) sorting_key: String,
    /// Expressions of the table's data skipping indices, comma-separated; `None`: the user may not ask.
    pub(crate) indices: Option<String>,
    pub(crate) columns: Columns,
    /// The server's defaults: parts that a table without a setting of its own remembers.
    pub(crate) plain_window: u64,
    pub(crate) replicated_window: u64,
    /// The server's default: for how long a replicated table remembers, in seconds.
    pub(crate) replicated_seconds: u64,
    pub(crate) policies: Policies,
    pub(crate) readable: Readable,
    pub(crate) partitions: Partitions,
}

/// A table as it was found, what it can promise, and what stands in its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableReport {
    /// The database, unquoted.
    pub database: String,
    /// The table, unquoted.
    pub table: String,
    /// The engine's name.
    pub engine: String,
    /// Whether tokens are recorded together with their parts, by a coordination service.
    pub replicated: bool,
    /// How many parts' tokens the table remembers; 0: it does not deduplicate.
    pub window: u64,
    /// For how long, in seconds, where time bounds it too.
    pub window_seconds: Option<u64>,
    /// Whether that is long enough; none where it does not deduplicate.
    pub horizon: Option<Horizon>,
    /// The expression by which it is partitioned, or `""`.
    pub partition_key: String,
    /// Its columns.
    pub columns: Vec<Column>,
    /// Whether rows get their sequence.
    pub has_sequence: bool,
    /// Whether rows get their stream.
    pub has_stream: bool,
    /// What is asked of it.
    pub asked: Demand,
    /// The highest level that it allows.
    pub highest: Level,
    /// The level that its rows get; `None`: it cannot give what is asked.
    pub level: Option<Level>,
    /// What stands in the way, the required first.
    pub findings: Vec<Finding>,
}

impl TableReport {
    /// What the table's rows are promised, in a sentence.
    #[must_use]
    pub const fn promise(&self) -> &'static str {
        match self.level {
            Some(Level::ExactlyOnce) => "every row once and in order, through any crash",
            // A replicated table records a token together with its part.
            Some(Level::Deduplicated) if self.replicated => "every row once and in order",
            Some(Level::Deduplicated) => {
                "every row once and in order, but that a ClickHouse killed within its commit can swallow a batch \
                 that is tried again"
            }
            Some(Level::AtLeastOnce) => "every row in order; after trouble some can be there twice",
            None => "nothing: it takes no rows as configured",
        }
    }

    /// The required findings in one sentence each, with what mends them.
    #[must_use]
    pub fn why_unfit(&self) -> String {
        let mut text = format!("{}.{} ", self.database, self.table);
        match self.asked {
            Demand::Exactly(level) => {
                let _ = write!(text, "cannot be {level}:");
            }
            Demand::Best => text.push_str("cannot take rows:"),
        }
        for finding in self.findings.iter().filter(|finding| finding.need == Need::Required) {
            let _ = write!(text, " {}: {}. To mend it: {}.", finding.field, finding.problem, finding.fix);
        }
        text
    }
}

/// Something that keeps a table from a level and from all above it.
struct Obstacle {
    /// `None`: it can take no rows at all.
    keeps_from: Option<Level>,
    field: String,
    problem: String,
    fix: String,
}

/// Judges a table by what the server says about it.
pub(crate) fn judge(facts: Facts, asked: &TableConfig, pace: Pace) -> TableReport {
    let name = identifier::quote_table(&facts.database, &facts.table)
        .unwrap_or_else(|_| format!("{}.{}", facts.database, facts.table));
    let (family, replicated) = engine::family(&facts.engine);
    let (window, window_seconds) = match (family, replicated) {
        (Family::Other | Family::NoInserts, _) => (0, None),
        (_, false) => (
            engine::setting(&facts.engine_full, "non_replicated_deduplication_window")
                .unwrap_or(facts.plain_window),
            None,
        ),
        (_, true) => (
            engine::setting(&facts.engine_full, "replicated_deduplication_window")
                .unwrap_or(facts.replicated_window),
            Some(
                engine::setting(&facts.engine_full, "replicated_deduplication_window_seconds")
                    .unwrap_or(facts.replicated_seconds),
            ),
        ),
    };

    let mut obstacles = Vec::new();
    let mut obstacle = |keeps_from, field: &str, problem: String, fix: String| {
        obstacles.push(Obstacle { keeps_from, field: field.to_owned(), problem, fix });
    };
    match family {
        Family::Plain => {}
        Family::Merging => obstacle(
            Some(Level::ExactlyOnce),
            "engine",
            format!("{} drops or merges rows by design, so a batch cannot be read back", facts.engine),
            "insert into a MergeTree table and let a materialized view fill this one, or accept delivery = \"deduplicated\"".into(),
        ),
        Family::Other => obstacle(
            Some(Level::Deduplicated),
            "engine",
            format!("{} does not deduplicate inserts", facts.engine),
            "insert into a MergeTree table, or accept delivery = \"at-least-once\"".into(),
        ),
        Family::NoInserts => obstacle(
            None,
            "engine",
            format!("a {} takes no inserts", facts.engine),
            "name the table behind it".into(),
        ),
    }
    if matches!(family, Family::Plain | Family::Merging) && window == 0 {
        let setting = if replicated {
            "replicated_deduplication_window"
        } else {
            "non_replicated_deduplication_window"
        };
        obstacle(
            Some(Level::Deduplicated),
            setting,
            "it is 0, so the table forgets each insert at once and stores a repeated one again".into(),
            format!("ALTER TABLE {name} MODIFY SETTING {setting} = {RECOMMENDED_WINDOW}"),
        );
    }
    if family == Family::Plain {
        for (key, column) in
            [("sequence_column", &asked.sequence_column), ("stream_column", &asked.stream_column)]
        {
            let quoted = identifier::quote(column).unwrap_or_else(|_| column.clone());
            let (problem, fix) = match facts.columns.find(column) {
                Some(found) if found.is_for_us() => continue,
                None => (
                    format!("the table has no column {column:?}, so a batch cannot be read back"),
                    format!("ALTER TABLE {name} ADD COLUMN {quoted} UInt64"),
                ),
                Some(Column { kind, .. }) if !matches!(kind.as_str(), "" | "DEFAULT") => (
                    format!("{column:?} is {kind}, so Holdfast cannot fill it"),
                    format!("make it an ordinary UInt64 column, or name another in {key}"),
                ),
                Some(found) if !found.keeps_numbers() => (
                    format!("{column:?} is {}, which does not keep every 64-bit number", found.data_type),
                    format!("ALTER TABLE {name} MODIFY COLUMN {quoted} UInt64, or name another in {key}"),
                ),
                Some(_) => (
                    format!("the values of {column:?} expire"),
                    format!("ALTER TABLE {name} MODIFY COLUMN {quoted} REMOVE TTL"),
                ),
            };
            obstacle(Some(Level::ExactlyOnce), key, problem, fix);
        }
        if engine::rows_expire(&facts.engine_full) {
            obstacle(
                Some(Level::ExactlyOnce),
                "TTL",
                "rows expire, and an expired row looks like one that was never stored".into(),
                format!("ALTER TABLE {name} REMOVE TTL, or accept delivery = \"deduplicated\""),
            );
        }
        if let Policies::Known(policies) = &facts.policies
            && !policies.is_empty()
        {
            obstacle(
                Some(Level::ExactlyOnce),
                "row policy",
                format!("{policies} can hide stored rows from Holdfast's user"),
                "exempt the user: ALTER ROW POLICY … TO ALL EXCEPT <user>".into(),
            );
        }
    }

    if let (Family::Plain, Readable::No(why)) = (family, &facts.readable) {
        let columns = [&asked.sequence_column, &asked.stream_column]
            .map(|column| identifier::quote(column).unwrap_or_else(|_| column.clone()));
        obstacle(
            Some(Level::ExactlyOnce),
            "grant",
            format!("Holdfast's user may not read the table, so a batch cannot be read back ({why})"),
            format!("GRANT SELECT({}) ON {name} TO <user>", columns.join(", ")),
        );
    }

    let takes_rows = obstacles.iter().all(|obstacle| obstacle.keeps_from.is_some());
    let highest = match obstacles.iter().filter_map(|obstacle| obstacle.keeps_from).min() {
        _ if !takes_rows => Level::AtLeastOnce,
        Some(Level::Deduplicated | Level::AtLeastOnce) => Level::AtLeastOnce,
        Some(Level::ExactlyOnce) => Level::Deduplicated,
        None => Level::ExactlyOnce,
    };
    let level = match asked.delivery {
        _ if !takes_rows => None,
        Demand::Best => Some(highest),
        Demand::Exactly(level) => (level <= highest).then_some(level),
    };
    let mut findings: Vec<Finding> = obstacles
        .into_iter()
        .filter_map(|Obstacle { keeps_from, field, problem, fix }| {
            let need = match (keeps_from, asked.delivery) {
                (None, _) => Need::Required,
                (Some(_), Demand::Best) => Need::Recommended,
                (Some(from), Demand::Exactly(level)) if from <= level => Need::Required,
                // What is asked for stands; it is no finding that more could be had.
                (Some(_), Demand::Exactly(_)) => return None,
            };
            Some(Finding { need, field, problem, fix })
        })
        .collect();
    if level == Some(Level::ExactlyOnce) {
        findings.extend(could_be_better(&facts, asked, &name));
    }
    let horizon = (window > 0).then(|| Horizon::new(window, facts.partitions, pace));
    if let Some(horizon) = horizon
        && level.is_some_and(|level| level >= Level::Deduplicated)
    {
        findings.extend(too_near(&horizon, window_seconds, replicated, &name));
    }
    findings.sort_by_key(|finding| finding.need);

    TableReport {
        has_sequence: facts.columns.has(&asked.sequence_column),
        has_stream: facts.columns.has(&asked.stream_column),
        database: facts.database,
        table: facts.table,
        engine: facts.engine,
        replicated,
        window,
        window_seconds,
        horizon,
        partition_key: facts.partition_key,
        columns: facts.columns.all,
        asked: asked.delivery,
        highest,
        level,
        findings,
    }
}

/// What is wrong with a window that forgets tokens while their inserts can still land.
fn too_near(horizon: &Horizon, window_seconds: Option<u64>, replicated: bool, name: &str) -> Option<Finding> {
    let seconds = horizon.life.as_secs();
    let (field, problem, fix) = if !horizon.is_enough() {
        let field = if replicated {
            "replicated_deduplication_window"
        } else {
            "non_replicated_deduplication_window"
        };
        let Horizon { window, parts_per_insert, inserts_per_minute, .. } = horizon;
        let whence = if horizon.assumed { "which is assumed" } else { "as seen" };
        let problem = format!(
            "the table remembers {window} parts; {inserts_per_minute} inserts a minute (batch.max_age) of up to \
             {parts_per_insert} parts each ({whence}) can have it forget an insert that lands after {seconds} s, and \
             store its rows twice"
        );
        // Twice as much as is needed: batches that are full, or split, come more often.
        let window = horizon.needed().saturating_mul(2).max(RECOMMENDED_WINDOW);
        (field, problem, window)
    } else if window_seconds.is_some_and(|remembered| remembered <= seconds) {
        let problem = format!(
            "the table remembers inserts for {} s; one can land after {seconds} s, and be stored twice",
            window_seconds.unwrap_or_default()
        );
        ("replicated_deduplication_window_seconds", problem, seconds.saturating_mul(2).max(3_600))
    } else {
        return None;
    };
    Some(Finding {
        need: Need::Recommended,
        field: field.into(),
        problem,
        fix: format!("ALTER TABLE {name} MODIFY SETTING {field} = {fix}"),
    })
}

/// What an exactly-once table could do better.
fn could_be_better(facts: &Facts, asked: &TableConfig, name: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    if facts.policies == Policies::Unknown {
        findings.push(Finding {
            need: Need::Recommended,
            field: "row policy".into(),
            problem: "the user may not see whether a row policy hides rows from it; if one does, a read-back misses them"
                .into(),
            fix: "GRANT SHOW ROW POLICIES ON *.* TO <user>".into(),
        });
    }
    let column = &asked.sequence_column;
    let leads = facts.sorting_key.split(',').any(|key| key.trim().trim_matches('`') == *column);
    let indexed = facts
        .indices
        .as_ref()
        .is_none_or(|indices| indices.split(',').any(|key| key.trim().trim_matches('`') == *column));
    if !leads && !indexed {
        let quoted = identifier::quote(column).unwrap_or_else(|_| column.clone());
        findings.push(Finding {
            need: Need::Recommended,
            field: "index".into(),
            problem: format!("no index covers {column:?}, so a read-back may have to read the whole column"),
            fix: format!("ALTER TABLE {name} ADD INDEX holdfast_sequence {quoted} TYPE minmax"),
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn column(name: &str, data_type: &str) -> Column {
        Column {
            name: name.into(),
            data_type: data_type.into(),
            kind: String::new(),
            expression: String::new(),
            ttl: String::new(),
        }
    }

    fn facts() -> Facts {
        Facts {
            database: "d".into(),
            table: "t".into(),
            engine: "MergeTree".into(),
            engine_full: "MergeTree ORDER BY _seq SETTINGS non_replicated_deduplication_window = 1000".into(),
            partition_key: String::new(),
            sorting_key: "_seq".into(),
            indices: Some(String::new()),
            columns: Columns {
                all: vec![column("_seq", "UInt64"), column("_stream", "Int64"), column("a", "String")],
            },
            plain_window: 0,
            replicated_window: 10_000,
            replicated_seconds: 3_600,
            policies: Policies::Known(String::new()),
            readable: Readable::Yes,
            partitions: Partitions::None,
        }
    }

    const PACE: Pace = Pace {
        intent_age: Duration::from_secs(10),
        insert_timeout: Duration::from_mins(2),
        batch_age: Duration::from_secs(1),
    };

    fn asking(delivery: Demand) -> TableConfig {
        TableConfig { delivery, ..TableConfig::default() }
    }

    fn best(facts: Facts) -> TableReport {
        judge(facts, &asking(Demand::Best), PACE)
    }

    #[test]
    fn a_good_table_gives_exactly_once() {
        let report = best(facts());
        assert_eq!(
            (report.highest, report.level, report.window),
            (Level::ExactlyOnce, Some(Level::ExactlyOnce), 1_000)
        );
        assert_eq!(report.findings, []);
        assert!(report.has_sequence && report.has_stream);
    }

    #[test]
    fn each_obstacle_costs_its_level() {
        type Change = fn(&mut Facts);
        let cases: &[(Level, &str, Change)] = &[
            (Level::Deduplicated, "engine", |f| f.engine = "ReplacingMergeTree".into()),
            (Level::Deduplicated, "sequence_column", |f| drop(f.columns.all.remove(0))),
            (Level::Deduplicated, "stream_column", |f| drop(f.columns.all.remove(1))),
            (Level::Deduplicated, "sequence_column", |f| f.columns.all[0].data_type = "UInt32".into()),
            (Level::Deduplicated, "sequence_column", |f| f.columns.all[0].kind = "MATERIALIZED".into()),
            (Level::Deduplicated, "stream_column", |f| f.columns.all[1].ttl = "toDate(a)".into()),
            (Level::Deduplicated, "TTL", |f| {
                f.engine_full = f.engine_full.replace("SETTINGS", "TTL d SETTINGS");
            }),
            (Level::Deduplicated, "row policy", |f| f.policies = Policies::Known("mine".into())),
            (Level::Deduplicated, "grant", |f| f.readable = Readable::No("Code: 497".into())),
            (Level::AtLeastOnce, "non_replicated_deduplication_window", |f| {
                f.engine_full = "MergeTree".into();
            }),
            (Level::AtLeastOnce, "engine", |f| f.engine = "Memory".into()),
        ];
        for (level, field, change) in cases {
            let mut facts = facts();
            change(&mut facts);
            let report = best(facts.clone());
            assert_eq!(report.level, Some(*level), "{field}");
            assert_eq!(report.findings[0].field, *field);
            assert_eq!(report.findings[0].need, Need::Recommended);
            let report = judge(facts.clone(), &asking(Demand::Exactly(Level::ExactlyOnce)), PACE);
            assert_eq!(report.level, None, "{field}");
            assert!(report.why_unfit().contains(&report.findings[0].fix), "{}", report.why_unfit());
            let report = judge(facts, &asking(Demand::Exactly(*level)), PACE);
            assert_eq!((report.level, report.findings), (Some(*level), vec![]), "{field}");
        }
    }

    #[test]
    fn the_servers_default_is_a_window_too() {
        let report =
            best(Facts { engine_full: "MergeTree ORDER BY _seq".into(), plain_window: 50, ..facts() });
        assert_eq!((report.level, report.window), (Some(Level::ExactlyOnce), 50));
        assert!(!report.horizon.unwrap().is_enough());
        let report =
            best(Facts { engine: "ReplicatedMergeTree".into(), engine_full: String::new(), ..facts() });
        assert_eq!((report.window, report.window_seconds, report.replicated), (10_000, Some(3_600), true));
    }

    #[test]
    fn a_window_that_is_too_small_is_named() {
        let report = best(Facts { partitions: Partitions::Lately(20), ..facts() });
        let horizon = report.horizon.unwrap();
        assert_eq!((horizon.window, horizon.parts_per_insert, horizon.needed()), (1_000, 20, 3_201));
        assert_eq!(report.level, Some(Level::ExactlyOnce), "it can be used");
        assert_eq!(report.findings[0].need, Need::Recommended);
        assert_eq!(
            report.findings[0].fix,
            "ALTER TABLE `d`.`t` MODIFY SETTING non_replicated_deduplication_window = 10000"
        );
        let replicated = Facts { engine: "ReplicatedMergeTree".into(), replicated_seconds: 100, ..facts() };
        let report = best(replicated);
        assert_eq!(report.findings[0].field, "replicated_deduplication_window_seconds");
        assert!(report.findings[0].fix.ends_with("= 3600"), "{:?}", report.findings);
        // Where nothing rests on it, it does not matter.
        let memory = best(Facts { engine: "Memory".into(), ..facts() });
        assert_eq!((memory.horizon, memory.level), (None, Some(Level::AtLeastOnce)));
        assert!(memory.promise().contains("twice"));
    }

    #[test]
    fn a_view_takes_no_rows() {
        let report = best(Facts { engine: "View".into(), ..facts() });
        assert_eq!(report.level, None);
        assert!(report.why_unfit().contains("cannot take rows"), "{}", report.why_unfit());
    }

    #[test]
    fn an_index_is_recommended() {
        let report = best(Facts { sorting_key: "a".into(), ..facts() });
        assert!(report.findings[0].fix.contains("ADD INDEX"));
        assert_eq!(
            best(Facts { sorting_key: "a".into(), indices: Some("a, _seq".into()), ..facts() }).findings,
            []
        );
    }

    #[test]
    fn an_insert_names_what_takes_values() {
        let mut columns = facts().columns;
        for (at, kind) in ["", "MATERIALIZED", "EPHEMERAL"].into_iter().enumerate() {
            columns.all[at].kind = kind.into();
        }
        assert_eq!(columns.list().unwrap(), "`_seq`, `a`");
    }
}
