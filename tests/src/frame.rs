//! The NATS protocol's frames, as bytes that can be looked at and passed on unchanged.

use std::fmt;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

/// The longest control line taken. A server's own limit is 4 KiB, but its INFO can be longer.
pub const LONGEST_LINE: usize = 64 * 1024;
/// The largest payload taken, headers included: the most that a server can be configured to.
pub const LARGEST_PAYLOAD: usize = 64 * 1024 * 1024;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the protocol's own words")]
pub enum Verb {
    Info,
    Connect,
    Pub,
    HPub,
    Msg,
    HMsg,
    Sub,
    Unsub,
    Ping,
    Pong,
    Ok,
    Err,
}

impl Verb {
    fn parse(word: &str) -> Option<Self> {
        const WORDS: [(&str, Verb); 12] = [
            ("INFO", Verb::Info),
            ("CONNECT", Verb::Connect),
            ("PUB", Verb::Pub),
            ("HPUB", Verb::HPub),
            ("MSG", Verb::Msg),
            ("HMSG", Verb::HMsg),
            ("SUB", Verb::Sub),
            ("UNSUB", Verb::Unsub),
            ("PING", Verb::Ping),
            ("PONG", Verb::Pong),
            ("+OK", Verb::Ok),
            ("-ERR", Verb::Err),
        ];
        WORDS.iter().find(|(name, _)| name.eq_ignore_ascii_case(word)).map(|&(_, verb)| verb)
    }
}

/// What cannot be a frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// A control line without an end.
    #[error("a control line of more than {LONGEST_LINE} bytes")]
    LongLine,
    /// A payload that no server would take.
    #[error("a payload of {0} bytes, more than {LARGEST_PAYLOAD}")]
    LargePayload(usize),
    /// A line that is not the protocol's.
    #[error("not the NATS protocol: {0:?}")]
    Line(String),
    /// A payload that does not end where its frame said.
    #[error("a payload that does not end where it should")]
    PayloadEnd,
}

/// One frame.
#[derive(Clone, PartialEq, Eq)]
pub struct Frame {
    raw: Bytes,
    verb: Verb,
    /// Within `raw`, empty where the frame has none.
    subject: Range<usize>,
    reply: Range<usize>,
    arguments: Range<usize>,
    headers: Range<usize>,
    payload: Range<usize>,
}

impl Frame {
    /// What it is.
    #[must_use]
    pub fn verb(&self) -> Verb {
        self.verb
    }

    /// The subject; empty for frames without one.
    #[must_use]
    pub fn subject(&self) -> &str {
        self.text(&self.subject)
    }

    /// The reply subject, if it has one.
    #[must_use]
    pub fn reply(&self) -> Option<&str> {
        if self.reply.is_empty() { None } else { Some(self.text(&self.reply)) }
    }

    /// The control line after the verb: the JSON of an INFO, the text of an error.
    #[must_use]
    pub fn arguments(&self) -> &str {
        self.text(&self.arguments)
    }

    /// The headers as they were sent (`NATS/1.0 …`), empty if it has none.
    #[must_use]
    pub fn headers(&self) -> &[u8] {
        &self.raw[self.headers.clone()]
    }

    /// A header's first value, trimmed.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        std::str::from_utf8(self.headers()).ok()?.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.trim().eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }

    /// The status of a message without a row, such as 408, 409 or 423: `NATS/1.0 409 …`.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        let first = std::str::from_utf8(self.headers()).ok()?.lines().next()?;
        first.strip_prefix("NATS/1.0")?.split_ascii_whitespace().next()?.parse().ok()
    }

    /// The payload without its headers.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.raw[self.payload.clone()]
    }

    /// The whole frame as it was sent.
    #[must_use]
    pub fn raw(&self) -> &Bytes {
        &self.raw
    }

    fn text(&self, range: &Range<usize>) -> &str {
        // The control line was checked when the frame was made.
        std::str::from_utf8(&self.raw[range.clone()]).unwrap_or_default()
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("verb", &self.verb)
            .field("arguments", &self.arguments())
            .field("headers", &String::from_utf8_lossy(self.headers()))
            .field("payload", &self.payload().len())
            .finish_non_exhaustive()
    }
}

/// Cuts a stream of bytes into frames.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: BytesMut,
    /// So much of the buffer has no line end in it; not looked at twice.
    searched: usize,
    /// The frame whose payload has not arrived whole.
    waiting: Option<Line>,
}

/// A control line, understood.
#[derive(Debug)]
struct Line {
    verb: Verb,
    /// With its line end.
    length: usize,
    subject: Range<usize>,
    reply: Range<usize>,
    arguments: Range<usize>,
    headers: usize,
    /// Headers and payload; `None` for a frame without either.
    total: Option<usize>,
}

