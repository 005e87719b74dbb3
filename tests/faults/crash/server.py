"""The server under test: `objectcache serve` in a process of its own, started, killed and started again.

Most starts fork a process that has imported everything already, which makes a round several times shorter; every
EXEC_EVERYth is the command line as a user runs it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from tests.support.servers import READY, eventually
from tests.support.tree import repository

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 60.0
ORPHAN_TIMEOUT_S: Final = 20.0
EXEC_EVERY: Final = 10


def _serve(arguments: list[str], output: str) -> None:
    """In the forked process."""
    os.setsid()
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.argv = ["objectcache", *arguments]
    from objectcache.cli import main

    main()


class Server:
    """One process and whatever it starts, as a process group."""

    _context = multiprocessing.get_context("forkserver")
    _count = 0

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
        self._popen: subprocess.Popen[bytes] | None = None
        self._forked: multiprocessing.process.BaseProcess | None = None
        self.began_s = time.monotonic()
        if prefix or Server._count % EXEC_EVERY == 0:
            with self._output.open("wb") as output:
                self._popen = subprocess.Popen(
                    [*prefix, sys.executable, "-m", "objectcache.cli", *arguments],
                    stdout=output,
                    stderr=output,
                    cwd=repository(),
                    env={**os.environ, "PYTHONPATH": str(repository())},
                    start_new_session=True,
                )
            self._pid = self._popen.pid
        else:
            self._context.set_forkserver_preload(["objectcache.cli", "tests.faults.crash.server"])
            self._forked = self._context.Process(target=_serve, args=(arguments, str(self._output)), daemon=True)
            self._forked.start()
            self._pid = self._forked.pid or 0
        Server._count += 1

    def url(self) -> str:
        """Where it listens, once it does. Raises AssertionError when it ends or takes too long."""
        while time.monotonic() < self.began_s + START_TIMEOUT_S:
            with contextlib.suppress(FileNotFoundError):
                for line in self._output.read_text(errors="replace").splitlines(keepends=True):
                    if READY in line and line.endswith("\n"):
                        return line.strip().partition(READY)[2]
            assert self.is_running, f"the server ended while it started: {self.output()}"
            time.sleep(0.01)
        raise AssertionError(f"the server does not start: {self.output()}")

    @property
    def pid(self) -> int:
        """The process."""
        return self._pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        if self._popen is not None:
            return self._popen.poll() is None
        return self._forked is not None and self._forked.is_alive()

    def output(self) -> str:
        """What it said."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def kill(self) -> None:
        """SIGKILL to all of it."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # it may not have its own group yet
        self._wait()

    def kill_first_process(self) -> bool:
        """SIGKILL to the process that holds the store; whether those it started ended by themselves."""
        started = psutil.Process(self._pid).children(recursive=True)
        os.kill(self._pid, signal.SIGKILL)
        self._wait()
        return eventually(lambda: not any(_is_alive(process) for process in started), ORPHAN_TIMEOUT_S)

    def terminate(self) -> int | None:
        """SIGTERM, as an operator stops it; its exit status."""
        os.kill(self._pid, signal.SIGTERM)
        return self._wait()

    def _wait(self) -> int | None:
        if self._popen is not None:
            return self._popen.wait(STOP_TIMEOUT_S)
        assert self._forked is not None
        self._forked.join(STOP_TIMEOUT_S)
        return self._forked.exitcode


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
