"""A prefill's cost in the coefficients of `descriptors.recompute.PrefillCosts`, fitted to what was measured. Pure.

The products with weights grow with the tokens that missed, attention with the pairs, and the rest is paid once. Fitted
by least squares of the relative errors, so that short prefills count as much as long ones; no coefficient is negative.

The table `[[compute_profiles]]` of a configuration says what a model's prefill costs on the machine it is for. From it
a storage server derives a request's compute window when the descriptor brings none. It knows only the cached tokens h;
it takes the context to be h / hit_rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from descriptors.recompute import PrefillCosts
from objectcache.calibration.compute.shapes import ModelShape, causal_pairs
from objectcache.calibration.fitting import fitted
from objectcache.calibration.text import six_digits

COEFFICIENTS = 3
Profile = dict[str, str | int | float]


class Observation(NamedTuple):
    """One measured prefill, all layers."""

    cached_tokens: int
    context_tokens: int
    prefill_us: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs over all layers, and what they were fitted to."""

    costs: PrefillCosts
    observations: tuple[Observation, ...]

    def errors(self) -> list[float]:
        """Fitted over observed, less one, for each observation."""
        return [prefill_s(self.costs, *place) * 1e6 / observed_us - 1 for *place, observed_us in self.observations]

    @property
    def median_error(self) -> float:
        """The median size of the errors."""
        return statistics.median(map(abs, self.errors()))

    @property
    def greatest_error(self) -> float:
        """The size of the greatest error."""
        return max(map(abs, self.errors()))

    def covers(self, cached_tokens: int, context_tokens: int) -> bool:
        """Whether the prefill lies between observed contexts and between observed counts of tokens that missed."""
        contexts = [each.context_tokens for each in self.observations]
        missed = [each.context_tokens - each.cached_tokens for each in self.observations]
        is_known_context = min(contexts) <= context_tokens <= max(contexts)
        return is_known_context and min(missed) <= context_tokens - cached_tokens <= max(missed)


def fit_cost_model(observations: Sequence[Observation]) -> Fit:
    """By least squares of relative errors. Raises ValueError where fewer than three different prefills are given."""
    count = len({(cached, context) for cached, context, _ in observations})
    if count < COEFFICIENTS:
        raise ValueError(f"{count} different prefills do not give {COEFFICIENTS} coefficients")
    terms = [(1.0, context - cached, causal_pairs(cached, context)) for cached, context, _ in observations]
    found = fitted(terms, [each.prefill_us for each in observations])
    assert found is not None
    request_us, token_us, token_pair_us = found.tolist()
    return Fit(PrefillCosts(token_us, token_pair_us, request_us), tuple(observations))


def prefill_s(costs: PrefillCosts, cached_tokens: int, context_tokens: int) -> float:
    """Seconds, all layers, of the tokens that missed. Raises ValueError when none did."""
    if not 0 <= cached_tokens < context_tokens:
        raise ValueError(f"{cached_tokens} cached tokens of {context_tokens} leave nothing to compute")
    return float(costs.prefill_s(context_tokens, np.array([float(cached_tokens)]))[0])


def scaled(costs: PrefillCosts, of: ModelShape, to: ModelShape) -> PrefillCosts:
    """The costs of another model on the same device: by operations for tokens and pairs, by layers for the rest."""
    return PrefillCosts(
        request_us=costs.request_us * to.num_layers / of.num_layers,
        token_us=costs.token_us * to.token_operations / of.token_operations,
        token_pair_us=costs.token_pair_us * to.pair_operations / of.pair_operations,
    )


def compute_profile(model: ModelShape, fit: Fit, hit_rate: float) -> Profile:
    """One table, microseconds over all layers. Raises ValueError for a hit rate that is none."""
    if not 0 < hit_rate < 1:
        raise ValueError(f"a hit rate lies between 0 and 1, not at {hit_rate}")
    return {
        "name": model.name,
        "num_layers": model.num_layers,
        "token_layer_bytes": model.token_layer_bytes,
        **{name: six_digits(getattr(fit.costs, name)) for name in ("request_us", "token_us", "token_pair_us")},
        "hit_rate": hit_rate,
    }
