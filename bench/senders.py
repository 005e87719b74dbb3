"""The raw senders, run as a process of their own: `python -m bench.senders KIND ARGUMENTS`, by `baselines` and `peers`.

Says "ready" on standard output once connected. Every line on standard input is a command; its end is the order to
leave.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from adapters.nixl_agent import Agent, Memory, PostedTransfer, TransferState, leave
from bench.content import Bytes
from bench.objects import ObjectContent, make_object_content

WRITES_IN_FLIGHT_MAX = 4
SEND_BYTES_MAX = 1 << 20
CONNECTIONS_MAX = 1024
PATTERN = 0x5A


def main(arguments: Sequence[str]) -> None:
    """Run one sender until standard input ends."""
    kind, *rest = arguments
    if kind == "nixl":
        metadata, address, target_bytes, source_bytes = rest
        send_nixl(bytes.fromhex(metadata), Memory(int(address), int(target_bytes)), int(source_bytes))
    elif kind == "objects":
        seed, nbytes_max = map(int, rest)
        send_objects(seed, nbytes_max)
    else:
        port, source_bytes = rest
        send_socket(int(port), int(source_bytes))


def send_nixl(metadata: bytes, target: Memory, source_bytes: int) -> None:
    """For each command, the size of one write in bytes, fill `target` and answer with the seconds it took."""
    agent = Agent(str(uuid.uuid4()))
    source = _source(source_bytes)
    registration = agent.register(Memory(source.ctypes.data, source.nbytes))
    peer = agent.add_peer(metadata)
    _say("ready")
    for line in sys.stdin:
        spans = list(write_spans(target.nbytes, int(line), source_bytes))
        started_s = time.monotonic()
        _write_all(agent, peer, source.ctypes.data, target.address, spans)
        _say(repr(time.monotonic() - started_s))
    agent.remove_peer(peer)
    registration.close()


def send_socket(port: int, source_bytes: int) -> None:
    """For each command, a number of bytes, send that many to a loopback port; nothing is answered."""
    view = _source(source_bytes).data
    with socket.create_connection(("127.0.0.1", port)) as sender:
        _say("ready")
        for line in sys.stdin:
            for source_offset, _, nbytes in write_spans(int(line), min(SEND_BYTES_MAX, source_bytes), source_bytes):
                sender.sendall(view[source_offset : source_offset + nbytes])


def send_objects(seed: int, nbytes_max: int) -> None:
    """Send an object for each line "NBYTES NUMBER" that comes over a connection; says "ready PORT" first.

    One thread for each connection: send calls leave the interpreter lock.
    """
    content = make_object_content(nbytes_max, seed)
    with socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS_MAX) as listener:
        _say(f"ready {listener.getsockname()[1]}")
        threading.Thread(target=_accept, args=(listener, content), daemon=True).start()
        sys.stdin.read()


def _accept(listener: socket.socket, content: ObjectContent) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer_lines, args=(connection, content), daemon=True).start()


def _answer_lines(connection: socket.socket, content: ObjectContent) -> None:
    with connection, contextlib.suppress(ConnectionError), connection.makefile("rb") as lines:
        for line in lines:
            nbytes, number = map(int, line.split())
            view = content.window(number, nbytes).data
            for first in range(0, nbytes, SEND_BYTES_MAX):
                connection.sendall(view[first : first + SEND_BYTES_MAX])


def write_spans(total_bytes: int, write_bytes: int, source_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(source offset, target offset, length) of the writes that cover `total_bytes`, cycling through the source."""
    places = max(1, source_bytes // write_bytes)
    for number, target_offset in enumerate(range(0, total_bytes, write_bytes)):
        yield number % places * write_bytes, target_offset, min(write_bytes, total_bytes - target_offset)


def _write_all(agent: Agent, peer: str, source: int, target: int, spans: Sequence[tuple[int, int, int]]) -> None:
    """Post every span, a few in flight; `source` and `target` are addresses."""
    in_flight: deque[PostedTransfer] = deque()
    for source_offset, target_offset, nbytes in spans:
        while len(in_flight) >= WRITES_IN_FLIGHT_MAX:
            _end_write(in_flight.popleft())
        write, _ = agent.post_write(
            peer, Memory(source + source_offset, nbytes), Memory(target + target_offset, nbytes)
        )
        in_flight.append(write)
    while in_flight:
        _end_write(in_flight.popleft())


def _end_write(write: PostedTransfer) -> None:
    while write.poll() is TransferState.IN_FLIGHT:
        pass
    write.release()


def _source(nbytes: int) -> Bytes:
    """Prefaulted memory on huge pages where there are any, like the server's staging pool."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    source = np.frombuffer(memory, dtype=np.uint8)
    source.fill(PATTERN)
    return source


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    leave(0)
