//! The rules that keep rows whole, by name.
//!
//! Code that exists only to keep a rule asks [`safeguard`]. Everywhere but in the simulator's own builds
//! that is `true` at compile time; there, a rule can be switched off to show that the proof would notice.
//! So this list is at once the list of rules, of mutants and of what the documentation explains.

macro_rules! rules {
    ($($(#[doc = $doc:literal])+ $name:ident = $key:literal,)+) => {
        /// A rule of the protocol that some line of code exists to keep.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Rule { $($(#[doc = $doc])+ $name,)+ }

        impl Rule {
            /// Every rule, in the order of this list.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// The rule's name on the command line.
            #[must_use]
            pub const fn key(self) -> &'static str {
                match self { $(Self::$name => $key,)+ }
            }

            /// What the rule says.
            #[must_use]
            pub const fn summary(self) -> &'static str {
                match self { $(Self::$name => concat!($($doc,)+).trim_ascii_start(),)+ }
            }
        }
    };
}

rules! {
    /// An insert is sent only for the batch that stands in `open` in a record known to be stored.
    IntentFirst = "intent-first",
    /// A retry is sent under the token of the first attempt.
    SameToken = "same-token",
    /// An inherited batch keeps the bounds that its record gives it.
    SameBounds = "same-bounds",
    /// A batch that is refused for its data is split through the ledger: a part is sent only once it stands in `open`.
    SplitThroughLedger = "split-through-ledger",
    /// A batch is split only when no attempt at it can land any more.
    SplitWhenAnswered = "split-when-answered",
    /// Rows that may be in the table already are read back before they are sent.
    SuspectsReadBack = "suspects-read-back",
    /// A tenure looks once whether a table has rows that the ledger does not know of.
    TableExamined = "table-examined",
    /// That a row is a dead letter stands in the record before it is published.
    ParkThroughLedger = "park-through-ledger",
    /// A dead letter is stored only if there is none with its identity.
    LetterOnce = "letter-once",
    /// `done` passes a dead letter only when it is stored.
    LetterBeforeDone = "letter-before-done",
    /// No row is acknowledged before a stored record says it is done.
    LedgerBeforeAck = "ledger-before-ack",
    /// No part of the stream is trimmed before a stored record says it is done.
    LedgerBeforeTrim = "ledger-before-trim",
    /// A lane has at most one open batch; the next is opened by the write that closes it.
    OneBatchPerLane = "one-batch-per-lane",
    /// No lane waits for another one's batch.
    LanesInParallel = "lanes-in-parallel",
    /// A delivery out of number, of another pin or going back in the stream means a resync.
    GapMeansResync = "gap-means-resync",
    /// Repeats are numbered like any other delivery: the number is checked before they are dropped.
    NumberBeforeRepeat = "number-before-repeat",
    /// A row at or below the last accepted one is dropped.
    RepeatsDropped = "repeats-dropped",
    /// A row at or below its lane's `done` is dropped.
    DoneRowsDropped = "done-rows-dropped",
    /// The first new row after a reset must be the one that a look at the stream named, or is looked for again.
    FirstRowExpected = "first-row-expected",
    /// When a pull ends empty, the consumer's delivered position is compared with what was seen.
    DeliveredCompared = "delivered-compared",
    /// A connection made anew, or a client that could not keep up, means a resync.
    DisruptionMeansResync = "disruption-means-resync",
    /// The consumer is reset on every new pin.
    ResetOnNewPin = "reset-on-new-pin",
    /// A reset goes to the stored floor + 1, never higher.
    ResetToStoredFloor = "reset-to-stored-floor",
    /// Rows of an older inbox are ignored.
    FreshInbox = "fresh-inbox",
    /// The first act under a new pin raises the epoch.
    FenceOnNewPin = "fence-on-new-pin",
    /// A conflict ends the tenure unless the stored record is this tenure's own.
    ConflictEndsTenure = "conflict-ends-tenure",
    /// Only a record of this very tenure is adopted, not one of the same session.
    AdoptOwnTenureOnly = "adopt-own-tenure-only",
    /// An intent that has aged is read again before it is sent.
    StaleIntentRead = "stale-intent-read",
    /// A batch in doubt is read back before it is sent again.
    ReadBackInDoubt = "read-back-in-doubt",
    /// An inherited batch is read back before it is sent.
    ReadBackInherited = "read-back-inherited",
    /// A doubted batch is read back after its success too: a retry can be swallowed.
    ReadBackAfterSuccess = "read-back-after-success",
    /// The generation is raised only when the current token is known to be burned.
    GenerationWhenBurned = "generation-when-burned",
    /// What is left of an inherited batch whose rows were removed goes under its old token.
    PurgedKeepsToken = "purged-keeps-token",
    /// Only rows of this stream count when a batch is read back (kept by whoever answers for the store).
    ReadBackOfThisStream = "read-back-of-this-stream",
    /// A stream made anew starts a fresh record.
    StreamIdentity = "stream-identity",
    /// A stream that lost its tail and uses sequences again stops the shard.
    ReuseStopsShard = "reuse-stops-shard",
    /// A consumer that is gone, or does not fit any more, ends its shard.
    GoneConsumerEndsShard = "gone-consumer-ends-shard",
    /// With nobody pinned and nothing pending, an unfinished record makes the claimer reset.
    ResetWhenStranded = "reset-when-stranded",
    /// The floor never passes a row that is not done.
    FloorBehindUnfinished = "floor-behind-unfinished",
    /// At the cap the owner renews its pin with a pull that delivers nothing.
    RenewAtCap = "renew-at-cap",
    /// A pull asks for no more than the share has room for.
    PullWithinShare = "pull-within-share",
    /// A halt takes no more rows.
    HaltStopsIntake = "halt-stops-intake",
    /// A shard is released only when what it accepted is written.
    WrittenBeforeRelease = "written-before-release",
    /// The pin is looked at before it is given up: it may be somebody else's by now.
    LookBeforeUnpin = "look-before-unpin",
    /// No shard is claimed before every member's record was read once and our own is stored.
    SnapshotBeforeClaims = "snapshot-before-claims",
    /// A member that does not answer a request is not dead; only one that nobody answers for is.
    SilenceIsNotDeath = "silence-is-not-death",
    /// Nobody's lease runs out for a process that does not hear its own heartbeat come back.
    LeaseWhileHearing = "lease-while-hearing",
    /// A shard that a live member found broken for everybody is claimed by nobody.
    FailedShardsLeft = "failed-shards-left",
    /// A member that is draining is given no shard.
    DrainingGetsNothing = "draining-gets-nothing",
    /// A shard is given up only to a member that says it stands by for it.
    GiveUpToStandby = "give-up-to-standby",
    /// A shard that a live member holds is not taken for unowned, whoever is pinned and however long nothing moves.
    HeldIsNotUnowned = "held-is-not-unowned",
    /// The shards of a process share its budget.
    SharesOfOneBudget = "shares-of-one-budget",
}

