//! Tables for generated rows, in which every row's place can be judged afterwards.

use crate::clickhouse::Sql;
use crate::error::Result;

/// Creates a table for generated rows: the counter `n`, the filling `pad`, and Holdfast's two columns.
///
/// The window is far longer than any test's, so that deduplication never depends on it. The block columns keep
/// the order of insertion through merges; they only do when set from the beginning.
///
/// # Errors
/// When ClickHouse refuses.
pub fn create_table(sql: &Sql, table: &str) -> Result<()> {
    create(sql, table, "", "tuple()")
}

/// [`create_table`] with a number `v`, which can be given values that ClickHouse refuses.
///
/// # Errors
/// When ClickHouse refuses.
pub fn create_picky_table(sql: &Sql, table: &str) -> Result<()> {
    create(sql, table, ", v Int32 DEFAULT 0", "tuple()")
}

/// [`create_picky_table`], partitioned by this expression.
///
/// # Errors
/// When ClickHouse refuses.
pub fn create_partitioned_table(sql: &Sql, table: &str, by: &str) -> Result<()> {
    create(sql, table, ", v Int32 DEFAULT 0", by)
}

fn create(sql: &Sql, table: &str, columns: &str, by: &str) -> Result<()> {
    sql.query(&format!(
        "CREATE TABLE {} (_seq UInt64, _stream UInt64, n UInt64, pad String{columns}) \
         ENGINE = MergeTree PARTITION BY {by} ORDER BY tuple() \
         SETTINGS non_replicated_deduplication_window = 1000000, \
         enable_block_number_column = 1, enable_block_offset_column = 1",
        identifier(table)
    ))?;
    Ok(())
}

/// The names `{prefix}0`, `{prefix}1`, …
#[must_use]
pub fn table_names(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{prefix}{number}")).collect()
}

/// A table's name in SQL: `web.clicks` is table `clicks` of database `web`.
#[must_use]
pub fn identifier(table: &str) -> String {
    table
        .splitn(2, '.')
        .map(|part| format!("`{}`", part.replace('\\', "\\\\").replace('`', "\\`")))
        .collect::<Vec<_>>()
        .join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_quoted() {
        assert_eq!(identifier("t1"), "`t1`");
        assert_eq!(identifier("web.clicks"), "`web`.`clicks`");
        assert_eq!(identifier("a`b\\c"), "`a\\`b\\\\c`");
    }

    #[test]
    fn names_are_numbered() {
        assert_eq!(table_names("t", 2), ["t0", "t1"]);
    }
}
