"""The connector of models whose KV is not loaded layer by layer: vLLM's own OffloadingConnector over the tier.

Such a model has several groups of layers, and some of them keep a window or a state. vLLM takes a failed load back only
where there is one group. So a load has to be over before its request runs, and computing hides nothing of it. The tier
does just this, and its objects are the same whichever of both connectors an engine names.
"""

from __future__ import annotations

import copy
import mmap
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from nixl_client.connectors.vllm.engine import UncacheableError
from nixl_client.connectors.vllm.plugin import NAME
from nixl_client.connectors.vllm.tier_options import tier_options


class RowwiseConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """One for the scheduler and one for each worker. `vllm_config` is as `over_tier` makes it. Raises UncacheableError
    where vLLM has no rows for this engine's KV, ValueError where not one row fits into `staging_bytes`.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        try:
            rows = build_offloading_config(vllm_config, kv_cache_config)
        except (AssertionError, ValueError) as error:
            raise UncacheableError(str(error)) from error
        given, needed = rows.extra_config.get("cpu_bytes_to_use"), rows.worker_kv_bytes_per_block + mmap.PAGESIZE
        if given is not None and given // rows.parallel.world_size < needed:
            raise ValueError(f"staging_bytes: a row is of {rows.worker_kv_bytes_per_block} bytes")
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load ahead of the request; None to ask again later. A producer loads nothing."""
        if self._kv_transfer_config.is_kv_consumer:
            found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
            return found
        told: tuple[int | None, bool] = self.scheduler.get_num_new_matched_tokens(
            request, num_computed_tokens, max_num_new_tokens=0
        )
        return told

    def reset_cache(self) -> bool:
        """Have nothing of what is stored, as if the weights were others: they may be."""
        super().reset_cache()
        for tier in self.scheduler.manager.secondary_tiers:
            tier.renew()
        return True


RowwiseConnector.__name__ = NAME
"""vLLM's MultiConnector finds the statistics of a connector by the name of its class."""


def over_tier(vllm_config: Any) -> Any:
    """The engine's configuration with that of OffloadingConnector over the tier in place of our connector's. Raises
    ValueError for options that cannot be.
    """
    transfer = copy.copy(vllm_config.kv_transfer_config)
    transfer.kv_connector_extra_config = tier_options(
        transfer.kv_connector_extra_config,
        vllm_config.parallel_config.world_size,
        is_storing=transfer.is_kv_producer,
    )
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = transfer
    return changed
