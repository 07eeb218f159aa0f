//! A model of ClickHouse's insert deduplication.
//!
//! It keeps to what was seen on ClickHouse 26.7 with `non_replicated_deduplication_window` set:
//!
//! - A batch is one block, split by partition; each partition's part is committed by itself, so a killed
//!   server may leave some of them. A retry under the same token completes the rest.
//! - **The token alone decides**, a partition at a time: a part whose token is remembered is dropped and
//!   answered like one that was stored.
//! - The window remembers parts, not inserts, and forgets the oldest.
//! - The deduplication log is written before the part is committed: a server killed in between has *burned*
//!   the token. Every retry is answered with success and stores nothing.
//! - An insert whose client has gone still completes. So does one that its client gave up waiting for.
//! - A row that does not fit the table refuses its whole block when it is parsed, that is, on its arrival. Whether a
//!   row fits can change: somebody alters the table. So does a block with more partitions than the table allows.
//!
//! One assumption stands in for arithmetic: whoever set the window made it outlast the horizon (protocol.md).
//! So a token is forgotten when enough parts came since, but never within the horizon of the first part of
//! another batch. (Until that comes a token can be of any age: the batch may be tried for hours.)

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use holdfast_core::ports::Attempt;
use holdfast_core::ports::store::{
    Class, Command, DescribeError, Description, Found, Insert, InsertOutcome, Level, Refusal, Reply, Target,
    Token,
};
use holdfast_core::row::{Row, Seq, ShardId, TableName};
use holdfast_core::rule::{Rule, safeguard};
use holdfast_core::time::Timestamp;

use crate::jetstream::{Client, number_of};

/// How a table is made.
#[derive(Clone, Debug)]
pub struct TableSpec {
    /// Its name.
    pub name: TableName,
    /// What it allows.
    pub level: Level,
    /// Into how many partitions rows fall, by their number.
    pub partitions: u64,
    /// Parts whose tokens are remembered, once they are older than the horizon.
    pub window: usize,
    /// A block of more partitions than this is refused; 0: none is.
    pub max_partitions: usize,
    /// It is created then.
    pub exists_from: Duration,
}

/// A row that its table refuses, within a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// From then on.
    pub from: Duration,
    /// Until then.
    pub until: Duration,
}

/// Why a block cannot become rows of its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// This row of those sent, counted from 0.
    Row(usize),
    /// It has too many partitions.
    Partitions,
}

/// What becomes of an insert that the server received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It lands and is answered.
    Lands {
        /// When its first part is committed.
        after: Duration,
        /// How long each further part takes.
        pace: Duration,
    },
    /// Nothing is written, and that is said.
    Refused {
        /// When.
        after: Duration,
        /// Why.
        refusal: Refusal,
    },
    /// The body was cut: nothing is written, nothing said.
    Cut,
    /// The server fails at it after some parts.
    Killed {
        /// When.
        after: Duration,
        /// Parts committed before.
        landed: usize,
        /// Whether the token of the part after them is logged although the part is not committed.
        burned: bool,
    },
}

/// Something that happened to a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Whose insert it is of.
    pub from: Client,
    /// The insert.
    pub insert: Insert,
    /// Its rows.
    pub rows: Vec<Row>,
    /// What became of it.
    pub outcome: PartOutcome,
}

/// What became of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartOutcome {
    /// Its rows are in the table.
    Stored,
    /// Its token was remembered with rows: dropped.
    Repeated,
    /// Its token was burned: dropped, although the rows are nowhere.
    Swallowed,
    /// Its token is burned now.
    Burned,
}

#[derive(Clone, Debug)]
struct Running {
    from: Client,
    insert: Insert,
    parts: VecDeque<(u64, Vec<Row>)>,
    done: usize,
    arrived: Duration,
    due: Duration,
    fate: Fate,
}

#[derive(Clone, Debug)]
struct Table {
    spec: TableSpec,
    /// Rows by stream and sequence: the number in the payload, and how often the row is there.
    rows: BTreeMap<(Timestamp, Seq), (u64, u32)>,
    /// The rows' numbers in the order in which they were written.
    order: Vec<u64>,
    window: VecDeque<(Duration, Token, u64)>,
    remembered: BTreeSet<(Token, u64)>,
    burned: BTreeSet<(Token, u64)>,
}

