"""The ucx process: it owns the NIXL agent, knows the peers, posts and polls writes and reads, and sends notices.

UCX authenticates nobody: anyone who can reach its listener can read and write the memory of the process behind it. So
this process maps no memory but the areas it was given, and has no credentials and no open files of the store; the
server does not believe what it says (`ucx_process`). Over shared memory a post copies the bytes itself. Over TCP or
RDMA the transfers stay in flight and are polled with a short sleep.

Run as a module: `python -m storage_server.delivery.transport.ucx_engine SOCKET [FD:NBYTES:rw|ro ...]`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import select
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from descriptors.notices import GREETING
from objectcache.adapters.child_process import begun
from objectcache.adapters.nixl_agent import Agent, NixlFailure, PeerLost, PostedTransfer, TransferState, leave
from objectcache.adapters.nixl_memory import Memory
from storage_server.delivery.transport.rules.ucx_commands import (
    READY,
    AddPeer,
    Command,
    EndFlight,
    Notify,
    Read,
    RemovePeer,
    Reply,
    WriteGroup,
    WriteSpans,
    decode_command,
    encode_reply,
)
from storage_server.planning.area_span import AreaSpan

POLL_INTERVAL_S = 50e-6
CONNECTION_WORK_S = 1.0
"""The seconds that connections get to open or close in the background, because UCX makes progress only when polled."""
RECEIVE_BYTES = 1 << 20
_FIRST, _AFTER = 0, 1
"""Commands that are carried out before posts, because a post may copy megabytes: notices, and changes of peers."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _InFlight:
    number: int
    peer: str
    transfer: PostedTransfer
    group: WriteGroup | None


@dataclass(slots=True)
class _Flight:
    """The writes of one delivery: how many of each group are under way, and which groups have all been posted."""

    pending: Counter[int] = field(default_factory=Counter)
    whole: set[int] = field(default_factory=set)
    has_failed: bool = False

    def posted(self, group: WriteGroup) -> None:
        self.pending[group.index] += 1
        if group.is_last:
            self.whole.add(group.index)

    def ended(self, group: WriteGroup, *, is_good: bool) -> bool:
        """Count one write as ended. Returns whether it was the group's last, and no write has failed so far."""
        self.pending[group.index] -= 1
        self.has_failed |= not is_good
        if self.pending[group.index]:
            return False
        del self.pending[group.index]
        is_complete = group.index in self.whole and not self.has_failed
        self.whole.discard(group.index)
        return is_complete


