//! Rows that the client cannot receive.

use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_core::ports::delivery::{PullEnd, Reply};
use holdfast_core::row::{Seq, TableName};
use holdfast_nats::dead_letters::DeadLetters;
use holdfast_nats::letters::Letters;

use crate::server::{Member, Rig, one_shard, publish_raw};

const SECOND: Duration = Duration::from_secs(1);

/// As a shard does: resets to the beginning and pulls, until everything came in one numbering under one pin.
async fn pull_all(member: &mut Member, inbox: &mut u64, count: u64) -> Vec<u64> {
    let start = Instant::now();
    let mut rounds = 0;
    loop {
        assert!(start.elapsed() < 20 * SECOND, "{rounds} rounds");
        rounds += 1;
        *inbox += 1;
        member.told();
        if member.reset(*inbox, 1).await.is_err() {
            tokio::time::sleep(SECOND / 20).await;
            continue;
        }
        let pull = member.pull(*inbox, None, u32::try_from(count).unwrap(), SECOND / 2);
        // A connection that breaks can leave a pull without an end.
        let end = tokio::time::timeout(SECOND, member.run(pull)).await;
        if end != Ok(PullEnd::Full) {
            // Somebody else, or an earlier numbering, may hold the pin.
            let _ = member.unpin().await;
            continue;
        }
        let replies = member.told();
        let rows = replies.into_iter().filter_map(|reply| match reply {
            Reply::Rows(rows) if rows.pin.is_some() => Some(rows.rows),
            _ => None,
        });
        let rows: Vec<_> = rows.flatten().collect();
        if rows.iter().zip(1..).all(|(row, number)| row.delivery.0 == number) && rows.len() as u64 == count {
            println!("past it after {rounds} rounds, {:?}", start.elapsed());
            return rows.iter().map(|row| row.seq.0).collect();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_cannot_be_received_becomes_a_dead_letter() {
    let hostile: [(&str, &[u8]); 7] = [
        ("clicks", b"NATS/1.0\r\njunk\r\n\r\n"),
        ("clicks", b"NATS/1.0\r\nX: \xFF\r\n\r\n"),
        ("a%2eb", b"HTTP/1.1\r\n\r\n"),
        // The client panics.
        ("clicks", b"NATS/1.0\r\nX: a\rb\r\n\r\n"),
        // The server's own header becomes a part of this one.
        ("clicks", b"NATS/1.0\r\nX: 12"),
        ("cl\u{b}icks", b"NATS/1.0\r\n\r\n"),
        ("cl\u{3000}icks", b"NATS/1.0\r\n\r\n"),
    ];
    for (token, block) in hostile {
        println!("{token:?} {}", block.escape_ascii());
        let rig = Rig::new(one_shard()).await;
        rig.publish("clicks", 300).await;
        publish_raw(&rig, &format!("ingest.{token}"), block, b"{\"bad\":1}").await;
        rig.publish("clicks", 2).await;
        publish_raw(&rig, &format!("ingest.{token}"), block, b"{\"bad\":2}").await;
        rig.publish("clicks", 3).await;
        let mut member = rig.member().await;
        let clock = Arc::new(|| holdfast_core::time::Instant::START);
        member.delivery.remove_unreceivable(DeadLetters::new(rig.connection.clone(), &rig.topology, clock));
        let seqs = pull_all(&mut member, &mut 0, 305).await;
        assert_eq!(seqs, (1..=307).filter(|seq| ![301, 304].contains(seq)).collect::<Vec<_>>());
        assert_eq!(member.delivery.unreceivable(), 2);
        let letters = Letters::new(rig.connection.clone(), &rig.topology);
        let page = letters.list(None, Seq(0), 10).await.unwrap();
        let seqs: Vec<_> = page.letters.iter().map(|letter| letter.seq.unwrap().0).collect();
        assert_eq!(seqs, [301, 304]);
        for (letter, payload) in page.letters.iter().zip(["{\"bad\":1}", "{\"bad\":2}"]) {
            assert_eq!(letter.table, Some(TableName::new(token)));
            assert!(letter.message.as_ref().unwrap().contains("receive"), "{letter:?}");
            assert_eq!(letters.get(letter.position).await.unwrap().unwrap().payload, payload);
        }
        // The connection works on, whatever became of the client.
        rig.publish("clicks", 1).await;
        assert!(member.connection.is_connected());
        assert_eq!(member.inspect(0).await.unwrap().last.seq, Seq(308));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_can_be_received_stay_whatever_happens_to_the_connection() {
    let mut rig = Rig::new(one_shard()).await;
    for block in [&b"NATS/1.0 503\r\n\r\n"[..], b"NATS/1.0\r\nX: 1\r\n 2\r\n\r\n", b"NATS/1.0\r\nA:\r\n\r\n"]
    {
        publish_raw(&rig, "ingest.clicks", block, b"{}").await;
    }
    let mut member = rig.member().await;
    let clock = Arc::new(|| holdfast_core::time::Instant::START);
    member.delivery.remove_unreceivable(DeadLetters::new(rig.connection.clone(), &rig.topology, clock));
    for _ in 0..2 {
        rig.server.kill();
        rig.server.start_again();
        assert!(member.connection.connected(10 * SECOND).await);
        tokio::time::sleep(SECOND / 2).await;
    }
    assert_eq!(pull_all(&mut member, &mut 0, 3).await, [1, 2, 3]);
    assert_eq!(member.delivery.unreceivable(), 0);
    let letters = Letters::new(rig.connection.clone(), &rig.topology);
    assert_eq!(letters.count().await, Ok(0));
}
