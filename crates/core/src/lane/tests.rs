//! What a lane says of itself when it contradicts itself, which nothing that is told to it from outside makes it do.

use bytes::Bytes;

use super::*;
use crate::ports::store::Level;

const FLOOR: Seq = Seq(2);

fn row(seq: u64) -> Row {
    Row {
        seq: Seq(seq),
        delivery: Delivery(seq),
        redelivered: false,
        stored_at: Timestamp(1),
        table: TableName::new("t"),
        payload: Bytes::from_static(b"{}"),
        verdict: Verdict::Good,
    }
}

/// Done up to row 2; rows 7 and 9 wait.
fn waiting() -> Lane {
    let mut lane = Lane::new(TableName::new("t"), FLOOR, None, Instant::START);
    for seq in [7, 9] {
        assert!(lane.accept(row(seq), Mark::default(), Instant::START));
    }
    lane
}

/// The same, with a batch of rows 3 and 5 open before them.
fn open() -> Lane {
    let target = Target { database: "db".into(), table: "t".into(), level: Level::ExactlyOnce };
    let rows = vec![row(3), row(5)];
    let work = Open::whole(rows.into(), Mark::default(), target, false, Instant::START);
    Lane { work: Some(Work::Batch(work)), ..waiting() }
}

/// Or a letter of row 3.
fn letter() -> Lane {
    let parked = Parked { row: Seq(3), cause: Cause::Payload, code: None, message: "no".into(), attempts: 1 };
    Lane { work: Some(Work::Letter(Parking::inherit(parked))), ..waiting() }
}

#[track_caller]
fn says(lane: &Lane, floor: Seq, words: &str) {
    let said = lane.defect(floor).expect("a defect");
    assert!(said.starts_with(words), "{said}");
}

#[test]
fn a_lane_that_was_told_everything_is_sound() {
    for lane in [waiting(), open(), letter()] {
        assert_eq!(lane.defect(FLOOR), None);
    }
    let finished = Lane { finished: Some(Seq(6)), ..waiting() };
    assert_eq!(finished.defect(FLOOR), None);
}

#[test]
fn what_is_finished_is_above_done() {
    for at in [1, 2] {
        says(&Lane { finished: Some(Seq(at)), ..waiting() }, FLOOR, "a batch finished at or below done");
    }
}

#[test]
fn what_is_open_is_above_done_and_floor() {
    for make in [open, letter] {
        says(&make(), Seq(3), "what is open starts with 3");
        says(&Lane { done: Seq(3), ..make() }, FLOOR, "what is open starts with 3");
        says(&Lane { finished: Some(Seq(3)), ..make() }, FLOOR, "what is open starts with 3");
    }
    let mut torn = open();
    if let Some(open) = torn.open_mut() {
        open.batch.rows = 3;
    }
    says(&torn, FLOOR, "the open batch is not its numbers");
}

#[test]
fn rows_wait_in_order_behind_what_is_open() {
    says(&Lane { done: Seq(7), ..waiting() }, FLOOR, "row 7 waits behind row 7");
    says(&Lane { done: Seq(8), ..waiting() }, FLOOR, "row 7 waits behind row 8");
    let mut swapped = waiting();
    swapped.held.swap(0, 1);
    says(&swapped, FLOOR, "row 7 waits behind row 9");
    let mut twice = open();
    twice.held[0].row = row(5);
    says(&twice, FLOOR, "row 5 waits behind row 5");
}

#[test]
fn their_bytes_are_counted() {
    for counted in [0, 3, 5] {
        says(&Lane { held_bytes: counted, ..waiting() }, FLOOR, "4 bytes wait");
    }
}