class UcxEngine:
    """Carries out the commands that come over `control`, until that ends. `areas` are (address, nbytes) here."""

    def __init__(self, control: socket.socket, areas: Sequence[tuple[int, int]]) -> None:
        self._control = control
        self._areas = areas
        self._received = bytearray()
        self._waiting: list[tuple[int, int, int, Command]] = []
        self._order = itertools.count()
        self._in_flight: list[_InFlight] = []
        self._flights: dict[int, _Flight] = {}
        self._lost: set[str] = set()
        self._busy_until_s = 0.0
        self._agent = Agent(str(uuid.uuid4()))
        self._registrations = [self._agent.register(Memory(*area)) for area in areas]

    def run(self) -> None:
        """Alternate between one command and one poll, so that queued posts do not delay the notice of a
        finished layer.
        """
        self._say(READY)
        while True:
            must_wait = not (self._waiting or self._in_flight or time.monotonic() < self._busy_until_s)
            if select.select([self._control], [], [], None if must_wait else 0)[0] and not self._receive():
                return
            if self._waiting:
                _, _, number, command = heapq.heappop(self._waiting)
                self._carry_out(number, command)
            if self._in_flight:
                self._poll()
            if not self._waiting and not must_wait:
                self._progress()
                time.sleep(POLL_INTERVAL_S)

    def close(self) -> None:
        """Close the agent. Nothing is in flight after this."""
        for flight in self._in_flight:
            flight.transfer.release()
        for registration in self._registrations:
            registration.close()
        del self._agent

    def _receive(self) -> bool:
        """Queue the commands that have arrived; False when the server has closed the connection."""
        data = self._control.recv(RECEIVE_BYTES)
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        for line in lines:
            number, command = decode_command(bytes(line))
            priority = _AFTER if isinstance(command, WriteSpans | Read) else _FIRST
            heapq.heappush(self._waiting, (priority, next(self._order), number, command))
        return bool(data)

    def _carry_out(self, number: int, command: Command) -> None:
        try:
            match command:
                case AddPeer():
                    self._add(command)
                case RemovePeer(name):
                    self._lost.discard(name)
                    self._drop(name)
                    self._stay_busy()
                case Notify(name, message):
                    self._agent.notify(name, message)
                    return
                case WriteSpans():
                    self._write(number, command)
                    return
                case Read(name, sources, span):
                    self._post(number, name, None, lambda: self._agent.post_read(name, sources, self._memory(span)))
                    return
                case EndFlight(flight):
                    self._flights.pop(flight, None)
                    return
        except NixlFailure as failure:
            if not isinstance(command, Notify):
                self._say(_failed(number, failure))
            return
        self._say(Reply(number))

    def _add(self, command: AddPeer) -> None:
        try:
            if self._agent.add_peer(command.metadata) != command.name:
                raise NixlFailure("the metadata names two agents")
            for memory in command.offered:
                self._agent.check_peer_memory(command.name, memory)
        except NixlFailure:
            self._drop(command.name)
            raise
        self._lost.discard(command.name)
        self._agent.notify(command.name, GREETING)
        self._stay_busy()

    def _write(self, number: int, command: WriteSpans) -> None:
        if command.group is not None:
            self._flights.setdefault(command.group.flight, _Flight()).posted(command.group)
        spans = np.array(
            [(self._areas[span.area][0] + span.offset, span.nbytes) for span in command.spans], dtype=np.int64
        )
        self._post(
            number,
            command.name,
            command.group,
            lambda: self._agent.post_gathered_write(command.name, spans, command.targets),
        )

    def _post(
        self,
        number: int,
        peer: str,
        group: WriteGroup | None,
        post: Callable[[], tuple[PostedTransfer, TransferState]],
    ) -> None:
        try:
            if peer in self._lost:
                raise PeerLost(f"agent {peer} is gone")
            transfer, state = post()
        except NixlFailure as failure:
            self._note_failure(peer, failure)
            self._tell(number, peer, group, 0, failure)
            return
        flight = _InFlight(number, peer, transfer, group)
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
        self._tell(flight.number, flight.peer, flight.group, counted, failure)

    def _tell(
        self, number: int, peer: str, group: WriteGroup | None, counted: int, failure: NixlFailure | None
    ) -> None:
        """Reply, after announcing the layer if it is complete: the client shall not wait for the next post, which may
        copy megabytes.
        """
        flight = None if group is None else self._flights.get(group.flight)
        if group is not None and flight is not None and flight.ended(group, is_good=failure is None) and group.notice:
            with contextlib.suppress(NixlFailure):
                self._agent.notify(peer, group.notice)
        self._say(Reply(number, counted) if failure is None else _failed(number, failure))

    def _note_failure(self, peer: str, failure: NixlFailure) -> None:
        if isinstance(failure, PeerLost):
            self._lost.add(peer)

    def _drop(self, name: str) -> None:
        with contextlib.suppress(NixlFailure):
            self._agent.remove_peer(name)

    def _stay_busy(self) -> None:
        self._busy_until_s = time.monotonic() + CONNECTION_WORK_S

    def _progress(self) -> None:
        """Let connections open and close. Notices from clients are read and dropped: only clients need notices."""
        with contextlib.suppress(NixlFailure):
            self._agent.notices()

    def _memory(self, span: AreaSpan) -> Memory:
        return Memory(self._areas[span.area][0] + span.offset, span.nbytes)

    def _say(self, reply: Reply) -> None:
        self._control.sendall(encode_reply(reply))


def _failed(number: int, failure: NixlFailure) -> Reply:
    return Reply(number, 0, str(failure) or "NIXL failed", isinstance(failure, PeerLost))


def _run(arguments: Sequence[str]) -> None:
    control, areas = begun(arguments)
    with contextlib.suppress(ConnectionError, BrokenPipeError):
        try:
            engine = UcxEngine(control, areas)
        except (ImportError, NixlFailure, OSError) as error:
            control.sendall(encode_reply(Reply(0, 0, f"{error}" or type(error).__name__)))
            return
        try:
            engine.run()
        finally:
            engine.close()


if __name__ == "__main__":
    _run(sys.argv[1:])
    leave(0)
