//! `holdfast status`: how a running daemon stands, as it says itself.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use crate::cli::Status;
use crate::config::Config;
use crate::document::{Document, Member, Shard};
use crate::exit::Exit;
use crate::output::{self, Width, count, lasts, shown};

/// How long the daemon may take to answer.
const TIME: Duration = Duration::from_secs(5);

/// The largest answer that is read, in bytes.
const LARGEST: usize = 16 << 20;

/// How often `--watch` looks.
const EVERY: Duration = Duration::from_secs(1);

/// Asks a daemon how it stands, and prints it.
///
/// # Errors
/// That it does not answer, or cannot be asked.
pub async fn status(config: &Config, options: &Status) -> Result<(), Exit> {
    let uri = address(config, options.url.as_deref())?;
    let client = Client::builder(TokioExecutor::new()).build_http();
    if !options.watch {
        let body = ask(&client, &uri).await?;
        let document = read(&uri, &body)?;
        return if options.json.json {
            // As the daemon says it: with what a newer one says more.
            output::json(&serde_json::from_slice::<serde_json::Value>(&body).map_err(Exit::error)?)
        } else {
            output::text(&describe(&document, Width::of_output()))
        };
    }
    loop {
        let text = match ask(&client, &uri).await.and_then(|body| read(&uri, &body)) {
            Ok(document) => describe(&document, Width::of_output()),
            // It may be on its way back.
            Err(exit) => format!("{}\n", exit.message().unwrap_or_default()),
        };
        // Home, draw over what is there, clear what is left: nothing flickers.
        let cleared = text.replace('\n', "\x1b[K\n");
        let page =
            if std::io::stdout().is_terminal() { format!("\x1b[H{cleared}\x1b[J") } else { text + "\n" };
        output::text(&page)?;
        tokio::time::sleep(EVERY).await;
    }
}

/// Where the status is.
fn address(config: &Config, url: Option<&str>) -> Result<Uri, Exit> {
    let base = if let Some(url) = url {
        url.to_owned()
    } else {
        let listen = config.listen()?.ok_or_else(|| {
            Exit::usage("node.listen is off here; name the daemon's address: --url http://HOST:PORT")
        })?;
        let (host, port) = listen.rsplit_once(':').unwrap_or((listen, "9464"));
        // Who listens everywhere can be asked here.
        let host = match host {
            "0.0.0.0" => "127.0.0.1",
            "[::]" => "[::1]",
            host => host,
        };
        format!("http://{host}:{port}")
    };
    let wrong = || Exit::usage(format!("--url {base}: write for example http://127.0.0.1:9464"));
    let uri: Uri = format!("{}/status", base.trim_end_matches('/')).parse().map_err(|_| wrong())?;
    if uri.scheme_str() != Some("http") || uri.host().is_none_or(str::is_empty) {
        return Err(wrong());
    }
    Ok(uri)
}

async fn ask(client: &Client<HttpConnector, Empty<Bytes>>, uri: &Uri) -> Result<Bytes, Exit> {
    let asked = async {
        let request = Request::get(uri.clone()).body(Empty::new()).map_err(|error| error.to_string())?;
        let response = client.request(request).await.map_err(|error| innermost(&error))?;
        if response.status() != StatusCode::OK {
            return Err(format!("HTTP status {}", response.status()));
        }
        let body = Limited::new(response.into_body(), LARGEST).collect().await;
        body.map(http_body_util::Collected::to_bytes).map_err(|error| error.to_string())
    };
    let why = match tokio::time::timeout(TIME, asked).await {
        Ok(Ok(body)) => return Ok(body),
        Ok(Err(why)) => why,
        Err(_) => format!("no answer within {} s", TIME.as_secs()),
    };
    Err(Exit::error(format!(
        "{uri}: {why}; does the daemon run, and is this its node.listen? (--url names another)"
    )))
}

/// The last cause says most: `Connection refused`.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

fn read(uri: &Uri, body: &[u8]) -> Result<Document, Exit> {
    serde_json::from_slice(body)
        .map_err(|error| Exit::error(format!("{uri}: this is no daemon's status: {error}")))
}

