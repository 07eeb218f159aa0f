//! JetStream in the protocol's own words, over a plain socket.
//!
//! The judge reads with it, so that what it says rests on no client that Holdfast uses; and it publishes what
//! `holdfast publish` never would.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::error::{Context, Error, Result};
use crate::frame::{Decoder, Frame, Verb};

/// How long a server may be silent.
const PATIENCE: Duration = Duration::from_secs(20);
/// Rows published without having heard of the first of them.
const WINDOW: usize = 1_000;

/// A client for the server at one address: a connection for each call, so that it outlives restarts.
#[derive(Debug, Clone, Copy)]
pub struct JetStream {
    addr: SocketAddr,
    patience: Duration,
}

/// A message of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// The subject it is stored under.
    pub subject: String,
    /// Its sequence.
    pub seq: u64,
    /// Its headers as they were sent (`NATS/1.0 …`); empty without.
    pub headers: String,
    /// Its payload.
    pub payload: Vec<u8>,
}

impl Stored {
    /// A header's first value.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.trim().eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }
}

/// What a pull for one row brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pulled {
    /// A row, under this pin.
    Row {
        /// The pin, where there is one.
        pin: Option<String>,
    },
    /// The pull's end with this status.
    Nothing(u16),
}

impl JetStream {
    /// A client for the server at this address.
    #[must_use]
    pub fn new(addr: SocketAddr) -> Self {
        Self { addr, patience: PATIENCE }
    }

    /// How long the server may be silent; 20 s if not given.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Asks JetStream's interface: `STREAM.INFO.S` with a body such as `{}`.
    ///
    /// # Errors
    /// [`Error::Answer`] with the server's words when it refuses, [`Error::Io`] when it does not answer.
    pub fn api(&self, what: &str, body: &Value) -> Result<Value> {
        let answer = self.connect()?.request(&format!("$JS.API.{what}"), body.to_string().as_bytes())?;
        let value: Value =
            serde_json::from_slice(&answer).map_err(|_| refused(&String::from_utf8_lossy(&answer)))?;
        if value.get("error").is_some() { Err(refused(&value.to_string())) } else { Ok(value) }
    }

    /// What the server says of a stream.
    ///
    /// # Errors
    /// As [`api`](Self::api).
    pub fn stream(&self, stream: &str) -> Result<Value> {
        self.api(&format!("STREAM.INFO.{stream}"), &json!({}))
    }

    /// When a stream was created, in nanoseconds since 1970.
    ///
    /// # Errors
    /// As [`api`](Self::api).
    pub fn created(&self, stream: &str) -> Result<i128> {
        let info = self.stream(stream)?;
        let text = info["created"].as_str().unwrap_or_default();
        OffsetDateTime::parse(text, &Rfc3339)
            .map(OffsetDateTime::unix_timestamp_nanos)
            .map_err(|_| refused(text))
    }

    /// The stream that takes messages under this subject. Nothing is stored: it is asked with a message that says that
    /// it is for a stream that cannot be, and refuses it.
    ///
    /// # Errors
    /// When none takes it.
    pub fn taker(&self, subject: &str) -> Result<String> {
        let mut publisher = self.publisher()?;
        publisher.send_with(subject, &["Nats-Expected-Stream: no stream"], b"")?;
        let answer = publisher.0.answer()?;
        let text = String::from_utf8_lossy(answer.payload()).into_owned();
        let value: Value = serde_json::from_str(&text).map_err(|_| refused(&text))?;
        value["stream"].as_str().map(str::to_owned).ok_or_else(|| refused(&text))
    }

    /// What the server says of a consumer.
    ///
    /// # Errors
    /// As [`api`](Self::api).
    pub fn consumer(&self, stream: &str, consumer: &str) -> Result<Value> {
        self.api(&format!("CONSUMER.INFO.{stream}.{consumer}"), &json!({}))
    }

