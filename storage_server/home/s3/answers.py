"""Answers of a service that are read whole: each is bounded in bytes and in time, whatever drips."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp

from storage_server.home.fetch.bulk_reads import ERROR_BYTES_MAX
from storage_server.home.rules.refusals import unreachable
from storage_server.home.s3.sent_body import SentBody

DOCUMENT_BYTES_MAX = 8 << 20
"""A page of 1,000 keys of 1 KiB, percent-encoded, has half as many."""
DOCUMENT_S_MAX = 600.0
"""S3 sends white space for minutes while it puts a large object together."""
BROKEN_OFF = (TimeoutError, aiohttp.ClientError, OSError)
"""The errors of a connection that ends, or on which nothing comes."""


@asynccontextmanager
async def head_in_time(head_s: float, body: SentBody | None) -> AsyncIterator[None]:
    """The head of an answer comes in the block, within `head_s` after the request, and after the body where there is
    one. Raises TimeoutError.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(head_s if body is None else None) as limit:
        if body is None:
            yield
            return
        body.on_end = lambda: limit.reschedule(loop.time() + head_s)
        try:
            yield
        finally:
            body.on_end = None


async def document_of(content: aiohttp.StreamReader) -> bytes:
    """The document of a good answer. Raises ServerError(SlowDown) where it breaks off, or is too large."""
    document = bytearray()
    try:
        async with asyncio.timeout(DOCUMENT_S_MAX):
            async for piece in content.iter_any():
                document += piece
                if len(document) > DOCUMENT_BYTES_MAX:
                    raise unreachable(f"a document of more than {DOCUMENT_BYTES_MAX} bytes")
    except BROKEN_OFF as error:
        raise unreachable(str(error) or type(error).__name__) from error
    return bytes(document)


async def error_document_of(content: aiohttp.StreamReader, wait_s: float) -> bytes:
    """The document of an error, or what came of it within `wait_s`: the status says the rest."""
    document = bytearray()
    with suppress(*BROKEN_OFF):
        async with asyncio.timeout(wait_s):
            async for piece in content.iter_any():
                document += piece
                if len(document) >= ERROR_BYTES_MAX:
                    break
    return bytes(document[:ERROR_BYTES_MAX])
