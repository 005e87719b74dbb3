"""Remote DRAM: chunks that this server or others have fetched from home, kept in memory that the hosts of a Mooncake
Store put together. It is asked before home, and where it fails, home is asked.

Mooncake's client runs in this process. Its calls may hang for a minute where a host is stopped. So each kind of call
has a thread, nobody waits for long, nothing waits behind a call that hangs, and a store that fails is left alone for a
while.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from storage_server.gather.landing import Landed, Landing
from storage_server.memory_area import PrivateArea
from storage_server.settings import RemoteDramSettings
from storage_server.upstream.key_locks import Name
from storage_server.upstream.remote_entry import ENTRY_BYTES, RemoteEntry, decode_entry, encode_entry

TURN_WAIT_S = 1.0
"""So long a fetch waits until others have been read; then home is asked."""
READ_WAIT_S = 1.0
READ_BYTES_PER_S_MIN = 100e6
"""An answer that takes longer than READ_WAIT_S, and its bytes at this rate, means that the store fails."""
REMOVE_WAIT_S = 6.0
REMOVE_ATTEMPTS = 5
REMOVE_AGAIN_S = 0.2
JOIN_WAIT_S = 15.0
CLOSE_WAIT_S = 10.0
ADMITS_MAX = 16
"""So many chunks may wait to be written there; others are not kept."""
BACK_OFF_MIN_S = 1.0
BACK_OFF_MAX_S = 60.0
REMOVED_MAX = 65_536
NOT_FOUND, NOT_READY, NO_ROOM = -704, -703, -200
WRONG_SIZE = frozenset({-600, -800})
"""What is said to a buffer of another size; -800 is also said of hosts that are gone."""
_TRIAL = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
sys.exit(store.setup(sys.argv[1], "P2PHANDSHAKE", 0, 0, sys.argv[2], sys.argv[3], sys.argv[4]) != 0)
"""
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


def require_client() -> None:
    """Raises RemoteDramError where Mooncake's client is not installed."""
    if importlib.util.find_spec("mooncake") is None:
        raise RemoteDramError("[upstream.remote_dram] needs Mooncake's client: pip install 'objectcache[mooncake]'")


def connected(settings: RemoteDramSettings) -> MooncakeClient:
    """Join the store. Another process tries first, since joining holds the interpreter's lock: where the master does
    not answer, all of this process would stand still. Raises ConnectionError.
    """
    master = urlsplit(settings.endpoint).netloc
    trial = [sys.executable, "-c", _TRIAL, settings.host, settings.protocol, settings.devices, master]
    try:
        subprocess.run(trial, capture_output=True, timeout=JOIN_WAIT_S, check=True)
    except subprocess.SubprocessError as error:
        raise ConnectionError(f"Mooncake's master at {master} cannot be joined: {error}") from error
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    code = store.setup(
        settings.host, "P2PHANDSHAKE", settings.segment_bytes, 0, settings.protocol, settings.devices, master
    )
    if code != 0:
        raise ConnectionError(f"Mooncake's master at {master} answered {code}")
    client: MooncakeClient = store
    return client


