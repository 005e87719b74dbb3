"""The limits the data path is measured against: memcpy, raw NIXL writes, a raw socket, a raw read from the disk.

Raw senders are processes of their own, as the server is, cycle through source memory as large as the server's window,
and fill the very buffer the fetches fill. Every measurement returns seconds.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from adapters.nixl_agent import Agent, Memory
from bench.child import ANSWER_TIMEOUT_S, BaselineError, Child
from bench.content import Bytes
from bench.kv_peers.memory import huge_page_memory
from bench.senders import PATTERN

MEMCPY_PASSES = 8
READ_BYTES = 4 << 20
READERS = 4
ALIGNMENT_BYTES = 4096
_CHECK_STRIDE = 509


class MemoryCopy:
    """memcpy over prefaulted memory, in huge pages where there are any, in one thread."""

    def __init__(self, nbytes: int) -> None:
        self._source = huge_page_memory(nbytes, PATTERN)
        self._target = huge_page_memory(nbytes)

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


class ColdRead:
    """Direct reads of files, several at a time, into memory that is used again and again: past the page cache."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._memory = [huge_page_memory(READ_BYTES) for _ in range(READERS)]
        self.nbytes = sum(file.stat().st_size for file in files)

    def run(self) -> float:
        """Read every file once."""
        started_s = time.monotonic()
        with ThreadPoolExecutor(READERS) as pool:
            for done in [pool.submit(self._read, reader) for reader in range(READERS)]:
                done.result()
        return time.monotonic() - started_s

    def _read(self, reader: int) -> None:
        for file in self._files[reader::READERS]:
            opened = _open_direct(file)
            try:
                at = 0
                while count := os.preadv(opened, [self._memory[reader].data], at):
                    at += count
                    if count % ALIGNMENT_BYTES:  # the end of a file that is no whole number of blocks
                        break
            finally:
                os.close(opened)


def _open_direct(file: Path) -> int:
    """Some file systems have no direct reads: theirs go through the page cache, which is cold."""
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(file, os.O_RDONLY)


def _check_pattern(buffer: Bytes) -> None:
    """A byte in every few hundred, and the last, tell whether everything was written."""
    if not (buffer[::_CHECK_STRIDE] == PATTERN).all() or buffer[-1] != PATTERN:
        raise BaselineError("a raw sender left bytes unwritten")
