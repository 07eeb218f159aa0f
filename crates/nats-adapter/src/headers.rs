//! A stored message's header block, read without trust: whatever a publisher wrote by hand is no error.

/// The block's fields, in order. What is no field (the version line, a line without a colon) is left out; what is
/// no UTF-8 is replaced.
pub fn fields(block: &[u8]) -> impl Iterator<Item = (String, String)> + '_ {
    block.split(|byte| *byte == b'\n').skip(1).filter_map(|line| {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let name = text(&line[..colon]);
        (!name.is_empty()).then(|| (name, text(&line[colon + 1..])))
    })
}

/// The first value of a field.
#[must_use]
pub fn value(block: &[u8], name: &str) -> Option<String> {
    fields(block).find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value)
}

/// Why the client could not read a pinned consumer's row with this block, if it could not. Its own rules, on the
/// block as the server would send it.
#[must_use]
pub fn unreadable(block: &[u8]) -> Option<&'static str> {
    const PIN: &str = "Nats-Pin-Id: 0123456789012345678901\r\n\r\n";
    // As the server does: the last line break is replaced by its own header, whatever stands there.
    let block = match block.len() {
        0..=2 => b"NATS/1.0\r\n",
        len => &block[..len - 2],
    };
    let Ok(block) = std::str::from_utf8(block) else { return Some("its headers are no UTF-8") };
    let sent = format!("{block}{PIN}");
    let mut lines = sent.lines().peekable();
    let Some(status) = lines.next().and_then(|line| line.strip_prefix("NATS/1.0")).map(str::trim) else {
        return Some("its headers do not begin with NATS/1.0");
    };
    let code = status.split_once(' ').map_or(status, |(code, _)| code.trim()).as_bytes();
    let is_code = code.len() == 3 && code.iter().all(u8::is_ascii_digit) && code[0] != b'0';
    if !code.is_empty() && !is_code {
        return Some("its headers begin with a status that is none");
    }
    let mut pinned = false;
    while let Some(line) = lines.next() {
        if line.is_empty() {
            continue;
        }
        let Some((name, value)) = line.split_once(':') else {
            return Some("its headers have a line without a colon");
        };
        if !name.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Some("its headers have a name that is none");
        }
        let mut value = value.trim_start().to_owned();
        while let Some(more) = lines.next_if(|line| line.starts_with(char::is_whitespace)) {
            value.push_str(more);
        }
        if value.trim_end().contains('\r') {
            return Some("its headers have a carriage return within a value");
        }
        pinned = name == "Nats-Pin-Id" && PIN.ends_with(&format!(": {value}\r\n\r\n"));
    }
    // The last field must be the server's.
    if pinned { None } else { Some("its headers have no end") }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_the_client_cannot_read() {
        for block in [
            &b""[..],
            b"NATS/1.0\r\n\r\n",
            b"NATS/1.0\r\nA: 1\r\nB:2\r\n\r\n",
            b"NATS/1.0 503\r\n\r\n",
            b"NATS/1.0 409 Consumer Deleted\r\n\r\n",
            b"NATS/1.0\r\nA: 1\r\n 2\r\n\r\n",
            b"NATS/1.0\r\n\r\nA: 1\r\n\r\n",
            b"NATS/1.0\r\nNats-Pin-Id: stolen\r\n\r\n",
            b"NATS/1.0\r\n:\r\n\r\n",
        ] {
            assert_eq!(unreadable(block), None, "{}", String::from_utf8_lossy(block));
        }
        for (block, words) in [
            (&b"NATS/1.0\r\nA: \xFF\r\n\r\n"[..], "no UTF-8"),
            (b"HTTP/1.1\r\n\r\n", "NATS/1.0"),
            (b"junk", "NATS/1.0"),
            (b"NATS/1.0 5\r\n\r\n", "status"),
            (b"NATS/1.0\r\njunk\r\n\r\n", "colon"),
            (b"NATS/1.0\r\nA b: 1\r\n\r\n", "name"),
            (b"NATS/1.0\r\nA: 1\r2\r\n\r\n", "carriage return"),
            // The server's header ends up in a value, and the row has no pin.
            (b"NATS/1.0\r\nA:  ", "no end"),
            (b"NATS/1.0\r\nA: x\r\n", "no end"),
        ] {
            let why = unreadable(block).unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(block)));
            assert!(why.contains(words), "{why}");
        }
    }

    #[test]
    fn fields_are_read_and_junk_is_left_out() {
        let block = b"NATS/1.0\r\nA: 1\r\njunk\r\n: x\r\nb:two: three\r\nC: \xFF\r\na: 4\r\n\r\n";
        let read: Vec<_> = fields(block).collect();
        let own = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(read, [own("A", "1"), own("b", "two: three"), own("C", "\u{FFFD}"), own("a", "4")]);
        assert_eq!(value(block, "a").as_deref(), Some("1"));
        assert_eq!(value(b"", "a"), None);
        assert_eq!(value(b"a: 1", "a"), None);
    }

    /// Whether the client itself gets a row with this block from a server, pin and all.
    async fn client_reads(block: &[u8]) -> bool {
        use futures_util::StreamExt as _;
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        let block = if block.len() > 2 { &block[..block.len() - 2] } else { b"NATS/1.0\r\n" };
        let block = [block, b"Nats-Pin-Id: pin\r\n\r\n"].concat();
        let row = [format!("HMSG x 1 {0} {0}\r\n", block.len()).as_bytes(), &block, b"\r\n"].concat();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = async move {
            let (mut socket, _) = listener.accept().await.unwrap();
            let serving = async move {
                socket.write_all(b"INFO {\"headers\":true,\"max_payload\":1000000}\r\n").await.unwrap();
                let mut buffer = [0; 4096];
                while let Ok(read @ 1..) = socket.read(&mut buffer).await {
                    let said = String::from_utf8_lossy(&buffer[..read]).into_owned();
                    if said.contains("PING") && socket.write_all(b"PONG\r\n").await.is_err() {
                        break;
                    }
                    if said.contains("SUB x") && socket.write_all(&row).await.is_err() {
                        break;
                    }
                }
                std::future::pending::<()>().await;
            };
            // A client that gives the connection up comes again, and only then lets go of the first.
            tokio::select! {
                _ = listener.accept() => {}
                () = serving => {}
            }
        };
        let received = async {
            let client = async_nats::connect(&address).await.unwrap();
            let mut subscription = client.subscribe("x").await.unwrap();
            client.flush().await.ok();
            let message = subscription.next().await?;
            message.headers?.get_last("Nats-Pin-Id").map(|pin| pin.as_str() == "pin")
        };
        tokio::select! {
            () = server => false,
            received = received => received == Some(true),
        }
    }

    /// The rules above are the client's own: told by the client, of blocks that are nearly right.
    #[tokio::test(flavor = "multi_thread")]
    async fn the_client_agrees() {
        use proptest::strategy::ValueTree as _;
        use proptest::test_runner::TestRunner;

        let piece = prop_oneof![
            Just(b"\r\n".to_vec()),
            Just(b"\r".to_vec()),
            Just(b"\n".to_vec()),
            Just(b":".to_vec()),
            Just(b" ".to_vec()),
            Just(b"A: 1\r\n".to_vec()),
            Just(b"404".to_vec()),
            Just("é".as_bytes().to_vec()),
            Just("\u{2028}".as_bytes().to_vec()),
            Just(vec![0xFF]),
            Just(b"Nats-Pin-Id: stolen\r\n".to_vec()),
            "[a-z]{1,3}".prop_map(String::into_bytes),
        ];
        let blocks = (any::<bool>(), prop::collection::vec(piece, 0..6), any::<bool>());
        let mut runner = TestRunner::deterministic();
        let mut readable = 0;
        for _ in 0..300 {
            let (line, pieces, ended) = blocks.new_tree(&mut runner).unwrap().current();
            let start = if line { &b"NATS/1.0\r\n"[..] } else { b"NATS/1.0" };
            let end = if ended { &b"\r\n\r\n"[..] } else { b"" };
            let block = [start, &pieces.concat(), end].concat();
            let ours = unreadable(&block);
            readable += usize::from(ours.is_none());
            let read = tokio::time::timeout(std::time::Duration::from_secs(10), client_reads(&block)).await;
            assert_eq!(read, Ok(ours.is_none()), "{ours:?} {}", block.escape_ascii());
        }
        assert!((50..250).contains(&readable), "{readable}");
    }

    proptest! {
        #[test]
        fn hostile_blocks_are_no_panic(block in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(fields(&block).count() <= block.len());
            let _ = unreadable(&block);
        }

        #[test]
        fn nearly_good_blocks_are_no_panic(block in "NATS/1.0(\r\n|\r|\n|:| |A|é|5){0,40}") {
            let _ = unreadable(block.as_bytes());
        }
    }
}
