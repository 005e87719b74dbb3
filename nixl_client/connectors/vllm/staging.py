"""The buffer that layers arrive in, and the copy of a layer from it to the device with the engine's blocks."""

from __future__ import annotations

import logging
from typing import Any

import torch

from nixl_client.client import Client
from nixl_client.connectors.vllm.options import StagingMemory

_cuda: Any = torch.cuda  # of which some is untyped
_log = logging.getLogger(__name__)


class Staging:
    """`nbytes` in host memory, page-locked where the blocks are in a GPU's, or in the GPU's own memory, for servers
    that write into it. Used by the thread that runs the model.
    """

    def __init__(self, client: Client, nbytes: int, device: torch.device, memory: StagingMemory) -> None:
        self.nbytes = nbytes
        self._client = client
        self._device = device
        self._is_on_gpu = device.type == "cuda"
        self._copied: Any = None
        is_copied = self._is_on_gpu and memory is StagingMemory.HOST
        self._stream: Any = _cuda.Stream(device) if is_copied else None
        self.array: Any = (
            torch.zeros(nbytes, dtype=torch.uint8, device=device)
            if memory is StagingMemory.DEVICE
            else client.allocate_buffer(nbytes)
        )
        self._is_locked = self._stream is not None and _lock(self.array)

    def rows(self, data: Any) -> torch.Tensor:
        """A layer's rows, uint8 of shape (chunk_count, S), on the blocks' device, for what the current stream does
        next. Copies run on a stream of their own, beside the layer before.
        """
        rows: torch.Tensor = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
        if self._stream is None:
            return rows
        with _cuda.stream(self._stream):
            copied = rows.to(self._device, non_blocking=True)
        current = _cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        copied.record_stream(current)
        return copied

    def mark_read(self) -> None:
        """All that is to be read of the buffer has been asked for."""
        if self._is_on_gpu:
            self._copied = _cuda.Event()
            self._copied.record(self._stream or _cuda.current_stream(self._device))

    def await_read(self) -> None:
        """Return when the device has read what it was asked to, and the buffer may be written again."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def release(self) -> None:
        """Give the buffer back; no server writes into it any more on return. Any thread."""
        self._client.release_buffer(self.array)
        if self._is_on_gpu:
            _cuda.synchronize(self._device)
        if self._is_locked:
            _cuda.cudart().cudaHostUnregister(self.array.ctypes.data)


def _lock(array: Any) -> bool:
    """Page-lock the memory; copies from memory that is not are right too, only slower."""
    result = _cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0)
    if int(result) != 0:
        _log.warning("the staging buffer could not be page-locked (CUDA error %d): loads will be slower", int(result))
        return False
    return True
