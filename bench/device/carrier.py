"""From host memory, or where the server put it, to the model's cache: each system's way. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

from torch import Tensor

from bench.device.accelerator import Mark
from bench.device.kv import place_chunks, place_layer
from bench.device.uploads import Arrivals, Uploader
from bench.ttft.cases import S3_SYSTEMS, Case, Scale, System
from bench.ttft.play import Source

CHUNKWISE_SYSTEMS = (System.LOCAL_DRAM_CW, System.S3_BATCH_CW)
LOCAL_SYSTEMS = (System.OPT_LOCAL_LW, System.LOCAL_DRAM_CW)
"""Whose bytes are in pinned host memory from the beginning, as they are copied up."""


class Landing(Enum):
    """What the server writes into: pinned host memory, from where layers are copied up, or the device's memory."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Pinned memory of this process, whatever the transport. `chunks` as they were stored, uint8 of shape (N, L*S);
    `payload` in the cache's own order, (L, 2, tokens, kv_heads, head_dim); `landing` N*L*S bytes to receive.
    """

    chunks: Tensor
    payload: Tensor
    landing: Tensor


@dataclass(frozen=True, slots=True)
class Carrier:
    """`target` is what the server fills, N*L*S bytes: the landing memory, or the device's."""

    cache: Tensor
    host: HostCopies
    target: Tensor
    landing: Landing
    uploader: Uploader
    scale: Scale

    def landed(self, system: System, case: Case) -> Tensor:
        """The case's bytes where this system has them before they are copied up."""
        nbytes = case.layout(self.scale).payload_bytes(case.chunk_count)
        if system in S3_SYSTEMS:
            return self.target[:nbytes]
        whole = self.host.landing if system is System.LOCAL_DRAM_LW else self.host.chunks.flatten()
        return whole[:nbytes]

    def carry(self, system: System, case: Case, source: Source, arrivals: Arrivals) -> None:
        """Have what comes copied up as soon as it is there, and tell; every failure is told, too."""
        try:
            if system in CHUNKWISE_SYSTEMS:
                self._carry_chunks(system, case, source, arrivals)
            else:
                self._carry_layers(system, case, source, arrivals)
        except BaseException as error:
            arrivals.fail(error)

    def _carry_layers(self, system: System, case: Case, source: Source, arrivals: Arrivals) -> None:
        layout = case.layout(self.scale)
        layer_bytes = layout.layer_bytes(case.chunk_count)
        landed = self.landed(system, case)
        for layer_index in range(layout.num_layers):
            source.wait_layer(layer_index)
            if system is System.OPT_LOCAL_LW:
                mark = self._straight(layer_index, case.cached_tokens)
            else:
                slices = landed[layer_index * layer_bytes : (layer_index + 1) * layer_bytes]
                mark = self._up(system, slices, partial(place_layer, self.cache, layer_index, case.chunk_tokens))
            arrivals.tell(layer_index, mark)

    def _carry_chunks(self, system: System, case: Case, source: Source, arrivals: Arrivals) -> None:
        """No layer is there before all are: a chunk holds some of each."""
        layout = case.layout(self.scale)
        source.wait_layer(layout.num_layers - 1)
        landed = self.landed(system, case)
        some = self.uploader.slot_bytes // layout.chunk_bytes
        marks = []
        for first in range(0, case.chunk_count, some):
            chunks = landed[first * layout.chunk_bytes : (first + some) * layout.chunk_bytes]
            marks.append(self._up(system, chunks, partial(place_chunks, self.cache, first, case.chunk_tokens)))
        for layer_index in range(layout.num_layers):
            arrivals.tell(layer_index, marks[-1])

    def _straight(self, layer_index: int, token_count: int) -> Mark:
        """Keys and values to where they belong, in two copies."""
        places = self.cache[layer_index, :, :token_count]
        return self.uploader.straight(list(zip(places, self.host.payload[layer_index, :, :token_count], strict=True)))

    def _up(self, system: System, landed: Tensor, place: Callable[[Tensor], None]) -> Mark:
        if system in S3_SYSTEMS and self.landing is Landing.DEVICE:
            return self.uploader.placed(partial(place, landed))
        return self.uploader.staged(landed, place)
