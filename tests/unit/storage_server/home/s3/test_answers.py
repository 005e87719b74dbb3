"""Answers that are read whole end in their time, and have their bounds."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol

from descriptors.errors import ServerError
from storage_server.home.fetch.bulk_reads import ERROR_BYTES_MAX
from storage_server.home.s3 import answers
from storage_server.home.s3.answers import document_of, error_document_of, head_in_time
from storage_server.home.s3.sent_body import SentBody
from tests.support.chunks import BytesBody
from tests.support.waiting import settled

AT_ONCE_S, LONG_S = 0.0, 60.0


def coming() -> aiohttp.StreamReader:
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(asyncio.Transport())
    return aiohttp.StreamReader(protocol, 1 << 20, loop=loop)


async def test_an_error_that_comes_in_two_packets_is_read_whole() -> None:
    """Its code was lost, so that a bucket that is not there looked like a key that is not there."""
    content = coming()
    content.feed_data(b"<Error><Code>NoSuch")
    reading = asyncio.ensure_future(error_document_of(content, LONG_S))
    await settled()
    content.feed_data(b"Bucket</Code></Error>")
    content.feed_eof()
    assert await reading == b"<Error><Code>NoSuchBucket</Code></Error>"


async def test_an_error_without_end_is_what_has_come() -> None:
    content = coming()
    content.feed_data(b"<Error>")
    assert await error_document_of(content, AT_ONCE_S) == b"<Error>"
    content = coming()
    content.feed_data(b"a" * (ERROR_BYTES_MAX + 1))
    assert await error_document_of(content, LONG_S) == b"a" * ERROR_BYTES_MAX
    content = coming()
    content.set_exception(aiohttp.ClientPayloadError("cut off"))
    assert await error_document_of(content, LONG_S) == b""


@pytest.mark.parametrize("bound", ["DOCUMENT_S_MAX", "DOCUMENT_BYTES_MAX"])
async def test_a_document_that_drips_or_has_no_end_is_given_up(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(answers, bound, 0)
    content = coming()
    content.feed_data(b"<a>")
    with pytest.raises(ServerError):
        await document_of(content)


async def never(*_: Any) -> None:
    await asyncio.Event().wait()


async def test_a_head_that_drips_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        async with head_in_time(AT_ONCE_S, None):
            await never()


async def test_the_head_has_its_time_when_the_body_has_gone() -> None:
    """A body takes as long as its sender needs."""
    sent = SentBody(BytesBody(b"abc"), 3, None)
    async with head_in_time(AT_ONCE_S, sent):
        await asyncio.sleep(0)
        assert not sent.is_under_way

    async def answered() -> None:
        async with head_in_time(AT_ONCE_S, sent):
            assert [piece async for piece in sent]
            assert not sent.is_under_way
            await never()

    with pytest.raises(TimeoutError):
        await answered()
    assert sent.on_end is None
