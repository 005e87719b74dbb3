"""vLLM's own OffloadingConnector over the tier, under our connector's name: for models whose KV is not loaded layer by
layer, and for engines whose options name the tier.

Such a model has several groups of layers, and some of them keep a window or a state. vLLM takes a failed load back only
where there is one group. So a load has to be over before its request runs, and computing hides nothing of it. The tier
does just this, and its objects are the same whichever of both connectors an engine names. Only this one tells the tier
which adapter a request has.
"""

from __future__ import annotations

import copy
import mmap
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from nixl_client.connectors.vllm.engine import UncacheableError, lora_settings
from nixl_client.connectors.vllm.plugin import NAME, TIER_MODULE
from nixl_client.connectors.vllm.tier_options import names_tier, tier_options, without_stores
from nixl_client.connectors.vllm.weights import Adapters
from nixl_client.connectors.vllm_tier.options import HAS_ADAPTERS
from nixl_client.connectors.vllm_tier.rules.adapters import AdapterHashes, BlockNames
from nixl_client.connectors.vllm_tier.tier import ObjectCacheTier


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
        self._adapters = Adapters(lora_settings(vllm_config))

    def on_new_request(self, request: Any) -> None:
        """A request has come: the tier is told how the store names its blocks, where that is known."""
        names = self._block_names(request)
        if names is not None:
            for tier in self._tiers:
                tier.name_blocks(request.request_id, names)
        super().on_new_request(request)

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
        for tier in self._tiers:
            tier.renew()
        return True

    @property
    def _tiers(self) -> list[ObjectCacheTier]:
        """Ours among the engine's tiers."""
        return [tier for tier in self.scheduler.manager.secondary_tiers if isinstance(tier, ObjectCacheTier)]

    def _block_names(self, request: Any) -> BlockNames | None:
        """The names of the request's blocks; None where the contents of its adapter are not known."""
        lora = request.lora_request
        if lora is None:
            return lambda block_hash: block_hash
        look = partial(self._adapters.contents, lora.lora_int_id, lora.lora_name, lora.lora_path)
        contents = look()
        hasher = getattr(request, "_block_hasher", None)  # the engine's own, which no public name has
        if contents is None or hasher is None:
            return None
        return AdapterHashes(request, hasher, contents, lambda: look() == contents)


RowwiseConnector.__name__ = NAME
"""vLLM's MultiConnector finds the statistics of a connector by the name of its class."""


def over_tier(vllm_config: Any) -> Any:
    """The engine's configuration with that of OffloadingConnector over the tier in place of our connector's, or as it
    is where it names the tier. Raises ValueError for options that cannot be.
    """
    transfer = copy.copy(vllm_config.kv_transfer_config)
    extra = transfer.kv_connector_extra_config
    if names_tier(extra):
        config = {"spec_module_path": TIER_MODULE, **(extra if transfer.is_kv_producer else without_stores(extra))}
    else:
        workers = vllm_config.parallel_config.world_size
        config = tier_options(extra, workers, is_storing=transfer.is_kv_producer)
    transfer.kv_connector_extra_config = {**config, HAS_ADAPTERS: vllm_config.lora_config is not None}
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = transfer
    return changed
