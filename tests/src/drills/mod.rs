//! Whole-system drills: real daemons, real servers, real signals, with figures.

mod random_kills;

use std::collections::BTreeMap;

use crate::error::Result;
use crate::verdict::Verdict;

/// A drill's own figures, by name.
pub type Figures = BTreeMap<&'static str, f64>;

/// How a drill ended.
#[derive(Debug, Default)]
pub struct Outcome {
    /// What plain SQL says of the rows, over all rounds.
    pub verdict: Verdict,
    /// What else was not as it should be.
    pub faults: Vec<String>,
    /// Its own figures.
    pub figures: Figures,
}

/// Does a drill so many times; tells a line now and then.
pub type Run = fn(u32, &mut dyn FnMut(&str)) -> Result<Outcome>;

/// A drill.
#[derive(Debug)]
pub struct Drill {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it does.
    pub about: &'static str,
    /// How often it is done unless told otherwise.
    pub rounds: u32,
    /// Does it.
    pub run: Run,
}

/// All of them.
pub const ALL: &[Drill] = &[Drill {
    name: "random-kills",
    about: "SIGKILL to daemon, nats-server and ClickHouse at random moments of a load, and restarts",
    rounds: 3,
    run: random_kills::run,
}];
