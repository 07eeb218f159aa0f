//! ClickHouse's HTTP interface out of `libchdb.so`.
//!
//! The library's `query_stable_v2` runs the main function of clickhouse-local, which can be told
//! `SYSTEM START LISTEN HTTP`. clickhouse-local lives as long as its query runs, so the query reads from a
//! pipe that nobody writes to; closing the pipe ends it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use libloading::{Library, Symbol};
use nix::sys::signal::{SigSet, Signal};

/// What the library exports: clickhouse-local's main.
type Entry = unsafe extern "C" fn(c_int, *mut *mut c_char) -> *mut Answer;

/// What it returns, field for field (`local_result_v2` in chdb's header).
#[repr(C)]
struct Answer {
    text: *mut c_char,
    length: usize,
    owner: *mut c_void,
    seconds: f64,
    rows: u64,
    bytes: u64,
    error: *mut c_char,
}

/// What ends the process.
enum Event {
    Signal(Signal),
    StdinClosed,
    ServerEnded(Result<(), String>),
}

/// How long an orderly end may take. Idle keep-alive connections would hold it up for five seconds, and
/// acknowledged rows are safe either way.
const GRACE: Duration = Duration::from_millis(500);

/// Serves until SIGTERM, SIGINT or, with `CHSERVE_STDIN=1`, the end of standard input. Prints one line
/// beginning with `ready` once the server answers.
///
/// # Errors
/// When the port is taken, the library cannot be loaded, or the server ends by itself.
pub(crate) fn run(library: &str, folder: &str, port: u16, extra: &[&str]) -> Result<ExitCode, String> {
    let began = Instant::now();
    // Without this, somebody else's server on the port would answer the ping below.
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(|error| format!("port {port}: {error}"))?;

    // Blocked before any thread is made, so in every thread, the library's own too; one thread takes them.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().map_err(|error| format!("cannot block signals: {error}"))?;

    let (events, happened) = mpsc::channel();
    let tell = events.clone();
    thread::spawn(move || {
        if let Ok(signal) = signals.wait() {
            let _ = tell.send(Event::Signal(signal));
        }
    });
    if std::env::var_os("CHSERVE_STDIN").is_some_and(|value| value == "1") {
        let tell = events.clone();
        thread::spawn(move || {
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            let _ = tell.send(Event::StdinClosed);
        });
    }

    let (reading, writing) = io::pipe().map_err(|error| format!("cannot make a pipe: {error}"))?;
    let query = format!(
        "SYSTEM START LISTEN HTTP; \
         SELECT count() FROM file('/dev/fd/{}', 'LineAsString', 'line String') SETTINGS max_threads = 1",
        reading.as_raw_fd()
    );
    let mut arguments = vec![
        "clickhouse".to_owned(),
        format!("--path={folder}"),
        "--listen_host=127.0.0.1".to_owned(),
        format!("--http_port={port}"),
        "--multiquery".to_owned(),
        format!("--query={query}"),
    ];
    arguments.extend(extra.iter().map(|&argument| argument.to_owned()));
    start(library.to_owned(), arguments, events)?;

    let end = if let Some(event) = wait_until_ready(port, &happened) {
        event
    } else {
        say(&format!("ready pid={} port={port} after={:?}", std::process::id(), began.elapsed()));
        happened.recv().map_err(|_| "every watcher ended".to_owned())?
    };
    let reason = match end {
        Event::ServerEnded(Ok(())) => leave(Err("the server ended by itself".to_owned())),
        Event::ServerEnded(Err(why)) => leave(Err(why)),
        Event::Signal(signal) => signal.as_str(),
        Event::StdinClosed => "stdin closed",
    };

    let stopping = Instant::now();
    drop(writing);
    let clean = loop {
        match happened.recv_timeout(GRACE.saturating_sub(stopping.elapsed())) {
            Ok(Event::ServerEnded(_)) => break true,
            Ok(_) => {}
            Err(_) => break false,
        }
    };
    say(&format!("stopped by={reason} clean={clean} after={:?}", stopping.elapsed()));
    leave(Ok(()))
}

/// A line to whoever reads our standard output; it is no failure of the server that nobody does.
fn say(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}

/// Runs clickhouse-local's main in a thread of its own.
fn start(library: String, arguments: Vec<String>, events: Sender<Event>) -> Result<(), String> {
    let arguments: Vec<CString> = arguments
        .into_iter()
        .map(CString::new)
        .collect::<Result<_, _>>()
        .map_err(|_| "an argument has a zero byte in it".to_owned())?;
    thread::Builder::new()
        .name("clickhouse".to_owned())
        // The library's own main thread would have the usual 8 MiB; its parsers recurse deeply.
        .stack_size(16 << 20)
        .spawn(move || {
            let ended = call(&library, &arguments);
            let _ = events.send(Event::ServerEnded(ended));
        })
        .map(drop)
        .map_err(|error| format!("cannot start a thread: {error}"))
}

fn call(library: &str, arguments: &[CString]) -> Result<(), String> {
    // SAFETY: loading runs the library's initialisers. It is the checked chdb library, made to be loaded so.
    // Never unloaded: its threads outlive the call.
    let library = ManuallyDrop::new(
        unsafe { Library::new(library) }.map_err(|error| format!("cannot load {library}: {error}"))?,
    );
    // SAFETY: `Entry` is the signature that chdb's header gives this symbol.
    let entry: Symbol<'_, Entry> = unsafe { library.get(b"query_stable_v2\0") }
        .map_err(|error| format!("this is no libchdb with query_stable_v2: {error}"))?;
    let mut pointers: Vec<*mut c_char> = arguments.iter().map(|text| text.as_ptr().cast_mut()).collect();
    let count = c_int::try_from(pointers.len()).map_err(|_| "too many arguments".to_owned())?;
    // SAFETY: `count` pointers to zero-terminated strings, which outlive the call; the library copies them
    // and does not write to them.
    let answer = unsafe { entry(count, pointers.as_mut_ptr()) };
    if answer.is_null() {
        return Ok(());
    }
    // SAFETY: not null, so it points to an `Answer` that the library made and that we never free.
    let error = unsafe { (*answer).error };
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: not null, so it is a zero-terminated string that belongs to the answer.
    Err(unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned())
}

/// Pings until the server answers. Returns early with whatever ended the wait.
fn wait_until_ready(port: u16, happened: &Receiver<Event>) -> Option<Event> {
    loop {
        if answers(port) {
            return None;
        }
        match happened.recv_timeout(Duration::from_millis(10)) {
            Ok(event) => return Some(event),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Some(Event::ServerEnded(Ok(()))),
        }
    }
}

fn answers(port: u16) -> bool {
    let ping = || -> io::Result<bool> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.write_all(b"GET /ping HTTP/1.0\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(answer.starts_with(b"HTTP/1.") && answer.get(8..13) == Some(b" 200 "))
    };
    ping().unwrap_or(false)
}

/// Ends the process without running the library's exit handlers: its threads are still at work, and would
/// see what they use destroyed.
fn leave(outcome: Result<(), String>) -> ! {
    let code = match outcome {
        Ok(()) => 0,
        Err(why) => {
            eprintln!("chserve: {why}");
            1
        }
    };
    // SAFETY: `_exit` takes no pointers and cannot fail. Standard output was flushed line by line.
    unsafe { libc::_exit(code) }
}
