"""The entry point `vllm.general_plugins`: all processes of vLLM know `ObjectCacheConnector`, and the tier's spec and
class, by their names.

Needs vLLM, which calls `register`.
"""

from __future__ import annotations

from contextlib import suppress

NAME = "ObjectCacheConnector"
TIER_MODULE = "nixl_client.connectors.vllm_tier"
SPEC, TIER = "ObjectCacheTieringSpec", "ObjectCacheTier"


def register() -> None:
    """Name our modules to vLLM, which imports them when they are asked for. May be called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(NAME, "nixl_client.connectors.vllm", NAME)
    with suppress(ValueError):
        OffloadingSpecFactory.register_spec(SPEC, TIER_MODULE, SPEC)
    with suppress(ValueError):
        SecondaryTierFactory.register_tier(TIER, TIER_MODULE, TIER)
