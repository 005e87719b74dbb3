"""Scenarios of the tier in vLLM's scheduler, without an engine and without a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.base import TransferJob

from nixl_client.connectors.vllm.rowwise import over_tier
from tests.engines.scheduled import Facts
from tests.engines.scheduled_config import Setup, cache_config, engine_config

__all__ = ["reset_of_a_tier"]
WAIT_S = 60.0


def reset_of_a_tier(folder: Path) -> Facts:
    """One request runs when the tier is renewed, another one comes later, and both have something to store: whether the
    names are new, how the lookup of before ends, and whether each store is over without the store that is not there.
    """
    config = engine_config(folder, Setup(options={"staging_bytes": 4 << 20}))
    rows = build_offloading_config(over_tier(config), cache_config(config))
    manager: Any = OffloadingSpecFactory.create_spec(rows).get_manager()
    try:
        (tier,) = manager.secondary_tiers
        before, key = tier.space.prefix, make_offload_key(b"\1" * 32, 0)
        running, later = ReqContext("running"), ReqContext("later")
        tier.on_new_request(running)
        first = tier.lookup(key, running).name
        manager.reset_cache()
        tier.renew()
        tier.on_new_request(later)
        for job_id, context in enumerate((running, later)):
            tier.submit_store(TransferJob(job_id, [key], np.array([job_id]), False, context))
        assert tier.traffic.book.wait_idle(WAIT_S)
        ended = {result.job_id: result.success for result in tier.get_finished_jobs()}
        return [tier.space.prefix != before, first, tier.lookup(key, running).name, ended[0], ended[1]]
    finally:
        manager.shutdown()
