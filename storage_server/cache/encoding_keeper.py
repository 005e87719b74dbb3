"""The keeper that encodes: what its policy decides is carried out behind deliveries. A chunk may lie in memory encoded;
readers that take only exact chunks get it from its home then.

A chunk that is encoded in place is read by nobody at that moment: its new bytes are written to the beginning of its
span in one turn of the event loop, and the rest of the span is freed. A chunk that is to come encoded is read, encoded,
and written to a span of the right size.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TypeVar

from objectcache.adapters.threads import in_parts, let_others_run
from objectcache.kv_codecs.layer import Codec, goes_on
from storage_server.cache.keeping import Copy, Keeper, Span, TierMemory
from storage_server.cache.policies.choice import Eviction
from storage_server.cache.policies.memory_policy import Encoding, TierDecision
from storage_server.cache.policies.memory_trials import TryingMemoryPolicy
from storage_server.cache.policies.reader_forms import ChunkUse
from storage_server.cache.policies.utility import UtilitySettings
from storage_server.cache.recoding import Recoder
from storage_server.cache.rules.residency import Key, key_of
from storage_server.planning.extent import ALIGNMENT_BYTES, CorruptExtentError, Extent, aligned
from storage_server.planning.forms import Encoded, Reading

RECODE_WAITS, RECODE_PAUSE_S = 10, 0.02
"""So often one decision waits for readers of chunks that it is to encode. Chunks that are read still leave then, and
come back at their next use: other decisions wait for this one, and a slow reader may have thousands of chunks.
"""
SLIDE_BYTES_MAX = 32 << 20
"""Moved in one turn of the event loop: some milliseconds."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class EncodingKeeper(Keeper):
    """Keeps chunks in the forms that are worth most by the `settings`; `eviction` says in which order they have their
    turns.
    """

    def __init__(
        self, memory: TierMemory, settings: UtilitySettings, eviction: Eviction = Eviction.REUSE_VALUE
    ) -> None:
        super().__init__(memory)
        self._policy = TryingMemoryPolicy(
            memory.residency.total_bytes, settings, ALIGNMENT_BYTES, eviction, secrets.token_bytes(16)
        )
        self._recoder = Recoder()
        self._is_stopped = False
        self._wanted: dict[int, Encoding] = {}
        """How chunks are to come encoded, by the offsets of their spans, until they have come."""
        self._made: dict[int, Encoded] = {}
        """The forms of chunks that have been written to these offsets, and are not noted yet."""
        self._notes: deque[Callable[[], None]] = deque()
        """The policy belongs to the thread of the books, which hears these before it is asked again."""
        self._told_codec: str | None = None

    @property
    def decided_bytes(self) -> int:
        return self._policy.used_bytes

    @property
    def encoded_bytes(self) -> int:
        return self._recoder.encoded_bytes

    @property
    def encoding_s(self) -> float:
        return self._recoder.busy_s

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        self._recoder.close()

    async def decide(self, known: Mapping[Key, Extent], reading: Reading | None) -> list[Copy]:
        uses = [ChunkUse(key, extent.nbytes, extent.content_class) for key, extent in known.items()]
        decision = await self._in_books(partial(self._policy.request, time.monotonic(), uses, reading))
        self._tell_codec()
        await self._memory.evict(decision.evicted)
        await self._recode(decision)
        return await self._admit(decision, known)

    def _tell_codec(self) -> None:
        """Say which codec the trials have chosen."""
        order = self._policy.ladders.order
        codec = None if order is None else next(iter(order), "")
        if codec != self._told_codec:
            self._told_codec = codec
            _log.info("memory encodes chunks with %s, by its trials", codec or "no codec")

    async def _recode(self, decision: TierDecision) -> None:
        waits = count()
        for key, encoding in decision.recoded.items():
            if self._is_stopped:
                return
            if not await self._recoded(key, encoding, waits):
                self._memory.residency.evict([key])
                await self.forget([key])

    async def _recoded(self, key: Key, encoding: Encoding, waits: Iterator[int]) -> bool:
        """Encode a chunk further in its place. `waits` counts the waits for readers."""
        codec, reading = encoding.codec, encoding.reading
        if not await self._is_unread(key, waits):
            return False
        place = self._memory.residency.place(key)
        if place is None:
            return False
        offset, before = place
        if before is not None and not (goes_on(before.codec, codec) and reading.is_shape_of(before)):
            return False
        try:
            with self._memory.residency.held(key):
                made = await self._encoded(offset, before, reading, codec)
        except MemoryError:
            return False
        if made is None:
            if before is None:
                self._note(partial(self._policy.readers.note_unencodable, key, reading.shape))
            return False
        encoded, data = made
        if before is None:
            self._note(partial(self._policy.readers.note_error, reading, codec, encoded.worst_error))
        if not await self._is_unread(key, waits) or self._memory.residency.place(key) != place:
            return False
        if not self._memory.residency.recode(key, encoded):
            return False
        self._memory.view[offset : offset + len(data)] = data
        self._note(partial(self._policy.note_made, key, encoded))
        return True

    async def _is_unread(self, key: Key, waits: Iterator[int]) -> bool:
        """Whether nobody reads a chunk, or somebody has just stopped."""
        while self._memory.residency.is_read(key):
            if next(waits) >= RECODE_WAITS:
                return False
            await asyncio.sleep(RECODE_PAUSE_S)
        return True

    async def _encoded(
        self, offset: int, before: Encoded | None, reading: Reading, codec: Codec
    ) -> tuple[Encoded, bytes] | None:
        loop, threads = asyncio.get_running_loop(), self._recoder.threads
        if before is None:
            exact = self._memory.view[offset : offset + reading.exact_bytes]
            return await loop.run_in_executor(threads, self._recoder.encode, exact, reading, codec)
        packed = self._memory.view[offset : offset + before.nbytes]
        return await loop.run_in_executor(threads, self._recoder.encode_further, packed, before, reading, codec)

    async def _admit(self, decision: TierDecision, known: Mapping[Key, Extent]) -> list[Copy]:
        coming: list[Copy] = []
        refused: list[Key] = []
        for start, part in in_parts(list(decision.admitted.items())):
            await let_others_run(start)
            encoded_bytes: dict[Key, int] = {}
            keys: list[Key] = []
            for key, encoding in part:
                if key not in known or self._memory.residency.holds(key):
                    refused.append(key)  # its former form is being read, so it has not left
                    continue
                keys.append(key)
                if encoding is not None:
                    encoded_bytes[key] = encoding.reading.chunk_bytes(encoding.codec)
            come, refuse = self._memory.residency.admit(keys, known, encoded_bytes)
            if refuse and self._slide(max(encoded_bytes.get(key, known[key].nbytes) for key in refuse)):
                more, refuse = self._memory.residency.admit(refuse, known, encoded_bytes)
                come += more
            for extent, offset in come:
                wanted = decision.admitted[key_of(extent)]
                if wanted is not None:
                    self._wanted[offset] = wanted
            coming += come
            refused += refuse
        await self.forget(refused)
        return coming

    def _slide(self, nbytes: int) -> bool:
        """Move chunks together, so that one of `nbytes` finds a span. Whether anything has moved."""
        moves = self._memory.residency.slide(aligned(nbytes), SLIDE_BYTES_MAX)
        for before, after, length in moves:
            self._memory.view[after : after + length] = self._memory.view[before : before + length]
        return bool(moves)

    def drop(self, coming: Sequence[Copy]) -> None:
        for _, offset in coming:
            self._wanted.pop(offset, None)
            self._made.pop(offset, None)

    async def forget(self, keys: Sequence[Key]) -> None:
        if keys:
            await self._in_books(partial(self._policy.remove, list(keys)))

    async def _in_books(self, call: Callable[[], _T]) -> _T:
        def called() -> _T:
            while self._notes:
                self._notes.popleft()()
            return call()

        return await self._memory.in_books(called)

    def _note(self, call: Callable[[], None]) -> None:
        """Have the policy told before it is asked again."""
        self._notes.append(call)

    def read(self, extent: Extent, offset: int, missing: Sequence[Span]) -> bool:
        wanted = self._wanted.get(offset)
        if wanted is None:
            return super().read(extent, offset, missing)
        codec, reading = wanted.codec, wanted.reading
        try:
            exact = memoryview(bytearray(extent.nbytes))
            self._memory.source.read_extent(extent, exact)
            made = self._recoder.encode(exact, reading, codec)
        except (CorruptExtentError, OSError, MemoryError) as error:
            _log.warning("a chunk was not taken into memory: %s", error)
            return False
        if made is None:
            self._note(partial(self._policy.readers.note_unencodable, key_of(extent), reading.shape))
            return False
        encoded, data = made
        self._memory.view[offset : offset + len(data)] = data
        self._made[offset] = encoded
        return True

    def form_of_copy(self, extent: Extent, offset: int) -> Encoded | None:
        wanted, encoded = self._wanted.pop(offset, None), self._made.pop(offset, None)
        if wanted is not None and encoded is not None:
            self._note(partial(self._policy.readers.note_error, wanted.reading, encoded.codec, encoded.worst_error))
            self._note(partial(self._policy.note_made, key_of(extent), encoded))
        return encoded
