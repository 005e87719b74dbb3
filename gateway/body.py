"""A request's body, read from the socket with a time limit, decoded, and handed on piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import BodyDigests
from descriptors.storage_api import Piece
from descriptors.tracing import Phase
from descriptors.units import KIB
from gateway.s3.aws_chunked import ChunkedDecoder, SignatureChain
from gateway.s3.upload import BodyPlan, decode_checksum
from objectcache.adapters.leave_to_send import give_leave, is_held_back
from objectcache.adapters.phases import Phases

SMALL_PIECE_BYTES = 4 * KIB
JOINED_PIECE_BYTES = 64 * KIB
PIECES_A_TURN = 64


class RequestBody:
    """Implements descriptors.storage_api.Body. `chain` verifies the chunks where they are signed. The time spent
    waiting for the client's bytes is added to `phases`.
    """

    def __init__(
        self,
        http: web.BaseRequest,
        plan: BodyPlan,
        chain: SignatureChain | None,
        idle_timeout_s: float,
        phases: Phases,
    ) -> None:
        self._http = http
        self._plan = plan
        self._chain = chain
        self._idle_timeout_s = idle_timeout_s
        self._phases = phases
        self._digests: BodyDigests | None = None

    @property
    def has_sha256(self) -> bool:
        """Whether the whole payload was signed, so that its SHA-256 is known."""
        return self._plan.digests.sha256 is not None

    @property
    def is_held_back(self) -> bool:
        """Whether the client waits for leave to send ("100 Continue")."""
        return is_held_back(self._http)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._decoded() if self._plan.form.is_chunked else self._plain()

    def digests(self) -> BodyDigests:
        if self._digests is None:
            raise RuntimeError("the body has not been read to its end")
        return self._digests

    async def _plain(self) -> AsyncIterator[Piece]:
        nbytes, received = self._plan.nbytes, 0
        async for piece in arriving(self._http, self._idle_timeout_s, self._phases):
            received += len(piece)
            if nbytes is not None and received > nbytes:
                raise _wrong_length(f"has more than the {nbytes} bytes announced")
            yield piece
        if nbytes is not None and received != nbytes:
            raise _wrong_length(f"has {received} of the {nbytes} bytes announced")
        self._digests = self._plan.digests

    async def _decoded(self) -> AsyncIterator[Piece]:
        """The decoded pieces. Those of tiny chunks are joined, and other requests get their turn
        between many chunks.
        """
        decoder = ChunkedDecoder(self._plan.nbytes or 0, self._chain, self._plan.trailer_names)
        joined, piece_count = bytearray(), 0
        async for data in arriving(self._http, self._idle_timeout_s, self._phases):
            for piece in decoder.feed(data):
                piece_count += 1
                if piece_count % PIECES_A_TURN == 0:
                    await asyncio.sleep(0)
                if len(piece) >= SMALL_PIECE_BYTES and not joined:
                    yield piece
                    continue
                joined += piece
                if len(joined) >= JOINED_PIECE_BYTES:
                    yield bytes(joined)
                    joined.clear()
            if joined:
                yield bytes(joined)
                joined.clear()
        trailers = decoder.finish()
        digests, algorithm = self._plan.digests, self._plan.trailer
        if algorithm is not None:
            digests = replace(digests, checksum=decode_checksum(algorithm, trailers[algorithm.header]))
        self._digests = digests


async def arriving(http: web.BaseRequest, idle_timeout_s: float, phases: Phases) -> AsyncIterator[bytes]:
    """The bytes of a body as they arrive. A client that waits for `100 Continue` gets it here: all earlier checks have
    passed.

    Raises CallerError: IncompleteBody, RequestTimeout.
    """
    await give_leave(http)
    while True:
        try:
            with phases.during(Phase.TRANSFER):
                async with asyncio.timeout(idle_timeout_s):
                    piece = await http.content.readany()
        except (web.RequestPayloadError, ConnectionError) as error:
            raise _wrong_length("ended early") from error
        except TimeoutError:
            raise CallerError(
                ErrorCode.REQUEST_TIMEOUT,
                f"no byte of the body came for {idle_timeout_s:g} s; the connection is closed",
                field="body",
            ) from None
        if not piece:
            return
        yield piece


def _wrong_length(problem: str) -> CallerError:
    return CallerError(ErrorCode.INCOMPLETE_BODY, f"the body {problem}", field="body")
