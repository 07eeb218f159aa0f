//! Coverage marks: the interesting things that a campaign must have met. A test that never reaches the bad
//! case proves nothing.

use std::collections::BTreeMap;

macro_rules! marks {
    ($($(#[doc = $doc:literal])+ $name:ident = $key:literal,)+) => {
        /// Something worth meeting.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Mark { $($(#[doc = $doc])+ $name,)+ }

        impl Mark {
            /// Every mark.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// The mark's name in reports.
            #[must_use]
            pub const fn key(self) -> &'static str {
                match self { $(Self::$name => $key,)+ }
            }
        }
    };
}

marks! {
    /// An insert of an earlier tenure wrote rows after another tenure had fenced.
    ZombieLanded = "zombie-landed",
    /// An insert landed after its client had stopped waiting for it.
    LandedAfterTimeout = "landed-after-timeout",
    /// A part was dropped because its token was remembered.
    RepeatDropped = "repeat-dropped",
    /// A part was dropped although its rows are nowhere.
    RetrySwallowed = "retry-swallowed",
    /// A generation was raised.
    GenerationRaised = "generation-raised",
    /// An insert left only some of its partitions.
    PartlyStored = "partly-stored",
    /// The deduplication window forgot a token.
    SentLateDropped = "stale-insert-not-sent",
    /// An intent had aged, and the record was read again.
    StaleIntentRead = "stale-intent-read",
    /// A conflict turned out to be a write of the same tenure whose answer was lost.
    OwnWriteAdopted = "own-write-adopted",
    /// A conflict ended a tenure.
    ConflictEndedTenure = "conflict-ended-tenure",
    /// A fence conflicted and was tried again.
    FenceConflict = "fence-conflict",
    /// A write arrived whose sender had given up waiting for it, and was stored.
    LateWriteStored = "late-write-stored",
    /// The same write arrived twice.
    WriteTwice = "write-arrived-twice",
    /// A reset arrived after its sender had given up waiting for it.
    LateReset = "late-reset",
    /// A reset of a client arrived that was not pinned any more.
    ResetByOther = "reset-by-other",
    /// A tenure began with an inherited batch that was complete.
    InheritedComplete = "inherited-batch-complete",
    /// An inherited batch was sent again, or what was missing of it.
    InheritedSent = "inherited-batch-sent",
    /// Rows of an inherited batch were gone from the stream.
    RowsRemoved = "inherited-rows-removed",
    /// A consumer was reset for a gap in its deliveries.
    Gap = "resync-gap",
    /// A consumer was reset because a delivery went back in the stream.
    WentBack = "resync-went-back",
    /// A consumer was reset because it had delivered more than was seen.
    LostTail = "resync-lost-tail",
    /// A look counted deliveries from before the last reset.
    Miscounted = "looks-miscount",
    /// A consumer was reset after its connection was made anew.
    Disrupted = "resync-disrupted",
    /// A consumer was reset for a pull without a final status.
    DeadPull = "resync-dead-pull",
    /// Nobody was pinned, nothing pending, and the record not finished.
    Stranded = "resync-stranded",
    /// Repeats were dropped.
    Repeats = "repeats-dropped",
    /// Rows came to an inbox that was closed.
    ClosedInbox = "rows-to-a-closed-inbox",
    /// Rows were lost on the way.
    RowsLost = "deliveries-lost",
    /// A pin lapsed.
    PinLapsed = "pin-lapsed",
    /// A process took the pin from another one that held it.
    UnpinRaced = "unpin-took-anothers-pin",
    /// A leader moved and forgot deliveries.
    LeaderForgot = "leader-forgot-deliveries",
    /// A renewal at the cap was refused its row, and kept the pin.
    RenewedAtCap = "renewed-at-the-cap",
    /// A row larger than the room was pulled alone.
    LargeRowAlone = "large-row-pulled-alone",
    /// A share became smaller than what was held.
    ShareShrank = "share-below-held",
    /// A lane waited for its table.
    TableMissing = "table-missing",
    /// A lane waits behind a row that can never be inserted.
    BadRow = "bad-row-waits",
    /// A fresh record was started for a stream made anew.
    StreamAnew = "stream-made-anew",
    /// Sequences used again stopped a shard.
    SequencesReused = "sequences-reused",
    /// A consumer that was gone ended a shard.
    ConsumerGone = "consumer-gone",
    /// A shard was given up with everything written.
    CleanRelease = "clean-release",
    /// A shard was given up at its deadline.
    LateRelease = "late-release",
    /// A trim removed rows.
    Trimmed = "trimmed",
    /// The first row after a reset was not the one that the stream had next.
    Skipped = "resync-skipped",
    /// A batch that was refused for its data was split.
    Split = "split",
    /// An inherited batch was split.
    SplitInherited = "split-inherited-batch",
    /// A batch that had been in doubt was waited out and split.
    SplitWaitedOut = "split-after-doubt",
    /// A block had too many partitions.
    TooManyPartitions = "too-many-partitions",
    /// The store named another row than the bad one.
    WrongHint = "wrong-hint",
    /// A row that was refused was stored: its table was mended.
    Mended = "refused-row-stored-later",
    /// A part of a batch of which some rows had landed was read back before it was sent.
    SuspectAfterSplit = "suspects-read-back-after-split",
    /// Rows that a set-back ledger did not know of were read back before they were sent.
    SuspectAfterRestore = "suspects-read-back-after-restore",
    /// A table had rows that the ledger did not know of.
    TableAhead = "table-ahead-of-the-ledger",
    /// A row whose subject names no table became a letter.
    ParkedSubject = "letter-subject",
    /// A row whose payload is none became a letter.
    ParkedPayload = "letter-payload",
    /// A row that the store refused became a letter.
    ParkedRefused = "letter-refused",
    /// A row of an unknown table became a letter.
    ParkedUnknownTable = "letter-unknown-table",
    /// A letter that an earlier tenure had decided on was sent.
    LetterInherited = "letter-inherited",
    /// A letter of an earlier tenure was kept after another one had fenced.
    LetterByZombie = "letter-by-a-zombie",
    /// A letter was there already, and its answer had been lost.
    LetterAnswerLost = "letter-answer-lost",
    /// A letter of an earlier tenure came and was there already.
    LetterAgainByZombie = "letter-again-by-a-zombie",
    /// The row of a letter that an earlier tenure had decided on was gone from the stream.
    LetterLost = "letter-row-removed",
    /// The dead letters took none.
    LettersRefused = "letters-refused",
    /// An answer of the store that nobody knows was told.
    UnknownRefusal = "unknown-refusal",
    /// A row whose acknowledgement was lost was delivered again.
    AckLostAgain = "ack-lost-row-redelivered",
    /// A row was delivered again that was not done.
    RedeliveredHeld = "unfinished-row-redelivered",
    /// A shard that sequences used again had stopped was given a new start.
    Rebased = "rebased",
    /// A process was stopped while it waited for its fence.
    StoppedFencing = "stopped-while-fencing",
    /// A thawed process found itself fenced.
    ThawedFenced = "thawed-and-fenced",
    /// A process gave a shard up to one that stood by for it.
    GivenUp = "given-up-to-a-standby",
    /// A shard that was given up is owned by another process.
    HandedOver = "handed-over",
    /// A shard was given up since an operator wanted it paused.
    PausedGivenUp = "paused-shard-given-up",
    /// A shard was claimed again while its last machine was ending.
    ClaimedWhileEnding = "claimed-while-ending",
    /// A process claimed a shard that another one should have had.
    StoodIn = "stood-in",
    /// Two processes each believed that one shard is theirs.
    SplitView = "split-view",
    /// A dead member's shard was claimed.
    OrphanClaimed = "orphan-claimed",
    /// A dead member's pin was taken away.
    OrphanUnpinned = "orphans-pin-taken-away",
    /// A dead member's pin was looked for, and somebody else had one.
    OrphanMoved = "orphans-pin-moved",
    /// A frozen process was taken for dead.
    FrozenTakenForDead = "frozen-taken-for-dead",
    /// A thawed process found that others had taken it for dead.
    ThawedGone = "thawed-and-taken-for-dead",
    /// A process was taken for dead since nobody answered for it.
    NobodyAnswered = "nobody-answered",
    /// A process was started anew before anybody took it for dead.
    Restarted = "restarted",
    /// A process did not hear itself.
    Deaf = "deaf",
    /// The members were watched anew.
    WatchedAnew = "watched-anew",
    /// A member saw its own record deleted.
    OwnRecordDeleted = "own-record-deleted",
    /// A member saw another one under its name.
    NameTaken = "name-taken",
    /// A shard's rows waited, and nobody had it.
    Unowned = "unowned",
}

/// How often each mark was met.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks(BTreeMap<Mark, u64>);

impl Marks {
    /// Counts a mark.
    pub fn hit(&mut self, mark: Mark) {
        *self.0.entry(mark).or_default() += 1;
    }

    /// Adds what another run met.
    pub fn add(&mut self, other: &Self) {
        for (mark, times) in &other.0 {
            *self.0.entry(*mark).or_default() += times;
        }
    }

    /// How often a mark was met.
    #[must_use]
    pub fn count(&self, mark: Mark) -> u64 {
        self.0.get(&mark).copied().unwrap_or_default()
    }

    /// The marks that were never met.
    #[must_use]
    pub fn missed(&self) -> Vec<Mark> {
        Mark::ALL.iter().copied().filter(|mark| self.count(*mark) == 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_mark_has_a_name_of_its_own() {
        let keys: BTreeSet<_> = Mark::ALL.iter().map(|mark| mark.key()).collect();
        assert_eq!(keys.len(), Mark::ALL.len());
    }

    #[test]
    fn what_was_not_met_is_named() {
        let mut marks = Marks::default();
        assert_eq!(marks.missed().len(), Mark::ALL.len());
        marks.hit(Mark::Gap);
        let mut sum = marks.clone();
        sum.add(&marks);
        assert_eq!((sum.count(Mark::Gap), sum.missed().len()), (2, Mark::ALL.len() - 1));
    }
}
