"""A test's side of LMCache: starts the process, asks it, ends it. Every wait ends at a deadline."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.engines.environment import engine_python, engine_variables
from tests.support.tree import repository

START_S = 180.0
ANSWER_S = 60.0


class LMCache:
    """A running LMCache."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self._answer(START_S)

    def put(self, seed: int, count: int) -> None:
        """Store the KV of so many tokens, and wait until it is written or given up."""
        self._ask("put", seed=seed, count=count)

    def forget(self) -> None:
        """Empty its memory; fails when something in it is still referred to."""
        self._ask("forget")

    def find(self, seed: int, count: int) -> int:
        """How many tokens it finds."""
        return int(self._ask("find", seed=seed, count=count))

    def get(self, seed: int, count: int) -> int:
        """How many tokens it retrieves; they are right."""
        loaded, is_right = self._ask("get", seed=seed, count=count)
        assert is_right
        return int(loaded)

    def names(self, seed: int, count: int) -> list[str]:
        """The objects of its chunks; in the multiprocess mode those of rank 0."""
        return [str(name) for name in self._ask("names", seed=seed, count=count)]

    def counters(self) -> dict[str, float]:
        """The connector's own figures."""
        return dict(self._ask("counters"))

    def lose_before_load(self, name: str) -> None:
        """Have it delete an object between its next lookup and the load."""
        self._ask("lose_before_load", name=name)

    def close(self) -> None:
        """It ends by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._answer(ANSWER_S)["is_closed"]
        assert self._process.wait(ANSWER_S) == 0

    def _ask(self, call: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": call, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer(ANSWER_S)["value"]

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        is_there = select.select([self._process.stdout], [], [], timeout_s)[0]
        line = self._process.stdout.readline() if is_there else ""
        if not line:
            raise AssertionError(f"LMCache {'ended' if is_there else 'hangs'}:\n{self._log.read_text()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def lmcache(mode: str, log: Path, **options: Any) -> Iterator[LMCache]:
    """LMCache with these options, killed with the block."""
    command = [str(engine_python()), "-m", "tests.engines.lmcache_host", mode, json.dumps(options)]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=repository(),
            env=engine_variables(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    try:
        yield LMCache(process, log)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
