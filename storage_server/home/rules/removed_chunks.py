"""Which remote copies of chunks are believed: those that were read from home after the chunk was changed last. Pure."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterable

from storage_server.home.rules.remote_entry import RemoteEntry

REMOVED_MAX = 65_536


class RemovedChunks:
    """When chunks were removed last (Unix seconds, as all times here). Copies are kept for at most `keep_s` (0: for
    ever).
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._removed: OrderedDict[tuple[str, str], float] = OrderedDict()
        self.before_s = 0.0
        """Chunks that are not remembered may have been removed until then."""

    def note(self, bucket: str, keys: Iterable[str], now_s: float) -> None:
        """These chunks have changed. A clock that is set back takes nothing from a removal that is known: copies that
        the clock saw while it was ahead are older than this one.
        """
        for key in keys:
            self._removed[bucket, key] = max(now_s, self._removed.get((bucket, key), 0.0))
            self._removed.move_to_end((bucket, key))
        while len(self._removed) > REMOVED_MAX:
            self.before_s = max(self.before_s, self._removed.popitem(last=False)[1])

    def dump(self, now_s: float) -> bytes:
        """Text for `load`, without removals that no copy is old enough for."""
        removed = [
            [bucket, key, removed_s]
            for (bucket, key), removed_s in self._removed.items()
            if not self._keep_s or now_s - removed_s < self._keep_s
        ]
        return json.dumps({"keep_s": self._keep_s, "before_s": self.before_s, "removed": removed}).encode()

    def load(self, text: bytes, now_s: float) -> None:
        """Take over what `dump` wrote before. It left out what is too old for its own `keep_s`, so with another one any
        chunk may have been removed. Times that have not come stay as they are: the clock was ahead, and copies seen
        before them are old. Raises ValueError for anything else.
        """
        try:
            fields = json.loads(text)
            keep_s, before_s = float(fields["keep_s"]), float(fields["before_s"])
            removed = list(fields["removed"])
            found = {(str(bucket), str(key)): float(removed_s) for bucket, key, removed_s in removed}
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"no removed chunks: {error!r}") from error
        if not all(map(math.isfinite, (before_s, *found.values()))):
            raise ValueError("times are numbers")
        self.before_s = before_s if keep_s == self._keep_s else max(before_s, now_s)
        for (bucket, key), removed_s in found.items():
            self.note(bucket, [key], removed_s)

    @property
    def last_s(self) -> float:
        """The latest time of a removal. Copies seen before it may not be believed."""
        return max(self.before_s, *self._removed.values(), 0.0)

    def is_believed(self, entry: RemoteEntry, now_s: float) -> bool:
        """Whether a copy is none of before a change, nor too old."""
        removed_s = max(self.before_s, self._removed.get((entry.bucket, entry.info.key), 0.0))
        age_s = now_s - entry.seen_at
        return entry.seen_at > removed_s and (not self._keep_s or -self._keep_s < age_s < self._keep_s)
