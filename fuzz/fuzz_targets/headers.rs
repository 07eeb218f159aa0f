//! Header blocks of rows, as publishers send them and servers store them unread.
#![no_main]

use holdfast_nats::headers::{fields, unreadable, value};

libfuzzer_sys::fuzz_target!(|block: &[u8]| {
    let read: Vec<_> = fields(block).collect();
    assert!(read.len() <= block.iter().filter(|byte| **byte == b'\n').count());
    for (name, found) in &read {
        assert!(!name.is_empty() && name.trim() == name && found.trim() == found);
        assert!(!name.contains(['\n', ':']) && !found.contains('\n'));
        let first = read.iter().find(|(other, _)| other.eq_ignore_ascii_case(name)).expect("it is there");
        assert_eq!(value(block, name).as_ref(), Some(&first.1));
    }
    if let Ok(text) = std::str::from_utf8(block) {
        let lines = text.split('\n').skip(1).filter_map(|line| line.split_once(':'));
        let other = lines.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()));
        assert_eq!(other.filter(|(name, _)| !name.is_empty()).collect::<Vec<_>>(), read);
    }
    // What the client can read is a block that the server has ended, and says nothing of a status but three digits.
    if unreadable(block).is_none() && block.len() > 2 {
        let text = std::str::from_utf8(&block[..block.len() - 2]).expect("the client reads text only");
        assert!(text.starts_with("NATS/1.0"));
        let lines = text.lines().skip(1).filter(|line| !line.is_empty());
        assert!(
            lines.clone().all(|line| line.contains(':') || line.starts_with(char::is_whitespace)),
            "{text:?}"
        );
        // The server puts the pin in place of the last line break, and it is found there.
        let sent = [text.as_bytes(), b"Nats-Pin-Id: 4711\r\n\r\n"].concat();
        assert_eq!(fields(&sent).last(), Some(("Nats-Pin-Id".to_owned(), "4711".to_owned())));
    }
    // And what a careful publisher would send is read.
    let fits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
    if read.iter().all(|(name, value)| fits(name) && fits(value)) {
        let lines = read.iter().map(|(name, value)| format!("{name}: {value}\r\n"));
        let block = format!("NATS/1.0\r\n{}\r\n", lines.collect::<String>());
        assert_eq!(unreadable(block.as_bytes()), None, "{block:?}");
    }
});
