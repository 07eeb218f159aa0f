//! What can go wrong, and how a run's share of it is drawn.

use std::fmt;
use std::time::Duration;

use holdfast_core::ports::store::Class;

use crate::chance::Chance;

/// How the way between a process and the stream's server is disturbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Nothing passes; what was sent arrives when it is over.
    Held,
    /// Nothing reaches the process; what was sent arrives when it is over.
    HeldInwards,
    /// Nothing reaches the server; what was sent arrives when it is over.
    HeldOutwards,
    /// The connection breaks; it is made anew when it is over.
    Broken,
}

/// Something that goes wrong at a known time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A process is killed, and started again.
    Crash { process: u32, down: Duration },
    /// A process's host is gone: the servers take its connections for living until they notice.
    HostLost { process: u32, down: Duration, noticed: Duration },
    /// A process is frozen.
    Pause { process: u32, lasting: Duration },
    /// A process is asked to stop, and started again some time after it has.
    Stop { process: u32, within: Duration, down: Duration },
    /// A process is asked to stop and frozen a moment later.
    StopAndPause { process: u32, within: Duration, after: Duration, lasting: Duration },
    /// A process cannot reach the stream's server.
    CutNats { process: u32, how: Cut, lasting: Duration },
    /// The same, but that it reaches the members' bucket.
    CutConsumers { process: u32, how: Cut, lasting: Duration },
    /// A process cannot reach the members' bucket, and everything else.
    CutMembers { process: u32, how: Cut, lasting: Duration },
    /// Somebody deletes a member's record.
    MemberDeleted { process: u32 },
    /// Somebody deletes the members' bucket and makes it again.
    MembersLost,
    /// Another process writes once under a member's name, and says that it stands by for this shard.
    NameTaken { process: u32, shard: u32 },
    /// An operator wants nobody to have this shard for a while, and says so to one process.
    PauseShard { process: u32, shard: u32, lasting: Duration },
    /// A process cannot reach the store.
    CutStore { process: u32, lasting: Duration },
    /// A process's share of the budget changes.
    Share { process: u32, rows: u64, bytes: u64 },
    /// The stream's server is killed and started again.
    BrokerRestart { down: Duration, forgotten: usize },
    /// The same, and it has lost its last rows.
    TailLost { down: Duration, rows: usize },
    /// A consumer's leader moves.
    LeaderMoves { shard: u32, forgotten: usize, leaderless: Duration },
    /// An operator takes the pin away.
    Unpin { shard: u32 },
    /// Resets to the first row that come within moments of a delivery are not written down.
    ResetsUnwritten { lasting: Duration },
    /// An operator sets a consumer back.
    SetBack { shard: u32, by: u64 },
    /// The same, and as many deliveries are lost on the way as were made since the last reset, so that the
    /// numbers go on as if nothing had been.
    SetBackUnseen { shard: u32, by: u64 },
    /// The owner's connection breaks; before the server notices, a late reset arrives and as many rows as were
    /// delivered since the last one go to nobody.
    CutUnseen { shard: u32, lasting: Duration },
    /// A delivery is lost; the owner's reset that follows goes astray, the owner loses its pin, and the reset
    /// arrives behind the heir's own.
    ResetAstray { shard: u32 },
    /// Rows of a batch that is on its way are removed from the stream; its sender dies, and it lands late.
    PurgedUnderWay { shard: u32, down: Duration },
    /// The next deliveries of a shard are lost on the way.
    DeliveriesLost { shard: u32, rows: u32 },
    /// A consumer is deleted, and made again.
    ConsumerDeleted { shard: u32, lasting: Duration },
    /// The stream is deleted and made again.
    StreamAnew,
    /// The same, just when a reset of a shard's owner has gone astray: it arrives behind the first one of the new
    /// stream.
    StreamAnewAstray { shard: u32 },
    /// The ledger is restored as it was so long ago, by somebody who has stopped every process and waited until
    /// nothing was under way.
    LedgerOlder { back: Duration },
    /// The same, and nothing of it is left.
    LedgerLost,
    /// Rows are removed from the stream, written or not: of a shard, as many as this from where the consumer
    /// stands back.
    Purged { shard: u32, rows: usize },
    /// The store is killed and started again.
    StoreKilled { down: Duration, burns: u32 },
    /// The store takes its time.
    StoreSlow { lasting: Duration },
    /// The store refuses inserts.
    StoreRefuses { lasting: Duration },
    /// Somebody rotated the password, broke a table, or put a proxy with answers of its own in between.
    StoreDenies { class: Class, lasting: Duration },
    /// An insert is on its way for long and its answer lost; meanwhile a row of it ceases to fit its table.
    AlteredUnderWay { shard: u32 },
    /// An insert leaves some of its parts; then a row of the others ceases to fit its table.
    AlteredHalfway { shard: u32 },
    /// The dead letters take no more.
    LettersFull { lasting: Duration },
    /// Nobody keeps dead letters.
    LettersMissing { lasting: Duration },
    /// No acknowledgement arrives.
    AcksLost { lasting: Duration },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// How often things go wrong in passing, in a thousand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rates {
    /// A request to the stream's server is lost.
    pub(crate) request_lost: u32,
    /// A request arrives seconds late; resets and writes at the worst moment there is.
    pub(crate) request_late: u32,
    /// A write to the ledger arrives twice.
    pub(crate) write_twice: u32,
    /// An answer is lost.
    pub(crate) answer_lost: u32,
    /// An answer comes late.
    pub(crate) answer_late: u32,
    /// An answer comes twice.
    pub(crate) answer_twice: u32,
    /// Nobody says that an answer will not come.
    pub(crate) answer_never: u32,
    /// A pull is lost.
    pub(crate) pull_lost: u32,
    /// A pull's final status is lost.
    pub(crate) status_lost: u32,
    /// A message of rows loses some of them.
    pub(crate) rows_lost: u32,
    /// What arrived waits in the process while answers overtake it.
    pub(crate) sink_slow: u32,
    /// An insert waits long for its turn.
    pub(crate) insert_queued: u32,
    /// An insert is refused.
    pub(crate) insert_refused: u32,
    /// An insert is cut on its way.
    pub(crate) insert_cut: u32,
    /// An insert lands, and its answer is lost.
    pub(crate) insert_unanswered: u32,
    /// An insert takes longer than its client waits.
    pub(crate) insert_slow: u32,
    /// The store fails at an insert, after some of its parts.
    pub(crate) insert_killed: u32,
    /// The same, with the token of the next part burned.
    pub(crate) insert_burned: u32,
    /// A read-back or a description fails.
    pub(crate) question_failed: u32,
    /// The ledger refuses a write for the moment.
    pub(crate) write_refused: u32,
    /// A letter waits long for its turn.
    pub(crate) letter_queued: u32,
    /// A letter is not kept, and that is said.
    pub(crate) letter_refused: u32,
    /// Acknowledgements are lost.
    pub(crate) ack_lost: u32,
    /// Acknowledgements come late.
    pub(crate) ack_late: u32,
    /// The members' watch stalls.
    pub(crate) watch_slow: u32,
    /// The members' watch misses a change, and is made anew.
    pub(crate) watch_lost: u32,
}

