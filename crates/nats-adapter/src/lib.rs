//! Holdfast's ports on NATS JetStream.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`connect`] | a connection: credentials, TLS, the server's version, disruptions |
//! | [`delivery`] | rows of one shard's pinned pull consumer: the delivery port |
//! | [`ledger`] | records by compare-and-set in a key-value bucket: the ledger port |
//! | [`dead_letters`] | rows that can never be stored, kept with the reason: the dead letters port |
//! | [`letters`] | reading them, putting them through the stream again, dropping them |
//! | [`backlog`] | what waits for a shard's consumer |
//! | [`retention`] | trimming written rows: the retention port |
//! | [`topology`] | the stream, consumers and buckets that Holdfast needs: print, apply, check |
//! | [`stream`] | the stream as it is, and the rows that it holds |
//! | [`publish`] | rows into the stream, with an acknowledgement each |
//! | [`subject`], [`ack_subject`], [`status`], [`errors`] | how all of that is written on the wire |

#![forbid(unsafe_code)]

pub mod ack_subject;
mod api;
pub mod backlog;
pub mod connect;
pub mod dead_letters;
pub mod delivery;
pub mod errors;
pub mod headers;
pub mod ledger;
pub mod letters;
pub mod members;
pub mod publish;
mod pulls;
mod request;
pub mod retention;
pub mod status;
pub mod stream;
pub mod subject;
pub mod topology;
mod unreceivable;

pub use connect::Connection;
