//! The members' bucket in the world, and members who are asked whether they live.

use std::time::Duration;

use bytes::Bytes;
use holdfast_core::member::{Hold, Member, State};
use holdfast_core::ports::Attempt;
use holdfast_core::ports::members::{Command, Probe, Reply};
use holdfast_core::record::Session;
use holdfast_core::row::ShardId;

use crate::jetstream::Client;
use crate::members::Answer;
use crate::process::Local;
use crate::scenario::Scenario;

use super::wires::Way;
use super::{Due, World, unanswered};

/// What a caller is told if a command of it is not answered.
fn unanswered_members(command: &Command) -> Reply {
    match command {
        Command::Put { attempt, .. } => Reply::Put { attempt: *attempt, outcome: Err(unanswered()) },
        Command::Delete { attempt, .. } => Reply::Deleted { attempt: *attempt, outcome: Err(unanswered()) },
        Command::Probe { attempt, .. } => Reply::Probed { attempt: *attempt, answer: Probe::Silent },
    }
}

const fn local(client: Option<Client>, reply: Reply) -> Local {
    Local::Members { client, reply }
}

impl World {
    pub(super) fn send_members(&mut self, process: u32, command: Command) {
        let owner = &self.processes[process as usize];
        let client = owner.client();
        let patience = match command {
            Command::Probe { .. } => owner.lasts(Scenario::PROBE_TIMEOUT),
            Command::Put { .. } | Command::Delete { .. } => Scenario::CALL_TIMEOUT,
        };
        let unanswered = local(None, unanswered_members(&command));
        if let Some((at, reply_by)) = self.request_by(Way::Members, patience, client, unanswered) {
            self.agenda.put(at, Due::AtMembers { from: client, command: Box::new(command), reply_by });
        }
    }

    pub(super) fn at_members(&mut self, from: Client, command: &Command, reply_by: Option<Duration>) {
        let unanswered = unanswered_members(command);
        if !self.broker_up {
            if let Some(reply_by) = reply_by {
                self.put_local(reply_by, from.process, from.start, local(None, unanswered));
            }
            return;
        }
        match self.members.handle(command) {
            Answer::Done(reply) => {
                if let Command::Put { member, .. } = command {
                    self.lives.written(self.now, member.clone());
                }
                self.answer_members(from, reply_by, reply, unanswered);
                self.serve_members();
            }
            Answer::Asks(asked) => {
                let Command::Probe { attempt, .. } = *command else { return };
                if asked.is_empty() {
                    let reply = Reply::Probed { attempt, answer: Probe::NoResponders };
                    self.answer_members(from, reply_by, reply, unanswered);
                    return;
                }
                // If none of them answers in time, that is silence.
                if let Some(reply_by) = reply_by {
                    self.put_local(reply_by, from.process, from.start, local(None, unanswered));
                }
                for asked in asked {
                    let at = self.inwards(asked.process, Way::Members);
                    self.agenda.put(at, Due::AtMember { asked, from, attempt, reply_by });
                }
            }
        }
    }

    fn answer_members(&mut self, to: Client, reply_by: Option<Duration>, reply: Reply, unanswered: Reply) {
        self.answer_by(Way::Members, to, reply_by, local(Some(to), reply), local(None, unanswered));
    }

    /// A member is asked whether it lives.
    pub(super) fn at_member(
        &mut self,
        asked: Client,
        from: Client,
        attempt: Attempt,
        reply_by: Option<Duration>,
    ) {
        let owner = &self.processes[asked.process as usize];
        if owner.up && owner.client() == asked && owner.frozen_until.is_none() {
            let at = self.outwards(asked.process, Way::Members);
            self.agenda.put(at, Due::MemberAnswers { to: from, attempt, reply_by });
        }
    }

    pub(super) fn member_answers(&mut self, to: Client, attempt: Attempt, reply_by: Option<Duration>) {
        let at = self.inwards(to.process, Way::Members);
        if self.broker_up && reply_by.is_some_and(|reply_by| at <= reply_by) {
            let reply = Reply::Probed { attempt, answer: Probe::Alive };
            self.put_local(at, to.process, to.start, local(Some(to), reply));
        }
    }

    /// A process has a connection: it answers to its name, and begins to watch.
    pub(super) fn meet(&mut self, process: u32) {
        let owner = &self.processes[process as usize];
        if owner.sharing.is_none() {
            return;
        }
        let (client, member) = (owner.client(), owner.member.clone());
        self.members.connect(client, member.clone());
        self.lives.connected(self.now, member, true);
        self.watch_soon(client, Duration::ZERO);
    }

    /// A process asks for a watch, which begins a moment later.
    fn watch_soon(&mut self, client: Client, pause: Duration) {
        let there = self.outwards(client.process, Way::Members);
        self.agenda.put(there + pause, Due::Watch(client));
    }

    pub(super) fn watch_members(&mut self, client: Client) {
        let owner = &self.processes[client.process as usize];
        if owner.up && owner.connected && owner.client() == client && self.broker_up {
            self.members.watch(client);
            self.serve_members();
        }
    }

    /// A connection is gone, as far as the server is concerned.
    pub(super) fn part_members(&mut self, client: Client) {
        self.members.disconnect(client);
        let member = self.processes[client.process as usize].member.clone();
        if self.members.listeners(&member).next().is_none() {
            self.lives.connected(self.now, member, false);
        }
    }

    /// Carries away what watches show.
    pub(super) fn serve_members(&mut self) {
        let mut lost = Vec::new();
        for (to, reply) in self.members.take_outgoing() {
            if lost.contains(&to) {
                continue;
            }
            if self.chance.permille(self.rates.watch_lost) {
                // A change is missing: that shows at the next one, or at the watch's heartbeat.
                lost.push(to);
                self.members.unwatch(to);
                let pause = self.chance.millis(20, 6_000);
                self.watch_soon(to, pause);
                continue;
            }
            if self.chance.permille(self.rates.watch_slow) {
                let until = self.now + self.chance.millis(50, 5_000);
                let owner = &mut self.processes[to.process as usize];
                owner.members_last_in = owner.members_last_in.max(until);
            }
            let at = self.inwards(to.process, Way::Watch);
            self.put_local(at, to.process, to.start, local(Some(to), reply));
        }
    }

    /// Somebody deletes the bucket and makes it again.
    pub(super) fn make_bucket_anew(&mut self) {
        for client in self.members.make_anew() {
            let pause = self.chance.millis(20, 6_000);
            self.watch_soon(client, pause);
        }
    }

    /// Somebody deletes a member's record.
    pub(super) fn delete_member(&mut self, process: u32) {
        let command = Command::Delete {
            attempt: Attempt(0),
            member: self.processes[process as usize].member.clone(),
            only: None,
        };
        let _ = self.members.handle(&command);
        self.serve_members();
    }

    /// Another process writes under a member's name, and claims to own this shard.
    pub(super) fn take_name(&mut self, process: u32, shard: ShardId) {
        let id = self.processes[process as usize].member.clone();
        let record = Member {
            version: Member::VERSION,
            id: id.clone(),
            session: Session(self.chance.below(u64::MAX)),
            beat: 1,
            state: State::Active,
            software: "sim".to_owned(),
            fingerprint: "00".to_owned(),
            shards: [(shard, Hold::default())].into(),
            failed: std::collections::BTreeMap::new(),
            paused: std::collections::BTreeSet::new(),
        };
        let record: Bytes = record.encode();
        self.members.put(id.as_str(), record);
        self.serve_members();
    }
}
