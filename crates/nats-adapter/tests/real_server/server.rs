//! Starting a nats-server, and what the tests do with it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use holdfast_core::ports::Attempt;
use holdfast_core::ports::Failure;
use holdfast_core::ports::delivery::{
    Command as Order, Inbox, InspectError, Inspection, PinId, Port as _, Pull, PullEnd, Reply, Rows,
};
use holdfast_core::row::{Row, Seq, ShardId, Unfit, Verdict};
use holdfast_nats::Connection;
use holdfast_nats::connect::Options;
use holdfast_nats::delivery::{Delivery, Screen};
use holdfast_nats::publish::{self, Publisher};
use holdfast_nats::topology::{Resharding, Topology};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;

/// The nats-server binary.
fn binary() -> PathBuf {
    if let Some(named) = std::env::var_os("HOLDFAST_NATS_SERVER") {
        return named.into();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    if let Some(found) = std::env::split_paths(&path).map(|dir| dir.join("nats-server")).find(|p| p.is_file())
    {
        return found;
    }
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache");
    find(&cache, 6).unwrap_or_else(|| {
        panic!(
            "no nats-server: set HOLDFAST_NATS_SERVER to its path, put it on the PATH, or run `cargo xtask servers`"
        )
    })
}

fn find(dir: &Path, depth: u32) -> Option<PathBuf> {
    let entries: Vec<_> = std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).collect();
    entries.iter().find(|path| path.ends_with("nats-server") && path.is_file()).cloned().or_else(|| {
        (depth > 0)
            .then(|| entries.iter().filter(|path| path.is_dir()).find_map(|path| find(path, depth - 1)))
            .flatten()
    })
}

