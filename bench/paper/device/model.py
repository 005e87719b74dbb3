"""Where the model runs, and the model: a whole Llama with random weights, prefilling after a prefix that may still be
arriving. Needs torch.

Work goes in lanes beside each other, with marks between them. On CUDA a lane is a stream and a mark an event; enqueued
work is done later. The CPU does everything at once, in the calling thread: the same code runs on both, so that what is
not about speed is tested without a GPU.

RMSNorm, rotary embedding (base 500000, not stretched), grouped-query attention, SwiGLU, as in Llama 3. Queries and
keys have wider weights than trained models begin with: attention then looks at few enough tokens that wrong KV shows in
the logits, and rounding is not yet amplified from layer to layer.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from objectcache.calibration.compute.layer import Device, describe_device
from objectcache.calibration.compute.shapes import ModelShape
from objectcache.calibration.content import Bytes

REGISTER_DEFAULT = 0
"""cudaHostRegisterDefault: pinned for the context that registers it, which is the only one here."""
PRIORITY_HIGH = -1
"""The priority of streams beside the computation: the few blocks of a copy's kernel must not queue behind a matrix
product's.
"""


class DeviceError(Exception):
    """The device refused what it was asked for, or computes something else."""


Mark = float | torch.cuda.Event
"""A place in a lane's work: an event where it is done later, the time where it was done at once."""
Lane = Callable[[], AbstractContextManager[object]]
"""Work in sequence, beside that of other lanes: what a thread enqueues within it goes there."""


class Accelerator:
    """The CPU, at once and in turn. Safe from any thread; a thread that has entered no lane works in the main one."""

    def __init__(self, device: Device = Device.CPU) -> None:
        self.device = torch.device("cpu") if device is Device.CPU else torch.device("cuda", 0)
        self.title = describe_device(device)

    def lane(self) -> Lane:
        """A new one."""
        return contextlib.nullcontext

    def mark(self) -> Mark:
        """After all that the current lane has been given so far."""
        return time.perf_counter()

    def wait(self, mark: Mark) -> None:
        """What the current lane is given from now on is done after the mark. Does not block the thread."""

    def elapsed_s(self, first: Mark, last: Mark) -> float:
        """Between two marks that were both reached."""
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first

    def synchronize(self) -> None:
        """Block until every lane has done everything."""

    @contextmanager
    def pinned(self, memory: Bytes) -> Iterator[Tensor]:
        """The memory as a uint8 tensor that the device copies from by itself. Not to be given back while in use: all
        lanes are waited for at the end. Raises DeviceError.
        """
        yield torch.from_numpy(memory)


class CudaAccelerator(Accelerator):
    """The first CUDA device; the main lane is its default stream."""

    def __init__(self) -> None:
        super().__init__(Device.CUDA)

    def lane(self) -> Lane:
        return partial(torch.cuda.stream, torch.cuda.Stream(priority=PRIORITY_HIGH))  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: Mark) -> None:
        torch.cuda.current_stream().wait_event(_event(mark))

    def elapsed_s(self, first: Mark, last: Mark) -> float:
        return float(_event(first).elapsed_time(_event(last))) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    @contextmanager
    def pinned(self, memory: Bytes) -> Iterator[Tensor]:
        tensor = torch.from_numpy(memory)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), REGISTER_DEFAULT))
        if status != 0:
            raise DeviceError(f"CUDA does not pin {tensor.numel()} bytes of host memory: error {status}")
        try:
            if not tensor.is_pinned():
                raise DeviceError("torch does not see that the memory is pinned: its copies would not be asynchronous")
            yield tensor
        finally:
            torch.cuda.synchronize()
            status = int(runtime.cudaHostUnregister(tensor.data_ptr()))
            if status != 0:
                raise DeviceError(f"CUDA does not give pinned host memory back: error {status}")


@contextmanager
def opened(device: Device) -> Iterator[Accelerator]:
    """The device must be present (`calibration.compute.layer.is_present`). The CPU is used with one thread: it tries
    things out, perhaps beside other work, and threads would wait for each other at every operation.
    """
    if device is Device.CUDA:
        yield CudaAccelerator()
        return
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield Accelerator()
    finally:
        torch.set_num_threads(thread_count)


def _event(mark: Mark) -> torch.cuda.Event:
    if not isinstance(mark, torch.cuda.Event):
        raise RuntimeError("a mark of another accelerator")
    return mark


