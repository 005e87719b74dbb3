"""Durable metadata."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from objectcache.orchestrator.metadata import Metadata, RegisteredEngine
from objectcache.orchestrator.metadata_blocks import BATCH, CacheEntry
from objectcache.orchestrator.metadata_file import FILE, DamagedMetadataError, MetadataError

ENGINE = RegisteredEngine("http://a:8000", "a", "{}")


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    metadata = Metadata(tmp_path)
    metadata.add_engine(ENGINE)
    metadata.add_engine(RegisteredEngine("http://b:8000", "b", "{}", is_draining=True))
    metadata.note_sessions({"s": "a", "t": "b"})
    metadata.blocks.note_source(
        "a", (7, 5.0), [CacheEntry("a", b"p1", b"n1"), CacheEntry("a", b"p2", b"n2")], [], is_cleared=False
    )
    metadata.set_pin("prefix", "a", None)
    metadata.set_pin("ending", "a", 5.0)
    metadata.set_quota("t", '{"weight": 2}')
    metadata.close()
    again = Metadata(tmp_path)
    assert [each.name for each in again.engines()] == ["a", "b"]
    assert [each.is_draining for each in again.engines()] == [False, True]
    assert dict(again.sessions()) == {"s": "a", "t": "b"}
    assert again.blocks.batches() == {"a": (7, 5.0)}
    assert [(each.block, each.prefix) for each in again.blocks.all("a")] == [(b"n1", b"p1"), (b"n2", b"p2")]
    assert again.pins() == {"prefix": ("a", None), "ending": ("a", 5.0)}
    assert again.quotas() == {"t": '{"weight": 2}'}
    again.close()
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


def test_an_engine_that_is_removed_takes_its_blocks_and_sessions_with_it(tmp_path: Path) -> None:
    metadata = Metadata(tmp_path)
    metadata.add_engine(ENGINE)
    metadata.note_sessions({"s": "a", "t": "b"})
    metadata.blocks.note([CacheEntry(name, b"p", b"n") for name in ("a", "a#1", "ab")])
    metadata.remove_engine("a")
    assert metadata.engines() == []
    assert metadata.sessions() == [("t", "b")]
    assert [each.engine for each in metadata.blocks.all()] == ["ab"]
    metadata.close()


@pytest.mark.parametrize(("name", "other"), [("http://[::1]:8000", "http://1:8000#1"), ("*", "good#1"), ("a_", "ab#1")])
def test_names_of_engines_are_no_patterns(name: str, other: str, tmp_path: Path) -> None:
    metadata = Metadata(tmp_path)
    names = (name, f"{name}#1", other)
    metadata.blocks.note([CacheEntry(each, b"p", b"n") for each in names])
    for each in names:
        metadata.blocks.note_source(each, (1, 1.0), [], [], is_cleared=False)
    metadata.remove_engine(name)
    assert [each.engine for each in metadata.blocks.all()] == [other]
    assert list(metadata.blocks.batches()) == [other]
    metadata.close()


def test_a_name_is_one_engines_and_an_engine_may_come_again(tmp_path: Path) -> None:
    metadata = Metadata(tmp_path)
    metadata.add_engine(ENGINE)
    metadata.add_engine(RegisteredEngine(ENGINE.url, "a", '{"requests_max": 4}'))
    with pytest.raises(MetadataError, match="another engine"):
        metadata.add_engine(RegisteredEngine("http://c:8000", "a", "{}"))
    assert [each.settings for each in metadata.engines()] == ['{"requests_max": 4}']
    metadata.close()


def test_sessions_are_bounded_and_entries_are_read_in_parts(tmp_path: Path) -> None:
    metadata = Metadata(tmp_path)
    metadata.note_sessions({str(at): "a" for at in range(20)}, sessions_max=5)
    assert len(metadata.sessions()) == 5
    metadata.blocks.note([CacheEntry("a", b"p", at.to_bytes(4, "big")) for at in range(12_000)])
    assert sum(1 for _ in metadata.blocks.all("a")) == 12_000
    assert metadata.blocks.find("a", (5).to_bytes(4, "big")) is not None
    assert metadata.blocks.find("a", b"none") is None
    metadata.close()


def test_a_file_of_a_later_release_or_of_something_else_is_refused(tmp_path: Path) -> None:
    metadata = Metadata(tmp_path)
    metadata.file._db.execute("PRAGMA user_version = 99")
    metadata.close()
    with pytest.raises(MetadataError, match="99"):
        Metadata(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(MetadataError):
        Metadata(tmp_path / "other")


def test_a_file_that_somebody_has_locked_is_an_error_of_the_metadata(tmp_path: Path) -> None:
    metadata = Metadata(tmp_path)
    metadata.file._db.execute("PRAGMA busy_timeout = 1")
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(MetadataError, match="locked"):
            metadata.set_draining("a", is_draining=True)
    metadata.set_draining("a", is_draining=True)
    metadata.close()


def test_the_last_page_of_an_engines_blocks_takes_no_longer_than_the_first(tmp_path: Path) -> None:
    """SQLite went through all pages before it: a start took 22 s for a million blocks, and 4 times that for two."""
    metadata = Metadata(tmp_path)
    metadata.blocks.note([CacheEntry("a", b"p", at.to_bytes(4, "big")) for at in range(8 * BATCH)])
    steps = [0]

    def step() -> int:
        steps[0] += 1
        return 0

    metadata.file._db.set_progress_handler(step, 1000)
    costs = []
    for after in (0, 7 * BATCH - 1):
        steps[0] = 0
        assert len(metadata.blocks.page("a", after.to_bytes(4, "big"))) == BATCH
        costs.append(steps[0])
    assert costs[1] <= 1.5 * costs[0]
    metadata.close()


def test_every_source_of_which_something_is_written_down_is_known(tmp_path: Path) -> None:
    metadata = Metadata(tmp_path)
    metadata.blocks.note([CacheEntry(name, b"p", b"n%d" % at) for name in ("a", "a#1", "b") for at in range(3)])
    metadata.blocks.note_source("c", (1, 1.0), [], [], is_cleared=False)
    assert metadata.blocks.sources() == {"a", "a#1", "b", "c"}
    metadata.close()


class FailingDisk:
    """A connection to a file on a disk that fails."""

    in_transaction = False

    def __init__(self, error: Exception) -> None:
        self.error = error

    def execute(self, statement: str, *_: Any) -> None:
        if not statement.startswith("BEGIN"):
            raise self.error

    def executemany(self, *_: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (sqlite3.OperationalError("disk I/O error"), MetadataError),
        (sqlite3.DatabaseError("database disk image is malformed"), DamagedMetadataError),
    ],
)
def test_whatever_a_disk_has_done_is_an_error_of_the_metadata(
    error: Exception, kind: type[MetadataError], tmp_path: Path
) -> None:
    """An engine of etcd did not join, and never again, because of an error that nobody knew."""
    metadata = Metadata(tmp_path)
    metadata.file._db = cast(sqlite3.Connection, FailingDisk(error))
    for call in (lambda: metadata.add_engine(ENGINE), metadata.engines, lambda: metadata.remove_engine("a")):
        with pytest.raises(MetadataError) as raised:
            call()
        assert type(raised.value) is kind


def test_nothing_is_acknowledged_that_goes_into_a_file_which_somebody_has_removed(tmp_path: Path) -> None:
    """A registration was answered as one on the disk, and was gone after a restart."""
    metadata = Metadata(tmp_path)
    metadata.add_engine(ENGINE)
    (tmp_path / FILE).unlink()
    with pytest.raises(MetadataError, match="No such file"):
        metadata.set_pin("prefix", "a", None)
    (tmp_path / FILE).touch()
    with pytest.raises(MetadataError, match="another file"):
        metadata.set_pin("prefix", "a", None)
    metadata.close()
