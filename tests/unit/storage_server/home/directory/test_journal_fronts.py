"""A journal that was written anew: whoever has read it goes on behind its front, and reads the front beside."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from descriptors.objects import CopyRequest, ReadRequest
from storage_server.home.directory import following as following_module
from storage_server.home.directory import journal as journal_module
from storage_server.home.directory import late_journals
from storage_server.home.directory import upkeep as upkeep_module
from storage_server.home.directory.journal import Rewrite
from storage_server.home.directory.rules.succession import Succession
from storage_server.home.directory.store import SharedDirectory
from tests.support.shared_bed import BUCKET, KEY, get, opened, put
from tests.support.waiting import until

KEYS = [f"key{number:02}" for number in range(30)]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep_module, "REWRITE_BYTES_MIN", 1)
    monkeypatch.setattr(late_journals, "LATE_PAUSE_S", 0.01)


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Fronts cannot be read; the result ends that."""

    def fail(*arguments: Any) -> Any:
        raise OSError(errno.EIO, "the front")

    read = following_module.read_front
    monkeypatch.setattr(following_module, "read_front", fail)
    return lambda: monkeypatch.setattr(following_module, "read_front", read)


async def filled(shared: SharedDirectory) -> None:
    await shared.objects.create_bucket(KEY, BUCKET)
    for key in KEYS:
        await put(shared, key, key.encode())
    for key in KEYS[::3]:
        await put(shared, key, b"again")


async def rewritten(shared: SharedDirectory) -> int:
    """Have the journal written anew; its generation then."""
    before = shared._journal.generation
    async with shared.upkeep.shortening:
        shared.upkeep.rewritten_bytes, shared.upkeep.rewrite_from_s = 0, float("-inf")
    await shared.upkeep.shorten_journal()
    assert shared._journal.generation > before
    return shared._journal.generation


def oldest_generation(shared: SharedDirectory, writer: str) -> int:
    sql = "SELECT min(generation) FROM records WHERE writer = ?"
    return int(shared.reader.here(lambda db: db.execute(sql, (writer,)).fetchone()[0]))


async def is_marked(shared: SharedDirectory, writer: str, generation: int) -> None:
    """Until the front is read, and what only older generations had is forgotten."""

    async def is_so() -> bool:
        await shared.following.read_journals()
        return oldest_generation(shared, writer) == generation

    while not await is_so():
        await until(lambda: not shared.following._fronts)


async def test_what_is_written_behind_a_rewrite_shows_before_its_front_is_read(
    tmp_path: Path, unreadable: Callable[[], None]
) -> None:
    """With a million objects others saw nothing of a server for 140 s, and could not copy its objects."""
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await filled(one)
        await other.following.read_journals()
        generation = await rewritten(one)
        await put(one, "new", b"new")
        await one.objects.delete_object(KEY, BUCKET, KEYS[1])
        assert await get(other, "new") == b"new"
        assert await get(other, KEYS[1]) is None
        assert await get(other, KEYS[0]) == b"again"
        assert not other.unread_count
        await other.objects.copy_object(KEY, CopyRequest(ReadRequest(BUCKET, KEYS[0]), BUCKET, "copy"))
        assert oldest_generation(other, one.writer) < generation
        unreadable()
        await is_marked(other, one.writer, generation)
        assert await get(other, KEYS[2]) == KEYS[2].encode()


async def test_a_restart_before_the_front_is_read_forgets_nothing(
    tmp_path: Path, unreadable: Callable[[], None]
) -> None:
    async with opened(tmp_path, "a") as one:
        async with opened(tmp_path, "b") as other:
            await filled(one)
            await other.following.read_journals()
            generation = await rewritten(one)
            await put(one, "new", b"new")
            assert await get(other, "new") == b"new"
        async with opened(tmp_path, "b") as other:
            await put(one, "newer", b"newer")
            expected = [b"again" if number % 3 == 0 else key.encode() for number, key in enumerate(KEYS)]
            assert [await get(other, key) for key in [*KEYS, "new", "newer"]] == [*expected, b"new", b"newer"]
            assert oldest_generation(other, one.writer) < generation
            unreadable()
            await is_marked(other, one.writer, generation)
            assert [await get(other, key) for key in [*KEYS, "new", "newer"]] == [*expected, b"new", b"newer"]


