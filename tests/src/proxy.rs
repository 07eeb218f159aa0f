//! A TCP proxy between a client and a server, which can be told to misbehave as networks do: cut connections,
//! refuse them, swallow them, slow them down. Between a NATS client and its server it can also be asked about
//! every single frame.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufWriter};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use crate::error::{Context, Result};
use crate::frame::{Decoder, Frame, Verb};
use crate::port;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

/// What becomes of a frame.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Fate {
    /// It goes on at once.
    Forward,
    /// It never arrives.
    Drop,
    /// Something else arrives in its place. Must be whole frames.
    Replace(Bytes),
    /// It arrives later; what comes behind it overtakes it.
    Delay(Duration),
    /// It arrives when the gate is opened; what comes behind it overtakes it.
    Hold(Gate),
    /// It arrives later, and so does everything behind it in its direction.
    Stall(Duration),
    /// It arrives when the gate is opened, and everything behind it in its direction waits too.
    StallUntil(Gate),
    /// The connection is cut in its place: what came before it arrives, it does not.
    Cut,
    /// It arrives, then the connection is cut.
    ForwardThenCut,
}

/// Holds what waits for it until it is opened. Clones are the same gate.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<watch::Sender<bool>>);

impl Gate {
    /// Lets through what waits, and everything after.
    pub fn open(&self) {
        self.0.send_replace(true);
    }

    /// Whether it is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until it is open.
    pub async fn opened(&self) {
        // The sender is `self`, so it cannot be gone.
        let _ = self.0.subscribe().wait_for(|open| *open).await;
    }
}

type Hook = dyn Fn(Direction, &Frame) -> Fate + Send + Sync;

/// What all connections of a proxy share.
struct Shared {
    target: Mutex<SocketAddr>,
    nats: bool,
    hook: Mutex<Option<Arc<Hook>>>,
    black_hole: watch::Sender<bool>,
    /// Counts cuts: a connection ends when it changes.
    cuts: watch::Sender<u64>,
    to_server: Way,
    to_client: Way,
    open: AtomicUsize,
    accepted: AtomicU64,
    fault: Mutex<Option<String>>,
}

#[derive(Default)]
struct Way {
    delay_us: AtomicU64,
    bytes: AtomicU64,
}

impl Shared {
    fn way(&self, direction: Direction) -> &Way {
        match direction {
            Direction::ToServer => &self.to_server,
            Direction::ToClient => &self.to_client,
        }
    }

    /// Returns once bytes may flow.
    async fn flowing(&self) {
        let _ = self.black_hole.subscribe().wait_for(|swallowed| !swallowed).await;
    }

    fn hook(&self) -> Option<Arc<Hook>> {
        self.hook.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Told to the task that listens; answered when it has done so.
struct Listen {
    on: bool,
    done: oneshot::Sender<io::Result<()>>,
}

/// A proxy on the loopback interface. Dropping it cuts its connections.
pub struct Proxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    listens: mpsc::Sender<Listen>,
    cut_every: watch::Sender<Option<Duration>>,
    tasks: [JoinHandle<()>; 2],
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy").field("addr", &self.addr).field("open", &self.open()).finish_non_exhaustive()
    }
}

impl Proxy {
    /// A proxy for any TCP protocol.
    ///
    /// # Errors
    /// When there is no port to listen on.
    pub async fn start(target: SocketAddr) -> Result<Self> {
        Self::listen(target, false).await
    }

    /// A proxy that understands NATS: it can be asked about frames (see [`set_hook`](Self::set_hook)), and it
    /// keeps clients to itself by taking other servers' addresses out of what the server announces.
    ///
    /// # Errors
    /// When there is no port to listen on.
    pub async fn start_nats(target: SocketAddr) -> Result<Self> {
        Self::listen(target, true).await
    }

