"""Facts about vLLM's configuration and memory that the connector needs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    iter_layer_specs,
)

from nixl_client.connectors.compute_fit import Work
from nixl_client.connectors.vllm.blocks import PagedLayer, find_packings, packed_layer, page_layers, plain_layer
from nixl_client.connectors.vllm.grid import Grid
from nixl_client.connectors.vllm.naming import Deployment, short_name
from nixl_client.connectors.vllm.options import VllmOptions
from nixl_client.connectors.vllm.weights import fingerprint

_log = logging.getLogger(__name__)
_NUMBER = re.compile(r"\d+")
_INPUT_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_INPUT_SETTINGS = (
    "mm_processor_kwargs", "media_io_kwargs", "mm_hasher_algorithm", "mm_device_do_normalize", "mm_encoder_attn_dtype",
    "video_pruning_rate", "video_pruning_method",
)  # fmt: skip
_KNOWN_SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
"""The kinds of layers whose prefixes vLLM's offloading can load."""


class UnsupportedError(Exception):
    """This engine's KV cannot be loaded layer by layer: the tier has it, in rows."""


class UncacheableError(UnsupportedError):
    """This engine's KV cannot be cached in any way; it runs as if nothing were ever stored."""


@dataclass(frozen=True, slots=True)
class CacheSetup:
    """How an engine's KV is cached: its attention, G and B, the bytes of a chunk on the rank with most layers, and the
    options, of which none is left open.
    """

    spec: FullAttentionSpec
    grid: Grid
    chunk_bytes: int
    options: VllmOptions


