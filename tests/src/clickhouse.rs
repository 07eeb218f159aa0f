//! A ClickHouse of one's own, and SQL against it.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::build;
use crate::error::{Context, Error, Result};
use crate::fetch;
use crate::guarded::{Ended, Guarded, Launch};
use crate::port;
use crate::wait;

/// How long a start may take: a second usually, more on a machine that is busy with other tests.
const READY_WITHIN: Duration = Duration::from_mins(1);
const STOP_WITHIN: Duration = Duration::from_secs(20);
/// Tries at a free port, where none was asked for.
const TRIES: u32 = 5;

/// How a ClickHouse is started.
#[derive(Debug, Clone, Default)]
pub struct Builder {
    folder: Option<PathBuf>,
    port: Option<u16>,
    arguments: Vec<String>,
}

impl Builder {
    /// Keeps its data here, and leaves it there. Otherwise in a temporary folder that goes with it.
    #[must_use]
    pub fn folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Listens on this port. Otherwise on a free one.
    #[must_use]
    pub fn port(mut self, port: u16) -> Self {
        self.port = Some(port);
        self
    }

    /// One more argument, in clickhouse-local's words, such as `--max_concurrent_queries=4`.
    #[must_use]
    pub fn argument(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Starts it, and returns when it answers.
    ///
    /// # Errors
    /// When it cannot be found, started, or does not answer in time.
    pub fn start(self) -> Result<ClickHouse> {
        let library = fetch::libchdb()?.path;
        let (folder, temporary) = own_folder(self.folder, "holdfast-clickhouse-")?;
        for left in (0..TRIES).rev() {
            let port = self.port.map_or_else(port::free, Ok)?;
            let mut server = ClickHouse {
                library: library.clone(),
                arguments: self.arguments.clone(),
                port,
                process: None,
                folder: folder.clone(),
                temporary: None,
            };
            match server.restart() {
                Ok(()) => {
                    server.temporary = temporary;
                    return Ok(server);
                }
                Err(Error::Ended { tail, .. }) if self.port.is_none() && left > 0 && lost_port(&tail) => {}
                Err(error) => return Err(error),
            }
        }
        unreachable!("the last try returns")
    }
}

/// Whether a server's log says that somebody else took its port.
fn lost_port(log: &str) -> bool {
    log.lines().rev().take(5).any(|line| line.contains("in use"))
}

/// The folder asked for, or a temporary one.
pub(crate) fn own_folder(asked: Option<PathBuf>, prefix: &str) -> Result<(PathBuf, Option<TempDir>)> {
    if let Some(folder) = asked {
        std::fs::create_dir_all(&folder).context(|| format!("cannot create {}", folder.display()))?;
        let folder = std::path::absolute(&folder).context(|| format!("cannot find {}", folder.display()))?;
        return Ok((folder, None));
    }
    let temporary = tempfile::Builder::new()
        .prefix(prefix)
        .tempdir()
        .context(|| "cannot create a temporary folder".to_owned())?;
    Ok((temporary.path().to_owned(), Some(temporary)))
}

/// A ClickHouse on the loopback interface. Dropping it kills it.
#[derive(Debug)]
pub struct ClickHouse {
    library: PathBuf,
    arguments: Vec<String>,
    port: u16,
    // Before the folder, so that it is gone before its folder is.
    process: Option<Guarded>,
    folder: PathBuf,
    temporary: Option<TempDir>,
}

impl ClickHouse {
    /// Starts one on a free port, with a temporary data folder.
    ///
    /// # Errors
    /// When it cannot be found, started, or does not answer in time.
    pub fn start() -> Result<Self> {
        Builder::default().start()
    }

    /// How to start one otherwise.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.addr())
    }

