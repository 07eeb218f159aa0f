//! The end: faults stop, and everything must come right.

use std::fmt::Write as _;
use std::time::Duration;

use holdfast_core::row::ShardId;

use crate::fault::Rates;
use crate::invariants::Checked;
use crate::invariants::deleted;
use crate::invariants::draining;
use crate::invariants::even;
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
        if let Some(twin) = self.scenario.twin() {
            self.crash(twin, Duration::ZERO);
        }
        let share = crate::process::share(&self.scenario);
        for process in 0..self.scenario.processes {
            let owner = &mut self.processes[process as usize];
            owner.store_cut = Duration::ZERO;
            owner.frozen_after = None;
            owner.members_inwards_held = owner.members_inwards_held.min(self.now);
            owner.members_outwards_held = owner.members_outwards_held.min(self.now);
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
            let shard = ShardId(shard);
            let stopped = |process: &Process| !process.up || process.reused.contains(&shard);
            // What one member says of it the others leave alone.
            let says = |process: &Process| process.sharing.is_some() && stopped(process) && process.up;
            tail_lost && (processes.iter().any(says) || processes.iter().all(stopped))
        };
        let intents = &self.intents;
        let unsettled = lands::unsettled(
            &self.truth,
            |shard| intents.current(ShardId(shard)),
            excused,
            |fact| self.poisons(fact),
            |fact| self.lingers(fact),
        );
        let uneven = self.uneven();
        if unsettled.is_none() && uneven.is_none() {
            self.settled_at.get_or_insert(self.now);
        } else if self.now > self.scenario.quiet_from + Scenario::SETTLES_WITHIN {
            let stuck = self.describe();
            self.check(lands::bound(unsettled, &stuck));
            self.check(even::bound(uneven));
            return;
        }
        let at = self.now + Duration::from_secs(1);
        self.agenda.put(at, Due::Look);
    }

    /// A process, or one shard of it, was told to stop, and should have by now, unless the process was frozen.
    /// `start`: of the one or the other.
    pub(super) fn look_whether_stopped(&mut self, process: u32, start: u32, shard: Option<ShardId>) {
        let owner = &self.processes[process as usize];
        let slots = owner.slots.iter().filter(|(of, slot)| match shard {
            Some(shard) => **of == shard && slot.life == start,
            None => owner.sharing.is_none(),
        });
        let runs = if shard.is_none() { owner.start == start } else { slots.clone().next().is_some() };
        if !owner.up || !runs {
            return;
        }
        let running_for = self.now.saturating_sub(owner.running_since);
        if owner.frozen_until.is_some() || running_for < Duration::from_secs(5) {
            let at = self.now + Duration::from_secs(5);
            self.agenda.put(at, Due::Overdue { process, start, shard });
            return;
        }
        let pending = slots.filter(|(_, slot)| !slot.over).filter_map(|(_, slot)| slot.stopping);
        let mut checks: Vec<Checked> =
            pending.map(|stopping| stopping.pending(self.now, running_for)).collect();
        if let (None, Some((_, deadline))) = (shard, owner.stopping) {
            checks.push(draining::pending(self.now, deadline, running_for));
        }
        for checked in checks {
            self.check(checked);
        }
    }

    /// The consumer of a shard is gone: its machines should notice.
    pub(super) fn look_whether_noticed(&mut self, shard: ShardId) {
        let Some(gone) = self.gone.get(&shard).copied() else { return };
        let mut checks = Vec::new();
        for owner in self.processes.iter().filter(|owner| owner.up && owner.connected && self.broker_up) {
            if owner.frozen_until.is_none()
                && let Some(slot) = owner.slots.get(&shard)
                && !slot.over
                && slot.stopping.is_none()
            {
                let undisturbed = self.pins.undisturbed(owner.id).max(slot.since).max(owner.running_since);
                checks.push(deleted::runs(self.now, shard, gone, undisturbed));
            }
        }
        for checked in checks {
            self.check(checked);
        }
        self.agenda.put(self.now + Duration::from_millis(500), Due::Deleted(shard));
    }

    /// How the shards stand, for a report of one that is stuck.
    pub(super) fn describe(&self) -> String {
        let mut text = String::new();
        for owner in self.processes.iter().filter(|owner| owner.up) {
            for (shard, slot) in &owner.slots {
                let status = slot.machine.status();
                let troubles: Vec<String> =
                    status.troubles.iter().map(|(table, trouble)| format!("{table}: {trouble}")).collect();
                let _ = write!(
                    text,
                    "p{} s{} is {}, floor {}, accepted {}, held {}, troubles [{}]; ",
                    owner.id,
                    shard.0,
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
