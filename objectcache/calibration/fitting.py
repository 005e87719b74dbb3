"""Least squares of relative errors, by which short times count as much as long ones. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LOSS_MIN = 1e-12


def fitted(
    rows: Sequence[Sequence[float]], times: Sequence[float], needed: int | None = None, gain_min: float = 0.0
) -> Floats | None:
    """Coefficients, none negative, by which the terms of a row make its time: the best of all choices of terms that are
    not zero, which is exact for a few of them. Every choice has the term `needed`, and one of more terms must lessen
    the sum of the squares by the part `gain_min`. None where no choice fits.
    """
    terms = np.array(rows, dtype=np.float64) / np.array(times)[:, None]
    sizes = np.linalg.norm(terms, axis=0)  # columns are brought to one size, for the solver's accuracy
    usable = np.flatnonzero(sizes).tolist()
    best, least = None, np.inf
    for count in range(1, len(usable) + 1):
        for some in map(list, combinations(usable, count)):
            solved = np.linalg.lstsq(terms[:, some] / sizes[some], np.ones(len(terms)), rcond=None)[0] / sizes[some]
            if (solved <= 0).any() or needed not in (None, *some):
                continue
            loss = float(((terms[:, some] @ solved - 1) ** 2).sum())
            if loss < least * (1 - gain_min) - (LOSS_MIN if gain_min else 0.0):
                best, least = np.zeros(terms.shape[1]), loss
                best[some] = solved
    return best