async def test_a_second_rewrite_before_the_front_of_the_first_is_read(
    tmp_path: Path, unreadable: Callable[[], None]
) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await filled(one)
        await other.following.read_journals()
        await rewritten(one)
        await other.following.read_journals()
        await one.objects.delete_object(KEY, BUCKET, KEYS[1])
        await other.following.read_journals()
        generation = await rewritten(one)
        await put(one, "new", b"new")
        assert await get(other, "new") == b"new"
        unreadable()
        await is_marked(other, one.writer, generation)
        assert await get(other, KEYS[1]) is None
        assert await get(other, KEYS[2]) == KEYS[2].encode()
        names = {path.name for path in (tmp_path / "shared" / "writers" / one.writer).iterdir()}
        assert {name for name in names if name.startswith(("journal", "succession"))} == {
            f"journal-{generation}",
            f"succession-{generation}",
        }
    async with opened(tmp_path, "a") as one, opened(tmp_path, "c") as newcomer:
        assert await get(newcomer, KEYS[2]) == await get(one, KEYS[2]) == KEYS[2].encode()


async def test_a_reader_that_lacks_something_of_the_front_reads_all(tmp_path: Path) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await one.objects.create_bucket(KEY, BUCKET)
        await put(one, "first", b"first")
        assert await get(other, "first") == b"first"
        for key in KEYS:
            await put(one, key, key.encode())
        await one.objects.delete_object(KEY, BUCKET, "first")
        await rewritten(one)
        assert [await get(other, key) for key in KEYS] == [key.encode() for key in KEYS]
        assert await get(other, "first") is None
        assert not other.following._fronts


@pytest.mark.parametrize(
    "data",
    [b"no JSON", b'{"generation": 1, "position": 1, "front": 4611686018427387903}', b'{"generation": 9}', None],
)
async def test_a_succession_that_makes_no_sense_has_all_read(tmp_path: Path, data: bytes | None) -> None:
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await filled(one)
        await other.following.read_journals()
        async with one.upkeep.shortening:
            generation = one._journal.generation
        generation = await rewritten(one)
        place = tmp_path / "shared" / "writers" / one.writer / f"succession-{generation}"
        place.unlink()
        if data is not None:
            place.write_bytes(data)
        await put(one, "new", b"new")
        assert await get(other, "new") == b"new"
        assert [await get(other, key) for key in KEYS[1:3]] == [key.encode() for key in KEYS[1:3]]
        assert oldest_generation(other, one.writer) == generation


@pytest.mark.parametrize("front", [13, 60])
async def test_a_succession_of_another_file_has_all_read(tmp_path: Path, front: int) -> None:
    """A kill left it, and a release that knows no successions wrote this generation: others read it no further."""
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await filled(one)
        await other.following.read_journals()
        position = one._journal.end
        generation = await rewritten(one)
        stale = Succession(generation - 1, position, front).encoded()
        (tmp_path / "shared" / "writers" / one.writer / f"succession-{generation}").write_bytes(stale)
        await put(one, "new", b"new")
        assert await get(other, "new") == b"new"
        assert not other.unread_count
        assert oldest_generation(other, one.writer) == generation


async def test_leftovers_of_a_rewrite_go_at_the_next_start(tmp_path: Path) -> None:
    async with opened(tmp_path, "a") as one:
        await filled(one)
        generation = await rewritten(one)
        folder = tmp_path / "shared" / "writers" / one.writer
    leftovers = [f"succession-{generation + 1}", f"succession-{generation}.0123456789ab.new", "succession-1"]
    for name in leftovers:
        with suppress(FileExistsError):
            (folder / name).write_bytes(b"left")
    async with opened(tmp_path, "a") as one:
        names = {path.name for path in folder.iterdir() if path.name.startswith("succession")}
        assert names == {f"succession-{generation}"}
    assert journal_module.newest(one._folder) == generation


async def test_what_was_written_during_the_rewrite_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front has an older record of it, and a reader that goes on behind it has read the newer one before."""
    async with opened(tmp_path, "a") as one, opened(tmp_path, "b") as other:
        await filled(one)
        await other.following.read_journals()
        shorten, begun = one._rewriting._shorten_tail, list[int]()

        async def during(rewrite: Rewrite, position: int) -> int:
            if not begun:
                begun.append(position)
                await put(one, KEYS[0], b"newer")
                await one.objects.delete_object(KEY, BUCKET, KEYS[1])
                await other.following.read_journals()
            return await shorten(rewrite, position)

        async with one.upkeep.shortening:
            monkeypatch.setattr(one._rewriting, "_shorten_tail", during)
        generation = await rewritten(one)
        assert begun
        await is_marked(other, one.writer, generation)
        assert [await get(other, key) for key in KEYS[:3]] == [b"newer", None, KEYS[2].encode()]
