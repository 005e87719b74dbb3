"""The ways to a first token that are compared, and how vLLM is told of each. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from descriptors.descriptor import Delivery
from descriptors.units import MIB
from nixl_client.connectors.vllm.options import LoadPolicy
from nixl_client.transport import Transport

LMCACHE_CHUNK_TOKENS = 256
"""Its default."""
WAIT_S = 120.0
STORE_QUEUE_CHUNKS = 1 << 16


class Way(Enum):
    """Names in the results."""

    RECOMPUTE = "recompute"
    OWN_BLOCKS = "own_blocks"
    LAYERWISE = "objectcache_layerwise"
    CHUNKWISE = "objectcache_chunkwise"
    ADVISED = "objectcache_advised"
    EXAMPLE = "example_connector"
    EXAMPLE_TOLD = "example_connector_told"
    LMCACHE_CPU = "lmcache_cpu"
    LMCACHE_S3 = "lmcache_s3"

    @property
    def title(self) -> str:
        """For people."""
        return self.value.replace("_", " ")


OURS = (Way.LAYERWISE, Way.CHUNKWISE)
"""Those that load all that is stored."""
CONNECTED = (*OURS, Way.ADVISED)
"""Those with our connector."""
EXAMPLES = (Way.EXAMPLE, Way.EXAMPLE_TOLD)
LMCACHES = (Way.LMCACHE_CPU, Way.LMCACHE_S3)
COMPUTING = (Way.RECOMPUTE, Way.EXAMPLE)
"""Those that compute a prompt of which a beginning is stored."""
NOTES: Mapping[Way, str] = {
    Way.RECOMPUTE: "vLLM alone, prefix caching off",
    Way.OWN_BLOCKS: "the prefix is in the engine's own blocks: what is left when loading costs nothing",
    Way.LAYERWISE: "our connector, delivery layer-major",
    Way.CHUNKWISE: "our connector, delivery chunk-major",
    Way.ADVISED: "our connector as it comes: it loads what is sooner loaded than computed, layer-major",
    Way.EXAMPLE: "vLLM's ExampleConnector as it comes: it finds whole prompts only, so that it recomputes these, and "
    "stores them before the first token",
    Way.EXAMPLE_TOLD: "the same, told the lengths of the prefixes that are stored; files in the page cache, mapped",
    Way.LMCACHE_CPU: "LMCache's own server, which engines on CPUs need, chunks of 256 tokens in its memory, which the "
    "engine maps",
    Way.LMCACHE_S3: "the same, chunks in our gateway as its S3 server, its own memory emptied before every request",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ways find things: our server, a bucket and a folder of the way's own. `prefixes` are the lengths that
    will be stored, `payload_bytes` the KV of the longest.
    """

    endpoint: str
    bucket: str
    folder: Path
    transport: Transport
    chunk_tokens: int
    prefixes: tuple[int, ...]
    payload_bytes: int
    lmcache_port: int = 0


def grain_tokens(way: Way, chunk_tokens: int) -> int:
    """Of how many tokens a hit is a multiple; `chunk_tokens` is G of our connector."""
    if way in LMCACHES:
        return LMCACHE_CHUNK_TOKENS
    return chunk_tokens if way in CONNECTED else 1


def transfer_config(way: Way, place: Place) -> dict[str, object] | None:
    """vLLM's `kv_transfer_config`; None for no connector."""
    if way in (Way.RECOMPUTE, Way.OWN_BLOCKS):
        return None
    if way in CONNECTED:
        return {
            "kv_connector": "ObjectCacheConnector",
            "kv_connector_module_path": "nixl_client.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": _our_options(way, place),
        }
    if way in EXAMPLES:
        return _example(way, place)
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": place.lmcache_port},
    }


def _example(way: Way, place: Place) -> dict[str, object]:
    extra: dict[str, object] = {"shared_storage_path": str(place.folder)}
    transfer: dict[str, object] = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    if way is Way.EXAMPLE_TOLD:
        extra["prefix_tokens"] = list(place.prefixes)
        transfer |= {
            "kv_connector": "PrefixExampleConnector",
            "kv_connector_module_path": "bench.engine.example_prefix",
        }
    return {**transfer, "kv_connector_extra_config": extra}


def _our_options(way: Way, place: Place) -> dict[str, object]:
    """Times and room so large that everything is stored before the next request; the rest is the default."""
    delivery = Delivery.CHUNK_MAJOR if way is Way.CHUNKWISE else Delivery.LAYER_MAJOR
    return {
        "endpoint": place.endpoint,
        "bucket": place.bucket,
        "transport": place.transport.value,
        "delivery": delivery.value,
        "load": (LoadPolicy.ADVISED if way is Way.ADVISED else LoadPolicy.ALL).value,
        "chunk_tokens": place.chunk_tokens,
        "staging_bytes": max(256 * MIB, place.payload_bytes),
        "load_timeout_s": WAIT_S,
        "store_wait_s": WAIT_S,
        "store_timeout_s": WAIT_S,
        "store_queue_chunks": STORE_QUEUE_CHUNKS,
    }
