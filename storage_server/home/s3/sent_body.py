"""A caller's body on its way upstream. The last bytes are held back until the digests have been compared: upstream gets
fewer bytes than were announced of a body that is not what its sender says, and keeps none of it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import BodyDigests, Checksum, ChecksumAlgorithm
from descriptors.storage_api import Body, Piece
from descriptors.units import KIB
from objectcache.adapters.threads import HERE_BYTES_MAX
from storage_server.kernel.rules.body_hashes import BodyHashes

UNSIGNED = "UNSIGNED-PAYLOAD"
UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
CHUNK_BYTES = 64 * KIB
HELD_BYTES_MAX = 64 * KIB
CHECKSUM_CHARACTERS = {
    ChecksumAlgorithm.CRC32: 8,
    ChecksumAlgorithm.CRC32C: 8,
    ChecksumAlgorithm.CRC64NVME: 12,
    ChecksumAlgorithm.SHA1: 28,
    ChecksumAlgorithm.SHA256: 44,
}
"""The length of each checksum in base64."""


class CheckedBody(ABC):
    """A body whose bytes are here, and have been compared with what their sender says of them."""

    has_sha256 = False
    is_held_back = False

    def __init__(self, md5: str, checksum: Checksum | None) -> None:
        self._md5 = md5
        self.checksum = checksum

    @abstractmethod
    def __aiter__(self) -> AsyncIterator[Piece]: ...

    def digests(self) -> BodyDigests:
        """The digests of the bytes as they were received: what goes upstream must be the same."""
        return BodyDigests(md5=self._md5, checksum=None if self.checksum is None else self.checksum.value)


class _HeldBody(CheckedBody):
    def __init__(self, whole: bytes, hashes: BodyHashes) -> None:
        super().__init__(hashes.etag, hashes.checksum)
        self._whole = whole

    async def __aiter__(self) -> AsyncIterator[Piece]:
        yield self._whole


async def checked_if_small(body: Body, nbytes: int, algorithm: ChecksumAlgorithm | None) -> Body:
    """The body, held and compared where it has a checksum and at most HELD_BYTES_MAX. Raises what `SentBody` does."""
    if algorithm is None or nbytes > HELD_BYTES_MAX or isinstance(body, CheckedBody):
        return body
    sent = SentBody(body, nbytes, algorithm, with_trailer=False)
    whole = b"".join([piece async for piece in sent])
    return _HeldBody(whole, sent.hashes)


class SentBody:
    """Iterate over it once. `failure` is the error that ended the body early; `hashes` are those of what was sent.

    The checksum of a body that has been checked goes before it, in a header. Otherwise it is not known before the last
    byte, and follows in a trailer, as S3 clients send it; `with_trailer` False leaves it out, for services that know no
    trailers: then only we have compared it.
    """

    def __init__(
        self, body: Body, nbytes: int, algorithm: ChecksumAlgorithm | None, *, with_trailer: bool = True
    ) -> None:
        self._body = body
        self._nbytes = nbytes
        self._known = body.checksum if isinstance(body, CheckedBody) else None
        self._algorithm = algorithm
        self.has_trailer = with_trailer and algorithm is not None and self._known is None
        self.hashes = BodyHashes(algorithm, sha256=body.has_sha256)
        self.failure: Exception | None = None
        self.is_under_way = False
        self.was_cut = False
        """Whether the connection ended while it was under way."""
        self.on_end: Callable[[], None] | None = None
        """Called when all of it has been handed over."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers that say how the body is sent."""
        if not self.has_trailer:
            known = {} if self._known is None else {self._known.algorithm.header: self._known.value}
            return {"Content-Length": str(self._nbytes), **known}
        assert self._algorithm is not None
        return {
            "Content-Encoding": "aws-chunked",
            "Content-Length": str(chunked_bytes(self._nbytes, self._trailer_bytes)),
            "x-amz-decoded-content-length": str(self._nbytes),
            "x-amz-sdk-checksum-algorithm": self._algorithm.value,
            "x-amz-trailer": self._algorithm.header,
        }

    @property
    def payload_hash(self) -> str:
        """The signature's stand-in for the body's hash."""
        return UNSIGNED_TRAILER if self.has_trailer else UNSIGNED

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The bytes that go over the wire."""
        self.is_under_way = True
        try:
            if not self.has_trailer:
                async for piece in self._checked():
                    yield piece
            else:
                async for chunk in self._chunked():
                    yield chunk
        except Exception as error:
            self.failure = error
            raise
        self.is_under_way = False
        if self.on_end is not None:
            self.on_end()

    @property
    def _trailer_bytes(self) -> int:
        assert self._algorithm is not None
        return len(self._algorithm.header) + 1 + CHECKSUM_CHARACTERS[self._algorithm] + 2

    async def _chunked(self) -> AsyncIterator[bytes]:
        """Chunks of CHUNK_BYTES, so that the length of the whole is known beforehand, and the trailer."""
        left = bytearray()
        async for piece in self._checked():
            left += piece
            while len(left) >= CHUNK_BYTES:
                yield _chunk(bytes(left[:CHUNK_BYTES]))
                del left[:CHUNK_BYTES]
        if left:
            yield _chunk(bytes(left))
        checksum = self.hashes.checksum
        assert checksum is not None
        yield f"0\r\n{checksum.algorithm.header}:{checksum.value}\r\n\r\n".encode()

    async def _checked(self) -> AsyncIterator[bytes]:
        held, nbytes = b"", 0
        async for piece in self._body:
            nbytes += len(piece)
            if nbytes > self._nbytes:
                raise _incomplete(nbytes, self._nbytes)
            await self._add(bytes(piece))
            if held:
                yield held
            held = bytes(piece)
        if nbytes != self._nbytes:
            raise _incomplete(nbytes, self._nbytes)
        self.hashes.check(self._body.digests())
        if held:
            yield held

    async def _add(self, piece: bytes) -> None:
        if len(piece) <= HERE_BYTES_MAX:
            self.hashes.update(piece)
        else:
            await asyncio.to_thread(self.hashes.update, piece)


def chunked_bytes(nbytes: int, trailer_bytes: int) -> int:
    """The length of a chunked body of `nbytes`, with a trailer line of `trailer_bytes`."""
    whole, rest = divmod(nbytes, CHUNK_BYTES)
    chunks = whole * len(_chunk(bytes(CHUNK_BYTES))) + (len(_chunk(bytes(rest))) if rest else 0)
    return chunks + len(b"0\r\n") + trailer_bytes + len(b"\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _incomplete(nbytes: int, wanted: int) -> CallerError:
    problem = f"{wanted} bytes were announced, and {nbytes} came"
    return CallerError(ErrorCode.INCOMPLETE_BODY, problem, field="content-length")
