"""One prompt's KV as chunks in a server and in pinned host memory, and a model that prefills what follows. Needs torch.

What bench.ttft plays is done here: the server fills pinned host memory (or the device's own), a thread has each layer
copied up as it comes, and the model's attention waits for that layer on the device. TTFT is from the request until the
host knows the first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench import aggregate_bed
from bench.aggregate_bed import Chunks
from bench.content import VerificationError, make_content
from bench.device.accelerator import Accelerator
from bench.device.carrier import LOCAL_SYSTEMS, Carrier, HostCopies, Landing
from bench.device.kv import chunks_of, poison, verify_prefix
from bench.device.subject import Subject
from bench.device.uploads import Arrivals, Uploader
from bench.progress import progress_bar
from bench.samples import State
from bench.server import BenchServer
from bench.ttft.cases import S3_SYSTEMS, Case, Scale, System
from bench.ttft.link import FixedConfig, PlayedLink, served_link
from bench.ttft.play import LAYER_TIMEOUT_S, Played, Source
from bench.ttft.sources import CopiedLayers, FetchedLayers
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.units import MIB
from nixl_client import shared_memory
from nixl_client.client import ObjectCacheClient, Transport
from storage_server.settings import StorageSettings

STORE_BATCH_BYTES = 256 * MIB
UNTOUCHED = 0xFF


@dataclass(frozen=True, slots=True)
class DeviceBedSettings:
    """How a bed is made. `scale` is the model's KV over Llama-3.1-8B's; `folder` is for the store."""

    scale: Scale
    transport: Transport
    landing: Landing
    gather_s: float | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """One request. Logits and first token are compared with those of the prompt computed whole."""

    played: Played
    logits_error: float
    is_first_token_same: bool


class LayersHere:
    """Layers that are in host memory from the beginning."""

    def wait_layer(self, layer_index: int) -> float:
        """Now."""
        return time.monotonic()

    def is_complete(self) -> bool:
        """Always."""
        return True


@dataclass(frozen=True, slots=True)
class DeviceBed:
    """`keys` are of the longest case's chunks; cases of fewer take the first ones."""

    subject: Subject
    settings: DeviceBedSettings
    keys: tuple[str, ...]
    link: PlayedLink
    client: ObjectCacheClient
    carrier: Carrier
    carrying: ThreadPoolExecutor
    gathering: ThreadPoolExecutor

    def run(self, system: System, case: Case) -> DeviceRun:
        """One request; every bit of the prefix on the device is compared afterwards. Raises VerificationError, and
        what the client or torch raises.
        """
        subject, accelerator = self.subject, self.subject.accelerator
        layer_count = subject.model.shape.num_layers
        arrivals = Arrivals(layer_count)
        poison(subject.cache)
        if system not in LOCAL_SYSTEMS:
            self.carrier.landed(system, case).fill_(UNTOUCHED)
        accelerator.synchronize()
        carried: Future[None] | None = None
        try:
            begun, started_s = accelerator.mark(), time.monotonic()
            with self._source(system, case) as source:
                carried = self.carrying.submit(self.carrier.carry, system, case, source, arrivals)
                logits = subject.model.prefill(
                    subject.tokens,
                    subject.cache,
                    case.cached_tokens,
                    lambda layer_index: accelerator.wait(arrivals.mark(layer_index)),
                )
                first_token = int(logits.argmax())  # waits for the device
                ttft_s = time.monotonic() - started_s
        finally:
            if carried is not None:
                wait([carried])  # its source has ended, so it will; nothing is given to a lane after this
            accelerator.synchronize()
        verify_prefix(subject.cache, subject.reference, case.cached_tokens)
        ready_s = (accelerator.elapsed_s(begun, arrivals.mark(layer_index)) for layer_index in range(layer_count))
        is_same = first_token == int(subject.logits.argmax())
        return DeviceRun(Played(ttft_s, tuple(ready_s)), subject.logits_error(logits), is_same)

    @contextmanager
    def _source(self, system: System, case: Case) -> Iterator[Source]:
        """Layers on their way to where the carrier takes them from."""
        layout, count = case.layout(self.settings.scale), case.chunk_count
        if system is System.LOCAL_DRAM_LW:
            yield CopiedLayers(self.gathering, self._gathers(case))
            return
        if system not in S3_SYSTEMS:
            yield LayersHere()
            return
        delivery = Delivery.CHUNK_MAJOR if system is System.S3_BATCH_CW else Delivery.LAYER_MAJOR
        windows_us = [max(1, round(case.layer_compute_s(self.settings.scale) * 1e6))] * layout.num_layers
        target, keys = self.carrier.target, self.keys[:count]
        with self.client.fetch(keys, layout, target, delivery=delivery, layer_compute_us=windows_us) as fetch:
            yield FetchedLayers(fetch)
            result = fetch.wait(LAYER_TIMEOUT_S)
        if result.mode.value != delivery.value or result.transferred_bytes != layout.payload_bytes(count):
            raise VerificationError(f"{result} came of {delivery.value}, {layout.payload_bytes(count)} bytes")

    def _gathers(self, case: Case) -> list[Callable[[], None]]:
        """Each layer out of all chunks into the landing memory, by one thread, as a serving node's own would."""
        layout, count = case.layout(self.settings.scale), case.chunk_count
        host, slice_bytes = self.carrier.host, layout.per_layer_chunk_bytes
        sources = host.chunks[:count].numpy().reshape(count, layout.num_layers, slice_bytes).transpose(1, 0, 2)
        landing = host.landing[: layout.payload_bytes(count)].numpy()
        layers = landing.reshape(layout.num_layers, count, slice_bytes)
        return [partial(np.copyto, layer, source) for layer, source in zip(layers, sources, strict=True)]


