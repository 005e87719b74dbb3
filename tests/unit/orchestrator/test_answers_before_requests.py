"""Answers of engines that do not have their requests yet."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp.base_protocol import BaseProtocol

from objectcache.orchestrator.dispatch import _has_request


def answer() -> aiohttp.StreamReader:
    loop = asyncio.get_running_loop()
    return aiohttp.StreamReader(BaseProtocol(loop), 1 << 16, loop=loop)


async def test_an_answer_waits_until_its_request_is_sent() -> None:
    sent = asyncio.Event()
    waiting = asyncio.create_task(_has_request(sent, answer()))
    await asyncio.sleep(0)
    assert not waiting.done()
    sent.set()
    await waiting


async def test_an_answer_that_is_whole_waits_for_nothing() -> None:
    """An engine refuses a long prompt before it has read all of it."""
    for is_early in (True, False):
        said = answer()
        waiting = None if is_early else asyncio.create_task(_has_request(asyncio.Event(), said))
        await asyncio.sleep(0)
        said.feed_eof()
        await (waiting or _has_request(asyncio.Event(), said))


async def test_an_answer_that_breaks_off_waits_for_nothing() -> None:
    """Its reader is told of the error."""
    for is_early in (True, False):
        said = answer()
        waiting = None if is_early else asyncio.create_task(_has_request(asyncio.Event(), said))
        await asyncio.sleep(0)
        said.set_exception(aiohttp.ClientPayloadError("cut"))
        await (waiting or _has_request(asyncio.Event(), said))