class RemoteDram:
    """The chunks of one home, which `namespace` names, as others keep them for at most `keep_s` (0: for ever). Used on
    one event loop. `start` before use, `close` after.
    """

    def __init__(
        self, settings: RemoteDramSettings, namespace: str, keep_s: float, connect: Connect | None = None
    ) -> None:
        self._settings = settings
        self._prefix = f"objectcache/{sha256(namespace.encode()).hexdigest()[:16]}"
        self._keep_s = keep_s
        self._connect = connect or connected
        self._needs_client = connect is None and self._connect is connected
        self._client: MooncakeClient | None = None
        self._threads = {kind: ThreadPoolExecutor(1, f"remote-dram-{kind}") for kind in ("read", "write", "remove")}
        self._reading = asyncio.Lock()
        self._removing: asyncio.Future[Any] | None = None
        self._joining: asyncio.Future[Any] | None = None
        self._entries = PrivateArea(2 * ENTRY_BYTES)
        self._landing: Landing | None = None
        self._failure_count = 0
        self._closed_until_s = 0.0
        self._is_closing = False
        self._admits: dict[Name, object] = {}
        """What waits to be written there, with a token: a removal takes the token away."""
        self._written: Name | None = None
        self._written_changed = threading.Condition()
        self._removed: OrderedDict[Name, float] = OrderedDict()
        """When chunks were removed last (Unix seconds): what was seen before is not believed."""
        self._removed_before = 0.0
        self._calls: set[asyncio.Future[Any]] = set()
        self.hit_count = 0
        self.miss_count = 0
        self.failed_count = 0
        self.read_bytes = 0
        self.admitted_bytes = 0

    async def start(self, landing: Landing) -> None:
        """Begin to join the store; chunks come into `landing`. Raises RemoteDramError where its client is not
        installed.
        """
        if self._needs_client:
            require_client()
        self._landing = landing
        self._join_again()

    async def close(self) -> None:
        """Leave the store. A call that hangs is not waited for: its memory stays until the process ends."""
        self._is_closing = True
        if self._calls:
            await asyncio.wait(self._calls, timeout=CLOSE_WAIT_S)
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None and not self._calls:
            await asyncio.to_thread(self._client.close)

    @property
    def is_open(self) -> bool:
        """Whether the store is there, and did not fail a moment ago."""
        if self._client is None:
            self._join_again()
        return self._client is not None and not self._is_closing and time.monotonic() >= self._closed_until_s

    @property
    def is_joined(self) -> bool:
        """Whether the store was joined."""
        return self._client is not None

    async def read(self, bucket: str, key: str, landed: Landed) -> RemoteEntry | None:
        """Bring a chunk into its memory; None where it is not there, or not soon enough. Its bytes are not proved yet.
        The memory is held until nothing writes there any more.
        """
        if not self.is_open or not await self._has_turn():
            return None
        if not self.is_open:
            self._reading.release()
            return None
        nbytes = len(landed.view)
        landed.hold()
        call = self._call("read", lambda: self._get(bucket, key, landed.address, nbytes))

        def end(_: object) -> None:
            landed.release()
            self._reading.release()

        call.add_done_callback(end)
        await asyncio.wait([call], timeout=READ_WAIT_S + nbytes / READ_BYTES_PER_S_MIN)
        if not call.done():
            self._failed("an answer takes too long")
            return None
        entry: RemoteEntry | None = self._result(call)
        if entry is None or not self._is_believed(entry):
            self.miss_count += 1
            return None
        self.hit_count += 1
        self.read_bytes += nbytes
        return entry

    def admit(self, entry: RemoteEntry, landed: Landed) -> None:
        """Keep a chunk there, behind all else."""
        name = entry.bucket, entry.info.key
        header = encode_entry(entry)
        if header is None or not self.is_open or len(self._admits) >= ADMITS_MAX or not self._is_believed(entry):
            return
        landed.hold()
        token = self._admits[name] = object()
        call = self._call("write", lambda: self._put(name, token, header, landed.address, len(landed.view)))

        def end(_: object) -> None:
            landed.release()
            if self._admits.get(name) is token:
                del self._admits[name]
            if not call.cancelled() and self._result(call):
                self.admitted_bytes += len(landed.view)

        call.add_done_callback(end)

    def distrust(self, bucket: str, keys: Sequence[str]) -> None:
        """These chunks have changed: what was seen of them before now is not believed here any more."""
        now_s = time.time()
        for key in keys:
            self._admits.pop((bucket, key), None)
            self._removed[bucket, key] = now_s
            self._removed.move_to_end((bucket, key))
        while len(self._removed) > REMOVED_MAX:
            _, self._removed_before = self._removed.popitem(last=False)

    async def remove(self, bucket: str, keys: Sequence[str]) -> None:
        """Remove these chunks, as far as the store can be reached; and distrust them."""
        self.distrust(bucket, keys)
        call = self.removing(bucket, keys)
        if call is not None:
            await asyncio.wait([call], timeout=REMOVE_WAIT_S)
            if not call.done():
                self._failed("a removal takes too long")
            elif not call.cancelled():
                self._result(call)

    def removing(self, bucket: str, keys: Sequence[str]) -> asyncio.Future[Any] | None:
        """Begin to remove these chunks. None where the store cannot be reached, or an earlier removal hangs."""
        is_stuck = self._removing is not None and not self._removing.done() and not self.is_open
        if not keys or not self.is_open or is_stuck:
            return None
        names = [(bucket, key) for key in keys]
        self._removing = self._call("remove", lambda: self._remove(names))
        return self._removing

    async def _has_turn(self) -> bool:
        """One chunk is read at a time. False where the turn does not come in time: the store is busy, and fails not."""
        try:
            async with asyncio.timeout(TURN_WAIT_S):
                await self._reading.acquire()
        except TimeoutError:
            self.miss_count += 1
            return False
        return True

    def _is_believed(self, entry: RemoteEntry) -> bool:
        removed_s = max(self._removed_before, self._removed.get((entry.bucket, entry.info.key), 0.0))
        age_s = time.time() - entry.seen_at
        return entry.seen_at > removed_s and (not self._keep_s or -self._keep_s < age_s < self._keep_s)

    def _call(self, kind: str, call: Callable[[], Any]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().run_in_executor(self._threads[kind], call)
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

    def _join_again(self) -> None:
        """Begin to join the store, unless that failed a moment ago."""
        is_joining = self._joining is not None and not self._joining.done()
        if not is_joining and not self._is_closing and time.monotonic() >= self._closed_until_s:
            self._joining = self._call("write", self._join)

    def _join(self) -> None:
        """In the writing thread."""
        assert self._landing is not None
        client = None
        try:
            client = self._connect(self._settings)
            areas = [(self._entries.address, 2 * ENTRY_BYTES), (self._landing.address, self._landing.nbytes)]
            codes = [client.register_buffer(address, nbytes) for address, nbytes in areas]
            if any(codes):
                raise ConnectionError(f"memory could not be registered: {codes}")
        except Exception as error:  # whatever it is, home is there
            if client is not None:
                client.close()
            self._failed(str(error))
            return
        self._failure_count = 0
        self._client = client

    def _get(self, bucket: str, key: str, address: int, nbytes: int) -> RemoteEntry | None:
        """In the reading thread."""
        assert self._client is not None
        header = memoryview(self._entries.map)[:ENTRY_BYTES]
        header[:] = bytes(ENTRY_BYTES)
        addresses, sizes = [[self._entries.address, address]], [[ENTRY_BYTES, nbytes]]
        (code,) = self._client.batch_get_into_multi_buffers([self._key(bucket, key)], addresses, sizes)
        if code != ENTRY_BYTES + nbytes:
            if code in WRONG_SIZE and self._client.get_size(self._key(bucket, key)) not in (-1, ENTRY_BYTES + nbytes):
                code = NOT_FOUND  # the caller asks for a wrong size, or it is gone by now
            self._note(code)
            return None
        self._note(0)
        entry = decode_entry(bytes(header), bucket, key)
        return entry if entry is not None and entry.info.nbytes == nbytes else None

    def _put(self, name: Name, token: object, header: bytes, address: int, nbytes: int) -> bool:
        """In the writing thread; whether the chunk is there now."""
        with self._written_changed:
            if self._admits.get(name) is not token or self._is_closing or time.monotonic() < self._closed_until_s:
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
        self._client.batch_remove([self._key(*name)], True)
        (code,) = self._client.batch_put_from_multi_buffers([self._key(*name)], addresses, sizes)
        if code != NO_ROOM:
            self._note(code)
        return code == 0

    def _remove(self, names: Sequence[Name]) -> None:
        """In the removing thread. A chunk that another server is writing cannot be removed before that has ended."""
        assert self._client is not None
        with self._written_changed:
            self._written_changed.wait_for(lambda: self._written not in names, timeout=REMOVE_WAIT_S)
        keys = [self._key(*name) for name in names]
        for _ in range(REMOVE_ATTEMPTS):
            codes = self._client.batch_remove(keys, True)
            self._note(min((code for code in codes if code != NOT_FOUND), default=0))
            keys = [key for key, code in zip(keys, codes, strict=True) if code == NOT_READY]
            if not keys:
                return
            time.sleep(REMOVE_AGAIN_S)

    def _note(self, code: int) -> None:
        if code >= 0 or code in (NOT_FOUND, NOT_READY):
            self._failure_count = 0
        else:
            self._failed(f"Mooncake answered {code}")

    def _failed(self, problem: str) -> None:
        """Leave the store alone for a while. In any thread."""
        self.failed_count += 1
        if time.monotonic() < self._closed_until_s:
            return
        self._failure_count += 1
        wait_s = min(BACK_OFF_MAX_S, BACK_OFF_MIN_S * 2.0 ** min(self._failure_count, 10))
        self._closed_until_s = time.monotonic() + wait_s
        if self._failure_count == 1:
            _log.warning("remote DRAM: %s; home is asked instead", problem)

    def _key(self, bucket: str, key: str) -> str:
        """Mooncake's name of a chunk."""
        return f"{self._prefix}/{bucket}/{quote(key, safe='/')}"
