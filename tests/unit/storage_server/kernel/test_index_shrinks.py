"""Rows that were deleted give their pages back: the index's bytes count in the bound of the directory."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from storage_server.kernel.index import schema

ROWS = [("b", f"key {number}", number, 0, "", 0.0, "x" * 2000) for number in range(4000)]
INSERT = (
    "INSERT INTO objects (bucket, key, version, nbytes, etag, modified_at, attributes) VALUES (?, ?, ?, ?, ?, ?, ?)"
)


def filled(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN")
    connection.executemany(INSERT, ROWS)
    connection.execute("COMMIT")
    connection.execute("DELETE FROM objects")


def file_bytes(connection: sqlite3.Connection, path: Path) -> int:
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return path.stat().st_size


def test_pages_without_rows_are_given_back_in_steps(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite3"
    connection = schema.connect(path)
    schema.create(connection)
    assert not schema.shrink(connection), "there is nothing to give back"
    filled(connection)
    before = file_bytes(connection, path)
    steps = 0
    while schema.shrink(connection):
        steps += 1
        assert steps < 100
    assert steps > 3
    assert file_bytes(connection, path) < before / 4
    connection.close()


@pytest.mark.parametrize("is_small", [True, False])
def test_an_index_of_an_earlier_release_is_rewritten_once_if_it_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_small: bool
) -> None:
    path = tmp_path / "index.sqlite3"
    connection = schema.connect(path)
    schema.create(connection)
    connection.execute("PRAGMA auto_vacuum=0")
    connection.execute("VACUUM")
    assert not schema.can_shrink(connection)
    if not is_small:
        monkeypatch.setattr(schema, "REWRITTEN_BYTES_MAX", 0)
    schema.create(connection)
    assert schema.can_shrink(connection) is is_small
    connection.close()
