//! `cargo xtask campaign`: what finds something the longer it runs, in turns, until the time is over.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use holdfast_testbed::build;
use holdfast_testbed::drills::{self, Settings};
use serde::Serialize;

use crate::command::json;
use crate::{fuzz, interrupt, mutants};

/// Seeds of one turn of the simulator.
const SEEDS: u64 = 500;
/// Seeds within which a safeguard that is off must be missed.
const MUTANT_SEEDS: u64 = 500;
/// How long a fuzz target runs in its turn, in seconds.
const FUZZ_SECONDS: u64 = 30;
/// How many fuzz targets have a turn together.
const FUZZ_TARGETS: usize = 2;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How long; the last turn is ended
    #[arg(long, value_name = "N", default_value_t = 30)]
    minutes: u64,
    /// Leave out what needs servers
    #[arg(long)]
    fast: bool,
    /// Print the report as JSON, and nothing else on standard output
    #[arg(long)]
    json: bool,
}

/// Something that should not have happened.
#[derive(Debug, Serialize)]
struct Finding {
    /// In which part of the campaign.
    part: &'static str,
    what: String,
    /// The command that shows it again.
    replay: String,
}

/// What is printed with `--json`.
#[derive(Debug, Default, Serialize)]
struct Report {
    seconds: f64,
    turns: usize,
    /// The first seed of all; those of another campaign are others.
    first_seed: u64,
    /// Seeds that the simulator ran with every safeguard on.
    seeds: u64,
    simulated_seconds: u64,
    /// Safeguards that were switched off and missed, and the seeds that it took.
    mutants: BTreeMap<String, u64>,
    /// Fuzz targets and the inputs that they tried.
    inputs: BTreeMap<String, u64>,
    /// Rounds of random kills on real servers, and the kills.
    rounds: u32,
    kills: u64,
    rows: u64,
    findings: Vec<Finding>,
    ok: bool,
}

#[derive(Clone, Copy, Debug)]
enum Part {
    Simulator,
    Fuzz,
    Kills,
    Mutant,
}

struct Campaign {
    next_seed: u64,
    targets: Vec<String>,
    rules: Vec<String>,
    report: Report,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let interrupted = interrupt::watch()?;
    let began = Instant::now();
    let end = Duration::from_secs(options.minutes.saturating_mul(60));
    let mut campaign = Campaign::new()?;
    eprintln!("seeds from {}", campaign.next_seed);
    let parts: &[Part] = if options.fast {
        &[Part::Simulator, Part::Fuzz, Part::Mutant]
    } else {
        &[Part::Simulator, Part::Fuzz, Part::Kills, Part::Mutant]
    };
    for (turn, part) in parts.iter().cycle().enumerate() {
        if began.elapsed() >= end || interrupted.try_recv().is_ok() {
            break;
        }
        eprintln!(
            "turn {}, {part:?}, {:.0} s of {} s",
            turn + 1,
            began.elapsed().as_secs_f64(),
            end.as_secs()
        );
        let outcome = match part {
            Part::Simulator => campaign.simulator(),
            Part::Fuzz => campaign.fuzz(turn / parts.len()),
            Part::Kills => campaign.kills(),
            Part::Mutant => campaign.mutant(turn / parts.len()),
        };
        // What was found so far is told, whatever went wrong since. (A child can end before we know of the interrupt.)
        if let Err(error) = outcome {
            if interrupted.recv_timeout(Duration::from_millis(500)).is_err() {
                campaign.report.found(
                    "campaign",
                    format!("{error:#}"),
                    "none: the turn itself failed".to_owned(),
                );
            }
            break;
        }
        campaign.report.turns += 1;
    }
    let mut report = campaign.report;
    report.seconds = began.elapsed().as_secs_f64();
    report.ok = report.findings.is_empty();
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        report.print();
    }
    if !report.ok {
        bail!("{} finding(s)", report.findings.len());
    }
    Ok(())
}

impl Report {
    fn print(&self) {
        let inputs: u64 = self.inputs.values().sum();
        println!("{} turns in {:.0} s", self.turns, self.seconds);
        println!(
            "simulator:    {} seeds from {}, {} simulated seconds",
            self.seeds, self.first_seed, self.simulated_seconds
        );
        println!("fuzz targets: {inputs} inputs to {} targets", self.inputs.len());
        println!("random kills: {} kills in {} rounds, {} rows", self.kills, self.rounds, self.rows);
        println!("safeguards:   {} switched off and missed", self.mutants.len());
        for finding in &self.findings {
            println!("FOUND {}: {}", finding.part, finding.what);
            println!("  replay: {}", finding.replay);
        }
        if self.ok {
            println!("nothing found");
        }
    }

