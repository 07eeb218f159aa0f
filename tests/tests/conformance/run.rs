//! Runs a script: each step is asked of a port or of the operator, and its answer is put into words.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant as Moment};

use bytes::Bytes;
use holdfast_core::member::MemberId;
use holdfast_core::ports::dead_letters::{self, Cause, Letter, ParkOutcome};
use holdfast_core::ports::delivery::{self, Inbox, InspectError, Inspection, PinId, Pull, PullEnd};
use holdfast_core::ports::ledger::{self, Revision, WriteOutcome};
use holdfast_core::ports::members::{self, Probe};
use holdfast_core::ports::store::{
    self, DescribeError, HoldsAbove, Insert, InsertOutcome, Level, Refusal, Token as Of,
};
use holdfast_core::ports::{Attempt, Failure, FailureClass, retention};
use holdfast_core::row::{Delivery, Mark, Row, Seq, ShardId, TableName, Verdict};
use holdfast_core::time::{Instant, Timestamp};
use tokio::task::JoinHandle;

use crate::answer::{Kind, Names, Token, words};
use crate::bench::{Bench, Between, Client, Result};
use crate::script::{Script, Step, duration, number};

/// How long an answer is waited for. It comes at once, or never.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

const SHARD: ShardId = ShardId(0);

/// The values of the stream column.
pub(crate) const STREAM: Timestamp = Timestamp(1_700_000_000_000_000_123);
const OTHER_STREAM: Timestamp = Timestamp(1_700_000_000_000_000_456);

/// An answer that was not the expected one.
#[derive(Clone, Debug)]
pub(crate) struct Mismatch {
    pub(crate) script: String,
    pub(crate) place: String,
    pub(crate) step: String,
    pub(crate) expected: String,
    pub(crate) got: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { script, place, step, expected, got } = self;
        write!(f, "{script} ({place})\n    step:     {step}\n    expected: {expected}\n    got:      {got}")
    }
}

/// Runs a script against fresh servers.
pub(crate) async fn run(
    script: &Script,
    bench: &dyn Bench,
    between: &dyn Between,
    patience: Duration,
) -> std::result::Result<(), Mismatch> {
    let (names, parties, stored) = (Names::default(), BTreeMap::new(), BTreeMap::new());
    let mut stage = Stage { bench, between, patience, names, parties, stored };
    for step in &script.steps {
        let outcome = stage.take(step).await;
        if let Err(got) = outcome {
            let expected = match (step.expected.join(" "), step.took) {
                (words, None) => words,
                (words, Some((from, to))) if to == Duration::MAX => {
                    format!("{words}, after {from:?} or more")
                }
                (words, Some((from, to))) => format!("{words}, after {from:?} to {to:?}"),
            };
            return Err(Mismatch {
                script: script.id.clone(),
                place: format!("{}:{}", script.file, step.line),
                step: step.text.clone(),
                expected: if expected.is_empty() { "(no answer)".to_owned() } else { expected },
                got,
            });
        }
    }
    Ok(())
}

/// A row as it came.
struct Came {
    seq: Seq,
    delivery: Delivery,
    redelivered: bool,
    pin: Option<PinId>,
}

/// What comes to a client unasked.
struct Heard<T> {
    all: Mutex<VecDeque<T>>,
    more: tokio::sync::Notify,
}

