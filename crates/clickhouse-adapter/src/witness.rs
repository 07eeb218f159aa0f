//! Who answered?
//!
//! The `clickhouse` crate takes whatever answers 200 for ClickHouse's success, and shows neither status nor headers. A
//! proxy's holding page would be a stored batch. So the heads of the answers are read along on their way through the
//! connection, and an insert counts as stored only if ClickHouse itself has signed the answer with its
//! `X-ClickHouse-Query-Id`. (Every version since 2018 sends it; a proxy passes it on unless it is told not to.)

use std::collections::BTreeMap;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use hyper::Uri;
use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use tower_service::Service;

/// The longest head of an answer that is looked at, in bytes. ClickHouse's is about 1 KB.
const MAX_HEAD: usize = 16 << 10;

/// What was seen of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The HTTP status.
    pub(crate) status: u16,
    /// Whether ClickHouse has answered, and not somebody before it.
    pub(crate) clickhouse: bool,
}

/// The answers that somebody waits for, by the id of their query.
#[derive(Clone, Debug, Default)]
pub(crate) struct Witness(Arc<Mutex<BTreeMap<String, Option<Seen>>>>);

impl Witness {
    /// Looks out for the answer to the query named `id`.
    pub(crate) fn expect(&self, id: &str) -> Expected {
        self.lock().insert(id.to_owned(), None);
        Expected { id: id.to_owned(), witness: self.clone() }
    }

    fn saw(&self, id: &str, seen: Seen) {
        if let Some(slot) = self.lock().get_mut(id) {
            *slot = Some(seen);
        }
    }

    /// A poisoned lock guards nothing that could be half-done here.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Option<Seen>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An answer that is waited for. Nothing stays behind when it is dropped.
#[derive(Debug)]
pub(crate) struct Expected {
    id: String,
    witness: Witness,
}

impl Expected {
    /// What was seen of the answer; none if its head has not come.
    pub(crate) fn seen(&self) -> Option<Seen> {
        self.witness.lock().get(&self.id).copied().flatten()
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.witness.lock().remove(&self.id);
    }
}

/// A connector whose connections are read along.
#[derive(Clone, Debug)]
pub(crate) struct Attended<C> {
    connector: C,
    witness: Witness,
}

impl<C> Attended<C> {
    pub(crate) fn new(connector: C, witness: Witness) -> Self {
        Self { connector, witness }
    }
}

impl<C> Service<Uri> for Attended<C>
where
    C: Service<Uri>,
    C::Future: Send + 'static,
{
    type Response = Attend<C::Response>;
    type Error = C::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.connector.poll_ready(cx)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let witness = self.witness.clone();
        let connecting = self.connector.call(uri);
        Box::pin(async move { connecting.await.map(|io| Attend { io, reader: Reader::new(witness) }) })
    }
}

/// A connection that is read along.
#[derive(Debug)]
pub(crate) struct Attend<T> {
    io: T,
    reader: Reader,
}

impl<T: Read + Unpin> Read for Attend<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.reader.wants_more() {
            return Pin::new(&mut this.io).poll_read(cx, into);
        }
        // Only heads take this way: what comes is copied once more.
        let mut bytes = [0; 4096];
        let room = into.remaining().min(bytes.len());
        let mut buffer = ReadBuf::new(&mut bytes[..room]);
        ready!(Pin::new(&mut this.io).poll_read(cx, buffer.unfilled()))?;
        this.reader.read(buffer.filled());
        into.put_slice(buffer.filled());
        Poll::Ready(Ok(()))
    }
}