/// Whether the code that keeps `rule` is in force: always, outside the simulator's builds.
#[cfg(not(feature = "mutants"))]
#[must_use]
#[inline]
pub const fn safeguard(_rule: Rule) -> bool {
    true
}

#[cfg(feature = "mutants")]
mod switch {
    use std::cell::Cell;

    use super::Rule;

    std::thread_local! {
        static OFF: Cell<Option<Rule>> = const { Cell::new(None) };
    }

    /// Whether the code that keeps `rule` is in force on this thread.
    #[must_use]
    pub fn safeguard(rule: Rule) -> bool {
        OFF.get() != Some(rule)
    }

    /// Switches one safeguard off on this thread, or all on again.
    pub fn switch_off(rule: Option<Rule>) {
        OFF.set(rule);
    }
}

#[cfg(feature = "mutants")]
pub use switch::{safeguard, switch_off};

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_rule_has_a_name_of_its_own_and_says_something() {
        let keys: BTreeSet<_> = Rule::ALL.iter().map(|rule| rule.key()).collect();
        assert_eq!(keys.len(), Rule::ALL.len());
        assert!(Rule::ALL.iter().all(|rule| rule.summary().len() > 20));
    }

    #[test]
    fn every_safeguard_is_in_force() {
        assert!(Rule::ALL.iter().all(|rule| safeguard(*rule)));
    }
}
