"""One thing may have a record in the journal of every writer that a neighbour makes: each is as little work as the
first.
"""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing

from storage_server.home.directory import merge
from storage_server.home.directory.rules.records import Record
from storage_server.kernel.index import schema
from storage_server.kernel.index.transaction import Transaction
from storage_server.kernel.rules.rows import Touched

ABOUT = Touched("object", "bucket", "key")
STEP = 100
"""SQLite's instructions between two counts."""


def new_index(db: sqlite3.Connection) -> Transaction:
    schema.create(db)
    tx = Transaction(db, itertools.count(1), synced=True)
    merge.prepare(tx)
    return tx


def apply_deletion(tx: Transaction, writer: int, stamp: int) -> None:
    merge.apply(tx, f"{writer:012x}", 1, [Record(ABOUT, stamp, None)], 0.0)


def steps_of_one_more(tx: Transaction, writer: int) -> int:
    """How much work SQLite has with one more record of the thing."""
    steps = itertools.count()
    tx.db.set_progress_handler(lambda: next(steps) < 0, STEP)
    apply_deletion(tx, writer, 1_000_000 + writer)
    tx.db.set_progress_handler(None, 0)
    return next(steps)


def test_a_record_is_as_little_work_where_a_thousand_others_are_about_the_same_thing() -> None:
    """All records of a thing were sorted for each further one: 36,000 records of four keys by 9,000 writers kept
    every call to the directory waiting for two minutes.
    """
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        tx = new_index(db)
        for writer in range(10):
            apply_deletion(tx, writer, writer + 1)
        few = steps_of_one_more(tx, 10)
        for writer in range(11, 1000):
            apply_deletion(tx, writer, writer + 1)
        assert steps_of_one_more(tx, 1000) <= few + 2


def test_the_record_of_the_greatest_stamp_and_writer_holds_among_many() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        tx = new_index(db)
        for writer, stamp in ((3, 7), (1, 9), (2, 9), (4, 8)):
            apply_deletion(tx, writer, stamp)
        assert merge.collected(db, [ABOUT], 100) == []  # the holding record says that it is gone already
        kept_by = {writer for writer in range(1, 5) if list(merge.kept(db, f"{writer:012x}", -1.0))}
        assert kept_by == {2}
