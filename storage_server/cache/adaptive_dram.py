"""The DRAM tier that compresses: what its policy decides is carried out behind deliveries. A chunk may lie
there encoded; readers that take only exact chunks get it from its home then.

A chunk that is encoded in place is read by nobody at that moment: its new bytes are written to the beginning of its
span in one turn of the event loop, and the rest of the span is freed. A chunk that is to come encoded is read, encoded,
and written to a span of the right size.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from objectcache.adapters.memory_area import Area, PrivateArea
from objectcache.adapters.threads import in_parts, let_others_run
from objectcache.kv_codecs.layer import Codec, goes_on
from storage_server.cache.dram import DramTier
from storage_server.cache.policies.choice import Eviction
from storage_server.cache.policies.memory_policy import Encoding, MemoryPolicy, TierDecision
from storage_server.cache.policies.reader_forms import ChunkUse
from storage_server.cache.policies.utility import UtilitySettings
from storage_server.cache.recoding import Recoder
from storage_server.cache.rules.residency import Key, key_of
from storage_server.planning.extent import ALIGNMENT_BYTES, CorruptExtentError, Extent, aligned
from storage_server.planning.forms import Encoded, Reading
from storage_server.planning.source import ChunkSource

RECODE_ATTEMPTS, RECODE_PAUSE_S = 10, 0.02
"""A chunk that somebody reads is tried again; then it leaves, and comes back at its next use."""
SLIDE_BYTES_MAX = 32 << 20
"""Moved in one turn of the event loop: some milliseconds."""
_log = logging.getLogger(__name__)


class AdaptiveTier(DramTier):
    """`nbytes` of memory for chunks of `source`, in the forms that are worth most; `eviction` says in which order they
    have their turns. It takes no landings: a chunk may come in another form than it is read in.
    """

    def __init__(
        self,
        nbytes: int,
        source: ChunkSource,
        settings: UtilitySettings,
        make_area: Callable[[int], Area] = PrivateArea,
        eviction: Eviction = Eviction.REUSE_VALUE,
    ) -> None:
        super().__init__(nbytes, source, make_area)
        self._forms_policy = MemoryPolicy(self.nbytes, settings, ALIGNMENT_BYTES, eviction)
        self.recoder = Recoder()
        self._wanted: dict[int, Encoding] = {}
        """How chunks are to come encoded, by the offsets of their spans, until they have come."""
        self._made: dict[int, Encoded] = {}
        """The forms of chunks that have been written to these offsets, and are not noted yet."""

    @property
    def encoded_bytes(self) -> int:
        return self.recoder.encoded_bytes

    @property
    def encoding_s(self) -> float:
        return self.recoder.busy_s

    @property
    def decided_bytes(self) -> int:
        """The bytes of all chunks that are to be in memory."""
        return self._forms_policy.used_bytes

    async def close(self) -> None:
        """As in DramTier."""
        await super().close()
        self.recoder.close()

    async def _decided(self, extents: Sequence[Extent], reading: Reading | None) -> list[tuple[Extent, int]]:
        known = await self._whole(extents)
        uses = [ChunkUse(key, extent.nbytes, extent.content_class) for key, extent in known.items()]
        decision = await self._in_books(partial(self._forms_policy.request, time.monotonic(), uses, reading))
        await self._evict(decision)
        await self._recode(decision)
        return await self._admit(decision, known)

    async def _evict(self, decision: TierDecision) -> None:
        for start, keys in in_parts(decision.evicted):
            await let_others_run(start)
            self.residency.evict(keys)

    async def _recode(self, decision: TierDecision) -> None:
        for key, encoding in decision.recoded.items():
            if self._closed:
                return
            if not await self._recoded(key, encoding):
                self.residency.evict([key])
                await self._forgotten([key])

    async def _recoded(self, key: Key, encoding: Encoding) -> bool:
        """Encode a chunk further in its place."""
        codec, reading = encoding.codec, encoding.reading
        place = self.residency.place(key)
        if place is None:
            return False
        offset, before = place
        if before is not None and not (goes_on(before.codec, codec) and reading.is_shape_of(before)):
            return False
        self.residency.hold(key)
        try:
            made = await self._encoded(offset, before, reading, codec)
        except MemoryError:
            return False
        finally:
            self.residency.release(key)
        if made is None:
            if before is None:
                self._forms_policy.note_unencodable(key, reading.shape)
            return False
        encoded, data = made
        if before is None:
            self._forms_policy.note_error(reading, codec, encoded.worst_error)
        for _ in range(RECODE_ATTEMPTS):
            if self.residency.place(key) != place:
                return False
            if self.residency.recode(key, encoded):
                self._view[offset : offset + len(data)] = data
                self._forms_policy.note_made(key, encoded)
                return True
            await asyncio.sleep(RECODE_PAUSE_S)
        return False

    async def _encoded(
        self, offset: int, before: Encoded | None, reading: Reading, codec: Codec
    ) -> tuple[Encoded, bytes] | None:
        loop, threads = asyncio.get_running_loop(), self.recoder.threads
        if before is None:
            exact = self._view[offset : offset + reading.exact_bytes]
            return await loop.run_in_executor(threads, self.recoder.encode, exact, reading, codec)
        packed = self._view[offset : offset + before.nbytes]
        return await loop.run_in_executor(threads, self.recoder.encode_further, packed, before, reading, codec)

    async def _admit(self, decision: TierDecision, known: dict[Key, Extent]) -> list[tuple[Extent, int]]:
        coming: list[tuple[Extent, int]] = []
        refused: list[Key] = []
        for start, part in in_parts(list(decision.admitted.items())):
            await let_others_run(start)
            encoded_bytes: dict[Key, int] = {}
            keys: list[Key] = []
            for key, encoding in part:
                if key not in known or self.residency.holds(key):
                    refused.append(key)  # its former form is being read, so it has not left
                    continue
                keys.append(key)
                if encoding is not None:
                    encoded_bytes[key] = encoding.reading.chunk_bytes(encoding.codec)
            come, refuse = self.residency.admit(keys, known, encoded_bytes)
            if refuse and self._slide(max(encoded_bytes.get(key, known[key].nbytes) for key in refuse)):
                more, refuse = self.residency.admit(refuse, known, encoded_bytes)
                come += more
            for extent, offset in come:
                wanted = decision.admitted[key_of(extent)]
                if wanted is not None:
                    self._wanted[offset] = wanted
            coming += come
            refused += refuse
        await self._forgotten(refused)
        return coming

    def _slide(self, nbytes: int) -> bool:
        """Move chunks together, so that one of `nbytes` finds a span. Whether anything has moved."""
        moves = self.residency.slide(aligned(nbytes), SLIDE_BYTES_MAX)
        for before, after, length in moves:
            self._view[after : after + length] = self._view[before : before + length]
        return bool(moves)

    async def _dropped(self, coming: Sequence[tuple[Extent, int]]) -> None:
        for _, offset in coming:
            self._wanted.pop(offset, None)
            self._made.pop(offset, None)
        await super()._dropped(coming)

    async def _forgotten(self, keys: Sequence[Key]) -> None:
        if keys:
            await self._in_books(partial(self._forms_policy.remove, list(keys)))

    def _read(self, extent: Extent, offset: int, missing: Sequence[tuple[int, int]]) -> bool:
        wanted = self._wanted.get(offset)
        if wanted is None:
            return super()._read(extent, offset, missing)
        codec, reading = wanted.codec, wanted.reading
        try:
            exact = memoryview(bytearray(extent.nbytes))
            self._source.read_extent(extent, exact)
            made = self.recoder.encode(exact, reading, codec)
        except (CorruptExtentError, OSError, MemoryError) as error:
            _log.warning("a chunk was not taken into memory: %s", error)
            return False
        if made is None:
            self._forms_policy.note_unencodable(key_of(extent), reading.shape)
            return False
        encoded, data = made
        self._view[offset : offset + len(data)] = data
        self._made[offset] = encoded
        return True

    def _form_of_copy(self, extent: Extent, offset: int) -> Encoded | None:
        wanted, encoded = self._wanted.pop(offset, None), self._made.pop(offset, None)
        if wanted is not None and encoded is not None:
            self._forms_policy.note_error(wanted.reading, encoded.codec, encoded.worst_error)
            self._forms_policy.note_made(key_of(extent), encoded)
        return encoded
