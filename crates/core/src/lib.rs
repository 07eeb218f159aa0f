//! Holdfast's core: the state machines that move rows of one shard of a stream into the tables of a store,
//! in order and exactly once, and the ports through which they act.
//!
//! Nothing here does I/O, reads a clock or draws a random number. A machine is handed events with the
//! instant at which they happen and answers with actions; the same events give the same actions.

pub mod action;
mod ask;
pub mod assign;
pub mod batch;
pub mod budget;
pub mod claims;
mod commit;
mod destination;
pub mod fence;
pub mod format;
pub mod intake;
pub mod lane;
mod letter;
mod look;
pub mod member;
pub mod mix;
pub mod notice;
mod open;
pub mod ports;
mod pull;
pub mod record;
mod release;
pub mod row;
pub mod rule;
pub mod shard;
mod standby;
pub mod state;
mod tenure;
pub mod time;
pub mod trim;