    async fn listen(target: SocketAddr, nats: bool) -> Result<Self> {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, port::free()?));
        let listener = TcpListener::bind(addr).await.context(|| format!("cannot listen on {addr}"))?;
        let shared = Arc::new(Shared {
            target: Mutex::new(target),
            nats,
            hook: Mutex::new(None),
            black_hole: watch::Sender::new(false),
            cuts: watch::Sender::new(0),
            to_server: Way::default(),
            to_client: Way::default(),
            open: AtomicUsize::new(0),
            accepted: AtomicU64::new(0),
            fault: Mutex::new(None),
        });
        let (listens, orders) = mpsc::channel(1);
        let cut_every = watch::Sender::new(None);
        let tasks = [
            tokio::spawn(accept(addr, listener, Arc::clone(&shared), orders)),
            tokio::spawn(cut_regularly(Arc::clone(&shared), cut_every.subscribe())),
        ];
        Ok(Self { addr, shared, listens, cut_every, tasks })
    }

    /// Where clients connect to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// New connections go to this server from now on.
    pub fn set_target(&self, target: SocketAddr) {
        *self.shared.target.lock().unwrap_or_else(PoisonError::into_inner) = target;
    }

    /// Asks about every frame in both directions from now on. The hook must not block. Of use only with
    /// [`start_nats`](Self::start_nats).
    pub fn set_hook(&self, hook: impl Fn(Direction, &Frame) -> Fate + Send + Sync + 'static) {
        *self.shared.hook.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(hook));
    }

    /// Forwards every frame again.
    pub fn clear_hook(&self) {
        *self.shared.hook.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Cuts all connections that are open now.
    pub fn cut(&self) {
        self.shared.cuts.send_modify(|count| *count += 1);
    }

    /// Cuts all connections again and again.
    pub fn cut_every(&self, period: Option<Duration>) {
        self.cut_every.send_replace(period);
    }

    /// Refuses new connections (the port is closed), or takes them again. Open ones go on.
    ///
    /// # Errors
    /// When the port cannot be opened again.
    pub async fn refuse(&self, on: bool) -> Result<()> {
        let (done, answer) = oneshot::channel();
        let gone = || io::Error::other("the proxy has ended");
        let outcome = match self.listens.send(Listen { on: !on, done }).await {
            Ok(()) => answer.await.unwrap_or_else(|_| Err(gone())),
            Err(_) => Err(gone()),
        };
        outcome.context(|| format!("cannot open or close {}", self.addr))
    }

    /// Connections are taken and stay open, and nothing goes through any of them, in neither direction; what
    /// was sent meanwhile arrives afterwards.
    pub fn black_hole(&self, on: bool) {
        self.shared.black_hole.send_replace(on);
    }

    /// Everything in this direction arrives so much later; as much as before arrives a second.
    pub fn delay(&self, direction: Direction, delay: Duration) {
        let delay = u64::try_from(delay.as_micros()).unwrap_or(u64::MAX);
        self.shared.way(direction).delay_us.store(delay, Ordering::Relaxed);
    }

    /// Connections open now.
    #[must_use]
    pub fn open(&self) -> usize {
        self.shared.open.load(Ordering::Relaxed)
    }

    /// Connections taken so far.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::Relaxed)
    }

    /// Bytes forwarded so far.
    #[must_use]
    pub fn bytes(&self, direction: Direction) -> u64 {
        self.shared.way(direction).bytes.load(Ordering::Relaxed)
    }

    /// The last thing that was not the NATS protocol; the connection was cut there.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        self.shared.fault.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

