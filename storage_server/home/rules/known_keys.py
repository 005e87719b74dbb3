"""Keys that upstream was seen to have a short while ago, so that lookups need not ask for them again. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

KNOWN_MAX = 65_536


class KnownKeys:
    """At most KNOWN_MAX keys, each for `keep_s` after it was seen; the oldest leave first. Times never go back."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._seen_at: OrderedDict[tuple[str, str], float] = OrderedDict()

    def add(self, bucket: str, keys: Iterable[str], now_s: float) -> None:
        """Upstream has these keys now."""
        for key in keys:
            self._seen_at[bucket, key] = now_s
            self._seen_at.move_to_end((bucket, key))
        while len(self._seen_at) > KNOWN_MAX:
            self._seen_at.popitem(last=False)

    def has(self, bucket: str, key: str, now_s: float) -> bool:
        """Whether the key was seen in the last `keep_s`."""
        seen_at = self._seen_at.get((bucket, key))
        return seen_at is not None and now_s - seen_at < self._keep_s

    def forget(self, bucket: str, keys: Sequence[str]) -> None:
        """These keys may be gone."""
        for key in keys:
            self._seen_at.pop((bucket, key), None)
