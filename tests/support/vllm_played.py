"""A store for the vLLM connector's parts, in memory, that fails as it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from descriptors.descriptor import Accept
from descriptors.kv_forms import KvLayout
from descriptors.layer_forms import LayerForms
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from descriptors.recompute import Advice, AdviceRequest, advise
from descriptors.storage_api import Grant
from nixl_client.connectors.vllm.grid import Grid
from nixl_client.connectors.vllm.naming import Deployment
from nixl_client.connectors.vllm.options import VllmOptions
from nixl_client.connectors.vllm.steps import StoreJob

ONE_RANK = Deployment("m", "bf16", 32)
OPTIONS = VllmOptions("http://127.0.0.1:1", "b")


def store_job(job_id: int, request_id: str, blocks: tuple[int, ...]) -> StoreJob:
    span = Grid(32, 32).store_range(0, len(blocks), blocks)
    return StoreJob(job_id, request_id, span, (tuple(f"k{index}" for index in range(len(blocks))),))


class PlayedFetch:
    """A fetch whose layers are there after `layers_s`, but for what is to go wrong."""

    def __init__(
        self,
        payload: Any,
        chunk_count: int,
        failure: Exception | None,
        failing_layer: int,
        settles: bool,
        layers_s: Sequence[float],
    ) -> None:
        self.began_s = time.monotonic()
        self.mode = Mode.LAYER_MAJOR
        self.descriptor = SimpleNamespace(num_layers=len(payload))
        self._due_s = [self.began_s + layer_s for layer_s in layers_s] or [self.began_s] * len(payload)
        self._payload = payload
        self._chunk_count = chunk_count
        self._failure = failure
        self._failing_layer = failing_layer
        self.is_settled = settles
        self.request_id = "played"
        self.forms: LayerForms | None = None
        self.grant = Grant()

    def cancel(self) -> None:
        self.is_settled = True

    def wait_layer(self, layer_index: int, timeout_s: float) -> Any:
        if self._failure is not None and layer_index >= self._failing_layer:
            raise self._failure
        due_s = self._due_s[layer_index]
        time.sleep(max(0.0, min(timeout_s, due_s - time.monotonic())))  # a layer takes its time to come
        if due_s > time.monotonic():
            raise TimeoutError(f"layer {layer_index} is not there")
        ready_at_s = time.monotonic()
        return SimpleNamespace(chunk_count=self._chunk_count, data=self._payload[layer_index], ready_at_s=ready_at_s)

    def ready_at_s(self) -> list[float]:
        return [due_s for due_s in self._due_s if due_s <= time.monotonic()]

    def wait(self, timeout_s: float) -> None:
        if self._failure is not None:
            raise self._failure

    def wait_settled(self, timeout_s: float) -> None:
        pass


class PlayedStore:
    """What a client does here, in memory: chunks by key; the first fetch fails as told."""

    def __init__(self, layout: ChunkLayout) -> None:
        self.layout = layout
        self.chunks: dict[str, bytes] = {}
        self.failure: Exception | None = None
        self.failing_layer = 0
        self.fetched: list[int] = []
        self.accepted: list[Accept | None] = []
        self.looked_up: list[Accept | None] = []
        self.all_forms: list[LayerForms | None] = []
        """The forms of the coming fetches; those after them have `forms`."""
        self.forms: LayerForms | None = None
        self.stated_us: list[tuple[int, ...]] = []
        self.asked_with: list[AdviceRequest] = []
        self.rate_bytes_per_s = 0.0
        self.put_failure: Exception | None = None
        self.lookup_failure: Exception | None = None
        self.settles = True
        self.layers_s: list[tuple[float, ...]] = []
        """When the layers of the coming fetches are there, in seconds after their start; those after them at once."""
        self.released = threading.Event()
        self.is_out_of_memory = False

    def allocate_buffer(self, nbytes: int) -> Any:
        if self.is_out_of_memory:
            raise OSError("no memory")
        return np.zeros(nbytes, np.uint8)

    def release_buffer(self, array: Any) -> None:
        self.released.set()

    def lookup(self, keys: Sequence[str], lease_s: float = 0.0, *, accept: Accept | None = None) -> int:
        if self.lookup_failure is not None:
            raise self.lookup_failure
        self.looked_up.append(accept)
        return self._count(keys)

    def _count(self, keys: Sequence[str]) -> int:
        return next((index for index, key in enumerate(keys) if key not in self.chunks), len(keys))

    def advise(
        self, keys: Sequence[str], compute: AdviceRequest, lease_s: float = 0.0, *, accept: Accept | None = None
    ) -> tuple[int, Advice]:
        self.asked_with.append(compute)
        matched = self.lookup(keys, lease_s, accept=accept)
        return matched, advise(matched, compute, self.rate_bytes_per_s)

    def put_chunks(
        self,
        keys: Sequence[str],
        chunks: Sequence[Any],
        *,
        content_class: str = "",
        kv_layout: KvLayout | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if self.put_failure is not None:
            raise self.put_failure
        self.chunks.update((key, bytes(chunk)) for key, chunk in zip(keys, chunks, strict=True))

    def fetch(self, keys: Sequence[str], layout: ChunkLayout, buffer: Any, **options: Any) -> PlayedFetch:
        self.fetched.append(len(keys))
        self.accepted.append(options["accept"])
        self.stated_us.append(tuple(options["layer_compute_us"]))
        count = self._count(keys)
        rows = [np.frombuffer(self.chunks[key], np.uint8) for key in keys[:count]]
        payload = np.stack(rows).reshape(count, layout.num_layers, -1).transpose(1, 0, 2).copy()
        failure, self.failure = self.failure, None
        layers_s = self.layers_s.pop(0) if self.layers_s else ()
        fetch = PlayedFetch(payload, count, failure, self.failing_layer, failure is None or self.settles, layers_s)
        fetch.forms = self.all_forms.pop(0) if self.all_forms else self.forms
        return fetch
