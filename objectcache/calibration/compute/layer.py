"""One decoder layer with random weights, and the clock around its prefill. Needs torch (the extra `torch`).

RMSNorm, grouped-query attention, RMSNorm, SwiGLU MLP, as in Llama. Rotary embedding is left out: it is below one in a
thousand of a layer's operations. Keys and values of the cached prefix lie before those of the tokens that missed, in
one buffer, as in an engine's cache.
"""

from __future__ import annotations

import time
from enum import Enum

import torch
import torch.nn.functional as functional
from torch import Tensor

from objectcache.calibration.compute.shapes import ModelShape

WEIGHT_SPREAD = 0.02


class Device(Enum):
    """Where the layer runs."""

    CPU = "cpu"
    CUDA = "cuda"


class Dtype(Enum):
    """The number format that a layer computes in."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


_DTYPES = {Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT32: torch.float32}


class DecoderLayer:
    """Random weights of one layer, and room for keys and values of `context_max` tokens."""

    def __init__(self, shape: ModelShape, device: Device, dtype: Dtype, context_max: int, seed: int) -> None:
        self._shape, self._device, self._dtype = shape, device, _DTYPES[dtype]
        self._generator = torch.Generator(device.value).manual_seed(seed)
        query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._qkv = self._weights(query + 2 * kv, shape.hidden)
        self._out = self._weights(shape.hidden, query)
        self._gate_up = self._weights(2 * shape.intermediate, shape.hidden)
        self._down = self._weights(shape.hidden, shape.intermediate)
        self._norms = torch.ones(2, shape.hidden, device=device.value, dtype=self._dtype)
        self._cache = self._weights(2, 1, shape.kv_heads, context_max, shape.head_dim)

    def prefill_s(self, cached_tokens: int, context_tokens: int) -> float:
        """Seconds that the layer takes for the tokens after the cached prefix."""
        missed = context_tokens - cached_tokens
        hidden = self._weights(1, missed, self._shape.hidden)
        mask = self.mask(cached_tokens, context_tokens)
        self._wait()
        started_s = time.perf_counter()
        with torch.inference_mode():
            self.forward(hidden, mask, cached_tokens)
        self._wait()
        return time.perf_counter() - started_s

    def forward(self, hidden: Tensor, mask: Tensor, cached_tokens: int) -> Tensor:
        """The layer's output for the tokens after the cached prefix; shapes (1, tokens, hidden). Their keys and values
        are kept.
        """
        shape = self._shape
        missed = hidden.shape[1]
        context_tokens = cached_tokens + missed
        query_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        normed = functional.rms_norm(hidden, (shape.hidden,), self._norms[0])
        projected = functional.linear(normed, self._qkv)
        query, *new = torch.split(projected, [query_size, kv_size, kv_size], dim=-1)
        for cache, values in zip(self._cache, new, strict=True):
            cache[:, :, cached_tokens:context_tokens] = values.view(1, missed, shape.kv_heads, -1).transpose(1, 2)
        keys, values = self._cache[:, :, :, :context_tokens]
        attended = functional.scaled_dot_product_attention(
            query.view(1, missed, shape.heads, -1).transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
        )
        hidden = hidden + functional.linear(attended.transpose(1, 2).reshape(1, missed, query_size), self._out)
        normed = functional.rms_norm(hidden, (shape.hidden,), self._norms[1])
        gate, up = functional.linear(normed, self._gate_up).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, self._down)

    def mask(self, cached_tokens: int, context_tokens: int) -> Tensor:
        """Token i of those that missed sees the prefix and the tokens up to itself. On CUDA it is a description that
        the kernels know, since it would otherwise be larger than the cache.
        """
        missed = context_tokens - cached_tokens
        if self._device is Device.CUDA:
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(missed, context_tokens)
        return torch.ones(missed, context_tokens, dtype=torch.bool).tril(cached_tokens)

    def _weights(self, *size: int) -> Tensor:
        made = torch.empty(*size, device=self._device.value, dtype=self._dtype)
        return made.normal_(0, WEIGHT_SPREAD, generator=self._generator)

    def _wait(self) -> None:
        if self._device is Device.CUDA:
            torch.cuda.synchronize()


def is_present(device: Device) -> bool:
    """Whether torch can use it here."""
    return device is Device.CPU or torch.cuda.is_available()


def present_device() -> Device:
    """The device that torch would serve models on here: a GPU where there is one."""
    return Device.CUDA if is_present(Device.CUDA) else Device.CPU


def describe_device(device: Device) -> str:
    """The device's name in a report."""
    if device is Device.CUDA:
        return str(torch.cuda.get_device_name())
    return f"CPU, {torch.get_num_threads()} threads"
