"""vLLM's KV connector over ObjectCache: `kv_connector` ObjectCacheConnector (`plugin` makes vLLM find this package).

The class is imported when it is asked for, so that the parts that decide can be used where vLLM is not installed.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "ObjectCacheConnector":
        from nixl_client.connectors.vllm.connector import ObjectCacheConnector

        return ObjectCacheConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
