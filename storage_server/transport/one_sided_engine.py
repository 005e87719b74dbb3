"""The thread that owns the NIXL agent: it posts writes and reads, polls them, sends notices, and knows the peers.

Work arrives through a queue and results leave through callbacks, called in the engine's thread. Over shared memory a
post copies the bytes itself; over TCP or RDMA transfers stay in flight and are polled with a short sleep.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from adapters.nixl_agent import Agent, Memory, NixlFailure, PeerLost, PostedTransfer, Registration, TransferState
from descriptors.notices import GREETING
from descriptors.storage_api import Spans

POLL_INTERVAL_S = 50e-6
_FIRST, _AFTER = 0, 1
"""Notices and peers go before posts: a post may copy megabytes."""
CONNECTION_WORK_S = 1.0
"""How long connections are given to open or close in the background: nothing in UCX moves unless it is polled."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)

OnEnded = Callable[[int, NixlFailure | None], None]
"""(bytes NIXL counted, failure): called once for every write and read, when our side's memory is no longer in use."""


@dataclass(slots=True)
class _InFlight:
    peer: str
    transfer: PostedTransfer
    on_ended: OnEnded


class OneSidedEngine:
    """One per storage server. Start-up raises NixlFailure or ImportError where UCX cannot run."""

    def __init__(self, staging: Memory) -> None:
        self._commands: queue.PriorityQueue[tuple[int, int, Callable[[], None]]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._in_flight: list[_InFlight] = []
        self._lost: set[str] = set()
        self._stopping = False
        self._busy_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="ucx-engine", daemon=True)
        started: Future[None] = Future()
        self._put(_FIRST, lambda: _settle(started, lambda: self._start(staging)))
        self._thread.start()
        atexit.register(self.stop)  # NIXL aborts a process that ends with an agent in a running thread
        try:
            started.result()
        except BaseException:
            self._put(_FIRST, self._stop)
            raise

    def _start(self, staging: Memory) -> None:
        self._agent = Agent(str(uuid.uuid4()))
        self._registrations: list[Registration] = [self._agent.register(staging)]

    def register(self, memory: Memory) -> Future[None]:
        """Register more memory of ours, until the engine stops. NixlFailure when that cannot be done."""
        return self._submit(lambda: self._registrations.append(self._agent.register(memory)))

    def add_peer(self, name: str, metadata: bytes, offered: Sequence[Memory]) -> Future[None]:
        """Load a peer's metadata, check that it is the one named and offers this memory, and open the connection, so
        that the first write does not pay for it. NixlFailure when it is not good for that; the name is then forgotten.
        """

        def add() -> None:
            try:
                if self._agent.add_peer(metadata) != name:
                    raise NixlFailure("the metadata names two agents")
                for memory in offered:
                    self._agent.check_peer_memory(name, memory)
            except NixlFailure:
                self._drop(name)
                raise
            self._lost.discard(name)
            self._agent.notify(name, GREETING)
            self._busy_until_s = time.monotonic() + CONNECTION_WORK_S

        return self._submit(add)

    def remove_peer(self, name: str) -> Future[None]:
        """Disconnect and forget a peer; its transfers in flight fail."""

        def remove() -> None:
            self._lost.discard(name)
            self._drop(name)
            self._busy_until_s = time.monotonic() + CONNECTION_WORK_S

        return self._submit(remove)

    def write(self, peer: str, source: Memory, target: Memory, on_ended: OnEnded) -> None:
        """Post a write; `on_ended` hears how it ended."""
        self._put(_AFTER, lambda: self._post(peer, lambda: self._agent.post_write(peer, source, target), on_ended))

    def write_spans(self, peer: str, spans: Spans, target: Memory, on_ended: OnEnded) -> None:
        """Post a write of registered memory, span after span; `on_ended` hears how it ended."""
        self._put(
            _AFTER,
            lambda: self._post(peer, lambda: self._agent.post_gathered_write(peer, spans, target), on_ended),
        )

    def read(self, peer: str, sources: Sequence[Memory], target: Memory, on_ended: OnEnded) -> None:
        """Post a read of `sources`, one after the other, into `target`; `on_ended` hears how it ended."""
        self._put(_AFTER, lambda: self._post(peer, lambda: self._agent.post_read(peer, sources, target), on_ended))

    def notify(self, peer: str, message: bytes) -> Future[None]:
        """Send a notice."""
        return self._submit(lambda: self._agent.notify(peer, message))

    @property
    def in_flight_count(self) -> int:
        """Transfers posted and not yet ended."""
        return len(self._in_flight)

    def stop(self) -> None:
        """Let go of the agent and end the thread."""
        self._put(_FIRST, self._stop)
        self._thread.join(timeout=10)
        atexit.unregister(self.stop)

    @property
    def _is_connecting(self) -> bool:
        return time.monotonic() < self._busy_until_s

    def _stop(self) -> None:
        self._stopping = True

    def _submit(self, action: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._put(_FIRST, lambda: _settle(future, action))
        return future

    def _put(self, priority: int, command: Callable[[], None]) -> None:
        self._commands.put((priority, next(self._order), command))

    def _run(self) -> None:
        """One command, then a look at what is in flight: queued posts must not delay the notice of a finished layer."""
        while not self._stopping:
            is_idle = not self._run_command()
            if self._in_flight:
                self._poll()
            if is_idle:
                self._progress()
                time.sleep(POLL_INTERVAL_S)
        for flight in self._in_flight:
            flight.transfer.release()
        for registration in getattr(self, "_registrations", []):
            registration.close()
        if hasattr(self, "_agent"):
            del self._agent

    def _progress(self) -> None:
        """Let connections open and close. Notices are for clients; what clients send us is read and dropped."""
        try:
            self._agent.notices()
        except NixlFailure as failure:
            _log.debug("reading notices: %s", failure)

    def _run_command(self) -> bool:
        """Run the next command, waiting for one only when there is nothing to poll; False when there was none."""
        try:
            _, _, command = self._commands.get(block=not self._in_flight and not self._is_connecting)
        except queue.Empty:
            return False
        try:
            command()
        except Exception:  # the thread serves every delivery: one bad command must not end it
            _log.exception("a command of the ucx engine failed")
        return True

    def _post(self, peer: str, post: Callable[[], tuple[PostedTransfer, TransferState]], on_ended: OnEnded) -> None:
        if peer in self._lost:
            _tell(on_ended, 0, PeerLost(f"agent {peer} is gone"))
            return
        try:
            transfer, state = post()
        except NixlFailure as failure:
            self._note_failure(peer, failure)
            _tell(on_ended, 0, failure)
            return
        flight = _InFlight(peer, transfer, on_ended)
        if state is TransferState.DONE:
            self._end(flight, None)
        else:
            self._in_flight.append(flight)

    def _poll(self) -> None:
        still = []
        for flight in self._in_flight:
            try:
                if flight.transfer.poll() is TransferState.IN_FLIGHT:
                    still.append(flight)
                    continue
                failure = None
            except NixlFailure as error:
                failure = error
                self._note_failure(flight.peer, error)
            self._end(flight, failure)
        self._in_flight = still

    def _end(self, flight: _InFlight, failure: NixlFailure | None) -> None:
        counted = 0
        if failure is None:
            try:
                counted = flight.transfer.transferred_bytes()
            except NixlFailure as error:
                failure = error
        flight.transfer.release()
        _tell(flight.on_ended, counted, failure)

    def _note_failure(self, peer: str, failure: NixlFailure) -> None:
        if isinstance(failure, PeerLost) and peer not in self._lost:
            self._lost.add(peer)
            _log.info("agent %s is gone: %s", peer, failure)

    def _drop(self, name: str) -> None:
        try:
            self._agent.remove_peer(name)
        except NixlFailure as failure:
            _log.debug("removing agent %s: %s", name, failure)


def _tell(on_ended: OnEnded, counted: int, failure: NixlFailure | None) -> None:
    try:
        on_ended(counted, failure)
    except RuntimeError:  # the event loop has closed; nobody is left to hear
        _log.debug("a transfer ended after its loop")


def _settle(future: Future[Any], action: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
