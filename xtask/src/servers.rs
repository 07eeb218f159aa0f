//! `cargo xtask servers`: where the servers are, and both of them in the foreground.

use std::path::PathBuf;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use anyhow::{Result, bail};
use holdfast_testbed::{ClickHouse, NatsServer, build, fetch};

use crate::interrupt;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Run both in the foreground until interrupted
    #[arg(long)]
    start: bool,
    /// Where they keep their data; otherwise in folders that go with them
    #[arg(long, value_name = "FOLDER", requires = "start")]
    data: Option<PathBuf>,
    /// nats-server's port; otherwise a free one
    #[arg(long, value_name = "PORT", requires = "start")]
    nats_port: Option<u16>,
    /// ClickHouse's port; otherwise a free one
    #[arg(long, value_name = "PORT", requires = "start")]
    clickhouse_port: Option<u16>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let interrupted = interrupt::watch()?;
    let nats = fetch::nats_server()?;
    let clickhouse = fetch::libchdb()?;
    println!("nats-server  {} (from {})", nats.path.display(), nats.whence);
    println!("ClickHouse   {} (from {})", clickhouse.path.display(), clickhouse.whence);
    println!("launcher     {}", build::chserve_binary()?.display());
    if !options.start {
        return Ok(());
    }

    let mut nats = NatsServer::builder();
    let mut clickhouse = ClickHouse::builder();
    if let Some(folder) = &options.data {
        nats = nats.folder(folder.join("nats"));
        clickhouse = clickhouse.folder(folder.join("clickhouse"));
    }
    if let Some(port) = options.nats_port {
        nats = nats.port(port);
    }
    if let Some(port) = options.clickhouse_port {
        clickhouse = clickhouse.port(port);
    }
    let mut nats = nats.start()?;
    let mut clickhouse = clickhouse.start()?;
    println!();
    println!("both run until Ctrl-C; for holdfast in another terminal:");
    println!("  export HOLDFAST_NATS__URL={}", nats.url());
    println!("  export HOLDFAST_CLICKHOUSE__URL={}", clickhouse.url());
    println!("logs:");
    println!("  {}", nats.log_path().display());
    println!("  {}", clickhouse.log_path().display());
    loop {
        match interrupted.recv_timeout(Duration::from_millis(500)) {
            Ok(()) => break,
            Err(RecvTimeoutError::Timeout) => {
                nats.must_run()?;
                clickhouse.must_run()?;
            }
            Err(RecvTimeoutError::Disconnected) => bail!("cannot watch for Ctrl-C any more"),
        }
    }
    clickhouse.stop()?;
    nats.stop()?;
    println!("stopped both");
    Ok(())
}
