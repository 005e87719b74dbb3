"""One load under way: what it still brings, and how much of it is worth waiting for."""

from __future__ import annotations

import time
from dataclasses import dataclass

from descriptors.notices import Mode
from descriptors.recompute import PrefillCosts
from nixl_client.connectors.late import LoadProgress, LoadVerdict, Tail, judge, pace_s
from nixl_client.connectors.vllm.blocks import Blocks
from nixl_client.connectors.vllm.grid import Grid
from nixl_client.connectors.vllm.staging import Staging
from nixl_client.connectors.vllm.steps import LoadJob
from nixl_client.fetch.layer_fetch import LayerFetch


@dataclass(slots=True)
class ActiveLoad:
    """The fetch of a load into `staging` from byte `offset` on, begun at `began_s`. `good_blocks` of its blocks are
    still expected to be filled, out of `chunk_count` chunks. `next_layer` is the first layer that has not been copied
    into the blocks, `ready_at_s` when the layer before it was complete. Times are monotonic seconds.
    """

    job: LoadJob
    blocks: Blocks
    staging: Staging
    fetch: LayerFetch
    offset: int
    deadline_s: float
    chunk_count: int
    good_blocks: int
    began_s: float
    next_layer: int = 0
    is_retried: bool = False
    ready_at_s: float = 0.0
    first_encoded: int | None = None
    """The first chunk that came encoded in a fetch before this one, of which layers have been copied."""

    def note_forms(self, *, is_over: bool) -> int:
        """The first chunk that came encoded so far, the count of chunks where none did. Call it before the fetch is
        replaced, and when it `is_over`: only then do missing forms say that all is exact.
        """
        forms = self.fetch.forms
        found = self.chunk_count if forms is None and is_over else 0 if forms is None else forms.first_encoded
        if is_over or self.next_layer:
            self.first_encoded = found if self.first_encoded is None else min(self.first_encoded, found)
        return self.chunk_count if self.first_encoded is None else min(self.first_encoded, self.chunk_count)

    def left_s(self) -> float:
        """Seconds until the deadline, 0 past it."""
        return max(0.0, self.deadline_s - time.monotonic())

    def progress(self) -> LoadProgress:
        """How far its fetch is."""
        ready_at_s = self.fetch.ready_at_s()
        silent_s = time.monotonic() - max(ready_at_s, default=self.fetch.began_s)
        if self.fetch.mode is not Mode.LAYER_MAJOR:
            return LoadProgress(1, 1, 0.0, silent_s)
        layers = self.fetch.descriptor.num_layers
        return LoadProgress(layers, layers - len(ready_at_s), pace_s(ready_at_s), silent_s)

    def verdict(self, costs: PrefillCosts | None, grid: Grid, layer_compute_s: float) -> LoadVerdict:
        """How much of the load to wait for, in a step whose layers take `layer_compute_s` each; without `costs` all of
        it, until its deadline.
        """
        if costs is None:
            return LoadVerdict(self.chunk_count, self.left_s())
        chunk_range, chunk_tokens = self.job.chunk_range, grid.chunk_tokens
        start = chunk_range.first_chunk * chunk_tokens + chunk_range.chunk_skip
        end = min(start + chunk_range.token_count, (chunk_range.first_chunk + self.chunk_count) * chunk_tokens)
        tail = Tail(start, end, chunk_tokens, self.chunk_count)
        return judge(self.progress(), tail, costs, layer_compute_s)
