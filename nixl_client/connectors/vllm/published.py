"""An engine publishes its chunks' names and shape, and the costs of steps and loads that its connector has fitted, in
vLLM's metrics, so that a router can ask the store for the very same chunks.

    vllm:objectcache_deployment_info{deployment="…",dtype="…",block_tokens="16",chunk_tokens="64",…} 1
    vllm:objectcache_cost_token_us 812.5
"""

from __future__ import annotations

from typing import Any

from descriptors.descriptor import Accept
from descriptors.layout import ChunkLayout
from descriptors.recompute import DeliveryCosts, PrefillCosts
from nixl_client.connectors.vllm.naming import Deployment

PUBLISHED = "published"
"""The key beside the counters. Under it are COSTS_KEY, and one of the two others: the labels of names by tokens, or of
the tier's.
"""
COSTS_KEY, DEPLOYMENT_KEY, TIER_KEY = "costs", "deployment", "tier"
DEPLOYMENT_LABELS = (
    "deployment", "dtype", "block_tokens", "tp_size", "pp_size", "num_layers", "chunk_tokens", "layer_chunk_bytes",
    "endpoint", "bucket", "accept", "element", "max_error", "max_loss", "name",
)  # fmt: skip
COSTS = {
    "token_us": "Microseconds to compute a token",
    "token_pair_us": "Microseconds for each token before it that a token attends to",
    "request_us": "Microseconds of a step, whatever it computes",
    "load_request_s": "Seconds of a load, whatever it loads",
    "load_chunk_s": "Seconds of a load for each chunk",
    "load_layer_s": "Seconds of a load for each layer",
    "load_bytes_per_s": "Bytes a second that loads have reached",
}
ADVICE = "objectcache"
LOAD_CHUNKS, HELD_TOKENS = "load_chunks", "held_tokens"
"""A router puts `{"objectcache": {"load_chunks": k, "held_tokens": h}}` into a request's `kv_transfer_params`: the
first k chunks are to be had from the engine's blocks or the store, and the rest is computed. It took the engine to hold
the first h tokens. Where the engine holds fewer, because the request has waited, the engine decides itself.
"""


def published_deployment(
    deployment: Deployment, layout: ChunkLayout, endpoint: str, bucket: str, accept: Accept | None = None
) -> dict[str, Any]:
    """The values of DEPLOYMENT_LABELS. An engine that loads ahead of its requests gives chunks of one layer, for it
    computes none while others come. The encoded chunks that the engine takes are empty texts where it takes none, or
    has no bound.
    """
    return {
        "deployment": deployment.model,
        "dtype": deployment.dtype,
        "block_tokens": deployment.block_tokens,
        "tp_size": deployment.tp_size,
        "pp_size": deployment.pp_size,
        "num_layers": layout.num_layers,
        "chunk_tokens": layout.chunk_tokens,
        "layer_chunk_bytes": layout.per_layer_chunk_bytes,
        "endpoint": endpoint,
        "bucket": bucket,
        "accept": "" if accept is None else ",".join(accept.codecs),
        "element": "" if accept is None else accept.element,
        "max_error": "" if accept is None or accept.max_error is None else accept.max_error,
        "max_loss": "" if accept is None or accept.max_loss is None else accept.max_loss,
        "name": deployment.name,
    }


def published_costs(prefill: PrefillCosts | None, loads: DeliveryCosts) -> dict[str, float]:
    """The values of COSTS; none until enough steps have been timed."""
    if prefill is None:
        return {}
    return {
        "token_us": prefill.token_us,
        "token_pair_us": prefill.token_pair_us,
        "request_us": prefill.request_us,
        "load_request_s": loads.request_s,
        "load_chunk_s": loads.chunk_s,
        "load_layer_s": loads.layer_s,
        "load_bytes_per_s": loads.bytes_per_s,
    }


def told_chunks(kv_transfer_params: object, held_tokens: int) -> int | None:
    """How many chunks a router has told an engine to use that holds so many tokens of the prompt; None where it has
    not, or took the engine to hold more.
    """
    advice = kv_transfer_params.get(ADVICE) if isinstance(kv_transfer_params, dict) else None
    if not isinstance(advice, dict):
        return None
    count, held = advice.get(LOAD_CHUNKS), advice.get(HELD_TOKENS, 0)
    if type(count) is not int or count < 0 or type(held) is not int or held > held_tokens:
        return None
    return count
