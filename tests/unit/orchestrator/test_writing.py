"""What the orchestrator writes down of its engines."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from objectcache.adapters.threads import computed
from objectcache.orchestrator import writing
from objectcache.orchestrator.metadata import RegisteredEngine
from objectcache.orchestrator.metadata_file import DamagedMetadataError, MetadataError
from objectcache.orchestrator.rules import prefix_index
from objectcache.orchestrator.rules.kv_events import (
    Batch,
    BlockRemoved,
    BlockStored,
    KnownBatch,
    WrongEventError,
    batch_of,
    name_bytes,
)
from objectcache.orchestrator.rules.policies import Sessions
from objectcache.orchestrator.rules.prefix_index import RANKS_MAX, PrefixIndex
from objectcache.orchestrator.settings import EngineSettings
from objectcache.orchestrator.writing import Writing
from tests.support.waiting import until


def stored(name: int) -> Batch:
    return Batch(1.0, (BlockStored((name,), None, (1, 2, 3, 4), 4),), 0)


@pytest.fixture
def made(tmp_path: Path) -> Writing:
    index = PrefixIndex()
    for name in ("bad", "good"):
        index.add_engine(name)
    return Writing(tmp_path, index, Sessions())


def note(made: Writing, source: str, number: int, batch: Batch) -> None:
    for event in batch.events:
        if isinstance(event, BlockRemoved):
            made.note_part(source, event)
        made._index.apply(source, event)
        if not isinstance(event, BlockRemoved):
            made.note_part(source, event)
    made.note_batch(source, number, batch.sent_at)


async def test_what_one_engine_says_keeps_nothing_of_others_from_the_disk(
    made: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch with the time NaN ended the writing of every engine's blocks for good."""
    note_source = made.metadata.blocks.note_source

    def refuse(source: str, *arguments: Any, **options: Any) -> None:
        if source == "bad":
            raise OSError("no")
        note_source(source, *arguments, **options)

    monkeypatch.setattr(made.metadata.blocks, "note_source", refuse)
    for number in range(3):
        note(made, "bad", number, stored(number))
        note(made, "good", number, stored(number))
        made.note_session(f"session {number}", "good")
        await made.flush()
    assert set(made.metadata.blocks.batches()) == {"good"}
    assert dict(made.metadata.sessions()) == {f"session {number}": "good" for number in range(3)}
    assert made.failure_count == 3
    monkeypatch.undo()
    await made.flush()
    assert set(made.metadata.blocks.batches()) == {"bad", "good"}
    assert len(list(made.metadata.blocks.all("bad"))) == 3
    await made.stop()


async def test_what_waits_for_a_disk_is_bounded(made: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "HELD_MAX", 100)
    monkeypatch.setattr(made.metadata.blocks, "note_source", lambda *_, **__: 1 / 0)
    for number in range(50):
        note(made, "bad", number, Batch(1.0, (BlockRemoved(tuple(range(number * 10, number * 10 + 10))),), 0))
        await made.flush()
        assert made._changes["bad"].count <= 100
    monkeypatch.undo()
    await made.stop()


