//! The demonstration on a terminal: drawn again and again in place. Elsewhere: a line for each thing that happens.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::time::Duration;

use console::{Alignment, Color, Style, Term, measure_text_width, pad_str, truncate_str};

use super::scene::{Happened, Holds, Kind, Member, Stage, State};
use crate::exit::Exit;
use crate::output::{self, count};

/// From this width on, what happens stands beside the nodes instead of below them.
const WIDE: usize = 140;

/// The widest that the nodes' side becomes.
const SIDE: usize = 92;

/// Of what happened, at most so much is shown below the nodes, or beside them.
const BELOW: usize = 16;
const BESIDE: usize = 32;

/// How many samples a rate is made from, and how many a bar: more than lie between two batches of a table.
const RATE_OVER: usize = 10;
const BAR_OVER: usize = 4;

/// What a node's shards are drawn in.
const COLOURS: [Color; 6] =
    [Color::Cyan, Color::Green, Color::Magenta, Color::Yellow, Color::Blue, Color::Red];

/// How rows come in, sample by sample.
#[derive(Debug, Default)]
pub(super) struct Rates {
    samples: VecDeque<Sample>,
}

#[derive(Clone, Debug, Default)]
struct Sample {
    at: Duration,
    published: u64,
    stored: u64,
    written: Vec<u64>,
}

impl Rates {
    const MOST: usize = 400;

    /// Takes a sample, once there is something to measure.
    pub(super) fn take(&mut self, stage: &Stage) {
        if !stage.has_begun() {
            return;
        }
        if self.samples.len() >= Self::MOST {
            self.samples.pop_front();
        }
        self.samples.push_back(Sample {
            at: stage.elapsed(),
            published: stage.published,
            stored: stage.stored,
            written: stage.members.iter().map(|member| member.written).collect(),
        });
    }

    /// A count's growth in a second, of late.
    fn rate(&self, of: impl Fn(&Sample) -> u64) -> u64 {
        let Some(last) = self.samples.back() else { return 0 };
        let first = &self.samples[self.samples.len().saturating_sub(RATE_OVER)];
        per_second(of(last).saturating_sub(of(first)), last.at.saturating_sub(first.at))
    }

    pub(super) fn stored(&self) -> u64 {
        self.rate(|sample| sample.stored)
    }

    /// Rows stored of late, sample by sample, the latest last, as bars.
    fn bars(&self, width: usize, highest: u64) -> String {
        const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let rates: Vec<u64> = self
            .samples
            .iter()
            .zip(self.samples.iter().skip(BAR_OVER))
            .map(|(a, b)| per_second(b.stored.saturating_sub(a.stored), b.at.saturating_sub(a.at)))
            .collect();
        let shown = &rates[rates.len().saturating_sub(width)..];
        shown
            .iter()
            .map(|rate| {
                let level = rate.saturating_mul(4) / highest.max(1);
                BARS[usize::try_from(level).unwrap_or(BARS.len()).min(BARS.len() - 1)]
            })
            .collect()
    }
}

fn per_second(rows: u64, time: Duration) -> u64 {
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    rows.saturating_mul(1_000).checked_div(millis).unwrap_or(0)
}

/// What stands above everything.
#[derive(Debug)]
pub(super) struct Titles {
    pub(super) title: String,
    /// How members notice each other.
    pub(super) times: String,
    pub(super) length: Duration,
    /// Rows a second that are published.
    pub(super) rate: u64,
}

/// Where the demonstration is shown.
#[derive(Debug)]
pub(super) enum View {
    /// Nowhere.
    Silent,
    /// A line for each thing that happens.
    Lines { told: usize },
    /// Drawn in place.
    Live { term: Term, lines: usize },
}

impl View {
    /// For standard output, or for nobody.
    pub(super) fn new(silent: bool) -> Self {
        let term = Term::stdout();
        if silent {
            Self::Silent
        } else if term.features().is_attended() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
        {
            // A terminal that does not hide its cursor shows it.
            let _ = term.hide_cursor();
            Self::Live { term, lines: 0 }
        } else {
            Self::Lines { told: 0 }
        }
    }

