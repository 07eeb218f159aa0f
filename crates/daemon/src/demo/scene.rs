//! What is seen of the demonstration as it runs. Nodes, servers and the script tell it; the view and the verdict read it.
//!
//! It is told under the servers' lock and from the nodes' own tasks: nothing here blocks or asks anybody anything.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use holdfast_core::claims;
use holdfast_core::notice::Notice;
use holdfast_core::row::ShardId;
use holdfast_sim::clickhouse::{Part, PartOutcome};

use crate::output::{count, lasts};

/// How a node's process fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Starting,
    Running,
    Stopping,
    Stopped,
    Crashed,
    Frozen,
}

impl State {
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Crashed => "crashed",
            Self::Frozen => "frozen",
        }
    }
}

/// How a shard stands with a node, as the node itself sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Holds {
    #[default]
    Nothing,
    StandsBy,
    Owns,
}

/// A start of a node.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) name: String,
    pub(super) state: State,
    /// Since when.
    pub(super) since: Instant,
    /// Rows that it wrote.
    pub(super) written: u64,
    pub(super) holds: Vec<Holds>,
}

/// A node's place among those that were started.
pub(super) type Place = usize;

/// What kind of thing happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Something that was done on purpose.
    Script,
    /// A shard changed hands.
    Moved,
    /// A node noticed something.
    Noticed,
    /// An insert of a node that has been replaced.
    Late,
    /// What should not be.
    Trouble,
}

/// Something that happened.
#[derive(Clone, Debug)]
pub(super) struct Happened {
    /// Since the start.
    pub(super) at: Duration,
    pub(super) kind: Kind,
    pub(super) text: String,
}

#[derive(Clone, Copy, Debug, Default)]
struct Shard {
    is_ready: bool,
    /// Who accepted rows of it last.
    owner: Option<Place>,
    /// When the owner was told to give it up.
    told: Option<Instant>,
}

/// How long it took until a shard's heir had its first row.
#[derive(Clone, Debug, Default)]
pub(super) struct Moves {
    /// From the moment at which its owner was told to give it up.
    pub(super) handovers: Vec<Duration>,
    /// From the crash of its owner.
    pub(super) takeovers: Vec<Duration>,
    /// From the moment at which its owner froze.
    pub(super) thefts: Vec<Duration>,
}

/// Inserts that landed after their shard had another owner, and were dropped for their token.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Late {
    pub(super) inserts: u64,
    pub(super) rows: u64,
    /// Of these inserts, those of a node that stood still.
    pub(super) frozen: u64,
}

/// Everything that is seen.
#[derive(Clone, Debug)]
pub(super) struct Stage {
    pub(super) members: Vec<Member>,
    pub(super) happened: Vec<Happened>,
    pub(super) published: u64,
    pub(super) stored: u64,
    pub(super) moves: Moves,
    pub(super) late: Late,
    /// What ended by itself, or should have happened and did not.
    pub(super) failures: Vec<String>,
    /// None until rows are published.
    start: Option<Instant>,
    shards: Vec<Shard>,
    /// Of whom it was told already that they are thought to be gone.
    missed: BTreeSet<Place>,
}

impl Stage {
    /// Since rows are published.
    pub(super) fn elapsed(&self) -> Duration {
        self.start.map_or(Duration::ZERO, |start| start.elapsed())
    }

    pub(super) const fn has_begun(&self) -> bool {
        self.start.is_some()
    }

    fn tell(&mut self, kind: Kind, text: String) {
        let at = self.elapsed();
        self.happened.push(Happened { at, kind, text });
    }

    fn named(&self, name: &str) -> Option<Place> {
        self.members.iter().rposition(|member| member.name == name)
    }

    fn shard(&mut self, shard: ShardId) -> Option<&mut Shard> {
        self.shards.get_mut(usize::try_from(shard.0).ok()?)
    }

    fn first_row(&mut self, by: Place, shard: ShardId) {
        let Some(seen) = self.shard(shard) else { return };
        let told = seen.told.take();
        let Some(before) = seen.owner.replace(by).filter(|before| *before != by) else { return };
        let old = &self.members[before];
        let (took, how) = match old.state {
            State::Crashed => (old.since.elapsed(), "taken over"),
            State::Frozen => (old.since.elapsed(), "taken over from the frozen node"),
            _ => match told {
                Some(told) => (told.elapsed(), "handed over"),
                // It had lost the shard before anybody told it anything.
                None => (Duration::ZERO, "moved"),
            },
        };
        match old.state {
            State::Crashed => self.moves.takeovers.push(took),
            State::Frozen => self.moves.thefts.push(took),
            _ if told.is_some() => self.moves.handovers.push(took),
            _ => {}
        }
        let (from, to) = (&old.name, &self.members[by].name);
        let time = if took.is_zero() { String::new() } else { format!(" in {}", brief(took)) };
        let text = format!("shard {shard}: {from} → {to}, {how}{time}");
        self.tell(Kind::Moved, text);
    }
}

