"""Layers on their way: from the server, or copied by this process out of its own memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

from bench.ttft.play import LAYER_TIMEOUT_S
from nixl_client.fetch import LayerFetch


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


def _timed(copy: Callable[[], None]) -> float:
    copy()
    return time.monotonic()
