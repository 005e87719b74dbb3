"""Remote DRAM: chunks that this server or others have fetched from home, kept in memory that the hosts of a Mooncake
Store put together. It is asked before home, and where it fails, home is asked.

Mooncake's client runs in this process. Its calls may hang for half a minute where an owner of memory is stopped, so
each has a thread, nobody waits for long, and a store that fails is left alone for a while.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from adapters.threads import finished
from storage_server.gather.landing import Landed, Landing
from storage_server.memory_area import PrivateArea
from storage_server.settings import RemoteDramSettings
from storage_server.upstream.key_locks import Name
from storage_server.upstream.remote_entry import ENTRY_BYTES, RemoteEntry, decode_entry, encode_entry

READ_WAIT_S = 1.0
READ_BYTES_PER_S_MIN = 200e6
"""So long a fetch waits before it asks home, and as long as all that was asked for before takes at this rate."""
REMOVE_WAIT_S = 6.0
ADMITS_MAX = 64
"""So many chunks may wait to be written there; others are not kept."""
BACK_OFF_MIN_S = 1.0
BACK_OFF_MAX_S = 60.0
DOUBTFUL_MAX = 65_536
NOT_FOUND = -704
_log = logging.getLogger(__name__)


class MooncakeClient(Protocol):
    """The calls of `mooncake.store.MooncakeDistributedStore` that are used; negative numbers are errors."""

    def register_buffer(self, address: int, nbytes: int) -> int: ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]: ...

    def get_size(self, key: str) -> int: ...

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]: ...

    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...

    def close(self) -> int: ...


Connect = Callable[[RemoteDramSettings], MooncakeClient]


class RemoteDramError(Exception):
    """Remote DRAM cannot be used; the message says what to do."""


def connected(settings: RemoteDramSettings) -> MooncakeClient:
    """Join the store. Raises RemoteDramError, ConnectionError."""
    try:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:
        raise RemoteDramError(
            f"[upstream.remote_dram] needs Mooncake's client: pip install 'objectcache[mooncake]' ({error})"
        ) from error
    master = urlsplit(settings.endpoint).netloc
    code = store.setup(
        settings.host, "P2PHANDSHAKE", settings.segment_bytes, 0, settings.protocol, settings.devices, master
    )
    if code != 0:
        raise ConnectionError(f"Mooncake's master at {master} answered {code}")
    client: MooncakeClient = store
    return client


class RemoteDram:
    """Used on one event loop. `start` before use, `close` after."""

    def __init__(self, settings: RemoteDramSettings, keep_s: float, connect: Connect | None = None) -> None:
        self._settings = settings
        self._keep_s = keep_s
        self._connect = connect or connected
        self._client: MooncakeClient | None = None
        self._reading = ThreadPoolExecutor(1, "remote-dram-read")
        self._writing = ThreadPoolExecutor(1, "remote-dram-write")
        self._entries = PrivateArea(2 * ENTRY_BYTES)
        self._landing: Landing | None = None
        self._failure_count = 0
        self._closed_until_s = 0.0
        self._removing = ThreadPoolExecutor(1, "remote-dram-remove")
        self._admits: dict[Name, object] = {}
        """What waits to be written there, with a token: a removal takes the token away."""
        self._written: Name | None = None
        self._written_changed = threading.Condition()
        self._doubtful: OrderedDict[Name, float] = OrderedDict()
        self._lost_until_s = float("-inf")
        self._calls: set[asyncio.Future[Any]] = set()
        self._queued_bytes = 0
        self.hit_count = 0
        self.miss_count = 0
        self.failed_count = 0
        self.read_bytes = 0
        self.admitted_bytes = 0

    async def start(self, landing: Landing) -> None:
        """Join the store; chunks come into `landing`. A store that is not there yet is asked again later. Raises
        RemoteDramError where its client is not installed.
        """
        self._landing = landing
        self._loop = asyncio.get_running_loop()
        self._given_up = self._loop.create_future()
        await asyncio.get_running_loop().run_in_executor(self._writing, self._join)

    async def close(self) -> None:
        """Wait for the calls under way, and leave the store."""
        while self._calls:
            await finished(next(iter(self._calls)))
        self._reading.shutdown()
        self._writing.shutdown()
        self._removing.shutdown()
        if self._client is not None:
            await asyncio.to_thread(self._client.close)

    @property
    def is_open(self) -> bool:
        """Whether the store is there, and did not fail a moment ago."""
        return self._client is not None and time.monotonic() >= self._closed_until_s

    async def read(self, bucket: str, key: str, landed: Landed) -> RemoteEntry | None:
        """Bring a chunk into its memory; None where it is not there, or not soon enough. Its bytes are not proved yet.
        The memory is held until nothing writes there any more.
        """
        if not self._may_ask(bucket, key):
            return None
        landed.hold()
        nbytes = len(landed.view)
        self._queued_bytes += nbytes
        call = self._call(self._reading, lambda: self._get(bucket, key, landed.address, nbytes))

        def end(_: object) -> None:
            self._queued_bytes -= nbytes
            landed.release()

        call.add_done_callback(end)
        timeout_s = READ_WAIT_S + self._queued_bytes / READ_BYTES_PER_S_MIN
        given_up = self._given_up
        await asyncio.wait([call, given_up], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            if not given_up.done():
                self._failed("an answer takes too long")
            return None
        entry: RemoteEntry | None = self._result(call)
        if entry is None or (self._keep_s and not 0 <= time.time() - entry.seen_at < self._keep_s):
            self.miss_count += 1
            return None
        self.hit_count += 1
        self.read_bytes += len(landed.view)
        return entry

    def admit(self, entry: RemoteEntry, landed: Landed) -> None:
        """Keep a chunk there, behind all else."""
        name = entry.bucket, entry.info.key
        header = encode_entry(entry)
        if header is None or not self._may_ask(*name) or len(self._admits) >= ADMITS_MAX:
            return
        landed.hold()
        token = self._admits[name] = object()
        call = self._call(self._writing, lambda: self._put(name, token, header, landed.address, len(landed.view)))

        def end(_: object) -> None:
            landed.release()
            if self._admits.get(name) is token:
                del self._admits[name]
            if not call.cancelled() and call.exception() is None and call.result():
                self.admitted_bytes += len(landed.view)

        call.add_done_callback(end)

    async def remove(self, bucket: str, keys: Sequence[str]) -> None:
        """Remove these chunks. Those that could not be removed are not read by this server until they are, and by no
        server when they have become old.
        """
        names = [(bucket, key) for key in keys]
        for name in names:
            self._admits.pop(name, None)
        self._doubt(names)
        if not names or not self.is_open:
            return
        call = self._call(self._removing, lambda: self._remove(names))
        await asyncio.wait([call], timeout=REMOVE_WAIT_S)
        if call.done() and self._result(call):
            for name in names:
                self._doubtful.pop(name, None)
        elif not call.done():
            self._failed("a removal takes too long")

    def _may_ask(self, bucket: str, key: str) -> bool:
        if self._client is None and time.monotonic() >= self._closed_until_s:
            self._closed_until_s = time.monotonic() + BACK_OFF_MAX_S / 4
            self._call(self._writing, self._join)
        is_lost = time.monotonic() < self._lost_until_s
        return self.is_open and not is_lost and not self._is_doubtful((bucket, key))

    def _is_doubtful(self, name: Name) -> bool:
        since_s = self._doubtful.get(name)
        if since_s is None:
            return False
        if self._keep_s and time.monotonic() - since_s > self._keep_s:  # what is left there is too old to be read
            del self._doubtful[name]
            return False
        return True

    def _doubt(self, names: Sequence[Name]) -> None:
        for name in names:
            self._doubtful[name] = time.monotonic()
            self._doubtful.move_to_end(name)
        if len(self._doubtful) > DOUBTFUL_MAX:
            self._doubtful.clear()
            self._lost_until_s = time.monotonic() + (self._keep_s or float("inf"))
            _log.warning("remote DRAM: too many chunks could not be removed; nothing is read there for a while")

    def _call(self, threads: ThreadPoolExecutor, call: Callable[[], Any]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().run_in_executor(threads, call)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def _result(self, call: asyncio.Future[Any]) -> Any:
        """What a call has returned; None where it raised."""
        error = call.exception()
        if error is not None:
            self._failed(f"Mooncake's client: {error!r}")
            return None
        return call.result()

    def _join(self) -> None:
        """In the writing thread."""
        assert self._landing is not None
        try:
            client = self._connect(self._settings)
            areas = [(self._entries.address, 2 * ENTRY_BYTES), (self._landing.address, self._landing.nbytes)]
            codes = [client.register_buffer(address, nbytes) for address, nbytes in areas]
            if any(codes):
                raise ConnectionError(f"memory could not be registered: {codes}")
        except ConnectionError as error:
            self._failed(str(error))
            return
        self._client = client
        self._failure_count = 0

    def _get(self, bucket: str, key: str, address: int, nbytes: int) -> RemoteEntry | None:
        """In the reading thread."""
        assert self._client is not None
        header = memoryview(self._entries.map)[:ENTRY_BYTES]
        header[:] = bytes(ENTRY_BYTES)
        addresses, sizes = [[self._entries.address, address]], [[ENTRY_BYTES, nbytes]]
        (code,) = self._client.batch_get_into_multi_buffers([_key(bucket, key)], addresses, sizes)
        if code != ENTRY_BYTES + nbytes:
            is_there = code != NOT_FOUND and self._client.get_size(_key(bucket, key)) >= 0
            self._note(NOT_FOUND if is_there else code)  # one of another size is there: the caller asks for a wrong one
            return None
        self._note(0)
        entry = decode_entry(bytes(header), bucket, key)
        return entry if entry is not None and entry.info.nbytes == nbytes else None

    def _put(self, name: Name, token: object, header: bytes, address: int, nbytes: int) -> bool:
        """In the writing thread; whether the chunk is there now."""
        with self._written_changed:
            if self._admits.get(name) is not token or time.monotonic() < self._closed_until_s:
                return False
            self._written = name
        try:
            return self._put_now(name, header, address, nbytes)
        finally:
            with self._written_changed:
                self._written = None
                self._written_changed.notify_all()

    def _put_now(self, name: Name, header: bytes, address: int, nbytes: int) -> bool:
        assert self._client is not None
        memoryview(self._entries.map)[ENTRY_BYTES:] = header
        addresses, sizes = [[self._entries.address + ENTRY_BYTES, address]], [[ENTRY_BYTES, nbytes]]
        self._client.batch_remove([_key(*name)], True)
        (code,) = self._client.batch_put_from_multi_buffers([_key(*name)], addresses, sizes)
        if code not in _NO_ROOM:
            self._note(code)
        return code == 0

    def _remove(self, names: Sequence[Name]) -> bool:
        """In the removing thread; whether none of them is there any more. None of them will be written."""
        assert self._client is not None
        with self._written_changed:
            self._written_changed.wait_for(lambda: self._written not in names)
        codes = self._client.batch_remove([_key(*name) for name in names], True)
        for code in codes:
            self._note(code)
        return all(code in (0, NOT_FOUND) for code in codes)

    def _note(self, code: int) -> None:
        if code >= 0 or code == NOT_FOUND:
            self._failure_count = 0
        else:
            self._failed(f"Mooncake answered {code}")

    def _give_up(self) -> None:
        """Let all that wait for an answer ask home."""
        self._given_up.set_result(None)
        self._given_up = self._loop.create_future()

    def _failed(self, problem: str) -> None:
        """Leave the store alone for a while. In any thread."""
        self.failed_count += 1
        self._failure_count += 1
        wait_s = min(BACK_OFF_MAX_S, BACK_OFF_MIN_S * 2.0 ** min(self._failure_count, 10))
        self._closed_until_s = time.monotonic() + wait_s
        with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            self._loop.call_soon_threadsafe(self._give_up)
        if self._failure_count == 1:
            _log.warning("remote DRAM: %s; home is asked instead", problem)


_NO_ROOM = frozenset({-200})
"""No memory is free there: the chunk is not kept, and nothing is wrong."""


def _key(bucket: str, key: str) -> str:
    """Mooncake's name of a chunk."""
    return f"objectcache/{bucket}/{quote(key, safe='/')}"
