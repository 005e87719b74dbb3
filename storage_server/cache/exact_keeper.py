"""The keeper of exact chunks: the eviction policy says which of them are in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

from objectcache.adapters.threads import in_parts, let_others_run
from storage_server.cache.keeping import Copy, Keeper, TierMemory
from storage_server.cache.policies.choice import Eviction, policy_of
from storage_server.cache.policies.order import Request
from storage_server.cache.policies.policy import EvictionPolicy
from storage_server.cache.rules.residency import Key
from storage_server.planning.extent import ALIGNMENT_BYTES, Extent, aligned
from storage_server.planning.forms import Reading


class ExactKeeper(Keeper):
    """Decides by the order `eviction`."""

    def __init__(self, memory: TierMemory, eviction: Eviction = Eviction.REUSE_VALUE) -> None:
        super().__init__(memory)
        self._policy = policy_of(eviction, memory.residency.total_bytes)

    @property
    def decided_bytes(self) -> int:
        return self._policy.used_bytes

    async def decide(self, known: Mapping[Key, Extent], reading: Reading | None) -> list[Copy]:
        memory = self._memory
        admitted, evicted = await memory.in_books(partial(_requested, self._policy, known))
        await memory.evict(evicted)
        coming: list[Copy] = []
        refused: list[Key] = []
        for start, keys in in_parts(admitted):
            await let_others_run(start)
            come, refuse = memory.residency.admit(keys, known)
            coming += come
            refused += refuse
        await self.forget(refused)
        return coming

    async def forget(self, keys: Sequence[Key]) -> None:
        if keys:
            await self._memory.in_books(lambda: [self._policy.remove(key) for key in keys])


def _requested(policy: EvictionPolicy, extents: Mapping[Key, Extent]) -> tuple[list[Key], list[Key]]:
    """The extents that come, parents before children, and those that go, after this use."""
    sizes = [max(ALIGNMENT_BYTES, aligned(extent.nbytes)) for extent in extents.values()]
    change = policy.request(Request(time.monotonic(), list(extents), sizes))
    return cast("list[Key]", list(change.admitted)), cast("list[Key]", list(change.evicted))
