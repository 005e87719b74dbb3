"""The policy of one bounded cache: what each use admits, encodes and evicts.

A chunk leaves only after all of its resident children have left, and the hits of a request are the leading chunks that
are resident. `EvictionOrder` says whose turn it is. A chunk that has a ladder is encoded at its turn, also while it has
children, and counts as much as its next form takes from then on; on the last rung it leaves at its turn, as all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from storage_server.cache.policies.ladder import Ladder, Rung
from storage_server.cache.policies.order import EvictionOrder, Former, Key, Request, Resident

DEPTH_LOOKED_AT_MAX = 4096


@dataclass(frozen=True, slots=True)
class Change:
    """The changes of the cache after a request. It evicts `evicted`, children before parents, and then copies
    `admitted`, parents before children, so it holds at most `capacity_bytes` at every moment.
    """

    admitted: tuple[Key, ...]
    evicted: tuple[Key, ...]


class EvictionPolicy:
    """Decides for one cache of `capacity_bytes`; `order` says in which order chunks leave. The same calls always get
    the same answers. Raises ValueError for a capacity below 0.

    The chunks of a request are used from the last one to the first one, so that a parent is always the more recently
    used. A chunk may reach the front of its queue while a child or a pin keeps it. It is then held back: it leaves the
    queue, and returns to the front when its last child leaves or its last pin is released. So a queue never searches
    past chunks that must stay, and the cost of a request does not grow with the number of residents.
    """

    def __init__(self, capacity_bytes: int, order: EvictionOrder) -> None:
        self._order = order
        self._bound(capacity_bytes)
        self._residents: dict[Key, Resident] = {}
        self._orphans: dict[Key, list[Resident]] = {}
        """Former residents whose parents have not come, by the parent."""
        self._queued_count = 0
        self.encoded: dict[Key, Rung] = {}
        """The residents that are to be encoded, and their new forms, until the caller takes them out of here."""
        self._has_ladders = False
        """Then a request's chunks are all noted before room is made: else its last ones would leave, since the turns of
        those before them, which may only have to be encoded, had not come.
        """
        self.look_again: Callable[[Key], Ladder | None] | None = None
        """Asked of a resident with a ladder at its turn: another ladder, from its present form on."""
        self._used_bytes = 0
        self._now_s = float("-inf")

    @property
    def capacity_bytes(self) -> int:
        """The most that residents may take, in bytes."""
        return self._order.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes of all residents."""
        return self._used_bytes

    def hit_count(self, keys: Sequence[Key]) -> int:
        """How many leading chunks are resident."""
        return next((count for count, key in enumerate(keys) if key not in self._residents), len(keys))

    def request(self, request: Request) -> Change:
        """Note a request and say what changes. Raises ValueError where `now_s` goes back."""
        if request.now_s < self._now_s:
            raise ValueError("time does not go back")
        self._now_s = request.now_s
        self._order.note(request)
        chain, news = self._linked(request)
        left: list[Key] = []
        for resident in chain:
            resident.is_asked = True
        for position in range(len(chain) - 1, -1, -1):
            resident = chain[position]
            resident.is_asked = False
            self._unpark(resident)
            if resident.key in news:
                self._used_bytes += resident.nbytes
                self._queued_count += 1
                self._order.admit(resident, position)
            else:
                self._order.use(resident, position)
            if not self._has_ladders:
                left += self._evicted()
        left += self._evicted()
        return Change(
            admitted=tuple(key for key in request.keys if key in news and key in self._residents),
            evicted=tuple(key for key in left if key not in news),
        )

    def restore(self, found: Iterable[Former], now_s: float) -> None:
        """Take over residents of before a restart, those first whose last use is longest ago; more may follow. Nothing
        leaves. Called before the first request. Raises ValueError for a resident.
        """
        for former in found:
            if former.key in self._residents:
                raise ValueError(f"{former.key!r} is resident")
            self._order.note_former(former, now_s, len(self._orphans.get(former.key, ())))
            resident = self._residents[former.key] = self._order.made(former.key, former.nbytes)
            resident.ladder = former.ladder
            self._has_ladders = self._has_ladders or bool(former.ladder)
            self._used_bytes += former.nbytes
            self._queued_count += 1
            self._join(resident, former.parent)
            self._order.admit_former(resident, former)

    def end_restore(self) -> None:
        """All of them have come."""
        self._orphans.clear()
        self._order.end_restore()

    def resize(self, capacity_bytes: int) -> tuple[Key, ...]:
        """Change the capacity. Returns what leaves, children before parents; pinned chunks stay, also where they take
        more than the capacity. Raises ValueError for one below 0.
        """
        self._bound(capacity_bytes)
        return tuple(self._evicted())

    def offer(self, key: Key, nbytes: int, ladder: Ladder) -> None:
        """Note that a resident takes `nbytes`, and has this ladder: where its form is not what was to be. Raises
        KeyError for others.
        """
        resident = self._residents[key]
        self.encoded.pop(key, None)
        if not resident.is_held_back:
            self._order.take(resident)
        self._used_bytes += nbytes - resident.nbytes
        resident.nbytes, resident.ladder, resident.rung_number = nbytes, ladder, 0
        self._has_ladders = True
        if not resident.is_held_back:
            self._order.put_back(resident)
        elif resident.may_go:
            self._unpark(resident)

    def resident(self, key: Key) -> Resident:
        """A resident, to be looked at. Raises KeyError for others."""
        return self._residents[key]

    def remove(self, key: Key) -> bool:
        """Note that a chunk is not there any more, whatever the policy would have done; whether it was resident."""
        resident = self._residents.get(key)
        if resident is None:
            return False
        if resident.is_held_back:
            resident.is_held_back = False
        else:
            self._queued_count -= 1
            self._order.take(resident)
        self._leave(resident)
        return True

    def pin(self, keys: Sequence[Key]) -> None:
        """Keep these residents until `unpin`, which is called once for each `pin`. Raises KeyError for others."""
        for resident in [self._residents[key] for key in keys]:
            if not resident.pin_count:
                self._lose_child(resident.parent)
                if resident.parent is not None:
                    resident.parent.pinned_child_count += 1
            resident.pin_count += 1

    def unpin(self, keys: Sequence[Key]) -> None:
        """Undo `pin`. Raises KeyError for a chunk that is not pinned."""
        for key in keys:
            resident = self._residents[key]
            if not resident.pin_count:
                raise KeyError(key)
            resident.pin_count -= 1
            if not resident.pin_count and resident.parent is not None:
                resident.parent.child_count += 1
                resident.parent.pinned_child_count -= 1
            if resident.may_go:
                self._unpark(resident)

    def _bound(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError("a cache holds 0 bytes or more")
        self._order.capacity_bytes = capacity_bytes

    def _linked(self, request: Request) -> tuple[list[Resident], set[Key]]:
        """The request's chunks, each joined to its parent, and the keys of those that are new. A chunk that came
        alone, or whose parent has been removed, is joined to the chunk before it. If it has children, it stays alone:
        the chunk before it could be one of them, and then neither could ever leave.
        """
        chain: list[Resident] = []
        news: set[Key] = set()
        for key, nbytes in zip(request.keys, request.sizes_bytes, strict=True):
            parent = chain[-1] if chain else None
            resident = self._residents.get(key)
            if resident is None:
                resident = self._residents[key] = self._order.made(key, nbytes)
                resident.ladder = request.ladders.get(key, ())
                self._has_ladders = self._has_ladders or bool(resident.ladder)
                news.add(key)
            is_alone = resident.parent is None or not resident.parent.is_resident
            if is_alone and not resident.has_children and parent is not None:
                resident.become_child_of(parent)
            chain.append(resident)
        return chain, news

    def _join(self, resident: Resident, parent_key: Key | None) -> None:
        """Join a former resident to its children and to its parent; in a circle of parents, not to the latter."""
        children = [
            child
            for child in self._orphans.pop(resident.key, ())
            if child.is_resident and (child.parent is None or not child.parent.is_resident)
        ]
        for child in children:
            child.become_child_of(resident)
        if parent_key is None:
            return
        parent = self._residents.get(parent_key)
        if parent is None:
            self._orphans.setdefault(parent_key, []).append(resident)
        elif not children or not _is_beneath(parent, resident):
            resident.become_child_of(parent)

    def _evicted(self) -> list[Key]:
        """Encode and evict until the residents fit, or until all that remain must stay."""
        left: list[Key] = []
        while self._used_bytes > self._order.capacity_bytes and self._queued_count:
            resident = self._order.take_next()
            latest = self.look_again(resident.key) if resident.ladder and self.look_again is not None else None
            if latest is not None:
                resident.ladder, resident.rung_number = latest, 0
                self._order.put_back(resident)
                continue
            if resident.ladder and resident.may_go and (after := resident.next_rung) is not None:
                self._used_bytes += after.nbytes - resident.nbytes
                resident.nbytes = after.nbytes
                resident.rung_number += 1
                self.encoded[resident.key] = after
                self._order.put_behind(resident)
                continue
            self._queued_count -= 1
            if resident.may_go:
                self._leave(resident)
                left.append(resident.key)
            else:
                resident.is_held_back = True
        return left

    def _leave(self, resident: Resident) -> None:
        """End the stay of a chunk that is in no queue."""
        resident.is_resident = False
        self.encoded.pop(resident.key, None)
        del self._residents[resident.key]
        self._used_bytes -= resident.nbytes
        if not resident.pin_count:
            self._lose_child(resident.parent)
        elif resident.parent is not None:
            resident.parent.pinned_child_count -= 1
        resident.parent = None  # its children may stay: they would keep all its forefathers in memory
        self._order.left(resident)

    def _lose_child(self, parent: Resident | None) -> None:
        if parent is not None:
            parent.child_count -= 1
            if parent.may_go:
                self._unpark(parent)

    def _unpark(self, resident: Resident) -> None:
        if resident.is_held_back:
            resident.is_held_back = False
            self._queued_count += 1
            self._order.put_back(resident)


def _is_beneath(resident: Resident, root: Resident) -> bool:
    """Whether `root` is among the resident's forefathers, or it itself; also where they are too many to look."""
    above: Resident | None = resident
    for _ in range(DEPTH_LOOKED_AT_MAX):
        if above is None:
            return False
        if above is root:
            return True
        above = above.parent
    return True
