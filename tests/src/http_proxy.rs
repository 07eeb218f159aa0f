//! A proxy between Holdfast and ClickHouse that sees requests, not bytes: a test decides the fate of each, and
//! reads afterwards what became of it.
//!
//! ```text
//! request ──▶ hook: Fate ──▶ forwarded, answered by the proxy itself, held, cut, or met with silence
//! ```
//!
//! Who the request comes from is taken out of it: the development server knows no users. A test that wants a
//! password to be wrong answers so itself.
//!
//! It has threads of its own, so drills without a runtime use it as tests with one do.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, BodyStream, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http1 as client;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::server::conn::http1 as server;
use hyper::service::service_fn;
use hyper::{StatusCode, Uri};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use crate::error::{Context, Result};
use crate::port;
use crate::proxy::Gate;

/// Requests that are remembered; older ones are only counted.
const RECORDS: usize = 200_000;
/// Tokens whose attempts are counted.
const TOKENS: usize = 100_000;
/// Bytes of all bodies that are held at once; a request beyond is cut.
const HELD: usize = 512 << 20;
/// The longest SQL that is looked at whole, and the longest answer that is taken in whole.
const WHOLE: usize = 4 << 20;
/// SQL that a request shows to a test.
const SHOWN: usize = 2_000;

const EXCEPTION_CODE: HeaderName = HeaderName::from_static("x-clickhouse-exception-code");
const QUERY_ID: HeaderName = HeaderName::from_static("x-clickhouse-query-id");
const USER: HeaderName = HeaderName::from_static("x-clickhouse-user");
const KEY: HeaderName = HeaderName::from_static("x-clickhouse-key");

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Rows.
    Insert,
    /// Anything else: questions about tables, read-backs, pings.
    Other,
}

/// A request, before anything has been done about it. The body of an insert has not been read yet.
#[derive(Debug, Clone)]
pub struct Request {
    /// Its number at this proxy, from 1.
    pub number: u64,
    /// What it asks for.
    pub kind: Kind,
    /// The deduplication token of an insert.
    pub token: Option<Arc<str>>,
    /// How often this token has come, this time included; 0 without one.
    pub attempt: u32,
    /// The table of an insert, without its database.
    pub table: Option<Arc<str>>,
    /// The query's text; cut where it is long.
    pub sql: String,
    parameters: Arc<[(String, String)]>,
}

impl Request {
    /// A setting or parameter of the query string.
    #[must_use]
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Whether it inserts into this table.
    #[must_use]
    pub fn inserts_into(&self, table: &str) -> bool {
        self.kind == Kind::Insert && self.table.as_deref() == Some(table)
    }
}

/// An answer that the proxy gives itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    status: u16,
    code: Option<u32>,
    text: String,
    /// Whether it looks like ClickHouse's own.
    ours: bool,
}

impl Answer {
    /// What ClickHouse answers to an insert that it has carried out, or dropped as a repeat: they look the same.
    #[must_use]
    pub fn success() -> Self {
        Self { status: 200, code: None, text: String::new(), ours: true }
    }

    /// An error in ClickHouse's form.
    #[must_use]
    pub fn exception(status: u16, code: u32, name: &str, text: &str) -> Self {
        let text = format!("Code: {code}. DB::Exception: {text}. ({name}) (version 26.7.2.1)\n");
        Self { status, code: Some(code), text, ours: true }
    }

    /// What a part whose rename fails is answered with: the rows are not stored, and the token is burned.
    #[must_use]
    pub fn rename_failed() -> Self {
        let text = "std::exception. Code: 1001, type: std::__1::__fs::filesystem::filesystem_error, \
                    e.what() = filesystem error: in rename: File exists";
        Self { status: 500, code: Some(1001), text: format!("{text}\n"), ours: true }
    }

    /// A wrong password.
    #[must_use]
    pub fn wrong_password() -> Self {
        Self::exception(
            403,
            516,
            "AUTHENTICATION_FAILED",
            "default: Authentication failed: password is incorrect, or there is no user with such name",
        )
    }

    /// Any status, with a text that is not ClickHouse's: what a balancer in between says.
    #[must_use]
    pub fn other(status: u16, text: &str) -> Self {
        Self { status, code: None, text: text.to_owned(), ours: false }
    }