/// The document in words, for a terminal.
#[must_use]
pub fn describe(document: &Document, width: Width) -> String {
    let mut text = String::new();
    for member in &document.members {
        let ready = if member.ready { "ready" } else { "NOT READY" };
        let _ = writeln!(
            text,
            "{}: {ready}, {}{}, stream {}, version {}",
            shown(&member.node, 60),
            shown(&member.phase, 20),
            // What another member holds and since when it runs only that one knows.
            if is_asked(member) {
                format!(" for {}", lasts(member.uptime_seconds as f64))
            } else {
                String::new()
            },
            shown(&document.stream, 60),
            shown(&member.version, 20),
        );
        for cause in &member.causes {
            let _ = writeln!(text, "  {}", shown(cause, 500));
        }
        if !is_asked(member) {
            let _ =
                writeln!(text, "  {} of {} shards owned", member.shards_owned.len(), document.shards.len());
            continue;
        }
        let _ = writeln!(
            text,
            "{} of {} shards owned; {} of {} rows held, {} of {}",
            member.shards_owned.len(),
            document.shards.len(),
            count(member.held_rows),
            count(member.held_rows_limit),
            bytesize::ByteSize(member.held_bytes).display().iec(),
            bytesize::ByteSize(member.held_bytes_limit).display().iec(),
        );
    }
    text.push('\n');
    let rows = document.shards.iter().map(|shard| {
        [
            shard.shard.to_string(),
            has(shard),
            shown(&shard.phase, 12),
            count(shard.lanes),
            shard.backlog_rows.map_or("–".to_owned(), count),
            shard.floor.map_or("–".to_owned(), count),
            count(shard.held_rows),
            shard.oldest_unwritten_seconds.map_or("–".to_owned(), lasts),
            count(shard.counts.rows_written),
            count(shard.counts.rows_dead_lettered),
        ]
    });
    let headings = [
        ">SHARD",
        "OWNER",
        "PHASE",
        ">TABLES",
        ">WAITING",
        ">DONE UP TO",
        ">HELD",
        ">OLDEST",
        ">WRITTEN",
        ">DEAD",
    ];
    text.push_str(&output::render(headings, rows, width));
    for shard in &document.shards {
        for why in reasons(shard) {
            let _ = writeln!(text, "shard {}: {}", shard.shard, shown(why, 500));
        }
    }
    let troubles: Vec<_> = document
        .shards
        .iter()
        .flat_map(|shard| shard.troubles.iter().map(move |trouble| (shard.shard, trouble)))
        .map(|(shard, trouble)| {
            [
                shown(&trouble.table, 40),
                shard.to_string(),
                shown(&trouble.kind, 20),
                output::reason(&trouble.why, 300),
            ]
        })
        .collect();
    if !troubles.is_empty() {
        text.push_str("\nTables that do not get on:\n");
        text.push_str(&output::render(["TABLE", ">SHARD", "KIND", "WHY"], troubles, width));
        left_off(&mut text, document.shards.iter().map(|shard| shard.troubles_left_off).sum());
    }
    if !document.weaker_tables.is_empty() {
        text.push_str("\nTables that get less than exactly-once (`holdfast check` says why):\n");
        let rows = document
            .weaker_tables
            .iter()
            .map(|table| [shown(&table.table, 40), shown(&table.target, 60), shown(&table.level, 20)]);
        text.push_str(&output::render(["TABLE", "TARGET", "LEVEL"], rows, width));
        left_off(&mut text, document.weaker_tables_left_off);
    }
    text
}

/// Who has the shard, or stands by for it, in parentheses.
/// Whether it is the member that was asked: only that one says how much it may hold.
const fn is_asked(member: &Member) -> bool {
    member.held_rows_limit > 0
}

fn has(shard: &Shard) -> String {
    match (&shard.owner, &shard.home) {
        _ if shard.paused => "paused".to_owned(),
        (Some(owner), _) => shown(owner, 24),
        (None, Some(home)) => format!("({})", shown(home, 22)),
        (None, None) => "nobody".to_owned(),
    }
}

/// Why it ended is among its member's causes, unless somebody else has it.
fn reasons(shard: &Shard) -> impl Iterator<Item = &String> {
    let failure = if shard.home.is_some() { &shard.failure } else { &None };
    [failure, &shard.ledger_trouble, &shard.waiting].into_iter().flatten()
}

fn left_off(text: &mut String, more: u64) {
    if more > 0 {
        let _ = writeln!(text, "and {} more", count(more));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::{Member, Trouble, WeakerTable};

    fn config(listen: &str) -> Config {
        serde_json::from_value(serde_json::json!({ "node": { "listen": listen } })).unwrap()
    }

    #[test]
    fn the_address_is_the_configurations_unless_named() {
        let at = |listen: &str, url| {
            address(&config(listen), url)
                .map(|uri| uri.to_string())
                .map_err(|exit| exit.message().unwrap().to_owned())
        };
        assert_eq!(at("127.0.0.1:9464", None).unwrap(), "http://127.0.0.1:9464/status");
        assert_eq!(at("0.0.0.0:80", None).unwrap(), "http://127.0.0.1:80/status");
        assert_eq!(at("[::]:80", None).unwrap(), "http://[::1]:80/status");
        assert_eq!(at("", Some("http://host:1/")).unwrap(), "http://host:1/status");
        assert!(at("", None).unwrap_err().contains("--url"));
        for wrong in ["host:1", "https://host", "http://", "nonsense", "http://a b"] {
            assert!(at("", Some(wrong)).unwrap_err().starts_with("--url"), "{wrong}");
        }
    }

    #[test]
    fn what_is_in_trouble_is_named_and_hostile_names_do_nothing() {
        let hostile = "a\u{1b}[2J\u{202e}";
        let document = Document {
            stream: "INGEST".into(),
            members: vec![Member {
                node: hostile.into(),
                phase: "running".into(),
                causes: vec!["shard 1 ended: gone".into()],
                ..Member::default()
            }],
            shards: vec![Shard {
                phase: "owning".into(),
                floor: Some(1_234_567),
                troubles: vec![Trouble { table: hostile.into(), kind: "store".into(), why: hostile.into() }],
                troubles_left_off: 7,
                oldest_unwritten_seconds: Some(4.0),
                ..Shard::default()
            }],
            weaker_tables: vec![WeakerTable { table: hostile.into(), ..WeakerTable::default() }],
            ..Document::default()
        };
        let text = describe(&document, Width::Columns(80));
        assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{text}");
        for part in ["NOT READY", "shard 1 ended: gone", "1,234,567", "and 7 more", "less than exactly-once"]
        {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn a_newer_daemons_document_is_read() {
        let document: Document =
            serde_json::from_str(r#"{"stream": "S", "news": 1, "shards": [{"shard": 3, "more": []}]}"#)
                .unwrap();
        assert_eq!((document.shards[0].shard, document.members.len()), (3, 0));
    }
}
