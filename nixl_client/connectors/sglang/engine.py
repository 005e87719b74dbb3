"""Facts about SGLang's configuration and pools that the names of pages need."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from nixl_client.connectors.sglang.rules.naming import Ranks, is_replicated
from nixl_client.connectors.vllm.naming import short_name
from nixl_client.connectors.vllm.weights import fingerprint

CONFIG_BYTES_MAX = 1 << 20
ARGUMENTS = (
    "revision", "load_format", "dtype", "kv_cache_dtype", "quantization", "quantization_param_path",
    "json_model_override_args", "speculative_algorithm", "speculative_draft_model_path", "speculative_num_draft_tokens",
)  # fmt: skip
"""The arguments of the server that KV bytes depend on, beside the weights."""
GEOMETRY = (
    "layer_num", "head_num", "head_dim", "v_head_dim", "head_group_num", "kv_lora_rank", "qk_rope_head_dim",
    "kv_cache_dim", "num_mamba_layers", "temporal_state_shape", "conv_state_shapes", "temporal_dtype", "conv_dtype",
)  # fmt: skip
"""The attributes of a pool that give the shape of its pages: of two of one size, one may have more, narrower heads."""
_log = logging.getLogger(__name__)


def server_arguments() -> Any | None:
    """The arguments that this process serves with; None where there is no server."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, ValueError, AttributeError):
        return None


def engine_name(arguments: Any | None, model_name: str | None) -> str:
    """The name that people know the model by."""
    return short_name(str(getattr(arguments, "model_path", None) or model_name or "model"))


def engine_identity(arguments: Any | None, model_name: str | None, epoch: str) -> str:
    """A digest of the weights, and of all in the configuration that KV depends on."""
    if arguments is None or not getattr(arguments, "model_path", None):
        _log.warning("pages are told apart by the name of the model alone: set epoch where its weights change")
        return _digest([f"name {model_name}", epoch])
    folder = _folder(str(arguments.model_path), getattr(arguments, "revision", None))
    parts = [f"{name} {getattr(arguments, name, None)}" for name in ARGUMENTS]
    try:
        parts.append(f"weights {fingerprint(folder)}")
    except OSError as error:
        _log.warning("pages are told apart by the name of the model alone, set epoch where it changes: %s", error)
        parts.append(f"name {arguments.model_path}")
    parts.append(f"config {_config(folder)}")
    parts += [f"adapter {_adapter(path)}" for path in _adapter_paths(getattr(arguments, "lora_paths", None))]
    draft = getattr(arguments, "speculative_draft_model_path", None)
    if draft:
        try:
            parts.append(f"draft {fingerprint(_folder(str(draft), None))}")
        except OSError:
            parts.append(f"draft {draft}")
    return _digest([*parts, epoch])


def ranks_of(config: Any) -> Ranks:
    """The ranks of SGLang's HiCacheStorageConfig."""
    return Ranks(
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        cp_rank=config.attn_cp_rank,
        cp_size=config.attn_cp_size,
    )


def pool_fields(config: Any, identity: str, pool_name: str, pool: Any) -> dict[str, object]:
    """All that decides what a page of this pool means, but for its size and the part's."""
    replicated = is_replicated(pool_name, is_mla_model=config.is_mla_model, has_heads=hasattr(pool, "head_num"))
    return {
        "identity": identity,
        "class": type(pool).__name__,
        "layout": str(getattr(pool, "layout", "")),
        "dtype": str(getattr(pool, "dtype", "")),
        "format": str(getattr(pool, "storage_format_tag", None)),
        "page_tokens": int(getattr(pool, "page_size", 1) or 1),
        "geometry": [str(getattr(pool, name, None)) for name in GEOMETRY],
        "layers": [getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)],
        **ranks_of(config).fields(is_replicated=replicated),
    }


def _adapter_paths(given: Any) -> list[str]:
    """The paths of the adapters that a server starts with. SGLang tells those apart by name and path alone; others, by
    an id that it makes anew whenever it loads one. They are given as NAME=PATH, as tables, or as SGLang's own records.
    """
    paths = []
    for each in given.values() if isinstance(given, Mapping) else given or ():
        path = each.get("lora_path") if isinstance(each, Mapping) else getattr(each, "lora_path", each)
        _, separator, named = str(path).partition("=")
        paths.append(named if separator and isinstance(each, str) else str(path))
    return sorted(paths)


def _adapter(path: str) -> str:
    """A text that tells an adapter's weights from those that were there before. An adapter that cannot be looked at
    gets one that nobody else has: pages then go with the process.
    """
    try:
        return fingerprint(_folder(path, None))
    except OSError as error:
        _log.warning("an adapter cannot be told from another one at its path, so nothing is shared: %s", error)
        return uuid.uuid4().hex


def _folder(model_path: str, revision: str | None) -> Path:
    """Where the model's files lie: its path, or its place in Hugging Face's cache."""
    path = Path(model_path)
    if path.exists():
        return path
    cached = try_to_load_from_cache(model_path, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else path


def _config(folder: Path) -> str:
    """A digest of the model's configuration, which says how positions are rotated; empty where there is none."""
    try:
        with (folder / "config.json").open("rb") as file:
            return hashlib.sha256(file.read(CONFIG_BYTES_MAX)).hexdigest()
    except OSError:
        return ""


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
