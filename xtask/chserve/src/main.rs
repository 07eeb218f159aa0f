//! Launches servers for development and tests.
//!
//! `chserve LIB DATA_DIR PORT [clickhouse-local arguments]` serves ClickHouse's own HTTP interface out of
//! `libchdb.so`: the real parsers, the real `MergeTree`, without a server package. See [`serve`].
//!
//! `chserve guard -- COMMAND [arguments]` runs any command and makes sure that it does not outlive whoever
//! started the guard. See [`guard`].
//!
//! This is the one crate of the workspace with `unsafe` in it: a foreign library's entry point, and one
//! system call between fork and exec.

mod guard;
mod serve;

use std::process::ExitCode;

const USAGE: &str = "usage: chserve LIB DATA_DIR PORT [clickhouse-local arguments]\n       chserve guard -- COMMAND [arguments]";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["guard", "--", program, rest @ ..] => guard::run(program, rest),
        ["guard", ..] => return usage("guard needs `-- COMMAND`"),
        [library, folder, port, extra @ ..] => match port.parse() {
            Ok(port) => serve::run(library, folder, port, extra),
            Err(_) => return usage(&format!("`{port}` is no port")),
        },
        _ => return usage("a library, a data folder and a port are needed"),
    };
    match outcome {
        Ok(code) => code,
        Err(why) => {
            eprintln!("chserve: {why}");
            ExitCode::FAILURE
        }
    }
}

fn usage(why: &str) -> ExitCode {
    eprintln!("chserve: {why}\n{USAGE}");
    ExitCode::from(2)
}
