//! Everything that one whole-system test needs: both servers, tables, topology, load, daemons.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::build::holdfast_binary;
use crate::clickhouse::{ClickHouse, Sql};
use crate::daemon::{self, Daemon};
use crate::dead_letters::{self, DeadLetter};
use crate::error::{Context, Error, Result};
use crate::guarded::{Ended, Guarded, Launch};
use crate::http_proxy::HttpProxy;
use crate::jetstream::JetStream;
use crate::nats::NatsServer;
use crate::verdict::{self, Verdict};
use crate::wait::TimedOut;
use crate::{rows, wait};

/// What a rig is made of.
#[derive(Clone, Debug)]
pub struct Options {
    /// Shards of the stream.
    pub shards: u32,
    /// Tables, named `t0`, `t1`, …
    pub tables: usize,
    /// Whether the tables exist from the beginning.
    pub create_tables: bool,
    /// Configuration beyond the servers' addresses.
    pub settings: Vec<(String, String)>,
}

impl Default for Options {
    fn default() -> Self {
        Self { shards: 8, tables: 16, create_tables: true, settings: Vec::new() }
    }
}

impl Options {
    /// Sets a configuration key.
    #[must_use]
    pub fn set(mut self, key: &str, value: impl std::fmt::Display) -> Self {
        self.settings.push((key.to_owned(), value.to_string()));
        self
    }
}

impl Options {
    /// Streams that the shards are spread over.
    fn streams(&self) -> u32 {
        let set = self.settings.iter().rev().find(|(key, _)| key == "topology.streams");
        set.and_then(|(_, value)| value.parse().ok()).unwrap_or(1)
    }

