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
from collections import OrderedDict
from typing import Any, Final, cast

from objectcache.adapters.accepting import accept
from objectcache.adapters.caller import caller_of
from objectcache.adapters.limited_server import LimitedServer
from objectcache.adapters.pieces import ParsingTurns
from objectcache.adapters.tls_connection import TlsConnection

HANDSHAKE_S: Final = 10.0
HANDSHAKES_MAX: Final = 512
"""A handshake may hold some 600 KiB: a client's first message may be long, and is held thrice."""
CONNECTION_BYTES: Final = 512 << 10
"""The memory that a connection with TLS may have."""
ACCEPTED_MAX = 16
"""So many connections are accepted in one pass of the loop: a handshake takes a millisecond."""
_log = logging.getLogger(__name__)


class TlsDoor:
    """Accepts connections for `server`, whose handshakes have HANDSHAKE_S. New ones use `context`, which may be
    replaced. Used on one event loop.
    """

    def __init__(self, server: LimitedServer, context: ssl.SSLContext) -> None:
        self.context = context
        self._server = server
        self.turns = ParsingTurns()
        """Those of all connections that wait to be decrypted."""
        self._handshakes: dict[str, OrderedDict[asyncio.Task[Any], socket.socket]] = {}
        """By address, the oldest one first."""
        self.handshake_count = 0

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections of a listening socket that does not block, for ever. At the end, no handshake goes on."""
        try:
            await accept(listener, self._begin, ACCEPTED_MAX)
        finally:
            tasks = [task for own in self._handshakes.values() for task in own]
            for own in self._handshakes.values():
                for accepted in own.values():
                    _hang_up(accepted)
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, accepted: socket.socket, address: str) -> None:
        """Where there are too many handshakes, the oldest of the address that has most ends, so that a crowd of one
        address keeps no other out. Where all places are taken, the longest idle connection gives its place up.
        """
        server = self._server
        is_full = self.handshake_count + server.open_count >= server.connections_max
        if self.handshake_count >= HANDSHAKES_MAX or (
            is_full and not server.makes_place(asyncio.get_running_loop().time()) and self.handshake_count
        ):
            counts = {each: len(own) for each, own in self._handshakes.items()}
            most = max(counts.values())
            crowd = address if counts.get(address, 0) >= most else max(counts, key=lambda each: counts[each])
            oldest, held = next(iter(self._handshakes[crowd].items()))
            self._end(oldest, crowd)
            _hang_up(held)
        handshake = asyncio.get_running_loop().create_task(self._shake(accepted, address))
        self._handshakes.setdefault(address, OrderedDict())[handshake] = accepted
        self.handshake_count += 1
        handshake.add_done_callback(lambda task: self._end(task, address))

    def _end(self, handshake: asyncio.Task[Any] | None, address: str) -> None:
        own = self._handshakes.get(address)
        if own is not None and handshake is not None and handshake in own:
            del own[handshake]
            self.handshake_count -= 1
            if not own:
                del self._handshakes[address]

    async def _shake(self, accepted: socket.socket, address: str) -> None:
        """Wait for the end of a handshake, which counts no more when the connection does."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        protocol = cast(asyncio.Protocol, self._server())
        connection = TlsConnection(
            self.context,
            self.turns,
            protocol,
            on_open=lambda: self._end(task, address),
            group_of=lambda peer: caller_of(str(peer[0])),
        )
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await loop.connect_accepted_socket(lambda: connection, accepted)
                await asyncio.shield(connection.opened)
        except OSError as error:  # ssl.SSLError and TimeoutError are such
            _log.debug("a TLS handshake has failed: %s", error)
            connection.abort()


def _hang_up(accepted: socket.socket) -> None:
    """End a connection, whose handshake then fails by itself."""
    with contextlib.suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
