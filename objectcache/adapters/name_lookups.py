"""Lookups of host names, in threads of their own: a name server that does not answer holds up nothing else, and whoever
needs one of its names learns of that after NAME_WAIT_S.

uvloop looks names up in two threads of libuv, and asks them for the address of each connection, too, although that is a
number already. Two names that take long would so keep every new connection of the process waiting, whoever it is to.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from threading import Thread
from typing import Any, Final

import uvloop

from objectcache.adapters.pieces import ParsingTurns
from objectcache.adapters.tls_connection import connect_tls

NAMES_MAX: Final = 256
"""So many names may be slow before others wait."""
NAME_WAIT_S: Final = 10.0
"""So long a name is waited for: resolvers ask a name server for 5 s, and then the next one. Those that wait on their
own for longer, or for ever, hold up no request and no stop.
"""
Found = list[tuple[Any, ...]]


class _Running:
    """One lookup, and how many wait for it."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Found]
        self.waiting_count = 0
        self.has_place = False


class NameLookups:
    """At most `names_max` lookups at once. Their threads keep no process from ending. Used on one event loop."""

    def __init__(self, names_max: int) -> None:
        self._places = asyncio.Semaphore(names_max)
        self._running: dict[tuple[Any, ...], _Running] = {}
        """One for each name: a name that hangs takes one place, however often it is asked for."""

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
        name = (host, port, family, kind, protocol, flags)
        running = self._running.get(name)
        if running is None:
            running = self._running[name] = _Running()
            running.task = asyncio.create_task(self._found(host, partial(look_up, flags), running))
            running.task.add_done_callback(partial(self._ended_for, name, running))
        running.waiting_count += 1
        try:
            async with asyncio.timeout(NAME_WAIT_S):
                return await asyncio.shield(running.task)
        except TimeoutError:
            raise _not_found(host) from None
        finally:
            running.waiting_count -= 1
            if not running.waiting_count and not running.has_place:
                running.task.cancel()  # nobody waits for it: it leaves the line
                self._ended_for(name, running, running.task)

    def _ended_for(self, name: tuple[Any, ...], running: _Running, done: asyncio.Task[Found]) -> None:
        if self._running.get(name) is running:
            del self._running[name]
        if done.done() and not done.cancelled():
            done.exception()  # whoever waits has it

    async def _found(self, host: Any, work: Callable[[], Found], running: _Running) -> Found:
        loop = asyncio.get_running_loop()
        await self._places.acquire()
        running.has_place = True
        found: asyncio.Future[Found] = loop.create_future()
        try:
            Thread(
                target=self._look_up,
                args=(loop, work, found),
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


class NameForThreads:
    """The addresses of one name, for threads: a lookup that hangs takes one thread, whoever waits for it. `close` has
    those that wait fail.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._running: Future[Found] | None = None
        self._is_closed = False

    def addresses(self, wait_s: float = NAME_WAIT_S) -> Found:
        """As `socket.getaddrinfo` gives them, for TCP. Raises OSError."""
        with self._lock:
            if self._is_closed:
                raise _not_found(self._host)
            running = self._running
            if running is None:
                running = Future()
                try:
                    Thread(target=self._look_up, args=(running,), name="objectcache-name", daemon=True).start()
                except RuntimeError as error:  # there is no room for a thread
                    raise OSError(f"{self._host} cannot be looked up: {error}") from error
                self._running = running
        try:
            return running.result(wait_s)
        except (TimeoutError, CancelledError):
            raise _not_found(self._host) from None

    def close(self) -> None:
        """Wait for no lookup any more."""
        with self._lock:
            self._is_closed = True
            if self._running is not None:
                self._running.cancel()

    def _look_up(self, running: Future[Found]) -> None:
        found: Found = []
        failure: Exception | None = None
        try:
            found = list(socket.getaddrinfo(self._host, self._port, 0, socket.SOCK_STREAM))
        except Exception as error:  # a name may be anything
            failure = error
        with self._lock:
            self._running = None
            if running.cancelled():
                return
            if failure is None:
                running.set_result(found)
            else:
                running.set_exception(failure)


def _not_found(host: Any) -> OSError:
    return socket.gaierror(socket.EAI_AGAIN, f"no name server has answered for {host} in {NAME_WAIT_S:g} s")


class ServerLoop(uvloop.Loop):
    """The event loop of our servers: uvloop's, which looks no names up in threads that connections need, and has TLS of
    its own towards other servers (`adapters.tls_connection`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._names = NameLookups(NAMES_MAX)
        self._decrypting: ParsingTurns | None = None

    async def create_connection(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        """As uvloop's. A socket of aiohttp that is to have TLS is decrypted in turns with all others."""
        context, sock = options.get("ssl"), options.get("sock")
        if not isinstance(context, ssl.SSLContext) or sock is None:
            return await super().create_connection(protocol_factory, *args, **options)
        if self._decrypting is None:
            self._decrypting = ParsingTurns()
        name = options.get("server_hostname") or ""
        return await connect_tls(sock, context, self._decrypting, protocol_factory, name)

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
        return await self._names.find(host, port, family=family, kind=type, protocol=proto, flags=flags)
