//! Rows of one shard, and the stream's retention.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use holdfast_core::ports::delivery::{self, Command, Inbox, InspectError, PullEnd, Reply, Sink};
use holdfast_core::ports::{Attempt, Failure, FailureClass, retention};
use holdfast_core::row::ShardId;
use tokio::sync::oneshot;

use crate::jetstream::{Client, Outgoing};

use super::{Process, Shared, State, not_connected};

/// A pull as its client's side knows it.
struct OpenPull {
    inbox: Inbox,
    batch: u32,
    got: u32,
    end: oneshot::Sender<PullEnd>,
}

/// The client's side of a connection.
pub(super) struct Link {
    sink: Sink,
    closed: Inbox,
    pulls: BTreeMap<Attempt, OpenPull>,
}

impl Link {
    fn end(&mut self, attempt: Attempt, end: PullEnd) {
        if let Some(pull) = self.pulls.remove(&attempt) {
            // Nobody waits: the pull was given up.
            let _ = pull.end.send(end);
        }
    }

    fn close(&mut self, inbox: Inbox) {
        self.closed = self.closed.max(inbox);
        let closed: Vec<_> =
            self.pulls.iter().filter(|(_, pull)| pull.inbox <= inbox).map(|(attempt, _)| *attempt).collect();
        for attempt in closed {
            self.end(attempt, PullEnd::Closed);
        }
    }
}

impl State {
    pub(super) fn route(&mut self, out: Outgoing) {
        match out {
            Outgoing::Rows { to, attempt, rows, .. } => {
                let Some(link) = self.links.get_mut(&to).filter(|link| rows.inbox > link.closed) else {
                    return;
                };
                let came = u32::try_from(rows.rows.len()).unwrap_or(u32::MAX);
                (link.sink)(Reply::Rows(rows));
                // The server ends a full pull without a word.
                if let Some(pull) = link.pulls.get_mut(&attempt) {
                    pull.got = pull.got.saturating_add(came);
                    if pull.got >= pull.batch {
                        link.end(attempt, PullEnd::Full);
                    }
                }
            }
            Outgoing::Ended { to, attempt, end, .. } => {
                if let Some(link) = self.links.get_mut(&to) {
                    link.end(attempt, end);
                }
            }
        }
    }
}

/// The delivery port of one shard, on a connection of its own.
pub struct Delivery {
    shared: Arc<Shared>,
    client: Client,
    shard: ShardId,
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("client", &self.client)
            .field("shard", &self.shard)
            .finish_non_exhaustive()
    }
}

impl Process {
    /// Connects for the rows of `shard`, which go to `sink`.
    #[must_use]
    pub fn delivery(&self, shard: ShardId, sink: Sink) -> Delivery {
        let client = self.shared.act(|state, _| {
            let client = self.client(state);
            if state.dead.contains(&self.id) {
                return client;
            }
            let shards = state.models.stream.shards();
            state.models.stream.connect(client, vec![Inbox(0); shards]);
            state.links.insert(client, Link { sink, closed: Inbox(0), pulls: BTreeMap::new() });
            client
        });
        Delivery { shared: Arc::clone(&self.shared), client, shard }
    }

    /// The stream's retention.
    #[must_use]
    pub fn retention(&self) -> Retention {
        Retention { shared: Arc::clone(&self.shared), process: self.id }
    }
}

impl Delivery {
    /// The connection breaks, and is made anew at once: pulls and rows that were on their way are lost.
    pub fn break_connection(&self) {
        let sink = self.shared.act(|state, now| {
            let link = state.links.get(&self.client)?;
            let mut closed = vec![Inbox(0); state.models.stream.shards()];
            if let Some(of_shard) = usize::try_from(self.shard.0).ok().and_then(|at| closed.get_mut(at)) {
                *of_shard = link.closed;
            }
            state.models.stream.disconnect(now, self.client);
            state.models.stream.connect(self.client, closed);
            Some(Arc::clone(&link.sink))
        });
        if let Some(sink) = sink {
            sink(Reply::Disrupted);
        }
    }

    fn ask(&self, command: Command) -> Option<Reply> {
        self.shared.act(|state, now| {
            let Some(link) = state.links.get_mut(&self.client) else {
                return unanswered(&command, &not_connected());
            };
            match &command {
                Command::Close { inbox } => link.close(*inbox),
                Command::Reset { inbox, .. } => link.close(Inbox(inbox.0.saturating_sub(1))),
                _ => {}
            }
            // Of a consumer that is not there a reset is never answered.
            let silence = Failure::new(FailureClass::Unanswered, "no answer");
            let unanswered = unanswered(&command, &silence);
            state.models.stream.handle(now, self.client, self.shard, command).or(unanswered)
        })
    }
}

/// What is told of a command that gets no answer, and why; none if none is waited for.
fn unanswered(command: &Command, why: &Failure) -> Option<Reply> {
    let why = why.clone();
    Some(match command {
        Command::Reset { attempt, .. } => Reply::Reset { attempt: *attempt, outcome: Err(why) },
        Command::Unpin { attempt } => Reply::Unpinned { attempt: *attempt, outcome: Err(why) },
        Command::Inspect { attempt, .. } => {
            Reply::Inspected { attempt: *attempt, outcome: Err(InspectError::Failed(why)) }
        }
        Command::Pull(_) | Command::Close { .. } | Command::Ack { .. } => return None,
    })
}

#[async_trait]
impl delivery::Port for Delivery {
    async fn call(&self, command: Command) -> Option<Reply> {
        let pull = match command {
            Command::Pull(pull) => pull,
            other => return self.ask(other),
        };
        let attempt = pull.attempt;
        let ended = self.shared.act(|state, now| {
            let Some(link) = state.links.get_mut(&self.client) else {
                return Err(PullEnd::Failed(not_connected()));
            };
            if pull.inbox <= link.closed {
                return Err(PullEnd::Closed);
            }
            let (end, ended) = oneshot::channel();
            link.pulls.insert(attempt, OpenPull { inbox: pull.inbox, batch: pull.batch, got: 0, end });
            state.models.stream.handle(now, self.client, self.shard, Command::Pull(pull));
            Ok(ended)
        });
        let end = match ended {
            Ok(ended) => ended.await.unwrap_or(PullEnd::Closed),
            Err(end) => end,
        };
        Some(Reply::Ended { attempt, end })
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.shared.act(|state, now| {
            if state.links.remove(&self.client).is_some() {
                state.models.stream.disconnect(now, self.client);
            }
        });
    }
}

/// The retention port.
#[derive(Debug)]
pub struct Retention {
    shared: Arc<Shared>,
    process: u32,
}

#[async_trait]
impl retention::Port for Retention {
    async fn call(&self, command: retention::Command) -> retention::Reply {
        let retention::Command::Trim { attempt, .. } = command;
        self.shared.act(|state, _| {
            if state.dead.contains(&self.process) {
                return retention::Reply::Trimmed { attempt, outcome: Err(not_connected()) };
            }
            state.models.stream.trim(&command).0
        })
    }
}
