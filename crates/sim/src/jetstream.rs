//! A model of one JetStream stream and of its pinned consumers, one a shard.
//!
//! It keeps to what was seen on nats-server 2.15 with `ack_policy: none` and limits retention, and with `explicit` on
//! limits and work-queue retention:
//!
//! - A pull without a pin id is served when nobody is pinned, and takes the pin **with its first row**; while
//!   another client is pinned it waits (that is a standby). An empty shard has no pin.
//! - Only a pull that carries the current pin id restarts the pin's timer. Deliveries do not.
//! - Another id than the pinned one: 423 at once. An id while nobody is pinned: 423 as soon as a row waits,
//!   until then nothing.
//! - Whoever waits is served in turn: a pull that got a row goes behind the others, and so does a standby that was
//!   passed over. A pull under a pin that is not held any more is told when its turn comes.
//! - A row larger than what is left of a pull's `max_bytes` ends it with 409, and takes no pin.
//! - A pull that got all it asked for ends without a word.
//! - Reset sets the next row and the numbering, keeps the pin and serves what waits. A reset to the first row within
//!   moments of a delivery may not be written down: then looks go on counting what was delivered before it, until more
//!   is.
//! - Unpin names no pin: it takes it from whoever has it.
//! - A consumer's new leader has no pin, tells the waiting pulls so, and may have forgotten the last
//!   deliveries. A restarted server has no pin either, and tells the pulls nothing.
//! - With acknowledgements a row that is not acknowledged within `ack_wait` is delivered again, before new ones and
//!   with the next number; at `max_ack_pending` only such rows are. An acknowledgement counts for the row, whichever
//!   delivery it names, if the row waits for one; else it is ignored. On work-queue retention it removes the row. A
//!   reset forgets what waited for acknowledgements.
//!
//! Whoever owns the model carries messages to and fro; how late, and whether at all, is not its business.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use holdfast_core::ports::delivery::{
    Acks, Command, Inbox, InspectError, Inspection, PinId, Pull, PullEnd, Reply, Rows,
};
use holdfast_core::ports::retention;
use holdfast_core::ports::{Attempt, Failure, FailureClass};
use holdfast_core::row::{Delivery, Mark, Row, Seq, ShardId, TableName, Verdict};
use holdfast_core::time::Timestamp;

/// For so long after a delivery the server writes counts down, and what a reset has to write in that time is left out.
const WRITING: Duration = Duration::from_millis(100);

/// A connection: the `link`th of the `start`th start of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Client {
    /// The process.
    pub process: u32,
    /// Which of its starts.
    pub start: u32,
    /// Which of this start's connections.
    pub link: u32,
}

/// What a publisher sends.
#[derive(Clone, Debug)]
pub struct Message {
    /// The shard that its subject maps to.
    pub shard: ShardId,
    /// The table that its subject names.
    pub table: TableName,
    /// The row.
    pub payload: Bytes,
    /// What a look at the row says (looking is the adapter's part; here the row carries the answer).
    pub verdict: Verdict,
}

/// What the server sends without having been asked just now.
#[derive(Clone, Debug)]
pub enum Outgoing {
    /// Rows of one pull, in order.
    Rows {
        /// To whom.
        to: Client,
        /// Of which shard.
        shard: ShardId,
        /// Of which pull.
        attempt: Attempt,
        /// The rows.
        rows: Rows,
    },
    /// A pull's final status.
    Ended {
        /// To whom.
        to: Client,
        /// Of which shard.
        shard: ShardId,
        /// Which pull.
        attempt: Attempt,
        /// How it ended.
        end: PullEnd,
    },
}

/// A change of a consumer's pin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinChange {
    /// A client was pinned.
    Taken {
        /// The shard.
        shard: ShardId,
        /// By whom.
        by: Client,
        /// The pin's name.
        pin: PinId,
    },
    /// No pull with its name came for the pinned TTL.
    Lapsed {
        /// The shard.
        shard: ShardId,
        /// Whose it was.
        of: Client,
        /// The pin's name.
        pin: PinId,
    },
}

#[derive(Clone, Debug)]
struct StoredRow {
    message: Message,
    stored_at: Timestamp,
}

#[derive(Clone, Debug)]
struct Waiting {
    to: Client,
    pull: Pull,
    left: u32,
    room: Option<u64>,
    ends_at: Duration,
}

#[derive(Clone, Debug)]
struct Pin {
    id: PinId,
    holder: Client,
    lapses_at: Duration,
}

#[derive(Clone, Debug)]
struct Consumer {
    exists: bool,
    /// Nobody leads it until then.
    leaderless_until: Duration,
    /// The next row to deliver is the first at or above this sequence.
    position: u64,
    /// Sequences delivered since the last reset, those delivered again included.
    delivered: Vec<u64>,
    last_delivery: Option<Duration>,
    /// Deliveries that looks count at least: a reset that was not written down left them.
    miscounted: usize,
    /// Rows that wait to be acknowledged, and until when; none: they wait to be delivered again.
    unacked: BTreeMap<u64, Option<Duration>>,
    /// Rows to be delivered again, in turn.
    again: VecDeque<u64>,
    /// The shard's rows that are still in the stream.
    rows: VecDeque<u64>,
    pin: Option<Pin>,
    waiting: VecDeque<Waiting>,
}

