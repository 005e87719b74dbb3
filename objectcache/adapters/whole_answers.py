"""Whole answers of other servers, bounded in bytes, because a server may answer anything."""

from __future__ import annotations

from typing import Final

import aiohttp

UNENCODED: Final = {"Accept-Encoding": "identity"}
"""The header of requests in sessions with `auto_decompress=False`. A compressed answer is then an answer that makes no
sense, and does not become a thousand times as large here.
"""


class LongAnswerError(aiohttp.ClientError):
    """An answer is longer than it may be."""


async def read_whole(answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """The body of an answer. Raises LongAnswerError for more than `bytes_max`, and what aiohttp raises."""
    if (answer.content_length or 0) > bytes_max:
        raise LongAnswerError(f"an answer of {answer.content_length} bytes; at most {bytes_max} are read")
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > bytes_max:
            raise LongAnswerError(f"an answer of more than {bytes_max} bytes")
    return bytes(body)
