//! What commands print on standard output.

use std::io::{IsTerminal, Write};

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

use crate::exit::Exit;

/// Prints one JSON document and a newline.
///
/// # Errors
/// If standard output cannot be written to.
pub fn json(value: &impl Serialize) -> Result<(), Exit> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, value).map_err(Exit::error)?;
    writeln!(out)?;
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
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(headings);
    if std::io::stdout().is_terminal() {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    for row in rows {
        table.add_row(row);
    }
    let mut out = std::io::stdout().lock();
    for line in table.to_string().lines() {
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}
