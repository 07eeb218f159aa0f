//! A simulator for Holdfast's core: models of JetStream and ClickHouse, hostile schedules, invariants.
//!
//! A run is one thread, virtual time and one seeded source of randomness. Several processes share the shards of a
//! stream out, as daemons do; or, in some seeds, each stands by for all of them, so that pins, fences, late
//! writers and takeovers are contended all the time. What can go wrong does, at rates drawn from the seed; then it
//! stops, and everything must come right within a stated time. The same seed gives the same trace, byte for byte,
//! on every machine.

mod agenda;
mod any_claims;
mod any_events;
pub mod bucket;
mod campaign;
mod chance;
mod choices;
pub mod clickhouse;
#[cfg(test)]
mod cost;
#[cfg(feature = "embedded")]
pub mod embedded;
mod fault;
mod invariants;
pub mod jetstream;
pub mod letters;
mod marks;
pub mod members;
#[cfg(feature = "mutants")]
mod mutants;
mod process;
mod scenario;
mod shrink;
mod timeline;
mod trace;
mod truth;
mod view;
mod world;

pub use any_claims::{Settled, any_claims};
pub use any_events::{Reached, any_events};
pub use campaign::{
    Failing, Options, Report, Shrunk, Trace, any_failing, any_schedule, campaign, replay, shrunk,
    shrunk_schedule,
};
pub use invariants::{NAMES as INVARIANTS, Violation};
pub use marks::{Mark, Marks};
#[cfg(feature = "mutants")]
pub use mutants::{Mutant, mutants, names as mutant_names};
pub use scenario::Profile;
pub use timeline::timeline;
pub use trace::Happening;
