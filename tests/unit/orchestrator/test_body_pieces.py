"""Large bodies in pieces."""

from __future__ import annotations

import asyncio

from objectcache.orchestrator.body_pieces import PIECE_BYTES, body_in_pieces


async def test_a_large_body_is_given_in_pieces_and_its_end_is_told() -> None:
    """A piece that waits for its peer keeps nothing of the rest."""
    body, sent = bytes(range(256)) * (PIECE_BYTES // 100), asyncio.Event()
    pieces = body_in_pieces(body, sent.set)
    assert not isinstance(pieces, bytes)
    found = []
    async for piece in pieces:
        assert not sent.is_set()
        found.append(piece)
    assert sent.is_set()
    assert b"".join(found) == body
    assert all(isinstance(piece, bytes) and len(piece) <= PIECE_BYTES for piece in found)


def test_a_small_body_is_sent_at_once() -> None:
    sent = asyncio.Event()
    assert body_in_pieces(b"small", sent.set) == b"small"
    assert sent.is_set()
