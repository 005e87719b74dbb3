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
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import Final, cast

from objectcache.adapters.accepting import accept
from objectcache.adapters.caller import ByCaller, caller_of
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
"""A client greets at once, in a packet or two, so one that has not done so by then gives its place up."""
LATE_S: Final = 1.0
"""A client that has greeted, and has not said all of what comes next for so long, gives its place up."""
LOOK_S: Final = 0.05
"""Where connections wait for a place, handshakes that are late are looked for so often."""
GIVEN_UP_MAX: Final = 64
"""So many places go from handshakes that are late to others at once."""
RECORD_HEAD_BYTES, RECORD_BYTES_MAX = 5, 5 + (1 << 14)
"""A record's head has so many bytes, and a whole record of a greeting so many at most (RFC 8446, section 5.1)."""
CONNECTION_BYTES: Final = 512 << 10
"""The memory that a connection with TLS may have."""
ACCEPTED_MAX = 16
"""So many connections are accepted in one pass of the loop: a handshake takes a millisecond."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Handshake:
    """A handshake under way, from `began_s` of the loop's clock on."""

    accepted: socket.socket
    caller: str
    began_s: float
    connection: TlsConnection
    task: asyncio.Task[None] | None = None

    def is_late(self, now_s: float) -> bool:
        """Whether its peer is waited for since so long that another one may have its place."""
        since_s, is_greeted = self.connection.awaited_since_s(self.began_s), self.connection.has_answered
        if since_s is None or now_s - since_s < (LATE_S if is_greeted else GREETING_S):
            return False
        return is_greeted or not _has_greeted(self.accepted)  # a greeting may not have been read yet


class TlsDoor:
    """Accepts connections for `server`, whose handshakes have HANDSHAKE_S. New ones use `context`, which may be
    replaced. Where all places are taken, a connection waits in its caller's line (`adapters.caller`). A handshake that
    goes on is never ended for a newcomer of its own caller: of a crowd that comes at once nobody would come in. One
    whose client is late gives its place to whoever waits, as long as clients may have any number of addresses. Used on
    one event loop.
    """

    def __init__(self, server: LimitedServer, context: ssl.SSLContext) -> None:
        self.context = context
        self._server = server
        self.turns = ParsingTurns()
        """Those of all connections that wait to be decrypted."""
        self._handshakes: ByCaller[_Handshake] = ByCaller()
        self._lines: OrderedDict[str, deque[socket.socket]] = OrderedDict()
        """The connections that wait, by caller. Each caller has its turn after the others."""
        self._is_looking = False
        self.waiting_count = 0

    @property
    def handshake_count(self) -> int:
        """The handshakes under way."""
        return len(self._handshakes)

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections of a listening socket that does not block, for ever. At the end, no handshake goes on."""
        try:
            await accept(listener, self._begin, ACCEPTED_MAX)
        finally:
            for line in self._lines.values():
                for accepted in line:
                    accepted.close()
            self._lines.clear()
            self.waiting_count = 0
            handshakes = list(self._handshakes)
            for each in handshakes:
                _hang_up(each.accepted)
            await asyncio.gather(*(each.task for each in handshakes if each.task is not None), return_exceptions=True)

    def _begin(self, accepted: socket.socket, address: str) -> None:
        caller = caller_of(address)
        self._lines.setdefault(caller, deque()).append(accepted)
        self.waiting_count += 1
        if self._has_place_for(caller):
            self._start_first_of(caller)
        elif self.waiting_count > min(WAITING_MAX, self._server.connections_max // 4):
            longest = max(self._lines, key=lambda each: len(self._lines[each]))
            self._taken(longest, -1 if _has_greeted(self._lines[longest][0]) else 0).close()
        self._look_later()

    def _look_later(self) -> None:
        if self._lines and not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Those that wait have the places of handshakes that are late, in turns."""
        self._is_looking = False
        now_s = asyncio.get_running_loop().time()
        late = (each for each in self._handshakes if each.is_late(now_s))
        for each in list(islice(late, min(GIVEN_UP_MAX, self.waiting_count))):
            self._give_up(each)
            self._start_first_of(next(iter(self._lines)))
        self._look_later()

    def _has_place_for(self, caller: str) -> bool:
        """Whether a handshake of this caller may begin."""
        return self.handshake_count < HANDSHAKES_MAX or self._another_gives_way(caller)

    def _another_gives_way(self, caller: str) -> bool:
        """Whether a handshake of the caller that has most is given up for one of this caller: a late one, or where this
        caller has fewer the oldest one.
        """
        crowd, now_s = self._crowd(), asyncio.get_running_loop().time()
        has_fewer = self._handshakes.count(caller) + 1 < len(crowd)
        looked_at = crowd if has_fewer else islice(crowd, LOOKED_AT_MAX)
        late = next((each for each in looked_at if each.is_late(now_s)), None)
        if late is None and not has_fewer:
            return False
        self._give_up(late or next(iter(crowd)))
        return True

    def _crowd(self) -> Collection[_Handshake]:
        """The handshakes of the caller that has most."""
        return self._handshakes.most()

    def _taken(self, caller: str, place: int) -> socket.socket:
        """Take a connection out of its line. The caller has its next turn behind the others."""
        line = self._lines.pop(caller)
        accepted = line[place]
        del line[place]
        self.waiting_count -= 1
        if line:
            self._lines[caller] = line
        return accepted

    def _next_of(self, caller: str) -> socket.socket:
        """The next connection of a line, which should have greeted: a crowd that says nothing lets others pass."""
        line = self._lines[caller]
        for _ in range(min(LOOKED_AT_MAX, len(line))):
            if _has_greeted(line[0]):
                break
            line.rotate(-1)
        return self._taken(caller, 0)

    def _start_first_of(self, caller: str) -> None:
        """Where the server takes no more connections, and none of them gives its place up, a handshake does, or the
        first one is refused.
        """
        accepted, server, loop = self._next_of(caller), self._server, asyncio.get_running_loop()
        is_full = self.handshake_count + server.open_count >= server.connections_max
        if is_full and not server.makes_place(loop.time(), caller) and not self._another_gives_way(caller):
            accepted.close()
            return
        connection = TlsConnection(
            self.context,
            self.turns,
            cast(asyncio.Protocol, server()),
            on_open=lambda: self._end(handshake),
            group_of=lambda _: caller,
        )
        handshake = _Handshake(accepted, caller, loop.time(), connection)
        self._handshakes.add(caller, handshake)
        handshake.task = loop.create_task(self._shake(handshake))
        handshake.task.add_done_callback(lambda _: self._end(handshake))

    def _end(self, handshake: _Handshake) -> None:
        """It counts no more, and those that wait have its place."""
        self._forget(handshake)
        while self._lines and self.handshake_count < HANDSHAKES_MAX:
            self._start_first_of(next(iter(self._lines)))

    def _forget(self, handshake: _Handshake) -> None:
        self._handshakes.remove(handshake.caller, handshake)

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
    """Whether the client's first record is there, or the client's end."""
    try:
        said = accepted.recv(RECORD_BYTES_MAX, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    length = int.from_bytes(said[RECORD_HEAD_BYTES - 2 : RECORD_HEAD_BYTES])
    return not said or len(said) >= min(RECORD_HEAD_BYTES + length, RECORD_BYTES_MAX)


def _hang_up(accepted: socket.socket) -> None:
    """End a connection, whose handshake then fails by itself."""
    with contextlib.suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
