//! The models as servers in real time: the core's ports on them, with nothing to install.
//!
//! One lock guards the models. A request is carried out at once, on the caller's thread, and what the server sends goes
//! straight into the clients' sinks: there is no network here, so nothing is lost or late but by a connection that
//! [breaks](Delivery::break_connection) or a process that is [killed](Process::kill). What takes time at a server (the
//! end of a pull, a pin that lapses, an insert) is done by a thread of the [`Server`]'s own.
//!
//! What a server does, and whoever is to be told of it, is the models' business: [`Server::with`] reaches them.

mod members;
mod stream;
#[cfg(test)]
mod tests;
mod writing;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant as Monotonic, SystemTime};

use holdfast_core::ports::store::{Insert, InsertOutcome};
use holdfast_core::ports::{Attempt, Failure, FailureClass};
use holdfast_core::row::{Seq, ShardId};
use holdfast_core::time::{Instant, Timestamp};
use tokio::sync::oneshot;

use crate::bucket::Bucket;
use crate::clickhouse::{ClickHouse, Fate, Part, TableSpec};
use crate::jetstream::{AckPolicy, Client, JetStream, Message, PinChange};
use crate::letters::Letters;
use crate::members::Members;

use self::stream::Link;

pub use self::members::MembersPort;
pub use self::stream::{Delivery, Retention};
pub use self::writing::{DeadLetters, Ledger, Store};

/// A client's clock, as the core counts time: what `send_by` is compared with.
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// What the servers do, as it happens. It is called under the lock: it must not block, nor ask the server anything.
pub type Watch = Arc<dyn Fn(Seen<'_>) + Send + Sync>;

/// Decides what becomes of an insert that has arrived and whose rows fit. Called under the lock.
pub type Fates = Box<dyn FnMut(&Insert) -> Fate + Send>;

/// Something that happened at a server.
#[derive(Clone, Copy, Debug)]
pub enum Seen<'a> {
    /// A consumer's pin was given, or lapsed.
    Pin(&'a PinChange),
    /// A part of an insert was stored, or dropped for its token.
    Part(&'a Part),
}

/// How the servers are made.
pub struct Settings {
    /// Shards of the stream.
    pub shards: u32,
    /// How long a pin lasts without a pull.
    pub pinned_ttl: Duration,
    /// Whether rows are acknowledged.
    pub policy: AckPolicy,
    /// The store's tables.
    pub tables: Vec<TableSpec>,
    /// The tables' windows outlast this.
    pub horizon: Duration,
    /// What becomes of inserts.
    pub fates: Fates,
    /// Who is told what happens.
    pub watch: Watch,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings").field("shards", &self.shards).finish_non_exhaustive()
    }
}

/// The servers' state.
#[derive(Debug)]
pub struct Models {
    /// The stream and its consumers.
    pub stream: JetStream,
    /// The ledger.
    pub bucket: Bucket,
    /// The members' records.
    pub members: Members,
    /// The store.
    pub store: ClickHouse,
    /// The dead letters.
    pub letters: Letters,
}

/// A broker and a store that live in this process. They end when this is dropped.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    time: Option<JoinHandle<()>>,
}

/// An insert that is waited for: by whom, of which shard, which.
type Waited = (Client, ShardId, Attempt);

struct State {
    models: Models,
    fates: Fates,
    watch: Watch,
    links: BTreeMap<Client, Link>,
    inserts: BTreeMap<Waited, oneshot::Sender<InsertOutcome>>,
    listeners: BTreeMap<Client, members::Listener>,
    processes: u32,
    clients: u32,
    /// Processes that are dead: nothing that they still ask for is heard.
    dead: BTreeSet<u32>,
    /// Until when the server's own thread sleeps; none: until it is woken.
    sleeps_until: Option<Duration>,
    over: bool,
}

struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    start: Monotonic,
    created: Timestamp,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("created", &self.created).finish_non_exhaustive()
    }
}

impl State {
    fn next_wakeup(&self) -> Option<Duration> {
        [self.models.stream.next_wakeup(), self.models.store.next_wakeup()].into_iter().flatten().min()
    }

    fn is_due(&self, now: Duration) -> bool {
        self.next_wakeup().is_some_and(|at| at <= now)
    }

    fn tick(&mut self, now: Duration) {
        self.models.stream.tick(now);
        self.models.store.tick(now);
    }

    /// Carries away what the servers want sent.
    fn carry(&mut self) {
        for out in self.models.stream.take_outgoing() {
            self.route(out);
        }
        for change in self.models.stream.take_pin_changes() {
            (self.watch)(Seen::Pin(&change));
        }
        for part in self.models.store.take_parts() {
            (self.watch)(Seen::Part(&part));
        }
        for (from, insert, outcome) in self.models.store.take_replies() {
            if let Some(waits) = self.inserts.remove(&(from, insert.shard, insert.attempt)) {
                // Nobody waits: its client gave it up, or is gone.
                let _ = waits.send(outcome);
            }
        }
        self.tell_members();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// The servers' wall clock.
    fn wall(&self, now: Duration) -> Timestamp {
        Timestamp(self.created.0.saturating_add(i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)))
    }

