"""003's tables by the orchestrator's own rules: strategies, the trace of allocations, and ten requests at once."""

from __future__ import annotations

from bench.core.show import Json
from objectcache.orchestrator.rules.admission import Admission, AdmissionSettings, Tenant, Verdict
from objectcache.orchestrator.rules.block_pool import MODEL_BLOCK_BYTES, Allocation, BlockPools, required_blocks
from objectcache.orchestrator.rules.latency_model import strategy_table

NODES = {"node-a": 62, "node-b": 62}
"""Blocks of each node in 003's trace."""
MB = 1_000_000
AT_ONCE, ACTIVE_MAX = 10, 3


def model() -> Json:
    """Strategies in ms, the steps of the allocation trace in blocks, and how many of the requests at once run."""
    strategies = [
        {
            "strategy": row.name, "average_ms": row.average_ms, "admitted_average_ms": row.admitted_average_ms,
            "p95_ms": row.p95_ms, "hit_rate": row.hit_rate, "rejection_rate": row.rejection_rate,
        }
        for row in strategy_table()
    ]  # fmt: skip
    return {"strategies": strategies, "allocations": allocations(), "at_once": at_once()}


def allocations() -> list[Json]:
    """003's trace. req-1 and req-2 run and leave 20 and 31 blocks free; req-4 ends before req-5, which needs more than
    there is even when req-4 is evicted.
    """
    pools = BlockPools(NODES)
    steps: list[Json] = []
    for request_id, required in (
        ("req-1", 42),
        ("req-2", 31),
        ("req-4", required_blocks(180 * MB, MODEL_BLOCK_BYTES)),
        ("req-5", required_blocks(600 * MB, MODEL_BLOCK_BYTES)),
    ):
        before = {node: pools.free_blocks(node) for node in NODES}
        found = pools.allocate(request_id, required)
        steps.append(
            {
                "request": request_id, "required_blocks": required, "free_before": before,
                "node": found.node if isinstance(found, Allocation) else None,
                "free_after": {node: pools.free_blocks(node) for node in NODES},
            }
        )  # fmt: skip
        if request_id == "req-4":
            pools.finish(request_id)
    return steps


def at_once() -> Json:
    """Ten requests where three run and none waits."""
    admission = Admission(AdmissionSettings(active_max=ACTIVE_MAX, queue_max=0))
    verdicts = [admission.offer(str(at), Tenant("model"), 1) for at in range(AT_ONCE)]
    return {
        "offered": AT_ONCE, "active_max": ACTIVE_MAX, "admitted": verdicts.count(Verdict.RUNS),
        "refused": verdicts.count(Verdict.REFUSED),
    }  # fmt: skip
