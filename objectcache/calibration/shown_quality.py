"""The quality of codecs as far as samples show it. Pure.

A policy that chooses among codecs by qualities of a few samples takes noise for differences: it keeps larger forms that
are no better, and so has room for fewer. So a larger codec counts as better than a smaller one only where the samples
show that it is; where they show none, all have one quality, and the policy falls back to the smallest codec by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
RESAMPLES = 2000
Scores = npt.NDArray[np.float64]


def shown_qualities(scores: Mapping[str, Scores], sizes: Mapping[str, float], seed: int = 1) -> dict[str, float]:
    """The quality of each codec, as a mean of its `scores`, one for each sample, the same samples for all. `sizes` say
    how large each makes a chunk. One that is larger and not shown to be better (its lead, samples drawn anew, is not
    above 0 in 95 % of the cases) has the quality of the best smaller one that it does not beat. Raises ValueError where
    the codecs have other numbers of samples, or none.
    """
    counts = {len(each) for each in scores.values()}
    if len(counts) > 1 or 0 in counts:
        raise ValueError("every codec needs the same samples, and there must be some")
    found: dict[str, float] = {}
    for name in sorted(scores, key=lambda each: (sizes[each], each)):
        mean = float(np.mean(scores[name]))
        unbeaten = [
            quality
            for smaller, quality in found.items()
            if sizes[smaller] < sizes[name]
            and mean >= float(np.mean(scores[smaller]))
            and least_lead(scores[name], scores[smaller], seed) <= 0
        ]
        found[name] = max(unbeaten, default=mean)
    return {name: found[name] for name in scores}


def least_lead(mine: Scores, theirs: Scores, seed: int = 1) -> float:
    """The lower bound of the mean difference of the same samples (bootstrap)."""
    differences = np.asarray(mine, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(differences), (RESAMPLES, len(differences)))
    return float(np.quantile(differences[drawn].mean(axis=1), 1 - CONFIDENCE))
