"""The books of one bounded cache: its objects, what is known of their uses, and which of them leave. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from descriptors.messages import LEASE_S_MAX
from storage_server.cache.policies.order import Former, Request
from storage_server.cache.policies.policy import EvictionPolicy
from storage_server.cache.rules.awaited import AwaitedLeases, ExpectedParents
from storage_server.cache.rules.ends import Births, HoldEnds
from storage_server.cache.rules.entry import Entry, Name, Victim
from storage_server.cache.rules.hold_budget import HoldBudget
from storage_server.cache.rules.replacing import MakeLadder, ReplacementBook
from storage_server.cache.rules.unwritten import LEASE_SPARE_S, Unwritten

RESTORING_FACTOR = 8
"""While objects of before a restart come back, so many times as many leases wait for theirs."""
SET_BACK_S = 60.0
"""A clock that is so much behind the time that it has told was set back."""
LATE_S = 60.0
"""A copy that came so long after its object was stored has a use of its own to be written down."""


class Books:
    """Objects are deleted after `ttl_s`, None for never. The bytes that are held count in `all_held`, too, which caches
    share. `ladder` says through which forms objects go before they leave. Times never go back here: earlier ones are
    taken as now.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        ttl_s: float | None = None,
        all_held: HoldBudget | None = None,
        ladder: MakeLadder | None = None,
    ) -> None:
        self._policy = policy
        self._entries: dict[Name, Entry] = {}
        self.replacing = ReplacementBook(policy, self._entries, self.remove, ladder)
        self.expected = ExpectedParents()
        self.unwritten = Unwritten(self._entries)
        self._awaited = AwaitedLeases()
        self._ends = HoldEnds()
        self._births = Births(ttl_s)
        self.held = HoldBudget(all_held)
        """Pin tags and leases above its bounds have no effect, nor have those of an object that becomes clean then."""
        self.refused_count = 0
        """Pin tags and leases that had no effect for that reason."""
        self._leaving: dict[Name, Victim] = {}
        """Those that are to leave with the next `leaving`, and are among the entries no more."""
        self._now = 0.0
        self._told = -math.inf
        """The time that the clock told last."""

    @property
    def used_bytes(self) -> int:
        """The space of all objects."""
        return self._policy.used_bytes

    @property
    def evictable_bytes(self) -> int:
        """The space of the objects that no pin, lease or dirty state holds."""
        return self._policy.used_bytes - self.held.nbytes

    @property
    def count(self) -> int:
        """How many objects there are."""
        return len(self._entries)

    def put(self, name: Name, entry: Entry) -> None:
        """Note that a key shows this object now. With the version that is known only the pin can have changed."""
        known = self._entries.get(name)
        if known is not None and known.version == entry.version:
            pinned_until, is_dirty = entry.pinned_until, entry.is_dirty
            self._set(name, known._replace(pinned_until=pinned_until, is_dirty=is_dirty, has_idle_pin=False))
            return
        if known is not None and known.version == entry.replaced_version:
            version, nbytes, modified_at = entry.version, entry.nbytes, entry.modified_at
            self._set(name, known._replace(version=version, nbytes=nbytes, modified_at=modified_at, form=entry.form))
            self.replacing.end(name)
            self.unwritten.note(name)
            self._births.note(name, min(modified_at, max(self._now, entry.used_at)))
            return
        if known is not None:
            self.remove(name)
        entry = self._with_awaited_lease(name, entry, entry.used_at)
        parent = self.expected.take(name) or entry.parent
        self._entries[name] = entry._replace(parent=parent, pinned_until=None, leased_until=None, is_dirty=False)
        if entry.used_at - entry.modified_at > LATE_S:
            self.unwritten.note(name)
        now = max(self._now, entry.used_at)  # by which a clock that was ahead holds no others up
        self._births.note(name, min(entry.modified_at, now))
        before = (name[0], parent or "")
        names = [before, name] if before in self._entries and before != name else [name]
        if not entry.is_held:
            self._request(names, entry.used_at)
            return
        capacity_bytes = self._policy.capacity_bytes  # whatever its value, it must come in
        self._left(self._policy.resize(max(capacity_bytes, self._policy.used_bytes + entry.nbytes)))
        self._request(names, entry.used_at)
        if name in self._entries:
            self._set(name, entry._replace(parent=parent))
            self.unwritten.note_lease(name)
        self._left(self._policy.resize(capacity_bytes))

    def remove(self, name: Name) -> None:
        """Note that a key shows nothing any more."""
        self._leaving.pop(name, None)
        entry = self._entries.pop(name, None)
        if entry is not None:
            if entry.is_held:
                self._policy.unpin([name])
                self.held.add(-entry.nbytes)
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
                self.unwritten.note(name)
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
                self.unwritten.note(name)
            elif known is None:
                self._awaited.add(name, until)
            elif known.leased_until is None or known.leased_until < until:
                self._set(name, known._replace(leased_until=until))
                self.unwritten.note(name)
                self.unwritten.note_lease(name)

    def follow(self, now: float) -> None:
        """Note what the clock tells. Where it was set back, leases end by as much earlier: else they would hold their
        part of the cache for as long, and no later lease would have an effect.
        """
        back_s, self._told = self._told - now, now
        if back_s <= SET_BACK_S:
            return
        leased = [(name, entry, entry.leased_until) for name, entry in self._entries.items()]
        for name, entry, until in leased:
            if until is not None:
                self._entries[name] = entry._replace(leased_until=until - back_s)
                self._ends.note(name, until - back_s)
        self._awaited.set_back(back_s)
        self.unwritten.forget_written_leases()

    def restore(self, found: Iterable[tuple[Name, Entry]], now: float) -> None:
        """Take over what was known before a restart, those first whose last use is longest ago; more may follow, and
        objects that are known are passed over. Nothing leaves before the next `leaving`. Only leases may have come
        before.
        """
        self._awaited.factor = RESTORING_FACTOR
        formers: list[Former] = []
        held: list[tuple[Name, Entry]] = []
        for name, entry in found:
            if name in self._entries:
                continue
            entry = self._with_awaited_lease(name, entry, now)
            self._entries[name] = entry
            parent = None if entry.parent is None or entry.parent == name[1] else (name[0], entry.parent)
            formers.append(
                Former(
                    key=name,
                    nbytes=entry.nbytes,
                    used_at_s=min(entry.used_at, now),  # the clock may have been ahead when this was written down
                    use_count=entry.use_count,
                    parent=parent,
                    is_shared=entry.is_shared,
                    ladder=self.replacing.ladder(name, entry),
                )
            )
            if entry.is_held:
                held.append((name, entry))
            self._births.note(name, min(entry.modified_at, now))
        self._policy.restore(formers, now)
        for name, entry in held:
            self._entries[name] = entry._replace(pinned_until=None, leased_until=None, is_dirty=False)
            if entry.leased_until is not None and entry.leased_until > now + LEASE_S_MAX + LEASE_SPARE_S:
                entry = entry._replace(leased_until=now + LEASE_S_MAX)  # the clock was ahead when this was written down
                self.unwritten.note(name)
            self._set(name, entry)
            self.unwritten.note_former(name, entry.leased_until)

    def end_restore(self) -> None:
        """All objects of before the restart have been taken over."""
        self._awaited.factor = 1
        self._policy.end_restore()

    def allow(self, capacity_bytes: int) -> None:
        """Let the objects take so much until the next `leaving`, if that is more than they may take now."""
        if capacity_bytes > self._policy.capacity_bytes:
            # objects leave also where it grows: what held them may have ended since it shrank
            self._left(self._policy.resize(capacity_bytes))

    def leaving(self, capacity_bytes: int, now: float) -> list[Victim]:
        """The objects that must leave so that the others take at most `capacity_bytes`, children before parents, and
        those whose time has come. They are forgotten here: a caller that could not delete one puts it again.
        """
        self.follow(now)
        self._now = max(self._now, now)
        for name in self._ends.due(now):
            self._set(name, _without_past_holds(self._entries[name], now))
        self._expire(now)
        self._left(self._policy.resize(capacity_bytes))
        victims, self._leaving = list(self._leaving.values()), {}
        return victims

    def _expire(self, now: float) -> None:
        """Have those leave whose time has come."""
        held: list[Name] = []
        for name in self._births.due(now):
            entry = self._entries.get(name)
            if entry is None:
                continue
            if entry.is_held:
                held.append(name)
            else:
                self.remove(name)
                self._leaving[name] = Victim(*name, entry)
        for name in held:  # looked at again after as long a time
            self._births.note(name, now)

    def takes_back(self, victim: Victim) -> bool:
        """Whether a victim of an earlier `leaving`, which is still there, stays: somebody has leased it since, or the
        key shows another object by now.
        """
        name = (victim.bucket, victim.key)
        if name in self._entries:
            return True
        if not self._awaited.has(name):
            return False
        self.put(name, victim.entry)
        return True

    def _request(self, names: Sequence[Name], now: float) -> None:
        self._now = max(self._now, now)
        if names:
            entries = [self._entries[name] for name in names]
            shared_count = next((at for at, entry in enumerate(entries) if not entry.is_shared), len(entries))
            sizes_bytes = [entry.nbytes for entry in entries]
            ladders = self.replacing.ladders_of_news(names)
            change = self._policy.request(Request(self._now, names, sizes_bytes, shared_count, ladders))
            refused = [name for name in names if not self._policy.hit_count([name])]
            self._left([*change.evicted, *refused])

    def _left(self, names: Iterable[object]) -> None:
        for name in names:
            assert isinstance(name, tuple)
            entry = self._entries.pop(name, None)
            if entry is not None:
                known = str(name[0]), str(name[1])
                self._forget(known)
                self._leaving.pop(known, None)  # behind those that leave already: children before parents
                self._leaving[known] = Victim(*known, entry)

    def _set(self, name: Name, entry: Entry) -> None:
        """Replace what is known of an object, and hold it, or let it go, as that says."""
        known = self._entries[name]
        if known.is_held:
            self.held.add(-known.nbytes)
        was_limited = known.is_held and not known.is_dirty
        is_limited = entry.is_held and not entry.is_dirty
        if is_limited and not was_limited and not self.held.has_room(entry.nbytes):
            has_idle_pin = entry.has_idle_pin or entry.pinned_until is not None
            entry = entry._replace(pinned_until=None, leased_until=None, has_idle_pin=has_idle_pin)
            self.refused_count += 1
        if entry.is_held:
            self.held.add(entry.nbytes)
        if entry.is_held and not known.is_held:
            self._policy.pin([name])
        elif known.is_held and not entry.is_held:
            self._policy.unpin([name])
        ends = [end for end in (entry.pinned_until, entry.leased_until) if end is not None]
        if ends:
            self._ends.note(name, min(ends))
        self._entries[name] = entry

    def _with_awaited_lease(self, name: Name, entry: Entry, now: float) -> Entry:
        """The entry with the lease that somebody got before the object came."""
        until = self._awaited.take(name)
        if until is None or until <= now:
            return entry
        self.unwritten.note(name)
        return entry._replace(leased_until=max(until, entry.leased_until or until))

    def _forget(self, name: Name) -> None:
        """Keep nothing of an object that is not in the cache any more."""
        self.replacing.forget(name)
        self.unwritten.forget(name)
        self._births.forget(name)
        self._ends.forget(name)


def _without_past_holds(entry: Entry, now: float) -> Entry:
    pin, lease = entry.pinned_until, entry.leased_until
    return entry._replace(
        pinned_until=None if pin is None or pin <= now else pin,
        leased_until=None if lease is None or lease <= now else lease,
    )
