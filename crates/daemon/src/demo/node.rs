//! A node of the demonstration: the daemon's own machines and drivers on the embedded servers.
//!
//! Each has a thread and a runtime of its own, so that it can stand still as a whole, like a process that gets no
//! processor, and can end where it stands, like one that is killed.

use std::future::pending;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use holdfast_core::action::Event;
use holdfast_core::claims::{self, Claims, Order, Status};
use holdfast_core::member::MemberId;
use holdfast_core::notice::{Notice, Report};
use holdfast_core::record::Session;
use holdfast_core::row::ShardId;
use holdfast_core::shard::{self, Shard};
use holdfast_core::{shard::Status as ShardStatus, trim};
use holdfast_sim::embedded::{Process, Server};
use tokio::runtime::{Builder, Handle};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};

use super::scene::{Place, Scene};
use crate::clock::Clock;
use crate::driver::{self, Ports, drive, drive_trim, sink};
use crate::sharing::{self, Limits, Request, Starter, Surroundings, share};

/// How long a member may take to answer a request.
const PROBE_TIME: Duration = Duration::from_millis(500);

/// What all nodes have in common.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) claims: claims::Config,
    pub(super) shard: shard::Config,
    pub(super) trim: trim::Config,
    pub(super) handover: Duration,
}

/// A node that was started.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) place: Place,
    process: Process,
    requests: UnboundedSender<Request>,
    kill: Option<oneshot::Sender<()>>,
    runtime: Handle,
    /// Closed when its thread is done.
    ended: oneshot::Receiver<()>,
}

impl Node {
    /// Starts a node.
    ///
    /// # Errors
    /// If the system has no thread or no runtime for it.
    pub(super) fn start(
        name: &str,
        server: &Server,
        plan: &Plan,
        scene: &Arc<Scene>,
    ) -> std::io::Result<Self> {
        let process = server.process();
        let place = scene.enters(name);
        let runtime = Builder::new_current_thread().enable_time().build()?;
        let (requests, requested) = unbounded_channel();
        let (kill, killed) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let watching = Arc::clone(scene);
        let handle = runtime.handle().clone();
        let id = MemberId::new(name).map_err(std::io::Error::other)?;
        let assembly = Assembly {
            plan: Plan { claims: claims::Config { id, ..plan.claims.clone() }, ..plan.clone() },
            clock: Clock::start(),
            process: process.clone(),
            place,
            scene: Arc::clone(scene),
        };
        std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let outcome = runtime.block_on(async {
                tokio::select! {
                    ended = assembly.run(requested) => ended.map_err(|error| error.to_string()),
                    _ = killed => Ok(()),
                }
            });
            // Whatever it still did ends here, where it stands.
            drop(runtime);
            watching.ended(place, outcome);
            drop(end);
        })?;
        Ok(Self { name: name.to_owned(), place, process, requests, kill: Some(kill), runtime: handle, ended })
    }

    /// Tells it to write what it accepted, hand over, and end.
    pub(super) fn stop(&self, within: Duration) {
        // One that has ended has nothing left to write.
        let _ = self.requests.send(Request::Stop { within });
    }

    /// It dies on the spot.
    pub(super) fn kill(&mut self) {
        self.process.kill();
        if let Some(kill) = self.kill.take() {
            let _ = kill.send(());
        }
    }

    /// Waits until its thread is done, however it ended.
    pub(super) async fn ended(self) {
        let _ = self.ended.await;
    }

    /// Makes the inserts that it has under way take at least so long; how many there are.
    pub(super) fn delay_inserts(&self, life: Duration) -> usize {
        self.process.delay_inserts(life)
    }

    /// Stops it in the middle of everything, until what is returned is dropped. Its clock goes on.
    pub(super) fn freeze(&self) -> Frozen {
        let gate = Arc::new(Gate::default());
        let closed = Arc::clone(&gate);
        // Its runtime has this one thread.
        self.runtime.spawn(async move { closed.wait() });
        Frozen(gate)
    }
}

#[derive(Debug, Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn wait(&self) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        while !*open {
            open = self.opened.wait(open).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A node that stands still. Dropped, it goes on.
#[derive(Debug)]
pub(super) struct Frozen(Arc<Gate>);

impl Drop for Frozen {
    fn drop(&mut self) {
        *self.0.open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.opened.notify_all();
    }
}

