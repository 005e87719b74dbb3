"""One contract, every transport: what the pipeline may rely on, whichever way the bytes go."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from adapters.nixl_agent import Memory, Registration
from adapters.nixl_metadata import agent_name
from descriptors.descriptor import RdmaTarget
from descriptors.errors import ErrorCode, ServerError
from descriptors.layout import ChunkLayout
from descriptors.messages import Region
from descriptors.notices import Admitted, Done, Failed, LayerReady, Mode, Notice
from descriptors.storage_api import DeliveryStart, Patience, Spans
from nixl_client.buffers import as_buffer
from nixl_client.receiver import Receiver
from nixl_client.shared_memory import allocate
from nixl_client.shm_link import ShmLink
from storage_server.gather.plan import DeliveryPlan, plan_delivery
from storage_server.gather.staging import StagingPool, stride_of
from storage_server.transport.http import HttpTransfer
from storage_server.transport.shm import ShmTransfer
from storage_server.transport.shm_door import ShmDoor
from storage_server.transport.transfer import Transfer
from storage_server.transport.ucx import UcxTransfer
from storage_server.transport.ucx_process import SharedArea, UcxProcess

LAYOUT = ChunkLayout(num_layers=3, chunk_tokens=16, per_layer_chunk_bytes=70_000)
K = 4
ID = "contract-request"


class MemorySink:
    """A BodySink that keeps what it is given; `gone` makes the next write fail as a closed connection does."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.aborted = False
        self.gone = False

    async def begin(self, start: DeliveryStart) -> None:
        assert start.payload_bytes == LAYOUT.payload_bytes(K)

    async def write(self, view: memoryview) -> None:
        await asyncio.sleep(0)
        if self.gone:
            raise ConnectionResetError("gone")
        self.data += view

    async def send(self, spans: Spans, patience: Patience) -> None:
        for address, nbytes in spans:
            await self.write(memoryview(ctypes.string_at(int(address), int(nbytes))))

    def abort(self) -> None:
        self.aborted = True


def heard(notices: list[Notice], kind: type) -> bool:
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline and not any(isinstance(notice, kind) for notice in notices):
        time.sleep(0.01)
    return any(isinstance(notice, kind) for notice in notices)


class HttpEnd:
    """The far end of an HttpTransfer."""

    def __init__(self, pool: StagingPool) -> None:
        self.sink = MemorySink()
        self.pool = pool

    def transfer(self, _: DeliveryPlan) -> Transfer:
        return HttpTransfer(self.sink, self.pool.window("key", 3), Patience(5.0))

    async def lose_client(self) -> None:
        self.sink.gone = True

    def received(self) -> bytes:
        return bytes(self.sink.data)

    def is_told_of_success(self) -> bool:
        return len(self.sink.data) == LAYOUT.payload_bytes(K) and not self.sink.aborted

    def is_told_of_failure(self) -> bool:
        return self.sink.aborted

    async def close(self) -> None:
        pass


