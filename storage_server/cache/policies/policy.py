"""The interface of eviction policies, and the books that every policy keeps.

A request names the chunks of a prefix in order. Chunk i + 1 is the child of chunk i, since its KV is of use only behind
the KV of chunk i. Therefore a chunk leaves only after all of its resident children have left, and the hits of a request
are the leading chunks that are resident.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Key = Hashable
DEPTH_LOOKED_AT_MAX = 4096


@dataclass(frozen=True, slots=True)
class Request:
    """The chunks of one prefix in order, and the bytes of each one. `now_s` never goes back from request to request.
    A client may say that the first `shared_count` chunks are a prefix that many prompts share, for example a system
    prompt. Raises ValueError for a key that is named twice, for sizes that are not positive or not one for each key,
    and for a `shared_count` that is no count of the chunks.
    """

    now_s: float
    keys: Sequence[Key]
    sizes_bytes: Sequence[int]
    shared_count: int = 0

    def __post_init__(self) -> None:
        if len(set(self.keys)) != len(self.keys):
            raise ValueError("a request names each chunk once")
        if len(self.sizes_bytes) != len(self.keys) or any(size <= 0 for size in self.sizes_bytes):
            raise ValueError("a request has one positive size for each chunk")
        if not 0 <= self.shared_count <= len(self.keys):
            raise ValueError("the shared chunks are some of the request's chunks")


@dataclass(frozen=True, slots=True)
class Change:
    """The changes of the cache after a request. It evicts `evicted`, children before parents, and then copies
    `admitted`, parents before children, so it holds at most `capacity_bytes` at every moment.
    """

    admitted: tuple[Key, ...]
    evicted: tuple[Key, ...]


class Former(NamedTuple):
    """A resident of before a restart: when it was used last, how often in all, and the chunk that it was used behind,
    None where that is not known. Of one that `is_shared` a client has said that many prompts begin with it.
    """

    key: Key
    nbytes: int
    used_at_s: float
    use_count: int = 1
    parent: Key | None = None
    is_shared: bool = False


class EvictionPolicy(Protocol):
    """Decides for one cache. The same calls always get the same answers."""

    @property
    def capacity_bytes(self) -> int:
        """The most that residents may take, in bytes."""
        ...

    @property
    def used_bytes(self) -> int:
        """The bytes of all residents."""
        ...

    def hit_count(self, keys: Sequence[Key]) -> int:
        """How many leading chunks are resident."""
        ...

    def request(self, request: Request) -> Change:
        """Note a request and say what changes. Raises ValueError where `now_s` goes back."""
        ...

    def restore(self, found: Iterable[Former], now_s: float) -> None:
        """Take over residents of before a restart, those first whose last use is longest ago; more may follow. Nothing
        leaves. Called before the first request. Raises ValueError for a resident.
        """
        ...

    def end_restore(self) -> None:
        """All of them have come."""
        ...

    def resize(self, capacity_bytes: int) -> tuple[Key, ...]:
        """Change the capacity. Returns what leaves, children before parents; pinned chunks stay, also where they take
        more than the capacity.
        """
        ...

    def remove(self, key: Key) -> bool:
        """Note that a chunk is not there any more, whatever the policy would have done; whether it was resident."""
        ...

    def pin(self, keys: Sequence[Key]) -> None:
        """Keep these residents until `unpin`, which is called once for each `pin`. Raises KeyError for others."""
        ...

    def unpin(self, keys: Sequence[Key]) -> None:
        """Undo `pin`. Raises KeyError for a chunk that is not pinned."""
        ...


class Resident:
    """A chunk in the cache."""

    __slots__ = (
        "child_count", "is_asked", "is_held_back", "is_resident", "key", "nbytes", "parent", "pin_count",
        "pinned_child_count",
    )  # fmt: skip

    def __init__(self, key: Key, nbytes: int, parent: Resident | None) -> None:
        self.key = key
        self.nbytes = nbytes
        self.parent = parent
        self.child_count = 0
        """Children without pins. Those with pins stay anyway; they must not keep any number of parents, too."""
        self.pinned_child_count = 0
        self.pin_count = 0
        self.is_asked = False
        """It belongs to the request that is being noted, and its turn has not come."""
        self.is_resident = True
        self.is_held_back = False
        """It was the next one to leave and had to stay. Once it may leave, it is the next one of its queue."""

    @property
    def has_children(self) -> bool:
        """With pins or without."""
        return bool(self.child_count or self.pinned_child_count)

    def become_child_of(self, parent: Resident) -> None:
        """It is none of another resident's yet."""
        self.parent = parent
        if self.pin_count:
            parent.pinned_child_count += 1
        else:
            parent.child_count += 1

    @property
    def may_leave(self) -> bool:
        """Nothing resident needs it, and nobody reads it."""
        return not (self.child_count or self.pin_count or self.is_asked)


