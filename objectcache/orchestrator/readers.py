"""Readers: a few processes that parse what is large and make tokens. The event loop only passes bytes to them.

A body that takes longer than READ_S, or more memory than a process may have, costs its sender an error, and this pool
one process or two, which are started anew: a process may have been killed for another reason, so the body of one that
ends is read once more in a new one. One caller, a tenant or an address where there are no tenants, has at most half of
the processes at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from objectcache.adapters.loop_share import LoopShare
from objectcache.adapters.threads import computed
from objectcache.orchestrator.body_pieces import pieces_of
from objectcache.orchestrator.rules import reading
from objectcache.orchestrator.rules.forms import form_steps
from objectcache.orchestrator.rules.openai_requests import TokenIds, WrongRequestError
from objectcache.orchestrator.tokenizer import NoTokensError, TokenizerFiles

INLINE_BYTES = 1 << 14
"""So much is parsed where it is: it takes some milliseconds at worst."""
READ_S = 10.0
START_S = 60.0
WAITING_MAX = 1024
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "TMPDIR")
_PACKAGES = str(Path(__file__).resolve().parents[2])
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_log = logging.getLogger(__name__)


class ReadingError(Exception):
    """A body could not be read: it takes too long or too much memory (`is_busy` False), or too many wait."""

    def __init__(self, message: str, *, is_busy: bool = False) -> None:
        super().__init__(message)
        self.is_busy = is_busy


class _LostError(Exception):
    """A process has ended, or answers no frames."""


class Readers:
    """Used on one event loop. `tokenizer` names a model's files, for `tokens`. Small bodies are read on the loop, in
    turns of `share`: hundreds that end in one pass of it would stop it for a second.
    """

    def __init__(
        self,
        tokenizer: Path | None = None,
        count: int | None = None,
        read_s: float = READ_S,
        share: LoopShare | None = None,
    ) -> None:
        self._share = share or LoopShare()
        self._folder = tokenizer
        self._files: TokenizerFiles | None = None
        self._count = count or max(2, min(8, os.cpu_count() or 1))
        self._read_s = read_s
        self._free = asyncio.Semaphore(self._count)
        self._idle: list[_Reader] = []
        self._running: Counter[str] = Counter()
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._left: set[asyncio.Task[tuple[dict[str, Any], list[bytes]]]] = set()
        """Frames whose callers have hung up."""
        self._is_stopped = False
        self.failure_count = 0
        """How many processes were ended because they took too long, or ended by themselves."""
        self.started_count = 0

    @property
    def busy_count(self) -> int:
        """Frames that are read, or wait for a process."""
        return self._running.total()

    @property
    def has_tokenizer(self) -> bool:
        """Whether `tokens` can be called."""
        return self._folder is not None

    async def start(self) -> None:
        """Start a first process where there are files of a tokenizer. Raises ValueError where they cannot be read."""
        if self._folder is not None:
            self._files = await computed(partial(TokenizerFiles.read, self._folder.absolute()), is_long=True)
            self._idle.append(await self._started(is_first=True))

    async def stop(self) -> None:
        """End all processes."""
        self._is_stopped = True
        for task in self._left:
            task.cancel()
        await asyncio.gather(*self._left, return_exceptions=True)
        while self._idle:
            self._end(self._idle.pop())
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def read(self, raw: bytes, order: reading.Order, caller: str = "") -> reading.ReadBody:
        """Read a request's body. `caller` has the turn; where none is named, the order's tenant. Raises
        WrongRequestError, ReadingError.
        """
        caller = caller or order.tenant
        if len(raw) <= INLINE_BYTES:
            async with self._share.turn(caller):
                return reading.read_body(raw, order)
        head, blobs = await self._asked(caller, {"call": "read", "order": reading.packed_order(order)}, raw)
        return reading.body_of(head, blobs, raw)

    async def fields(self, caller: str, content_type: str, raw: bytes) -> list[tuple[str, bytes]]:
        """The fields of a form, on the loop: looking for its boundary takes a millisecond for each MiB. Raises
        WrongFormError.
        """
        steps = form_steps(content_type, raw)
        while True:
            async with self._share.turn(caller):
                try:
                    next(steps)
                except StopIteration as end:
                    found: list[tuple[str, bytes]] = end.value
                    return found

    async def edited(
        self, caller: str, raw: bytes, drop: Sequence[str], put: Mapping[str, Any], handed_over: bytes = b""
    ) -> bytes:
        """The body without some fields, and with others, and with what was handed over. Raises WrongRequestError,
        ReadingError.
        """
        if len(raw) + len(handed_over) <= INLINE_BYTES:
            async with self._share.turn(caller):
                return reading.edited(raw, drop, put, handed_over)
        head = {"call": "edit", "drop": list(drop), "put": dict(put)}
        _, (changed,) = await self._asked(caller, head, raw, handed_over)
        return changed

    async def handed_over(self, engine: str, answer: bytes) -> bytes:
        """The parameters, as JSON, that an engine's answer has for another engine. Long answers of one engine take
        turns as those of a caller do. Raises WrongRequestError, ReadingError.
        """
        if len(answer) <= INLINE_BYTES:
            async with self._share.turn(engine):
                return reading.handed_over(answer)
        _, (params,) = await self._asked(engine, {"call": "handed over"}, answer)
        return params

    async def tokens(self, caller: str, document: bytes) -> TokenIds:
        """The tokens of a `/tokenize` document, by the model's own files. Raises NoTokensError, ReadingError."""
        _, (tokens,) = await self._asked(caller, {"call": "tokens"}, document)
        return np.frombuffer(tokens, np.uint32)

    async def answered_tokens(self, caller: str, answer: bytes) -> TokenIds:
        """The tokens of an engine's answer. Raises NoTokensError, ReadingError."""
        if len(answer) <= INLINE_BYTES:
            try:
                async with self._share.turn(caller):
                    return reading.answered_tokens(answer)
            except ValueError as error:
                raise NoTokensError(str(error)) from None
        _, (tokens,) = await self._asked(caller, {"call": "answer"}, answer)
        return np.frombuffer(tokens, np.uint32)

    async def _asked(self, caller: str, head: Mapping[str, Any], *blobs: bytes) -> tuple[dict[str, Any], list[bytes]]:
        """The answer to a frame. A caller that hangs up while a process reads its frame leaves it to the process: one
        that was ended would have to be started anew, for the next caller's body.
        """
        begun = asyncio.Event()
        reading_it = asyncio.create_task(self._in_turn(caller, head, blobs, begun))
        try:
            answer, answered = await asyncio.shield(reading_it)
        except asyncio.CancelledError:
            if not begun.is_set():
                reading_it.cancel()
            self._left.add(reading_it)
            reading_it.add_done_callback(self._left_is_over)
            raise
        problem = answer.get("error")
        if problem is None:
            return answer, answered
        if answer["about"] == "request":
            raise WrongRequestError(problem, answer["field"])
        raise ReadingError(problem) if answer["about"] == "size" else NoTokensError(problem)

    async def _in_turn(
        self, caller: str, head: Mapping[str, Any], blobs: Sequence[bytes], begun: asyncio.Event
    ) -> tuple[dict[str, Any], list[bytes]]:
        async with self.turn(caller):
            begun.set()
            try:
                return await self._answered(head, blobs)
            except _LostError:  # it may have been killed for another reason than this body
                try:
                    return await self._answered(head, blobs, is_fresh=True)
                except _LostError as error:
                    raise ReadingError("it takes too much memory to read") from error

    def _left_is_over(self, task: asyncio.Task[tuple[dict[str, Any], list[bytes]]]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # nobody else asks

    async def _answered(
        self, head: Mapping[str, Any], blobs: Sequence[bytes], *, is_fresh: bool = False
    ) -> tuple[dict[str, Any], list[bytes]]:
        """The answer of an idle process, or of a new one. Raises _LostError where the process has ended."""
        while self._idle and not self._idle[-1].is_running:
            self._end(self._idle.pop())
        reader = self._idle.pop() if self._idle and not is_fresh else await self._started()
        try:
            async with asyncio.timeout(self._read_s):
                answer, answered = await reader.ask(reading.packed(head, blobs))
        except BaseException as error:
            self._end(reader)
            self.failure_count += not isinstance(error, asyncio.CancelledError)
            if isinstance(error, TimeoutError):
                raise ReadingError(f"it takes more than {self._read_s:g} s to read") from None
            if isinstance(error, OSError | asyncio.IncompleteReadError | ValueError):
                raise _LostError from error
            raise
        self._idle.append(reader)
        if self._is_stopped:
            self._end(self._idle.pop())
        return answer, answered

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """A place among the processes, of which one caller has at most half. As many wait as are still free for others:
        the first caller has half of the places, the next one half of the rest.
        """
        if self._running[caller] >= WAITING_MAX - self._running.total():
            raise ReadingError("too many large bodies wait to be read", is_busy=True)
        own = self._turns.setdefault(caller, asyncio.Semaphore((self._count + 1) // 2))
        self._running[caller] += 1
        try:
            async with own, self._free:
                yield
        finally:
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller], self._turns[caller]

    def _end(self, reader: _Reader) -> None:
        """End a process that is of no use any more."""
        ending = asyncio.create_task(reader.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _started(self, *, is_first: bool = False) -> _Reader:
        """A new process. Raises ReadingError where it does not start; ValueError where the first one cannot read the
        tokenizer.
        """
        environment = {name: value for name, value in os.environ.items() if name in _KEPT}
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "objectcache.orchestrator.reading_process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**environment, **_ONE_THREAD, "PYTHONPATH": _PACKAGES},
                limit=1 << 20,
                cwd="/",
            )
        except OSError as error:
            raise ReadingError(f"no process can be started: {error}", is_busy=True) from error
        reader = _Reader(process)
        self.started_count += 1
        try:
            async with asyncio.timeout(START_S):
                head, _ = await reader.answer()
                if self._files is not None:
                    head, _ = await reader.ask(_packed_files(self._files))
        except BaseException as error:
            self._end(reader)
            if isinstance(error, TimeoutError | OSError | asyncio.IncompleteReadError):
                raise ReadingError("a reading process does not start", is_busy=True) from error
            raise
        if "error" in head:
            self._end(reader)
            if is_first:
                raise ValueError(head["error"])
            _log.error("a reading process cannot start: %.300r", head["error"])
            raise ReadingError("a reading process cannot start", is_busy=True)
        return reader


def _packed_files(files: TokenizerFiles) -> list[bytes]:
    head = {"call": "tokenizer", "name": files.name}
    return reading.packed(head, (files.tokenizer, files.config, files.template))


class _Reader:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._requests, self._answers = process, process.stdin, process.stdout

    @property
    def is_running(self) -> bool:
        """Whether the process has not been seen to end."""
        return self._process.returncode is None and not self._answers.at_eof()

    async def ask(self, pieces: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """One frame, and its answer. Raises OSError, IncompleteReadError, ValueError."""
        for each in pieces:
            for piece in pieces_of(each):
                self._requests.write(piece)
                await self._requests.drain()
        return await self.answer()

    async def answer(self) -> tuple[dict[str, Any], list[bytes]]:
        """The next frame. Raises OSError, IncompleteReadError, ValueError."""
        (length,) = reading.HEAD.unpack(await self._answers.readexactly(reading.HEAD.size))
        if length > reading.HEAD_BYTES_MAX:
            raise ValueError("a head that is too long")
        head, lengths = reading.head_of(await self._answers.readexactly(length))
        return head, [await self._answers.readexactly(each) for each in lengths]

    async def end(self) -> None:
        """End the process, and wait for that."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._requests.close()
        while await self._answers.read(1 << 20):  # the pipe ends with the process
            continue
        await self._process.wait()