/// A running nats-server; killed when dropped.
pub(crate) struct Server {
    child: Child,
    dir: tempfile::TempDir,
    port: u16,
    config: Option<PathBuf>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::with_config(None)
    }

    /// `config` is the text of a configuration file.
    pub(crate) fn with_config(config: Option<&str>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = config.map(|text| {
            let path = dir.path().join("server.conf");
            std::fs::write(&path, text).unwrap();
            path
        });
        let child = Self::spawn(dir.path(), config.as_deref(), None);
        let mut server = Self { child, dir, port: 0, config };
        server.port = server.read_port();
        server
    }

    fn spawn(dir: &Path, config: Option<&Path>, port: Option<u16>) -> Child {
        let mut command = Command::new(binary());
        command.args(["-js", "-a", "127.0.0.1", "-sd"]).arg(dir.join("store"));
        command.arg("--ports_file_dir").arg(dir);
        command.arg("-p").arg(port.map_or("-1".to_owned(), |port| port.to_string()));
        if let Some(config) = config {
            command.arg("-c").arg(config);
        }
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("nats-server starts")
    }

    fn read_port(&self) -> u16 {
        let file = self.dir.path().join(format!("nats-server_{}.ports", self.child.id()));
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(20) {
            if let Ok(text) = std::fs::read_to_string(&file)
                && let Ok(ports) = serde_json::from_str::<serde_json::Value>(&text)
                && let Some(url) = ports["nats"][0].as_str()
            {
                return url.rsplit(':').next().unwrap().parse().unwrap();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("nats-server did not say its port");
    }

    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://{}", self.address())
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again on the same port and store.
    pub(crate) fn start_again(&mut self) {
        self.child = Self::spawn(self.dir.path(), self.config.as_deref(), Some(self.port));
        self.read_port();
    }

    pub(crate) async fn connect(&self) -> Connection {
        Connection::open(&Options::new(self.url(), "test")).await.expect("a connection")
    }
}

/// One shard, a short TTL.
pub(crate) fn one_shard() -> Topology {
    Topology { shards: 1, pinned_ttl: Duration::from_secs(2), max_bytes: None, ..Topology::default() }
}

/// A server with a topology.
pub(crate) struct Rig {
    pub(crate) server: Server,
    pub(crate) connection: Connection,
    pub(crate) topology: Topology,
}

impl Rig {
    pub(crate) async fn new(topology: Topology) -> Self {
        Self::on(Server::start(), topology).await
    }

    pub(crate) async fn on(server: Server, topology: Topology) -> Self {
        let connection = server.connect().await;
        topology.apply(&connection, Resharding::Refuse).await.expect("the topology");
        Self { server, connection, topology }
    }

    pub(crate) fn publisher(&self, options: publish::Options) -> Publisher {
        Publisher::new(self.connection.clone(), self.topology.streams(), &self.topology.prefix, options)
    }

    /// `count` rows `{"n":0}`, `{"n":1}` … of `table`; their sequences.
    pub(crate) async fn publish(&self, table: &str, count: u64) -> Vec<Seq> {
        let mut publisher = self.publisher(publish::Options::default());
        for n in 0..count {
            publisher.publish(table, Bytes::from(format!("{{\"n\":{n}}}"))).await.expect("published");
        }
        publisher.flush().await.expect("stored");
        publisher.take_receipts().into_iter().map(|receipt| receipt.seq).collect()
    }

    /// A member on a connection of its own.
    pub(crate) async fn member(&self) -> Member {
        Member::new(self.server.connect().await, &self.topology, ShardId(0))
    }

    /// Calls the JetStream API directly.
    pub(crate) async fn api(&self, subject: &str, body: &str) -> serde_json::Value {
        let answer =
            self.connection.client().request(subject.to_owned(), body.to_owned().into()).await.unwrap();
        serde_json::from_slice(&answer.payload).unwrap()
    }
}

/// A delivery adapter and what it was told.
pub(crate) struct Member {
    pub(crate) delivery: Arc<Delivery>,
    pub(crate) connection: Connection,
    replies: mpsc::UnboundedReceiver<Reply>,
    attempt: u64,
}

impl Member {
    pub(crate) fn new(connection: Connection, topology: &Topology, shard: ShardId) -> Self {
        let screen: Screen = Arc::new(|_, payload| match payload.first() {
            Some(b'{') => Verdict::Good,
            _ => Verdict::Bad(Unfit::Payload("no object".into())),
        });
        Self::with_screen(connection, topology, shard, screen)
    }

    pub(crate) fn with_screen(
        connection: Connection,
        topology: &Topology,
        shard: ShardId,
        screen: Screen,
    ) -> Self {
        let (sender, replies) = mpsc::unbounded_channel();
        let sink = Arc::new(move |reply| {
            let _ = sender.send(reply);
        });
        let source = topology.source(shard, Duration::from_secs(1));
        let delivery = Arc::new(Delivery::new(connection.clone(), source, sink, screen));
        Self { delivery, connection, replies, attempt: 0 }
    }

    fn attempt(&mut self) -> Attempt {
        self.attempt += 1;
        Attempt(self.attempt)
    }

    pub(crate) fn pull(&mut self, inbox: u64, pin: Option<&PinId>, batch: u32, expires: Duration) -> Pull {
        let attempt = self.attempt();
        Pull { attempt, inbox: Inbox(inbox), pin: pin.cloned(), batch, max_bytes: None, expires }
    }

    pub(crate) async fn run(&self, pull: Pull) -> PullEnd {
        run(Arc::clone(&self.delivery), pull).await
    }

    /// Runs a pull elsewhere.
    pub(crate) fn spawn(&self, pull: Pull) -> tokio::task::JoinHandle<PullEnd> {
        tokio::spawn(run(Arc::clone(&self.delivery), pull))
    }

    pub(crate) async fn reset(&mut self, inbox: u64, from: u64) -> Result<(), Failure> {
        let attempt = self.attempt();
        let order = Order::Reset { attempt, inbox: Inbox(inbox), from: Seq(from) };
        match self.delivery.call(order).await {
            Some(Reply::Reset { attempt: answered, outcome }) if answered == attempt => outcome,
            other => panic!("{other:?}"),
        }
    }

    /// A look that asks about the row at `row` and the one after it.
    pub(crate) async fn inspect(&mut self, row: u64) -> Result<Inspection, InspectError> {
        self.look(row, row).await
    }

    pub(crate) async fn look(&mut self, row: u64, above: u64) -> Result<Inspection, InspectError> {
        let attempt = self.attempt();
        match self.delivery.call(Order::Inspect { attempt, row: Seq(row), above: Seq(above) }).await {
            Some(Reply::Inspected { attempt: answered, outcome }) if answered == attempt => outcome,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn unpin(&mut self) -> Result<(), Failure> {
        let attempt = self.attempt();
        match self.delivery.call(Order::Unpin { attempt }).await {
            Some(Reply::Unpinned { attempt: answered, outcome }) if answered == attempt => outcome,
            other => panic!("{other:?}"),
        }
    }

    /// Everything the sink was given so far.
    pub(crate) fn told(&mut self) -> Vec<Reply> {
        std::iter::from_fn(|| self.replies.try_recv().ok()).collect()
    }

    /// The rows the sink was given so far; panics on anything else.
    pub(crate) fn rows(&mut self) -> Vec<Rows> {
        self.told()
            .into_iter()
            .map(|reply| match reply {
                Reply::Rows(rows) => rows,
                other => panic!("{other:?}"),
            })
            .collect()
    }

    /// The same as one list, and the one pin they came under.
    pub(crate) fn rows_of_one_pin(&mut self) -> (Vec<Row>, PinId) {
        let rows = self.rows();
        let pin = rows.first().and_then(|rows| rows.pin.clone()).expect("rows under a pin");
        assert!(rows.iter().all(|rows| rows.pin.as_ref() == Some(&pin) && !rows.rows.is_empty()));
        (rows.into_iter().flat_map(|rows| rows.rows).collect(), pin)
    }

    /// Waits for the next word.
    pub(crate) async fn next(&mut self) -> Reply {
        tokio::time::timeout(Duration::from_secs(20), self.replies.recv()).await.expect("in time").unwrap()
    }
}

async fn run(delivery: Arc<Delivery>, pull: Pull) -> PullEnd {
    let attempt = pull.attempt;
    match delivery.call(Order::Pull(pull)).await {
        Some(Reply::Ended { attempt: answered, end }) if answered == attempt => end,
        other => panic!("{other:?}"),
    }
}

/// A row as a publisher that means harm would send it, byte for byte.
pub(crate) async fn publish_raw(rig: &Rig, subject: &str, headers: &[u8], payload: &[u8]) {
    let mut socket = tokio::net::TcpStream::connect(rig.server.address()).await.unwrap();
    let mut bytes = b"CONNECT {\"verbose\":false,\"headers\":true}\r\n".to_vec();
    bytes.extend(format!("HPUB {subject} {} {}\r\n", headers.len(), headers.len() + payload.len()).bytes());
    bytes.extend([headers, payload, b"\r\nPING\r\n"].concat());
    socket.write_all(&bytes).await.unwrap();
    let (mut answer, mut buffer) = (Vec::new(), [0; 4096]);
    while !answer.windows(4).any(|window| window == b"PONG") {
        let read = socket.read(&mut buffer).await.unwrap();
        assert!(read > 0, "{}", String::from_utf8_lossy(&answer));
        answer.extend_from_slice(&buffer[..read]);
    }
}
