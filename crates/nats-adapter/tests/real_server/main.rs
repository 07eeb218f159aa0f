//! The adapter against a real nats-server.
//!
//! The server is the binary that `HOLDFAST_NATS_SERVER` names, else `nats-server` on the `PATH` or below
//! `.cache` in the workspace. Each test starts one of its own in a directory of its own.

mod acks;
mod dead_letters;
mod delivery;
mod ledger;
mod publish;
mod server;
mod several_streams;
mod topology;
mod unreceivable;
