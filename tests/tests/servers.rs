//! The testbed's own promises: servers come back with their data, and none outlives its test.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use holdfast_testbed::verdict::{judge, judge_with};
use holdfast_testbed::wait::until_true;
use holdfast_testbed::{ClickHouse, Error, NatsCluster, NatsServer, Sql, Verdict, rows};

const SOON: Duration = Duration::from_secs(20);

#[test]
fn clickhouse_keeps_its_rows_through_a_kill() {
    let mut clickhouse = ClickHouse::start().unwrap();
    let sql = clickhouse.sql();
    sql.query("CREATE DATABASE web").unwrap();
    rows::create_table(&sql, "web.clicks").unwrap();
    sql.query_with(
        "INSERT INTO web.clicks FORMAT JSONEachRow {\"_seq\":1,\"_stream\":7,\"n\":0,\"pad\":\"x\"}",
        &[("async_insert", "0"), ("insert_deduplication_token", "t 1")],
    )
    .unwrap();
    let (url, first) = (clickhouse.url(), clickhouse.pid().unwrap());
    clickhouse.kill().unwrap();
    assert!(is_gone(first) && clickhouse.pid().is_none());
    assert!(matches!(sql.query("SELECT 1"), Err(Error::Io { .. })));
    clickhouse.restart().unwrap();
    assert_eq!(clickhouse.url(), url);
    assert_eq!(clickhouse.query("SELECT _seq, _stream, n, pad FROM web.clicks").unwrap(), "1\t7\t0\tx");

    match sql.query("SELECT * FROM nowhere").unwrap_err() {
        Error::Query { status: 404, code: Some(60), text } => assert!(text.contains("nowhere"), "{text}"),
        other => panic!("{other}"),
    }
    assert!(clickhouse.stop().unwrap().unwrap().is_success());
    clickhouse.restart().unwrap();
    assert_eq!(clickhouse.query("SELECT count() FROM web.clicks").unwrap(), "1");
}

#[test]
fn a_paused_clickhouse_answers_when_it_goes_on() {
    let mut clickhouse = ClickHouse::start().unwrap();
    let sql = clickhouse.sql().timeout(Duration::from_millis(300));
    clickhouse.pause().unwrap();
    assert!(!sql.ping());
    clickhouse.resume().unwrap();
    assert!(clickhouse.sql().ping());
    // A stopped server can be stopped for good.
    clickhouse.pause().unwrap();
    clickhouse.stop().unwrap();
}

/// A request in the protocol's own words, and its answer.
fn jetstream(server: &NatsServer, subject: &str, body: &str) -> serde_json::Value {
    ask(server, subject, body).unwrap()
}

