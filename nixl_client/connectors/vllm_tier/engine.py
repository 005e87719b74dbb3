"""Facts about vLLM's configuration and memory that the tier's names and forms need."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

from nixl_client.connectors.vllm.engine import inputs_name, weights_name
from nixl_client.connectors.vllm.naming import short_name
from nixl_client.connectors.vllm.weights import fingerprint
from nixl_client.connectors.vllm_tier.rules.card import EngineCard
from nixl_client.connectors.vllm_tier.rules.rows import RowForm, UsedPages

_log = logging.getLogger(__name__)


def card_of(config: Any, kv_caches: Any, rank: int, cell_bytes: int) -> EngineCard | None:
    """This worker's card; None outside of a worker's set-up. `config` is vLLM's OffloadingConfig, and `cell_bytes` what
    a worker has of a row.
    """
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return None
    return _card(
        vllm_config,
        groups=tuple(_used_pages(config, kv_caches, rank, cell_bytes)),
        are_whole=tuple(_is_whole(vllm_config, group.layer_names) for group in config.groups),
    )


def card_of_pages(vllm_config: Any, page_bytes: int, page_count: int) -> EngineCard:
    """The card that the only worker would leave whose rows are so many pages, side by side, of one cache group that
    keeps every block.
    """
    pages = tuple(UsedPages(index * page_bytes, page_bytes, page_bytes, 1) for index in range(page_count))
    return _card(vllm_config, groups=(pages,), are_whole=(True,))


def _card(vllm_config: Any, groups: tuple[tuple[UsedPages, ...], ...], are_whole: tuple[bool, ...]) -> EngineCard:
    cache = vllm_config.cache_config
    return EngineCard(
        identity=_identity(vllm_config),
        name=short_name(vllm_config.model_config.model),
        platform=platform_name(),
        hashing=f"{cache.prefix_caching_hash_algo} {os.environ.get('PYTHONHASHSEED', 'unset')}",
        has_adapters=vllm_config.lora_config is not None,
        groups=groups,
        are_whole=are_whole,
    )


def _identity(vllm_config: Any) -> str:
    """A digest of the weights, and of all in the configuration that KV depends on."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    text: str = model.hf_config.to_json_string(use_diff=False)
    parts = [weights_name(vllm_config), text, str(model.quantization), f"{model.dtype} {cache.cache_dtype}"]
    parts.append(str(getattr(cache, "mamba_cache_dtype", "")) + str(getattr(cache, "mamba_ssm_cache_dtype", "")))
    parts += inputs_name(vllm_config)
    if "longrope" in text:
        parts.append(f"max_model_len={model.max_model_len}")  # decides which factors positions are rotated with
    speculation = vllm_config.speculative_config
    if speculation is not None:
        parts.append(f"{speculation.method} {speculation.model}")  # its layers are in the groups
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        parts.append(str(envs.VLLM_PP_LAYER_PARTITION))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def platform_name() -> str:
    """The kind of device. On CPUs also what decides how attention packs a block: one host's bytes are not another's."""
    if current_platform.device_type != "cpu":
        return str(current_platform.device_type)
    return (
        f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} amx={torch.cpu._is_amx_tile_supported()}"
    )


def _used_pages(config: Any, kv_caches: Any, rank: int, cell_bytes: int) -> list[tuple[UsedPages, ...]]:
    """For each group the pages that this worker's tensors have in a row (vLLM, `SharedOffloadRegion`): tensor after
    tensor, each with a page for every block of the chunk.
    """
    count = config.cache.blocks_per_chunk
    is_canonical = config.canonical_layout
    sizes = [tensor.page_size_bytes for tensor in kv_caches.tensors]
    if is_canonical:
        sizes = [0] * len(kv_caches.tensors)
        for refs in kv_caches.group_data_refs:
            for ref in refs:
                sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
    first = 0 if is_canonical else rank * cell_bytes
    starts = [first + count * sum(sizes[:index]) for index in range(len(sizes))]
    groups: list[tuple[UsedPages, ...]] = []
    for refs in kv_caches.group_data_refs:
        pages: list[UsedPages] = []
        for ref in refs:
            used = ref.mapping.canonical_page_size_bytes if is_canonical else ref.page_size_bytes
            pages.append(UsedPages(starts[ref.tensor_idx], sizes[ref.tensor_idx], used, count))
        groups.append(tuple(pages))
    return groups


def _is_whole(vllm_config: Any, layer_names: Sequence[str]) -> bool:
    """Whether each layer keeps every block of a prefix: one with a window or a state has only the last ones."""
    layers = vllm_config.compilation_config.static_forward_context
    for name in layer_names:
        layer = layers.get(name)
        spec = layer.get_kv_cache_spec(vllm_config) if layer is not None else None
        kinds = {type(spec).__name__} if spec is not None else {"unknown"}
        if not kinds <= {"FullAttentionSpec", "MLAAttentionSpec"}:
            return False
    return True


def named_weights(model: str) -> str:
    """The text that tells the weights apart where no worker has left a card: samples of their files, or the name."""
    try:
        return fingerprint(Path(model))
    except OSError:
        _log.warning("objects are told apart by the name of the model alone: set epoch where its weights change")
        return model


def even_form(config: Any, row_bytes: int) -> RowForm | None:
    """How rows are used where no worker has left a card: with one group all of a row but what fills its last page. None
    with several groups: which bytes of a row they use is not known then.
    """
    copies = 1 if config.replicated_layout else config.parallel.world_size
    used = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk * copies
    if len(config.groups) != 1 or config.canonical_layout or not 0 < used <= row_bytes:
        return None
    return RowForm.of([UsedPages(0, 0, used, 1)], row_bytes)
