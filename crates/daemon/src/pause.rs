//! `holdfast pause` and `holdfast resume`: every daemon is told.

use std::time::Duration;

use holdfast_core::member::MemberId;
use holdfast_core::record::Session;
use holdfast_core::row::ShardId;
use holdfast_nats::members::{Meeting, Wish};

use crate::assembly::connect;
use crate::config::Config;
use crate::exit::Exit;

/// Keeps everybody from `shard`.
///
/// # Errors
/// If there is no such shard, or no daemon could be told.
pub async fn pause(config: &Config, shard: u32) -> Result<(), Exit> {
    tell(config, shard, Wish::Pause(ShardId(shard)), "paused").await
}

/// Lets `shard` be tried again.
///
/// # Errors
/// If there is no such shard, or no daemon could be told.
pub async fn resume(config: &Config, shard: u32) -> Result<(), Exit> {
    tell(config, shard, Wish::Resume(ShardId(shard)), "tried again").await
}

async fn tell(config: &Config, shard: u32, wish: Wish, done: &str) -> Result<(), Exit> {
    let topology = config.topology()?;
    if shard >= topology.shards {
        return Err(Exit::usage(format!("there is no shard {shard}: they are 0 to {}", topology.shards - 1)));
    }
    let connection = connect(config).await?;
    let meeting = Meeting {
        bucket: topology.bucket,
        stream: topology.stream,
        member: MemberId::new("operator").map_err(Exit::error)?,
        session: Session(0),
        probe: Duration::ZERO,
    };
    let answers = meeting.tell_all(&connection, wish).await.map_err(Exit::error)?;
    let mut told = 0;
    for (member, answer) in &answers {
        match answer {
            Ok(()) => {
                told += 1;
                println!("{}: told", crate::output::shown(member, 60));
            }
            Err(why) => println!("{}: {}", crate::output::shown(member, 60), crate::output::shown(why, 200)),
        }
    }
    if told == 0 {
        return Err(Exit::error("no daemon is there to be told; is one running on this stream?"));
    }
    println!("shard {shard} is {done}");
    Ok(())
}
