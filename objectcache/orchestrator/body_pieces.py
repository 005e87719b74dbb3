"""Bodies in pieces: megabytes that are written at once are copied at once, and the event loop waits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

PIECE_BYTES = 1 << 16
"""A piece is as large as what a connection takes before its writers wait."""


def pieces_of(body: bytes) -> Iterator[memoryview]:
    """The body in pieces of PIECE_BYTES, which are no copies."""
    view = memoryview(body)
    return (view[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES))


def body_in_pieces(body: bytes, on_sent: Callable[[], object] = lambda: None) -> bytes | AsyncIterator[bytes]:
    """A request's body for aiohttp, which writes a piece after the other. The request needs a Content-Length. `on_sent`
    is called when the connection has all of it.
    """
    if len(body) <= PIECE_BYTES:
        on_sent()
        return body
    return _one_by_one(body, on_sent)


async def _one_by_one(body: bytes, on_sent: Callable[[], object]) -> AsyncIterator[bytes]:
    for piece in pieces_of(body):
        yield bytes(piece)  # a copy: the last pieces wait for the peer, and must not keep the whole body here
    on_sent()