    /// How many messages a stream holds; none if there is no such stream.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn messages(&self, stream: &str) -> Result<u64> {
        match self.stream(stream) {
            Ok(info) => Ok(info["state"]["messages"].as_u64().unwrap_or_default()),
            Err(Error::Answer { answer, .. }) if answer.contains("stream not found") => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Publishes one message, and gives its sequence.
    ///
    /// # Errors
    /// When it is not stored.
    pub fn publish(&self, subject: &str, payload: &[u8]) -> Result<u64> {
        self.publish_all([(subject, payload)]).map(|seqs| seqs[0])
    }

    /// Publishes one message with headers (`Name: value`), and gives its sequence.
    ///
    /// # Errors
    /// When it is not stored.
    pub fn publish_with(&self, subject: &str, headers: &[&str], payload: &[u8]) -> Result<u64> {
        self.publisher()?.publish_with(subject, headers, payload)
    }

    /// Publishes messages in this order, and gives the sequence of each.
    ///
    /// # Errors
    /// When one is not stored; those before it may be.
    pub fn publish_all<S: AsRef<str>, P: AsRef<[u8]>>(
        &self,
        messages: impl IntoIterator<Item = (S, P)>,
    ) -> Result<Vec<u64>> {
        self.publisher()?.publish_all(messages)
    }

    /// A connection that is kept for publishing again and again.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn publisher(&self) -> Result<Publisher> {
        self.connect().map(Publisher)
    }

    /// Pulls one row from a consumer's priority group as somebody who is not pinned does, and waits for it as long.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn pull_unpinned(
        &self,
        stream: &str,
        consumer: &str,
        group: &str,
        expires: Duration,
    ) -> Result<Pulled> {
        let body =
            json!({ "batch": 1, "expires": u64::try_from(expires.as_nanos()).unwrap_or(u64::MAX), "group": group }).to_string();
        let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}");
        let answer = self.connect()?.ask(&subject, body.as_bytes())?;
        Ok(answer.status().map_or_else(
            || Pulled::Row { pin: answer.header("Nats-Pin-Id").map(str::to_owned) },
            Pulled::Nothing,
        ))
    }

    /// The pin of a consumer's priority group, while there is one.
    ///
    /// # Errors
    /// As [`api`](Self::api).
    pub fn pin(&self, stream: &str, consumer: &str) -> Result<Option<String>> {
        let info = self.consumer(stream, consumer)?;
        let pin = info["priority_groups"][0]["pinned_client_id"].as_str();
        Ok(pin.filter(|pin| !pin.is_empty()).map(str::to_owned))
    }

    /// All messages of a stream, in their order; none if there is no such stream.
    ///
    /// # Errors
    /// When the server refuses or does not answer.
    pub fn read(&self, stream: &str) -> Result<Vec<Stored>> {
        let mut connection = self.connect()?;
        let mut found = Vec::new();
        let mut next = 1;
        loop {
            let body = json!({ "seq": next, "next_by_subj": ">" }).to_string();
            let answer = connection.request(&format!("$JS.API.STREAM.MSG.GET.{stream}"), body.as_bytes())?;
            let value: Value = serde_json::from_slice(&answer)
                .map_err(|_| refused(&String::from_utf8_lossy(&answer[..answer.len().min(200)])))?;
            if let Some(error) = value.get("error") {
                return match error["err_code"].as_u64() {
                    // No message found; stream not found.
                    Some(10_037 | 10_059) => Ok(found),
                    _ => Err(refused(&error.to_string())),
                };
            }
            let message = &value["message"];
            let bytes = |field: &str| {
                let text = message[field].as_str().unwrap_or_default();
                BASE64_STANDARD.decode(text).map_err(|_| refused(text))
            };
            let seq = message["seq"].as_u64().ok_or_else(|| refused(&message.to_string()))?;
            found.push(Stored {
                subject: message["subject"].as_str().unwrap_or_default().to_owned(),
                seq,
                headers: String::from_utf8_lossy(&bytes("hdrs")?).into_owned(),
                payload: bytes("data")?,
            });
            next = seq + 1;
        }
    }

    fn connect(&self) -> Result<Connection> {
        Connection::open(self.addr, self.patience).context(|| format!("nats-server at {}", self.addr))
    }
}

