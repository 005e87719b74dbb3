"""The tier that encodes, between a source and its policy."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from objectcache.kv_codecs.elements import Element, from_floats
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.cache import encoding_keeper
from storage_server.cache.dram import DramTier
from storage_server.cache.encoding_keeper import EncodingKeeper
from storage_server.cache.policies.utility import CodecFigures, UtilitySettings
from storage_server.planning.extent import Extent
from storage_server.planning.forms import Reading
from tests.support.waiting import LIMIT_S, settled, until

SHAPE = LayerShape(32, 256, Element.BFLOAT16)
READING = Reading(SHAPE, 4, (Codec.KIVI8, Codec.KIVI4))
FIGURES = {Codec.KIVI8: CodecFigures(1.0, 1e12), Codec.KIVI4: CodecFigures(0.98, 1e12)}
SETTINGS = UtilitySettings(FIGURES, alpha_s=0.001, memory_bytes_per_s=8e9, home_bytes_per_s=1e8)


class KvSource:
    """A ChunkSource of chunks of KV; `broken` ones are no numbers."""

    generation = 0

    def __init__(self) -> None:
        self.broken: set[Extent] = set()

    def keep(self, extents: Sequence[Extent], since: int) -> KvSource:
        return self

    def release(self) -> None:
        pass

    def read_extent(self, one: Extent, view: memoryview, start: int = 0) -> None:
        values = np.random.default_rng(int(one.file_id, 16)).standard_normal(READING.exact_bytes // 2)
        out = np.empty(READING.exact_bytes, dtype=np.uint8)
        from_floats(values.astype(np.float32), Element.BFLOAT16, out)
        if one in self.broken:
            out[:2] = (0xC0, 0x7F)
        view[:] = out[start : start + len(view)].data


def extent(number: int) -> Extent:
    return Extent(f"{number:032x}", 0, READING.exact_bytes, b"")


@pytest.fixture
async def tier() -> AsyncIterator[DramTier]:
    keep = partial(EncodingKeeper, settings=SETTINGS)
    tier = DramTier(4 * READING.exact_bytes, KvSource(), keep)  # type: ignore[arg-type]
    yield tier
    await tier.close()


async def use(tier: DramTier, extents: Sequence[Extent]) -> None:
    async with tier.lent(extents, READING):
        pass
    while tier._working:
        await asyncio.wait(list(tier._working))


async def test_what_the_policy_decides_lies_in_memory(tier: DramTier) -> None:
    for _ in range(4):
        await use(tier, [extent(number) for number in range(7)])
        assert tier.keeper.decided_bytes == tier.residency.used_bytes
    counts = tier.residency.form_counts
    assert sum(counts.values()) == 7
    assert set(counts) & {"kivi8-1", "kivi4-1"}
    assert tier.keeper.encoded_bytes > 0


async def test_the_log_says_which_codec_the_trials_have_chosen(
    tier: DramTier, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, and not with each of the requests."""
    caplog.set_level(logging.INFO)
    for _ in range(60):
        await use(tier, [extent(number) for number in range(7)])
    told = [record.getMessage() for record in caplog.records if "by its trials" in record.getMessage()]
    assert told
    assert len(told) == len([text for text, after in pairwise([*told, ""]) if text != after])


async def test_the_policy_is_told_of_everything_in_the_thread_of_the_books(
    tier: DramTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no locks: what the filler and the event loop have seen waits until it is asked again."""
    keeper = tier.keeper
    assert isinstance(keeper, EncodingKeeper)
    threads: dict[str, set[str]] = {}

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name.rpartition("_")[0])
            return call(*arguments)

        return called

    policy = keeper._policy
    heard = {policy: ("request", "remove", "note_made"), policy.readers: ("note_error", "note_unencodable")}
    for each, names in heard.items():
        for name in names:
            monkeypatch.setattr(each, name, watched(name, getattr(each, name)))
    source = tier._source
    assert isinstance(source, KvSource)
    source.broken.add(extent(3))
    for _ in range(6):
        await use(tier, [extent(number) for number in range(7)])
    assert set(threads) == {"request", "remove", "note_made", "note_error", "note_unencodable"}
    assert set.union(*threads.values()) == {"dram-books"}


async def test_a_decision_waits_for_all_readers_of_chunks_together_so_often(
    tier: DramTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited so often for each chunk of a slow reader, and all other decisions waited for it."""
    monkeypatch.setattr(encoding_keeper, "RECODE_PAUSE_S", 0.0)
    keeper = tier.keeper
    assert isinstance(keeper, EncodingKeeper)
    waits = list[bool]()
    is_read = tier.residency.is_read

    def noted(key: Any) -> bool:
        waits.append(is_read(key))
        return waits[-1]

    monkeypatch.setattr(tier.residency, "is_read", noted)
    firsts = [extent(number) for number in range(4)]
    await use(tier, firsts)
    async with tier.lent(firsts, READING):
        async with tier.lent([extent(number) for number in range(4, 8)], READING):
            pass
        await until(lambda: len(tier._working) == 0)
    while tier._working:
        await asyncio.wait(list(tier._working))
    assert encoding_keeper.RECODE_WAITS < waits.count(True) <= encoding_keeper.RECODE_WAITS + len(firsts)
    assert tier.residency.used_bytes == keeper.decided_bytes


def held_calls(call: Callable[..., Any], begun: threading.Event, may_end: threading.Event) -> Callable[..., Any]:
    """The call, which has its result when `begun` is set, and returns it when it may."""

    def called(*arguments: Any) -> Any:
        found = call(*arguments)
        begun.set()
        may_end.wait(LIMIT_S)
        return found

    return called


async def test_a_chunk_that_could_not_be_encoded_leaves_no_memory_behind_that_nobody_knows_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decision takes it exactly while its copy is given up: memory had it, and the policy knew nothing of it."""
    settings = UtilitySettings(FIGURES, alpha_s=0.0, memory_bytes_per_s=1e6, home_bytes_per_s=1e8)
    source = KvSource()
    source.broken.add(extent(0))
    tier = DramTier(4 * READING.exact_bytes, source, partial(EncodingKeeper, settings=settings))  # type: ignore[arg-type]
    keeper = tier.keeper
    assert isinstance(keeper, EncodingKeeper)
    read_other, may_read, begun, may_end = (threading.Event() for _ in range(4))
    read = source.read_extent

    def read_extent(one: Extent, view: memoryview, start: int = 0) -> None:
        if one == extent(1):
            read_other.set()
            may_read.wait(LIMIT_S)
        read(one, view, start)

    monkeypatch.setattr(source, "read_extent", read_extent)
    async with tier.lent([extent(0), extent(1)], READING):
        pass
    await until(read_other.is_set)  # the broken one has failed, and its copy is given up with the other one's end
    monkeypatch.setattr(keeper._policy, "request", held_calls(keeper._policy.request, begun, may_end))
    async with tier.lent([extent(0)], READING):
        pass
    await until(begun.is_set)
    may_read.set()
    await until(lambda: tier.residency.has(extent(1), READING))
    await settled()
    may_end.set()
    while tier._working:
        await asyncio.wait(list(tier._working))
    assert tier.residency.used_bytes == keeper.decided_bytes
    await tier.close()
