//! A run drawn: one HTML page that needs nothing else.
//!
//! A lane for each process and shard; bars for who waits, takes over, owns and halts, for what is frozen or down,
//! and for inserts from their sending to their answer; marks for faults and for what the store and the ledger do.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Serialize;

use crate::campaign::Trace;
use crate::trace::Happening;

/// Something that lasts.
#[derive(Serialize)]
struct Span {
    lane: String,
    kind: &'static str,
    from: f64,
    to: f64,
    text: String,
}

/// A line of the trace.
#[derive(Serialize)]
struct Line {
    at: f64,
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    lane: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mark: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    seqs: Vec<u64>,
}

#[derive(Serialize)]
struct Page<'a> {
    seed: u64,
    hash: String,
    end: f64,
    violation: Option<&'a crate::invariants::Violation>,
    lanes: Vec<String>,
    spans: Vec<Span>,
    lines: Vec<Line>,
}

fn lane(process: u32, shard: u32) -> String {
    format!("p{process} s{shard}")
}

fn seconds(at: Duration) -> f64 {
    at.as_secs_f64()
}

/// Draws a run as one HTML page.
///
/// # Panics
/// Never: a page is plain data.
#[must_use]
pub fn timeline(trace: &Trace) -> String {
    let end = trace.happenings.last().map_or(0.0, |(at, _)| seconds(*at));
    let mut drawing = Drawing::default();
    for (at, happening) in &trace.happenings {
        drawing.take(seconds(*at), happening);
    }
    let (lanes, spans, told) = drawing.finish(end);
    let hash = format!("{:016x}", trace.hash);
    let page =
        Page { seed: trace.seed, hash, end, violation: trace.violation.as_ref(), lanes, spans, lines: told };
    // Inside a script nothing may look like its end.
    let data = serde_json::to_string(&page).expect("a page is plain data").replace("</", "<\\/");
    include_str!("timeline.html").replace("/*DATA*/null", &data)
}

