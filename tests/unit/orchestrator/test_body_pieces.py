"""Large bodies in pieces."""

from __future__ import annotations

from objectcache.orchestrator.body_pieces import PIECE_BYTES, body_in_pieces


async def test_a_large_body_is_given_in_pieces_that_are_no_copies() -> None:
    body = bytes(range(256)) * (PIECE_BYTES // 100)
    pieces = body_in_pieces(body)
    assert not isinstance(pieces, bytes)
    found = [piece async for piece in pieces]
    assert b"".join(found) == body
    assert all(piece.obj is body and len(piece) <= PIECE_BYTES for piece in found)
    assert body_in_pieces(b"small") == b"small"
