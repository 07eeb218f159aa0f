//! What happened in a run: one line a change, and a running hash over the lines.

use std::fmt::{self, Write as _};
use std::time::Duration;

use holdfast_core::claims;
use holdfast_core::notice::{Notice, Report};
use xxhash_rust::xxh3::Xxh3;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Happening {
    /// Something went wrong, or was set right again.
    Fault(String),
    /// A process started or ended, froze or thawed.
    Process {
        /// Which.
        process: u32,
        /// What.
        what: &'static str,
    },
    /// A row was published.
    Published {
        /// Its number.
        row: u64,
        /// Its table.
        table: u32,
        /// Its shard.
        shard: u32,
        /// Its sequence.
        seq: u64,
    },
    /// Rows reached a process.
    Delivered {
        /// The process.
        process: u32,
        /// The shard.
        shard: u32,
        /// Sequences of the rows.
        seqs: Vec<u64>,
        /// The first one's delivery number.
        delivery: u64,
        /// Whether anyone listened.
        heard: bool,
    },
    /// A pin was given or lapsed.
    Pin {
        /// The shard.
        shard: u32,
        /// The process that has it or had it.
        process: u32,
        /// What happened.
        what: &'static str,
    },
    /// A command reached the stream's server.
    Asked {
        /// Of whom.
        process: u32,
        /// Of which shard.
        shard: u32,
        /// What.
        what: String,
    },
    /// A record was stored, or a write conflicted.
    Ledger {
        /// The shard.
        shard: u32,
        /// The process that wrote.
        process: u32,
        /// The revision, the epoch and the floor; none for a conflict.
        stored: Option<(u64, u64, u64)>,
        /// Open batches: table, first, last, generation.
        open: Vec<(u32, u64, u64, u8)>,
        /// Parked rows: table, row.
        parked: Vec<(u32, u64)>,
        /// Rows that may be in their table already: table, up to where.
        suspect: Vec<(u32, u64)>,
    },
    /// A letter left a process, or something became of it.
    Letter {
        /// The process that sent it.
        process: u32,
        /// The shard.
        shard: u32,
        /// The table.
        table: u32,
        /// The attempt.
        attempt: u64,
        /// The row.
        seq: u64,
        /// What.
        what: &'static str,
    },
    /// An insert left a process.
    Sent {
        /// The process.
        process: u32,
        /// The shard.
        shard: u32,
        /// The table.
        table: u32,
        /// The attempt.
        attempt: u64,
        /// The token.
        token: String,
        /// Sequences of the rows.
        seqs: Vec<u64>,
    },
    /// Something became of a part of an insert.
    Part {
        /// The process that sent it.
        process: u32,
        /// The shard.
        shard: u32,
        /// The table.
        table: u32,
        /// The attempt.
        attempt: u64,
        /// What.
        what: &'static str,
        /// Sequences of the rows.
        seqs: Vec<u64>,
    },
    /// A process learned how its insert ended.
    Answered {
        /// The process.
        process: u32,
        /// The shard.
        shard: u32,
        /// The table.
        table: u32,
        /// The attempt.
        attempt: u64,
        /// How.
        how: &'static str,
    },
    /// A shard told something.
    Told {
        /// The process.
        process: u32,
        /// The shard.
        shard: u32,
        /// What.
        notice: Box<Notice>,
    },
    /// A shard reported to its process.
    Reported {
        /// The process.
        process: u32,
        /// The shard.
        shard: u32,
        /// What.
        report: Box<Report>,
    },
    /// A shard is in another phase.
    Phase {
        /// The process.
        process: u32,
        /// The shard.
        shard: u32,
        /// The phase.
        phase: &'static str,
        /// The epoch, while there is one.
        epoch: Option<u64>,
    },
    /// A process orders one of its shards.
    Ordered {
        /// The process.
        process: u32,
        /// The shard.
        shard: u32,
        /// What.
        order: Box<claims::Order>,
    },
    /// A process told something of how shards are shared out.
    Shared {
        /// The process.
        process: u32,
        /// What.
        notice: Box<claims::Notice>,
    },
    /// Rows were removed from the stream.
    Removed {
        /// Why.
        why: &'static str,
        /// Which.
        seqs: Vec<u64>,
    },
    /// An invariant was broken.
    Violated {
        /// Which.
        invariant: &'static str,
        /// How.
        how: String,
    },
}

/// Sequences, with runs drawn together.
pub(crate) struct Seqs<'a>(pub(crate) &'a [u64]);

impl fmt::Display for Seqs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        let mut first = true;
        while let Some((start, _)) = rest.split_first() {
            let run = rest.iter().zip(*start..).take_while(|(seq, expected)| **seq == *expected).count();
            if !first {
                f.write_char(',')?;
            }
            first = false;
            match run {
                1 => write!(f, "{start}")?,
                _ => write!(f, "{start}-{}", rest[run - 1])?,
            }
            rest = &rest[run..];
        }
        Ok(())
    }
}

