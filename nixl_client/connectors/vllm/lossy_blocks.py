"""Which of the engine's blocks hold KV that came with a loss, or that was computed on top of such KV. It is not what
the model computes from the exact prefix, so it is never stored: others take stored chunks for exact ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from nixl_client.connectors.vllm.steps import StoreJob


class LossyBlocks:
    """At most as many as the engine has. Used by the thread that runs the model."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def loading(self, blocks: Iterable[int]) -> None:
        """These are being filled, with chunks of which any may come encoded."""
        self._blocks.update(blocks)

    def exact(self, blocks: Iterable[int]) -> None:
        """These were filled with exact chunks, or are to be computed after all."""
        self._blocks.difference_update(blocks)

    def rewritten(self, blocks: frozenset[int] | None) -> None:
        """These are going to hold something else; None: all of them."""
        if blocks is None:
            self._blocks.clear()
        else:
            self._blocks -= blocks

    def covers(self, job: StoreJob) -> bool:
        """Whether the chunks of this job, or what they were computed from, came with a loss. Then those that are
        computed from them are covered, too.
        """
        before = () if job.block_before is None else (job.block_before,)
        if self._blocks.isdisjoint((*job.chunk_range.blocks, *before)):
            return False
        self._blocks.update(job.chunk_range.blocks)
        return True
