"""The lines of a watch, however they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from objectcache.adapters import etcd
from objectcache.adapters.etcd import LINE_BYTES_MAX, LINES_AT_ONCE, EtcdError


async def lines(pieces: Iterable[bytes]) -> list[bytes]:
    async def iter_any() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    response: Any = SimpleNamespace(content=SimpleNamespace(iter_any=iter_any))
    return [line async for line in etcd._lines(response)]


async def test_lines_come_whole_however_they_are_cut() -> None:
    said = b"first\n\nsecond\n" + b"x" * 1000 + b"\nan end that is no line"
    for step in (1, 2, 6, 7, 2000):
        found = await lines(said[at : at + step] for at in range(0, len(said), step))
        assert found == [b"first", b"second", b"x" * 1000]


async def test_a_byte_more_of_a_long_line_copies_nothing_of_the_line() -> None:
    """Each byte had 7 MB copied twice: 100 bytes a second took 0.6 of a core."""
    long = b"y" * (4 << 20)
    assert await lines([long, *[b"z"] * 100_000, b"\n"]) == [long + b"z" * 100_000]


@pytest.mark.parametrize("line", [b"\n", b"{}\n"])
async def test_short_lines_that_come_at_once_give_the_loop_turns(line: bytes) -> None:
    """A quarter of a megabyte of them was parsed in one pass: a watch stopped the loop for seconds."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    waiting = asyncio.create_task(others())
    assert len(await lines([line * 6400])) == (0 if line == b"\n" else 6400)
    waiting.cancel()
    assert turns >= 6400 // LINES_AT_ONCE - 1


async def test_a_line_without_an_end_is_refused() -> None:
    with pytest.raises(EtcdError, match="a line of more than"):
        await lines([b"y" * LINE_BYTES_MAX, b"y"])
