"""The Mooncake process: it joins a Mooncake Store with Mooncake's client, and carries out the server's calls.

Mooncake's calls may hang for a minute where a host is stopped, joining holds the interpreter's lock meanwhile, and its
peers are not authenticated. So this process maps no memory of the server but the areas it was given, and has no
credentials; the server kills it where it does not end.

Run as a module: `python -m storage_server.home.remote_dram.mooncake_engine SOCKET [FD:NBYTES:rw ...]`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from objectcache.adapters.child_process import begun
from storage_server.home.rules.mooncake_commands import (
    CallKind,
    Join,
    MooncakeAnswer,
    MooncakeCall,
    decode_call,
    decode_join,
    encode_answer,
)
from storage_server.home.rules.unended_moves import NOT_FOUND, may_move_on

LEAVE_WAIT_S = 8.0
WRONG_SIZE = frozenset({-600, -800})
"""Mooncake's codes for a buffer of another size; -800 is also its code for hosts that are gone."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_Areas = Sequence[tuple[int, int]]


class MooncakeEngine:
    """Carries out calls with `store`, a joined MooncakeDistributedStore that knows the memory of `areas`."""

    def __init__(self, store: Any, areas: _Areas) -> None:
        self._store = store
        self._areas = areas

    def codes(self, call: MooncakeCall) -> list[int]:
        """Mooncake's code for each key; what GET brought lies in the spans. Raises what its client raises."""
        carry_out: Callable[[MooncakeCall], list[int]] = {
            CallKind.GET: self._get,
            CallKind.PUT: self._put,
            CallKind.REMOVE: self._remove,
        }[call.kind]
        return [int(code) for code in carry_out(call)]

    def _get(self, call: MooncakeCall) -> list[int]:
        addresses, sizes = self._memory(call)
        began_s = time.monotonic()
        codes: list[int] = self._store.batch_get_into_multi_buffers(list(call.keys), addresses, sizes)
        may_be_size = codes[0] in WRONG_SIZE and not may_move_on(codes[0], time.monotonic() - began_s)
        if may_be_size and self._store.get_size(call.keys[0]) not in (-1, sum(sizes[0])):
            return [NOT_FOUND]  # the caller asks for a wrong size, or it is gone by now
        return codes

    def _put(self, call: MooncakeCall) -> list[int]:
        """In the place of what is there."""
        addresses, sizes = self._memory(call)
        self._remove(call)
        codes: list[int] = self._store.batch_put_from_multi_buffers(list(call.keys), addresses, sizes)
        return codes

    def _remove(self, call: MooncakeCall) -> list[int]:
        codes: list[int] = self._store.batch_remove(list(call.keys), True)
        return codes

    def _memory(self, call: MooncakeCall) -> tuple[list[list[int]], list[list[int]]]:
        addresses = [self._areas[span.area][0] + span.offset for span in call.spans]
        return [addresses], [[span.nbytes for span in call.spans]]


def joined(join: Join, areas: _Areas) -> Any:
    """Mooncake's client, joined. Raises ConnectionError and ImportError."""
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    code = store.setup(join.host, "P2PHANDSHAKE", join.segment_bytes, 0, join.protocol, join.devices, join.master)
    if code != 0:
        raise ConnectionError(f"Mooncake's master at {join.master} answered {code}")
    codes = [store.register_buffer(address, nbytes) for address, nbytes in areas]
    if any(codes):
        raise ConnectionError(f"Mooncake cannot register memory: {codes}")
    return store


def serve(control: socket.socket, engine: MooncakeEngine) -> None:
    """Carry out calls until the server closes the socket."""
    threads = {kind: ThreadPoolExecutor(1, kind.value) for kind in CallKind}
    sending = threading.Lock()

    def carry_out(call: MooncakeCall) -> None:
        try:
            answer = MooncakeAnswer(call.number, tuple(engine.codes(call)))
        except Exception as error:  # whatever it is, the server must know that the call has ended
            answer = MooncakeAnswer(call.number, (), f"{type(error).__name__}: {error}")
        with sending, contextlib.suppress(OSError):
            control.sendall(encode_answer(answer))

    with control.makefile("rb") as lines:
        for line in lines:
            call = decode_call(line)
            threads[call.kind].submit(carry_out, call)


def _run(arguments: Sequence[str]) -> None:
    control, areas = begun(arguments)
    libc = ctypes.CDLL(None)
    with contextlib.suppress(ConnectionError):
        try:
            with control.makefile("rb") as lines:
                join = decode_join(lines.readline())
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # while joining, nothing else ends this process
            store = joined(join, areas)
            libc.prctl(_PR_SET_PDEATHSIG, 0)
        except (ImportError, OSError, ValueError) as error:
            control.sendall(encode_answer(MooncakeAnswer(0, (), f"{error}" or type(error).__name__)))
            return
        control.sendall(encode_answer(MooncakeAnswer(0, ())))
        try:
            serve(control, MooncakeEngine(store, areas))
        finally:
            threading.Timer(LEAVE_WAIT_S, os._exit, (1,)).start()  # calls that hang do not keep this process
            store.close()


if __name__ == "__main__":
    _run(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)
