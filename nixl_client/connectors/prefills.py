"""The costs of a model's prefills, learned from those that run. They say which part of a stored prefix is worth
loading, and how long a layer takes, for callers that run their model themselves.

    prefills = Prefills(shape.layout, model.device)
    stored, count = prefills.worth_loading(client, keys, len(tokens))
    fetch = client.fetch(keys[:count], ..., layer_compute_us=prefills.layer_compute_us(cached, new))
    with prefills.timed(cached, new, lambda: waited_s):
        model(...)

Until prefills of a few sizes have been seen all that is stored is worth loading, and nothing is said of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from descriptors.descriptor import LAYER_COMPUTE_US_MAX
from descriptors.layout import ChunkLayout
from descriptors.recompute import AdviceRequest, PrefillCosts
from nixl_client.client import Client
from nixl_client.connectors.compute_fit import ComputeFit, Work, step_s
from nixl_client.connectors.step_timer import StepTimer


def never_waited() -> float:
    """The forward pass waited for no layer."""
    return 0.0


class Prefills:
    """The prefills of one model on one device, whose chunks are of `layout`. Used by the thread that runs the model."""

    def __init__(self, layout: ChunkLayout, device: torch.device) -> None:
        self._layout = layout
        self._timer = StepTimer(device)
        self._fit = ComputeFit()
        self._costs: PrefillCosts | None = None

    @contextmanager
    def timed(
        self, cached_tokens: int, new_tokens: int, waited_s: Callable[[], float] = never_waited
    ) -> Iterator[None]:
        """The block is a forward pass of `new_tokens` after `cached_tokens`, and layers were waited for `waited_s()` of
        it. One that fails tells nothing.
        """
        self._timer.begin()
        yield
        self._timer.end(Work().add(new_tokens, cached_tokens), waited_s())

    @property
    def costs(self) -> PrefillCosts | None:
        """The costs of prefills; None while too few sizes have been seen."""
        seen = self._timer.take()
        for work, seconds in seen:
            self._fit.observe(work, seconds)
        if seen:
            self._costs = self._fit.costs()
        return self._costs

    def layer_compute_us(self, cached_tokens: int, new_tokens: int) -> tuple[int, ...]:
        """c of such a prefill, for `client.fetch`; empty while it is not known."""
        costs = self.costs
        if costs is None:
            return ()
        layer_s = step_s(costs, Work().add(new_tokens, cached_tokens)) / self._layout.num_layers
        return (min(round(layer_s * 1e6), LAYER_COMPUTE_US_MAX),)

    def worth_loading(
        self, client: Client, chunk_keys: Sequence[str], context_tokens: int, lease_s: float = 0.0
    ) -> tuple[int, int]:
        """How many chunks, from the first, are stored, and how many of those are sooner loaded than computed for a
        prompt of `context_tokens`, at the rate the server offers. Raises what `client.lookup` raises.
        """
        costs = self.costs
        if costs is None:
            stored = client.lookup(chunk_keys, lease_s)
            return stored, stored
        stored, advice = client.advise(chunk_keys, AdviceRequest(context_tokens, self._layout, costs), lease_s)
        return stored, advice.chunk_count
