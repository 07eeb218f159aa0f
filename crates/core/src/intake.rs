//! Which deliveries are accepted: in number, under one pin, rising in the stream (rule 5).

use crate::notice::ResyncReason;
use crate::ports::delivery::{Inbox, PinId};
use crate::row::{Delivery, Mark, Row, Seq};
use crate::rule::{Rule, safeguard};

/// What to do with a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// A new row.
    Accept,
    /// A row that was accepted before.
    Repeat,
    /// Something was lost or mixed up: everything from here on comes again after a reset.
    Resync(ResyncReason),
}

/// Where a shard stands in its deliveries.
#[derive(Clone, Debug)]
pub struct Intake {
    inbox: Inbox,
    pin: PinId,
    /// Deliveries since the last reset.
    seen: Delivery,
    /// The stream sequence of the last of them.
    seen_seq: Seq,
    /// The last row accepted in this tenure; at its beginning, the floor.
    accepted: Mark,
    /// What must come first since the last reset; none once it has come.
    first: Option<FirstRow>,
}

/// The first row that a reset is to bring, as a look at the stream showed before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FirstRow {
    /// Rows up to here were done: the reset goes to the row after it.
    pub above: Seq,
    /// The shard's next row; none if there was none, or none was asked about.
    pub next: Option<Seq>,
}

impl Intake {
    /// Nothing delivered yet; everything up to `floor` is done.
    #[must_use]
    pub const fn new(inbox: Inbox, pin: PinId, floor: Mark) -> Self {
        Self { inbox, pin, seen: Delivery(0), seen_seq: Seq::ZERO, accepted: floor, first: None }
    }

    /// The consumer was reset; rows come to `inbox` from here on, numbered from 1. The first of them must
    /// be `first`: a reset of another tenure that comes late, and behind ours, would otherwise skip rows as our own
    /// delivery 1.
    pub fn restart(&mut self, inbox: Inbox, first: FirstRow) {
        debug_assert!(inbox > self.inbox);
        self.inbox = inbox;
        self.seen = Delivery(0);
        self.seen_seq = Seq::ZERO;
        self.first = safeguard(Rule::FirstRowExpected).then_some(first);
    }

    /// The inbox that counts.
    #[must_use]
    pub const fn inbox(&self) -> Inbox {
        self.inbox
    }

    /// Deliveries seen since the last reset.
    #[must_use]
    pub const fn seen(&self) -> Delivery {
        self.seen
    }

    /// The last row accepted.
    #[must_use]
    pub const fn accepted(&self) -> Mark {
        self.accepted
    }

    /// Every row of the shard up to `mark` is known to have been delivered and seen.
    pub fn caught_up(&mut self, mark: Mark) {
        if mark.seq > self.accepted.seq {
            self.accepted = mark;
        }
    }

    /// Whether rows that came to `inbox` count.
    #[must_use]
    pub fn listens_to(&self, inbox: Inbox) -> bool {
        inbox == self.inbox || !safeguard(Rule::FreshInbox)
    }

