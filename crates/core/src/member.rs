//! A member's record in the bucket: who it is, that it lives, and which shards it holds.
//!
//! Each member writes its own record and nobody else's, so there is no compare-and-set: the last write is
//! the truth. Members of mixed versions read each other's records, so unlike a shard's record
//! ([`crate::record`]) one with unknown fields is read by the fields that are known: nothing rests on a
//! member's record but who should stand by for what, and a pin decides in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::format;
use crate::ports::delivery::PinId;
use crate::record::Session;
use crate::row::ShardId;

/// A member's name: the node id of its process. It is a key of the bucket, so its letters are a key's:
/// `A-Z a-z 0-9 - _ . = /`, 1 to [`MemberId::MAX`] of them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct MemberId(Arc<str>);

/// Why a text is no member's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a node id has 1 to {max} letters out of A-Z a-z 0-9 - _ . = /", max = MemberId::MAX)]
pub struct BadMemberId;

impl MemberId {
    /// The longest name, in bytes.
    pub const MAX: usize = 128;

    /// The member named `id`.
    ///
    /// # Errors
    /// If the text cannot be a key of the bucket, or is too long.
    pub fn new(id: impl Into<Arc<str>>) -> Result<Self, BadMemberId> {
        let id = id.into();
        let fits = |b: u8| b.is_ascii_alphanumeric() || b"-_.=/".contains(&b);
        if id.is_empty() || id.len() > Self::MAX || !id.bytes().all(fits) {
            return Err(BadMemberId);
        }
        Ok(Self(id))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for MemberId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        Self::new(text.as_ref()).map_err(serde::de::Error::custom)
    }
}

/// Whether a member takes shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It does.
    Active,
    /// It is on its way out: it keeps what it holds until that is written, and takes nothing.
    Draining,
    /// It is gone. (A deleted record says the same.)
    Resigned,
    /// A state that a newer version knows. It is alive and keeps what it holds; nothing is given to it.
    #[serde(other)]
    Unknown,
}

/// How a member holds a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// The pin that it owns the shard by; none while it stands by.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "pin")]
    pub pin: Option<PinId>,
    /// With a pin: higher than the turn of every owner that this one knew of. Of two members that both call
    /// themselves the owner, the higher turn is the later one; the other was frozen, say.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub turn: u64,
    /// Whether it is giving the shard up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_zero(turn: &u64) -> bool {
    *turn == 0
}

mod pin {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serializer};

    use super::PinId;

    #[expect(clippy::ref_option, reason = "serde asks for it")]
    pub(super) fn serialize<S: Serializer>(pin: &Option<PinId>, serializer: S) -> Result<S::Ok, S::Error> {
        match pin {
            Some(pin) => serializer.serialize_str(&pin.0),
            None => serializer.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PinId>, D::Error> {
        Ok(Option::<Arc<str>>::deserialize(deserializer)?.map(PinId))
    }
}

/// Whom a failed shard fails for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// This member only (the shard's record is newer than it knows, say): another may well manage.
    Here,
    /// Everybody (the consumer is gone, or does not fit): an heir would fail in turn.
    Everywhere,
}

/// Why a member does not have a shard although it tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Why, in words, cut to [`Member::MAX_TEXT`] bytes.
    pub reason: String,
    /// For whom.
    pub scope: Scope,
}

impl Fault {
    /// A fault in the words of `reason`, cut to what a record carries, on one line.
    #[must_use]
    pub fn new(reason: &str, scope: Scope) -> Self {
        let end = reason.floor_char_boundary(Member::MAX_TEXT);
        let reason = reason[..end].chars().map(|c| if c.is_ascii_control() { ' ' } else { c }).collect();
        Self { reason, scope }
    }
}

