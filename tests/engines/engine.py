"""A test's side of engines: starts them, asks them, ends them. Every wait ends at a deadline."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.engines.environment import engine_python, engine_variables
from tests.engines.messages import EngineSettings, Moment, Operation, Outcome, Prompt
from tests.support.tree import repository
from tests.support.waiting import eventually

START_S = 180.0
REPLY_S = 240.0
OUTPUT_TOKENS = 24


class EngineError(AssertionError):
    """The engine failed or hangs; the message has the end of its log."""


class Engine:
    """A running engine."""

    def __init__(self, connection: socket.socket, log_file: Path) -> None:
        self._log_file = log_file
        self._connection = connection
        self._stream = connection.makefile("rw")
        connection.settimeout(START_S)
        self._pid = int(self._reply()["pid"])

    def start(self, settings: EngineSettings) -> None:
        """Return when it is ready. Raises EngineError when it does not start."""
        self._send(asdict(settings))
        self._reply()
        self._connection.settimeout(REPLY_S)

    def generate(
        self,
        prompts: Sequence[Prompt],
        output_tokens: int | Sequence[int] = OUTPUT_TOKENS,
        *,
        at: Moment | None = None,
        do: Callable[[], object] | None = None,
    ) -> Outcome:
        """Greedy tokens of these prompts, given to the engine at once; at a moment it waits until `do` is done."""
        counts = [output_tokens] * len(prompts) if isinstance(output_tokens, int) else list(output_tokens)
        moment = None if at is None else at.value
        request = {"prompts": [prompt.to_json() for prompt in prompts], "max_tokens": counts, "moment": moment}
        self._send({"operation": Operation.GENERATE.value, **request})
        reply = self._reply()
        if reply.get("is_reached"):
            assert do is not None
            do()
            self._send({})
            reply = self._reply()
        return Outcome(**reply)

    def generate_each(self, prompts: Sequence[Prompt]) -> Outcome:
        """One after the other, each written before the next; the sum of what they gave."""
        outcomes = [self.generate([prompt]) for prompt in prompts]
        return Outcome(
            tokens=[tokens for outcome in outcomes for tokens in outcome.tokens],
            counters=_sum(outcome.counters for outcome in outcomes),
            prometheus=_sum(outcome.prometheus for outcome in outcomes),
            preemptions=sum(outcome.preemptions for outcome in outcomes),
            lost_blocks=outcomes[-1].lost_blocks,
            has_happened=False,
        )

    def forget(self, *, is_store_too: bool = False) -> None:
        """Empty its own prefix cache, and have the connector reset, too."""
        self._send({"operation": Operation.FORGET.value, "is_store_too": is_store_too})
        assert self._reply()["is_done"]

    def keys(self, prompt: Prompt) -> list[str]:
        """The stored keys of the prompt's whole chunks, in order."""
        self._send({"operation": Operation.KEYS.value, **_as_dict(prompt)})
        return [str(key) for key in self._reply()["keys"]]

    def watch(self) -> None:
        """From now on digest what loads leave in the engine's blocks."""
        self._send({"operation": Operation.WATCH.value})
        self._reply()

    def loaded(self) -> dict[str, str]:
        """The SHA-256 of each chunk that was loaded since then, as it lies in the engine's blocks, by key."""
        self._send({"operation": Operation.LOADED.value})
        return dict(self._reply()["digests"])

    def stop(self) -> None:
        """Shut it down, as an operator would. Raises EngineError when it does not end."""
        self._send({"operation": Operation.STOP.value})
        self._reply()

    def has_said(self, pattern: str) -> bool:
        """Whether a line of its log matches."""
        return any(re.search(pattern, line) for line in self.log().splitlines())

    def log(self) -> str:
        """Everything it has said."""
        return self._log_file.read_text(errors="replace")

    def close(self) -> None:
        """End the process and those it started, whatever it is doing."""
        self._stream.close()
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)

    def _send(self, message: dict[str, Any]) -> None:
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()

    def _reply(self) -> dict[str, Any]:
        try:
            line = self._stream.readline()
        except TimeoutError:
            raise EngineError(f"the engine hangs:\n{self.log()[-6000:]}") from None
        if not line:
            raise EngineError(f"the engine is gone:\n{self.log()[-6000:]}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineError(f"{reply['error']}\n{self.log()[-6000:]}")
        return reply


class EngineHost:
    """Starts engines as forks of one process, and ends those that are left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._log_file = folder / "host.log"
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [str(engine_python()), "-m", "tests.engines.engine_host"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=repository(),
                env=engine_variables(),
            )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        while ready and (line := self._process.stdout.readline()):
            if line == "ready\n":
                return
        self.close()
        raise EngineError(f"vLLM cannot be imported:\n{self._log_file.read_text()[-6000:]}")

    @contextlib.contextmanager
    def engine(self, settings: EngineSettings) -> Iterator[Engine]:
        """An engine in a fork, until the block ends."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            log_file = self._folder / f"engine-{next(self._numbers)}.log"
            log_file.touch()
            assert self._process.stdin is not None
            self._process.stdin.write(f"{listener.getsockname()[1]} {log_file}\n")
            self._process.stdin.flush()
            with _accepted(listener, log_file, settings) as engine:
                yield engine

    @contextlib.contextmanager
    def fresh_engine(self, settings: EngineSettings) -> Iterator[Engine]:
        """An engine in a process of its own that imports everything anew, as a user runs it."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            log_file = self._folder / f"engine-{next(self._numbers)}.log"
            with log_file.open("wb") as log:
                process = subprocess.Popen(
                    [str(engine_python()), "-m", "tests.engines.engine_process", str(listener.getsockname()[1])],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=repository(),
                    env=engine_variables(),
                    start_new_session=True,
                )
            try:
                with _accepted(listener, log_file, settings) as engine:
                    yield engine
            finally:
                process.kill()
                process.wait()

    def close(self) -> None:
        """End."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def _accepted(listener: socket.socket, log_file: Path, settings: EngineSettings) -> Iterator[Engine]:
    listener.settimeout(START_S)
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        raise EngineError(f"the engine does not come:\n{log_file.read_text()[-6000:]}") from None
    engine = Engine(connection, log_file)
    try:
        engine.start(settings)
        yield engine
    finally:
        engine.close()


def await_true(is_so: Callable[[], bool], timeout_s: float = 150.0) -> None:
    """Return when it is so. Raises AssertionError when it does not become so."""
    assert eventually(is_so, timeout_s), "it does not come to be"


def _as_dict(prompt: Prompt) -> dict[str, Any]:
    return {"tokens": list(prompt.tokens), "salt": prompt.salt}


def _sum(counts: Iterator[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in counts:
        for name, value in each.items():
            total[name] = total.get(name, 0) + value
    return total
