//! `holdfast pause` and `holdfast resume`: every daemon is told.

use std::time::Duration;

use holdfast_core::member::MemberId;
use holdfast_core::record::Session;
use holdfast_core::row::ShardId;
use holdfast_nats::members::{Meeting, Wish};
use holdfast_nats::stream;

use crate::assembly::connect;
use crate::config::Config;
use crate::exit::Exit;
use crate::output;

/// Keeps everybody from the shard `what`, or from the one that the table `what` goes to.
///
/// # Errors
/// If there is no such shard or the stream has no row of such a table, or if no daemon could be told.
pub async fn pause(config: &Config, what: &str) -> Result<(), Exit> {
    tell(config, what, Wish::Pause, "paused").await
}

/// Lets the shard `what` be tried again, or the one that the table `what` goes to.
///
/// # Errors
/// If there is no such shard or the stream has no row of such a table, or if no daemon could be told.
pub async fn resume(config: &Config, what: &str) -> Result<(), Exit> {
    tell(config, what, Wish::Resume, "tried again").await
}

async fn tell(config: &Config, what: &str, wish: fn(ShardId) -> Wish, done: &str) -> Result<(), Exit> {
    let topology = config.topology()?;
    let number = what.parse::<u32>().ok();
    if let Some(shard) = number.filter(|shard| *shard >= topology.shards) {
        return Err(Exit::usage(format!("there is no shard {shard}: they are 0 to {}", topology.shards - 1)));
    }
    let connection = connect(config).await?;
    let shard = if let Some(shard) = number {
        shard
    } else {
        // A table alone could not be stopped for long: its rows would fill what its shard may hold.
        let shown = output::shown(what, 60);
        let shard = stream::shard_of(&connection, &topology.stream, &topology.prefix, what).await;
        let shard = shard.map_err(Exit::error)?.ok_or_else(|| {
            Exit::error(format!("the stream holds no row of a table `{shown}`; name its shard by number"))
        })?;
        output::line(format_args!("{shown} goes to shard {shard}, with other tables perhaps"))?;
        shard.0
    };
    let meeting = Meeting {
        bucket: topology.bucket,
        stream: topology.stream,
        member: MemberId::new("operator").map_err(Exit::error)?,
        session: Session(0),
        probe: Duration::ZERO,
    };
    let answers = meeting.tell_all(&connection, wish(ShardId(shard))).await.map_err(Exit::error)?;
    let mut told = 0;
    for (member, answer) in &answers {
        match answer {
            Ok(()) => {
                told += 1;
                output::line(format_args!("{}: told", output::shown(member, 60)))?;
            }
            Err(why) => {
                output::line(format_args!("{}: {}", output::shown(member, 60), output::shown(why, 200)))?;
            }
        }
    }
    if told == 0 {
        return Err(Exit::error("no daemon is there to be told; is one running on this stream?"));
    }
    output::line(format_args!("shard {shard} is {done}"))
}
