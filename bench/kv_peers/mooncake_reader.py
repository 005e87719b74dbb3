"""Mooncake Store's client: `python -m bench.kv_peers.mooncake_reader WORK WAY MASTER OWNER`, in Mooncake's environment.

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

from bench.content import Bytes, verify_payload
from bench.kv_peers.memory import huge_page_memory
from bench.kv_peers.serving import Run, serve
from bench.kv_peers.work import Capability, Work
from descriptors.descriptor import Delivery

POOL_SPARE_BYTES = 64 << 20
PUT_CHUNKS = 16
TCP_SLICES_IN_CALL_MAX = 1024
"""More in one call overrun a queue of Mooncake's TCP transport, and the call fails after 60 s."""
_NOTES = {"tcp": "data in another process, over TCP", "shm": "mooncake_client, memory shared with the client"}


class Reader:
    """A client with a buffer for the whole payload."""

    def __init__(self, work: Work, store: Any, buffer: Bytes) -> None:
        self.work, self.store, self.buffer = work, store, buffer
        self.content = work.content()

    def put_chunks(self) -> None:
        """Store every chunk, through the start of the buffer."""
        nbytes, keys = self.work.layout.chunk_bytes, self.work.keys
        config = ReplicateConfig()
        config.with_hard_pin = True
        batch = min(PUT_CHUNKS, len(keys))
        for first in range(0, len(keys), batch):
            some = keys[first : first + batch]
            for place in range(len(some)):
                self.buffer[place * nbytes : (place + 1) * nbytes] = self.content.chunk(first + place)
            addresses = [self._address(place * nbytes) for place in range(len(some))]
            _require(self.store.batch_put_from(list(some), addresses, [nbytes] * len(some), config), 0)

    def by_ranges(self) -> tuple[float, float | None]:
        """`get_into_ranges`, a call for each layer."""
        slice_bytes, keys = self.work.per_layer_chunk_bytes, list(self.work.keys)
        sizes = [[slice_bytes]] * len(keys)

        def prepare(layer: int) -> Callable[[], None]:
            targets = [[(layer * len(keys) + index) * slice_bytes] for index in range(len(keys))]
            call = ([self._address(0)], [keys], [targets], [[[layer * slice_bytes]] * len(keys)], [sizes])
            return lambda: _require(self.store.get_into_ranges(*call)[0], [slice_bytes])

        return self._layer_by_layer(prepare, lambda: None, lambda: None)

    def by_session(self) -> tuple[float, float | None]:
        """A get session, which asks the master once, and a call for every layer's ranges."""
        slice_bytes, keys = self.work.per_layer_chunk_bytes, list(self.work.keys)

        def prepare(layer: int) -> Callable[[], None]:
            targets = [[self._address((layer * len(keys) + index) * slice_bytes)] for index in range(len(keys))]
            call = (keys, targets, [[slice_bytes]] * len(keys), [[layer * slice_bytes]] * len(keys))
            return lambda: _require(self.store.batch_get_into_multi_buffer_ranges(*call), slice_bytes)

        return self._layer_by_layer(
            prepare,
            lambda: _require(self.store.batch_get_session_start(keys), 0),
            lambda: _require([self.store.batch_get_session_end(keys)], 0),
        )

    def at_once(self, slices_in_call_max: int) -> tuple[float, float | None]:
        """Whole chunks, each into as many places as it has layers."""
        slice_bytes, keys, layers = self.work.per_layer_chunk_bytes, list(self.work.keys), self.work.num_layers
        step = max(1, slices_in_call_max // layers)
        calls = []
        for first in range(0, len(keys), step):
            some = keys[first : first + step]
            addresses = [
                [self._address((layer * len(keys) + first + place) * slice_bytes) for layer in range(layers)]
                for place in range(len(some))
            ]
            calls.append((some, addresses, [[slice_bytes] * layers] * len(some)))
        self.buffer.fill(0)
        started_s = time.monotonic()
        for call in calls:
            _require(self.store.batch_get_into_multi_buffers(*call), self.work.layout.chunk_bytes)
        duration_s = time.monotonic() - started_s
        verify_payload(self.buffer, self.content, Delivery.LAYER_MAJOR)
        return duration_s, None

    def chunk_major(self) -> tuple[float, float | None]:
        """Whole chunks in one call."""
        nbytes, keys = self.work.layout.chunk_bytes, list(self.work.keys)
        addresses = [self._address(index * nbytes) for index in range(len(keys))]
        self.buffer.fill(0)
        started_s = time.monotonic()
        _require(self.store.batch_get_into(keys, addresses, [nbytes] * len(keys)), nbytes)
        duration_s = time.monotonic() - started_s
        verify_payload(self.buffer, self.content, Delivery.CHUNK_MAJOR)
        return duration_s, None

    def _layer_by_layer(
        self,
        prepare: Callable[[int], Callable[[], None]],
        begin: Callable[[], None],
        end: Callable[[], None],
    ) -> tuple[float, float | None]:
        """Arguments are made beforehand: only Mooncake's calls are timed."""
        calls = [prepare(layer) for layer in range(self.work.num_layers)]
        self.buffer.fill(0)
        first_layer_s = None
        started_s = time.monotonic()
        begin()
        for call in calls:
            call()
            first_layer_s = first_layer_s or time.monotonic() - started_s
        end()
        duration_s = time.monotonic() - started_s
        verify_payload(self.buffer, self.content, Delivery.LAYER_MAJOR)
        return duration_s, first_layer_s

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

    def offer(kind: str, delivery: Delivery, calls: str, run: Run) -> tuple[Capability, Run]:
        return Capability(f"mooncake_{way}_{kind}", delivery, work.payload_bytes, f"{_NOTES[way]}; {calls}"), run

    slices_max = TCP_SLICES_IN_CALL_MAX if way == "tcp" else work.num_layers * len(work.keys)
    at_once = partial(reader.at_once, slices_max)
    session = offer("session_layer_major", Delivery.LAYER_MAJOR, "get session, call by layer", reader.by_session)
    return [
        offer("layer_major", Delivery.LAYER_MAJOR, "get_into_ranges by layer", reader.by_ranges),
        *([session] if way == "tcp" else []),
        offer("at_once_layer_major", Delivery.LAYER_MAJOR, "chunks scattered, no layer before the end", at_once),
        offer("chunk_major", Delivery.CHUNK_MAJOR, "batch_get_into", reader.chunk_major),
    ]


def _require(answers: Sequence[object], wanted: object) -> None:
    """Raise RuntimeError unless Mooncake answered this for everything."""
    others = [answer for answer in answers if answer != wanted]
    if others:
        raise RuntimeError(f"Mooncake answered {others[0]} instead of {wanted}, {len(others)} of {len(answers)} times")


if __name__ == "__main__":
    work_file, chosen_way, master_address, owner_address = sys.argv[1:]
    serve(partial(start, chosen_way, master_address, owner_address), [work_file])
