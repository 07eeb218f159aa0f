//! What Holdfast's whole-system tests and drills stand on: real servers that can be killed and restarted, a
//! proxy that cuts, delays and drops what goes through it, and verdicts on what arrived.
//!
//! | module | holds |
//! | --- | --- |
//! | [`fetch`] | where nats-server and ClickHouse come from: the PATH, the environment or the cache |
//! | [`build`] | this workspace's own binaries, built on demand |
//! | [`guarded`] | a process that can be signalled and never outlives us |
//! | [`nats`], [`clickhouse`] | the two servers |
//! | [`daemon`] | `holdfast` itself |
//! | [`proxy`], [`frame`] | what stands between a client and a server |
//! | [`rows`], [`verdict`] | tables, and what is missing, repeated or out of order in them |
//! | [`rig`] | all of it together: servers, tables, topology, load, daemons |
//! | [`drills`] | whole-system drills, with figures |
//! | [`wait`] | waiting for a condition, with a deadline |
//!
//! Nothing here leaves a process behind, also when the test that started it is killed: see [`guarded`].

pub mod build;
pub mod clickhouse;
pub mod daemon;
pub mod drills;
pub mod error;
pub mod fetch;
pub mod frame;
pub mod guarded;
pub mod nats;
mod port;
pub mod proxy;
pub mod rig;
pub mod rows;
pub mod verdict;
pub mod wait;

pub use clickhouse::{ClickHouse, Sql};
pub use daemon::Daemon;
pub use error::{Error, Result};
pub use nats::{NatsCluster, NatsServer};
pub use proxy::Proxy;
pub use rig::Rig;
pub use verdict::Verdict;