/// A time in few letters.
pub(super) fn brief(time: Duration) -> String {
    if time < Duration::from_secs(1) { format!("{} ms", time.as_millis()) } else { lasts(time.as_secs_f64()) }
}

/// The stage, as those who tell of it reach it.
#[derive(Debug)]
pub(super) struct Scene(Mutex<Stage>);

impl Scene {
    pub(super) fn new(shards: u32) -> Self {
        Self(Mutex::new(Stage {
            members: Vec::new(),
            happened: Vec::new(),
            published: 0,
            stored: 0,
            moves: Moves::default(),
            late: Late::default(),
            failures: Vec::new(),
            start: None,
            shards: (0..shards).map(|_| Shard::default()).collect(),
            missed: BTreeSet::new(),
        }))
    }

    /// Looks, or tells. The lock is held meanwhile.
    pub(super) fn stage(&self) -> MutexGuard<'_, Stage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time counts from now on.
    pub(super) fn begin(&self) {
        self.stage().start = Some(Instant::now());
    }

    pub(super) fn tell(&self, kind: Kind, text: impl Into<String>) {
        self.stage().tell(kind, text.into());
    }

    pub(super) fn fail(&self, why: String) {
        let mut stage = self.stage();
        stage.tell(Kind::Trouble, why.clone());
        stage.failures.push(why);
    }

    pub(super) fn enters(&self, name: &str) -> Place {
        let mut stage = self.stage();
        let holds = vec![Holds::Nothing; stage.shards.len()];
        let since = Instant::now();
        stage.members.push(Member {
            name: name.to_owned(),
            state: State::Starting,
            since,
            written: 0,
            holds,
        });
        stage.members.len() - 1
    }

    pub(super) fn set(&self, place: Place, to: State) {
        let mut stage = self.stage();
        let member = &mut stage.members[place];
        (member.state, member.since) = (to, Instant::now());
        if matches!(to, State::Stopped | State::Crashed) {
            member.holds.fill(Holds::Nothing);
        }
    }

    /// A node's thread is done.
    pub(super) fn ended(&self, place: Place, outcome: Result<(), String>) {
        let (name, state) = {
            let stage = self.stage();
            (stage.members[place].name.clone(), stage.members[place].state)
        };
        match (state, outcome) {
            (State::Crashed, _) => {}
            (State::Stopping, Ok(())) => self.set(place, State::Stopped),
            (_, Ok(())) => self.fail(format!("{name} ended by itself")),
            (_, Err(why)) => self.fail(format!("{name} failed: {why}")),
        }
    }

    /// Whether every shard has its record, and one node that stands by for it, and the nodes share them evenly.
    pub(super) fn is_settled(&self) -> bool {
        let stage = self.stage();
        let held = |member: &Member| member.holds.iter().filter(|holds| **holds != Holds::Nothing).count();
        let (least, most) = stage
            .members
            .iter()
            .map(held)
            .fold((usize::MAX, 0), |(least, most), held| (least.min(held), most.max(held)));
        let all: usize = stage.members.iter().map(held).sum();
        all == stage.shards.len()
            && most <= least + 1
            && (0..all).all(|at| stage.members.iter().any(|member| member.holds[at] != Holds::Nothing))
            && stage.shards.iter().all(|shard| shard.is_ready)
    }

    /// The running node that takes rows of the most shards; of several the first.
    pub(super) fn busiest(&self) -> Option<Place> {
        let stage = self.stage();
        let owned = |place: &Place| stage.shards.iter().filter(|shard| shard.owner == Some(*place)).count();
        let running =
            (0..stage.members.len()).rev().filter(|place| stage.members[*place].state == State::Running);
        running.max_by_key(owned)
    }

    // ---- what the nodes tell -------------------------------------------------------------------------

    pub(super) fn ready(&self, shard: ShardId) {
        if let Some(shard) = self.stage().shard(shard) {
            shard.is_ready = true;
        }
    }

    pub(super) fn shard_notice(&self, by: Place, shard: ShardId, notice: &Notice) {
        if let Notice::FirstRow { .. } = notice {
            self.stage().first_row(by, shard);
        }
    }

