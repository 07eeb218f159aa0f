//! The version of what is kept in the bucket: shards' records and members' records, which daemons of two versions read
//! side by side while one replaces the other.
//!
//! **What a newer daemon owes older ones.** It reads every earlier version. What it writes has its own version, always,
//! and the number goes up with any change of a shard's record, an added field included: an older daemon must not act on
//! a record of which it knows a part only ([`RecordError::Newer`](crate::record::RecordError::Newer)).
//!
//! **What an older daemon owes newer ones.** A shard whose record is newer than it knows it leaves to the others, and
//! says so; it never writes over it. A member's record is read by the fields that are known: a newer member is alive,
//! has what it says, and keeps it. A shard that a newer member has is not planned for an older one, which could not read
//! its record ([`crate::claims`]). So shards go from old daemons to new ones as they are replaced, and never back while
//! a new one lives.
//!
//! **What it costs.** Going back: once only older daemons are left, shards with newer records stand still, their rows
//! wait in the stream, and a newer daemon goes on with them where they are.

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The version that this code writes, and the highest that it reads.
///
/// With the feature `next-format` it is the one after: for the test of two builds side by side only.
pub const VERSION: u32 = if cfg!(feature = "next-format") { 2 } else { 1 };

/// # Panics
/// If the value has no JSON form.
pub(crate) fn encode<T: Serialize>(value: &T) -> Bytes {
    layout::to_vec(value).expect("a record is plain data").into()
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    layout::from_slice(bytes)
}

#[cfg(not(feature = "next-format"))]
mod layout {
    pub(super) use serde_json::{from_slice, to_vec};
}

/// A layout with one field more.
#[cfg(feature = "next-format")]
mod layout {
    use serde::Serialize;
    use serde::de::DeserializeOwned;
    use serde_json::{Result, Value, json};

    const FIELD: &str = "of_the_next_format";

    pub(super) fn to_vec<T: Serialize>(value: &T) -> Result<Vec<u8>> {
        let mut value = serde_json::to_value(value)?;
        value[FIELD] = json!({ "known": ["to", 2] });
        serde_json::to_vec(&value)
    }

    pub(super) fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
        let mut value: Value = serde_json::from_slice(bytes)?;
        if let Some(fields) = value.as_object_mut() {
            fields.remove(FIELD);
        }
        serde_json::from_value(value)
    }
}
