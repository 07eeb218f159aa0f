//! Answers that are not ClickHouse's.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use holdfast_clickhouse::{Class, Compression, PingError};
use holdfast_core::ports::store::{DescribeError, InsertOutcome};
use holdfast_testbed::ClickHouse;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::bed::*;

/// Stands between: passes everything on, or answers it itself.
struct Between {
    addr: SocketAddr,
    answer: watch::Sender<Option<Arc<str>>>,
}

impl Between {
    async fn start(server: &ClickHouse) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (addr, to) = (listener.local_addr().unwrap(), server.addr());
        let (answer, changes) = watch::channel(None);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let mut changes = changes.clone();
                let answer = changes.borrow_and_update().clone();
                // A connection lasts until it is decided otherwise.
                tokio::spawn(async move {
                    tokio::select! {
                        () = serve(client, to, answer) => {}
                        _ = changes.changed() => {}
                    }
                });
            }
        });
        Self { addr, answer }
    }

    async fn set(&self, answer: Option<&str>) {
        self.answer.send_replace(answer.map(Into::into));
        // Until the other side has seen its connections end.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    fn url(&self) -> String {
        format!("http://{}", self.addr)
    }
}

async fn serve(mut client: TcpStream, to: SocketAddr, answer: Option<Arc<str>>) {
    let Some(answer) = answer else {
        let mut server = TcpStream::connect(to).await.unwrap();
        let _ = copy_bidirectional(&mut client, &mut server).await;
        return;
    };
    let mut bytes = vec![0; 1 << 20];
    let _ = client.read(&mut bytes).await;
    let _ = client.write_all(answer.as_bytes()).await;
    if !answer.contains("\r\n\r\n") || answer.contains("Content-Length: 9") {
        return;
    }
    // The rest of the request, so that the answer is not lost to a reset.
    while client.read(&mut bytes).await.is_ok_and(|len| len > 0) {}
}

fn page(head: &str, body: &str) -> String {
    format!("HTTP/1.1 {head}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
}

#[tokio::test(flavor = "multi_thread")]
async fn only_clickhouse_stores_and_refuses() {
    let server = ClickHouse::start().unwrap();
    plain(&server, "t");
    let between = Between::start(&server).await;
    let bed = Bed::new(between.url(), |config| config.compression = Compression::None);
    assert_eq!(bed.put("t", "a", rows(1..=3)).await, InsertOutcome::Stored);
    let html = "<html>\u{1b}[2J Code: 60. At row 7</html>";
    for (answer, class, words) in [
        (page("200 OK", ""), Class::Table, "in ClickHouse's place"),
        (page("200 OK", html), Class::Table, "in ClickHouse's place"),
        (page("200 OK\r\nX-ClickHouse-Summary: {}", ""), Class::Table, "in ClickHouse's place"),
        (page("204 No Content", ""), Class::Table, "204"),
        (page("302 Found\r\nLocation: http://elsewhere/", ""), Class::Table, "must name the server itself"),
        (page("401 Unauthorized", ""), Class::Access, "401"),
        (page("403 Forbidden", html), Class::Access, "403"),
        (page("404 Not Found", html), Class::Doubt, "404"),
        (page("413 Payload Too Large", html), Class::Table, "lower batch.max_bytes"),
        (page("429 Too Many Requests", ""), Class::Doubt, "429"),
        (page("502 Bad Gateway", html), Class::Doubt, "502"),
        (page("503 Service Unavailable", "Code: 60. DB::Exception: no"), Class::Doubt, "503"),
        (page("500 Oops", "Code: 27. DB::Exception: (at row 2)"), Class::Doubt, "500"),
        ("SSH-2.0-OpenSSH\r\n".to_owned(), Class::Doubt, ""),
        ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n".to_owned(), Class::Doubt, ""),
        (String::new(), Class::Doubt, ""),
    ] {
        for size in [4, 20_000] {
            // What is asked before an insert is known.
            assert!(bed.describe("t").await.is_ok());
            between.set(Some(&answer)).await;
            let refusal = doubt(bed.put("t", "b", rows(4..=3 + size)).await);
            assert_eq!(
                (refusal.class, refusal.code, refusal.row),
                (class, None, None),
                "{answer:?}: {refusal}"
            );
            assert!(refusal.message.contains(words), "{answer:?}: {refusal}");
            assert!(!refusal.message.contains('\u{1b}'), "{refusal}");
            // Now it is not known any more, and nothing is sent.
            let refusal = again(bed.put("t", "b", rows(4..=3 + size)).await);
            assert!(
                refusal.class != Class::Doubt && refusal.message.contains(words),
                "{answer:?}: {refusal}"
            );
            // An empty page is no empty table.
            let refusal = bed.read_back("t", 1, 9).await.unwrap_err();
            assert!(refusal.code.is_none(), "{answer:?}: {refusal}");
            assert!(matches!(bed.describe("t").await, Err(DescribeError::Failed(_))), "{answer:?}");
            assert!(matches!(bed.store.ping().await, Err(PingError::NotClickHouse { .. })), "{answer:?}");
            between.set(None).await;
        }
    }
    assert_eq!(bed.put("t", "b", rows(4..=6)).await, InsertOutcome::Stored);
    assert_eq!(server.query("SELECT count() FROM t").unwrap(), "6");
    // One that says it is ClickHouse's is believed: whoever can forge that can forge anything.
    between.set(Some(&page("200 OK\r\nX-ClickHouse-Query-Id: whatever", ""))).await;
    assert_eq!(bed.put("t", "c", rows(7..=9)).await, InsertOutcome::Stored);
}
