"""Which of the engine's blocks hold KV that came with a loss, or that was computed on top of such KV. It is not what
the model computes from the exact prefix, so it is never stored: others take stored chunks for exact ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from nixl_client.connectors.vllm.steps import Grown, StoreJob


class LossyBlocks:
    """At most as many as the engine has. Where a worker is not alone, others' loads may have come encoded: every load
    counts as lossy then. Loads that are ahead of their requests are told by a thread of their own, before anything is
    computed from them.
    """

    def __init__(self, *, is_alone: bool = True, is_ahead: bool = False) -> None:
        self._is_alone = is_alone
        self._is_ahead = is_ahead
        self._lock = threading.Lock()
        self._blocks: set[int] = set()
        self._new: dict[int, tuple[Grown, int]] = {}
        """The new blocks of requests whose prefixes are exact as far as they are not loaded, and their places there."""

    def begin(self, grown: Iterable[Grown], rewritten: frozenset[int] | None) -> None:
        """A step begins: requests have these new blocks, and the rewritten ones are going to hold something else; None:
        all of them.
        """
        with self._lock:
            if rewritten is None:
                self._blocks.clear()
            else:
                self._blocks -= rewritten
            self._new = {}
            for each in grown:
                if each.block_before in self._blocks:
                    self._blocks.update(each.blocks)
                else:
                    self._new.update((block, (each, at)) for at, block in enumerate(each.blocks))

    def loading(self, blocks: Sequence[int]) -> None:
        """These are being filled, with chunks of which any may come encoded. Those behind are computed from them."""
        with self._lock:
            self._blocks.update(blocks)
            self._blocks.update(self._tail(blocks[0]))

    def loaded(self, blocks: Sequence[int], exact_count: int) -> None:
        """Note that the first `exact_count` of these were filled with exact chunks. If all were, or the others are
        computed after all, what is computed from them is exact, too.
        """
        if not self._is_alone:
            return
        with self._lock:
            if self._is_ahead:
                self._blocks.difference_update(blocks[:exact_count])
            elif blocks[0] in self._new:
                is_exact = exact_count == len(blocks)
                self._blocks.difference_update(self._tail(blocks[0]) if is_exact else blocks[:exact_count])

    def covers(self, job: StoreJob) -> bool:
        """Whether any of the job's chunks came with a loss, or was computed from such."""
        with self._lock:
            return not self._blocks.isdisjoint(job.chunk_range.blocks)

    def _tail(self, block: int) -> Sequence[int]:
        """The new blocks of the request from this one on."""
        found = self._new.get(block)
        return () if found is None else found[0].blocks[found[1] :]
