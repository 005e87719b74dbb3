"""Small seeded models of each family whose caches differ: windows beside full attention, states, latents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.model import VOCABULARY

_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def _save(folder: Path, config: Any, kind: Any, seed: int) -> None:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind(config).to(torch.float32).save_pretrained(folder)


def make_gemma3(folder: Path) -> None:
    """Gemma 3: five layers with a window, then one that sees everything."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **_COMMON, num_hidden_layers=6, sliding_window=64, query_pre_attn_scalar=64, sliding_window_pattern=6
    )
    _save(folder, config, Gemma3ForCausalLM, 19)


def make_mistral(folder: Path) -> None:
    """Mistral, as it first was: every layer has a window."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**_COMMON, num_hidden_layers=3, sliding_window=64)
    _save(folder, config, MistralForCausalLM, 41)


def make_gpt_oss(folder: Path) -> None:
    """gpt-oss: every second layer has a window; experts and sinks."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**_COMMON, num_hidden_layers=4, sliding_window=64, num_local_experts=4, num_experts_per_tok=2)
    _save(folder, config, GptOssForCausalLM, 23)


def make_qwen3_next(folder: Path) -> None:
    """Qwen3-Next: three layers with linear states, then one with attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_COMMON,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    )
    _save(folder, config, Qwen3NextForCausalLM, 29)


def make_lfm2(folder: Path) -> None:
    """Lfm2: short convolutions beside attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **{name: value for name, value in _COMMON.items() if name != "head_dim"},
        num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        conv_L_cache=3,
    )
    config.conv_dim = config.conv_dim_out = config.block_dim = (
        config.hidden_size
    )  # vLLM 0.32 reads what transformers has dropped
    _save(folder, config, Lfm2ForCausalLM, 31)


def make_deepseek(folder: Path) -> None:
    """DeepSeek-V2: a latent in place of keys and values."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        initializer_range=0.15,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        tie_word_embeddings=False,
        dtype="float32",
    )
    _save(folder, config, DeepseekV2ForCausalLM, 37)


MODELS: dict[str, Callable[[Path], None]] = {
    "gemma3": make_gemma3,
    "gpt-oss": make_gpt_oss,
    "mistral": make_mistral,
    "qwen3-next": make_qwen3_next,
    "lfm2": make_lfm2,
    "deepseek": make_deepseek,
}