/// Puts a node's parts together.
#[derive(Clone)]
struct Assembly {
    plan: Plan,
    clock: Clock,
    process: Process,
    place: Place,
    scene: Arc<Scene>,
}

impl Assembly {
    async fn run(self, requests: UnboundedReceiver<Request>) -> Result<(), tokio::task::JoinError> {
        let (told, watched) = unbounded_channel();
        let id = self.plan.claims.id.clone();
        let members = self.process.members(id, PROBE_TIME, Arc::new(move |reply| drop(told.send(reply))));
        let (lead, leads) = watch::channel(false);
        let conductor = Conductor { place: self.place, scene: Arc::clone(&self.scene), lead };
        let machine = claims::Config { session: Session(rand::random()), ..self.plan.claims.clone() };
        let machine = Claims::new(machine, self.clock.now());
        let limits = Limits { handover: self.plan.handover };
        let trimming = {
            let (trim, clock) = (self.plan.trim.clone(), self.clock);
            let ledger = Arc::new(self.process.ledger());
            let retention = Arc::new(self.process.retention());
            async move { drive_trim(trim, clock, ledger, retention, leads, &Trimming).await }
        };
        let (clock, starter) = (self.clock, Arc::new(self));
        let surroundings = Surroundings { members: Arc::new(members), watch: watched, requests, starter };
        tokio::select! {
            ended = share(machine, clock, surroundings, limits, &conductor) => ended,
            () = async { trimming.await; pending().await } => Ok(()),
        }
    }
}

impl Starter for Assembly {
    fn start(
        &self,
        shard: ShardId,
        events: UnboundedReceiver<Event>,
        own: UnboundedSender<Event>,
        reports: UnboundedSender<(ShardId, Report)>,
    ) -> BoxFuture<'static, ()> {
        let config = shard::Config { shard, session: Session(rand::random()), ..self.plan.shard.clone() };
        let clock = self.clock;
        let core_clock = || Arc::new(move || clock.now());
        let ports = Ports {
            delivery: Arc::new(self.process.delivery(shard, sink(own.clone()))),
            ledger: Arc::new(self.process.ledger()),
            store: Arc::new(self.process.store(core_clock())),
            dead_letters: Arc::new(self.process.dead_letters(core_clock())),
        };
        let watcher = Watcher { shard, place: self.place, scene: Arc::clone(&self.scene), reports };
        Box::pin(async move { drive(Shard::new(config), clock, ports, events, own, &watcher).await })
    }
}

/// Shows what the sharing does.
struct Conductor {
    place: Place,
    scene: Arc<Scene>,
    lead: watch::Sender<bool>,
}

impl sharing::Observer for Conductor {
    fn notice(&self, notice: &claims::Notice) {
        self.scene.sharing_notice(self.place, notice);
    }

    fn report(&self, _shard: ShardId, _report: &Report) {}

    fn ordered(&self, shard: ShardId, order: &Order) {
        if matches!(order, Order::GiveUp | Order::Stop { .. }) {
            self.scene.gives_up(self.place, shard);
        }
    }

    fn status(&self, status: &Status<'_>) {
        self.scene.sharing_status(self.place, status);
        self.lead.send_if_modified(|leads| std::mem::replace(leads, status.leads) != status.leads);
    }
}

/// Shows what a shard does.
struct Watcher {
    shard: ShardId,
    place: Place,
    scene: Arc<Scene>,
    reports: UnboundedSender<(ShardId, Report)>,
}

impl driver::Observer for Watcher {
    fn notice(&self, notice: &Notice) {
        self.scene.shard_notice(self.place, self.shard, notice);
    }

    fn report(&self, report: &Report) {
        match report {
            Report::Ready | Report::Owned { .. } => self.scene.ready(self.shard),
            Report::Failed(failure) => self.scene.fail(format!("shard {} ended: {failure}", self.shard)),
            Report::Lost | Report::Released { .. } => {}
        }
        // The sharing is over: nobody needs to know any more.
        drop(self.reports.send((self.shard, report.clone())));
    }

    fn status(&self, _status: &ShardStatus<'_>) {}
}

/// The trimmer has nothing to show.
struct Trimming;

impl driver::Observer for Trimming {
    fn notice(&self, _notice: &Notice) {}

    fn report(&self, _report: &Report) {}

    fn status(&self, _status: &ShardStatus<'_>) {}
}
