//! `holdfast dead-letters`: what was parked and why, putting it through the stream again, dropping it.
//!
//! Everything in a letter comes from anybody: a terminal is shown nothing that could move it.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use holdfast_core::row::Seq;
use holdfast_core::time::Timestamp;
use holdfast_nats::letters::{Letters, MAX_PAGE, Opened, Page, Summary};
use serde::Serialize;

use crate::assembly::connect;
use crate::cli::{DeadLettersCommand, Selection};
use crate::config::Config;
use crate::exit::Exit;
use crate::output::{self, Width, count, shown};

/// Characters of a payload that `show` prints; `--payload` prints it whole.
const SHOWN: usize = 4_096;

/// The list, as `--json` prints it.
#[derive(Debug, Serialize)]
struct List {
    #[serde(flatten)]
    page: Page,
    /// Letters that are there, of every table.
    total: u64,
}

/// One letter, as `--json` prints it.
#[derive(Debug, Serialize)]
struct Whole<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    headers: &'a [(String, String)],
    /// The payload, where it is text.
    payload: Option<&'a str>,
    payload_base64: String,
}

/// What became of the letters, as `--json` prints it.
#[derive(Debug, Default, Serialize)]
struct Outcome {
    done: Vec<Done>,
    failed: Vec<Failed>,
}

#[derive(Debug, Serialize)]
struct Done {
    position: Seq,
    /// The row's new place in the stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    seq: Option<Seq>,
    /// An earlier replay had stored it already.
    #[serde(skip_serializing_if = "is_false")]
    repeated: bool,
}

#[derive(Debug, Serialize)]
struct Failed {
    position: Seq,
    why: String,
}

// The signature is serde's.
#[expect(clippy::trivially_copy_pass_by_ref)]
fn is_false(truth: &bool) -> bool {
    !truth
}

/// Lists, shows, replays or drops dead letters.
///
/// # Errors
/// What the server refused, that a letter is not there, or that nobody confirmed.
pub async fn dead_letters(config: &Config, command: &DeadLettersCommand) -> Result<(), Exit> {
    if !config.parking().dead_letters {
        return Err(Exit::usage("topology.dead_letters is \"\": there are no dead letters"));
    }
    let topology = config.topology()?;
    let letters = Letters::new(connect(config).await?, &topology);
    match command {
        DeadLettersCommand::List { table, from, limit, json } => {
            let limit = usize::try_from(*limit).unwrap_or(MAX_PAGE).min(MAX_PAGE);
            let page = letters.list(table.as_deref(), Seq(*from), limit).await.map_err(Exit::error)?;
            let total = letters.count().await.map_err(Exit::error)?;
            if json.json {
                return output::json(&List { page, total });
            }
            output::text(&list(&page, total, table.as_deref(), Width::of_output()))
        }
        DeadLettersCommand::Show { position, payload, json } => {
            let letter = letters.get(Seq(*position)).await.map_err(Exit::error)?;
            let letter = letter.ok_or_else(|| not_there(*position))?;
            if *payload {
                std::io::stdout().lock().write_all(&letter.payload)?;
                return Ok(());
            }
            if json.json {
                return output::json(&Whole {
                    summary: &letter.summary,
                    headers: &letter.headers,
                    payload: std::str::from_utf8(&letter.payload).ok(),
                    payload_base64: STANDARD.encode(&letter.payload),
                });
            }
            output::text(&show(&letter))
        }
        DeadLettersCommand::Replay { selection, into, json } => {
            let chosen = choose(&letters, selection).await?;
            let into_table = into.as_ref().map(|table| format!("into table {}", shown(table, 60)));
            let place = |own: &str| into_table.clone().unwrap_or_else(|| own.to_owned());
            let one = format!(
                "goes through the stream again, as a new row at its end, {}",
                place("into its table")
            );
            let many = format!(
                "go through the stream again, as new rows at its end, {}",
                place("into their tables")
            );
            confirm(&chosen, [&one, &many], selection)?;
            let mut outcome = Outcome::default();
            for position in chosen.positions() {
                match letters.replay(position, into.as_deref()).await {
                    Ok(replayed) => {
                        outcome.done.push(Done {
                            position,
                            seq: Some(replayed.seq),
                            repeated: replayed.repeated,
                        });
                        if let Some(failure) = replayed.left {
                            let why = format!(
                                "stored as row {}, but the letter is still there: {failure}",
                                replayed.seq
                            );
                            outcome.failed.push(Failed { position, why });
                        }
                    }
                    Err(error) => outcome.failed.push(Failed { position, why: error.to_string() }),
                }
            }
            report(&outcome, "replayed", json.json, chosen.more)
        }
        DeadLettersCommand::Drop { selection, json } => {
            let chosen = choose(&letters, selection).await?;
            let one = "is removed for good: nobody has this row any more";
            let many = "are removed for good: nobody has these rows any more";
            confirm(&chosen, [one, many], selection)?;
            let mut outcome = Outcome::default();
            for position in chosen.positions() {
                match letters.drop_letter(position).await {
                    Ok(true) => outcome.done.push(Done { position, seq: None, repeated: false }),
                    Ok(false) => {
                        let why = format!("there is no dead letter {position}");
                        outcome.failed.push(Failed { position, why });
                    }
                    Err(failure) => outcome.failed.push(Failed { position, why: failure.to_string() }),
                }
            }
            report(&outcome, "dropped", json.json, chosen.more)
        }
    }
}