    /// Its address.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))
    }

    /// Its process id; `None` when it does not run.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Guarded::pid)
    }

    /// Its log.
    #[must_use]
    pub fn log_path(&self) -> PathBuf {
        self.folder.join("chserve.log")
    }

    /// The folder with its data and its log.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A client for it, which can be used from any thread while the server is killed and restarted.
    #[must_use]
    pub fn sql(&self) -> Sql {
        Sql::new(self.addr())
    }

    /// Runs SQL and gives the answer's text, without the last line's end.
    ///
    /// # Errors
    /// [`Error::Query`] with ClickHouse's words when it refuses, [`Error::Io`] when it does not answer.
    pub fn query(&self, sql: &str) -> Result<String> {
        self.sql().query(sql)
    }

    /// An error with the end of its log when it has ended by itself.
    ///
    /// # Errors
    /// [`Error::Ended`] when it has.
    pub fn must_run(&mut self) -> Result<()> {
        self.process.as_mut().map_or(Ok(()), Guarded::must_run)
    }

    /// SIGKILL, if it runs.
    ///
    /// # Errors
    /// When it does not go.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            process.kill()?;
        }
        Ok(())
    }

    /// SIGTERM, if it runs; returns when it is gone.
    ///
    /// # Errors
    /// When it had to be killed.
    pub fn stop(&mut self) -> Result<Option<Ended>> {
        self.process.take().map(|mut process| process.stop(STOP_WITHIN)).transpose()
    }

    /// SIGSTOP.
    ///
    /// # Errors
    /// When the signal cannot be sent.
    pub fn pause(&mut self) -> Result<()> {
        self.process.as_mut().map_or(Ok(()), Guarded::pause)
    }

    /// SIGCONT.
    ///
    /// # Errors
    /// When the signal cannot be sent.
    pub fn resume(&mut self) -> Result<()> {
        self.process.as_mut().map_or(Ok(()), Guarded::resume)
    }

    /// Any signal.
    ///
    /// # Errors
    /// When the signal cannot be sent.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        self.process.as_mut().map_or(Ok(()), |process| process.signal(signal))
    }

    /// Starts it again on the same data and the same port, and returns when it answers. Kills it first if it
    /// runs.
    ///
    /// # Errors
    /// When it cannot be started or does not answer in time.
    pub fn restart(&mut self) -> Result<()> {
        self.kill()?;
        let data = self.folder.join("data");
        let mut arguments: Vec<OsString> = vec![self.library.clone().into(), data.into()];
        arguments.push(self.port.to_string().into());
        arguments.extend(self.arguments.iter().map(OsString::from));
        let launch = Launch {
            name: "ClickHouse".to_owned(),
            program: build::chserve_binary()?,
            arguments,
            // Its standard input is not ours: the guard ends it.
            environment: vec![("CHSERVE_STDIN".to_owned(), None)],
            folder: None,
            log: self.log_path(),
        };
        let mut process = Guarded::start(&launch)?;
        let sql = self.sql().timeout(Duration::from_secs(5));
        let what = format!("ClickHouse on port {} (log {})", self.port, self.log_path().display());
        wait::until(&what, READY_WITHIN, || match process.must_run() {
            Err(error) => Some(Err(error)),
            Ok(()) => self.is_ours(&sql).then_some(Ok(())),
        })??;
        self.process = Some(process);
        Ok(())
    }

    /// Makes the renames of some of the next parts of a table's partition fail, those with the numbers `which`
    /// counted from the next one: the insert is answered 500 with code 1001, and every retry under its token
    /// with success, though its rows are not there.
    ///
    /// Every part of a table takes a number, whatever its partition, and so does an insert that is dropped as a
    /// repeat.
    ///
    /// # Errors
    /// When ClickHouse does not answer or the file system refuses.
    pub fn obstruct(&self, table: &str, partition: &str, which: Range<u64>) -> Result<Obstacle> {
        let folder = self.query(&format!(
            "SELECT data_paths[1] FROM system.tables WHERE database = 'default' AND name = '{table}'"
        ))?;
        let last = self.query(&format!(
            "SELECT max(max_block_number) FROM system.parts WHERE database = 'default' AND table = '{table}'"
        ))?;
        let next = last.trim().parse::<u64>().unwrap_or_default() + 1;
        let mut obstacle = Obstacle { files: Vec::new() };
        for number in which {
            // A folder in the way is replaced, a file is not.
            let number = next + number;
            let file = Path::new(folder.trim()).join(format!("{partition}_{number}_{number}_0"));
            match std::fs::File::create_new(&file) {
                Ok(_) => obstacle.files.push(file),
                // The part itself came first.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).context(|| format!("cannot create {}", file.display())),
            }
        }
        Ok(obstacle)
    }

    /// Whether what answers on the port is this server: it must have this data folder.
    fn is_ours(&self, sql: &Sql) -> bool {
        sql.ping()
            && sql
                .query("SELECT path FROM system.disks WHERE name = 'default'")
                .is_ok_and(|path| Path::new(&path).starts_with(&self.folder))
    }
}

