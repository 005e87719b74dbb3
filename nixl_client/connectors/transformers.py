"""Hugging Face transformers: run a model on a prefix whose layers are still arriving.

A model needs the keys and values of layer l only in that layer's attention. `WaitingCache` says at once how long the
prefix is, so that masks and positions can be made, and lets the attention of layer l wait for layer l alone: layer
l+1 travels while layer l computes.

    with client.fetch(keys, shape.layout, buffer) as fetch:
        logits = model(question, past_key_values=WaitingCache(fetch, shape)).logits
        fetch.wait()

One layer in a cache is keys and values of shape (1, kv_heads, tokens, head_dim) each. One layer in a chunk object is S
bytes: K, then V, each (chunk_tokens, kv_heads, head_dim) (KV_L2TD, see descriptors.layout). With latent attention (MLA)
transformers keeps latents as the keys of one head, and the part that carries positions as its values, which are
narrower. Keys are kept as the model
caches them. In models with rotary embeddings each key thus carries its position, a prefix is good only from position 0
on, and full attention cannot tell the order of whole chunks: it gives the same sum, but for rounding.

Layers with windows are stored and loaded whole, like the others: a later prompt may go on from any chunk. Their
attention sees its window alone. A model's first pass needs `keeping_cache`, since an ordinary cache drops what a window
has passed.

Batch size 1. Needs torch and transformers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from descriptors.descriptor import Accept
from descriptors.kv_forms import KvLayout
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from nixl_client.fetch.layer_fetch import Layer
from nixl_client.lossy import MAX_ERROR, Lossy, accept_of
from objectcache.kv_codecs.layer import Codec

WAIT_TIMEOUT_S = 60.0


class RunningFetch(Protocol):
    """The calls that a cache makes to a running fetch; `nixl_client.fetch.layer_fetch.LayerFetch` is one."""

    def wait_admitted(self, timeout_s: float | None = None) -> tuple[Mode, int]:
        """Mode and k, the number of chunks that will come."""

    @property
    def kept_tokens(self) -> int:
        """How many tokens will be there in each layer; known with k."""

    def wait_layer(self, layer_index: int, timeout_s: float | None = None) -> Layer:
        """Block until the layer is complete."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of one model's KV, cut into chunks of `chunk_tokens` tokens. `value_dim` is the head dimension of
    values, None where it is that of keys; `windows` has each layer's window in tokens, None for layers without one, and
    is empty where none has one.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    chunk_tokens: int
    value_dim: int | None = None
    windows: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, config: PreTrainedConfig, dtype: torch.dtype, chunk_tokens: int) -> KvShape:
        """The shape of a model whose layers cache keys and values of the same heads, windows included. Raises
        ValueError, with the reason, for other models: `of_model` knows more of them.
        """
        text: PreTrainedConfig = config.get_text_config(decoder=True)
        if getattr(text, "kv_lora_rank", None) is not None:
            raise ValueError("what latent attention caches is seen in the model only: take KvShape.of_model")
        windows = _windows(DynamicCache(config=config))
        heads: int = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return cls(text.num_hidden_layers, kv_heads, head_dim, dtype, chunk_tokens, windows=windows)

    @classmethod
    def of_model(cls, model: PreTrainedModel, chunk_tokens: int) -> KvShape:
        """The shape that a model's cache has after one token, which this computes. Raises ValueError, with the reason,
        where layers cache something else than keys and values (states), or not all of them the same.
        """
        cache = DynamicCache(config=model.config)
        windows = _windows(cache)
        with torch.inference_mode():
            model(torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=cache)
        pairs = [_keys_and_values(layer) for layer in cache.layers]
        shapes = {(keys.shape, values.shape, keys.dtype, values.dtype) for keys, values in pairs}
        if len(shapes) > 1:
            raise ValueError("layers whose keys or values differ in heads, dimension or dtype are not cached")
        keys, values = pairs[0]
        if keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            raise ValueError("keys and values of different heads or dtypes are not cached")
        value_dim = None if values.shape[3] == keys.shape[3] else values.shape[3]
        return cls(
            num_layers=len(pairs),
            kv_heads=keys.shape[1],
            head_dim=keys.shape[3],
            dtype=keys.dtype,
            chunk_tokens=chunk_tokens,
            value_dim=value_dim,
            windows=windows,
        )

    @property
    def layout(self) -> ChunkLayout:
        """The layout of its chunk objects."""
        per_layer = (self.key_elements + self.value_elements) * self.dtype.itemsize
        return ChunkLayout(self.num_layers, self.chunk_tokens, per_layer)

    @property
    def key_elements(self) -> int:
        """Elements of a chunk's keys in one layer."""
        return self.chunk_tokens * self.kv_heads * self.head_dim

    @property
    def value_elements(self) -> int:
        """Elements of a chunk's values in one layer."""
        return self.chunk_tokens * self.kv_heads * (self.value_dim or self.head_dim)

    @property
    def kv_layout(self) -> KvLayout:
        """The layout that `put_chunks` may declare. Raises ValueError for what no codec takes."""
        if self.value_dim is not None:
            raise ValueError("codecs take keys and values of the same dimension: latents come exactly")
        element = str(self.dtype).removeprefix("torch.")
        return KvLayout(self.num_layers, self.chunk_tokens, self.kv_heads * self.head_dim, element)

    def accept(
        self,
        lossy: Lossy,
        max_error: float = MAX_ERROR,
        *,
        max_loss: float | None = None,
        dropping: Sequence[Codec] = (),
    ) -> Accept | None:
        """The value for `accept` of `fetch`, so that layers may come encoded. A `WaitingCache` attends to the tokens
        that are there, so it can also take codecs that drop some: `dropping`, of kv_codecs.layer.DROPPING. Their errors
        are large and their losses not calibrated, so no bound counts for them but that of the server. Raises
        ValueError.
        """
        if self.value_dim is not None and (dropping or lossy is not Lossy.OFF):
            raise ValueError("lossy: codecs take keys and values of the same dimension: latents come exactly")
        if self.windows and dropping:
            raise ValueError("dropping: a window counts tokens, so none may be missing")
        accept = accept_of(lossy, self.dtype, max_error, max_loss)
        if not dropping:
            return accept
        if max_loss is not None or (accept is not None and accept.max_error is not None):
            raise ValueError("lossy: a bound leaves no codec that drops tokens: take `adaptive`, and no `max_loss`")
        if not all(codec.drops_tokens for codec in dropping):
            raise ValueError("dropping: not all of these codecs drop tokens")
        names = tuple(codec.value for codec in dropping)
        return Accept(names if accept is None else (*accept.codecs, *names), str(self.dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class LayerWait:
    """When the model asked for a layer and when it had it; `ready_at_s` is when the layer was complete, which may be
    long before. Monotonic seconds.
    """

    started_s: float
    ended_s: float
    ready_at_s: float


class WaitingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__ is untyped
    """A DynamicLayer that holds `prefix_tokens` tokens from the start, though their bytes come with the first update.
    Where a codec has dropped tokens, they count for positions, and nobody attends to them.

    `wait` is None until then. Sizes, dtype or a batch that do not fit raise ValueError.
    """

    def __init__(
        self, fetch: RunningFetch, layer_index: int, chunk_count: int, shape: KvShape, timeout_s: float
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dropped_tokens = chunk_count * shape.chunk_tokens - fetch.kept_tokens
        self.wait: LayerWait | None = None
        self._fetch: RunningFetch | None = fetch
        self._layer_index = layer_index
        self._chunk_count = chunk_count
        self._shape = shape
        self._timeout_s = timeout_s
        self._kept: torch.Tensor | None = None

    def get_seq_length(self) -> int:
        """Tokens so far, those still on their way and those that were dropped included. Never waits, and nor does
        `get_mask_sizes`.
        """
        if self._fetch is not None:
            return self._chunk_count * self._shape.chunk_tokens
        return int(super().get_seq_length()) + self._dropped_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The tokens that are attended to, and the place of the first one: those that are kept of the prefix count as
        its last ones, which all later tokens see.
        """
        return self.get_seq_length() + query_length - self._dropped_tokens, self._dropped_tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (1, kv_heads, n, head_dim) and return all keys and values; the first call waits for the layer.

        Raises TimeoutError past the deadline, and whatever ended the fetch.
        """
        self._check(key_states, value_states)
        if self._fetch is None:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values
        first_keys, first_values = self._take(self._fetch)
        self.lazy_initialization(key_states, value_states)
        if self._kept is None:
            self.keys = _joined(first_keys, key_states)
            self.values = _joined(first_values, value_states)
        else:
            self.keys = _joined_kept(first_keys, self._kept, key_states)
            self.values = _joined_kept(first_values, self._kept, value_states)
        self._fetch = self._kept = None
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """As DynamicLayer; ValueError while the layer is still on its way."""
        if self._fetch is not None and tokens_to_remove != 0:
            raise ValueError(f"layer {self._layer_index} has not arrived: run the model before cropping")
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Hold nothing, and wait for nothing."""
        self._fetch = self._kept = None
        self._dropped_tokens = 0
        super().reset()

    def _take(self, fetch: RunningFetch) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the layer; keys and values as views of the buffer, (chunk_count, chunk_tokens, kv_heads, head_dim)
        each.
        """
        shape = self._shape
        started_s = time.monotonic()
        layer = fetch.wait_layer(self._layer_index, self._timeout_s)
        self.wait = LayerWait(started_s, time.monotonic(), layer.ready_at_s)
        wanted = (self._chunk_count, shape.layout.per_layer_chunk_bytes)
        if tuple(layer.data.shape) != wanted:
            raise ValueError(f"layer {self._layer_index} is of shape {tuple(layer.data.shape)}, {wanted} expected")
        if layer.kept is not None:
            if int(layer.kept.sum()) != wanted[0] * shape.chunk_tokens - self._dropped_tokens:
                raise ValueError(f"layer {self._layer_index} has other tokens than were announced")
            self._kept = torch.from_numpy(layer.kept)
        data: torch.Tensor = layer.data if isinstance(layer.data, torch.Tensor) else torch.from_numpy(layer.data)
        elements = data.view(shape.dtype)
        cut = (self._chunk_count, shape.chunk_tokens, shape.kv_heads, -1)
        return elements[:, : shape.key_elements].view(cut), elements[:, shape.key_elements :].view(cut)

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.shape[0] != 1:
            raise ValueError(f"batch size {keys.shape[0]}: only 1 is supported")
        shape = self._shape
        value_dim = shape.value_dim or shape.head_dim
        for states, head_dim in ((keys, shape.head_dim), (values, value_dim)):
            found, wanted = (states.shape[1], states.shape[3], states.dtype), (shape.kv_heads, head_dim, shape.dtype)
            if found != wanted:
                raise ValueError(f"the model's kv_heads, head_dim, dtype are {found}, the prefix has {wanted}")


class WaitingWindowLayer(WaitingLayer):  # type: ignore[no-untyped-call]
    """A WaitingLayer whose attention sees the last `sliding_window` tokens. It keeps the others, so that chunks can be
    made of them.
    """

    is_sliding = True

    def __init__(
        self, fetch: RunningFetch, layer_index: int, chunk_count: int, shape: KvShape, timeout_s: float, window: int
    ) -> None:
        super().__init__(fetch, layer_index, chunk_count, shape, timeout_s)
        self.sliding_window = window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The tokens that attention is given, and the place of the first one."""
        tokens = self.get_seq_length()
        first = max(0, tokens - self.sliding_window + 1)
        return tokens - first + query_length, first

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As WaitingLayer; returns those keys and values that a window of the new tokens reaches."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        seen = self.sliding_window - 1 + key_states.shape[2]
        return keys[:, :, -seen:], values[:, :, -seen:]


class WaitingCache(Cache):
    """`past_key_values` over a running fetch, for one forward pass and the decoding after it.

    Waits for the fetch's admission, which tells how many chunks come, and for each layer in that layer's attention: at
    most `timeout_s` each, then TimeoutError. If the fetch fails, the wait under way raises its error. After the first
    forward pass nothing refers to the fetch's buffer any more.
    """

    def __init__(self, fetch: RunningFetch, shape: KvShape, *, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        _, chunk_count = fetch.wait_admitted(timeout_s)
        layers: list[Any] = []
        for index, window in enumerate(shape.windows or [None] * shape.num_layers):
            if window is None:
                layers.append(WaitingLayer(fetch, index, chunk_count, shape, timeout_s))
            else:
                layers.append(WaitingWindowLayer(fetch, index, chunk_count, shape, timeout_s, window=window))
        super().__init__(layers=layers)

    @property
    def waits(self) -> tuple[LayerWait | None, ...]:
        """Each layer's wait; None for layers not yet taken."""
        return tuple(layer.wait for layer in self.layers if isinstance(layer, WaitingLayer))

    @property
    def waited_s(self) -> float:
        """How long the forward pass has waited for layers."""
        return sum(wait.ended_s - wait.started_s for wait in self.waits if wait is not None)


def chunks_from_cache(cache: Cache, chunk_tokens: int) -> np.ndarray:
    """The whole chunks of a filled cache as objects to put: uint8 of shape (chunk_count, L*S), in prefix order.

    Tokens past the last whole chunk are left out. Raises ValueError for a batch, and for caches whose layers do not
    all hold every token (windows that have passed some, layers never run).
    """
    layers = [_keys_and_values(layer) for layer in cache.layers]
    first = layers[0]
    batch, kv_heads, tokens, _ = first[0].shape
    if batch != 1:
        raise ValueError(f"batch size {batch}: only 1 is supported")
    chunk_count = tokens // chunk_tokens
    elements = [kv_heads * chunk_tokens * states.shape[3] for states in first]
    chunks = torch.empty((chunk_count, len(layers), sum(elements)), dtype=first[0].dtype)
    parts = (chunks[:, :, : elements[0]], chunks[:, :, elements[0] :])
    for layer_index, layer in enumerate(layers):
        for states, of_first, part in zip(layer, first, parts, strict=True):
            if states.shape != of_first.shape or states.dtype != of_first.dtype:
                raise ValueError(f"layer {layer_index} differs from layer 0 in shape or dtype")
            whole = states[0, :, : chunk_count * chunk_tokens]
            cut = whole.reshape(kv_heads, chunk_count, chunk_tokens, states.shape[3])
            part[:, layer_index].view(chunk_count, chunk_tokens, kv_heads, -1).copy_(cut.permute(1, 2, 0, 3))
    array: np.ndarray = chunks.flatten(1).view(torch.uint8).numpy()
    return array


def keeping_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for a model's first pass, whose layers keep every token, so that chunks can be made of it. Windows
    are as narrow for attention as ever.
    """
    cache = DynamicCache(config=config)
    cache.activate_past_recording()  # type: ignore[no-untyped-call]
    return cache


def _windows(cache: DynamicCache) -> tuple[int | None, ...]:
    """Each layer's window; empty where no layer has one. Raises ValueError, with the reason."""
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(f"layer {index} caches no keys and values of its own, but has a {type(layer).__name__}")
    windows = tuple(getattr(layer, "sliding_window", None) for layer in cache.layers)
    return windows if any(window is not None for window in windows) else ()


def _keys_and_values(layer: object) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
        raise ValueError("every layer must hold every token")
    if layer.keys.shape[-2] != layer.get_seq_length():
        raise ValueError("every layer must hold every token: run the model with keeping_cache, which drops none")
    return layer.keys, layer.values


def _joined(prefix: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """(chunk_count, chunk_tokens, heads, dim) followed by (1, heads, n, dim), as (1, heads, tokens, dim): one copy out
    of the receive buffer, straight to where attention reads.
    """
    chunk_count, chunk_tokens, heads, dim = prefix.shape
    prefix_tokens = chunk_count * chunk_tokens
    joined = new.new_empty((1, heads, prefix_tokens + new.shape[2], dim))
    joined[0, :, :prefix_tokens].view(heads, chunk_count, chunk_tokens, dim).copy_(prefix.permute(2, 0, 1, 3))
    joined[:, :, prefix_tokens:] = new
    return joined


def _joined_kept(prefix: torch.Tensor, kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """As `_joined`, but of the prefix only the tokens that are there: `kept`, (chunk_count, chunk_tokens)."""
    there = prefix[kept.to(prefix.device)].permute(1, 0, 2)[None]
    return torch.cat([there.to(new.device), new], dim=2)
