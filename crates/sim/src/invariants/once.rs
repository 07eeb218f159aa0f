//! Invariant 1: every published row is in its table exactly once, or in the dead letters exactly once, and there only
//! if it cannot be in its table.
//!
//! A repeat shows when its part is committed, or its letter kept. A loss shows when the ledger calls a row done that is not in its
//! table (the ledger is the truth about what is written), or when everything has settled without it.

use holdfast_core::ports::dead_letters::{Cause, Letter};
use holdfast_core::ports::store::Level;
use holdfast_core::record::Record;
use holdfast_core::row::{Row, Seq};
use holdfast_core::time::Timestamp;

use super::{Checked, violated};
use crate::jetstream::number_of;
use crate::truth::{Fact, Truth};
use crate::world::table_name;

/// A row is in its table more than once.
pub(crate) const REPEAT: &str = "1 once: repeat";
/// A row is called done, and is nowhere.
pub(crate) const LOSS: &str = "1 once: loss";
/// A row is in its table and in the dead letters.
pub(crate) const BOTH: &str = "1 once: both";
/// A row is a dead letter that fits its table.
pub(crate) const LETTER: &str = "1 once: letter without cause";
/// A row is where it does not belong.
pub(crate) const STRAY: &str = "1 once: stray";

/// Counts rows that were committed to `table`.
pub(crate) fn landed(
    truth: &mut Truth,
    table: u32,
    level: Level,
    created: Timestamp,
    rows: &[Row],
) -> Checked {
    for row in rows {
        let Some(fact) = truth.by_number(number_of(&row.payload)) else {
            return violated(STRAY, format!("row {} was never published", row.seq));
        };
        if (fact.table, fact.seq) != (table, row.seq) || !fact.is_of(created) {
            return violated(
                STRAY,
                format!("row {} of t{} was written as {} to t{table}", fact.seq, fact.table, row.seq),
            );
        }
        if fact.screened {
            return violated(STRAY, format!("row {} can never be a row, and was inserted", row.seq));
        }
        fact.landed += 1;
        if fact.landed > 1 + fact.spare && level != Level::AtLeastOnce {
            return violated(REPEAT, format!("row {} is in t{table} {} times", row.seq, fact.landed));
        }
        both(fact)?;
    }
    Ok(())
}

fn both(fact: &Fact) -> Checked {
    if fact.landed > 0 && fact.letters > 0 && !fact.may_be_both {
        return violated(BOTH, format!("row {} is in t{} and in the dead letters", fact.seq, fact.table));
    }
    Ok(())
}

/// A letter is kept now. `unfit`: whether the row did not fit its table at any time since it was published; and
/// whether its table was missing at one.
pub(crate) fn lettered(
    truth: &mut Truth,
    letter: &Letter,
    unfit: impl Fn(&Fact) -> bool,
    missing: impl Fn(&Fact) -> bool,
) -> Checked {
    let Some(fact) = truth.by_number(number_of(&letter.payload)) else {
        return violated(STRAY, format!("letter {} was never published as a row", letter.seq));
    };
    let there = (fact.seq, fact.shard, fact.stored_at) == (letter.seq, letter.shard.0, letter.stored_at);
    if !there || table_name(fact.table) != letter.table || !fact.is_of(letter.created) {
        return violated(STRAY, format!("row {} of t{} became letter {}", fact.seq, fact.table, letter.seq));
    }
    if fact.payload != letter.payload {
        return violated(STRAY, format!("the letter of row {} is not what was published", fact.seq));
    }
    let cause = match letter.cause {
        Cause::Payload | Cause::Subject => fact.screened,
        Cause::Refused => unfit(fact),
        Cause::UnknownTable => missing(fact),
    };
    if !cause {
        let why = &letter.message;
        return violated(LETTER, format!("row {} of t{} became a letter ({why})", fact.seq, fact.table));
    }
    fact.letters += 1;
    if fact.letters > 1 + fact.spare {
        return violated(REPEAT, format!("row {} is {} letters", fact.seq, fact.letters));
    }
    both(fact)
}

/// What a record newly calls done must be there.
pub(crate) fn recorded(
    truth: &Truth,
    shard: u32,
    before: Option<&Record>,
    record: &Record,
    tail_lost: bool,
) -> Checked {
    let before = before.filter(|before| before.stream_created == record.stream_created);
    let floor_before = before.map_or(Seq::ZERO, |before| before.floor);
    // Written by an owner that does not know yet that the stream lost its tail: every later look finds that the
    // highest row is another one, and stops the shard. What was dropped then shows at the end.
    let other = truth.at(record.stream_created, record.high.seq).is_some_and(|fact| {
        fact.gone || (record.high.stored_at != Timestamp(0) && fact.stored_at != record.high.stored_at)
    });
    if tail_lost && other {
        return Ok(());
    }
    let lost = |fact: &&Fact| fact.shard == shard && !fact.is_done();
    let created = record.stream_created;
    if let Some(fact) = truth.range(created, floor_before.next()..=record.floor).find(lost) {
        let how = format!(
            "the floor of s{shard} is {}, row {} of t{} is nowhere",
            record.floor, fact.seq, fact.table
        );
        return violated(LOSS, how);
    }
    for (table, lane) in &record.lanes {
        let done_before =
            before.and_then(|before| before.lanes.get(table)).map_or(floor_before, |lane| lane.done);
        let index = crate::world::table_index(table);
        let mut newly = truth.range(created, done_before.next()..=lane.done);
        if let Some(fact) = newly.find(|fact| fact.table == index && lost(fact)) {
            return violated(
                LOSS,
                format!("t{index} is done up to {}, row {} is nowhere", lane.done, fact.seq),
            );
        }
    }
    Ok(())
}