    fn mapping(&self, binary: &Path) -> Result<String> {
        if self.streams() == 1 {
            return Ok(String::new());
        }
        let mut command = Command::new(binary);
        command.args(["topology", "print", "--mapping"]);
        let shards = ("topology.shards".to_owned(), self.shards.to_string());
        for (key, value) in std::iter::once(&shards).chain(&self.settings) {
            command.args(["--set".to_owned(), format!("{key}={value}")]);
        }
        let output = command.stdin(Stdio::null()).output();
        let output = output.context(|| "cannot run holdfast topology print --mapping".to_owned())?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(Error::Command {
            command: "holdfast topology print --mapping".to_owned(),
            status: output.status.to_string(),
            said: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }
}

/// Both servers, and how to run `holdfast` against them. Dropping it ends everything.
#[derive(Debug)]
pub struct Rig {
    /// nats-server.
    pub nats: NatsServer,
    /// ClickHouse.
    pub clickhouse: ClickHouse,
    binary: PathBuf,
    options: Options,
    nats_url: Option<String>,
    clickhouse_url: Option<String>,
    folder: TempDir,
}

impl Rig {
    /// Starts both servers, creates the tables and the topology.
    ///
    /// # Errors
    /// When a server does not start or refuses.
    pub fn start(options: Options) -> Result<Self> {
        let rig = Self::bare(options)?;
        if rig.options.create_tables {
            for table in rig.tables() {
                rows::create_table(&rig.sql(), &table)?;
            }
        }
        rig.expect(&["topology", "apply"])?;
        Ok(rig)
    }

    /// Starts both servers and nothing else.
    ///
    /// # Errors
    /// When a server does not start.
    pub fn bare(options: Options) -> Result<Self> {
        let binary = holdfast_binary(true)?;
        let folder = tempfile::tempdir().context(|| "cannot make a folder".to_owned())?;
        let nats = NatsServer::builder().extra_config(options.mapping(&binary)?).start()?;
        let clickhouse = ClickHouse::start()?;
        Ok(Self { nats, clickhouse, binary, options, nats_url: None, clickhouse_url: None, folder })
    }

    /// What nats-server's configuration needs for several streams; nothing for one.
    ///
    /// # Errors
    /// When it cannot be asked for.
    pub fn mapping(&self) -> Result<String> {
        self.options.mapping(&self.binary)
    }

    /// The stream that holds a shard's rows.
    #[must_use]
    pub fn stream(&self, shard: u32) -> String {
        let name = self.setting("topology.stream").unwrap_or("INGEST");
        match self.options.streams() {
            1 => name.to_owned(),
            streams => format!("{name}-{}", shard % streams),
        }
    }

    /// Another build of `holdfast` for the commands that are run from now on.
    pub fn set_binary(&mut self, binary: PathBuf) {
        self.binary = binary;
    }

    /// Sets a configuration key for whatever is started from now on.
    pub fn set(&mut self, key: &str, value: impl std::fmt::Display) {
        self.options.settings.push((key.to_owned(), value.to_string()));
    }

    /// Lets daemons started from now on reach NATS through this address.
    pub fn nats_through(&mut self, addr: std::net::SocketAddr) {
        self.nats_url = Some(format!("nats://{addr}"));
    }

    /// Lets daemons started from now on reach ClickHouse through this address.
    pub fn clickhouse_through(&mut self, addr: std::net::SocketAddr) {
        self.clickhouse_url = Some(format!("http://{addr}"));
    }

    /// A proxy in front of ClickHouse, through which daemons started from now on reach it.
    ///
    /// # Errors
    /// When there is no port to listen on.
    pub fn clickhouse_proxy(&mut self) -> Result<HttpProxy> {
        let proxy = HttpProxy::start(self.clickhouse.addr())?;
        self.clickhouse_through(proxy.addr());
        Ok(proxy)
    }

    /// The tables whose rows go to this shard, as the stream shows it.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn tables_of(&self, shard: u32) -> Result<Vec<String>> {
        let ask = serde_json::json!({ "subjects_filter": format!("ingest.{shard}.>") });
        let info = self.jetstream().api("STREAM.INFO.INGEST", &ask)?;
        let subjects = info["state"]["subjects"].as_object().into_iter().flatten();
        Ok(subjects.filter_map(|(subject, _)| Some(subject.rsplit_once('.')?.1.to_owned())).collect())
    }

    /// The tables' names.
    #[must_use]
    pub fn tables(&self) -> Vec<String> {
        rows::table_names("t", self.options.tables)
    }

    /// SQL for the judge.
    #[must_use]
    pub fn sql(&self) -> Sql {
        self.clickhouse.sql().timeout(Duration::from_mins(2))
    }

    /// JetStream, for the judge and for rows that `holdfast publish` would not send.
    #[must_use]
    pub fn jetstream(&self) -> JetStream {
        self.nats.jetstream()
    }

    /// The value that a configuration key was set to last.
    fn setting(&self, key: &str) -> Option<&str> {
        self.options.settings.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// The dead letters' stream; `None` where there is none.
    fn dead_letter_stream(&self) -> Option<&str> {
        Some(self.setting("topology.dead_letters").unwrap_or("INGEST_DEAD")).filter(|name| !name.is_empty())
    }

    /// The dead letters, from the stream itself.
    ///
    /// # Errors
    /// When nats-server does not answer.
    pub fn dead_letters(&self) -> Result<Vec<DeadLetter>> {
        self.dead_letter_stream()
            .map_or(Ok(Vec::new()), |stream| dead_letters::read(&self.jetstream(), stream))
    }

    /// A folder of the rig's own.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The receipt of everything that [`Self::publish`] stored.
    #[must_use]
    pub fn receipt(&self) -> PathBuf {
        self.folder.path().join("receipt")
    }

    fn settings(&self, nats: &str, clickhouse: &str) -> Vec<(String, String)> {
        let mut settings = vec![
            ("nats.url".to_owned(), nats.to_owned()),
            ("clickhouse.url".to_owned(), clickhouse.to_owned()),
            ("clickhouse.compression".to_owned(), "none".to_owned()),
            ("topology.shards".to_owned(), self.options.shards.to_string()),
            ("node.listen".to_owned(), String::new()),
        ];
        settings.extend(self.options.settings.iter().cloned());
        settings
    }

    fn arguments(&self) -> Vec<OsString> {
        // Commands speak to the servers themselves; only daemons go through proxies.
        self.settings(&self.nats.url(), &self.clickhouse.url())
            .into_iter()
            .flat_map(|(key, value)| ["--set".into(), OsString::from(format!("{key}={value}"))])
            .collect()
    }

    /// How to start a daemon called `name`.
    #[must_use]
    pub fn daemon(&self, name: &str) -> daemon::Builder {
        let nats = self.nats_url.clone().unwrap_or_else(|| self.nats.url());
        let clickhouse = self.clickhouse_url.clone().unwrap_or_else(|| self.clickhouse.url());
        let log = self.folder.path().join(format!("{name}.log"));
        let builder =
            Daemon::builder(&self.binary, name, log).folder(self.folder.path()).set("node.id", name);
        self.settings(&nats, &clickhouse)
            .into_iter()
            .fold(builder, |builder, (key, value)| builder.set(&key, value))
    }

    /// Starts a daemon called `name`, and waits until it is ready for whatever is published from then on.
    ///
    /// # Errors
    /// When it ends by itself, or is not ready in half a minute.
    pub fn ready_daemon(&self, name: &str) -> Result<Daemon> {
        let mut daemon = self.daemon(name).start()?;
        let mut failed = None;
        wait::until_true(&format!("{name} to be ready"), Duration::from_secs(30), || {
            failed = daemon.must_run().err();
            failed.is_some() || daemon.log().is_ok_and(|log| log.contains("ready: every shard"))
        })?;
        failed.map_or(Ok(daemon), Err)
    }

    /// Runs a `holdfast` command and returns what it printed, whatever it ended with.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn holdfast(&self, arguments: &[&str]) -> Result<Output> {
        Command::new(&self.binary)
            .args(arguments)
            .args(self.arguments())
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .output()
            .context(|| format!("cannot run holdfast {}", arguments.join(" ")))
    }

    /// Runs a `holdfast` command that must succeed, and returns its standard output.
    ///
    /// # Errors
    /// With what it said, when it fails.
    pub fn expect(&self, arguments: &[&str]) -> Result<String> {
        let output = self.holdfast(arguments)?;
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(out);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(Error::Command {
            command: format!("holdfast {}", arguments.join(" ")),
            status: output.status.to_string(),
            said: format!("{out}{said}"),
        })
    }

    /// Starts publishing `count` rows of `bytes` each, to all tables in turn, with their receipt; the counter
    /// of each table starts at `first`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn publish(&self, first: u64, count: u64, bytes: usize, rate: Option<u64>) -> Result<Publishing> {
        let mut arguments: Vec<OsString> = vec!["publish".into()];
        for table in self.tables() {
            arguments.extend(["--table".into(), table.into()]);
        }
        let mut option = |name: &str, value: String| arguments.extend([name.into(), value.into()]);
        option("--generate", bytes.to_string());
        option("--count", count.to_string());
        option("--first", first.to_string());
        if let Some(rate) = rate {
            option("--rate", rate.to_string());
        }
        // With replicas that is refused: a server of a cluster can stumble over it.
        if self.setting("topology.replicas").is_none_or(|replicas| replicas == "1") {
            arguments.push("--sole-publisher".into());
        }
        arguments.extend(["--receipt".into(), self.receipt().into()]);
        arguments.extend(self.arguments());
        let process = Guarded::start(&Launch {
            name: "holdfast publish".into(),
            program: self.binary.clone(),
            arguments,
            environment: Vec::new(),
            folder: Some(self.folder.path().to_owned()),
            log: self.folder.path().join("publish.log"),
        })?;
        Ok(Publishing(process))
    }

