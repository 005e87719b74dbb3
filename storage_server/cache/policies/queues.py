"""Queues of chunks whose bytes are counted, and bounded memories of chunks that have left."""

from __future__ import annotations

from collections import OrderedDict

from storage_server.cache.policies.order import Key, Resident

GHOST_COUNT_MAX = 1 << 20


class Queue:
    """Residents, the next one to leave first."""

    def __init__(self) -> None:
        self._residents: OrderedDict[Key, Resident] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._residents)

    def __contains__(self, key: object) -> bool:
        return key in self._residents

    def put_last(self, resident: Resident) -> None:
        """Add a chunk, or move the chunk, to the end."""
        if resident.key not in self._residents:
            self.nbytes += resident.nbytes
            self._residents[resident.key] = resident
        self._residents.move_to_end(resident.key)

    def put_first(self, resident: Resident) -> None:
        """Add a chunk as the next one to leave."""
        self.put_last(resident)
        self._residents.move_to_end(resident.key, last=False)

    def take_first(self) -> Resident:
        """The next one to leave; KeyError where there is none."""
        _, resident = self._residents.popitem(last=False)
        self.nbytes -= resident.nbytes
        return resident

    def take(self, resident: Resident) -> None:
        """Remove a chunk; KeyError where it is not here."""
        del self._residents[resident.key]
        self.nbytes -= resident.nbytes


class Ghosts:
    """Keys and sizes of chunks that have left, the oldest first."""

    def __init__(self) -> None:
        self._sizes_bytes: OrderedDict[Key, int] = OrderedDict()
        self.nbytes = 0

    def __contains__(self, key: object) -> bool:
        return key in self._sizes_bytes

    def add(self, key: Key, nbytes: int) -> None:
        """Remember a chunk as the latest one."""
        self.remove(key)
        self._sizes_bytes[key] = nbytes
        self.nbytes += nbytes

    def remove(self, key: Key) -> None:
        """Forget a chunk, if it is remembered."""
        self.nbytes -= self._sizes_bytes.pop(key, 0)

    def keep(self, nbytes: int) -> None:
        """Forget the oldest chunks until those that remain had at most `nbytes`, and are GHOST_COUNT_MAX at most."""
        while self._sizes_bytes and (self.nbytes > nbytes or len(self._sizes_bytes) > GHOST_COUNT_MAX):
            self.nbytes -= self._sizes_bytes.popitem(last=False)[1]


class UseCounts:
    """How often each chunk was used: each resident, and the `gone_count_max` chunks that left last."""

    def __init__(self, gone_count_max: int) -> None:
        self._gone_count_max = gone_count_max
        self._counts: dict[Key, int] = {}
        self._gone: OrderedDict[Key, None] = OrderedDict()

    def __getitem__(self, key: Key) -> int:
        return self._counts[key]

    def add(self, key: Key) -> int:
        """Count a use, and return the uses so far."""
        self._gone.pop(key, None)
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]

    def restore(self, key: Key, count: int) -> None:
        """Take over the uses of before a restart."""
        self._counts[key] = count
        self._gone.pop(key, None)

    def leave(self, key: Key) -> None:
        """The chunk is not resident any more."""
        self._gone[key] = None
        if len(self._gone) > self._gone_count_max:
            del self._counts[self._gone.popitem(last=False)[0]]