impl Consumer {
    const fn new() -> Self {
        Self {
            exists: true,
            leaderless_until: Duration::ZERO,
            position: 1,
            delivered: Vec::new(),
            last_delivery: None,
            miscounted: 0,
            unacked: BTreeMap::new(),
            again: VecDeque::new(),
            rows: VecDeque::new(),
            pin: None,
            waiting: VecDeque::new(),
        }
    }

    fn serves(&self, now: Duration) -> bool {
        self.exists && now >= self.leaderless_until
    }

    fn pending(&self) -> usize {
        self.rows.len() - self.rows.partition_point(|seq| *seq < self.position)
    }

    fn next(&self) -> Option<u64> {
        self.rows.get(self.rows.partition_point(|seq| *seq < self.position)).copied()
    }

    /// The next row to deliver, and whether it was delivered before.
    fn next_due(&self, max_unacked: usize) -> Option<(u64, bool)> {
        if let Some(seq) = self.again.front() {
            return Some((*seq, true));
        }
        self.next().filter(|_| self.unacked.len() < max_unacked).map(|seq| (seq, false))
    }

    /// Begins anew at `from`. With `unwritten`, looks still count what was delivered before.
    fn reset(&mut self, from: Seq, unwritten: bool) {
        self.miscounted = if unwritten { self.counted() } else { 0 };
        self.position = from.0;
        self.delivered.clear();
        self.unacked.clear();
        self.again.clear();
    }

    /// What a look counts as delivered.
    fn counted(&self) -> usize {
        self.delivered.len().max(self.miscounted)
    }

    /// The last `forgotten` deliveries were never written down.
    fn forget(&mut self, forgotten: usize) {
        let keep = self.delivered.len().saturating_sub(forgotten);
        let lost = self.delivered.split_off(keep);
        for seq in lost {
            if !self.delivered.contains(&seq) {
                self.position = self.position.min(seq);
                self.unacked.remove(&seq);
                self.again.retain(|again| *again != seq);
            }
        }
    }

    /// The row is not in the stream any more.
    fn remove(&mut self, seq: u64) {
        if let Ok(at) = self.rows.binary_search(&seq) {
            self.rows.remove(at);
        }
        if self.unacked.remove(&seq).is_some() {
            self.again.retain(|again| *again != seq);
        }
    }
}

/// Whether rows are acknowledged, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckPolicy {
    /// Whether, and what it does.
    pub acks: Acks,
    /// A row that is not acknowledged after so long is delivered again.
    pub wait: Duration,
    /// So many rows may wait to be acknowledged.
    pub max_pending: usize,
}

impl AckPolicy {
    /// No acknowledgements.
    pub const NONE: Self = Self { acks: Acks::None, wait: Duration::MAX, max_pending: usize::MAX };
}

/// The stream and its consumers.
#[derive(Clone, Debug)]
pub struct JetStream {
    created: Timestamp,
    rows: BTreeMap<u64, StoredRow>,
    last: Mark,
    consumers: Vec<Consumer>,
    /// Each client's newest closed inbox by shard: what it still listens to.
    clients: BTreeMap<Client, Vec<Inbox>>,
    pinned_ttl: Duration,
    policy: AckPolicy,
    pins: u64,
    outgoing: Vec<Outgoing>,
    changes: Vec<PinChange>,
    resets_unwritten_until: Duration,
}

impl JetStream {
    /// What the server counts of a row beside its payload: subject and headers.
    pub const FRAME: u64 = 64;

    /// An empty stream, made at `created`, with a consumer for each of `shards`.
    #[must_use]
    pub fn new(created: Timestamp, shards: u32, pinned_ttl: Duration, policy: AckPolicy) -> Self {
        Self {
            created,
            rows: BTreeMap::new(),
            last: Mark::default(),
            consumers: (0..shards).map(|_| Consumer::new()).collect(),
            clients: BTreeMap::new(),
            pinned_ttl,
            policy,
            pins: 0,
            outgoing: Vec::new(),
            changes: Vec::new(),
            resets_unwritten_until: Duration::ZERO,
        }
    }

    // ---- publishers ----------------------------------------------------------------------------------

    /// Stores a message and serves whoever waits for it.
    pub fn publish(&mut self, now: Duration, message: Message, stored_at: Timestamp) -> Seq {
        let seq = self.last.seq.next();
        self.last = Mark { seq, stored_at };
        let shard = index(message.shard.0);
        self.rows.insert(seq.0, StoredRow { message, stored_at });
        self.consumers[shard].rows.push_back(seq.0);
        self.pump(now, shard);
        seq
    }

    /// The stream's identity.
    #[must_use]
    pub const fn created(&self) -> Timestamp {
        self.created
    }

    /// How many shards it has.
    #[must_use]
    pub const fn shards(&self) -> usize {
        self.consumers.len()
    }

    /// The stream's last row.
    #[must_use]
    pub const fn last(&self) -> Mark {
        self.last
    }

    /// Who is pinned to a shard.
    #[must_use]
    pub fn holder(&self, shard: ShardId) -> Option<(Client, &PinId)> {
        self.consumers[index(shard.0)].pin.as_ref().map(|pin| (pin.holder, &pin.id))
    }

