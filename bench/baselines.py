"""What the data path is compared with: memcpy, raw NIXL writes, a raw socket, one boto3 ranged GET per slice.

Raw senders are processes of their own, as the server is, cycle through source memory as large as the server's window,
and fill the very buffer the fetches fill. Every measurement returns seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from botocore.exceptions import BotoCoreError, ClientError

from adapters.nixl_agent import Agent, Memory
from bench.content import Bytes
from bench.senders import PATTERN

MEMCPY_PASSES = 4
POLL_INTERVAL_S = 50e-6
ANSWER_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
ROOT = Path(__file__).resolve().parent.parent
_CHECK_STRIDE = 509


class BaselineError(Exception):
    """A baseline failed or moved wrong bytes, so nothing can be compared with it."""


class MemoryCopy:
    """memcpy over prefaulted memory, in one thread."""

    def __init__(self, nbytes: int) -> None:
        self._source = np.full(nbytes, PATTERN, dtype=np.uint8)
        self._target = np.full(nbytes, 0xFF, dtype=np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes copied by one `run`."""
        return MEMCPY_PASSES * self._source.nbytes

    def run(self) -> float:
        """Copy the whole memory a few times."""
        started_s = time.monotonic()
        for _ in range(MEMCPY_PASSES):
            ctypes.memmove(self._target.ctypes.data, self._source.ctypes.data, self._source.nbytes)
        return time.monotonic() - started_s


class SenderProcess:
    """A running `bench.senders`. Every method raises BaselineError when it has ended or says nothing for too long."""

    def __init__(self, *arguments: object) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.senders", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout
        try:
            self.answer()
        except BaseException:
            self.close()
            raise

    def tell(self, command: int) -> None:
        """Send a command."""
        try:
            self._commands.write(b"%d\n" % command)
        except OSError as error:
            raise BaselineError(f"the sender process is gone: {error}") from error

    def answer(self, while_waiting: Callable[[], object] = lambda: None) -> str:
        """The next line it says; `while_waiting` is called every now and then."""
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while not select.select([self._answers], [], [], POLL_INTERVAL_S)[0]:
            while_waiting()
            if time.monotonic() > deadline_s:
                raise BaselineError(f"the sender process is silent for {ANSWER_TIMEOUT_S:.0f} s")
        line: bytes = self._answers.readline()
        if not line.endswith(b"\n"):
            raise BaselineError("the sender process ended early; see its message above")
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


class RawNixlWrites:
    """One-sided NIXL writes from another process into `buffer`, without any assembly, protocol or notices."""

    def __init__(self, buffer: Bytes, source_bytes: int) -> None:
        self._buffer = buffer
        self._agent = Agent(str(uuid.uuid4()))
        self._registration = self._agent.register(Memory(buffer.ctypes.data, buffer.nbytes))
        target = (self._agent.metadata().hex(), buffer.ctypes.data, buffer.nbytes)
        self._sender = SenderProcess("nixl", *target, source_bytes)

    def run(self, write_bytes: int) -> float:
        """Fill the buffer by writes of `write_bytes`, a few in flight; our side polls, as TCP needs it to."""
        self._buffer.fill(0)
        self._sender.tell(write_bytes)
        duration_s = float(self._sender.answer(self._agent.notices))
        _check_pattern(self._buffer)
        return duration_s

    def __enter__(self) -> RawNixlWrites:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._sender.close()
        self._registration.close()
        del self._agent


class RawSocket:
    """Plain send calls from another process over loopback, received straight into `buffer`."""

    def __init__(self, buffer: Bytes, source_bytes: int) -> None:
        self._buffer = buffer
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._sender = SenderProcess("socket", listener.getsockname()[1], source_bytes)
            self._socket, _ = listener.accept()
        self._socket.settimeout(ANSWER_TIMEOUT_S)

    def run(self) -> float:
        """Fill the buffer once."""
        self._buffer.fill(0)
        view = self._buffer.data
        started_s = time.monotonic()
        self._sender.tell(view.nbytes)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise BaselineError("the socket sender ended early")
            view = view[count:]
        duration_s = time.monotonic() - started_s
        _check_pattern(self._buffer)
        return duration_s

    def __enter__(self) -> RawSocket:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()
        self._sender.close()


def get_ranges(s3: Any, bucket: str, keys: Sequence[str], slices: Bytes, first_slice: int = 0) -> float:
    """The naive client: one ranged GET per slice, in the order a layer-major payload has them.

    Fills `slices`, uint8 of shape (count, S), with slices `first_slice` on; seconds taken. Raises BaselineError.
    """
    slice_bytes = slices.shape[1]
    started_s = time.monotonic()
    for index, row in enumerate(slices, first_slice):
        layer_index, chunk_index = divmod(index, len(keys))
        start = layer_index * slice_bytes
        span = f"bytes={start}-{start + slice_bytes - 1}"
        try:
            body = s3.get_object(Bucket=bucket, Key=keys[chunk_index], Range=span)["Body"].read()
            row[:] = np.frombuffer(body, dtype=np.uint8)
        except (BotoCoreError, ClientError, ValueError) as error:
            raise BaselineError(f"chunk {chunk_index}, {span}: {error}") from error
    return time.monotonic() - started_s


def _check_pattern(buffer: Bytes) -> None:
    """A byte in every few hundred, and the last, tell whether everything was written."""
    if not (buffer[::_CHECK_STRIDE] == PATTERN).all() or buffer[-1] != PATTERN:
        raise BaselineError("a raw sender left bytes unwritten")
