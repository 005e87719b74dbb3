"""The objects of a bounded cache that are to be replaced by encoded ones. Pure.

The policy counts what an object takes encoded from the moment when it decides so; the object is encoded behind that.

    leaving                    told: a, exact, is to be kivi8-1         the books count 288 of its 512 KiB
    put, replaced_version      a shows the encoded one                  its uses, its parent and its children stay
    may_replace says no        somebody has leased a meanwhile          it stays exact, the books count 512 KiB again
    keep, is_refused           its error was too great                  the same, and it is never encoded so
    give_up                    somebody waits for room                  it leaves, if no child of it is there
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from objectcache.kv_codecs.layer import Codec
from storage_server.cache.policies.ladder import ChunkForm, Ladder
from storage_server.cache.policies.order import Key
from storage_server.cache.policies.policy import EvictionPolicy
from storage_server.cache.rules.entry import Entry, Name, Victim

MakeLadder = Callable[[Name, ChunkForm, Collection[Codec]], Ladder]
"""The ladder of a chunk of a form, without the codecs that it was refused; empty where nothing is to be encoded."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """An object that is to be encoded with `codec`, and takes `nbytes` then. The books count that from now on."""

    bucket: str
    key: str
    entry: Entry
    codec: Codec
    nbytes: int

    @property
    def name(self) -> Name:
        """Its bucket and its key."""
        return self.bucket, self.key

    @property
    def spare_bytes(self) -> int:
        """The bytes that it takes until then, and the books do not count."""
        return self.entry.nbytes - self.nbytes


class ReplacementBook:
    """Those of one cache, whose `entries` and policy are given; `remove` has an object leave the books."""

    def __init__(
        self,
        policy: EvictionPolicy,
        entries: Mapping[Name, Entry],
        remove: Callable[[Name], None],
        ladder: MakeLadder | None,
    ) -> None:
        self._policy = policy
        self._entries = entries
        self._remove = remove
        self._make_ladder = ladder
        self._told: dict[Name, Replacement] = {}
        """Those that have not come to an end."""
        self._refused: dict[Name, tuple[Codec, ...]] = {}
        """The codecs that objects were refused: their errors were too great."""

    def ladder(self, name: Name, entry: Entry) -> Ladder:
        """The forms through which an object goes, from its present one; empty where it is not encoded."""
        if self._make_ladder is None or entry.form is None or entry.is_dirty:
            return ()
        return self._make_ladder(name, entry.form, self._refused.get(name, ()))

    def ladders_of_news(self, names: Sequence[Name]) -> dict[Key, Ladder]:
        """The ladders of those among these entries that the policy does not have yet."""
        if self._make_ladder is None:
            return {}
        news = [name for name in names if not self._policy.hit_count([name])]
        return {name: ladder for name in news if (ladder := self.ladder(name, self._entries[name]))}

    def told(self) -> list[Replacement]:
        """The objects that are to be encoded by what the policy has decided since the last call."""
        told: list[Replacement] = []
        for name in list(self._policy.encoded):
            rung = self._policy.encoded.pop(name)
            assert isinstance(name, tuple)
            bucket, key = str(name[0]), str(name[1])
            found = Replacement(bucket, key, self._entries[bucket, key], rung.codec, rung.nbytes)
            self._told[bucket, key] = found
            told.append(found)
        return told

    def may_replace(self, replacement: Replacement) -> bool:
        """Whether it is still to be encoded: its key shows the same object, and nobody has pinned or leased that. If
        not, it stays as it is.
        """
        if not self._is_told(replacement):
            return False
        entry = self._entries[replacement.name]
        if entry.version == replacement.entry.version and not entry.is_held:
            return True
        self.keep(replacement)
        return False

    def keep(self, replacement: Replacement, *, is_refused: bool = False) -> None:
        """It stays as it is, since it could not be encoded; where it is refused that codec, it is never tried again."""
        if not self._is_told(replacement):
            return
        name = replacement.name
        del self._told[name]
        if is_refused:
            self._refused[name] = (*self._refused.get(name, ()), replacement.codec)
        entry = self._entries[name]
        self._policy.offer(name, entry.nbytes, self.ladder(name, entry))

    def give_up(self, replacement: Replacement) -> Victim | None:
        """It leaves at once, since somebody waits for its room, if it may; else it stays as it is, and leaves at its
        turn.
        """
        if not self._is_told(replacement):
            return None
        name = replacement.name
        entry, resident = self._entries[name], self._policy.resident(name)
        if not (resident.child_count or resident.pin_count):
            self._remove(name)
            return Victim(*name, entry)
        del self._told[name]
        self._policy.offer(name, entry.nbytes, ())
        return None

    def end(self, name: Name) -> None:
        """Its key shows what replaced it."""
        self._told.pop(name, None)
        entry = self._entries[name]
        if self._policy.resident(name).nbytes != entry.nbytes:
            self._policy.offer(name, entry.nbytes, self.ladder(name, entry))

    def forget(self, name: Name) -> None:
        """An object has left the books."""
        self._told.pop(name, None)
        self._refused.pop(name, None)

    def _is_told(self, replacement: Replacement) -> bool:
        return self._told.get(replacement.name) is replacement
