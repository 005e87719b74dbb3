"""Accepting many connections in one pass of an event loop.

uvloop accepts one in each pass. A pass takes ten milliseconds and more while hundreds of answers flow, so whoever came
behind eight hundred connections of one client waited for fifteen seconds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Any, Final

ACCEPTED_MAX: Final = 64
"""So many connections are accepted in one pass of the loop: each takes 0.1 ms."""
ACCEPT_PAUSE_S: Final = 1.0
_NOTHING_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_log = logging.getLogger(__name__)


async def accept(
    listener: socket.socket, begin: Callable[[socket.socket, str], None], accepted_max: int = ACCEPTED_MAX
) -> None:
    """Accept connections of a listening socket that does not block, for ever, `accepted_max` of them in one pass of the
    loop. `begin` gets each, with its address.
    """
    loop = asyncio.get_running_loop()
    while True:
        for count in range(accepted_max):
            try:
                if count:
                    accepted, peer = listener.accept()
                    accepted.setblocking(False)
                else:
                    accepted, peer = await loop.sock_accept(listener)  # comes back in another pass, also with a crowd
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in _NOTHING_LEFT:  # an immediate retry would fail again
                    _log.warning("no connection is accepted for %.0f s: %s", ACCEPT_PAUSE_S, error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                break
            begin(accepted, str(peer[0]))
        await asyncio.sleep(0)


class Door:
    """Accepts connections for a server without TLS. Used on one event loop."""

    def __init__(self, server: Callable[[], asyncio.BaseProtocol]) -> None:
        self._server = server
        self._beginning: set[asyncio.Task[Any]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections of a listening socket that does not block, for ever."""
        await accept(listener, self._begin)

    def _begin(self, accepted: socket.socket, _: str) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(accepted))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._server, accepted)
        except OSError as error:
            _log.debug("a connection has failed: %s", error)
