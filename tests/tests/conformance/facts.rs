//! The table of facts in `tests/conformance/README.md`: every fact has scripts or a reason why not, every script has
//! a fact.

use std::collections::BTreeSet;

use crate::{folder, script};

/// A line of the table: the fact's id, and its scripts, or none and why.
struct Fact {
    id: String,
    scripts: Vec<String>,
    reason: String,
}

fn facts() -> Vec<Fact> {
    let text = std::fs::read_to_string(folder().join("README.md")).expect("the table of facts");
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let rows = text.lines().filter(|line| line.starts_with("| `")).map(cells);
    let fact = |cells: Vec<String>| {
        let [id, _, by] = &cells[..] else { panic!("{cells:?} is no fact: id, fact, script") };
        let named =
            |text: &str| -> Vec<String> { text.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
        let reason = by.strip_prefix("none: ").unwrap_or_default().to_owned();
        let scripts = if reason.is_empty() { named(by) } else { Vec::new() };
        Fact { id: named(id).concat(), scripts, reason }
    };
    rows.map(fact).collect()
}

#[test]
fn every_fact_has_scripts_or_a_reason_and_every_script_a_fact() {
    let facts = facts();
    let all = script::read(&folder()).unwrap_or_else(|error| panic!("{error}"));
    let scripts: BTreeSet<&str> = all.iter().map(|script| script.id.as_str()).collect();
    assert_eq!(scripts.len(), all.len(), "two scripts have one id");
    let ids: BTreeSet<&str> = facts.iter().map(|fact| fact.id.as_str()).collect();
    assert_eq!(ids.len(), facts.len(), "two facts have one id");
    for fact in &facts {
        let (id, none) = (&fact.id, fact.scripts.is_empty());
        assert!(none != fact.reason.is_empty(), "{id} has neither a script nor a reason why not");
        let unknown: Vec<_> =
            fact.scripts.iter().filter(|script| !scripts.contains(script.as_str())).collect();
        assert!(unknown.is_empty(), "{id} names {unknown:?}, which are no scripts");
    }
    let told: BTreeSet<&str> =
        facts.iter().flat_map(|fact| fact.scripts.iter().map(String::as_str)).collect();
    let untold: Vec<_> = scripts.difference(&told).collect();
    assert!(untold.is_empty(), "no fact names {untold:?}");
    assert!(all.iter().all(|script| script.steps.iter().any(|step| !step.expected.is_empty())));
}
