"""The books of one bounded cache: its objects, what is known of their uses, and which of them leave. Pure."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from descriptors.messages import LEASE_S_MAX
from storage_server.cache.policies.policy import EvictionPolicy, Former, Request

EXPECTED_MAX = 65_536
EXPECTED_CHARACTERS_MAX = 16 << 20
AWAITED_MAX = 65_536
AWAITED_CHARACTERS_MAX = 16 << 20
AWAITED_FRACTION = 0.5
"""One bucket has no more than this fraction of all leases of objects that have not come."""
AWAITED_FACTOR = 8
"""While objects of before a restart come back, so many times as many leases wait for theirs."""
ENDS_SPARE = 1000
LEASE_SPARE_S = 10.0
"""Leases are written down so much longer than they are. Renewals within this time need no writing."""
LATE_S = 60.0
"""A copy that came so long after its object was stored has a use of its own to be written down."""
Name = tuple[str, str]
"""Bucket and key."""


class Entry(NamedTuple):
    """An object in the cache. `nbytes` is the space that it takes, `parent` the key of the chunk before, if known.
    `pinned_until` and `leased_until` are None for an object without a pin or a lease. An object that `is_dirty` exists
    only in this cache. Of one that `is_shared` a client has said that many prompts begin with it. One that
    `is_replaceable` may be replaced by an encoded one. Times are Unix seconds.
    """

    version: int
    nbytes: int
    modified_at: float
    used_at: float
    use_count: int = 1
    parent: str | None = None
    pinned_until: float | None = None
    leased_until: float | None = None
    is_dirty: bool = False
    is_shared: bool = False
    is_replaceable: bool = False

    @property
    def is_held(self) -> bool:
        """Whether it may not leave."""
        return self.is_dirty or self.pinned_until is not None or self.leased_until is not None


@dataclass(frozen=True, slots=True)
class Victim:
    """An object that leaves the cache, unless it has another version by then."""

    bucket: str
    key: str
    entry: Entry


class Books:
    """Objects are deleted after `ttl_s`, None for never. Times never go back here: earlier ones are taken as now."""

    def __init__(self, policy: EvictionPolicy, ttl_s: float | None = None) -> None:
        self._policy = policy
        self._ttl_s = ttl_s
        self._entries: dict[Name, Entry] = {}
        self._expected: OrderedDict[Name, str] = OrderedDict()
        self._expected_characters = 0
        self._awaited: dict[str, OrderedDict[str, float]] = {}
        """The ends of leases by bucket and key, of objects that have not come yet."""
        self._awaited_count = 0
        self._awaited_characters: Counter[str] = Counter()
        """In the keys of each bucket."""
        self._all_awaited_characters = 0
        self._is_restoring = False
        self._hold_ends: list[tuple[float, Name]] = []
        self._next_ends: dict[Name, float] = {}
        """One entry of the heap counts for each object, its earliest; renewed leases must not fill the memory."""
        self._held_bytes = 0
        self.held_bytes_max: int | None = None
        """The most bytes that pin tags and leases may hold, dirty objects included; later ones have no effect. None:
        any amount.
        """
        self.refused_count = 0
        """Pin tags and leases that had no effect for that reason."""
        self._written_ends: dict[Name, float] = {}
        """Until when each leased object is leased, as far as that is written down."""
        self._unwritten: set[Name] = set()
        """Objects whose leases are longer than what is written down."""
        self._births: OrderedDict[Name, float] = OrderedDict()
        """When objects were stored, the oldest first, with a `ttl_s`."""
        self._former_births: list[tuple[float, Name]] = []
        """A heap of those of before a restart. Some have left."""
        self._changed: set[Name] = set()
        self._leaving: dict[Name, Victim] = {}
        """Those that are to leave with the next `leaving`, and are among the entries no more."""
        self._now = 0.0

    @property
    def used_bytes(self) -> int:
        """The space of all objects."""
        return self._policy.used_bytes

    @property
    def count(self) -> int:
        """How many objects there are."""
        return len(self._entries)

    @property
    def has_unwritten_leases(self) -> bool:
        """Whether `leased` has anything to tell."""
        return bool(self._unwritten)

    def put(self, name: Name, entry: Entry) -> None:
        """Note that a key shows this object now. With the version that is known only the pin can have changed."""
        known = self._entries.get(name)
        if known is not None and known.version == entry.version:
            self._set(name, known._replace(pinned_until=entry.pinned_until, is_dirty=entry.is_dirty))
            return
        if known is not None:
            self.remove(name)
        entry = self._with_awaited_lease(name, entry, entry.used_at)
        parent = self._forget_expected(name) or entry.parent
        self._entries[name] = entry._replace(parent=parent, pinned_until=None, leased_until=None, is_dirty=False)
        if entry.used_at - entry.modified_at > LATE_S:
            self._changed.add(name)
        if self._ttl_s is not None:
            now = max(self._now, entry.used_at)  # by which a clock that was ahead holds no others up
            self._births[name] = min(entry.modified_at, now)
            self._births.move_to_end(name)
        before = (name[0], parent or "")
        names = [before, name] if before in self._entries and before != name else [name]
        if not entry.is_held:
            self._request(names, entry.used_at)
            return
        capacity_bytes = self._policy.capacity_bytes  # whatever its value, it must come in
        self._policy.resize(max(capacity_bytes, self._policy.used_bytes + entry.nbytes))
        self._request(names, entry.used_at)
        if name in self._entries:
            self._set(name, entry._replace(parent=parent))
            self._note_lease(name)
        self._left(self._policy.resize(capacity_bytes))

    def remove(self, name: Name) -> None:
        """Note that a key shows nothing any more."""
        self._leaving.pop(name, None)
        entry = self._entries.pop(name, None)
        if entry is not None:
            if entry.is_held:
                self._policy.unpin([name])
                self._held_bytes -= entry.nbytes
            self._policy.remove(name)
            self._forget(name)

    def use(self, bucket: str, keys: Sequence[str], now: float) -> None:
        """Note that the chunks of a prefix were read, as far as they are in the cache."""
        names = list(dict.fromkeys((bucket, key) for key in keys))
        count = next((at for at, name in enumerate(names) if name not in self._entries), len(names))
        self._request(names[:count], now)
        parent: str | None = None
        for name in names[:count]:
            known = self._entries.get(name)
            if known is not None:
                count = known.use_count + 1
                self._entries[name] = known._replace(used_at=now, use_count=count, parent=known.parent or parent)
                self._changed.add(name)
            parent = name[1]

    def lease(self, bucket: str, keys: Sequence[str], until: float) -> None:
        """Keep these chunks until then; those that are not in the cache from the moment when they come. A chunk that
        was to leave, and is still there, stays.
        """
        for name in dict.fromkeys((bucket, key) for key in keys):
            known = self._entries.get(name)
            victim = None if known is not None else self._leaving.pop(name, None)
            if victim is not None:
                self.put(name, victim.entry._replace(leased_until=until))
                self._changed.add(name)
            elif known is None:
                self._await(name, until)
            elif known.leased_until is None or known.leased_until < until:
                self._set(name, known._replace(leased_until=until))
                self._changed.add(name)
                self._note_lease(name)

    def expect(self, bucket: str, keys: Sequence[str], matched: int) -> None:
        """Note that somebody has asked for this prefix, whose first `matched` chunks are there. The client that
        computes the others will put them soon, one by one.
        """
        for index in range(max(1, matched), len(keys)):
            name, parent = (bucket, keys[index]), keys[index - 1]
            self._forget_expected(name)
            self._expected[name] = parent
            self._expected_characters += len(name[1]) + len(parent)
        while len(self._expected) > EXPECTED_MAX or self._expected_characters > EXPECTED_CHARACTERS_MAX:
            self._forget_expected(next(iter(self._expected)))

    def _forget_expected(self, name: Name) -> str | None:
        """The parent that the object was expected behind; None where nobody has asked for it."""
        parent = self._expected.pop(name, None)
        if parent is not None:
            self._expected_characters -= len(name[1]) + len(parent)
        return parent

    def restore(self, found: Iterable[tuple[Name, Entry]], now: float) -> None:
        """Take over what was known before a restart, those first whose last use is longest ago; more may follow, and
        objects that are known are passed over. Nothing leaves before the next `leaving`. Only leases may have come
        before.
        """
        self._is_restoring = True
        formers: list[Former] = []
        held: list[tuple[Name, Entry]] = []
        for name, entry in found:
            if name in self._entries:
                continue
            entry = self._with_awaited_lease(name, entry, now)
            self._entries[name] = entry
            parent = None if entry.parent is None or entry.parent == name[1] else (name[0], entry.parent)
            formers.append(Former(name, entry.nbytes, entry.used_at, entry.use_count, parent, entry.is_shared))
            if entry.is_held:
                held.append((name, entry))
            if self._ttl_s is not None:
                heappush(self._former_births, (entry.modified_at, name))
        self._policy.restore(formers, now)
        for name, entry in held:
            self._entries[name] = entry._replace(pinned_until=None, leased_until=None, is_dirty=False)
            if entry.leased_until is not None and entry.leased_until > now + LEASE_S_MAX + LEASE_SPARE_S:
                entry = entry._replace(leased_until=now + LEASE_S_MAX)  # the clock was ahead when this was written down
                self._changed.add(name)
            self._set(name, entry)
            if name in self._changed:
                self._note_lease(name)
            elif entry.leased_until is not None:
                self._written_ends[name] = entry.leased_until

    def end_restore(self) -> None:
        """All objects of before the restart have been taken over."""
        self._is_restoring = False
        self._policy.end_restore()

    def allow(self, capacity_bytes: int) -> None:
        """Let the objects take so much until the next `leaving`, if that is more than they may take now."""
        if capacity_bytes > self._policy.capacity_bytes:
            self._policy.resize(capacity_bytes)

    def leaving(self, capacity_bytes: int, now: float) -> list[Victim]:
        """The objects that must leave so that the others take at most `capacity_bytes`, children before parents, and
        those whose time has come. They are forgotten here: a caller that could not delete one puts it again.
        """
        self._now = max(self._now, now)
        while self._hold_ends and self._hold_ends[0][0] <= now:
            end, name = heappop(self._hold_ends)
            if self._next_ends.get(name) == end:
                del self._next_ends[name]
                self._set(name, _without_past_holds(self._entries[name], now))
        if self._ttl_s is not None:
            self._expire(self._ttl_s, now)
        self._left(self._policy.resize(capacity_bytes))
        victims, self._leaving = list(self._leaving.values()), {}
        return victims

    def _expire(self, ttl_s: float, now: float) -> None:
        """Have those leave whose time has come."""
        due: dict[Name, None] = {}
        while self._former_births and self._former_births[0][0] + ttl_s <= now:
            born, name = heappop(self._former_births)
            entry = self._entries.get(name)
            if entry is not None and entry.modified_at == born and name not in self._births:
                due[name] = None
        for name, born in self._births.items():
            if born + ttl_s > now:
                break
            due[name] = None
        for name in due:
            entry = self._entries[name]
            if entry.is_held:
                self._births[name] = now  # looked at again after as long a time
                self._births.move_to_end(name)
            else:
                self.remove(name)
                self._to_leave(name, entry)

    def takes_back(self, victim: Victim) -> bool:
        """Whether a victim of an earlier `leaving`, which is still there, stays: somebody has leased it since, or the
        key shows another object by now.
        """
        name = (victim.bucket, victim.key)
        if name in self._entries:
            return True
        if victim.key not in self._awaited.get(victim.bucket, ()):
            return False
        self.put(name, victim.entry)
        return True

    def changed(self) -> list[tuple[Name, Entry]]:
        """The objects that were used, pinned or leased since the last call, as they are to be written down."""
        names, self._changed, self._unwritten = self._changed, set(), set()
        return self._to_write(names)

    def leased(self) -> list[tuple[Name, Entry]]:
        """Those of `changed` whose leases are longer than what is written down."""
        names, self._unwritten = self._unwritten, set()
        self._changed -= names
        return self._to_write(names)

    def forget_written_leases(self) -> None:
        """Have all leases written down again: what is written counts by another clock."""
        self._written_ends.clear()
        for name, entry in self._entries.items():
            if entry.leased_until is not None:
                self._changed.add(name)
                self._note_lease(name)

    def not_written(self, names: Iterable[Name]) -> None:
        """Take back what `changed` or `leased` gave: these could not be written down."""
        for name in names:
            if name in self._entries:
                self._changed.add(name)
                self._written_ends.pop(name, None)
                self._note_lease(name)

    def _to_write(self, names: Iterable[Name]) -> list[tuple[Name, Entry]]:
        found = []
        for name in names:
            entry = self._entries.get(name)
            if entry is None:
                continue
            until = entry.leased_until
            if until is not None and until > self._written_ends.get(name, -math.inf):
                self._written_ends[name] = until + LEASE_SPARE_S
            written = None if until is None else self._written_ends[name]
            found.append((name, entry._replace(leased_until=written)))
        return found

    def _note_lease(self, name: Name) -> None:
        """Have a lease written down where it is longer than what is."""
        until = self._entries[name].leased_until
        if until is not None and until > self._written_ends.get(name, -math.inf):
            self._unwritten.add(name)

    def _request(self, names: Sequence[Name], now: float) -> None:
        self._now = max(self._now, now)
        if names:
            entries = [self._entries[name] for name in names]
            shared_count = next((at for at, entry in enumerate(entries) if not entry.is_shared), len(entries))
            change = self._policy.request(Request(self._now, names, [entry.nbytes for entry in entries], shared_count))
            refused = [name for name in names if not self._policy.hit_count([name])]
            self._left([*change.evicted, *refused])

    def _left(self, names: Iterable[object]) -> None:
        for name in names:
            assert isinstance(name, tuple)
            entry = self._entries.pop(name, None)
            if entry is not None:
                known = str(name[0]), str(name[1])
                self._forget(known)
                self._to_leave(known, entry)

    def _to_leave(self, name: Name, entry: Entry) -> None:
        """Behind those that leave already: children before parents."""
        self._leaving.pop(name, None)
        self._leaving[name] = Victim(*name, entry)

    def _set(self, name: Name, entry: Entry) -> None:
        """Replace what is known of an object, and hold it, or let it go, as that says."""
        known = self._entries[name]
        limit_bytes = self.held_bytes_max
        if entry.is_held and not known.is_held:
            if not entry.is_dirty and limit_bytes is not None and self._held_bytes + entry.nbytes > limit_bytes:
                entry = entry._replace(pinned_until=None, leased_until=None)
                self.refused_count += 1
            else:
                self._policy.pin([name])
                self._held_bytes += entry.nbytes
        elif known.is_held and not entry.is_held:
            self._policy.unpin([name])
            self._held_bytes -= known.nbytes
        ends = [end for end in (entry.pinned_until, entry.leased_until) if end is not None]
        if ends and min(ends) < self._next_ends.get(name, math.inf):
            self._next_ends[name] = min(ends)
            heappush(self._hold_ends, (min(ends), name))
            if len(self._hold_ends) > 2 * len(self._next_ends) + ENDS_SPARE:
                self._hold_ends = [(end, name) for name, end in self._next_ends.items()]
                heapify(self._hold_ends)
        self._entries[name] = entry

    def _await(self, name: Name, until: float) -> None:
        """Lease an object when it comes. One bucket must not make the leases of others be forgotten."""
        bucket, key = name
        awaited = self._awaited.setdefault(bucket, OrderedDict())
        if key not in awaited:
            self._awaited_count += 1
            self._awaited_characters[bucket] += len(key)
            self._all_awaited_characters += len(key)
        awaited[key] = max(until, awaited.pop(key, until))
        factor = AWAITED_FACTOR if self._is_restoring else 1
        count_max, characters_max = factor * AWAITED_MAX, factor * AWAITED_CHARACTERS_MAX
        while (
            len(awaited) > AWAITED_FRACTION * count_max
            or self._awaited_characters[bucket] > AWAITED_FRACTION * characters_max
        ):
            self._stop_awaiting(bucket, next(iter(awaited)))
        while self._awaited_count > count_max or self._all_awaited_characters > characters_max:
            largest = max(self._awaited, key=lambda bucket: len(self._awaited[bucket]))
            self._stop_awaiting(largest, next(iter(self._awaited[largest])))

    def _stop_awaiting(self, bucket: str, key: str) -> float | None:
        """Forget the lease of an object that has not come; its end, None where there is none."""
        awaited = self._awaited.get(bucket)
        until = None if awaited is None else awaited.pop(key, None)
        if until is not None:
            self._awaited_count -= 1
            self._awaited_characters[bucket] -= len(key)
            self._all_awaited_characters -= len(key)
        if awaited is not None and not awaited:
            del self._awaited[bucket], self._awaited_characters[bucket]
        return until

    def _with_awaited_lease(self, name: Name, entry: Entry, now: float) -> Entry:
        """The entry with the lease that somebody got before the object came."""
        until = self._stop_awaiting(*name)
        if until is None or until <= now:
            return entry
        self._changed.add(name)
        return entry._replace(leased_until=max(until, entry.leased_until or until))

    def _forget(self, name: Name) -> None:
        """Keep nothing of an object that is not in the cache any more."""
        self._changed.discard(name)
        self._unwritten.discard(name)
        self._written_ends.pop(name, None)
        self._births.pop(name, None)
        self._next_ends.pop(name, None)


def _without_past_holds(entry: Entry, now: float) -> Entry:
    pin, lease = entry.pinned_until, entry.leased_until
    return entry._replace(
        pinned_until=None if pin is None or pin <= now else pin,
        leased_until=None if lease is None or lease <= now else lease,
    )