impl Table {
    fn commit(
        &mut self,
        now: Duration,
        horizon: Duration,
        token: &Token,
        partition: u64,
        rows: &[Row],
        created: Timestamp,
    ) -> PartOutcome {
        let key = (token.clone(), partition);
        if self.spec.level != Level::AtLeastOnce && self.remembered.contains(&key) {
            return if self.burned.contains(&key) { PartOutcome::Swallowed } else { PartOutcome::Repeated };
        }
        self.remember(now, horizon, key);
        for row in rows {
            let number = number_of(&row.payload);
            let there = self.rows.entry((created, row.seq)).or_insert((number, 0));
            there.1 += 1;
            self.order.push(number);
        }
        PartOutcome::Stored
    }

    fn remember(&mut self, now: Duration, horizon: Duration, key: (Token, u64)) {
        self.window.push_back((now, key.0.clone(), key.1));
        self.remembered.insert(key);
        while self.window.len() > self.spec.window && self.may_forget(now, horizon) {
            let Some((_, token, partition)) = self.window.pop_front() else { return };
            let key = (token, partition);
            self.remembered.remove(&key);
            self.burned.remove(&key);
        }
    }

    /// Whether the horizon of the oldest token is over.
    fn may_forget(&self, now: Duration, horizon: Duration) -> bool {
        let Some((_, oldest, _)) = self.window.front() else { return false };
        let other = self.window.iter().find(|(_, token, _)| token != oldest);
        other.is_some_and(|(at, ..)| *at + horizon < now)
    }
}

/// The store.
#[derive(Clone, Debug)]
pub struct ClickHouse {
    tables: BTreeMap<TableName, Table>,
    /// Rows by number that do not fit their table, and when.
    unfit: BTreeMap<u64, Vec<Unfit>>,
    horizon: Duration,
    running: Vec<Running>,
    replies: Vec<(Client, Insert, InsertOutcome)>,
    parts: Vec<Part>,
}

impl ClickHouse {
    /// A store with these tables, whose windows outlast `horizon`.
    #[must_use]
    pub fn new(tables: impl IntoIterator<Item = TableSpec>, horizon: Duration) -> Self {
        let table = |spec: TableSpec| {
            let name = spec.name.clone();
            let (rows, order, window) = (BTreeMap::new(), Vec::new(), VecDeque::new());
            (name, Table { spec, rows, order, window, remembered: BTreeSet::new(), burned: BTreeSet::new() })
        };
        Self {
            tables: tables.into_iter().map(table).collect(),
            unfit: BTreeMap::new(),
            horizon,
            running: Vec::new(),
            replies: Vec::new(),
            parts: Vec::new(),
        }
    }

    /// The row of this number does not fit its table within that time.
    pub fn refuse(&mut self, number: u64, unfit: Unfit) {
        self.unfit.entry(number).or_default().push(unfit);
    }

    /// Somebody alters the tables: from now on every row fits.
    pub fn accept_all(&mut self, now: Duration) {
        for unfit in self.unfit.values_mut().flatten() {
            unfit.until = unfit.until.min(now);
        }
    }

    /// Whether the row of this number did not fit its table at any time between these two.
    #[must_use]
    pub fn was_unfit(&self, number: u64, from: Duration, until: Duration) -> bool {
        let times = self.unfit.get(&number).map_or(&[][..], Vec::as_slice);
        times.iter().any(|unfit| unfit.from <= until && from < unfit.until)
    }

    /// When a table comes to exist.
    #[must_use]
    pub fn exists_from(&self, table: &TableName) -> Option<Duration> {
        self.tables.get(table).map(|table| table.spec.exists_from)
    }

    /// The numbers of a table's rows, in the order in which they were written.
    #[must_use]
    pub fn contents(&self, table: &TableName) -> &[u64] {
        self.tables.get(table).map_or(&[], |table| &table.order)
    }

