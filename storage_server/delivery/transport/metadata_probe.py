"""MetadataProbe: a client's NIXL metadata is loaded first in a child process that may crash, then in the ucx process.

NIXL 1.5.1 hands the connection part of the metadata to UCX unchecked. Metadata with four bytes changed crashed the
process about one time in fifty (SIGSEGV, or an assertion in UCX's address.c), always while loading. So a child loads
the metadata first: metadata that crashes the child, or fails there, is refused, and a new child takes its place.

Run as a module this is the child: it reads one JSON object per line and answers `ok` or a reason.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence

from objectcache.adapters.nixl_agent import Agent, NixlFailure, leave
from objectcache.adapters.nixl_memory import Memory
from objectcache.adapters.threads import to_end

ANSWER_TIMEOUT_S = 20.0
ANSWER_BYTES_MAX = 64 << 10
_OK = "ok"


class MetadataProbe:
    """Runs one child at a time; checks queue for it. `start` has the child ready before the first registration. The
    child gets `environment` and no other data of the server, because its own agent can be reached by others, too.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._child: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._warming: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start a child in the background."""
        self._warming = asyncio.create_task(self._warm())

    async def check(self, metadata: bytes, offered: Sequence[Memory]) -> None:
        """Raises NixlFailure when the metadata cannot be loaded, or does not offer this memory.

        The check runs to its end even when the caller is cancelled: the next check would take an unread answer for its
        own.
        """
        await to_end(asyncio.create_task(self._check(metadata, offered)))

    async def _check(self, metadata: bytes, offered: Sequence[Memory]) -> None:
        question = {
            "metadata": base64.b64encode(metadata).decode(),
            "offered": [[memory.address, memory.nbytes, memory.device] for memory in offered],
        }
        async with self._lock:
            answer = await self._ask(json.dumps(question).encode() + b"\n")
            if answer != _OK:
                await self._end_child()
                self.start()
        if answer != _OK:
            raise NixlFailure(answer or "the process that loads it crashes")

    async def close(self) -> None:
        """End the child."""
        if self._warming is not None:
            self._warming.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._warming
        async with self._lock:
            await self._end_child()

    async def _ask(self, line: bytes) -> str:
        """The child's answer; empty when the child crashed, did not answer in time, or said what is no answer: then it
        is ended, and none of its lines is taken for the answer to another question.
        """
        child = await self._started()
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("the child has no pipes")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                child.stdin.write(line)
                await child.stdin.drain()
                return (await child.stdout.readline()).decode().strip()
        except (ConnectionError, TimeoutError, ValueError):  # also of a line that is too long, or no text
            return ""

    async def _warm(self) -> None:
        async with self._lock:
            await self._started()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                __name__,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=ANSWER_BYTES_MAX,
                env=self._environment,
                cwd="/",
            )
        return self._child

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def _answer(agent: Agent, line: bytes) -> str:
    question = json.loads(line)
    offered = [Memory(*memory) for memory in question["offered"]]
    try:
        name = agent.add_peer(base64.b64decode(question["metadata"]))
        for memory in offered:
            agent.check_peer_memory(name, memory)
        agent.remove_peer(name)
    except NixlFailure as failure:
        return " ".join(str(failure).split()) or "NIXL refuses it"
    return _OK


def _run_child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent = Agent(str(uuid.uuid4()))
    for line in sys.stdin.buffer:
        print(_answer(agent, line), flush=True)


if __name__ == "__main__":
    _run_child()
    leave(0)
