"""The Mooncake process, with Mooncake's client played in it: whatever that does, the server goes on, and gets its
memory back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from objectcache.adapters.memory_area import SharedArea
from storage_server.home.remote_dram import mooncake_process
from storage_server.home.remote_dram.mooncake_process import MooncakeProcess
from storage_server.home.remote_dram.remote_dram import RemoteDram
from storage_server.home.rules import unended_moves
from storage_server.settings import RemoteDramSettings
from tests.support.waiting import settled, until

PLAYED = """
import ctypes, os, signal, threading, time

class MooncakeDistributedStore:
    def setup(self, host, metadata, segment, buffer, protocol, devices, master):
        if host == "refuses":
            return -900
        if host == "holds":
            ctypes.PyDLL(None).sleep(600)  # with the interpreter's lock, as Mooncake does
        if host == "crashes":
            os.abort()
        self.stored = {}
        return 0

    def register_buffer(self, address, nbytes):
        return 0

    def batch_get_into_multi_buffers(self, keys, addresses, sizes):
        if "MC_SEEN" in os.environ:
            open(os.environ["MC_SEEN"], "w").close()
        if "garbage" in keys[0]:
            for fd in map(int, os.listdir("/proc/self/fd")):
                try:
                    if fd > 2:
                        os.write(fd, b"garbage\\n")
                except OSError:
                    pass
        if "abort" in keys[0]:
            os.abort()
        if "raise" in keys[0]:
            raise RuntimeError("broken")
        if "hang" in keys[0]:
            time.sleep(600)  # for ever
        if "lock" in keys[0]:
            ctypes.PyDLL(None).sleep(600)  # for ever, with the interpreter's lock
        if "late" in keys[0]:  # its bytes come for as long as the process lives
            def come():
                while True:
                    ctypes.memset(addresses[0][1], 33, sizes[0][1])
                    time.sleep(0.001)
            threading.Thread(target=come, daemon=True).start()
            return [-800]
        if keys[0] not in self.stored:
            return [-704]
        ctypes.memmove(addresses[0][0], self.stored[keys[0]], sizes[0][0])
        return [sizes[0][0]]

    def get_size(self, key):
        return -1

    def batch_put_from_multi_buffers(self, keys, addresses, sizes):
        self.stored[keys[0]] = ctypes.string_at(addresses[0][0], sizes[0][0])
        return [0]

    def batch_remove(self, keys, force):
        return [0 if self.stored.pop(key, None) is not None else -704 for key in keys]

    def close(self):
        if os.environ.get("MC_CLOSE_HANGS"):
            time.sleep(600)  # for ever
"""
NBYTES = 4096


@pytest.fixture(autouse=True)
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package named `mooncake` where the process looks for it."""
    package = tmp_path / "played" / "mooncake"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "store.py").write_text(PLAYED)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


def settings(host: str = "127.0.0.1") -> RemoteDramSettings:
    return RemoteDramSettings("mooncake://127.0.0.1:1", host)


@asynccontextmanager
async def running() -> AsyncIterator[tuple[MooncakeProcess, SharedArea]]:
    area = SharedArea(2 * NBYTES)
    process = await mooncake_process.joined(settings(), [area])
    assert isinstance(process, MooncakeProcess)
    try:
        yield process, area
    finally:
        await process.close()
        area.close()
        assert not is_alive(process.pid)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_values_go_there_and_back_through_shared_memory() -> None:
    async with running() as (process, area):
        spans, other = [(area.address, NBYTES)], [(area.address + NBYTES, NBYTES)]
        area.map[:NBYTES] = data = os.urandom(NBYTES)
        assert await process.get("a", other) == -704
        assert await process.put("a", spans) == 0
        assert await process.get("a", other) == NBYTES
        assert area.map[NBYTES:] == data
        assert await process.remove(["a", *map(str, range(2_500))]) == [0] + [-704] * 2_500


async def test_memory_that_is_not_shared_is_refused() -> None:
    async with running() as (process, area):
        with pytest.raises(ValueError, match="not shared"):
            await process.get("a", [(area.address + NBYTES, NBYTES + 1)])


async def test_the_process_knows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OBJECTCACHE_UPSTREAM_SECRET_ACCESS_KEY", "secret")
    async with running() as (process, _):
        variables, opened = seen_of(process.pid)
        assert "PATH" in variables
        assert not [name for name in variables if "SECRET" in name]
        assert not [path for path in opened if path.endswith((".sqlite3", ".log", ".segment"))]


def seen_of(pid: int) -> tuple[list[str], list[str]]:
    """The names of a process's variables, and the files that it has open."""
    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return [line.split("=")[0] for line in lines], [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]


@pytest.mark.parametrize("fault", ["abort", "garbage"])
async def test_when_it_ends_or_lies_every_call_fails_and_it_is_gone(fault: str) -> None:
    async with running() as (process, area):
        hanging = asyncio.create_task(process.remove(["a"] * 1000))
        with pytest.raises(ConnectionError):
            await process.get(fault, [(area.address, NBYTES)])
        assert isinstance((await asyncio.gather(hanging, return_exceptions=True))[0], ConnectionError | list)
        assert not process.is_running
        assert not is_alive(process.pid)
        with pytest.raises(ConnectionError):
            await process.put("a", [(area.address, NBYTES)])


