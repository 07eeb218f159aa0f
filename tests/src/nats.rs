//! A nats-server of one's own, or a cluster of them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::clickhouse::own_folder;
use crate::error::{Context, Error, Result};
use crate::fetch;
use crate::guarded::{Ended, Guarded, Launch};
use crate::jetstream::JetStream;
use crate::port;
use crate::wait;

/// How long a start may take, a cluster's election included.
const READY_WITHIN: Duration = Duration::from_mins(1);
const STOP_WITHIN: Duration = Duration::from_secs(30);
/// Tries at a free port, where none was asked for.
const TRIES: u32 = 5;

/// How a nats-server is started.
#[derive(Debug, Clone, Default)]
pub struct Builder {
    folder: Option<PathBuf>,
    port: Option<u16>,
    name: Option<String>,
    extra: String,
    login: Option<(String, String)>,
}

impl Builder {
    /// Keeps its store here, and leaves it there. Otherwise in a temporary folder that goes with it.
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

    /// Its name in a cluster. Otherwise one of its own making.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// More configuration, in nats-server's language, added to the file.
    #[must_use]
    pub fn extra_config(mut self, text: impl Into<String>) -> Self {
        self.extra = text.into();
        self
    }

    /// A user that may ask about JetStream. Needed only when the configuration asks for a login: without one,
    /// a server that does is taken to be ready when it greets.
    #[must_use]
    pub fn login(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.login = Some((user.into(), password.into()));
        self
    }

    /// Starts it, and returns when JetStream answers.
    ///
    /// # Errors
    /// When it cannot be found, started, or does not answer in time.
    pub fn start(self) -> Result<NatsServer> {
        let asked = self.port;
        let mut server = self.prepare()?;
        for left in (0..TRIES).rev() {
            match server.restart() {
                Ok(()) => return Ok(server),
                Err(Error::Ended { tail, .. }) if asked.is_none() && left > 0 && tail.contains("in use") => {
                    server.port = port::free()?;
                }
                Err(error) => return Err(error),
            }
        }
        unreachable!("the last try returns")
    }

    /// Everything but the start.
    fn prepare(self) -> Result<NatsServer> {
        let binary = fetch::nats_server()?.path;
        let (folder, temporary) = own_folder(self.folder, "holdfast-nats-")?;
        let port = self.port.map_or_else(port::free, Ok)?;
        let name = self.name.unwrap_or_else(|| format!("testbed-{}-{port}", std::process::id()));
        Ok(NatsServer {
            binary,
            name,
            port,
            extra: self.extra,
            login: self.login,
            process: None,
            folder,
            _temporary: temporary,
        })
    }
}

/// A nats-server with JetStream on the loopback interface. Dropping it kills it.
#[derive(Debug)]
pub struct NatsServer {
    binary: PathBuf,
    name: String,
    port: u16,
    extra: String,
    login: Option<(String, String)>,
    // Before the folder, so that it is gone before its folder is.
    process: Option<Guarded>,
    folder: PathBuf,
    _temporary: Option<TempDir>,
}

impl NatsServer {
    /// Starts one on a free port, with a temporary store.
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
        format!("nats://{}", self.addr())
    }

    /// Its address.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))
    }

    /// A client for it, which can be used while the server is killed and restarted.
    #[must_use]
    pub fn jetstream(&self) -> JetStream {
        JetStream::new(self.addr())
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its process id; `None` when it does not run.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Guarded::pid)
    }

    /// Its log.
    #[must_use]
    pub fn log_path(&self) -> PathBuf {
        self.folder.join("nats-server.log")
    }

    /// The folder with its store, its configuration and its log.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Other extra configuration, from the next [`restart`](Self::restart) or [`reload`](Self::reload) on.
    pub fn set_extra_config(&mut self, text: impl Into<String>) {
        self.extra = text.into();
    }

    /// Another login for asking whether JetStream is ready.
    pub fn set_login(&mut self, user: impl Into<String>, password: impl Into<String>) {
        self.login = Some((user.into(), password.into()));
    }

    /// Writes the configuration anew and has the server read it (SIGHUP).
    ///
    /// # Errors
    /// When the file cannot be written or the signal cannot be sent. The server itself says in its log only
    /// what it could not take over.
    pub fn reload(&mut self) -> Result<()> {
        self.write_config()?;
        self.signal(Signal::SIGHUP)
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

    /// Starts it again on the same store and the same port, and returns when JetStream answers. Kills it first
    /// if it runs.
    ///
    /// # Errors
    /// When it cannot be started or does not answer in time.
    pub fn restart(&mut self) -> Result<()> {
        self.launch()?;
        self.wait_until_ready()
    }

    /// Starts it and does not wait: a cluster's nodes are ready only together.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn launch(&mut self) -> Result<()> {
        self.kill()?;
        self.write_config()?;
        let launch = Launch {
            name: format!("nats-server {}", self.name),
            program: self.binary.clone(),
            arguments: vec!["--config".into(), self.config_path().into()],
            environment: Vec::new(),
            folder: None,
            log: self.log_path(),
        };
        self.process = Some(Guarded::start(&launch)?);
        Ok(())
    }

    /// Waits until JetStream answers.
    ///
    /// # Errors
    /// When the server ends, or JetStream does not answer in time.
    pub fn wait_until_ready(&mut self) -> Result<()> {
        let what = format!("JetStream on port {} (log {})", self.port, self.log_path().display());
        let (addr, name, login) = (self.addr(), self.name.clone(), self.login.clone());
        wait::until(&what, READY_WITHIN, || match self.process.as_mut().map_or(Ok(()), Guarded::must_run) {
            Err(error) => Some(Err(error)),
            Ok(()) => probe(addr, &name, login.as_ref()).is_some_and(|ready| ready).then_some(Ok(())),
        })?
    }

    fn config_path(&self) -> PathBuf {
        self.folder.join("nats-server.conf")
    }

    fn write_config(&self) -> Result<()> {
        let store = self.folder.join("store");
        let text = format!(
            "server_name: {name}\n\
             host: \"127.0.0.1\"\n\
             port: {port}\n\
             jetstream {{ store_dir: {store}, max_memory_store: 1GB, max_file_store: 50GB }}\n\
             {extra}\n",
            name = quoted(&self.name),
            port = self.port,
            store = quoted(&store.to_string_lossy()),
            extra = self.extra,
        );
        let path = self.config_path();
        std::fs::write(&path, text).context(|| format!("cannot write {}", path.display()))
    }
}

