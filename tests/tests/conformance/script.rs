//! Scripts as they stand in `tests/conformance/*.script`: read, and nothing more.

use std::path::Path;
use std::time::Duration;

/// The stream and the tables that a script wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Setup {
    pub(crate) pinned_ttl: Duration,
    pub(crate) acks: Acks,
    pub(crate) ack_wait: Duration,
    pub(crate) max_ack_pending: Option<u32>,
    /// Servers that keep the stream: more than one are a cluster.
    pub(crate) replicas: u32,
    pub(crate) tables: Vec<Table>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acks {
    None,
    Explicit,
    WorkQueue,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) name: String,
    /// Rows fall into as many partitions by their number.
    pub(crate) partitions: u64,
    /// Parts whose tokens are remembered; 0: the table has no window.
    pub(crate) window: u32,
    /// Whether it has the columns by which rows are read back.
    pub(crate) columns: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub(crate) id: String,
    /// The file's name.
    pub(crate) file: String,
    pub(crate) setup: Setup,
    pub(crate) steps: Vec<Step>,
}

impl Script {
    /// Whether a step or its answer has one of these texts in it.
    pub(crate) fn has(&self, texts: &[&str]) -> bool {
        self.steps.iter().any(|step| texts.iter().any(|text| step.text.contains(text)))
    }

    /// Whether it stops a server under everybody's feet.
    pub(crate) fn restarts(&self) -> bool {
        let stops = |step: &Step| matches!(step.words[0].as_str(), "restart" | "keep-state" | "lose-tail");
        self.steps.iter().any(stops)
    }
}

/// One line: who does what, the answer, and how long it may take.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) line: usize,
    pub(crate) text: String,
    /// The client; none: the operator.
    pub(crate) who: Option<String>,
    /// Asked again until the answer is right, for what has no answer of its own when it is done.
    pub(crate) eventually: bool,
    pub(crate) words: Vec<String>,
    pub(crate) expected: Vec<String>,
    pub(crate) took: Option<(Duration, Duration)>,
}

/// All scripts of a folder, by file and place.
pub(crate) fn read(folder: &Path) -> Result<Vec<Script>, String> {
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "script"));
    paths.sort();
    let mut scripts = Vec::new();
    for path in paths {
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{file}: {error}"))?;
        scripts.extend(parse(&file, &text)?);
    }
    Ok(scripts)
}

pub(crate) fn parse(file: &str, text: &str) -> Result<Vec<Script>, String> {
    let mut scripts: Vec<Script> = Vec::new();
    for (at, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let wrong = |why: String| format!("{file}:{at}: {why}");
        let words: Vec<&str> = line.split_whitespace().collect();
        if let ["script", id] = words[..] {
            let (file, id) = (file.to_owned(), id.to_owned());
            scripts.push(Script { id, file, setup: Setup::default(), steps: Vec::new() });
            continue;
        }
        let script = scripts.last_mut().ok_or_else(|| wrong("a line before the first script".into()))?;
        match words[0] {
            "stream" => script.setup.stream(&words[1..]).map_err(wrong)?,
            "table" => script.setup.table(&words[1..]).map_err(wrong)?,
            _ => script.steps.push(Step::parse(at, line).map_err(wrong)?),
        }
    }
    Ok(scripts)
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            // A pin lapses only where that is the point, however slow the machine is.
            pinned_ttl: Duration::from_mins(2),
            acks: Acks::None,
            ack_wait: Duration::from_mins(2),
            max_ack_pending: None,
            replicas: 1,
            tables: Vec::new(),
        }
    }
}

impl Setup {
    fn stream(&mut self, words: &[&str]) -> Result<(), String> {
        for pair in words.chunks(2) {
            match pair {
                ["ttl", time] => self.pinned_ttl = duration(time)?,
                ["acks", "explicit"] => self.acks = Acks::Explicit,
                ["acks", "work-queue"] => self.acks = Acks::WorkQueue,
                ["wait", time] => self.ack_wait = duration(time)?,
                ["replicas", servers] => self.replicas = number(servers)?,
                ["max-pending", rows] => self.max_ack_pending = Some(number(rows)?),
                other => return Err(format!("{other:?} says nothing of a stream")),
            }
        }
        Ok(())
    }

    fn table(&mut self, words: &[&str]) -> Result<(), String> {
        let (name, mut rest) = words.split_first().ok_or("a table without a name")?;
        let mut table = Table { name: (*name).to_owned(), partitions: 1, window: 1_000, columns: true };
        while let Some((word, after)) = rest.split_first() {
            rest = after;
            let mut value = || -> Result<u64, String> {
                let (value, after) = rest.split_first().ok_or("a number is missing")?;
                rest = after;
                number(value)
            };
            match *word {
                "partitions" => table.partitions = value()?,
                "window" => table.window = u32::try_from(value()?).map_err(|error| error.to_string())?,
                "no-columns" => table.columns = false,
                other => return Err(format!("{other:?} says nothing of a table")),
            }
        }
        self.tables.push(table);
        Ok(())
    }
}

impl Step {
    fn parse(line: usize, text: &str) -> Result<Self, String> {
        let (asked, answer) = text.split_once("->").unwrap_or((text, ""));
        let owned = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let (mut words, mut expected) = (owned(asked), owned(answer));
        let mut took = None;
        if let [.., word, range] = &expected[..]
            && word == "in"
        {
            let (from, to) =
                range.split_once("..").ok_or_else(|| format!("{range:?} is no range of times"))?;
            let or = |text: &str, otherwise| if text.is_empty() { Ok(otherwise) } else { duration(text) };
            took = Some((or(from, Duration::ZERO)?, or(to, Duration::MAX)?));
            expected.truncate(expected.len() - 2);
        }
        let eventually = words.first().is_some_and(|word| word == "eventually");
        if eventually {
            words.remove(0);
        }
        let who = words.first().and_then(|word| word.strip_suffix(':')).map(str::to_owned);
        if who.is_some() {
            words.remove(0);
        }
        if words.is_empty() {
            return Err("nothing is done".to_owned());
        }
        Ok(Self { line, text: text.to_owned(), who, eventually, words, expected, took })
    }
}

/// `300ms`, `2s`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    if let Some(millis) = text.strip_suffix("ms") {
        return number(millis).map(Duration::from_millis);
    }
    let seconds = text.strip_suffix('s').ok_or_else(|| format!("{text:?} is no time"))?;
    number(seconds).map(Duration::from_secs)
}

pub(crate) fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{text:?} is no number"))
}
