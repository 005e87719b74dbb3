"""Playing a GPU: layer l is computed from when it is there and layer l-1 is done, and for as long as its window.

A sleep that ends late shifts nothing: windows follow each other on paper, and only a layer that is really late delays
the next one. Layers come from the server, or are copied by this process out of its own memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from nixl_client.fetch.layer_fetch import LayerFetch

LAYER_TIMEOUT_S = 300.0


class Source(Protocol):
    """Layers on their way."""

    def wait_layer(self, layer_index: int) -> float:
        """Block until the layer is there; the monotonic time at which it was. In any order, and again."""

    def is_complete(self) -> bool:
        """Whether every layer is there."""


class FetchedLayers:
    """A fetch under way; chunk-major, all its layers are there at once."""

    def __init__(self, fetch: LayerFetch) -> None:
        self._fetch = fetch

    def wait_layer(self, layer_index: int) -> float:
        """Raises what the fetch raises, and TimeoutError."""
        return self._fetch.wait_layer(layer_index, LAYER_TIMEOUT_S).ready_at_s

    def is_complete(self) -> bool:
        """Whether every layer is there."""
        return self._fetch.is_complete


class CopiedLayers:
    """Copies that a thread beside the computation makes one after the other, as a GPU's copy engine does. `copies` has
    one for each layer, or a single one after which all layers are there.
    """

    def __init__(self, copier: Executor, copies: Sequence[Callable[[], None]]) -> None:
        self._copied: list[Future[float]] = [copier.submit(_timed, copy) for copy in copies]

    def wait_layer(self, layer_index: int) -> float:
        """Raises what the copy raised, and TimeoutError."""
        return self._copied[min(layer_index, len(self._copied) - 1)].result(LAYER_TIMEOUT_S)

    def is_complete(self) -> bool:
        """Whether every copy is made."""
        return self._copied[-1].done()


class Waits(Enum):
    """ALL: every window is waited for, and TTFT read from the clock at the end. LOADING: only while layers are still to
    come; the windows after that are added, since nothing can happen in them any more.
    """

    ALL = "all"
    LOADING = "loading"


@dataclass(frozen=True, slots=True)
class Played:
    """Seconds since the request: the first token, and when each layer was there."""

    ttft_s: float
    ready_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Clock:
    """Where time comes from."""

    now_s: Callable[[], float] = time.monotonic
    sleep_s: Callable[[float], None] = time.sleep


def play(
    source: Source, num_layers: int, layer_compute_s: float, started_s: float, waits: Waits, clock: Clock | None = None
) -> Played:
    """Compute each layer in its turn; `started_s` is when the request was made."""
    clock = clock or Clock()
    ended_s = started_s
    ready_s = []
    for layer_index in range(num_layers):
        asked_s = clock.now_s()
        there_s = source.wait_layer(layer_index)
        ready_s.append(there_s - started_s)
        # a layer that had to be waited for is computed when the waiting thread runs again, not when its bytes came
        ended_s = max(ended_s, there_s if there_s <= asked_s else clock.now_s()) + layer_compute_s
        if waits is Waits.ALL or not source.is_complete():
            clock.sleep_s(max(0.0, ended_s - clock.now_s()))
    if waits is Waits.ALL:
        ended_s = max(ended_s, clock.now_s())
    return Played(ended_s - started_s, tuple(ready_s))


def _timed(copy: Callable[[], None]) -> float:
    copy()
    return time.monotonic()
