//! What each shard has under way, so that it can be broken off.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::{AbortHandle, AbortRegistration, Abortable, Aborted};
use holdfast_core::ports::Attempt;
use holdfast_core::row::ShardId;

/// The work under way, by shard.
#[derive(Clone, Default)]
pub(crate) struct Underway(Arc<Mutex<Entries>>);

#[derive(Default)]
struct Entries {
    handles: BTreeMap<(ShardId, Attempt), AbortHandle>,
    /// What was broken off: work up to this number that is yet to be started is not.
    aborted: BTreeMap<ShardId, Attempt>,
}

impl Underway {
    /// Runs `work` for `shard` until it ends or [`Self::abort`] breaks it off. Then it is dropped where it stands.
    pub(crate) async fn run<F: Future>(
        &self,
        shard: ShardId,
        attempt: Attempt,
        work: F,
    ) -> Result<F::Output, Aborted> {
        let (_entry, registration) = self.enter(shard, attempt);
        Abortable::new(work, registration).await
    }

    fn enter(&self, shard: ShardId, attempt: Attempt) -> (Entry, AbortRegistration) {
        let (handle, registration) = AbortHandle::new_pair();
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (shard, attempt);
        if entries.aborted.get(&shard).is_some_and(|until| attempt <= *until) {
            handle.abort();
        }
        entries.handles.insert(key, handle);
        (Entry { key, underway: self.clone() }, registration)
    }

    /// Breaks off all work of `shard` with a number up to `until`, also what has yet to be started.
    pub(crate) fn abort(&self, shard: ShardId, until: Attempt) {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, handle) in entries.handles.range((shard, Attempt(0))..=(shard, until)) {
            handle.abort();
        }
        let aborted = entries.aborted.entry(shard).or_default();
        *aborted = until.max(*aborted);
    }
}

/// Takes its entry out when the work ends, however it ends.
struct Entry {
    key: (ShardId, Attempt),
    underway: Underway,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.underway.0.lock().unwrap_or_else(PoisonError::into_inner).handles.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn a_shard_is_broken_off_and_its_neighbour_is_not() {
        let underway = Underway::default();
        let run = |shard, attempt| {
            let underway = underway.clone();
            tokio::spawn(async move { underway.run(ShardId(shard), Attempt(attempt), pending::<()>()).await })
        };
        let (first, second, other) = (run(1, 1), run(1, 2), run(2, 1));
        while underway.0.lock().unwrap().handles.len() < 3 {
            tokio::task::yield_now().await;
        }
        underway.abort(ShardId(1), Attempt(3));
        assert_eq!(first.await.unwrap(), Err(Aborted));
        assert_eq!(second.await.unwrap(), Err(Aborted));
        assert_eq!(underway.0.lock().unwrap().handles.len(), 1);
        assert!(!other.is_finished());
        other.abort();
        assert!(other.await.is_err());
        assert!(underway.0.lock().unwrap().handles.is_empty(), "dropped work leaves no entry");
        assert_eq!(
            underway.run(ShardId(1), Attempt(3), pending::<()>()).await,
            Err(Aborted),
            "started too late"
        );
        assert_eq!(underway.run(ShardId(1), Attempt(4), async { 7 }).await, Ok(7), "a later one runs");
    }
}
