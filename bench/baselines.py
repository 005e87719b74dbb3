"""What the data path is compared with: memcpy, raw NIXL writes, a raw socket, one boto3 ranged GET per slice.

Raw senders are processes of their own, as the server is, cycle through source memory as large as the server's window,
and fill the very buffer the fetches fill. Every measurement returns seconds.
"""

from __future__ import annotations

import ctypes
import socket
import time
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from botocore.exceptions import BotoCoreError, ClientError

from adapters.nixl_agent import Agent, Memory
from bench.child import ANSWER_TIMEOUT_S, BaselineError, Child
from bench.content import Bytes
from bench.senders import PATTERN

MEMCPY_PASSES = 4
_CHECK_STRIDE = 509


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


class RawNixlWrites:
    """One-sided NIXL writes from another process into `buffer`, without any assembly, protocol or notices."""

    def __init__(self, buffer: Bytes, source_bytes: int) -> None:
        self._buffer = buffer
        self._agent = Agent(str(uuid.uuid4()))
        self._registration = self._agent.register(Memory(buffer.ctypes.data, buffer.nbytes))
        target = (self._agent.metadata().hex(), buffer.ctypes.data, buffer.nbytes)
        self._sender = Child("bench.senders", "nixl", *target, source_bytes)

    def run(self, write_bytes: int) -> float:
        """Fill the buffer by writes of `write_bytes`, a few in flight; our side polls, as TCP needs it to."""
        self._buffer.fill(0)
        self._sender.tell(str(write_bytes))
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
            self._sender = Child("bench.senders", "socket", listener.getsockname()[1], source_bytes)
            self._socket, _ = listener.accept()
        self._socket.settimeout(ANSWER_TIMEOUT_S)

    def run(self) -> float:
        """Fill the buffer once."""
        self._buffer.fill(0)
        view = self._buffer.data
        started_s = time.monotonic()
        self._sender.tell(str(view.nbytes))
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