    /// Decides about the next delivery.
    pub fn admit(&mut self, pin: Option<&PinId>, row: &Row) -> Admission {
        let repeat = row.seq <= self.accepted.seq && safeguard(Rule::RepeatsDropped);
        if repeat && !safeguard(Rule::NumberBeforeRepeat) {
            return Admission::Repeat;
        }
        if safeguard(Rule::GapMeansResync) {
            if pin != Some(&self.pin) {
                return Admission::Resync(ResyncReason::OtherPin);
            }
            if row.delivery.0 != self.seen.0 + 1 {
                return Admission::Resync(ResyncReason::Gap);
            }
            // The server's own repeat of a row that was not acknowledged in time: it is in number like any other.
            if row.redelivered && row.seq <= self.seen_seq.min(self.accepted.seq) {
                self.seen = row.delivery;
                return Admission::Repeat;
            }
            if row.seq <= self.seen_seq {
                return Admission::Resync(ResyncReason::WentBack);
            }
        }
        if let Some(FirstRow { above, next }) = self.first
            && row.seq > above
        {
            if next.is_none_or(|next| row.seq > next) {
                return Admission::Resync(ResyncReason::Skipped);
            }
            self.first = None;
        }
        self.seen = row.delivery;
        self.seen_seq = row.seq;
        if repeat {
            return Admission::Repeat;
        }
        self.accepted = row.mark();
        Admission::Accept
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use crate::row::{TableName, Verdict};
    use crate::time::Timestamp;

    fn pin() -> PinId {
        PinId("pin".into())
    }

    fn row(seq: u64, delivery: u64) -> Row {
        Row {
            seq: Seq(seq),
            delivery: Delivery(delivery),
            redelivered: false,
            stored_at: Timestamp(0),
            table: TableName::new("t"),
            payload: Bytes::new(),
            verdict: Verdict::Good,
        }
    }

    fn intake(floor: u64) -> Intake {
        Intake::new(Inbox(1), pin(), Mark { seq: Seq(floor), stored_at: Timestamp(0) })
    }

    #[test]
    fn rows_are_accepted_in_number() {
        let mut intake = intake(10);
        assert_eq!(intake.admit(Some(&pin()), &row(11, 1)), Admission::Accept);
        assert_eq!(intake.admit(Some(&pin()), &row(15, 2)), Admission::Accept);
        assert_eq!(intake.admit(Some(&pin()), &row(16, 4)), Admission::Resync(ResyncReason::Gap));
    }

    #[test]
    fn the_first_delivery_must_be_number_one() {
        assert_eq!(intake(10).admit(Some(&pin()), &row(11, 2)), Admission::Resync(ResyncReason::Gap));
    }

    #[test]
    fn another_pin_or_none_is_not_ours() {
        let other = PinId("other".into());
        assert_eq!(intake(0).admit(Some(&other), &row(1, 1)), Admission::Resync(ResyncReason::OtherPin));
        assert_eq!(intake(0).admit(None, &row(1, 1)), Admission::Resync(ResyncReason::OtherPin));
    }

    #[test]
    fn repeats_after_a_reset_are_numbered_and_dropped() {
        let mut intake = intake(0);
        for n in 1..=3 {
            assert_eq!(intake.admit(Some(&pin()), &row(n, n)), Admission::Accept);
        }
        intake.restart(Inbox(2), FirstRow { above: Seq::ZERO, next: Some(Seq(1)) });
        for n in 1..=3 {
            assert_eq!(intake.admit(Some(&pin()), &row(n, n)), Admission::Repeat);
        }
        assert_eq!(intake.admit(Some(&pin()), &row(4, 4)), Admission::Accept);
    }

    #[test]
    fn the_stream_does_not_go_back() {
        let mut intake = intake(0);
        assert_eq!(intake.admit(Some(&pin()), &row(5, 1)), Admission::Accept);
        assert_eq!(intake.admit(Some(&pin()), &row(5, 2)), Admission::Resync(ResyncReason::WentBack));
    }

    #[test]
    fn the_first_new_row_after_a_reset_is_the_one_that_the_stream_has_next() {
        let skipped = Admission::Resync(ResyncReason::Skipped);
        let mut intake = intake(10);
        intake.restart(Inbox(2), FirstRow { above: Seq(10), next: Some(Seq(12)) });
        assert_eq!(intake.admit(Some(&pin()), &row(14, 1)), skipped);
        intake.restart(Inbox(3), FirstRow { above: Seq(10), next: None });
        assert_eq!(intake.admit(Some(&pin()), &row(14, 1)), skipped);
        intake.restart(Inbox(4), FirstRow { above: Seq(10), next: Some(Seq(14)) });
        assert_eq!(intake.admit(Some(&pin()), &row(14, 1)), Admission::Accept);
        assert_eq!(intake.admit(Some(&pin()), &row(19, 2)), Admission::Accept);
    }

    #[test]
    fn a_row_that_was_not_acknowledged_in_time_comes_again_in_number() {
        let mut intake = intake(0);
        for n in 1..=3 {
            assert_eq!(intake.admit(Some(&pin()), &row(n, n)), Admission::Accept);
        }
        let again = Row { redelivered: true, ..row(2, 4) };
        assert_eq!(intake.admit(Some(&pin()), &again), Admission::Repeat);
        assert_eq!(intake.admit(Some(&pin()), &row(4, 5)), Admission::Accept);
        // Lost on the way the first time: that is a gap, whatever the server says of it.
        let lost = Row { redelivered: true, ..row(9, 7) };
        assert_eq!(intake.admit(Some(&pin()), &lost), Admission::Resync(ResyncReason::Gap));
    }

    proptest! {
        // Whatever arrives, in whatever order: what is accepted rises, and nothing between two accepted
        // rows of an unbroken numbering is skipped.
        #[test]
        fn accepted_rows_rise(deliveries in proptest::collection::vec((1_u64..30, 1_u64..30, any::<bool>()), 0..200)) {
            let mut intake = intake(0);
            let mut last = Seq::ZERO;
            let mut inbox = 1;
            for (seq, delivery, ours) in deliveries {
                let from = if ours { pin() } else { PinId("other".into()) };
                let before = intake.seen();
                match intake.admit(Some(&from), &row(seq, delivery)) {
                    Admission::Accept => {
                        prop_assert!(ours && Seq(seq) > last && delivery == before.0 + 1);
                        last = Seq(seq);
                    }
                    Admission::Repeat => prop_assert!(ours && Seq(seq) <= last && delivery == before.0 + 1),
                    Admission::Resync(_) => {
                        inbox += 1;
                        intake.restart(Inbox(inbox), FirstRow { above: Seq(30), next: None });
                    }
                }
                prop_assert_eq!(intake.accepted().seq, last);
            }
        }
    }
}
