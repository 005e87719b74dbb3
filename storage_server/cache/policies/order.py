"""The interface of eviction policies: in which order the chunks of a cache leave.

A request names the chunks of a prefix in order. Chunk i + 1 is the child of chunk i, since its KV is of use only behind
the KV of chunk i. `EvictionPolicy` (storage_server.cache.policies.policy) keeps children before parents, pins and the
capacity; an order only knows the chunks that it has been given. A chunk with a ladder (storage_server.cache.policies.
ladder) is encoded when its turn comes, and gets another turn, until it is on the last rung.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from storage_server.cache.policies.ladder import Ladder, Rung

Key = Hashable


@dataclass(frozen=True, slots=True)
class Request:
    """The chunks of one prefix in order, and the bytes of each one. `now_s` never goes back from request to request.
    A client may say that the first `shared_count` chunks are a prefix that many prompts share, for example a system
    prompt. Chunks that may be encoded have `ladders`, which count where they are new. Raises ValueError for a key that
    is named twice, for sizes that are not positive or not one for each key, and for a `shared_count` that is no count
    of the chunks.
    """

    now_s: float
    keys: Sequence[Key]
    sizes_bytes: Sequence[int]
    shared_count: int = 0
    ladders: Mapping[Key, Ladder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(set(self.keys)) != len(self.keys):
            raise ValueError("a request names each chunk once")
        if len(self.sizes_bytes) != len(self.keys) or any(size <= 0 for size in self.sizes_bytes):
            raise ValueError("a request has one positive size for each chunk")
        if not 0 <= self.shared_count <= len(self.keys):
            raise ValueError("the shared chunks are some of the request's chunks")


class Former(NamedTuple):
    """A resident of before a restart: when it was used last, how often in all, and the chunk that it was used behind,
    None where that is not known. Of one that `is_shared` a client has said that many prompts begin with it. `ladder` is
    empty for one that is not encoded.
    """

    key: Key
    nbytes: int
    used_at_s: float
    use_count: int = 1
    parent: Key | None = None
    is_shared: bool = False
    ladder: Ladder = ()


class Resident:
    """A chunk in the cache."""

    __slots__ = (
        "child_count", "is_asked", "is_held_back", "is_resident", "key", "ladder", "nbytes", "parent", "pin_count",
        "pinned_child_count", "rung_number",
    )  # fmt: skip

    def __init__(self, key: Key, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.ladder: Ladder = ()
        """The forms through which it goes, if it is encoded at all."""
        self.rung_number = 0
        self.parent: Resident | None = None
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
    def rung(self) -> Rung | None:
        """Its form; None for one without a ladder."""
        return self.ladder[self.rung_number] if self.ladder else None

    @property
    def next_rung(self) -> Rung | None:
        """The form to which it goes on; None where it leaves."""
        after = self.rung_number + 1
        return self.ladder[after] if after < len(self.ladder) else None

    @property
    def may_go(self) -> bool:
        """Its next step may be taken: nobody reads it, and nothing resident needs it, or it is only encoded."""
        if self.pin_count or self.is_asked:
            return False
        return not self.child_count or (bool(self.ladder) and self.next_rung is not None)


class EvictionOrder(ABC):
    """Says which chunk leaves next. Every resident is queued here, but for those that `take_next` or `take` took."""

    capacity_bytes = 0
    """The capacity of the cache whose order this is."""

    def made(self, key: Key, nbytes: int) -> Resident:
        """A resident for a chunk of which `note` or `note_former` was told."""
        return Resident(key, nbytes)

    def note(self, request: Request) -> None:  # noqa: B027 - only some orders look at whole requests
        """See a request before its chunks are used."""

    def note_former(self, former: Former, now_s: float, child_count: int) -> None:  # noqa: B027 - as `note`
        """See a former resident before it is queued: so many of its children have come before it."""

    def end_restore(self) -> None:  # noqa: B027 - as `note`
        """All former residents have come."""

    @abstractmethod
    def admit(self, resident: Resident, position: int) -> None:
        """Queue a new chunk, which is the request's chunk `position`."""

    def admit_former(self, resident: Resident, former: Former) -> None:
        """Queue a former resident behind those that were used earlier."""
        self.admit(resident, 0)

    @abstractmethod
    def use(self, resident: Resident, position: int) -> None:
        """Note that a queued chunk is used again."""

    @abstractmethod
    def take_next(self) -> Resident:
        """Take the chunk out of its queue that is to leave next. There is one in a queue."""

    @abstractmethod
    def take(self, resident: Resident) -> None:
        """Take a chunk out of its queue, wherever in it."""

    @abstractmethod
    def put_back(self, resident: Resident) -> None:
        """Queue a chunk again that `take_next` or `take` took, so that it is the next one of its queue."""

    @abstractmethod
    def put_behind(self, resident: Resident) -> None:
        """Queue a chunk again that `take_next` took and that has been encoded, so that it gets another turn."""

    def left(self, resident: Resident) -> None:  # noqa: B027 - only some orders remember
        """Remember what has left, where the order does so."""