    /// Publishes rows to tables as they are given, of any bytes whatever, with their receipt, and gives the
    /// sequence of each.
    ///
    /// # Errors
    /// When one is not stored.
    pub fn publish_rows<'a, P: AsRef<[u8]>>(
        &self,
        rows: impl IntoIterator<Item = (&'a str, P)>,
    ) -> Result<Vec<u64>> {
        let mut tables = Vec::new();
        let rows = rows.into_iter().map(|(table, payload)| {
            tables.push(table);
            (format!("ingest.{table}"), payload)
        });
        let stored = self.jetstream().publish_all(rows)?;
        let stream = self.setting("topology.stream").unwrap_or("INGEST");
        let created = self.jetstream().created(stream)?;
        let mut text = format!("# holdfast receipt 1 {created} {stream}\n");
        for (seq, table) in stored.iter().zip(tables) {
            let _ = writeln!(text, "{seq}\t{table}");
        }
        let path = self.receipt();
        let append = || File::options().create(true).append(true).open(&path)?.write_all(text.as_bytes());
        append().context(|| format!("cannot write {}", path.display()))?;
        Ok(stored)
    }

    /// Rows in all tables.
    ///
    /// # Errors
    /// When ClickHouse does not answer.
    pub fn stored(&self) -> Result<u64> {
        let counts: Vec<_> = self
            .tables()
            .iter()
            .map(|table| format!("(SELECT count() FROM {})", rows::identifier(table)))
            .collect();
        let answer = self.sql().query(&format!("SELECT {}", counts.join(" + ")))?;
        answer.trim().parse().map_err(|_| Error::Answer { what: "a count of rows", answer })
    }

    /// Rows in all tables and in the dead letters.
    ///
    /// # Errors
    /// When a server does not answer.
    pub fn settled(&self) -> Result<u64> {
        let parked = self.dead_letter_stream().map_or(Ok(0), |stream| self.jetstream().messages(stream))?;
        Ok(self.stored()? + parked)
    }