    /// What a look at a block, on its arrival, finds that does not fit.
    #[must_use]
    pub fn misfit(&self, now: Duration, insert: &Insert) -> Option<Misfit> {
        let bad = |row: &Row| self.was_unfit(number_of(&row.payload), now, now);
        if let Some(at) = insert.rows.iter().position(bad) {
            return Some(Misfit::Row(at));
        }
        let most = self.tables.get(&insert.table)?.spec.max_partitions;
        (most > 0 && self.parts_of(insert) > most).then_some(Misfit::Partitions)
    }

    /// How many parts an insert is split into.
    #[must_use]
    pub fn parts_of(&self, insert: &Insert) -> usize {
        self.split(insert).len()
    }

    fn split(&self, insert: &Insert) -> BTreeMap<u64, Vec<Row>> {
        let partitions = self.tables.get(&insert.table).map_or(1, |table| table.spec.partitions).max(1);
        let mut parts: BTreeMap<u64, Vec<Row>> = BTreeMap::new();
        for row in insert.rows.iter() {
            parts.entry(number_of(&row.payload) % partitions).or_default().push(row.clone());
        }
        parts
    }

    /// Takes an insert that arrived. `rotated` decides with which partition it begins.
    pub fn insert(&mut self, now: Duration, from: Client, insert: Insert, fate: Fate, rotated: usize) {
        let exists = self.tables.get(&insert.table).is_some_and(|table| table.spec.exists_from <= now);
        if !exists {
            self.replies.push((from, insert, InsertOutcome::Again(missing())));
            return;
        }
        let after = match &fate {
            Fate::Cut => return,
            Fate::Lands { after, .. } | Fate::Refused { after, .. } | Fate::Killed { after, .. } => *after,
        };
        let mut parts: VecDeque<_> = self.split(&insert).into_iter().collect();
        let rotated = rotated % parts.len().max(1);
        parts.rotate_left(rotated);
        self.running.push(Running { from, insert, parts, done: 0, arrived: now, due: now + after, fate });
    }

    /// Answers a question.
    #[must_use]
    pub fn answer(&self, now: Duration, command: &Command) -> Option<Reply> {
        match command {
            Command::Insert(_) | Command::Abort { .. } => None,
            Command::ReadBack { attempt, table, created, first, last, .. } => {
                let outcome = match self.tables.get(table) {
                    Some(table) if table.spec.exists_from <= now => {
                        Ok(table.read_back(*created, *first, *last))
                    }
                    _ => Err(missing()),
                };
                Some(Reply::ReadBack { attempt: *attempt, table: table.clone(), outcome })
            }
            Command::Describe { attempt, table, holds, .. } => {
                let outcome = match self.tables.get(table) {
                    Some(known) if known.spec.exists_from <= now => {
                        let level = known.spec.level;
                        let target =
                            Target { database: "db".into(), table: Arc::from(table.as_str()), level };
                        let holds = holds
                            .filter(|_| level.can_read_back())
                            .and_then(|holds| known.holds(holds.created, holds.above));
                        Ok(Description { target, holds })
                    }
                    _ => Err(DescribeError::Missing(missing())),
                };
                Some(Reply::Described { attempt: *attempt, table: table.clone(), outcome })
            }
        }
    }

    /// The inserts that run, in the order of their arrival.
    pub fn running(&self) -> impl Iterator<Item = &Insert> {
        self.running.iter().map(|running| &running.insert)
    }

    /// The server fails at one insert after `landed` more parts. Says which rows were left.
    pub fn fail_at(&mut self, now: Duration, shard: ShardId, attempt: Attempt, landed: usize) -> Vec<Row> {
        let asked = |running: &Running| (running.insert.shard, running.insert.attempt) == (shard, attempt);
        let Some(at) = self.running.iter().position(asked) else { return Vec::new() };
        let mut running = self.running.remove(at);
        for _ in 0..landed {
            self.commit_next(now, &mut running);
        }
        let left = running.parts.iter().flat_map(|(_, rows)| rows.clone()).collect();
        self.fail(running.from, running.insert);
        left
    }

    /// What runs for a shard takes as long as it may: until `life` after its arrival.
    pub fn linger(&mut self, shard: ShardId, life: Duration) {
        for running in self.running.iter_mut().filter(|running| running.insert.shard == shard) {
            running.due = running.due.max(running.arrived + life);
        }
    }

