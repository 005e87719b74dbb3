"""Scenarios of the tier in vLLM's scheduler, without an engine and without a store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.base import TransferJob

from nixl_client.connectors.vllm.rowwise import over_tier
from nixl_client.connectors.vllm_tier.options import HAS_ADAPTERS
from nixl_client.connectors.vllm_tier.rules.adapters import AdapterHashes
from tests.engines.scheduled import Facts
from tests.engines.scheduled_config import Setup, cache_config, engine_config

__all__ = [
    "jobs_of_an_adapter_that_changes",
    "reset_of_a_tier",
    "stores_of_bounded_requests",
    "uses_of_an_engine_without_cards",
]
WAIT_S = 60.0


def reset_of_a_tier(folder: Path) -> Facts:
    """One request runs when the tier is renewed, another one comes later, and both have something to store: whether the
    names are new, how the lookup of before ends, and whether each store is over without the store that is not there.
    """
    with _manager(folder) as manager:
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


def uses_of_an_engine_without_cards(folder: Path, told: bool | None, is_named: bool) -> Facts:
    """No worker has left a card, and `told` is what the connector says of adapters. With `is_named` it says how
    the blocks of the request are named, too: what a lookup says, and how many chunks would be stored.
    """
    with _manager(folder, told) as manager:
        (tier,) = manager.secondary_tiers
        taken: list[Any] = []
        tier.traffic.store = taken.append
        key, context = make_offload_key(b"\1" * 32, 0), ReqContext("one")
        tier.on_new_request(context)
        if is_named:
            tier.name_blocks("one", lambda block_hash: block_hash)
        found = tier.lookup(key, context).name
        context.set_offload_key_position(key, 32)
        tier.submit_store(TransferJob(0, [key], np.arange(1), False, context))
        return [found, sum(len(job.keys) for job in taken)]


def jobs_of_an_adapter_that_changes(folder: Path) -> Facts:
    """A request stores and loads a chunk before its adapter changes and after: how many jobs went to the store each
    time, and what a lookup says in the end.
    """
    with _manager(folder, True) as manager:
        (tier,) = manager.secondary_tiers
        taken: list[Any] = []
        tier.traffic.store = tier.traffic.load = taken.append
        request, is_current = SimpleNamespace(block_hashes=[b"\1" * 32]), [True]
        key, context = make_offload_key(request.block_hashes[0], 0), ReqContext("one")
        tier.on_new_request(context)
        tier.name_blocks("one", AdapterHashes(request, lambda _: [b"\2" * 32], "sum", lambda: is_current[0]))
        context.set_offload_key_position(key, 32)
        counts = []
        for job_id in (0, 2):
            tier.submit_store(TransferJob(job_id, [key], np.arange(1), False, context))
            tier.submit_load(TransferJob(job_id + 1, [key], np.arange(1), True, context))
            counts.append(len(taken))
            is_current[0] = False
        return [*counts, tier.lookup(key, context).name]


def stores_of_bounded_requests(folder: Path, bounds: list[int | None]) -> Facts:
    """Requests with these `max_offload_tokens`, each with chunks that end after 32, 64 and 96 tokens in the slots 0, 1
    and 2: the slots that the tier would store.
    """
    with _manager(folder) as manager:
        (tier,) = manager.secondary_tiers
        taken: list[Any] = []
        tier.traffic.store = taken.append
        keys = [make_offload_key(bytes([index]) * 32, 0) for index in range(3)]
        for job_id, bound in enumerate(bounds):
            context = ReqContext(str(job_id), {} if bound is None else {"max_offload_tokens": bound})
            for index, key in enumerate(keys):
                context.set_offload_key_position(key, 32 * (index + 1))
            tier.on_new_request(context)
            tier.submit_store(TransferJob(job_id, keys, np.arange(3), False, context))
            tier.on_request_finished(context)
        return [list(job.slots) for job in taken]


@contextlib.contextmanager
def _manager(folder: Path, told: bool | None = False) -> Iterator[Any]:
    config = engine_config(folder, Setup(options={"staging_bytes": 4 << 20}))
    rows = build_offloading_config(over_tier(config), cache_config(config))
    extra = {name: value for name, value in rows.extra_config.items() if name != HAS_ADAPTERS}
    if told is not None:
        extra[HAS_ADAPTERS] = told
    manager: Any = OffloadingSpecFactory.create_spec(replace(rows, extra_config=extra)).get_manager()
    try:
        yield manager
    finally:
        manager.shutdown()
