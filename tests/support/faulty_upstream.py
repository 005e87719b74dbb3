"""A proxy before an S3 service that passes everything on until it is told what goes wrong with which request."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL


class Fault(Enum):
    """What goes wrong with an answer."""

    BUSY = "503 SlowDown"
    FAILED = "500 without a document"
    MOVED = "301 PermanentRedirect"
    FULL = "507 of another kind of store"
    MANY_HEADERS = "600 headers"
    ODD_ETAG = "an ETag beyond ASCII"
    RESET = "the connection ends before the answer"
    LOST = "the request is carried out, and the connection ends before the answer"
    TRUNCATED = "the connection ends in the middle of the body"
    SHORT = "the body is shorter, and the head says so"
    CORRUPT = "one bit of the body is another"
    OTHER_RANGE = "the body of another range"
    OTHER_ETAG = "another ETag"
    ENCRYPTED = "an ETag that is no digest of the bytes, because they are encrypted with a key of a key service"
    KEPT_KEYS = "nothing is deleted, and of the keys that begin with `kept` the answer says so"
    HANGING = "no answer before `release`"
    DRIPPING = "the second half of the body comes byte by byte before `release`"
    STALLED = "the second half of the body does not come before `release`"


_KEPT = b"<Error><Key>%b</Key><Code>ObjectLocked</Code><Message>until the audit is over</Message></Error>"
Choose = Callable[[web.Request], Fault | None]


def start_of_range(request: web.Request) -> int | None:
    """The first byte that the request asks for."""
    text = request.headers.get("Range", "")
    return int(text.removeprefix("bytes=").split("-")[0]) if text.startswith("bytes=") and text[6:7] != "-" else None


class FaultyUpstream:
    """Use it as a context, in a thread of its own. `choose` says what goes wrong; `seen` are the requests that came."""

    def __init__(self, url: str) -> None:
        self._target = url
        self.choose: Choose = lambda _: None
        self.hidden_headers: frozenset[str] = frozenset()
        """Headers of answers, in lower case, that this service does not know."""
        self.seen: list[tuple[str, str, str]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FaultyUpstream:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def release(self) -> None:
        """Let the requests that hang go on, and no later one hang."""
        self.choose = lambda _: None
        self._loop.call_soon_threadsafe(self._released.set)

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        self._released = asyncio.Event()
        self._session = aiohttp.ClientSession(auto_decompress=False)
        self._runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1)
        await self._runner.setup()
        bound = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        await web.SockSite(self._runner, bound).start()

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append((request.method, request.path, request.headers.get("Range", "")))
        fault = self.choose(request)  # type: ignore[arg-type]
        body = await request.read()
        if fault is Fault.HANGING:
            await self._released.wait()
        if fault is Fault.BUSY:
            return web.Response(status=503, body=b"<Error><Code>SlowDown</Code><Message>busy</Message></Error>")
        if fault is Fault.FAILED:
            return web.Response(status=500)
        if fault is Fault.MOVED:
            return web.Response(status=301, body=b"<Error><Code>PermanentRedirect</Code></Error>")
        if fault is Fault.FULL:
            return web.Response(status=507, body=b"<Error><Code>XMinioStorageFull</Code></Error>")
        if fault is Fault.RESET:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        if fault is Fault.KEPT_KEYS:
            kept = [key for key in re.findall(rb"<Key>(.*?)</Key>", body) if key.startswith(b"kept")]
            errors = [_KEPT % key for key in kept]
            return web.Response(body=b"<DeleteResult>" + b"".join(errors) + b"</DeleteResult>")
        headers = {name: value for name, value in request.headers.items() if name != "Transfer-Encoding"}
        if fault is Fault.OTHER_RANGE:
            start = start_of_range(request) or 0  # type: ignore[arg-type]
            return await self._shifted(request, headers, start)
        url = URL(self._target + request.raw_path, encoded=True)
        async with self._session.request(
            request.method, url, headers=headers, data=body, allow_redirects=False, skip_auto_headers=("Content-Type",)
        ) as answer:
            return await self._altered(request, answer, fault)

    async def _altered(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, fault: Fault | None
    ) -> web.StreamResponse:
        data = bytearray(await answer.read())
        if fault is Fault.LOST:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        left_out = {"transfer-encoding", "date"} | self.hidden_headers
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in left_out}
        if fault is Fault.CORRUPT and data:
            data[len(data) // 2] ^= 0x10
        if fault is Fault.SHORT:
            del data[len(data) // 2 :]
            headers["Content-Length"] = str(len(data))
        if fault is Fault.ENCRYPTED:
            headers["x-amz-server-side-encryption"] = "aws:kms"
        if fault in (Fault.OTHER_ETAG, Fault.ENCRYPTED):
            headers["ETag"] = f'"{"0" * 32}"'
        if fault is Fault.ODD_ETAG:
            headers["ETag"] = '"é"'
        if fault is Fault.MANY_HEADERS:
            headers |= {f"x-amz-meta-{index}": "v" for index in range(600)}
        response = web.StreamResponse(status=answer.status, headers=headers)
        if request.method == "HEAD":
            response.content_length = int(headers.get("Content-Length", "0"))
        await response.prepare(request)
        if fault is Fault.TRUNCATED:
            await response.write(bytes(data[: len(data) // 2]))
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        if fault is Fault.STALLED:
            await response.write(bytes(data[: len(data) // 2]))
            await self._released.wait()
            del data[: len(data) // 2]
        if fault is Fault.DRIPPING:
            await response.write(bytes(data[: len(data) // 2]))
            del data[: len(data) // 2]
            while data and not self._released.is_set():
                await response.write(bytes(data[:1]))
                del data[:1]
                await asyncio.sleep(0.1)  # a service that brings ten bytes a second
        await response.write(bytes(data))
        return response

    async def _shifted(self, request: web.BaseRequest, headers: dict[str, str], start: int) -> web.StreamResponse:
        length = 1000
        said = {"Content-Range": f"bytes {start + 7}-{start + 6 + length}/{1 << 40}", "ETag": '"x"'}
        return web.Response(status=206, headers=said, body=bytes(length))