    pub(super) const fn is_live(&self) -> bool {
        matches!(self, Self::Live { .. })
    }

    /// Shows how it stands.
    pub(super) fn show(&mut self, titles: &Titles, stage: &Stage, rates: &Rates) -> Result<(), Exit> {
        match self {
            Self::Silent => Ok(()),
            Self::Lines { told } => {
                let new = &stage.happened[(*told).min(stage.happened.len())..];
                let mut text = String::new();
                for what in new {
                    text.push_str(&line(what, false));
                    text.push('\n');
                }
                *told = stage.happened.len();
                output::text(&text)
            }
            Self::Live { term, lines } => {
                let (height, width) = term.size();
                let frame = frame(titles, stage, rates, Size { width, height }, console::colors_enabled());
                let mut text = if *lines > 0 { format!("\x1b[{lines}A\r") } else { String::new() };
                *lines = frame.len();
                for line in frame {
                    // Drawn over what was there, and what is left of that cleared: nothing flickers.
                    let _ = writeln!(text, "{line}\x1b[K");
                }
                text.push_str("\x1b[J");
                output::text(&text)
            }
        }
    }

    /// How rows come in, where there is no room to draw it.
    pub(super) fn tally(&self, stage: &Stage, rates: &Rates) -> Result<(), Exit> {
        if !matches!(self, Self::Lines { .. }) {
            return Ok(());
        }
        let text = format!(
            "{:>6.1} s  {} rows published, {} stored, {} a second\n",
            stage.elapsed().as_secs_f64(),
            count(stage.published),
            count(stage.stored),
            count(rates.stored())
        );
        output::text(&text)
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if let Self::Live { term, .. } = self {
            let _ = term.show_cursor();
        }
    }
}

/// A terminal's size, in characters.
#[derive(Clone, Copy, Debug)]
struct Size {
    width: u16,
    height: u16,
}

/// One picture: lines that fit.
fn frame(titles: &Titles, stage: &Stage, rates: &Rates, size: Size, colours: bool) -> Vec<String> {
    let (width, height) = (usize::from(size.width).max(20), usize::from(size.height).max(8));
    let is_wide = width >= WIDE;
    let left_width = if is_wide { SIDE } else { width - 1 };
    let most = height - 1;
    // What must be seen stands above the nodes, of which there can be more than fit.
    let mut lines = vec![
        Style::new().bold().force_styling(colours).apply_to(&titles.title).to_string(),
        Style::new().dim().force_styling(colours).apply_to(&titles.times).to_string(),
        progress(titles, stage, left_width, colours),
        format!(
            "published {:>11} {:>8}/s",
            count(stage.published),
            count(rates.rate(|sample| sample.published)),
        ),
        format!(
            "stored    {:>11} {:>8}/s  {} on their way",
            count(stage.stored),
            count(rates.stored()),
            count(stage.published.saturating_sub(stage.stored))
        ),
        Style::new().dim().force_styling(colours).apply_to(rates.bars(left_width, titles.rate)).to_string(),
        String::new(),
    ];
    let mut nodes = nodes(stage, rates, left_width, colours);
    let room = most.saturating_sub(lines.len());
    if nodes.len() > room {
        // The first of these lines is a heading.
        let shown = room.saturating_sub(2);
        let left_out = nodes.len() - 1 - shown;
        nodes.truncate(1 + shown);
        nodes.push(format!("… and {left_out} nodes more"));
    }
    lines.extend(nodes);
    if is_wide {
        lines.truncate(most);
        let room = most.min(lines.len().max(BESIDE));
        lines.resize(room, String::new());
        let from = stage.happened.len().saturating_sub(room);
        for (line, what) in lines.iter_mut().zip(&stage.happened[from..]) {
            let mut beside = String::new();
            pad(&mut beside, &truncate_str(line, left_width, "…"), left_width + 3);
            *line = format!("{beside}{}", self::line(what, colours));
        }
    } else {
        lines.push(String::new());
        let room = most.saturating_sub(lines.len()).min(BELOW);
        let from = stage.happened.len().saturating_sub(room);
        lines.extend(stage.happened[from..].iter().map(|what| line(what, colours)));
        lines.truncate(most);
    }
    lines.into_iter().map(|line| truncate_str(&line, width - 1, "…").into_owned()).collect()
}

