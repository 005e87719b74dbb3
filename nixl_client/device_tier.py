"""Chunks in a device's memory, for those who drive a model themselves: what was loaded before need not come again.
Needs torch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch

from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from nixl_client.client import Client

LOAD_TIMEOUT_S = 60.0


class DeviceTier:
    """Chunks of one layout as tensors on `device`, uint8 of shape (L, S). They take at most `capacity_bytes`. The chunk
    that was used longest ago leaves first; of one prefix, children leave before parents, since a chunk is of use only
    behind all those before it. Safe from any thread.
    """

    def __init__(self, capacity_bytes: int, layout: ChunkLayout, device: torch.device | str = "cpu") -> None:
        self._layout = layout
        self._device = torch.device(device)
        self._count_max = max(0, capacity_bytes // layout.chunk_bytes)
        self._chunks: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """The bytes of all chunks that are here."""
        return len(self._chunks) * self._layout.chunk_bytes

    def matched(self, chunk_keys: Sequence[str]) -> int:
        """How many chunks, from the first, are here."""
        return next((index for index, key in enumerate(chunk_keys) if key not in self._chunks), len(chunk_keys))

    def leading(self, chunk_keys: Sequence[str]) -> list[torch.Tensor]:
        """The chunks, from the first, that are here. They count as used; do not write to them."""
        with self._lock:
            keys = chunk_keys[: self.matched(chunk_keys)]
            for key in reversed(keys):
                self._chunks.move_to_end(key)
            return [self._chunks[key] for key in keys]

    def put(self, chunk_keys: Sequence[str], chunks: Iterable[torch.Tensor], parents: Sequence[str] = ()) -> None:
        """Keep copies of chunks of one prefix, uint8 of shape (L, S), which follow `parents`. Raises ValueError for
        another shape.
        """
        shape = (self._layout.num_layers, self._layout.per_layer_chunk_bytes)
        made: list[tuple[str, torch.Tensor]] = []
        for key, chunk in zip(chunk_keys, chunks, strict=True):
            if tuple(chunk.shape) != shape or chunk.dtype != torch.uint8:
                raise ValueError(f"a chunk is uint8 of shape {shape}, not {chunk.dtype} of {tuple(chunk.shape)}")
            if len(made) < self._count_max:
                made.append((key, chunk.to(self._device, copy=True).contiguous()))
        with self._lock:
            for key, chunk in reversed(made):
                self._chunks[key] = chunk
                self._chunks.move_to_end(key)
            for key in reversed(parents):
                if key in self._chunks:
                    self._chunks.move_to_end(key)
            while len(self._chunks) > self._count_max:
                self._chunks.popitem(last=False)

    def clear(self) -> None:
        """Forget all chunks."""
        with self._lock:
            self._chunks.clear()

    def load(self, client: Client, chunk_keys: Sequence[str], timeout_s: float = LOAD_TIMEOUT_S) -> torch.Tensor:
        """A prefix on the device, uint8 of shape (L, N, S): what is here from here, the rest by a fetch, which is kept.
        Raises what `client.fetch` and its waits raise; TimeoutError where a layer does not come within `timeout_s`.
        """
        layout, here = self._layout, self.leading(chunk_keys)
        shape = (layout.num_layers, len(chunk_keys), layout.per_layer_chunk_bytes)
        loaded = torch.empty(shape, dtype=torch.uint8, device=self._device)
        for index, chunk in enumerate(here):
            loaded[:, index] = chunk
        missing = chunk_keys[len(here) :]
        if not missing:
            return loaded
        buffer = client.allocate_buffer(layout.delivery_bytes(len(missing)))
        try:
            with client.fetch(missing, layout, buffer, delivery=Delivery.LAYER_MAJOR) as fetch:
                for layer_index in range(layout.num_layers):
                    layer = fetch.wait_layer(layer_index, timeout_s)
                    loaded[layer_index, len(here) :] = torch.from_numpy(layer.data)
                fetch.wait(timeout_s)
        finally:
            client.release_buffer(buffer)
        kept = (loaded[:, index] for index in range(len(here), len(chunk_keys)))
        self.put(missing, kept, chunk_keys[: len(here)])
        return loaded
