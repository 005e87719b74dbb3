"""What an engine's steps take, learned from those it runs anyway. Pure.

A step that computes n tokens, each after h others, takes request_us + token_us * sum(n) + token_pair_us * sum(pairs):
the prefill costs of `descriptors.recompute`, with pairs = n * (2 h + n) / 2 as there.

Steps differ by orders of magnitude, most are decodes of a few tokens, and some are slow for reasons of their own. So
samples are sorted into cells by size, a cell counts once whatever the number of its samples, by their median, and
errors count relative to the time.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from descriptors.recompute import PrefillCosts

CELL_SAMPLES_MAX = 9
CELLS_MAX = 128
CELLS_MIN = 3
"""Fewer sizes than coefficients tell nothing."""
_US = 1e6


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: `tokens` of all its requests, and `pairs` of tokens that attend to each other."""

    tokens: int = 0
    pairs: float = 0.0

    def add(self, new_tokens: int, before_tokens: int) -> Work:
        """One more request: `new_tokens` after `before_tokens`."""
        pairs = new_tokens * (2 * before_tokens + new_tokens) / 2
        return Work(self.tokens + new_tokens, self.pairs + pairs)

    @classmethod
    def of(cls, requests: Iterable[tuple[int, int]]) -> Work:
        """Requests as (new tokens, tokens before them)."""
        work = cls()
        for new_tokens, before_tokens in requests:
            work = work.add(new_tokens, before_tokens)
        return work


NO_WORK = Work()


class ComputeFit:
    """Samples of steps, and the costs that explain them best; the latest CELL_SAMPLES_MAX of each size count."""

    def __init__(self) -> None:
        self._cells: OrderedDict[tuple[int, int], deque[tuple[Work, float]]] = OrderedDict()

    def observe(self, work: Work, seconds: float) -> None:
        """A step took so long. What is no time is passed over."""
        if work.tokens < 1 or not 0 < seconds < math.inf:
            return
        cell = (round(2 * math.log2(work.tokens)), round(math.log2(max(1.0, work.pairs))))
        self._cells.setdefault(cell, deque(maxlen=CELL_SAMPLES_MAX)).append((work, seconds))
        self._cells.move_to_end(cell)
        if len(self._cells) > CELLS_MAX:
            self._cells.popitem(last=False)

    def costs(self) -> PrefillCosts | None:
        """The costs, none of them negative; None while too few sizes have been seen."""
        if len(self._cells) < CELLS_MIN:
            return None
        points = [_middle(samples) for samples in self._cells.values()]
        features = np.array([[1.0, work.tokens, work.pairs] for work, _ in points])
        times_us = np.array([seconds * _US for _, seconds in points])
        found = _least_relative_errors(features, times_us)
        return None if found is None else PrefillCosts(float(found[1]), float(found[2]), float(found[0]))


def step_s(costs: PrefillCosts, work: Work) -> float:
    """How long a step of this work takes."""
    return (costs.request_us + costs.token_us * work.tokens + costs.token_pair_us * work.pairs) / _US


def slower(one: PrefillCosts | None, other: PrefillCosts | None, context_tokens: int = 4096) -> PrefillCosts | None:
    """Of two ranks' costs those of the slower: a step ends with it."""
    known = [costs for costs in (one, other) if costs is not None]
    work = Work().add(context_tokens, 0)
    return max(known, key=lambda costs: step_s(costs, work), default=None)


def _middle(samples: Iterable[tuple[Work, float]]) -> tuple[Work, float]:
    """A sample of the cell whose time per token is in the middle."""
    kept = list(samples)
    wanted = median(seconds / work.tokens for work, seconds in kept)
    return min(kept, key=lambda sample: abs(sample[1] / sample[0].tokens - wanted))


def _least_relative_errors(features: np.ndarray, times: np.ndarray) -> np.ndarray | None:
    """Non-negative coefficients with the least squared relative error: of all subsets of features, solved without
    bounds, the best whose solution is not negative. The scale of each feature is taken out first.
    """
    scale = features.max(axis=0)
    weighted, wanted = features / scale / times[:, None], np.ones(len(times))
    best, best_error = None, math.inf
    for count in range(1, features.shape[1] + 1):
        for kept in combinations(range(features.shape[1]), count):
            columns = list(kept)
            solved, *_ = np.linalg.lstsq(weighted[:, columns], wanted, rcond=None)
            error = float(((weighted[:, columns] @ solved - wanted) ** 2).sum())
            if (solved >= 0).all() and error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(features.shape[1]), error
                best[columns] = solved
    return None if best is None else best / scale