impl<T: Write + Unpin> Write for Attend<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        this.reader.wrote(bytes);
        Pin::new(&mut this.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        this.reader.wrote(parts.iter().find(|part| !part.is_empty()).map_or(&[], |part| &**part));
        Pin::new(&mut this.io).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl<T: Connection> Connection for Attend<T> {
    fn connected(&self) -> Connected {
        self.io.connected()
    }
}

/// Follows the requests and answers of one connection, which take turns.
#[derive(Debug)]
struct Reader {
    witness: Witness,
    /// The query whose answer comes next, if it names one.
    asked: Option<String>,
    head: Vec<u8>,
    /// The head of the answer is complete, or not to be understood: what follows is its body, up to the next request.
    past_head: bool,
}

impl Reader {
    fn new(witness: Witness) -> Self {
        Self { witness, asked: None, head: Vec::new(), past_head: true }
    }

    fn wants_more(&self) -> bool {
        !self.past_head
    }

    /// `bytes` are about to be sent: of a request's first ones, its head is a part.
    fn wrote(&mut self, bytes: &[u8]) {
        if self.past_head && bytes.starts_with(b"POST ") {
            self.asked = query_id(bytes);
            self.head.clear();
            self.past_head = false;
        }
    }

    /// `bytes` have come.
    fn read(&mut self, bytes: &[u8]) {
        let from = self.head.len().saturating_sub(3);
        self.head.extend_from_slice(bytes);
        if let Some(end) = self.head[from..].windows(4).position(|four| four == b"\r\n\r\n") {
            let seen = look(&self.head[..from + end]);
            // "Go on": the answer itself is yet to come.
            if let Some(Seen { status: 100..=199, .. }) = seen {
                self.head.drain(..from + end + 4);
                let rest = std::mem::take(&mut self.head);
                if !rest.is_empty() {
                    self.read(&rest);
                }
                return;
            }
            if let (Some(id), Some(seen)) = (self.asked.take(), seen) {
                self.witness.saw(&id, seen);
            }
        } else if self.head.len() < MAX_HEAD && !bytes.is_empty() {
            return;
        }
        self.past_head = true;
        self.head = Vec::new();
    }
}

/// The `query_id` in the first line of a request. Ours have nothing that a URL would escape.
fn query_id(request: &[u8]) -> Option<String> {
    const NAME: &[u8] = b"query_id=";
    let line = request.split(|&byte| byte == b'\r').next()?;
    let at = line
        .windows(NAME.len() + 1)
        .position(|window| matches!(window[0], b'?' | b'&') && &window[1..] == NAME)?;
    let value = &line[at + 1 + NAME.len()..];
    let end = value.iter().position(|&byte| matches!(byte, b'&' | b' ')).unwrap_or(value.len());
    String::from_utf8(value[..end].to_vec()).ok()
}

/// What the head of an answer says.
fn look(head: &[u8]) -> Option<Seen> {
    let head = String::from_utf8_lossy(head);
    let mut lines = head.split("\r\n");
    let status = lines.next()?.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    let clickhouse = lines.filter_map(|line| line.split_once(':')).any(|(name, value)| {
        ["X-ClickHouse-Query-Id", "X-ClickHouse-Exception-Code"]
            .iter()
            .any(|own| own.eq_ignore_ascii_case(name))
            && !value.trim().is_empty()
    });
    Some(Seen { status, clickhouse })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const REQUEST: &[u8] =
        b"POST /?query=INSERT%26query_id%3Dx&other_query_id=no&query_id=s-1&a=b HTTP/1.1\r\nhost: h\r\n\r\n";
    const OURS: &[u8] = b"HTTP/1.1 200 OK\r\nDate: now\r\nx-clickhouse-query-id: other\r\n\r\nbody";

    /// What is seen of `answer`, however it is cut on its way.
    fn seen(answer: &[u8], piece: usize) -> Option<Seen> {
        let witness = Witness::default();
        let expected = witness.expect("s-1");
        let mut reader = Reader::new(witness.clone());
        reader.wrote(REQUEST);
        reader.wrote(b"POST /?query_id=s-2 in a body");
        for bytes in answer.chunks(piece) {
            if reader.wants_more() {
                reader.read(bytes);
            }
        }
        let seen = expected.seen();
        drop(expected);
        assert!(witness.lock().is_empty());
        seen
    }

    #[test]
    fn clickhouse_is_told_from_others() {
        for (answer, status, clickhouse) in [
            (OURS, 200, true),
            (b"HTTP/1.1 500 x\r\nX-ClickHouse-Exception-Code: 60\r\n\r\n", 500, true),
            (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX-ClickHouse-Query-Id: a\r\n\r\n", 200, true),
            (b"HTTP/1.1 200 OK\r\nServer: proxy\r\n\r\nX-ClickHouse-Query-Id: s-1\r\n\r\n", 200, false),
            (b"HTTP/1.1 200 OK\r\nX-ClickHouse-Query-Id:\r\n\r\n", 200, false),
            (b"HTTP/1.0 502 Bad Gateway\r\n\r\n", 502, false),
            (b"HTTP/1.1 302 Found\r\nLocation: /X-ClickHouse-Query-Id: 1\r\n\r\n", 302, false),
        ] {
            for piece in [1, 3, 7, 4096] {
                assert_eq!(seen(answer, piece), Some(Seen { status, clickhouse }), "{piece}");
            }
        }
    }

    #[test]
    fn what_is_no_head_is_not_seen() {
        for answer in
            [&b""[..], b"HTTP/1.1 200 OK\r\n", b"SSH-2.0\r\n\r\n", b"HTTP/1.1 x\r\n\r\n", &vec![b'x'; 40_000]]
        {
            assert_eq!(seen(answer, 4096), None);
        }
    }

    #[test]
    fn answers_belong_to_their_requests() {
        let witness = Witness::default();
        let (one, two) = (witness.expect("1"), witness.expect("2"));
        let mut reader = Reader::new(witness);
        reader.wrote(b"POST /?query_id=1 HTTP/1.1\r\n");
        reader.read(b"HTTP/1.1 502 Bad Gateway\r\n\r\n");
        assert!(!reader.wants_more());
        reader.wrote(b"the rest of the body");
        assert!(!reader.wants_more());
        reader.wrote(b"POST /?query_id=2 HTTP/1.1\r\n");
        reader.read(OURS);
        assert_eq!(one.seen(), Some(Seen { status: 502, clickhouse: false }));
        assert_eq!(two.seen(), Some(Seen { status: 200, clickhouse: true }));
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read(parts in proptest::collection::vec(any::<(bool, Vec<u8>)>(), 0..20)) {
            let mut reader = Reader::new(Witness::default());
            for (ours, bytes) in parts {
                if ours {
                    reader.wrote(&[b"POST ", &bytes[..]].concat());
                } else if reader.wants_more() {
                    reader.read(&bytes);
                }
            }
        }
    }
}
