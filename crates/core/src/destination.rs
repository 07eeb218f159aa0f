//! Where a lane's rows go, and what its table allows.

use std::time::Duration;

use crate::ask::{Ask, backoff};
use crate::ports::Attempt;
use crate::ports::store::{DescribeError, Description, Target};
use crate::time::Instant;

/// The longest wait between two tries of one lane: bounds the attempts a minute.
pub(crate) const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// A table is described again after this long: its window can be taken away, its engine changed.
const DESCRIBED_FOR: Duration = Duration::from_mins(1);

/// Where a lane's rows go.
#[derive(Clone, Debug)]
pub(crate) struct Destination {
    /// For the next batch; none while it is not known.
    target: Option<Target>,
    /// What people were told last.
    told: Option<Target>,
    /// To be described when due; under way.
    pub(crate) ask: Ask,
    tries: u32,
    /// Whether this tenure has looked for rows in the table that the record does not know of.
    pub(crate) examined: bool,
    /// The table does not exist, in the store's words; and when the question was asked to which that is the answer.
    missing: Option<(Instant, String)>,
}

/// What a description changed.
#[derive(Debug)]
pub(crate) enum Described {
    /// Not the answer that was waited for, or nothing to tell.
    Nothing,
    /// Rows can go there; told apart from what was known before.
    Known { news: Option<Target>, holds: Option<crate::row::Seq> },
    /// It cannot take rows.
    Refused(DescribeError),
}

impl Destination {
    /// `target`: what is known from before, by this very tenure.
    pub(crate) fn new(target: Option<Target>, now: Instant) -> Self {
        let ask = Ask::at(if target.is_some() { now + DESCRIBED_FOR } else { now });
        let examined = target.is_some();
        Self { told: target.clone(), target, ask, tries: 0, examined, missing: None }
    }

    pub(crate) fn target(&self) -> Option<&Target> {
        self.target.as_ref()
    }

    /// Why the table is known to be missing at `since` or later, if it is: what was known of it before a row came
    /// says nothing about that row.
    pub(crate) fn missing(&self, since: Instant) -> Option<&str> {
        self.missing.as_ref().filter(|(asked_at, _)| *asked_at >= since).map(|(_, why)| why.as_str())
    }

    /// The table may be another one by now (made anew, a column added): the next batch asks.
    pub(crate) fn doubt(&mut self, now: Instant) {
        if self.target.take().is_some() {
            self.ask = Ask::at(now);
        }
    }

    /// Takes the answer to a description.
    pub(crate) fn on_described(
        &mut self,
        now: Instant,
        attempt: Attempt,
        outcome: Result<Description, DescribeError>,
    ) -> Described {
        if !self.ask.awaits(attempt) {
            return Described::Nothing;
        }
        let asked_at = self.ask.asked_at();
        match outcome {
            Ok(Description { target, holds }) => {
                self.tries = 0;
                self.missing = None;
                self.examined = true;
                self.ask.again(now, DESCRIBED_FOR);
                let news = (self.told.as_ref() != Some(&target)).then(|| target.clone());
                self.told = Some(target.clone());
                self.target = Some(target);
                Described::Known { news, holds }
            }
            Err(error) => {
                self.tries += 1;
                self.ask.again(now, backoff(self.tries, MAX_BACKOFF, attempt.0));
                match &error {
                    // What was known a minute ago is good enough until somebody can be asked again.
                    DescribeError::Failed(_) if self.target.is_some() => return Described::Nothing,
                    DescribeError::Failed(_) => {}
                    DescribeError::Missing(refusal) => {
                        self.target = None;
                        self.missing = Some((asked_at, refusal.to_string()));
                    }
                    DescribeError::Unfit(_) => self.target = None,
                }
                Described::Refused(error)
            }
        }
    }
}
