"""The delay that a request causes to other requests. The engine whose first token comes soonest may have to work much
more for it than another one, and then everybody else waits for that work.

    others_s = prefill * requests that wait there
               + growth * requests that are there
               + work * arrivals/s at an engine * (least queue + work / 2n) / (1 - busy share)

`work` is the prefill with its loads, in seconds of an engine of median speed. Requests that wait at the engine are
computed in one step with the new one. `growth` is the time that one more stream takes from each other one, since a step
of many streams takes longer: without it an engine that holds what all prompts begin with would get all of them, because
a prefill there takes next to nothing. That running streams stand still during a prefill is left out: it would keep
prompts off the engine where their first token comes soonest.

Requests that are still to come go where they wait least, so they are delayed only until the first engine is idle again:
hence the least queue, and half of the new work spread over all n engines. Where one of many engines is idle, next to
nothing is left; in a burst it outweighs the request's own time.

    2 engines, queues of 1.0 and 1.2 s, 2 arrivals/s at each, 80 % busy, nobody waits
    0.4 s of work   ->   0.4 * 2 * (1.0 + 0.1) / 0.2 = 4.4 s, for all that come meanwhile together
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from objectcache.orchestrator.rules.prediction import EngineState

GROWTH_S_ASSUMED_MAX = 0.25
BUSY_SHARE_MAX = 0.9
"""A greater share is taken as this: engines that cannot keep up would make any delay infinite."""


@dataclass(frozen=True, slots=True)
class Congestion:
    """The state of all engines together: their number, the arrivals at one of them, the least queue, the share of
    the time that they compute prompts, the median of their speeds in prompt tokens per µs, and the growth where it is
    not known: the least of the others', of which an engine that lies can only make so much.
    """

    engine_count: int
    arrivals_per_s: float
    least_queue_s: float
    busy_share: float
    speed: float
    growth_s: float = 0.0

    @classmethod
    def among(cls, engines: Sequence[EngineState]) -> Congestion:
        """The congestion among at least one engine."""
        count = len(engines)
        arrivals_per_s, busy_share, least_queue_s = 0.0, 0.0, float("inf")
        for state in engines:
            arrivals_per_s += state.arrivals_per_s
            busy_share += state.busy_share
            least_queue_s = min(least_queue_s, state.queue_s)
        busy_share = min(busy_share / count, BUSY_SHARE_MAX)
        known = [state.growth_s for state in engines if state.growth_s is not None]
        growth_s = min(GROWTH_S_ASSUMED_MAX, *known) if known else 0.0
        typical_speed = median(map(speed, engines))
        return cls(count, arrivals_per_s / count, least_queue_s, busy_share, typical_speed, growth_s)

    def others_s(self, compute_s: float, state: EngineState) -> float:
        """The delay of all others together by a request whose prefill takes `compute_s` on this engine."""
        work_s = compute_s * speed(state) / self.speed
        open_s = self.least_queue_s + work_s / (2 * self.engine_count)
        later_count = self.arrivals_per_s * open_s / (1 - self.busy_share)
        growth_s = self.growth_s if state.growth_s is None else state.growth_s
        return compute_s * state.waiting_count + growth_s * state.active_count + work_s * later_count


def speed(state: EngineState) -> float:
    """Prompt tokens that an engine computes in a µs, as seen from here."""
    return 1 / max(1e-9, state.prefill.token_us * state.correction.factor)
