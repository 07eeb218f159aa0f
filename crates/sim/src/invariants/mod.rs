//! The invariants of protocol.md, one a file, checked as a run goes and at its end.
//!
//! They look at the models and at what processes say of themselves from outside, never at what the core
//! believes to be right: an invariant that repeated the core's own reasoning would share its mistakes.

pub(crate) mod broken;
pub(crate) mod budget;
pub(crate) mod death;
pub(crate) mod deleted;
pub(crate) mod doubt;
pub(crate) mod draining;
pub(crate) mod even;
pub(crate) mod handover;
pub(crate) mod heard;
pub(crate) mod heir;
pub(crate) mod intent;
pub(crate) mod lands;
pub(crate) mod once;
pub(crate) mod order;
pub(crate) mod pin;
pub(crate) mod record;
pub(crate) mod resync;
pub(crate) mod stand_in;
pub(crate) mod stops;
pub(crate) mod trim;
pub(crate) mod vacant;

/// Something that must never happen, and did.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Violation {
    /// The invariant's name.
    pub invariant: &'static str,
    /// What happened.
    pub how: String,
}

/// Every invariant's name.
pub const NAMES: &[&str] = &[
    once::REPEAT,
    once::LOSS,
    once::STRAY,
    once::BOTH,
    once::LETTER,
    order::NAME,
    intent::NAME,
    intent::SPLIT,
    trim::NAME,
    trim::ACK,
    budget::NAME,
    pin::NAME,
    record::NAME,
    lands::NAME,
    handover::NAME,
    stops::NAME,
    stops::TOLD,
    doubt::NAME,
    resync::NAME,
    deleted::NAME,
    heard::NAME,
    broken::NAME,
    heir::NAME,
    stand_in::NAME,
    draining::NAME,
    death::NAME,
    vacant::NAME,
    even::NAME,
];

pub(crate) type Checked = Result<(), Violation>;

pub(crate) fn violated(invariant: &'static str, how: impl Into<String>) -> Checked {
    Err(Violation { invariant, how: how.into() })
}
