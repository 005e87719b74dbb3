"""What can be served beside the small Llama: adapters for it, and models with windows."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engines.model import LAYERS, VOCABULARY

RANK = 8
_OUT = {"q_proj": 256, "k_proj": 128, "v_proj": 128, "o_proj": 256}


def make_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter for the small Llama, as PEFT writes it, that changes tokens."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, width in _OUT.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn((RANK, 256), generator=generator) * 0.1
            weights[f"{prefix}.lora_B.weight"] = torch.randn((width, RANK), generator=generator) * 0.1
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(_OUT),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def make_gemma(folder: Path, window: int) -> None:
    """A small Gemma 2: every second layer sees `window` tokens back."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        sliding_window=window,
        query_pre_attn_scalar=64,
        initializer_range=0.15,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(13)
        Gemma2ForCausalLM(config).save_pretrained(folder)


def make_tokenizer(folder: Path) -> None:
    """One word for each token, for servers that will not start without."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)
