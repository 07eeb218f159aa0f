//! Runs the machine that shares the shards out, and the shards that it orders. Like the driver it holds no policy: it
//! carries orders to shards and their reports back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use holdfast_core::action::Event;
use holdfast_core::claims::{self, Action, Claims, Notice, Order, Runs, Status, Step};
use holdfast_core::notice::Report;
use holdfast_core::ports::members;
use holdfast_core::row::ShardId;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

use crate::clock::Clock;
use crate::driver::sleep_until;

/// Starts shards.
pub trait Starter: Send + Sync {
    /// What runs `shard` from now on: it takes its events from `events`, whose other end is `own`, and reports to
    /// `reports`, last of all that it was released or failed. Dropped, it ends at once.
    fn start(
        &self,
        shard: ShardId,
        events: UnboundedReceiver<Event>,
        own: UnboundedSender<Event>,
        reports: UnboundedSender<(ShardId, Report)>,
    ) -> BoxFuture<'static, ()>;
}

/// What is shown of the sharing as it goes on. Called on the machine's own task; must not block.
pub trait Observer: Send + Sync {
    /// Something worth a line in the log or a count.
    fn notice(&self, notice: &Notice);
    /// A shard tells how it fares.
    fn report(&self, shard: ShardId, report: &Report);
    /// What an order did.
    fn ordered(&self, shard: ShardId, order: &Order);
    /// The machine's state after the events that were at hand.
    fn status(&self, status: &Status<'_>);
}

/// What people or signals ask of it.
#[derive(Clone, Copy, Debug)]
pub enum Request {
    /// Write what was accepted, give everything up and end, within this time.
    Stop {
        /// Past it everything is given up as it is.
        within: Duration,
    },
    /// Nobody is to have this shard.
    Pause(ShardId),
    /// It is to be tried again.
    Resume(ShardId),
    /// Its rows wait, and nobody is known to have it.
    Unowned(ShardId),
}

/// How long a shard that is handed over may take to write what it holds.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// `limits.handover`.
    pub handover: Duration,
}

/// The shards of this process.
struct Shards {
    starter: Arc<dyn Starter>,
    runs: Runs,
    /// The ways into those that run.
    events: BTreeMap<ShardId, UnboundedSender<Event>>,
    tasks: JoinSet<ShardId>,
    reports: UnboundedSender<(ShardId, Report)>,
}

impl Shards {
    fn take(&mut self, step: Option<Step>) {
        match step {
            Some(Step::Start { shard, first }) => {
                let (own, events) = unbounded_channel();
                for event in first {
                    drop(own.send(event));
                }
                let task = self.starter.start(shard, events, own.clone(), self.reports.clone());
                self.tasks.spawn(async move {
                    task.await;
                    shard
                });
                self.events.insert(shard, own);
            }
            Some(Step::Tell { shard, event }) => {
                if let Some(events) = self.events.get(&shard) {
                    drop(events.send(event));
                }
            }
            None => {}
        }
    }

    fn order(&mut self, shard: ShardId, order: Order) {
        let step = self.runs.order(shard, order);
        self.take(step);
    }

    fn ended(&mut self, shard: ShardId) {
        self.events.remove(&shard);
        let step = self.runs.ended(shard);
        self.take(step);
    }
}

/// Whom the sharing talks to.
pub struct Surroundings {
    /// The bucket and the members.
    pub members: Arc<dyn members::Port>,
    /// What the members' watch shows.
    pub watch: UnboundedReceiver<members::Reply>,
    /// What people and signals ask.
    pub requests: UnboundedReceiver<Request>,
    /// Starts shards.
    pub starter: Arc<dyn Starter>,
}

/// Runs `machine` until it has resigned.
///
/// # Errors
/// A shard's task that panicked: a fault of Holdfast. Everything is given up at once.
pub async fn share(
    mut machine: Claims,
    clock: Clock,
    surroundings: Surroundings,
    limits: Limits,
    observer: &dyn Observer,
) -> Result<(), tokio::task::JoinError> {
    let Surroundings { members, mut watch, mut requests, starter } = surroundings;
    let (reports, mut reported) = unbounded_channel();
    let runs = Runs::new(limits.handover);
    let mut shards = Shards { starter, runs, events: BTreeMap::new(), tasks: JoinSet::new(), reports };
    let mut calls: FuturesUnordered<BoxFuture<'static, members::Reply>> = FuturesUnordered::new();
    let mut actions = Vec::new();
    machine.handle(clock.now(), claims::Event::Wakeup, &mut actions);
    loop {
        for action in actions.drain(..) {
            match action {
                Action::Members(command) => {
                    let members = Arc::clone(&members);
                    calls.push(Box::pin(async move { members.call(command).await }));
                }
                Action::Shard { shard, order } => {
                    observer.ordered(shard, &order);
                    shards.order(shard, order);
                }
                Action::Notice(notice) => observer.notice(&notice),
            }
        }
        observer.status(&machine.status());
        if machine.is_over() {
            // What is still held past the time for stopping is given up as it is.
            shards.tasks.shutdown().await;
            return Ok(());
        }
        let wakeup = machine.next_wakeup().map(|at| clock.to_tokio(at));
        let event = tokio::select! {
            // A shard's last report is in the queue before its task has ended.
            biased;
            Some((shard, report)) = reported.recv() => {
                observer.report(shard, &report);
                Some(claims::Event::Shard { shard, report: claims::Report::from(&report) })
            }
            Some(ended) = shards.tasks.join_next() => {
                shards.ended(ended?);
                None
            }
            Some(reply) = watch.recv() => Some(claims::Event::Members(reply)),
            Some(reply) = calls.next() => Some(claims::Event::Members(reply)),
            Some(request) = requests.recv() => Some(match request {
                Request::Stop { within } => claims::Event::Stop { within },
                Request::Pause(shard) => claims::Event::Pause(shard),
                Request::Resume(shard) => claims::Event::Resume(shard),
                Request::Unowned(shard) => claims::Event::Unowned { shard },
            }),
            () = sleep_until(wakeup) => Some(claims::Event::Wakeup),
        };
        if let Some(event) = event {
            machine.handle(clock.now(), event, &mut actions);
        }
    }
}
