"""GGUF files of tiny models with seeded weights, whose tokens are bytes, for llama.cpp."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

LAYERS, HEADS, KV_HEADS, WIDTH, HEAD_WIDTH, INNER, CONTEXT = 3, 4, 2, 64, 16, 96, 4096
BYTES = 256
SPECIAL = ["<unk>", "<s>", "</s>"]
WINDOW = 64


def make_llama(path: Path, seed: int = 1) -> None:
    """A Llama of three layers."""
    _make(path, "llama", seed, {})


def make_windowed(path: Path) -> None:
    """A Gemma 3 whose layers but the last have windows of 64 tokens."""
    _make(path, "gemma3", 1, {"windows": True})


def make_adapter(path: Path) -> None:
    """An adapter of the Llama that changes what its layers attend to."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 8.0)
    generator = np.random.default_rng(3)
    for index in range(LAYERS):
        for name, width in (("attn_k", KV_HEADS * HEAD_WIDTH), ("attn_v", KV_HEADS * HEAD_WIDTH)):
            for half, shape in (("lora_a", (4, WIDTH)), ("lora_b", (width, 4))):
                values = generator.standard_normal(shape).astype(np.float32)
                writer.add_tensor(f"blk.{index}.{name}.weight.{half}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _make(path: Path, architecture: str, seed: int, wanted: dict[str, bool]) -> None:
    writer = gguf.GGUFWriter(str(path), architecture)
    layers = 6 if wanted.get("windows") else LAYERS
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_value_length(HEAD_WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if wanted.get("windows"):
        writer.add_sliding_window(WINDOW)
    else:
        writer.add_rope_dimension_count(HEAD_WIDTH)
    tokens = [*SPECIAL, *(f"<0x{value:02X}>" for value in range(BYTES))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[6] * BYTES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    generator = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            values = 1 + 0.1 * generator.standard_normal(shape)
        else:
            values = generator.standard_normal(shape) * (0.6 if "embd" in name else 1.5) / np.sqrt(shape[-1])
        writer.add_tensor(name, values.astype(np.float32))

    add("token_embd.weight", len(tokens), WIDTH)
    add("output_norm.weight", WIDTH)
    if not wanted.get("windows"):
        add("output.weight", len(tokens), WIDTH)
    for index in range(layers):
        of = f"blk.{index}."
        add(f"{of}attn_norm.weight", WIDTH)
        add(f"{of}attn_q.weight", HEADS * HEAD_WIDTH, WIDTH)
        add(f"{of}attn_k.weight", KV_HEADS * HEAD_WIDTH, WIDTH)
        add(f"{of}attn_v.weight", KV_HEADS * HEAD_WIDTH, WIDTH)
        add(f"{of}attn_output.weight", WIDTH, HEADS * HEAD_WIDTH)
        if wanted.get("windows"):
            add(f"{of}attn_q_norm.weight", HEAD_WIDTH)
            add(f"{of}attn_k_norm.weight", HEAD_WIDTH)
            add(f"{of}post_attention_norm.weight", WIDTH)
            add(f"{of}post_ffw_norm.weight", WIDTH)
        add(f"{of}ffn_norm.weight", WIDTH)
        add(f"{of}ffn_gate.weight", INNER, WIDTH)
        add(f"{of}ffn_up.weight", INNER, WIDTH)
        add(f"{of}ffn_down.weight", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
