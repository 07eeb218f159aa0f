//! What a user may do.

use std::path::PathBuf;

use holdfast_clickhouse::{Class, Config, Demand, Need, Secret};
use holdfast_core::ports::store::{DescribeError, InsertOutcome, Level};
use holdfast_core::row::TableName;
use holdfast_testbed::ClickHouse;

use crate::bed::*;

const USERS: &str = "<clickhouse><profiles><default/></profiles><quotas><default/></quotas><users>
<default><password></password><networks><ip>::/0</ip></networks></default>
<writer><password>hunter2</password><networks><ip>::/0</ip></networks>
  <grants><query>GRANT INSERT ON default.*</query></grants></writer>
<reader><password>hunter2</password><networks><ip>::/0</ip></networks>
  <grants><query>GRANT INSERT, SELECT ON default.*</query></grants></reader>
<filtered><password>hunter2</password><networks><ip>::/0</ip></networks>
  <databases><default><t><filter>n > 2</filter></t></default></databases></filtered>
<stranger><password>hunter2</password><networks><ip>::/0</ip></networks>
  <grants><query>GRANT SELECT ON system.one</query></grants></stranger>
</users></clickhouse>";

struct Rights {
    server: ClickHouse,
    folder: PathBuf,
}

impl Rights {
    fn start() -> Self {
        let name = format!("holdfast-rights-{}-{:x}", std::process::id(), rand::random::<u32>());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).unwrap();
        let (users, config) = (folder.join("users.xml"), folder.join("config.xml"));
        std::fs::write(&users, USERS).unwrap();
        let text = format!("<clickhouse><users_config>{}</users_config></clickhouse>", users.display());
        std::fs::write(&config, text).unwrap();
        let server =
            ClickHouse::builder().argument(format!("--config-file={}", config.display())).start().unwrap();
        Self { server, folder }
    }

    fn bed(&self, user: &str, change: impl FnOnce(&mut Config)) -> Bed {
        Bed::new(self.server.url(), |config| {
            user.clone_into(&mut config.user);
            config.password = Secret::new("hunter2");
            change(config);
        })
    }
}

impl Drop for Rights {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_that_may_not_read_gets_the_level_below() {
    let rights = Rights::start();
    plain(&rights.server, "t");
    // All that is needed is to insert and to read back.
    let reader = rights.bed("reader", |_| {});
    assert_eq!(reader.describe("t").await, Ok(target("default", "t", Level::ExactlyOnce)));
    assert_eq!(reader.put("t", "a", rows(1..=5)).await, InsertOutcome::Stored);
    assert_eq!(reader.read_back("t", 1, 9).await.unwrap().seqs, seqs(1..=5));
    assert_eq!(reader.holds("t", 3).await, Ok(Some(holdfast_core::row::Seq(5))));
    // Whoever lost the right to read says so, and an open batch waits.
    let writer = rights.bed("writer", |_| {});
    let refusal = writer.read_back("t", 1, 9).await.unwrap_err();
    assert_eq!((refusal.class, refusal.code), (Class::Access, Some(497)), "{refusal}");
    assert_eq!(writer.describe("t").await, Ok(target("default", "t", Level::Deduplicated)));
    let report = writer.store.report(&TableName::new("t")).await.unwrap();
    assert_eq!((report.findings[0].field.as_str(), report.findings[0].need), ("grant", Need::Recommended));
    assert_eq!(report.findings[0].fix, "GRANT SELECT(`_seq`, `_stream`) ON `default`.`t` TO <user>");
    let strict =
        rights.bed("writer", |config| config.defaults.delivery = Demand::Exactly(Level::ExactlyOnce));
    assert!(
        matches!(strict.describe("t").await, Err(DescribeError::Unfit(why)) if why.contains("GRANT SELECT"))
    );
    let weaker = batch_for("t", Level::Deduplicated, "b", rows(6..=7));
    assert_eq!(writer.send(weaker).await, InsertOutcome::Stored);
    // Neither user needs a grant to have the bad row found.
    rights
        .server
        .query("ALTER TABLE t ADD COLUMN z UInt8 MATERIALIZED toUInt8(if(n = 99, 'x', '1'))")
        .unwrap();
    for bed in [&reader, &writer] {
        let refusal = again(bed.put("t", "c", rows(90..=110)).await);
        assert_eq!((refusal.class, refusal.code, refusal.row), (Class::Data, Some(6), Some(10)), "{refusal}");
    }
    // A policy hides rows: what is not seen must not be taken for missing.
    let filtered = rights.bed("filtered", |_| {});
    assert_eq!(filtered.describe("t").await, Ok(target("default", "t", Level::Deduplicated)));
    let refusal = filtered.read_back("t", 1, 9).await.unwrap_err();
    assert!(
        refusal.class == Class::Table && refusal.message.contains("can no longer be read back"),
        "{refusal}"
    );
    // Who may do nothing, and who is nobody.
    let stranger = rights.bed("stranger", |_| {});
    let refusal = again(stranger.put("t", "d", rows(1..=3)).await);
    assert!(matches!(refusal.class, Class::Access | Class::Table), "{refusal}");
    assert!(stranger.describe("t").await.is_err());
    let nobody = rights.bed("reader", |config| config.password = Secret::new("hunter3"));
    let refusal = again(nobody.put("t", "d", rows(1..=3)).await);
    assert_eq!((refusal.class, refusal.code), (Class::Access, Some(516)), "{refusal}");
    assert!(!refusal.message.contains("hunter"), "{refusal}");
    assert_eq!(rights.server.query("SELECT count() FROM t").unwrap(), "7");
}
