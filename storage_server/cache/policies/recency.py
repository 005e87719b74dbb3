"""Policies that go by recency, by counts of uses, and by both: LRU, LFU, and CASCADE's rule."""

from __future__ import annotations

from bisect import bisect_left, insort

from storage_server.cache.policies.order import EvictionOrder, Former, Key, Request, Resident
from storage_server.cache.policies.queues import Queue, UseCounts

GONE_COUNT_MAX = 1 << 18


class LeastRecentlyUsed(EvictionOrder):
    """The chunk whose last use is longest ago leaves first."""

    def __init__(self) -> None:
        self._queue = Queue()

    def admit(self, resident: Resident, position: int) -> None:
        self._queue.put_last(resident)

    def use(self, resident: Resident, position: int) -> None:
        self._queue.put_last(resident)

    def take_next(self) -> Resident:
        return self._queue.take_first()

    def take(self, resident: Resident) -> None:
        self._queue.take(resident)

    def put_back(self, resident: Resident) -> None:
        self._queue.put_first(resident)

    def put_behind(self, resident: Resident) -> None:
        self._queue.put_last(resident)


class LeastFrequentlyUsed(EvictionOrder):
    """The chunk with the fewest uses leaves first; among equals the least recently used one. Uses of the
    `gone_count_max` chunks that left last are remembered.
    """

    def __init__(self, gone_count_max: int = GONE_COUNT_MAX) -> None:
        self._queues: dict[int, Queue] = {}
        self._use_counts = UseCounts(gone_count_max)
        self._waiting_counts: list[int] = []
        """Each count with a queue, in order. They are few even where chunks are many: n different counts take n^2 / 2
        uses.
        """

    def _queue(self, count: int) -> Queue:
        if count not in self._queues:
            insort(self._waiting_counts, count)
            self._queues[count] = Queue()
        return self._queues[count]

    def _drop_empty(self, count: int) -> None:
        if not self._queues[count]:
            del self._queues[count]
            del self._waiting_counts[bisect_left(self._waiting_counts, count)]

    def note_former(self, former: Former, now_s: float, child_count: int) -> None:
        self._use_counts.restore(former.key, former.use_count - 1)

    def admit(self, resident: Resident, position: int) -> None:
        self._queue(self._use_counts.add(resident.key)).put_last(resident)

    def use(self, resident: Resident, position: int) -> None:
        self.take(resident)
        self.admit(resident, position)

    def take_next(self) -> Resident:
        count = self._waiting_counts[0]
        resident = self._queues[count].take_first()
        self._drop_empty(count)
        return resident

    def take(self, resident: Resident) -> None:
        count = self._use_counts[resident.key]
        self._queues[count].take(resident)
        self._drop_empty(count)

    def put_back(self, resident: Resident) -> None:
        self._queue(self._use_counts[resident.key]).put_first(resident)

    def put_behind(self, resident: Resident) -> None:
        self._queue(self._use_counts[resident.key]).put_last(resident)

    def left(self, resident: Resident) -> None:
        self._use_counts.leave(resident.key)


class Cascade(EvictionOrder):
    """CASCADE's rule (Eq. 4 and Algorithm 1): a chunk of a shared prefix (`is_prefix`) and a chunk that was requested
    more than once (`ref_count`) leave after all others; the least recently used one leaves first on either side. Uses
    of the `gone_count_max` chunks that left last are remembered.
    """

    def __init__(self, gone_count_max: int = GONE_COUNT_MAX) -> None:
        self._others, self._protected = Queue(), Queue()
        self._protected_keys: set[Key] = set()
        self._use_counts = UseCounts(gone_count_max)
        self._shared_count = 0

    def note(self, request: Request) -> None:
        self._shared_count = request.shared_count

    def note_former(self, former: Former, now_s: float, child_count: int) -> None:
        self._use_counts.restore(former.key, former.use_count - 1)
        self._shared_count = int(former.is_shared)

    def admit(self, resident: Resident, position: int) -> None:
        if self._use_counts.add(resident.key) > 1 or position < self._shared_count:
            self._protected_keys.add(resident.key)
        self._queue(resident).put_last(resident)

    def use(self, resident: Resident, position: int) -> None:
        self.take(resident)
        self.admit(resident, position)

    def _queue(self, resident: Resident) -> Queue:
        return self._protected if resident.key in self._protected_keys else self._others

    def take_next(self) -> Resident:
        return (self._others or self._protected).take_first()

    def take(self, resident: Resident) -> None:
        self._queue(resident).take(resident)

    def put_back(self, resident: Resident) -> None:
        self._queue(resident).put_first(resident)

    def put_behind(self, resident: Resident) -> None:
        self._queue(resident).put_last(resident)

    def left(self, resident: Resident) -> None:
        self._protected_keys.discard(resident.key)
        self._use_counts.leave(resident.key)
