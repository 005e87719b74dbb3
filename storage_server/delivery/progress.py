"""How far each delivery is, for people who look: pure, with the times that it is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

from descriptors.descriptor import NUM_LAYERS_MAX
from descriptors.notices import Mode
from descriptors.status import DELIVERIES_MAX, ENDED_MAX, DeliveryStatus

READY, LATE = "r", "l"


@dataclass(slots=True)
class Progress:
    """One delivery. `began_at` is Unix seconds, all other times are of one monotonic clock, in seconds."""

    request_id: str
    bucket: str
    transport: str
    began_at: float
    began_s: float
    mode: Mode | None = None
    group_count: int = 0
    nbytes: int = 0
    sent_bytes: int = 0
    rate_bytes_per_s: int = 0
    stalled_s: float = 0.0
    outcome: str = ""
    _groups: list[str] = field(default_factory=list)
    _compute_s: float | None = None
    _needed_s: float | None = None
    _ended_s: float | None = None

    def planned(self, mode: Mode, group_count: int, nbytes: int, compute_s: float | None) -> None:
        """The delivery sends so many layers, or chunks, and bytes, to a client that computes each layer in
        `compute_s`; None where nobody knows.
        """
        self.mode, self.group_count, self.nbytes, self._compute_s = mode, group_count, nbytes, compute_s

    def group_sent(self, now_s: float) -> None:
        """The next layer, or chunk, is sent. A layer is late where the client has computed all layers before it: then
        it waits. Nobody waits for chunks one by one.
        """
        late_s = 0.0
        if self._compute_s is not None and self.mode is Mode.LAYER_MAJOR:
            late_s = 0.0 if self._needed_s is None else max(0.0, now_s - self._needed_s)
            self._needed_s = max(now_s, self._needed_s or now_s) + self._compute_s
        self.stalled_s += late_s
        if len(self._groups) < NUM_LAYERS_MAX:
            self._groups.append(LATE if late_s else READY)

    def ended(self, outcome: str, now_s: float) -> None:
        """The delivery is over."""
        self.outcome, self._ended_s = outcome, now_s

    def status(self, now_s: float) -> DeliveryStatus:
        """The delivery as a status tells it."""
        return DeliveryStatus(
            request_id=self.request_id,
            bucket=self.bucket,
            transport=self.transport,
            mode="" if self.mode is None else self.mode.value,
            began_at=self.began_at,
            elapsed_s=(now_s if self._ended_s is None else self._ended_s) - self.began_s,
            nbytes=self.nbytes,
            sent_bytes=self.sent_bytes,
            group_count=self.group_count,
            groups="".join(self._groups),
            rate_bytes_per_s=self.rate_bytes_per_s,
            stalled_s=None if self._compute_s is None else self.stalled_s,
            outcome=self.outcome,
        )


class Deliveries:
    """The deliveries under way, and the last that have ended."""

    def __init__(self) -> None:
        self._running: dict[int, Progress] = {}
        self._ended: deque[Progress] = deque(maxlen=ENDED_MAX)

    @contextmanager
    def running(self, progress: Progress) -> Iterator[None]:
        """The delivery is under way while the block runs."""
        self._running[id(progress)] = progress
        try:
            yield
        finally:
            del self._running[id(progress)]
            self._ended.append(progress)

    def status(self, now_s: float) -> tuple[DeliveryStatus, ...]:
        """Those under way, the latest first, and then those that ended last."""
        found = chain(reversed(self._running.values()), reversed(self._ended))
        return tuple([each.status(now_s) for each, _ in zip(found, range(DELIVERIES_MAX), strict=False)])