#[derive(Default)]
struct Drawing {
    lanes: BTreeSet<String>,
    phases: BTreeMap<String, (f64, &'static str, String)>,
    states: BTreeMap<u32, (f64, &'static str)>,
    inserts: BTreeMap<(u32, u32, u64), (f64, String)>,
    spans: Vec<Span>,
    lines: Vec<Line>,
}

impl Drawing {
    fn take(&mut self, at: f64, happening: &Happening) {
        let mut line = Line { at, text: happening.to_string(), lane: None, mark: None, seqs: Vec::new() };
        match happening {
            Happening::Fault(_) => line.mark = Some("fault"),
            Happening::Violated { .. } => line.mark = Some("violation"),
            Happening::Process { process, what } => self.process(at, *process, what),
            Happening::Published { seq, .. } => line.seqs.push(*seq),
            Happening::Delivered { process, shard, seqs, .. } => {
                line.lane = Some(lane(*process, *shard));
                line.seqs.clone_from(seqs);
            }
            Happening::Pin { process, shard, .. } => {
                line.lane = Some(lane(*process, *shard));
                line.mark = Some("pin");
            }
            Happening::Asked { process, shard, .. } => {
                line.lane = Some(lane(*process, *shard));
                line.mark = Some("reset");
            }
            Happening::Ledger { process, shard, stored, open, .. } => {
                line.lane = Some(lane(*process, *shard));
                line.mark = Some(if stored.is_some() { "ledger" } else { "conflict" });
                line.seqs = open.iter().flat_map(|(_, first, last, _)| [*first, *last]).collect();
            }
            Happening::Letter { process, shard, seq, .. } => {
                line.lane = Some(lane(*process, *shard));
                line.seqs.push(*seq);
            }
            Happening::Sent { process, shard, attempt, seqs, .. } => {
                line.lane = Some(lane(*process, *shard));
                line.seqs.clone_from(seqs);
                self.inserts.insert((*process, *shard, *attempt), (at, line.text.clone()));
            }
            Happening::Part { process, shard, what, seqs, .. } => {
                line.lane = Some(lane(*process, *shard));
                line.seqs.clone_from(seqs);
                line.mark = Some(what);
            }
            Happening::Answered { process, shard, attempt, how, .. } => {
                line.lane = Some(lane(*process, *shard));
                self.insert_ends(at, (*process, *shard, *attempt), how);
            }
            Happening::Phase { process, shard, phase, epoch } => {
                let place = lane(*process, *shard);
                line.lane = Some(place.clone());
                let text =
                    epoch.map_or_else(|| (*phase).to_owned(), |epoch| format!("{phase}, epoch {epoch}"));
                self.phase(at, place, phase, text);
                // Giving a shard up breaks off what is under way; it may land all the same.
                if !matches!(*phase, "owning" | "halting" | "handing over") {
                    let ours = |insert: &&(u32, u32, u64)| (insert.0, insert.1) == (*process, *shard);
                    let over: Vec<_> = self.inserts.keys().filter(ours).copied().collect();
                    for insert in over {
                        self.insert_ends(at, insert, "broken off");
                    }
                }
            }
            Happening::Told { process, shard, .. } | Happening::Reported { process, shard, .. } => {
                line.lane = Some(lane(*process, *shard));
            }
            Happening::Ordered { process, shard, .. } => {
                line.lane = Some(lane(*process, *shard));
                line.mark = Some("order");
            }
            Happening::Shared { .. } => {}
            Happening::Removed { seqs, .. } => line.seqs.clone_from(seqs),
        }
        if let Some(lane) = &line.lane {
            self.lanes.insert(lane.clone());
        }
        self.lines.push(line);
    }

    fn phase(&mut self, at: f64, lane: String, phase: &'static str, text: String) {
        if let Some((from, kind, text)) = self.phases.insert(lane.clone(), (at, phase, text)) {
            self.spans.push(Span { lane, kind, from, to: at, text });
        }
    }

    fn process(&mut self, at: f64, process: u32, what: &'static str) {
        if let Some((from, kind)) = self.states.remove(&process) {
            self.spans.push(Span { lane: format!("p{process}"), kind, from, to: at, text: kind.to_owned() });
        }
        match what {
            "is frozen" => {
                self.states.insert(process, (at, "frozen"));
            }
            "is killed" | "has stopped" => {
                self.states.insert(process, (at, "down"));
                let of_it = format!("p{process} ");
                let over: Vec<String> =
                    self.phases.keys().filter(|lane| lane.starts_with(&of_it)).cloned().collect();
                for lane in over {
                    if let Some((from, kind, text)) = self.phases.remove(&lane) {
                        self.spans.push(Span { lane, kind, from, to: at, text });
                    }
                }
            }
            _ => {}
        }
    }

    fn insert_ends(&mut self, at: f64, insert: (u32, u32, u64), how: &str) {
        if let Some((from, text)) = self.inserts.remove(&insert) {
            let kind = if how == "stored" { "insert" } else { "doubted" };
            let (lane, text) = (lane(insert.0, insert.1), format!("{text}: {how}"));
            self.spans.push(Span { lane, kind, from, to: at, text });
        }
    }

    fn finish(mut self, end: f64) -> (Vec<String>, Vec<Span>, Vec<Line>) {
        for (lane, (from, kind, text)) in std::mem::take(&mut self.phases) {
            self.spans.push(Span { lane, kind, from, to: end, text });
        }
        for (process, (from, kind)) in std::mem::take(&mut self.states) {
            self.spans.push(Span { lane: format!("p{process}"), kind, from, to: end, text: kind.to_owned() });
        }
        for insert in self.inserts.keys().copied().collect::<Vec<_>>() {
            self.insert_ends(end, insert, "never answered");
        }
        (self.lanes.into_iter().collect(), self.spans, self.lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_whole_and_holds_the_run() {
        let trace = crate::campaign::replay(1, crate::scenario::Profile::Swarm);
        let page = timeline(&trace);
        assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
        assert!(page.contains("\"lanes\":[\"p") && !page.contains("/*DATA*/"));
        assert!(!page.contains("http://") && !page.contains("https://"), "nothing is fetched");
        assert_eq!(page.matches("</script>").count(), 1);
    }
}
