"""A model and its tokenizer out of a Hugging Face folder, whose KV this package can encode; all others are refused with
the reason. Needs torch and transformers.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

CONTROL_KL_MAX = 0.01
"""From the whole text in one go to the text behind its cache. Rounding the KV to bfloat16 is 0.0001."""


class UnusableModelError(ValueError):
    """A model that cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class RealModel:
    """A model in float32, ready to answer, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any

    @property
    def tokens_max(self) -> int:
        """The longest context that the model takes, as its configuration says."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30)

    @property
    def kv_shape(self) -> tuple[int, int] | None:
        """Layers, and elements of one token's keys in a layer: KV heads times head dimension. None for a model whose
        layers have different widths. Raises UnusableModelError.
        """
        ids = torch.zeros((1, 1), dtype=torch.int64, device=self.model.device)
        with torch.inference_mode():
            told = self.model(ids, past_key_values=DynamicCache(), use_cache=True)
        layers: Any = checked_cache(told.past_key_values, 1).layers
        widths = {layer.keys.shape[1] * layer.keys.shape[3] for layer in layers}
        return (len(layers), widths.pop()) if len(widths) == 1 else None

    @property
    def has_windows(self) -> bool:
        """Whether some layers attend to the last tokens only."""
        config = self.model.config.get_text_config()
        types = getattr(config, "layer_types", None)
        if types is None:
            return getattr(config, "sliding_window", None) is not None
        return any(each != "full_attention" for each in types)


def load_real_model(name: str, device: str) -> RealModel:
    """Load a model. Raises UnusableModelError."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers, tokenizers, safetensors and json have no class for all that can be wrong
        lines = str(error).strip().splitlines()
        raise UnusableModelError(f"cannot be loaded: {lines[0] if lines else type(error).__name__}") from error
    model, told = loaded
    absent = sorted({*map(str, told["missing_keys"]), *(str(each[0]) for each in told["mismatched_keys"])})
    if absent:
        raise UnusableModelError(f"its folder lacks {len(absent)} weights, or has them in other shapes: {absent[0]}")
    model.train(False)
    return RealModel(model.to(torch.device(device)), tokenizer)


def checked_cache(cache: object, tokens: int) -> DynamicCache:
    """The cache, where it is keys and values of every token for each layer. Raises UnusableModelError."""
    layers = getattr(cache, "layers", None)
    if not isinstance(cache, DynamicCache) or not layers:
        raise UnusableModelError("it keeps states or nothing, no keys and values of every token")
    for number, layer in enumerate(layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor) or keys.dim() != 4:
            raise UnusableModelError(f"layer {number} keeps a state ({type(layer).__name__}), no keys and values")
        if keys.shape != values.shape:
            raise UnusableModelError(
                f"keys of layer {number} have {keys.shape[-1]} elements and its values {values.shape[-1]} (MLA): such "
                "chunks are not encoded"
            )
        if keys.shape[2] != tokens:
            raise UnusableModelError(f"layer {number} keeps {keys.shape[2]} of {tokens} tokens")
        if not bool(keys.isfinite().all() and values.isfinite().all()):
            raise UnusableModelError(f"the KV of layer {number} has values that are no numbers")
    return cache


def last_logits(model: PreTrainedModel, count: int) -> dict[str, int]:
    """The argument by which a model computes the logits of the last tokens only, where it has one: those of all tokens
    of a context are a gigabyte with a large vocabulary.
    """
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
