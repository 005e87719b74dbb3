"""The KV that is kept of slots, and the cost of failures."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from nixl_client.connectors.llama_cpp import slot_cache
from nixl_client.connectors.llama_cpp.llama_server import LlamaServerError
from nixl_client.connectors.llama_cpp.slot_cache import SlotCache, SlotTurn, UncachedServerError
from nixl_client.connectors.llama_cpp.slot_store import RUN_TOKENS
from tests.support.waiting import settled
from tests.unit.nixl_client.connectors.llama_cpp.played import PlayedClient, PlayedServer, prompt, slot_bytes

THREE_RUNS = prompt(3 * RUN_TOKENS + 1)


class Bed(NamedTuple):
    """A cache between a server and a store that are played."""

    cache: SlotCache
    server: PlayedServer
    client: PlayedClient
    folder: Path

    async def ran(self, asked: Any = THREE_RUNS) -> SlotTurn:
        """A request that has run, and what waited to be stored was stored or not."""
        turn = await self.cache.begin(asked, b"", {})
        await self.runs(turn)
        return turn

    async def runs(self, turn: SlotTurn) -> None:
        self.server.slots[turn.index] = turn.tokens
        turn.is_computed = True
        self.cache.end(turn, {})
        await asyncio.gather(*self.cache._saves)


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"weights")
    folder = tmp_path / "slots"
    folder.mkdir()
    server, client = PlayedServer(folder, model), PlayedClient()
    made = Bed(SlotCache(cast(Any, server), cast(Any, client), folder), server, client, folder)
    yield made
    await made.cache.close()
    assert list(folder.iterdir()) == []


async def test_a_prompt_is_stored_and_loaded_again(bed: Bed) -> None:
    assert (await bed.ran()).loaded_tokens == 0
    assert len(bed.client.chunks) == 3
    bed.cache.forget()
    assert (await bed.ran()).loaded_tokens == 3 * RUN_TOKENS
    assert (bed.server.probes, bed.server.restored) == (1, [3 * RUN_TOKENS])


@pytest.mark.parametrize("is_seen", [True, False])
async def test_a_server_whose_adapters_have_changed_is_cached_no_more_until_it_starts_anew(
    bed: Bed, *, is_seen: bool
) -> None:
    """The server goes on with the KV that it has of other scales, which would be stored under the names of these."""
    adapter = bed.folder.parent / "a.gguf"
    adapter.write_bytes(b"adapter")
    told = bed.server.told = dataclasses.replace(bed.server.told, adapters=((str(adapter), 1.0),))
    turn = await bed.cache.begin(THREE_RUNS, b"", {})
    if is_seen:
        bed.server.told = dataclasses.replace(told, adapters=((str(adapter), 0.5),))
    else:
        bed.cache.adapters_change()  # there and back again
    await bed.runs(turn)
    for _ in range(2):
        with pytest.raises(LlamaServerError, match="scales of adapters have changed"):
            await bed.cache.begin(THREE_RUNS, b"", {})
        bed.server.told = told
    assert bed.client.chunks == {}
    bed.server.told = dataclasses.replace(told, start="b")
    await bed.ran()
    assert len(bed.client.chunks) == 3


async def test_servers_without_adapters_have_none_that_change(bed: Bed) -> None:
    await bed.ran()
    bed.cache.adapters_change()
    await bed.ran()
    assert bed.server.probes == 1


def media(tokens: Any) -> bytes:
    """The file of a slot that holds an image, too."""
    data = bytearray(slot_bytes(tokens))
    data[12:16] = struct.pack("<i", -2)
    return bytes(data)


def short(tokens: Any) -> bytes:
    return slot_bytes(tokens[:0])


@pytest.mark.parametrize("writes", [media, short])
async def test_a_slot_in_other_use_costs_what_was_to_be_stored_of_it(bed: Bed, writes: Any) -> None:
    """An image, or an emptied slot, says nothing of the slots of texts."""
    bed.server.writes = writes
    with pytest.raises(LlamaServerError, match="slot 0 is in other use"):
        await bed.cache.begin(THREE_RUNS, b"", {})
    bed.server.writes = slot_bytes
    bed.cache._learning_breaker.succeeded()  # the pause is over
    turn = await bed.cache.begin(THREE_RUNS, b"", {})
    bed.server.writes = writes
    await bed.runs(turn)
    bed.server.writes = slot_bytes
    assert bed.client.chunks == {}
    await bed.ran()
    assert len(bed.client.chunks) == 3


@pytest.mark.parametrize("lost", [1, 4000, 0])
async def test_a_file_cut_short_by_a_full_folder_costs_what_was_to_be_stored(
    bed: Bed, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    turn = await bed.cache.begin(THREE_RUNS, b"", {})
    bed.server.loses_bytes = lost
    if not lost:
        bed.server.writes = lambda _: b""
    await bed.runs(turn)
    assert "full?" in caplog.text
    bed.server.loses_bytes, bed.server.writes = 0, slot_bytes
    await bed.ran()
    assert (len(bed.client.chunks), bed.server.probes) == (3, 1)


async def test_a_server_whose_slots_cannot_be_cut_is_looked_at_anew_later(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    bed.server.writes = lambda tokens: slot_bytes(tokens) + b"more"
    for _ in range(2):
        with pytest.raises(LlamaServerError):
            await bed.cache.begin(THREE_RUNS, b"", {})
    assert bed.server.probes == 1
    assert caplog.text.count("tiny.gguf runs without a cache") == 1
    bed.server.writes = slot_bytes
    for breaker in (bed.cache._uncached_breaker, bed.cache._learning_breaker):
        breaker.succeeded()  # the pause is over
    await bed.ran()
    assert len(bed.client.chunks) == 3


async def test_a_restore_that_is_refused_is_a_miss(bed: Bed) -> None:
    """The slots that are shared may have no room: the server is the one that was learned."""
    await bed.ran()
    bed.cache.forget()
    bed.server.refuses = True
    turn = await bed.ran()
    bed.server.refuses = False
    bed.cache.forget()
    assert (turn.loaded_tokens, (await bed.ran()).loaded_tokens, bed.server.probes) == (0, 3 * RUN_TOKENS, 1)


async def test_no_more_is_loaded_than_a_slot_has_room_for(bed: Bed) -> None:
    """Another server, with longer slots, has stored more."""
    await bed.ran()
    bed.server.told = dataclasses.replace(bed.server.told, slot_tokens=2 * RUN_TOKENS + 1)
    assert (await bed.ran()).loaded_tokens == 2 * RUN_TOKENS
    bed.server.told = dataclasses.replace(bed.server.told, slot_tokens=2 * RUN_TOKENS)
    assert (await bed.ran()).loaded_tokens == RUN_TOKENS


async def test_a_request_that_sees_no_slot_freed_goes_on_without_one(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_cache, "FREED_S", 0.01)
    turns = [await bed.cache.begin(prompt(5), b"", {}) for _ in range(2)]
    with pytest.raises(LlamaServerError, match="no slot was freed"):
        await bed.cache.begin(prompt(5), b"", {})
    monkeypatch.setattr(slot_cache, "FREED_S", 60.0)
    waiting = asyncio.ensure_future(bed.cache.begin(prompt(5), b"", {}))
    await settled()
    bed.cache.end(turns[0], {})
    assert (await waiting).index == turns[0].index


async def test_requests_run_without_a_cache_while_a_look_at_the_server_takes_long(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look waits for slot 0, which one client may have for as long as it likes."""
    monkeypatch.setattr(slot_cache, "LOOK_S", 0.0)
    is_free = asyncio.Event()
    probe = bed.server.probe

    async def waits(headers: Any) -> None:
        await is_free.wait()
        await probe(headers)

    monkeypatch.setattr(bed.server, "probe", waits)
    for _ in range(3):
        with pytest.raises(UncachedServerError):
            await bed.cache.begin(THREE_RUNS, b"", {})
    is_free.set()
    assert bed.cache._look is not None
    await bed.cache._look
    await bed.ran()
    assert (len(bed.client.chunks), bed.server.probes) == (3, 1)


async def test_a_server_that_does_not_write_a_file_does_not_hold_a_stop_up(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_cache, "CLOSE_S", 0.0)
    turn = await bed.cache.begin(THREE_RUNS, b"", {})
    monkeypatch.setattr(bed.server, "save_slot", lambda *_: asyncio.Event().wait())
    bed.server.slots[turn.index] = turn.tokens
    turn.is_computed = True
    bed.cache.end(turn, {})
    await settled()
    await bed.cache.close()
    assert not bed.cache._saves
    assert turn.server.ledger.choose(turn.tokens) is not None
