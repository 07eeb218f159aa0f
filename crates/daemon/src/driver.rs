//! Carries the machines' commands to ports and the ports' replies back. It holds no policy: nothing here
//! decides what happens to a row.
//!
//! **What may complete in any order:** everything. Commands of one port are *started* in the order in which
//! the machine gave them; their replies are events like any other, handled as they come, but after what is in the
//! queue by then: a pull's rows come before its end.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use holdfast_core::action::{Action, Actions, Event};
use holdfast_core::notice::{Notice, Report};
use holdfast_core::ports::{dead_letters, delivery, ledger, retention, store};
use holdfast_core::shard::{Shard, Status};
use holdfast_core::trim::{self, Trim};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;

use crate::clock::Clock;

/// The ports that a shard acts through.
#[derive(Clone)]
pub struct Ports {
    /// The shard's consumer.
    pub delivery: Arc<dyn delivery::Port>,
    /// The ledger.
    pub ledger: Arc<dyn ledger::Port>,
    /// The store.
    pub store: Arc<dyn store::Port>,
    /// The dead letters.
    pub dead_letters: Arc<dyn dead_letters::Port>,
}

/// What a driver shows of its machine as it runs. Called on the machine's own task; must not block.
pub trait Observer: Send + Sync {
    /// Something worth a line or a count.
    fn notice(&self, notice: &Notice);
    /// Something that the process acts on.
    fn report(&self, report: &Report);
    /// How the shard stands, after a round of events.
    fn status(&self, status: &Status<'_>);
}

/// A queue into a machine, and the rows' sink that fills it.
///
/// It has no bound of its own: what can be in it is bounded by the rows that were asked for, and by one
/// reply for each command under way.
#[must_use]
pub fn queue() -> (UnboundedSender<Event>, UnboundedReceiver<Event>) {
    unbounded_channel()
}

/// Where a delivery adapter puts the rows of the machine behind `events`.
#[must_use]
pub fn sink(events: UnboundedSender<Event>) -> delivery::Sink {
    // A machine that has ended takes no more rows; they come again to the heir.
    Arc::new(move |reply| drop(events.send(Event::Delivery(reply))))
}

/// Events handled before the machine's actions are carried out together.
const ROUND: usize = 64;

/// Runs `shard` until it is released or fails. `events` is its queue, `own` the way into it.
pub async fn drive(
    mut shard: Shard,
    clock: Clock,
    ports: Ports,
    mut events: UnboundedReceiver<Event>,
    own: UnboundedSender<Event>,
    observer: &dyn Observer,
) {
    let mut actions = Actions::default();
    // Consumer, ledger and dead letters are asked from this task, so that their commands start in order. The store is
    // asked from tasks of its own: building a body is work that other shards need not wait for.
    let mut calls: FuturesUnordered<BoxFuture<'static, Option<Event>>> = FuturesUnordered::new();
    loop {
        let wakeup = shard.next_wakeup().map(|at| clock.to_tokio(at));
        let event = tokio::select! {
            event = events.recv() => match event {
                Some(event) => Some(event),
                None => return,
            },
            Some(event) = calls.next() => {
                // What a reply follows is in the queue already: a pull's rows come before its end.
                while let Ok(before) = events.try_recv() {
                    shard.handle(clock.now(), before, &mut actions);
                }
                event
            }
            () = sleep_until(wakeup) => Some(Event::Wakeup),
        };
        if let Some(event) = event {
            shard.handle(clock.now(), event, &mut actions);
        }
        for _ in 1..ROUND {
            let Ok(event) = events.try_recv() else { break };
            shard.handle(clock.now(), event, &mut actions);
        }
        let mut ended = false;
        for action in actions.drain() {
            match action {
                Action::Delivery(command) => {
                    let port = Arc::clone(&ports.delivery);
                    calls.push(Box::pin(async move { port.call(command).await.map(Event::Delivery) }));
                }
                Action::Ledger(command) => {
                    let port = Arc::clone(&ports.ledger);
                    calls.push(Box::pin(async move { Some(Event::Ledger(port.call(command).await)) }));
                }
                Action::Store(command) => {
                    let port = Arc::clone(&ports.store);
                    let own = own.clone();
                    tokio::spawn(async move {
                        if let Some(reply) = port.call(command).await {
                            drop(own.send(Event::Store(reply)));
                        }
                    });
                }
                Action::DeadLetter(command) => {
                    let port = Arc::clone(&ports.dead_letters);
                    calls.push(Box::pin(async move { Some(Event::DeadLetter(port.call(command).await)) }));
                }
                Action::Notice(notice) => observer.notice(&notice),
                Action::Report(report) => {
                    ended |= matches!(report, Report::Released { .. } | Report::Failed(_));
                    observer.report(&report);
                }
            }
        }
        observer.status(&shard.status());
        if ended {
            // What was started last (closing the inbox) is given its first chance to be sent.
            while let Some(Some(_)) = futures_util::FutureExt::now_or_never(calls.next()) {}
            return;
        }
    }
}

/// Waits until `wakeup`, or for ever.
pub(crate) async fn sleep_until(wakeup: Option<tokio::time::Instant>) {
    match wakeup {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Runs the trimmer for ever, and looks on while `leads` is false.
pub async fn drive_trim(
    config: trim::Config,
    clock: Clock,
    ledger: Arc<dyn ledger::Port>,
    retention: Arc<dyn retention::Port>,
    mut leads: watch::Receiver<bool>,
    observer: &dyn Observer,
) {
    let mut machine = Trim::new(config, clock.now());
    let mut actions = Vec::new();
    let mut calls: FuturesUnordered<BoxFuture<'static, trim::Event>> = FuturesUnordered::new();
    loop {
        if leads.wait_for(|leads| *leads).await.is_err() {
            return;
        }
        let wakeup = machine.next_wakeup().map(|at| clock.to_tokio(at));
        let event = tokio::select! {
            Some(event) = calls.next() => event,
            () = sleep_until(wakeup) => trim::Event::Wakeup,
        };
        machine.handle(clock.now(), event, &mut actions);
        for action in actions.drain(..) {
            match action {
                trim::Action::Ledger(command) => {
                    let port = Arc::clone(&ledger);
                    calls.push(Box::pin(async move { trim::Event::Ledger(port.call(command).await) }));
                }
                trim::Action::Retention(command) => {
                    let port = Arc::clone(&retention);
                    calls.push(Box::pin(async move { trim::Event::Retention(port.call(command).await) }));
                }
                trim::Action::Notice(notice) => observer.notice(&notice),
            }
        }
    }
}
