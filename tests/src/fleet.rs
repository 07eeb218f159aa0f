//! Several daemons at once: each with an address that says how it stands, and a log whose lines say when what
//! happened.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::daemon::{self, Daemon};
use crate::error::{Context, Error, Result};
use crate::guarded::Ended;
use crate::rig::Rig;
use crate::{port, wait};

/// How long a daemon may take to answer about itself.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the log must hold for [`Member::events`].
const FILTER: &str = "warn,holdfast=debug,holdfast_nats=info,holdfast_clickhouse=info";

/// A moment of the wall clock, which all processes of a machine share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

impl Moment {
    /// So long after the beginning of 1970.
    #[must_use]
    pub const fn from_epoch(since: Duration) -> Self {
        Self(since)
    }

    /// This moment.
    #[must_use]
    pub fn now() -> Self {
        Self(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
    }

    /// Seconds from `earlier` to this; negative if that came later.
    #[must_use]
    pub fn since(self, earlier: Self) -> f64 {
        self.0.as_secs_f64() - earlier.0.as_secs_f64()
    }

    fn parse(text: &str) -> Option<Self> {
        let at = OffsetDateTime::parse(text, &Rfc3339).ok()?;
        Some(Self(Duration::from_nanos(u64::try_from(at.unix_timestamp_nanos()).ok()?)))
    }
}

/// A line of a daemon's log.
#[derive(Debug, Clone)]
pub struct Event {
    /// When.
    pub at: Moment,
    /// Whose.
    pub node: String,
    /// What.
    pub message: String,
    /// Everything else that it says.
    pub fields: Value,
}

impl Event {
    /// The shard that it is about.
    #[must_use]
    pub fn shard(&self) -> Option<u32> {
        self.number("shard").and_then(|shard| u32::try_from(shard).ok())
    }

    /// A number of it. What is printed in words is in quotes.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u64> {
        let field = &self.fields[name];
        field.as_u64().or_else(|| field.as_str()?.parse().ok())
    }
}

/// A batch that a daemon called stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBatch {
    /// Which daemon.
    pub node: String,
    /// The shard.
    pub shard: u32,
    /// The table.
    pub table: String,
    /// The batch's first row.
    pub first: u64,
    /// Its last.
    pub last: u64,
    /// When the insert's answer was known.
    pub at: Moment,
}

/// Batches stored, as these events tell.
#[must_use]
pub fn stored_batches(events: &[Event]) -> Vec<StoredBatch> {
    let of = |event: &Event| {
        Some(StoredBatch {
            node: event.node.clone(),
            shard: event.shard()?,
            table: event.fields["table"].as_str()?.to_owned(),
            first: event.number("first")?,
            last: event.number("last")?,
            at: event.at,
        })
    };
    events.iter().filter(|event| event.message == "batch stored").filter_map(of).collect()
}

/// A shard that went from one daemon to another.
#[derive(Debug, Clone)]
pub struct Change {
    /// The shard.
    pub shard: u32,
    /// Who had it.
    pub from: String,
    /// Who has it now.
    pub to: String,
    /// When the old owner's last insert was answered.
    pub last_stored: Moment,
    /// When the heir accepted its first row.
    pub first_row: Moment,
}

impl Change {
    /// From the one to the other, in seconds.
    #[must_use]
    pub fn gap(&self) -> f64 {
        self.first_row.since(self.last_stored)
    }
}

/// The changes of owner that these events, sorted by their time, tell of.
#[must_use]
pub fn changes(events: &[Event]) -> Vec<Change> {
    let mut last: BTreeMap<u32, (&str, Option<Moment>)> = BTreeMap::new();
    let mut found = Vec::new();
    for event in events {
        let Some(shard) = event.shard() else { continue };
        let owner = last.entry(shard).or_insert((&event.node, None));
        match event.message.as_str() {
            "batch stored" if owner.0 == event.node => owner.1 = Some(event.at),
            "first row accepted" if owner.0 != event.node => {
                if let (from, Some(last_stored)) = *owner {
                    found.push(Change {
                        shard,
                        from: from.to_owned(),
                        to: event.node.clone(),
                        last_stored,
                        first_row: event.at,
                    });
                }
                *owner = (&event.node, None);
            }
            _ => {}
        }
    }
    found
}

