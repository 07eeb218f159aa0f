//! What the store is told: where ClickHouse is, and what is asked of each table.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use holdfast_core::ports::store::Level;
use holdfast_core::row::TableName;
use thiserror::Error;
use url::Url;

use crate::horizon::Pace;
use crate::identifier::{self, IdentifierError};
use crate::settings;

/// A text that is shown nowhere.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Hides `text`.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "(none)" } else { "(hidden)" })
    }
}

/// How bodies and answers travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// LZ4: pays on a network.
    #[default]
    Lz4,
    /// As they are: pays on the same machine.
    None,
}

impl FromStr for Compression {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text {
            "lz4" => Ok(Self::Lz4),
            "none" => Ok(Self::None),
            _ => Err(ConfigError::Value {
                key: "compression",
                found: text.into(),
                allowed: "\"lz4\" or \"none\"",
            }),
        }
    }
}

/// Which level of delivery is asked of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Demand {
    /// The highest that the table allows.
    #[default]
    Best,
    /// This one: a table that cannot give it is unfit.
    Exactly(Level),
}

impl FromStr for Demand {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text {
            "best" => Ok(Self::Best),
            "exactly-once" => Ok(Self::Exactly(Level::ExactlyOnce)),
            "deduplicated" => Ok(Self::Exactly(Level::Deduplicated)),
            "at-least-once" => Ok(Self::Exactly(Level::AtLeastOnce)),
            _ => Err(ConfigError::Value {
                key: "delivery",
                found: text.into(),
                allowed: "\"best\", \"exactly-once\", \"deduplicated\" or \"at-least-once\"",
            }),
        }
    }
}

/// What becomes of a field that the table has no column for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownFields {
    /// The row is refused.
    #[default]
    Reject,
    /// The field is dropped.
    Ignore,
}

impl FromStr for UnknownFields {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text {
            "reject" => Ok(Self::Reject),
            "ignore" => Ok(Self::Ignore),
            _ => Err(ConfigError::Value {
                key: "unknown_fields",
                found: text.into(),
                allowed: "\"reject\" or \"ignore\"",
            }),
        }
    }
}

/// What is asked of one table, or of all that have no section of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableConfig {
    /// `database.table`, or `table` in [`Config::database`]; `None`: the name that the subject gives, as it is.
    /// Names with dots are written in backticks, see [`identifier::parse_target`].
    pub target: Option<String>,
    /// The level of delivery.
    pub delivery: Demand,
    /// The column for the row's stream sequence, used where the table has it.
    pub sequence_column: String,
    /// The column for the stream's creation time in nanoseconds since 1970, used where the table has it.
    pub stream_column: String,
    /// What becomes of fields without a column.
    pub unknown_fields: UnknownFields,
    /// ClickHouse settings that are sent with each insert. Those that Holdfast's promises rest on are refused.
    pub settings: BTreeMap<String, String>,
}

impl Default for TableConfig {
    fn default() -> Self {
        Self {
            target: None,
            delivery: Demand::Best,
            sequence_column: "_seq".to_owned(),
            stream_column: "_stream".to_owned(),
            unknown_fields: UnknownFields::Reject,
            settings: BTreeMap::new(),
        }
    }
}

