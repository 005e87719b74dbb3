"""When chunks are used again, learned from a stream of requests, and the value per second of keeping a chunk.

Chunks are of classes. A class is a path of features, from the coarsest to the finest; a chunk counts for every
beginning of its path. For each class and each bucket of ages there are two counts: of the chunks that came to such an
age, those that were used before they left the bucket, and those that were not. Chunks count when they leave the bucket,
used or not: counting uses at once would make the greatest ages seen so far look like certain uses. Where few chunks of
a class have been seen, its rates are mixed with those of the coarser class.

The value at an age (Gittins' index) is max over T of P(used again within T) / E(time held until then, at most T): uses
per second of space, with the best moment to give up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Path = tuple[int, ...]
Floats = NDArray[np.float64]

FIRST_AGE_S = 1.0
AGE_RATIO = 1.3
BUCKET_COUNT = 48
EDGES_S = (0.0, *(FIRST_AGE_S * AGE_RATIO**step for step in range(BUCKET_COUNT)))
"""Bucket i has the ages from edge i up to edge i + 1: the last edge is about two and a half days."""
WEIGHT_USES = 3.0
"""A class is as its coarser class is until about so many uses are expected of it."""
NEARNESS = 0.7
"""A count in a bucket also counts for the buckets beside it, less by this factor for each step away."""
RATE_MAX = 0.9
PRIOR_RATE = 0.05
PRIOR_WEIGHT = 300.0
"""Before anything is known, a twentieth of the chunks is used again in each bucket. Ages grow by a constant ratio from
bucket to bucket, so the value falls with the age: the least recently used chunk is worth least.
"""

_BUCKETS = np.arange(BUCKET_COUNT)
_NEAR: Floats = NEARNESS ** np.abs(np.subtract.outer(_BUCKETS, _BUCKETS))


def values_at(rates: Floats) -> Floats:
    """The values in uses/s of keeping a chunk at the beginning of each bucket; shape (classes, buckets). `rates` has,
    in the same shape, the part of the chunks of that age that are used before they leave the bucket.
    """
    widths_s = np.diff(np.asarray(EDGES_S))
    values = np.empty_like(rates)
    for bucket in range(BUCKET_COUNT):
        ends = np.cumprod(1 - rates[:, bucket:], axis=1)
        starts = np.concatenate((np.ones((len(rates), 1)), ends[:, :-1]), axis=1)
        held_s = np.cumsum(widths_s[bucket:] * (starts + ends) / 2, axis=1)
        values[:, bucket] = np.max((1 - ends) / held_s, axis=1)
    return values


class ReuseTimes:
    """Counts for classes, and the values that follow from them. Classes are numbered as they come."""

    def __init__(self) -> None:
        self._numbers: dict[Path, int] = {(): 0}
        self._parents = [0]
        self._by_length: list[list[int]] = [[0]]
        self._counts = np.zeros((2, 64, BUCKET_COUNT))
        """Used again, and passed unused: for each class and bucket."""
        self._values: list[list[float]] = []
        self.refresh(1.0)

    def number_of(self, path: Path) -> int:
        """The number of a class."""
        number = self._numbers.get(path)
        if number is None:
            parent = self.number_of(path[:-1])
            number = self._numbers[path] = len(self._parents)
            self._parents.append(parent)
            if len(path) == len(self._by_length):
                self._by_length.append([])
            self._by_length[len(path)].append(number)
            if number == self._counts.shape[1]:
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)), axis=1)
        return number

    def note(self, number: int, bucket: int, used: float, unused: float) -> None:
        """Note how many chunks of a class that came into a bucket were used before they left it, and how many not."""
        self._counts[0, number, bucket] += used
        self._counts[1, number, bucket] += unused

    def value(self, number: int, bucket: int) -> float:
        """The value in uses/s of keeping a chunk of the class at an age of the bucket. Until the next `refresh` a class
        that is new has the value of a coarser one.
        """
        while number >= len(self._values):
            number = self._parents[number]
        return self._values[number][bucket]

    def refresh(self, kept_part: float) -> None:
        """Keep `kept_part` of all counts, so that old ones fade, and bring the values up to date with the counts."""
        self._counts *= kept_part
        sums = self._counts[:, : len(self._parents)].copy()
        parents = np.asarray(self._parents)
        for numbers in reversed(self._by_length[1:]):
            for counts in sums:
                np.add.at(counts, parents[numbers], counts[numbers])
        used, seen = sums[0], sums[0] + sums[1]
        rates = np.empty_like(used)
        rates[0] = _smoothed(used[0], seen[0])
        for numbers in self._by_length[1:]:
            coarser = rates[parents[numbers]]
            expected = seen[numbers] * coarser
            factors = (used[numbers] @ _NEAR + WEIGHT_USES) / (expected @ _NEAR + WEIGHT_USES)
            rates[numbers] = np.minimum(coarser * factors, RATE_MAX)
        self._values = values_at(rates).tolist()


def _smoothed(used: Floats, seen: Floats) -> Floats:
    """The rates of all chunks; where few were seen, that of the bucket before counts too."""
    rates = np.empty(BUCKET_COUNT)
    rate = PRIOR_RATE
    for bucket in range(BUCKET_COUNT):
        rate = (used[bucket] + PRIOR_WEIGHT * rate) / (seen[bucket] + PRIOR_WEIGHT)
        rates[bucket] = rate
    return rates
