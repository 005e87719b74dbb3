"""`objectcache ARGUMENTS` in a process of its own. Most starts fork a process that has imported everything already,
which takes a tenth of the time; every EXEC_EVERYth is the command line as a user runs it, and so is each one that a
fork cannot show: under a prefix, from another checkout, with workers, or with other paths of modules.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, TextIO

from tests.support.run_folder import run_folder
from tests.support.tree import repository

EXEC_EVERY: Final = 20
_CONTEXT = multiprocessing.get_context("forkserver")
_started = count()
_logs = count()
_recent: deque[ServerProcess] = deque(maxlen=8)


class ServerProcess:
    """A running process, with the part of subprocess.Popen's interface that tests use. `stdout` is the server's, or,
    with `output`, a file has both its outputs; `is_session` gives it a process group of its own. `log` is the file that
    has what it writes to stderr.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        tree: Path | None = None,
        output: Path | None = None,
        is_session: bool = False,
    ) -> None:
        self.stdout: TextIO | None = None
        self._popen: subprocess.Popen[str] | None = None
        self._forked: multiprocessing.process.BaseProcess | None = None
        self.arguments = arguments
        self.log = output or run_folder() / f"server-{next(_logs)}.log"
        _recent.append(self)
        tree = repository() if tree is None else tree
        variables = {**os.environ, **(environment or {})}
        is_plain = not prefix and tree == repository() and "--workers" not in arguments
        is_plain = is_plain and not any(name.startswith(("PYTHON", "LD_")) for name in environment or ())
        if next(_started) % EXEC_EVERY and is_plain:
            self._fork(arguments, variables, output, is_session)
            return
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self.log.open("wb"))
            sink = subprocess.PIPE if output is None else log
            self._popen = subprocess.Popen(
                [*prefix, sys.executable, "-m", "objectcache", *arguments],
                stdout=sink,
                stderr=log,
                text=True,
                env=variables,
                cwd=tree,
                start_new_session=is_session,
            )
        self.stdout = self._popen.stdout
        self.pid = self._popen.pid

    def _fork(
        self, arguments: Sequence[str], variables: Mapping[str, str], output: Path | None, is_session: bool
    ) -> None:
        _CONTEXT.set_forkserver_preload(["objectcache", "tests.support.processes"])
        reader, writer = _CONTEXT.Pipe(duplex=False)
        sink: Connection | Path = writer if output is None else output
        self._forked = _CONTEXT.Process(
            target=_serve, args=(list(arguments), dict(variables), sink, self.log, is_session), daemon=True
        )
        with reader, writer:
            self._forked.start()
            if output is None:
                self.stdout = os.fdopen(os.dup(reader.fileno()))
        self.pid = self._forked.pid or 0

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self._popen is not None:
            return self._popen.poll()
        assert self._forked is not None
        return self._forked.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        if self._popen is not None:
            return self._popen.wait(timeout)
        assert self._forked is not None
        self._forked.join(timeout)
        status = self._forked.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("objectcache", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Nothing happens where it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


def last_lines(servers_max: int = 4, lines_max: int = 20) -> str:
    """The last lines in the logs of the servers that were started last, for people who look at a failure."""
    told = []
    for server in list(_recent)[-servers_max:]:
        with contextlib.suppress(OSError):
            lines = server.log.read_text(errors="replace").splitlines()[-lines_max:]
            state = "runs" if server.poll() is None else f"has ended with {server.poll()}"
            told += [f"objectcache {' '.join(server.arguments)} (pid {server.pid}, {state})", *lines] if lines else []
    return "\n".join(told)


def _serve(
    arguments: list[str], variables: dict[str, str], sink: Connection | Path, log: Path, is_session: bool
) -> None:
    """In the forked process."""
    if is_session:
        os.setsid()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 2)
    if isinstance(sink, Connection):
        os.dup2(sink.fileno(), 1)
        sink.close()
    else:
        os.dup2(fd, 1)
    os.close(fd)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(repository())
    sys.argv = ["objectcache", *arguments]
    from objectcache.cli.main import main

    main()
