"""Watcher: what a store tells of its keys, and asks for the bounds of its buckets. Caches are watchers."""

from __future__ import annotations

from collections.abc import Sequence

from storage_server.kernel.data.bound import Bound
from storage_server.kernel.rules.rows import Committed


class Watcher:
    """This one listens to nothing, and bounds nothing."""

    def bounds_of(self, bucket: str, *, of_part: bool = False) -> tuple[Bound, ...]:
        """The bounds of the bucket in which a body needs room; none where the bucket has no bound of its own."""
        return ()

    def note_changes(self, committed: Committed) -> None:
        """Note what has changed. Called by the committer's thread."""

    def note_read(self, bucket: str, keys: Sequence[str]) -> None:
        """Note that the chunks of a prefix, or one object, were read."""

    def before_lookup(self) -> int:
        """The `since` of `note_lookup`, asked for before the index is read."""
        return 0

    def note_lookup(self, bucket: str, keys: Sequence[str], matched: int, since: int, lease_s: float = 0.0) -> int:
        """Note that a prefix was looked up, whose first `matched` chunks are there and are to be kept for `lease_s`.
        Returns how many of them will be there. Raises ServerError(SlowDown) where no lease can be given now.
        """
        return matched

    def note_present(self, bucket: str, keys: Sequence[str], since: int, lease_s: float = 0.0) -> Sequence[int]:
        """Note that these chunks, each looked up by itself, are there and are to be kept for `lease_s`. Returns the
        positions of those that will not be there. Raises as `note_lookup` does.
        """
        return ()
