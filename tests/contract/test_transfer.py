"""One contract, every transport: what the pipeline may rely on, whichever way the bytes go."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator

import numpy as np
import pytest

from descriptors.errors import ErrorCode, ServerError
from descriptors.layout import ChunkLayout
from descriptors.messages import Region
from descriptors.notices import Admitted, Done, Failed, LayerReady, Mode, Notice
from descriptors.storage_api import DeliveryStart, Patience, Spans
from nixl_client.transports.buffers import as_buffer
from nixl_client.transports.shared_memory import allocate
from nixl_client.transports.shm import SINGLE, ShmReceiver
from nixl_client.transports.ucx import NixlThread
from objectcache.adapters.memory_area import SharedArea
from objectcache.adapters.nixl_agent import Registration
from objectcache.adapters.nixl_memory import Memory
from objectcache.adapters.nixl_metadata import agent_name
from storage_server.delivery.gather.staging import StagingPool, stride_of
from storage_server.delivery.transport.destination import PayloadLimits, Transfer
from storage_server.delivery.transport.flight import Flight
from storage_server.delivery.transport.http import HttpDestination
from storage_server.delivery.transport.shm import ShmDestination
from storage_server.delivery.transport.shm_door import ShmDoor
from storage_server.delivery.transport.ucx import UcxDestination
from storage_server.delivery.transport.ucx_process import UcxProcess
from storage_server.planning.plan import DeliveryPlan, plan_delivery
from tests.support.waiting import until

LAYOUT = ChunkLayout(num_layers=3, chunk_tokens=16, per_layer_chunk_bytes=70_000)
K = 4
ID, BEHIND_ID = "contract-request", "contract-request-behind"
LIMITS = PayloadLimits(100_000, 100_000)


class MemorySink:
    """A BodySink that keeps what it is given; `gone` makes the next write fail as a closed connection does."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.aborted = False
        self.gone = False

    async def begin(self, start: DeliveryStart) -> None:
        assert start.delivery_bytes == LAYOUT.delivery_bytes(K)

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


def heard(notices: list[Notice], *kinds: type) -> bool:
    """Whether there is a notice of such a kind by now."""
    return any(isinstance(notice, kinds) for notice in notices)


class HttpEnd:
    """The far end of an HttpTransfer."""

    def __init__(self, pool: StagingPool) -> None:
        self.sink = MemorySink()
        self.pool = pool

    def transfer(self, plan: DeliveryPlan) -> Transfer:
        window = self.pool.window("key", 3)
        return HttpDestination(self.sink, window, Patience(60.0), LIMITS).open(plan)

    async def lose_client(self) -> None:
        self.sink.gone = True

    def received(self) -> bytes:
        return bytes(self.sink.data)

    async def has_heard_all(self) -> None:
        """Nothing is on its way: a call that writes has written when it returns."""

    def is_told_of_success(self) -> bool:
        return len(self.sink.data) == LAYOUT.delivery_bytes(K) and not self.sink.aborted

    def is_told_of_failure(self) -> bool:
        return self.sink.aborted

    async def close(self) -> None:
        pass


