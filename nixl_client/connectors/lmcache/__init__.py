"""LMCache over ObjectCache: a remote storage plug-in of its in-process mode (`ObjectCacheAdapter`), and a plug-in L2
adapter of its multiprocess server (`ObjectCacheL2Adapter`).

The classes are imported when they are asked for, so that the parts that decide can be used where LMCache is not
installed.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "ObjectCacheAdapter":
        from nixl_client.connectors.lmcache.connector import ObjectCacheAdapter

        return ObjectCacheAdapter
    if name == "ObjectCacheL2Adapter":
        from nixl_client.connectors.lmcache.l2_adapter import ObjectCacheL2Adapter

        return ObjectCacheL2Adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
