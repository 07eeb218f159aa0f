//! A look at the server before the daemon starts: what a person has to mend is said at once, in one line.

use holdfast_nats::Connection;
use holdfast_nats::topology::{Severity, Topology};

use crate::exit::Exit;

/// Looks whether stream, consumers and bucket are there and fit.
///
/// # Errors
/// The first thing that is required and missing, with how to mend it.
pub(crate) async fn preflight(topology: &Topology, connection: &Connection) -> Result<(), Exit> {
    let findings = topology.check(connection).await.map_err(Exit::error)?;
    let required: Vec<_> = findings.iter().filter(|finding| finding.severity == Severity::Required).collect();
    if let Some(finding) = required.first() {
        let more = match required.len() {
            1 => String::new(),
            n => format!(" (and {} more: see `holdfast check`)", n - 1),
        };
        let field = if finding.field.is_empty() { String::new() } else { format!(" {}", finding.field) };
        return Err(Exit::error(format!(
            "{}{field}: {}; {}{more}",
            finding.object, finding.problem, finding.fix
        )));
    }
    Ok(())
}