    fn response(&self, request: &Request) -> hyper::Response<Body> {
        let mut response = hyper::Response::new(whole(Bytes::from(self.text.clone())));
        *response.status_mut() = StatusCode::from_u16(self.status).unwrap_or(StatusCode::BAD_GATEWAY);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=UTF-8"));
        headers.insert("x-clickhouse-server-display-name", HeaderValue::from_static("proxy"));
        if let Some(code) = self.code {
            headers.insert(EXCEPTION_CODE, HeaderValue::from(code));
        }
        // ClickHouse says which query it answers; nobody else does.
        let query_id = request.parameter("query_id").and_then(|id| HeaderValue::from_str(id).ok());
        if let (true, Some(id)) = (self.ours, query_id) {
            headers.insert(QUERY_ID, id);
        }
        response
    }
}

/// What becomes of a request.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Fate {
    /// It goes on, and the answer comes back, both as they stream.
    Forward,
    /// Its body is read to the end and thrown away; this is the answer. ClickHouse never hears of it.
    Answer(Answer),
    /// ClickHouse carries it out and answers; the client is told this instead.
    ForwardThenAnswer(Answer),
    /// ClickHouse carries it out and answers; the connection is cut instead of telling the client.
    LoseAnswer,
    /// So many bytes of the body reach ClickHouse, never its end; then both connections are cut.
    CutBody(u64),
    /// The connection is cut at once; ClickHouse hears nothing.
    Cut,
    /// The whole body is taken; it reaches ClickHouse only after this time, also when the client has gone.
    HoldFor(Duration),
    /// As [`HoldFor`](Self::HoldFor), until the gate is opened.
    HoldUntil(Gate),
    /// Nothing is read, nothing answered, until the client goes.
    Silence,
}

/// An answer in short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answered {
    /// The HTTP status.
    pub status: u16,
    /// ClickHouse's error code.
    pub code: Option<u32>,
}

impl Answered {
    /// Whether it says that all is well.
    #[must_use]
    pub fn is_success(self) -> bool {
        self.status == 200
    }
}

/// What became of a request.
#[derive(Debug, Clone)]
pub struct Record {
    /// The request's number.
    pub number: u64,
    /// When it came.
    pub at: Instant,
    /// What it asked for.
    pub kind: Kind,
    /// The table of an insert.
    pub table: Option<Arc<str>>,
    /// The token of an insert.
    pub token: Option<Arc<str>>,
    /// How often the token had come by then, this time included.
    pub attempt: u32,
    /// What ClickHouse answered; none when it was not asked, or did not answer.
    pub server: Option<Answered>,
    /// What the client was told; none when it was told nothing, or had gone.
    pub client: Option<Answered>,
}

impl Record {
    /// The client was told that the rows are stored, and ClickHouse never heard of them.
    #[must_use]
    pub fn is_swallowed(&self) -> bool {
        self.server.is_none() && self.client.is_some_and(Answered::is_success)
    }
}

type Hook = dyn Fn(&Request) -> Fate + Send + Sync;
type Body = BoxBody<Bytes, io::Error>;

struct Shared {
    target: Mutex<SocketAddr>,
    hook: Mutex<Option<Arc<Hook>>>,
    silent: watch::Sender<bool>,
    /// A connection ends when it changes.
    cuts: watch::Sender<u64>,
    numbers: AtomicU64,
    accepted: AtomicU64,
    held: AtomicUsize,
    log: Mutex<Log>,
    /// Held requests outlive their clients, and end with the proxy.
    late: Mutex<JoinSet<()>>,
}

#[derive(Default)]
struct Log {
    records: VecDeque<Record>,
    forgotten: u64,
    attempts: HashMap<Arc<str>, u32>,
    /// In the order of their first attempt.
    tokens: VecDeque<Arc<str>>,
}

impl Log {
    /// How often this token has come by now.
    fn attempt(&mut self, token: &Arc<str>) -> u32 {
        if let Some(count) = self.attempts.get_mut(token) {
            *count += 1;
            return *count;
        }
        if self.tokens.len() == TOKENS
            && let Some(oldest) = self.tokens.pop_front()
        {
            self.attempts.remove(&oldest);
        }
        self.tokens.push_back(Arc::clone(token));
        self.attempts.insert(Arc::clone(token), 1);
        1
    }

