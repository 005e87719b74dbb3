"""The limits the data path is measured against: memcpy, raw NIXL writes, a raw socket, a raw read from the disk.

Raw senders are processes of their own, as the server is: `python -m bench.beds.baselines nixl|socket ARGUMENTS`. They
cycle through source memory as large as the server's window, and fill the very buffer the fetches fill. Each says
"ready" once connected; every line on standard input is a command, its end the order to leave. Measurements return
seconds.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

from bench.beds.memory import huge_page_memory
from bench.beds.processes import ANSWER_TIMEOUT_S, BaselineError, Child, say
from objectcache.adapters.nixl_agent import Agent, PostedTransfer, TransferState, leave
from objectcache.adapters.nixl_memory import Memory
from objectcache.calibration.content import Bytes

MEMCPY_PASSES = 8
READ_BYTES = 4 << 20
READERS = 4
ALIGNMENT_BYTES = 4096
WRITES_IN_FLIGHT_MAX = 4
SEND_BYTES_MAX = 1 << 20
PATTERN = 0x5A
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


class ColdRead:
    """Direct reads of files, several at a time, into memory that is used again and again: past the page cache. Where a
    file system has no direct reads, they go through the page cache, which is cold.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._memory = [huge_page_memory(READ_BYTES) for _ in range(READERS)]
        self.nbytes = sum(file.stat().st_size for file in files)

    def run(self) -> float:
        """Read every file once."""
        started_s = time.monotonic()
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(self._read, range(READERS)))
        return time.monotonic() - started_s

    def _read(self, reader: int) -> None:
        for file in self._files[reader::READERS]:
            try:
                opened = os.open(file, os.O_RDONLY | os.O_DIRECT)
            except OSError:
                opened = os.open(file, os.O_RDONLY)
            try:
                at = 0
                while count := os.preadv(opened, [self._memory[reader].data], at):
                    at += count
                    if count % ALIGNMENT_BYTES:  # the end of a file that is no whole number of blocks
                        break
            finally:
                os.close(opened)


@contextmanager
def raw_nixl_writes(buffer: Bytes, source_bytes: int) -> Iterator[Callable[[int], float]]:
    """One-sided NIXL writes from another process into `buffer`, without any assembly, protocol or notices: a run fills
    it by writes of so many bytes, a few in flight. Raises BaselineError.
    """
    agent = Agent(str(uuid.uuid4()))
    target = (buffer.ctypes.data, buffer.nbytes)
    with closing(agent.register(Memory(*target))):
        child = Child("bench.beds.baselines", "nixl", agent.metadata().hex(), *target, source_bytes)
        with closing(child):

            def run(write_bytes: int) -> float:
                buffer.fill(0)
                child.tell(str(write_bytes))
                duration_s = float(child.answer(agent.notices))  # our side polls, as TCP needs it to
                check_pattern(buffer)
                return duration_s

            yield run


@contextmanager
def raw_socket(buffer: Bytes, source_bytes: int) -> Iterator[Callable[[], float]]:
    """Plain send calls from another process over loopback, received straight into `buffer`: a run fills it once. Raises
    BaselineError.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = Child("bench.beds.baselines", "socket", listener.getsockname()[1], source_bytes)
        connection, _ = listener.accept()
    connection.settimeout(ANSWER_TIMEOUT_S)
    with closing(child), connection:

        def run() -> float:
            buffer.fill(0)
            view = buffer.data
            started_s = time.monotonic()
            child.tell(str(view.nbytes))
            while view:
                count = connection.recv_into(view)
                if not count:
                    raise BaselineError("the socket sender ended early")
                view = view[count:]
            duration_s = time.monotonic() - started_s
            check_pattern(buffer)
            return duration_s

        yield run


def check_pattern(buffer: Bytes) -> None:
    """A byte in every few hundred, and the last, tell whether everything was written."""
    if not (buffer[::_CHECK_STRIDE] == PATTERN).all() or buffer[-1] != PATTERN:
        raise BaselineError("a raw sender left bytes unwritten")


def send_nixl(metadata: str, address: str, target_bytes: str, source_bytes: str) -> None:
    """For each command, the size of one write in bytes, fill the target and answer with the seconds it took."""
    agent = Agent(str(uuid.uuid4()))
    source = huge_page_memory(int(source_bytes), PATTERN)
    first, target = source.ctypes.data, int(address)
    registration = agent.register(Memory(first, source.nbytes))
    peer = agent.add_peer(bytes.fromhex(metadata))
    say("ready")
    for line in sys.stdin:
        spans = list(write_spans(int(target_bytes), int(line), source.nbytes))
        in_flight: deque[PostedTransfer] = deque()
        started_s = time.monotonic()
        for source_offset, target_offset, nbytes in spans:
            while len(in_flight) >= WRITES_IN_FLIGHT_MAX:
                _end_write(in_flight.popleft())
            ours, theirs = Memory(first + source_offset, nbytes), Memory(target + target_offset, nbytes)
            write, _ = agent.post_write(peer, ours, theirs)
            in_flight.append(write)
        while in_flight:
            _end_write(in_flight.popleft())
        say(repr(time.monotonic() - started_s))
    agent.remove_peer(peer)
    registration.close()


def send_socket(port: str, source_bytes: str) -> None:
    """For each command, a number of bytes, send that many to a loopback port; nothing is answered."""
    view = huge_page_memory(int(source_bytes), PATTERN).data
    with socket.create_connection(("127.0.0.1", int(port))) as sender:
        say("ready")
        for line in sys.stdin:
            for source_offset, _, nbytes in write_spans(int(line), min(SEND_BYTES_MAX, view.nbytes), view.nbytes):
                sender.sendall(view[source_offset : source_offset + nbytes])


def write_spans(total_bytes: int, write_bytes: int, source_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(source offset, target offset, length) of the writes that cover `total_bytes`, cycling through the source."""
    places = max(1, source_bytes // write_bytes)
    for number, target_offset in enumerate(range(0, total_bytes, write_bytes)):
        yield number % places * write_bytes, target_offset, min(write_bytes, total_bytes - target_offset)


def _end_write(write: PostedTransfer) -> None:
    while write.poll() is TransferState.IN_FLIGHT:
        pass
    write.release()


if __name__ == "__main__":
    if sys.argv[1] == "nixl":
        send_nixl(*sys.argv[2:])
    else:
        send_socket(*sys.argv[2:])
    leave(0)
