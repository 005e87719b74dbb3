"""Lookups of host names, in threads of their own: a name server that does not answer holds up nothing else.

uvloop looks names up in two threads of libuv, and asks them for the address of each connection, too, although that is a
number already. Two names that take long would so keep every new connection of the process waiting, whoever it is to.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any, Final

import uvloop

NAMES_MAX: Final = 256
"""So many names may be slow before others wait."""
Found = list[tuple[Any, ...]]


class NameLookups:
    """At most `names_max` lookups at once. Their threads keep no process from ending. Used on one event loop."""

    def __init__(self, names_max: int) -> None:
        self._places = asyncio.Semaphore(names_max)

    async def find(
        self, host: Any, port: Any, family: int = 0, kind: int = 0, protocol: int = 0, flags: int = 0
    ) -> Found:
        """The addresses, as `socket.getaddrinfo` gives them; of a number at once. Raises OSError, also for a text that
        no name can be: callers know no other error of a lookup, and others choose the names.
        """
        look_up = partial(socket.getaddrinfo, host, port, family, kind, protocol)
        try:
            return list(look_up(flags | socket.AI_NUMERICHOST))
        except UnicodeError as error:
            raise socket.gaierror(socket.EAI_NONAME, f"{str(host)[:300]!r} is no name: {error}") from error
        except socket.gaierror:  # it is no number
            pass
        loop = asyncio.get_running_loop()
        await self._places.acquire()
        found: asyncio.Future[Found] = loop.create_future()
        try:
            Thread(
                target=self._look_up,
                args=(loop, partial(look_up, flags), found),
                name="objectcache-name",
                daemon=True,
            ).start()
        except RuntimeError as error:  # there is no room for a thread
            self._places.release()
            raise OSError(f"{host} cannot be looked up: {error}") from error
        return await found

    def _look_up(
        self, loop: asyncio.AbstractEventLoop, work: Callable[[], Found], found: asyncio.Future[Found]
    ) -> None:
        """In a thread. Its place is taken until it ends, also where nobody waits any more."""
        addresses: Found = []
        failure: Exception | None = None
        try:
            addresses = list(work())
        except Exception as error:  # a name may be anything
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._ended, found, addresses, failure)

    def _ended(self, found: asyncio.Future[Found], addresses: Found, failure: Exception | None) -> None:
        self._places.release()
        if found.done():
            return
        if failure is None:
            found.set_result(addresses)
        else:
            found.set_exception(failure)


class ServerLoop(uvloop.Loop):
    """The event loop of our servers: uvloop's, which looks no names up in threads that connections need."""

    def __init__(self) -> None:
        super().__init__()
        self._names = NameLookups(NAMES_MAX)

    async def getaddrinfo(
        self,
        host: Any,
        port: Any,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 - asyncio names it so
        proto: int = 0,
        flags: int = 0,
    ) -> Found:
        """The addresses of a name, or of a number. Raises OSError."""
        return await self._names.find(host, port, family, type, proto, flags)
