"""Mooncake Store's client: `python -m bench.beds.kv_peers.mooncake_reader WORK WAY MASTER OWNER`, in its environment.

WAY is `tcp`, a client that reads the owner's segment over TCP, or `shm`, one that shares memory with the owner
(`setup_dummy`) and whose buffer comes from that pool. Layer-major is done in every way Mooncake has for it:

    layer by layer   `get_into_ranges`, and a get session with ranges (which the shared-memory client refuses)
    all at once      whole chunks, each scattered into as many places as it has layers: no layer is ready before the end
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from bench.beds.kv_peers.work import Capability, Run, Work, serve
from bench.beds.memory import huge_page_memory
from descriptors.descriptor import Delivery
from objectcache.calibration.content import Bytes, verify_payload

POOL_SPARE_BYTES = 64 << 20
PUT_CHUNKS = 16
TCP_SLICES_IN_CALL_MAX = 1024
"""More in one call overrun a queue of Mooncake's TCP transport, and the call fails after 60 s."""
_NOTES = {"tcp": "data in another process, over TCP", "shm": "mooncake_client, memory shared with the client"}
Times = tuple[float, float | None]


class Reader:
    """A client with a buffer for the whole payload. Arguments are made beforehand: only Mooncake's calls are timed."""

    def __init__(self, work: Work, store: Any, buffer: Bytes) -> None:
        self.work, self.store, self.buffer = work, store, buffer
        self.content = work.content()
        self.keys = list(work.keys)
        self.layers = range(work.layout.num_layers)

    def put_chunks(self) -> None:
        """Store every chunk, through the start of the buffer."""
        nbytes = self.work.layout.chunk_bytes
        config = ReplicateConfig()
        config.with_hard_pin = True
        for first in range(0, len(self.keys), PUT_CHUNKS):
            some = self.keys[first : first + PUT_CHUNKS]
            for place in range(len(some)):
                self.buffer[place * nbytes : (place + 1) * nbytes] = self.content.chunk(first + place)
            addresses = [self._address(place * nbytes) for place in range(len(some))]
            _require(self.store.batch_put_from(some, addresses, [nbytes] * len(some), config), 0)

    def by_ranges(self) -> Times:
        """`get_into_ranges`, a call for each layer."""
        nbytes, count = self.work.layout.per_layer_chunk_bytes, len(self.keys)

        def get(*where: object) -> Any:
            return self.store.get_into_ranges([self._address(0)], [self.keys], *where)[0]

        calls = []
        for layer in self.layers:
            targets = [[(layer * count + index) * nbytes] for index in range(count)]
            calls.append(_call(get, [nbytes], [targets], [[[layer * nbytes]] * count], [[[nbytes]] * count]))
        return self._timed(calls, Delivery.LAYER_MAJOR, 0)

    def by_session(self) -> Times:
        """A get session, which asks the master once, and a call for every layer's ranges."""
        nbytes, count, store = self.work.layout.per_layer_chunk_bytes, len(self.keys), self.store
        get, sizes = store.batch_get_into_multi_buffer_ranges, [[nbytes]] * count
        calls = [_call(store.batch_get_session_start, 0, self.keys)]
        for layer in self.layers:
            targets = [[self._address((layer * count + index) * nbytes)] for index in range(count)]
            calls.append(_call(get, nbytes, self.keys, targets, sizes, [[layer * nbytes]] * count))
        calls.append(_call(lambda keys: [store.batch_get_session_end(keys)], 0, self.keys))
        return self._timed(calls, Delivery.LAYER_MAJOR, 1)

    def at_once(self, slices_in_call_max: int) -> Times:
        """Whole chunks, each into as many places as it has layers."""
        nbytes, count, layers = self.work.layout.per_layer_chunk_bytes, len(self.keys), len(self.layers)
        step = max(1, slices_in_call_max // layers)
        get, wanted = self.store.batch_get_into_multi_buffers, self.work.layout.chunk_bytes
        calls = []
        for first in range(0, count, step):
            keys = self.keys[first : first + step]
            targets = [
                [self._address((layer * count + first + place) * nbytes) for layer in self.layers]
                for place in range(len(keys))
            ]
            calls.append(_call(get, wanted, keys, targets, [[nbytes] * layers] * len(keys)))
        return self._timed(calls, Delivery.LAYER_MAJOR, None)

    def chunk_major(self) -> Times:
        """Whole chunks in one call."""
        nbytes, count = self.work.layout.chunk_bytes, len(self.keys)
        targets = [self._address(index * nbytes) for index in range(count)]
        call = _call(self.store.batch_get_into, nbytes, self.keys, targets, [nbytes] * count)
        return self._timed([call], Delivery.CHUNK_MAJOR, None)

    def _timed(self, calls: Sequence[Callable[[], None]], delivery: Delivery, first_layer: int | None) -> Times:
        """Make the calls, of which one brings the first layer, and compare every byte."""
        self.buffer.fill(0)
        ended_s = []
        started_s = time.monotonic()
        for call in calls:
            call()
            ended_s.append(time.monotonic() - started_s)
        verify_payload(self.buffer, self.content, delivery)
        return ended_s[-1], None if first_layer is None else ended_s[first_layer]

    def _address(self, offset: int) -> int:
        return int(self.buffer.ctypes.data) + offset


def start(way: str, master: str, owner: str, work: Work) -> Sequence[tuple[Capability, Run]]:
    """Connect, store the chunks unless they are there, and offer both orders."""
    store = MooncakeDistributedStore()
    if way == "tcp":
        _require([store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master)], 0)
        buffer = huge_page_memory(work.payload_bytes)
    else:
        _require([store.setup_dummy(work.payload_bytes + POOL_SPARE_BYTES, 0, owner)], 0)
        address = store.alloc_from_mem_pool(work.payload_bytes)
        if not address:
            raise RuntimeError("alloc_from_mem_pool gave nothing")
        buffer = np.ctypeslib.as_array((ctypes.c_uint8 * work.payload_bytes).from_address(address))
        buffer.fill(0xFF)
    _require([store.register_buffer(buffer.ctypes.data, buffer.nbytes)], 0)
    reader = Reader(work, store, buffer)
    if store.is_exist(work.keys[-1]) != 1:
        reader.put_chunks()

    slices_max = TCP_SLICES_IN_CALL_MAX if way == "tcp" else work.layout.num_layers * len(work.keys)
    offered: list[tuple[str, str, Run]] = [
        ("layer_major", "get_into_ranges by layer", reader.by_ranges),
        ("session_layer_major", "get session, call by layer", reader.by_session),
        ("at_once_layer_major", "chunks scattered, no layer before the end", partial(reader.at_once, slices_max)),
        ("chunk_major", "batch_get_into", reader.chunk_major),
    ]
    return [
        (Capability(f"mooncake_{way}_{kind}", work.payload_bytes, f"{_NOTES[way]}; {calls}"), run)
        for kind, calls, run in offered
        if way == "tcp" or run != reader.by_session
    ]


def _call(function: Callable[..., Sequence[object]], wanted: object, *arguments: object) -> Callable[[], None]:
    """A call of Mooncake's for later."""
    return lambda: _require(function(*arguments), wanted)


def _require(answers: Sequence[object], wanted: object) -> None:
    """Raise RuntimeError unless Mooncake answered this for everything."""
    others = [answer for answer in answers if answer != wanted]
    if others:
        raise RuntimeError(f"Mooncake answered {others[0]} instead of {wanted}, {len(others)} of {len(answers)} times")


if __name__ == "__main__":
    work_file, chosen_way, master_address, owner_address = sys.argv[1:]
    serve(partial(start, chosen_way, master_address, owner_address), work_file)
