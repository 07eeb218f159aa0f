//! What commands print on standard output.

use std::io::{IsTerminal, Write};

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde::Serialize;

use crate::exit::Exit;

/// Prints one JSON document and a newline.
///
/// # Errors
/// If standard output cannot be written to.
pub fn json(value: &impl Serialize) -> Result<(), Exit> {
    document(std::io::stdout().lock(), value)
}

fn document(mut out: impl Write, value: &impl Serialize) -> Result<(), Exit> {
    // As an error of the output, if it is one: whoever closed it wants no word about that.
    serde_json::to_writer_pretty(&mut out, value).map_err(std::io::Error::from)?;
    writeln!(out)?;
    Ok(())
}

/// Prints text.
///
/// # Errors
/// If standard output cannot be written to.
pub fn text(text: &str) -> Result<(), Exit> {
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(())
}

/// Prints a line.
///
/// # Errors
/// If standard output cannot be written to.
pub fn line(line: impl std::fmt::Display) -> Result<(), Exit> {
    writeln!(std::io::stdout().lock(), "{line}")?;
    Ok(())
}

/// Prints a table with these headings, as wide as the terminal allows.
///
/// # Errors
/// If standard output cannot be written to.
pub fn table<const N: usize>(
    headings: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> Result<(), Exit> {
    text(&render(headings, rows, Width::of_output()))
}

/// How wide a table may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// As wide as it is.
    Any,
    /// As wide as the terminal.
    Terminal,
    /// So many columns.
    Columns(u16),
}

impl Width {
    /// In columns, if it has a bound.
    #[must_use]
    pub fn columns(self) -> Option<usize> {
        match self {
            Self::Any => None,
            // What the table's own terminal says.
            Self::Terminal => {
                Table::new().set_content_arrangement(ContentArrangement::Dynamic).width().map(usize::from)
            }
            Self::Columns(columns) => Some(usize::from(columns)),
        }
    }

    /// What fits standard output.
    #[must_use]
    pub fn of_output() -> Self {
        if std::io::stdout().is_terminal() { Self::Terminal } else { Self::Any }
    }
}

/// A table as text. Headings that begin with `>` are those of figures, and stand to the right.
pub fn render<const N: usize>(
    headings: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
    width: Width,
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(headings.map(|heading| heading.trim_start_matches('>')));
    if width != Width::Any {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    if let Width::Columns(columns) = width {
        table.set_width(columns);
    }
    for row in rows {
        table.add_row(row);
    }
    for (number, heading) in headings.iter().enumerate() {
        if let Some(column) = table.column_mut(number).filter(|_| heading.starts_with('>')) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut text = String::new();
    for line in table.to_string().lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Text that comes from anybody, as it can be shown on a terminal: at most `most` characters, without any that
/// move the cursor, change colours, or change the direction of what follows.
#[must_use]
pub fn shown(text: &str, most: usize) -> String {
    let mut safe = String::with_capacity(text.len().min(4 * most));
    let mut length = 0;
    for c in text.chars() {
        let piece: String = if is_invisible(c) { c.escape_default().to_string() } else { c.to_string() };
        length += piece.chars().count();
        if length > most {
            safe.push('…');
            break;
        }
        safe.push_str(&piece);
    }
    safe
}

fn is_invisible(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// What a store says, as it fits a line: without what stands before and behind its words in every answer.
#[must_use]
pub fn reason(message: &str, most: usize) -> String {
    const FRAME: &str = ". DB::Exception: ";
    let mut words = message.to_owned();
    if let (Some(from), Some(to)) = (words.find("Code: "), words.find(FRAME))
        && words.get(from..to).is_some_and(|code| code.len() < 16)
    {
        words.replace_range(from..to + FRAME.len(), "");
    }
    if let Some(from) = words.find(" (version ")
        && let Some(length) = words[from..].find(')')
    {
        words.replace_range(from..=from + length, "");
    }
    shown(&words, most)
}

/// Text in lines of at most `columns` characters, broken between words where that is possible.
#[must_use]
pub fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut length = 0;
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let size = word.chars().count();
        if length > 0 && length + 1 + size > columns {
            lines.push(String::new());
            length = 0;
        }
        let Some(line) = lines.last_mut() else { break };
        if length > 0 {
            line.push(' ');
            length += 1;
        }
        line.push_str(word);
        length += size;
    }
    lines
}

/// A count as people read it.
#[must_use]
pub fn count(number: u64) -> String {
    indicatif::HumanCount(number).to_string()
}

/// A time as people read it: two figures at most.
#[must_use]
pub fn lasts(seconds: f64) -> String {
    match seconds {
        s if s < 9.95 => format!("{s:.1} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7_200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.0} h", s / 3_600.0),
        s => format!("{:.0} d", s / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_output_is_worth_no_word_and_a_full_one_is() {
        struct Fails(std::io::ErrorKind);
        impl Write for Fails {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(self.0.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let said = |kind| document(Fails(kind), &[1]).unwrap_err().message().map(str::to_owned);
        assert_eq!(said(std::io::ErrorKind::BrokenPipe), None);
        assert!(said(std::io::ErrorKind::StorageFull).is_some());
    }

    #[test]
    fn hostile_text_is_shown_and_does_nothing() {
        assert_eq!(shown("clicks", 10), "clicks");
        assert_eq!(shown("a\u{1b}[2J\u{202e}b", 40), "a\\u{1b}[2J\\u{202e}b");
        assert_eq!(shown("日本語テキスト", 3), "日本語…");
        assert_eq!(shown("\u{1b}\u{1b}\u{1b}", 8), "\\u{1b}…");
        assert_eq!(shown("line\r\nbreak", 40), "line\\r\\nbreak");
    }

    #[test]
    fn a_stores_words_are_told_without_their_frame() {
        let message = "Code: 27. DB::Exception: Cannot parse: (at row 1). (CANNOT_PARSE) (version 26.7.2.1)";
        assert_eq!(reason(message, 100), "Cannot parse: (at row 1). (CANNOT_PARSE)");
        assert_eq!(reason(message, 12), "Cannot parse…");
        let message = format!("code 27: {message}; tried again");
        assert_eq!(reason(&message, 100), "code 27: Cannot parse: (at row 1). (CANNOT_PARSE); tried again");
        for odd in [". DB::Exception: Code: ", "Code: (version", "é (version 1"] {
            assert_eq!(reason(odd, 100), odd);
        }
        assert_eq!(reason("not a JSON object", 100), "not a JSON object");
        assert_eq!(reason("", 10), "");
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrapped("one two  three", 8), ["one two", "three"]);
        assert_eq!(wrapped("a verylongword b", 4), ["a", "verylongword", "b"]);
        assert_eq!(wrapped("", 4), [""]);
    }

    #[test]
    fn figures_stand_to_the_right() {
        let rows = [["a".to_owned(), "1".to_owned()], ["b".to_owned(), "1,000".to_owned()]];
        let text = render(["NAME", ">ROWS"], rows, Width::Any);
        let lines: Vec<_> = text.lines().map(str::trim_start).collect();
        assert_eq!(lines, ["NAME   ROWS", "a         1", "b     1,000"]);
    }

    #[test]
    fn times_are_short() {
        for (seconds, text) in
            [(0.0, "0.0 s"), (59.0, "59 s"), (600.0, "10 min"), (86_400.0, "24 h"), (1e6, "12 d")]
        {
            assert_eq!(lasts(seconds), text);
        }
    }
}
