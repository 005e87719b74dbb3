"""The books of one engine: which requests it has from us, and how long a new one would wait.

Requests are counted from the moment they are sent until their stream ends, however it ends. An engine computes prompts
one after the other, so a new prompt waits for the rest of those before it; it also waits where as many requests run
as the engine takes. Requests of others are known from the engine's own metrics only.

    prompts of 0.4 s and 0.2 s are with the engine, the first for 0.1 s   ->   a new one waits 0.3 + 0.2 = 0.5 s
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from objectcache.orchestrator.rules.observed_costs import Correction, ObservedPrefills

SERVICE_S_DEFAULT = 1.0
"""The time a request holds its place, until some have ended."""
SAMPLES_MAX = 64
ARRIVALS_MAX, ARRIVALS_MIN = 32, 4
"""Rates are those of so many arrivals; of fewer than the least no rate is told."""
OVERDUE_S, OVERDUE_TIMES = 1.0, 3.0
"""A stream whose first byte has not come after so many seconds, nor after so many times its prediction, is late. An
engine that has late streams is taken to answer them as slowly as it has answered others since the oldest was sent: one
that answers nothing, or few, would else seem to have nothing to do. An answer that is no stream may take any time, as
its client chooses, and says nothing.
"""
MEAN_WEIGHT = 0.2
"""The last request has this weight in the mean of prefills."""


@dataclass(slots=True)
class SentRequest:
    """A request that an engine has. `work_s` is its prefill by the engine's costs, loads included, and `predicted_s`
    its TTFT, corrected and with its wait; `tokens` are those of its prompt and of the answer that it is taken to have.
    """

    request_id: str
    tokens: int
    work_s: float
    predicted_s: float
    sent_s: float
    is_stream: bool = True
    has_load: bool = False
    first_byte_s: float | None = None
    answered_before: int = 0
    """The answers that the engine had begun when it was sent."""


class Load(NamedTuple):
    """How busy an engine is. `queue_s` is the wait that a new request has before its own prefill begins.
    `arrivals_per_s` is the rate of our last requests to it, and `busy_share` the part of the time that their prefills
    take.
    """

    queue_s: float
    active_count: int
    waiting_count: int
    tokens: int
    arrivals_per_s: float = 0.0
    busy_share: float = 0.0


class EngineBooks:
    """The requests of one engine. `requests_max` is the number of requests that run at the same time."""

    def __init__(self, requests_max: int) -> None:
        self.requests_max = requests_max
        self._sent: dict[str, SentRequest] = {}
        self._others_waiting = 0
        self._others_running = 0
        self._progress_s = 0.0
        self._answered_s = 0.0
        self._answered_count = 0
        self._mean_work_s = 0.0
        self._services_s: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._arrivals: deque[tuple[float, float]] = deque(maxlen=ARRIVALS_MAX)
        """When the last requests were sent, and their work."""
        self._arrived_work_s = 0.0
        self._prefills = ObservedPrefills()

    @property
    def active_count(self) -> int:
        """Requests of ours that it has."""
        return len(self._sent)

    @property
    def correction(self) -> Correction:
        """The correction of the engine's costs by its last prefills."""
        return self._prefills.correction

    def send(self, sent: SentRequest) -> None:
        """A request was sent to the engine."""
        if not self._waiting(sent.sent_s):
            self._progress_s = sent.sent_s
        sent.answered_before = self._answered_count
        self._sent[sent.request_id] = sent
        self._note_arrival(sent)
        self._mean_work_s += MEAN_WEIGHT * (sent.work_s - self._mean_work_s)

    def first_byte(self, request_id: str, now_s: float, *, is_stream: bool = True) -> float | None:
        """The engine has begun to answer. Returns the request's TTFT; None where it is not known, or has begun. An
        answer that is no stream begins with its end, so it says nothing of the prediction.
        """
        sent = self._sent.get(request_id)
        if sent is None or sent.first_byte_s is not None:
            return None
        if is_stream and sent.work_s > 0:
            self._prefills.note(sent.work_s, max(self._progress_s, sent.sent_s), now_s)
        sent.first_byte_s = self._progress_s = self._answered_s = now_s
        self._answered_count += 1
        return now_s - sent.sent_s if is_stream else None

    def end(self, request_id: str, now_s: float, *, is_complete: bool) -> None:
        """The request has ended: its stream is over, it was cancelled, or it failed."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        if sent.first_byte_s is None:
            self._progress_s = now_s
        if is_complete:
            self._services_s.append(now_s - sent.sent_s)

    def correct(self, running: int, waiting: int, now_s: float) -> None:
        """Take over what the engine's own metrics say: requests that are not ours take room, too."""
        ours_waiting = len(self._waiting(now_s))
        self._others_waiting = max(0, waiting - ours_waiting)
        self._others_running = max(0, running + waiting - len(self._sent) - self._others_waiting)

    def waiting_loads(self, now_s: float) -> int:
        """Requests that will load from the store when their turn comes: no quote of the store's link has them yet."""
        return sum(each.has_load for each in self._waiting(now_s)[1:])

    def load(self, now_s: float) -> Load:
        """How busy the engine is."""
        arrivals_per_s, work_share = self._arrival_rates(now_s)
        factor = self.correction.factor
        if not self._sent and not self._others_waiting and not self._others_running:
            return Load(
                queue_s=0.0,
                active_count=0,
                waiting_count=0,
                tokens=0,
                arrivals_per_s=arrivals_per_s,
                busy_share=factor * work_share,
            )
        waiting = self._waiting(now_s)
        work_s = sum(each.work_s for each in waiting)
        mean_s = work_s / len(waiting) if waiting else self._mean_work_s
        queue_s = factor * (work_s + self._others_waiting * mean_s)
        if waiting:
            queue_s -= min(factor * waiting[0].work_s, max(0.0, now_s - self._progress_s))
        queue_s = max(queue_s, self.overdue_s(now_s))
        active_count = len(self._sent) + self._others_waiting + self._others_running
        over = active_count - self.requests_max + 1
        if over > 0:
            queue_s = max(queue_s, over * self._service_s() / max(1, self.requests_max))
        tokens = sum(each.tokens for each in self._sent.values())
        waiting_count = len(waiting) + self._others_waiting
        return Load(
            queue_s=queue_s,
            active_count=active_count,
            waiting_count=waiting_count,
            tokens=tokens,
            arrivals_per_s=arrivals_per_s,
            busy_share=factor * work_share,
        )

    def overdue_s(self, now_s: float) -> float:
        """How long the engine needs for its late streams, at most as long again as the oldest has waited. One stream
        that is late beside many that are answered counts little: it may be its client's doing.
        """
        late = [
            each
            for each in self._sent.values()
            if each.is_stream
            and each.first_byte_s is None
            and now_s - each.sent_s > max(OVERDUE_S, OVERDUE_TIMES * each.predicted_s)
        ]
        if not late:
            return 0.0
        oldest = late[0]
        age_s, silent_s = now_s - oldest.sent_s, now_s - max(self._answered_s, oldest.sent_s)
        each_s = max(silent_s, age_s / (1 + self._answered_count - oldest.answered_before))
        return min(age_s, len(late) * each_s)

    def room_wait_s(self, need_tokens: int, room_tokens: int, now_s: float) -> float:
        """How long a request waits for KV blocks of others, where the engine has room for so many tokens. The requests
        here give theirs back evenly over the time of a request; one that has run for longer may run as long again.
        """
        held_tokens = sum(each.tokens for each in self._sent.values())
        lacking_tokens = min(held_tokens, held_tokens + need_tokens - room_tokens)
        if lacking_tokens <= 0:
            return 0.0
        service_s = self._service_s()
        weighted_s = sum(each.tokens * max(service_s, now_s - each.sent_s) for each in self._sent.values())
        return lacking_tokens / held_tokens * weighted_s / held_tokens

    def _note_arrival(self, sent: SentRequest) -> None:
        if len(self._arrivals) == ARRIVALS_MAX:
            self._arrived_work_s -= self._arrivals[0][1]
        self._arrivals.append((sent.sent_s, sent.work_s))
        self._arrived_work_s += sent.work_s

    def _arrival_rates(self, now_s: float) -> tuple[float, float]:
        """The last requests by the time since the first of them: their number, and the seconds of their prefills."""
        if len(self._arrivals) < ARRIVALS_MIN:
            return 0.0, 0.0
        passed_s = max(now_s - self._arrivals[0][0], 1e-3)
        return len(self._arrivals) / passed_s, max(0.0, self._arrived_work_s) / passed_s

    def _waiting(self, now_s: float) -> list[SentRequest]:
        """Prompts that are not computed yet. Of a request that is not streamed nobody sees that; it is taken to be
        computed when its prediction says so.
        """
        return [
            each
            for each in self._sent.values()
            if each.first_byte_s is None and (each.is_stream or now_s < each.sent_s + each.predicted_s)
        ]

    def _service_s(self) -> float:
        return median(self._services_s) if self._services_s else SERVICE_S_DEFAULT
