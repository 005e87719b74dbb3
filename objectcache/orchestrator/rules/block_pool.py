"""The block pools of several nodes: which node a request's KV fits on, and what leaves under pressure. Source: 003,
"block-based KV cache allocation" and "eviction under memory pressure".

    required = ceil(kv_bytes / block_bytes)
    best fit: of the nodes with so many free blocks, the one that has the fewest left afterwards
    none: evict the oldest inactive request, try once more, then refuse

Requests stand in the order in which they came. An active one is skipped, and so is an entry whose request has gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

MODEL_BLOCK_BYTES = 16_000_000
"""The block of 003's model, which counts in MB."""


def required_blocks(kv_bytes: int, block_bytes: int) -> int:
    """The blocks that so many bytes need."""
    return -(-kv_bytes // block_bytes)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that was considered. `leftover_blocks` is None where it has too few."""

    node: str
    free_blocks: int
    leftover_blocks: int | None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks of a node that a request has."""

    request_id: str
    node: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """No node has enough: what was required, and what each node had free and in all."""

    request_id: str
    required_blocks: int
    free_blocks: Mapping[str, int]
    total_blocks: Mapping[str, int]

    @property
    def never_fits(self) -> bool:
        """Whether even empty nodes could not take it."""
        return all(total < self.required_blocks for total in self.total_blocks.values())


@dataclass(slots=True)
class _Pool:
    total: int
    free: list[int] = field(default_factory=list)


class BlockPools:
    """The pools of all nodes, and the requests that have blocks there."""

    def __init__(self, totals: Mapping[str, int]) -> None:
        self._pools = {node: _Pool(total, list(range(total))) for node, total in totals.items()}
        self._allocations: dict[str, Allocation] = {}
        self._active: set[str] = set()
        self._order: OrderedDict[str, None] = OrderedDict()

    def free_blocks(self, node: str) -> int:
        """Blocks that nobody has."""
        return len(self._pools[node].free)

    def allocation(self, request_id: str) -> Allocation | None:
        """The blocks that a request has."""
        return self._allocations.get(request_id)

    def candidates(self, required: int) -> list[Candidate]:
        """Every node, by name, and what it would have left."""
        return [
            Candidate(node, len(pool.free), len(pool.free) - required if len(pool.free) >= required else None)
            for node, pool in sorted(self._pools.items())
        ]

    def allocate(self, request_id: str, required: int) -> Allocation | Refused:
        """Take blocks for an active request; under pressure the oldest inactive one loses its blocks. Raises ValueError
        for a request that has blocks.
        """
        if request_id in self._allocations:
            raise ValueError(f"{request_id} has blocks")
        found = self._fit(request_id, required)
        if found is None and self.evict() is not None:
            found = self._fit(request_id, required)
        if found is not None:
            return found
        free = {node: len(pool.free) for node, pool in self._pools.items()}
        return Refused(request_id, required, free, {node: pool.total for node, pool in self._pools.items()})

    def finish(self, request_id: str) -> None:
        """The request is inactive: it keeps its blocks until they are needed."""
        self._active.discard(request_id)

    def free(self, request_id: str) -> Allocation | None:
        """Give a request's blocks back."""
        allocation = self._allocations.pop(request_id, None)
        self._active.discard(request_id)
        if allocation is not None:
            pool = self._pools[allocation.node]
            pool.free = sorted([*pool.free, *allocation.blocks])
        return allocation

    def evict(self) -> Allocation | None:
        """Free the oldest inactive request's blocks; None where there is none."""
        for request_id in list(self._order):
            if request_id not in self._allocations:
                del self._order[request_id]  # freed meanwhile
            elif request_id not in self._active:
                del self._order[request_id]
                return self.free(request_id)
        return None

    def _fit(self, request_id: str, required: int) -> Allocation | None:
        fitting = [each for each in self.candidates(required) if each.leftover_blocks is not None]
        if not fitting:
            return None
        best = min(fitting, key=lambda each: (each.leftover_blocks, each.node))
        pool = self._pools[best.node]
        taken, pool.free = pool.free[:required], pool.free[required:]
        allocation = self._allocations[request_id] = Allocation(request_id, best.node, tuple(taken))
        self._active.add(request_id)
        self._order[request_id] = None
        self._order.move_to_end(request_id)
        return allocation
