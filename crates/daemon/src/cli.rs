//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use holdfast_sim::Profile;

use crate::log::LogFormat;

/// Moves rows from NATS JetStream into ClickHouse: a table has one writer, keeps its order, and receives
/// every row exactly once.
#[derive(Debug, Parser)]
#[command(name = "holdfast", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "\
Examples:
  holdfast demo                                see it work, with no server
  holdfast topology apply                      create stream, consumers and buckets
  holdfast check                               look whether everything fits
  holdfast run --config holdfast.toml          run the daemon
  holdfast publish --table clicks rows.ndjson  send rows
  holdfast verify --table clicks --receipt R   prove that they arrived
  holdfast status --watch                      how a running daemon stands
  holdfast dead-letters list                   rows that ClickHouse can never take, and why

Exit codes: 0 done, 1 an error or a finding, 2 a wrong command line or configuration,
3 a shard's consumer is gone.")]
pub struct Cli {
    /// Where the configuration comes from.
    #[command(flatten)]
    pub source: ConfigSource,
    /// How log lines are written; what is logged is chosen with `RUST_LOG`.
    #[arg(long, global = true, value_enum, default_value_t, help_heading = "Logging")]
    pub log_format: LogFormat,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Where the configuration comes from: a file, then the environment (`HOLDFAST_NATS__URL=…`), then `--set`.
#[derive(Debug, Args)]
pub struct ConfigSource {
    /// The configuration file [default: holdfast.toml, if it is there].
    #[arg(long, global = true, value_name = "FILE", help_heading = "Configuration")]
    pub config: Option<PathBuf>,
    /// Sets one key, over file and environment: --set nats.url=nats://10.0.0.7:4222 (repeatable).
    #[arg(long, global = true, value_name = "KEY=VALUE", help_heading = "Configuration")]
    pub set: Vec<String>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon. SIGTERM and SIGINT stop it cleanly, a second one at once.
    #[command(after_help = "\
Examples:
  holdfast run
  holdfast run --config /etc/holdfast.toml --log-format json
  HOLDFAST_CLICKHOUSE__PASSWORD_FILE=/run/secrets/ch holdfast run --set topology.start=first")]
    Run,
    /// See it work with no server: rows published while nodes join, stop, crash and freeze; then a verdict. Exit 1 unless
    /// every row is there once, in order.
    #[command(after_help = "\
Examples:
  holdfast demo
  holdfast demo --nodes 5 --shards 16 --tables 64 --rate 50000 --seconds 30
  holdfast demo --json | jq '{published, stored, missing, repeated, out_of_order, ok}'

The daemon's own machines and drivers run on a broker and a store inside this process; each node has a thread of its \
own. Nothing is read or written but standard output, and no port is opened. On a terminal it is drawn as it runs. \
Ctrl-C ends it early, with a verdict on what was published by then; a second one at once.")]
    Demo(Demo),
    /// The stream, consumers and buckets that Holdfast needs.
    #[command(subcommand)]
    Topology(TopologyCommand),
    /// Verify topology, ClickHouse and every configured table; exit 1 if something required is missing.
    #[command(after_help = "\
Examples:
  holdfast check
  holdfast check --json | jq '.findings[] | select(.severity == \"required\")'")]
    Check(Json),
    /// How a running daemon stands: its shards, what it holds, which tables do not get on and why.
    #[command(after_help = "\
Examples:
  holdfast status
  holdfast status --watch
  holdfast status --url http://10.0.0.7:9464 --json")]
    Status(Status),
    /// Send rows to the stream, one JSON object a line, and wait until they are stored.
    #[command(after_help = "\
Examples:
  holdfast publish --table clicks rows.ndjson
  generate-rows | holdfast publish --table clicks -
  holdfast publish --table a --table b --generate 256 --count 100000 --receipt rows.receipt")]
    Publish(Publish),
    /// Prove a table: missing, repeated or out of order; exit 1 unless all is proven and right.
    #[command(after_help = "\
Examples:
  holdfast verify --table clicks --receipt rows.receipt
  holdfast verify --table clicks --json       against what the stream still holds")]
    Verify(Verify),
    /// Rows that can never be stored: what they are and why, sending them again, dropping them.
    #[command(subcommand)]
    DeadLetters(DeadLettersCommand),
    /// What the ledger says is written, and a new start for a shard.
    #[command(subcommand)]
    Ledger(LedgerCommand),
    /// Keep everybody from a shard: its owner hands it over to nobody. It lasts until `resume`, or while one of the
    /// daemons lives that were told.
    #[command(after_help = "\
Examples:
  holdfast pause 3
  holdfast pause clicks                      the shard that this table's rows go to")]
    Pause {
        /// The shard's number, or a table of it.
        #[arg(value_name = "SHARD|TABLE")]
        what: String,
    },
    /// Let a shard go on that was paused, or that has ended by itself and was mended.
    #[command(after_help = "\
Examples:
  holdfast resume 3
  holdfast resume clicks")]
    Resume {
        /// The shard's number, or a table of it.
        #[arg(value_name = "SHARD|TABLE")]
        what: String,
    },
    /// Run the simulator: hostile hours in seconds, invariants checked all the way; exit 1 if one is broken.
    #[command(after_help = "\
Examples:
  holdfast sim --seeds 2000
  holdfast sim --seed 1234 --timeline run.html
  holdfast sim --seed 1234 --shrink")]
    Sim(Sim),
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
}

/// What to do with the topology.
#[derive(Debug, Subcommand)]
pub enum TopologyCommand {
    /// Print it as JSON that the `nats` tool takes.
    Print {
        /// The form of the output.
        #[arg(long, value_enum, default_value_t)]
        format: TopologyFormat,
        /// Print the least permissions of a daemon, a publisher and an operator instead.
        #[arg(long)]
        permissions: bool,
        /// With several streams: print the subject mapping that the publishers' account needs, for nats-server's
        /// configuration.
        #[arg(long, conflicts_with = "permissions")]
        mapping: bool,
    },
    /// Create or update it; nothing is ever deleted.
    Apply {
        /// Also change the number of shards of a stream that holds rows. Safe only when every row is written
        /// and no daemon runs.
        #[arg(long)]
        allow_resharding: bool,
        /// Print what was done as JSON.
        #[command(flatten)]
        json: Json,
    },
}

/// What to show.
#[derive(Debug, Args)]
pub struct Demo {
    /// Nodes to begin with; one more joins.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=16))]
    pub nodes: u32,
    /// Tables.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub tables: u32,
    /// Shards of the stream.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub shards: u32,
    /// Rows published in a second, over all tables.
    #[arg(long, value_name = "ROWS", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(100..=1_000_000))]
    pub rate: u64,
    /// How long rows are published; starting and ending take some seconds more.
    #[arg(long, value_name = "S", default_value_t = 15, value_parser = clap::value_parser!(u64).range(5..=600))]
    pub seconds: u64,
    /// Print the verdict as JSON, and draw nothing.
    #[command(flatten)]
    pub json: Json,
}

/// What to simulate.
#[derive(Debug, Args)]
pub struct Sim {
    /// How many seeds.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub seeds: u64,
    /// The first of them.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub first: u64,
    /// Only this seed, with its trace.
    #[arg(long, value_name = "S", conflicts_with_all = ["seeds", "first"])]
    pub seed: Option<u64>,
    /// How hostile: calm, faults or swarm.
    #[arg(long, default_value = "swarm")]
    pub profile: Profile,
    /// Draw the run of --seed into this file, as a page to open in a browser.
    #[arg(long, value_name = "FILE", requires = "seed")]
    pub timeline: Option<PathBuf>,
    /// Make the run of --seed as small as it can be while it still fails.
    #[arg(long, requires = "seed")]
    pub shrink: bool,
    /// Print what was found as JSON.
    #[command(flatten)]
    pub json: Json,
}

impl Sim {
    /// Whether a mark that was never met is a failure: only a standard campaign is long and hostile enough.
    #[must_use]
    pub fn judges_marks(&self) -> bool {
        self.profile == Profile::Swarm && self.seeds >= 2_000
    }
}

/// Which daemon to ask.
#[derive(Debug, Args)]
pub struct Status {
    /// The daemon's address [default: http:// and the configuration's node.listen].
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// Look again every second, until interrupted.
    #[arg(long, conflicts_with = "json")]
    pub watch: bool,
    /// Print the daemon's document as JSON.
    #[command(flatten)]
    pub json: Json,
}

/// What to do with dead letters.
#[derive(Debug, Subcommand)]
pub enum DeadLettersCommand {
    /// List them, the oldest first.
    #[command(after_help = "\
Examples:
  holdfast dead-letters list
  holdfast dead-letters list --table clicks --limit 10
  holdfast dead-letters list --from 118 --json")]
    List {
        /// Only those of this table, as its subject names it.
        #[arg(long, value_name = "T")]
        table: Option<String>,
        /// Begin with this letter.
        #[arg(long, value_name = "LETTER", default_value_t = 1)]
        from: u64,
        /// At most this many.
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=1_000))]
        limit: u64,
        /// Print them as JSON.
        #[command(flatten)]
        json: Json,
    },
    /// Show one: where it comes from, why it is here, its headers and its payload.
    #[command(after_help = "\
