//! What the daemon serves over HTTP, on `node.listen`: metrics, health, readiness, status, and a page that shows it.
//!
//! It is small on purpose: no request changes anything, none carries a body, each connection serves one request
//! and is bounded in time, and only so many are served at once, so that nobody who reaches the port can take more
//! than a little from the daemon.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tracing::{debug, warn};

use crate::exit::Exit;
use crate::process::Process;

/// Requests served at once; others wait for their turn.
const CONNECTIONS: usize = 64;

/// A connection that has not got its answer by then is closed.
const TIME: Duration = Duration::from_secs(10);

const PAGE: &str = include_str!("status.html");

/// Takes the address.
///
/// # Errors
/// Why not, and what to set instead.
pub async fn bind(listen: &str) -> Result<TcpListener, Exit> {
    TcpListener::bind(listen).await.map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => Exit::error(format!(
            "node.listen: {listen} is taken, perhaps by another daemon on this machine; give each an address of \
             its own (--set node.listen=127.0.0.1:9465), or none (--set node.listen=)"
        )),
        _ => Exit::error(format!("node.listen: cannot listen on {listen}: {error}")),
    })
}

/// Serves for ever.
pub async fn serve(listener: TcpListener, process: Arc<Process>) {
    let service = TowerToHyperService::new(routes(process));
    let turns = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(turn) = Arc::clone(&turns).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Above all: no file descriptors left. They come back.
                warn!("node.listen: {error}; tried again");
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        let service = service.clone();
        tokio::spawn(async move {
            let connection =
                http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service);
            if let Ok(Err(error)) = tokio::time::timeout(TIME, connection).await {
                debug!("node.listen: {error}");
            }
            drop(turn);
        });
    }
}

fn routes(process: Arc<Process>) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/healthz", get(async || text(StatusCode::OK, "ok\n".to_owned())))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/status", get(status))
        .fallback(async || {
            let known = "here are /, /status, /metrics, /healthz and /readyz\n";
            text(StatusCode::NOT_FOUND, known.to_owned())
        })
        .with_state(process)
}

type Shared = State<Arc<Process>>;

async fn readyz(State(process): Shared) -> Response {
    let causes = process.causes();
    if causes.is_empty() {
        return text(StatusCode::OK, "ready\n".to_owned());
    }
    text(StatusCode::SERVICE_UNAVAILABLE, causes.join("\n") + "\n")
}

