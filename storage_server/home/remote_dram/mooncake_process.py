"""The server's side of the Mooncake process: starts it, gives it memory, and learns how each call ended."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import os
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlsplit

from objectcache.adapters.child_process import child_environment, spawned
from objectcache.adapters.lines import lines_of
from objectcache.adapters.memory_area import SharedArea
from objectcache.adapters.threads import to_end
from storage_server.home.rules.mooncake_commands import (
    ANSWER_BYTES_MAX,
    KEYS_MAX,
    CallKind,
    Join,
    MooncakeAnswer,
    MooncakeCall,
    decode_answer,
    encode_call,
    encode_join,
)
from storage_server.planning.area_span import area_spans
from storage_server.settings import RemoteDramSettings

JOIN_WAIT_S = 30.0
CALL_WAIT_S = 120.0
"""A process with a call that takes longer is ended: Mooncake's own limits are 30 and 60 s."""
LEAVE_WAIT_S = 10.0
STRAYS_MAX = 1_000
"""A process that tells the ends of more commands that nobody gave is ended."""
_log = logging.getLogger(__name__)

Spans = Sequence[tuple[int, int]]
"""(address, nbytes) of the server's memory in areas that the process has."""


class RemoteDramError(Exception):
    """Remote DRAM cannot be used; the message says what to do."""


class MooncakeClient(Protocol):
    """A Mooncake Store that was joined. Codes are Mooncake's, negative ones errors. Calls raise ConnectionError where
    they cannot be carried out; the memory is free when a call has ended, and only then, but see `may_move_on`.
    """

    @property
    def is_running(self) -> bool: ...

    @property
    def has_ended(self) -> bool: ...

    async def get(self, key: str, spans: Spans) -> int: ...

    async def put(self, key: str, spans: Spans) -> int: ...

    async def remove(self, keys: Sequence[str]) -> list[int]: ...

    async def close(self) -> None: ...


def require_client() -> None:
    """Raises RemoteDramError where Mooncake's client is not installed."""
    if importlib.util.find_spec("mooncake") is None:
        raise RemoteDramError(
            "[upstream.remote_dram] needs Mooncake's client: pip install mooncake-transfer-engine-non-cuda"
        )


async def joined(settings: RemoteDramSettings, areas: Sequence[SharedArea]) -> MooncakeClient:
    """Start a process that joins the store and has this memory. Raises ConnectionError."""
    master = urlsplit(settings.endpoint).netloc
    join = Join(master, settings.host, settings.segment_bytes, settings.protocol, settings.devices)
    environment = child_environment(os.environ, ("MC_", "MOONCAKE_", "GLOG_"))
    if "PYTHONPATH" in os.environ:  # where Mooncake may lie
        environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    try:
        process, ours = await spawned("storage_server.home.remote_dram.mooncake_engine", areas, environment)
    except OSError as error:
        raise ConnectionError(f"the Mooncake process cannot be started: {error}") from error
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=ANSWER_BYTES_MAX)
        writer.write(encode_join(join))
        async with asyncio.timeout(JOIN_WAIT_S):
            first = decode_answer(await reader.readline())
        if first.problem is not None:
            raise ConnectionError(first.problem)
    except BaseException as error:
        (writer or ours).close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if isinstance(error, ValueError | OSError):
            raise ConnectionError(f"Mooncake's master at {master} cannot be joined: {error!r}") from error
        raise
    return MooncakeProcess(process, reader, writer, areas)


class MooncakeProcess:
    """One that has joined a store. Used on one event loop."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        areas: Sequence[SharedArea],
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._places = [(area.address, area.nbytes) for area in areas]
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[int, ...]]] = {}
        self._stray_count = 0
        """Answers to no call."""
        self._is_closing = False
        self._hearing = asyncio.create_task(self._hear())

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether calls can be given."""
        return not self._is_closing and not self._hearing.done()

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the process runs any more."""
        return self._hearing.done()

    async def get(self, key: str, spans: Spans) -> int:
        """Bring a value of the size of all spans into them; its size, or a code."""
        (code,) = await self._call(CallKind.GET, (key,), spans)
        return code

    async def put(self, key: str, spans: Spans) -> int:
        """Keep a value in the place of what is there; 0, or a code."""
        (code,) = await self._call(CallKind.PUT, (key,), spans)
        return code

    async def remove(self, keys: Sequence[str]) -> list[int]:
        """Remove values; a code for each."""
        codes: list[int] = []
        for start in range(0, len(keys), KEYS_MAX):
            codes += await self._call(CallKind.REMOVE, tuple(keys[start : start + KEYS_MAX]), ())
        return codes

    async def close(self) -> None:
        """Leave the store; a process that does not end is killed."""
        self._is_closing = True
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_WAIT_S):
                await self._process.wait()
        self._kill()
        await self._hearing

    async def _call(self, kind: CallKind, keys: tuple[str, ...], spans: Spans) -> tuple[int, ...]:
        """Ends when the call has ended, even where the caller is cancelled: until then its memory is in use."""
        if not self.is_running:
            raise ConnectionError("the Mooncake process is not running")
        loop = asyncio.get_running_loop()
        call = MooncakeCall(next(self._numbers), kind, keys, area_spans(self._places, spans))
        done = self._waiting[call.number] = loop.create_future()
        too_late = loop.call_later(CALL_WAIT_S, self._kill)
        self._writer.write(encode_call(call))
        try:
            codes: tuple[int, ...] = await to_end(done)
        finally:
            too_late.cancel()
        if len(codes) != len(keys):
            self._kill()
            raise ConnectionError("the Mooncake process gave no valid answer")
        return codes

    async def _hear(self) -> None:
        """Read answers until the process ends; when nothing of it runs any more, what it has not answered fails."""
        try:
            async for line in lines_of(self._reader):
                self._end(decode_answer(line))
        except (ValueError, OSError) as error:
            if not self._is_closing:
                _log.warning("the Mooncake process sent an invalid answer (%s) and is ended", error)
        if not self._is_closing:
            self._kill()
        status = await self._process.wait()
        if not self._is_closing:
            _log.warning("the Mooncake process ended with status %d", status)
        self._writer.close()
        for number in list(self._waiting):
            self._end(MooncakeAnswer(number, (), "the Mooncake process has ended"))

    def _end(self, answer: MooncakeAnswer) -> None:
        done = self._waiting.pop(answer.number, None)
        if done is None:
            self._stray_count += 1
            if self._stray_count > STRAYS_MAX:
                raise ValueError("answers to no call")
            return
        if done.done():
            return
        if answer.problem is None:
            done.set_result(answer.codes)
        else:
            done.set_exception(ConnectionError(answer.problem))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