fn progress(titles: &Titles, stage: &Stage, width: usize, colours: bool) -> String {
    let (done, all) = (stage.elapsed().min(titles.length), titles.length);
    let words = format!(" {:.1} of {} s", done.as_secs_f64(), all.as_secs());
    let room = width.saturating_sub(measure_text_width(&words)).clamp(1, 60);
    let full =
        usize::try_from(room as u128 * done.as_millis() / all.as_millis().max(1)).unwrap_or(room).min(room);
    let style = Style::new().green().force_styling(colours);
    let rest = Style::new().dim().force_styling(colours);
    format!("{}{}{words}", style.apply_to("━".repeat(full)), rest.apply_to("─".repeat(room - full)))
}

/// The latest start of each node, by name, with the shards that it has.
fn nodes(stage: &Stage, rates: &Rates, width: usize, colours: bool) -> Vec<String> {
    const NAME: usize = 9;
    const STATE: usize = 10;
    const FIGURES: usize = 22;
    let shards = stage.members.first().map_or(0, |member| member.holds.len());
    let cell = (width.saturating_sub(NAME + STATE + FIGURES) / shards.max(1)).min(3);
    let mut heading = format!("{:NAME$}{:STATE$}", "node", "state");
    match cell {
        0 => heading.push_str("shards    "),
        // Numbers of two figures would run into each other.
        1 | 2 if cell == 1 || shards > 10 => pad(&mut heading, "shards", shards * cell),
        _ => (0..shards).for_each(|shard| pad(&mut heading, &shard.to_string(), cell)),
    }
    let _ = write!(heading, "{:>12}{:>10}", "rows", "rows/s");
    let mut lines = vec![Style::new().dim().force_styling(colours).apply_to(heading).to_string()];
    let mut names: Vec<&str> = Vec::new();
    for member in &stage.members {
        if !names.contains(&member.name.as_str()) {
            names.push(&member.name);
        }
    }
    for (number, name) in names.into_iter().enumerate() {
        let starts: Vec<(usize, &Member)> =
            stage.members.iter().enumerate().filter(|(_, member)| member.name == name).collect();
        let Some((_, member)) = starts.last() else { continue };
        let style = Style::new().fg(COLOURS[number % COLOURS.len()]).force_styling(colours);
        let style = if member.state == State::Frozen { style.dim() } else { style };
        let mut line = format!("{name:NAME$}");
        let word = state_style(member.state).force_styling(colours).apply_to(member.state.word());
        pad(&mut line, &word.to_string(), STATE);
        if cell > 0 {
            for holds in &member.holds {
                let drawn = match holds {
                    Holds::Nothing => Style::new().dim().force_styling(colours).apply_to("·"),
                    Holds::StandsBy => style.apply_to("□"),
                    Holds::Owns => style.apply_to("■"),
                };
                pad(&mut line, &drawn.to_string(), cell);
            }
        } else {
            let owned = member.holds.iter().filter(|holds| **holds == Holds::Owns).count();
            let _ = write!(line, "{owned:<10}");
        }
        let written: u64 = starts.iter().map(|(_, member)| member.written).sum();
        let rate = rates.rate(|sample| {
            starts.iter().filter_map(|(place, _)| sample.written.get(*place)).copied().sum::<u64>()
        });
        let _ = write!(line, "{:>12}{:>10}", count(written), count(rate));
        lines.push(line);
    }
    lines
}

/// Adds text that takes so many columns.
fn pad(line: &mut String, text: &str, columns: usize) {
    line.push_str(&pad_str(text, columns, Alignment::Left, None));
}

