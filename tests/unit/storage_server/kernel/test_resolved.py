"""What is remembered of the index is never older than what anybody was told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from descriptors.objects import PutRequest
from storage_server.kernel.index.resolved import ResolvedKeys, entry_bytes
from storage_server.planning.extent import Extent, read_object
from tests.support.chunks import BytesBody
from tests.support.faulty_disk import FaultyDisk
from tests.support.store_bed import opened

OLD, NEW = [Extent("old", 0, 1, b"")], [Extent("new", 0, 1, b"")]


def test_what_was_looked_up_is_found_again_up_to_a_bound() -> None:
    resolved = ResolvedKeys(2, 1 << 20)
    since, found = resolved.find("b", ["x", "y", "z"])
    assert found == [None, None, None]
    resolved.remember(since, "b", [("x", OLD), ("y", OLD), ("z", OLD)])
    assert resolved.find("b", ["x", "y", "z"])[1] == [None, OLD, OLD]
    assert resolved.find("c", ["z"])[1] == [None]


def test_absence_is_not_remembered() -> None:
    """Somebody may be storing the chunk right now."""
    resolved = ResolvedKeys(10, 1 << 20)
    resolved.remember(resolved.find("b", ["x"])[0], "b", [("x", None)])
    assert resolved.find("b", ["x"])[1] == [None]


def test_what_changed_after_the_look_is_not_remembered_after_it() -> None:
    resolved = ResolvedKeys(10, 1 << 20)
    since, _ = resolved.find("b", ["x", "y"])
    resolved.forget([("b", "x")])
    resolved.remember(since, "b", [("x", OLD), ("y", OLD)])
    assert resolved.find("b", ["x", "y"])[1] == [None, OLD]
    since, _ = resolved.find("b", ["x"])
    resolved.remember(since, "b", [("x", NEW)])
    assert resolved.find("b", ["x"])[1] == [NEW]


def test_after_a_move_nothing_older_is_remembered() -> None:
    resolved = ResolvedKeys(10, 1 << 20)
    since, _ = resolved.find("b", ["x"])
    resolved.forget_all()
    resolved.remember(since, "b", [("x", OLD)])
    assert resolved.find("b", ["x"])[1] == [None]


def test_more_changes_than_are_noted_forbid_remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage_server.kernel.index.resolved.RECENT_MAX", 2)
    resolved = ResolvedKeys(10, 1 << 20)
    since, _ = resolved.find("b", ["x"])
    for key in ("x", "p", "q"):
        resolved.forget([("b", key)])
    resolved.remember(since, "b", [("x", OLD)])
    assert resolved.find("b", ["x"])[1] == [None]


async def test_a_prefix_is_never_older_than_the_last_answer(tmp_path: Path) -> None:
    """Writers overwrite and delete while readers resolve: a reader sees at least what was acknowledged before it began,
    and the bytes it names are there.
    """
    store = await opened(tmp_path / "data", FaultyDisk())
    await store.objects.create_bucket("k", "bbb")
    keys = [f"key-{number}" for number in range(8)]
    acknowledged = dict.fromkeys(keys, 0)
    sizes = 5_000

    async def put(key: str, turn: int) -> None:
        await store.objects.put_object(
            "k", PutRequest("bbb", key, sizes), BytesBody(turn.to_bytes(4, "little") * (sizes // 4))
        )
        acknowledged[key] = turn

    for key in keys:
        await put(key, 1)

    async def write(key: str) -> None:
        for turn in range(2, 20):
            if turn % 7 == 0:
                await store.objects.delete_object("k", "bbb", key)
            await put(key, turn)

    async def read() -> int:
        seen = 0
        while not writing.done():
            before = dict(acknowledged)
            assert await store.objects.prefixes.matched("bbb", keys[:1]) in (0, 1)
            async with store.objects.prefixes.open("bbb", keys[:1], sizes, prefix_only=False) as chunks:
                data = memoryview(bytearray(sizes))
                read_object(store.files.open.read_into, chunks[0], 0, data)
            turn = int.from_bytes(data[:4], "little")
            assert turn >= before[keys[0]]
            assert bytes(data) == turn.to_bytes(4, "little") * (sizes // 4)
            seen += 1
            await asyncio.sleep(0)
        return seen

    async def write_without_gaps(key: str) -> None:
        for turn in range(2, 30):
            await put(key, turn)

    writing = asyncio.gather(write_without_gaps(keys[0]), *(write(key) for key in keys[1:]))
    counts = await asyncio.gather(*(read() for _ in range(3)))
    await writing
    assert min(counts) > 2
    assert store.files.pinned_count == 0
    store.close()


def test_memory_is_bounded_in_bytes_too() -> None:
    """The checksums of a chunk of 128 MiB are 32 KiB: entries alone bound nothing."""
    large = [Extent("f", 0, 128 << 20, bytes(32_768))]
    each = entry_bytes("b", "key-00", large)
    resolved = ResolvedKeys(1000, 3 * each)
    for index in range(10):
        since, _ = resolved.find("b", [f"key-{index:02}"])
        resolved.remember(since, "b", [(f"key-{index:02}", large)])
        resolved.remember(since, "b", [(f"key-{index:02}", large)])
        assert resolved.nbytes <= 3 * each
    assert [found is not None for found in resolved.find("b", ["key-06", "key-07", "key-09"])[1]] == [False, True, True]
    resolved.forget([("b", "key-07")])
    assert resolved.nbytes == 2 * each
    resolved.forget_all()
    assert resolved.nbytes == 0
