"""The change that a codec makes in a model's answers: the KV of a context is encoded and decoded, and the answers
behind it are compared with those on the exact KV. Needs torch and transformers.

The exact KV is that of the model in the KV's element type. Answers are the most likely token at each place, given the
right tokens before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from objectcache.calibration.real_model import UnusableModelError, checked_cache, last_logits
from objectcache.kv_codecs.dropping import chosen_places
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.encoding import decode, encode, encode_further
from objectcache.kv_codecs.layer import Codec, LayerShape, kept_count
from objectcache.kv_codecs.loss import loss

IGNORED = -100
CHUNK_TOKENS = 64
States = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, (batch, KV heads, tokens, head dimension)."""


@dataclass(frozen=True, slots=True)
class ScoredAnswers:
    """The answers on one form of the KV: `right` and `same` have a value for each answered token: whether it is the
    right one, and whether it is the one on exact KV; `nll` is that of the right token, and `exact_nll` on exact KV,
    `kl` the divergence from the distribution on exact KV. `predicted` are the tokens.
    """

    right: np.ndarray
    same: np.ndarray
    nll: np.ndarray
    kl: np.ndarray
    predicted: np.ndarray
    exact_nll: np.ndarray

    @property
    def accuracy(self) -> float:
        """The part of the tokens that is right."""
        return float(self.right.mean())

    @property
    def perplexity(self) -> float:
        """The perplexity of the right tokens."""
        return math.exp(float(self.nll.mean()))

    @property
    def exact_perplexity(self) -> float:
        """The same on exact KV."""
        return math.exp(float(self.exact_nll.mean()))


@dataclass(frozen=True, slots=True)
class Coded:
    """KV that was encoded and decoded: bytes before and after, and the errors of the layers, of keys and of values."""

    states: States
    exact_bytes: int
    encoded_bytes: int
    errors: tuple[float, ...]


def prefix_states(model: PreTrainedModel, context: torch.Tensor) -> States:
    """The KV of contexts, int64 of shape (batch, tokens), rounded to bfloat16: that of every token, also in layers that
    attend to the last ones only, since stores have all of it. Raises UnusableModelError for a model with another cache.
    """
    try:
        with torch.inference_mode():
            told = model(
                context.to(model.device), past_key_values=DynamicCache(), use_cache=True, **last_logits(model, 1)
            )  # fmt: skip
    except (TypeError, AttributeError, LookupError) as error:  # of models whose caches are states
        raise UnusableModelError(f"it takes no cache of keys and values: {error}") from error
    cache: Any = checked_cache(getattr(told, "past_key_values", None), context.shape[1])
    return [
        (layer.keys.bfloat16().to(layer.keys.dtype), layer.values.bfloat16().to(layer.values.dtype))
        for layer in cache.layers
    ]