    /// Does something at the servers, after what was due before it, and carries away what comes of it.
    fn act<R>(&self, what: impl FnOnce(&mut State, Duration) -> R) -> R {
        let mut state = self.lock();
        let now = self.now();
        if state.is_due(now) {
            state.tick(now);
        }
        let done = what(&mut state, now);
        state.carry();
        let next = state.next_wakeup();
        if next.is_some_and(|next| state.sleeps_until.is_none_or(|until| next < until)) {
            self.wake.notify_one();
        }
        done
    }

    /// Does what is due, until the server is over.
    fn keep_time(&self) {
        let mut state = self.lock();
        while !state.over {
            let now = self.now();
            if state.is_due(now) {
                state.tick(now);
                state.carry();
            }
            let next = state.next_wakeup();
            state.sleeps_until = next;
            let pause = next.map_or(Duration::from_hours(1), |next| next.saturating_sub(self.now()));
            let woken = self.wake.wait_timeout(state, pause);
            let (woken, _) = woken.unwrap_or_else(PoisonError::into_inner);
            state = woken;
        }
    }
}

impl Server {
    /// Starts the servers: an empty stream, an empty bucket, tables without rows.
    ///
    /// # Errors
    /// If the system has no thread for them.
    pub fn start(settings: Settings) -> std::io::Result<Self> {
        let created = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let created = Timestamp(i64::try_from(created.as_nanos()).unwrap_or(i64::MAX));
        let Settings { shards, pinned_ttl, policy, tables, horizon, fates, watch } = settings;
        let models = Models {
            stream: JetStream::new(created, shards, pinned_ttl, policy),
            bucket: Bucket::default(),
            members: Members::default(),
            store: ClickHouse::new(tables, horizon),
            letters: Letters::default(),
        };
        let state = State {
            models,
            fates,
            watch,
            links: BTreeMap::new(),
            inserts: BTreeMap::new(),
            listeners: BTreeMap::new(),
            processes: 0,
            clients: 0,
            dead: BTreeSet::new(),
            sleeps_until: None,
            over: false,
        };
        let shared =
            Shared { state: Mutex::new(state), wake: Condvar::new(), start: Monotonic::now(), created };
        let shared = Arc::new(shared);
        let keeper = Arc::clone(&shared);
        let time =
            std::thread::Builder::new().name("servers".to_owned()).spawn(move || keeper.keep_time())?;
        Ok(Self { shared, time: Some(time) })
    }

    /// When the stream was made.
    #[must_use]
    pub fn created(&self) -> Timestamp {
        self.shared.created
    }

    /// Stores messages in the stream; the sequence of the last one.
    pub fn publish(&self, messages: impl IntoIterator<Item = Message>) -> Seq {
        self.shared.act(|state, now| {
            let stored_at = self.shared.wall(now);
            for message in messages {
                state.models.stream.publish(now, message, stored_at);
            }
            state.models.stream.last().seq
        })
    }

    /// Looks at the servers, or does something to them, at the time that they count from their start. What comes of
    /// it goes to the clients.
    pub fn with<R>(&self, what: impl FnOnce(&mut Models, Duration) -> R) -> R {
        self.shared.act(|state, now| what(&mut state.models, now))
    }

    /// A process connects.
    #[must_use]
    pub fn process(&self) -> Process {
        let id = self.shared.act(|state, _| {
            state.processes += 1;
            state.processes
        });
        Process { shared: Arc::clone(&self.shared), id }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        self.shared.wake.notify_all();
        if let Some(time) = self.time.take() {
            // A panic of the models was told when it happened.
            let _ = time.join();
        }
    }
}

/// A process's connections.
#[derive(Clone, Debug)]
pub struct Process {
    shared: Arc<Shared>,
    id: u32,
}

impl Process {
    /// The number that [`Client::process`] has in what is [seen](Seen).
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.id
    }

    /// Its inserts that the store has begun take until `life` after their arrival; how many there are. (So does
    /// whatever else runs for their shards.)
    #[must_use]
    pub fn delay_inserts(&self, life: Duration) -> usize {
        self.shared.act(|state, _| {
            let ours: Vec<ShardId> = state
                .inserts
                .keys()
                .filter(|(from, ..)| from.process == self.id)
                .map(|(_, shard, _)| *shard)
                .collect();
            for shard in &ours {
                state.models.store.linger(*shard, life);
            }
            ours.len()
        })
    }

    /// It dies: its connections end and no new ones are made, nothing that it still asks for is heard, and nobody
    /// waits for its inserts. (Those that the store has begun go on.)
    pub fn kill(&self) {
        self.shared.act(|state, now| {
            state.dead.insert(self.id);
            let ours = |client: &Client| client.process == self.id;
            let clients: Vec<Client> = state.links.keys().filter(|client| ours(client)).copied().collect();
            for client in clients {
                state.links.remove(&client);
                state.models.stream.disconnect(now, client);
            }
            state.inserts.retain(|(from, ..), _| !ours(from));
            let listening: Vec<Client> =
                state.listeners.keys().filter(|client| ours(client)).copied().collect();
            for client in listening {
                state.forget_listener(client);
            }
        });
    }

    fn client(&self, state: &mut State) -> Client {
        state.clients += 1;
        Client { process: self.id, start: 1, link: state.clients }
    }
}

fn not_connected() -> Failure {
    Failure::new(FailureClass::Unavailable, "not connected")
}