    fn push(&mut self, record: Record) {
        if self.records.len() == RECORDS {
            self.records.pop_front();
            self.forgotten += 1;
        }
        self.records.push_back(record);
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Returns once requests may go on.
    async fn flowing(&self) {
        // The sender is `self`, so it cannot be gone.
        let _ = self.silent.subscribe().wait_for(|silent| !silent).await;
    }

    fn target(&self) -> SocketAddr {
        *lock(&self.target)
    }
}

/// Told to the task that listens; answered when it has done so.
struct Listen {
    on: bool,
    done: std::sync::mpsc::Sender<io::Result<()>>,
}

/// A proxy on the loopback interface. Dropping it cuts its connections.
pub struct HttpProxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    listens: mpsc::UnboundedSender<Listen>,
    runtime: Option<Runtime>,
}

impl fmt::Debug for HttpProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpProxy").field("addr", &self.addr).finish_non_exhaustive()
    }
}

impl HttpProxy {
    /// A proxy for the server at `target`. It forwards everything until told otherwise.
    ///
    /// # Errors
    /// When there is no port to listen on.
    pub fn start(target: SocketAddr) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("http-proxy")
            .enable_all()
            .build()
            .context(|| "cannot start the proxy's threads".to_owned())?;
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, port::free()?));
        let shared = Arc::new(Shared {
            target: Mutex::new(target),
            hook: Mutex::new(None),
            silent: watch::Sender::new(false),
            cuts: watch::Sender::new(0),
            numbers: AtomicU64::new(0),
            accepted: AtomicU64::new(0),
            held: AtomicUsize::new(0),
            log: Mutex::default(),
            late: Mutex::default(),
        });
        let (listens, orders) = mpsc::unbounded_channel();
        runtime.spawn(accept(addr, Arc::clone(&shared), orders));
        let proxy = Self { addr, shared, listens, runtime: Some(runtime) };
        proxy.refuse(false)?;
        Ok(proxy)
    }

    /// Where clients connect to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Asks about every request from now on. The hook must not block.
    pub fn set_hook(&self, hook: impl Fn(&Request) -> Fate + Send + Sync + 'static) {
        *lock(&self.shared.hook) = Some(Arc::new(hook));
    }

    /// Forwards every request again.
    pub fn clear_hook(&self) {
        *lock(&self.shared.hook) = None;
    }

    /// Cuts all connections that are open now. Held requests go on to ClickHouse all the same.
    pub fn cut(&self) {
        self.shared.cuts.send_modify(|count| *count += 1);
    }

    /// Refuses new connections (the port is closed), or takes them again. Open ones go on.
    ///
    /// # Errors
    /// When the port cannot be opened.
    pub fn refuse(&self, on: bool) -> Result<()> {
        let (done, answer) = std::sync::mpsc::channel();
        let gone = || io::Error::other("the proxy has ended");
        let outcome = match self.listens.send(Listen { on: !on, done }) {
            Ok(()) => answer.recv().unwrap_or_else(|_| Err(gone())),
            Err(_) => Err(gone()),
        };
        outcome.context(|| format!("cannot open or close {}", self.addr))
    }

    /// Connections are taken and requests read, and nothing is answered, also not what ClickHouse answers
    /// meanwhile. Requests whose clients still wait go on afterwards.
    pub fn silent(&self, on: bool) {
        self.shared.silent.send_replace(on);
    }

    /// Connections taken so far.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::Relaxed)
    }

    /// What became of the requests that have ended, in the order of their end, and how many older ones are
    /// forgotten.
    #[must_use]
    pub fn records(&self) -> (Vec<Record>, u64) {
        let log = lock(&self.shared.log);
        (log.records.iter().cloned().collect(), log.forgotten)
    }

    /// What became of the inserts that have ended.
    #[must_use]
    pub fn inserts(&self) -> Vec<Record> {
        lock(&self.shared.log).records.iter().filter(|record| record.kind == Kind::Insert).cloned().collect()
    }

    /// Ended requests that `fit`.
    #[must_use]
    pub fn count(&self, fit: impl Fn(&Record) -> bool) -> u64 {
        lock(&self.shared.log).records.iter().filter(|record| fit(record)).count() as u64
    }
}