impl Decoder {
    /// Takes what has arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame, or `None` when more bytes are needed.
    ///
    /// # Errors
    /// When what has arrived is not the protocol. The stream cannot be followed from there on.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let line = match self.waiting.take() {
            Some(line) => line,
            None => match self.line()? {
                Some(line) => line,
                None => return Ok(None),
            },
        };
        let end = line.length + line.total.map_or(0, |total| total + 2);
        if self.buffer.len() < end {
            self.waiting = Some(line);
            return Ok(None);
        }
        if line.total.is_some() && &self.buffer[end - 2..end] != b"\r\n" {
            return Err(FrameError::PayloadEnd);
        }
        let headers = line.length..line.length + line.headers;
        let payload = headers.end..line.length + line.total.unwrap_or(0);
        Ok(Some(Frame {
            raw: self.buffer.split_to(end).freeze(),
            verb: line.verb,
            subject: line.subject,
            reply: line.reply,
            arguments: line.arguments,
            headers,
            payload,
        }))
    }

    /// The control line at the head of the buffer, once it is whole.
    fn line(&mut self) -> Result<Option<Line>, FrameError> {
        let Some(end) = self.buffer[self.searched..].iter().position(|&byte| byte == b'\n') else {
            self.searched = self.buffer.len();
            return if self.searched > LONGEST_LINE { Err(FrameError::LongLine) } else { Ok(None) };
        };
        let length = self.searched + end + 1;
        self.searched = 0;
        if length > LONGEST_LINE {
            return Err(FrameError::LongLine);
        }
        parse(&self.buffer[..length]).map(Some)
    }
}

fn parse(bytes: &[u8]) -> Result<Line, FrameError> {
    let bad = || FrameError::Line(String::from_utf8_lossy(&bytes[..bytes.len().min(80)]).into_owned());
    let text = std::str::from_utf8(bytes).map_err(|_| bad())?.trim_end_matches(['\r', '\n']);
    let verb_end = text.find([' ', '\t']).unwrap_or(text.len());
    let verb = Verb::parse(&text[..verb_end]).ok_or_else(bad)?;
    let arguments = verb_end + (text[verb_end..].len() - text[verb_end..].trim_start().len())..text.len();
    let words = words(text, arguments.clone());
    let number = |range: &Range<usize>| {
        let word = &text[range.clone()];
        // `parse` alone would take a sign.
        if word.bytes().all(|byte| byte.is_ascii_digit()) { word.parse::<usize>().ok() } else { None }
    };
    let none = 0..0;
    let (subject, reply, headers, total) = match (verb, words.as_slice()) {
        (Verb::Pub, [subject, total]) | (Verb::Msg, [subject, _, total]) => {
            (subject, &none, None, Some(total))
        }
        (Verb::Pub, [subject, reply, total]) | (Verb::Msg, [subject, _, reply, total]) => {
            (subject, reply, None, Some(total))
        }
        (Verb::HPub, [subject, headers, total]) | (Verb::HMsg, [subject, _, headers, total]) => {
            (subject, &none, Some(headers), Some(total))
        }
        (Verb::HPub, [subject, reply, headers, total])
        | (Verb::HMsg, [subject, _, reply, headers, total]) => (subject, reply, Some(headers), Some(total)),
        (Verb::Sub, [subject, _] | [subject, _, _]) => (subject, &none, None, None),
        (Verb::Unsub, [_] | [_, _])
        | (Verb::Ping | Verb::Pong | Verb::Ok, [])
        | (Verb::Info | Verb::Connect | Verb::Err, _) => (&none, &none, None, None),
        _ => return Err(bad()),
    };
    let total = total.map(|range| number(range).ok_or_else(bad)).transpose()?;
    let headers = headers.map(|range| number(range).ok_or_else(bad)).transpose()?.unwrap_or(0);
    if let Some(total) = total {
        if total > LARGEST_PAYLOAD {
            return Err(FrameError::LargePayload(total));
        }
        if headers > total {
            return Err(bad());
        }
    }
    let (subject, reply) = (subject.clone(), reply.clone());
    Ok(Line { verb, length: bytes.len(), subject, reply, arguments, headers, total })
}

