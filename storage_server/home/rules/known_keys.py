"""Keys that upstream was seen to have a short while ago, so that lookups need not ask for them again. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

KNOWN_MAX = 65_536
FORGOTTEN_MAX = 4_096


class KnownKeys:
    """At most KNOWN_MAX keys, each for `keep_s` after upstream was asked for it; the oldest leave first. An answer to a
    question that was asked before its key was forgotten is passed over: it may tell of what is gone by now.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._asked_s: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._forgotten_s: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._all_forgotten_s = -math.inf
        """Until then any key may have been forgotten: only the last FORGOTTEN_MAX are known."""

    def add(self, bucket: str, keys: Iterable[str], asked_s: float) -> None:
        """Upstream said that it has these keys when it was asked at this time."""
        for key in keys:
            name = bucket, key
            if asked_s > max(
                self._asked_s.get(name, -math.inf), self._forgotten_s.get(name, -math.inf), self._all_forgotten_s
            ):
                self._asked_s[name] = asked_s
                self._asked_s.move_to_end(name)
        while len(self._asked_s) > KNOWN_MAX:
            self._asked_s.popitem(last=False)

    def has(self, bucket: str, key: str, now_s: float) -> bool:
        """Whether upstream was asked in the last `keep_s`, and had the key."""
        asked_s = self._asked_s.get((bucket, key))
        return asked_s is not None and now_s - asked_s < self._keep_s

    def forget(self, bucket: str, keys: Sequence[str], now_s: float) -> None:
        """These keys may be gone."""
        for key in keys:
            name = bucket, key
            self._asked_s.pop(name, None)
            self._forgotten_s[name] = now_s
            self._forgotten_s.move_to_end(name)
        while len(self._forgotten_s) > FORGOTTEN_MAX:
            _, self._all_forgotten_s = self._forgotten_s.popitem(last=False)
