//! Reply subjects of delivered rows: what is read is what an acknowledgement of it says.
#![no_main]

use holdfast_nats::ack_subject::{AckSubject, acknowledgement};

libfuzzer_sys::fuzz_target!(|subject: &str| {
    let Some(read) = AckSubject::parse(subject) else { return };
    assert!(read.seq.0 > 0 && subject.starts_with(read.origin));
    // Another reader of numbers, which takes none that is too large.
    let tokens: Vec<&str> = subject.split('.').collect();
    let numbers = if tokens.len() == 9 { 4 } else { 6 };
    assert_eq!((tokens[numbers - 2], tokens[numbers - 1]), (read.stream, read.consumer));
    assert_eq!(tokens[numbers].parse(), Ok(read.deliveries));
    assert_eq!(
        (tokens[numbers + 1].parse(), tokens[numbers + 2].parse()),
        (Ok(read.seq.0), Ok(read.delivery.0))
    );
    let ack = acknowledgement(read.origin, read.seq, read.delivery);
    let again = AckSubject::parse(&ack).expect("an acknowledgement is a reply subject");
    let place = |read: &AckSubject<'_>| (read.seq, read.delivery);
    assert_eq!(place(&again), place(&read), "{ack}");
    assert_eq!((again.origin, again.stream, again.consumer), (read.origin, read.stream, read.consumer));
    // The server's other fields survive in a subject that is written anew.
    let (time, origin) = (read.stored_at.0, read.origin);
    let anew =
        format!("{origin}.{}.{}.{}.{time}.{}", read.deliveries, read.seq, read.delivery.0, read.pending);
    assert_eq!(AckSubject::parse(&anew), Some(read));
    // And in the other form, which says the same.
    let (stream, consumer) = (read.stream, read.consumer);
    let rest = anew.strip_prefix(origin).expect("it begins with it");
    for origin in [format!("$JS.ACK.{stream}.{consumer}"), format!("$JS.ACK._.HASH.{stream}.{consumer}")] {
        let other = format!("{origin}{rest}");
        assert_eq!(AckSubject::parse(&other), Some(AckSubject { origin: &origin, ..read }));
    }
});
