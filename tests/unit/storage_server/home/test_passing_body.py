"""Bodies of callers on their way upstream."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from descriptors.errors import CallerError, ErrorCode
from storage_server.home import passing_body
from storage_server.home.passing_body import EndedBody, RatedBody
from tests.support.chunks import BytesBody
from tests.support.waiting import settled

WINDOW_S = 30.0


async def come(body: RatedBody | EndedBody) -> bytes:
    return b"".join([bytes(piece) async for piece in body])


@pytest.mark.parametrize(("piece_s", "is_refused"), [(50.0, True), (0.01, False)])
async def test_a_body_that_comes_byte_by_byte_is_refused(
    monkeypatch: pytest.MonkeyPatch, piece_s: float, is_refused: bool
) -> None:
    """It would hold a connection upstream for as long as it likes."""
    clock = iter(range(1_000))
    monkeypatch.setattr(passing_body, "time", SimpleNamespace(monotonic=lambda: next(clock) * piece_s))
    coming = asyncio.ensure_future(come(RatedBody(BytesBody(b"abcd", 4), WINDOW_S)))
    if is_refused:
        with pytest.raises(CallerError) as refused:
            await coming
        assert refused.value.code is ErrorCode.REQUEST_TIMEOUT
    else:
        assert await coming == b"abcd"


@pytest.mark.parametrize("data", [b"", b"a", b"abcdef"])
async def test_the_last_piece_waits_for_leave(data: bytes) -> None:
    body, seen = EndedBody(BytesBody(data)), list[bytes]()

    async def read() -> None:
        seen.extend([bytes(piece) async for piece in body])

    reading = asyncio.ensure_future(read())
    await body.has_come.wait()
    await settled()
    assert not reading.done()
    body.may_end.set()
    await reading
    assert b"".join(seen) == data