    /// Waits until `expected` rows are in the tables or the dead letters. `seen` is told how many there are as
    /// they come; an error from it ends the wait.
    ///
    /// # Errors
    /// When they are not there in time.
    pub fn landed(
        &self,
        expected: u64,
        within: Duration,
        mut seen: impl FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let mut failed = None;
        let mut last = 0;
        let outcome = wait::until_true(&format!("{expected} rows in the tables"), within, || {
            // A server that is being restarted does not answer.
            let Ok(settled) = self.settled() else { return false };
            last = settled;
            failed = seen(settled).err();
            settled >= expected || failed.is_some()
        });
        outcome.map_err(|late| TimedOut { what: format!("{}; there are {last}", late.what), ..late })?;
        failed.map_or(Ok(()), Err)
    }

    /// Judges all tables, to which `published` rows in all were published in turn, by plain SQL and by what the
    /// stream of dead letters holds.
    ///
    /// # Errors
    /// When a server does not answer.
    pub fn judge(&self, published: u64) -> Result<Verdict> {
        let tables = self.tables();
        let mut parked: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for letter in self.dead_letters()? {
            // One without a counter was never generated: unexpected.
            parked.entry(letter.table.clone()).or_default().push(letter.counter().unwrap_or(u64::MAX));
        }
        let each = published / tables.len() as u64;
        let more = published % tables.len() as u64;
        tables
            .iter()
            .zip(0_u64..)
            .map(|(table, place)| {
                let dead = parked.get(table).map_or(&[][..], Vec::as_slice);
                verdict::judge_with(&self.sql(), table, each + u64::from(place < more), dead)
            })
            .sum()
    }

    /// Lets `holdfast verify` prove each table against the receipt; the JSON of those that it does not
    /// prove.
    ///
    /// # Errors
    /// When the command cannot be run.
    pub fn unproven(&self) -> Result<Vec<String>> {
        let receipt = self.receipt();
        let receipt = receipt.to_string_lossy();
        let mut wrong = Vec::new();
        for table in self.tables() {
            let output = self.holdfast(&["verify", "--table", &table, "--receipt", &receipt, "--json"])?;
            if !output.status.success() {
                let said = [output.stdout, output.stderr].concat();
                wrong.push(String::from_utf8_lossy(&said).into_owned());
            }
        }
        Ok(wrong)
    }
}

/// Waits until `expected` rows are in the tables or the dead letters, while the daemon runs.
///
/// # Panics
/// When they are not there in two minutes, or the daemon ends; with the end of its log.
#[track_caller]
pub fn assert_landed(rig: &Rig, daemon: &mut Daemon, expected: u64) {
    if let Err(error) = rig.landed(expected, Duration::from_mins(2), |_| daemon.must_run()) {
        panic!("{error}\n{}", daemon.log_tail());
    }
}

/// Stops the daemon with SIGTERM.
///
/// # Panics
/// When that is no clean end; with the end of its log.
#[track_caller]
pub fn assert_stops(daemon: &mut Daemon) {
    match daemon.stop(Duration::from_secs(26)) {
        Ok(ended) if ended.is_success() => {}
        Ok(ended) => panic!("{ended}\n{}", daemon.log_tail()),
        Err(error) => panic!("{error}\n{}", daemon.log_tail()),
    }
}

/// Panics unless every one of `published` rows is there once and in order, by plain SQL and by
/// `holdfast verify`.
///
/// # Panics
/// With what both say, when it is not so.
#[track_caller]
pub fn assert_whole(rig: &Rig, published: u64) {
    match (rig.judge(published), rig.unproven()) {
        (Ok(verdict), Ok(unproven)) if verdict.ok() && unproven.is_empty() => {}
        (Ok(verdict), Ok(unproven)) => panic!("{verdict}\n{}", unproven.join("\n")),
        (Err(error), _) | (_, Err(error)) => panic!("{error}"),
    }
}

/// Rows being published.
#[derive(Debug)]
pub struct Publishing(Guarded);

impl Publishing {
    /// Whether it has ended.
    ///
    /// # Errors
    /// When it ended without having stored every row.
    pub fn is_done(&mut self) -> Result<bool> {
        match self.0.ended()? {
            None => Ok(false),
            Some(ended) if ended.is_success() => Ok(true),
            Some(_) => self.0.must_run().map(|()| false),
        }
    }

    /// Waits until every row is stored in the stream.
    ///
    /// # Errors
    /// When it fails, or takes longer.
    pub fn finish(mut self, within: Duration) -> Result<()> {
        let ended: Ended = self.0.wait(within)?;
        if ended.is_success() { Ok(()) } else { self.0.must_run() }
    }
}