impl fmt::Display for Happening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault(what) => write!(f, "fault {what}"),
            Self::Process { process, what } => write!(f, "p{process} {what}"),
            Self::Published { row, table, shard, seq } => {
                write!(f, "stream: row {row} of t{table} in s{shard} is {seq}")
            }
            Self::Delivered { process, shard, seqs, delivery, heard } => {
                let heard = if *heard { "" } else { " to a closed inbox" };
                write!(f, "p{process} s{shard} gets {} from delivery {delivery}{heard}", Seqs(seqs))
            }
            Self::Pin { shard, process, what } => write!(f, "stream: s{shard} pin of p{process} {what}"),
            Self::Asked { process, shard, what } => write!(f, "stream: p{process} s{shard} {what}"),
            Self::Ledger { shard, process, stored, open, parked, suspect } => {
                write!(f, "ledger: s{shard} by p{process} ")?;
                match stored {
                    None => f.write_str("conflicts")?,
                    Some((revision, epoch, floor)) => {
                        write!(f, "is {revision}: epoch {epoch} floor {floor}")?;
                    }
                }
                for (table, first, last, generation) in open {
                    write!(f, " t{table}:{first}-{last}.{generation}")?;
                }
                for (table, row) in parked {
                    write!(f, " t{table} parks {row}")?;
                }
                for (table, suspect) in suspect {
                    write!(f, " t{table} suspects up to {suspect}")?;
                }
                Ok(())
            }
            Self::Letter { process, shard, table, attempt, seq, what } => {
                write!(f, "p{process} s{shard} t{table} letter #{attempt} of {seq} {what}")
            }
            Self::Sent { process, shard, table, attempt, token, seqs } => {
                write!(f, "p{process} s{shard} t{table} sends #{attempt} {token} {}", Seqs(seqs))
            }
            Self::Part { process, shard, table, attempt, what, seqs } => {
                write!(f, "store: p{process} s{shard} t{table} #{attempt} {what} {}", Seqs(seqs))
            }
            Self::Answered { process, shard, table, attempt, how } => {
                write!(f, "p{process} s{shard} t{table} #{attempt} answered {how}")
            }
            Self::Told { process, shard, notice } => write!(f, "p{process} s{shard} {notice:?}"),
            Self::Reported { process, shard, report } => write!(f, "p{process} s{shard} reports {report:?}"),
            Self::Phase { process, shard, phase, epoch } => {
                write!(f, "p{process} s{shard} is {phase}")?;
                epoch.map_or(Ok(()), |epoch| write!(f, " in epoch {epoch}"))
            }
            Self::Ordered { process, shard, order } => write!(f, "p{process} orders s{shard} {order:?}"),
            Self::Shared { process, notice } => write!(f, "p{process} {notice:?}"),
            Self::Removed { why, seqs } => write!(f, "stream: {why} removes {}", Seqs(seqs)),
            Self::Violated { invariant, how } => write!(f, "VIOLATED {invariant}: {how}"),
        }
    }
}

/// A run's happenings, or only their hash.
pub(crate) struct Trace {
    keeps: bool,
    kept: Vec<(Duration, Happening)>,
    hash: Xxh3,
    line: String,
}

impl Trace {
    pub(crate) fn new(keeps: bool) -> Self {
        Self { keeps, kept: Vec::new(), hash: Xxh3::new(), line: String::new() }
    }

    pub(crate) fn add(&mut self, at: Duration, happening: Happening) {
        self.line.clear();
        // Writing to a string cannot fail.
        let _ = writeln!(self.line, "{} {happening}", at.as_nanos());
        self.hash.update(self.line.as_bytes());
        if self.keeps {
            self.kept.push((at, happening));
        }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash.digest()
    }

    pub(crate) fn into_kept(self) -> Vec<(Duration, Happening)> {
        self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_sequences_are_drawn_together() {
        assert_eq!(Seqs(&[1, 2, 3, 7, 9, 10]).to_string(), "1-3,7,9-10");
        assert_eq!(Seqs(&[]).to_string(), "");
    }

    #[test]
    fn the_hash_depends_on_what_happened_when() {
        let mut one = Trace::new(false);
        let mut two = Trace::new(true);
        for trace in [&mut one, &mut two] {
            trace.add(Duration::from_secs(1), Happening::Process { process: 1, what: "starts" });
        }
        assert_eq!(one.hash(), two.hash());
        one.add(Duration::from_secs(1), Happening::Process { process: 1, what: "ends" });
        two.add(Duration::from_secs(2), Happening::Process { process: 1, what: "ends" });
        assert_ne!(one.hash(), two.hash());
        assert_eq!(two.into_kept().len(), 2);
    }
}