def coded(states: States, codec: Codec, chunk_tokens: int = CHUNK_TOKENS, further: Sequence[Codec] = ()) -> Coded:
    """Encode and decode all whole chunks of the KV, as the DRAM tier does; tokens behind them stay exact. The chunks
    are then encoded `further`, one codec after the other. To a codec that drops tokens the whole context is one chunk,
    and the states that come back have the kept ones only. Raises ValueError for contexts that are too short for that.
    """
    batch, _, tokens, _ = states[0][0].shape
    if codec.drops_tokens:
        chunk_tokens = tokens
    count = tokens // chunk_tokens
    out: States = []
    errors: list[float] = []
    exact_bytes = encoded_bytes = 0
    for keys, values in states:
        heads, dim = keys.shape[1], keys.shape[3]
        shape = LayerShape(chunk_tokens, heads * dim, Element.BFLOAT16)
        back = np.empty(shape.nbytes, dtype=np.uint8)
        pair = []
        for part in (keys, values):
            whole = part[:, :, : count * chunk_tokens].reshape(batch, heads, count, chunk_tokens, dim)
            pair.append(whole.permute(0, 2, 3, 1, 4).bfloat16().contiguous())
        layer = torch.stack(pair, dim=2).flatten(0, 1)  # (batch * chunks, 2, tokens, heads, dim)
        data = layer.cpu().view(torch.uint8).reshape(len(layer), -1).numpy().copy()
        kept = torch.empty(len(data), kept_count(codec, chunk_tokens), dtype=torch.int64)
        for index, row in enumerate(data):
            if codec.drops_tokens:
                kept[index] = torch.from_numpy(chosen_places(row, shape, codec))
            part_bytes = encode(row, shape, codec)
            for after in further:
                part_bytes, _ = encode_further(part_bytes, shape, after)
            decode(part_bytes, shape, back)
            lost = loss(row, back, shape)
            errors += [lost.keys, lost.values]
            encoded_bytes += len(part_bytes)
            exact_bytes += shape.nbytes
            row[:] = back
        decoded = torch.from_numpy(data).view(torch.bfloat16).reshape(batch, count, 2, chunk_tokens, heads, dim)
        decoded = decoded.permute(2, 0, 4, 1, 3, 5).reshape(2, batch, heads, count * chunk_tokens, dim)
        made = []
        for part, exact in zip(decoded, (keys, values), strict=True):
            made.append(torch.cat([part.to(exact.device, exact.dtype), exact[:, :, count * chunk_tokens :]], dim=2))
            if codec.drops_tokens:
                there = kept[:, None, :, None].expand(-1, heads, -1, dim).to(exact.device)
                made[-1] = made[-1].gather(2, there)
        out.append((made[0], made[1]))
    return Coded(out, exact_bytes, encoded_bytes, tuple(errors))


def answer_logits(model: PreTrainedModel, states: States, questions: torch.Tensor, context_tokens: int) -> torch.Tensor:
    """The logits of questions behind contexts of `context_tokens`, of which `states` has the KV that is kept."""
    return logits_behind(model, states, [questions], context_tokens)[0]


def logits_behind(
    model: PreTrainedModel, states: States, asked: Sequence[torch.Tensor], context_tokens: int
) -> list[torch.Tensor]:
    """The logits of several questions, each int64 of shape (batch, tokens) and right behind the same contexts, of which
    `states` has the KV that is kept. Where tokens were dropped, the model's layers have to attend to all tokens.
    """
    batch, held = states[0][0].shape[0], states[0][0].shape[2]
    cache = DynamicCache()
    for index, (keys, values) in enumerate(states):
        cache.update(keys, values, index)
    found = []
    for questions in asked:
        count = questions.shape[1]
        mask = None  # the model's own, which knows its windows
        if held < context_tokens:
            mask = torch.zeros(batch, 1, count, held + count)
            mask[..., held:] = torch.full((count, count), -math.inf).triu(1)
            mask = mask.to(model.device)
        places = torch.arange(context_tokens, context_tokens + count).expand(batch, -1)
        with torch.inference_mode():
            logits: torch.Tensor = model(
                questions.to(model.device), past_key_values=cache, attention_mask=mask,
                position_ids=places.to(model.device), use_cache=True,
            ).logits  # fmt: skip
        cache.crop(-count)
        found.append(logits.float().cpu())
    return found


def compared(logits: torch.Tensor, exact: torch.Tensor, labels: torch.Tensor) -> ScoredAnswers:
    """The answers by these logits, where `labels` has tokens; `exact` are the logits on exact KV."""
    asked = labels != IGNORED
    mine, theirs, wanted = logits[asked], exact[asked], labels[asked]
    log_mine, log_theirs = mine.log_softmax(-1), theirs.log_softmax(-1)
    predicted = mine.argmax(-1)
    return ScoredAnswers(
        right=(predicted == wanted).numpy(),
        same=(predicted == theirs.argmax(-1)).numpy(),
        nll=-log_mine.gather(-1, wanted[:, None])[:, 0].numpy(),
        kl=(log_theirs.exp() * (log_theirs - log_mine)).sum(-1).numpy(),
        predicted=predicted.numpy(),
        exact_nll=-log_theirs.gather(-1, wanted[:, None])[:, 0].numpy(),
    )


def joined(answers: Sequence[ScoredAnswers]) -> ScoredAnswers:
    """All answers as one."""
    names = ("right", "same", "nll", "kl", "predicted", "exact_nll")
    return ScoredAnswers(*(np.concatenate([getattr(each, name) for each in answers]) for name in names))
