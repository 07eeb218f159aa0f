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
//! | [`jetstream`] | JetStream in its own words: what the judge reads, and rows that `holdfast publish` would not send |
//! | [`proxy`], [`frame`] | what stands between a client and a server |
//! | [`http_proxy`] | what stands between Holdfast and ClickHouse, request by request |
//! | [`rows`], [`dead_letters`], [`verdict`] | tables, what was parked, and what is missing, repeated or out of order |
//! | [`token`] | the tokens that inserts carry |
//! | [`fleet`] | several daemons at once, and what their logs say of when what happened |
//! | [`load`] | rows published at an even rate, each with its time |
//! | [`rig`] | all of it together: servers, tables, topology, load, daemons |
//! | [`drills`] | whole-system drills, with figures |
//! | [`wait`] | waiting for a condition, with a deadline |
//!
//! Nothing here leaves a process behind, also when the test that started it is killed: see [`guarded`].

pub mod build;
pub mod clickhouse;
pub mod daemon;
pub mod dead_letters;
pub mod drills;
pub mod error;
pub mod fetch;
pub mod fleet;
pub mod frame;
pub mod guarded;
pub mod http_proxy;
pub mod jetstream;
pub mod load;
pub mod nats;
mod port;
pub mod proxy;
pub mod rig;
pub mod rows;
pub mod token;
pub mod verdict;
pub mod wait;

pub use clickhouse::{ClickHouse, Sql};
pub use daemon::Daemon;
pub use error::{Error, Result};
pub use fleet::{Fleet, Member};
pub use http_proxy::HttpProxy;
pub use jetstream::JetStream;
pub use load::Load;
pub use nats::{NatsCluster, NatsServer};
pub use proxy::Proxy;
pub use rig::Rig;
pub use token::Token;
pub use verdict::Verdict;