    /// Whether a row is in the stream.
    #[must_use]
    pub fn has(&self, seq: Seq) -> bool {
        self.rows.contains_key(&seq.0)
    }

    /// The row that a shard's consumer delivers next.
    #[must_use]
    pub fn position(&self, shard: ShardId) -> Seq {
        Seq(self.consumers[index(shard.0)].position)
    }

    // ---- clients -------------------------------------------------------------------------------------

    /// A client connects; inboxes up to `closed`, one entry a shard, are closed already.
    pub fn connect(&mut self, client: Client, closed: Vec<Inbox>) {
        self.clients.insert(client, closed);
    }

    /// The server notices that a client is gone: nothing is sent to it any more.
    pub fn disconnect(&mut self, now: Duration, client: Client) {
        self.clients.remove(&client);
        for shard in 0..self.consumers.len() {
            self.pump(now, shard);
        }
    }

    /// Takes a command of a client. Pulls are answered in [`Self::take_outgoing`], the rest at once; none if
    /// the command has no answer, or the server gives none.
    pub fn handle(&mut self, now: Duration, from: Client, shard: ShardId, command: Command) -> Option<Reply> {
        match command {
            Command::Pull(pull) => {
                self.pull(now, from, shard, pull);
                None
            }
            Command::Close { inbox } => {
                self.close(now, from, shard, inbox);
                None
            }
            Command::Reset { attempt, inbox, from: seq } => {
                self.close(now, from, shard, Inbox(inbox.0.saturating_sub(1)));
                self.reset(now, shard, seq).then_some(Reply::Reset { attempt, outcome: Ok(()) })
            }
            Command::Ack { rows } => {
                for (seq, _) in rows {
                    self.ack(shard, seq);
                }
                self.pump(now, index(shard.0));
                None
            }
            Command::Inspect { attempt, row, above } => {
                let mut seen = self.look_at_stream();
                self.look_at_rows(shard, row, above, &mut seen);
                let outcome = self.look_at_consumer(now, shard, seen);
                Some(Reply::Inspected { attempt, outcome })
            }
            Command::Unpin { attempt } => {
                let outcome = self.unpin(now, shard);
                Some(Reply::Unpinned { attempt, outcome })
            }
        }
    }

    fn pull(&mut self, now: Duration, from: Client, shard: ShardId, pull: Pull) {
        let consumer = &mut self.consumers[index(shard.0)];
        if !consumer.serves(now) {
            self.end(from, shard, pull.attempt, PullEnd::NoResponders);
            return;
        }
        match (&mut consumer.pin, &pull.pin) {
            (Some(pinned), Some(id)) if pinned.id == *id => {
                pinned.lapses_at = now + self.pinned_ttl;
                pinned.holder = from;
            }
            (Some(_), Some(_)) => {
                self.end(from, shard, pull.attempt, PullEnd::NotPinned);
                return;
            }
            (_, None) | (None, _) => {}
        }
        let ends_at = now + pull.expires;
        consumer.waiting.push_back(Waiting {
            to: from,
            left: pull.batch,
            room: pull.max_bytes,
            ends_at,
            pull,
        });
        self.pump(now, index(shard.0));
    }

    fn close(&mut self, now: Duration, from: Client, shard: ShardId, inbox: Inbox) {
        if let Some(closed) = self.clients.get_mut(&from) {
            let closed = &mut closed[index(shard.0)];
            *closed = (*closed).max(inbox);
        }
        self.pump(now, index(shard.0));
    }

    /// Sets a consumer's position. A consumer that is not there does not answer at all.
    fn reset(&mut self, now: Duration, shard: ShardId, from: Seq) -> bool {
        let consumer = &mut self.consumers[index(shard.0)];
        if !consumer.serves(now) {
            return false;
        }
        // The server reads the old counts back only where the new state is no different from none.
        let writing = consumer.last_delivery.is_some_and(|last| now < last + WRITING);
        consumer.reset(from, from == Seq(1) && writing && now < self.resets_unwritten_until);
        self.pump(now, index(shard.0));
        true
    }

    /// An acknowledgement of a row: whether one was waited for.
    pub fn ack(&mut self, shard: ShardId, seq: Seq) -> bool {
        let consumer = &mut self.consumers[index(shard.0)];
        if consumer.unacked.remove(&seq.0).is_none() {
            return false;
        }
        consumer.again.retain(|again| *again != seq.0);
        if self.policy.acks == Acks::WorkQueue {
            self.remove(&[seq]);
        }
        true
    }

