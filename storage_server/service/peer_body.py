"""The body of a put that a gateway passes on: the object's bytes, then JSON with the digests they should have."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import BodyDigests
from descriptors.peer_calls import DIGESTS_BYTES_MAX
from descriptors.storage_api import Piece
from descriptors.tracing import Phase
from objectcache.adapters.leave_to_send import give_leave, is_held_back
from objectcache.adapters.phases import Phases

_DIGESTS = TypeAdapter(BodyDigests)


class PeerBody:
    """Implements descriptors.storage_api.Body over a request of `nbytes` object bytes and a trailer. The time spent
    waiting for bytes is added to `phases`.
    """

    def __init__(self, http: web.BaseRequest, nbytes: int, phases: Phases, *, has_sha256: bool) -> None:
        self._http = http
        self._phases = phases
        self._nbytes = nbytes
        self._trailer = bytearray()
        self.has_sha256 = has_sha256

    @property
    def is_held_back(self) -> bool:
        """Whether the gateway waits for leave to send ("100 Continue"), because its client waits for it."""
        return is_held_back(self._http)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        left = self._nbytes
        async for piece in arriving(self._http, self._phases):
            if left:
                yield piece[:left]
            self._trailer += piece[left:]
            left = max(0, left - len(piece))
            if len(self._trailer) > DIGESTS_BYTES_MAX:
                raise CallerError(ErrorCode.INCOMPLETE_BODY, "the body is longer than announced", field="body")
        if left:
            raise CallerError(ErrorCode.INCOMPLETE_BODY, f"the body ended {left} bytes early", field="body")

    def digests(self) -> BodyDigests:
        """The digests in the trailer. Raises CallerError(IncompleteBody) where the trailer is missing or damaged."""
        try:
            return _DIGESTS.validate_json(bytes(self._trailer))
        except ValidationError as error:
            raise CallerError(ErrorCode.INCOMPLETE_BODY, "the body ended without its digests", field="body") from error


async def arriving(http: web.BaseRequest, phases: Phases) -> AsyncIterator[bytes]:
    """The request's bytes as they arrive. A sender that waits for leave to send gets it first. Raises
    CallerError(IncompleteBody) when the connection ends early.
    """
    try:
        await give_leave(http)
        while True:
            with phases.during(Phase.TRANSFER):
                piece = await http.content.readany()
            if not piece:
                return
            yield piece
    except (web.RequestPayloadError, ConnectionError) as error:
        raise CallerError(ErrorCode.INCOMPLETE_BODY, "the body ended early", field="body") from error