class UcxEnd:
    """The far end of a UcxTransfer: a real agent with registered memory."""

    pool: StagingPool
    engine: UcxProcess
    receiver: Receiver
    buffer: np.ndarray
    registration: Registration
    notices: list[Notice]
    seen: dict[int, bytes]
    peer: str
    region: Region

    @staticmethod
    async def made(pool: StagingPool) -> UcxEnd:
        end = UcxEnd()
        end.pool = pool
        area = pool._area
        assert isinstance(area, SharedArea)
        end.engine = UcxProcess([area], "lo", lambda: None)
        await end.engine.start()
        end.receiver = await asyncio.to_thread(Receiver)
        end.buffer = np.zeros(LAYOUT.payload_bytes(K), dtype=np.uint8)
        memory = Memory(int(end.buffer.ctypes.data), end.buffer.nbytes)
        end.registration = end.receiver.register(memory)
        end.notices = []
        end.seen = {}
        end.receiver.listen(ID, end._note)
        metadata = end.receiver.metadata()
        end.peer = agent_name(metadata)
        await end.engine.add_peer(end.peer, metadata, [memory])
        end.region = Region("kv", memory.address, memory.nbytes)
        return end

    def _note(self, notice: Notice) -> None:
        self.notices.append(notice)
        if isinstance(notice, LayerReady):
            span = slice(notice.offset, notice.offset + notice.nbytes)
            self.seen[notice.layer_index] = self.buffer[span].tobytes()

    def transfer(self, plan: DeliveryPlan) -> Transfer:
        target = RdmaTarget("agent", "kv", 0, self.buffer.nbytes)
        return UcxTransfer(
            self.engine,
            self.peer,
            self.region,
            target,
            plan,
            self.pool.window("key", 3),
            5.0,
            lambda: None,
            from_resident=True,
        )

    async def lose_client(self) -> None:
        await self.engine.remove_peer(self.peer)

    def received(self) -> bytes:
        return self.buffer.tobytes()

    def is_told_of_success(self) -> bool:
        return heard(self.notices, Done)

    def is_told_of_failure(self) -> bool:
        return heard(self.notices, Failed)

    async def close(self) -> None:
        await self.engine.stop()
        self.receiver.deregister(self.registration)
        self.receiver.stop()


class ShmEnd:
    """The far end of a ShmTransfer: a real connection to a door, and memory handed in at it."""

    def __init__(self, door: ShmDoor) -> None:
        self.door = door
        self.buffer = allocate(LAYOUT.payload_bytes(K))
        self.link = ShmLink(lambda: door.address)
        self.notices: list[Notice] = []
        self.link.listen(ID, self.notices.append)
        self.link.offer("kv", as_buffer(self.buffer))
        self.ticket = self.link.registration([], 60.0).shm_ticket or ""

    def transfer(self, plan: DeliveryPlan) -> Transfer:
        client = self.door.client(self.ticket)
        assert client is not None
        return ShmTransfer(client, client.regions["kv"].address, plan)

    async def lose_client(self) -> None:
        self.link.stop()
        while self.door.client(self.ticket) is not None:  # noqa: ASYNC110 - another thread hangs up
            await asyncio.sleep(0.01)

    def received(self) -> bytes:
        return self.buffer.tobytes()

    def is_told_of_success(self) -> bool:
        return heard(self.notices, Done)

    def is_told_of_failure(self) -> bool:
        return heard(self.notices, Failed)

    async def close(self) -> None:
        self.link.stop()


End = HttpEnd | UcxEnd | ShmEnd


@pytest.fixture
async def pool() -> StagingPool:
    return StagingPool(100_000, 6, SharedArea(6 * stride_of(100_000)), key_slots_max=6)


@pytest.fixture(params=["http", "ucx", "shm"])
async def end(request: pytest.FixtureRequest, pool: StagingPool) -> AsyncIterator[End]:
    door = ShmDoor(lambda _: None)
    door.start()
    made: End
    if request.param == "http":
        made = HttpEnd(pool)
    elif request.param == "ucx":
        made = await UcxEnd.made(pool)
    else:
        made = await asyncio.to_thread(ShmEnd, door)
        client = door.client(made.ticket)
        assert client is not None
        await door.map(client, [Region("kv", 0, client.offered["kv"][1])])
    yield made
    await made.close()
    await door.close()


def expected() -> np.ndarray:
    return np.random.default_rng(5).integers(1, 256, LAYOUT.payload_bytes(K), dtype=np.uint8)