/// Where ClickHouse is and how it is used. [`Store::new`](crate::Store::new) checks it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `http://host:port` or `https://host:port`, with a path if a proxy wants one. No user, no password, no query.
    pub url: String,
    /// The database of tables whose target names none.
    pub database: String,
    /// The user.
    pub user: String,
    /// Its password.
    pub password: Secret,
    /// How bodies and answers travel.
    pub compression: Compression,
    /// The longest that an insert or a read-back may take, from its turn to its answer.
    pub insert_timeout: Duration,
    /// The longest that a description or a [`ping`](crate::Store::ping) may take.
    pub query_timeout: Duration,
    /// The longest that a connection may take to come about, names and TLS included.
    pub connect_timeout: Duration,
    /// The longest that a row waits for its batch, and so how often a table is inserted into at least. Only
    /// [`Store::report`](crate::Store::report) uses it.
    pub batch_age: Duration,
    /// The longest between a look at the ledger and the insert that rests on it. Only
    /// [`Store::report`](crate::Store::report) uses it.
    pub intent_age: Duration,
    /// How many inserts may be under way in this process at once; as many read-backs and descriptions beside them.
    pub inserts_in_flight: usize,
    /// The longest payload that is taken for a row, in bytes.
    pub max_row: usize,
    /// For tables with no section of their own.
    pub defaults: TableConfig,
    /// The tables' own sections, by the name that the subject gives.
    pub tables: BTreeMap<TableName, TableConfig>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            url: "http://127.0.0.1:8123".to_owned(),
            database: "default".to_owned(),
            user: "default".to_owned(),
            password: Secret::default(),
            compression: Compression::default(),
            insert_timeout: Duration::from_mins(2),
            query_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
            batch_age: Duration::from_secs(1),
            intent_age: Duration::from_secs(10),
            inserts_in_flight: 8,
            max_row: 1 << 20,
            defaults: TableConfig::default(),
            tables: BTreeMap::new(),
        }
    }
}

/// What is wrong with a [`Config`]. No variant quotes a secret.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The URL does not parse. It is not quoted: it may hold a password.
    #[error("clickhouse.url is no URL ({0}); write http://host:8123 or https://host:8443")]
    Url(String),
    /// Two subjects' rows would go to one table.
    #[error(
        "tables.{one} and tables.{other} both go to {target}: a table has one writer, so give each its own"
    )]
    Shared {
        /// A table.
        one: String,
        /// Another.
        other: String,
        /// Where both go.
        target: String,
    },
    /// The URL holds what has keys of its own.
    #[error("clickhouse.url holds {part}; {instead}")]
    UrlPart {
        /// What it holds.
        part: &'static str,
        /// What to do instead.
        instead: &'static str,
    },
    /// A key's value is not one of those allowed.
    #[error("{key} is {found:?}; it must be {allowed}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// A header cannot carry the user's name or the password.
    #[error("clickhouse.{0} holds a control character, which HTTP cannot carry")]
    Unprintable(&'static str),
    /// A name of a table, database or column.
    #[error("{section}: {key}: {error}")]
    Name {
        /// The configuration's section.
        section: String,
        /// The key in it.
        key: &'static str,
        /// What is wrong.
        error: IdentifierError,
    },
    /// Both columns have one name.
    #[error("{section}: sequence_column and stream_column are both {name:?}; they need a column each")]
    SameColumn {
        /// The configuration's section.
        section: String,
        /// The name.
        name: String,
    },
    /// A setting that Holdfast sends itself.
    #[error("{section}: settings.{name} cannot be set: {reason}")]
    ReservedSetting {
        /// The configuration's section.
        section: String,
        /// The setting.
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// No certificates to check an https server by.
    #[error(
        "no root certificates were found to check {0} by; install the system's (ca-certificates) or set SSL_CERT_FILE"
    )]
    NoRoots(String),
}

/// A [`Config`] that was checked.
pub(crate) struct Checked {
    pub(crate) url: Url,
    pub(crate) config: Config,
    /// The tables with a section of their own, resolved.
    pub(crate) tables: BTreeMap<TableName, Resolved>,
}

/// What is asked of a table, and where its rows go.
#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    pub(crate) database: String,
    pub(crate) table: String,
    pub(crate) asked: TableConfig,
}

