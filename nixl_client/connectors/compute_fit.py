"""The times that an engine's steps and loads take, learned from those that it runs anyway. Pure.

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

from descriptors.recompute import DeliveryCosts, PrefillCosts

CELL_SAMPLES_MAX = 9
CELLS_MAX = 128
CELLS_MIN = 3
"""Fewer sizes than coefficients tell nothing."""
LOAD_KEEP_S = 60.0
_US = 1e6


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step: `tokens` of all its requests, and `pairs` of tokens that attend to each other."""

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


class _Samples:
    """Measured times, in cells of about the same size; the latest CELL_SAMPLES_MAX of each cell count. A sample has
    features, the tokens or the bytes that it measured. The middle sample of a cell is the median by the time for one
    unit of its first feature.
    """

    def __init__(self) -> None:
        self._cells: OrderedDict[tuple[int, ...], deque[tuple[tuple[float, ...], float]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cells)

    def add(self, cell: tuple[int, ...], features: tuple[float, ...], seconds: float) -> None:
        self._cells.setdefault(cell, deque(maxlen=CELL_SAMPLES_MAX)).append((features, seconds))
        self._cells.move_to_end(cell)
        if len(self._cells) > CELLS_MAX:
            self._cells.popitem(last=False)

    def solve(self) -> np.ndarray | None:
        """The constant and one coefficient for each feature, in seconds."""
        points = [_middle(samples) for samples in self._cells.values()]
        features = np.array([(1.0, *found) for found, _ in points])
        return _least_relative_errors(features, np.array([seconds for _, seconds in points]))


class ComputeFit:
    """Samples of steps, and the costs that explain them best."""

    def __init__(self) -> None:
        self._samples = _Samples()

    def observe(self, work: Work, seconds: float) -> None:
        """A step of this work took so long. A time that is not positive and finite is ignored."""
        if work.tokens < 1 or not 0 < seconds < math.inf:
            return
        cell = (round(2 * math.log2(work.tokens)), round(math.log2(max(1.0, work.pairs))))
        self._samples.add(cell, (work.tokens, work.pairs), seconds)

    def costs(self) -> PrefillCosts | None:
        """The costs, none of them negative; None while too few sizes have been seen."""
        found = self._samples.solve() if len(self._samples) >= CELLS_MIN else None
        return None if found is None else PrefillCosts(*(float(found[index] * _US) for index in (1, 2, 0)))


class LoadFit:
    """Samples of loads that nobody paced, or that were late: what a request costs in seconds, and the rate at which its
    bytes come. Samples are forgotten when the last is older than LOAD_KEEP_S, so that a path that was slow is tried
    again.
    """

    def __init__(self) -> None:
        self._samples = _Samples()
        self._seen_s = 0.0

    def observe(self, nbytes: int, seconds: float, now_s: float) -> None:
        """A load of so many bytes took so long. A time that is not positive and finite is ignored."""
        if nbytes > 0 and 0 < seconds < math.inf:
            self._forget_old(now_s)
            self._seen_s = now_s
            self._samples.add((round(2 * math.log2(nbytes)),), (float(nbytes),), seconds)

    def costs(self, now_s: float) -> DeliveryCosts | None:
        """None while nothing has been seen; no costs at all where that is long ago."""
        self._forget_old(now_s)
        if not self._seen_s:
            return None
        found = self._samples.solve() if len(self._samples) else None
        if found is None:
            return DeliveryCosts()
        return DeliveryCosts(request_s=float(found[0]), bytes_per_s=float(1 / found[1]) if found[1] > 0 else 0.0)

    def _forget_old(self, now_s: float) -> None:
        if now_s - self._seen_s > LOAD_KEEP_S:
            self._samples = _Samples()


def step_s(costs: PrefillCosts, work: Work) -> float:
    """How long a step of this work takes."""
    return (costs.request_us + costs.token_us * work.tokens + costs.token_pair_us * work.pairs) / _US


def slower(one: PrefillCosts | None, other: PrefillCosts | None) -> PrefillCosts | None:
    """The costs of the slower of two ranks: a step ends with it."""
    known = [costs for costs in (one, other) if costs is not None]
    return max(known, key=lambda costs: step_s(costs, Work().add(4096, 0)), default=None)


def longer(one: DeliveryCosts | None, other: DeliveryCosts | None) -> DeliveryCosts | None:
    """Those load costs of two ranks that make a load of 64 MiB take longer."""

    def of_64_mib(costs: DeliveryCosts) -> float:
        return costs.request_s + (2**26 / costs.bytes_per_s if costs.bytes_per_s else 0.0)

    return max((costs for costs in (one, other) if costs is not None), key=of_64_mib, default=None)


def _middle(samples: Iterable[tuple[tuple[float, ...], float]]) -> tuple[tuple[float, ...], float]:
    """A sample of the cell whose time for one of the first feature is in the middle."""
    kept = list(samples)
    wanted = median(seconds / features[0] for features, seconds in kept)
    return min(kept, key=lambda sample: abs(sample[1] / sample[0][0] - wanted))


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
