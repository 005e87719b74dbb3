"""News: changes of keys, reads and lookups, which wait until the thread that keeps the books takes them over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storage_server.cache.cache_set import CacheSet
from storage_server.cache.caches import entry_of
from storage_server.cache.rules.entry import Victim
from storage_server.kernel.rules.rows import KeyChange
from storage_server.planning.extent import aligned

NEWS_MAX = 16_384
NEWS_BYTES_MAX = 32 << 20
"""The keys of prefixes that wait to be noted have no more bytes; one prefix alone may have more."""
KEY_OBJECT_BYTES = 64


@dataclass(frozen=True, slots=True)
class AskedPrefix:
    """A prefix that was read, or looked up; in the latter case `matched` of its chunks were there, which are to be kept
    for `lease_s`.
    """

    bucket: str
    keys: Sequence[str]
    at: float
    matched: int | None = None
    lease_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """About how much memory its keys take."""
        return sum(map(len, self.keys)) + KEY_OBJECT_BYTES * len(self.keys)


class News:
    """Noted on the event loop and by the committer's thread, taken over by the thread of the books. `now` is the time
    of day.
    """

    def __init__(self, caches: CacheSet, now: Callable[[], float]) -> None:
        self._caches = caches
        self._now = now
        self._news: deque[KeyChange | AskedPrefix] = deque()
        self._held: deque[KeyChange | AskedPrefix] = deque()
        """Those of before `_news` that wait until the books are restored."""
        self._noted_bytes = self._drained_bytes = 0
        self._noted_count = self._drained_count = 0
        """How many prefixes came into `_news` since the start, and how many left it. The event loop counts the former,
        the thread the latter.
        """
        self.is_restored = False
        """Whether the books have what the index knew at the start."""

    def __bool__(self) -> bool:
        return bool(self._news)

    @property
    def has_changes(self) -> bool:
        """Whether objects may have come that the books do not know."""
        return not self.is_restored or any(isinstance(each, KeyChange) for each in tuple(self._news))

    @property
    def coming_bytes(self) -> int:
        """The room of objects that have come, and that the books do not know."""
        news = (*self._held, *tuple(self._news))
        return sum(aligned(each.nbytes) for each in news if isinstance(each, KeyChange))

    def note_change(self, change: KeyChange) -> None:
        """A key shows something else."""
        self._news.append(change)

    def note(self, asked: AskedPrefix) -> bool:
        """Note what was asked, in order with the changes of keys; where too much that was asked waits it is forgotten.
        Changes do not count: while a restart's objects come back they wait, and lookups must go on.
        """
        waiting_bytes = self._noted_bytes - self._drained_bytes
        if self._noted_count - self._drained_count >= NEWS_MAX:
            return False
        if waiting_bytes and waiting_bytes + asked.nbytes > NEWS_BYTES_MAX:
            return False
        self._noted_bytes += asked.nbytes
        self._noted_count += 1
        self._news.append(asked)
        return True

    def take_over(self) -> None:
        """Note the news in the books. Until the books are restored only leases: they keep what has come, and await the
        rest. Runs in the thread of the books.
        """
        while self.is_restored and self._held:
            self._news.appendleft(self._held.pop())
        while self._news:
            noted = self._news.popleft()
            if not self.is_restored and (isinstance(noted, KeyChange) or noted.matched is None):
                self._held.append(noted)
                continue
            if isinstance(noted, AskedPrefix):
                self._drained_bytes += noted.nbytes
                self._drained_count += 1
            cache = self._caches.of(noted.bucket)
            if cache is None:
                continue
            if isinstance(noted, KeyChange):
                name = (noted.bucket, noted.key)
                if noted.version is None:
                    cache.books.remove(name)
                else:
                    cache.books.put(name, entry_of(noted)._replace(used_at=self._now()))
            elif noted.matched is None:
                cache.books.use(noted.bucket, noted.keys, noted.at)
            else:
                cache.books.expected.add(noted.bucket, noted.keys, noted.matched)
                if noted.lease_s > 0:
                    cache.books.follow(noted.at)
                    cache.books.lease(noted.bucket, noted.keys[: noted.matched], noted.at + noted.lease_s)

    def not_asked(self, victims: list[Victim]) -> list[Victim]:
        """The victims that nobody has got a lease of since they were chosen, nor has used since a restart, whether the
        books know of it, or it waits to be noted. The others stay. Runs in the thread.
        """
        asked = [each for each in self._held if isinstance(each, AskedPrefix)]  # the books chose without these
        asked += [
            each
            for each in tuple(self._news)
            if isinstance(each, AskedPrefix) and (each.lease_s > 0 or not self.is_restored)
        ]
        names = {(victim.bucket, victim.key) for victim in victims}
        wanted = {
            (each.bucket, key) for each in asked for key in each.keys[: each.matched] if (each.bucket, key) in names
        }
        left: list[Victim] = []
        for victim in victims:
            cache = self._caches.of(victim.bucket)
            if cache is None or cache.is_gone(victim.key):
                left.append(victim)
            elif not cache.books.takes_back(victim):
                if (victim.bucket, victim.key) in wanted:
                    cache.books.put((victim.bucket, victim.key), victim.entry)
                else:
                    left.append(victim)
        return left
