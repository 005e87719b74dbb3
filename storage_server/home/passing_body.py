"""Callers' bodies on their way through the cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import BodyDigests
from descriptors.storage_api import Body, Piece
from storage_server.home.rules.least_rate import LeastRate


class PassingBody:
    """A caller's body that passes through. Subclasses see its pieces."""

    def __init__(self, body: Body) -> None:
        self._body = body

    @property
    def has_sha256(self) -> bool:
        return self._body.has_sha256

    @property
    def is_held_back(self) -> bool:
        return self._body.is_held_back

    def digests(self) -> BodyDigests:
        return self._body.digests()


class CountedBody(PassingBody):
    """A body of which one can tell whether anybody has begun to read it."""

    has_begun = False

    def __aiter__(self) -> AsyncIterator[Piece]:
        self.has_begun = True
        return aiter(self._body)


class RatedBody(PassingBody):
    """A body that holds a connection upstream while it comes, and so must not come too slowly. Iterating raises
    CallerError(RequestTimeout) where fewer bytes come than `LeastRate` wants in `window_s`.
    """

    def __init__(self, body: Body, window_s: float) -> None:
        super().__init__(body)
        self._window_s = window_s

    async def __aiter__(self) -> AsyncIterator[Piece]:
        rate = LeastRate(self._window_s)
        asked_s = time.monotonic()
        async for piece in self._body:
            if rate.is_too_slow(time.monotonic() - asked_s, len(piece)):
                raise CallerError(ErrorCode.REQUEST_TIMEOUT, "the body comes too slowly", field="body")
            yield piece
            asked_s = time.monotonic()


class EndedBody(PassingBody):
    """A body whose last piece waits for leave, so that its object is not there before. `has_come` is set when all of it
    has come, and `may_end` gives the leave.
    """

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.has_come = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        last: Piece | None = None
        async for piece in self._body:
            if last is not None:
                yield last
            last = bytes(piece)  # its memory is used for the next one
        self.has_come.set()
        await self.may_end.wait()
        if last is not None:
            yield last
