"""Processes of the benchmark's own that take commands and answer in lines, and programs of others on free ports."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from objectcache.calibration.origin import python_path

POLL_INTERVAL_S = 50e-6
ANSWER_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
PORTS, PORTS_TRIED = range(20_000, 32_768), 64
"""Below those that outgoing connections have: one of these may have a port before its program listens."""
PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_READ_BYTES = 1 << 16


class BaselineError(Exception):
    """A baseline failed or moved wrong bytes, so nothing can be compared with it."""


class Child:
    """A running `python -m MODULE`: says one line when ready, answers in lines, and ends with its standard input.
    `python` is the interpreter to run it, by default this one, and `launcher` the words before it.

    Every method raises BaselineError when it has ended or says nothing for too long.
    """

    def __init__(
        self,
        module: str,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
        launcher: Sequence[str] = (),
    ) -> None:
        self._module = module
        self._pending = b""
        self._process = subprocess.Popen(
            [*launcher, str(python), "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": python_path(), **(environment or {})},
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
        end(self._process)
        self._answers.close()


def start_children(starts: Sequence[Callable[[], Child]], stack: ExitStack) -> list[Child]:
    """All at once; `stack` ends them. Raises BaselineError."""

    def start(make: Callable[[], Child]) -> Child:
        child = make()
        stack.callback(child.close)
        return child

    with ThreadPoolExecutor(len(starts)) as starters:
        return list(starters.map(start, starts))


def shares(total: int, parts: int) -> list[int]:
    """How many of `total` each of so many processes does, as evenly as it goes."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def say(line: str, answers: TextIO | None = None) -> None:
    """Answer the parent: on standard output, or where that was taken out of the libraries' way."""
    print(line, file=answers, flush=True)


def take_answers(log: Path) -> TextIO:
    """Where the parent reads. What libraries print goes to the log from here on; and everything is on loopback."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    with log.open("wb") as said:
        os.dup2(said.fileno(), sys.stdout.fileno())
        os.dup2(said.fileno(), sys.stderr.fileno())
    for name in PROXIES:
        os.environ.pop(name, None)
    return answers


def answer_lines(answers: TextIO, answer: Callable[[str], str], failed: Callable[[Exception], str]) -> None:
    """Answer each line of standard input until it ends. Whatever a library raises is its failure, and the parent is
    told what `failed` makes of it.
    """
    for line in sys.stdin:
        try:
            said = answer(line.strip())
        except Exception as error:
            traceback.print_exc()
            said = failed(error)
        say(said, answers)
    sys.stderr.flush()


@contextmanager
def running_program(
    command: Sequence[str],
    log: Path,
    *,
    number: signal.Signals = signal.SIGTERM,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A program of others, with what it says in a log; it is ended by that signal. Raises BaselineError."""
    with log.open("wb") as said:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, cwd=folder
            )
        except OSError as error:
            raise BaselineError(f"{command[0]}: {error}") from error
        try:
            yield process
        finally:
            process.send_signal(number)
            end(process)


@contextmanager
def serving_program(
    command: Sequence[str], log: Path, port: int, timeout_s: float, folder: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program of others that takes connections to a port of this host. Raises BaselineError."""
    with running_program(command, log, folder=folder) as process:
        await_ready(process, lambda: is_listening(port), log.stem, timeout_s)
        yield process


def end(process: subprocess.Popen[bytes]) -> None:
    """Let a process end, forcibly where it does not."""
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def await_ready(
    process: subprocess.Popen[bytes], is_ready: Callable[[], bool], name: str, timeout_s: float, every_s: float = 0.1
) -> None:
    """Until a program answers, which is asked every `every_s`. Raises BaselineError when it ends before, or takes
    too long.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise BaselineError(f"{name} ended with status {process.returncode} while starting")
        if is_ready():
            return
        time.sleep(every_s)
    raise BaselineError(f"{name} does not answer after {timeout_s:.0f} s")


def is_listening(port: int) -> bool:
    """Whether something takes connections to a port of this host."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def free_port() -> int:
    """A port of loopback that nobody listens on. Raises BaselineError."""
    for port in random.SystemRandom().sample(PORTS, PORTS_TRIED):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise BaselineError("no port of loopback is free")


def failure_of(command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> str | None:
    """The last line that a command which fails says; None for one that does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return f"{' '.join(command[:3])} took more than {timeout_s:.0f} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it ended early"])[-1]


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
