"""UCX authenticates nobody, so it lives in a process that has nothing to lose: off unless asked for, on the interfaces
that were named, without credentials, and replaced when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from descriptors.descriptor import Delivery
from descriptors.errors import ErrorCode, ObjectCacheError
from nixl_client.transports.ucx import NixlThread
from objectcache.adapters.memory_area import SharedArea
from objectcache.adapters.nixl_memory import Memory
from objectcache.adapters.nixl_metadata import agent_name
from storage_server.delivery.transport import ucx_child, ucx_process
from storage_server.delivery.transport.rules.ucx_commands import (
    Reply,
    decode_reply,
)
from storage_server.delivery.transport.ucx_process import UcxProcess
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.requests import OWNER, request
from tests.support.servers import CONFIG, UCX, LocalStack, Stack, stack, started
from tests.support.ucx_handshake import captured, put_frame
from tests.support.waiting import eventually, until


def listeners_of(pid: int) -> set[str]:
    """Addresses a process listens on over TCP."""
    return {entry.laddr.ip for entry in psutil.Process(pid).net_connections("tcp") if entry.status == "LISTEN"}


def ucx_children(pid: int) -> dict[str, psutil.Process]:
    """The processes of a server that have a UCX agent, by their module's last name."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        words = child.cmdline()
        if "-m" in words:
            found[words[words.index("-m") + 1].rpartition(".")[2]] = child
    return found


def fetched(running: Any, keys: list[str], transport: str = "ucx") -> bytes:
    with running.client("chunks", transport) as client:
        buffer = np.zeros(LAYOUT.delivery_bytes(len(keys)), dtype=np.uint8)
        if transport == "shm":
            buffer = client.allocate_buffer(LAYOUT.delivery_bytes(len(keys)))
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        return buffer.tobytes()