    /// The server is killed: what runs is lost where it stands. `burns` says of each insert, in order, whether
    /// the next part's token was logged already.
    pub fn kill(&mut self, now: Duration, burns: &[bool]) {
        for (at, mut running) in std::mem::take(&mut self.running).into_iter().enumerate() {
            if burns.get(at).copied().unwrap_or_default() {
                self.burn(now, &mut running);
            }
            self.fail(running.from, running.insert);
        }
    }

    fn fail(&mut self, from: Client, insert: Insert) {
        let refusal = Refusal {
            class: Class::Doubt,
            code: None,
            row: None,
            message: "the connection broke".to_owned(),
        };
        self.replies.push((from, insert, InsertOutcome::Doubt(refusal)));
    }

    fn burn(&mut self, now: Duration, running: &mut Running) {
        let Some(table) = self.tables.get_mut(&running.insert.table) else { return };
        let Some((partition, rows)) = running.parts.pop_front() else { return };
        let key = (running.insert.token.clone(), partition);
        if table.remembered.contains(&key) {
            return;
        }
        table.burned.insert(key.clone());
        table.remember(now, self.horizon, key);
        let (from, insert) = (running.from, running.insert.clone());
        self.parts.push(Part { from, insert, rows, outcome: PartOutcome::Burned });
    }

    /// When [`Self::tick`] has something to do.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Duration> {
        self.running.iter().map(|running| running.due).min()
    }

    /// Goes on with what runs.
    pub fn tick(&mut self, now: Duration) {
        let mut at = 0;
        while at < self.running.len() {
            if self.running[at].due > now {
                at += 1;
                continue;
            }
            let mut running = self.running.remove(at);
            if self.step(now, &mut running) {
                self.running.insert(at, running);
                at += 1;
            }
        }
    }

    /// One step of an insert; whether there are more.
    fn step(&mut self, now: Duration, running: &mut Running) -> bool {
        match running.fate.clone() {
            Fate::Cut => false,
            Fate::Refused { refusal, .. } => {
                let outcome = InsertOutcome::Again(refusal);
                self.replies.push((running.from, running.insert.clone(), outcome));
                false
            }
            Fate::Lands { pace, .. } => {
                self.commit_next(now, running);
                if running.parts.is_empty() {
                    self.replies.push((running.from, running.insert.clone(), InsertOutcome::Stored));
                    return false;
                }
                running.due = now + pace;
                true
            }
            Fate::Killed { landed, burned, .. } => {
                while running.done < landed && !running.parts.is_empty() {
                    self.commit_next(now, running);
                }
                if burned {
                    self.burn(now, running);
                }
                self.fail(running.from, running.insert.clone());
                false
            }
        }
    }

    fn commit_next(&mut self, now: Duration, running: &mut Running) {
        let Some((partition, rows)) = running.parts.pop_front() else { return };
        running.done += 1;
        let insert = &running.insert;
        let Some(table) = self.tables.get_mut(&insert.table) else { return };
        let outcome = table.commit(now, self.horizon, &insert.token, partition, &rows, insert.created);
        self.parts.push(Part { from: running.from, insert: insert.clone(), rows, outcome });
    }

    /// Answers to inserts that have ended, in order.
    pub fn take_replies(&mut self) -> Vec<(Client, Insert, InsertOutcome)> {
        std::mem::take(&mut self.replies)
    }

    /// What happened to parts, in order.
    pub fn take_parts(&mut self) -> Vec<Part> {
        std::mem::take(&mut self.parts)
    }
}

fn missing() -> Refusal {
    Refusal { class: Class::Table, code: Some(60), row: None, message: "the table does not exist".to_owned() }
}

impl Table {
    /// The highest row of a stream above a place.
    fn holds(&self, created: Timestamp, above: Seq) -> Option<Seq> {
        let rows = self.rows.range((created, above.next())..=(created, Seq(u64::MAX)));
        rows.last().map(|((_, seq), _)| *seq)
    }