async fn metrics(State(process): Shared) -> Response {
    answer(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", process.render_metrics())
}

async fn status(State(process): Shared) -> Response {
    match serde_json::to_string(&process.document()) {
        Ok(document) => answer(StatusCode::OK, "application/json", document),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

async fn page() -> Response {
    // Only the page's own script and style are run, whatever gets into it.
    let nonce = format!("{:032x}", rand::random::<u128>());
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let mut response = answer(StatusCode::OK, "text/html; charset=utf-8", PAGE.replace("{{nonce}}", &nonce));
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    response
}

fn text(code: StatusCode, body: String) -> Response {
    answer(code, "text/plain; charset=utf-8", body)
}

fn answer(code: StatusCode, kind: &'static str, body: String) -> Response {
    const HEADERS: [(HeaderName, &str); 3] = [
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (code, [(header::CONTENT_TYPE, kind)], HEADERS, body).into_response()
}

#[cfg(test)]
mod tests {
    use holdfast_core::budget::Share;
    use holdfast_core::claims;
    use holdfast_core::member::{Fault, MemberId, Scope};
    use holdfast_core::notice::{Notice, Report, Trouble};
    use holdfast_core::ports::dead_letters::Cause;
    use holdfast_core::ports::store::{Level, Target};
    use holdfast_core::record::Session;
    use holdfast_core::row::{Seq, ShardId, TableName};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;
    use crate::clock::Clock;
    use crate::config::Config;
    use crate::document::Document;
    use crate::driver::Observer;
    use crate::process::Stage;
    use crate::shards::Watcher;

    async fn started() -> (Arc<Process>, std::net::SocketAddr) {
        let config: Config = serde_json::from_str(
            r#"{"topology": {"shards": 2}, "tables": {"clicks": {}}, "nats": {"user": "u", "password": "hunter2"}}"#,
        )
        .unwrap();
        let process = Arc::new(Process::new(&config, Session(7), Clock::start()));
        let listener = bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, Arc::clone(&process)));
        (process, address)
    }

    async fn get(address: std::net::SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    fn watchers(process: &Arc<Process>) -> [Watcher; 2] {
        let (reports, _) = tokio::sync::mpsc::unbounded_channel();
        [0, 1].map(|shard| Watcher::new(ShardId(shard), Arc::clone(process), reports.clone()))
    }

    #[tokio::test]
    async fn ready_once_every_shard_has_its_record_and_none_has_ended() {
        let (process, address) = started().await;
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        let answer = get(address, "/readyz").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("starting"), "{answer}");
        process.enter(Stage::Running);
        let answer = get(address, "/readyz").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("members"), "{answer}");
        let me = MemberId::new("me").unwrap();
        let shard = |shard| claims::ShardStatus {
            shard: ShardId(shard),
            home: Some(&me),
            mine: "standby",
            pin: None,
            owners: Vec::new(),
            standbys: Vec::new(),
            failed: Vec::new(),
            paused: Vec::new(),
            unowned: false,
        };
        let tell = |shards| {
            process.share(&claims::Status {
                phase: "running",
                ready: true,
                deaf: false,
                leads: true,
                members: Vec::new(),
                shards,
                share: Share::even(1_000, 1 << 20, 2),
            });
        };
        tell(vec![shard(0), shard(1)]);
        let [first, second] = watchers(&process);
        first.report(&Report::Ready);
        second.notice(&Notice::Waiting { what: "read the ledger", why: "no answer".into() });
        let answer = get(address, "/readyz").await;
        assert!(
            answer.ends_with("not taken yet: shard 1: cannot read the ledger now (no answer)\n"),
            "{answer}"
        );
        second.report(&Report::Ready);
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        process.with(ShardId(1), |view| {
            view.failure = Some(holdfast_core::notice::ShardFailure::ConsumerGone("gone".into()));
        });
        let answer = get(address, "/readyz").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("shard 1 ended: gone\n"), "{answer}");
        // Somebody else can have it: one of a newer version, say.
        let other = MemberId::new("other").unwrap();
        let fault = Fault::new("too new", Scope::Here);
        let left = |home| claims::ShardStatus { home, mine: "free", failed: vec![(&me, &fault)], ..shard(1) };
        tell(vec![shard(0), left(Some(&other))]);
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        assert!(get(address, "/metrics").await.contains("holdfast_shards_unowned 0"));
        tell(vec![shard(0), left(None)]);
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 503"));
        assert!(get(address, "/metrics").await.contains("holdfast_shards_unowned 1"));
    }

    #[tokio::test]
    async fn hostile_tables_stay_text_and_share_a_label() {
        let (process, address) = started().await;
        let [watcher, _] = watchers(&process);
        let hostile = TableName::new("</script><img src=x onerror=alert(1)>\"\\\n\u{1b}[31m");
        let trouble = Trouble::Stopped("<b>why</b>".into());
        process.with(ShardId(0), |view| view.troubles = vec![(hostile.clone(), trouble)]);
        let target = Target { database: "d".into(), table: "<i>".into(), level: Level::Deduplicated };
        watcher.notice(&Notice::Described { table: hostile.clone(), target });
        for table in [hostile.clone(), TableName::new("clicks"), TableName::new("another")] {
            let notice =
                Notice::Parked { table, seq: Seq(4), cause: Cause::Payload, code: None, why: "x".into() };
            watcher.notice(&notice);
        }
        let answer = get(address, "/status").await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("application/json") && head.contains("nosniff"), "{head}");
        let document: Document = serde_json::from_str(body).unwrap();
        assert_eq!(document.shards[0].troubles[0].table, hostile.as_str());
        assert_eq!(document.weaker_tables[0].target, "d.<i>");
        assert_eq!(document.shards[0].counts.rows_dead_lettered, 3);
        assert!(!answer.contains("hunter2"));
        let metrics = get(address, "/metrics").await;
        assert!(!metrics.contains("onerror"), "{metrics}");
        for line in [
            "holdfast_rows_dead_lettered_total{table=\"other\",reason=\"payload\"} 2",
            "holdfast_rows_dead_lettered_total{table=\"clicks\",reason=\"payload\"} 1",
            "holdfast_rows_written_total{table=\"clicks\"} 0",
            "holdfast_held_rows{shard=\"1\"} 0",
        ] {
            assert!(metrics.lines().any(|found| found == line), "{line} is not in {metrics}");
        }
    }

    #[tokio::test]
    async fn the_page_runs_its_own_script_only() {
        let (_, address) = started().await;
        let (one, other) = (get(address, "/").await, get(address, "/").await);
        let nonce = one.split("script-src 'nonce-").nth(1).unwrap().split('\'').next().unwrap();
        assert!(one.contains(&format!("<script nonce=\"{nonce}\">")), "{one}");
        assert!(!other.contains(nonce) && !one.contains("{{"), "{one}");
        // Nothing is written as markup, and nothing is asked of anybody else.
        for never in ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "src=", "@import", "url("]
        {
            assert!(!PAGE.contains(never), "{never}");
        }
    }

    #[tokio::test]
    async fn a_port_that_is_taken_says_what_to_set() {
        let first = bind("127.0.0.1:0").await.unwrap();
        let address = first.local_addr().unwrap().to_string();
        let error = bind(&address).await.unwrap_err();
        let message = error.message().unwrap();
        assert!(message.contains(&address) && message.contains("--set node.listen"), "{message}");
    }
}
