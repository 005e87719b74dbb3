"""Upgrades of the index of an earlier release. docs/guides/durability.md says what they mean for users.

A schema has a number, which SQLite keeps as `user_version`. Each step takes the index to the next number, in one
transaction that also writes the number. So after a crash, or on a full disk, the index has the old schema or the new
one, never half of each. No step touches the extents' files. There is no way back: an earlier release refuses the index.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping, Sequence

STEPS: Mapping[int, Sequence[str]] = {
    # Compaction looks up the extents of a file by their offset in it.
    2: (
        "DROP INDEX IF EXISTS extents_by_file",
        "CREATE INDEX IF NOT EXISTS extents_by_place ON extents (file_id, file_offset, nbytes)",
    ),
    # A bounded cache goes on after a restart with the order in which its objects were used.
    3: (
        "CREATE TABLE IF NOT EXISTS uses (bucket TEXT NOT NULL, key TEXT NOT NULL, used_at REAL NOT NULL,"
        " use_count INTEGER NOT NULL, parent TEXT, leased_until REAL, PRIMARY KEY (bucket, key)) WITHOUT ROWID",
    ),
    # In front of another service a chunk may be durable here before it is there.
    4: (
        "CREATE TABLE IF NOT EXISTS dirty (bucket TEXT NOT NULL, key TEXT NOT NULL, version INTEGER NOT NULL,"
        " PRIMARY KEY (bucket, key)) WITHOUT ROWID",
    ),
    # Equal bytes of one tenant are stored once.
    5: (
        "ALTER TABLE extents ADD COLUMN content BLOB",
        "CREATE INDEX IF NOT EXISTS extents_by_content ON extents (content, version) WHERE content IS NOT NULL",
    ),
    # Clients may declare a bucket a cache.
    6: ("ALTER TABLE buckets ADD COLUMN cache TEXT",),
}
"""The statements that take a schema of this number to the next."""
SCHEMA_VERSION = max(STEPS) + 1
_log = logging.getLogger(__name__)


class SchemaError(Exception):
    """The index has a schema that this release cannot read. The message says what to do."""


def schema_of(connection: sqlite3.Connection) -> int:
    """The number of the index's schema; 0 for an index without tables."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def require_current(connection: sqlite3.Connection) -> None:
    """Raises SchemaError unless the index has this release's schema."""
    found = schema_of(connection)
    if found > SCHEMA_VERSION:
        raise SchemaError(
            f"the index has schema {found}, this release reads up to {SCHEMA_VERSION}: a later release has opened it;"
            " go on with that release"
        )
    if found == 0:
        raise SchemaError("the index is empty")
    if found < min(STEPS):
        raise SchemaError(
            f"the index has schema {found}, this release upgrades from {min(STEPS)}: its objects have no checksums;"
            " copy them over S3 from the release that wrote them"
        )
    if found < SCHEMA_VERSION:
        raise SchemaError(
            f"the index has schema {found}, this release reads {SCHEMA_VERSION}: start a storage server on the"
            " directory once, which upgrades it"
        )


def migrate(connection: sqlite3.Connection) -> None:
    """Take the index to this release's schema. Raises SchemaError where there is no such upgrade, sqlite3.Error where
    the disk is full or fails; the index is then as it was after the last whole step.
    """
    if (found := schema_of(connection)) in STEPS:
        _log.warning("the index is upgraded from schema %d to %d: a large one takes minutes", found, SCHEMA_VERSION)
    while (found := schema_of(connection)) in STEPS:
        run_whole(connection, (*STEPS[found], f"PRAGMA user_version={found + 1}"))
        _log.warning("the index has schema %d of %d now", found + 1, SCHEMA_VERSION)
    require_current(connection)


def run_whole(connection: sqlite3.Connection, statements: Sequence[str]) -> None:
    """Run the statements in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in statements:
            connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
