"""The last part of an answer's way, to its client, and the memory of answers that clients have not taken.

A client that does not read must not keep an engine's place: a whole answer is held here, and of a stream so much is
read ahead that the end of most streams comes here at once. All that is held counts in one budget, with a part for each
tenant. Where that is used up, answers go on as fast as their clients read.
"""

from __future__ import annotations

import asyncio
from collections import deque

from aiohttp import web

from descriptors.errors import ObjectCacheError
from objectcache.adapters.document_budget import DocumentBudget
from objectcache.orchestrator.body_pieces import pieces_of

AHEAD_BYTES_MAX = 1 << 20
PIECE_BYTES = 64
"""A piece that waits takes so much more than its bytes."""
"""No more of one stream is held for a client that is slow: about 4,000 tokens, as events."""
STRAIGHT_BYTES = 1 << 15
"""A connection with so few unsent bytes takes a piece at once. It is half of where asyncio has writers wait."""
BLOCKED_S = 20.0
"""An engine that puts a stream out waits so long for its client, all waits together: less than others wait for the
place (`deadline_s`).
"""
TAKEN_BYTES_PER_S = 64 << 10
"""It waits a second more for each so many bytes that the client has taken: a large answer may take long, to a client
that reads.
"""


class SlowReaderError(Exception):
    """A client has read so slowly that its stream is ended."""


class HeldBytes:
    """The bytes of one answer that are held for its client."""

    def __init__(self, budget: DocumentBudget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self.nbytes = 0

    def take(self, nbytes: int) -> bool:
        """Hold so many bytes more; False where all answers, or the tenant's, have no memory for them."""
        try:
            self._budget.take(self._tenant, nbytes)
        except ObjectCacheError:
            return False
        self.nbytes += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """So many of them are held no more."""
        self._budget.give_back(self._tenant, nbytes)
        self.nbytes -= nbytes

    def drop(self) -> None:
        """Nothing is held any more."""
        self.give_back(self.nbytes)


class Relay:
    """Passes the pieces of a stream on. They wait here while the client is slow, up to AHEAD_BYTES_MAX. Call `stop` at
    the end, whatever has happened.
    """

    def __init__(self, response: web.StreamResponse, http: web.BaseRequest, held: HeldBytes) -> None:
        self._response = response
        self._http = http
        self._held = held
        self._taken_bytes = 0
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._written = asyncio.Event()
        self._blocked_s = 0.0

    async def write(self, piece: bytes) -> None:
        """Pass a piece on, or hold it. Raises SlowReaderError, and what writing raises."""
        self._note_end()
        if self._writing is None and self._unsent_bytes() + len(piece) <= STRAIGHT_BYTES:
            await self._put(piece)
            return
        if self._is_held(piece):
            return
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        patience_s = BLOCKED_S + self._taken_bytes / TAKEN_BYTES_PER_S
        try:
            async with asyncio.timeout(max(0.0, patience_s - self._blocked_s)):
                while self._writing is not None:
                    await self._some_written()
                    if self._is_held(piece):
                        return
                await self._put(piece)  # there is no memory to hold it
        except TimeoutError:
            raise SlowReaderError(f"the client has kept an engine waiting for {patience_s:.0f} s") from None
        finally:
            self._blocked_s += loop.time() - began_s

    async def flush(self) -> None:
        """Wait until the client's connection has all pieces. Raises what writing raises."""
        while self._writing is not None:
            await self._some_written()

    async def stop(self) -> None:
        """Write nothing more of what waits, and give its memory back. A piece is written whole or not at all."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None
        self._held.give_back(self._waiting_bytes)
        self._waiting.clear()
        self._waiting_bytes = 0

    async def _put(self, piece: bytes) -> None:
        await self._response.write(piece)
        self._taken_bytes += len(piece)

    def _unsent_bytes(self) -> int:
        transport = self._http.transport
        return 0 if transport is None else transport.get_write_buffer_size()

    def _is_held(self, piece: bytes) -> bool:
        """Whether there is memory for the piece, which then waits for the client."""
        nbytes = len(piece) + PIECE_BYTES
        if self._waiting_bytes + nbytes > AHEAD_BYTES_MAX or not self._held.take(nbytes):
            return False
        self._waiting.append(piece)
        self._waiting_bytes += nbytes
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_waiting())
        return True

    async def _some_written(self) -> None:
        if self._writing is not None and not self._writing.done():
            self._written.clear()
            await self._written.wait()
        self._note_end()

    def _note_end(self) -> None:
        """Raises what writing has raised."""
        writing = self._writing
        if writing is not None and writing.done():
            self._writing = None
            writing.result()

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                await self._put(self._waiting[0])
                nbytes = len(self._waiting.popleft()) + PIECE_BYTES
                self._waiting_bytes -= nbytes
                self._held.give_back(nbytes)
                self._written.set()
        finally:
            asyncio.get_running_loop().call_soon(self._written.set)  # when this task is done


async def send_whole(http: web.BaseRequest, answer: web.Response) -> web.StreamResponse:
    """Send an answer that is here as a whole, as fast as the client reads."""
    body = answer.body if isinstance(answer.body, bytes) else b""
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=answer.headers)
    response.content_length = len(body)
    await response.prepare(http)
    for piece in pieces_of(b"" if http.method == "HEAD" else body):  # at once the connection would hold it twice
        await response.write(piece)
    await response.write_eof()
    return response
