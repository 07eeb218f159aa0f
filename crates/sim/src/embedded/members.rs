//! The members' records: everyone's watch, and signs of life.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use holdfast_core::member::MemberId;
use holdfast_core::ports::Attempt;
use holdfast_core::ports::members::{self, Command, Probe, Reply, Sink};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;

use crate::jetstream::Client;
use crate::members::Answer;

use super::{Process, Shared, State, not_connected};

/// A process that watches, and that answers under its name.
pub(super) struct Listener {
    sink: Sink,
    asked: UnboundedSender<UnboundedSender<()>>,
}

impl State {
    pub(super) fn tell_members(&mut self) {
        for (to, reply) in self.models.members.take_outgoing() {
            if let Some(listener) = self.listeners.get(&to) {
                (listener.sink)(reply);
            }
        }
    }

    pub(super) fn forget_listener(&mut self, client: Client) {
        self.listeners.remove(&client);
        self.models.members.disconnect(client);
    }
}

impl Process {
    /// Begins to watch the members' records and to answer as `member`, on the runtime that this is called on: while
    /// that stands still, nobody answers. A member that does not answer within `probe` is silent.
    #[must_use]
    pub fn members(&self, member: MemberId, probe: Duration, sink: Sink) -> MembersPort {
        let (asked, mut asks) = unbounded_channel::<UnboundedSender<()>>();
        let answering = tokio::spawn(async move {
            while let Some(ask) = asks.recv().await {
                // Whoever asked has given up waiting.
                let _ = ask.send(());
            }
        });
        let client = self.shared.act(|state, _| {
            let client = self.client(state);
            if state.dead.contains(&self.id) {
                return client;
            }
            state.listeners.insert(client, Listener { sink, asked });
            state.models.members.connect(client, member);
            state.models.members.watch(client);
            client
        });
        MembersPort { shared: Arc::clone(&self.shared), client, probe, answering }
    }
}

/// The members port. Its watch and its answers end when it is dropped.
pub struct MembersPort {
    shared: Arc<Shared>,
    client: Client,
    probe: Duration,
    answering: JoinHandle<()>,
}

impl fmt::Debug for MembersPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MembersPort").field("client", &self.client).finish_non_exhaustive()
    }
}

impl MembersPort {
    /// Waits for the first of those who are asked.
    async fn asks(&self, attempt: Attempt, whom: Vec<Client>) -> Reply {
        let (ask, mut answers) = unbounded_channel();
        self.shared.act(|state, _| {
            for client in &whom {
                if let Some(listener) = state.listeners.get(client) {
                    // One that is ending does not answer.
                    let _ = listener.asked.send(ask.clone());
                }
            }
        });
        let answer = if whom.is_empty() {
            Probe::NoResponders
        } else if tokio::time::timeout(self.probe, answers.recv()).await == Ok(Some(())) {
            Probe::Alive
        } else {
            Probe::Silent
        };
        Reply::Probed { attempt, answer }
    }
}

fn unanswered(command: &Command) -> Reply {
    match command {
        Command::Put { attempt, .. } => Reply::Put { attempt: *attempt, outcome: Err(not_connected()) },
        Command::Delete { attempt, .. } => {
            Reply::Deleted { attempt: *attempt, outcome: Err(not_connected()) }
        }
        Command::Probe { attempt, .. } => Reply::Probed { attempt: *attempt, answer: Probe::Silent },
    }
}

#[async_trait]
impl members::Port for MembersPort {
    async fn call(&self, command: Command) -> Reply {
        let answer = self.shared.act(|state, _| {
            if state.dead.contains(&self.client.process) {
                return Answer::Done(unanswered(&command));
            }
            state.models.members.handle(&command)
        });
        match (answer, command) {
            (Answer::Asks(whom), Command::Probe { attempt, .. }) => self.asks(attempt, whom).await,
            (Answer::Done(reply), _) => reply,
            (Answer::Asks(_), command) => unanswered(&command),
        }
    }
}

impl Drop for MembersPort {
    fn drop(&mut self) {
        self.answering.abort();
        self.shared.act(|state, _| state.forget_listener(self.client));
    }
}
