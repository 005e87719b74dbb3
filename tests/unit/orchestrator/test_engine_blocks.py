"""The names and the written blocks of an engine's data-parallel ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from objectcache.orchestrator.engine_blocks import EngineBlocks
from objectcache.orchestrator.events_feed import EventsFeed
from objectcache.orchestrator.rules.kv_events import BlockStored, Event
from objectcache.orchestrator.rules.prefix_index import PrefixIndex

STORED = BlockStored((1,), None, (1, 2, 3, 4), 4)


class Log:
    """Remembers which sources the file forgets."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def note_part(self, source: str, part: Event) -> None: ...

    def note_batch(self, source: str, number: int, sent_at: float) -> None: ...

    def cleared(self, source: str) -> None:
        self.forgotten.append(source)


@pytest.fixture
async def blocks(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineBlocks]:
    async def run(feed: EventsFeed) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(EventsFeed, "run", run)
    made = EngineBlocks("a", PrefixIndex(), None, Log(), None)
    yield made
    await made.stop()


def source(rank: int) -> tuple[int, str, str | None, str]:
    return rank, f"tcp://127.0.0.1:{5557 + rank}", None, ""


async def test_ranks_that_leave_are_forgotten_where_they_are_written_down(blocks: EngineBlocks) -> None:
    """Each rank that an engine had ever named stayed in the file, until no orchestrator started any more."""
    blocks.found([source(0), source(1)])
    assert blocks.names == ("a", "a#1")
    blocks.found([source(0), source(2)])
    assert blocks.names == ("a", "a#2")
    assert blocks._index.names_of("a") == ["a", "a#2"]
    log = blocks._log
    assert isinstance(log, Log)
    assert set(log.forgotten) == {"a", "a#1"}


async def test_blocks_that_were_restored_stay_where_the_engine_names_their_rank(blocks: EngineBlocks) -> None:
    index = blocks._index
    index.add_engine("a#1")
    for name in ("a", "a#1"):
        index.apply(name, STORED)
    blocks.found([source(0)])
    assert (index.held_count("a"), index.names_of("a")) == (1, ["a"])
    blocks.leave()
    assert (blocks.names, index.names_of("a"), index.block_count) == ((), [], 0)
