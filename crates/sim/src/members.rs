//! A model of the members' bucket and of who can be asked: records with revisions, watches, and connections that
//! answer to a member's name.
//!
//! - A record is written whatever is there; a delete may name the revision that it means. A key that is not there is
//!   deleted all the same: the answer is that it is gone.
//! - A watch begins with everything there is, then shows every change in the order of the bucket, its own process's
//!   included. One watch a client: another one begins anew.
//! - A request to a name reaches every connection that answers to it. One whose process is frozen or far exists as
//!   much as any other: only where there is none does the server say that nobody is there.
//!
//! Whoever owns the model carries messages to and fro; how late, and whether at all, is not its business.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use holdfast_core::member::MemberId;
use holdfast_core::ports::ledger::Revision;
use holdfast_core::ports::members::{Command, Entry, Reply};
use holdfast_core::ports::{Failure, FailureClass};

use crate::jetstream::Client;

/// What the server makes of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The answer to a put or a delete.
    Done(Reply),
    /// A probe goes to these connections, of which any may answer; if there is none, nobody is there.
    Asks(Vec<Client>),
}

/// The bucket, its watches, and the connections.
#[derive(Clone, Debug, Default)]
pub struct Members {
    revision: u64,
    records: BTreeMap<Arc<str>, Entry>,
    /// Who answers to which name.
    listening: BTreeMap<Client, MemberId>,
    watching: BTreeSet<Client>,
    outgoing: Vec<(Client, Reply)>,
}

impl Members {
    /// A client connects, and answers requests to the member's name from now on.
    pub fn connect(&mut self, client: Client, member: MemberId) {
        self.listening.insert(client, member);
    }

    /// The server notices that a client is gone.
    pub fn disconnect(&mut self, client: Client) {
        self.listening.remove(&client);
        self.watching.remove(&client);
        self.outgoing.retain(|(to, _)| *to != client);
    }

    /// The server forgets every connection and every watch; what is stored stays.
    pub fn restart(&mut self) {
        self.listening.clear();
        self.watching.clear();
        self.outgoing.clear();
    }

    /// A client watches, from everything there is on.
    pub fn watch(&mut self, client: Client) {
        self.watching.insert(client);
        let entries = self.records.values().cloned().collect();
        self.outgoing.push((client, Reply::Snapshot(entries)));
    }

    /// A client's watch ends.
    pub fn unwatch(&mut self, client: Client) {
        self.watching.remove(&client);
    }

    /// Takes a command and answers it.
    pub fn handle(&mut self, command: &Command) -> Answer {
        match command {
            Command::Put { attempt, member, record } => {
                self.put(member.as_str(), record.clone());
                Answer::Done(Reply::Put { attempt: *attempt, outcome: Ok(()) })
            }
            Command::Delete { attempt, member, only } => {
                let outcome = self.delete(member.as_str(), *only);
                Answer::Done(Reply::Deleted { attempt: *attempt, outcome })
            }
            Command::Probe { member, .. } => Answer::Asks(self.listeners(member).collect()),
        }
    }

    /// Stores a record, whatever is there; anybody may store anything under any key.
    pub fn put(&mut self, key: &str, record: Bytes) {
        self.revision += 1;
        let entry = Entry { key: Arc::from(key), revision: Revision(self.revision), record };
        self.records.insert(Arc::clone(&entry.key), entry.clone());
        self.show(&Reply::Changed(entry));
    }

    fn delete(&mut self, key: &str, only: Option<Revision>) -> Result<(), Failure> {
        let stored = self.records.get(key).map(|entry| entry.revision);
        if only.is_some_and(|only| stored != Some(only)) {
            return Err(Failure::new(FailureClass::Other, "wrong last sequence"));
        }
        self.revision += 1;
        self.records.remove(key);
        self.show(&Reply::Removed { key: Arc::from(key) });
        Ok(())
    }

    /// Somebody deletes the bucket and makes it again: its revisions begin anew. Nobody watches the new one; who
    /// watched is named.
    pub fn make_anew(&mut self) -> Vec<Client> {
        self.records.clear();
        self.revision = 0;
        std::mem::take(&mut self.watching).into_iter().collect()
    }

