"""An index that does not know the files beside it stops the start: what it does not know would be taken for what a
crash left behind, and deleted.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.index.identity import Identity, IndexMismatchError, Mark, mismatch
from storage_server.planning.durability import Durability
from storage_server.settings import StorageSettings
from tests.support.store_bed import files_in, get, opened, put, remove_index


def empty_index(directory: Path) -> None:
    remove_index(directory)
    (directory / "index.sqlite3").touch()


def old_index(directory: Path) -> None:
    remove_index(directory)
    shutil.copy(directory.parent / "backup", directory / "index.sqlite3")


async def filled(directory: Path, durability: Durability = Durability.STRICT) -> None:
    """Two objects; an index that knows only the first is kept as `backup`."""
    store = await opened(directory, durability=durability)
    await store.objects.create_bucket("k", "bbb")
    await put(store, "first", b"1" * 200_000)
    store.close()
    shutil.copy(directory / "index.sqlite3", directory.parent / "backup")
    store = await opened(directory, durability=durability)
    await put(store, "second", b"2" * 200_000)
    store.close()


@pytest.mark.parametrize("durability", Durability)
@pytest.mark.parametrize(
    ("spoil", "why"),
    [(remove_index, "missing or another"), (empty_index, "missing or another"), (old_index, "older than")],
)
async def test_an_index_without_memory_stops_the_start_and_nothing_is_touched(
    tmp_path: Path, spoil: Callable[[Path], None], why: str, durability: Durability
) -> None:
    directory = tmp_path / "data"
    await filled(directory, durability)
    shutil.copytree(directory, tmp_path / "whole")
    spoil(directory)
    for _ in range(2):
        store = EmbeddedStore(StorageSettings(data_dir=directory, durability=durability))
        with pytest.raises(IndexMismatchError, match=why):
            await store.start()
        assert len(files_in(store)) == 2
        store.close()
    remove_index(directory)
    shutil.copy(tmp_path / "whole" / "index.sqlite3", directory)
    store = await opened(directory)
    assert await get(store, "first") == b"1" * 200_000
    assert await get(store, "second") == b"2" * 200_000
    store.close()


async def test_an_older_index_with_its_mark_stops_the_start_too(tmp_path: Path) -> None:
    """A backup of both would have all newer files taken for leftovers, and deleted."""
    directory = tmp_path / "data"
    store = await opened(directory)
    await store.objects.create_bucket("k", "bbb")
    await put(store, "first", b"1" * 200_000)
    store.close()
    for name in ("index.sqlite3", "mark"):
        shutil.copy(directory / name, tmp_path / name)
    store = await opened(directory)
    await put(store, "second", b"2" * 200_000)
    store.close()
    remove_index(directory)
    for name in ("index.sqlite3", "mark"):
        shutil.copy(tmp_path / name, directory / name)
    for _ in range(2):
        store = EmbeddedStore(StorageSettings(data_dir=directory))
        with pytest.raises(IndexMismatchError, match="older than"):
            await store.start()
        assert len(files_in(store)) == 2
        store.close()


async def test_an_adopted_index_sets_aside_what_it_does_not_know(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    await filled(directory)
    old_index(directory)
    store = await opened(directory, adopt_index=True)
    assert await get(store, "first") == b"1" * 200_000
    assert len(files_in(store)) == 1
    (aside,) = (directory / "set-aside").iterdir()
    assert aside.read_bytes()[:200_000] == b"2" * 200_000
    await put(store, "third", b"3")
    store.close()
    store = await opened(directory)
    assert await get(store, "third") == b"3"
    store.close()


async def test_a_directory_of_the_release_before_has_no_mark_and_opens(tmp_path: Path) -> None:
    """What its index does not know is set aside, since nothing proves that a crash left it."""
    await filled(tmp_path / "data")
    for mark in ("mark", "extents/mark"):
        (tmp_path / "data" / mark).unlink()
    database = sqlite3.connect(tmp_path / "data" / "index.sqlite3")
    database.execute("DELETE FROM meta")
    database.commit()
    database.close()
    orphan = tmp_path / "data" / "extents" / "00" / ("0" * 32)
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"x")
    store = await opened(tmp_path / "data")
    assert await get(store, "second") == b"2" * 200_000
    assert (tmp_path / "data" / "set-aside" / orphan.name).exists()
    store.close()


@pytest.mark.parametrize(
    ("index", "mark", "is_new", "file_count", "why"),
    [
        (Identity(1, 5), Identity(1, 5), False, 3, None),
        (Identity(1, 6), Identity(1, 5), False, 3, None),
        (Identity(2, 0), Identity(1, 5), True, 3, "another"),
        (Identity(2, 0), Identity(1, 5), True, 0, None),
        (Identity(1, 4), Identity(1, 5), False, 3, "older"),
        (Identity(2, 9), Identity(1, 5), False, 3, "another"),
        (Identity(1, 0), None, True, 3, "no index"),
        (Identity(1, 0), None, False, 3, None),
    ],
)
def test_which_index_belongs_to_the_files(
    index: Identity, mark: Identity | None, is_new: bool, file_count: int, why: str | None
) -> None:
    problem = mismatch(index, mark, index_is_new=is_new, file_count=file_count)
    assert problem is None if why is None else why in str(problem)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"store": 1}', b'{"store": [], "transactions": 1}', b"\0" * 64]
)
def test_a_torn_mark_is_no_mark(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "mark").write_bytes(content)
    mark = Mark(tmp_path)
    assert mark.read() is None
    mark.note(Identity(2**56 - 1, 10**12))
    mark.note(Identity(7, 3))
    assert mark.read() == Identity(7, 3)
    mark.close()


async def test_nobody_else_on_the_host_can_read_the_index(tmp_path: Path) -> None:
    """It names every tenant's keys. An index of a release that left it readable is closed at the start."""
    directory = tmp_path / "data"
    await filled(directory)
    (directory / "index.sqlite3").chmod(0o644)
    store = await opened(directory)
    await put(store, "third", b"3")
    assert [path for path in directory.iterdir() if path.is_file() and path.stat().st_mode & 0o077] == []
    assert (directory / "index.sqlite3-wal").exists()
    assert directory.stat().st_mode & 0o077 == 0
    store.close()