    fn read_back(&self, created: Timestamp, first: Seq, last: Seq) -> Found {
        let mut found = Found::default();
        if first > last {
            return found;
        }
        if !safeguard(Rule::ReadBackOfThisStream) {
            let any = self.rows.keys().map(|(_, seq)| *seq).filter(|seq| (first..=last).contains(seq));
            found.seqs = any.collect::<std::collections::BTreeSet<_>>().into_iter().collect();
            return found;
        }
        for ((_, seq), (_, times)) in self.rows.range((created, first)..=(created, last)) {
            found.seqs.push(*seq);
            if *times > 1 && found.repeated.is_none() {
                found.repeated = Some(*seq);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use holdfast_core::row::{Delivery, Verdict};
    use holdfast_core::time::Instant;

    use super::*;
    use crate::jetstream::payload;

    const ME: Client = Client { process: 0, start: 1, link: 1 };
    const STREAM: Timestamp = Timestamp(5);

    fn store(partitions: u64, window: usize) -> ClickHouse {
        let name = TableName::new("t");
        let spec = TableSpec {
            name,
            level: Level::ExactlyOnce,
            partitions,
            window,
            max_partitions: 0,
            exists_from: Duration::ZERO,
        };
        ClickHouse::new([spec], Duration::ZERO)
    }

    fn insert(token: &str, seqs: std::ops::RangeInclusive<u64>) -> Insert {
        let rows: Vec<Row> = seqs
            .map(|seq| Row {
                seq: Seq(seq),
                delivery: Delivery(0),
                redelivered: false,
                stored_at: Timestamp(0),
                table: TableName::new("t"),
                payload: payload(seq, 8),
                verdict: Verdict::Good,
            })
            .collect();
        Insert {
            attempt: Attempt(1),
            shard: ShardId(0),
            table: TableName::new("t"),
            target: Target { database: "db".into(), table: "t".into(), level: Level::ExactlyOnce },
            created: STREAM,
            token: Token(token.into()),
            rows: rows.into(),
            send_by: Instant::START,
        }
    }

    fn lands() -> Fate {
        Fate::Lands { after: Duration::ZERO, pace: Duration::from_secs(1) }
    }

    fn found(store: &ClickHouse) -> Vec<u64> {
        let ask = Command::ReadBack {
            attempt: Attempt(1),
            shard: ShardId(0),
            table: TableName::new("t"),
            target: insert("x", 1..=1).target,
            created: STREAM,
            first: Seq(1),
            last: Seq(99),
        };
        match store.answer(Duration::MAX, &ask) {
            Some(Reply::ReadBack { outcome: Ok(found), .. }) => found.seqs.iter().map(|seq| seq.0).collect(),
            other => panic!("{other:?}"),
        }
    }

    fn run(store: &mut ClickHouse, from: u64, to: u64) -> Vec<InsertOutcome> {
        for second in from..=to {
            store.tick(Duration::from_secs(second));
        }
        store.take_replies().into_iter().map(|(_, _, outcome)| outcome).collect()
    }

    #[test]
    fn partitions_land_one_by_one_and_the_answer_comes_last() {
        let mut store = store(2, 100);
        store.insert(Duration::ZERO, ME, insert("a", 1..=4), lands(), 0);
        assert_eq!(run(&mut store, 0, 0), vec![]);
        assert_eq!(found(&store), vec![2, 4]);
        assert_eq!(run(&mut store, 1, 1), vec![InsertOutcome::Stored]);
        assert_eq!(found(&store), vec![1, 2, 3, 4]);
    }

    #[test]
    fn the_token_alone_decides() {
        let mut store = store(1, 100);
        store.insert(Duration::ZERO, ME, insert("a", 1..=2), lands(), 0);
        store.insert(Duration::ZERO, ME, insert("a", 3..=4), lands(), 0);
        assert_eq!(run(&mut store, 0, 0), vec![InsertOutcome::Stored, InsertOutcome::Stored]);
        assert_eq!(found(&store), vec![1, 2]);
    }

    #[test]
    fn a_burned_token_swallows_every_retry() {
        let mut store = store(1, 100);
        let killed = Fate::Killed { after: Duration::ZERO, landed: 0, burned: true };
        store.insert(Duration::ZERO, ME, insert("a", 1..=2), killed, 0);
        assert!(matches!(run(&mut store, 0, 0).as_slice(), [InsertOutcome::Doubt(_)]));
        store.insert(Duration::ZERO, ME, insert("a", 1..=2), lands(), 0);
        assert_eq!(run(&mut store, 0, 0), vec![InsertOutcome::Stored]);
        assert_eq!(found(&store), Vec::<u64>::new());
        store.insert(Duration::ZERO, ME, insert("b", 1..=2), lands(), 0);
        run(&mut store, 0, 0);
        assert_eq!(found(&store), vec![1, 2]);
    }

    #[test]
    fn a_partly_stored_batch_is_completed_by_a_retry() {
        let mut store = store(2, 100);
        let killed = Fate::Killed { after: Duration::ZERO, landed: 1, burned: false };
        store.insert(Duration::ZERO, ME, insert("a", 1..=4), killed, 1);
        run(&mut store, 0, 0);
        assert_eq!(found(&store), vec![1, 3]);
        store.insert(Duration::ZERO, ME, insert("a", 1..=4), lands(), 0);
        assert_eq!(run(&mut store, 0, 3), vec![InsertOutcome::Stored]);
        assert_eq!(found(&store), vec![1, 2, 3, 4]);
    }

    #[test]
    fn the_window_counts_parts() {
        let mut store = store(2, 3);
        for (second, token) in [(0, "a"), (10, "b"), (20, "a")] {
            store.insert(Duration::from_secs(second), ME, insert(token, 1..=2), lands(), 0);
            run(&mut store, second, second + 2);
        }
        // After `b` one part of `a` is remembered; storing the other again pushes that out, too.
        let stored = store.take_parts().iter().filter(|part| part.outcome == PartOutcome::Stored).count();
        assert_eq!(stored, 6);
        store.insert(Duration::from_secs(30), ME, insert("a", 1..=2), lands(), 0);
        run(&mut store, 30, 32);
        assert!(store.take_parts().iter().all(|part| part.outcome == PartOutcome::Repeated));
    }

    #[test]
    fn a_row_refuses_its_block_while_it_does_not_fit() {
        let mut store = store(2, 10);
        store.refuse(3, Unfit { from: Duration::from_secs(5), until: Duration::from_secs(9) });
        let at = Duration::from_secs;
        assert_eq!(store.misfit(at(4), &insert("a", 1..=4)), None);
        assert_eq!(store.misfit(at(5), &insert("a", 1..=4)), Some(Misfit::Row(2)));
        assert_eq!(store.misfit(at(9), &insert("a", 1..=4)), None);
        assert!(store.was_unfit(3, at(0), at(7)) && store.was_unfit(3, at(8), at(20)));
        assert!(!store.was_unfit(3, at(0), at(4)) && !store.was_unfit(3, at(9), at(20)));
    }

    #[test]
    fn a_description_tells_the_highest_row_of_a_stream_above_a_place() {
        let mut store = store(1, 10);
        store.insert(Duration::ZERO, ME, insert("a", 1..=4), lands(), 0);
        run(&mut store, 0, 0);
        let holds = |created, above| {
            let holds = Some(holdfast_core::ports::store::HoldsAbove { created, above: Seq(above) });
            let (attempt, shard, table) = (Attempt(1), ShardId(0), TableName::new("t"));
            let ask = Command::Describe { attempt, shard, table, holds };
            match store.answer(Duration::MAX, &ask) {
                Some(Reply::Described { outcome: Ok(description), .. }) => description.holds,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(holds(STREAM, 2), Some(Seq(4)));
        assert_eq!(holds(STREAM, 4), None);
        assert_eq!(holds(Timestamp(6), 0), None);
    }

    #[test]
    fn a_missing_table_refuses_for_certain() {
        let mut store = store(1, 10);
        let stray = Insert { table: TableName::new("nowhere"), ..insert("a", 1..=1) };
        store.insert(Duration::ZERO, ME, stray, lands(), 0);
        assert!(matches!(run(&mut store, 0, 0).as_slice(), [InsertOutcome::Again(_)]));
    }
}