async def test_changes_that_wait_for_a_full_disk_are_taken_up_without_a_look_at_each(
    made: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them were copied each second: 16 ranks of 200,000 blocks stopped the event loop for half of it."""
    tried: list[str] = []

    def refuse(source: str, *_: Any, **__: Any) -> None:
        tried.append(source)
        raise MetadataError("the disk is full")

    note(made, "good", 0, stored(1))
    for number in range(3):
        note(made, "bad", number, stored(number))
    monkeypatch.setattr(made.metadata.blocks, "note_source", refuse)
    await made.flush()
    waiting = made._changes["bad"]
    held = waiting.added
    note(made, "bad", 3, stored(3))
    note(made, "bad", 4, Batch(1.0, (BlockRemoved((0, 3)),), 0))
    await made.flush()
    assert made._changes["bad"] is waiting
    assert waiting.added is held
    assert (waiting.count, waiting.known) == (4, KnownBatch(4, 1.0))
    assert tried == ["good"] * 2, "a larger change is not tried where the file refuses a smaller one"
    monkeypatch.undo()
    await made.flush()
    assert sorted(each.block for each in made.metadata.blocks.all("bad")) == [name_bytes(1), name_bytes(2)]
    assert made.metadata.blocks.batches() == {"bad": (4, 1.0), "good": (0, 1.0)}
    await made.stop()


async def test_a_disk_that_hangs_takes_no_thread_of_others(made: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's orders that waited for it took all threads in which long metrics are read, so that no engine was
    probed any more, and one that hung had its requests for ten minutes.
    """
    goes_on = threading.Event()
    monkeypatch.setattr(made.metadata, "set_pin", lambda *_: goes_on.wait(60))
    pins = [asyncio.create_task(made.pin(f"{at:032x}", "good", None)) for at in range(64)]
    await asyncio.sleep(0)
    reading = asyncio.create_task(computed(lambda: "read", is_long=True))
    done, _ = await asyncio.wait([reading], timeout=30)
    goes_on.set()
    await asyncio.gather(*pins)
    assert done == {reading}
    await made.stop()


@pytest.mark.parametrize("is_refused", [False, True])
async def test_sessions_that_wait_for_the_disk_are_bounded(
    made: Writing, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """A client names a session of its own with each request. On a disk that hung they took 300 bytes each, for ever."""
    monkeypatch.setattr(writing, "SESSIONS_MAX", 3)
    with monkeypatch.context() as refusing:
        if is_refused:
            refusing.setattr(made.metadata, "note_sessions", lambda *_: 1 / 0)
        for number in range(4):
            made.note_session(f"session {number}", "bad")
        await made.flush()
        for number in (2, 4):
            made.note_session(f"session {number}", "good")
        assert len(made._sessions) <= 3
        if is_refused:
            await made.flush()
            assert dict(made._sessions) == {"session 3": "bad", "session 2": "good", "session 4": "good"}
    await made.flush()
    assert {"session 2": "good", "session 3": "bad", "session 4": "good"}.items() <= dict(
        made.metadata.sessions()
    ).items()
    await made.stop()


async def test_what_waits_for_a_disk_that_hangs_is_bounded(made: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "HELD_ALL_MAX", 5)
    monkeypatch.setattr(writing, "FLUSH_S", 0.001)
    goes_on, hangs = threading.Event(), asyncio.Event()
    loop, note_source = asyncio.get_running_loop(), made.metadata.blocks.note_source

    def hang(*arguments: Any, **options: Any) -> None:
        loop.call_soon_threadsafe(hangs.set)
        goes_on.wait(60)
        note_source(*arguments, **options)

    monkeypatch.setattr(made.metadata.blocks, "note_source", hang)
    note(made, "good", 0, stored(0))
    made.start()
    await hangs.wait()
    for number in range(9):
        note(made, "bad", number, stored(number))
    try:
        await until(lambda: made._changes["bad"].is_cleared)
    finally:
        goes_on.set()
        await made.stop()


async def test_an_engine_joins_without_its_blocks_while_the_disk_hangs(
    made: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of etcd did not join for as long as the disk hung, so that nobody was served."""
    for name in ("good", "good#1"):
        made._index.add_engine(name)
        note(made, name, 0, stored(0))
    await made.flush()
    monkeypatch.setattr(writing, "WARM_S", 0.01)
    goes_on, note_source = threading.Event(), made.metadata.blocks.note_source

    def hang(*arguments: Any, **options: Any) -> None:
        goes_on.wait(60)
        note_source(*arguments, **options)

    monkeypatch.setattr(made.metadata.blocks, "note_source", hang)
    note(made, "bad", 0, stored(0))
    try:
        for _ in range(2):
            assert await made.warm("good") == {}
    finally:
        goes_on.set()
    note(made, "good", 7, stored(9))
    await made.flush()
    assert made.metadata.blocks.batches() == {"bad": (0, 1.0), "good": (7, 1.0)}
    assert [each.block for each in made.metadata.blocks.all("good")] == [name_bytes(9)]
    await made.stop()


@pytest.mark.parametrize("call", ["batches", "page"])
async def test_an_engine_joins_without_its_blocks_where_the_disk_fails(
    call: str, made: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd replaced an engine by another one, which did not join: nobody was served, for good."""

    def fail(*_: Any) -> None:
        raise MetadataError("disk I/O error")

    note(made, "good", 0, stored(0))
    await made.flush()
    monkeypatch.setattr(made.metadata.blocks, call, fail)
    assert await made.warm("good") == {}
    monkeypatch.undo()
    await made.flush()
    assert made.metadata.blocks.sources() == set()
    await made.stop()


async def test_an_engine_joins_without_its_blocks_where_the_disk_hangs_amid_them(
    made: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All engines of etcd that came or went waited for it."""
    note(made, "good", 0, stored(0))
    await made.flush()
    monkeypatch.setattr(writing, "WARM_S", 0.05)
    goes_on, page, begun = threading.Event(), made.metadata.blocks.page, threading.Event()

    def hang(*arguments: Any) -> list[tuple[bytes, bytes]]:
        begun.set()
        goes_on.wait(60)
        return page(*arguments)

    monkeypatch.setattr(made.metadata.blocks, "page", hang)
    try:
        assert await made.warm("good") == {}
        assert begun.is_set()
        assert not made._index.held_count("good"), "some of the blocks would be taken for all of them"
        monkeypatch.setattr(writing, "WARM_S", 60.0)
        assert await made.warm("bad") == {}, "each engine that joins would wait anew"
    finally:
        goes_on.set()
    await made.stop()


async def test_a_source_that_the_disk_has_damaged_keeps_nothing_of_others_from_it(
    made: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_source = made.metadata.blocks.note_source

    def fail(source: str, *arguments: Any, **options: Any) -> None:
        if source == "bad":
            raise DamagedMetadataError("malformed")
        note_source(source, *arguments, **options)

    note(made, "bad", 0, stored(0))
    for number in range(2):
        note(made, "good", number, stored(number))
    monkeypatch.setattr(made.metadata.blocks, "note_source", fail)
    await made.flush()
    assert set(made.metadata.blocks.batches()) == {"good"}
    monkeypatch.undo()
    await made.stop()


async def test_the_file_forgets_engines_that_nobody_has_any_more(made: Writing) -> None:
    """Each pod of a rollout has a name of its own: the blocks of all stayed on the disk for good."""
    for name in ("good#1", "gone"):
        made._index.add_engine(name)
    for name in ("bad", "good", "good#1", "gone"):
        note(made, name, 0, stored(0))
    await made.flush()
    note(made, "gone", 1, stored(1))
    again = Writing(made.metadata.file.path.parent, PrefixIndex(), Sessions())
    for each in (made, again):
        each.forget_others({"bad", "good"})
        await each.flush()
        assert each.metadata.blocks.sources() == {"bad", "good", "good#1"} == each._written
        await each.stop()


async def test_an_engine_whose_blocks_are_to_be_forgotten_joins_without_them(
    made: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(made, "good", 0, stored(0))
    await made.flush()
    monkeypatch.setattr(made.metadata.blocks, "note_source", lambda *_, **__: 1 / 0)
    made.forget_others({"bad"})
    assert await made.warm("good") == {}
    monkeypatch.undo()
    await made.stop()


async def test_what_waits_of_all_engines_is_bounded(made: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "HELD_ALL_MAX", 5)
    monkeypatch.setattr(made.metadata.blocks, "note_source", lambda *_, **__: 1 / 0)
    for number in range(4):
        note(made, "bad", number, stored(number))
    note(made, "good", 0, stored(9))
    await made.flush()
    assert {source: each.count for source, each in made._changes.items()} == {"bad": 4, "good": 1}
    note(made, "good", 1, stored(10))
    await made.flush()
    assert {source: each.count for source, each in made._changes.items()} == {"bad": 0, "good": 2}
    assert made._changes["bad"].is_cleared
    monkeypatch.undo()
    await made.stop()


@pytest.mark.parametrize("sent_at", [float("nan"), float("inf"), float("-inf")])
def test_a_batch_has_a_time(sent_at: float) -> None:
    with pytest.raises(WrongEventError, match="the time of a batch"):
        batch_of([sent_at, [], 0])


async def test_names_of_blocks_that_the_index_does_not_hold_are_not_written_down(made: Writing) -> None:
    """Any number of them comes from an engine that removes what it never had."""
    note(made, "bad", 0, stored(0))
    removed = BlockRemoved(tuple(range(10_000, 60_000)))
    made.note_part("bad", removed)
    assert made._changes["bad"].count == 1
    await made.stop()


async def test_of_a_source_with_too_many_changes_the_file_knows_nothing(
    made: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("objectcache.orchestrator.writing.HELD_MAX", 2)
    for number in range(4):
        note(made, "bad", number, stored(number))
    assert made._changes["bad"].count <= 2
    await made.flush()
    assert len(list(made.metadata.blocks.all("bad"))) <= 2
    await made.stop()


async def test_more_ranks_of_an_engine_than_there_can_be_keep_no_start_from_going_on(
    made: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that named other ranks every ten seconds ended each start with an error."""
    ranks = ["bad", *(f"bad#{rank}" for rank in range(1, RANKS_MAX + 9))]
    for name in ranks:
        made._index.add_engine(name)
        note(made, name, 0, stored(7))
    await made.flush()
    assert len(made.metadata.blocks.batches()) == len(ranks)
    index = PrefixIndex()
    again = Writing(made.metadata.file.path.parent, index, Sessions())
    assert len(await again.warm("bad")) == RANKS_MAX
    monkeypatch.setattr(prefix_index, "ENGINES_MAX", RANKS_MAX)
    index.add_engine("bad")
    assert "good" not in await again.warm("good")
    await again.flush()
    assert len(again.metadata.blocks.batches()) == RANKS_MAX


@pytest.mark.parametrize("unread", ['{"url": "http://later", "of_a_later_release": 1}', "[]", "5", "[" * 20_000])
async def test_an_engine_that_cannot_be_read_keeps_no_start_from_going_on(made: Writing, unread: str) -> None:
    await made.add_engine(EngineSettings("http://good", "good"))
    made.metadata.add_engine(RegisteredEngine("http://later", "later", unread))
    assert [settings.label for settings, _ in made.engines()] == ["good"]
    assert [each.name for each in made.metadata.engines()] == ["good", "later"]