async def send(transfer: Transfer, plan: DeliveryPlan, pool: StagingPool, upto: int | None = None) -> None:
    data = expected()
    await transfer.start(DeliveryStart(ID, plan.mode, K, plan.payload_bytes))
    for index, payload in enumerate(plan.payloads()):
        if index == upto:
            return
        room = await transfer.room(payload, is_resident=False)
        assert room is not None
        span = slice(payload.target_offset, payload.target_offset + payload.nbytes)
        ctypes.memmove(room.address, data[span].tobytes(), payload.nbytes)
        await transfer.send(payload, np.array([[room.address, payload.nbytes]]), room)


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_finished_transfer_delivered_every_byte(end: End, pool: StagingPool, mode: Mode) -> None:
    plan = plan_delivery(mode, LAYOUT, K, 100_000)
    transfer = end.transfer(plan)
    await send(transfer, plan, pool)
    assert await transfer.finish() == LAYOUT.payload_bytes(K)
    await transfer.close()
    assert await asyncio.to_thread(end.is_told_of_success)
    assert end.received() == expected().tobytes()
    assert not await asyncio.to_thread(end.is_told_of_failure)
    assert pool.free_count == pool.slot_count


async def test_a_failed_transfer_is_told_and_holds_nothing(end: End, pool: StagingPool) -> None:
    plan = plan_delivery(Mode.LAYER_MAJOR, LAYOUT, K, 100_000)
    transfer = end.transfer(plan)
    await send(transfer, plan, pool, upto=5)
    await transfer.fail(1, 2)
    await transfer.close()
    assert await asyncio.to_thread(end.is_told_of_failure)
    assert not await asyncio.to_thread(end.is_told_of_success)
    assert pool.free_count == pool.slot_count


async def test_a_transfer_closed_halfway_is_never_a_success(end: End, pool: StagingPool) -> None:
    plan = plan_delivery(Mode.LAYER_MAJOR, LAYOUT, K, 100_000)
    transfer = end.transfer(plan)
    await send(transfer, plan, pool, upto=5)
    await transfer.close()
    assert not await asyncio.to_thread(end.is_told_of_success)
    assert pool.free_count == pool.slot_count


async def test_a_lost_client_ends_the_transfer_with_an_error(end: End, pool: StagingPool) -> None:
    plan = plan_delivery(Mode.LAYER_MAJOR, LAYOUT, K, 100_000)
    transfer = end.transfer(plan)
    await end.lose_client()
    with pytest.raises(ServerError) as lost:
        await send_and_finish(transfer, plan, pool)
    assert lost.value.code is ErrorCode.TARGET_UNREACHABLE
    await transfer.close()
    assert pool.free_count == pool.slot_count


async def send_and_finish(transfer: Transfer, plan: DeliveryPlan, pool: StagingPool) -> None:
    await send(transfer, plan, pool)
    await transfer.finish()


async def test_every_announced_layer_was_complete_when_it_was_announced(pool: StagingPool) -> None:
    """What ucx adds: when a notice is read its bytes are there, and `admitted` names the shape."""
    end = await UcxEnd.made(pool)
    try:
        plan = plan_delivery(Mode.LAYER_MAJOR, LAYOUT, K, 100_000)
        transfer = end.transfer(plan)
        await send(transfer, plan, pool)
        await transfer.finish()
        await transfer.close()
        assert await asyncio.to_thread(end.is_told_of_success)
        data = expected()
        for layer_index in range(3):
            start = layer_index * plan.group_bytes
            assert end.seen[layer_index] == data[start : start + plan.group_bytes].tobytes()
        assert Admitted(ID, Mode.LAYER_MAJOR, K) in end.notices
    finally:
        await end.close()


async def test_windows_and_pool_bound_what_is_held_and_serve_in_order() -> None:
    """First come, first served; a cancelled waiter loses nothing."""
    pool = StagingPool(100, 2)
    window = pool.window("key", 1)
    first = await window.take()
    second = asyncio.create_task(window.take())
    await asyncio.sleep(0)
    assert pool.free_count == 1
    first.release()
    first.release()
    other = await second
    assert pool.free_count == 1
    wide = pool.window("key", 5)
    held = await wide.take()
    waiting = [asyncio.create_task(wide.take()) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting[0]
    held.release()
    third = await waiting[1]
    for slot in (other, third):
        slot.release()
    assert pool.free_count == 2
