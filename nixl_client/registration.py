"""The client's standing with the gateway: one registered agent, its buffers, and renewal before it expires."""

from __future__ import annotations

import threading
import time
import uuid

from adapters.nixl_agent import Registration
from descriptors.errors import ErrorCode, ObjectCacheError
from descriptors.messages import AgentRegistration, AgentRenewal, Region, registration_body, renewal_body
from nixl_client.buffers import Buffer
from nixl_client.http import SignedHttp
from nixl_client.receiver import Receiver

LIFETIME_S = 3600.0
AGENTS_PATH = "/_objectcache/agents"
GONE = frozenset({ErrorCode.NO_SUCH_AGENT, ErrorCode.EXPIRED_TOKEN})


class AgentSession:
    """Keeps the gateway's view of our agent in step with the memory we registered. Safe from any thread."""

    def __init__(self, http: SignedHttp, receiver: Receiver) -> None:
        self._http = http
        self._receiver = receiver
        self._lock = threading.Lock()
        self._regions: dict[str, tuple[Buffer, Registration]] = {}
        self._agent_id: str | None = None
        self._renew_at = 0.0

    def region_of(self, buffer: Buffer) -> str:
        """The region id of a buffer, registering it first where needed. Raises ObjectCacheError, NixlFailure."""
        with self._lock:
            for region_id, (known, _) in self._regions.items():
                if known.memory == buffer.memory:
                    return region_id
            region_id = uuid.uuid4().hex
            registration = self._receiver.register(buffer.memory)
            self._regions[region_id] = (buffer, registration)
            try:
                self._announce()
            except BaseException:
                del self._regions[region_id]
                self._receiver.deregister(registration)
                raise
            return region_id

    def release(self, buffer: Buffer) -> None:
        """Take a buffer back: after this the server cannot write into it."""
        with self._lock:
            found = [region_id for region_id, (known, _) in self._regions.items() if known.memory == buffer.memory]
            for region_id in found:
                _, registration = self._regions.pop(region_id)
                if self._regions and self._agent_id is not None:
                    self._announce()
                else:
                    self._withdraw()
                self._receiver.deregister(registration)

    def agent_id(self) -> str:
        """The id descriptors name, renewed when half its life is over."""
        with self._lock:
            if self._agent_id is None or time.monotonic() >= self._renew_at:
                self._announce()
            if self._agent_id is None:
                raise RuntimeError("no buffer is registered")
            return self._agent_id

    def forget(self, agent_id: str) -> None:
        """The gateway no longer knows this id; the next use registers anew."""
        with self._lock:
            if self._agent_id == agent_id:
                self._agent_id = None

    def close(self) -> None:
        """Tell the gateway, which answers when nothing is in flight, then let the memory go."""
        with self._lock:
            regions, self._regions = self._regions, {}
            try:
                self._withdraw()
            finally:
                for _, registration in regions.values():
                    self._receiver.deregister(registration)

    def _announce(self) -> None:
        """Register, or renew with the regions as they are now."""
        metadata = self._receiver.metadata()
        regions = tuple(
            Region(region_id, buffer.memory.address, buffer.memory.nbytes, buffer.memory.device)
            for region_id, (buffer, _) in self._regions.items()
        )
        if self._agent_id is not None:
            body = renewal_body(AgentRenewal(LIFETIME_S, metadata, regions))
            try:
                self._http.request("POST", f"{AGENTS_PATH}/{self._agent_id}", body=body)
            except ObjectCacheError as error:
                if error.code not in GONE:
                    raise
                self._agent_id = None
        if self._agent_id is None:
            body = registration_body(AgentRegistration(metadata, regions, LIFETIME_S))
            answer = self._receiver.greeted_by(lambda: self._http.request("POST", AGENTS_PATH, body=body))
            self._agent_id = answer.json()["agent_id"]
        self._renew_at = time.monotonic() + LIFETIME_S / 2

    def _withdraw(self) -> None:
        """Drop the registration; answered when nothing is in flight."""
        agent_id, self._agent_id = self._agent_id, None
        if agent_id is None:
            return
        try:
            self._http.request("DELETE", f"{AGENTS_PATH}/{agent_id}")
        except ObjectCacheError as error:
            if error.code not in GONE:
                raise
