"""A Llama small enough for every test, and what the tests ask it."""

from __future__ import annotations

import torch
import transformers

CHUNK_TOKENS = 4
CHUNKS = 6
PREFIX_TOKENS = CHUNK_TOKENS * CHUNKS
LAYERS = 4
VOCABULARY = 64
TIMEOUT_S = 20.0


def small_llama():
    """A Llama of four layers with fixed random weights."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(config).eval()


def tokens(count, seed=1):
    return torch.randint(0, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


PREFIX = tokens(PREFIX_TOKENS, seed=1)
QUESTION = tokens(5, seed=2)


def filled_cache(model, prefix=PREFIX):
    cache = transformers.DynamicCache()
    model(prefix, past_key_values=cache)
    return cache


def largest_difference(left, right):
    return float((left - right).abs().max())
