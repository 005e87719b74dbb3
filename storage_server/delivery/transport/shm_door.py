"""ShmDoor: a Unix socket over which clients on this host hand in the memory that shall be filled.

A client connects, gets a ticket, and passes a memfd for every region. With the ticket it then registers at the gateway,
by a signed request (docs/reference/protocol.md). Only then is its memory mapped: until its key is known, a caller costs
a connection and a few descriptors. Notices go back over the same connection. When the connection ends, the client
counts as gone. A descriptor proves that the client itself may write to the memory. If the client takes pages away
later, the server's writes fail, and nothing worse (`shared_region`).

Messages both ways, one per packet: JSON, or notices (descriptors.notices).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from descriptors.messages import AGENT_REGIONS_MAX, Region
from descriptors.shm_messages import MESSAGE_BYTES_MAX, RegionOffer, greeting, parse_offer, reply
from objectcache.adapters.caller import CALLER, CallerTurns
from objectcache.adapters.threads import to_end
from storage_server.delivery.transport.shared_region import FaultGuard, OfferError, SharedRegion, check_offer

UNREGISTERED_MAX = 64
UNREGISTERED_UID_MAX = 16
"""The most connections of one user of this host, so that no user takes every place."""
UNREGISTERED_S = 10.0
UNREGISTERED_REGIONS_MAX = 16
MALFORMED_MAX = 3
"""A connection ends with so many messages that are no offers: no client sends any."""
ACCEPT_PAUSE_S = 1.0
BACKLOG = 64
_CREDENTIALS = struct.Struct("iII")
_log = logging.getLogger(__name__)


REFUSED_MAX = 64


class ShmClient:
    """One connection of a process of user `uid`. Used on the event loop. Descriptors in `offered` are held until they
    are mapped or the connection ends; `regions` stay mapped until `close`.
    """

    def __init__(self, connection: socket.socket, ticket: str, uid: int) -> None:
        self.ticket = ticket
        self.uid = uid
        self.offered: dict[str, tuple[int, int]] = {}
        """Region id to (descriptor, length in bytes)."""
        self.regions: dict[str, SharedRegion] = {}
        self.is_registered = False
        self.malformed_count = 0
        self._is_closed = False
        self._connection: socket.socket | None = connection

    @property
    def is_gone(self) -> bool:
        """Whether the connection has ended."""
        return self._connection is None

    def notify(self, message: bytes) -> None:
        """Send a notice. If the client's socket is full, the notice is lost, as any notice may be."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    async def map(self, wanted: Sequence[Region], guard: FaultGuard) -> None:
        """Map regions that were handed in with these ids and lengths: all of them, or none. Raises OfferError, OSError,
        and ConnectionError where the client has gone meanwhile. Regions that were mapped before the failure are
        unmapped, because nobody counts them; the client hands them in again.
        """
        fresh: list[str] = []
        try:
            for region in wanted:
                if region.region_id not in self.regions:
                    await self._map_offered(region.region_id, guard)
                    fresh.append(region.region_id)
        except BaseException:
            for region_id in fresh:
                self.forget(region_id)
            raise

    async def _map_offered(self, region_id: str, guard: FaultGuard) -> None:
        fd, nbytes = self.offered.pop(region_id)
        mapping = asyncio.get_running_loop().run_in_executor(None, guard.map, fd, nbytes)
        try:
            mapped = await to_end(mapping)
        except asyncio.CancelledError:
            if not mapping.cancelled() and mapping.exception() is None:
                _unmap(mapping.result())
            raise
        finally:
            os.close(fd)
        if self._is_closed:  # `close` ran while the thread mapped: nobody else would unmap the region
            _unmap(mapped)
            raise ConnectionResetError("the client is gone")
        self.regions[region_id] = mapped

    def knows(self, region: Region) -> bool:
        """Whether the region was handed in, with this length."""
        offered = self.offered.get(region.region_id)
        mapped = self.regions.get(region.region_id)
        if mapped is not None:
            return mapped.nbytes >= region.length
        return offered is not None and offered[1] == region.length

    def forget(self, region_id: str) -> None:
        """Remove a region that nothing is written to any more. A thread unmaps it."""
        offered, region = self.offered.pop(region_id, None), self.regions.pop(region_id, None)
        if offered is not None:
            os.close(offered[0])
        if region is not None:
            _unmap(region)

    def hang_up(self) -> None:
        """End the connection. Its reading task then closes it; the regions stay mapped."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Unmap the regions and close the descriptors. Nothing may write for this client any more."""
        self.hang_up()
        self._is_closed = True
        for region_id in [*self.offered, *self.regions]:
            self.forget(region_id)


