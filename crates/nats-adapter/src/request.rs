//! Requests with an answer each, over one subscription of a connection.
//!
//! The client's own request keeps an entry for ever for each request that is never answered, and waits
//! without a limit when its queue is full. A daemon that outlives outages needs neither.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use async_nats::{HeaderMap, Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::connect::Connection;
use crate::errors::{ApiError, CallError, RequestError, cut};

/// How long an API call waits for its answer.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a request that a shard's progress waits for (a reset, an unpin, a ledger write) waits.
pub(crate) const QUICK_TIMEOUT: Duration = Duration::from_secs(2);

/// Told of what happens to a connection. Must not block.
pub(crate) trait Listener: Send + Sync {
    /// Messages may have been lost: the connection broke, was made anew, or could not keep up.
    fn disrupted(&self);
    /// The server refused a publish to `subject`.
    fn denied(&self, subject: &str);
}

type Answer = Result<Message, RequestError>;

#[derive(Debug)]
struct Waiting {
    subject: Arc<str>,
    answer: oneshot::Sender<Answer>,
}

/// What a connection's requests and listeners share.
pub(crate) struct Hub {
    next: AtomicU64,
    waiting: Mutex<HashMap<u64, Waiting>>,
    listeners: Mutex<Vec<Weak<dyn Listener>>>,
    connects: watch::Sender<u64>,
    /// When the last error of the server was logged: one that comes with every pull is told now and then.
    told: Mutex<Option<Instant>>,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub").finish_non_exhaustive()
    }
}

/// Nothing that runs under these locks leaves half a change behind, so a panic elsewhere is no reason to stop.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    pub(crate) fn new() -> Self {
        Self {
            next: AtomicU64::new(0),
            waiting: Mutex::new(HashMap::new()),
            listeners: Mutex::new(Vec::new()),
            connects: watch::Sender::new(0),
            told: Mutex::new(None),
        }
    }

    pub(crate) fn listen(&self, listener: Weak<dyn Listener>) {
        let mut listeners = lock(&self.listeners);
        listeners.retain(|known| known.strong_count() > 0);
        listeners.push(listener);
    }

    fn tell(&self, what: impl Fn(&dyn Listener)) {
        let listeners: Vec<_> = lock(&self.listeners).iter().filter_map(Weak::upgrade).collect();
        for listener in listeners {
            what(&*listener);
        }
    }

    pub(crate) fn connected(&self) {
        // The first connect disrupts nothing.
        let mut first = false;
        self.connects.send_modify(|connects| {
            first = *connects == 0;
            *connects += 1;
        });
        if !first {
            tracing::info!("connected to the NATS server again");
            self.disrupted();
        }
    }

    /// Whether an error of the server should be logged.
    pub(crate) fn is_news(&self) -> bool {
        const TOLD_AGAIN: Duration = Duration::from_secs(5);
        let mut told = lock(&self.told);
        let news = told.is_none_or(|at| at.elapsed() >= TOLD_AGAIN);
        if news {
            *told = Some(Instant::now());
        }
        news
    }

    /// How often there was a connect: what was sent under another number may be lost.
    pub(crate) fn connects(&self) -> u64 {
        *self.connects.borrow()
    }

    pub(crate) fn disconnected(&self) {
        let broken: Vec<_> = lock(&self.waiting).drain().collect();
        for (_, waiting) in broken {
            let _ = waiting.answer.send(Err(RequestError::Broken));
        }
        self.disrupted();
    }

    pub(crate) fn disrupted(&self) {
        self.tell(|listener| listener.disrupted());
    }

    pub(crate) fn denied(&self, subject: &str) {
        let denied: Vec<_> =
            lock(&self.waiting).extract_if(|_, waiting| &*waiting.subject == subject).collect();
        for (_, waiting) in denied {
            let _ = waiting.answer.send(Err(RequestError::Denied(subject.to_owned())));
        }
        self.tell(|listener| listener.denied(subject));
    }

    /// Waits for a connect event until `is_connected` says so, for `limit` at most.
    pub(crate) async fn wait_for_connect(&self, limit: Duration, is_connected: impl Fn() -> bool) -> bool {
        let mut connects = self.connects.subscribe();
        let deadline = Instant::now() + limit;
        while !is_connected() {
            match tokio::time::timeout_at(deadline, connects.changed()).await {
                Ok(Ok(())) => {}
                _ => return is_connected(),
            }
        }
        true
    }

    /// Hands answers to their requests until the subscription ends.
    pub(crate) async fn answer(self: Arc<Self>, mut subscriber: Subscriber) {
        while let Some(message) = subscriber.next().await {
            let id = message.subject.rsplit('.').next().and_then(|token| token.parse().ok());
            let Some(waiting) = id.and_then(|id: u64| lock(&self.waiting).remove(&id)) else { continue };
            let answer = if message.status == Some(StatusCode::NO_RESPONDERS) {
                Err(RequestError::NoResponders(waiting.subject.to_string()))
            } else {
                Ok(message)
            };
            let _ = waiting.answer.send(answer);
        }
    }
}

