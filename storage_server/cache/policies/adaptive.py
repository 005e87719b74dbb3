"""Policies that remember chunks that have left: ARC and S3-FIFO, with sizes in bytes."""

from __future__ import annotations

from storage_server.cache.policies.order import EvictionOrder, Former, Key, Resident
from storage_server.cache.policies.queues import Ghosts, Queue


class AdaptiveReplacement(EvictionOrder):
    """ARC (Megiddo and Modha, FAST '03). Symbols: T1 is `_once`, T2 `_again`, B1 and B2 their ghosts, p is
    `_once_bytes`: the share of the cache for chunks that were used once, which grows when such a chunk left too early.
    """

    def __init__(self) -> None:
        self._once, self._again = Queue(), Queue()
        self._once_ghosts, self._again_ghosts = Ghosts(), Ghosts()
        self._again_keys: set[Key] = set()
        self._once_bytes = 0.0
        self._is_again_ghost = False

    def admit(self, resident: Resident, position: int) -> None:
        key, once, again = resident.key, self._once_ghosts, self._again_ghosts
        self._is_again_ghost = key in again
        if key in once:
            step_bytes = resident.nbytes * max(again.nbytes / once.nbytes, 1)
            self._once_bytes = min(self.capacity_bytes, self._once_bytes + step_bytes)
        elif key in again:
            step_bytes = resident.nbytes * max(once.nbytes / again.nbytes, 1)
            self._once_bytes = max(0.0, self._once_bytes - step_bytes)
        else:
            self._once.put_last(resident)
            return
        once.remove(key)
        again.remove(key)
        self._again_keys.add(key)
        self._again.put_last(resident)

    def admit_former(self, resident: Resident, former: Former) -> None:
        if former.use_count > 1:
            self._again_keys.add(resident.key)
            self._again.put_last(resident)
        else:
            self._once.put_last(resident)

    def use(self, resident: Resident, position: int) -> None:
        if resident.key not in self._again_keys:
            self._again_keys.add(resident.key)
            self._once.take(resident)
        self._again.put_last(resident)

    def take_next(self) -> Resident:
        is_once_over = self._once.nbytes > self._once_bytes or (
            self._is_again_ghost and self._once.nbytes == self._once_bytes
        )
        if self._once and (is_once_over or not self._again):
            return self._once.take_first()
        return self._again.take_first()

    def _queue(self, resident: Resident) -> Queue:
        return self._again if resident.key in self._again_keys else self._once

    def take(self, resident: Resident) -> None:
        self._queue(resident).take(resident)

    def put_back(self, resident: Resident) -> None:
        self._queue(resident).put_first(resident)

    def put_behind(self, resident: Resident) -> None:
        self._queue(resident).put_last(resident)

    def left(self, resident: Resident) -> None:
        if resident.key in self._again_keys:
            self._again_keys.discard(resident.key)
            self._again_ghosts.add(resident.key, resident.nbytes)
        else:
            self._once_ghosts.add(resident.key, resident.nbytes)
        self._once_ghosts.keep(self.capacity_bytes - self._once.nbytes)
        remembered_bytes = 2 * self.capacity_bytes - self._once.nbytes - self._again.nbytes
        self._again_ghosts.keep(remembered_bytes - self._once_ghosts.nbytes)


class S3Fifo(EvictionOrder):
    """S3-FIFO (Yang et al., SOSP '23): new chunks pass a small queue, and only those that are used there again, or that
    are asked for soon after they left, come into the main queue, where a used chunk gets another round.
    """

    SMALL_FRACTION = 0.1
    USE_COUNT_MAX = 3

    def __init__(self) -> None:
        self._small, self._main = Queue(), Queue()
        self._ghosts = Ghosts()
        self._use_counts: dict[Key, int] = {}
        self._main_keys: set[Key] = set()

    def admit(self, resident: Resident, position: int) -> None:
        self._use_counts[resident.key] = 0
        if resident.key in self._ghosts:
            self._ghosts.remove(resident.key)
            self._to_main(resident)
        else:
            self._small.put_last(resident)

    def admit_former(self, resident: Resident, former: Former) -> None:
        self._use_counts[resident.key] = min(self.USE_COUNT_MAX, former.use_count - 1)
        self._small.put_last(resident)

    def use(self, resident: Resident, position: int) -> None:
        count = self._use_counts[resident.key]
        self._use_counts[resident.key] = min(self.USE_COUNT_MAX, count + 1)

    def _to_main(self, resident: Resident) -> None:
        self._main_keys.add(resident.key)
        self._main.put_last(resident)

    def take_next(self) -> Resident:
        while self._small and (self._small.nbytes > self.SMALL_FRACTION * self.capacity_bytes or not self._main):
            resident = self._small.take_first()
            if self._use_counts[resident.key] <= 1:
                return resident
            self._use_counts[resident.key] = 0
            self._to_main(resident)
        while self._main:
            resident = self._main.take_first()
            if not self._use_counts[resident.key]:
                return resident
            self._use_counts[resident.key] -= 1
            self._main.put_last(resident)
        return self._small.take_first()

    def _queue(self, resident: Resident) -> Queue:
        return self._main if resident.key in self._main_keys else self._small

    def take(self, resident: Resident) -> None:
        self._queue(resident).take(resident)

    def put_back(self, resident: Resident) -> None:
        self._queue(resident).put_first(resident)

    def put_behind(self, resident: Resident) -> None:
        self._queue(resident).put_last(resident)

    def left(self, resident: Resident) -> None:
        del self._use_counts[resident.key]
        if resident.key in self._main_keys:
            self._main_keys.discard(resident.key)
        else:
            self._ghosts.add(resident.key, resident.nbytes)
            self._ghosts.keep(self.capacity_bytes)
