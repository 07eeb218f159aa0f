//! A connection to NATS, shared by everything that uses it.
//!
//! Cheap to clone. A daemon opens two: one for deliveries, one for the ledger and the JetStream API, so that
//! compare-and-set answers do not queue behind a flood of rows.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;

use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event, ServerAddr, ServerError, Subscriber};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::errors::cut;
use crate::request::{Hub, Listener};

/// The oldest nats-server that resets consumers.
pub const MINIMUM_VERSION: (u32, u32) = (2, 14);

/// How often the server is asked for a sign of life; after two questions without an answer the connection is
/// given up and made anew.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// Messages that may wait for a subscriber before the client drops them. A queue this long costs nothing
/// while it is empty; what can be in it is bounded by the pulls that asked for it.
const SUBSCRIPTION_CAPACITY: usize = 262_144;

/// The longest wait between two attempts to reconnect.
const RECONNECT_CAP: Duration = Duration::from_secs(1);

/// The pause between two attempts of the first connect.
const FIRST_CONNECT_PAUSE: Duration = Duration::from_millis(200);

/// The pause before a client that failed is replaced.
const REVIVAL_PAUSE: Duration = Duration::from_millis(200);

/// Who connects. Its `Debug` form shows no secret.
#[derive(Clone, Default)]
pub enum Credentials {
    /// Nobody in particular.
    #[default]
    None,
    /// A `.creds` file: user JWT and nkey seed.
    File(PathBuf),
    /// User and password.
    Password {
        /// The user.
        user: String,
        /// The password.
        password: String,
    },
    /// A token.
    Token(String),
    /// An nkey seed.
    Nkey(String),
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::File(_) => "File(…)",
            Self::Password { .. } => "Password(…)",
            Self::Token(_) => "Token(…)",
            Self::Nkey(_) => "Nkey(…)",
        })
    }
}

/// TLS, beyond what a `tls://` address asks for.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// Certificates to trust beside the system's own (PEM).
    pub ca: Option<PathBuf>,
    /// The client's certificate and its key (PEM).
    pub client: Option<(PathBuf, PathBuf)>,
}

/// How to connect. Its `Debug` form shows no secret: not the addresses either, which may hold one.
#[derive(Clone)]
pub struct Options {
    /// Addresses, comma separated: `nats://` or `tls://`. A user and password in an address are taken as
    /// [`Credentials`] if those are none.
    pub url: String,
    /// Who connects.
    pub credentials: Credentials,
    /// TLS.
    pub tls: Tls,
    /// The node's name; the server shows the connection as `holdfast <node>`.
    pub node: String,
    /// How long the first connect may take, retries included. Later reconnects go on for ever.
    pub timeout: Duration,
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("node", &self.node)
            .field("credentials", &self.credentials)
            .field("tls", &self.tls)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

impl Options {
    /// Connects to `url` as nobody in particular, for ten seconds at most.
    #[must_use]
    pub fn new(url: impl Into<String>, node: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            credentials: Credentials::None,
            tls: Tls::default(),
            node: node.into(),
            timeout: Duration::from_secs(10),
        }
    }
}

/// Why there is no connection. One line each, without secrets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The address list cannot be read. The address itself is not shown: it may hold a password.
    #[error("NATS address number {number} is not an address such as nats://host:4222: {reason}")]
    Address {
        /// Counted from 1.
        number: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The credentials file cannot be used.
    #[error("cannot use the NATS credentials file {path}: {reason}")]
    CredentialsFile {
        /// Its path.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The server does not accept the user.
    #[error("nats-server at {servers} does not accept the credentials ({reason})")]
    Denied {
        /// Where.
        servers: String,
        /// The client's words.
        reason: String,
    },
    /// TLS cannot be set up.
    #[error("no TLS connection to nats-server at {servers}: {reason}")]
    Tls {
        /// Where.
        servers: String,
        /// The client's words.
        reason: String,
    },
    /// Nobody could be reached in time.
    #[error("no nats-server at {servers} within {seconds} s: {reason}")]
    Unreachable {
        /// Where.
        servers: String,
        /// How long was tried.
        seconds: u64,
        /// The last attempt's error.
        reason: String,
    },
    /// The server cannot reset consumers.
    #[error("nats-server {version} at {servers} is too old; Holdfast needs 2.14 or newer (consumer reset)")]
    TooOld {
        /// Where.
        servers: String,
        /// Its version.
        version: String,
    },
}

/// A connection. Cheap to clone; closed when the last clone is gone.
#[derive(Clone, Debug)]
pub struct Connection {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    client: RwLock<Client>,
    /// The client's own task has ended: nothing goes in or out until there is another client.
    dead: AtomicBool,
    hub: Arc<Hub>,
    servers: String,
    reply_prefix: String,
    guard: OnceLock<AbortHandle>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.get() {
            guard.abort();
        }
    }
}

