//! Status messages: how the server says that a pull is over.

use holdfast_core::ports::delivery::PullEnd;
use holdfast_core::ports::{Failure, FailureClass};

use crate::errors::cut;

/// How a pull ended by this status line; none if the status ends nothing (heartbeats).
#[must_use]
pub fn pull_end(code: u16, description: &str) -> Option<PullEnd> {
    let failed = |class| {
        let text = if description.is_empty() {
            format!("status {code}")
        } else {
            format!("status {code}: {}", cut(description))
        };
        Some(PullEnd::Failed(Failure::new(class, text)))
    };
    let says = |words: &str| description.to_ascii_lowercase().contains(words);
    match code {
        // Idle heartbeats and flow control.
        100..=199 => None,
        404 | 408 => Some(PullEnd::Empty),
        409 if says("message size exceeds maxbytes") => Some(PullEnd::TooLarge),
        409 if says("batch completed") => Some(PullEnd::Full),
        409 if says("leadership change") => Some(PullEnd::LeaderChanged),
        409 if says("consumer deleted") => Some(PullEnd::Deleted),
        // The client has reconnected, or will.
        409 if says("server shutdown") => failed(FailureClass::Unavailable),
        // "Exceeded MaxWaiting", "Exceeded MaxRequestBatch of 100", … Expires, … MaxBytes.
        409 if says("exceeded max") => failed(FailureClass::Limit),
        423 => Some(PullEnd::NotPinned),
        503 => Some(PullEnd::NoResponders),
        429 => failed(FailureClass::Unavailable),
        _ => failed(FailureClass::Other),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_servers_words() {
        for (code, words, end) in [
            (404, "No Messages", PullEnd::Empty),
            (408, "Request Timeout", PullEnd::Empty),
            (408, "Interest Expired", PullEnd::Empty),
            (409, "Message Size Exceeds MaxBytes", PullEnd::TooLarge),
            (409, "Batch Completed", PullEnd::Full),
            (409, "Leadership Change", PullEnd::LeaderChanged),
            (409, "Consumer Deleted", PullEnd::Deleted),
            (423, "Nats-Pin-Id mismatch", PullEnd::NotPinned),
            (423, "Nats-Wrong-Pin-Id", PullEnd::NotPinned),
            (503, "", PullEnd::NoResponders),
        ] {
            assert_eq!(pull_end(code, words), Some(end), "{code} {words}");
        }
        assert_eq!(pull_end(100, "Idle Heartbeat"), None);
    }

    #[test]
    fn refusals_keep_the_servers_words() {
        for (code, words, class) in [
            (400, "Bad Request - Priority Group missing", FailureClass::Other),
            (409, "Exceeded MaxWaiting", FailureClass::Limit),
            (409, "Exceeded MaxRequestBatch of 10", FailureClass::Limit),
            (409, "Server Shutdown", FailureClass::Unavailable),
            (409, "Consumer is push based", FailureClass::Other),
            (777, "something new", FailureClass::Other),
        ] {
            let Some(PullEnd::Failed(failure)) = pull_end(code, words) else { panic!("{code} {words}") };
            assert_eq!(failure.class, class, "{code} {words}");
            assert!(failure.message.contains(words));
        }
        let Some(PullEnd::Failed(failure)) = pull_end(500, &"𒚞".repeat(10_000)) else { panic!() };
        assert!(failure.message.chars().count() < 400);
    }

    proptest! {
        #[test]
        fn every_status_has_an_answer(code: u16, words in ".*") {
            let _ = pull_end(code, &words);
        }
    }
}
