"""A Llama small enough for every test, models with windows and with latents, and what the tests ask them."""

from __future__ import annotations

import torch
import transformers

from nixl_client.connectors.transformers import keeping_cache

CHUNK_TOKENS = 4
CHUNKS = 6
PREFIX_TOKENS = CHUNK_TOKENS * CHUNKS
LAYERS = 4
VOCABULARY = 64
TIMEOUT_S = 20.0


WINDOW = 8
"""Tokens of a window: fewer than the prefix has."""
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": LAYERS,
}


def small_llama():
    """A Llama of four layers with fixed random weights."""
    return _seeded(transformers.LlamaConfig(**SHAPE, num_key_value_heads=2, head_dim=16))


def small_mistral():
    """A Mistral whose layers all have windows."""
    return _seeded(transformers.MistralConfig(**SHAPE, num_key_value_heads=2, head_dim=16, sliding_window=WINDOW))


def small_gemma():
    """A Gemma 3, whose first and third layer have windows."""
    kinds = ["sliding_attention", "full_attention"] * 2
    options = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": WINDOW, "pad_token_id": None}
    return _seeded(transformers.Gemma3TextConfig(**SHAPE, **options, layer_types=kinds))


def small_deepseek():
    """A DeepSeek V3 without experts, whose cache holds latents."""
    return _seeded(transformers.DeepseekV3Config(**SHAPE, **LATENTS))


def _seeded(config):
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tokens(count, seed=1):
    return torch.randint(0, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


PREFIX = tokens(PREFIX_TOKENS, seed=1)
QUESTION = tokens(5, seed=2)


def filled_cache(model, prefix=PREFIX):
    cache = keeping_cache(model.config)
    model(prefix, past_key_values=cache)
    return cache


def largest_difference(left, right):
    return float((left - right).abs().max())