    /// Rows of a shard that wait to be acknowledged.
    pub fn unacked(&self, shard: ShardId) -> impl Iterator<Item = Seq> + '_ {
        self.consumers[index(shard.0)].unacked.keys().map(|seq| Seq(*seq))
    }

    /// Takes the pin from whoever holds it.
    ///
    /// # Errors
    /// If the consumer does not exist, or nobody serves it.
    pub fn unpin(&mut self, now: Duration, shard: ShardId) -> Result<(), Failure> {
        let consumer = &mut self.consumers[index(shard.0)];
        if !consumer.exists {
            return Err(Failure::new(FailureClass::Missing, "the consumer does not exist"));
        }
        if !consumer.serves(now) {
            return Err(Failure::new(FailureClass::Unavailable, "no leader"));
        }
        consumer.pin = None;
        self.pump(now, index(shard.0));
        Ok(())
    }

    /// The first part of a look: the stream's own state.
    #[must_use]
    pub fn look_at_stream(&self) -> Inspection {
        Inspection {
            created: self.created,
            messages: self.rows.len() as u64,
            first: self.rows.keys().next().map_or(self.last.seq.next(), |seq| Seq(*seq)),
            last: self.last,
            shard_last: None,
            row_stored_at: None,
            next: None,
            delivered: 0,
            pending: 0,
            pinned: None,
            unfit: None,
        }
    }

    /// The second part: three rows of it. They are asked for beside the stream's state and may be older or
    /// newer than it.
    pub fn look_at_rows(&self, shard: ShardId, row: Seq, above: Seq, seen: &mut Inspection) {
        let rows = &self.consumers[index(shard.0)].rows;
        seen.shard_last = rows.back().map(|seq| Seq(*seq));
        seen.row_stored_at = self.rows.get(&row.0).map(|row| row.stored_at);
        seen.next = rows.get(rows.partition_point(|seq| *seq <= above.0)).map(|seq| Seq(*seq));
    }

    /// The last part: the consumer.
    ///
    /// # Errors
    /// If it is not there, or has no leader.
    pub fn look_at_consumer(
        &self,
        now: Duration,
        shard: ShardId,
        mut seen: Inspection,
    ) -> Result<Inspection, InspectError> {
        let consumer = &self.consumers[index(shard.0)];
        if !consumer.exists {
            return Err(InspectError::Gone("the consumer does not exist".to_owned()));
        }
        if now < consumer.leaderless_until {
            let failure = Failure::new(FailureClass::Unavailable, "the consumer has no leader");
            return Err(InspectError::Failed(failure));
        }
        seen.delivered = consumer.counted() as u64;
        seen.pending = consumer.pending() as u64;
        seen.pinned = consumer.pin.as_ref().map(|pin| pin.id.clone());
        Ok(seen)
    }

    /// Removes rows from the stream's beginning, as the retention adapter does.
    pub fn trim(&mut self, command: &retention::Command) -> (retention::Reply, Vec<Seq>) {
        let retention::Command::Trim { attempt, created, below, witness } = *command;
        let (outcome, removed) = if created != self.created {
            (Err(Failure::new(FailureClass::Missing, "the stream was made anew")), Vec::new())
        } else if self.last.seq < below.max(witness.seq) {
            (Err(Failure::new(FailureClass::Other, "the stream ends before that")), Vec::new())
        } else if witness.stored_at != Timestamp(0)
            && self.rows.get(&witness.seq.0).is_some_and(|row| row.stored_at != witness.stored_at)
        {
            (Err(Failure::new(FailureClass::Other, "the stream has another row there")), Vec::new())
        } else {
            let removed: Vec<Seq> = self.rows.range(..below.0).map(|(seq, _)| Seq(*seq)).collect();
            (Ok(removed.len() as u64), removed)
        };
        self.remove(&removed);
        (retention::Reply::Trimmed { attempt, outcome }, removed)
    }

    // ---- what happens to a server --------------------------------------------------------------------

    /// Removes rows, whoever may still need them.
    pub fn remove(&mut self, seqs: &[Seq]) {
        for seq in seqs {
            if let Some(row) = self.rows.remove(&seq.0) {
                self.consumers[index(row.message.shard.0)].remove(seq.0);
            }
        }
    }

    /// The sequences of a shard that are in the stream.
    #[must_use]
    pub fn rows_of(&self, shard: ShardId) -> Vec<Seq> {
        self.consumers[index(shard.0)].rows.iter().map(|seq| Seq(*seq)).collect()
    }

    /// The consumer's leader moves: the pin is gone, the pulls are told, the last `forgotten` deliveries are
    /// not known any more, and for a while nobody leads.
    pub fn move_leader(&mut self, now: Duration, shard: ShardId, forgotten: usize, leaderless: Duration) {
        let consumer = &mut self.consumers[index(shard.0)];
        consumer.pin = None;
        consumer.leaderless_until = now + leaderless;
        consumer.forget(forgotten);
        let waiting: Vec<_> = consumer.waiting.drain(..).collect();
        for waiting in waiting {
            self.end(waiting.to, shard, waiting.pull.attempt, PullEnd::LeaderChanged);
        }
    }

    /// The server is killed and started again: connections, pins and pulls are gone without a word, and the
    /// last `forgotten` deliveries of each consumer may not be known any more.
    pub fn restart(&mut self, forgotten: usize) {
        self.clients.clear();
        self.outgoing.clear();
        for consumer in &mut self.consumers {
            consumer.pin = None;
            consumer.waiting.clear();
            consumer.forget(forgotten);
        }
    }

    /// The server comes back without its last `rows` rows; the sequences will be used again.
    pub fn lose_tail(&mut self, rows: usize) -> Vec<Seq> {
        let lost: Vec<Seq> = self.rows.keys().rev().take(rows).map(|seq| Seq(*seq)).collect();
        self.remove(&lost);
        if let Some(first) = lost.last() {
            let kept = Seq(first.0 - 1);
            let stored_at = self.rows.get(&kept.0).map_or(Timestamp(0), |row| row.stored_at);
            self.last = Mark { seq: kept, stored_at };
            for consumer in &mut self.consumers {
                consumer.position = consumer.position.min(first.0);
            }
        }
        lost
    }

    /// Rows that the consumer has delivered since its last reset, the first and how many.
    #[must_use]
    pub fn delivered(&self, shard: ShardId) -> (Option<Seq>, usize) {
        let delivered = &self.consumers[index(shard.0)].delivered;
        (delivered.first().map(|seq| Seq(*seq)), delivered.len())
    }

    /// The next `rows` deliveries go where nobody hears them.
    pub fn deliver_to_nobody(&mut self, now: Duration, shard: ShardId, rows: usize) {
        for _ in 0..rows {
            let Some((seq, again)) = self.consumers[index(shard.0)].next_due(self.policy.max_pending) else {
                return;
            };
            self.count_delivery(now, shard, seq, again);
        }
    }

    /// A row is delivered.
    fn count_delivery(&mut self, now: Duration, shard: ShardId, seq: u64, again: bool) {
        let consumer = &mut self.consumers[index(shard.0)];
        consumer.delivered.push(seq);
        consumer.last_delivery = Some(now);
        if again {
            consumer.again.pop_front();
        } else {
            consumer.position = seq + 1;
        }
        if self.policy.acks != Acks::None {
            consumer.unacked.insert(seq, Some(now.saturating_add(self.policy.wait)));
        }
    }

    /// Sets a consumer back without serving whoever waits, as if the rows that follow were already on their way.
    pub fn set_back(&mut self, shard: ShardId, to: Seq) {
        self.consumers[index(shard.0)].reset(to, false);
    }

    /// Whether looks count more than was delivered since the last reset.
    #[must_use]
    pub fn miscounts(&self, shard: ShardId) -> bool {
        let consumer = &self.consumers[index(shard.0)];
        consumer.counted() > consumer.delivered.len()
    }

    /// Until then a reset to the first row that comes within moments of a delivery is not written down.
    pub const fn leave_resets_unwritten(&mut self, until: Duration) {
        self.resets_unwritten_until = until;
    }

    /// Somebody deletes the stream and makes another of the same name, with its consumers.
    pub fn make_anew(&mut self, created: Timestamp) {
        self.created = created;
        self.rows.clear();
        self.last = Mark::default();
        for shard in 0..self.consumers.len() {
            self.delete_consumer(shard);
            self.consumers[shard] = Consumer::new();
        }
    }

    /// Somebody deletes a shard's consumer.
    pub fn delete_consumer(&mut self, shard: usize) {
        let consumer = &mut self.consumers[shard];
        consumer.exists = false;
        consumer.pin = None;
        let waiting: Vec<_> = consumer.waiting.drain(..).collect();
        let shard = ShardId(u32::try_from(shard).unwrap_or_default());
        for waiting in waiting {
            self.end(waiting.to, shard, waiting.pull.attempt, PullEnd::Deleted);
        }
    }

    /// Somebody makes it again: it begins with the first row.
    pub fn create_consumer(&mut self, shard: usize) {
        let rows = std::mem::take(&mut self.consumers[shard].rows);
        self.consumers[shard] = Consumer { rows, ..Consumer::new() };
    }

    // ---- time ----------------------------------------------------------------------------------------

    /// When [`Self::tick`] has something to do.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Duration> {
        let pins =
            self.consumers.iter().filter_map(|consumer| consumer.pin.as_ref()).map(|pin| pin.lapses_at);
        let pulls = self.consumers.iter().flat_map(|consumer| &consumer.waiting).map(|pull| pull.ends_at);
        let unacked = self.consumers.iter().flat_map(|consumer| consumer.unacked.values().flatten().copied());
        pins.chain(pulls).chain(unacked).min()
    }

    /// Ends what has had its time: pulls with 408, pins without a word.
    pub fn tick(&mut self, now: Duration) {
        for at in 0..self.consumers.len() {
            let shard = ShardId(u32::try_from(at).unwrap_or_default());
            let consumer = &mut self.consumers[at];
            let mut ended = Vec::new();
            consumer.waiting.retain(|waiting| {
                let over = waiting.ends_at <= now;
                if over {
                    ended.push((waiting.to, waiting.pull.attempt));
                }
                !over
            });
            if let Some(pin) = consumer.pin.take_if(|pin| pin.lapses_at <= now) {
                self.changes.push(PinChange::Lapsed { shard, of: pin.holder, pin: pin.id });
            }
            for (seq, due) in &mut consumer.unacked {
                if due.take_if(|due| *due <= now).is_some() {
                    consumer.again.push_back(*seq);
                }
            }
            for (to, attempt) in ended {
                self.end(to, shard, attempt, PullEnd::Empty);
            }
            self.pump(now, at);
        }
    }

    /// What is to be sent, in order.
    pub fn take_outgoing(&mut self) -> Vec<Outgoing> {
        std::mem::take(&mut self.outgoing)
    }

    /// How pins changed, in order.
    pub fn take_pin_changes(&mut self) -> Vec<PinChange> {
        std::mem::take(&mut self.changes)
    }

    fn end(&mut self, to: Client, shard: ShardId, attempt: Attempt, end: PullEnd) {
        if self.clients.contains_key(&to) {
            self.outgoing.push(Outgoing::Ended { to, shard, attempt, end });
        }
    }

    /// Brings the pull whose turn it is to the front; false if nobody's is. On the way those under another pin than
    /// `current` are told, and those that wait for the pin go behind the others.
    fn turn(&mut self, at: usize, shard: ShardId, current: Option<&PinId>) -> bool {
        for _ in 0..self.consumers[at].waiting.len() {
            let waiting = &mut self.consumers[at].waiting;
            let Some(front) = waiting.front() else { return false };
            if front.pull.pin.as_ref() == current {
                return true;
            }
            if front.pull.pin.is_none() {
                waiting.rotate_left(1);
            } else {
                let (to, attempt) = (front.to, front.pull.attempt);
                waiting.pop_front();
                self.end(to, shard, attempt, PullEnd::NotPinned);
            }
        }
        false
    }

    /// Delivers what can be delivered.
    fn pump(&mut self, now: Duration, at: usize) {
        let shard = ShardId(u32::try_from(at).unwrap_or_default());
        loop {
            let consumer = &mut self.consumers[at];
            if !consumer.serves(now) {
                return;
            }
            // A pull that nobody listens to any more is dropped when its turn comes.
            let clients = &self.clients;
            consumer.waiting.retain(|waiting| {
                clients.get(&waiting.to).is_some_and(|closed| waiting.pull.inbox > closed[at])
            });
            let Some((seq, again)) = consumer.next_due(self.policy.max_pending) else { return };
            let current = consumer.pin.as_ref().map(|pin| pin.id.clone());
            if !self.turn(at, shard, current.as_ref()) {
                return;
            }
            let consumer = &mut self.consumers[at];
            let row = &self.rows[&seq];
            let size = row.message.payload.len() as u64 + Self::FRAME;
            let Some(waiting) = consumer.waiting.front_mut() else { return };
            if waiting.room.is_some_and(|room| room < size) {
                let (to, attempt) = (waiting.to, waiting.pull.attempt);
                consumer.waiting.pop_front();
                if again {
                    consumer.again.rotate_left(1);
                }
                self.end(to, shard, attempt, PullEnd::TooLarge);
                continue;
            }
            waiting.room = waiting.room.map(|room| room - size);
            waiting.left -= 1;
            let (to, attempt, inbox) = (waiting.to, waiting.pull.attempt, waiting.pull.inbox);
            let left = waiting.left;
            let pin = current.unwrap_or_else(|| {
                self.pins += 1;
                let id = PinId(format!("pin-{}", self.pins).into());
                // From here on the pull is one of the pinned client.
                waiting.pull.pin = Some(id.clone());
                consumer.pin = Some(Pin { id: id.clone(), holder: to, lapses_at: now + self.pinned_ttl });
                self.changes.push(PinChange::Taken { shard, by: to, pin: id.clone() });
                id
            });
            if left == 0 {
                consumer.waiting.pop_front();
            } else {
                consumer.waiting.rotate_left(1);
            }
            let row = Row {
                seq: Seq(seq),
                delivery: Delivery(consumer.delivered.len() as u64 + 1),
                redelivered: again,
                stored_at: row.stored_at,
                table: row.message.table.clone(),
                payload: row.message.payload.clone(),
                verdict: row.message.verdict.clone(),
            };
            self.count_delivery(now, shard, seq, again);
            if let Some(Outgoing::Rows { attempt: last, shard: of, to: last_to, rows }) =
                self.outgoing.last_mut()
                && (*last, *of, *last_to) == (attempt, shard, to)
            {
                rows.rows.push(row);
            } else {
                let rows = Rows { inbox, pin: Some(pin), rows: vec![row] };
                self.outgoing.push(Outgoing::Rows { to, shard, attempt, rows });
            }
        }
    }
}

