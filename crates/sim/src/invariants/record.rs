//! Invariant 6: floor < first row of every open batch; done < first; done and floor never go back within a
//! stream. And every record is its writer's own.

use holdfast_core::record::{Record, Session};

use super::{Checked, violated};

pub(crate) const NAME: &str = "6 record";

/// A record was stored by the process start `session`.
pub(crate) fn stored(before: Option<&Record>, record: &Record, session: Option<Session>) -> Checked {
    if let Some(defect) = record.defect() {
        return violated(NAME, defect);
    }
    if session.is_some_and(|session| session != record.writer.session) {
        return violated(NAME, format!("a record was written in the name of {:?}", record.writer));
    }
    let Some(before) = before else { return Ok(()) };
    if let Some(back) = record.regression_from(before) {
        return violated(NAME, back);
    }
    if record.epoch < before.epoch || (record.epoch == before.epoch && record.writer != before.writer) {
        return violated(
            NAME,
            format!("epoch {} of {:?} follows epoch {}", record.epoch, record.writer, before.epoch),
        );
    }
    Ok(())
}