/// A member's record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The layout, [`Member::VERSION`] or what a newer Holdfast wrote.
    pub version: u32,
    /// Who.
    pub id: MemberId,
    /// Its process start. Another one under the same name is another member: the earlier is gone.
    pub session: Session,
    /// Raised with every write.
    pub beat: u64,
    /// Whether it takes shards.
    pub state: State,
    /// The version of its software, for people.
    #[serde(default)]
    pub software: String,
    /// A hash of its configuration in hexadecimal: members that differ are told of.
    #[serde(default)]
    pub fingerprint: String,
    /// What it owns or stands by for.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub shards: BTreeMap<ShardId, Hold>,
    /// What it tried and cannot have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failed: BTreeMap<ShardId, Fault>,
    /// What its operator wants nobody to have.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub paused: BTreeSet<ShardId>,
}

/// Why a stored record cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemberError {
    /// A newer Holdfast wrote it in a way that leaves nothing to read.
    #[error("the member's record has version {0}, this Holdfast knows up to {known}: finish the upgrade", known = Member::VERSION)]
    Newer(u32),
    /// It is no member's record.
    #[error("not a member's record ({0}): delete the key if nothing of yours writes it")]
    Broken(String),
}

impl Member {
    /// The layout that this code writes.
    pub const VERSION: u32 = format::VERSION;
    /// The longest record that is looked at, in bytes.
    pub const MAX_BYTES: usize = 512 * 1024;
    /// The most shards that a record speaks of, and that a topology has.
    pub const MAX_SHARDS: usize = 1_024;
    /// The longest text in a record, in bytes.
    pub const MAX_TEXT: usize = 200;

