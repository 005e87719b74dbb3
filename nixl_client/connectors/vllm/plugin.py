"""The entry point `vllm.general_plugins`: all processes of vLLM know `ObjectCacheConnector` by its name.

Needs vLLM, which calls `register`.
"""

from __future__ import annotations

from contextlib import suppress

NAME = "ObjectCacheConnector"


def register() -> None:
    """Name the connector's module to vLLM, which imports it when it is asked for. May be called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(NAME, "nixl_client.connectors.vllm", NAME)