/// Publishes over one connection. An error ends it: what was on its way may be stored or not.
#[derive(Debug)]
pub struct Publisher(Connection);

impl Publisher {
    /// Publishes one message with headers (`Name: value`), and gives its sequence.
    ///
    /// # Errors
    /// When it is not stored, or it is not known whether it is.
    pub fn publish_with(&mut self, subject: &str, headers: &[&str], payload: &[u8]) -> Result<u64> {
        self.send_with(subject, headers, payload)?;
        stored(&self.0.answer()?)
    }

    fn send_with(&mut self, subject: &str, headers: &[&str], payload: &[u8]) -> Result<()> {
        let headers = format!("NATS/1.0\r\n{}\r\n\r\n", headers.join("\r\n"));
        let total = headers.len() + payload.len();
        let connection = &mut self.0;
        let inbox = &connection.inbox;
        let mut bytes =
            format!("HPUB {subject} {inbox}.0 {} {total}\r\n{headers}", headers.len()).into_bytes();
        bytes.extend_from_slice(payload);
        bytes.extend_from_slice(b"\r\n");
        connection.send(&bytes)
    }

    /// Publishes messages in this order, and gives the sequence of each.
    ///
    /// # Errors
    /// When one is not stored; those before it may be.
    pub fn publish_all<S: AsRef<str>, P: AsRef<[u8]>>(
        &mut self,
        messages: impl IntoIterator<Item = (S, P)>,
    ) -> Result<Vec<u64>> {
        let connection = &mut self.0;
        let mut seqs: Vec<Option<u64>> = Vec::new();
        let mut answered = 0;
        let mut messages = messages.into_iter();
        let mut buffer = Vec::new();
        loop {
            buffer.clear();
            while seqs.len() - answered < WINDOW
                && buffer.len() < 1 << 20
                && let Some((subject, payload)) = messages.next()
            {
                let payload = payload.as_ref();
                let (inbox, sent) = (&connection.inbox, seqs.len());
                let line = format!("PUB {} {inbox}.{sent} {}\r\n", subject.as_ref(), payload.len());
                buffer.extend_from_slice(line.as_bytes());
                buffer.extend_from_slice(payload);
                buffer.extend_from_slice(b"\r\n");
                seqs.push(None);
            }
            connection.send(&buffer)?;
            if answered == seqs.len() {
                return Ok(seqs.into_iter().flatten().collect());
            }
            // Several streams answer in any order among them.
            let answer = connection.answer()?;
            let number: Option<usize> =
                answer.subject().rsplit('.').next().and_then(|number| number.parse().ok());
            let place = number.and_then(|number| seqs.get_mut(number)).filter(|place| place.is_none());
            *place.ok_or_else(|| refused(answer.subject()))? = Some(stored(&answer)?);
            answered += 1;
        }
    }
}

/// The sequence in a publish's answer.
fn stored(answer: &Frame) -> Result<u64> {
    let text = String::from_utf8_lossy(answer.payload()).into_owned();
    let value: Value = serde_json::from_str(&text).map_err(|_| refused(&text))?;
    match value["seq"].as_u64() {
        Some(seq) if value.get("error").is_none() => Ok(seq),
        _ => Err(refused(&text)),
    }
}

fn refused(answer: &str) -> Error {
    Error::Answer { what: "JetStream", answer: answer.chars().take(1_000).collect() }
}

#[derive(Debug)]
struct Connection {
    /// Of its own, so that no connection gets another one's answers.
    inbox: String,
    patience: Duration,
    stream: TcpStream,
    decoder: Decoder,
    frames: VecDeque<Frame>,
}

