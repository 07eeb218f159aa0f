//! Ports for servers that must be able to come back on the same one.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::net::{Ipv4Addr, TcpListener};

use crate::error::{Context, Result};

/// Below the range that the kernel takes the ports of outgoing connections from (32768 and up, unless told
/// otherwise): a port that it hands out itself could be some client's by the time a killed server comes back.
const FIRST: u16 = 12_000;
const COUNT: u16 = 20_000;

/// A port of the loopback interface that nothing listens on.
///
/// Another process may take it before the caller does; so the callers check that it is their own server that
/// answers there, and try another port if not.
pub(crate) fn free() -> Result<u16> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..100 {
        // The standard library's hash keys are its one source of randomness, which is all that is needed here.
        let random = RandomState::new().build_hasher().finish();
        let port = FIRST + u16::try_from(random % u64::from(COUNT)).unwrap_or_default();
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(_) => return Ok(port),
            Err(error) => last = error,
        }
    }
    Err(last).context(|| "cannot find a free port".to_owned())
}