def test_without_being_asked_for_there_is_no_ucx(tmp_path: Path) -> None:
    """No process, no listener but the server's own."""
    environment = {"AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1]}
    with started("serve", "--data", str(tmp_path), "--port", "0", environment=environment) as (url, process):
        assert b'"ucx": false' in request(url, "GET", "/_objectcache/transports").body
        assert ucx_children(process.pid) == {}
        assert listeners_of(process.pid) == {"127.0.0.1"}


def test_ucx_listens_where_it_was_told_and_knows_no_secret(servers: Stack) -> None:
    children = ucx_children(servers.storage_pid)
    assert set(children) == {"ucx_engine", "metadata_probe"}
    for child in children.values():
        assert eventually(lambda child=child: listeners_of(child.pid) == {"127.0.0.1"})  # type: ignore[misc]
        environment = Path(f"/proc/{child.pid}/environ").read_bytes()
        assert b"SECRET" not in environment.upper()
        assert OWNER[1].encode() not in environment
        opened = [entry.path for entry in child.open_files()]
        assert not [path for path in opened if str(servers.data_dir) in path]
    maps = Path(f"/proc/{children['ucx_engine'].pid}/maps").read_text()
    shared = [line for line in maps.splitlines() if "memfd:objectcache" in line]
    assert [line.split()[1] for line in shared] == ["rw-s"], "staging, and nothing else"
    assert listeners_of(servers.storage_pid) <= {"127.0.0.1"}


@pytest.mark.slow
@pytest.mark.with_ucx
def test_the_client_listens_where_it_reaches_the_server(local: LocalStack, keys: list[str]) -> None:
    before = {(entry.laddr.ip, entry.laddr.port) for entry in psutil.Process().net_connections("tcp")}
    with local.client("chunks", "ucx") as client:
        client.register_buffer(np.zeros(4096, dtype=np.uint8))
        now = psutil.Process().net_connections("tcp")
        made = {(entry.laddr.ip, entry.laddr.port) for entry in now if entry.status == "LISTEN"} - before
        assert {ip for ip, _ in made} == {"127.0.0.1"}
        assert "UCX_NET_DEVICES" not in os.environ


@pytest.mark.slow
@pytest.mark.with_ucx
def test_a_process_that_is_killed_costs_what_is_in_flight_and_comes_back(local: LocalStack, keys: list[str]) -> None:
    """Others are served meanwhile, and the same client fetches again."""
    expected = make_chunks(N, LAYOUT)[1].tobytes()
    engine: UcxProcess = local.storage.ucx.engine
    with local.client("chunks", "ucx") as client:
        buffer = np.zeros(LAYOUT.delivery_bytes(N), dtype=np.uint8)
        released = local.hold_from_layer(2)
        fetch = client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
        fetch.wait_layer(1, 30)
        assert engine.child.pid is not None
        before = engine.child.pid
        os.kill(before, signal.SIGKILL)
        assert eventually(lambda: not engine.is_running or engine.child.pid != before)
        released.set()
        with pytest.raises(ObjectCacheError) as failed:
            fetch.wait(30)
        assert failed.value.code is ErrorCode.TARGET_UNREACHABLE
        assert fetched(local, keys, "http") == fetched(local, keys, "shm") == expected
        assert eventually(lambda: engine.is_running and engine.child.pid != before)
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
        assert buffer.tobytes() == expected
    assert eventually(lambda: engine.in_flight_count == 0)


@pytest.mark.slow
@pytest.mark.with_ucx
def test_a_process_that_hangs_is_replaced(local: LocalStack, keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither writes nor answers; a delivery must not wait for it for ever."""
    engine: UcxProcess = local.storage.ucx.engine
    with local.client("chunks", "ucx") as client:
        buffer = np.zeros(LAYOUT.delivery_bytes(N), dtype=np.uint8)
        client.register_buffer(buffer)
        monkeypatch.setattr(ucx_process, "ANSWER_TIMEOUT_S", 0.5)
        assert engine.child.pid is not None
        before = engine.child.pid
        os.kill(before, signal.SIGSTOP)
        fetch = client.fetch(keys, LAYOUT, buffer)
        with pytest.raises(ObjectCacheError) as failed:
            fetch.wait(60)
        assert failed.value.code is ErrorCode.TARGET_UNREACHABLE
        monkeypatch.undo()
        assert eventually(lambda: engine.is_running and engine.child.pid != before)
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
    assert buffer.tobytes() == make_chunks(N, LAYOUT)[1].tobytes()


@contextlib.contextmanager
def unharmed(directory: Path) -> Iterator[Stack]:
    """A server whose ucx listeners strangers talk to. Afterwards it is the same process and serves as before: http at
    once, ucx when its process has come back.
    """
    keys, chunks = make_chunks(3, LAYOUT)
    with stack("together", directory, CONFIG) as running:
        running.s3().create_bucket(Bucket="chunks")
        with running.client("chunks", "http") as client:
            client.put_chunks(keys, list(chunks))
        assert fetched(running, keys) == chunks.tobytes()
        yield running
        assert running.processes[0].poll() is None
        assert fetched(running, keys, "http") == chunks.tobytes()

        def again() -> bool:
            try:
                return fetched(running, keys) == chunks.tobytes()
            except ObjectCacheError:
                return False

        assert eventually(again)


def send_to_listeners(running: Stack, data: bytes) -> int:
    """Send these bytes to every ucx listener of the server; the number of listeners."""
    count = 0
    for child in ucx_children(running.storage_pid).values():
        for address in [entry.laddr for entry in child.net_connections("tcp") if entry.status == "LISTEN"]:
            with contextlib.suppress(ConnectionError), socket.create_connection(tuple(address), timeout=60) as stranger:
                stranger.sendall(data)
                time.sleep(0.1)  # its process reads meanwhile; nobody tells of it
            count += 1
    return count


@pytest.mark.slow
@pytest.mark.parametrize("garbage", [b"\0" * 64, b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64])
def test_strangers_at_its_listeners_cost_ucx_at_most(tmp_path: Path, garbage: bytes) -> None:
    """Whatever a process without a key sends there: the server goes on, and so does ucx."""
    with unharmed(tmp_path) as running:
        assert send_to_listeners(running, garbage) == 2


@pytest.fixture(scope="module")
def handshake() -> list[bytes]:
    """The pieces that a real client sends."""
    return captured()


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["garbage", "put", "put at nothing", "replay", "replay with other lengths"])
def test_strangers_that_begin_as_a_client_does_cost_ucx_at_most(
    tmp_path: Path, handshake: list[bytes], attack: str
) -> None:
    """A handshake and one PUT frame wrote anywhere into the server, and ended it with a segmentation fault."""
    frames = {
        "garbage": bytes(range(256)) * 16,
        "put": put_frame(8, b"x" * 4096) * 4,
        "put at nothing": put_frame(0x7FFF_FFFF_F000, b""),
        "replay": b"".join(handshake[1:]),
        "replay with other lengths": b"".join(piece[:2] + b"\xff" + piece[3:] for piece in handshake[1:]),
    }
    with unharmed(tmp_path) as running:
        first = ucx_children(running.storage_pid)["ucx_engine"].pid
        assert send_to_listeners(running, handshake[0] + frames[attack]) == 2
        if attack == "put":  # else the frame is no attack any more, and this test shows nothing
            assert eventually(lambda: running_engine(running) not in (None, first))


def running_engine(running: Stack) -> int | None:
    """The id of the process that has the ucx agent, where it runs."""
    with contextlib.suppress(psutil.Error):
        child = ucx_children(running.storage_pid).get("ucx_engine")
        return None if child is None else child.pid
    return None


@pytest.mark.slow
def test_the_dram_tier_is_mapped_for_reading_only_where_that_was_asked_for(tmp_path: Path) -> None:
    """Then payloads go straight from it; every ucx peer can read it, which is why it must be asked for."""
    keys, chunks = make_chunks(N, LAYOUT)
    settings: dict[str, Any] = {"dram_bytes": 8 << 20, "ucx_maps_dram": True}
    with LocalStack(tmp_path / "data", ucx=UCX, **settings) as local:
        local.call(local.storage.objects.create_bucket(OWNER[0], "chunks"))
        with local.client("chunks", "http") as client:
            client.put_chunks(keys, list(chunks))
        for _ in range(4):
            assert fetched(local, keys) == chunks.tobytes()
        assert eventually(lambda: local.storage.dram.residency.resident_count == N)
        assert fetched(local, keys) == chunks.tobytes()
        maps = Path(f"/proc/{local.storage.ucx.engine.child.pid}/maps").read_text()
        shared = [line.split()[1] for line in maps.splitlines() if "memfd:objectcache" in line]
        assert sorted(shared) == ["r--s", "rw-s"]


@pytest.mark.slow
def test_a_server_asked_for_an_interface_that_is_not_there_does_not_start(tmp_path: Path) -> None:
    """Falling back to less than was asked for would be found out by users."""
    command = [sys.executable, "-m", "objectcache", "serve", "--data", str(tmp_path), "--port", "0", "--ucx", "no0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "no network interface 'no0'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
async def test_a_process_that_says_what_it_should_not_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replies are bounded and checked, numbers that were never given are passed over."""
    gone: list[bool] = []
    area = SharedArea(4096)
    process = UcxProcess([area], "lo", lambda: gone.append(True))
    await process.start()
    try:
        first = process.child.pid
        replies = iter([Reply(999_999, 5)])
        monkeypatch.setattr(ucx_child, "decode_reply", lambda line: next(replies, None) or decode_reply(b"garbage"))
        heard: list[object] = []
        for _ in range(2):
            process.read("nobody", [Memory(0, 10)], area.address, lambda *ended: heard.append(ended))
        await until(lambda: bool(gone))
        assert len(heard) == 2
        monkeypatch.undo()
        await until(lambda: process.is_running)
        assert process.child.pid != first
    finally:
        await process.stop()


@pytest.mark.slow
async def test_a_peer_whose_registration_is_cancelled_is_forgotten(tmp_path: Path) -> None:
    """It would stay for ever: nobody knows of it, so nobody removes it."""
    area = SharedArea(4096)
    process = UcxProcess([area], "lo", lambda: None)
    await process.start()
    receiver = await asyncio.to_thread(NixlThread)
    buffer = np.zeros(4096, dtype=np.uint8)
    memory = Memory(int(buffer.ctypes.data), buffer.nbytes)
    registration = receiver.register(memory)
    metadata = receiver.metadata()
    name = agent_name(metadata)

    async def is_known() -> bool:
        ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        spans, targets = np.array([[area.address, 64]]), [Memory(memory.address, 64)]
        process.write(name, spans, targets, None, lambda _, failure: ended.set_result(failure))
        return await asyncio.wait_for(ended, 60) is None

    try:
        assert not await is_known()
        await process.add_peer(name, metadata, [memory])
        receiver.listen("0" * 32, lambda _: None)  # so that its thread polls, and the write ends
        assert await is_known()
        await process.remove_peer(name)
        assert process.child.pid is not None
        os.kill(process.child.pid, signal.SIGSTOP)  # so that the peer is being added for a while
        adding = asyncio.create_task(process.add_peer(name, metadata, [memory]))
        for _ in range(3):  # the task begins, and gives the command
            await asyncio.sleep(0)
        assert process.in_flight_count == 1
        adding.cancel()
        await asyncio.sleep(0)
        assert not adding.done()
        os.kill(process.child.pid, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(adding, 60)
        assert not await is_known()
        assert process.child.start_count == 1
    finally:
        await process.stop()
        receiver.deregister(registration)
        receiver.stop()