impl Drop for HttpProxy {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waiting for it is not allowed inside another runtime, and not needed.
            runtime.shutdown_background();
        }
    }
}

async fn accept(addr: SocketAddr, shared: Arc<Shared>, mut orders: mpsc::UnboundedReceiver<Listen>) {
    let mut listener: Option<TcpListener> = None;
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
            accepted = next => if let Ok((stream, _)) = accepted {
                shared.accepted.fetch_add(1, Ordering::Relaxed);
                let cuts = shared.cuts.subscribe();
                connections.spawn(connection(stream, cuts, Arc::clone(&shared)));
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(stream: TcpStream, mut cuts: watch::Receiver<u64>, shared: Arc<Shared>) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(|request| {
        let shared = Arc::clone(&shared);
        async move { serve(request, shared).await }
    });
    let serving =
        server::Builder::new().timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // An error of the service ends the connection without an answer.
        _ = serving => {}
        _ = cuts.changed() => {}
    }
}

/// Ends a connection in the place of an answer.
#[derive(Debug, thiserror::Error)]
#[error("cut")]
struct Cut;

impl From<io::Error> for Cut {
    fn from(_: io::Error) -> Self {
        Self
    }
}

impl From<hyper::Error> for Cut {
    fn from(_: hyper::Error) -> Self {
        Self
    }
}

/// Keeps the record of a request however it ends, also when its client goes. Whoever has a part in the request
/// holds it; the last one leaves it in the log.
struct Recording {
    shared: Arc<Shared>,
    record: Mutex<Record>,
}

impl Recording {
    fn server(&self, answered: Answered) {
        lock(&self.record).server = Some(answered);
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let record = lock(&self.record).clone();
        lock(&self.shared.log).push(record);
    }
}

async fn serve(
    request: hyper::Request<Incoming>,
    shared: Arc<Shared>,
) -> std::result::Result<hyper::Response<Body>, Cut> {
    let at = Instant::now();
    let (mut parts, incoming) = request.into_parts();
    let (asked, body) = look(&parts.uri, incoming, &shared).await?;
    let recording = Arc::new(Recording {
        record: Mutex::new(Record {
            number: asked.number,
            at,
            kind: asked.kind,
            table: asked.table.clone(),
            token: asked.token.clone(),
            attempt: asked.attempt,
            server: None,
            client: None,
        }),
        shared: Arc::clone(&shared),
    });
    let hook = lock(&shared.hook).clone();
    let fate = hook.map_or(Fate::Forward, |hook| hook(&asked));
    shared.flowing().await;
    hop_by_hop(&mut parts.headers);
    // The development server knows nobody, and refuses whoever comes with a password.
    for name in [header::AUTHORIZATION, USER, KEY] {
        parts.headers.remove(name);
    }
    let response = match fate {
        Fate::Forward => {
            let response = forward(parts, body, &shared).await?;
            recording.server(short(&response));
            response
        }
        Fate::Answer(answer) => {
            drain(body).await?;
            answer.response(&asked)
        }
        Fate::ForwardThenAnswer(answer) => {
            recording.server(finish(forward(parts, body, &shared).await?).await?);
            answer.response(&asked)
        }
        Fate::LoseAnswer => {
            recording.server(finish(forward(parts, body, &shared).await?).await?);
            return Err(Cut);
        }
        Fate::CutBody(after) => {
            if let Ok(response) = forward(parts, cut_after(body, after), &shared).await {
                recording.server(short(&response));
            }
            return Err(Cut);
        }
        Fate::Cut => return Err(Cut),
        Fate::HoldFor(time) => held(parts, body, &recording, tokio::time::sleep(time)).await?,
        Fate::HoldUntil(gate) => held(parts, body, &recording, async move { gate.opened().await }).await?,
        Fate::Silence => std::future::pending().await,
    };
    shared.flowing().await;
    lock(&recording.record).client = Some(short(&response));
    Ok(response)
}

