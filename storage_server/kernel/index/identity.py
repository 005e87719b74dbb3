"""The identity of a data directory's index, by which a lost or old index is told from the leftovers of a crash.

An index has a number, drawn when the index is made, and counts its transactions. A file beside the index, the mark,
holds both; it is written after each durable transaction. An index with another number, or with fewer transactions than
the mark, lacks files whose writes were acknowledged. A server that went on with it would delete these files as
leftovers.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from objectcache.adapters.beneath import Beneath

MARK_BYTES = 64
MARK_NAME = "mark"


@dataclass(frozen=True, slots=True)
class Identity:
    """`number` is drawn for each new index; `transactions` counts the commits to it."""

    number: int
    transactions: int


class IndexMismatchError(Exception):
    """The index does not belong to the files beside it. The message says what to do."""


def draw_identity(db: sqlite3.Connection) -> None:
    """Give an index a number, unless it has one."""
    number = int.from_bytes(os.urandom(7), "little")
    db.execute("INSERT INTO meta VALUES ('store', ?) ON CONFLICT DO NOTHING", (number,))


def count_transaction(db: sqlite3.Connection) -> int:
    """Count one more transaction and return its number. The count also makes every transaction change the log."""
    sql = "INSERT INTO meta VALUES ('transactions', 1) ON CONFLICT DO UPDATE SET value = value + 1 RETURNING value"
    ((transactions,),) = db.execute(sql).fetchall()
    return int(transactions)


def read_identity(db: sqlite3.Connection) -> Identity:
    """The identity that the index holds."""
    found = dict(db.execute("SELECT name, value FROM meta WHERE name IN ('store', 'transactions')").fetchall())
    return Identity(found.get("store", 0), found.get("transactions", 0))


def mismatch(index: Identity, mark: Identity | None, *, index_is_new: bool, file_count: int) -> str | None:
    """The reason why a server may not go on with this index, or None. A directory of an earlier release, or one that
    lost power early, has no mark; then only an index that was just made is suspicious.
    """
    if not file_count:
        return None
    if mark is None:
        return f"there is no index, but there are {file_count} data files" if index_is_new else None
    if index.number != mark.number:
        return f"the index is missing or another store's: it does not belong to the {file_count} data files here"
    if index.transactions < mark.transactions:
        behind = mark.transactions - index.transactions
        return f"the index is older than the data files: {behind} transactions are missing from it"
    return None


class Mark:
    """The mark of a data directory, and a copy among the data files: the mark may come back with an older index, from
    a backup of both. Used by one thread at a time.
    """

    def __init__(self, directory: Path, data_files: str | None = None) -> None:
        """`data_files` names the folder of data files in the directory."""
        names = [MARK_NAME] if data_files is None else [MARK_NAME, f"{data_files}/{MARK_NAME}"]
        self._fds = [Beneath(directory, name).open(os.O_RDWR | os.O_CREAT) for name in names]
        for fd in self._fds:
            if not os.fstat(fd).st_size:  # its space counts from the beginning
                os.pwrite(fd, b" " * MARK_BYTES, 0)

    def read(self) -> Identity | None:
        """The mark; None where none was ever written, or both copies are torn. The one among the data files counts
        where it is of another store, or later.
        """
        own, *among = (_read(fd) for fd in self._fds)
        for copy in filter(None, among):
            if own is None or copy.number != own.number or copy.transactions > own.transactions:
                own = copy
        return own

    def note(self, identity: Identity) -> None:
        """Record that the transaction is durable: an index without it is then known to be an old one. The mark is not
        synced, and may fail to be written: with an older one fewer old indexes are noticed, nothing else is lost.
        """
        text = json.dumps({"store": identity.number, "transactions": identity.transactions})
        with contextlib.suppress(OSError):
            for fd in self._fds:
                os.pwrite(fd, text.ljust(MARK_BYTES).encode(), 0)

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds:
            os.close(fd)


def _read(fd: int) -> Identity | None:
    try:
        fields = json.loads(os.pread(fd, MARK_BYTES, 0))
        return Identity(int(fields["store"]), int(fields["transactions"]))
    except (ValueError, KeyError, TypeError):
        return None
