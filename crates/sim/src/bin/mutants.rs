//! Switches safeguards off, one after another, and says which invariant noticed. What `cargo xtask mutants`
//! runs: `mutants [--list] [--only NAME] [--seeds N] [--first N] [--threads N]`, JSON on standard output.

use std::io::Write as _;
use std::process::ExitCode;

use holdfast_sim::{mutant_names, mutants};

fn main() -> ExitCode {
    let (mut only, mut seeds, mut first) = (None, 500, 0);
    let mut threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        if name == "--list" {
            let names = serde_json::to_string_pretty(&mutant_names()).expect("names are plain text");
            return print(&names, true);
        }
        let Some(value) = arguments.next() else {
            eprintln!("{name} needs a value");
            return ExitCode::from(2);
        };
        let parsed = match name.as_str() {
            "--only" => {
                only = Some(value.clone());
                mutant_names().contains(&value.as_str())
            }
            "--seeds" => value.parse().map(|n| seeds = n).is_ok(),
            "--first" => value.parse().map(|n| first = n).is_ok(),
            "--threads" => value.parse().map(|n| threads = n).is_ok(),
            _ => false,
        };
        if !parsed {
            eprintln!("{name} {value} is not understood");
            return ExitCode::from(2);
        }
    }
    // A mutant may make the core panic: such a run is passed over, and its message would only alarm.
    std::panic::set_hook(Box::new(|_| {}));
    let report = mutants(only.as_deref(), first, seeds, threads, &mut |mutant| {
        let by = mutant.invariant.unwrap_or("nothing");
        eprintln!("{}: caught by {by} after {} seeds", mutant.name, mutant.seeds_needed);
    });
    let all = report.iter().all(|mutant| mutant.caught);
    print(&serde_json::to_string_pretty(&report).expect("a report is plain data"), all)
}

fn print(text: &str, good: bool) -> ExitCode {
    let written = writeln!(std::io::stdout(), "{text}").is_ok();
    if good && written { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
