"""A test's side of LMCache: starts the process, asks it, ends it. Every wait ends at a deadline."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.engines.asked_process import AskedProcess, asked_process
from tests.engines.environment import engine_python


class LMCache:
    """A running LMCache."""

    def __init__(self, process: AskedProcess) -> None:
        self._process = process

    def put(self, seed: int, count: int) -> None:
        """Store the KV of so many tokens, and wait until it is written or given up."""
        self._process.ask("put", seed=seed, count=count)

    def forget(self) -> None:
        """Empty its memory; fails when something in it is still referred to."""
        self._process.ask("forget")

    def find(self, seed: int, count: int) -> int:
        """How many tokens it finds."""
        return int(self._process.ask("find", seed=seed, count=count))

    def get(self, seed: int, count: int) -> int:
        """How many tokens it retrieves; they are right."""
        loaded, is_right = self._process.ask("get", seed=seed, count=count)
        assert is_right
        return int(loaded)

    def names(self, seed: int, count: int) -> list[str]:
        """The objects of its chunks; in the multiprocess mode those of rank 0."""
        return [str(name) for name in self._process.ask("names", seed=seed, count=count)]

    def counters(self) -> dict[str, float]:
        """The connector's own figures."""
        return dict(self._process.ask("counters"))

    def lose_before_load(self, name: str) -> None:
        """Have it delete an object between its next lookup and the load."""
        self._process.ask("lose_before_load", name=name)

    def close(self) -> None:
        """It ends by itself."""
        self._process.finish()


@contextlib.contextmanager
def lmcache(mode: str, log: Path, **options: Any) -> Iterator[LMCache]:
    """LMCache with these options, killed with the block."""
    arguments = [mode, json.dumps(options)]
    with asked_process(engine_python(), "tests.engines.lmcache_host", arguments, log) as process:
        yield LMCache(process)