class PrefixPolicy(ABC):
    """The books of an `EvictionPolicy`; a subclass says in which order chunks leave.

    The chunks of a request are used from the last one to the first one, so that a parent is always the more recently
    used. A chunk may reach the front of its queue while a child or a pin keeps it. It is then held back: it leaves the
    queue, and returns to the front when its last child leaves or its last pin is released. So a queue never searches
    past chunks that must stay, and the cost of a request does not grow with the number of residents.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError("a cache holds 0 bytes or more")
        self._capacity_bytes = capacity_bytes
        self._residents: dict[Key, Resident] = {}
        self._orphans: dict[Key, list[Resident]] = {}
        """Former residents whose parents have not come, by the parent."""
        self._queued_count = 0
        self._used_bytes = 0
        self._now_s = float("-inf")

    @property
    def capacity_bytes(self) -> int:
        """As in `EvictionPolicy`, like all that follows."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def hit_count(self, keys: Sequence[Key]) -> int:
        return next((count for count, key in enumerate(keys) if key not in self._residents), len(keys))

    def request(self, request: Request) -> Change:
        if request.now_s < self._now_s:
            raise ValueError("time does not go back")
        self._now_s = request.now_s
        self._note(request)
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
                self._admit(resident, position)
            else:
                self._use(resident, position)
            left += self._evicted()
        return Change(
            admitted=tuple(key for key in request.keys if key in news and key in self._residents),
            evicted=tuple(key for key in left if key not in news),
        )

    def restore(self, found: Iterable[Former], now_s: float) -> None:
        for former in found:
            if former.key in self._residents:
                raise ValueError(f"{former.key!r} is resident")
            self._note_former(former, now_s)
            resident = self._residents[former.key] = self._made(former.key, former.nbytes, None)
            self._used_bytes += former.nbytes
            self._queued_count += 1
            self._join(resident, former.parent)
            self._admit_former(resident, former)

    def end_restore(self) -> None:
        self._orphans.clear()

    def resize(self, capacity_bytes: int) -> tuple[Key, ...]:
        if capacity_bytes < 0:
            raise ValueError("a cache holds 0 bytes or more")
        self._capacity_bytes = capacity_bytes
        return tuple(self._evicted())

    def remove(self, key: Key) -> bool:
        resident = self._residents.get(key)
        if resident is None:
            return False
        if resident.is_held_back:
            resident.is_held_back = False
        else:
            self._queued_count -= 1
            self._take(resident)
        self._leave(resident)
        return True

    def pin(self, keys: Sequence[Key]) -> None:
        for resident in [self._residents[key] for key in keys]:
            if not resident.pin_count:
                self._lose_child(resident.parent)
                if resident.parent is not None:
                    resident.parent.pinned_child_count += 1
            resident.pin_count += 1

    def unpin(self, keys: Sequence[Key]) -> None:
        for key in keys:
            resident = self._residents[key]
            if not resident.pin_count:
                raise KeyError(key)
            resident.pin_count -= 1
            if not resident.pin_count and resident.parent is not None:
                resident.parent.child_count += 1
                resident.parent.pinned_child_count -= 1
            if resident.may_leave:
                self._unpark(resident)

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
                resident = self._residents[key] = self._made(key, nbytes, None)
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
        """Evict until the residents fit, or until all that remain must stay."""
        left: list[Key] = []
        while self._used_bytes > self._capacity_bytes and self._queued_count:
            resident = self._next()
            self._queued_count -= 1
            if resident.may_leave:
                self._leave(resident)
                left.append(resident.key)
            else:
                resident.is_held_back = True
        return left

    def _leave(self, resident: Resident) -> None:
        """End the stay of a chunk that is in no queue."""
        resident.is_resident = False
        del self._residents[resident.key]
        self._used_bytes -= resident.nbytes
        if not resident.pin_count:
            self._lose_child(resident.parent)
        elif resident.parent is not None:
            resident.parent.pinned_child_count -= 1
        self._left(resident)

    def _lose_child(self, parent: Resident | None) -> None:
        if parent is not None:
            parent.child_count -= 1
            if parent.may_leave:
                self._unpark(parent)

    def _unpark(self, resident: Resident) -> None:
        if resident.is_held_back:
            resident.is_held_back = False
            self._queued_count += 1
            self._return(resident)

    def _made(self, key: Key, nbytes: int, parent: Resident | None) -> Resident:
        return Resident(key, nbytes, parent)

    def _note_former(self, former: Former, now_s: float) -> None:  # noqa: B027 - as `_note`
        """See a former resident before it is queued."""

    def _admit_former(self, resident: Resident, former: Former) -> None:
        """Queue a former resident behind those that were used earlier."""
        self._admit(resident, 0)

    def _note(self, request: Request) -> None:  # noqa: B027 - only some policies look at whole requests
        """See a request before its chunks are used."""

    @abstractmethod
    def _admit(self, resident: Resident, position: int) -> None:
        """Queue a new chunk, which is the request's chunk `position`."""

    @abstractmethod
    def _use(self, resident: Resident, position: int) -> None:
        """Note that a queued chunk is used again."""

    @abstractmethod
    def _next(self) -> Resident:
        """Take the chunk out of its queue that is to leave next. There is one in a queue."""

    @abstractmethod
    def _take(self, resident: Resident) -> None:
        """Take a chunk out of its queue, wherever in it."""

    @abstractmethod
    def _return(self, resident: Resident) -> None:
        """Queue a chunk again that `_next` took, so that it is the next one of its queue."""

    def _left(self, resident: Resident) -> None:  # noqa: B027 - only some policies remember
        """Remember what has left, where the policy does so."""


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
