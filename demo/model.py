"""The model and what it reads: a small Llama with seeded random weights, byte-level tokens, one document."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

CHUNK_TOKENS = 16
SEED = 20260101
ATTENTION_GAIN = 2.5
"""Queries and keys are scaled by this: with the plain random ones attention is nearly uniform, and one wrong chunk
among hundreds would hardly show in the logits."""

FIRST_QUESTION = "\nQ: May I sell a modified copy?\nA:"
SECOND_QUESTION = "\nQ: Do I get a patent license too?\nA:"
_HERE = Path(__file__).parent

# attention reads grouped keys and values in place; else transformers first copies them for every query head
os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")


def make_model() -> LlamaForCausalLM:
    """The model of model.json: float32, the same weights on every run."""
    config = LlamaConfig.from_json_file(_HERE / "model.json")
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= ATTENTION_GAIN
            layer.self_attn.k_proj.weight *= ATTENTION_GAIN
    return model


def read_document(chunk_count: int) -> list[int]:
    """The document's first `chunk_count` chunks as tokens: one per byte."""
    document = (_HERE / "document.txt").read_bytes()
    tokens = chunk_count * CHUNK_TOKENS
    if tokens > len(document):
        raise ValueError(f"the document has {len(document) // CHUNK_TOKENS} chunks, {chunk_count} asked for")
    return list(document[:tokens])


def as_tokens(text: str) -> list[int]:
    """One token per byte."""
    return list(text.encode())


def logits_of_last(model: LlamaForCausalLM, tokens: list[int], cache: object = None) -> torch.Tensor:
    """Run the model on `tokens`, after what `cache` holds; the last token's logits, (vocabulary,)."""
    output = model(torch.tensor([tokens]), past_key_values=cache, logits_to_keep=1)
    return output.logits[0, -1]


def first_tokens(cache: DynamicCache, tokens: int) -> DynamicCache:
    """A copy of a cache, cut to its first `tokens` tokens."""
    copy = DynamicCache()
    for layer_index, layer in enumerate(cache.layers):
        copy.update(layer.keys[:, :, :tokens].clone(), layer.values[:, :, :tokens].clone(), layer_index)
    return copy