impl Checked {
    pub(crate) fn new(config: Config) -> Result<Self, ConfigError> {
        let url = check_url(&config.url)?;
        for (key, text) in [("user", config.user.as_str()), ("password", config.password.reveal())] {
            if text.chars().any(char::is_control) {
                return Err(ConfigError::Unprintable(key));
            }
        }
        let not_zero = |key, zero| {
            if zero {
                Err(ConfigError::Value { key, found: "0".into(), allowed: "more than zero" })
            } else {
                Ok(())
            }
        };
        not_zero("limits.inserts_in_flight", config.inserts_in_flight == 0)?;
        not_zero("limits.max_row", config.max_row == 0)?;
        not_zero("clickhouse.insert_timeout", config.insert_timeout.is_zero())?;
        not_zero("clickhouse.query_timeout", config.query_timeout.is_zero())?;
        not_zero("clickhouse.connect_timeout", config.connect_timeout.is_zero())?;
        let name = |section: &str, key, error| ConfigError::Name { section: section.to_owned(), key, error };
        identifier::quote(&config.database).map_err(|error| name("clickhouse", "database", error))?;
        check_table("defaults", &config.defaults)?;
        let mut tables: BTreeMap<TableName, Resolved> = BTreeMap::new();
        for (table, asked) in &config.tables {
            let section = format!("tables.{table}");
            check_table(&section, asked)?;
            let (database, name) = match &asked.target {
                Some(target) => identifier::parse_target(target, &config.database),
                None => identifier::quote(table.as_str())
                    .map(|_| (config.database.clone(), table.as_str().to_owned())),
            }
            .map_err(|error| name(&section, "table", error))?;
            if let Some((other, _)) = tables
                .iter()
                .find(|(_, known): &(_, &Resolved)| (&known.database, &known.table) == (&database, &name))
            {
                return Err(ConfigError::Shared {
                    one: other.to_string(),
                    other: table.to_string(),
                    target: name,
                });
            }
            tables.insert(table.clone(), Resolved { database, table: name, asked: asked.clone() });
        }
        Ok(Self { url, config, tables })
    }

    /// How inserts are paced.
    pub(crate) const fn pace(&self) -> Pace {
        let Config { intent_age, insert_timeout, batch_age, .. } = self.config;
        Pace { intent_age, insert_timeout, batch_age }
    }

    /// What is asked of `table`.
    pub(crate) fn asked(&self, table: &TableName) -> &TableConfig {
        self.tables.get(table).map_or(&self.config.defaults, |resolved| &resolved.asked)
    }

    /// Whose section names the table that `table` would go to by its own name, if one does.
    pub(crate) fn taken_by(&self, table: &TableName) -> Option<&TableName> {
        if self.tables.contains_key(table) {
            return None;
        }
        let target = self.target(table);
        self.tables
            .iter()
            .find(|(_, known)| (&*known.database, &*known.table) == target)
            .map(|(name, _)| name)
    }

    /// Where the rows of `table` go.
    pub(crate) fn target<'a>(&'a self, table: &'a TableName) -> (&'a str, &'a str) {
        match self.tables.get(table) {
            Some(resolved) => (&resolved.database, &resolved.table),
            None => (&self.config.database, table.as_str()),
        }
    }
}