impl<T> Heard<T> {
    fn new() -> Arc<Self> {
        Arc::new(Self { all: Mutex::default(), more: tokio::sync::Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, what: T) {
        self.lock().push_back(what);
        self.more.notify_one();
    }

    /// Everything so far, but first so much is waited for.
    async fn take(&self, at_least: usize, patience: Duration) -> Vec<T> {
        let enough = async {
            while self.lock().len() < at_least {
                self.more.notified().await;
            }
        };
        // What is there when patience ends is the answer.
        let _ = tokio::time::timeout(patience, enough).await;
        self.lock().drain(..).collect()
    }
}

/// A client of the script.
struct Party {
    client: Client,
    attempt: u64,
    inbox: u64,
    rows: Arc<Heard<Came>>,
    pulls: VecDeque<JoinHandle<PullEnd>>,
    inserts: VecDeque<JoinHandle<InsertOutcome>>,
    member: Option<Member>,
}

/// A client as a member, on a runtime that can be stopped.
struct Member {
    port: Arc<dyn members::Port>,
    heard: Arc<Heard<members::Reply>>,
    runtime: Option<tokio::runtime::Runtime>,
    frozen: Option<std::sync::mpsc::Sender<()>>,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.frozen = None;
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Party {
    fn attempt(&mut self) -> Attempt {
        self.attempt += 1;
        Attempt(self.attempt)
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        self.pulls.iter().for_each(JoinHandle::abort);
        self.inserts.iter().for_each(JoinHandle::abort);
    }
}

struct Stage<'a> {
    bench: &'a dyn Bench,
    between: &'a dyn Between,
    patience: Duration,
    names: Names,
    parties: BTreeMap<String, Party>,
    /// When the rows that were seen were stored.
    stored: BTreeMap<Seq, Timestamp>,
}

impl Stage<'_> {
    /// Does a step; if the answer is not the expected one, what it was.
    async fn take(&mut self, step: &Step) -> Result<()> {
        let begun = Moment::now();
        loop {
            let asked = Moment::now();
            let answer = self.ask(step).await.map_err(|trouble| format!("trouble: {trouble}"))?;
            let took = asked.elapsed();
            let in_time = step.took.is_none_or(|(from, to)| from <= took && took <= to);
            if in_time && self.names.take(&step.expected, &answer) {
                return Ok(());
            }
            if !step.eventually || begun.elapsed() > self.patience {
                let late = if in_time { String::new() } else { format!(", after {took:.1?}") };
                return Err(format!("{}{late}", self.names.show(&answer)));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn ask(&mut self, step: &Step) -> Result<Vec<Token>> {
        let words: Vec<&str> = step.words.iter().map(String::as_str).collect();
        match &step.who {
            None => self.operate(&words).await,
            Some(who) => {
                self.connect(who).await?;
                match words[0] {
                    "pull" | "begin-pull" | "ended" | "quiet" | "rows" | "reset" | "close" | "look"
                    | "unpin" | "ack" | "trim" => self.stream(who, &words, &step.expected).await,
                    "read" | "write" | "park" => self.keep(who, &words).await,
                    "join" | "hears" | "put" | "remove" | "probe" => self.meet(who, &words).await,
                    _ => self.store(who, &words).await,
                }
            }
        }
    }

    async fn connect(&mut self, who: &str) -> Result<()> {
        if self.parties.contains_key(who) {
            return Ok(());
        }
        let rows = Heard::new();
        let stored = Arc::clone(&rows);
        let sink: delivery::Sink = Arc::new(move |reply| {
            if let delivery::Reply::Rows(came) = reply {
                for Row { seq, delivery, redelivered, stored_at: _, .. } in came.rows {
                    stored.push(Came { seq, delivery, redelivered, pin: came.pin.clone() });
                }
            }
        });
        let client = self.bench.connect(who, self.between.sink(sink)).await?;
        let party = Party {
            client: self.between.client(client),
            attempt: 0,
            inbox: 1,
            rows,
            pulls: VecDeque::new(),
            inserts: VecDeque::new(),
            member: None,
        };
        self.parties.insert(who.to_owned(), party);
        Ok(())
    }

    fn party(&mut self, who: &str) -> Result<&mut Party> {
        self.parties.get_mut(who).ok_or_else(|| format!("there is no client {who}"))
    }

    // ---- the operator --------------------------------------------------------------------------------

    async fn operate(&mut self, words: &[&str]) -> Result<Vec<Token>> {
        let bench = self.bench;
        match words {
            _ if !self.between.operates(words) => {}
            ["wait", time] => tokio::time::sleep(duration(time)?).await,
            ["publish", rows] => {
                return Ok(vec![Token::text(bench.publish(number(rows)?, 1).await?.to_string())]);
            }
            ["publish", rows, "of", bytes, "bytes"] => {
                let last = bench.publish(number(rows)?, number(bytes)?).await?;
                return Ok(vec![Token::text(last.to_string())]);
            }
            ["kill", who] => {
                let mut party =
                    self.parties.remove(*who).ok_or_else(|| format!("there is no client {who}"))?;
                let (pulls, inserts) = (std::mem::take(&mut party.pulls), std::mem::take(&mut party.inserts));
                drop(party);
                for pull in pulls {
                    pull.abort();
                    let _ = pull.await;
                }
                for insert in inserts {
                    insert.abort();
                    let _ = insert.await;
                }
                bench.kill(who).await?;
            }
            ["freeze", who] => {
                let member = self.party(who)?.member.as_mut().ok_or("it has not joined")?;
                let runtime = member.runtime.as_ref().ok_or("it has no runtime")?;
                let (thaw, frozen) = std::sync::mpsc::channel();
                let (stands, still) = tokio::sync::oneshot::channel();
                runtime.spawn(async move {
                    let _ = stands.send(());
                    // On purpose: its only thread answers nobody until then.
                    let _ = frozen.recv();
                });
                let _ = still.await;
                member.frozen = Some(thaw);
            }
            ["thaw", who] => {
                self.party(who)?.member.as_mut().ok_or("it has not joined")?.frozen = None;
            }
            ["remove", "rows", rows @ ..] => {
                let rows = rows.iter().map(|row| number(row)).collect::<Result<Vec<u64>>>()?;
                bench.remove(&rows).await?;
            }
            ["delete", "consumer"] => bench.delete_consumer().await?,
            ["create", "consumer"] => bench.create_consumer().await?,
            ["make", "stream", "anew"] => bench.make_stream_anew().await?,
            ["delete", "letters"] => bench.delete_letters().await?,
            ["fill", "letters"] => bench.fill_letters().await?,
            ["move", "leader"] => bench.move_leader().await?,
            ["keep-state"] => bench.keep_state().await?,
            ["lose-tail"] => bench.lose_tail().await?,
            ["restart", "broker"] => bench.restart_broker().await?,
            ["restart", "store"] => bench.restart_store().await?,
            ["unacked"] => return Ok(vec![Token::text(bench.unacked().await?.to_string())]),
            ["letters"] => return Ok(vec![Token::text(bench.letters().await?.to_string())]),
            ["spoil", row] => bench.spoil(number(row)?),
            ["mend", table] => bench.mend(table).await?,
            ["burn", table] => bench.burn(table, None).await?,
            ["burn", table, "partition", partition] => bench.burn(table, Some(number(partition)?)).await?,
            ["slow", table] => bench.slow(table).await?,
            ["inserting", table] => return Ok(vec![Token::text(bench.inserting(table).await?.to_string())]),
            ["contents", table] => return Ok(some(bench.contents(table).await?.iter())),
            other => return Err(format!("no operator knows {other:?}")),
        }
        Ok(Vec::new())
    }

    // ---- the stream ----------------------------------------------------------------------------------

    /// The pin that a name stands for; a name in small letters is a pin that the server never gave.
    fn pin(&self, name: &str) -> Result<PinId> {
        if name.starts_with(|c: char| c.is_ascii_lowercase()) {
            return Ok(PinId(format!("{name:w<22}").into()));
        }
        let value = self.names.value(name).ok_or_else(|| format!("{name} stands for nothing yet"))?;
        Ok(PinId(value.into()))
    }

    fn pull_of(&mut self, who: &str, words: &[&str]) -> Result<Pull> {
        let ["for", time, rest @ ..] = &words[1..] else { return Err("pull ROWS for TIME".to_owned()) };
        let (mut pin, mut max_bytes) = (None, None);
        for pair in rest.chunks(2) {
            match pair {
                ["under", name] => pin = Some(self.pin(name)?),
                ["bytes", bytes] => max_bytes = Some(number(bytes)?),
                other => return Err(format!("{other:?} says nothing of a pull")),
            }
        }
        let party = self.party(who)?;
        let (attempt, inbox) = (party.attempt(), Inbox(party.inbox));
        Ok(Pull { attempt, inbox, pin, batch: number(words[0])?, max_bytes, expires: duration(time)? })
    }

    async fn stream(&mut self, who: &str, words: &[&str], expected: &[String]) -> Result<Vec<Token>> {
        let port = Arc::clone(&self.party(who)?.client.delivery);
        let patience = self.patience;
        match words {
            ["pull", rest @ ..] => {
                let pull = self.pull_of(who, rest)?;
                // One that nobody ends is told by its end never coming.
                let limit = pull.expires + self.patience;
                let end = tokio::time::timeout(limit, run_pull(port, pull)).await;
                Ok(end.map_or_else(|_| words_of("unended"), |end| end_of(&end)))
            }
            ["begin-pull", rest @ ..] => {
                let pull = self.pull_of(who, rest)?;
                // A question on the same connection goes out behind the pull. When it is answered the server has
                // seen both.
                let attempt = self.party(who)?.attempt();
                let look = delivery::Command::Inspect { attempt, row: Seq::ZERO, above: Seq::ZERO };
                let mut running = Box::pin(run_pull(Arc::clone(&port), pull));
                let running = tokio::select! {
                    biased;
                    end = &mut running => tokio::spawn(async move { end }),
                    _ = port.call(look) => tokio::spawn(running),
                };
                self.party(who)?.pulls.push_back(running);
                Ok(Vec::new())
            }
            ["ended"] => {
                let pull = self.party(who)?.pulls.front_mut().ok_or("no pull was begun")?;
                match tokio::time::timeout(patience, pull).await {
                    Err(_) => Ok(words_of("unended")),
                    Ok(end) => {
                        self.party(who)?.pulls.pop_front();
                        end.map(|end| end_of(&end)).map_err(|error| error.to_string())
                    }
                }
            }
            ["quiet", time] => {
                tokio::time::sleep(duration(time)?).await;
                let party = self.party(who)?;
                if party.pulls.front().is_some_and(JoinHandle::is_finished) {
                    return Ok(words_of("ended"));
                }
                let rows = party.rows.take(0, patience).await;
                Ok(if rows.is_empty() { words_of("yes") } else { rows_of(rows) })
            }
            ["rows"] => Ok(rows_of(self.party(who)?.rows.take(0, patience).await)),
            ["rows", count] => Ok(rows_of(self.party(who)?.rows.take(number(count)?, patience).await)),
            ["reset", seq] => {
                let party = self.party(who)?;
                party.inbox += 1;
                let (attempt, inbox) = (party.attempt(), Inbox(party.inbox));
                match port.call(delivery::Command::Reset { attempt, inbox, from: Seq(number(seq)?) }).await {
                    Some(delivery::Reply::Reset { outcome, .. }) => Ok(done(outcome)),
                    other => Err(format!("{other:?}")),
                }
            }
            ["close"] => {
                let party = self.party(who)?;
                let inbox = Inbox(party.inbox);
                party.inbox += 1;
                let attempt = party.attempt();
                let none = port.call(delivery::Command::Close { inbox }).await;
                // The server has seen it when it answers the next question on the connection.
                let _ =
                    port.call(delivery::Command::Inspect { attempt, row: Seq::ZERO, above: Seq::ZERO }).await;
                none.map_or(Ok(Vec::new()), |other| Err(format!("{other:?}")))
            }
            ["look", rest @ ..] => {
                let (mut row, mut above) = (Seq::ZERO, Seq::ZERO);
                for pair in rest.chunks(2) {
                    match pair {
                        ["row", seq] => row = Seq(number(seq)?),
                        ["above", seq] => above = Seq(number(seq)?),
                        other => return Err(format!("{other:?} says nothing of a look")),
                    }
                }
                let attempt = self.party(who)?.attempt();
                match port.call(delivery::Command::Inspect { attempt, row, above }).await {
                    Some(delivery::Reply::Inspected { outcome: Ok(seen), .. }) => {
                        if let Some(stored_at) = seen.row_stored_at {
                            self.stored.insert(row, stored_at);
                        }
                        Ok(look_of(&seen, expected))
                    }
                    Some(delivery::Reply::Inspected { outcome: Err(InspectError::Gone(_)), .. }) => {
                        Ok(words_of("gone"))
                    }
                    Some(delivery::Reply::Inspected { outcome: Err(InspectError::Failed(why)), .. }) => {
                        Ok(failed("failed", &why))
                    }
                    other => Err(format!("{other:?}")),
                }
            }
            ["unpin"] => {
                let attempt = self.party(who)?.attempt();
                match port.call(delivery::Command::Unpin { attempt }).await {
                    Some(delivery::Reply::Unpinned { outcome, .. }) => Ok(done(outcome)),
                    other => Err(format!("{other:?}")),
                }
            }
            // `seq` or `seq:delivery`.
            ["ack", rows @ ..] => {
                let row = |row: &&str| {
                    let (seq, delivery) = row.split_once(':').unwrap_or((row, row));
                    Ok((Seq(number(seq)?), Delivery(number(delivery)?)))
                };
                let rows = rows.iter().map(row).collect::<Result<Vec<_>>>()?;
                let none = port.call(delivery::Command::Ack { rows }).await;
                none.map_or(Ok(Vec::new()), |other| Err(format!("{other:?}")))
            }
            ["trim", "below", seq, rest @ ..] => self.trim(who, number(seq)?, rest).await,
            other => Err(format!("no client knows {other:?}")),
        }
    }

    /// What the trim rests on is what a look saw.
    async fn trim(&mut self, who: &str, below: u64, words: &[&str]) -> Result<Vec<Token>> {
        let (mut witness, mut other_stream) = (Mark::default(), false);
        for pair in words.chunks(2) {
            match pair {
                ["witness", seq] => {
                    let seq = Seq(number(seq)?);
                    witness = Mark { seq, stored_at: self.stored.get(&seq).copied().unwrap_or_default() };
                }
                // Another row was stored there.
                ["not", seq] => {
                    let seq = Seq(number(seq)?);
                    let Timestamp(at) = self.stored.get(&seq).copied().ok_or("no look saw that row")?;
                    witness = Mark { seq, stored_at: Timestamp(at + 1) };
                }
                ["of", "another"] => other_stream = true,
                other => return Err(format!("{other:?} says nothing of a trim")),
            }
        }
        let party = self.party(who)?;
        let (port, looks) = (Arc::clone(&party.client.retention), Arc::clone(&party.client.delivery));
        let (attempt, look) = (party.attempt(), party.attempt());
        let look = delivery::Command::Inspect { attempt: look, row: Seq::ZERO, above: Seq::ZERO };
        let created = match looks.call(look).await {
            Some(delivery::Reply::Inspected { outcome: Ok(seen), .. }) => seen.created,
            other => return Err(format!("{other:?}")),
        };
        let created = if other_stream { Timestamp(created.0 + 1) } else { created };
        let trim = retention::Command::Trim { attempt, created, below: Seq(below), witness };
        let retention::Reply::Trimmed { outcome, .. } = port.call(trim).await;
        Ok(match outcome {
            Ok(rows) => words_of(&format!("trimmed {rows}")),
            Err(why) => failed("failed", &why),
        })
    }

    // ---- the ledger, the dead letters ----------------------------------------------------------------

    fn revision(&self, name: &str) -> Result<Revision> {
        match name {
            "none" => Ok(Revision(0)),
            name => {
                let value = self.names.value(name).ok_or_else(|| format!("{name} stands for nothing yet"))?;
                Ok(Revision(number(value)?))
            }
        }
    }

    async fn keep(&mut self, who: &str, words: &[&str]) -> Result<Vec<Token>> {
        let party = self.party(who)?;
        let attempt = party.attempt();
        let (ledger, letters) = (Arc::clone(&party.client.ledger), Arc::clone(&party.client.letters));
        match words {
            ["read", shard] => {
                let read = ledger::Command::Read { attempt, shard: ShardId(number(shard)?) };
                match ledger.call(read).await {
                    ledger::Reply::Read { outcome: Ok(None), .. } => Ok(words_of("none")),
                    ledger::Reply::Read { outcome: Ok(Some(entry)), .. } => {
                        Ok(vec![text(&entry.record), revision(entry.revision)])
                    }
                    ledger::Reply::Read { outcome: Err(why), .. } => Ok(failed("failed", &why)),
                    other @ ledger::Reply::Written { .. } => Err(format!("{other:?}")),
                }
            }
            ["write", shard, record, "on", expected] => {
                let expected = self.revision(expected)?;
                let record = Bytes::copy_from_slice(record.as_bytes());
                let write =
                    ledger::Command::Write { attempt, shard: ShardId(number(shard)?), expected, record };
                match ledger.call(write).await {
                    ledger::Reply::Written { outcome, .. } => Ok(match outcome {
                        WriteOutcome::Stored(stored) => vec![Token::text("stored"), revision(stored)],
                        WriteOutcome::Conflict => words_of("conflict"),
                        WriteOutcome::Unknown(why) => failed("unknown", &why),
                        WriteOutcome::Refused(why) => failed("refused", &why),
                    }),
                    other @ ledger::Reply::Read { .. } => Err(format!("{other:?}")),
                }
            }
            ["park", seq, rest @ ..] => {
                let seq = number(seq)?;
                // Another row, whose sequence was used before.
                let another = rest == ["another"];
                let letter = Letter {
                    created: STREAM,
                    shard: SHARD,
                    table: TableName::new("t"),
                    seq: Seq(seq),
                    stored_at: Timestamp(STREAM.0 + 1),
                    payload: self.bench.payload(if another { seq + 1 } else { seq }),
                    cause: Cause::Payload,
                    code: None,
                    message: "it can never be a row".into(),
                    attempts: 0,
                };
                let send_by = Instant::at(Duration::from_hours(1));
                let park = dead_letters::Command::Park { attempt, letter, send_by, unless_there: true };
                let dead_letters::Reply::Parked { outcome, .. } = letters.call(park).await;
                Ok(match outcome {
                    ParkOutcome::Parked => words_of("parked"),
                    ParkOutcome::Stale => words_of("stale"),
                    ParkOutcome::Failed(why) => failed("failed", &why),
                })
            }
            other => Err(format!("no client knows {other:?}")),
        }
    }

    // ---- the members ---------------------------------------------------------------------------------

    async fn meet(&mut self, who: &str, words: &[&str]) -> Result<Vec<Token>> {
        if let ["join", name] = words {
            return self.join(who, name).await;
        }
        let patience = self.patience;
        let party = self.party(who)?;
        let attempt = party.attempt();
        let member = party.member.as_ref().ok_or("it has not joined")?;
        let (port, heard) = (Arc::clone(&member.port), Arc::clone(&member.heard));
        let name = |name: &str| MemberId::new(name).map_err(|error| error.to_string());
        let reply = match words {
            ["hears", count] => return Ok(watch_of(heard.take(number(count)?, patience).await)),
            ["put", member, record] => {
                let record = Bytes::copy_from_slice(record.as_bytes());
                port.call(members::Command::Put { attempt, member: name(member)?, record }).await
            }
            ["remove", member] => {
                port.call(members::Command::Delete { attempt, member: name(member)?, only: None }).await
            }
            ["remove", member, "if", revision] => {
                let only = Some(self.revision(revision)?);
                port.call(members::Command::Delete { attempt, member: name(member)?, only }).await
            }
            ["probe", member] => port.call(members::Command::Probe { attempt, member: name(member)? }).await,
            other => return Err(format!("no member knows {other:?}")),
        };
        match reply {
            members::Reply::Put { outcome, .. } | members::Reply::Deleted { outcome, .. } => {
                Ok(done(outcome))
            }
            members::Reply::Probed { answer, .. } => Ok(words_of(match answer {
                Probe::Alive => "alive",
                Probe::NoResponders => "no-responders",
                Probe::Silent => "silent",
            })),
            other => Err(format!("{other:?}")),
        }
    }

    async fn join(&mut self, who: &str, name: &str) -> Result<Vec<Token>> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(|error| error.to_string())?;
        let heard = Heard::new();
        let sink = Arc::clone(&heard);
        let sink = self.between.member_sink(Arc::new(move |reply| sink.push(reply)));
        let id = MemberId::new(name).map_err(|error| error.to_string())?;
        let port = self.bench.join(who, id, sink, runtime.handle()).await?;
        let port = self.between.member(port);
        self.party(who)?.member = Some(Member { port, heard, runtime: Some(runtime), frozen: None });
        Ok(Vec::new())
    }

    // ---- the store -----------------------------------------------------------------------------------

    fn insert_of(&mut self, who: &str, words: &[&str]) -> Result<Insert> {
        let [table, "as", token, "rows", range, rest @ ..] = words else {
            return Err("insert TABLE as TOKEN rows FROM..TO".to_owned());
        };
        let (mut level, mut created) = (Level::ExactlyOnce, STREAM);
        for pair in rest.chunks(2) {
            match pair {
                ["at", "at-least-once"] => level = Level::AtLeastOnce,
                ["at", "deduplicated"] => level = Level::Deduplicated,
                ["of", "another"] => created = OTHER_STREAM,
                other => return Err(format!("{other:?} says nothing of an insert")),
            }
        }
        let mut rows = Vec::new();
        // One range, or several with commas between them.
        for range in range.split(',') {
            let (first, last) = range.split_once("..").unwrap_or((range, range));
            for seq in number::<u64>(first)?..=number(last)? {
                rows.push(Row {
                    seq: Seq(seq),
                    delivery: Delivery(seq),
                    redelivered: false,
                    stored_at: Timestamp(STREAM.0 + 1),
                    table: self.bench.table(table),
                    payload: self.bench.payload(seq),
                    verdict: Verdict::Good,
                });
            }
        }
        Ok(Insert {
            attempt: self.party(who)?.attempt(),
            shard: SHARD,
            table: self.bench.table(table),
            target: self.bench.target(table, level),
            created,
            token: Of((*token).into()),
            rows: rows.into(),
            send_by: Instant::at(Duration::from_hours(1)),
        })
    }

    async fn store(&mut self, who: &str, words: &[&str]) -> Result<Vec<Token>> {
        let port = Arc::clone(&self.party(who)?.client.store);
        match words {
            ["insert", rest @ ..] => {
                let insert = self.insert_of(who, rest)?;
                Ok(insert_ended(&run_insert(port, insert).await))
            }
            ["begin-insert", rest @ ..] => {
                let insert = self.insert_of(who, rest)?;
                self.party(who)?.inserts.push_back(tokio::spawn(run_insert(port, insert)));
                Ok(Vec::new())
            }
            ["inserted"] => {
                let insert = self.party(who)?.inserts.pop_front().ok_or("no insert was begun")?;
                insert.await.map(|outcome| insert_ended(&outcome)).map_err(|error| error.to_string())
            }
            ["abort"] => {
                let until = self.party(who)?.attempt();
                let none = port.call(store::Command::Abort { shard: SHARD, until }).await;
                none.map_or(Ok(Vec::new()), |other| Err(format!("{other:?}")))
            }
            ["read-back", table, range, rest @ ..] => {
                let created = if rest == ["of", "another"] { OTHER_STREAM } else { STREAM };
                let (first, last) = range.split_once("..").ok_or("read-back TABLE FROM..TO")?;
                let read = store::Command::ReadBack {
                    attempt: self.party(who)?.attempt(),
                    shard: SHARD,
                    table: self.bench.table(table),
                    target: self.bench.target(table, Level::ExactlyOnce),
                    created,
                    first: Seq(number(first)?),
                    last: Seq(number(last)?),
                };
                match port.call(read).await {
                    Some(store::Reply::ReadBack { outcome: Ok(found), .. }) => {
                        let mut answer = some(found.seqs.iter().map(|seq| &seq.0));
                        if let Some(seq) = found.repeated {
                            answer.extend(words_of(&format!("repeated {seq}")));
                        }
                        Ok(answer)
                    }
                    Some(store::Reply::ReadBack { outcome: Err(why), .. }) => Ok(refused("failed", &why)),
                    other => Err(format!("{other:?}")),
                }
            }
            ["describe", table, rest @ ..] => {
                let holds = match rest {
                    [] => None,
                    ["above", seq] => Some(HoldsAbove { created: STREAM, above: Seq(number(seq)?) }),
                    other => return Err(format!("{other:?} says nothing of a description")),
                };
                let (attempt, table) = (self.party(who)?.attempt(), self.bench.table(table));
                let describe = store::Command::Describe { attempt, shard: SHARD, table, holds };
                match port.call(describe).await {
                    Some(store::Reply::Described { outcome, .. }) => Ok(match outcome {
                        Ok(found) => {
                            let holds = found.holds.map(|seq| format!(" holds {seq}")).unwrap_or_default();
                            words_of(&format!("{}{holds}", found.target.level))
                        }
                        Err(DescribeError::Missing(why)) => refused("missing", &why),
                        Err(DescribeError::Failed(why)) => refused("failed", &why),
                        Err(DescribeError::Unfit(_)) => words_of("unfit"),
                    }),
                    other => Err(format!("{other:?}")),
                }
            }
            other => Err(format!("no client knows {other:?}")),
        }
    }
}

async fn run_pull(port: Arc<dyn delivery::Port>, pull: Pull) -> PullEnd {
    let attempt = pull.attempt;
    match port.call(delivery::Command::Pull(pull)).await {
        Some(delivery::Reply::Ended { attempt: ended, end }) if ended == attempt => end,
        other => PullEnd::Failed(Failure::new(FailureClass::Other, format!("{other:?}"))),
    }
}

async fn run_insert(port: Arc<dyn store::Port>, insert: Insert) -> InsertOutcome {
    match port.call(store::Command::Insert(insert)).await {
        Some(store::Reply::Inserted { outcome, .. }) => outcome,
        // An insert always answers.
        other => panic!("{other:?}"),
    }
}

// ---- in words --------------------------------------------------------------------------------------------

fn words_of(text: &str) -> Vec<Token> {
    words(text)
}

fn some<'a>(numbers: impl Iterator<Item = &'a u64>) -> Vec<Token> {
    let all: Vec<_> = numbers.map(|number| Token::text(number.to_string())).collect();
    if all.is_empty() { words_of("nothing") } else { all }
}

fn text(bytes: &[u8]) -> Token {
    Token::text(String::from_utf8_lossy(bytes))
}

fn revision(revision: Revision) -> Token {
    Token::Named(Kind::Revision, revision.0.to_string())
}

fn pin(pin: Option<&PinId>) -> Token {
    pin.map_or_else(|| Token::text("nobody"), |pin| Token::Named(Kind::Pin, pin.0.to_string()))
}

fn class(failure: &Failure) -> &'static str {
    match failure.class {
        FailureClass::Unanswered => "unanswered",
        FailureClass::Unavailable => "unavailable",
        FailureClass::Full => "full",
        FailureClass::Limit => "limit",
        FailureClass::Denied => "denied",
        FailureClass::Missing => "missing",
        FailureClass::TooOld => "too-old",
        FailureClass::Other => "other",
    }
}

fn failed(how: &str, why: &Failure) -> Vec<Token> {
    words_of(&format!("{how} {}", class(why)))
}

fn done(outcome: std::result::Result<(), Failure>) -> Vec<Token> {
    outcome.map_or_else(|why| failed("failed", &why), |()| words_of("done"))
}

fn refused(how: &str, why: &Refusal) -> Vec<Token> {
    let code = why.code.map(|code| format!(" code {code}")).unwrap_or_default();
    let row = why.row.map(|row| format!(" row {row}")).unwrap_or_default();
    words_of(&format!("{how} {}{code}{row}", why.class))
}

fn insert_ended(outcome: &InsertOutcome) -> Vec<Token> {
    match outcome {
        InsertOutcome::Stored => words_of("stored"),
        InsertOutcome::Again(why) => refused("refused", why),
        // Why it is in doubt is for people.
        InsertOutcome::Doubt(_) => words_of("doubt"),
        InsertOutcome::Stale => words_of("stale"),
    }
}

fn end_of(end: &PullEnd) -> Vec<Token> {
    words_of(match end {
        PullEnd::Full => "full",
        PullEnd::Empty => "empty",
        PullEnd::TooLarge => "too-large",
        PullEnd::NotPinned => "not-pinned",
        PullEnd::LeaderChanged => "leader-changed",
        PullEnd::Deleted => "deleted",
        PullEnd::NoResponders => "no-responders",
        PullEnd::Closed => "closed",
        PullEnd::Failed(why) => return failed("failed", why),
    })
}

/// `seq:delivery`, with a mark if it was delivered before, and the pin once for all rows that follow each other.
fn rows_of(rows: Vec<Came>) -> Vec<Token> {
    if rows.is_empty() {
        return words_of("nothing");
    }
    let mut answer = Vec::new();
    let mut rows = rows.into_iter().peekable();
    while let Some(Came { seq, delivery, redelivered, pin: under }) = rows.next() {
        let mark = if redelivered { "!" } else { "" };
        answer.push(Token::text(format!("{seq}:{}{mark}", delivery.0)));
        if rows.peek().is_none_or(|next| next.pin != under) {
            answer.extend([Token::text("under"), pin(under.as_ref())]);
        }
    }
    answer
}

/// Those of a look's numbers that are expected, in their order.
fn look_of(seen: &Inspection, expected: &[String]) -> Vec<Token> {
    let or_none =
        |seq: Option<Seq>| Token::text(seq.map_or_else(|| "none".to_owned(), |seq| seq.to_string()));
    let count = |number: u64| Token::text(number.to_string());
    let mut answer = Vec::new();
    for key in expected.iter().step_by(2) {
        let value = match key.as_str() {
            "created" => Token::Named(Kind::Created, seen.created.0.to_string()),
            "messages" => count(seen.messages),
            "first" => count(seen.first.0),
            "last" => count(seen.last.seq.0),
            "shard-last" => or_none(seen.shard_last),
            "next" => or_none(seen.next),
            "there" => Token::text(if seen.row_stored_at.is_some() { "yes" } else { "no" }),
            "delivered" => count(seen.delivered),
            "pending" => count(seen.pending),
            "pinned" => pin(seen.pinned.as_ref()),
            "fits" => Token::text(if seen.unfit.is_none() { "yes" } else { "no" }),
            _ => Token::text("(a look does not show that)"),
        };
        answer.extend([Token::text(key), value]);
    }
    answer
}

/// `all` and every record of a snapshot, then each change.
fn watch_of(heard: Vec<members::Reply>) -> Vec<Token> {
    let mut answer = Vec::new();
    let entry =
        |entry: members::Entry| [Token::text(&*entry.key), text(&entry.record), revision(entry.revision)];
    for reply in heard {
        match reply {
            members::Reply::Snapshot(entries) => {
                answer.push(Token::text("all"));
                let mut entries = entries;
                entries.sort_by_key(|entry| entry.revision);
                answer.extend(entries.into_iter().flat_map(entry));
            }
            members::Reply::Changed(changed) => answer.extend(entry(changed)),
            members::Reply::Removed { key } => answer.push(Token::text(format!("-{key}"))),
            other => answer.push(Token::text(format!("({other:?})"))),
        }
    }
    if answer.is_empty() { words_of("nothing") } else { answer }
}
