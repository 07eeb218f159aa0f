//! The end: faults stop, and everything must come right.

use std::fmt::Write as _;
use std::time::Duration;

use holdfast_core::row::ShardId;

use crate::fault::Rates;
use crate::invariants::Checked;
use crate::invariants::lands;
use crate::process::Process;
use crate::scenario::Scenario;
use crate::trace::Happening;

use super::{Due, World};

impl World {
    pub(super) fn fall_quiet(&mut self) {
        self.quiet = true;
        self.rates = Rates::default();
        self.deliveries_to_lose.clear();
        self.store_slow_until = Duration::ZERO;
        self.store_refuses_until = Duration::ZERO;
        self.store_denies.0 = Duration::ZERO;
        self.letters.recover();
        self.acks_lost_until = Duration::ZERO;
        self.astray.clear();
        self.anew_astray.clear();
        self.note(Happening::Fault("over: everything".to_owned()));
        let share = crate::process::share(&self.scenario);
        for process in 0..self.scenario.processes {
            let owner = &mut self.processes[process as usize];
            owner.store_cut = Duration::ZERO;
            owner.frozen_after = None;
            let (now, start) = (self.now, owner.start);
            if owner.frozen_until.is_some() {
                owner.frozen_until = Some(now);
                self.thaw(process, start);
            }
            self.set_share(process, share);
            self.agenda.put(now, Due::Start { process });
        }
        let at = self.now + Duration::from_secs(1);
        self.agenda.put(at, Due::Look);
    }

    pub(super) fn look_whether_settled(&mut self) {
        let processes = &self.processes;
        let tail_lost = self.causes.tail_lost;
        let excused = |shard: u32| {
            let stopped = |process: &Process| !process.up || process.slots[shard as usize].reused;
            tail_lost && processes.iter().all(stopped)
        };
        let intents = &self.intents;
        let unsettled = lands::unsettled(
            &self.truth,
            |shard| intents.current(ShardId(shard)),
            excused,
            |fact| self.poisons(fact),
            |fact| self.lingers(fact),
        );
        if unsettled.is_none() {
            self.settled_at.get_or_insert(self.now);
        } else if self.now > self.scenario.quiet_from + Scenario::SETTLES_WITHIN {
            let stuck = self.describe();
            self.check(lands::bound(unsettled, &stuck));
            return;
        }
        let at = self.now + Duration::from_secs(1);
        self.agenda.put(at, Due::Look);
    }

    /// A process was told to stop, and should have by now, unless it was frozen.
    pub(super) fn look_whether_stopped(&mut self, process: u32, start: u32) {
        let owner = &self.processes[process as usize];
        if !owner.up || owner.start != start {
            return;
        }
        let running_for = self.now.saturating_sub(owner.running_since);
        if owner.frozen_until.is_some() || running_for < Duration::from_secs(5) {
            self.agenda.put(self.now + Duration::from_secs(5), Due::Overdue { process, start });
            return;
        }
        let pending = owner.slots.iter().filter(|slot| !slot.over).filter_map(|slot| slot.stopping);
        let checks: Vec<Checked> = pending.map(|stopping| stopping.pending(self.now, running_for)).collect();
        for checked in checks {
            self.check(checked);
        }
    }

    /// How the shards stand, for a report of one that is stuck.
    pub(super) fn describe(&self) -> String {
        let mut text = String::new();
        for owner in self.processes.iter().filter(|owner| owner.up) {
            for (slot, shard) in owner.slots.iter().zip(0..) {
                let status = slot.machine.status();
                let troubles: Vec<String> =
                    status.troubles.iter().map(|(table, trouble)| format!("{table}: {trouble}")).collect();
                let _ = write!(
                    text,
                    "p{} s{shard} is {}, floor {}, accepted {}, held {}, troubles [{}]; ",
                    owner.id,
                    status.phase,
                    status.floor,
                    status.accepted,
                    status.held_rows,
                    troubles.join(", ")
                );
            }
        }
        text
    }
}
