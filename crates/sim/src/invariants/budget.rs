//! Invariant 4: held rows and bytes stay within the share and the stated overshoot: no row, and bytes by at
//! most one row; and by the rows of batches that an earlier owner left open, which must be had whole.

use holdfast_core::budget::Share;
use holdfast_core::ports::delivery::Pull;

use super::{Checked, violated};

pub(crate) const NAME: &str = "4 budget";

/// A process that may hold `rows` and `bytes` has told its shards these shares: together they are no more. (No share is
/// below the least number of rows that there is.)
pub(crate) fn shared<'a>(shares: impl Iterator<Item = &'a Share>, rows: u64, bytes: u64) -> Checked {
    let told = shares.fold((0, 0, 0), |sum, share| (sum.0 + 1, sum.1 + share.rows, sum.2 + share.bytes));
    let (count, told_rows, told_bytes) = told;
    if told_rows > rows.max(count * Share::MIN_ROWS) || told_bytes > bytes {
        let how = format!("{told_rows} rows and {told_bytes} bytes are shared out of {rows} and {bytes}");
        return violated(NAME, how);
    }
    Ok(())
}

/// What a shard may hold.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Budget {
    rows: u64,
    bytes: u64,
}

impl Budget {
    /// A pull for rows is sent while `held` rows and bytes are held; `inherited` rows belong to open batches of
    /// earlier owners.
    pub(crate) fn pulled(
        &mut self,
        pull: &Pull,
        share: Share,
        held: (u64, u64),
        largest: u64,
        inherited: u64,
    ) -> Checked {
        // What a smaller share finds already held stays; from here on nothing may be added to it.
        self.rows = (share.rows + inherited).max(held.0).max(1);
        self.bytes = (share.bytes + largest + inherited * largest).max(held.1).max(largest);
        let batch = u64::from(pull.batch);
        let alone = batch == 1 && held.0 == 0;
        if held.0 + batch > share.rows + inherited && !alone {
            let how = format!("{batch} rows were asked for with {} held of {}", held.0, share.rows);
            return violated(NAME, how);
        }
        Ok(())
    }

    /// This much is held. (What was asked for before the share became smaller may still come.)
    pub(crate) fn held(&self, held: (u64, u64)) -> Checked {
        if held.0 > self.rows || held.1 > self.bytes {
            let how = format!(
                "{} rows and {} bytes are held, {} and {} are allowed",
                held.0, held.1, self.rows, self.bytes
            );
            return violated(NAME, how);
        }
        Ok(())
    }
}