@contextmanager
def filled_bed(subject: Subject, case: Case, settings: DeviceBedSettings) -> Iterator[DeviceBed]:
    """Everything in place and warm for `case` and for those of its chunk size that hit less. Raises BenchServerError,
    ObjectCacheError, NixlFailure, VerificationError, DeviceError, OSError, MemoryError, and RuntimeError (torch's).
    """
    layout, count = case.layout(settings.scale), case.chunk_count
    nbytes = layout.payload_bytes(count)
    keys = tuple(f"device/{case.context}/{case.chunk_tokens}/{index:06d}" for index in range(count))
    accelerator = subject.accelerator
    with ExitStack() as stack:
        host = HostCopies(
            chunks=_pinned(stack, accelerator, nbytes).view(count, layout.chunk_bytes),
            payload=_pinned(stack, accelerator, nbytes)
            .view(subject.cache.dtype)
            .view(*subject.cache.shape[:2], case.cached_tokens, *subject.cache.shape[3:]),
            landing=_pinned(stack, accelerator, nbytes),
        )
        _fill(host, subject, layout)
        fixed = FixedConfig(nbytes + nbytes // 4 + 64 * MIB, settings.gather_s)
        link = stack.enter_context(served_link(settings.folder, fixed))
        client = stack.enter_context(link.server.client(settings.transport))
        _store(link.server, keys, host.chunks, f"{case.context}, G={case.chunk_tokens}: storing")
        target = host.landing
        if settings.landing is Landing.DEVICE:
            target = torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device)
        _register(client, target, settings.transport)
        _warm(link.server, client, keys, layout, host.landing)
        slot_bytes = max(layout.layer_bytes(count), layout.chunk_bytes)
        uploader = Uploader(accelerator, slot_bytes)
        carrier = Carrier(subject.cache, host, target, settings.landing, uploader, settings.scale)
        accelerator.synchronize()  # memory that other lanes will use may have been in use in the main one
        pools = [stack.enter_context(ThreadPoolExecutor(1, name)) for name in ("carry", "gather")]
        yield DeviceBed(subject, settings, keys, link, client, carrier, *pools)


def _pinned(stack: ExitStack, accelerator: Accelerator, nbytes: int) -> Tensor:
    """Of the kind that the client allocates, so that every transport can fill it."""
    return stack.enter_context(accelerator.pinned(shared_memory.allocate(nbytes)))


def _fill(host: HostCopies, subject: Subject, layout: ChunkLayout) -> None:
    """The reference in both orders, in pieces that the device has room for."""
    batch = max(1, STORE_BATCH_BYTES // layout.chunk_bytes)
    for first in range(0, len(host.chunks), batch):
        some = host.chunks[first : first + batch]
        some.copy_(chunks_of(subject.reference, layout.chunk_tokens, first, len(some)))
    for layer, reference in zip(host.payload, subject.reference, strict=True):
        layer.copy_(reference[:, : layer.shape[1]])


def _store(server: BenchServer, keys: tuple[str, ...], chunks: Tensor, title: str) -> None:
    batch = max(1, STORE_BATCH_BYTES // chunks.shape[1])
    with server.client(Transport.HTTP) as client, progress_bar(len(keys), title) as advance:
        for first in range(0, len(keys), batch):
            some = keys[first : first + batch]
            client.put_chunks(some, list(chunks[first : first + batch].numpy()))
            advance(len(some))


def _register(client: ObjectCacheClient, target: Tensor, wanted: Transport) -> None:
    used = client.register_buffer(target)
    if wanted is not Transport.AUTO and used is not wanted:
        raise VerificationError(f"{used.value} took the place of {wanted.value}")


def _warm(
    server: BenchServer, client: ObjectCacheClient, keys: tuple[str, ...], layout: ChunkLayout, landing: Tensor
) -> None:
    """Into the server's DRAM tier. What is in the chunks does not matter for it."""
    chunks = {layout.chunk_tokens: Chunks(keys, make_content(len(keys), layout, seed=0))}
    settings = StorageSettings(data_dir=Path())
    aggregate_bed.warm(aggregate_bed.Bed(State.DRAM, server, settings, chunks, landing.numpy()), client)