fn not_there(position: u64) -> Exit {
    Exit::error(format!("there is no dead letter {position}; `holdfast dead-letters list` shows them"))
}

/// The letters that a command is about, read before anything is changed: what is replayed and refused again gets
/// a new place behind them, and is left alone.
struct Chosen {
    letters: Vec<Summary>,
    /// There are more than were taken.
    more: bool,
}

impl Chosen {
    fn positions(&self) -> impl Iterator<Item = Seq> + '_ {
        self.letters.iter().map(|letter| letter.position)
    }
}

async fn choose(letters: &Letters, selection: &Selection) -> Result<Chosen, Exit> {
    let mut chosen = Chosen { letters: Vec::new(), more: false };
    if !selection.position.is_empty() {
        for position in &selection.position {
            let letter = letters.get(Seq(*position)).await.map_err(Exit::error)?;
            chosen.letters.push(letter.ok_or_else(|| not_there(*position))?.summary);
        }
        chosen.letters.sort_by_key(|letter| letter.position);
        chosen.letters.dedup_by_key(|letter| letter.position);
        return Ok(chosen);
    }
    let limit = usize::try_from(selection.limit).unwrap_or(usize::MAX);
    let mut from = Seq(1);
    loop {
        let room = (limit - chosen.letters.len()).min(MAX_PAGE);
        let page = letters.list(selection.table.as_deref(), from, room).await.map_err(Exit::error)?;
        chosen.letters.extend(page.letters);
        let Some(next) = page.next else { return Ok(chosen) };
        from = next;
        if chosen.letters.len() >= limit {
            let rest = letters.list(selection.table.as_deref(), from, 1).await.map_err(Exit::error)?;
            chosen.more = !rest.letters.is_empty();
            return Ok(chosen);
        }
    }
}

