//! What a look at stream and consumer is good for.

use std::time::Duration;

use crate::action::Actions;
use crate::ask::Ask;
use crate::notice::{Notice, ShardFailure};
use crate::ports::delivery::{InspectError, Inspection};
use crate::rule::{Rule, safeguard};
use crate::time::Instant;

/// How long to wait before a question that failed is asked again.
pub(crate) const RETRY: Duration = Duration::from_millis(200);

/// What was seen, if it can be gone on with; none if the look failed and is taken again. A consumer that is
/// gone, or does not fit, ends the shard.
pub(crate) fn usable(
    now: Instant,
    ask: &mut Ask,
    outcome: Result<Inspection, InspectError>,
    out: &mut Actions,
) -> Result<Option<Inspection>, ShardFailure> {
    match outcome {
        Ok(Inspection { unfit: Some(why), .. }) | Err(InspectError::Gone(why))
            if safeguard(Rule::GoneConsumerEndsShard) =>
        {
            Err(ShardFailure::ConsumerGone(why))
        }
        Ok(seen) => Ok(Some(seen)),
        Err(error) => {
            let why = match error {
                InspectError::Failed(failure) => failure.to_string(),
                InspectError::Gone(why) => why,
            };
            ask.again(now, RETRY);
            out.notice(Notice::Waiting { what: "look at the consumer", why });
            Ok(None)
        }
    }
}
