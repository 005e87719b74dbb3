"""A prefill's cost in the coefficients of `descriptors.recompute.PrefillCosts`, fitted to what was measured. Pure.

The products with weights grow with the tokens that missed, attention with the pairs, and the rest is paid once. Fitted
by least squares of the relative errors, so that short prefills count as much as long ones; no coefficient is negative.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from bench.compute.shapes import ModelShape, causal_pairs
from descriptors.recompute import PrefillCosts

COEFFICIENTS = 3


@dataclass(frozen=True, slots=True)
class Observation:
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
        return [
            prefill_s(self.costs, each.cached_tokens, each.context_tokens) * 1e6 / each.prefill_us - 1
            for each in self.observations
        ]

    @property
    def median_error(self) -> float:
        """Of the errors' sizes."""
        return statistics.median(map(abs, self.errors()))

    @property
    def greatest_error(self) -> float:
        """Of the errors' sizes."""
        return max(map(abs, self.errors()))

    def covers(self, cached_tokens: int, context_tokens: int) -> bool:
        """Whether the prefill lies between observed contexts and between observed counts of tokens that missed."""
        contexts = [each.context_tokens for each in self.observations]
        missed = [each.context_tokens - each.cached_tokens for each in self.observations]
        is_known_context = min(contexts) <= context_tokens <= max(contexts)
        return is_known_context and min(missed) <= context_tokens - cached_tokens <= max(missed)


def fit_cost_model(observations: Sequence[Observation]) -> Fit:
    """The least squares over all choices of coefficients that are not zero, which is exact for three of them.

    Raises ValueError where fewer than three different prefills were observed.
    """
    different = {(each.cached_tokens, each.context_tokens) for each in observations}
    if len(different) < COEFFICIENTS:
        raise ValueError(f"{len(different)} different prefills do not give {COEFFICIENTS} coefficients")
    times_us = np.array([each.prefill_us for each in observations])
    terms = np.array([_terms(each) for each in observations]) / times_us[:, None]
    best: NDArray[np.float64] | None = None
    least = np.inf
    for count in range(1, COEFFICIENTS + 1):
        for chosen in combinations(range(COEFFICIENTS), count):
            found = _least_squares(terms, chosen)
            error = float(((terms @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = found, error
    assert best is not None
    request_us, token_us, token_pair_us = map(float, best)
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


def _terms(observed: Observation) -> tuple[float, float, float]:
    missed = observed.context_tokens - observed.cached_tokens
    return 1.0, float(missed), causal_pairs(observed.cached_tokens, observed.context_tokens)


def _least_squares(terms: NDArray[np.float64], chosen: Sequence[int]) -> NDArray[np.float64]:
    """Coefficients of the chosen terms, the others zero. Columns are brought to one size, for the solver's accuracy."""
    columns = terms[:, list(chosen)]
    sizes = np.linalg.norm(columns, axis=0)
    solved, *_ = np.linalg.lstsq(columns / sizes, np.ones(len(terms)))
    found = np.zeros(COEFFICIENTS)
    found[list(chosen)] = solved / sizes
    return found