/// Asks whether to go on; `what` says what becomes of one, and of many.
fn confirm(chosen: &Chosen, what: [&str; 2], selection: &Selection) -> Result<(), Exit> {
    let [one, many] = what;
    let (Some(first), Some(last)) = (chosen.letters.first(), chosen.letters.last()) else { return Ok(()) };
    if selection.yes {
        return Ok(());
    }
    match &chosen.letters[..] {
        [letter] => eprintln!("Dead letter {} ({}) {one}.", letter.position, place(letter)),
        letters => eprintln!(
            "{} dead letters, {} ({}) to {} ({}), {many}.",
            count(letters.len() as u64),
            first.position,
            place(first),
            last.position,
            place(last)
        ),
    }
    if chosen.more {
        eprintln!("There are more of them; --limit takes more at once.");
    }
    if !std::io::stdin().is_terminal() {
        return Err(Exit::usage("nobody to ask here: say --yes"));
    }
    eprint!("Type yes to go on: ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    if answer.trim() == "yes" { Ok(()) } else { Err(Exit::error("left as they were")) }
}

fn place(letter: &Summary) -> String {
    let table = letter.table.as_ref().map_or("no table".to_owned(), |table| shown(table.as_str(), 40));
    let row = letter.seq.map_or(String::new(), |seq| format!(", row {seq}"));
    format!("{table}{row}")
}

fn report(outcome: &Outcome, done: &str, json: bool, more: bool) -> Result<(), Exit> {
    if json {
        output::json(outcome)?;
    } else {
        let mut text = format!("{} {done}", count(outcome.done.len() as u64));
        if let [Done { seq: Some(seq), repeated, .. }] = outcome.done[..] {
            let before = if repeated { ", by an earlier replay" } else { "" };
            let _ = write!(text, ", as row {seq}{before}");
        }
        if !outcome.failed.is_empty() {
            let _ = write!(text, ", {} not", count(outcome.failed.len() as u64));
        }
        text.push('\n');
        for Failed { why, .. } in &outcome.failed {
            let _ = writeln!(text, "  {}", shown(why, 500));
        }
        if more {
            text.push_str("There are more of them: do it again.\n");
        }
        output::text(&text)?;
    }
    if outcome.failed.is_empty() { Ok(()) } else { Err(Exit::findings()) }
}

fn moment(time: Timestamp) -> String {
    let nanos = u64::try_from(time.0).unwrap_or_default();
    let seconds = Duration::from_secs(nanos / 1_000_000_000);
    // Beyond the year 9999 there is no such form; a server's clock is never there.
    let time = SystemTime::UNIX_EPOCH + seconds.min(Duration::from_secs(253_402_300_799));
    humantime::format_rfc3339_seconds(time).to_string().replace('T', " ").replace('Z', "")
}

/// The list for a terminal.
fn list(page: &Page, total: u64, table: Option<&str>, width: Width) -> String {
    let mut text = String::new();
    if page.letters.is_empty() {
        let of = table.map_or(String::new(), |table| format!(" of table {}", shown(table, 60)));
        let _ = writeln!(text, "no dead letters{of} here; {} in all", count(total));
        return text;
    }
    if let Some(columns) = width.columns() {
        text.push_str(&two_lines_each(page, columns));
    } else {
        let rows = page.letters.iter().map(|letter| {
            [
                letter.position.to_string(),
                moment(letter.kept_at),
                letter.table.as_ref().map_or("–".to_owned(), |table| shown(table.as_str(), 100)),
                letter.seq.map_or("–".to_owned(), |seq| seq.to_string()),
                shown(letter.cause.as_deref().unwrap_or("–"), 20),
                letter.size.to_string(),
                why(letter, 300),
            ]
        });
        let headings = [">LETTER", "KEPT (UTC)", "TABLE", ">ROW", "CAUSE", ">BYTES", "WHY"];
        text.push_str(&output::render(headings, rows, width));
    }
    let _ = match page.next {
        Some(next) => writeln!(text, "{} in all; go on with --from {next}", count(total)),
        None => writeln!(text, "{} in all; these are the last", count(total)),
    };
    text
}

/// The list where a line has an end: the reason stands below its letter.
fn two_lines_each(page: &Page, columns: usize) -> String {
    let rows = page.letters.iter().map(|letter| {
        [
            letter.position.to_string(),
            moment(letter.kept_at),
            letter.table.as_ref().map_or("–".to_owned(), |table| shown(table.as_str(), 16)),
            letter.seq.map_or("–".to_owned(), |seq| seq.to_string()),
            shown(letter.cause.as_deref().unwrap_or("–"), 13),
            letter.size.to_string(),
        ]
    });
    let headings = [">LETTER", "KEPT (UTC)", "TABLE", ">ROW", "CAUSE", ">BYTES"];
    let table = output::render(headings, rows, Width::Any);
    let mut lines = table.lines();
    let mut text = format!("{}\n", lines.next().unwrap_or_default());
    for (line, letter) in lines.zip(&page.letters) {
        let _ = writeln!(text, "{line}\n         {}", why(letter, columns.saturating_sub(10)));
    }
    text
}

/// Why it is a dead letter, in at most so many characters and an ellipsis.
fn why(letter: &Summary, most: usize) -> String {
    let words = letter.message.as_deref().unwrap_or("no reason is known");
    match letter.code {
        Some(code) => {
            let code = format!("code {code}: ");
            let words = output::reason(words, most.saturating_sub(code.len()));
            code + &words
        }
        None => output::reason(words, most),
    }
}

/// A letter for a terminal.
fn show(letter: &Opened) -> String {
    let Opened { summary, headers, payload } = letter;
    let mut text = format!("dead letter {}, kept {} UTC\n", summary.position, moment(summary.kept_at));
    let mut line = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            let _ = writeln!(text, "  {name:<10}{value}");
        }
    };
    line("table", summary.table.as_ref().map(|table| shown(table.as_str(), 500)));
    line("row", summary.seq.map(|seq| seq.to_string()));
    line("shard", summary.shard.map(|shard| shard.to_string()));
    line("stored", summary.stored_at.map(|at| format!("{} UTC", moment(at))));
    line("stream", summary.created.map(|created| format!("the one created at {} ns", created.0)));
    line("cause", summary.cause.as_deref().map(|cause| shown(cause, 40)));
    line("code", summary.code.map(|code| code.to_string()));
    line("why", summary.message.as_deref().map(|why| shown(why, 1_000)));
    line("attempts", summary.attempts.map(|attempts| attempts.to_string()));
    text.push_str("headers\n");
    for (name, value) in headers {
        let _ = writeln!(text, "  {}: {}", shown(name, 100), shown(value, 500));
    }
    let _ = writeln!(text, "payload, {} bytes", count(payload.len() as u64));
    let is_text = std::str::from_utf8(payload).is_ok();
    for line in String::from_utf8_lossy(payload).lines().take(40) {
        let _ = writeln!(text, "  {}", shown(line, SHOWN));
    }
    if !is_text {
        text.push_str("(not text: --payload prints the bytes as they are)\n");
    } else if payload.len() > SHOWN {
        text.push_str("(--payload prints all of it)\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use holdfast_core::row::{ShardId, TableName};

    use super::*;

    fn summary() -> Summary {
        Summary {
            position: Seq(17),
            subject: "ingest-dead.5.3.clicks.42".into(),
            kept_at: Timestamp(1_700_000_000_123_456_789),
            created: Some(Timestamp(5)),
            shard: Some(ShardId(3)),
            table: Some(TableName::new("clicks\u{1b}[2J\u{202e}")),
            seq: Some(Seq(42)),
            stored_at: Some(Timestamp(1_700_000_000_000_000_000)),
            cause: Some("refused".into()),
            class: Some("data".into()),
            code: Some(27),
            message: Some("Cannot parse input: expected ',' before: '\u{202e}x'".into()),
            attempts: Some(2),
            size: 12,
        }
    }

    fn nothing_that_moves(text: &str) {
        let hidden = text.chars().find(|c| *c != '\n' && (c.is_control() || *c == '\u{202e}'));
        assert_eq!(hidden, None, "{text}");
    }

    #[test]
    fn hostile_letters_are_listed_within_the_terminal() {
        let page = Page { letters: vec![summary(); 3], next: Some(Seq(18)) };
        let text = list(&page, 1_234, None, Width::Columns(80));
        nothing_that_moves(&text);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("refused") && text.ends_with("1,234 in all; go on with --from 18\n"), "{text}");
        let text = list(&Page::default(), 3, Some("\u{1b}x"), Width::Any);
        assert_eq!(text, "no dead letters of table \\u{1b}x here; 3 in all\n");
    }

    #[test]
    fn a_letter_of_any_bytes_is_shown() {
        for payload in [&b"{\"a\": 1}\n\x1b[31m\r\nlast"[..], &[0xff, 0xfe, 0, 27], b"", &[b'x'; 10_000]] {
            let letter = Opened {
                summary: summary(),
                headers: vec![("Nats-Msg-Id".into(), "\u{1b}]0;title\u{7}".into())],
                payload: Bytes::copy_from_slice(payload),
            };
            let text = show(&letter);
            nothing_that_moves(&text);
            assert!(text.contains("2023-11-14 22:13:20") && text.contains("code      27"), "{text}");
            assert!(text.len() < 8_000);
        }
    }

    #[test]
    fn a_moment_of_any_clock_is_shown() {
        assert_eq!(moment(Timestamp(1_700_000_000_123_456_789)), "2023-11-14 22:13:20");
        for nanos in [i64::MIN, -1, 0, i64::MAX] {
            assert!(!moment(Timestamp(nanos)).is_empty());
        }
    }
}