/// A daemon among others.
#[derive(Debug)]
pub struct Member {
    /// The process.
    pub daemon: Daemon,
    addr: SocketAddr,
}

impl Member {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.daemon.name()
    }

    /// Where it says how it stands.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// What it answers to a GET: the HTTP status and the text.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn get(&self, path: &str) -> Result<(u16, String)> {
        let exchange = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect_timeout(&self.addr, PATIENCE)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes())?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer)?;
            Ok(String::from_utf8_lossy(&answer).into_owned())
        };
        let answer = exchange().context(|| format!("{} at {}", self.name(), self.addr))?;
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
        match (status, answer.split_once("\r\n\r\n")) {
            (Some(status), Some((_, body))) => Ok((status, body.to_owned())),
            _ => Err(Error::Answer { what: "a daemon", answer }),
        }
    }

    /// What its `/status` says.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn status(&self) -> Result<Value> {
        let (_, body) = self.get("/status")?;
        serde_json::from_str(&body).map_err(|_| Error::Answer { what: "a daemon's status", answer: body })
    }

    /// The shards that it has claimed, whether their rows have come or not.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn shards(&self) -> Result<Vec<u32>> {
        let status = self.status()?;
        let is_held = |shard: &&Value| {
            !matches!(shard["phase"].as_str(), None | Some("elsewhere" | "unclaimed" | "released" | "failed"))
        };
        let shards = status["shards"].as_array().into_iter().flatten().filter(is_held);
        Ok(shards.filter_map(|shard| u32::try_from(shard["shard"].as_u64()?).ok()).collect())
    }

    /// The shards whose rows it writes.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn owned(&self) -> Result<Vec<u32>> {
        let status = self.status()?;
        let shards = status["shards"].as_array().into_iter().flatten();
        let owned = shards.filter(|shard| shard["phase"] == "owning");
        Ok(owned.filter_map(|shard| u32::try_from(shard["shard"].as_u64()?).ok()).collect())
    }

    /// What its log tells so far.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn events(&self) -> Result<Vec<Event>> {
        Ok(read_log(self.name(), &self.daemon.log()?))
    }

    /// The processor time that it has used, in seconds.
    #[must_use]
    pub fn processor_time(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.daemon.pid())).unwrap_or_default();
        // Behind the name, which may have anything in it: the state is the first, the times are the 12th and 13th.
        let ticks: u64 = stat
            .rsplit(") ")
            .next()
            .unwrap_or_default()
            .split(' ')
            .skip(11)
            .take(2)
            .filter_map(|ticks| ticks.parse::<u64>().ok())
            .sum();
        // The unit of /proc has been a hundredth of a second wherever Linux runs.
        ticks as f64 / 100.0
    }
}

fn read_log(node: &str, log: &str) -> Vec<Event> {
    let event = |line: &str| {
        let mut line: Value = serde_json::from_str(line).ok()?;
        Some(Event {
            at: Moment::parse(line["timestamp"].as_str()?)?,
            node: node.to_owned(),
            message: line["fields"]["message"].as_str()?.to_owned(),
            fields: line["fields"].take(),
        })
    };
    log.lines().filter_map(event).collect()
}

/// The daemons of a rig, each start under a name of its own.
#[derive(Debug)]
pub struct Fleet<'a> {
    rig: &'a Rig,
    /// Those that run.
    pub members: Vec<Member>,
    started: u32,
    /// The logs of those that ended, without their daemons.
    past: Vec<Event>,
}

impl<'a> Fleet<'a> {
    /// None yet.
    #[must_use]
    pub fn new(rig: &'a Rig) -> Self {
        Self { rig, members: Vec::new(), started: 0, past: Vec::new() }
    }