    fn found(&mut self, part: &'static str, what: String, replay: String) {
        eprintln!("FOUND {part}: {what}");
        self.findings.push(Finding { part, what, replay });
    }
}

impl Campaign {
    fn new() -> Result<Self> {
        // So many thousands a second that no campaign runs another's seeds.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
        let first_seed = now.as_secs() * 1_000;
        let rules = mutants::report(&["--list".to_owned()])?;
        let rules = rules.as_array().context("a list of names")?;
        Ok(Self {
            next_seed: first_seed,
            targets: fuzz::targets()?,
            rules: rules.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect(),
            report: Report { first_seed, ..Report::default() },
        })
    }

    fn seeds(&mut self, many: u64) -> String {
        let first = self.next_seed;
        self.next_seed += many;
        first.to_string()
    }

    fn simulator(&mut self) -> Result<()> {
        let mut sim = Command::new(build::holdfast_binary(true)?);
        sim.args(["sim", "--json", "--seeds", &SEEDS.to_string(), "--first", &self.seeds(SEEDS)]);
        let report = json(sim)?;
        let number = |key: &str| report[key].as_u64().context("the simulator's report has changed");
        self.report.seeds += number("seeds")?;
        self.report.simulated_seconds += number("simulated_seconds")?;
        for failing in report["violations"].as_array().into_iter().flatten() {
            let text = |key: &str| failing[key].as_str().unwrap_or("?").to_owned();
            let what = format!("seed {}: {}: {}", failing["seed"], text("invariant"), text("how"));
            self.report.found("simulator", what, text("replay"));
        }
        Ok(())
    }

    fn fuzz(&mut self, round: usize) -> Result<()> {
        let many = self.targets.len();
        let chosen: Vec<String> =
            (0..FUZZ_TARGETS).map(|n| self.targets[(round * FUZZ_TARGETS + n) % many].clone()).collect();
        let binaries = fuzz::built(&self.targets, &fuzz::Fault::None)?;
        for outcome in fuzz::fuzz(&binaries, &chosen, FUZZ_SECONDS, &fuzz::Fault::None)? {
            *self.report.inputs.entry(outcome.name.clone()).or_default() += outcome.executions;
            if !outcome.ok {
                let replay =
                    outcome.replay.clone().unwrap_or_else(|| format!("cargo xtask fuzz {}", outcome.name));
                self.report.found("fuzz target", outcome.in_words(), replay);
            }
        }
        Ok(())
    }

    fn kills(&mut self) -> Result<()> {
        let name = "random-kills";
        let drill = drills::ALL.iter().find(|drill| drill.name == name).context("there is such a drill")?;
        let settings = Settings {
            streams: 1,
            rounds: 1,
            short: false,
            ack_policy: "none".to_owned(),
            retention: "limits".to_owned(),
        };
        let replay = || format!("cargo xtask drill {name} --rounds 1");
        match (drill.run)(&settings, &mut |text| eprintln!("{name}: {text}")) {
            Ok(outcome) => {
                let figure = |key: &str| outcome.figures.get(key).copied().unwrap_or_default();
                self.report.rounds += 1;
                self.report.kills += whole(figure("kills"));
                self.report.rows += whole(figure("rows"));
                for fault in &outcome.faults {
                    self.report.found(name, fault.clone(), replay());
                }
                if !outcome.verdict.ok() {
                    self.report.found(name, outcome.verdict.to_string(), replay());
                }
            }
            // What did not come to an end in time is one, too.
            Err(error) => self.report.found(name, error.to_string(), replay()),
        }
        Ok(())
    }

    fn mutant(&mut self, round: usize) -> Result<()> {
        let rule = self.rules
            [(usize::try_from(self.report.first_seed).unwrap_or(0) / 1_000 + round) % self.rules.len()]
        .clone();
        let first = self.seeds(MUTANT_SEEDS);
        let arguments = ["--only", &rule, "--first", &first, "--seeds", &MUTANT_SEEDS.to_string()];
        let report = mutants::report(&arguments.map(str::to_owned))?;
        let needed = report[0]["seeds_needed"].as_u64().context("the mutants' report has changed")?;
        if report[0]["caught"] == true {
            self.report.mutants.insert(rule, needed);
        } else {
            let replay = format!("cargo xtask mutants --only {rule} --first {first} --seeds {MUTANT_SEEDS}");
            self.report.found(
                "safeguard",
                format!("{rule} is off, and {needed} seeds from {first} miss nothing"),
                replay,
            );
        }
        Ok(())
    }
}

/// A count among figures.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count is whole and small")]
const fn whole(figure: f64) -> u64 {
    figure as u64
}
