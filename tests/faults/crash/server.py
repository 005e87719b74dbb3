"""The server under test: `objectcache serve` in a process of its own, started, killed and started again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from tests.support.processes import ServerProcess
from tests.support.servers import READY
from tests.support.waiting import eventually

STOP_TIMEOUT_S: Final = 60.0
ORPHAN_TIMEOUT_S: Final = 60.0


class Server:
    """One process and whatever it starts, as a process group."""

    def __init__(
        self,
        directory: Path,
        config: Path,
        data_dir: Path | None = None,
        prefix: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        """`prefix` is a command that runs the server, in a namespace or under limits; `options` are for `serve`."""
        self._output = directory / "server-output"
        self._output.unlink(missing_ok=True)
        data_dir = data_dir or directory / "data"
        arguments = [
            "--log-level",
            "info",
            "serve",
            "--data",
            str(data_dir),
            "--port",
            "0",
            "--config",
            str(config),
            *options,
        ]
        self._process = ServerProcess(arguments, prefix=prefix, output=self._output, is_session=True)

    def url(self) -> str:
        """Where it listens, once it does. Raises AssertionError when it ends or takes too long."""
        urls: list[str] = []

        def is_ready() -> bool:
            is_running = self.is_running
            lines = self.output().splitlines(keepends=True)
            urls[:] = [line.strip().partition(READY)[2] for line in lines if READY in line and line.endswith("\n")]
            assert urls or is_running, f"the server ended while it started: {self.output()}"
            return bool(urls)

        assert eventually(is_ready), f"the server does not start: {self.output()}"
        return urls[0]

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def output(self) -> str:
        """What it said."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def kill(self) -> None:
        """SIGKILL to all of it."""
        for kill in (os.killpg, os.kill):  # it may not have its own group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT_S)

    def kill_first_process(self) -> bool:
        """SIGKILL to the process that holds the store; whether those it started ended by themselves."""
        started = psutil.Process(self.pid).children(recursive=True)
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT_S)
        return eventually(lambda: not any(_is_alive(process) for process in started), ORPHAN_TIMEOUT_S)

    def terminate(self) -> int | None:
        """SIGTERM, as an operator stops it; its exit status."""
        self._process.terminate()
        return self._process.wait(STOP_TIMEOUT_S)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
