"""Which transport fills a buffer, and what has to be set up for it."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from descriptors.errors import ErrorCode, ObjectCacheError
from nixl_client.fetch.one_sided import OneSidedFetches
from nixl_client.session.agent import ClientAgent
from nixl_client.session.signed_http import SignedHttp
from nixl_client.transports import shared_memory
from nixl_client.transports.buffers import Buffer, as_buffer
from nixl_client.transports.shm import NoShmError, ShmUnavailableError
from nixl_client.transports.transport import Transport
from objectcache.adapters.nixl_agent import NixlFailure, has_infiniband
from objectcache.adapters.nixl_memory import Memory

UNSUPPORTED = frozenset({ErrorCode.NOT_IMPLEMENTED, ErrorCode.METHOD_NOT_ALLOWED, ErrorCode.INVALID_URI})
"""The answers of a server that does not have the transport, or does not know of it."""
RETRY_S = 10.0
"""A transport that was unavailable for a passing reason is tried again after this time."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """How fetches fill one buffer: for one-sided transports its region, and where the buffer starts in it."""

    transport: Transport
    fetches: OneSidedFetches | None = None
    region_id: str = ""
    region_offset: int = 0


class Routes:
    """The transports of one client, each set up when it is first needed. Buffers are referenced until `release` or
    `close`. Safe from any thread.
    """

    def __init__(
        self, http: SignedHttp, wanted: Transport, agent_lifetime_s: float, downlink_bytes_per_s: float | None = None
    ) -> None:
        self._http = http
        self._wanted = wanted
        self._agent_lifetime_s = agent_lifetime_s
        self._downlink_bytes_per_s = downlink_bytes_per_s
        self._lock = threading.Lock()
        self._one_sided: dict[Transport, OneSidedFetches] = {}
        self._unavailable_until_s: dict[Transport, float] = {}
        self._arrays: dict[tuple[Transport, Memory], dict[Memory, Any]] = {}

    def route_to(self, array: Any) -> Route:
        """The first transport that can fill this buffer, which is registered there. Raises ValueError for a buffer that
        no transport can fill. Where the user has chosen the transport, raises what that transport raises.
        """
        buffer = as_buffer(array)
        for transport in self._candidates(buffer):
            if transport is Transport.HTTP:
                if buffer.memory.device != "cpu":
                    raise ValueError("the http transport needs a buffer in host memory")
                return Route(Transport.HTTP)
            try:
                return self.route_over(transport, array)
            except (ImportError, NixlFailure, ShmUnavailableError, ObjectCacheError) as error:
                is_unavailable = not isinstance(error, ObjectCacheError) or error.code in UNSUPPORTED
                if self._wanted is not Transport.AUTO or not is_unavailable:
                    raise
                _log.info("%s cannot be used here: %s", transport.value, error)
                is_passing = isinstance(error, ShmUnavailableError) and not isinstance(error, NoShmError)
                self._unavailable_until_s[transport] = time.monotonic() + RETRY_S if is_passing else math.inf
        raise ValueError(f"no transport fills this buffer ({self._wanted.value} was asked for)")

    def route_over(self, transport: Transport, array: Any) -> Route:
        """The buffer registered with this one-sided transport. Raises as `route_to`."""
        buffer = as_buffer(array)
        shared = shared_memory.find(buffer.memory) if transport is Transport.SHM else None
        if transport is Transport.SHM and shared is None:
            raise ValueError("the shm transport fills buffers of allocate_buffer only")
        fetches = self._fetches_over(transport)
        whole = buffer if shared is None else shared.buffer
        region_id = fetches.agent.region_of(whole)
        self._arrays.setdefault((transport, whole.memory), {})[buffer.memory] = array
        return Route(transport, fetches, region_id, buffer.memory.address - whole.memory.address)

    def release(self, array: Any) -> None:
        """On return no server can write into the buffer, with one exception: an allocation is registered as a whole, so
        that a buffer stays registered while other parts of its allocation are used.
        """
        buffer = as_buffer(array)
        for transport, fetches in self._one_sided.items():
            shared = shared_memory.find(buffer.memory) if transport is Transport.SHM else None
            whole = shared.buffer if shared is not None else buffer
            users = self._arrays.get((transport, whole.memory), {})
            if set(users) <= {buffer.memory}:
                fetches.agent.release(whole)
                self._arrays.pop((transport, whole.memory), None)
            else:
                users.pop(buffer.memory, None)

    def close(self) -> None:
        """Deregister the client's buffers, which waits for writes in flight."""
        try:
            with ExitStack() as closing:
                for fetches in self._one_sided.values():
                    closing.callback(fetches.agent.close)
        finally:
            self._arrays.clear()

    def _candidates(self, buffer: Buffer) -> list[Transport]:
        if self._wanted is not Transport.AUTO:
            return [self._wanted]
        # without RDMA http moves more than ucx over TCP does (README); a device's memory only ucx can fill
        is_ucx_first = has_infiniband() or buffer.memory.device != "cpu"
        order = [Transport.UCX, Transport.HTTP] if is_ucx_first else [Transport.HTTP]
        if shared_memory.find(buffer.memory) is not None:
            order.insert(0, Transport.SHM)
        now_s = time.monotonic()
        return [transport for transport in order if self._unavailable_until_s.get(transport, 0.0) <= now_s]

    def _fetches_over(self, transport: Transport) -> OneSidedFetches:
        with self._lock:
            if transport not in self._one_sided:
                agent = ClientAgent(transport, self._http, self._agent_lifetime_s, self._downlink_bytes_per_s)
                self._one_sided[transport] = OneSidedFetches(self._http, agent)
            return self._one_sided[transport]