fn state_style(state: State) -> Style {
    match state {
        State::Starting | State::Running => Style::new(),
        State::Stopping | State::Stopped => Style::new().dim(),
        State::Crashed => Style::new().red(),
        State::Frozen => Style::new().blue().bold(),
    }
}

/// Something that happened, in a line.
fn line(what: &Happened, colours: bool) -> String {
    let style = match what.kind {
        Kind::Script => Style::new().bold(),
        Kind::Moved => Style::new().green(),
        Kind::Noticed => Style::new(),
        Kind::Late => Style::new().yellow(),
        Kind::Trouble => Style::new().red().bold(),
    };
    format!("{:>6.1} s  {}", what.at.as_secs_f64(), style.force_styling(colours).apply_to(&what.text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::scene::Scene;

    fn drawn(nodes: u32, shards: u32, width: u16, height: u16, colours: bool) -> Vec<String> {
        let scene = Scene::new(shards);
        let mut rates = Rates::default();
        for node in (1..=nodes).chain([1]) {
            scene.enters(&format!("node-{node}"));
        }
        rates.take(&scene.stage());
        assert!(rates.samples.is_empty(), "nothing has begun");
        scene.begin();
        for event in 0..40 {
            scene.tell(Kind::Moved, format!("shard {event}: node-1 → node-2, handed over in 41 ms"));
            scene.stage().stored += 5_000;
            rates.take(&scene.stage());
        }
        let (title, times) = ("a title ".repeat(20), "times ".repeat(20));
        let titles = Titles { title, times, length: Duration::from_secs(15), rate: 20_000 };
        frame(&titles, &scene.stage(), &rates, Size { width, height }, colours)
    }

    #[test]
    fn a_picture_fits_its_terminal() {
        for (nodes, shards) in [(2, 1), (2, 8), (17, 8), (2, 16), (17, 32), (2, 64)] {
            for (width, height) in [(1, 1), (40, 10), (80, 24), (139, 50), (140, 24), (200, 50), (200, 8)] {
                for colours in [false, true] {
                    let lines = drawn(nodes, shards, width, height, colours);
                    assert!(lines.len() < usize::from(height).max(8), "{} lines of {height}", lines.len());
                    for figure in ["published ", "stored "] {
                        assert!(lines.iter().any(|line| line.starts_with(figure)), "{lines:#?}");
                    }
                    for line in lines {
                        let is = measure_text_width(&line);
                        assert!(is < usize::from(width).max(20), "{is} columns of {width}: {line}");
                    }
                }
            }
        }
    }

    #[test]
    fn nodes_that_do_not_fit_are_counted() {
        // Seven lines stand above the nodes.
        for (height, shown) in [(24, 14), (25, 15), (26, 17), (10, 0)] {
            let text = drawn(17, 8, 80, height, false).join("\n");
            assert_eq!(text.matches(" starting ").count(), shown, "{height}: {text}");
            let left_out = format!("… and {} nodes more", 17 - shown);
            assert_eq!(text.contains(&left_out), shown < 17, "{height}: {text}");
        }
    }

    #[test]
    fn a_heading_can_be_read() {
        for shards in 1..=64 {
            for width in [60, 80, 100, 140, 200] {
                let lines = drawn(2, shards, width, 24, false);
                let heading = lines.iter().find(|line| line.starts_with("node ")).unwrap();
                let words: Vec<&str> =
                    heading.split_whitespace().skip(2).take_while(|word| *word != "rows").collect();
                let numbers: Vec<String> = (0..shards).map(|shard| shard.to_string()).collect();
                assert!(words == ["shards"] || words == numbers, "{shards} in {width}: {heading}");
            }
        }
    }

    #[test]
    fn a_node_that_was_started_again_has_one_line_and_what_happened_last_is_shown() {
        for width in [80, 200] {
            let text = drawn(2, 8, width, 30, false).join("\n");
            assert_eq!(text.matches("node-1   starting").count(), 1, "{text}");
            assert!(text.contains("shard 39:") && !text.contains("shard 1:"), "{text}");
            assert!(!text.contains('\x1b'), "{text}");
        }
    }
}