async fn accept(
    addr: SocketAddr,
    first: TcpListener,
    shared: Arc<Shared>,
    mut orders: mpsc::Receiver<Listen>,
) {
    let mut listener = Some(first);
    // Ends with this task, and so do the connections.
    let mut connections = JoinSet::new();
    loop {
        let next = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            order = orders.recv() => {
                let Some(Listen { on, done }) = order else { return };
                let outcome = match (on, &listener) {
                    (true, None) => TcpListener::bind(addr).await.map(|again| listener = Some(again)),
                    (true, Some(_)) => Ok(()),
                    (false, _) => {
                        listener = None;
                        Ok(())
                    }
                };
                let _ = done.send(outcome);
            }
            // Fails when the process has no file descriptors left, say: the client has noticed.
            accepted = next => if let Ok((client, _)) = accepted {
                shared.accepted.fetch_add(1, Ordering::Relaxed);
                shared.open.fetch_add(1, Ordering::Relaxed);
                let counted = Counted(Arc::clone(&shared));
                let cuts = shared.cuts.subscribe();
                connections.spawn(connection(client, cuts, counted));
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn cut_regularly(shared: Arc<Shared>, mut period: watch::Receiver<Option<Duration>>) {
    loop {
        let now = *period.borrow_and_update();
        let tick = async {
            match now {
                Some(period) => tokio::time::sleep(period).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = tick => shared.cuts.send_modify(|count| *count += 1),
            changed = period.changed() => if changed.is_err() { return },
        }
    }
}

/// Counts an open connection until it is dropped, however it ends.
struct Counted(Arc<Shared>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn connection(client: TcpStream, mut cuts: watch::Receiver<u64>, counted: Counted) {
    let shared = &counted.0;
    let forward = async {
        shared.flowing().await;
        let target = *shared.target.lock().unwrap_or_else(PoisonError::into_inner);
        let server = TcpStream::connect(target).await?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        tokio::try_join!(
            pump(Direction::ToServer, from_client, to_server, shared),
            pump(Direction::ToClient, from_server, to_client, shared),
        )
    };
    tokio::select! {
        // An error ends both directions, as the end of a process does.
        _ = forward => {}
        _ = cuts.changed() => {}
    }
}

/// What waits to be written.
enum Piece {
    Bytes(Bytes, Instant),
    Cut,
}

/// Pieces between reading and writing: enough that a delay does not slow the reading.
const PIECES: usize = 4096;

async fn pump(
    direction: Direction,
    from: OwnedReadHalf,
    to: OwnedWriteHalf,
    shared: &Shared,
) -> io::Result<()> {
    let (pieces, queue) = mpsc::channel(PIECES);
    // Frames on their way beside the queue. They end with this connection.
    let mut late = JoinSet::new();
    let reading = async {
        if shared.nats {
            read_frames(direction, from, pieces, shared, &mut late).await
        } else {
            read_bytes(direction, from, pieces, shared).await
        }
    };
    tokio::try_join!(reading, write(direction, queue, to, shared)).map(drop)
}

fn due(direction: Direction, shared: &Shared) -> Instant {
    Instant::now() + Duration::from_micros(shared.way(direction).delay_us.load(Ordering::Relaxed))
}

async fn read_bytes(
    direction: Direction,
    mut from: OwnedReadHalf,
    pieces: mpsc::Sender<Piece>,
    shared: &Shared,
) -> io::Result<()> {
    let mut buffer = BytesMut::new();
    loop {
        shared.flowing().await;
        buffer.reserve(64 * 1024);
        if from.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
        let piece = Piece::Bytes(buffer.split().freeze(), due(direction, shared));
        if pieces.send(piece).await.is_err() {
            return Ok(());
        }
    }
}

async fn read_frames(
    direction: Direction,
    mut from: OwnedReadHalf,
    pieces: mpsc::Sender<Piece>,
    shared: &Shared,
    late: &mut JoinSet<()>,
) -> io::Result<()> {
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        shared.flowing().await;
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        decoder.push(&buffer[..count]);
        let hook = shared.hook();
        loop {
            let frame = match decoder.next_frame() {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(error) => {
                    let mut fault = shared.fault.lock().unwrap_or_else(PoisonError::into_inner);
                    *fault = Some(format!("{direction:?}: {error}"));
                    return Err(io::Error::other(error));
                }
            };
            let fate = hook.as_ref().map_or(Fate::Forward, |hook| hook(direction, &frame));
            let bytes =
                if direction == Direction::ToClient { to_oneself(&frame) } else { frame.raw().clone() };
            let (first, second) = match fate {
                Fate::Forward => (Some(Piece::Bytes(bytes, due(direction, shared))), None),
                Fate::Replace(other) => (Some(Piece::Bytes(other, due(direction, shared))), None),
                Fate::Drop => (None, None),
                Fate::Delay(delay) => {
                    let until = due(direction, shared) + delay;
                    overtaken(late, &pieces, bytes, tokio::time::sleep_until(until));
                    (None, None)
                }
                Fate::Hold(gate) => {
                    overtaken(late, &pieces, bytes, async move { gate.opened().await });
                    (None, None)
                }
                Fate::Stall(delay) => {
                    tokio::time::sleep(delay).await;
                    (Some(Piece::Bytes(bytes, due(direction, shared))), None)
                }
                Fate::StallUntil(gate) => {
                    gate.opened().await;
                    (Some(Piece::Bytes(bytes, due(direction, shared))), None)
                }
                Fate::Cut => (Some(Piece::Cut), None),
                Fate::ForwardThenCut => (Some(Piece::Bytes(bytes, due(direction, shared))), Some(Piece::Cut)),
            };
            for piece in [first, second].into_iter().flatten() {
                if pieces.send(piece).await.is_err() {
                    return Ok(());
                }
            }
        }
    }
}

/// Sends a frame on after `event`; what comes behind it does not wait.
fn overtaken(
    late: &mut JoinSet<()>,
    pieces: &mpsc::Sender<Piece>,
    bytes: Bytes,
    event: impl Future<Output = ()> + Send + 'static,
) {
    while late.try_join_next().is_some() {}
    // A frame that is held must not hold up the end of the connection.
    let pieces = pieces.downgrade();
    late.spawn(async move {
        event.await;
        if let Some(pieces) = pieces.upgrade() {
            let _ = pieces.send(Piece::Bytes(bytes, Instant::now())).await;
        }
    });
}

/// The frame, without the addresses of other servers, which a client could go to past the proxy.
fn to_oneself(frame: &Frame) -> Bytes {
    if frame.verb() == Verb::Info
        && let Ok(mut info) = serde_json::from_str::<serde_json::Value>(frame.arguments())
        && info.as_object_mut().is_some_and(|info| info.remove("connect_urls").is_some())
    {
        return Bytes::from(format!("INFO {info}\r\n"));
    }
    frame.raw().clone()
}

async fn write(
    direction: Direction,
    mut queue: mpsc::Receiver<Piece>,
    to: OwnedWriteHalf,
    shared: &Shared,
) -> io::Result<()> {
    let mut to = BufWriter::with_capacity(64 * 1024, to);
    while let Some(piece) = queue.recv().await {
        match piece {
            Piece::Bytes(bytes, due) => {
                if due > Instant::now() {
                    to.flush().await?;
                    tokio::time::sleep_until(due).await;
                }
                shared.flowing().await;
                to.write_all(&bytes).await?;
                shared.way(direction).bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            }
            Piece::Cut => {
                to.flush().await?;
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
        }
        if queue.is_empty() {
            to.flush().await?;
        }
    }
    to.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait;

    const SOON: Duration = Duration::from_secs(10);

    /// A server that sends back what it gets.
    async fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut from, mut to) = stream.split();
                    let _ = tokio::io::copy(&mut from, &mut to).await;
                });
            }
        });
        addr
    }

    async fn say(stream: &mut TcpStream, text: &str) {
        stream.write_all(text.as_bytes()).await.unwrap();
    }

    /// Reads so many bytes.
    async fn hear(stream: &mut TcpStream, count: usize) -> String {
        let mut buffer = vec![0; count];
        tokio::time::timeout(SOON, stream.read_exact(&mut buffer)).await.unwrap().unwrap();
        String::from_utf8(buffer).unwrap()
    }

    async fn hears_nothing(stream: &mut TcpStream) -> bool {
        let mut buffer = [0];
        tokio::time::timeout(Duration::from_millis(50), stream.read(&mut buffer)).await.is_err()
    }

    async fn is_cut(stream: &mut TcpStream) -> bool {
        let mut buffer = [0];
        !matches!(tokio::time::timeout(SOON, stream.read(&mut buffer)).await, Ok(Ok(1..)) | Err(_))
    }

    #[tokio::test]
    async fn forwards_cuts_and_refuses() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
        say(&mut client, "hello").await;
        assert_eq!(hear(&mut client, 5).await, "hello");
        assert_eq!((proxy.open(), proxy.accepted()), (1, 1));
        assert_eq!((proxy.bytes(Direction::ToServer), proxy.bytes(Direction::ToClient)), (5, 5));
        proxy.cut();
        assert!(is_cut(&mut client).await);
        wait::until_async("no connection", SOON, async || (proxy.open() == 0).then_some(())).await.unwrap();

        proxy.refuse(true).await.unwrap();
        let refused = TcpStream::connect(proxy.addr()).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        proxy.refuse(false).await.unwrap();
        let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
        say(&mut client, "again").await;
        assert_eq!(hear(&mut client, 5).await, "again");

        proxy.cut_every(Some(Duration::from_millis(20)));
        assert!(is_cut(&mut client).await);
    }

    #[tokio::test]
    async fn a_black_hole_gives_back_what_it_took() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        let mut before = TcpStream::connect(proxy.addr()).await.unwrap();
        say(&mut before, "x").await;
        assert_eq!(hear(&mut before, 1).await, "x");
        proxy.black_hole(true);
        let mut during = TcpStream::connect(proxy.addr()).await.unwrap();
        say(&mut before, "one").await;
        say(&mut during, "two").await;
        assert!(hears_nothing(&mut before).await && hears_nothing(&mut during).await);
        proxy.black_hole(false);
        assert_eq!(hear(&mut before, 3).await, "one");
        assert_eq!(hear(&mut during, 3).await, "two");
    }

    #[tokio::test]
    async fn delays_each_direction() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        proxy.delay(Direction::ToServer, Duration::from_millis(30));
        proxy.delay(Direction::ToClient, Duration::from_millis(40));
        let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
        let began = Instant::now();
        say(&mut client, "hello").await;
        assert_eq!(hear(&mut client, 5).await, "hello");
        assert!(began.elapsed() >= Duration::from_millis(70));
    }

    /// The fate of the frame `PUB held`, towards the server only.
    fn fate_of_held(fate: Fate) -> impl Fn(Direction, &Frame) -> Fate + Send + Sync {
        move |direction, frame| {
            if direction == Direction::ToServer && frame.subject() == "held" {
                fate.clone()
            } else {
                Fate::Forward
            }
        }
    }

    const HELD: &str = "PUB held 1\r\nx\r\n";

    #[tokio::test]
    async fn frames_are_dropped_held_and_overtaken() {
        let proxy = Proxy::start_nats(echo().await).await.unwrap();
        let mut client = TcpStream::connect(proxy.addr()).await.unwrap();

        proxy.set_hook(fate_of_held(Fate::Drop));
        say(&mut client, &format!("{HELD}PING\r\n")).await;
        assert_eq!(hear(&mut client, 6).await, "PING\r\n");

        let gate = Gate::default();
        proxy.set_hook(fate_of_held(Fate::Hold(gate.clone())));
        say(&mut client, &format!("{HELD}PING\r\n")).await;
        assert_eq!(hear(&mut client, 6).await, "PING\r\n");
        assert!(hears_nothing(&mut client).await && !gate.is_open());
        gate.open();
        assert_eq!(hear(&mut client, HELD.len()).await, HELD);

        proxy.set_hook(fate_of_held(Fate::Delay(Duration::from_millis(20))));
        say(&mut client, &format!("{HELD}PING\r\n")).await;
        assert_eq!(hear(&mut client, 6 + HELD.len()).await, format!("PING\r\n{HELD}"));

        let gate = Gate::default();
        proxy.set_hook(fate_of_held(Fate::StallUntil(gate.clone())));
        say(&mut client, &format!("{HELD}PING\r\n")).await;
        assert!(hears_nothing(&mut client).await);
        gate.open();
        assert_eq!(hear(&mut client, 6 + HELD.len()).await, format!("{HELD}PING\r\n"));

        proxy.set_hook(fate_of_held(Fate::Replace(Bytes::from_static(b"PONG\r\n"))));
        say(&mut client, HELD).await;
        assert_eq!(hear(&mut client, 6).await, "PONG\r\n");
    }

    #[tokio::test]
    async fn a_connection_is_cut_at_a_frame() {
        let proxy = Proxy::start_nats(echo().await).await.unwrap();
        proxy.set_hook(|direction, frame| match (direction, frame.verb()) {
            (Direction::ToClient, Verb::Pong) => Fate::ForwardThenCut,
            (Direction::ToClient, Verb::Pub) => Fate::Cut,
            _ => Fate::Forward,
        });
        let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
        say(&mut client, "PING\r\nPONG\r\nPING\r\n").await;
        assert_eq!(hear(&mut client, 12).await, "PING\r\nPONG\r\n");
        assert!(is_cut(&mut client).await);

        let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
        say(&mut client, &format!("PING\r\n{HELD}")).await;
        assert_eq!(hear(&mut client, 6).await, "PING\r\n");
        assert!(is_cut(&mut client).await);
    }

    #[tokio::test]
    async fn what_is_not_nats_is_a_fault() {
        let proxy = Proxy::start_nats(echo().await).await.unwrap();
        let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
        say(&mut client, "GET / HTTP/1.1\r\n\r\n").await;
        assert!(is_cut(&mut client).await);
        assert!(proxy.fault().unwrap().contains("GET"));
    }

    #[tokio::test]
    async fn other_servers_are_not_announced() {
        let proxy = Proxy::start_nats(echo().await).await.unwrap();
        let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
        say(&mut client, "INFO {\"a\":1,\"connect_urls\":[\"127.0.0.1:1\"]}\r\nPING\r\n").await;
        assert_eq!(hear(&mut client, 20).await, "INFO {\"a\":1}\r\nPING\r\n");
    }
}