async def test_what_its_client_raises_fails_that_call_alone() -> None:
    async with running() as (process, area):
        with pytest.raises(ConnectionError, match="RuntimeError: broken"):
            await process.get("raise", [(area.address, NBYTES)])
        assert await process.put("a", [(area.address, NBYTES)]) == 0


@pytest.mark.slow
async def test_nothing_waits_behind_a_call_that_hangs_and_it_ends_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_process, "CALL_WAIT_S", 3.0)
    async with running() as (process, area):
        hanging = asyncio.create_task(process.get("hang", [(area.address, NBYTES)]))
        await asyncio.sleep(0)  # the call begins
        monkeypatch.setattr(mooncake_process, "CALL_WAIT_S", 60.0)
        assert await process.put("a", [(area.address + NBYTES, NBYTES)]) == 0
        assert await process.remove(["a"]) == [0]
        hanging.cancel()  # its memory is still in use
        await settled()
        assert not hanging.done()
        await asyncio.wait([hanging], timeout=60)
        assert hanging.done()
        assert not is_alive(process.pid)


@pytest.mark.slow
@pytest.mark.parametrize("close", ["", "hangs"])
async def test_leaving_ends_it_even_where_a_call_hangs(
    close: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mooncake_process, "LEAVE_WAIT_S", 1.0)
    monkeypatch.setenv("MC_CLOSE_HANGS", close)
    monkeypatch.setenv("MC_SEEN", str(tmp_path / "seen"))
    async with running() as (process, area):
        calls = [asyncio.create_task(process.get(key, [(area.address, NBYTES)])) for key in ("hang", "lock")]
        await until((tmp_path / "seen").exists)
    done, _ = await asyncio.wait(calls, timeout=60)
    assert [type(call.exception()) for call in done] == [ConnectionError] * 2


@pytest.mark.slow
@pytest.mark.parametrize("host", ["refuses", "crashes", "holds"])
async def test_a_store_that_cannot_be_joined_is_told_and_the_loop_goes_on(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_process, "JOIN_WAIT_S", 3.0)
    area = SharedArea(NBYTES)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)  # a turn of the loop
            turns += 1

    counting = asyncio.create_task(count())
    with pytest.raises(ConnectionError):
        await mooncake_process.joined(settings(host), [area])
    counting.cancel()
    area.close()
    assert turns > 5


async def test_a_server_that_stops_while_it_joins_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    spawned = mooncake_process.spawned

    async def seen(*arguments: object) -> object:
        process, ours = await spawned(*arguments)  # type: ignore[arg-type]
        started.append(process)
        return process, ours

    monkeypatch.setattr(mooncake_process, "spawned", seen)
    monkeypatch.setattr(mooncake_process, "require_client", lambda: None)
    monkeypatch.setattr(mooncake_process, "JOIN_WAIT_S", 600.0)
    remote = RemoteDram(settings("holds"), "home", 1.0)
    remote.landing(1 << 20)
    await remote.start()
    await until(lambda: bool(started))
    async with asyncio.timeout(60):
        await remote.close()
    assert not is_alive(started[0].pid)


async def test_remote_dram_joins_again_after_its_process_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage_server.home.remote_dram.joined_store.PAUSE_S_MIN", 0.2)
    joined: list[MooncakeProcess] = []

    async def join(settings: RemoteDramSettings, areas: Sequence[SharedArea]) -> MooncakeProcess:
        process = await mooncake_process.joined(settings, areas)
        assert isinstance(process, MooncakeProcess)
        joined.append(process)
        return process

    remote = RemoteDram(settings(), "home", 1.0, join)
    landing = remote.landing(1 << 20)
    await remote.start()
    await until(lambda: remote.store.is_usable)
    os.kill(joined[0].pid, 9)
    await until(lambda: not remote.store.is_joined)
    await until(lambda: remote.store.is_usable)
    assert len(joined) == 2
    landed = landing.take("bucket", NBYTES)
    assert landed is not None
    assert await remote.read("bucket", "a", landed) is None
    assert remote.miss_count == 1
    landed.release()
    await remote.close()
    assert landing.used_bytes == 0


async def test_late_bytes_come_into_nobody_elses_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has failed, and what it asked for still comes. The memory is free when the process has ended."""
    monkeypatch.setattr(unended_moves, "QUICK_S", 0.0)
    monkeypatch.setattr("storage_server.home.remote_dram.joined_store.PAUSE_S_MIN", 0.1)
    joined: list[MooncakeProcess] = []

    async def join(settings: RemoteDramSettings, areas: Sequence[SharedArea]) -> MooncakeProcess:
        process = await mooncake_process.joined(settings, areas)
        assert isinstance(process, MooncakeProcess)
        joined.append(process)
        return process

    remote = RemoteDram(settings(), "home", 1.0, join)
    landing = remote.landing(1 << 20)
    await remote.start()
    await until(lambda: remote.store.is_usable)
    landed = landing.take("bucket", NBYTES)
    assert landed is not None
    assert await remote.read("bucket", "late", landed) is None
    await until(lambda: bytes(landed.view) == b"!" * NBYTES)
    landed.release()
    other = landing.take("bucket", NBYTES)
    assert other is not None
    assert other.address != landed.address
    other.release()
    assert landing.used_bytes == NBYTES
    remote.store.leave()
    await until(lambda: remote.store.is_usable and len(joined) == 2)
    assert not is_alive(joined[0].pid)
    assert landing.used_bytes == 0
    await remote.close()
