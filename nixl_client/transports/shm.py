"""The client's side of shm: memory is handed in at the server's Unix socket, and notices come back over it."""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from descriptors.messages import AgentRegistration, AgentRenewal, Region
from descriptors.notices import Notice, NoticeError, decode_notice
from descriptors.shm_messages import MESSAGE_BYTES_MAX, RegionOffer, offer_message, parse_greeting, parse_reply
from nixl_client.transports.buffers import Buffer
from nixl_client.transports.shared_memory import SharedMemory, find

REPLY_TIMEOUT_S = 30.0
MEMBER_TIMEOUT_S = 1.0
"""A member of a cluster that hangs delays a registration by this much."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class ShmUnavailableError(Exception):
    """The server is not on this host, or does not take this memory now."""


class NoShmError(ShmUnavailableError):
    """The server has no shm transport."""


SINGLE = ""
"""Stands in place of a member's name where one storage server has the only socket."""


class ShmReceiver:
    """A connection to each Unix socket that `find_sockets` names, by the name of its storage server (none where the
    transport is off), made when it is first needed. A ticket serves one registration. The next registration gets new
    connections, over which all memory is offered again.
    """

    def __init__(self, find_sockets: Callable[[], Mapping[str, str]]) -> None:
        self._find_sockets = find_sockets
        self._lock = threading.RLock()
        self._offered: dict[str, SharedMemory] = {}
        self._connections: dict[str, ShmConnection] = {}
        self._listeners: dict[str, Callable[[Notice], None]] = {}

    def offer(self, region_id: str, buffer: Buffer) -> None:
        """Hand a whole allocation over to every server. Raises ShmUnavailableError."""
        shared = find(buffer.memory)
        if shared is None:
            raise ShmUnavailableError("the shm transport needs a buffer of allocate_buffer")
        with self._lock:
            self._connect(with_tickets=False)
            for name in list(self._connections):
                self._offer_to(name, region_id, shared)
            if not self._connections:
                raise ShmUnavailableError("no server takes the memory now")
            self._offered[region_id] = shared

    def _offer_to(self, name: str, region_id: str, shared: SharedMemory) -> None:
        """A member of a cluster that does not take the memory now is left: others bring its chunks, and it learns of us
        anew when it answers again.
        """
        try:
            self._connections[name].hand_over(region_id, shared)
        except ConnectionError:  # the server has restarted, or has forgotten us
            self._connections[name].has_ended = True
            if name == SINGLE:
                self._connect(with_tickets=False)
                self._connections[name].hand_over(region_id, shared)
        except ShmUnavailableError:
            if name == SINGLE:
                raise
            self._connections.pop(name).close()

    def withdraw(self, region_id: str) -> None:
        with self._lock:
            self._offered.pop(region_id, None)

    def registration(self, regions: Sequence[Region], lifetime_s: float) -> AgentRegistration:
        """Raises ShmUnavailableError."""
        with self._lock:
            self._connect(with_tickets=True)
            return self._registration(regions, lifetime_s, list(self._connections))

    def introduction(self, regions: Sequence[Region], lifetime_s: float, names: Sequence[str]) -> AgentRegistration:
        """Connections to servers that do not know us are made anew."""
        with self._lock:
            for name in names:
                connection = self._connections.pop(name, None)
                if connection is not None:
                    connection.close()
            addresses = self._find_sockets()
            wanted = [name for name in names if name in addresses]
            made = []
            for name in wanted:
                with contextlib.suppress(ShmUnavailableError, ConnectionError):
                    self._connections[name] = self._connected(name, addresses[name])
                    made.append(name)
            return self._registration(regions, lifetime_s, made)

    def renewal(self, regions: Sequence[Region], lifetime_s: float) -> AgentRenewal:
        return AgentRenewal(lifetime_s, None, tuple(regions))

    def ended_ids(self) -> list[str]:
        """The kernel closes the connection of a process that has ended; a server closes it when nothing writes."""
        with self._lock:
            return [name for name, connection in self._connections.items() if name != SINGLE and connection.has_ended]

    def writers(self) -> Callable[[], bool]:
        """They have ended when each has closed its connection: the kernel closes that of a process that has ended, and
        a server closes it when nothing writes.
        """
        with self._lock:
            connections = list(self._connections.values())
        return lambda: bool(connections) and all(each.was_closed_there for each in connections)

    def on_forgotten(self) -> None:
        """The server closes the connection of a client that it has forgotten: close our end."""
        with self._lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def call_and_connect(self, register: Callable[[], _T]) -> _T:
        """Call `register`; the connection is open since the memory was handed in."""
        return register()

    def listen(self, request_id: str, on_notice: Callable[[Notice], None]) -> None:
        self._listeners[request_id] = on_notice

    def stop_listening(self, request_id: str) -> None:
        self._listeners.pop(request_id, None)

    def stop(self) -> None:
        self.on_forgotten()

    def _registration(self, regions: Sequence[Region], lifetime_s: float, names: Sequence[str]) -> AgentRegistration:
        tickets = {name: self._connections[name].use_ticket() for name in names}
        if set(tickets) == {SINGLE}:
            return AgentRegistration(b"", tuple(regions), lifetime_s, tickets[SINGLE])
        return AgentRegistration(b"", tuple(regions), lifetime_s, shm_tickets=tickets)

    def _connect(self, *, with_tickets: bool) -> None:
        """Make the connections that are missing: where one has ended, and all where tickets are wanted and one of them
        is used. Raises ShmUnavailableError where a server cannot be reached.
        """
        before = len(self._connections)
        is_used = with_tickets and any(connection.is_ticket_used for connection in self._connections.values())
        for name in [name for name, connection in self._connections.items() if is_used or connection.has_ended]:
            self._connections.pop(name).close()
        if self._connections and len(self._connections) == before:
            return
        addresses = self._find_sockets()
        if not addresses:
            raise NoShmError("the server has no shm transport")
        for name, address in addresses.items():
            if name not in self._connections:
                self._connections[name] = self._connected(name, address)

    def _connected(self, name: str, address: str) -> ShmConnection:
        """A new connection, over which all memory is offered."""
        connection = ShmConnection(address, self._on_notice, REPLY_TIMEOUT_S if name == SINGLE else MEMBER_TIMEOUT_S)
        for region_id, shared in self._offered.items():
            connection.hand_over(region_id, shared)
        return connection

    def _on_notice(self, notice: Notice) -> None:
        listener = self._listeners.get(notice.request_id)
        if listener is None:
            return
        try:
            listener(notice)
        except Exception:  # one fetch must not take the others' thread with it
            _log.exception("entering %r failed", notice)