    /// Starts so many.
    ///
    /// # Errors
    /// When one cannot be started.
    pub fn start(&mut self, count: u32) -> Result<()> {
        (0..count).try_for_each(|_| self.start_with(|builder| builder))
    }

    /// Starts one, with something special about it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_with(&mut self, special: impl FnOnce(daemon::Builder) -> daemon::Builder) -> Result<()> {
        self.started += 1;
        let name = format!("d{}", self.started);
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, port::free()?));
        let builder = self
            .rig
            .daemon(&name)
            .set("node.listen", addr)
            .argument("--log-format")
            .argument("json")
            .environment("RUST_LOG", FILTER);
        let daemon = special(builder).start()?;
        self.members.push(Member { daemon, addr });
        Ok(())
    }

    /// Takes one out of the fleet, after its end.
    fn bury(&mut self, place: usize) -> Result<()> {
        let member = self.members.remove(place);
        self.past.extend(member.events()?);
        Ok(())
    }

    /// SIGTERM to the one at this place; returns when it has ended.
    ///
    /// # Errors
    /// When it does not end in time, or not cleanly.
    pub fn stop(&mut self, place: usize, within: Duration) -> Result<Ended> {
        let ended = self.members[place].daemon.stop(within)?;
        self.bury(place)?;
        Ok(ended)
    }

    /// Waits until the one at this place ends by itself, or by a signal sent before.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn wait(&mut self, place: usize, within: Duration) -> Result<Ended> {
        let ended = self.members[place].daemon.wait(within)?;
        self.bury(place)?;
        Ok(ended)
    }

    /// SIGKILL to the one at this place; gives its name, and the moment right before.
    ///
    /// # Errors
    /// When it does not go.
    pub fn kill(&mut self, place: usize) -> Result<(String, Moment)> {
        let name = self.members[place].name().to_owned();
        let at = Moment::now();
        self.members[place].daemon.kill()?;
        self.bury(place)?;
        Ok((name, at))
    }

    /// SIGTERM to all at once; returns when all have ended, and how.
    ///
    /// # Errors
    /// When one does not end in time.
    pub fn stop_all(&mut self, within: Duration) -> Result<Vec<Ended>> {
        for member in &mut self.members {
            member.daemon.terminate()?;
        }
        let mut ended = Vec::new();
        while !self.members.is_empty() {
            // A second SIGTERM would end it at once.
            ended.push(self.wait(0, within)?);
        }
        Ok(ended)
    }

    /// An error when one has ended.
    ///
    /// # Errors
    /// With the end of its log.
    pub fn must_run(&mut self) -> Result<()> {
        self.members.iter_mut().try_for_each(|member| member.daemon.must_run())
    }

    /// The place of the daemon of this name.
    #[must_use]
    pub fn place(&self, name: &str) -> Option<usize> {
        self.members.iter().position(|member| member.name() == name)
    }

    /// The place of whoever writes this shard's rows.
    #[must_use]
    pub fn owner(&self, shard: u32) -> Option<usize> {
        let owns = |member: &Member| member.owned().is_ok_and(|owned| owned.contains(&shard));
        self.members.iter().position(owns)
    }

    /// Whether every one of `shards` shards is claimed by one daemon, and they are shared out evenly.
    #[must_use]
    pub fn is_even(&self, shards: u32) -> bool {
        let held: Vec<Vec<u32>> = self.members.iter().filter_map(|member| member.shards().ok()).collect();
        let counts: Vec<usize> = held.iter().map(Vec::len).collect();
        let mut all: Vec<u32> = held.into_iter().flatten().collect();
        all.sort_unstable();
        counts.len() == self.members.len()
            && all.iter().copied().eq(0..shards)
            && counts.iter().max().zip(counts.iter().min()).is_some_and(|(most, least)| most - least <= 1)
    }

    /// Waits until [`is_even`](Self::is_even), and gives how long that took.
    ///
    /// # Errors
    /// When it does not come to that in time, or a daemon ends.
    pub fn settle(&mut self, shards: u32, within: Duration) -> Result<Duration> {
        let began = Instant::now();
        let what = format!("{shards} shards to be shared out evenly over {}", self.members.len());
        let mut failed = None;
        let outcome = wait::until_true(&what, within, || {
            failed = self.must_run().err();
            failed.is_some() || self.is_even(shards)
        });
        if let Err(late) = outcome {
            let held: Vec<_> = self.members.iter().map(|member| (member.name(), member.shards())).collect();
            let what = format!("{what}; they have {held:?}");
            return Err(wait::TimedOut { what, ..late }.into());
        }
        failed.map_or_else(|| Ok(began.elapsed()), Err)
    }

    /// Waits until the shards of the one at this place hold what they may, or nearly, and nothing is pulled for the
    /// rows of `shard`.
    ///
    /// # Errors
    /// When it does not come to that in time.
    pub fn blocked(&self, place: usize, shard: u32, within: Duration) -> Result<()> {
        const LOOKS: u32 = 10;
        let member = &self.members[place];
        let full = |status: &Value| {
            let shards = status["shards"].as_array().into_iter().flatten();
            shards.filter(|shard| shard["phase"] == "owning").all(|shard| {
                let held = shard["held_rows"].as_u64().unwrap_or_default();
                4 * held >= 3 * shard["share_rows"].as_u64().unwrap_or_default()
            })
        };
        let consumer = format!("holdfast-{shard}");
        let mut quiet = 0;
        wait::until_true(&format!("everything of {} to be blocked", member.name()), within, || {
            let info = self.rig.jetstream().consumer(&self.rig.stream(shard), &consumer);
            let is_quiet = info.is_ok_and(|info| info["num_waiting"].as_u64().unwrap_or_default() == 0);
            quiet = if is_quiet && member.status().is_ok_and(|status| full(&status)) { quiet + 1 } else { 0 };
            quiet >= LOOKS
        })?;
        Ok(())
    }

    /// What all logs tell, those of daemons that have ended included, in the order of time.
    ///
    /// # Errors
    /// When a log cannot be read.
    pub fn events(&self) -> Result<Vec<Event>> {
        let mut events = self.past.clone();
        for member in &self.members {
            events.extend(member.events()?);
        }
        events.sort_by_key(|event| event.at);
        Ok(events)
    }

    /// The last lines of all logs, for a failed test.
    #[must_use]
    pub fn log_tails(&self) -> String {
        self.members
            .iter()
            .map(|member| format!("--- {}\n{}\n", member.name(), member.daemon.log_tail()))
            .collect::<Vec<_>>()
            .concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(seconds: u64, node: &str, message: &str) -> Event {
        Event {
            at: Moment::from_epoch(Duration::from_secs(seconds)),
            node: node.into(),
            message: message.into(),
            fields: serde_json::json!({ "shard": 3 }),
        }
    }

    #[test]
    fn a_change_of_owner_runs_from_the_last_insert_to_the_first_row() {
        let events = [
            event(1, "a", "first row accepted"),
            event(2, "a", "batch stored"),
            event(3, "a", "batch stored"),
            event(5, "b", "first row accepted"),
            event(6, "a", "batch stored"),
            event(7, "b", "batch stored"),
            event(8, "b", "first row accepted"),
        ];
        let found = changes(&events);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].shard, found[0].from.as_str(), found[0].to.as_str()), (3, "a", "b"));
        assert!((found[0].gap() - 2.0).abs() < 1e-9);
    }

    #[test]
    fn log_lines_are_read_and_others_left() {
        let line = r#"{"timestamp":"1970-01-01T00:00:02.500000Z","level":"DEBUG","fields":{"message":"batch stored","shard":3,"table":"t1","first":"7","last":"9","rows":2}}"#;
        let events = read_log("n", &format!("nonsense\n{line}\n"));
        let batches = stored_batches(&events);
        assert_eq!((batches.len(), batches[0].first, batches[0].last), (1, 7, 9));
        assert_eq!(batches[0].at, Moment::from_epoch(Duration::from_millis(2_500)));
    }
}