/// What the request is, and its body: untouched if it inserts, read whole if it asks.
async fn look(uri: &Uri, incoming: Incoming, shared: &Shared) -> std::result::Result<(Request, Body), Cut> {
    let parameters: Arc<[(String, String)]> =
        url::form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).into_owned().collect();
    let value = |name: &str| parameters.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let number = shared.numbers.fetch_add(1, Ordering::Relaxed) + 1;
    let mut request = Request {
        number,
        kind: Kind::Other,
        token: None,
        attempt: 0,
        table: None,
        sql: value("query").unwrap_or_default().to_owned(),
        parameters: Arc::clone(&parameters),
    };
    if request.sql.trim_start().get(..6).is_some_and(|word| word.eq_ignore_ascii_case("insert")) {
        request.kind = Kind::Insert;
        request.table = table(&request.sql).map(Arc::from);
        request.token = value("insert_deduplication_token").map(Arc::from);
        if let Some(token) = &request.token {
            request.attempt = lock(&shared.log).attempt(token);
        }
        return Ok((request, incoming.map_err(io::Error::other).boxed()));
    }
    let body =
        collect(incoming.map_err(io::Error::other).boxed(), WHOLE, &AtomicUsize::new(0), WHOLE).await?;
    if request.sql.is_empty() {
        request.sql = String::from_utf8_lossy(&body[..body.len().min(SHOWN)]).into_owned();
    }
    Ok((request, whole(body)))
}

/// The table of `INSERT INTO [database.]table …`, without quotes.
fn table(sql: &str) -> Option<&str> {
    let mut words = sql.split_ascii_whitespace().skip(2);
    let name = words.next()?.split('(').next()?;
    let name = name.rsplit('.').next()?;
    Some(name.trim_matches(|quote| quote == '`' || quote == '"'))
}

fn whole(body: Bytes) -> Body {
    Full::new(body).map_err(|never: Infallible| match never {}).boxed()
}

fn hop_by_hop(headers: &mut HeaderMap) {
    for name in [header::CONNECTION, header::TRANSFER_ENCODING, HeaderName::from_static("keep-alive")] {
        headers.remove(name);
    }
}

fn short(response: &hyper::Response<Body>) -> Answered {
    let code = response.headers().get(EXCEPTION_CODE).and_then(|code| code.to_str().ok()?.parse().ok());
    Answered { status: response.status().as_u16(), code }
}

/// Sends a request on, over a connection of its own: one that is kept could be cut by another request's fate.
async fn forward(
    parts: hyper::http::request::Parts,
    body: Body,
    shared: &Shared,
) -> std::result::Result<hyper::Response<Body>, Cut> {
    let stream = TcpStream::connect(shared.target()).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = client::handshake(TokioIo::new(stream)).await?;
    // It ends with the answer's body, or when nobody waits for it any more.
    tokio::spawn(connection);
    let response = sender.send_request(hyper::Request::from_parts(parts, body)).await?;
    let (mut parts, body) = response.into_parts();
    hop_by_hop(&mut parts.headers);
    Ok(hyper::Response::from_parts(parts, body.map_err(io::Error::other).boxed()))
}

/// Takes in a whole answer that the client will not see.
async fn finish(response: hyper::Response<Body>) -> std::result::Result<Answered, Cut> {
    let answered = short(&response);
    drain(response.into_body()).await?;
    Ok(answered)
}

async fn drain(mut body: Body) -> std::result::Result<(), Cut> {
    while let Some(frame) = body.frame().await {
        frame?;
    }
    Ok(())
}

/// Reads a body of at most `limit` bytes, as long as all that are `held` stay below `budget`.
async fn collect(
    mut body: Body,
    limit: usize,
    held: &AtomicUsize,
    budget: usize,
) -> std::result::Result<Bytes, Cut> {
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        bytes.extend_from_slice(&data);
        if bytes.len() > limit || held.load(Ordering::Relaxed) + bytes.len() > budget {
            return Err(Cut);
        }
    }
    Ok(bytes.freeze())
}

