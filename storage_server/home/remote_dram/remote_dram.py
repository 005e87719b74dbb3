"""Remote DRAM: chunks that this server or others have fetched from home, kept in memory that the hosts of a Mooncake
Store put together. It is asked before home, and where it fails, home is asked.

Its calls may hang for a minute where a host is stopped. So nobody waits for long, nothing waits behind a call that
hangs, and a store that fails is left alone for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from urllib.parse import quote

from objectcache.adapters.memory_area import SharedArea
from objectcache.adapters.threads import to_end
from storage_server.delivery.gather.landing import Landed, Landing
from storage_server.home.further_tier import FurtherTier
from storage_server.home.key_locks import Name
from storage_server.home.remote_dram.joined_store import Connect, JoinedStore
from storage_server.home.remote_dram.mooncake_process import MooncakeClient
from storage_server.home.remote_dram.removed_file import RemovedFile
from storage_server.home.rules.remote_entry import ENTRY_BYTES, RemoteEntry, decode_entry, encode_entry
from storage_server.home.rules.removed_chunks import RemovedChunks
from storage_server.home.rules.unended_moves import FAILED, NO_ROOM, NOT_FOUND, NOT_READY, may_move_on
from storage_server.settings import RemoteDramSettings

TURN_WAIT_S = 1.0
"""So long a fetch waits until others have been read; then home is asked."""
READ_WAIT_S = 1.0
READ_BYTES_PER_S_MIN = 100e6
"""An answer that takes longer than READ_WAIT_S, and its bytes at this rate, means that the store fails."""
REMOVE_WAIT_S = 6.0
REMOVE_ATTEMPTS = 5
REMOVE_AGAIN_S = 0.2
ADMITS_FRACTION = 0.25
"""Chunks that wait to be written there take no more than this fraction of landing memory; others are not kept."""
KEPT_FRACTION = 0.125
"""Where calls that failed may still move bytes in more than this fraction of landing memory, the client is ended."""


class RemoteDram(FurtherTier):
    """The chunks of one home, which `namespace` names, as others keep them for at most `keep_s` (0: for ever). With
    `file` a restart knows of chunks that were removed. Used on one event loop. `start` before use, `close` after.
    """

    def __init__(
        self,
        settings: RemoteDramSettings,
        namespace: str,
        keep_s: float,
        connect: Connect | None = None,
        file: RemovedFile | None = None,
    ) -> None:
        self._prefix = f"objectcache/{sha256(namespace.encode()).hexdigest()[:16]}"
        self._file = file
        self._removed = RemovedChunks(keep_s)
        self.store = JoinedStore(settings, self._areas, connect)
        self._reading, self._writing, self._removing_turn = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self._is_overdue = False
        """Whether the read under way has taken too long. Until it ends no other one can begin, so none waits for it."""
        self._removing: asyncio.Task[None] | None = None
        self._entries = SharedArea(2 * ENTRY_BYTES)
        """The entries of the chunk that is read, and of the one that is written."""
        self.landing_area: SharedArea | None = None
        self._admits: dict[Name, object] = {}
        """Chunks that wait to be written there, each with a token. A removal takes the token away."""
        self._admitting_bytes = 0
        self._landing_bytes = 0
        self._written: tuple[Name, asyncio.Future[int]] | None = None
        """The chunk that is being written there."""
        self.hit_count = 0
        self.miss_count = 0
        self.read_bytes = 0
        self.admitted_bytes = 0

    def landing(self, nbytes: int) -> Landing:
        """The memory that chunks come into, which the Mooncake process has, too."""
        self.landing_area, self._landing_bytes = SharedArea(nbytes), nbytes
        return Landing(nbytes, self.landing_area)

    async def start(self) -> None:
        """Begin to join the store. Raises RemoteDramError where its client is not installed."""
        if self._file is not None:
            await asyncio.to_thread(self._file.take, self._removed, time.time())
        self.store.start()

    async def close(self) -> None:
        """Leave the store."""
        await self.store.close()
        if self._file is not None:
            await asyncio.to_thread(self._file.keep, self._removed, time.time())
        for area in self._areas():
            area.close()

    def _areas(self) -> list[SharedArea]:
        return [area for area in (self._entries, self.landing_area) if area is not None]

    def may_have(self, bucket: str, key: str) -> bool:
        """Whether the store can be asked, and no answer of it is overdue."""
        return self.store.is_usable and not self._is_overdue

    def found_wrong(self, bucket: str, key: str) -> None:
        """Distrust and remove a chunk whose bytes were wrong."""
        self.distrust(bucket, [key])
        self.begin_removal(bucket, [key])

    async def read(self, bucket: str, key: str, landed: Landed) -> RemoteEntry | None:
        """Bring a chunk into its memory; None where it is not there, or not soon enough. Its bytes are not proved yet.
        The memory is held until nothing writes there any more.
        """
        if not self.may_have(bucket, key) or not await self._has_turn():
            return None
        if not self.may_have(bucket, key):
            self._reading.release()
            return None
        nbytes = len(landed.view)
        landed.hold()
        call = self.store.call(self._get(bucket, key, landed))

        def end(_: object) -> None:
            landed.release()
            self._is_overdue = False
            self._reading.release()

        call.add_done_callback(end)
        await asyncio.wait([call], timeout=READ_WAIT_S + nbytes / READ_BYTES_PER_S_MIN)
        if not call.done():
            self._is_overdue = True
            self.store.failed("an answer takes too long")
            return None
        entry: RemoteEntry | None = self.store.result(call)
        if entry is None or not self._removed.is_believed(entry, time.time()):
            self.miss_count += 1
            return None
        self.hit_count += 1
        self.read_bytes += nbytes
        return entry

    def admit(self, entry: RemoteEntry, landed: Landed) -> None:
        """Keep a chunk there, behind all else."""
        name = entry.bucket, entry.info.key
        header = encode_entry(entry)
        nbytes = len(landed.view)
        waiting_bytes = self._admitting_bytes
        has_room = not waiting_bytes or waiting_bytes + nbytes <= ADMITS_FRACTION * self._landing_bytes
        is_wanted = self.store.is_usable and self._removed.is_believed(entry, time.time())
        if header is None or not has_room or not is_wanted:
            return
        landed.hold()
        self._admitting_bytes += nbytes
        token = self._admits[name] = object()
        call = self.store.call(self._put(name, token, header, landed))

        def end(_: object) -> None:
            landed.release()
            self._admitting_bytes -= nbytes
            if self._admits.get(name) is token:
                del self._admits[name]
            if not call.cancelled() and self.store.result(call):
                self.admitted_bytes += nbytes

        call.add_done_callback(end)

    def distrust(self, bucket: str, keys: Sequence[str]) -> None:
        """These chunks have changed: this server ignores remote copies that were read from home before now."""
        for key in keys:
            self._admits.pop((bucket, key), None)
        self._removed.note(bucket, keys, time.time())

    async def remove(self, bucket: str, keys: Sequence[str]) -> None:
        """Remove these chunks, as far as the store can be reached; and distrust them, also after a restart."""
        if not keys:
            return
        self.distrust(bucket, keys)
        call = self.begin_removal(bucket, keys)
        if call is not None:
            await asyncio.wait([call], timeout=REMOVE_WAIT_S)
            if not call.done():
                self.store.failed("a removal takes too long")
            elif not call.cancelled():
                self.store.result(call)

    def begin_removal(self, bucket: str, keys: Sequence[str]) -> asyncio.Task[None] | None:
        """Begin to remove these chunks. None where the store cannot be reached, or an earlier removal hangs."""
        is_stuck = self._removing is not None and not self._removing.done() and not self.store.is_usable
        if not keys or not self.store.is_usable or is_stuck:
            return None
        names = [(bucket, key) for key in keys]
        self._removing = self.store.call(self._remove(names))
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

    async def _get(self, bucket: str, key: str, landed: Landed) -> RemoteEntry | None:
        """The caller must hold `_reading`."""
        nbytes = len(landed.view)
        header = memoryview(self._entries.map)[:ENTRY_BYTES]
        header[:] = bytes(ENTRY_BYTES)
        spans = [(self._entries.address, ENTRY_BYTES), (landed.address, nbytes)]
        code = await self._moved(landed, lambda client: client.get(self._key(bucket, key), spans))
        if code != ENTRY_BYTES + nbytes:
            self.store.note(code)
            return None
        self.store.note(0)
        entry = decode_entry(bytes(header), bucket, key)
        return entry if entry is not None and entry.info.nbytes == nbytes else None

    async def _moved(self, landed: Landed, move: Callable[[MooncakeClient], Awaitable[int]]) -> int:
        """The code of a call that moves bytes of this memory. Where some may come behind its end, the memory is kept
        from others until the client has left; entries are not, since a wrong one is found out.
        """
        client, began_s, code = self.store.client, time.monotonic(), FAILED
        assert client is not None
        try:
            code = await move(client)
        finally:
            if may_move_on(code, time.monotonic() - began_s) and not client.has_ended:
                self.store.keep_until_left(client, landed)
                if self.store.kept_bytes > KEPT_FRACTION * self._landing_bytes:
                    self.store.leave()
        return code

    async def _put(self, name: Name, token: object, header: bytes, landed: Landed) -> bool:
        """Whether the chunk is there now."""
        async with self._writing:
            if self._admits.get(name) is not token or not self.store.is_usable:
                return False
            memoryview(self._entries.map)[ENTRY_BYTES : 2 * ENTRY_BYTES] = header
            spans = [(self._entries.address + ENTRY_BYTES, ENTRY_BYTES), (landed.address, len(landed.view))]
            put = self._moved(landed, lambda client: client.put(self._key(*name), spans))
            putting = asyncio.ensure_future(put)
            self._written = name, putting
            try:
                code = await to_end(putting)
            finally:
                self._written = None
            if code != NO_ROOM:
                self.store.note(code)
            return code == 0

    async def _remove(self, names: Sequence[Name]) -> None:
        """A chunk that is being written, here or by another server, cannot be removed before that has ended."""
        async with self._removing_turn:
            if self._written is not None and self._written[0] in names:
                await asyncio.wait([self._written[1]], timeout=REMOVE_WAIT_S)
            keys = [self._key(*name) for name in names]
            for _ in range(REMOVE_ATTEMPTS):
                if self.store.client is None:
                    return
                codes = await self.store.client.remove(keys)
                self.store.note(min((code for code in codes if code != NOT_FOUND), default=0))
                keys = [key for key, code in zip(keys, codes, strict=True) if code == NOT_READY]
                if not keys:
                    return
                await asyncio.sleep(REMOVE_AGAIN_S)

    def _key(self, bucket: str, key: str) -> str:
        """Mooncake's name of a chunk."""
        return f"{self._prefix}/{bucket}/{quote(key, safe='/')}"
