//! Rule 9, from outside: a batch that may have been written is read back before it is sent again.

use std::collections::BTreeMap;

use holdfast_core::ports::Attempt;
use holdfast_core::ports::store::{Class, Insert, Token};
use holdfast_core::row::TableName;

use super::intent::SPLIT;
use super::{Checked, violated};

pub(crate) const NAME: &str = "9 doubt";

/// What a shard of a process start knows of an attempt at a batch.
#[derive(Debug, Default)]
pub(crate) struct Doubts {
    /// By table: the token in doubt.
    doubted: BTreeMap<TableName, Token>,
    under_way: BTreeMap<TableName, (Attempt, Token)>,
    /// By table: the last batch that was ever in doubt.
    ever: BTreeMap<TableName, Token>,
    /// By table: why the last attempt was refused for certain, if it was.
    refused: BTreeMap<TableName, Class>,
}

impl Doubts {
    /// The shard wants a batch sent.
    pub(crate) fn sends(&mut self, insert: &Insert) -> Checked {
        if self.doubted.get(&insert.table) == Some(&insert.token) && insert.target.level.can_read_back() {
            return violated(NAME, format!("{} was sent again and not read back before", insert.token.0));
        }
        self.under_way.insert(insert.table.clone(), (insert.attempt, insert.token.clone()));
        Ok(())
    }

    /// It asks what is in the table: an attempt that is under way is given up, and in doubt; what is told of it later
    /// is no news.
    pub(crate) fn asks(&mut self, table: &TableName) {
        if let Some((_, token)) = self.under_way.remove(table) {
            self.ever.insert(table.clone(), token.clone());
            self.doubted.insert(table.clone(), token);
        }
    }

    /// It is told how an attempt ended: whether it may have written something. (Of an attempt that was answered
    /// before it takes no other answer.)
    pub(crate) fn answered(&mut self, table: &TableName, attempt: Attempt, in_doubt: bool) {
        if self.under_way.get(table).is_some_and(|(under_way, _)| *under_way == attempt)
            && let Some((_, token)) = self.under_way.remove(table)
            && in_doubt
        {
            self.ever.insert(table.clone(), token.clone());
            self.doubted.insert(table.clone(), token);
        }
    }

    /// The last batch of a table that was ever in doubt.
    pub(crate) fn last(&self, table: &TableName) -> Option<&Token> {
        self.ever.get(table)
    }

    /// It is told why an attempt was refused for certain, or else that it was not.
    pub(crate) fn refused(&mut self, table: &TableName, class: Option<Class>) {
        match class {
            Some(class) => self.refused.insert(table.clone(), class),
            None => self.refused.remove(table),
        };
    }

    /// It splits a batch of a table.
    pub(crate) fn splits(&self, table: &TableName) -> Checked {
        match self.refused.get(table) {
            Some(Class::Data) => Ok(()),
            other => violated(SPLIT, format!("a batch of {table} was split, refused for {other:?}")),
        }
    }

    /// It is told what is in the table.
    pub(crate) fn read_back(&mut self, table: &TableName) {
        self.doubted.remove(table);
    }
}
