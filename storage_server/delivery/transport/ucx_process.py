"""The server's side of the ucx process: starts it, gives it memory, and learns how each command ended.

When the process ends, every command under way fails, its peers are forgotten, and the process is started again. So a
peer that crashes the process costs only the ucx deliveries in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from descriptors.storage_api import Spans
from objectcache.adapters.child_process import child_environment, spawned
from objectcache.adapters.lines import lines_of
from objectcache.adapters.memory_area import SharedArea
from objectcache.adapters.nixl_agent import NixlFailure, PeerLost
from objectcache.adapters.nixl_memory import Memory
from objectcache.adapters.threads import to_end
from storage_server.delivery.transport.rules.ucx_commands import (
    REPLY_BYTES_MAX,
    AddPeer,
    Command,
    EndFlight,
    Notify,
    Read,
    RemovePeer,
    Reply,
    WriteGroup,
    WriteSpans,
    decode_reply,
    encode_command,
)
from storage_server.planning.area_span import area_spans

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 10.0
RESTART_S, RESTART_S_MAX = 0.1, 30.0
"""The first and the longest wait before a restart. The wait doubles as long as the process does not live for
RESTART_S_MAX.
"""
STRAYS_MAX = 1_000
"""A process that tells the ends of more commands that nobody gave is ended."""
_log = logging.getLogger(__name__)

OnEnded = Callable[[int, NixlFailure | None], None]
"""(bytes NIXL counted, failure): called once for every write and read, when the server's memory may be used again."""


def ucx_environment(environment: Mapping[str, str], devices: str) -> dict[str, str]:
    """The environment of a process with a UCX agent, which listens on `devices`."""
    return {**child_environment(environment, ("UCX_", "NIXL_")), "UCX_NET_DEVICES": devices}


@dataclass(slots=True)
class _Waiting:
    peer: str
    on_ended: OnEnded


class UcxProcess:
    """One per storage server. Used on one event loop. `on_gone` is called when the process has ended by itself."""

    def __init__(self, areas: Sequence[SharedArea], devices: str, on_gone: Callable[[], None]) -> None:
        self._areas = areas
        self._places = [(area.address, area.nbytes) for area in areas]
        self._devices = devices
        self._on_gone = on_gone
        self._numbers = itertools.count(1)
        self._flights = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._stray_count = 0
        """Replies of the process to no command."""
        self._child: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.start_count = 0
        """How often the process has been started."""

    @property
    def is_running(self) -> bool:
        """Whether commands can be given now."""
        return self._writer is not None

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return None if self._child is None else self._child.pid

    @property
    def in_flight_count(self) -> int:
        """How many commands were given and have not ended."""
        return len(self._waiting)

    async def start(self) -> None:
        """Start the process. Raises NixlFailure where UCX cannot run."""
        reader = await self._launch()
        self._keeper = asyncio.create_task(self._keep(reader))

    async def stop(self) -> None:
        """End the process. Commands under way fail."""
        self._is_stopping = True
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self._keeper is not None:
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await asyncio.shield(self._keeper)
            except TimeoutError:
                self._kill()
                await self._keeper

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
        too_late = loop.call_later(ANSWER_TIMEOUT_S, self._kill)
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
        if self._writer is None:
            return False
        self._writer.write(encode_command(number, command))
        return True

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

    async def _launch(self) -> asyncio.StreamReader:
        """Start the process and wait until it can take commands. Raises NixlFailure."""
        self.start_count += 1
        self._stray_count = 0
        environment = ucx_environment(os.environ, self._devices)
        try:
            self._child, ours = await spawned("storage_server.delivery.transport.ucx_engine", self._areas, environment)
        except OSError as error:
            raise NixlFailure(f"the ucx process cannot be started: {error}") from error
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=REPLY_BYTES_MAX)
            async with asyncio.timeout(START_TIMEOUT_S):
                first = decode_reply(await reader.readline())
            if first.reason is not None:
                raise NixlFailure(first.reason)
        except (ValueError, TimeoutError, NixlFailure) as error:
            ours.close()
            self._kill()
            await self._child.wait()
            raise NixlFailure(f"the ucx process does not start: {error}") from error
        except BaseException:
            self._kill()
            raise
        self._writer = writer
        return reader

    async def _keep(self, reader: asyncio.StreamReader) -> None:
        """Read replies, and start the process again when it has ended."""
        pause_s = RESTART_S
        while True:
            began_s = time.monotonic()
            await self._hear(reader)
            await self._gone()
            if self._is_stopping:
                return
            if time.monotonic() - began_s > RESTART_S_MAX:
                pause_s = RESTART_S
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RESTART_S_MAX)
                if self._is_stopping:
                    return
                try:
                    reader = await self._launch()
                    break
                except NixlFailure as failure:
                    _log.warning("%s; it is tried again in %.1f s", failure, pause_s)

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        try:
            async for line in lines_of(reader):
                self._end(decode_reply(line))
        except (ValueError, OSError) as error:
            if not self._is_stopping:
                _log.warning("the ucx process sent an invalid reply (%s) and is ended", error)

    async def _gone(self) -> None:
        """Fail the commands under way. When the process has been waited for, nothing of it is in flight."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if not self._is_stopping:
            self._kill()
        status = await self._child.wait() if self._child is not None else 0
        for number in list(self._waiting):
            self._end(Reply(number, 0, "the ucx process has ended", is_peer_lost=True))
        if not self._is_stopping:
            _log.warning("the ucx process ended with status %d and is started again", status)
            self._on_gone()

    def _kill(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
