//! What `/status` says: one document, written by the daemon and read by the status page and `holdfast status`.
//!
//! Members and shards are lists side by side, so that a document of one daemon and one of all look alike. Fields
//! may be added; whoever reads must not mind. It names tables as publishers do, that is, as anyone likes: who
//! shows them escapes them. It never holds a secret.

use serde::{Deserialize, Serialize};

/// How everything stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Document {
    /// The stream; of several, the first and the last.
    pub stream: String,
    /// The daemons, as far as the one that was asked knows them.
    pub members: Vec<Member>,
    /// Every shard of the stream.
    pub shards: Vec<Shard>,
    /// Tables that get less than exactly-once: the first hundred of each shard.
    pub weaker_tables: Vec<WeakerTable>,
    /// How many more there are.
    pub weaker_tables_left_off: u64,
}

/// A daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Member {
    /// Its name.
    pub node: String,
    /// A random value of its start, in hexadecimal.
    pub session: String,
    /// Its version.
    pub version: String,
    /// `starting`, `running` or `stopping`.
    pub phase: String,
    /// Whether it takes rows: what `/readyz` says.
    pub ready: bool,
    /// Why not.
    pub causes: Vec<String>,
    /// Since its start.
    pub uptime_seconds: u64,
    /// The shards that it owns.
    pub shards_owned: Vec<u32>,
    /// Whether its configuration is that of the daemon that was asked.
    pub same_configuration: bool,
    /// Rows held, over all its shards.
    pub held_rows: u64,
    /// How many it may hold.
    pub held_rows_limit: u64,
    /// Bytes held.
    pub held_bytes: u64,
    /// How many it may hold.
    pub held_bytes_limit: u64,
}

/// A shard.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Shard {
    /// Its number.
    pub shard: u32,
    /// The stream that holds its rows.
    pub stream: String,
    /// The member that owns it, by its name; none: nobody that is known.
    pub owner: Option<String>,
    /// The member that should have it; none: nobody may.
    pub home: Option<String>,
    /// The other members that stand by for it.
    pub standbys: Vec<String>,
    /// Whether an operator has paused it.
    pub paused: bool,
    /// The phase as a word, at the daemon that was asked.
    pub phase: String,
    /// The pin, while the member has one.
    pub pin: Option<String>,
    /// The tenure's epoch, while there is one.
    pub epoch: Option<u64>,
    /// Since the tenure began.
    pub owned_seconds: Option<u64>,
    /// How long its takeover took, from the pin to the stored fence.
    pub takeover_ms: Option<u64>,
    /// Every row at or below it is done; none: the member never owned the shard.
    pub floor: Option<u64>,
    /// The last row accepted; none: as above.
    pub accepted: Option<u64>,
    /// Rows held.
    pub held_rows: u64,
    /// Bytes held.
    pub held_bytes: u64,
    /// Rows that it may hold.
    pub share_rows: u64,
    /// Bytes that it may hold.
    pub share_bytes: u64,
    /// Rows that wait for delivery, where that is known.
    pub backlog_rows: Option<u64>,
    /// For how long the oldest row waits that is accepted and not written; 0: there is none; none: not known.
    pub oldest_unwritten_seconds: Option<f64>,
    /// Tables at work.
    pub lanes: u64,
    /// Tables that do not get on, and why: the first ten.
    pub troubles: Vec<Trouble>,
    /// How many more there are.
    pub troubles_left_off: u64,
    /// What cannot be done now and is tried again.
    pub waiting: Option<String>,
    /// Why the ledger does not take the record.
    pub ledger_trouble: Option<String>,
    /// Why the shard ended by itself.
    pub failure: Option<String>,
    /// What it did since the daemon's start.
    pub counts: Counts,
}

/// A table that does not get on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trouble {
    /// Its name as its subject gives it.
    pub table: String,
    /// `table`, `store`, `bad-row`, `dead-letters` or `stopped`.
    pub kind: String,
    /// In words.
    pub why: String,
}

/// A table that gets less than exactly-once.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WeakerTable {
    /// Its name as its subject gives it.
    pub table: String,
    /// Where its rows go.
    pub target: String,
    /// `deduplicated` or `at-least-once`.
    pub level: String,
}

/// What a shard did since its process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counts {
    /// Rows accepted.
    pub rows_accepted: u64,
    /// Rows in batches that are in the store.
    pub rows_written: u64,
    /// Rows kept as dead letters.
    pub rows_dead_lettered: u64,
    /// Batches in the store.
    pub batches: u64,
    /// Attempts beyond the first.
    pub retries: u64,
    /// Batches cut in two for a bad row.
    pub splits: u64,
    /// Rows delivered again and dropped.
    pub rows_repeated: u64,
    /// Resets of the consumer.
    pub resets: u64,
    /// Tenures begun.
    pub tenures: u64,
    /// Tenures lost.
    pub tenures_lost: u64,
    /// Tokens that were burned without their rows.
    pub tokens_burned: u64,
    /// Rows of open batches that were removed from the stream, and lost.
    pub rows_removed: u64,
}
