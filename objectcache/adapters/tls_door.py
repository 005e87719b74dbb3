"""TLS in front of a LimitedServer: handshakes count from their accept on, and nobody's records stop the event loop.

The event loop's own TLS server tells nobody of a connection before its handshake is done. Here each connection counts
from its accept on, and is decrypted by `adapters.tls_connection`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final, cast

from objectcache.adapters.accepting import accept
from objectcache.adapters.caller import caller_of
from objectcache.adapters.limited_server import LimitedServer
from objectcache.adapters.pieces import ParsingTurns
from objectcache.adapters.tls_connection import TlsConnection

HANDSHAKE_S: Final = 10.0
HANDSHAKES_MAX: Final = 512
"""A handshake may hold some 600 KiB: a client's first message may be long, and is held thrice."""
WAITING_MAX: Final = 4096
"""So many accepted connections wait for a place, or a quarter of those that the server takes: each has a descriptor."""
LOOKED_AT_MAX: Final = 16
"""The next one of a line is the first that has greeted among so many."""
GREETING_S: Final = 0.25
"""A client begins its handshake at once, so one that has not done so by then gives its place up."""
SILENT_S: Final = 2.0
"""A client that has said nothing for so long amid its handshake gives its place up."""
CONNECTION_BYTES: Final = 512 << 10
"""The memory that a connection with TLS may have."""
ACCEPTED_MAX = 16
"""So many connections are accepted in one pass of the loop: a handshake takes a millisecond."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Handshake:
    """A handshake under way, from `began_s` of the loop's clock on."""

    accepted: socket.socket
    address: str
    began_s: float
    connection: TlsConnection
    task: asyncio.Task[None] | None = None

    def is_silent(self, now_s: float) -> bool:
        """Whether its peer has said nothing for so long that another one may have its place."""
        since_s = self.connection.silent_since_s(self.began_s)
        patience_s = SILENT_S if self.connection.has_heard else GREETING_S
        return since_s is not None and now_s - since_s >= patience_s


