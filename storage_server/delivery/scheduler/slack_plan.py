"""The plan of slack-aware dispatch: a stall for each request's GPU, such that the link can keep all of them. Pure.

    s layer bytes   c compute time of a layer   D stall, the added TTFT   B link rate   t = 0 now

A request whose GPU may stall for D in all needs layer l by D + l*c after its start. Conversely, it stalls for D = max
over l of (arrival of l) - l*c. A set of stalls is a set of deadlines on one link. It can be kept when, by every
deadline, no more bytes are due than the link has carried; then earliest deadline first keeps it. So, with the others'
deadlines given, the least stall of one request has a closed form (`Steps.tighten`). A plan gives requests, one after
the other, the least stall that lets the others keep theirs.

The search begins with stalls that can be kept: those on an equal share of the link. The order in which requests choose
matters, so a few orders are tried, each is improved by exchanging neighbours, and the plan of least weighted stall is
taken, high priorities before low. `TRIALS_MAX` and `WORK_MAX` bound the work; nothing bounds the number of requests.

    B = 100; request 1: 2 layers of s = 50, c = 1; request 2: 2 layers of s = 100, c = 1

    equal share    D = 1.0 and 2.0, together 3.0 s
    plan           D = 0.5 and 2.0: layer 0 of request 1 goes first, since request 2 can wait for it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from storage_server.delivery.scheduler.slack_steps import TOLERANCE_S, Floats, Line, Remaining, Steps

TRIALS_MAX = 160
"""The most computations of one request's least stall."""
WORK_MAX = 1 << 19
"""The most deadlines that all these computations look at together."""
FACTOR_MAX = 4.0
FACTOR_STEPS = 7
"""How often the range from 1 to `FACTOR_MAX` is halved."""


def plan_stalls(remaining: Sequence[Remaining], rate_bytes_per_s: float, starts: Sequence[Floats] = ()) -> Floats:
    """D of each request in seconds, in order. `starts` are further sets of stalls to begin from, such as those of
    another policy. Where such a set can be kept and keeps the promises, the plan is no worse than the set.
    """
    if not remaining:
        return np.zeros(0)
    steps = Steps(remaining, rate_bytes_per_s)
    lines = _lines(steps, starts)
    search = _Search(steps, lines)
    for line in lines:
        tried = set()
        for order in _orders(remaining):
            if tuple(order) not in tried:
                tried.add(tuple(order))
                search.try_order(line, order)
    return search.best


def amend_stalls(
    remaining: Sequence[Remaining], rate_bytes_per_s: float, earlier: Floats, come: Sequence[int]
) -> Floats:
    """The `earlier` stalls, where they can still be kept, and for each new request in `come` the least stall that lets
    the others keep theirs. There is no search: the result serves until the next plan.
    """
    steps = Steps(remaining, rate_bytes_per_s)
    line = _lines(steps, [earlier])[-1]
    for index in come:
        line = steps.tighten(line, index)
    return line.stalls


def _lines(steps: Steps, starts: Sequence[Floats]) -> list[Line]:
    """The promises, and those sets of `starts` that can be kept and keep the promises."""
    promised = kept_promises(steps)
    lines = [steps.line(promised)]
    for start in starts:
        if (start <= promised + TOLERANCE_S).all() and steps.can_be_kept(start):
            lines.append(steps.line(np.maximum(start, steps.incurred)))
    return lines


def kept_promises(steps: Steps) -> Floats:
    """The promised stalls, where they can be kept. Otherwise every TTFT grows by one factor, the least that can be
    kept, up to `FACTOR_MAX`. If none can be kept, the stalls on an equal share of the link from now on.
    """
    promised = steps.promised
    if steps.can_be_kept(promised):
        return promised
    kept: Floats = np.maximum(promised, steps.shared())
    low, high = 1.0, FACTOR_MAX
    if steps.can_be_kept(later := steps.delayed(high)):
        kept = later
        for _ in range(FACTOR_STEPS):
            middle = (low + high) / 2
            if steps.can_be_kept(later := steps.delayed(middle)):
                kept, high = later, middle
            else:
                low = middle
    return kept


def _orders(remaining: Sequence[Remaining]) -> Iterable[list[int]]:
    """The orders in which requests choose: by bytes left, by layer bytes, by compute time per byte, by compute time,
    and by compute time per byte from the greatest; always high priority before low.
    """
    sizes = np.array([max(each.layer_bytes, 1.0) for each in remaining])
    left = sizes * np.array([each.layer_count for each in remaining])
    computes = np.array([each.compute_s for each in remaining])
    weights = np.array([each.weight for each in remaining])
    priorities = np.array([-each.priority for each in remaining])
    for key in (left / weights, sizes / weights, computes / sizes, computes, -computes / sizes):
        yield np.lexsort((key, priorities)).tolist()


class _Search:
    """The best plan so far, and the number of trials left."""

    def __init__(self, steps: Steps, lines: Sequence[Line]) -> None:
        self._steps = steps
        self._left = min(TRIALS_MAX, max(1, WORK_MAX // steps.count))
        self._has_tried = False
        self.best = lines[0].stalls
        for line in lines:
            self._consider(line.stalls)

    def try_order(self, start: Line, order: list[int]) -> None:
        """Let requests choose in this order, then improve it by exchanging neighbours of one priority."""
        order = [index for index in order if start.stalls[index] > self._steps.alone[index] + TOLERANCE_S]
        if self._has_tried and self._left < len(order):
            return
        self._has_tried = True
        priorities = self._steps.priorities
        lines = self._tightened([start], order)
        self._consider(lines[-1].stalls)
        reserve = self._left // 2
        improving = True
        while improving:
            improving = False
            for at in range(len(order) - 1):
                first, second = order[at], order[at + 1]
                if priorities[first] != priorities[second]:
                    continue
                if self._left - (len(order) - at) < reserve:
                    return
                other = [*order[:at], second, first, *order[at + 2 :]]
                found = self._tightened(lines[: at + 1], other)
                if self._steps.is_better(found[-1].stalls, lines[-1].stalls):
                    order, lines, improving = other, found, True
                    self._consider(lines[-1].stalls)

    def _tightened(self, lines: list[Line], order: Sequence[int]) -> list[Line]:
        """The lines before each choice and after the last. The first of them are given in `lines`."""
        lines = lines.copy()
        for index in order[len(lines) - 1 :]:
            if self._left > 0:
                self._left -= 1
                lines.append(self._steps.tighten(lines[-1], index))
        return lines

    def _consider(self, stalls: Floats) -> None:
        if self._steps.is_better(stalls, self.best):
            self.best = stalls