class ShmDoor:
    """Listens at `address`, an abstract Unix socket of this network namespace; the name is not secret. Processes of
    this user, of root and of `users` may come in. `on_gone` is called with the ticket of a registered client whose
    connection has ended.
    """

    def __init__(self, on_gone: Callable[[str], None], users: Iterable[int] = ()) -> None:
        self._users = frozenset((os.geteuid(), 0, *users))
        self.address = f"@objectcache-{secrets.token_hex(16)}"
        self._on_gone = on_gone
        self._listener: socket.socket | None = None
        self._guard: FaultGuard | None = None
        self._clients: dict[str, ShmClient] = {}
        self._refused: set[int] = set()
        """Users that were told of."""
        self._turns = CallerTurns(1)
        """One message is taken at a time, by users in turn: thousands of connections together would otherwise keep the
        event loop for as long as all their messages take.
        """
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def client_count(self) -> int:
        """How many connections are open, registered or not."""
        return len(self._clients)

    def start(self) -> None:
        """Listen. Raises OSError where it cannot listen, or memory cannot be mapped safely."""
        guard = FaultGuard()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind("\0" + self.address[1:])
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            guard.close()
            raise
        self._listener, self._guard = listener, guard
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    async def close(self) -> None:
        """Close every connection. Deliveries must have ended."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for ticket in list(self._clients):
            self.dismiss(ticket)
        if self._guard is not None:
            self._guard.close()  # nobody writes any more, not even to regions that are still being unmapped

    async def map(self, client: ShmClient, regions: Sequence[Region]) -> None:
        """Map regions of a client. Raises what `ShmClient.map` raises."""
        if self._guard is None:
            raise ConnectionResetError("the door is closed")
        await client.map(regions, self._guard)

    def client(self, ticket: str) -> ShmClient | None:
        """The connection that got this ticket; None when it has ended."""
        client = self._clients.get(ticket)
        return None if client is None or client.is_gone else client

    def dismiss(self, ticket: str) -> None:
        """Close a client for which nothing is written any more."""
        client = self._clients.pop(ticket, None)
        if client is not None:
            client.close()

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is left: wait, since an immediate retry would fail again
            _log.warning("the shm door is closed for %.0f s: %s", ACCEPT_PAUSE_S, error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(ACCEPT_PAUSE_S, self._listen_again)
            return
        uid = peer_uid(connection)
        if uid not in self._users:  # whoever hands descriptors over can make their last close wait for ever
            if uid not in self._refused and len(self._refused) < REFUSED_MAX:
                self._refused.add(uid)
                _log.warning("user %d may not use shm here: [storage] shm = [%d] lets that user", uid, uid)
            connection.close()
            return
        waiting = Counter(client.uid for client in self._clients.values() if not client.is_registered)
        if waiting.total() >= UNREGISTERED_MAX or waiting[uid] >= UNREGISTERED_UID_MAX:
            connection.close()
            return
        connection.setblocking(False)
        client = ShmClient(connection, secrets.token_hex(16), uid)
        self._clients[client.ticket] = client
        client.notify(greeting(client.ticket))
        task = asyncio.create_task(self._serve(client, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _listen_again(self) -> None:
        if self._listener is not None and self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def _serve(self, client: ShmClient, connection: socket.socket) -> None:
        """Take offers until the connection ends. A client that does not register in time is disconnected."""
        CALLER.set(f"user {client.uid}")
        loop = asyncio.get_running_loop()
        late = loop.call_later(UNREGISTERED_S, self._send_away, client)
        try:
            while client.malformed_count < MALFORMED_MAX:
                await _readable(connection)
                async with self._turns.turn():
                    self._take(client, connection)
                    await asyncio.sleep(0)
        except (OSError, EOFError):
            pass
        finally:
            late.cancel()
            client.hang_up()
            connection.close()
            if client.is_registered:
                self._on_gone(client.ticket)
            else:
                self.dismiss(client.ticket)

    def _send_away(self, client: ShmClient) -> None:
        if not client.is_registered:
            client.hang_up()

    def _take(self, client: ShmClient, connection: socket.socket) -> None:
        """Take one offer. Raises OSError, EOFError when the connection has ended."""
        data, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES_MAX, 1)
        try:
            if not data:
                raise EOFError
            try:
                offer = _parsed(client, data)
                if not fds:
                    raise OfferError("the offer came without a descriptor")
                _check_region_id(client, offer.region_id)
                check_offer(fds[0], offer.nbytes)
            except (OfferError, ValueError, OSError) as error:
                client.notify(reply(str(error)))
            else:
                client.offered[offer.region_id] = (fds.pop(0), offer.nbytes)
                client.notify(reply(None))
        finally:
            for fd in fds:
                os.close(fd)


def _parsed(client: ShmClient, data: bytes) -> RegionOffer:
    try:
        return parse_offer(data)
    except ValueError:
        client.malformed_count += 1
        raise


def _check_region_id(client: ShmClient, region_id: str) -> None:
    if region_id in client.regions or region_id in client.offered:
        raise OfferError("the region is known already")
    own_max = AGENT_REGIONS_MAX if client.is_registered else UNREGISTERED_REGIONS_MAX
    if len(client.regions) + len(client.offered) >= own_max:
        raise OfferError(f"at most {own_max} regions")
    if len(client.offered) >= UNREGISTERED_REGIONS_MAX:
        raise OfferError(f"at most {UNREGISTERED_REGIONS_MAX} regions that are not registered yet")


def _unmap(region: SharedRegion) -> None:
    asyncio.get_running_loop().run_in_executor(None, region.unmap)


def peer_uid(connection: socket.socket) -> int:
    """The user of the process that connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection.fileno(), _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(connection.fileno())


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
