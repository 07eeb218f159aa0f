//! Runs a campaign and prints its report, or one seed's trace: `campaign [--seeds N] [--first N]
//! [--profile P] [--threads N] [--trace SEED] [--timeline SEED] [--shrink SEED]`.

use holdfast_sim::{Options, Profile, campaign, replay, shrunk, timeline};

fn main() {
    let mut options = Options { first: 0, seeds: 100, profile: Profile::Swarm, threads: 2 };
    let mut trace = None;
    let mut arguments = std::env::args().skip(1);
    while let (Some(name), Some(value)) = (arguments.next(), arguments.next()) {
        let number = value.parse::<u64>();
        match name.as_str() {
            "--seeds" => options.seeds = number.expect("a number"),
            "--first" => options.first = number.expect("a number"),
            "--threads" => options.threads = value.parse().expect("a number"),
            "--profile" => options.profile = value.parse().expect("a profile"),
            "--timeline" => {
                println!("{}", timeline(&replay(number.expect("a seed"), options.profile)));
                return;
            }
            "--shrink" => {
                let small = shrunk(number.expect("a seed"), options.profile);
                println!("{}", serde_json::to_string_pretty(&small).expect("plain data"));
                return;
            }
            "--trace" => trace = Some(number.expect("a seed")),
            other => panic!("{other} is no option"),
        }
    }
    if let Some(seed) = trace {
        for (at, happening) in replay(seed, options.profile).happenings {
            println!("{:>12.6} {happening}", at.as_secs_f64());
        }
        return;
    }
    let report = campaign(&options, &|_| {});
    println!("{}", serde_json::to_string_pretty(&report).expect("plain data"));
}
