"""The server's side of the ucx process: gives it commands, and learns how each one ended.

When the process ends, every command under way fails, its peers are forgotten, and the process is started again
(`ucx_child`). So a peer that crashes the process costs only the ucx deliveries in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from descriptors.storage_api import Spans
from objectcache.adapters.memory_area import SharedArea
from objectcache.adapters.nixl_agent import NixlFailure, PeerLost
from objectcache.adapters.nixl_memory import Memory
from objectcache.adapters.threads import to_end
from storage_server.delivery.transport.rules.ucx_commands import (
    AddPeer,
    Command,
    EndFlight,
    Notify,
    Read,
    RemovePeer,
    Reply,
    WriteGroup,
    WriteSpans,
    encode_command,
)
from storage_server.delivery.transport.ucx_child import UcxChild
from storage_server.planning.area_span import area_spans

ANSWER_TIMEOUT_S = 10.0
STRAYS_MAX = 1_000
"""A process that tells the ends of more commands that nobody gave is ended."""
_log = logging.getLogger(__name__)

OnEnded = Callable[[int, NixlFailure | None], None]
"""(bytes NIXL counted, failure): called once for every write and read, when the server's memory may be used again."""


@dataclass(slots=True)
class _Waiting:
    peer: str
    on_ended: OnEnded


class UcxProcess:
    """One per storage server. Used on one event loop. `on_gone` is called when the process has ended by itself."""

    def __init__(self, areas: Sequence[SharedArea], devices: str, on_gone: Callable[[], None]) -> None:
        self._places = [(area.address, area.nbytes) for area in areas]
        self.child = UcxChild(areas, devices, on_reply=self._end, on_end=self._fail_all, on_gone=on_gone)
        self._numbers = itertools.count(1)
        self._flights = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._stray_count = 0
        """Replies of the process to no command."""

    @property
    def is_running(self) -> bool:
        """Whether commands can be given now."""
        return self.child.is_running

    @property
    def in_flight_count(self) -> int:
        """How many commands were given and have not ended."""
        return len(self._waiting)

    async def start(self) -> None:
        """Start the process. Raises NixlFailure where UCX cannot run."""
        await self.child.start()

    async def stop(self) -> None:
        """End the process. Commands under way fail."""
        await self.child.stop()

    async def add_peer(self, name: str, metadata: bytes, offered: Sequence[Memory]) -> None:
        """Make a peer known and open the connection, so that the first write does not have to. Raises NixlFailure when
        the metadata cannot be used. The name is forgotten after a failure, and also when the caller is cancelled.
        """
        adding = asyncio.ensure_future(self._ask(AddPeer(name, metadata, tuple(offered))))
        try:
            await to_end(adding)
        except asyncio.CancelledError:
            with contextlib.suppress(NixlFailure):
                await to_end(asyncio.ensure_future(self.remove_peer(name)))
            raise

    async def remove_peer(self, name: str) -> None:
        """Disconnect and forget a peer; its transfers in flight fail. Raises NixlFailure where the process is gone."""
        await self._ask(RemovePeer(name))

    def disconnect(self, name: str) -> None:
        """Begin `remove_peer` without waiting. A process that does not carry it out is killed."""
        loop = asyncio.get_running_loop()
        too_late = loop.call_later(ANSWER_TIMEOUT_S, self.child.kill)
        self._give(RemovePeer(name), name, lambda counted, failure: too_late.cancel())

    def begin_flight(self) -> int:
        """A new number for the writes of one delivery."""
        return next(self._flights)

    def end_flight(self, flight: int) -> None:
        """Say that the flight gets no more writes."""
        self._send(0, EndFlight(flight))

    def write(
        self, peer: str, spans: Spans, targets: Sequence[Memory], group: WriteGroup | None, on_ended: OnEnded
    ) -> None:
        """Write the server's `spans`, one after the other, to `targets`, one after the other, of one kind of memory and
        as many bytes; `on_ended` is called at the end.
        """
        places = area_spans(self._places, [(int(address), int(nbytes)) for address, nbytes in spans])
        self._give(WriteSpans(peer, places, tuple(targets), group), peer, on_ended)

    def read(self, peer: str, sources: Sequence[Memory], address: int, on_ended: OnEnded) -> None:
        """Read `sources`, one after the other, to the server's `address`; `on_ended` is called at the end."""
        nbytes = sum(source.nbytes for source in sources)
        (place,) = area_spans(self._places, [(address, nbytes)])
        self._give(Read(peer, tuple(sources), place), peer, on_ended)

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notice, which may be lost."""
        self._send(0, Notify(peer, message))

    async def _ask(self, command: Command) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(_: int, failure: NixlFailure | None) -> None:
            if done.cancelled():
                return
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)

        self._give(command, "", settle)
        await done

    def _give(self, command: Command, peer: str, on_ended: OnEnded) -> None:
        number = next(self._numbers)
        self._waiting[number] = _Waiting(peer, on_ended)
        if not self._send(number, command):
            self._end(Reply(number, 0, "the ucx process is not running", is_peer_lost=True))

    def _send(self, number: int, command: Command) -> bool:
        return self.child.send(encode_command(number, command))

    def _fail_all(self) -> None:
        self._stray_count = 0
        for number in list(self._waiting):
            self._end(Reply(number, 0, "the ucx process has ended", is_peer_lost=True))

    def _end(self, reply: Reply) -> None:
        waiting = self._waiting.pop(reply.number, None)
        if waiting is None:
            self._stray_count += 1
            if self._stray_count > STRAYS_MAX:
                raise ValueError("replies to no command")
            return
        failure = None
        if reply.reason is not None:
            failure = PeerLost(reply.reason) if reply.is_peer_lost else NixlFailure(reply.reason)
        try:
            waiting.on_ended(reply.counted, failure)
        except Exception:  # other commands must still be told that they have ended
            _log.exception("the callback of a finished transfer failed")
