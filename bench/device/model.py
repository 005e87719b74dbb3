"""A whole Llama with random weights, prefilling after a prefix that may still be arriving. Needs torch.

RMSNorm, rotary embedding (base 500000, not stretched), grouped-query attention, SwiGLU, as in Llama 3. Queries and
keys have wider weights than trained models begin with: attention then looks at few enough tokens that wrong KV shows in
the logits, and rounding is not yet amplified from layer to layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from bench.compute.shapes import ModelShape
from bench.device.accelerator import Accelerator, DeviceError

ROTARY_BASE = 500000.0
NORM_EPSILON = 1e-5
QUERY_KEY_GAIN = 1.5
DOWN_GAIN = 0.5
MLP_TOKENS_MAX = 16384
"""Tokens that go through an MLP at once: its activations are the largest of a prefill."""
ATTENTION_ERROR_MAX = 0.02
VOCABULARIES = {"llama-3.1-8b": 128256, "deepseek-r1-7b": 152064}
"""Of the models that Tables A1 and A2 have: vocab_size of the same files as bench.compute.shapes."""
VOCABULARY_SMALL = 512


@dataclass(frozen=True, slots=True)
class _Layer:
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    norms: Tensor


class Model:
    """`tokens_max` is the longest context. Raises DeviceError where the device's attention is not what it must be."""

    def __init__(
        self,
        shape: ModelShape,
        vocabulary: int,
        accelerator: Accelerator,
        seed: int,
        tokens_max: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.shape = shape
        self.vocabulary = vocabulary
        self.accelerator = accelerator
        self.dtype = dtype
        self._generator = torch.Generator(accelerator.device).manual_seed(seed)
        self.layers = [self._layer() for _ in range(shape.num_layers)]
        self.embedding = self._weights(vocabulary, shape.hidden, math.sqrt(shape.hidden))
        self.norm = torch.ones(shape.hidden, device=accelerator.device, dtype=self.dtype)
        self.head = self._weights(vocabulary, shape.hidden, 1.0)
        self._cosines, self._sines = self._rotations(tokens_max)
        self._check_attention()

    def empty_cache(self, token_count: int) -> Tensor:
        """Keys and values of all layers, of shape (L, 2, tokens, kv_heads, head_dim)."""
        shape = self.shape
        size = (shape.num_layers, 2, token_count, shape.kv_heads, shape.head_dim)
        return torch.empty(size, device=self.accelerator.device, dtype=self.dtype)

    def random_tokens(self, token_count: int, seed: int) -> Tensor:
        """A prompt."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.vocabulary, (token_count,), generator=generator).to(self.accelerator.device)

    @torch.inference_mode()
    def prefill(
        self, tokens: Tensor, cache: Tensor, cached_tokens: int, before_attention: Callable[[int], None]
    ) -> Tensor:
        """Logits after the last of `tokens`, float32 of shape (vocabulary,). `tokens` is the whole prompt; keys and
        values of the first `cached_tokens` are in `cache` or will be once `before_attention(layer_index)` has
        returned, those of the others are put there.
        """
        shape, context = self.shape, len(tokens)
        cosines, sines = (each[cached_tokens:context].unsqueeze(1) for each in (self._cosines, self._sines))
        mask = self._mask(cached_tokens, context)
        hidden = self.embedding[tokens[cached_tokens:]]
        for layer_index, layer in enumerate(self.layers):
            keys, values = cache[layer_index, 0, :context], cache[layer_index, 1, :context]
            normed = functional.rms_norm(hidden, (shape.hidden,), layer.norms[0], NORM_EPSILON)
            query = _rotated(
                functional.linear(normed, layer.query).view(-1, shape.heads, shape.head_dim), cosines, sines
            )
            key = functional.linear(normed, layer.key).view(-1, shape.kv_heads, shape.head_dim)
            keys[cached_tokens:] = _rotated(key, cosines, sines)
            values[cached_tokens:] = functional.linear(normed, layer.value).view(-1, shape.kv_heads, shape.head_dim)
            before_attention(layer_index)
            hidden += functional.linear(_attended(query, keys, values, mask).flatten(1), layer.out)
            self._add_mlp(hidden, layer)
        last = functional.rms_norm(hidden[-1], (shape.hidden,), self.norm, NORM_EPSILON)
        return functional.linear(last, self.head).float()

    def _add_mlp(self, hidden: Tensor, layer: _Layer) -> None:
        for part in torch.split(hidden, MLP_TOKENS_MAX):
            normed = functional.rms_norm(part, (self.shape.hidden,), layer.norms[1], NORM_EPSILON)
            gated = functional.silu(functional.linear(normed, layer.gate)) * functional.linear(normed, layer.up)
            part += functional.linear(gated, layer.down)  # a view: `hidden` itself is added to

    def _mask(self, cached_tokens: int, context_tokens: int) -> Tensor:
        """As in bench.compute.layer: a description on CUDA, where the mask would be larger than the cache."""
        missed = context_tokens - cached_tokens
        if self.accelerator.device.type == "cuda":
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(missed, context_tokens)
        return torch.ones(missed, context_tokens, dtype=torch.bool).tril(cached_tokens)

    def _check_attention(self) -> None:
        """The kernel that a mask's description chooses must see what the mask says: no test without a GPU can tell."""
        shape, context, cached = self.shape, 96, 64
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        lengths = (context - cached, context, context)
        query, keys, values = (
            self._weights(length * count, shape.head_dim, 1.5 * math.sqrt(shape.head_dim)).view(
                length, count, shape.head_dim
            )
            for length, count in zip(lengths, heads, strict=True)
        )
        found = _attended(query, keys, values, self._mask(cached, context)).float()
        group = shape.heads // shape.kv_heads
        seen = torch.ones(context - cached, context, dtype=torch.bool, device=query.device).tril(cached)
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys.float().repeat_interleave(group, 1))
        weights = (scores / math.sqrt(shape.head_dim)).masked_fill(~seen, -math.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, values.float().repeat_interleave(group, 1))
        error = relative_error(found, expected)
        if not error <= ATTENTION_ERROR_MAX:
            raise DeviceError(f"attention over a prefix is off by {error:.3g} on this device")

    def _rotations(self, tokens_max: int) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float32) / self.shape.head_dim
        angles = torch.outer(torch.arange(tokens_max, dtype=torch.float32), ROTARY_BASE**-exponents)
        device = self.accelerator.device
        return angles.cos().to(device, self.dtype), angles.sin().to(device, self.dtype)

    def _layer(self) -> _Layer:
        shape = self.shape
        query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return _Layer(
            query=self._weights(query, shape.hidden, QUERY_KEY_GAIN),
            key=self._weights(kv, shape.hidden, QUERY_KEY_GAIN),
            value=self._weights(kv, shape.hidden, 1.0),
            out=self._weights(shape.hidden, query, 1.0),
            gate=self._weights(shape.intermediate, shape.hidden, 1.0),
            up=self._weights(shape.intermediate, shape.hidden, 1.0),
            down=self._weights(shape.hidden, shape.intermediate, DOWN_GAIN),
            norms=torch.ones(2, shape.hidden, device=self.accelerator.device, dtype=self.dtype),
        )

    def _weights(self, rows: int, columns: int, gain: float) -> Tensor:
        """With a gain of 1 a product with them is as large as what it is made of."""
        made = torch.empty(rows, columns, device=self.accelerator.device, dtype=self.dtype)
        return made.normal_(0, gain / math.sqrt(columns), generator=self._generator)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, Euclidean; NaN where either has one."""
    return float((found - expected).norm() / expected.norm())


def _rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Heads' first and second halves are the coordinates, as in Hugging Face's Llama; shape (tokens, heads, dim)."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def _attended(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """All of shape (tokens, heads, dim)."""
    batched_query, batched_keys, batched_values = (each.unsqueeze(0).transpose(1, 2) for each in (query, keys, values))
    attended = functional.scaled_dot_product_attention(
        batched_query, batched_keys, batched_values, attn_mask=mask, enable_gqa=True
    )
    return attended.transpose(1, 2)[0]
