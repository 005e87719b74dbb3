"""Makes the model: `python -m bench.engine.model FOLDER SHAPE`, where transformers is installed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.engine.shapes import Dtype, Shape

POSITIONS_MAX = 1 << 17


def make_model(folder: Path, shape: Shape) -> None:
    """A Llama of that shape with seeded weights, as vLLM reads it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(shape.seed)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=POSITIONS_MAX,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=False,
        dtype=shape.dtype.value,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(getattr(torch, shape.dtype.value)).save_pretrained(folder)


def shape_to_text(shape: Shape) -> str:
    """The inverse of `shape_from_text`."""
    return json.dumps({**asdict(shape), "dtype": shape.dtype.value})


def shape_from_text(text: str) -> Shape:
    """The inverse of `shape_to_text`."""
    fields = json.loads(text)
    return Shape(**{**fields, "dtype": Dtype(fields["dtype"])})


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), shape_from_text(sys.argv[2]))
