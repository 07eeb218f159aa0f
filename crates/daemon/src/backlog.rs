//! Looks now and then at what waits in the stream, for people; and at shards that nobody has, for the sharing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_core::row::ShardId;
use holdfast_nats::backlog::backlog;
use holdfast_nats::{Connection, topology::Topology};
use tokio::sync::mpsc::UnboundedSender;
use tracing::debug;

use crate::process::Process;
use crate::sharing::Request;

/// How often: a request for each shard that is owned here or nobody's.
const EVERY: Duration = Duration::from_secs(10);

/// Looks for ever.
pub(crate) async fn watch(
    control: Connection,
    topology: Topology,
    process: Arc<Process>,
    requests: UnboundedSender<Request>,
) {
    // Shards that nobody has: how far each was delivered, and since when.
    let mut still = BTreeMap::<ShardId, (u64, Instant)>::new();
    loop {
        tokio::time::sleep(EVERY).await;
        let (ours, nobodys) = process.to_look_at();
        still.retain(|shard, _| nobodys.contains(shard));
        for shard in (0..topology.shards).map(ShardId) {
            let is_nobodys = nobodys.contains(&shard);
            if !is_nobodys && !ours.contains(&shard) {
                process.with(shard, |view| view.backlog_rows = None);
                continue;
            }
            let asked = Instant::now();
            let waits =
                match backlog(&control, &topology.streams().of(shard), &topology.consumer(shard)).await {
                    Ok(waits) => waits,
                    Err(why) => {
                        debug!(shard = shard.0, "cannot see what waits now ({why})");
                        process.with(shard, |view| view.backlog_rows = None);
                        still.remove(&shard);
                        continue;
                    }
                };
            process.with(shard, |view| view.backlog_rows = Some(waits.rows));
            if is_nobodys && waits.rows > 0 {
                let (delivered, since) = still.entry(shard).or_insert((waits.delivered, asked));
                if *delivered != waits.delivered {
                    (*delivered, *since) = (waits.delivered, asked);
                }
                // Somebody who is not among the members may have it for as long as a pin lives.
                if asked.duration_since(*since) >= topology.pinned_ttl {
                    // A process that is ending claims nothing.
                    let _ = requests.send(Request::Unowned(shard));
                }
            } else {
                still.remove(&shard);
            }
        }
    }
}