fn check_url(text: &str) -> Result<Url, ConfigError> {
    let url = Url::parse(text).map_err(|error| ConfigError::Url(error.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(ConfigError::Value {
            key: "clickhouse.url's scheme",
            found: url.scheme().to_owned(),
            allowed: "http or https: Holdfast speaks ClickHouse's HTTP interface (port 8123, or 8443 with TLS)",
        });
    }
    let part = |part, instead| Err(ConfigError::UrlPart { part, instead });
    if !url.username().is_empty() || url.password().is_some() {
        return part("a user or a password", "use clickhouse.user and clickhouse.password");
    }
    if url.query().is_some() || url.fragment().is_some() {
        return part("a query or a fragment", "use clickhouse.database and the tables' settings");
    }
    Ok(url)
}

fn check_table(section: &str, asked: &TableConfig) -> Result<(), ConfigError> {
    for (key, column) in
        [("sequence_column", &asked.sequence_column), ("stream_column", &asked.stream_column)]
    {
        identifier::quote(column).map_err(|error| ConfigError::Name {
            section: section.to_owned(),
            key,
            error,
        })?;
    }
    if asked.sequence_column.eq_ignore_ascii_case(&asked.stream_column) {
        return Err(ConfigError::SameColumn {
            section: section.to_owned(),
            name: asked.stream_column.clone(),
        });
    }
    for name in asked.settings.keys() {
        if let Some(reason) = settings::reserved(name) {
            return Err(ConfigError::ReservedSetting {
                section: section.to_owned(),
                name: name.clone(),
                reason,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(change: impl FnOnce(&mut Config)) -> String {
        let mut config = Config { password: Secret::new("hunter2"), ..Config::default() };
        change(&mut config);
        let Err(error) = Checked::new(config) else { panic!("accepted") };
        assert!(
            !error.to_string().contains("hunter2") && !format!("{error:?}").contains("hunter2"),
            "{error}"
        );
        error.to_string()
    }

    #[test]
    fn the_default_is_accepted() {
        assert!(Checked::new(Config::default()).is_ok());
    }

    #[test]
    fn a_url_is_checked_and_never_quoted() {
        for url in ["tcp://localhost:9000", "clickhouse://x", "ftp://x"] {
            assert!(error(|c| c.url = url.into()).contains("http or https"), "{url}");
        }
        assert!(error(|c| c.url = "hunter2".into()).contains("is no URL"));
        assert!(error(|c| c.url = "http://u:hunter2@host:8123".into()).contains("use clickhouse.user"));
        assert!(error(|c| c.url = "http://host:8123?password=hunter2".into()).contains("a query"));
        assert!(error(|c| c.url = "http://u:hunter2@:8123".into()).contains("is no URL"));
    }

    #[test]
    fn a_password_is_shown_nowhere() {
        let config = Config { password: Secret::new("hunter2"), ..Config::default() };
        assert!(!format!("{config:?}").contains("hunter2"));
        assert!(error(|c| c.password = Secret::new("hunter2\n")).contains("clickhouse.password"));
    }

    #[test]
    fn tables_are_checked() {
        let with = |table: TableConfig| {
            error(|c| {
                c.tables.insert(TableName::new("clicks"), table);
            })
        };
        let base = TableConfig::default;
        assert!(
            with(TableConfig { target: Some("a.".into()), ..base() })
                .contains("tables.clicks: table: a name is empty")
        );
        assert!(with(TableConfig { sequence_column: String::new(), ..base() }).contains("sequence_column"));
        assert!(with(TableConfig { stream_column: "_SEQ".into(), ..base() }).contains("a column each"));
        for name in ["async_insert", "insert_deduplication_token", "password", "query", "param_x", "a&b", ""]
        {
            let settings = BTreeMap::from([(name.to_owned(), "1".to_owned())]);
            assert!(with(TableConfig { settings, ..base() }).contains("cannot be set"), "{name}");
        }
    }

    #[test]
    fn targets_are_resolved() {
        let table = TableConfig { target: Some("web.clicks".into()), ..TableConfig::default() };
        let tables = BTreeMap::from([(TableName::new("clicks"), table)]);
        let checked = Checked::new(Config { tables, ..Config::default() }).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(checked.target(&TableName::new("clicks")), ("web", "clicks"));
        assert_eq!(checked.target(&TableName::new("a.b")), ("default", "a.b"));
    }

    #[test]
    fn words() {
        assert_eq!("best".parse(), Ok(Demand::Best));
        assert_eq!("exactly-once".parse(), Ok(Demand::Exactly(Level::ExactlyOnce)));
        assert!("once".parse::<Demand>().unwrap_err().to_string().contains("\"deduplicated\""));
        assert_eq!("none".parse(), Ok(Compression::None));
        assert!("zip".parse::<Compression>().is_err());
        assert_eq!("ignore".parse(), Ok(UnknownFields::Ignore));
        assert!("skip".parse::<UnknownFields>().is_err());
    }
}