/// Something where parts should go. Dropping it takes it away.
#[derive(Debug)]
pub struct Obstacle {
    files: Vec<PathBuf>,
}

impl Drop for Obstacle {
    fn drop(&mut self) {
        for file in &self.files {
            // A part that came first, or later, is a folder and stays.
            let _ = std::fs::remove_file(file);
        }
    }
}

/// A client for SQL over HTTP: one connection a query, answers as text.
#[derive(Debug, Clone, Copy)]
pub struct Sql {
    addr: SocketAddr,
    timeout: Duration,
}

/// Errors quote rows and whole queries: cut them.
const LONGEST_ERROR: usize = 1000;

impl Sql {
    /// A client for the server at this address.
    #[must_use]
    pub fn new(addr: SocketAddr) -> Self {
        Self { addr, timeout: Duration::from_mins(2) }
    }

    /// How long a connection may be silent; two minutes if not given.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Whether the server answers at all.
    #[must_use]
    pub fn ping(&self) -> bool {
        self.request("GET /ping", b"").is_ok_and(|answer| answer.status == 200)
    }

    /// Runs SQL and gives the answer's text, without the last line's end.
    ///
    /// # Errors
    /// [`Error::Query`] with ClickHouse's words when it refuses, [`Error::Io`] when it does not answer.
    pub fn query(&self, sql: &str) -> Result<String> {
        self.query_with(sql, &[])
    }

    /// [`query`](Self::query) with settings, such as `("insert_deduplication_token", "t1")`.
    ///
    /// # Errors
    /// As [`query`](Self::query).
    pub fn query_with(&self, sql: &str, settings: &[(&str, &str)]) -> Result<String> {
        // Otherwise a query that fails midway has answered 200 already.
        let mut target = "POST /?wait_end_of_query=1".to_owned();
        for (name, value) in settings {
            target.push('&');
            target.push_str(&escape(name));
            target.push('=');
            target.push_str(&escape(value));
        }
        let answer = self.request(&target, sql.as_bytes())?;
        let mut text = answer.text;
        if answer.status == 200 {
            if text.ends_with('\n') {
                text.pop();
            }
            return Ok(text);
        }
        let code = text.strip_prefix("Code: ").and_then(|rest| rest.split('.').next()?.parse().ok());
        if let Some((cut, _)) = text.char_indices().nth(LONGEST_ERROR) {
            text.truncate(cut);
        }
        Err(Error::Query { status: answer.status, code, text: text.trim().to_owned() })
    }

    /// HTTP/1.0: the answer ends with the connection, so neither lengths nor chunks need reading.
    fn request(&self, target: &str, body: &[u8]) -> Result<Answer> {
        let exchange = || -> io::Result<Vec<u8>> {
            let mut stream = TcpStream::connect_timeout(&self.addr, self.timeout)?;
            stream.set_read_timeout(Some(self.timeout))?;
            stream.set_write_timeout(Some(self.timeout))?;
            let head = format!("{target} HTTP/1.0\r\nContent-Length: {}\r\n\r\n", body.len());
            stream.write_all(head.as_bytes())?;
            stream.write_all(body)?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer)?;
            Ok(answer)
        };
        let bytes = exchange().context(|| format!("ClickHouse at {}", self.addr))?;
        parse(&bytes).ok_or_else(|| Error::Answer {
            what: "ClickHouse",
            answer: String::from_utf8_lossy(&bytes[..bytes.len().min(100)]).into_owned(),
        })
    }
}

struct Answer {
    status: u16,
    text: String,
}

fn parse(bytes: &[u8]) -> Option<Answer> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&bytes[..end]).ok()?;
    let status = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, text: String::from_utf8_lossy(&bytes[end + 4..]).into_owned() })
}

/// Percent-encodes all but the plainest characters.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.') {
            escaped.push(char::from(byte));
        } else {
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers() {
        let answer = parse(b"HTTP/1.0 404 Not Found\r\nX-A: b\r\n\r\nCode: 60. DB::Exception\n").unwrap();
        assert_eq!((answer.status, answer.text.as_str()), (404, "Code: 60. DB::Exception\n"));
        assert!(parse(b"HTTP/1.0 200 OK\r\n").is_none());
        assert!(parse(b"SSH-2.0\r\n\r\n").is_none());
    }

    #[test]
    fn settings_are_escaped() {
        assert_eq!(escape("a_b-1.2 &/ü"), "a_b-1.2%20%26%2F%C3%BC");
    }
}
