"""S3-compatible object storage that serves LLM KV caches layer by layer: the client library.

    import objectcache

    with objectcache.Client("http://127.0.0.1:9000", "kv-cache") as client:
        matched = client.lookup(objectcache.chunk_keys(namespace, tokens, 16))

A name is loaded when it is first used, so that the servers, which live below this package, load no client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from descriptors.descriptor import Accept as Accept
    from descriptors.descriptor import Delivery as Delivery
    from descriptors.descriptor import OnMissing as OnMissing
    from descriptors.errors import CallerError as CallerError
    from descriptors.errors import ChunkUnavailable as ChunkUnavailable
    from descriptors.errors import ErrorCode as ErrorCode
    from descriptors.errors import ObjectCacheError as ObjectCacheError
    from descriptors.errors import ServerError as ServerError
    from descriptors.kv_forms import KvLayout as KvLayout
    from descriptors.layout import ChunkLayout as ChunkLayout
    from descriptors.layout import slice_bytes as slice_bytes
    from descriptors.prefix_keys import Namespace as Namespace
    from descriptors.prefix_keys import chunk_keys as chunk_keys
    from nixl_client.client import Client as Client
    from nixl_client.fetch.layer_fetch import FetchResult as FetchResult
    from nixl_client.fetch.layer_fetch import Layer as Layer
    from nixl_client.fetch.layer_fetch import LayerFetch as LayerFetch
    from nixl_client.session.retries import Retries as Retries
    from nixl_client.transports.transport import Transport as Transport

from descriptors.version import __version__

_MODULES = {
    "Accept": "descriptors.descriptor",
    "CallerError": "descriptors.errors",
    "ChunkLayout": "descriptors.layout",
    "ChunkUnavailable": "descriptors.errors",
    "Client": "nixl_client.client",
    "Delivery": "descriptors.descriptor",
    "ErrorCode": "descriptors.errors",
    "FetchResult": "nixl_client.fetch.layer_fetch",
    "KvLayout": "descriptors.kv_forms",
    "Layer": "nixl_client.fetch.layer_fetch",
    "LayerFetch": "nixl_client.fetch.layer_fetch",
    "Namespace": "descriptors.prefix_keys",
    "ObjectCacheError": "descriptors.errors",
    "OnMissing": "descriptors.descriptor",
    "Retries": "nixl_client.session.retries",
    "ServerError": "descriptors.errors",
    "Transport": "nixl_client.transports.transport",
    "chunk_keys": "descriptors.prefix_keys",
    "slice_bytes": "descriptors.layout",
}
__all__ = ["__version__", *sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    """A public name from its module. Raises AttributeError for other names."""
    if name not in _MODULES:
        raise AttributeError(f"module 'objectcache' has no attribute {name!r}")
    value: Any = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
