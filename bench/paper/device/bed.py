"""One prompt's KV as chunks in a server and in pinned host memory, and a model that prefills what follows. Needs torch.

What `bench ttft` plays is done here: the server fills pinned host memory (or the device's own), a thread has each
layer copied up as it comes, and the model's attention waits for that layer on the device. TTFT is from the request
until the host knows the first token.

KV has two forms here. The model's cache is bfloat16 of shape (L, 2, tokens, kv_heads, head_dim). One layer in a chunk
is S bytes: keys, then values, each (chunk_tokens, kv_heads, head_dim) (KV_L2TD, see descriptors.layout).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.beds.fetchers import LAYER_TIMEOUT_S, CopiedLayers, FetchedLayers, Played, Source
from bench.paper.device.command import Landing
from bench.paper.device.model import Accelerator, Mark, Subject, poison
from bench.paper.ttft.results import S3_SYSTEMS, Case, Scale, System, Task
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.units import MIB
from nixl_client.client import Client, Transport
from nixl_client.transports import shared_memory
from objectcache.calibration.chunks import Chunks, check_fetch, register_as, store_bodies, warm
from objectcache.calibration.content import VerificationError, make_content
from objectcache.calibration.servers import FixedConfig, PlayedLink, served_link

STORE_BATCH_BYTES = 256 * MIB
UNTOUCHED = 0xFF
WIDE = torch.int64
"""What is put in order is moved in elements of this size: a kernel computes an address for each."""
SLOT_COUNT = 3
LOCAL_SYSTEMS = (System.OPT_LOCAL_LW, System.LOCAL_DRAM_CW)
"""Whose bytes are in pinned host memory from the beginning, as they are copied up."""


def chunks_of(cache: Tensor, chunk_tokens: int, first: int, count: int) -> Tensor:
    """Chunk objects `first` to `first + count`: uint8 of shape (count, L*S), on the cache's device."""
    layers, parts, _, heads, dim = cache.shape
    some = cache[:, :, first * chunk_tokens : (first + count) * chunk_tokens]
    cut = some.view(layers, parts, count, chunk_tokens, heads, dim)
    return cut.permute(2, 0, 1, 3, 4, 5).contiguous().flatten(1).view(torch.uint8)


def place_chunks(cache: Tensor, first: int, chunk_tokens: int, chunks: Tensor) -> None:
    """Whole chunks from number `first` on, uint8 of their bytes one after the other, into all layers of the cache.
    Slices of one layer are chunks for a cache of that layer alone.
    """
    wide = cache.view(WIDE)
    layers, _, _, heads, width = wide.shape
    found = chunks.view(WIDE).view(-1, layers, 2, chunk_tokens, heads, width)
    count, start = found.shape[0], first * chunk_tokens
    into = wide[:, :, start : start + count * chunk_tokens]
    into.view(layers, 2, count, chunk_tokens, heads, width).copy_(found.permute(1, 2, 0, 3, 4, 5))


def verify_prefix(cache: Tensor, reference: Tensor, token_count: int) -> None:
    """Compare every bit of the first tokens' KV. Raises VerificationError with the first wrong layer."""
    for layer_index, (ours, theirs) in enumerate(zip(cache, reference, strict=True)):
        found, expected = (each[:, :token_count].view(torch.int16) for each in (ours, theirs))
        if not torch.equal(found, expected):
            raise VerificationError(f"layer {layer_index}: wrong KV on the device")


