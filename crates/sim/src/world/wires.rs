//! The ways between processes and servers: how long a message takes, and whether it arrives.

use std::time::Duration;

use crate::jetstream::Client;
use crate::process::Local;
use crate::scenario::Scenario;

use super::{Due, World};

/// Which way a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Rows, and what must not overtake: they keep their order.
    Ordered,
    /// Requests about the consumers and the ledger, and their answers: they may overtake.
    Request,
    /// The same about the members.
    Members,
    /// What the members' watch shows, in order.
    Watch,
}

impl Way {
    /// Whether trouble on it keeps an owner from pulling.
    fn carries_pulls(self) -> bool {
        matches!(self, Self::Ordered | Self::Request)
    }
}

impl World {
    pub(super) fn latency(&mut self) -> Duration {
        self.chance.time(Duration::from_micros(100), self.scenario.latency)
    }

    /// When a message that leaves the process now arrives at the stream's server.
    pub(super) fn outwards(&mut self, process: u32, way: Way) -> Duration {
        let arrives = self.now + self.latency();
        let process = &mut self.processes[process as usize];
        match way {
            Way::Request => arrives.max(process.outwards_held),
            Way::Ordered => {
                process.last_out = arrives.max(process.outwards_held).max(process.last_out);
                process.last_out
            }
            Way::Members | Way::Watch => arrives.max(process.members_outwards_held),
        }
    }

    pub(super) fn inwards(&mut self, process: u32, way: Way) -> Duration {
        let arrives = self.now + self.latency();
        let process = &mut self.processes[process as usize];
        match way {
            Way::Request => arrives.max(process.inwards_held),
            Way::Ordered => {
                process.last_in = arrives.max(process.inwards_held).max(process.last_in);
                process.last_in
            }
            Way::Members => arrives.max(process.members_inwards_held),
            Way::Watch => {
                let arrives = arrives.max(process.members_inwards_held);
                process.members_last_in = arrives.max(process.members_last_in);
                process.members_last_in
            }
        }
    }

    pub(super) fn disturbed(&mut self, process: u32, until: Duration) {
        self.pins.disturbed(process, until);
    }

    fn disturbed_by(&mut self, way: Way, process: u32, until: Duration) {
        if way.carries_pulls() {
            self.disturbed(process, until);
        }
    }

    pub(super) fn put_local(&mut self, at: Duration, process: u32, start: u32, what: Local) {
        self.agenda.put(at, Due::Local { process, start, what });
    }

    /// An answer on its way back: on time, or else `unanswered` when the caller gives up.
    pub(super) fn answer(&mut self, to: Client, reply_by: Option<Duration>, reply: Local, unanswered: Local) {
        self.answer_by(Way::Request, to, reply_by, reply, unanswered);
    }

    pub(super) fn answer_by(
        &mut self,
        way: Way,
        to: Client,
        reply_by: Option<Duration>,
        reply: Local,
        unanswered: Local,
    ) {
        // The caller was told already that no answer came.
        let Some(reply_by) = reply_by else { return };
        let Client { process, start, .. } = to;
        if self.chance.permille(self.rates.answer_lost) {
            self.disturbed_by(way, process, reply_by);
            if !self.chance.permille(self.rates.answer_never) {
                self.put_local(reply_by, process, start, unanswered);
            }
            return;
        }
        let mut at = self.inwards(process, way);
        if self.chance.permille(self.rates.answer_late) {
            at += self.chance.millis(10, 3_000);
            self.disturbed_by(way, process, at);
        }
        if at > reply_by {
            self.put_local(reply_by, process, start, unanswered);
            return;
        }
        if self.chance.permille(self.rates.answer_twice) {
            let again = at + self.chance.millis(0, 2_000);
            self.put_local(again, process, start, reply.clone());
        }
        self.put_local(at, process, start, reply);
    }

    /// Arranges a request's arrival: when, if at all, and until when an answer counts.
    pub(super) fn request(
        &mut self,
        client: Client,
        unanswered: Local,
    ) -> Option<(Duration, Option<Duration>)> {
        self.request_by(Way::Request, Scenario::CALL_TIMEOUT, client, unanswered)
    }

    pub(super) fn request_by(
        &mut self,
        way: Way,
        patience: Duration,
        client: Client,
        unanswered: Local,
    ) -> Option<(Duration, Option<Duration>)> {
        let Client { process, start, .. } = client;
        let reply_by = self.now + patience;
        let connected = self.processes[process as usize].connected;
        if !connected || self.chance.permille(self.rates.request_lost) {
            self.disturbed_by(way, process, reply_by);
            if !self.chance.permille(self.rates.answer_never) {
                self.put_local(reply_by, process, start, unanswered);
            }
            return None;
        }
        let mut arrives = self.outwards(process, way);
        if self.chance.permille(self.rates.request_late) {
            arrives += self.chance.millis(50, 8_000);
        }
        if arrives < reply_by {
            return Some((arrives, Some(reply_by)));
        }
        self.disturbed_by(way, process, reply_by);
        self.put_local(reply_by, process, start, unanswered);
        Some((arrives, None))
    }
}
