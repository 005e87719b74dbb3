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

from bench.beds.play import CopiedLayers, FetchedLayers, Played, Source, Waits, play
from bench.experiments.ttft.cases import S3_SYSTEMS, Case, Scale, System, Task
from calibration.chunks import Chunks, StoredFiles, check_fetch, register_as, store_chunks, warm
from calibration.content import Bytes, make_content, verify_payload
from calibration.samples import State
from calibration.servers import FixedConfig, PlayedLink, served_link
from descriptors.units import MIB
from nixl_client.client import ObjectCacheClient, Transport


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
    prefix: Chunks
    device: Bytes
    chunks: NDArray[np.uint8]
    payload: NDArray[np.uint8]
    copier: ThreadPoolExecutor
    files: StoredFiles

    def run(self, task: Task) -> Played:
        """One request and its windows over the task's link; every byte is compared afterwards. Raises
        VerificationError, LocalServerError, and what the client raises.
        """
        self.link.set(self.settings.scale.link_bytes_per_s(task.link_bytes_per_s))
        content = self.prefix.part(0, task.case.chunk_count).content
        target = self.device[: content.layout.delivery_bytes(task.case.chunk_count)]
        target.fill(0)
        compute_s = task.case.layer_compute_s(self.settings.scale)
        with self._source(task, target, compute_s) as (source, started_s):
            played = play(source, content.layout.num_layers, compute_s, started_s, self.settings.waits)
        verify_payload(target, content, task.system.delivery)
        return played

    @contextmanager
    def _source(self, task: Task, target: Bytes, compute_s: float) -> Iterator[tuple[Source, float]]:
        """The layers on their way, and when they were asked for."""
        layout, system, count = self.prefix.layout, task.system, task.case.chunk_count
        if system in S3_SYSTEMS:
            keys, delivery = self.prefix.keys[:count], system.delivery
            windows_us = [round(compute_s * 1e6)] * layout.num_layers
            self.files.drop()
            started_s = time.monotonic()
            with self.client.fetch(keys, layout, self.device, delivery=delivery, layer_compute_us=windows_us) as fetch:
                yield FetchedLayers(fetch), started_s
                check_fetch(fetch, delivery, target.nbytes)
            return
        chunks = self.chunks[:count]
        if system is System.LOCAL_DRAM_CW:
            copies = [partial(np.copyto, target.reshape(chunks.shape), chunks)]
        else:
            sources = self.payload[:, :count] if system is System.OPT_LOCAL_LW else chunks.transpose(1, 0, 2)
            layers = target.reshape(sources.shape)
            copies = [partial(np.copyto, layer, source) for layer, source in zip(layers, sources, strict=True)]
        started_s = time.monotonic()
        yield CopiedLayers(self.copier, copies), started_s


@contextmanager
def filled_bed(case: Case, settings: BedSettings) -> Iterator[Bed]:
    """Everything in place and warm for `case` and for those of its context and chunk size that hit less; the link is
    not limited. Raises LocalServerError, ObjectCacheError, NixlFailure, VerificationError, OSError, MemoryError.
    """
    layout, count = case.layout(settings.scale), case.chunk_count
    payload_bytes = layout.delivery_bytes(count)
    keys = tuple(f"ttft/{index:06d}" for index in range(count))
    prefix = Chunks(keys, make_content(count, layout, settings.seed))
    dram_bytes = payload_bytes + payload_bytes // 4 + 64 * MIB if settings.state is State.DRAM else 0
    with (
        served_link(settings.folder, FixedConfig(dram_bytes, settings.gather_s)) as link,
        link.server.client(settings.transport) as client,
        ThreadPoolExecutor(1, "copy") as copier,
    ):
        store_chunks(link.server, prefix, f"{case.context}, G={case.chunk_tokens}: storing")
        device = client.allocate_buffer(payload_bytes)
        register_as(client, device, settings.transport)
        files = StoredFiles(link.server.data_files() if settings.state is State.COLD else [])
        if settings.state is State.DRAM:
            warm(link.server, client, [prefix], device)
        chunks = np.empty((count, layout.num_layers, layout.per_layer_chunk_bytes), dtype=np.uint8)
        for index, chunk in enumerate(chunks):
            chunk[:] = prefix.content.chunk(index).reshape(chunk.shape)
        payload = np.ascontiguousarray(chunks.transpose(1, 0, 2))
        yield Bed(settings, link, client, prefix, device, chunks, payload, copier, files)
