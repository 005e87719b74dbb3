"""Layers on their way from host memory to where attention reads them, in lanes beside the computation. Needs torch.

Chunks' slices are copied up as they lie, into one of a few slots on the device, and put in order there by a second
lane: the copy engine needs none of the processors, and is at the next layer meanwhile. A slot is filled again only
after what was in it has been put in order. Sources are in pinned memory and not touched before the device is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.device.accelerator import Accelerator, Mark
from bench.ttft.play import LAYER_TIMEOUT_S

SLOT_COUNT = 3


class Arrivals:
    """The mark after which each layer is on the device. Told by one thread, asked by another."""

    def __init__(self, num_layers: int) -> None:
        self._marks: list[Future[Mark]] = [Future() for _ in range(num_layers)]

    def tell(self, layer_index: int, mark: Mark) -> None:
        """The layer's work has been given to a lane, up to the mark."""
        self._marks[layer_index].set_result(mark)

    def fail(self, error: BaseException) -> None:
        """No layer will come that has not been told of."""
        for each in self._marks:
            if not each.done():
                each.set_exception(error)

    def mark(self, layer_index: int) -> Mark:
        """Blocks until it is told. Raises what the other thread failed with, and TimeoutError."""
        return self._marks[layer_index].result(LAYER_TIMEOUT_S)


@dataclass(slots=True)
class _Slot:
    memory: Tensor
    emptied: Mark | None = None


class Uploader:
    """Used by one thread at a time. `slot_bytes` is the most that `staged` is given at once."""

    def __init__(self, accelerator: Accelerator, slot_bytes: int) -> None:
        self._accelerator = accelerator
        self._copies = accelerator.lane()
        self._orderings = accelerator.lane()
        self.slot_bytes = slot_bytes
        self._slots = [
            _Slot(torch.empty(slot_bytes, dtype=torch.uint8, device=accelerator.device)) for _ in range(SLOT_COUNT)
        ]
        self._turn = 0

    def staged(self, host: Tensor, place: Callable[[Tensor], None]) -> Mark:
        """Copy pinned bytes up, then `place` them from where they are on the device."""
        slot = self._slots[self._turn % SLOT_COUNT]
        self._turn += 1
        landed = slot.memory[: host.numel()]
        with self._copies.entered():
            if slot.emptied is not None:
                self._accelerator.wait(slot.emptied)
            landed.copy_(host, non_blocking=True)
            copied = self._accelerator.mark()
        with self._orderings.entered():
            self._accelerator.wait(copied)
            place(landed)
            slot.emptied = self._accelerator.mark()
        return slot.emptied

    def straight(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Mark:
        """Pairs of a place on the device and pinned memory of the same shape, each contiguous."""
        with self._copies.entered():
            for into, host in copies:
                into.copy_(host, non_blocking=True)
            return self._accelerator.mark()

    def placed(self, place: Callable[[], None]) -> Mark:
        """`place` what is on the device already."""
        with self._orderings.entered():
            place()
            return self._accelerator.mark()