    fn show(&mut self, change: &Reply) {
        self.outgoing.extend(self.watching.iter().map(|client| (*client, change.clone())));
    }

    /// The connections that answer to a name.
    pub fn listeners(&self, member: &MemberId) -> impl Iterator<Item = Client> {
        self.listening.iter().filter(move |(_, name)| *name == member).map(|(client, _)| *client)
    }

    /// What is stored.
    pub fn records(&self) -> impl Iterator<Item = &Entry> {
        self.records.values()
    }

    /// What watches are to be shown since this was last asked; for each client in order.
    pub fn take_outgoing(&mut self) -> Vec<(Client, Reply)> {
        std::mem::take(&mut self.outgoing)
    }
}

#[cfg(test)]
mod tests {
    use holdfast_core::ports::Attempt;

    use super::*;

    const ONE: Client = Client { process: 1, start: 1, link: 1 };
    const TWO: Client = Client { process: 2, start: 1, link: 1 };

    fn id(name: &str) -> MemberId {
        MemberId::new(name).expect("a name")
    }

    fn shown(members: &mut Members, to: Client) -> Vec<String> {
        let outgoing = members.take_outgoing().into_iter().filter(|(client, _)| *client == to);
        outgoing
            .map(|(_, reply)| match reply {
                Reply::Snapshot(entries) => format!("all {}", entries.len()),
                Reply::Changed(entry) => format!("{}@{}", entry.key, entry.revision.0),
                Reply::Removed { key } => format!("-{key}"),
                other => panic!("{other:?} is nothing that a watch shows"),
            })
            .collect()
    }

    #[test]
    fn a_watch_begins_with_everything_and_shows_every_change_in_order() {
        let mut members = Members::default();
        members.put("a", Bytes::from_static(b"1"));
        members.watch(ONE);
        members.put("b", Bytes::from_static(b"2"));
        members.put("a", Bytes::from_static(b"3"));
        members.handle(&Command::Delete { attempt: Attempt(1), member: id("b"), only: None });
        assert_eq!(shown(&mut members, ONE), ["all 1", "b@2", "a@3", "-b"]);
        members.unwatch(ONE);
        members.put("a", Bytes::from_static(b"4"));
        assert!(shown(&mut members, ONE).is_empty());
        members.watch(ONE);
        assert_eq!(shown(&mut members, ONE), ["all 1"]);
    }

    #[test]
    fn a_delete_that_means_another_revision_deletes_nothing() {
        let mut members = Members::default();
        members.put("a", Bytes::from_static(b"1"));
        members.put("a", Bytes::from_static(b"2"));
        let mut delete = |only| {
            let command = Command::Delete { attempt: Attempt(1), member: id("a"), only };
            match members.handle(&command) {
                Answer::Done(Reply::Deleted { outcome, .. }) => outcome.is_ok(),
                other => panic!("{other:?}"),
            }
        };
        assert!(!delete(Some(Revision(1))));
        assert!(delete(Some(Revision(2))));
        assert!(delete(None), "what is not there is gone");
        assert_eq!(members.records().count(), 0);
    }

    #[test]
    fn who_is_asked_is_who_has_a_connection() {
        let mut members = Members::default();
        let probe = Command::Probe { attempt: Attempt(1), member: id("a") };
        assert_eq!(members.handle(&probe), Answer::Asks(vec![]));
        members.connect(ONE, id("a"));
        members.connect(TWO, id("b"));
        assert_eq!(members.handle(&probe), Answer::Asks(vec![ONE]));
        members.disconnect(ONE);
        assert_eq!(members.handle(&probe), Answer::Asks(vec![]));
    }

    #[test]
    fn a_bucket_made_anew_is_empty_watched_by_nobody_and_counts_anew() {
        let mut members = Members::default();
        members.watch(ONE);
        members.put("a", Bytes::from_static(b"1"));
        assert_eq!(members.make_anew(), [ONE]);
        members.take_outgoing();
        members.put("a", Bytes::from_static(b"2"));
        assert!(shown(&mut members, ONE).is_empty());
        assert_eq!(members.records().next().map(|entry| entry.revision), Some(Revision(1)));
    }
}
