"""A chunk on its way that has its place in a file."""

from __future__ import annotations

from functools import partial

from descriptors.errors import ObjectCacheError
from descriptors.objects import ObjectInfo
from descriptors.units import MIB
from objectcache.adapters.threads import computed
from storage_server.delivery.gather.coming import Arrival, ComingExtent
from storage_server.home.fetch.receiving import ChunkReceiver, wrong
from storage_server.home.rules.headers import is_md5
from storage_server.home.rules.proof import Proof, proved_bytes, proves
from storage_server.kernel.data.segments import ExtentWriter
from storage_server.planning.block_checksums import BLOCK_BYTES, WORD_BYTES

PROVED_HERE_BYTES_MAX = 64 * MIB
"""The checksums of so many bytes are joined in some milliseconds."""


class PlacedChunk:
    """Proves the bytes that come, and tells them to those that wait. Without a proof the ETag proves the chunk as a
    whole, if it `has_digest` there.
    """

    def __init__(
        self, info: ObjectInfo, proof: Proof | None, receiver: ChunkReceiver, writer: ExtentWriter, *, has_digest: bool
    ) -> None:
        self.info = info
        self.proof = proof
        self.writer = writer
        self._receiver = receiver
        self._has_digest = has_digest
        self._arrival = Arrival(info.nbytes, receiver.landed)
        self._proved_bytes = 0
        self._is_wrong = False

    @property
    def extent(self) -> ComingExtent:
        """All of it, for deliveries that begin before it has come."""
        return ComingExtent.of(self.writer.file.file_id, self.writer.offset, self._arrival)

    def advance(self, words: bytes, arrived_bytes: int) -> None:
        """Tell what has come and is proved. Wrong bytes are not told; they end the fetch when all have come. Of a chunk
        without a proof nothing is told before its end.
        """
        if self.proof is None or self._is_wrong:
            return
        start, end = self._proved_bytes, arrived_bytes // self.proof.unit_bytes * self.proof.unit_bytes
        if not start < end < self.info.nbytes:
            return
        fresh = words[start // BLOCK_BYTES * WORD_BYTES : end // BLOCK_BYTES * WORD_BYTES]
        if not proves(self.proof, fresh, start, end):  # only what is new: a large chunk comes in thousands of steps
            self._is_wrong = True
            return
        self._proved_bytes = end
        if self._arrival.arrived_bytes < end:
            self._arrival.advance(end, words)

    async def prove(self) -> None:
        """Prove all bytes, and tell the last ones. Raises ServerError where they are not those that were put."""
        info = self.info
        words = self._receiver.words(self.writer)
        if self.proof is not None:
            prove = partial(proved_bytes, self.proof, words, info.nbytes)
            if await computed(prove, is_long=info.nbytes > PROVED_HERE_BYTES_MAX) != info.nbytes:
                raise wrong("the bytes are not those that were put")
        elif self._has_digest and is_md5(info.etag) and info.etag != await self._receiver.etag(self.writer):
            raise wrong("the bytes are not those of the ETag")
        self._arrival.advance(info.nbytes, words)

    def fail(self, error: ObjectCacheError) -> None:
        """Tell those that wait that the rest will not come."""
        self._arrival.fail(error)

    def close(self) -> None:
        """Give its place back, if no row names it."""
        self.writer.close()
