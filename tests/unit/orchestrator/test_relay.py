"""Streams of slow clients: what is read ahead, in which order it goes on, and how much of it is held."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from aiohttp import web

from objectcache.adapters.document_budget import DocumentBudget
from objectcache.orchestrator import relay
from objectcache.orchestrator.relay import HeldBytes, Relay, SlowReaderError
from tests.support.waiting import settled


class Client:
    """Plays an answer and its connection. A client that does not read lets no write end, and has unsent bytes."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.reads = asyncio.Event()
        self.transport = self
        self.problem: Exception | None = None

    def get_write_buffer_size(self) -> int:
        return 0 if self.reads.is_set() else relay.STRAIGHT_BYTES

    async def write(self, piece: bytes) -> None:
        self.got.append(piece)
        await self.reads.wait()
        if self.problem is not None:
            raise self.problem


def relay_to(client: Client, held: HeldBytes) -> Relay:
    return Relay(cast(web.StreamResponse, client), cast(web.BaseRequest, client), held)


@pytest.fixture
def budget() -> DocumentBudget:
    return DocumentBudget(2000, 1000)


async def test_pieces_wait_for_a_slow_client_and_come_in_order(budget: DocumentBudget) -> None:
    client, held = Client(), HeldBytes(budget, "a")
    made = relay_to(client, held)
    pieces = [b"%d" % at for at in range(12)]
    for piece in pieces:
        await made.write(piece)
    await settled()
    assert client.got == pieces[:1]
    assert budget.held_bytes == sum(len(piece) + relay.PIECE_BYTES for piece in pieces)
    client.reads.set()
    await made.flush()
    assert client.got == pieces
    assert budget.held_bytes == 0
    await made.write(b"straight")
    assert client.got[-1] == b"straight"
    await made.stop()


async def test_no_more_is_held_than_the_tenant_may_have(
    budget: DocumentBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Client(), Client()
    one, other = relay_to(first, HeldBytes(budget, "a")), relay_to(second, HeldBytes(budget, "a"))
    await one.write(b"1" * 900)
    writing = asyncio.create_task(one.write(b"2" * 200))
    await settled()
    assert not writing.done()  # the engine waits with its next piece
    first.reads.set()
    await writing
    await one.flush()
    assert first.got == [b"1" * 900, b"2" * 200]
    monkeypatch.setattr(relay, "BLOCKED_S", 0.0)
    await other.write(b"3" * 900)
    with pytest.raises(SlowReaderError):
        await other.write(b"4" * 200)
    await other.stop()
    assert budget.held_bytes == 0


async def test_a_client_that_is_gone_is_told_with_the_next_piece(budget: DocumentBudget) -> None:
    client = Client()
    made = relay_to(client, HeldBytes(budget, "a"))
    await made.write(b"1")
    client.problem = ConnectionResetError()
    client.reads.set()
    await settled()
    with pytest.raises(ConnectionResetError):
        await made.write(b"2")
    await made.stop()
    assert budget.held_bytes == 0


async def test_a_client_that_reads_has_time_by_what_it_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "BLOCKED_S", 0.0)
    monkeypatch.setattr(relay, "TAKEN_BYTES_PER_S", 1e-3)  # the first byte gives it a thousand seconds
    client = Client()
    client.reads.set()
    made = relay_to(client, HeldBytes(DocumentBudget(100, 100), "a"))
    await made.write(b"taken")
    client.reads.clear()
    writing = asyncio.create_task(made.write(b"2" * 200))
    await settled()
    assert not writing.done()
    client.reads.set()
    await writing
    assert client.got == [b"taken", b"2" * 200]
    await made.stop()


async def test_one_that_does_not_read_has_none_whatever_length_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "BLOCKED_S", 0.0)
    made = relay_to(Client(), HeldBytes(DocumentBudget(100, 100), "a"))
    with pytest.raises(SlowReaderError):
        await made.write(b"2" * 200)
    await made.stop()
