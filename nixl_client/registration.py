"""The client's standing with the gateway: one registered agent, its buffers, and a heartbeat that renews it.

Registrations are short so that a client that dies is forgotten soon, with its connection and its memory keys.
"""

from __future__ import annotations

import logging
import threading
import uuid

from descriptors.errors import ErrorCode, ObjectCacheError
from descriptors.messages import AgentRenewal, Region, registration_body, renewal_body
from nixl_client.buffers import Buffer
from nixl_client.http import SignedHttp
from nixl_client.links import Link

LIFETIME_S = 60.0
AGENTS_PATH = "/_objectcache/agents"
_log = logging.getLogger(__name__)
GONE = frozenset({ErrorCode.NO_SUCH_AGENT, ErrorCode.EXPIRED_TOKEN})


class AgentSession:
    """Keeps the gateway's view of our agent in step with the memory we offered. Safe from any thread."""

    def __init__(self, http: SignedHttp, link: Link, lifetime_s: float = LIFETIME_S) -> None:
        self._http = http
        self._link = link
        self._lifetime_s = lifetime_s
        self._lock = threading.Lock()
        self._regions: dict[str, Buffer] = {}
        self._agent_id: str | None = None
        self._closing = threading.Event()
        self._heartbeat = threading.Thread(target=self._keep_renewing, name="objectcache-heartbeat", daemon=True)
        self._heartbeat.start()

    def region_of(self, buffer: Buffer) -> str:
        """The region id of a buffer, offering it first where needed. Raises ObjectCacheError, or as the link."""
        with self._lock:
            for region_id, known in self._regions.items():
                if known.memory == buffer.memory:
                    return region_id
            region_id = uuid.uuid4().hex
            self._link.offer(region_id, buffer)
            self._regions[region_id] = buffer
            try:
                self._announce()
            except BaseException:
                del self._regions[region_id]
                self._link.withdraw(region_id)
                raise
            return region_id

    def release(self, buffer: Buffer) -> None:
        """Take a buffer back: after this the server cannot write into it."""
        with self._lock:
            found = [region_id for region_id, known in self._regions.items() if known.memory == buffer.memory]
            for region_id in found:
                known = self._regions.pop(region_id)
                try:
                    if self._regions and self._agent_id is not None:
                        self._announce()
                    else:
                        self._withdraw()
                except BaseException:  # not released: the server may still write into it
                    self._regions[region_id] = known
                    raise
                self._link.withdraw(region_id)

    def agent_id(self) -> str:
        """The id descriptors name; registers anew where the gateway has forgotten us."""
        with self._lock:
            if self._agent_id is None:
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
        self._closing.set()
        self._heartbeat.join()
        with self._lock:
            regions, self._regions = self._regions, {}
            try:
                self._withdraw()
            finally:
                for region_id in regions:
                    self._link.withdraw(region_id)

    def _announce(self) -> None:
        """Register, or renew with the regions as they are now."""
        regions = [
            Region(region_id, buffer.memory.address, buffer.memory.nbytes, buffer.memory.device)
            for region_id, buffer in self._regions.items()
        ]
        if self._agent_id is not None:
            self._renew(self._link.renewal(regions, self._lifetime_s))
        if self._agent_id is None:
            body = registration_body(self._link.registration(regions, self._lifetime_s))
            answer = self._link.greeted_by(lambda: self._http.request("POST", AGENTS_PATH, body=body))
            self._agent_id = answer.json()["agent_id"]

    def _renew(self, renewal: AgentRenewal) -> None:
        try:
            self._http.request("POST", f"{AGENTS_PATH}/{self._agent_id}", body=renewal_body(renewal))
        except ObjectCacheError as error:
            if error.code not in GONE:
                raise
            self._agent_id = None

    def _keep_renewing(self) -> None:
        while not self._closing.wait(self._lifetime_s / 3):
            with self._lock:
                if self._agent_id is None:
                    continue
                try:
                    self._renew(AgentRenewal(self._lifetime_s))
                except ObjectCacheError as error:
                    _log.warning("renewing the agent failed: %s", error)

    def _withdraw(self) -> None:
        """Drop the registration; answered when nothing is in flight."""
        if self._agent_id is None:
            return
        try:
            self._http.request("DELETE", f"{AGENTS_PATH}/{self._agent_id}")
        except ObjectCacheError as error:
            if error.code not in GONE:
                raise
        self._agent_id = None
        self._link.unregistered()