/// A request on its way. Dropping it forgets the request.
pub(crate) struct Pending {
    hub: Arc<Hub>,
    id: u64,
    answer: oneshot::Receiver<Answer>,
}

impl Pending {
    pub(crate) async fn wait(mut self, subject: &str, limit: Duration) -> Answer {
        match tokio::time::timeout(limit, &mut self.answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(RequestError::Broken),
            Err(_) => Err(RequestError::TimedOut { subject: cut(subject), millis: limit.as_millis() }),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        lock(&self.hub.waiting).remove(&self.id);
    }
}

/// What the server's answer to a publish or an API call holds beside its payload.
#[derive(serde::Deserialize)]
struct Envelope {
    error: Option<ApiError>,
}

/// Reads an API answer.
pub(crate) fn read<T: DeserializeOwned>(payload: &[u8]) -> Result<T, CallError> {
    let unreadable = |error: serde_json::Error| CallError::Unreadable(cut(&error.to_string()));
    let envelope: Envelope = serde_json::from_slice(payload).map_err(unreadable)?;
    if let Some(error) = envelope.error {
        return Err(CallError::Api(error));
    }
    serde_json::from_slice(payload).map_err(unreadable)
}

impl Connection {
    /// Sends a request; the future it gives waits for the answer.
    pub(crate) async fn send(
        &self,
        subject: Arc<str>,
        headers: Option<HeaderMap>,
        payload: Bytes,
    ) -> Result<Pending, RequestError> {
        let hub = Arc::clone(self.hub());
        let id = hub.next.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        lock(&hub.waiting).insert(id, Waiting { subject: Arc::clone(&subject), answer: sender });
        let pending = Pending { hub, id, answer };
        let reply = format!("{}.{id}", self.reply_prefix());
        let subject = subject.to_string();
        let sent = match headers {
            Some(headers) => {
                self.client().publish_with_reply_and_headers(subject, reply, headers, payload).await
            }
            None => self.client().publish_with_reply(subject, reply, payload).await,
        };
        match sent {
            Ok(()) => Ok(pending),
            Err(error) => Err(RequestError::NotSent(cut(&error.to_string()))),
        }
    }

    /// Sends a request once there is a connection, and waits for its answer, for `limit` in all.
    pub(crate) async fn request(
        &self,
        subject: &str,
        headers: Option<HeaderMap>,
        payload: Bytes,
        limit: Duration,
    ) -> Answer {
        let timed_out = || RequestError::TimedOut { subject: cut(subject), millis: limit.as_millis() };
        let deadline = Instant::now() + limit;
        if !self.connected(limit).await {
            return Err(RequestError::NotConnected);
        }
        let pending =
            match tokio::time::timeout_at(deadline, self.send(subject.into(), headers, payload)).await {
                Ok(sent) => sent?,
                // It may be in the client's queue already.
                Err(_) => return Err(timed_out()),
            };
        pending.wait(subject, deadline - Instant::now()).await
    }

    /// Calls the JetStream API.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        subject: &str,
        body: &impl Serialize,
        limit: Duration,
    ) -> Result<T, CallError> {
        let body = serde_json::to_vec(body).map_err(|error| RequestError::NotSent(error.to_string()))?;
        let message = self.request(subject, None, body.into(), limit).await?;
        read(&message.payload)
    }

    /// Calls the JetStream API without a body.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        subject: &str,
        limit: Duration,
    ) -> Result<T, CallError> {
        let message = self.request(subject, None, Bytes::new(), limit).await?;
        read(&message.payload)
    }
}