/// Where the words are.
fn words(text: &str, within: Range<usize>) -> Vec<Range<usize>> {
    let mut words = Vec::with_capacity(5);
    let mut begin = None;
    for (at, byte) in text.bytes().enumerate().take(within.end).skip(within.start) {
        match (byte == b' ' || byte == b'\t', begin) {
            (true, Some(from)) => {
                words.push(from..at);
                begin = None;
            }
            (false, None) => begin = Some(at),
            _ => {}
        }
    }
    if let Some(from) = begin {
        words.push(from..within.end);
    }
    words
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All frames of these bytes, given in pieces of this size.
    fn frames(bytes: &[u8], piece: usize) -> Result<Vec<Frame>, FrameError> {
        let mut decoder = Decoder::default();
        let mut frames = Vec::new();
        for piece in bytes.chunks(piece.max(1)) {
            decoder.push(piece);
            while let Some(frame) = decoder.next_frame()? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }

    const SESSION: &[u8] = b"INFO {\"server_name\":\"a b\"}\r\nCONNECT {}\r\nPING\r\nPONG\r\n+OK\r\n\
        SUB a.* 1\r\nSUB a.* group 2\r\nUNSUB 1\r\nUNSUB 2 5\r\nPUB a.b 0\r\n\r\nPUB a.b re.ply 5\r\nhe\r\no\r\n\
        MSG a.b 1 2\r\nhi\r\nMSG a.b 1 re.ply 2\r\nhi\r\n\
        HPUB a.b 12 14\r\nNATS/1.0\r\n\r\nhi\r\n\
        HMSG a.b 1 re.ply 34 34\r\nNATS/1.0 409 Gone\r\nNats-Pin: x\r\n\r\n\r\n-ERR 'Bad Subject'\r\nmsg a 1 0\r\n\r\n";

    #[test]
    fn a_session_in_pieces_of_any_size() {
        for piece in 1..=SESSION.len() {
            let frames = frames(SESSION, piece).unwrap();
            assert_eq!(frames.len(), 17, "{frames:?}");
            assert_eq!(frames.iter().flat_map(|frame| frame.raw().to_vec()).collect::<Vec<_>>(), SESSION);
        }
    }

    #[test]
    fn the_parts_of_a_frame() {
        let frames = frames(SESSION, 7).unwrap();
        assert_eq!((frames[0].verb(), frames[0].arguments()), (Verb::Info, "{\"server_name\":\"a b\"}"));
        assert_eq!((frames[5].verb(), frames[5].subject()), (Verb::Sub, "a.*"));
        assert_eq!((frames[9].payload(), frames[9].reply()), (&b""[..], None));
        assert_eq!((frames[10].payload(), frames[10].reply()), (&b"he\r\no"[..], Some("re.ply")));
        assert_eq!(
            (frames[12].verb(), frames[12].reply(), frames[12].payload()),
            (Verb::Msg, Some("re.ply"), &b"hi"[..])
        );
        assert_eq!((frames[13].headers(), frames[13].payload()), (&b"NATS/1.0\r\n\r\n"[..], &b"hi"[..]));
        assert_eq!(frames[13].status(), None);
        assert_eq!((frames[14].status(), frames[14].header("nats-pin")), (Some(409), Some("x")));
        assert_eq!(frames[14].subject(), "a.b");
        assert!(frames[14].payload().is_empty());
        assert_eq!((frames[15].verb(), frames[15].arguments()), (Verb::Err, "'Bad Subject'"));
        assert_eq!(frames[16].verb(), Verb::Msg);
    }

    #[test]
    fn a_large_payload_in_small_pieces() {
        let mut bytes = format!("PUB a {}\r\n", 3 << 20).into_bytes();
        bytes.resize(bytes.len() + (3 << 20), b'\n');
        bytes.extend_from_slice(b"\r\nPING\r\n");
        let frames = frames(&bytes, 1000).unwrap();
        assert_eq!(frames[0].payload().len(), 3 << 20);
        assert_eq!(frames[1].verb(), Verb::Ping);
    }

    #[test]
    fn hostile_lengths_are_errors() {
        let huge = format!("PUB a {}\r\n", LARGEST_PAYLOAD + 1);
        assert_eq!(frames(huge.as_bytes(), 9), Err(FrameError::LargePayload(LARGEST_PAYLOAD + 1)));
        for line in [
            "PUB a 18446744073709551616\r\n",
            "PUB a -1\r\n",
            "PUB a +1\r\n",
            "PUB a\r\n",
            "PUB a b c 1\r\n",
            "HPUB a 5 4\r\nabcd\r\n",
            "HMSG a 1 99999999999999999999 4\r\n",
            "MSG a 1 \r\n",
            "PING now\r\n",
            "GET / HTTP/1.1\r\n",
            "\r\n",
        ] {
            assert!(matches!(frames(line.as_bytes(), 3), Err(FrameError::Line(_))), "{line:?}");
        }
        assert_eq!(frames(b"PUB a 2\r\nhiho\r\n", 4), Err(FrameError::PayloadEnd));
        assert_eq!(frames(&vec![b'x'; LONGEST_LINE + 1], 1000), Err(FrameError::LongLine));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), piece in 1_usize..50) {
            let _ = frames(&bytes, piece);
        }

        #[test]
        fn nearly_right_bytes_neither(at in 0..SESSION.len(), byte: u8, piece in 1_usize..50) {
            let mut bytes = SESSION.to_vec();
            bytes[at] = byte;
            let _ = frames(&bytes, piece);
        }
    }
}