Examples:
  holdfast dead-letters show 17
  holdfast dead-letters show 17 --payload | jq .")]
    Show {
        /// The letter, as `list` numbers it.
        #[arg(value_name = "LETTER")]
        position: u64,
        /// Print the payload only, byte for byte.
        #[arg(long, conflicts_with = "json")]
        payload: bool,
        /// Print it as JSON; the payload as text if it is text, and in base64.
        #[command(flatten)]
        json: Json,
    },
    /// Put them through the stream again, as new rows at its end, and remove them from the dead letters.
    #[command(after_help = "\
Examples:
  holdfast dead-letters replay 17
  holdfast dead-letters replay --table clicks --yes
  holdfast dead-letters replay 17 --into clicks_v2

What can still not be stored becomes a dead letter again, under a new number. If this command is killed \
between storing a row and removing its letter, run it again within two minutes: the row is stored once. \
A receipt of the row's first place no longer fits it.")]
    Replay {
        /// Which.
        #[command(flatten)]
        selection: Selection,
        /// Into this table, instead of where they came from.
        #[arg(long, value_name = "T")]
        into: Option<String>,
        /// Print what was done as JSON.
        #[command(flatten)]
        json: Json,
    },
    /// Remove them for good.
    #[command(after_help = "\
Examples:
  holdfast dead-letters drop 17 18
  holdfast dead-letters drop --table clicks --limit 100 --yes")]
    Drop {
        /// Which.
        #[command(flatten)]
        selection: Selection,
        /// Print what was done as JSON.
        #[command(flatten)]
        json: Json,
    },
}

