"""Writing payload memory into an aiohttp answer without copying it, and never letting go of it too early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

from aiohttp import web

from descriptors.storage_api import DeliveryStart
from descriptors.units import KIB

DRAIN_BYTES = 64 * KIB


class ResponseSink:
    """A BodySink over one HTTP request. The transport's write buffer is set to zero: a write returns when the kernel
    has every byte, so the memory is free again.
    """

    def __init__(self, http: web.BaseRequest, headers: Callable[[DeliveryStart], Mapping[str, str]]) -> None:
        self._http = http
        self._headers = headers
        self.response: web.StreamResponse | None = None

    async def begin(self, start: DeliveryStart) -> None:
        transport = self._http.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        cast(asyncio.WriteTransport, transport).set_write_buffer_limits(high=0)
        self.response = web.StreamResponse(headers=self._headers(start))
        self.response.content_type = "application/octet-stream"
        self.response.content_length = start.payload_bytes
        await self.response.prepare(self._http)

    async def write(self, view: memoryview) -> None:
        if self.response is None:
            raise ConnectionResetError("write before begin")
        # aiohttp waits for the transport only past 64 KiB; anything smaller is copied instead
        await self.response.write(view if len(view) > DRAIN_BYTES else bytes(view))

    def abort(self) -> None:
        transport = self._http.transport
        if transport is not None:
            transport.abort()
