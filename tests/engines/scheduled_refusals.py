"""Scenarios of engines that cannot be served, or that must not share keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec

from nixl_client.connectors.vllm import engine as engine_module
from nixl_client.connectors.vllm.connector import ObjectCacheConnector
from nixl_client.connectors.vllm.options import VllmOptions
from tests.engines.messages import Json
from tests.engines.scheduled import PREFIX, Facts, scheduled
from tests.engines.scheduled_config import Setup, cache_config, engine_config

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

__all__ = [
    "changed_rope",
    "latents_with_an_indexer",
    "long_rope",
    "may_sleep",
    "started",
    "unsupported_model",
    "unsupported_spec",
    "with_small_staging",
]
QUANTIZED = "quantized"


def started(folder: Path, policy: str, is_async: bool, pipeline_size: int, is_below_multi: bool) -> Facts:
    """A worker's connector is made, as vLLM does; whether it loads ahead of requests."""
    peer: dict[str, Json] | None = {"request_id": "", "tokens": 0, "is_async": False} if is_below_multi else None
    arguments: dict[str, Json] = {"pipeline_parallel_size": pipeline_size, "distributed_executor_backend": "mp"}
    config = engine_config(folder, Setup(policy, arguments=arguments, peer=peer, is_async=is_async))
    with set_current_vllm_config(config):
        made = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config(config))
    mine = made._connectors[1] if is_below_multi else made
    is_ahead: bool = mine._is_ahead
    return is_ahead


def may_sleep(folder: Path) -> Facts:
    """The answer to vLLM 0.33, which asks before it lets an engine sleep."""
    return ObjectCacheConnector.supports_sleep_mode(None)


def with_small_staging(folder: Path, staging_bytes: int) -> Facts:
    """Staging of so many bytes; what the scheduler's connector raises, if anything."""
    try:
        with scheduled(folder, Setup(options={"staging_bytes": staging_bytes})) as engine:
            engine.fill_store()
            engine.add("A", (*PREFIX, 1))
            return engine.run().loads
    except ValueError as error:
        return str(error)


def long_rope(folder: Path, lengths: list[int], name: str) -> Facts:
    """Namespaces of engines that differ in max_model_len, of a model that then rotates positions by other factors."""
    rope: dict[str, Json] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 32,
        "long_factor": [3.0] * 32,
        "original_max_position_embeddings": 1024,
    }
    return [_namespace(folder, name, rope, length) for length in lengths]


def changed_rope(folder: Path, thetas: list[float], name: str) -> Facts:
    """Namespaces of engines that are told another rope_theta each."""
    return [_namespace(folder, name, {"rope_type": "default", "rope_theta": theta}, 2048) for theta in thetas]


def unsupported_spec(folder: Path, name: str, value: Any) -> Facts:
    """Why an engine whose cache has this in its spec is not served."""
    if name == "kv_quant_mode":
        value = KVQuantMode[value]
    config = engine_config(folder, Setup())
    return _refusal(config, cache_config(config, **{name: value}))


def latents_with_an_indexer(folder: Path) -> Facts:
    """Why a worker and the scheduler load KV of two sizes in one group not layer by layer, and whether it is cached."""
    config = engine_config(folder, Setup())
    config.cache_config.kv_cache_layout = "LBHNC"
    sizes: dict[str, tuple[int, torch.dtype]] = {"attn": (576, torch.bfloat16), "indexer": (132, torch.uint8)}
    specs = {
        f"layers.{index}.{name}": MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=size, dtype=dtype)
        for index in range(2)
        for name, (size, dtype) in sizes.items()
    }
    worker = get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, specs), 1 << 30)
    found = []
    for caches in (worker, generate_scheduler_kv_cache_config([worker])):
        try:
            engine_module.attention_spec(config, caches)
        except engine_module.UnsupportedError as error:
            found.append([str(error), not isinstance(error, engine_module.UncacheableError)])
    return found


def unsupported_model(folder: Path, pooling: str) -> Facts:
    """Why an engine whose model pools in this way is not served, and whether its connector has a scheduler's part."""
    arguments: dict[str, Json] = {"runner": "pooling", "pooler_config": {"pooling_type": pooling}}
    config = engine_config(folder, Setup("fail", arguments=arguments))
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config(config))
    has_part = connector._scheduler is not None
    connector.shutdown()
    return [_refusal(config, cache_config(config)), has_part]


def _refusal(config: Any, caches: Any) -> str | None:
    try:
        engine_module.attention_spec(config, caches)
    except engine_module.UnsupportedError as error:
        return str(error)
    return None


def _namespace(folder: Path, name: str, rope: dict[str, Json], max_model_len: int) -> str:
    arguments: dict[str, Json] = {"max_model_len": max_model_len, "hf_overrides": {"rope_parameters": rope}}
    config = engine_config(folder, Setup(arguments=arguments))
    group = cache_config(config).kv_cache_groups[0]
    options = VllmOptions("http://127.0.0.1:9", "b", model=name)
    return engine_module.deployment(config, group, options).namespace(0, "", "").text()