def cache_setup(vllm_config: Any, kv_cache_config: Any, options: VllmOptions) -> CacheSetup:
    """Raises UnsupportedError where this engine's KV cannot be cached, ValueError for options that do not fit it."""
    spec = attention_spec(vllm_config, kv_cache_config)
    found = grid(options, spec)
    size = chunk_bytes(vllm_config, kv_cache_config.kv_cache_groups[0], found)
    prompt_chunks = -(-vllm_config.model_config.max_model_len // found.chunk_tokens)
    return CacheSetup(spec, found, size, options.with_staging_for(prompt_chunks * size))


def join_log() -> None:
    """Have our lines in vLLM's log, which only its own loggers write to, unless the application has said otherwise. A
    root logger that shows warnings alone says nothing: vLLM makes one by accident, where a model has experts on CPUs.
    """
    ours, theirs, root = (logging.getLogger(name) for name in ("nixl_client", "vllm", None))
    if not ours.handlers and not (root.handlers and ours.isEnabledFor(logging.INFO)):
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = not root.handlers


def loads_ahead(vllm_config: Any) -> bool:
    """Whether a load has to be over before its request runs: where a load that fails is recomputed, and several steps
    are under way, vLLM 0.32 also takes the output of those it had already scheduled on top of the failed one.
    """
    configs = [vllm_config.kv_transfer_config]
    current = get_current_vllm_config_or_none()
    if current is not None and current.kv_transfer_config is not None:
        configs.append(current.kv_transfer_config)  # MultiConnector's own, which decides, where it made this connector
    is_recomputed = any(config.kv_load_failure_policy == "recompute" for config in configs)
    return is_recomputed and vllm_config.max_concurrent_batches > 1


def require_cacheable(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises UncacheableError where a prefix's KV is not the same bytes whenever it is computed, or vLLM does not keep
    it: prefixes that later tokens have a part in, scales that lie elsewhere, and states of the last token alone.
    """
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    cacheable = [spec for spec in specs if spec.prefix_cacheable]
    model, cache = vllm_config.model_config, vllm_config.cache_config
    is_causal = not any(getattr(spec, "non_causal", False) for spec in specs)
    unknown = sorted({type(spec).__name__ for spec in cacheable if not isinstance(spec, _KNOWN_SPECS)})
    obstacles = {
        "no layer keeps a prefix": not cacheable,
        "attention to later tokens": not is_causal or model.is_diffusion or not model.is_prefix_caching_supported,
        "scales found at run time": bool(getattr(cache, "calculate_kv_scales", False)),
        "states are kept for the last token alone, without vLLM's prefix caching": any(
            isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none" for spec in specs
        ),
        "HiSparse": getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None,
        f"layers of another kind ({', '.join(unknown)})": bool(unknown),
    }
    for what, is_there in obstacles.items():
        if is_there:
            raise UncacheableError(what)


def attention_spec(vllm_config: Any, kv_cache_config: Any) -> FullAttentionSpec:
    """The spec of the one cache group, all of whose layers are alike. Raises UncacheableError, and UnsupportedError
    where KV is not keys and values, or latents, of all tokens, each as large as all others: several groups, layers that
    do not keep every token, tokens that are spread over ranks. (Layers with a window are fine where vLLM keeps all
    their tokens, as it does with `--disable-hybrid-kv-cache-manager`.) The scheduler is shown one spec where a worker
    has several in a group: the number of tensors is the same for both, so that they agree.
    """
    require_cacheable(vllm_config, kv_cache_config)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) not in (FullAttentionSpec, MLAAttentionSpec):
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise UnsupportedError(f"groups of layers: {kinds}")
    spec: FullAttentionSpec = groups[0].kv_cache_spec
    parallel = vllm_config.parallel_config
    is_split = parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    is_packed = spec.num_head_slots is not None or spec.state_content_bytes is not None or spec.tokens_per_state != 1
    obstacles = {
        "context parallelism": is_split,
        "layers of several sizes": len(kv_cache_config.kv_cache_tensors) > 1,
        "scales of each token": spec.kv_quant_mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR),
        "packed states": is_packed,
    }
    if isinstance(spec, MLAAttentionSpec):
        obstacles["latents that are packed or padded"] = (
            spec.head_size % 2 != 0
            or spec.num_kv_heads != 1
            or spec.page_size_bytes != spec.block_size * spec.head_size * spec.dtype.itemsize
        )
        obstacles["caches of an indexer"] = spec.cache_role is SparseCacheRole.INDEXER or spec.is_index_group_leader
    else:
        obstacles["keys and values of different sizes"] = spec.head_size_v != spec.head_size
    for what, is_there in obstacles.items():
        if is_there:
            raise UnsupportedError(what)
    return spec


def grid(options: VllmOptions, spec: FullAttentionSpec) -> Grid:
    """G and B."""
    return Grid(options.chunk_tokens or spec.block_size, spec.block_size)


def chunk_bytes(vllm_config: Any, group: Any, grid: Grid) -> int:
    """Bytes of a chunk on the pipeline rank that has most layers; the scheduler's group has those of the first."""
    ranks = vllm_config.parallel_config.pipeline_parallel_size
    layer_count = len(group.layer_names)
    if ranks > 1:
        total = vllm_config.model_config.get_total_num_hidden_layers()
        spans = [get_pp_indices(total, rank, ranks) for rank in range(ranks)]
        layer_count = max(layer_count, *(end - start for start, end in spans))
    spec = group.kv_cache_spec
    return int(spec.page_size_bytes * layer_count * grid.chunk_tokens // spec.block_size)


def deployment(vllm_config: Any, group: Any, options: VllmOptions) -> Deployment:
    """The part of the keys that is the engine's: weights, configuration and all else that KV bytes depend on. `group`
    is the one cache group.
    """
    parallel, model, spec = vllm_config.parallel_config, vllm_config.model_config, group.kv_cache_spec
    config: str = model.hf_config.to_json_string(use_diff=False)
    parts = [config, f"{len(group.layer_names)} layers", f"{spec.page_size_bytes} bytes", str(model.quantization)]
    parts += inputs_name(vllm_config)
    if "longrope" in config:
        parts.append(f"max_model_len={model.max_model_len}")  # decides which factors positions are rotated with
    speculation = vllm_config.speculative_config
    if speculation is not None:
        parts.append(f"{speculation.method} {speculation.model}")  # its layers may be in the group
    if parallel.pipeline_parallel_size > 1:
        parts.append(str(envs.VLLM_PP_LAYER_PARTITION))
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Deployment(
        model=f"{options.model or weights_name(vllm_config)} {digest}",
        dtype=f"{spec.dtype} {vllm_config.cache_config.cache_dtype} {model.dtype}",
        block_tokens=spec.block_size,
        tp_size=1 if is_replicated(spec) else parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        name=model_name(vllm_config, options),
        copies=parallel.tensor_parallel_size if is_replicated(spec) else 1,
    )


def is_replicated(spec: FullAttentionSpec) -> bool:
    """Whether all tensor-parallel ranks hold the same bytes: latents of MLA, from which each makes its own heads."""
    return isinstance(spec, MLAAttentionSpec)


def model_name(vllm_config: Any, options: VllmOptions) -> str:
    """The label of the chunks."""
    return options.model or short_name(vllm_config.model_config.model)


def inputs_name(vllm_config: Any) -> list[str]:
    """All that decides how images, sound and video become embeddings, besides the weights: vLLM's hash of one says
    which it is, and not how an engine scales it. Nothing for models that read text alone.
    """
    inputs = vllm_config.model_config.multimodal_config
    if inputs is None:
        return []
    found = [f"{name}={getattr(inputs, name, None)!r}" for name in _INPUT_SETTINGS]
    for name in _INPUT_FILES:
        with contextlib.suppress(OSError):
            found.append(hashlib.sha256((_model_folder(vllm_config) / name).read_bytes()).hexdigest())
    return found


def weights_name(vllm_config: Any) -> str:
    """The fingerprint of the weights the engine has loaded; where they are not in files, the name they go by."""
    model, load = vllm_config.model_config, vllm_config.load_config
    try:
        return fingerprint(_model_folder(vllm_config))
    except OSError as error:
        _log.warning("keys are told apart by the model's name alone: %s", error)
        return f"{model.model}@{model.revision or ''} {load.load_format}"


def _model_folder(vllm_config: Any) -> Path:
    model, load = vllm_config.model_config, vllm_config.load_config
    path = Path(model.model)
    if not path.exists():
        cached = try_to_load_from_cache(model.model, "config.json", load.download_dir, model.revision)
        path = Path(cached).parent if isinstance(cached, str) else path
    return path


def lora_settings(vllm_config: Any) -> str:
    """The settings by which an engine computes otherwise with the same adapter."""
    lora = vllm_config.lora_config
    if lora is None:
        return ""
    modules = None if lora.target_modules is None else sorted(lora.target_modules)
    names = ("lora_dtype", "enable_tower_connector_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras")
    return " ".join([f"target_modules={modules}", *(f"{name}={getattr(lora, name, None)}" for name in names)])


def worker_rank(tp_size: int) -> int:
    """The rank of this worker: its pipeline rank times `tp_size`, and its tensor rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return int(get_pp_group().rank_in_group * tp_size + get_tp_group().rank_in_group)


def layer_indexes(kv_caches: dict[str, torch.Tensor]) -> dict[str, int]:
    """The place of each layer's memory by the numbers in the names, as the model runs them; layers that share another's
    memory share its place.
    """
    names = sorted(kv_caches, key=layer_order)
    places: dict[int, int] = {}
    return {name: places.setdefault(kv_caches[name].data_ptr(), len(places)) for name in names}


def layer_order(name: str) -> list[int]:
    """The numbers in a layer's name, by which the model runs them."""
    return [int(number) for number in _NUMBER.findall(name)]


def paged_layers(vllm_config: Any, spec: FullAttentionSpec, caches: list[torch.Tensor]) -> list[PagedLayer]:
    """The layers' memory. Raises UnsupportedError for a memory layout that is not known."""
    if isinstance(spec, MLAAttentionSpec):
        return _latent_layers(spec, caches)
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


def raw_layers(spec: FullAttentionSpec, caches: list[torch.Tensor]) -> list[PagedLayer]:
    """The layers' memory as it lies. Raises UnsupportedError where a block of a layer is no run of bytes."""
    try:
        return page_layers(caches, int(spec.page_size_bytes), spec.block_size)
    except ValueError as error:
        raise UnsupportedError(str(error)) from error


def _latent_layers(spec: MLAAttentionSpec, caches: list[torch.Tensor]) -> list[PagedLayer]:
    """Latents as one head, of which the first half counts as key and the second as value: the order of bytes within a
    chunk is all that comes of it.
    """
    shape = spec.block_size, spec.head_size
    for cache in caches:
        if tuple(cache.shape[1:]) not in (shape, (1, *shape)) or cache.dtype != spec.dtype:
            raise UnsupportedError(f"blocks of {tuple(cache.shape[1:])}, {shape} expected")
    return [plain_layer(cache.view(len(cache), 1, *shape)) for cache in caches]


def _cpu_write(vllm_config: Any, spec: FullAttentionSpec) -> Any:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    kind = vllm_config.cache_config.cache_dtype
    isa = _get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size, kind)

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor) -> None:
        if spec.dtype == torch.uint8:
            eight_bit = torch.float8_e5m2 if kind == "fp8_e5m2" else torch.float8_e4m3fn
            keys, values = (states.view(eight_bit).to(vllm_config.model_config.dtype) for states in (keys, values))
        blocks, heads, tokens, width = cache.shape
        halves = cache.view(blocks, heads, 2 * tokens, width // 2).chunk(2, dim=2)
        slots = torch.arange(tokens)
        ops.cpu_attn_reshape_and_cache(
            keys, values, halves[0], halves[1], slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=kind
        )

    return write


def given_out_blocks(scheduler_output: Any, block_tokens: int) -> set[int]:
    """Blocks given out for the coming step, but for those that `update_state_after_alloc` has told: their bytes may
    change, be it by zeroing, loading or computing.
    """
    blocks = set(scheduler_output.new_block_ids_to_zero or ())
    cached = scheduler_output.scheduled_cached_reqs
    requests: Iterable[tuple[str, int, Any]] = [
        *((new.req_id, new.num_computed_tokens, new.block_ids) for new in scheduler_output.scheduled_new_reqs),
        *zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True),
    ]
    with_all_blocks = {new.req_id for new in scheduler_output.scheduled_new_reqs} | cached.resumed_req_ids
    for request_id, computed_tokens, block_ids in requests:
        if block_ids is not None:
            first = computed_tokens // block_tokens if request_id in with_all_blocks else 0
            blocks.update(block_ids[0][first:])
    return blocks


def step_work(scheduler_output: Any) -> Work:
    """The work of the coming step, of all its requests."""
    cached = scheduler_output.scheduled_cached_reqs
    before = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    scheduled = scheduler_output.num_scheduled_tokens
    return Work.of((new_tokens, before.get(request_id, 0)) for request_id, new_tokens in scheduled.items())
