"""A small Llama whose seeded weights are so large that attention decides tokens: wrong KV then gives wrong tokens."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 1024
LAYERS = 4
TOKEN_BYTES = LAYERS * 2 * 2 * 64 * 4
"""KV of one token: layers, key and value, heads, head dimension, float32."""
SEED = 7


def make_model(folder: Path) -> None:
    """Write it as transformers does."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        initializer_range=0.15,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