fn index(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// A row's payload: a number that names it for ever, and bytes to make up its size.
#[must_use]
pub fn payload(number: u64, size: usize) -> Bytes {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(size.max(8), b'.');
    bytes.into()
}

/// The number in a row's payload.
#[must_use]
pub fn number_of(payload: &[u8]) -> u64 {
    payload.first_chunk().map_or(u64::MAX, |chunk| u64::from_le_bytes(*chunk))
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: ShardId = ShardId(0);
    const TTL: Duration = Duration::from_secs(2);

    fn client(process: u32) -> Client {
        Client { process, start: 1, link: 1 }
    }

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    struct Bench {
        stream: JetStream,
        pulls: u64,
    }

    impl Bench {
        fn new() -> Self {
            Self::with(AckPolicy::NONE)
        }

        fn with(policy: AckPolicy) -> Self {
            let mut stream = JetStream::new(Timestamp(1), 1, TTL, policy);
            for process in 0..3 {
                stream.connect(client(process), vec![Inbox(0)]);
            }
            Self { stream, pulls: 0 }
        }

        fn publish(&mut self, now: Duration) -> Seq {
            let message = Message {
                shard: S,
                table: TableName::new("t"),
                payload: payload(1, 20),
                verdict: Verdict::Good,
            };
            self.stream.publish(now, message, Timestamp(i64::try_from(now.as_nanos()).unwrap()))
        }

        fn pull(&mut self, now: Duration, from: u32, pin: Option<&PinId>, max_bytes: Option<u64>) {
            self.pulls += 1;
            let pull = Pull {
                attempt: Attempt(self.pulls),
                inbox: Inbox(1),
                pin: pin.cloned(),
                batch: 10,
                max_bytes,
                expires: at(1_000),
            };
            self.stream.handle(now, client(from), S, Command::Pull(pull));
        }

        /// To whom, under which pin, which sequences with which numbers.
        #[expect(clippy::type_complexity)]
        fn rows(&mut self) -> Option<(u32, PinId, Vec<(u64, u64)>)> {
            self.stream.take_outgoing().into_iter().find_map(|out| match out {
                Outgoing::Rows { to, rows, .. } => Some((
                    to.process,
                    rows.pin.unwrap(),
                    rows.rows.iter().map(|row| (row.seq.0, row.delivery.0)).collect(),
                )),
                Outgoing::Ended { .. } => None,
            })
        }

        fn ended(&mut self) -> Option<(u32, PullEnd)> {
            self.stream.take_outgoing().into_iter().find_map(|out| match out {
                Outgoing::Ended { to, end, .. } => Some((to.process, end)),
                Outgoing::Rows { .. } => None,
            })
        }
    }

    #[test]
    fn the_first_row_brings_the_pin_and_a_standby_waits_for_it_to_lapse() {
        let mut bench = Bench::new();
        bench.pull(at(0), 0, None, None);
        assert!(bench.stream.holder(S).is_none());
        bench.publish(at(1));
        let (to, pin, rows) = bench.rows().unwrap();
        assert_eq!((to, rows), (0, vec![(1, 1)]));
        bench.pull(at(1_500), 1, None, None);
        bench.stream.delete_consumer_pulls_of(0);
        bench.publish(at(1_600));
        assert!(bench.rows().is_none(), "another is pinned");
        assert_eq!(bench.stream.next_wakeup(), Some(at(2_001)));
        bench.stream.tick(at(2_001));
        assert_eq!(
            bench.stream.take_pin_changes().last().map(|change| matches!(change, PinChange::Taken { .. })),
            Some(true)
        );
        let (to, other, rows) = bench.rows().unwrap();
        assert_eq!((to, rows), (1, vec![(2, 2)]));
        assert_ne!(pin, other);
        bench.pull(at(2_100), 0, Some(&pin), None);
        assert_eq!(bench.ended(), Some((0, PullEnd::NotPinned)));
    }

    #[test]
    fn only_pulls_of_the_pinned_renew_and_one_byte_delivers_nothing() {
        let mut bench = Bench::new();
        bench.publish(at(0));
        bench.pull(at(0), 0, None, Some(1));
        assert_eq!(bench.ended(), Some((0, PullEnd::TooLarge)));
        assert!(bench.stream.holder(S).is_none(), "a refused pull takes no pin");
        bench.pull(at(0), 0, None, None);
        let (_, pin, _) = bench.rows().unwrap();
        bench.publish(at(100));
        bench.rows();
        bench.stream.delete_consumer_pulls_of(0);
        bench.publish(at(1_000));
        bench.pull(at(1_900), 0, Some(&pin), Some(1));
        assert_eq!(bench.ended(), Some((0, PullEnd::TooLarge)));
        bench.stream.tick(at(2_500));
        assert_eq!(bench.stream.holder(S).map(|(holder, _)| holder), Some(client(0)));
        bench.stream.tick(at(3_900));
        assert!(bench.stream.holder(S).is_none());
    }

    #[test]
    fn a_stale_id_on_an_idle_shard_is_not_told_until_a_row_comes() {
        let mut bench = Bench::new();
        bench.pull(at(0), 0, Some(&PinId("old".into())), None);
        assert!(bench.ended().is_none());
        bench.publish(at(10));
        assert_eq!(bench.ended(), Some((0, PullEnd::NotPinned)));
    }

    #[test]
    fn a_reset_numbers_anew_and_serves_who_waits() {
        let mut bench = Bench::new();
        for _ in 0..3 {
            bench.publish(at(0));
        }
        bench.pull(at(0), 0, None, None);
        assert_eq!(bench.rows().unwrap().2, vec![(1, 1), (2, 2), (3, 3)]);
        let reset = Command::Reset { attempt: Attempt(90), inbox: Inbox(1), from: Seq(2) };
        assert!(bench.stream.handle(at(5), client(1), S, reset).is_some());
        assert_eq!(bench.rows().unwrap().2, vec![(2, 1), (3, 2)], "the pinned client's own pull");
        let beyond = Command::Reset { attempt: Attempt(91), inbox: Inbox(1), from: Seq(9) };
        bench.stream.handle(at(6), client(1), S, beyond);
        bench.publish(at(7));
        assert!(bench.rows().is_none(), "rows up to there are skipped in silence");
    }

    #[test]
    fn a_new_leader_forgets_and_tells() {
        let mut bench = Bench::new();
        for _ in 0..3 {
            bench.publish(at(0));
        }
        bench.pull(at(0), 0, None, None);
        bench.rows();
        bench.stream.move_leader(at(1), S, 2, Duration::ZERO);
        assert_eq!(bench.ended(), Some((0, PullEnd::LeaderChanged)));
        bench.pull(at(2), 1, None, None);
        assert_eq!(bench.rows().unwrap().2, vec![(2, 2), (3, 3)]);
    }

    #[test]
    fn a_reset_that_is_not_written_down_leaves_the_count_until_more_is_delivered() {
        let mut bench = Bench::new();
        bench.stream.leave_resets_unwritten(at(10_000));
        let reset = |bench: &mut Bench, now, seq| {
            let reset = Command::Reset { attempt: Attempt(90), inbox: Inbox(1), from: Seq(seq) };
            bench.stream.handle(at(now), client(0), S, reset);
            let seen = bench.stream.look_at_stream();
            bench.stream.look_at_consumer(at(now), S, seen).unwrap().delivered
        };
        for _ in 0..3 {
            bench.publish(at(0));
        }
        bench.stream.deliver_to_nobody(at(0), S, 3);
        assert_eq!(reset(&mut bench, 50, 1), 3);
        assert_eq!(reset(&mut bench, 60, 1), 3);
        assert_eq!(reset(&mut bench, 150, 1), 0, "the server has written by now");
        bench.stream.deliver_to_nobody(at(200), S, 3);
        assert_eq!(reset(&mut bench, 210, 2), 0, "that state differs from none");
        bench.stream.deliver_to_nobody(at(20_000), S, 3);
        assert_eq!(reset(&mut bench, 20_010, 1), 0, "the fault is over");
    }

    #[test]
    fn a_lost_tail_uses_sequences_again() {
        let mut bench = Bench::new();
        for n in 0..4 {
            bench.publish(at(n));
        }
        assert_eq!(bench.stream.lose_tail(2), vec![Seq(4), Seq(3)]);
        assert_eq!(bench.stream.last().seq, Seq(2));
        assert_eq!(bench.publish(at(9)), Seq(3));
    }

    #[test]
    fn a_client_that_is_gone_or_does_not_listen_is_passed_over() {
        let mut bench = Bench::new();
        bench.pull(at(0), 0, None, None);
        bench.pull(at(0), 1, None, None);
        bench.pull(at(0), 2, None, None);
        bench.stream.disconnect(at(1), client(0));
        bench.stream.handle(at(1), client(1), S, Command::Close { inbox: Inbox(1) });
        bench.publish(at(2));
        assert_eq!(bench.rows().unwrap().0, 2);
    }

    #[test]
    fn what_is_not_acknowledged_in_time_comes_again_in_number() {
        let policy = AckPolicy { acks: Acks::WorkQueue, wait: at(500), max_pending: 3 };
        let mut bench = Bench::with(policy);
        for _ in 0..5 {
            bench.publish(at(0));
        }
        bench.pull(at(0), 0, None, None);
        assert_eq!(bench.rows().unwrap().2, vec![(1, 1), (2, 2), (3, 3)], "no more may wait");
        let acks = vec![(Seq(2), Delivery(2)), (Seq(4), Delivery(9))];
        bench.stream.handle(at(100), client(0), S, Command::Ack { rows: acks });
        assert_eq!(bench.rows().unwrap().2, vec![(4, 4)]);
        assert_eq!(bench.stream.rows_of(S), vec![Seq(1), Seq(3), Seq(4), Seq(5)]);
        bench.stream.tick(at(500));
        assert_eq!(bench.rows().unwrap().2, vec![(1, 5), (3, 6)]);
        assert_eq!(bench.stream.unacked(S).collect::<Vec<_>>(), vec![Seq(1), Seq(3), Seq(4)]);
        let reset = Command::Reset { attempt: Attempt(90), inbox: Inbox(1), from: Seq(1) };
        bench.stream.handle(at(600), client(0), S, reset);
        assert_eq!(bench.rows().unwrap().2, vec![(1, 1), (3, 2), (4, 3)]);
    }

    impl JetStream {
        fn delete_consumer_pulls_of(&mut self, process: u32) {
            self.consumers[0].waiting.retain(|waiting| waiting.to.process != process);
        }
    }

    #[test]
    fn a_trim_spares_another_stream() {
        let mut bench = Bench::new();
        for n in 0..4 {
            bench.publish(at(n));
        }
        let witness = |seq| Mark {
            seq: Seq(seq),
            stored_at: Timestamp(i64::try_from(at(seq - 1).as_nanos()).unwrap()),
        };
        let trim_past = |created, witness| retention::Command::Trim {
            attempt: Attempt(1),
            created,
            below: Seq(3),
            witness,
        };
        let trim = |created| trim_past(created, witness(4));
        let lost = trim_past(Timestamp(1), Mark { stored_at: Timestamp(9), ..witness(4) });
        assert!(bench.stream.trim(&lost).1.is_empty(), "another row is where the highest was");
        assert!(matches!(
            bench.stream.trim(&trim(Timestamp(2))).0,
            retention::Reply::Trimmed { outcome: Err(_), .. }
        ));
        assert_eq!(bench.stream.trim(&trim(Timestamp(1))).1, vec![Seq(1), Seq(2)]);
        assert_eq!(bench.stream.rows_of(S), vec![Seq(3), Seq(4)]);
    }

    #[test]
    fn names_survive_in_payloads() {
        assert_eq!(number_of(&payload(77, 3)), 77);
        assert_eq!(payload(1, 30).len(), 30);
    }
}