/// Which dead letters.
#[derive(Debug, Args)]
pub struct Selection {
    /// The letters, as `list` numbers them.
    #[arg(value_name = "LETTER", required_unless_present_any = ["table", "all"])]
    pub position: Vec<u64>,
    /// All of this table, as its subject names it.
    #[arg(long, value_name = "T", conflicts_with = "position")]
    pub table: Option<String>,
    /// All of every table.
    #[arg(long, conflicts_with_all = ["position", "table"])]
    pub all: bool,
    /// With --table or --all: at most this many, the oldest first.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: u64,
    /// Do not ask.
    #[arg(long)]
    pub yes: bool,
}

/// What to do with the ledger.
#[derive(Debug, Subcommand)]
pub enum LedgerCommand {
    /// Show the records: what is done, and which batches may have been sent.
    Show {
        /// Only this shard.
        #[arg(long, value_name = "N")]
        shard: Option<u32>,
        /// Print them as JSON.
        #[command(flatten)]
        json: Json,
    },
    /// Give a shard a new start, after its stream lost rows and used their sequences again.
    #[command(after_help = "\
Examples:
  holdfast ledger rebase --shard 3 --to seq:1048576
  holdfast ledger rebase --shard 3 --to first --yes")]
    Rebase {
        /// The shard.
        #[arg(long, value_name = "N")]
        shard: u32,
        /// The first row that it takes from then on: first, new or seq:N.
        #[arg(long, value_name = "START")]
        to: String,
        /// Do not ask.
        #[arg(long)]
        yes: bool,
    },
}

/// The form of `topology print`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TopologyFormat {
    /// For `nats stream add --config` and the like.
    #[default]
    Json,
}

/// Whether to print for programs.
#[derive(Clone, Copy, Debug, Args)]
pub struct Json {
    /// Print one JSON document on standard output, and nothing else there.
    #[arg(long)]
    pub json: bool,
}

/// What to publish.
#[derive(Debug, Args)]
pub struct Publish {
    /// The table; with --generate it can be given several times, and rows go to each in turn.
    #[arg(long, required = true, value_name = "T")]
    pub table: Vec<String>,
    /// A file of JSON lines; - for standard input.
    #[arg(value_name = "FILE", required_unless_present = "generate", conflicts_with = "generate")]
    pub file: Option<PathBuf>,
    /// Make rows of this many bytes instead, each with a counter `n` of its table.
    #[arg(long, value_name = "BYTES", requires = "count")]
    pub generate: Option<usize>,
    /// Stop after this many rows, over all tables.
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// The first value of the counter `n`.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "generate")]
    pub first: u64,
    /// Send at most this many rows a second.
    #[arg(long, value_name = "ROWS")]
    pub rate: Option<u64>,
    /// Nobody else publishes to the stream: the server refuses a row whose predecessor it has not stored, so
    /// that the order survives a connection that breaks. Not for streams with replicas.
    #[arg(long)]
    pub sole_publisher: bool,
    /// Append table and sequence of every stored row to this file, for `holdfast verify`.
    #[arg(long, value_name = "FILE")]
    pub receipt: Option<PathBuf>,
    /// Print what was sent as JSON.
    #[command(flatten)]
    pub json: Json,
}

/// What to verify.
#[derive(Debug, Args)]
pub struct Verify {
    /// The table, as its subject names it.
    #[arg(long, value_name = "T")]
    pub table: String,
    /// Compare with the rows of this receipt, instead of those that the stream still holds.
    #[arg(long, value_name = "FILE")]
    pub receipt: Option<PathBuf>,
    /// Print the verdict as JSON.
    #[command(flatten)]
    pub json: Json,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn dead_letters_are_chosen_by_number_or_by_table() {
        let parse = |line: &str| {
            Cli::try_parse_from(format!("holdfast dead-letters {line}").split(' ')).map(|_| ()).is_ok()
        };
        for good in
            ["drop 1 2", "drop --table t", "replay --all --yes", "replay 4 --into t", "show 1 --payload"]
        {
            assert!(parse(good), "{good}");
        }
        for bad in [
            "drop",
            "drop 1 --all",
            "drop --all --table t",
            "list --limit 0",
            "show",
            "show 1 --payload --json",
        ] {
            assert!(!parse(bad), "{bad}");
        }
    }

    #[test]
    fn the_command_line_contradicts_itself_nowhere() {
        Cli::command().debug_assert();
    }
}
