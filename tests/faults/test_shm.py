"""The shm door takes only memory a client offers itself, and only such that writing to it cannot hurt the server."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest

from descriptors.descriptor import Delivery, Descriptor, RdmaTarget
from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ErrorCode, ObjectCacheError
from descriptors.layout import ChunkLayout
from descriptors.notices import Notice
from descriptors.shm_messages import RegionOffer, greeting, parse_offer, reply
from nixl_client.client import Client, Transport
from nixl_client.session import agent
from nixl_client.transports import shared_memory
from nixl_client.transports.buffers import as_buffer
from nixl_client.transports.shm import ShmConnection, ShmReceiver
from storage_server.agents.requests import ActiveRequest
from storage_server.agents.rules import agents
from storage_server.delivery.transport import shm_door
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.memory_holes import punch
from tests.support.requests import OTHER, OWNER, request
from tests.support.servers import LocalStack, Stack
from tests.support.waiting import eventually

SIZE = 65_536


def memfd(*, size: int = SIZE, seals: int = fcntl.F_SEAL_SHRINK, allocated: bool = True) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if allocated:
        os.pwrite(fd, bytes(size), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def plain_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(SIZE))
        file.flush()
        return os.dup(file.fileno())


def pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


class Caller:
    """A connection to the door by hand."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(60)
        self.socket.connect("\0" + address[1:])
        self.ticket: str = json.loads(self.socket.recv(4096))["ticket"]

    def offer(self, fds: list[int], message: object = None) -> str | None:
        data = message if isinstance(message, bytes) else json.dumps(message or {"region_id": "kv", "length": SIZE})
        socket.send_fds(self.socket, [data if isinstance(data, bytes) else data.encode()], fds)
        for fd in fds:
            os.close(fd)
        error: str | None = json.loads(self.socket.recv(4096))["error"]
        return error


@pytest.fixture
def caller(local: LocalStack) -> Iterator[Caller]:
    assert local.storage.shm.door is not None
    made = Caller(local.storage.shm.door.address)
    yield made
    made.socket.close()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: memfd(seals=0), "not sealed"),
        (lambda: memfd(size=SIZE - 4096), "memory has 61440"),
        (plain_file, "not of a memfd"),
        (pipe, "not of memory"),
    ],
)
def test_memory_that_could_hurt_us_is_refused(caller: Caller, make: Callable[[], int], why: str) -> None:
    """A file that may shrink under our writes is refused, and so is what is no memory; the connection goes on."""
    assert why in str(caller.offer([make()]))
    assert caller.offer([memfd()]) is None


@pytest.mark.parametrize(
    "message",
    [
        b"garbage",
        b"{}",
        b'{"region_id":"kv"}',
        b'{"region_id":"","length":1}',
        b'{"region_id":"kv","length":0}',
        b"[1]",
    ],
)
def test_garbage_is_answered_with_what_is_wrong(caller: Caller, message: bytes) -> None:
    assert caller.offer([memfd()], message) is not None
    assert caller.offer([]) == "the offer came without a descriptor"
    assert caller.offer([memfd()]) is None
    assert "known already" in str(caller.offer([memfd()]))


def test_a_connection_ends_with_the_third_message_that_is_no_offer(local: LocalStack, caller: Caller) -> None:
    """No client sends any, and each one takes time of the event loop."""
    for _ in range(shm_door.MALFORMED_MAX):
        assert "not an offer" in str(caller.offer([], b"garbage"))
    assert caller.socket.recv(10) == b""
    door = local.storage.shm.door
    assert eventually(lambda: door.client_count == 0)


