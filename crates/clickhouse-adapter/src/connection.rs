//! The HTTP connection, and whether anybody answers on it.

use std::sync::Arc;
use std::time::Duration;

use clickhouse::Client;
use holdfast_core::ports::store::Refusal;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use thiserror::Error as ThisError;

use crate::config::{Checked, Compression, ConfigError};
use crate::error::{Class, Failure};
use crate::witness::{Attended, Witness};

/// Shorter than the keep-alive of any ClickHouse (3 s before 23.11, 10 s or 30 s since), so that an insert is not
/// sent into a connection that the server is closing.
const POOL_IDLE: Duration = Duration::from_secs(2);

/// What a connection may be silent beyond an insert's own limit before it is cut. The limits of the insert come
/// first; this one ends connections whose insert was given up.
const SILENCE_MARGIN: Duration = Duration::from_secs(5);

/// A client for `checked`'s server. Connects to nothing yet.
///
/// The `clickhouse` crate's own connections have no time limits: one that was given up while the server does not
/// answer would stay for ever. These are bounded in each phase.
pub(crate) fn client(checked: &Checked, witness: &Witness) -> Result<Client, ConfigError> {
    let config = &checked.config;
    let mut http = HttpConnector::new();
    http.set_nodelay(true);
    http.set_keepalive(Some(Duration::from_mins(1)));
    http.enforce_http(false);
    let connector = if checked.url.scheme() == "https" {
        // The system's certificates, or those of SSL_CERT_FILE: a company's own authority is common here.
        HttpsConnectorBuilder::new()
            .with_provider_and_native_roots(rustls::crypto::ring::default_provider())
            .map_err(|_| ConfigError::NoRoots(checked.url.host_str().unwrap_or_default().to_owned()))?
            .https_only()
    } else {
        // No certificates are looked for where none are used: there may be none, in a small container.
        HttpsConnectorBuilder::new().with_tls_config(no_tls()?).https_or_http()
    };
    let client = bounded(connector.enable_http1().wrap_connector(http), checked, witness);
    Ok(client
        .with_url(checked.url.as_str())
        .with_user(&config.user)
        .with_password(config.password.reveal())
        .with_compression(match config.compression {
            Compression::Lz4 => clickhouse::Compression::Lz4,
            Compression::None => clickhouse::Compression::None,
        })
        .with_product_info("holdfast", env!("CARGO_PKG_VERSION")))
}

/// TLS that trusts nobody: what a plain connection's type needs, and never uses.
fn no_tls() -> Result<rustls::ClientConfig, ConfigError> {
    Ok(rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| ConfigError::Url(error.to_string()))?
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth())
}

fn bounded(connector: HttpsConnector<HttpConnector>, checked: &Checked, witness: &Witness) -> Client {
    let silence =
        checked.config.insert_timeout.max(checked.config.query_timeout).saturating_add(SILENCE_MARGIN);
    let mut connector = TimeoutConnector::new(connector);
    connector.set_connect_timeout(Some(checked.config.connect_timeout));
    connector.set_read_timeout(Some(silence));
    connector.set_write_timeout(Some(silence));
    connector.set_reset_reader_on_write(true);
    let connector = Attended::new(connector, witness.clone());
    let http = HttpClient::builder(TokioExecutor::new()).pool_idle_timeout(POOL_IDLE).build(connector);
    Client::with_http_client(http)
}

/// A server that answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Its version, such as `26.7.2.1`.
    pub version: String,
    /// Whom it takes us for.
    pub user: String,
    /// Whether [`Config::database`](crate::Config::database) exists.
    pub has_database: bool,
}

/// Why no server answered as it should.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
pub enum PingError {
    /// No connection came about.
    #[error("{at}: {}; is ClickHouse running there, and is clickhouse.url its HTTP port (8123, or 8443 with TLS)?", .refusal.message)]
    Unreachable {
        /// The host and port.
        at: String,
        /// What happened.
        refusal: Refusal,
    },
    /// The server does not let us in, or not ask.
    #[error(
        "ClickHouse at {at} refuses the user {user:?}: {refusal}; check clickhouse.user and clickhouse.password"
    )]
    Denied {
        /// The host and port.
        at: String,
        /// The user.
        user: String,
        /// The server's words.
        refusal: Refusal,
    },
    /// Something answers, but not ClickHouse's HTTP interface.
    #[error("what answers at {at} does not speak ClickHouse's HTTP interface: {}; 9000 is ClickHouse's native port, 8123 its HTTP port", .refusal.message)]
    NotClickHouse {
        /// The host and port.
        at: String,
        /// What it said.
        refusal: Refusal,
    },
    /// Connected, and then nothing.
    #[error("{at} accepted the connection and did not answer within {after:?}")]
    Silent {
        /// The host and port.
        at: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// ClickHouse itself reports an error.
    #[error("ClickHouse at {at} cannot answer: {refusal}")]
    Failed {
        /// The host and port.
        at: String,
        /// The server's words.
        refusal: Refusal,
    },
}

impl PingError {
    pub(crate) fn of(at: String, user: &str, failure: Failure) -> Self {
        let nothing_written = failure.nothing_written();
        let refusal = failure.refusal;
        match refusal {
            Refusal { class: Class::Access, code: Some(_), .. } => {
                Self::Denied { at, user: user.to_owned(), refusal }
            }
            Refusal { code: Some(_), .. } => Self::Failed { at, refusal },
            _ if nothing_written => Self::Unreachable { at, refusal },
            _ => Self::NotClickHouse { at, refusal },
        }
    }
}
