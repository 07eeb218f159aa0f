//! The daemon's TOML: what is accepted can be used, and what is not is told on one line.
#![no_main]

use holdfast::config::Config;
use holdfast_core::record::Session;

libfuzzer_sys::fuzz_target!(|text: &str| {
    // A configuration may name any file, one without end too.
    if ["file", "credentials", "tls"].iter().any(|word| text.contains(word)) || text.contains('\\') {
        return;
    }
    match Config::of_text(text) {
        Ok(config) => {
            assert!(config.topology().is_ok() && config.start().is_ok() && config.clickhouse().is_ok());
            assert!(config.listen().is_ok() && config.nats().is_ok());
            let claims = config.claims(Session(1)).ok().expect("it can share shards out");
            assert!(claims.probe <= claims.lease && !claims.heartbeat.is_zero());
            let (batch, _) = (config.batch(), config.parking());
            assert!(batch.max_rows > 0 && batch.max_bytes > 0);
            let again = Config::of_text(text).ok().expect("it was accepted");
            assert_eq!(again.fingerprint(), config.fingerprint());
        }
        Err(exit) => {
            let said = exit.message().expect("an error says why");
            assert!(!said.is_empty() && said.lines().count() == 1, "{said:?}");
        }
    }
});