impl Connection {
    fn open(addr: SocketAddr, patience: Duration) -> std::io::Result<Self> {
        let stream = TcpStream::connect_timeout(&addr, patience)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        // The port is ours as long as the connection lives, and no other process of this machine has it.
        let inbox = format!("_TESTBED.{}", stream.local_addr()?.port());
        let mut connection =
            Self { inbox, patience, stream, decoder: Decoder::default(), frames: VecDeque::new() };
        let hello = "{\"verbose\":false,\"pedantic\":false,\"headers\":true,\"no_responders\":true,\"lang\":\"testbed\"}";
        let subscribe = format!("CONNECT {hello}\r\nSUB {}.* 1\r\n", connection.inbox);
        connection.stream.write_all(subscribe.as_bytes())?;
        Ok(connection)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).context(|| "cannot write to nats-server".to_owned())
    }

    fn request(&mut self, subject: &str, payload: &[u8]) -> Result<Vec<u8>> {
        Ok(self.ask(subject, payload)?.payload().to_vec())
    }

    fn ask(&mut self, subject: &str, payload: &[u8]) -> Result<Frame> {
        let mut bytes = format!("PUB {subject} {}.0 {}\r\n", self.inbox, payload.len()).into_bytes();
        bytes.extend_from_slice(payload);
        bytes.extend_from_slice(b"\r\n");
        self.send(&bytes)?;
        self.answer()
    }

    /// The next message to us.
    fn answer(&mut self) -> Result<Frame> {
        let until = Instant::now() + self.patience;
        loop {
            while let Some(frame) = self.frames.pop_front() {
                match frame.verb() {
                    Verb::HMsg if frame.status() == Some(503) => return Err(refused("no responders")),
                    Verb::Msg | Verb::HMsg => return Ok(frame),
                    Verb::Ping => self.send(b"PONG\r\n")?,
                    Verb::Err => return Err(refused(frame.arguments())),
                    _ => {}
                }
            }
            if Instant::now() > until {
                return Err(refused("no answer"));
            }
            let mut buffer = [0; 8 * 1024];
            let count =
                self.stream.read(&mut buffer).context(|| "cannot hear from nats-server".to_owned())?;
            if count == 0 {
                return Err(refused("the connection ended"));
            }
            self.decoder.push(&buffer[..count]);
            while let Some(frame) = self.decoder.next_frame().map_err(|error| refused(&error.to_string()))? {
                self.frames.push_back(frame);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NatsServer;

    #[test]
    fn what_is_published_is_read() {
        let server = NatsServer::start().unwrap();
        let js = server.jetstream();
        assert_eq!(js.messages("S").unwrap(), 0);
        assert_eq!(js.read("S").unwrap(), []);
        js.api("STREAM.CREATE.S", &json!({ "name": "S", "subjects": ["s.>"] })).unwrap();
        let rows: Vec<_> = (0..3_000).map(|n| (format!("s.{n}"), n.to_string())).collect();
        let stored = js.publish_all(rows).unwrap();
        assert_eq!(stored, (1..=3_000).collect::<Vec<u64>>());
        let big = vec![0xff; 900_000];
        assert_eq!(js.publish("s.big", &big).unwrap(), 3_001);
        let read = js.read("S").unwrap();
        assert_eq!(
            (read.len(), read[7].subject.as_str(), read[7].payload.as_slice()),
            (3_001, "s.7", &b"7"[..])
        );
        assert_eq!(read[3_000].payload, big);
        assert_eq!(js.messages("S").unwrap(), 3_001);
        assert_eq!(js.taker("s.x").unwrap(), "S");
        assert_eq!(js.messages("S").unwrap(), 3_001);
        let error = js.publish("nowhere", b"").unwrap_err();
        assert!(error.to_string().contains("no responders"), "{error}");
        assert!(js.consumer("S", "c").unwrap_err().to_string().contains("consumer not found"));
    }
}