def test_messages_of_many_connections_are_taken_one_a_turn(local: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections may be readable in the same turn of the event loop, which others wait for."""
    door = local.storage.shm.door
    callers = [Caller(door.address) for _ in range(8)]
    turns: list[int] = []
    turn = 0

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if len(turns) < 2 * len(callers):
            asyncio.get_running_loop().call_soon(next_turn)

    def parse(data: bytes) -> RegionOffer:
        turns.append(turn)
        return parse_offer(data)

    async def send_all() -> None:
        for caller in callers:
            for _ in range(2):
                socket.send_fds(caller.socket, [b"garbage"], [])
        next_turn()

    monkeypatch.setattr(shm_door, "parse_offer", parse)
    local.call(send_all())
    assert eventually(lambda: len(turns) == 2 * len(callers))
    assert len(set(turns)) == len(turns)
    for caller in callers:
        caller.socket.close()


def register(local: LocalStack, ticket: str, regions: list[dict[str, object]], key: tuple[str, str] = OWNER) -> str:
    body = json.dumps({"shm_ticket": ticket, "regions": regions, "lifetime_s": 60}).encode()
    reply = request(local.url, "POST", "/_objectcache/agents", body=body, key=key)
    return reply.code if reply.status != 200 else str(json.loads(reply.body)["agent_id"])


def test_a_ticket_is_good_once_and_for_what_was_handed_in(local: LocalStack, caller: Caller) -> None:
    region = {"region_id": "kv", "address": 0, "length": SIZE}
    assert register(local, caller.ticket, [region]) == "InvalidArgument"
    caller.offer([memfd()])
    assert register(local, caller.ticket, [{**region, "length": SIZE + 1}]) == "InvalidArgument"
    assert register(local, caller.ticket, [{**region, "region_id": "other"}]) == "InvalidArgument"
    assert register(local, "0" * 32, [region]) == "NoSuchAgent"
    assert len(register(local, caller.ticket, [region])) == 32
    assert register(local, caller.ticket, [region]) == "AgentConflict"
    assert register(local, caller.ticket, [region], OTHER) == "AgentConflict"


def test_a_client_that_hangs_up_is_forgotten_with_its_memory(local: LocalStack, caller: Caller) -> None:
    region = {"region_id": "kv", "address": 0, "length": SIZE}
    caller.offer([memfd()])
    agent_id = register(local, caller.ticket, [region])
    assert len(local.storage.agents.table) == 1
    caller.socket.close()
    assert eventually(lambda: len(local.storage.agents.table) == 0)
    door = local.storage.shm.door
    assert door is not None
    assert eventually(lambda: door.client_count == 0)
    assert request(local.url, "DELETE", f"/_objectcache/agents/{agent_id}").code == "NoSuchAgent"


@pytest.mark.parametrize("limit", ["UNREGISTERED_MAX", "UNREGISTERED_UID_MAX"])
def test_strangers_are_few_and_do_not_stay(local: LocalStack, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Connections that never register are bounded in number and time, those of one user of the host below all."""
    monkeypatch.setattr(shm_door, "UNREGISTERED_S", 0.3)
    monkeypatch.setattr(shm_door, limit, 3)
    door = local.storage.shm.door
    assert door is not None
    callers = [Caller(door.address) for _ in range(3)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as fourth:
        fourth.connect("\0" + door.address[1:])
        assert fourth.recv(10) == b""
    assert eventually(lambda: door.client_count == 0)
    for caller in callers:
        assert caller.socket.recv(10) == b""
        caller.socket.close()


def test_a_client_that_reads_no_notices_loses_only_notices(
    local: LocalStack, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket is full; the delivery ends all the same, and the answer says so."""
    listen = ShmReceiver.listen

    def listen_slowly(receiver: ShmReceiver, request_id: str, on_notice: Callable[[Notice], None]) -> None:
        def heard(notice: Notice) -> None:
            time.sleep(0.2)  # a client that is slower than its server
            on_notice(notice)

        listen(receiver, request_id, heard)

    chunks = make_chunks(N, LAYOUT)[1]
    with local.client("chunks", "shm") as client:
        buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
        client.fetch(keys, LAYOUT, buffer).wait(30)
        monkeypatch.setattr(ShmReceiver, "listen", listen_slowly)
        for _ in range(3):
            buffer[:] = 0
            client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
            assert buffer.tobytes() == chunks.tobytes()


def test_a_released_buffer_is_never_written_again(servers: Stack) -> None:
    """Its region is gone at the server, in whatever arrangement; others go on."""
    keys, chunks = make_chunks(3, LAYOUT, seed=81)
    with servers.client("chunks", "shm") as client:
        client.put_chunks(keys, list(chunks))
        first, second = (client.allocate_buffer(LAYOUT.delivery_bytes(3)) for _ in range(2))
        for buffer in (first, second):
            client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        client.release_buffer(first)
        first[:] = 0
        client.fetch(keys, LAYOUT, second, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert not first.any()
        client.fetch(keys, LAYOUT, first, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert first.tobytes() == chunks.tobytes()


def test_a_server_without_shm_says_so(tmp_path: object) -> None:
    with LocalStack(tmp_path / "data", shm=False) as local:  # type: ignore[operator]
        local.call(local.storage.objects.create_bucket("OWNERKEY", "chunks"))
        with local.client("chunks", "shm") as client:
            buffer = client.allocate_buffer(SIZE)
            with pytest.raises(Exception, match="no shm transport"):
                client.register_buffer(buffer)
        with local.client("chunks") as client:
            assert client.register_buffer(client.allocate_buffer(SIZE)) is Transport.HTTP


def test_another_keys_region_cannot_be_named(local: LocalStack, caller: Caller) -> None:
    """Only the access key that registered the memory may have it written to."""
    layout = ChunkLayout(num_layers=2, chunk_tokens=16, per_layer_chunk_bytes=SIZE // 4)
    (key,), chunks = make_chunks(1, layout, seed=9)
    region = {"region_id": "kv", "address": 0, "length": SIZE}
    fd = memfd()
    caller.offer([os.dup(fd)])
    agent_id = register(local, caller.ticket, [region], OTHER)
    request(local.url, "PUT", f"/chunks/{key}", body=chunks.tobytes())
    target = RdmaTarget(agent_id, "kv", 0, layout.delivery_bytes(1))
    descriptor = Descriptor((key,), 2, 16, SIZE // 4, rdma_target=target, request_id=uuid.uuid4().hex)
    body = encode_binary(descriptor)
    assert request(local.url, "POST", "/chunks?layerwise", body=body).code == "AccessDenied"
    assert os.pread(fd, SIZE, 0) == bytes(SIZE)
    assert request(local.url, "POST", "/chunks?layerwise", body=body, key=OTHER).status == 200
    assert np.array_equal(np.frombuffer(os.pread(fd, SIZE // 2, 0), np.uint8), chunks.ravel())
    os.close(fd)


def test_memory_without_its_pages_is_refused_where_it_is_registered(local: LocalStack, caller: Caller) -> None:
    """To look for holes takes 13 ms a GiB: a thread does it, for an access key."""
    assert caller.offer([memfd(allocated=False)]) is None
    assert register(local, caller.ticket, [{"region_id": "kv", "address": 0, "length": SIZE}]) == "InvalidArgument"


def test_other_users_of_the_host_are_sent_away(
    local: LocalStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that hands in a descriptor whose last close waits stops the one that closes it."""
    door = local.storage.shm.door
    assert door is not None
    monkeypatch.setattr(shm_door, "peer_uid", lambda _: 65534)
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect("\0" + door.address[1:])
            assert stranger.recv(10) == b""
    assert [each.getMessage() for each in caplog.records if "user 65534" in each.getMessage()] == [
        "user 65534 may not use shm here: [storage] shm = [65534] lets that user"
    ]


def test_a_hole_below_allocated_pages_is_no_memory(local: LocalStack, caller: Caller) -> None:
    """What is allocated elsewhere in the file says nothing of the region."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2 * SIZE)
    os.pwrite(fd, bytes(SIZE), SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert caller.offer([fd]) is None
    assert register(local, caller.ticket, [{"region_id": "kv", "address": 0, "length": SIZE}]) == "InvalidArgument"


def test_a_stranger_hands_in_only_a_few_regions(caller: Caller) -> None:
    for number in range(shm_door.UNREGISTERED_REGIONS_MAX):
        assert caller.offer([memfd()], {"region_id": f"r{number}", "length": SIZE}) is None
    assert "at most" in str(caller.offer([memfd()]))


@pytest.mark.slow
def test_buffers_may_be_released_while_they_are_fetched_into(servers: Stack) -> None:
    """No delivery begins into a region that is being taken back, and the server outlives it."""
    keys, chunks = make_chunks(4, LAYOUT, seed=91)
    failures: list[str] = []
    with servers.client("chunks", "shm") as client:
        client.put_chunks(keys, list(chunks))
        kept, shared = (client.allocate_buffer(LAYOUT.delivery_bytes(4)) for _ in range(2))
        for _ in range(3):
            client.fetch(keys, LAYOUT, kept).wait(30)
        ended = threading.Event()

        def fetch() -> None:
            while not ended.is_set():
                try:
                    client.fetch(keys, LAYOUT, shared, delivery=Delivery.CHUNK_MAJOR).wait(30)
                except ObjectCacheError as error:
                    if error.code not in (ErrorCode.CANCELLED, ErrorCode.INVALID_DESCRIPTOR):
                        failures.append(str(error))

        threads = [threading.Thread(target=fetch) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(40):
            time.sleep(0.01)  # fetches go on meanwhile: the moments to release the buffer at are what is tried
            client.release_buffer(shared)
        ended.set()
        for thread in threads:
            thread.join(60)
        client.fetch(keys, LAYOUT, kept, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert kept.tobytes() == chunks.tobytes()
    assert not failures


def test_a_client_that_hangs_up_during_a_renewal_stays_gone(
    local: LocalStack, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal that waits for a delivery to drain does not bring back an agent that has gone meanwhile."""
    receivers: list[ShmReceiver] = []

    class Recorded(ShmReceiver):
        def __init__(self, find_sockets: Callable[[], Mapping[str, str]]) -> None:
            super().__init__(find_sockets)
            receivers.append(self)

    stop, stopping = ActiveRequest.stop, threading.Event()

    def stop_and_say_so(request: ActiveRequest, error: ObjectCacheError) -> None:
        stop(request, error)
        stopping.set()

    monkeypatch.setattr(agent, "ShmReceiver", Recorded)
    monkeypatch.setattr(ActiveRequest, "stop", stop_and_say_so)
    released = local.hold_from_layer(2)
    client = local.client("chunks", "shm")
    first, second = (client.allocate_buffer(LAYOUT.delivery_bytes(N)) for _ in range(2))
    client.register_buffer(second)
    fetch = client.fetch(keys, LAYOUT, first, delivery=Delivery.LAYER_MAJOR)
    fetch.wait_layer(1, 30)
    (registered,) = local.storage.agents.table.agents
    releasing = threading.Thread(target=_quietly, args=(client, first))
    releasing.start()
    assert stopping.wait(60)
    (receiver,) = receivers
    receiver.stop()
    released.set()
    releasing.join(60)
    table = local.storage.agents.table  # the client may have made another connection, and registered anew there
    assert eventually(lambda: registered.agent_id not in {agent.agent_id for agent in table.agents})
    with contextlib.suppress(ObjectCacheError):
        client.close()
    assert eventually(lambda: len(table) == 0)


def _quietly(client: Client, buffer: np.ndarray) -> None:
    with contextlib.suppress(ObjectCacheError):
        client.release_buffer(buffer)


def test_releasing_the_last_buffer_and_taking_another_stays_on_shm(servers: Stack) -> None:
    """The server hangs up on an agent that is gone; the client knows, and makes a new connection."""
    keys, chunks = make_chunks(2, LAYOUT, seed=92)
    with servers.client("chunks") as client:
        client.put_chunks(keys, list(chunks))
        for _ in range(30):
            buffer = client.allocate_buffer(LAYOUT.delivery_bytes(2))
            fetch = client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR)
            fetch.wait(30)
            assert fetch.transport is Transport.SHM
            assert buffer.tobytes() == chunks.tobytes()
            client.release_buffer(buffer)


def test_a_part_of_an_allocation_stays_in_use_when_another_is_released(local: LocalStack, keys: list[str]) -> None:
    chunks = make_chunks(N, LAYOUT)[1]
    with local.client("chunks", "shm") as client:
        whole = client.allocate_buffer(2 * LAYOUT.delivery_bytes(N))
        one, other = whole[: LAYOUT.delivery_bytes(N)], whole[LAYOUT.delivery_bytes(N) :]
        released = local.hold_from_layer(3)
        client.register_buffer(one)
        fetch = client.fetch(keys, LAYOUT, other, delivery=Delivery.LAYER_MAJOR)
        fetch.wait_layer(1, 30)
        client.release_buffer(one)
        released.set()
        fetch.wait(30)
        assert np.array_equal(other.reshape(6, N, -1), chunks.reshape(N, 6, -1).transpose(1, 0, 2))


def test_nothing_is_mapped_before_the_signed_registration(local: LocalStack, caller: Caller) -> None:
    """A user of the host without a key costs a connection and descriptors, and no mapping."""
    region = {"region_id": "kv", "address": 0, "length": SIZE}
    assert caller.offer([memfd()]) is None
    assert "memfd:test" not in maps()
    assert len(register(local, caller.ticket, [region])) == 32
    assert "memfd:test" in maps()
    caller.socket.close()
    assert eventually(lambda: "memfd:test" not in maps())


def maps() -> str:
    with open("/proc/self/maps") as file:
        return file.read()


def test_pages_punched_out_after_they_were_handed_in_are_not_made_by_us(local: LocalStack, caller: Caller) -> None:
    """Between the check and the mapping, a hole would have been filled with pages charged to the server."""
    fd = memfd()
    assert caller.offer([os.dup(fd)]) is None
    punch(fd, 0, SIZE)
    assert register(local, caller.ticket, [{"region_id": "kv", "address": 0, "length": SIZE}]) == "InvalidArgument"
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


def test_a_fetch_into_memory_without_pages_fails_and_fills_nothing(local: LocalStack, keys: list[str]) -> None:
    """The pages go while the agent is registered: the fetch ends with TargetUnreachable, others go on, and no chunk
    counts as damaged.
    """
    chunks = make_chunks(N, LAYOUT)[1]
    with local.client("chunks", "shm") as client:
        for _ in range(3):  # from files, and then from the DRAM tier
            buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
            client.fetch(keys, LAYOUT, buffer).wait(30)
            shared = shared_memory.find(as_buffer(buffer).memory)
            assert shared is not None
            punch(shared.fd, 0, shared.nbytes)
            with pytest.raises(ObjectCacheError) as failed:
                client.fetch(keys, LAYOUT, buffer).wait(30)
            assert failed.value.code is ErrorCode.TARGET_UNREACHABLE
            assert os.fstat(shared.fd).st_blocks == 0
        assert client.lookup(keys) == N
        good = client.allocate_buffer(LAYOUT.delivery_bytes(N))
        client.fetch(keys, LAYOUT, good, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert good.tobytes() == chunks.tobytes()


def test_a_client_that_goes_while_its_memory_is_mapped_leaves_nothing(
    local: LocalStack, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping made for nobody would stay until the server ends."""
    mapping, may_go_on = threading.Event(), threading.Event()
    real = shm_door.FaultGuard.map

    def slow(guard: shm_door.FaultGuard, fd: int, nbytes: int) -> object:
        mapping.set()
        may_go_on.wait(60)
        return real(guard, fd, nbytes)

    monkeypatch.setattr(shm_door.FaultGuard, "map", slow)
    assert caller.offer([memfd()]) is None
    codes: list[str] = []
    region = {"region_id": "kv", "address": 0, "length": SIZE}
    registering = threading.Thread(target=lambda: codes.append(register(local, caller.ticket, [region])))
    registering.start()
    assert mapping.wait(60)
    caller.socket.close()
    door = local.storage.shm.door
    assert eventually(lambda: door.client_count == 0)
    may_go_on.set()
    registering.join(60)
    assert codes == ["NoSuchAgent"]
    assert eventually(lambda: "memfd:test" not in maps())
    assert len(local.storage.agents.table) == 0


def test_a_renewal_that_fails_leaves_nothing_mapped(local: LocalStack, caller: Caller) -> None:
    """Its mapped regions would count nowhere: one key could take every mapping that a process may have."""
    first = {"region_id": "kv", "address": 0, "length": SIZE}
    caller.offer([memfd()])
    agent_id = register(local, caller.ticket, [first])
    assert maps().count("memfd:test") == 1
    for round_index in range(2):
        good = [f"good{round_index}-{number}" for number in range(3)]
        for name in good:
            assert caller.offer([memfd()], {"region_id": name, "length": SIZE}) is None
        assert caller.offer([memfd(allocated=False)], {"region_id": "bad", "length": SIZE}) is None
        assert renew(local, agent_id, [*good, "bad"]) == "InvalidArgument"
        assert eventually(lambda: maps().count("memfd:test") == 1)
    assert local.storage.agents.table.region_count == 1
    assert caller.offer([memfd()], {"region_id": "good0-0", "length": SIZE}) is None, "it may come again"
    assert renew(local, agent_id, ["kv", "good0-0"]) == agent_id
    assert maps().count("memfd:test") == 2 == local.storage.agents.table.region_count


def renew(local: LocalStack, agent_id: str, names: list[str]) -> str:
    regions = [{"region_id": name, "address": 0, "length": SIZE} for name in names]
    body = json.dumps({"regions": regions, "lifetime_s": 60}).encode()
    reply = request(local.url, "POST", f"/_objectcache/agents/{agent_id}", body=body)
    return reply.code if reply.status != 200 else str(json.loads(reply.body)["agent_id"])


def test_one_access_key_does_not_take_every_region(local: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions are a bounded good of all keys: one took all of them, for a day, in seconds."""
    monkeypatch.setattr(agents, "KEY_REGIONS_MAX", 3)
    monkeypatch.setattr(agents, "REGIONS_MAX", 5)
    door = local.storage.shm.door
    callers = [Caller(door.address) for _ in range(4)]

    def take(caller: Caller, count: int, key: tuple[str, str]) -> str:
        names = [f"r{index}" for index in range(count)]
        for name in names:
            if name not in door.client(caller.ticket).offered:
                assert caller.offer([memfd()], {"region_id": name, "length": SIZE}) is None
        regions: list[dict[str, object]] = [{"region_id": name, "address": 0, "length": SIZE} for name in names]
        return register(local, caller.ticket, regions, key)

    assert len(take(callers[0], 2, OWNER)) == 32
    assert take(callers[1], 2, OWNER) == "SlowDown"
    assert len(take(callers[2], 2, OTHER)) == 32
    assert take(callers[3], 2, OTHER) == "SlowDown"
    assert len(take(callers[1], 1, OWNER)) == 32
    assert take(callers[3], 1, OTHER) == "SlowDown", "of all"
    callers[0].socket.close()
    assert eventually(lambda: len(local.storage.agents.table) == 2)
    assert len(take(callers[3], 1, OTHER)) == 32
    for caller in callers:
        caller.socket.close()


def test_a_client_takes_no_reply_to_nothing() -> None:
    """A server that replies without end would fill the client's memory."""
    name = f"objectcache-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        sent: list[int] = []

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.send(greeting("t" * 32))
                with contextlib.suppress(OSError):
                    while len(sent) < 100_000:
                        sent.append(connection.send(reply(None)))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        made = ShmConnection(f"@{name}", lambda _: None, 5.0)
        thread.join(30)
        assert not thread.is_alive()
        assert len(sent) < 100_000
        assert eventually(lambda: made.has_ended)
        made.close()
