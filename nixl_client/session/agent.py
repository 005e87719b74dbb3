"""The client's standing with the server: one registered agent, its regions, and a heartbeat that renews it.

Registrations are short so that a client that dies is forgotten soon, with its connection and its memory keys.

The clients of one process that use a transport with the same account and the same times share one agent: one NIXL agent
or one shm connection, one heartbeat. They also share waits and losses: while one of them registers or releases memory,
the others wait for that request, and a server that forgets the agent forgets it for all of them.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from descriptors.headers import AGENTS_PATH, TRANSPORTS_PATH, WRITERS_HEADER
from descriptors.messages import AgentRegistration, AgentRenewal, Region, registration_body, renewal_body
from nixl_client.session.retries import if_refused
from nixl_client.session.shared import Shared
from nixl_client.session.signed_http import Account, SignedAnswer, SignedHttp, understood
from nixl_client.transports.buffers import Buffer
from nixl_client.transports.receiver import Receiver
from nixl_client.transports.shm import SINGLE, ShmReceiver, ShmUnavailableError
from nixl_client.transports.transport import Transport
from nixl_client.transports.ucx import UcxReceiver
from objectcache.adapters.interfaces import UnknownInterfaceError
from objectcache.adapters.nixl_agent import NixlFailure, is_available
from objectcache.adapters.renewals import RENEWALS, Renewals

LIFETIME_S = 60.0
GONE = frozenset({ErrorCode.NO_SUCH_AGENT, ErrorCode.EXPIRED_TOKEN})
"""The server knows the agent no more: it restarted, or this process was suspended."""
_log = logging.getLogger(__name__)


class ClientAgent:
    """One client's use of the agent. `http` carries the client's requests, and is the client's name among the users of
    a region. Safe from any thread. Methods raise RuntimeError once the client is closed, and in a process forked from
    this one, which needs a client of its own; there `close` does nothing.
    """

    def __init__(
        self, transport: Transport, http: SignedHttp, lifetime_s: float, downlink_bytes_per_s: float | None = None
    ) -> None:
        """Raises ImportError or NixlFailure where ucx cannot run."""
        self._http = http
        self._key = _AgentKey(transport, http.account, http.timeout_s, lifetime_s, downlink_bytes_per_s)
        self._shared = _agents.take(
            self._key, lambda: _SharedAgent(transport, http.copy(), lifetime_s, downlink_bytes_per_s)
        )
        self._is_closed = False

    @property
    def receiver(self) -> Receiver:
        """The receiver of the server's notices."""
        return self._shared.receiver

    def region_of(self, buffer: Buffer) -> str:
        """The region id of a buffer, registering it first where needed. Raises ObjectCacheError, or what the receiver's
        `offer` raises.
        """
        self._check_open()
        return self._shared.region_of(self._http, buffer)

    def release(self, buffer: Buffer) -> None:
        """Take a buffer back: after this the server cannot write into it, unless another client of this process has
        registered it too. Raises ObjectCacheError when the server could not be asked.
        """
        self._shared.release(self._http, [buffer])

    def agent_id(self) -> str:
        """The id that descriptors name; registers anew where the server has forgotten us."""
        self._check_open()
        return self._shared.agent_id(self._http)

    def writers_header(self) -> dict[str, str] | None:
        """The header that names the members of a cluster which must answer before memory is ours again."""
        return self._shared.writers_header()

    def mark_gone(self, agent_id: str) -> None:
        """The server has answered that it knows no agent of this id: the next use registers anew."""
        self._shared.mark_gone(agent_id)

    def close(self) -> None:
        """Let go of this client's buffers, which waits for writes in flight, and with the last client of the agent
        itself.
        """
        is_closed, self._is_closed = self._is_closed, True
        if is_closed:
            return
        if _agents.give_back(self._key, self._shared):
            self._shared.close(self._http)
        else:
            self._shared.leave(self._http)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the client is closed")


@dataclass(frozen=True, slots=True)
class _AgentKey:
    transport: Transport
    account: Account
    timeout_s: float
    lifetime_s: float
    downlink_bytes_per_s: float | None


@dataclass(slots=True)
class _Registered:
    """A region's memory, and the clients that use it."""

    buffer: Buffer
    users: set[SignedHttp] = field(default_factory=set)