ROTARY_BASE = 500000.0
NORM_EPSILON = 1e-5
QUERY_KEY_GAIN = 1.5
DOWN_GAIN = 0.5
MLP_TOKENS_MAX = 16384
"""Tokens that go through an MLP at once: its activations are the largest of a prefill."""
ATTENTION_ERROR_MAX = 0.02
LOGITS_ERROR_MAX = 0.05
"""How far the last token's logits may be from those of the prompt computed whole: |difference| / |expected|. In
bfloat16 a product's rounding depends on how many tokens it is made for; with every cached value wrong the error is far
greater.
"""


POISON = -1
"""As 16-bit integers: not a number in bfloat16, so that whatever is computed with it shows."""
Weights = dict[str, Tensor]
"""The weights of one layer, by name."""


class Model:
    """Random weights; `tokens_max` is the longest context. Tensors no longer in use are given back to the device first.
    Raises DeviceError where the device's attention is not what it must be.
    """

    def __init__(
        self,
        shape: ModelShape,
        vocabulary: int,
        accelerator: Accelerator,
        seed: int,
        tokens_max: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
        self.shape, self.vocabulary, self.accelerator, self.dtype = shape, vocabulary, accelerator, dtype
        self._generator = torch.Generator(accelerator.device).manual_seed(seed)
        self.layers = [self._layer() for _ in range(shape.num_layers)]
        self.embedding = self._weights(vocabulary, shape.hidden, math.sqrt(shape.hidden))
        self.norm = torch.ones(shape.hidden, device=accelerator.device, dtype=self.dtype)
        self.head = self._weights(vocabulary, shape.hidden, 1.0)
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(torch.arange(tokens_max, dtype=torch.float32), ROTARY_BASE**-exponents)
        self._cosines, self._sines = (each.to(accelerator.device, dtype) for each in (angles.cos(), angles.sin()))
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
            normed = functional.rms_norm(hidden, (shape.hidden,), layer["norms"][0], NORM_EPSILON)
            query, key, value = (
                functional.linear(normed, layer[name]).view(len(normed), -1, shape.head_dim)
                for name in ("query", "key", "value")
            )
            query, keys[cached_tokens:] = (_rotated(each, cosines, sines) for each in (query, key))
            values[cached_tokens:] = value
            before_attention(layer_index)
            hidden += functional.linear(_attended(query, keys, values, mask).flatten(1), layer["out"])
            for part in torch.split(hidden, MLP_TOKENS_MAX):
                normed = functional.rms_norm(part, (shape.hidden,), layer["norms"][1], NORM_EPSILON)
                gated = functional.silu(functional.linear(normed, layer["gate"]))
                gated *= functional.linear(normed, layer["up"])
                part += functional.linear(gated, layer["down"])  # a view: `hidden` itself is added to
        last = functional.rms_norm(hidden[-1], (shape.hidden,), self.norm, NORM_EPSILON)
        return functional.linear(last, self.head).float()

    def timed_prefill(self, tokens: Tensor, cache: Tensor, cached_tokens: int) -> tuple[float, Tensor]:
        """Seconds until the first token is known to the host, and its logits; the prefix is on the device."""
        self.accelerator.synchronize()
        started_s = time.perf_counter()
        logits = self.prefill(tokens, cache, cached_tokens, lambda _: None)
        int(logits.argmax())  # waits for the device
        return time.perf_counter() - started_s, logits

    def _mask(self, cached_tokens: int, context_tokens: int) -> Tensor:
        """As in calibration.compute.layer: a description on CUDA, where the mask would be larger than the cache."""
        missed = context_tokens - cached_tokens
        if self.accelerator.device.type == "cuda":
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(missed, context_tokens)
        return torch.ones(missed, context_tokens, dtype=torch.bool).tril(cached_tokens)

    def _check_attention(self) -> None:
        """The kernel that a mask's description chooses must see what the mask says: no test without a GPU can tell."""
        shape, context, cached = self.shape, 96, 64
        gain, lengths = 1.5 * math.sqrt(shape.head_dim), (context - cached, context, context)
        query, keys, values = (
            self._weights(length * count, shape.head_dim, gain).view(length, count, shape.head_dim)
            for length, count in zip(lengths, (shape.heads, shape.kv_heads, shape.kv_heads), strict=True)
        )
        found = _attended(query, keys, values, self._mask(cached, context)).float()
        seen = torch.ones(context - cached, context, dtype=torch.bool, device=query.device).tril(cached)
        keys, values = (each.float().repeat_interleave(shape.heads // shape.kv_heads, 1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) / math.sqrt(shape.head_dim)
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), values)
        error = relative_error(found, expected)
        if not error <= ATTENTION_ERROR_MAX:
            raise DeviceError(f"attention over a prefix is off by {error:.3g} on this device")

    def _layer(self) -> Weights:
        shape = self.shape
        query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {
            "query": (query, shape.hidden, QUERY_KEY_GAIN),
            "key": (kv, shape.hidden, QUERY_KEY_GAIN),
            "value": (kv, shape.hidden, 1.0),
            "out": (shape.hidden, query, 1.0),
            "gate": (shape.intermediate, shape.hidden, 1.0),
            "up": (shape.intermediate, shape.hidden, 1.0),
            "down": (shape.hidden, shape.intermediate, DOWN_GAIN),
        }
        norms = torch.ones(2, shape.hidden, device=self.accelerator.device, dtype=self.dtype)
        return {"norms": norms, **{name: self._weights(*size) for name, size in sizes.items()}}

    def _weights(self, rows: int, columns: int, gain: float) -> Tensor:
        """With a gain of 1 a product with them is as large as what it is made of."""
        made = torch.empty(rows, columns, device=self.accelerator.device, dtype=self.dtype)
        return made.normal_(0, gain / math.sqrt(columns), generator=self._generator)


def poison(cache: Tensor) -> None:
    """Overwrite everything: what is right afterwards was loaded or computed since."""
    cache.view(torch.int16).fill_(POISON)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, Euclidean; NaN where either has one."""
    return float((found - expected).norm() / expected.norm())


def _rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Heads' first and second halves are the coordinates, as in Hugging Face's Llama; shape (tokens, heads, dim)."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def _attended(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """All of shape (tokens, heads, dim)."""
    query, keys, values = (each.unsqueeze(0).transpose(1, 2) for each in (query, keys, values))
    attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    return attended.transpose(1, 2)[0]


RECOMPUTE_RUNS = 2
RESIDENT_RUNS = 2


@dataclass(frozen=True, slots=True)
class Subject:
    """`reference` is the whole prompt's KV, `logits` what follows it, `cache` what runs fill; `recompute_s` are TTFTs
    without any cached KV, `blind_error` how far off the logits are when the values of every cached token are wrong.
    """

    model: Model
    tokens: Tensor
    cache: Tensor
    reference: Tensor
    logits: Tensor
    recompute_s: tuple[float, ...]
    blind_error: float

    def baseline(self) -> dict[str, Any]:
        """TTFTs of computing everything, and whether the logits would tell wrong values: by twice the limit."""
        shows_wrong_values = self.blind_error > 2 * LOGITS_ERROR_MAX
        found = {"recompute_s": self.recompute_s, "blind_error": self.blind_error}
        return {**found, "shows_wrong_values": shows_wrong_values}

    def logits_error(self, logits: Tensor) -> float:
        """Against those of the prompt computed whole."""
        return relative_error(logits, self.logits)

    def resident_s(self, cached_tokens: int) -> float:
        """TTFT with the prefix's KV on the device already: the median after a run that is not counted."""
        self.cache[:, :, :cached_tokens].copy_(self.reference[:, :, :cached_tokens])
        timed = [self.model.timed_prefill(self.tokens, self.cache, cached_tokens) for _ in range(RESIDENT_RUNS + 1)]
        return statistics.median(seconds for seconds, _ in timed[1:])


def make_subject(model: Model, token_count: int, blind_tokens: int, seed: int) -> Subject:
    """Prefill the prompt. `blind_tokens` is how many are given wrong values, to see whether the logits show it."""
    tokens = model.random_tokens(token_count, seed)
    cache = model.empty_cache(token_count)
    poison(cache)
    timed = [model.timed_prefill(tokens, cache, 0) for _ in range(RECOMPUTE_RUNS + 1)]
    reference = cache.clone()
    logits = timed[-1][1]
    cache[:, 1, :blind_tokens].neg_()
    _, blind = model.timed_prefill(tokens, cache, blind_tokens)
    cache.copy_(reference)
    seconds = tuple(seconds for seconds, _ in timed[1:])
    return Subject(model, tokens, cache, reference, logits, seconds, relative_error(blind, logits))
