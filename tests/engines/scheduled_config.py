"""Configurations of vLLM for scenarios without a model. Imported in the engines' environment only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from vllm import EngineArgs
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from bench.beds.connector_extra import extra_config
from tests.engines.messages import Json
from tests.engines.scheduled_peer import PEER

BLOCK_TOKENS = 32
LAYERS = 4
VOCABULARY = 1024


@dataclass(frozen=True, slots=True)
class Setup:
    """A scheduler to be. `options` are the connector's, `arguments` are of `vllm.EngineArgs`; `peer` is the
    configuration of another connector that is asked first.
    """

    policy: str = "recompute"
    role: str = "kv_both"
    options: Mapping[str, Json] = field(default_factory=dict)
    arguments: Mapping[str, Json] = field(default_factory=dict)
    peer: Mapping[str, Json] | None = None
    is_async: bool = False
    """Whether a step may be made before the last has ended; vLLM does so by itself except on CPUs."""
    has_quick_store: bool = True
    """Whether the scheduler waits for lookups; else for 20 ms, as it does in earnest."""


def make_config(folder: Path) -> None:
    """A model without weights: nothing is computed."""
    LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    ).save_pretrained(folder)


def engine_config(folder: Path, setup: Setup) -> Any:
    """The engine's whole configuration."""
    mine: dict[str, Any] = {
        "kv_connector": "ObjectCacheConnector",
        "kv_connector_module_path": "nixl_client.connectors.vllm",
        "kv_role": setup.role,
        "kv_connector_extra_config": extra_config({"endpoint": "http://127.0.0.1:9", "bucket": "b", **setup.options}),
    }
    if setup.peer is not None:
        connectors = [PEER | {"kv_connector_extra_config": dict(setup.peer)}, mine]
        mine = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": connectors},
        }
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "block_size": BLOCK_TOKENS,
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 16,
        "kv_transfer_config": KVTransferConfig(**mine, kv_load_failure_policy=setup.policy),
    }
    config = EngineArgs(model=str(folder), **(arguments | dict(setup.arguments))).create_engine_config()
    config.cache_config.num_gpu_blocks = 60
    config.scheduler_config.async_scheduling = setup.is_async
    return config


def cache_config(config: Any, **changed: Any) -> Any:
    """The one group of layers; `changed` are fields of its spec."""
    fields: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    group = KVCacheGroupSpec([f"layers.{index}" for index in range(LAYERS)], FullAttentionSpec(**fields, **changed))
    return KVCacheConfig(num_blocks=config.cache_config.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