impl Inner {
    fn client(&self) -> Client {
        // A client is put there whole, or not at all.
        self.client.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Hands answers to their requests. That ends when the client's own task does, which no broken connection
/// brings about but a panic: of some headers that a publisher can write the client panics. Then there is a new
/// client, on the same terms, in its place.
async fn guard(inner: Weak<Inner>, options: Options, hub: Arc<Hub>, mut replies: Subscriber) {
    loop {
        Arc::clone(&hub).answer(replies).await;
        let Some(reply_prefix) = inner.upgrade().map(|inner| {
            inner.dead.store(true, Ordering::Release);
            inner.reply_prefix.clone()
        }) else {
            return;
        };
        tracing::error!("the NATS client failed; making a new one");
        hub.disconnected();
        replies = loop {
            tokio::time::sleep(REVIVAL_PAUSE).await;
            let client = match establish(&options, &hub).await {
                Ok((client, _)) => client,
                Err(error) => {
                    tracing::warn!(%error, "no new NATS client yet");
                    continue;
                }
            };
            let Ok(replies) = client.subscribe(format!("{reply_prefix}.*")).await else { continue };
            let Some(inner) = inner.upgrade() else { return };
            *inner.client.write().unwrap_or_else(PoisonError::into_inner) = client;
            inner.dead.store(false, Ordering::Release);
            break replies;
        };
        hub.connected();
    }
}

/// Connects, for `options.timeout` at most; the client, and the addresses without secrets.
async fn establish(options: &Options, hub: &Arc<Hub>) -> Result<(Client, String), ConnectError> {
    let (addresses, servers, from_url) = addresses(&options.url)?;
    let credentials = match &options.credentials {
        Credentials::None => from_url,
        given => given.clone(),
    };
    let deadline = Instant::now() + options.timeout;
    loop {
        let prepared = prepare(options, &credentials, hub).await?;
        let before = hub.connects();
        let error = match tokio::time::timeout_at(deadline, prepared.connect(&addresses[..])).await {
            Ok(Ok(client)) => {
                // The client tells of its connects from a task of its own. Counted later, this one would pass for
                // a reconnect, and what was being sent meanwhile for lost.
                let left = deadline.saturating_duration_since(Instant::now());
                let _ = hub.wait_for_connect(left, || hub.connects() > before).await;
                return Ok((client, servers));
            }
            Ok(Err(error)) => error,
            Err(_) => {
                return Err(ConnectError::Unreachable {
                    servers,
                    seconds: options.timeout.as_secs(),
                    reason: "no answer".to_owned(),
                });
            }
        };
        let reason = cut(&error.to_string());
        match error.kind() {
            ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
                return Err(ConnectError::Denied { servers, reason });
            }
            ConnectErrorKind::Tls => return Err(ConnectError::Tls { servers, reason }),
            _ if Instant::now() + FIRST_CONNECT_PAUSE < deadline => {
                tokio::time::sleep(FIRST_CONNECT_PAUSE).await;
            }
            _ => {
                let seconds = options.timeout.as_secs();
                return Err(ConnectError::Unreachable { servers, seconds, reason });
            }
        }
    }
}

/// The addresses of a list, stripped of user and password, and those.
fn addresses(url: &str) -> Result<(Vec<ServerAddr>, String, Credentials), ConnectError> {
    let mut servers = Vec::new();
    let mut shown = Vec::new();
    let mut found = Credentials::None;
    for (index, part) in url.split(',').map(str::trim).filter(|part| !part.is_empty()).enumerate() {
        let bad = |reason: &str| ConnectError::Address { number: index + 1, reason: reason.to_owned() };
        let (scheme, rest) = part.split_once("://").unwrap_or(("nats", part));
        if scheme != "nats" && scheme != "tls" {
            return Err(bad("only nats:// and tls:// are supported"));
        }
        let (user, host) = match rest.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, rest),
        };
        let host = host.trim_end_matches('/');
        if host.is_empty() || host.contains(|c: char| c == '/' || c.is_whitespace()) {
            return Err(bad("host and port cannot be read"));
        }
        // The address without user and password: the client's debug log prints addresses whole.
        let address = format!("{scheme}://{host}");
        servers.push(address.parse().map_err(|_| bad("host and port cannot be read"))?);
        shown.push(host.to_owned());
        if let (Some(user), Credentials::None) = (user, &found) {
            let text = |part: &str| {
                percent_encoding::percent_decode_str(part)
                    .decode_utf8()
                    .map(std::borrow::Cow::into_owned)
                    .map_err(|_| bad("user or password is not UTF-8"))
            };
            found = match user.split_once(':') {
                Some((user, password)) => {
                    Credentials::Password { user: text(user)?, password: text(password)? }
                }
                None => Credentials::Token(text(user)?),
            };
        }
    }
    if servers.is_empty() {
        return Err(ConnectError::Address { number: 1, reason: "the list is empty".to_owned() });
    }
    Ok((servers, shown.join(", "), found))
}

