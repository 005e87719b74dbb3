"""Which way a buffer is filled, and what has to be set up for it."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from adapters.interfaces import UnknownInterfaceError
from adapters.nixl_agent import Memory, NixlFailure, has_infiniband, is_available
from descriptors.errors import ErrorCode, ObjectCacheError
from nixl_client import shared_memory
from nixl_client.buffers import Buffer, as_buffer
from nixl_client.fetch_one_sided import OneSidedFetches
from nixl_client.http import SignedHttp
from nixl_client.links import Link, UcxLink
from nixl_client.registration import AgentSession
from nixl_client.shm_link import NoShmError, ShmLink, ShmUnavailableError
from nixl_client.transport import Transport

UNSUPPORTED = frozenset({ErrorCode.NOT_IMPLEMENTED, ErrorCode.METHOD_NOT_ALLOWED, ErrorCode.INVALID_URI})
"""What a server says that has no such transport, or has never heard of it."""
RETRY_S = 10.0
"""After this a transport is tried again that could not be had just now."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Way:
    """How a buffer is filled: for one-sided transports its region, and where the buffer starts in it."""

    transport: Transport
    fetches: OneSidedFetches | None = None
    region_id: str = ""
    region_offset: int = 0


class Ways:
    """The transports of one client, each set up when it is first needed. Safe from any thread. Buffers are referenced
    until `release` or `close`.
    """

    def __init__(self, http: SignedHttp, wanted: Transport, agent_lifetime_s: float) -> None:
        self._http = http
        self._wanted = wanted
        self._agent_lifetime_s = agent_lifetime_s
        self._lock = threading.Lock()
        self._one_sided: dict[Transport, OneSidedFetches] = {}
        self._unavailable_until_s: dict[Transport, float] = {}
        self._arrays: dict[tuple[Transport, Memory], dict[Memory, Any]] = {}

    def find(self, array: Any) -> Way:
        """The first transport that can fill this buffer, its region registered there. Raises ValueError for a buffer
        that none can, and what the transport asked for raises.
        """
        buffer = as_buffer(array)
        for transport in self._candidates(buffer):
            if transport is Transport.HTTP:
                if buffer.memory.device != "cpu":
                    raise ValueError("the http transport needs a buffer in host memory")
                return Way(Transport.HTTP)
            try:
                return self.over(transport, array)
            except (ImportError, NixlFailure, ShmUnavailableError, ObjectCacheError) as error:
                is_unavailable = not isinstance(error, ObjectCacheError) or error.code in UNSUPPORTED
                if self._wanted is not Transport.AUTO or not is_unavailable:
                    raise
                _log.info("%s is not to be had here: %s", transport.value, error)
                is_passing = isinstance(error, ShmUnavailableError) and not isinstance(error, NoShmError)
                self._unavailable_until_s[transport] = time.monotonic() + RETRY_S if is_passing else math.inf
        raise ValueError(f"no transport fills this buffer ({self._wanted.value} was asked for)")

    def over(self, transport: Transport, array: Any) -> Way:
        """This one-sided transport, and no other. Raises as `find`."""
        buffer = as_buffer(array)
        shared = shared_memory.find(buffer.memory) if transport is Transport.SHM else None
        if transport is Transport.SHM and shared is None:
            raise ValueError("the shm transport fills buffers of allocate_buffer only")
        fetches = self._fetches_over(transport)
        whole = buffer if shared is None else shared.buffer
        region_id = fetches.session.region_of(whole)
        self._arrays.setdefault((transport, whole.memory), {})[buffer.memory] = array
        return Way(transport, fetches, region_id, buffer.memory.address - whole.memory.address)

    def release(self, array: Any) -> None:
        """On return no server can write into the buffer, unless it is part of an allocation other parts of which are
        still in use: those are known to the server as a whole.
        """
        buffer = as_buffer(array)
        for transport, fetches in self._one_sided.items():
            shared = shared_memory.find(buffer.memory) if transport is Transport.SHM else None
            whole = shared.buffer if shared is not None else buffer
            users = self._arrays.get((transport, whole.memory), {})
            if set(users) <= {buffer.memory}:
                fetches.session.release(whole)
                self._arrays.pop((transport, whole.memory), None)
            else:
                users.pop(buffer.memory, None)

    def close(self) -> None:
        """Deregister everything, which waits for writes in flight."""
        try:
            with ExitStack() as closing:
                for fetches in self._one_sided.values():
                    closing.callback(fetches.close)
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
                link = self._link(transport)
                session = AgentSession(self._http, link, self._agent_lifetime_s)
                fetches = OneSidedFetches(self._http, link, session)
                self._one_sided[transport] = fetches
            return self._one_sided[transport]

    def _link(self, transport: Transport) -> Link:
        if transport is Transport.SHM:
            return ShmLink(self._shm_socket)
        if not is_available():
            raise ImportError("NIXL is not installed: pip install 'objectcache[ucx]'")
        try:
            return UcxLink(*self._http.address)
        except (OSError, UnknownInterfaceError) as error:
            raise NixlFailure(f"no interface leads to the server: {error}") from error

    def _shm_socket(self) -> str | None:
        address = self._http.request("GET", "/_objectcache/transports").json().get("shm_socket")
        return None if address is None else str(address)
