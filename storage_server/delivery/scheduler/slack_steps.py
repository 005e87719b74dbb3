"""The deadlines of all requests of a plan in order of time, and the least stall that one request can have. Pure.

Times are seconds from now. Bytes are counted in seconds of the link: 50 bytes are 0.5 at 100 bytes/s.

Example: at 100 bytes/s request 1 has 2 layers of 50 bytes, request 2 has 2 of 100 bytes, c = 1 s. With stalls of 1 and
2 the deadlines are 1 and 2 for request 1, 2 and 3 for request 2; by 3 s the link must have carried 3. `tighten` finds
that request 1 can have a stall of 0.5: its layers then come at 0.5 and 1.5, and request 2 still has its 1 by 2 s and 2
by 3 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
STEPS_MAX = 1 << 15
"""The most deadlines of all requests together. With more layers, several layers share the first one's deadline."""
TOLERANCE_S = 1e-9


@dataclass(frozen=True, slots=True)
class Remaining:
    """The rest of a request. `first_bytes` complete its next layer, which the GPU could compute `first_due_s` from now
    had there been no stall at all. `layer_count` layers are left, that one included. The request has stalled for
    `stall_s` already, and was promised at most `stall_max_s`.
    """

    first_bytes: float
    layer_bytes: float
    layer_count: int
    first_due_s: float
    compute_s: float
    stall_s: float
    stall_max_s: float
    weight: float = 1.0
    priority: int = 0
    computing_s: float = 0.0
    """The compute time of all its layers, also of those that have arrived: TTFT less the stall."""


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Stalls, and their deadlines in order of time: when each is due, how much it adds, and its request's index."""

    stalls: Floats
    due: Floats
    size: Floats
    owner: Indices


class Steps:
    """All deadlines as steps: at time `at` + D of its request, each deadline adds its layer to the
    amount that is due.
    """

    def __init__(self, remaining: Sequence[Remaining], rate: float) -> None:
        layer_counts = np.array([each.layer_count for each in remaining])
        first = np.array([each.first_bytes for each in remaining], dtype=np.float64) / rate
        layer = np.array([each.layer_bytes for each in remaining], dtype=np.float64) / rate
        first_due = np.array([each.first_due_s for each in remaining])
        compute = np.array([each.compute_s for each in remaining])
        stride = -(-int(layer_counts.sum()) // STEPS_MAX)
        counts = -(-layer_counts // stride)
        self._begins: Indices = np.cumsum(counts) - counts
        self._owner: Indices = np.repeat(np.arange(len(remaining)), counts)
        self.count = len(self._owner)
        begun = (np.arange(self.count) - self._begins[self._owner]) * stride
        done = np.minimum(begun + stride, layer_counts[self._owner])
        self._at: Floats = first_due[self._owner] + begun * compute[self._owner]
        self._need: Floats = first[self._owner] + (done - 1) * layer[self._owner]
        self._size: Floats = np.diff(self._need, prepend=0.0)
        self._size[self._begins] = self._need[self._begins]
        self._computing_s = np.array([each.computing_s for each in remaining])
        self._weights = np.array([each.weight for each in remaining])
        self.priorities = [each.priority for each in remaining]
        self._classes = [
            np.where(np.array(self.priorities) == priority, self._weights, 0.0)
            for priority in sorted(set(self.priorities), reverse=True)
        ]
        self.incurred = np.array([each.stall_s for each in remaining])
        self.promised = np.array([max(each.stall_max_s, each.stall_s) for each in remaining])
        self.alone = np.maximum(self.incurred, self._latest(self._need))

    def delayed(self, factor: float) -> Floats:
        """The stalls with which every TTFT is `factor` times the promised TTFT."""
        later: Floats = self.promised + (factor - 1) * (self.promised + self._computing_s)
        delayed: Floats = np.maximum(self.incurred, later)
        return delayed

    def line(self, stalls: Floats) -> Line:
        """The deadlines of these stalls."""
        due = self._at + stalls[self._owner]
        order = np.argsort(due, kind="stable")
        return Line(stalls, due[order], self._size[order], self._owner[order])

    def is_better(self, stalls: Floats, others: Floats) -> bool:
        """Whether `stalls` cost less than `others`: the weighted sum counts, the highest priority's first."""
        for weights in self._classes:
            gain = float((others - stalls) @ weights)
            if abs(gain) > TOLERANCE_S * float(weights.sum()):
                return gain > 0
        return False

    def can_be_kept(self, stalls: Floats) -> bool:
        """Whether, by every deadline, no more is due than the link has carried."""
        line = self.line(stalls)
        return bool((np.cumsum(line.size) - line.due <= TOLERANCE_S * (1 + np.abs(line.due))).all())

    def tighten(self, line: Line, index: int) -> Line:
        """The line in which one request has its least stall that lets the others keep theirs."""
        is_other = line.owner != index
        due, size = line.due[is_other], line.size[is_other]
        begin = self._begins[index]
        end = begin + len(line.owner) - len(due)
        at, need = self._at[begin:end], self._need[begin:end]
        owed = np.cumsum(size)
        # The time that can be spared before each of the others' deadlines, and before all deadlines that follow it.
        spare = np.minimum.accumulate((due - owed)[::-1])[::-1]
        # A layer that needs more than can be spared before a deadline comes after the bytes due by that deadline.
        after = np.searchsorted(spare, need - TOLERANCE_S, "left")
        there = need + np.concatenate([[0.0], owed])[after]
        stall = max(float(self.alone[index]), float((there - at).max()))
        if stall >= line.stalls[index]:
            return line
        stalls = line.stalls.copy()
        stalls[index] = stall
        return Line(stalls, *self._merged(due, size, owner=line.owner[is_other], begin=begin, end=end, stall=stall))

    def shared(self) -> Floats:
        """D of each request in seconds, if the link were shared by weight from now on and freed shares were shared
        again. These stalls can always be kept together.
        """
        ends = np.append(self._begins[1:], self.count) - 1
        left = self._need[ends] / self._weights
        order = np.argsort(left, kind="stable")
        active = np.cumsum(self._weights[order][::-1])[::-1]
        times = np.cumsum(np.diff(left[order], prepend=0.0) * active)
        marks = self._need / self._weights[self._owner]
        there = np.interp(marks, np.concatenate([[0.0], left[order]]), np.concatenate([[0.0], times]))
        shared: Floats = np.maximum(self.incurred, self._latest(there))
        return shared

    def _latest(self, there: Floats) -> Floats:
        """The stall of each request whose layers arrive at the times `there`."""
        latest: Floats = np.maximum.reduceat(there - self._at, self._begins)
        return latest

    def _merged(
        self, due: Floats, size: Floats, owner: Indices, begin: int, end: int, stall: float
    ) -> tuple[Floats, Floats, Indices]:
        """The others' deadlines, with those of one request merged in."""
        own = self._at[begin:end] + stall
        places = np.searchsorted(due, own, "right") + np.arange(end - begin)
        is_other = np.ones(len(due) + len(own), dtype=bool)
        is_other[places] = False
        merged_due, merged_size = np.empty(len(is_other)), np.empty(len(is_other))
        merged_owner = np.full(len(is_other), self._owner[begin])
        merged_due[is_other], merged_due[places] = due, own
        merged_size[is_other], merged_size[places] = size, self._size[begin:end]
        merged_owner[is_other] = owner
        return merged_due, merged_size, merged_owner
