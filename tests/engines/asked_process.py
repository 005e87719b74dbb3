"""A process that answers requests, a line of JSON each. Every wait ends at a deadline."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.engines.environment import engine_variables
from tests.support.tree import repository

START_S = 180.0
ANSWER_S = 120.0


class AskedProcess:
    """A running process; `log` is what it writes for people."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.answer(START_S)

    def ask(self, call: str, **arguments: Any) -> Any:
        """The value of a call. Raises AssertionError with the error of a call that failed."""
        self.begin(call, **arguments)
        return self.value()

    def begin(self, call: str, **arguments: Any) -> None:
        """Send a call, whose answer comes later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": call, **arguments}) + "\n")
        self._process.stdin.flush()

    def value(self) -> Any:
        """The value of the call that was sent."""
        answer = self.answer(ANSWER_S)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def answer(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """The next line."""
        assert self._process.stdout is not None
        is_there = select.select([self._process.stdout], [], [], timeout_s)[0]
        line = self._process.stdout.readline() if is_there else ""
        if not line:
            raise AssertionError(f"the process {'ended' if is_there else 'hangs'}:\n{self.log()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def log(self) -> str:
        """Everything it has written for people."""
        return self._log.read_text(errors="replace")

    def finish(self) -> None:
        """Have it end by itself, and wait for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self.answer()["is_closed"]
        assert self._process.wait(ANSWER_S) == 0


@contextlib.contextmanager
def asked_process(python: Path, module: str, arguments: Sequence[str], log: Path) -> Iterator[AskedProcess]:
    """A module that is run so, killed with the block."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(python), "-m", module, *arguments],
            cwd=repository(),
            env=engine_variables(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    try:
        yield AskedProcess(process, log)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