/// `major.minor` of a version such as `2.15.1` or `v2.14.0-RC.1`.
fn version_of(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.trim_start_matches('v').split(['.', '-']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

impl Connection {
    /// Connects, and checks the server's version. Tries again until `options.timeout`, but not when the
    /// server refuses the user.
    ///
    /// # Errors
    ///
    /// See [`ConnectError`].
    pub async fn open(options: &Options) -> Result<Self, ConnectError> {
        let hub = Arc::new(Hub::new());
        let (client, servers) = establish(options, &hub).await?;
        let version = client.server_info().version;
        if version_of(&version).is_none_or(|version| version < MINIMUM_VERSION) {
            return Err(ConnectError::TooOld { servers, version: cut(&version) });
        }
        let reply_prefix = client.new_inbox();
        let replies = match client.subscribe(format!("{reply_prefix}.*")).await {
            Ok(subscriber) => subscriber,
            Err(error) => {
                let reason = cut(&error.to_string());
                return Err(ConnectError::Unreachable { servers, seconds: 0, reason });
            }
        };
        let inner = Arc::new(Inner {
            client: RwLock::new(client),
            dead: AtomicBool::new(false),
            hub: Arc::clone(&hub),
            servers,
            reply_prefix,
            guard: OnceLock::new(),
        });
        let guard = tokio::spawn(guard(Arc::downgrade(&inner), options.clone(), hub, replies));
        let _ = inner.guard.set(guard.abort_handle());
        Ok(Self { inner })
    }

    /// The client itself, for what this crate does not offer. Not to be kept: another may take its place.
    #[must_use]
    pub fn client(&self) -> Client {
        self.inner.client()
    }

    /// The configured addresses, without user and password.
    #[must_use]
    pub fn servers(&self) -> &str {
        &self.inner.servers
    }

    /// The connected server's version.
    #[must_use]
    pub fn server_version(&self) -> String {
        cut(&self.client().server_info().version)
    }

    /// The largest message the server takes, headers included, in bytes.
    #[must_use]
    pub fn max_payload(&self) -> usize {
        self.client().max_payload()
    }

    /// Whether there is a connection now.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        !self.inner.dead.load(Ordering::Acquire)
            && self.client().connection_state() == async_nats::connection::State::Connected
    }

    /// Waits until there is a connection, for `limit` at most; whether there is.
    pub async fn connected(&self, limit: Duration) -> bool {
        self.is_connected() || self.inner.hub.wait_for_connect(limit, || self.is_connected()).await
    }

    pub(crate) fn hub(&self) -> &Arc<Hub> {
        &self.inner.hub
    }

    pub(crate) fn reply_prefix(&self) -> &str {
        &self.inner.reply_prefix
    }

    /// Tells `listener` of disruptions and denials for as long as it lives.
    pub(crate) fn listen(&self, listener: std::sync::Weak<dyn Listener>) {
        self.inner.hub.listen(listener);
    }
}

async fn prepare(
    options: &Options,
    credentials: &Credentials,
    hub: &Arc<Hub>,
) -> Result<ConnectOptions, ConnectError> {
    let hub = Arc::clone(hub);
    let mut prepared = ConnectOptions::new()
        .name(format!("holdfast {}", options.node))
        .ping_interval(PING_INTERVAL)
        .subscription_capacity(SUBSCRIPTION_CAPACITY)
        .connection_timeout(options.timeout.min(Duration::from_secs(5)))
        .max_reconnects(None)
        .reconnect_delay_callback(|attempts| {
            let doublings = u32::try_from(attempts.saturating_sub(1)).unwrap_or(u32::MAX);
            // The first attempt at once, then 2, 4, 8 … ms.
            let millis = if doublings == 0 { 0 } else { 2_u64.saturating_pow(doublings) };
            Duration::from_millis(millis).min(RECONNECT_CAP)
        })
        .event_callback(move |event| {
            let hub = Arc::clone(&hub);
            async move { on_event(&hub, &event) }
        });
    if let Some(ca) = &options.tls.ca {
        prepared = prepared.add_root_certificates(ca.clone()).require_tls(true);
    }
    if let Some((certificate, key)) = &options.tls.client {
        prepared = prepared.add_client_certificate(certificate.clone(), key.clone()).require_tls(true);
    }
    Ok(match credentials {
        Credentials::None => prepared,
        Credentials::File(path) => prepared.credentials_file(path).await.map_err(|error| {
            // Only the kind: the text of a parse error may quote the file.
            ConnectError::CredentialsFile {
                path: path.display().to_string(),
                reason: error.kind().to_string(),
            }
        })?,
        Credentials::Password { user, password } => {
            prepared.user_and_password(user.clone(), password.clone())
        }
        Credentials::Token(token) => prepared.token(token.clone()),
        Credentials::Nkey(seed) => prepared.nkey(seed.clone()),
    })
}

fn on_event(hub: &Hub, event: &Event) {
    match event {
        Event::Connected => hub.connected(),
        Event::Disconnected => {
            tracing::warn!("the connection to the NATS server is lost; reconnecting");
            hub.disconnected();
        }
        Event::SlowConsumer(_) => {
            tracing::warn!("the NATS client dropped messages: a subscription could not keep up");
            hub.disrupted();
        }
        Event::ServerError(ServerError::Other(words)) => {
            if let Some(subject) = denied_publish(words) {
                hub.denied(subject);
            }
            if hub.is_news() {
                tracing::warn!(error = %cut(words), "the NATS server reported an error");
            }
        }
        _ => {}
    }
}

/// The subject of `Permissions Violation for Publish to "subject"`.
fn denied_publish(words: &str) -> Option<&str> {
    let words = words.trim_matches('\'');
    let rest = words.get(.."permissions violation for publish to ".len())?;
    if !rest.eq_ignore_ascii_case("permissions violation for publish to ") {
        return None;
    }
    words[rest.len()..].split('"').nth(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lose_their_secrets() {
        let (servers, shown, found) = addresses("nats://joe:s%40fe@one:4222, two:5000,tls://three").unwrap();
        assert_eq!(servers.len(), 3);
        assert_eq!(shown, "one:4222, two:5000, three");
        assert!(!format!("{servers:?}{shown}{found:?}").contains("fe@"));
        let Credentials::Password { user, password } = found else { panic!("{found:?}") };
        assert_eq!((user.as_str(), password.as_str()), ("joe", "s@fe"));
        let (_, _, token) = addresses("nats://t0ken@one").unwrap();
        assert!(matches!(token, Credentials::Token(token) if token == "t0ken"));
    }

    #[test]
    fn a_bad_address_is_named_by_its_number_only() {
        for url in ["nats://one,http://joe:secret@two", "nats://one,nats://joe:secret@two:port"] {
            let error = addresses(url).unwrap_err().to_string();
            assert!(error.contains("number 2"), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
        assert!(addresses(" , ").is_err());
    }

    #[test]
    fn debug_forms_hold_no_secret() {
        let mut options = Options::new("nats://joe:s3cret@one", "n");
        options.credentials = Credentials::Token("t0ken".into());
        let shown = format!("{options:?}");
        assert!(!shown.contains("s3cret") && !shown.contains("t0ken"), "{shown}");
    }

    #[test]
    fn versions_are_compared_by_number() {
        for (version, enough) in
            [("2.15.1", true), ("2.14.0-RC.1", true), ("v3.0", true), ("2.9.25", false), ("?", false)]
        {
            assert_eq!(version_of(version).is_some_and(|v| v >= MINIMUM_VERSION), enough, "{version}");
        }
    }

    #[test]
    fn denied_subjects_are_found() {
        assert_eq!(denied_publish("Permissions Violation for Publish to \"a.b\""), Some("a.b"));
        assert_eq!(denied_publish("Permissions Violation for Subscription to \"a.b\""), None);
        assert_eq!(denied_publish("é"), None);
        assert_eq!(denied_publish("Permissions Violation for Publish to "), None);
    }
}
