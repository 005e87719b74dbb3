"""The stall that every request would have under the policy Equal: a simulated link that is shared by weight. It moves
no bytes; its stalls are the bounds that slack-aware dispatch promises. Pure: `now` is an argument.

A request of weight w gets w/(sum of weights) of the link while it has bytes left there; when a request ends, its share
goes to the others. Service per unit of weight is one rising function of time, `_served`, the same for all (the virtual
time of fair queueing). Layer l of a request arrives when `_served` has risen by (l+1)*s/w since the request came.

Example: two requests of 2 layers of 50 bytes, c = 0.5 s, on a link of 100 bytes/s. Each gets 50 bytes/s, so its layers
arrive at 1 s and 2 s. They are needed at 0 s and 0.5 s: the stall is max(1 - 0, 2 - 0.5) = 1.5 s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(slots=True)
class _Sharer:
    weight: float
    marks: Floats
    """For each layer that has not arrived: the value of `_served` at which it arrives."""
    deadlines: Floats
    """For each of these layers: the time at which it would be needed had there been no stall."""
    stall_s: float = 0.0


class EqualShare:
    """One simulated link. A request leaves it when all its bytes have arrived there, or by `abandon`."""

    def __init__(self, rate_bytes_per_s: float) -> None:
        self._rate = rate_bytes_per_s
        self._now = 0.0
        self._served = 0.0
        self._sharers: dict[int, _Sharer] = {}
        self._done: dict[int, float] = {}
        self._asked: set[int] = set()

    def __len__(self) -> int:
        """How many requests it knows of."""
        return len(self._asked | self._sharers.keys())

    def join(
        self, number: int, layer_bytes: int, layer_count: int, compute_s: float, weight: float, now: float
    ) -> None:
        """Add a request whose layers are computed in `compute_s` each."""
        self.advance(now)
        layers = np.arange(layer_count, dtype=np.float64)
        marks: Floats = self._served + (layers + 1) * (layer_bytes / weight)
        deadlines: Floats = self._now + layers * compute_s
        self._sharers[number] = _Sharer(weight, marks, deadlines)
        self._asked.add(number)

    def drop_result(self, number: int) -> None:
        """Drop the result of a request that is over. In the simulation it goes on, because others share with it."""
        self._asked.discard(number)
        self._done.pop(number, None)

    def abandon(self, number: int, now: float) -> None:
        """Remove a request that was given up, from the simulation too."""
        self.advance(now)
        self._sharers.pop(number, None)
        self.drop_result(number)

    def reweigh(self, number: int, weight: float, now: float) -> None:
        """Set the request's weight from now on."""
        self.advance(now)
        sharer = self._sharers.get(number)
        if sharer is None or sharer.weight == weight:
            return
        sharer.marks = self._served + (sharer.marks - self._served) * (sharer.weight / weight)
        sharer.weight = weight

    def set_rate(self, rate_bytes_per_s: float, now: float) -> None:
        """Set the link's rate from now on."""
        self.advance(now)
        self._rate = rate_bytes_per_s

    def advance(self, now: float) -> None:
        """Move the simulation to `now`. A clock that stands still or goes back changes nothing."""
        if now <= self._now:
            return
        if not self._sharers:
            self._now = now
            self._served = 0.0
            return
        times, served = self._future()
        there, late, begins = self._layers(times, served)
        is_there = there <= now
        counts = np.add.reduceat(is_there, begins, dtype=np.int64).tolist()
        worst = np.maximum.reduceat(np.where(is_there, late, 0.0), begins).tolist()
        for (number, sharer), count, late_s in zip(list(self._sharers.items()), counts, worst, strict=True):
            if not count:
                continue
            sharer.stall_s = max(sharer.stall_s, late_s)
            sharer.marks, sharer.deadlines = sharer.marks[count:], sharer.deadlines[count:]
            if not len(sharer.marks):
                del self._sharers[number]
                if number in self._asked:
                    self._done[number] = sharer.stall_s
        self._served = float(np.interp(now, times, served))
        self._now = now

    def stalls(self) -> dict[int, float]:
        """The stall D of every request in seconds, if no further request came."""
        found = dict(self._done)
        if self._sharers:
            _, late, begins = self._layers(*self._future())
            worst = np.maximum.reduceat(late, begins).tolist()
            for (number, sharer), late_s in zip(self._sharers.items(), worst, strict=True):
                found[number] = max(sharer.stall_s, late_s)
        return found

    def _layers(self, times: Floats, served: Floats) -> tuple[Floats, Floats, Indices]:
        """For every layer to come: its arrival and its lateness; and the index of each request's first layer."""
        marks = [sharer.marks for sharer in self._sharers.values()]
        there = np.interp(np.concatenate(marks), served, times)
        late = there - np.concatenate([sharer.deadlines for sharer in self._sharers.values()])
        begins = np.cumsum([0, *map(len, marks[:-1])])
        return there, late, begins

    def _future(self) -> tuple[Floats, Floats]:
        """The corners of `_served` over time from now on. It rises faster after every request that ends."""
        ends = np.array([sharer.marks[-1] for sharer in self._sharers.values()])
        weights = np.array([sharer.weight for sharer in self._sharers.values()])
        order = np.argsort(ends, kind="stable")
        ends, weights = ends[order], weights[order]
        active = np.cumsum(weights[::-1])[::-1]
        gaps = np.diff(ends, prepend=self._served)
        times = self._now + np.cumsum(np.maximum(gaps, 0.0) * active / self._rate)
        return np.concatenate([[self._now], times]), np.concatenate([[self._served], ends])
