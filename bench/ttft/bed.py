"""One prefix in a server's memory and in this process's, the buffer all systems fill, and each system's request.

The buffer stands for the device's memory: here it is host memory, registered with the server, which writes into it as
RDMA does into a GPU's. Local systems copy into the same buffer. What is local is chunks one after the other, as they
were stored, and the payload aggregated in layer order, which is what opt-local-LW starts from.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench import aggregate_bed
from bench.aggregate_bed import Chunks
from bench.content import Bytes, Content, VerificationError, make_content, verify_payload
from bench.ladder.chunks import Prefix, store_prefix
from bench.samples import State
from bench.ttft.cases import Case, Scale, System
from bench.ttft.link import FixedConfig, PlayedLink, served_link
from bench.ttft.play import LAYER_TIMEOUT_S, Played, Source, Waits, play
from bench.ttft.sources import CopiedLayers, FetchedLayers
from descriptors.descriptor import Delivery
from descriptors.units import MIB
from nixl_client.client import ObjectCacheClient, Transport
from storage_server.settings import StorageSettings

LAYER_MAJOR_SYSTEMS = (System.OPT_LOCAL_LW, System.LOCAL_DRAM_LW, System.S3_AGG_LW)


@dataclass(frozen=True, slots=True)
class BedSettings:
    """How a bed is made. `gather_s` is the scheduler's setting, None its default; `state` is where chunks are when they
    are asked for, `folder` is for the store.
    """

    scale: Scale
    waits: Waits = Waits.LOADING
    transport: Transport = Transport.SHM
    seed: int = 1
    gather_s: float | None = None
    folder: Path | None = None
    state: State = State.DRAM


@dataclass(frozen=True, slots=True)
class Bed:
    """`chunks` is uint8 of shape (N, L, S), `payload` of shape (L, N, S); cases of fewer chunks take the first ones."""

    settings: BedSettings
    link: PlayedLink
    client: ObjectCacheClient
    prefix: Prefix
    device: Bytes
    chunks: NDArray[np.uint8]
    payload: NDArray[np.uint8]
    copier: ThreadPoolExecutor
    stored: aggregate_bed.Bed

    def run(self, system: System, case: Case) -> Played:
        """One request and its windows; every byte is compared afterwards. Raises VerificationError, and what the
        client raises.
        """
        content = _first(self.prefix.content, case.chunk_count)
        target = self.device[: content.layout.payload_bytes(case.chunk_count)]
        target.fill(0)
        if system is System.S3_AGG_LW:
            played = self._fetch(case, Delivery.LAYER_MAJOR, target)
        elif system is System.S3_BATCH_CW:
            played = self._fetch(case, Delivery.CHUNK_MAJOR, target)
        else:
            played = self._copy(case, system, target)
        delivery = Delivery.LAYER_MAJOR if system in LAYER_MAJOR_SYSTEMS else Delivery.CHUNK_MAJOR
        verify_payload(target, content, delivery)
        return played

    def _fetch(self, case: Case, delivery: Delivery, target: Bytes) -> Played:
        layout = self.prefix.layout
        keys = self.prefix.keys[: case.chunk_count]
        compute_s = case.layer_compute_s(self.settings.scale)
        windows_us = [round(compute_s * 1e6)] * layout.num_layers
        self.stored.make_cold()
        started_s = time.monotonic()
        with self.client.fetch(keys, layout, self.device, delivery=delivery, layer_compute_us=windows_us) as fetch:
            played = self._play(FetchedLayers(fetch), compute_s, started_s)
            result = fetch.wait(LAYER_TIMEOUT_S)
        if result.mode.value != delivery.value or result.transferred_bytes != target.nbytes:
            raise VerificationError(f"{result} came of {delivery.value}, {target.nbytes} bytes")
        return played

    def _copy(self, case: Case, system: System, target: Bytes) -> Played:
        layout, count = self.prefix.layout, case.chunk_count
        slice_shape = layout.per_layer_chunk_bytes
        chunks = self.chunks[:count]
        if system is System.LOCAL_DRAM_CW:
            whole = target.reshape(count, layout.num_layers, slice_shape)
            copies = [partial(np.copyto, whole, chunks)]
        else:
            layers = target.reshape(layout.num_layers, count, slice_shape)
            sources = self.payload[:, :count] if system is System.OPT_LOCAL_LW else chunks.transpose(1, 0, 2)
            copies = [partial(np.copyto, layer, source) for layer, source in zip(layers, sources, strict=True)]
        started_s = time.monotonic()
        return self._play(CopiedLayers(self.copier, copies), case.layer_compute_s(self.settings.scale), started_s)

    def _play(self, source: Source, compute_s: float, started_s: float) -> Played:
        return play(source, self.prefix.layout.num_layers, compute_s, started_s, self.settings.waits)


@contextmanager
def filled_bed(case: Case, settings: BedSettings) -> Iterator[Bed]:
    """Everything in place and warm for `case` and for those of its context and chunk size that hit less; the link is
    not limited. Raises BenchServerError, ObjectCacheError, NixlFailure, VerificationError, OSError, MemoryError.
    """
    layout, count = case.layout(settings.scale), case.chunk_count
    payload_bytes = layout.payload_bytes(count)
    keys = tuple(f"ttft/{index:06d}" for index in range(count))
    prefix = Prefix(keys, make_content(count, layout, settings.seed))
    dram_bytes = payload_bytes + payload_bytes // 4 + 64 * MIB if settings.state is State.DRAM else 0
    with (
        served_link(settings.folder, FixedConfig(dram_bytes, settings.gather_s)) as link,
        link.server.client(settings.transport) as client,
        ThreadPoolExecutor(1, "copy") as copier,
    ):
        store_prefix(link.server, prefix, f"{case.context}, G={case.chunk_tokens}: storing")
        device = client.allocate_buffer(payload_bytes)
        used = client.register_buffer(device)
        if settings.transport is not Transport.AUTO and used is not settings.transport:
            raise VerificationError(f"{used.value} took the place of {settings.transport.value}")
        files = link.data_files() if settings.state is State.COLD else []
        stored = aggregate_bed.Bed(
            settings.state,
            link.server,
            StorageSettings(data_dir=Path()),
            {case.chunk_tokens: Chunks(keys, prefix.content)},
            device,
            files,
        )
        if settings.state is State.DRAM:
            aggregate_bed.warm(stored, client)
        chunks = _chunks(prefix)
        payload = np.ascontiguousarray(chunks.transpose(1, 0, 2))
        yield Bed(settings, link, client, prefix, device, chunks, payload, copier, stored)


def _chunks(prefix: Prefix) -> NDArray[np.uint8]:
    layout = prefix.layout
    found = np.empty((len(prefix.keys), layout.num_layers, layout.per_layer_chunk_bytes), dtype=np.uint8)
    for index, chunk in enumerate(found):
        chunk[:] = prefix.content.chunk(index).reshape(chunk.shape)
    return found


def _first(content: Content, count: int) -> Content:
    """The content of the first chunks alone."""
    return Content(content.layout, count, content.base, content.stamps[:, :count])
