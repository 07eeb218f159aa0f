//! Ctrl-C and SIGTERM: end in order, and leave nothing half-done behind. A second one ends at once.

use std::sync::mpsc::{self, Receiver};
use std::thread;

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};

/// What a command that was interrupted exits with, as shells have it.
const EXIT_CODE: i32 = 130;

/// Takes the two signals from now on. What is received tells of the first one.
pub(crate) fn watch() -> Result<Receiver<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot watch for Ctrl-C")?;
    let (mut interrupt, mut terminate) = {
        let _context = runtime.enter();
        let watch = |kind| signal(kind).context("cannot watch for Ctrl-C");
        (watch(SignalKind::interrupt())?, watch(SignalKind::terminate())?)
    };
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        runtime.block_on(async {
            let mut first = true;
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                if !first {
                    std::process::exit(EXIT_CODE);
                }
                first = false;
                holdfast_testbed::fetch::interrupt();
                let _ = tell.send(());
            }
        });
    });
    Ok(told)
}
