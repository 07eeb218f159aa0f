//! Holdfast's store port on ClickHouse.
//!
//! [`Store`] implements [`holdfast_core::ports::store::Port`] over ClickHouse's HTTP interface, with the official
//! `clickhouse` crate. What it promises rests on a few habits, each with a file of its own:
//!
//! - **One batch is one block** of one insert with one deduplication token, whatever the user's profile says:
//!   every setting that could split, delay, drop or merge it is sent with it (`settings`).
//! - **The body is complete before anything is sent** ([`body`]): a slow producer cannot stall an insert, and a
//!   broken connection leaves a body that ClickHouse throws away.
//! - **A payload is exactly one row, or it is refused on delivery** ([`mod@screen`]).
//! - **Nothing counts as refused unless it certainly was** ([`error`]): everything else is in doubt, and read back.
//! - **Only ClickHouse can say that it stored something**: an answer without its signature is in doubt (`witness`).
//! - **A bad row is named**: by ClickHouse, or else found by questions that write nothing (`probe`).
//! - **What a table can promise is read from the table** ([`describe`]), never assumed.
//! - **Every wait has an end**: for a turn, for a connection, for each piece of a body, for the answer.

#![forbid(unsafe_code)]

pub mod body;
pub mod config;
mod connection;
pub mod describe;
mod engine;
pub mod error;
pub mod horizon;
pub mod identifier;
mod probe;
pub mod screen;
mod settings;
pub mod store;
mod underway;
mod witness;

pub use config::{Compression, Config, ConfigError, Demand, Secret, TableConfig, UnknownFields};
pub use connection::{PingError, Server};
pub use describe::{Finding, Need, TableReport};
pub use error::{Class, classify};
pub use horizon::Horizon;
pub use screen::screen;
pub use store::{Clock, Store};