class Uploader:
    """Used by one thread at a time. `slot_bytes` is the most that `staged` is given at once."""

    def __init__(self, accelerator: Accelerator, slot_bytes: int) -> None:
        self._accelerator, self.slot_bytes = accelerator, slot_bytes
        self._copies, self._orderings = accelerator.lane(), accelerator.lane()
        self._slots = torch.empty((SLOT_COUNT, slot_bytes), dtype=torch.uint8, device=accelerator.device)
        self._emptied: list[Mark | None] = [None] * SLOT_COUNT
        self._turn = 0

    def staged(self, host: Tensor, place: Callable[[Tensor], None]) -> Mark:
        """Copy pinned bytes up, then `place` them from where they are on the device."""
        slot = self._turn % SLOT_COUNT
        self._turn += 1
        landed, emptied = self._slots[slot, : host.numel()], self._emptied[slot]
        with self._copies():
            if emptied is not None:
                self._accelerator.wait(emptied)
            landed.copy_(host, non_blocking=True)
            copied = self._accelerator.mark()
        with self._orderings():
            self._accelerator.wait(copied)
            place(landed)
            placed = self._emptied[slot] = self._accelerator.mark()
        return placed

    def straight(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Mark:
        """Pairs of a place on the device and pinned memory of the same shape, each contiguous."""
        with self._copies():
            for into, host in copies:
                into.copy_(host, non_blocking=True)
            return self._accelerator.mark()

    def placed(self, place: Callable[[], None]) -> Mark:
        """`place` what is on the device already."""
        with self._orderings():
            place()
            return self._accelerator.mark()


@dataclass(frozen=True, slots=True)
class DeviceBedSettings:
    """How a bed is made. `scale` is the model's KV over Llama-3.1-8B's; `folder` is for the store."""

    scale: Scale
    transport: Transport
    landing: Landing
    gather_s: float | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class DeviceRun(Played):
    """One request. Logits and first token are compared with those of the prompt computed whole."""

    logits_error: float
    is_first_token_same: bool


@dataclass(frozen=True, slots=True)
class DeviceBed:
    """`keys` are of the longest case's chunks; cases of fewer take the first ones. Pinned memory of this process has
    `chunks` as they were stored, uint8 of shape (N, L*S), `payload` in the cache's own order, (L, 2, tokens, kv_heads,
    head_dim), and `landing`, N*L*S bytes to receive. `target` is what the server fills: that, or the device's memory.
    """

    subject: Subject
    settings: DeviceBedSettings
    layout: ChunkLayout
    keys: tuple[str, ...]
    link: PlayedLink
    client: Client
    chunks: Tensor
    payload: Tensor
    landing: Tensor
    target: Tensor
    uploader: Uploader
    carrying: ThreadPoolExecutor
    gathering: ThreadPoolExecutor

    def run(self, task: Task) -> DeviceRun:
        """One request over the task's link; every bit of the prefix on the device is compared afterwards. Raises
        VerificationError, LocalServerError, and what the client or torch raises.
        """
        self.link.set(self.settings.scale.link_bytes_per_s(task.link_bytes_per_s))
        subject, accelerator, cached_tokens = self.subject, self.subject.model.accelerator, task.case.cached_tokens
        arrivals: list[Future[Mark]] = [Future() for _ in range(self.layout.num_layers)]
        poison(subject.cache)
        if task.system not in LOCAL_SYSTEMS:
            self._landed(task).fill_(UNTOUCHED)
        accelerator.synchronize()

        def wait_layer(layer_index: int) -> None:
            accelerator.wait(arrivals[layer_index].result(LAYER_TIMEOUT_S))

        carried: Future[None] | None = None
        try:
            begun, started_s = accelerator.mark(), time.monotonic()
            with self._source(task) as source:
                carried = self.carrying.submit(self._carry, task, source, arrivals)
                logits = subject.model.prefill(subject.tokens, subject.cache, cached_tokens, wait_layer)
                first_token = int(logits.argmax())  # waits for the device
                ttft_s = time.monotonic() - started_s
        finally:
            if carried is not None:
                wait([carried])  # its source has ended, so it will; nothing is given to a lane after this
            accelerator.synchronize()
        verify_prefix(subject.cache, subject.reference, cached_tokens)
        ready_s = tuple(accelerator.elapsed_s(begun, arrival.result()) for arrival in arrivals)
        is_same = first_token == int(subject.logits.argmax())
        return DeviceRun(ttft_s, ready_s, subject.logits_error(logits), is_same)

    @contextmanager
    def _source(self, task: Task) -> Iterator[Source | None]:
        """Layers on their way to where they are copied up from; None where they are there from the beginning."""
        layout, delivery, count = self.layout, task.system.delivery, task.case.chunk_count
        if task.system is System.LOCAL_DRAM_LW:  # one thread gathers each layer, as a serving node's own would
            shape = (count, layout.num_layers, layout.per_layer_chunk_bytes)
            sources = self.chunks[:count].numpy().reshape(shape).transpose(1, 0, 2)
            layers = self._landed(task).numpy().reshape(sources.shape)
            copies = [partial(np.copyto, layer, source) for layer, source in zip(layers, sources, strict=True)]
            yield CopiedLayers(self.gathering, copies)
        elif task.system in S3_SYSTEMS:
            windows_us = [max(1, round(task.case.layer_compute_s(self.settings.scale) * 1e6))] * layout.num_layers
            target, keys = self.target, self.keys[:count]
            with self.client.fetch(keys, layout, target, delivery=delivery, layer_compute_us=windows_us) as fetch:
                yield FetchedLayers(fetch)
                check_fetch(fetch, delivery, layout.delivery_bytes(count))
        else:
            yield None

    def _landed(self, task: Task) -> Tensor:
        """The case's bytes where this system has them before they are copied up."""
        if task.system in S3_SYSTEMS:
            whole = self.target
        else:
            whole = self.landing if task.system is System.LOCAL_DRAM_LW else self.chunks.flatten()
        return whole[: self.layout.delivery_bytes(task.case.chunk_count)]

    def _carry(self, task: Task, source: Source | None, arrivals: list[Future[Mark]]) -> None:
        """Have what comes copied up as soon as it is there, and tell of each layer; every failure is told, too."""
        carry = self._carry_chunks if task.system.delivery is Delivery.CHUNK_MAJOR else self._carry_layers
        try:
            for arrival, mark in zip(arrivals, carry(task, source), strict=True):
                arrival.set_result(mark)
        except BaseException as error:
            for arrival in arrivals:
                if not arrival.done():
                    arrival.set_exception(error)

    def _carry_layers(self, task: Task, source: Source | None) -> Iterator[Mark]:
        layer_bytes, token_count = self.layout.layer_bytes(task.case.chunk_count), task.case.cached_tokens
        landed = self._landed(task)
        for layer_index in range(self.layout.num_layers):
            if source is not None:
                source.wait_layer(layer_index)
            layer = self.subject.cache[layer_index : layer_index + 1]
            if task.system is System.OPT_LOCAL_LW:  # keys and values to where they belong, in two copies
                copies = zip(layer[0, :, :token_count], self.payload[layer_index, :, :token_count], strict=True)
                yield self.uploader.straight(list(copies))
            else:
                slices = landed[layer_index * layer_bytes : (layer_index + 1) * layer_bytes]
                yield self._up(task.system, slices, partial(place_chunks, layer, 0, self.layout.chunk_tokens))

    def _carry_chunks(self, task: Task, source: Source | None) -> Iterator[Mark]:
        """No layer is there before all are: a chunk holds some of each."""
        if source is not None:
            source.wait_layer(self.layout.num_layers - 1)
        landed, chunk_bytes = self._landed(task), self.layout.chunk_bytes
        some = self.uploader.slot_bytes // chunk_bytes
        for first in range(0, task.case.chunk_count, some):
            chunks = landed[first * chunk_bytes : (first + some) * chunk_bytes]
            place = partial(place_chunks, self.subject.cache, first, self.layout.chunk_tokens)
            mark = self._up(task.system, chunks, place)
        yield from [mark] * self.layout.num_layers

    def _up(self, system: System, landed: Tensor, place: Callable[[Tensor], None]) -> Mark:
        if system in S3_SYSTEMS and self.settings.landing is Landing.DEVICE:
            return self.uploader.placed(partial(place, landed))
        return self.uploader.staged(landed, place)


@contextmanager
def filled_bed(subject: Subject, case: Case, settings: DeviceBedSettings) -> Iterator[DeviceBed]:
    """Everything in place and warm for `case` and for those of its chunk size that hit less. Raises LocalServerError,
    ObjectCacheError, NixlFailure, VerificationError, DeviceError, OSError, MemoryError, and RuntimeError (torch's).
    """
    layout, count = case.layout(settings.scale), case.chunk_count
    nbytes = layout.delivery_bytes(count)
    keys = tuple(f"device/{case.context}/{case.chunk_tokens}/{index:06d}" for index in range(count))
    accelerator, reference = subject.model.accelerator, subject.reference[:, :, : case.cached_tokens]
    with ExitStack() as stack:
        chunks, payload, landing = (  # of the kind that the client allocates, so that every transport can fill it
            stack.enter_context(accelerator.pinned(shared_memory.allocate(nbytes))) for _ in range(3)
        )
        chunks = chunks.view(count, layout.chunk_bytes)
        payload = payload.view(reference.dtype).view(reference.shape)
        batch = max(1, STORE_BATCH_BYTES // layout.chunk_bytes)  # pieces that the device has room for
        for first in range(0, count, batch):
            some = chunks[first : first + batch]
            some.copy_(chunks_of(subject.reference, layout.chunk_tokens, first, len(some)))
        for layer, source in zip(payload, reference, strict=True):
            layer.copy_(source)
        fixed = FixedConfig(nbytes + nbytes // 4 + 64 * MIB, settings.gather_s)
        link = stack.enter_context(served_link(settings.folder, fixed))
        client = stack.enter_context(link.server.client(settings.transport))
        title = f"{case.context}, G={case.chunk_tokens}: storing"
        store_bodies(link.server, keys, lambda index: chunks[index].numpy(), layout.chunk_bytes, title)
        target = landing
        if settings.landing is Landing.DEVICE:
            target = torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device)
        register_as(client, target, settings.transport)
        # What is in the chunks does not matter for having them in the server's DRAM tier.
        warm(link.server, client, [Chunks(keys, make_content(count, layout, seed=0))], landing.numpy())
        uploader = Uploader(accelerator, max(layout.layer_bytes(count), layout.chunk_bytes))
        accelerator.synchronize()  # memory that other lanes will use may have been in use in the main one
        carrying, gathering = (stack.enter_context(ThreadPoolExecutor(1, name)) for name in ("carry", "gather"))
        memory = (chunks, payload, landing, target)
        yield DeviceBed(subject, settings, layout, keys, link, client, *memory, uploader, carrying, gathering)