    /// A node is told to give a shard up.
    pub(super) fn gives_up(&self, by: Place, shard: ShardId) {
        if let Some(seen) = self.stage().shard(shard).filter(|seen| seen.owner == Some(by)) {
            seen.told = Some(Instant::now());
        }
    }

    pub(super) fn sharing_notice(&self, by: Place, notice: &claims::Notice) {
        let mut stage = self.stage();
        match notice {
            claims::Notice::Left { member, why } if *why != claims::Gone::Resigned => {
                let Some(place) = stage.named(member.as_str()) else { return };
                if stage.missed.insert(place) {
                    let text = format!("{}: {member} is taken for dead ({why})", stage.members[by].name);
                    stage.tell(Kind::Noticed, text);
                }
            }
            claims::Notice::Joined { member } => {
                if let Some(place) = stage.named(member.as_str()) {
                    stage.missed.remove(&place);
                }
            }
            claims::Notice::Deaf => {
                let text =
                    format!("{} does not hear itself: it believes nobody dead", stage.members[by].name);
                stage.tell(Kind::Noticed, text);
            }
            _ => {}
        }
    }

    pub(super) fn sharing_status(&self, by: Place, status: &claims::Status<'_>) {
        let mut stage = self.stage();
        for (holds, shard) in stage.members[by].holds.iter_mut().zip(&status.shards) {
            *holds = match (shard.mine, shard.pin) {
                ("free", _) => Holds::Nothing,
                (_, Some(_)) => Holds::Owns,
                (_, None) => Holds::StandsBy,
            };
        }
    }

    // ---- what the servers tell -----------------------------------------------------------------------

    pub(super) fn part(&self, part: &Part) {
        let mut stage = self.stage();
        let rows = part.rows.len() as u64;
        // Processes are numbered from 1 on, in the order in which nodes are started.
        let Some(by) = usize::try_from(part.from.process).ok().and_then(|number| number.checked_sub(1))
        else {
            return;
        };
        let owner = stage.shard(part.insert.shard).and_then(|shard| shard.owner);
        match part.outcome {
            PartOutcome::Stored => {
                stage.stored += rows;
                stage.members[by].written += rows;
            }
            PartOutcome::Repeated if owner != Some(by) => {
                stage.late.inserts += 1;
                stage.late.rows += rows;
                stage.late.frozen += u64::from(stage.members[by].state == State::Frozen);
                let name = &stage.members[by].name;
                let (shard, rows) = (part.insert.shard, count(rows));
                let text = format!("late insert of {name}: shard {shard}, {rows} rows, dropped by its token");
                stage.tell(Kind::Late, text);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use holdfast_core::ports::Attempt;
    use holdfast_core::ports::store::{Insert, Level, Target, Token};
    use holdfast_core::row::TableName;
    use holdfast_core::time::{Instant as Moment, Timestamp};
    use holdfast_sim::jetstream::Client;

    use super::*;

    /// A part of a node's insert that was dropped for its token.
    fn repeated(by: Place) -> Part {
        let process = u32::try_from(by + 1).unwrap();
        let insert = Insert {
            attempt: Attempt(1),
            shard: ShardId(0),
            table: TableName::new("t"),
            target: Target { database: "db".into(), table: "t".into(), level: Level::ExactlyOnce },
            created: Timestamp(0),
            token: Token("a".into()),
            rows: [].into(),
            send_by: Moment::START,
        };
        let from = Client { process, start: 1, link: 1 };
        Part { from, insert, rows: Vec::new(), outcome: PartOutcome::Repeated }
    }

    #[test]
    fn late_is_what_comes_from_a_replaced_owner_and_a_frozen_one_is_told_apart() {
        let scene = Scene::new(1);
        let (first, second) = (scene.enters("node-1"), scene.enters("node-2"));
        let late = |by| {
            scene.part(&repeated(by));
            let late = scene.stage().late;
            (late.inserts, late.frozen)
        };
        scene.stage().first_row(second, ShardId(0));
        assert_eq!(late(second), (0, 0), "it is the owner");
        scene.set(first, State::Crashed);
        assert_eq!(late(first), (1, 0));
        scene.set(first, State::Frozen);
        assert_eq!(late(first), (2, 1));
    }

    #[test]
    fn time_stands_still_until_rows_are_published() {
        let scene = Scene::new(1);
        scene.tell(Kind::Script, "early");
        let stage = scene.stage().clone();
        assert!(!stage.has_begun());
        assert_eq!((stage.elapsed(), stage.happened[0].at), (Duration::ZERO, Duration::ZERO));
        scene.begin();
        assert!(scene.stage().has_begun());
    }
}
