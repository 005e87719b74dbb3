"""Processes of the benchmark's own that take commands and answer in lines: senders and the S3 load."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

POLL_INTERVAL_S = 50e-6
ANSWER_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
ROOT = Path(__file__).resolve().parent.parent
_READ_BYTES = 1 << 16


class BaselineError(Exception):
    """A baseline failed or moved wrong bytes, so nothing can be compared with it."""


class Child:
    """A running `python -m MODULE`: says one line when ready, answers in lines, and ends with its standard input.
    `python` is the interpreter to run it, by default this one.

    Every method raises BaselineError when it has ended or says nothing for too long.
    """

    def __init__(
        self,
        module: str,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._module = module
        self._pending = b""
        self._process = subprocess.Popen(
            [str(python), "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout
        try:
            self.ready = self.answer()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def tell(self, command: str) -> None:
        """Send a command of one line."""
        try:
            self._commands.write(command.encode() + b"\n")
        except OSError as error:
            raise BaselineError(f"{self._module} is gone: {error}") from error

    def answer(self, while_waiting: Callable[[], object] | None = None, timeout_s: float = ANSWER_TIMEOUT_S) -> str:
        """The next line it says; `while_waiting` is called every now and then."""
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            patience_s = max(0.0, deadline_s - time.monotonic()) if while_waiting is None else POLL_INTERVAL_S
            if select.select([self._answers], [], [], patience_s)[0]:
                said = os.read(self._answers.fileno(), _READ_BYTES)
                if not said:
                    raise BaselineError(f"{self._module} ended early; see its message above")
                self._pending += said
            elif time.monotonic() > deadline_s:
                raise BaselineError(f"{self._module} is silent for {timeout_s:.0f} s")
            if while_waiting is not None:
                while_waiting()
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode().strip()

    def close(self) -> None:
        """Let the process end, forcibly where it does not."""
        with contextlib.suppress(OSError):
            self._commands.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