class UcxEnd:
    """The far end of a UcxTransfer: a real agent with registered memory."""

    pool: StagingPool
    engine: UcxProcess
    receiver: NixlThread
    buffer: np.ndarray
    registration: Registration
    notices: list[Notice]
    behind: list[Notice]
    seen: dict[int, bytes]
    peer: str
    region: Region

    @staticmethod
    async def made(pool: StagingPool, area: SharedArea) -> UcxEnd:
        end = UcxEnd()
        end.pool = pool
        end.engine = UcxProcess([area], "lo", lambda: None)
        await end.engine.start()
        end.receiver = await asyncio.to_thread(NixlThread)
        end.buffer = np.zeros(LAYOUT.delivery_bytes(K), dtype=np.uint8)
        memory = Memory(int(end.buffer.ctypes.data), end.buffer.nbytes)
        end.registration = end.receiver.register(memory)
        end.notices = []
        end.seen = {}
        end.behind = []
        end.receiver.listen(ID, end.note)
        end.receiver.listen(BEHIND_ID, end.behind.append)
        metadata = end.receiver.metadata()
        end.peer = agent_name(metadata)
        await end.engine.add_peer(end.peer, metadata, [memory])
        end.region = Region("kv", memory.address, memory.nbytes)
        return end

    def note(self, notice: Notice) -> None:
        self.notices.append(notice)
        if isinstance(notice, LayerReady):
            span = slice(notice.offset, notice.offset + notice.nbytes)
            self.seen[notice.layer_index] = self.buffer[span].tobytes()

    def transfer(self, plan: DeliveryPlan) -> Transfer:
        window = self.pool.window("key", 3)
        destination = UcxDestination(
            self.engine, self.peer, self.region, 0, window, LIMITS, is_direct=True, open_flight=self.open_flight
        )
        return destination.open(plan)

    def open_flight(self) -> Flight:
        return Flight(self.engine, self.peer, 60.0, lambda: None)

    async def lose_client(self) -> None:
        await self.engine.remove_peer(self.peer)

    def received(self) -> bytes:
        return self.buffer.tobytes()

    async def has_heard_all(self) -> None:
        """A transfer behind the others has ended, whose notices took the same way."""
        plan = plan_delivery(Mode.LAYER_MAJOR, LAYOUT, K, 100_000)
        transfer = self.transfer(plan)
        await send(transfer, plan, self.pool, request_id=BEHIND_ID)
        await transfer.finish()
        await transfer.close()
        await until(lambda: heard(self.behind, Done))

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

    def __init__(self, door: ShmDoor, pool: StagingPool) -> None:
        self.door, self.pool = door, pool
        self.buffer = allocate(LAYOUT.delivery_bytes(K))
        self.receiver = ShmReceiver(lambda: {SINGLE: door.address})
        self.notices: list[Notice] = []
        self.behind: list[Notice] = []
        self.receiver.listen(ID, self.notices.append)
        self.receiver.listen(BEHIND_ID, self.behind.append)
        self.receiver.offer("kv", as_buffer(self.buffer))
        self.ticket = self.receiver.registration([], 60.0).shm_ticket or ""

    def transfer(self, plan: DeliveryPlan) -> Transfer:
        client = self.door.client(self.ticket)
        assert client is not None
        return ShmDestination(client, client.regions["kv"].address, 100_000).open(plan)

    async def lose_client(self) -> None:
        self.receiver.stop()
        await until(lambda: self.door.client(self.ticket) is None)  # another thread hangs up

    def received(self) -> bytes:
        return self.buffer.tobytes()

    async def has_heard_all(self) -> None:
        """A transfer behind the others has ended, whose notices took the same way."""
        plan = plan_delivery(Mode.LAYER_MAJOR, LAYOUT, K, 100_000)
        transfer = self.transfer(plan)
        await send(transfer, plan, self.pool, request_id=BEHIND_ID)
        await transfer.finish()
        await transfer.close()
        await until(lambda: heard(self.behind, Done))

    def is_told_of_success(self) -> bool:
        return heard(self.notices, Done)

    def is_told_of_failure(self) -> bool:
        return heard(self.notices, Failed)

    async def close(self) -> None:
        self.receiver.stop()


End = HttpEnd | UcxEnd | ShmEnd


@pytest.fixture
def area() -> SharedArea:
    return SharedArea(6 * stride_of(100_000))


@pytest.fixture
async def pool(area: SharedArea) -> StagingPool:
    return StagingPool(100_000, 6, area, key_slots_max=6)


