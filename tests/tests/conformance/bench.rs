//! What a script is run against: the ports of clients, and an operator who does things to the servers.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use holdfast_core::member::MemberId;
use holdfast_core::ports::{dead_letters, delivery, ledger, members, retention, store};
use holdfast_core::row::{Seq, TableName};

use crate::script::Setup;

/// How long a probe waits for its answer.
pub(crate) const PROBE: Duration = Duration::from_millis(700);

/// What goes wrong with the servers rather than with an answer.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// One client's ports, on a connection of its own.
#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) delivery: Arc<dyn delivery::Port>,
    pub(crate) retention: Arc<dyn retention::Port>,
    pub(crate) ledger: Arc<dyn ledger::Port>,
    pub(crate) letters: Arc<dyn dead_letters::Port>,
    pub(crate) store: Arc<dyn store::Port>,
}

/// A stream with one shard, a bucket, a stream of dead letters and the tables of one script.
#[async_trait]
pub(crate) trait Bench: Send + Sync {
    /// Connects a client.
    async fn connect(&self, name: &str, sink: delivery::Sink) -> Result<Client>;

    /// Has a client watch and answer as a member, on `runtime`.
    async fn join(
        &self,
        client: &str,
        member: MemberId,
        sink: members::Sink,
        runtime: &tokio::runtime::Handle,
    ) -> Result<Arc<dyn members::Port>>;

    /// Breaks a client's connections for ever; returns when the server knows. Its ports are dropped before.
    async fn kill(&self, client: &str) -> Result<()>;

    /// Publishes rows for a table, each of at least `size` bytes; the last one's sequence.
    async fn publish(&self, rows: u64, size: usize) -> Result<Seq>;

    /// Removes rows, whoever may need them.
    async fn remove(&self, rows: &[u64]) -> Result<()>;

    async fn delete_consumer(&self) -> Result<()>;

    async fn create_consumer(&self) -> Result<()>;

    /// Deletes the stream and makes another of the same name.
    async fn make_stream_anew(&self) -> Result<()>;

    /// Rows that wait to be acknowledged.
    async fn unacked(&self) -> Result<u64>;

    /// Dead letters that are kept.
    async fn letters(&self) -> Result<u64>;

    async fn delete_letters(&self) -> Result<()>;

    /// Kills the broker and starts it again; returns when every client is connected again.
    async fn restart_broker(&self) -> Result<()>;

    /// Kills the broker and starts it again with the stream as it was when its state was kept.
    async fn lose_tail(&self) -> Result<()>;

    /// Stops the broker, keeps the stream's state, and starts it again.
    async fn keep_state(&self) -> Result<()>;

    /// The consumer's leader steps down; returns when there is another.
    async fn move_leader(&self) -> Result<()>;

    /// The dead letters' stream takes no more.
    async fn fill_letters(&self) -> Result<()>;

    /// The name under which the script's table is known to the ports.
    fn table(&self, name: &str) -> TableName;

    /// Where a table's rows go.
    fn target(&self, name: &str, level: store::Level) -> store::Target;

    /// The row of a number.
    fn payload(&self, number: u64) -> Bytes;

    /// From now on the row of this number does not fit its table.
    fn spoil(&self, number: u64);

    /// Somebody alters the table so that every row fits.
    async fn mend(&self, table: &str) -> Result<()>;

    /// The store's next insert into the table fails between the deduplication log's entry and the commit of the
    /// part for this partition.
    async fn burn(&self, table: &str, partition: Option<u64>) -> Result<()>;

    /// From now on inserts into the table take about a second before anything is written.
    async fn slow(&self, table: &str) -> Result<()>;

    /// Inserts into the table that the store has received and not answered.
    async fn inserting(&self, table: &str) -> Result<u64>;

    /// The numbers of a table's rows, in the order in which they were written.
    async fn contents(&self, table: &str) -> Result<Vec<u64>>;

    /// Kills the store and starts it again.
    async fn restart_store(&self) -> Result<()>;
}

/// What stands between a script's clients and their ports: nothing, or a lie.
pub(crate) trait Between: Send + Sync {
    /// What the models are made like.
    fn setup(&self, setup: &Setup) -> Setup {
        setup.clone()
    }

    /// Whether the operator does what he says that he does.
    fn operates(&self, _words: &[&str]) -> bool {
        true
    }

    fn sink(&self, sink: delivery::Sink) -> delivery::Sink {
        sink
    }

    fn client(&self, client: Client) -> Client {
        client
    }

    fn member(&self, member: Arc<dyn members::Port>) -> Arc<dyn members::Port> {
        member
    }

    fn member_sink(&self, sink: members::Sink) -> members::Sink {
        sink
    }
}

/// The answers as they are.
pub(crate) struct Honest;

impl Between for Honest {}
