"""Which of the engine's blocks hold KV that came with a loss, or that was computed on top of such KV. It is not what
the model computes from the exact prefix, so it is never stored: others take stored chunks for exact ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nixl_client.connectors.vllm.steps import Grown, StoreJob


class LossyBlocks:
    """At most as many as the engine has. Used by the thread that runs the model."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._tails: dict[int, tuple[int, ...]] = {}
        """The blocks from each new one on, of requests whose prefixes are exact as far as they are not loaded."""

    def begin(self, grown: Iterable[Grown], rewritten: frozenset[int] | None) -> None:
        """A step begins: requests have these new blocks, and the rewritten ones are going to hold something else; None:
        all of them.
        """
        if rewritten is None:
            self._blocks.clear()
        else:
            self._blocks -= rewritten
        self._tails = {}
        for each in grown:
            if each.block_before in self._blocks:
                self._blocks.update(each.blocks)
            else:
                self._tails.update((block, each.blocks[at:]) for at, block in enumerate(each.blocks))

    def loading(self, blocks: Sequence[int]) -> None:
        """These are being filled, with chunks of which any may come encoded. Those behind are computed from them."""
        self._blocks.update(blocks)
        self._blocks.update(self._tails.get(blocks[0], ()))

    def loaded(self, blocks: Sequence[int], exact_count: int) -> None:
        """Of these the first `exact_count` were filled with exact chunks. If all were, or the others are computed after
        all, so is what is computed from them.
        """
        tail = self._tails.get(blocks[0])
        if tail is not None:
            self._blocks.difference_update(tail if exact_count == len(blocks) else blocks[:exact_count])

    def covers(self, job: StoreJob) -> bool:
        """Whether any of the job's chunks came with a loss, or was computed from such."""
        return not self._blocks.isdisjoint(job.chunk_range.blocks)