@pytest.fixture(
    params=[
        "http",
        pytest.param("ucx", marks=pytest.mark.needs_server),
        pytest.param("shm", marks=pytest.mark.needs_server),
    ]
)
async def end(request: pytest.FixtureRequest, pool: StagingPool, area: SharedArea) -> AsyncIterator[End]:
    made: End
    if request.param == "shm":
        door = ShmDoor(lambda _: None)
        door.start()
        made = await asyncio.to_thread(ShmEnd, door, pool)
        client = door.client(made.ticket)
        assert client is not None
        await door.map(client, [Region("kv", 0, client.offered["kv"][1])])
        yield made
        await made.close()
        await door.close()
        return
    made = HttpEnd(pool) if request.param == "http" else await UcxEnd.made(pool, area)
    yield made
    await made.close()


def expected() -> np.ndarray:
    return np.random.default_rng(5).integers(1, 256, LAYOUT.delivery_bytes(K), dtype=np.uint8)


async def send(
    transfer: Transfer, plan: DeliveryPlan, pool: StagingPool, upto: int | None = None, request_id: str = ID
) -> None:
    data = expected()
    await transfer.start(DeliveryStart(request_id, plan.mode, K, plan.delivery_bytes))
    for index, payload in enumerate(plan.payloads()):
        if index == upto:
            return
        room = await transfer.room(payload, is_resident=False)
        assert room is not None
        span = slice(payload.target_offset, payload.target_offset + payload.nbytes)
        ctypes.memmove(room.address, data[span].tobytes(), payload.nbytes)
        await transfer.send(payload, np.array([[room.address, payload.nbytes]]), room)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(Mode))
async def test_a_finished_transfer_delivered_every_byte(end: End, pool: StagingPool, mode: Mode) -> None:
    plan = plan_delivery(mode, LAYOUT, K, 100_000)
    transfer = end.transfer(plan)
    await send(transfer, plan, pool)
    assert await transfer.finish() == LAYOUT.delivery_bytes(K)
    await transfer.close()
    await until(end.is_told_of_success)
    assert end.received() == expected().tobytes()
    await end.has_heard_all()
    assert not end.is_told_of_failure()
    assert pool.free_count == pool.slot_count


@pytest.mark.slow
async def test_a_failed_transfer_is_told_and_holds_nothing(end: End, pool: StagingPool) -> None:
    plan = plan_delivery(Mode.LAYER_MAJOR, LAYOUT, K, 100_000)
    transfer = end.transfer(plan)
    await send(transfer, plan, pool, upto=5)
    await transfer.fail(1, 2, tells_client=True)
    await transfer.close()
    await until(end.is_told_of_failure)
    await end.has_heard_all()
    assert not end.is_told_of_success()
    assert pool.free_count == pool.slot_count


@pytest.mark.slow
async def test_a_transfer_closed_halfway_is_never_a_success(end: End, pool: StagingPool) -> None:
    plan = plan_delivery(Mode.LAYER_MAJOR, LAYOUT, K, 100_000)
    transfer = end.transfer(plan)
    await send(transfer, plan, pool, upto=5)
    await transfer.close()
    await end.has_heard_all()
    assert not end.is_told_of_success()
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


@pytest.mark.slow
@pytest.mark.needs_server
async def test_every_announced_layer_was_complete_when_it_was_announced(pool: StagingPool, area: SharedArea) -> None:
    """What ucx adds: when a notice is read its bytes are there, and `admitted` names the shape."""
    end = await UcxEnd.made(pool, area)
    try:
        plan = plan_delivery(Mode.LAYER_MAJOR, LAYOUT, K, 100_000)
        transfer = end.transfer(plan)
        await send(transfer, plan, pool)
        await transfer.finish()
        await transfer.close()
        await until(end.is_told_of_success)
        data = expected()
        for layer_index in range(3):
            layer_bytes = plan.series[0].group_bytes
            start = layer_index * layer_bytes
            assert end.seen[layer_index] == data[start : start + layer_bytes].tobytes()
        assert Admitted(ID, Mode.LAYER_MAJOR, K) in end.notices
    finally:
        await end.close()
