//! Holdfast's core: the state machines that move rows of one shard of a stream into the tables of a store,
//! in order and exactly once, and the ports through which they act.
//!
//! Nothing here does I/O, reads a clock or draws a random number. A machine is handed events with the
//! instant at which they happen and answers with actions; the same events give the same actions.

pub mod ports;
pub mod row;
pub mod time;