class _SharedAgent:
    """Keeps the server's view of the agent in step with the memory that was offered. `http` carries what no client asks
    for: heartbeats, and the question where the shm socket is.
    """

    def __init__(
        self, transport: Transport, http: SignedHttp, lifetime_s: float, downlink_bytes_per_s: float | None = None
    ) -> None:
        self._http = http
        try:
            self.receiver = _make_receiver(transport, http)
        except BaseException:
            http.close()
            raise
        self._lifetime_s = lifetime_s
        self._downlink_bytes_per_s = downlink_bytes_per_s
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._regions: dict[str, _Registered] = {}
        self._agent_id: str | None = None
        self._forgotten_id: str | None = None
        self._writers: set[str] = set()
        self._renewals = Renewals("the client's agent", lifetime_s, self._beat)
        self._renewals.start()

    def region_of(self, http: SignedHttp, buffer: Buffer) -> str:
        self._check_process()
        with self._lock:
            for region_id, known in self._regions.items():
                if known.buffer.memory == buffer.memory:
                    known.users.add(http)
                    return region_id
            region_id = uuid.uuid4().hex
            self.receiver.offer(region_id, buffer)
            self._regions[region_id] = _Registered(buffer, {http})
            try:
                self._announce(http)
            except BaseException:
                del self._regions[region_id]
                self.receiver.withdraw(region_id)
                raise
            return region_id

    def release(self, http: SignedHttp, buffers: list[Buffer]) -> None:
        self._check_process()
        with self._lock:
            memories = [buffer.memory for buffer in buffers]
            self._release(http, [key for key, known in self._regions.items() if known.buffer.memory in memories])

    def leave(self, http: SignedHttp) -> None:
        if self._process_id != os.getpid():
            return
        with self._lock:
            self._release(http, [region_id for region_id, known in self._regions.items() if http in known.users])

    def agent_id(self, http: SignedHttp) -> str:
        self._check_process()
        with self._lock:
            if self._agent_id is None:
                self._announce(http)
            if self._agent_id is None:
                raise RuntimeError("no buffer is registered")
            return self._agent_id

    def mark_gone(self, agent_id: str) -> None:
        with self._lock:
            if self._agent_id == agent_id:
                self._forget()

    def close(self, http: SignedHttp) -> None:
        """Tell the server, which answers when nothing is in flight, then let the memory go."""
        self._renewals.stop()
        try:
            with self._lock:
                regions, self._regions = self._regions, {}
                try:
                    self._deregister(http)
                finally:
                    for region_id in regions:
                        self.receiver.withdraw(region_id)
        finally:
            self.receiver.stop()
            self._http.close()

    def _release(self, http: SignedHttp, region_ids: list[str]) -> None:
        """End one client's use of these regions, and the regions that nobody uses any more."""
        ended: dict[str, _Registered] = {}
        for region_id in region_ids:
            if self._regions[region_id].users == {http}:
                ended[region_id] = self._regions.pop(region_id)
            else:
                self._regions[region_id].users.discard(http)
        if not ended:
            return
        try:
            if self._regions and self._agent_id is not None:
                self._announce(http, ends_regions=True)
            else:
                self._deregister(http)
        except BaseException:  # not released: the server may still write into them
            self._regions.update(ended)
            raise
        for region_id in ended:
            self.receiver.withdraw(region_id)

    def _region_list(self) -> list[Region]:
        memories = [(region_id, known.buffer.memory) for region_id, known in self._regions.items()]
        return [Region(region_id, memory.address, memory.nbytes, memory.device) for region_id, memory in memories]

    def _announce(self, http: SignedHttp, *, ends_regions: bool = False) -> None:
        """Register, or renew with the regions as they are now. With `ends_regions`, every server must have heard it.
        Raises ObjectCacheError.
        """
        regions = self._region_list()
        unreached: list[str] = []
        if self._agent_id is not None:
            told = self._renew(http, self.receiver.renewal(regions, self._lifetime_s), http.request)
            unreached = sorted(self._living_writers() - set(told))
        if unreached and ends_regions:  # also where the others know us no more: who hangs may not have forgotten
            problem = f"the storage server {unreached[0]} could not be told, and may still write"
            raise ServerError(ErrorCode.SLOW_DOWN, problem, retryable=True)
        if self._agent_id is None:
            answer = http.retries.run(lambda left_s: self._register(http, regions, left_s), http.timeout_s, if_refused)
            self._note(answer.json())

    def _register(self, http: SignedHttp, regions: list[Region], timeout_s: float) -> SignedAnswer:
        """One try: over shm each has tickets of its own."""
        body = self._registration_body(self.receiver.registration(regions, self._lifetime_s))
        return self.receiver.call_and_connect(lambda: http.request_once("POST", AGENTS_PATH, None, body, timeout_s))

    def _renew(self, http: SignedHttp, renewal: AgentRenewal, ask: Callable[..., SignedAnswer]) -> tuple[str, ...]:
        """Renew, and make the agent known to members of a cluster that do not know it. Returns the ids of members that
        have taken the renewal.
        """
        try:
            answer = ask("POST", f"{AGENTS_PATH}/{self._agent_id}", body=renewal_body(renewal)).json()
        except ObjectCacheError as error:
            if error.code not in GONE:
                raise
            self._forget()
            return ()
        self._note(answer)
        with understood():
            unknown_to = [str(name) for name in answer.get("unknown_to") or ()]
            members = tuple(str(name) for name in answer.get("members", ()))
        if unknown_to:
            self._introduce(http, unknown_to)
        return members

    def _registration_body(self, registration: AgentRegistration) -> bytes:
        return registration_body(replace(registration, downlink_bytes_per_s=self._downlink_bytes_per_s))

    def _forget(self) -> None:
        self._forgotten_id, self._agent_id = self._agent_id, None

    def _note(self, answer: Mapping[str, Any]) -> None:
        """Remember who may write into our memory from now on."""
        with understood():
            agent_id, writers = str(answer["agent_id"]), (*answer.get("members", ()), *answer.get("unreached", ()))
            self._agent_id = agent_id
            self._writers.update(map(str, writers))

    def _living_writers(self) -> set[str]:
        return self._writers - set(self.receiver.ended_ids())

    def writers_header(self) -> dict[str, str] | None:
        """The header that names the members of a cluster which must answer before memory is ours again."""
        living = sorted(self._living_writers())
        return {WRITERS_HEADER: ",".join(living)} if living else None

    def _introduce(self, http: SignedHttp, names: list[str]) -> None:
        """A member that does not take us gets no portions: the others bring them."""
        try:
            introduction = self.receiver.introduction(self._region_list(), self._lifetime_s, names)
            if introduction.shm_tickets or introduction.members:
                body = self._registration_body(replace(introduction, agent_id=self._agent_id))
                answer = self.receiver.call_and_connect(lambda: http.request_once("POST", AGENTS_PATH, body=body))
                self._note(answer.json())
        except (ObjectCacheError, ShmUnavailableError, NixlFailure) as error:
            _log.warning("the agent could not be made known to %s: %s", ", ".join(names), error)

    def _beat(self) -> None:
        with self._lock:
            if self._agent_id is not None:
                ask = partial(self._http.request_once, timeout_s=self._lifetime_s / RENEWALS)
                self._renew(self._http, AgentRenewal(self._lifetime_s), ask)

    def _deregister(self, http: SignedHttp) -> None:
        """Drop the registration; answered when nothing is in flight. A registration that the servers have forgotten is
        dropped, too, while some of them may not have.
        """
        agent_id = self._agent_id or (self._forgotten_id if self._living_writers() else None)
        if agent_id is None:
            self._writers.clear()
            return
        try:
            http.retries.run(lambda left_s: self._end(http, agent_id, left_s), http.timeout_s)
        except ObjectCacheError as error:
            if error.code not in GONE:
                raise
        self._agent_id = None
        self._writers.clear()
        self.receiver.on_forgotten()

    def _end(self, http: SignedHttp, agent_id: str, timeout_s: float) -> None:
        """Each try names the members that live now: one that has just died may be known to have ended by then."""
        headers = self.writers_header()
        http.request_once("DELETE", f"{AGENTS_PATH}/{agent_id}", timeout_s=timeout_s, headers=headers)

    def _check_process(self) -> None:
        if self._process_id != os.getpid():
            raise RuntimeError("a forked process has no thread that hears the server: make a client in it")


def _make_receiver(transport: Transport, http: SignedHttp) -> Receiver:
    """Raises ImportError or NixlFailure where ucx cannot run."""
    if transport is Transport.SHM:
        return ShmReceiver(lambda: _shm_sockets(http))
    if not is_available():
        raise ImportError("NIXL is not installed: pip install nixl-cu12")
    try:
        return UcxReceiver(http.account.address.host, http.account.address.port)
    except (OSError, UnknownInterfaceError) as error:
        raise NixlFailure(f"no interface leads to the server: {error}") from error


def _shm_sockets(http: SignedHttp) -> dict[str, str]:
    """The socket of the storage server, or those of a cluster's members by name; none where shm is off."""
    offered = http.request("GET", TRANSPORTS_PATH).json()
    with understood():
        if offered.get("shm_socket") is not None:
            return {SINGLE: str(offered["shm_socket"])}
        return {str(name): str(address) for name, address in offered.get("shm_sockets", {}).items()}


_agents: Shared[_AgentKey, _SharedAgent] = Shared()
