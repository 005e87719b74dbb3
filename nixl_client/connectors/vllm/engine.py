"""What the connector has to know of vLLM's configuration and of its memory."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nixl_client.connectors.vllm.blocks import PagedLayer, find_packings, packed_layer, plain_layer
from nixl_client.connectors.vllm.naming import Deployment
from nixl_client.connectors.vllm.options import Options
from nixl_client.connectors.vllm.plan import Grid

_NUMBER = re.compile(r"\d+")


class UnsupportedError(Exception):
    """This engine's KV cannot be cached; it runs as if nothing were ever stored."""


def check_failure_handling(vllm_config: Any) -> None:
    """Raises ValueError where a load that fails could cost a wrong token: with asynchronous scheduling vLLM 0.32 also
    takes the output of the step it had already scheduled on top of the failed one.
    """
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if vllm_config.scheduler_config.async_scheduling and policy == "recompute":
        raise ValueError('kv_load_failure_policy "recompute" needs --no-async-scheduling')


def attention_spec(kv_cache_config: Any) -> FullAttentionSpec:
    """The spec of the one cache group. Raises UnsupportedError for models that have several, or whose layers do not
    keep every token.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise UnsupportedError(f"one group of full attention layers is supported, not {kinds}")
    spec = groups[0].kv_cache_spec
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        raise UnsupportedError("windowed attention is not supported")
    return spec


def grid(options: Options, spec: FullAttentionSpec) -> Grid:
    """G and B."""
    return Grid(options.chunk_tokens or spec.block_size, spec.block_size)


def deployment(vllm_config: Any, options: Options, spec: FullAttentionSpec) -> Deployment:
    """What the keys say about the engine. Raises UnsupportedError for context parallelism."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise UnsupportedError("context parallelism is not supported")
    model = vllm_config.model_config
    name = options.model
    if not name:
        config = model.hf_config.to_json_string(use_diff=False)
        digest = hashlib.sha256(config.encode()).hexdigest()
        name = f"{model.model}@{model.revision or ''} {model.quantization or ''} {digest}"
    return Deployment(
        model=name,
        dtype=f"{spec.dtype} {vllm_config.cache_config.cache_dtype} {model.dtype}",
        block_tokens=spec.block_size,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
    )


def worker_rank(tp_size: int) -> int:
    """Of this worker, as `Deployment.namespace` counts."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return int(get_pp_group().rank_in_group * tp_size + get_tp_group().rank_in_group)


def ordered_layers(names: list[str]) -> list[str]:
    """By the numbers in their names, as the model runs them."""
    return sorted(names, key=lambda name: [int(number) for number in _NUMBER.findall(name)])


def paged_layers(vllm_config: Any, spec: FullAttentionSpec, caches: list[torch.Tensor]) -> list[PagedLayer]:
    """The layers' memory. Raises UnsupportedError for a memory layout that is not known."""
    heads, tokens, width = spec.num_kv_heads, spec.block_size, 2 * spec.head_size
    for cache in caches:
        if tuple(cache.shape[1:]) != (heads, tokens, width) or cache.dtype != spec.dtype:
            raise UnsupportedError(f"blocks of {tuple(cache.shape[1:])}, {(heads, tokens, width)} expected")
    if caches[0].device.type != "cpu":
        return [plain_layer(cache) for cache in caches]
    try:
        write = _cpu_write(vllm_config, spec)
        packings = find_packings(tokens, heads, spec.head_size, spec.dtype, write)
        return [packed_layer(cache, packings) for cache in caches]
    except (ValueError, RuntimeError, ImportError) as error:
        raise UnsupportedError(str(error)) from error


def _cpu_write(vllm_config: Any, spec: FullAttentionSpec) -> Any:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    kind = vllm_config.cache_config.cache_dtype
    isa = _get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size, kind)

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor) -> None:
        blocks, heads, tokens, width = cache.shape
        halves = cache.view(blocks, heads, 2 * tokens, width // 2).chunk(2, dim=2)
        slots = torch.arange(tokens)
        ops.cpu_attn_reshape_and_cache(
            keys, values, halves[0], halves[1], slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=kind
        )

    return write