impl Rates {
    /// Rates of which each is drawn, or is none with one chance in two.
    pub(crate) fn draw(chance: &mut Chance, swarm: bool) -> Self {
        let mut rate = |most: u32| {
            if swarm && chance.permille(500) { 0 } else { chance.between32(1, most) }
        };
        Self {
            request_lost: rate(40),
            request_late: rate(60),
            write_twice: rate(60),
            answer_lost: rate(60),
            answer_late: rate(80),
            answer_twice: rate(80),
            answer_never: rate(10),
            pull_lost: rate(15),
            status_lost: rate(15),
            rows_lost: rate(60),
            sink_slow: rate(120),
            insert_queued: rate(150),
            insert_refused: rate(100),
            insert_cut: rate(60),
            insert_unanswered: rate(100),
            insert_slow: rate(120),
            insert_killed: rate(80),
            insert_burned: rate(80),
            question_failed: rate(100),
            write_refused: rate(40),
            letter_queued: rate(150),
            letter_refused: rate(200),
            ack_lost: rate(100),
            ack_late: rate(100),
            watch_slow: 0,
            watch_lost: 0,
        }
    }

    /// Every rate, to be changed one by one.
    pub(crate) fn kinds(&mut self) -> Vec<&mut u32> {
        let Self {
            request_lost,
            request_late,
            write_twice,
            answer_lost,
            answer_late,
            answer_twice,
            answer_never,
            pull_lost,
            status_lost,
            rows_lost,
            sink_slow,
            insert_queued,
            insert_refused,
            insert_cut,
            insert_unanswered,
            insert_slow,
            insert_killed,
            insert_burned,
            question_failed,
            write_refused,
            letter_queued,
            letter_refused,
            ack_lost,
            ack_late,
            watch_slow,
            watch_lost,
        } = self;
        vec![
            request_lost,
            request_late,
            write_twice,
            answer_lost,
            answer_late,
            answer_twice,
            answer_never,
            pull_lost,
            status_lost,
            rows_lost,
            sink_slow,
            insert_queued,
            insert_refused,
            insert_cut,
            insert_unanswered,
            insert_slow,
            insert_killed,
            insert_burned,
            question_failed,
            write_refused,
            letter_queued,
            letter_refused,
            ack_lost,
            ack_late,
            watch_slow,
            watch_lost,
        ]
    }
}