/// A string in the configuration's language.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Asks a server about its JetStream: in a cluster it answers only once there is a leader. `None` when there
/// is no sensible answer, which is what a server gives that is not up yet.
fn probe(addr: SocketAddr, name: &str, login: Option<&(String, String)>) -> Option<bool> {
    const PATIENCE: Duration = Duration::from_secs(2);
    let stream = TcpStream::connect_timeout(&addr, PATIENCE).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let mut lines = BufReader::new(stream);
    let mut line = String::new();
    lines.read_line(&mut line).ok()?;
    let info: serde_json::Value = serde_json::from_str(line.strip_prefix("INFO ")?).ok()?;
    // Somebody else's server may have taken the port.
    if info["server_name"] != name || info["jetstream"] != true {
        return Some(false);
    }
    let mut connect =
        serde_json::json!({ "verbose": false, "pedantic": false, "lang": "testbed", "version": "1" });
    match login {
        Some((user, password)) => {
            connect["user"] = user.as_str().into();
            connect["pass"] = password.as_str().into();
        }
        None if info["auth_required"] == true => return Some(true),
        None => {}
    }
    if info["tls_required"] == true {
        return Some(true);
    }
    let ask =
        format!("CONNECT {connect}\r\nSUB _TESTBED.ready 1\r\nPUB $JS.API.INFO _TESTBED.ready 0\r\n\r\n");
    lines.get_mut().write_all(ask.as_bytes()).ok()?;
    loop {
        line.clear();
        lines.read_line(&mut line).ok()?;
        let word = line.split_ascii_whitespace().next()?;
        if word == "PING" {
            lines.get_mut().write_all(b"PONG\r\n").ok()?;
        } else if word == "MSG" {
            let size: usize = line.split_ascii_whitespace().next_back()?.parse().ok()?;
            let mut payload = Vec::new();
            lines.take(u64::try_from(size).ok()?).read_to_end(&mut payload).ok()?;
            let answer: serde_json::Value = serde_json::from_slice(&payload).ok()?;
            return Some(answer.get("error").is_none());
        } else if word == "-ERR" {
            return Some(false);
        }
    }
}

/// Nodes that form one cluster. Each can be killed, stopped and restarted by itself.
#[derive(Debug)]
pub struct NatsCluster {
    /// The nodes.
    pub nodes: Vec<NatsServer>,
}

impl NatsCluster {
    /// Starts a cluster of this many nodes, and returns when JetStream answers on each.
    ///
    /// # Errors
    /// When a node cannot be found, started, or does not answer in time.
    pub fn start(nodes: usize) -> Result<Self> {
        Self::start_with(nodes, "")
    }

    /// The same with more configuration on each node.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(nodes: usize, extra: &str) -> Result<Self> {
        let mut left = TRIES;
        loop {
            left -= 1;
            match Self::try_start(nodes, extra) {
                Err(Error::Ended { tail, .. }) if left > 0 && tail.contains("in use") => {}
                outcome => return outcome,
            }
        }
    }

    fn try_start(nodes: usize, more: &str) -> Result<Self> {
        let mut routes = Vec::with_capacity(nodes);
        while routes.len() < nodes {
            let port = port::free()?;
            if !routes.contains(&port) {
                routes.push(port);
            }
        }
        let list: Vec<_> = routes.iter().map(|port| format!("\"nats://127.0.0.1:{port}\"")).collect();
        let list = list.join(", ");
        let name = format!("testbed-{}-{}", std::process::id(), routes.first().copied().unwrap_or_default());
        let mut cluster = Self { nodes: Vec::with_capacity(nodes) };
        for (number, port) in routes.iter().enumerate() {
            let extra = format!(
                "cluster {{ name: \"{name}\", host: \"127.0.0.1\", port: {port}, routes: [{list}] }}\n{more}"
            );
            let mut node =
                NatsServer::builder().name(format!("{name}-{number}")).extra_config(extra).prepare()?;
            node.launch()?;
            cluster.nodes.push(node);
        }
        for node in &mut cluster.nodes {
            node.wait_until_ready()?;
        }
        Ok(cluster)
    }

    /// The URLs of all nodes, comma-separated.
    #[must_use]
    pub fn url(&self) -> String {
        self.nodes.iter().map(NatsServer::url).collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_the_configuration_are_quoted() {
        assert_eq!(quoted(r#"a "b" \c"#), r#""a \"b\" \\c""#);
    }

    #[test]
    fn nobody_there_is_no_answer() {
        let port = port::free().unwrap();
        assert_eq!(probe(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), "x", None), None);
    }
}