class TlsDoor:
    """Accepts connections for `server`, whose handshakes have HANDSHAKE_S. New ones use `context`, which may be
    replaced. Where all places are taken, a connection waits in its address's line. A handshake that goes on is never
    ended for a newcomer of its own address: of a crowd that comes at once nobody would come in. Used on one event loop.
    """

    def __init__(self, server: LimitedServer, context: ssl.SSLContext) -> None:
        self.context = context
        self._server = server
        self.turns = ParsingTurns()
        """Those of all connections that wait to be decrypted."""
        self._handshakes: dict[str, OrderedDict[_Handshake, None]] = {}
        """By address, the oldest one first."""
        self._lines: OrderedDict[str, deque[socket.socket]] = OrderedDict()
        """The connections that wait, by address. Each address has its turn after the others."""
        self.handshake_count = 0
        self.waiting_count = 0

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections of a listening socket that does not block, for ever. At the end, no handshake goes on."""
        try:
            await accept(listener, self._begin, ACCEPTED_MAX)
        finally:
            for line in self._lines.values():
                for accepted in line:
                    accepted.close()
            self._lines.clear()
            handshakes = [each for own in self._handshakes.values() for each in own]
            for each in handshakes:
                _hang_up(each.accepted)
            await asyncio.gather(*(each.task for each in handshakes if each.task is not None), return_exceptions=True)

    def _begin(self, accepted: socket.socket, address: str) -> None:
        self._lines.setdefault(address, deque()).append(accepted)
        self.waiting_count += 1
        if self._has_place_for(address):
            self._start_first_of(address)
        elif self.waiting_count > min(WAITING_MAX, self._server.connections_max // 4):
            longest = max(self._lines, key=lambda each: len(self._lines[each]))
            self._taken(longest, -1 if _has_greeted(self._lines[longest][0]) else 0).close()
        else:  # others may be silent by then
            asyncio.get_running_loop().call_later(GREETING_S, self._look_again, address)

    def _look_again(self, address: str) -> None:
        if address in self._lines and self._has_place_for(address):
            self._start_first_of(address)

    def _has_place_for(self, address: str) -> bool:
        """Whether a handshake of this address may begin. Where all places are taken, it may have that of an address
        that has more of them, or of one of its own that is silent.
        """
        if self.handshake_count < HANDSHAKES_MAX:
            return True
        crowd = self._crowd()
        own = self._handshakes.get(address, ())
        now_s = asyncio.get_running_loop().time()
        given_up = next((each for each in own if each.is_silent(now_s)), None)
        if given_up is None and len(own) + 1 < len(crowd):
            given_up = next((each for each in crowd if each.is_silent(now_s)), next(iter(crowd)))
        if given_up is None:
            return False
        self._give_up(given_up)
        return True

    def _crowd(self) -> OrderedDict[_Handshake, None]:
        """The handshakes of the address that has most."""
        return max(self._handshakes.values(), key=len)

    def _taken(self, address: str, place: int) -> socket.socket:
        """Take a connection out of its line. The address has its next turn behind the others."""
        line = self._lines.pop(address)
        accepted = line[place]
        del line[place]
        self.waiting_count -= 1
        if line:
            self._lines[address] = line
        return accepted

    def _next_of(self, address: str) -> socket.socket:
        """The next connection of a line, which should have greeted: a crowd that says nothing lets others pass."""
        line = self._lines[address]
        for _ in range(min(LOOKED_AT_MAX, len(line))):
            if _has_greeted(line[0]):
                break
            line.rotate(-1)
        return self._taken(address, 0)

    def _start_first_of(self, address: str) -> None:
        """Where the server takes no more connections, the longest idle one gives its place up, else the oldest
        handshake of the address that has most.
        """
        accepted, server, loop = self._next_of(address), self._server, asyncio.get_running_loop()
        is_full = self.handshake_count + server.open_count >= server.connections_max
        if is_full and not server.makes_place(loop.time()) and self.handshake_count:
            self._give_up(next(iter(self._crowd())))
        connection = TlsConnection(
            self.context,
            self.turns,
            cast(asyncio.Protocol, server()),
            on_open=lambda: self._end(handshake),
            group_of=lambda peer: caller_of(str(peer[0])),
        )
        handshake = _Handshake(accepted, address, loop.time(), connection)
        self._handshakes.setdefault(address, OrderedDict())[handshake] = None
        self.handshake_count += 1
        handshake.task = loop.create_task(self._shake(handshake))
        handshake.task.add_done_callback(lambda _: self._end(handshake))

    def _end(self, handshake: _Handshake) -> None:
        """It counts no more, and those that wait have its place."""
        self._forget(handshake)
        while self._lines and self.handshake_count < HANDSHAKES_MAX:
            self._start_first_of(next(iter(self._lines)))

    def _forget(self, handshake: _Handshake) -> None:
        own = self._handshakes.get(handshake.address)
        if own is not None and handshake in own:
            del own[handshake]
            self.handshake_count -= 1
            if not own:
                del self._handshakes[handshake.address]

    def _give_up(self, handshake: _Handshake) -> None:
        self._forget(handshake)
        _hang_up(handshake.accepted)

    async def _shake(self, handshake: _Handshake) -> None:
        """Wait for the end of a handshake, which counts no more when the connection does."""
        connection = handshake.connection
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, handshake.accepted)
                await asyncio.shield(connection.opened)
        except OSError as error:  # ssl.SSLError and TimeoutError are such
            _log.debug("a TLS handshake has failed: %s", error)
            connection.abort()


def _has_greeted(accepted: socket.socket) -> bool:
    """Whether bytes of the client are there, or its end."""
    try:
        accepted.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _hang_up(accepted: socket.socket) -> None:
    """End a connection, whose handshake then fails by itself."""
    with contextlib.suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