class ShmConnection:
    """A connection and the thread that reads it. Raises ShmUnavailableError where no such server is on this host."""

    def __init__(self, address: str, on_notice: Callable[[Notice], None], timeout_s: float) -> None:
        if not address.startswith("@"):
            raise NoShmError("the server has no shm transport")
        self.is_ticket_used = False
        self._timeout_s = timeout_s
        self._on_notice = on_notice
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_asked = False
        """Whether a reply is due: nobody takes another one."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect("\0" + address[1:])
            self.ticket = parse_greeting(self._socket.recv(MESSAGE_BYTES_MAX))
        except (OSError, ValueError) as error:
            self._socket.close()
            raise ShmUnavailableError(f"the server is not on this host: {error}") from error
        self._socket.settimeout(None)
        self.has_ended = False
        self.was_closed_there = False
        """Whether the server has closed it, and not we."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._read, name="objectcache-shm", daemon=True)
        self._thread.start()

    def use_ticket(self) -> str:
        """The ticket, which serves one registration."""
        self.is_ticket_used = True
        return self.ticket

    def hand_over(self, region_id: str, shared: SharedMemory) -> None:
        """Hand memory over. Raises ShmUnavailableError where the server refuses it, ConnectionError where it has closed
        the connection.
        """
        message = offer_message(RegionOffer(region_id, shared.nbytes))
        try:
            self._is_asked = True
            socket.send_fds(self._socket, [message], [shared.fd])
            said = self._replies.get(timeout=self._timeout_s)
            if not said:
                raise ConnectionResetError("the server has closed the connection")
            refusal = parse_reply(said)
        except ConnectionError:
            raise
        except (OSError, ValueError, queue.Empty) as error:
            self.close()  # a reply that comes later must not be taken for the next offer's
            raise ShmUnavailableError(f"handing memory in failed: {error}") from error
        if refusal is not None:
            raise ShmUnavailableError(f"the server does not take the memory: {refusal}")

    def close(self) -> None:
        """Close the connection, and wait for the thread, unless the caller is that thread."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        try:
            while data := self._socket.recv(MESSAGE_BYTES_MAX):
                if data.startswith(b"{"):
                    if not self._is_asked:
                        raise ConnectionResetError("the server replies to nothing")
                    self._is_asked = False
                    self._replies.put(data)
                    continue
                with contextlib.suppress(NoticeError):
                    self._on_notice(decode_notice(data))
            self.was_closed_there = not self._is_closing
        except OSError as error:
            self.was_closed_there = error.errno == errno.ECONNRESET and not self._is_closing
            _log.debug("the shm connection ended: %s", error)
        finally:
            self.has_ended = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # the server need not wait for us
            self._replies.put(b"")
