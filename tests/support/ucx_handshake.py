"""The bytes that a UCX client sends to a listener: its handshake, a notice and a write, captured by a relay.

Run as a module, in a process of its own, because UCX reads UCX_TLS once: `python -m tests.support.ucx_handshake` prints
the pieces as a JSON list of hex digits, in the order in which they were sent.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import psutil

from objectcache.adapters.nixl_agent import Agent, leave
from objectcache.adapters.nixl_memory import Memory
from tests.support.tree import repository

NBYTES = 4096
CAPTURE_S = 30.0
_FRAME = struct.Struct("<BI")
_PUT = struct.Struct("<QQI")
_PUT_REQUEST = 0x21


def captured() -> list[bytes]:
    """What a client sends while it connects, sends a notice and writes NBYTES. The first piece is the handshake."""
    environment = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    command = [sys.executable, "-m", "tests.support.ucx_handshake"]
    done = subprocess.run(
        command, env=environment, cwd=repository(), capture_output=True, text=True, timeout=90, check=True
    )
    return [bytes.fromhex(piece) for piece in json.loads(done.stdout)]


def put_frame(address: int, data: bytes) -> bytes:
    """A write to an address of the process behind the listener, as UCX's TCP transport frames it."""
    return _FRAME.pack(_PUT_REQUEST, _PUT.size) + _PUT.pack(address, len(data), 0) + data


def _listeners() -> set[int]:
    return {entry.laddr.port for entry in psutil.Process().net_connections("tcp") if entry.status == "LISTEN"}


def _pump(source: socket.socket, target: socket.socket, sent: list[bytes]) -> None:
    while data := source.recv(1 << 16):
        sent.append(data)
        target.sendall(data)


def _relay(door: socket.socket, port: int, sent: list[bytes]) -> None:
    client, _ = door.accept()
    server = socket.create_connection(("127.0.0.1", port))
    threading.Thread(target=_pump, args=(client, server, sent), daemon=True).start()
    threading.Thread(target=_pump, args=(server, client, []), daemon=True).start()


def _capture() -> list[bytes]:
    client = Agent(str(uuid.uuid4()))
    before = _listeners()
    server = Agent(str(uuid.uuid4()))
    (port,) = _listeners() - before
    source, target = np.ones(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
    ours, theirs = (Memory(array.ctypes.data, NBYTES) for array in (source, target))
    client.register(ours)
    server.register(theirs)
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as door:
        metadata = server.metadata()
        wanted = struct.pack(">H", port)
        if metadata.count(wanted) != 1:
            raise RuntimeError("the listener's port is not in the metadata once")
        threading.Thread(target=_relay, args=(door, port, sent), daemon=True).start()
        peer = client.add_peer(metadata.replace(wanted, struct.pack(">H", door.getsockname()[1])))
        client.notify(peer, b"hello")
        transfer, _ = client.post_write(peer, ours, theirs)
        until_s = time.monotonic() + CAPTURE_S
        while not target.all():
            if time.monotonic() > until_s:
                raise TimeoutError("the write did not arrive")
            server.notices()
            client.notices()
            transfer.poll()
            time.sleep(0.001)  # NIXL is asked, and tells nobody
    return list(sent)


if __name__ == "__main__":
    print(json.dumps([piece.hex() for piece in _capture()]))
    leave(0)
