//! `holdfast topology`: print or create what Holdfast needs on the NATS server.

use holdfast_nats::topology::Resharding;

use crate::assembly::connect;
use crate::cli::{TopologyCommand, TopologyFormat};
use crate::config::Config;
use crate::exit::Exit;
use crate::output;

/// Prints or applies the topology.
///
/// # Errors
/// What the server refused, or that it could not be asked.
pub async fn topology(config: &Config, command: &TopologyCommand) -> Result<(), Exit> {
    let topology = config.topology()?;
    match command {
        TopologyCommand::Print { permissions: true, .. } => output::json(&topology.permissions()),
        TopologyCommand::Print { mapping: true, .. } => match topology.mapping_config() {
            Some(mapping) => output::text(&mapping),
            None => Err(Exit::usage(
                "--mapping: with topology.streams = 1 the stream itself does it; the account needs no mapping",
            )),
        },
        TopologyCommand::Print { format: TopologyFormat::Json, .. } => output::json(&topology.document()),
        TopologyCommand::Apply { allow_resharding, json } => {
            let connection = connect(config).await?;
            let resharding = if *allow_resharding { Resharding::Allow } else { Resharding::Refuse };
            let done = topology.apply(&connection, resharding).await.map_err(Exit::error)?;
            if json.json {
                return output::json(&done);
            }
            let rows = done
                .iter()
                .map(|done| [done.object.clone(), done.action.to_string(), done.changes.join("; ")]);
            output::table(["OBJECT", "DONE", "CHANGES"], rows)
        }
    }
}