    /// The record's bytes, always the same for the same record.
    ///
    /// # Panics
    /// Never: every part of a record has a JSON form.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        debug_assert_eq!(self.defect(), None, "{self:?}");
        format::encode(self)
    }

    /// Reads a stored record. Fields that are not known are passed over, whichever version wrote them; a
    /// newer layout is read by the fields that it still has, and keeps its version so that it can be told.
    ///
    /// # Errors
    /// [`MemberError::Newer`] for a newer layout of which too little is known, [`MemberError::Broken`] for
    /// anything else that is no member's record. Nothing worse, whatever the bytes are.
    pub fn decode(bytes: &[u8]) -> Result<Self, MemberError> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        if bytes.len() > Self::MAX_BYTES {
            return Err(MemberError::Broken(format!("{} bytes are too many", bytes.len())));
        }
        let broken = |error: serde_json::Error| MemberError::Broken(error.to_string());
        let Version { version } = serde_json::from_slice(bytes).map_err(broken)?;
        let read = format::decode::<Self>(bytes)
            .map_err(broken)
            .and_then(|member| member.defect().map_or(Ok(member), |defect| Err(MemberError::Broken(defect))));
        if version > Self::VERSION { read.map_err(|_| MemberError::Newer(version)) } else { read }
    }

    /// What makes this record unfit to be believed or stored, if anything does.
    #[must_use]
    pub fn defect(&self) -> Option<String> {
        if self.version == 0 {
            return Some("there is no version 0".to_owned());
        }
        let counts = [self.shards.len(), self.failed.len(), self.paused.len()];
        if counts.iter().any(|count| *count > Self::MAX_SHARDS) {
            return Some(format!("more than {} shards", Self::MAX_SHARDS));
        }
        let pins = self.shards.values().filter_map(|hold| hold.pin.as_ref()).map(|pin| &*pin.0);
        let reasons = self.failed.values().map(|fault| fault.reason.as_str());
        let mut texts = pins.chain(reasons).chain([self.software.as_str(), self.fingerprint.as_str()]);
        if let Some(text) = texts.find(|text| text.len() > Self::MAX_TEXT) {
            return Some(format!("a text of {} bytes", text.len()));
        }
        let held_twice = self.shards.keys().find(|shard| self.failed.contains_key(shard));
        held_twice.map(|shard| format!("shard {shard} is held and failed at once"))
    }

    /// Whether everything but the beat is the same.
    #[must_use]
    pub fn says_the_same_as(&self, other: &Self) -> bool {
        Self { beat: 0, ..self.clone() } == Self { beat: 0, ..other.clone() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> Member {
        Member {
            version: Member::VERSION,
            id: MemberId::new("node-1.example").unwrap(),
            session: Session(0xfeed),
            beat: 17,
            state: State::Active,
            software: "0.1.0".to_owned(),
            fingerprint: "00ff".to_owned(),
            shards: BTreeMap::from([
                (ShardId(0), Hold::default()),
                (ShardId(7), Hold { pin: Some(PinId("p1".into())), turn: 3, leaving: false }),
            ]),
            failed: BTreeMap::from([(ShardId(2), Fault::new("the consumer is gone", Scope::Everywhere))]),
            paused: BTreeSet::from([ShardId(3)]),
        }
    }

    fn text() -> String {
        String::from_utf8(sample().encode().to_vec()).unwrap()
    }

    #[test]
    fn a_record_comes_back_as_it_was_and_its_layout_is_written_down() {
        assert_eq!(Member::decode(&sample().encode()), Ok(sample()));
        assert_eq!(
            text(),
            r#"{"version":1,"id":"node-1.example","session":"000000000000feed","beat":17,"state":"active","software":"0.1.0","fingerprint":"00ff","shards":{"0":{},"7":{"pin":"p1","turn":3}},"failed":{"2":{"reason":"the consumer is gone","scope":"everywhere"}},"paused":[3]}"#
        );
    }

    #[test]
    fn a_heartbeat_alone_says_nothing_new() {
        assert!(sample().says_the_same_as(&Member { beat: 18, ..sample() }));
        assert!(!sample().says_the_same_as(&Member { state: State::Draining, ..sample() }));
    }

    #[test]
    fn versions_mix() {
        let more = text().replace(r#""beat":17"#, r#""beat":17,"mood":{"good":true}"#);
        assert_eq!(Member::decode(more.as_bytes()), Ok(sample()), "an unknown field is passed over");
        let newer = more.replace(r#""version":1"#, r#""version":9"#).replace("active", "thinking");
        let read = Member::decode(newer.as_bytes()).unwrap();
        assert_eq!((read.version, read.state, &read.shards), (9, State::Unknown, &sample().shards));
        assert_eq!(Member::decode(br#"{"version":9,"all":"new"}"#), Err(MemberError::Newer(9)));
    }

    #[test]
    fn what_is_no_record_is_refused() {
        let long = format!(r#""reason":"{}""#, "x".repeat(Member::MAX_TEXT + 1));
        for bad in [
            String::new(),
            r#"{"version":1}"#.to_owned(),
            text().replace(r#""version":1"#, r#""version":0"#),
            text().replace("node-1.example", "node 1"),
            text().replace("node-1.example", &"n".repeat(MemberId::MAX + 1)),
            text().replace(r#""reason":"the consumer is gone""#, &long),
            text().replace(r#"{"2":{"#, r#"{"7":{"#),
            format!("{}{}", text(), " ".repeat(Member::MAX_BYTES)),
        ] {
            assert!(matches!(Member::decode(bad.as_bytes()), Err(MemberError::Broken(_))), "{bad:.80}");
        }
    }

    #[test]
    fn the_largest_record_fits_what_is_read() {
        let mut member = sample();
        let wide = "\u{1}".repeat(Member::MAX_TEXT);
        for shard in (0..).take(Member::MAX_SHARDS).map(ShardId) {
            if shard.0 % 2 == 0 {
                member.failed.insert(shard, Fault::new(&"\"\n".repeat(4_000), Scope::Here));
                member.shards.remove(&shard);
            } else {
                member.failed.remove(&shard);
                member.shards.insert(
                    shard,
                    Hold { pin: Some(PinId("p".repeat(22).into())), turn: u64::MAX, leaving: true },
                );
            }
        }
        member.software = wide;
        assert_eq!(Member::decode(&member.encode()), Ok(member));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_record_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = Member::decode(&bytes);
        }

        #[test]
        fn a_damaged_record_is_sound_or_refused(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut bytes = sample().encode().to_vec();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok(member) = Member::decode(&bytes) {
                prop_assert_eq!(member.defect(), None);
            }
        }
    }
}
