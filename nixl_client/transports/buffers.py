"""A caller's buffer, numpy or torch, as a span of memory and as views of layers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from objectcache.adapters.nixl_memory import Memory


@dataclass(frozen=True, slots=True)
class Buffer:
    """Contiguous writable memory. `flat` is a one-dimensional uint8 numpy array or torch tensor over all of it."""

    memory: Memory
    flat: Any

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.memory.nbytes

    def host_view(self) -> memoryview:
        """The bytes, for reading a body into. Raises ValueError for device memory."""
        if self.memory.device != "cpu":
            raise ValueError("the http transport needs a buffer in host memory")
        flat: np.ndarray = self.flat if isinstance(self.flat, np.ndarray) else self.flat.numpy()
        return memoryview(flat)  # type: ignore[arg-type]  # numpy arrays are buffers; typeshed cannot say so here

    def payload(self, offset: int, nbytes: int) -> Any:
        """A part of it: a numpy array of host memory, a torch tensor of a device's."""
        part = self.flat[offset : offset + nbytes]
        return part.numpy() if self.memory.device == "cpu" and not isinstance(part, np.ndarray) else part

    def layer(self, layer_index: int, mode: Mode, chunk_count: int, layout: ChunkLayout, offset: int) -> Any:
        """One layer as a uint8 array or tensor of shape (chunk_count, S), without copying. In chunk-major payloads
        the rows are strided.
        """
        payload = self.flat[offset : offset + layout.delivery_bytes(chunk_count)]
        if mode is Mode.LAYER_MAJOR:
            return payload.reshape(layout.num_layers, chunk_count, layout.per_layer_chunk_bytes)[layer_index]
        return payload.reshape(chunk_count, layout.num_layers, layout.per_layer_chunk_bytes)[:, layer_index]


def as_buffer(array: Any) -> Buffer:
    """Describe a numpy array, torch tensor or writable bytes-like object.

    Raises ValueError when it is not contiguous, empty or read-only, TypeError for anything else.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if not array.is_contiguous():
            raise ValueError("the buffer must be contiguous")
        flat = array.detach().view(-1).view(torch.uint8)
        device = "cpu" if array.device.type == "cpu" else f"cuda:{array.device.index or 0}"
        return _buffer(int(flat.data_ptr()), int(flat.numel()), device, flat)
    view = memoryview(array)
    if view.readonly:
        raise ValueError("the buffer must be writable")
    if not view.c_contiguous:
        raise ValueError("the buffer must be contiguous")
    numpy_flat = np.frombuffer(view.cast("B") if view.nbytes else view, dtype=np.uint8)
    return _buffer(int(numpy_flat.ctypes.data), int(numpy_flat.nbytes), "cpu", numpy_flat)


def _buffer(address: int, nbytes: int, device: str, flat: Any) -> Buffer:
    if nbytes == 0:
        raise ValueError("the buffer is empty")
    return Buffer(Memory(address, nbytes, device), flat)