fn ask(server: &NatsServer, subject: &str, body: &str) -> io::Result<serde_json::Value> {
    let mut stream = TcpStream::connect(server.addr())?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(
        stream,
        "CONNECT {{\"verbose\":false}}\r\nSUB answer 1\r\nPUB {subject} answer {}\r\n{body}\r\n",
        body.len()
    )?;
    let mut lines = BufReader::new(stream);
    let mut line = String::new();
    while !line.starts_with("MSG answer") {
        line.clear();
        if lines.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    line.clear();
    lines.read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

#[test]
fn nats_keeps_its_stream_through_a_kill() {
    let mut nats = NatsServer::start().unwrap();
    let created =
        jetstream(&nats, "$JS.API.STREAM.CREATE.S", r#"{"name":"S","subjects":["s.*"],"storage":"file"}"#);
    assert!(created.get("error").is_none(), "{created}");
    assert_eq!(jetstream(&nats, "s.a", "row")["seq"], 1);
    let (url, first) = (nats.url(), nats.pid().unwrap());
    nats.kill().unwrap();
    assert!(is_gone(first));
    nats.restart().unwrap();
    assert_eq!(nats.url(), url);
    assert_eq!(jetstream(&nats, "s.a", "row")["seq"], 2);
    nats.stop().unwrap();
    nats.restart().unwrap();
    assert_eq!(jetstream(&nats, "$JS.API.STREAM.INFO.S", "")["state"]["messages"], 2);
}

#[test]
fn a_cluster_outlives_one_node() {
    let mut cluster = NatsCluster::start(3).unwrap();
    let created = jetstream(
        &cluster.nodes[0],
        "$JS.API.STREAM.CREATE.S",
        r#"{"name":"S","subjects":["s.*"],"num_replicas":3}"#,
    );
    assert!(created.get("error").is_none(), "{created}");
    assert_eq!(jetstream(&cluster.nodes[0], "s.a", "row")["seq"], 1);
    cluster.nodes[2].kill().unwrap();
    cluster.nodes[2].restart().unwrap();
    // Whoever led may have been the one that was killed: until there is a new leader the answer is an error, or
    // none at all.
    until_true("the stream's row", SOON, || {
        ask(&cluster.nodes[1], "$JS.API.STREAM.INFO.S", "").is_ok_and(|info| info["state"]["messages"] == 1)
    })
    .unwrap();
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let error = NatsServer::builder().extra_config("no_such_option: [").start().unwrap_err();
    assert!(matches!(error, Error::Ended { .. }) && error.to_string().contains("Parse error"), "{error}");
}

#[test]
fn a_port_that_is_taken_is_an_error_or_another_port() {
    let first = ClickHouse::start().unwrap();
    let error = ClickHouse::builder().port(first.addr().port()).start().unwrap_err();
    assert!(error.to_string().contains("in use"), "{error}");
}

#[test]
fn verdicts() {
    let clickhouse = ClickHouse::start().unwrap();
    let sql = clickhouse.sql();
    let insert = |table: &str, select: &str| {
        sql.query(&format!("INSERT INTO {table} SELECT seq, 7, n, 'x' FROM ({select})")).unwrap();
    };
    let fresh = |table: &str| {
        rows::create_table(&sql, table).unwrap();
        insert(table, "SELECT number + 1 AS seq, number AS n FROM numbers(100)");
    };
    let right = |stored, expected| Verdict { expected, stored, ..Verdict::default() };

    fresh("good");
    insert("good", "SELECT number + 101 AS seq, number + 100 AS n FROM numbers(50)");
    // The order of insertion must be seen through merges.
    sql.query("OPTIMIZE TABLE good FINAL").unwrap();
    let verdict = judge(&sql, "good", 150).unwrap();
    assert_eq!(verdict, right(150, 150));
    assert!(verdict.ok());

    rows::create_table(&sql, "empty").unwrap();
    assert_eq!(judge(&sql, "empty", 0).unwrap(), right(0, 0));
    assert_eq!(judge(&sql, "empty", 3).unwrap(), Verdict { missing: 3, ..right(0, 3) });

    fresh("short");
    assert_eq!(judge(&sql, "short", 110).unwrap(), Verdict { missing: 10, ..right(100, 110) });
    assert_eq!(judge(&sql, "short", 90).unwrap(), Verdict { unexpected: 10, ..right(100, 90) });

    // One batch inserted twice: repeated, and its first row comes after rows that it should come before.
    fresh("twice");
    insert("twice", "SELECT number + 91 AS seq, number + 90 AS n FROM numbers(10)");
    let verdict = judge(&sql, "twice", 100).unwrap();
    assert_eq!(verdict, Verdict { repeated: 10, out_of_order: 1, ..right(110, 100) });
    assert!(!verdict.ok());

    // A batch that overtook another one.
    rows::create_table(&sql, "overtaken").unwrap();
    insert("overtaken", "SELECT number + 51 AS seq, number + 50 AS n FROM numbers(50)");
    insert("overtaken", "SELECT number + 1 AS seq, number AS n FROM numbers(50)");
    sql.query("OPTIMIZE TABLE overtaken FINAL").unwrap();
    assert_eq!(judge(&sql, "overtaken", 100).unwrap(), Verdict { out_of_order: 1, ..right(100, 100) });

    // Rows whose sequence is not the order of publishing.
    rows::create_table(&sql, "swapped").unwrap();
    insert("swapped", "SELECT number + 1 AS seq, bitXor(number, 1) AS n FROM numbers(100)");
    assert_eq!(judge(&sql, "swapped", 100).unwrap(), Verdict { out_of_order: 50, ..right(100, 100) });

    // Dead letters have a row's place: not beside the row, not twice, and not without a row.
    fresh("parked");
    let dead = |numbers: &[u64]| judge_with(&sql, "parked", 103, numbers).unwrap();
    let with = |dead_lettered| Verdict { dead_lettered, ..right(100, 103) };
    assert!(dead(&[100, 101, 102]).ok());
    assert_eq!(dead(&[102]), Verdict { missing: 2, ..with(1) });
    assert_eq!(dead(&[100, 101, 102, 102]), Verdict { repeated: 1, ..with(4) });
    assert_eq!(dead(&[100, 101, 102, 7]), Verdict { repeated: 1, ..with(4) });
    assert_eq!(dead(&[100, 101, 102, u64::MAX]), Verdict { unexpected: 1, ..with(4) });

    let sum: Verdict = [right(1, 2), right(3, 4)].into_iter().sum();
    assert_eq!(sum, right(4, 6));
}

/// Whether a process is gone. One that nobody has waited for yet counts as gone.
fn is_gone(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')),
        Err(_) => true,
    }
}

const HELPER: &str = "HOLDFAST_TESTBED_HELPER";

/// Not a test: the process that the next one kills.
#[test]
#[ignore = "run by the next test"]
fn a_helper_with_servers() {
    if std::env::var_os(HELPER).is_none() {
        return;
    }
    let nats = NatsServer::start().unwrap();
    let mut clickhouse = ClickHouse::start().unwrap();
    let mut paused = NatsServer::start().unwrap();
    paused.pause().unwrap();
    // On a line of its own, after whatever the test runner has written.
    println!("\npids {} {} {}", nats.pid().unwrap(), clickhouse.pid().unwrap(), paused.pid().unwrap());
    clickhouse.signal(nix::sys::signal::Signal::SIGCONT).unwrap();
    // Until we are killed.
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn a_killed_test_leaves_no_server() {
    // What is killed cannot remove its folders.
    let folders = tempfile::tempdir().unwrap();
    let mut helper = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_helper_with_servers", "--ignored", "--nocapture"])
        .env(HELPER, "1")
        .env("TMPDIR", folders.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(helper.stdout.take().unwrap());
    let line = output.lines().map(Result::unwrap).find(|line| line.starts_with("pids ")).unwrap();
    let pids: Vec<u32> = line.split(' ').skip(1).map(|pid| pid.parse().unwrap()).collect();
    assert_eq!(pids.len(), 3);
    assert!(pids.iter().all(|&pid| Path::new(&format!("/proc/{pid}")).exists()));
    let killed = Instant::now();
    helper.kill().unwrap();
    helper.wait().unwrap();
    until_true("the servers to be gone", SOON, || pids.iter().all(|&pid| is_gone(pid))).unwrap();
    println!("gone after {:?}", killed.elapsed());
}

#[test]
fn sql_to_nobody_is_an_error() {
    let nobody = Sql::new("127.0.0.1:1".parse().unwrap());
    assert!(!nobody.ping());
    assert!(matches!(nobody.query("SELECT 1"), Err(Error::Io { .. })));
}