/// The first bytes of a body, and then an error in the place of its end.
fn cut_after(body: Body, after: u64) -> Body {
    let mut left = usize::try_from(after).unwrap_or(usize::MAX);
    let frames = BodyStream::new(body)
        .map(move |frame| {
            let mut data = frame?.into_data().map_err(|_| io::ErrorKind::ConnectionAborted)?;
            if left == 0 {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            data.truncate(left);
            left -= data.len();
            Ok(Frame::data(data))
        })
        // A body that is shorter has no end either.
        .chain(futures_util::stream::once(async { Err(io::ErrorKind::ConnectionAborted.into()) }));
    BodyExt::boxed(StreamBody::new(frames))
}

/// Counts held bytes until it is dropped.
struct Held {
    shared: Arc<Shared>,
    bytes: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shared.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Takes the whole request, and sends it on after `event` whether or not the client still waits.
async fn held(
    parts: hyper::http::request::Parts,
    body: Body,
    recording: &Arc<Recording>,
    event: impl Future<Output = ()> + Send + 'static,
) -> std::result::Result<hyper::Response<Body>, Cut> {
    let shared = Arc::clone(&recording.shared);
    let body = collect(body, HELD, &shared.held, HELD).await?;
    shared.held.fetch_add(body.len(), Ordering::Relaxed);
    let counted = Held { shared: Arc::clone(&shared), bytes: body.len() };
    let (tell, told) = oneshot::channel();
    let recording = Arc::clone(recording);
    {
        let mut late = lock(&shared.late);
        while late.try_join_next().is_some() {}
        let shared = Arc::clone(&shared);
        late.spawn(async move {
            event.await;
            if let Ok(response) = forward(parts, whole(body), &shared).await {
                recording.server(short(&response));
                if let Err(response) = tell.send(response) {
                    // The client has gone; ClickHouse goes on all the same.
                    let _: std::result::Result<(), Cut> = drain(hyper::Response::into_body(response)).await;
                }
            }
            drop(counted);
        });
    }
    told.await.map_err(|_| Cut)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream as Blocking;

    use super::*;
    use crate::wait;

    const SOON: Duration = Duration::from_secs(20);

    /// A server that answers each request with the length of its body, and counts those it read whole.
    fn counting() -> (SocketAddr, Arc<AtomicU64>) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let whole = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&whole);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let counter = Arc::clone(&counter);
                std::thread::spawn(move || {
                    let mut bytes = Vec::new();
                    let mut piece = [0; 1024];
                    loop {
                        let Ok(count) = stream.read(&mut piece) else { return };
                        if count == 0 {
                            return;
                        }
                        bytes.extend_from_slice(&piece[..count]);
                        let text = String::from_utf8_lossy(&bytes);
                        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                        let length = head
                            .lines()
                            .find_map(|line| {
                                line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok()
                            })
                            .unwrap_or(0_usize);
                        if body.len() < length {
                            continue;
                        }
                        counter.fetch_add(1, Ordering::SeqCst);
                        let body = length.to_string();
                        let _ =
                            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                        return;
                    }
                });
            }
        });
        (addr, whole)
    }

    fn insert(proxy: &HttpProxy, token: &str, body: &str) -> String {
        let mut stream = Blocking::connect(proxy.addr()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        write!(
            stream,
            "POST /?query=INSERT+INTO+%60d%60.%60t0%60+(a)+FORMAT+JSONEachRow&insert_deduplication_token={token} \
             HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    fn ended(proxy: &HttpProxy, count: usize) -> Vec<Record> {
        wait::until("the records", SOON, || {
            let (records, _) = proxy.records();
            (records.len() == count).then_some(records)
        })
        .unwrap()
    }

    #[test]
    fn each_fate_and_its_record() {
        let (addr, whole) = counting();
        let proxy = HttpProxy::start(addr).unwrap();
        assert!(insert(&proxy, "a", "12345").ends_with("\r\n5"));
        proxy.set_hook(|request| {
            assert!(request.inserts_into("t0"), "{request:?}");
            assert_eq!(request.parameter("insert_deduplication_token"), request.token.as_deref());
            match request.token.as_deref() {
                Some("refused") => Fate::Answer(Answer::wrong_password()),
                Some("swallowed") if request.attempt == 1 => Fate::Answer(Answer::rename_failed()),
                Some("swallowed") => Fate::Answer(Answer::success()),
                Some("lost") => Fate::LoseAnswer,
                Some("lied") => Fate::ForwardThenAnswer(Answer::other(502, "Bad Gateway")),
                Some("body") => Fate::CutBody(3),
                Some("cut") => Fate::Cut,
                _ => Fate::Forward,
            }
        });
        let refused = insert(&proxy, "refused", "1");
        assert!(
            refused.starts_with("HTTP/1.1 403") && refused.contains("Code: 516. DB::Exception: "),
            "{refused}"
        );
        assert!(refused.contains("x-clickhouse-exception-code: 516"), "{refused}");
        assert!(insert(&proxy, "swallowed", "1").contains("Code: 1001"));
        assert!(insert(&proxy, "swallowed", "1").starts_with("HTTP/1.1 200"));
        assert_eq!(insert(&proxy, "lost", "1"), "");
        assert!(insert(&proxy, "lied", "1").starts_with("HTTP/1.1 502"));
        assert_eq!(insert(&proxy, "body", "12345"), "");
        assert_eq!(insert(&proxy, "cut", "12345"), "");
        assert_eq!(whole.load(Ordering::SeqCst), 3, "a, lost, lied");
        let records = ended(&proxy, 8);
        let of = |token: &str| records.iter().rfind(|record| record.token.as_deref() == Some(token)).unwrap();
        assert!(of("swallowed").is_swallowed() && of("swallowed").attempt == 2);
        assert!(of("lost").server.is_some() && of("lost").client.is_none());
        assert!(of("lied").server.unwrap().is_success() && of("lied").client.unwrap().status == 502);
        assert!(of("body").server.is_none() && of("cut").client.is_none());
        assert_eq!(of("refused").client, Some(Answered { status: 403, code: Some(516) }));
    }

    #[test]
    fn a_held_request_lands_without_its_client() {
        let (addr, whole) = counting();
        let proxy = HttpProxy::start(addr).unwrap();
        let gate = Gate::default();
        let held = gate.clone();
        proxy.set_hook(move |_| Fate::HoldUntil(held.clone()));
        let mut stream = Blocking::connect(proxy.addr()).unwrap();
        write!(stream, "POST /?query=INSERT+INTO+t HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab")
            .unwrap();
        wait::until_true("the body to be held", SOON, || proxy.shared.held.load(Ordering::SeqCst) == 2)
            .unwrap();
        drop(stream);
        assert_eq!(whole.load(Ordering::SeqCst), 0);
        gate.open();
        wait::until_true("the request to land", SOON, || whole.load(Ordering::SeqCst) == 1).unwrap();
        let record = ended(&proxy, 1).remove(0);
        assert!(record.server.is_some(), "{record:?}");
        assert_eq!(proxy.shared.held.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn silence_and_refusal() {
        let (addr, whole) = counting();
        let proxy = HttpProxy::start(addr).unwrap();
        proxy.silent(true);
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| insert(&proxy, "a", "123"));
            wait::until_true("the request to be taken", SOON, || proxy.accepted() == 1).unwrap();
            assert!(!asked.is_finished());
            proxy.silent(false);
            assert!(asked.join().unwrap().ends_with('3'));
        });
        assert_eq!(whole.load(Ordering::SeqCst), 1);
        proxy.refuse(true).unwrap();
        assert!(Blocking::connect(proxy.addr()).is_err());
        proxy.refuse(false).unwrap();
        assert!(insert(&proxy, "b", "1").ends_with('1'));
    }

    #[test]
    fn tables_of_inserts() {
        assert_eq!(table("INSERT INTO `d`.`t0` (`a`) FORMAT X"), Some("t0"));
        assert_eq!(table("INSERT INTO t0(a) FORMAT X"), Some("t0"));
        assert_eq!(table("INSERT"), None);
    }

    #[test]
    fn memory_is_bounded() {
        let mut log = Log::default();
        for number in 0..TOKENS + 10 {
            assert_eq!(log.attempt(&Arc::from(number.to_string())), 1);
        }
        assert_eq!((log.attempts.len(), log.tokens.len()), (TOKENS, TOKENS));
        assert_eq!(log.attempt(&Arc::from("0")), 1, "the oldest was forgotten");
    }
}
