"""The loss of each form on two real models, as `objectcache calibrate quality` measures it: of forms that have all
layers in one codec, of chunks that are encoded one form after the other, and of those with fewer bits in some layers.
And the errors of chunks that are encoded further, as they are told and as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.core.experiment import WrongUse
from bench.paper.compression.gemma import NAME as GEMMA
from bench.paper.compression.gemma import gemma3
from bench.paper.compression.texts import asked_texts
from nixl_client.lossy import MAX_ERROR
from objectcache.calibration.form_losses import FormLoss, TextSample, on_curve
from objectcache.calibration.model_quality import form_losses, scored, text_sample
from objectcache.calibration.probes import Probe
from objectcache.calibration.quality import States, coded, prefix_states
from objectcache.calibration.real_model import RealModel, load_real_model
from objectcache.cli.config_compression import DEFAULT_CODECS
from objectcache.demo.weights import NAME as SMOLLM2
from objectcache.demo.weights import NoWeightsError, models_folder, smollm2
from objectcache.kv_codecs.chains import chains_of
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.encoding import decode
from objectcache.kv_codecs.layer import KIVI, Codec, LayerShape
from objectcache.kv_codecs.loss import loss
from storage_server.cache.recoding import Recoder
from storage_server.planning.forms import Reading

FOLDERS: Mapping[str, Callable[[Path], Path]] = {SMOLLM2: smollm2, GEMMA: gemma3}
CODECS = (*KIVI, Codec.FP8)
CHAINS = (
    (Codec.KIVI4,),
    (Codec.KIVI8, Codec.KIVI4),
    (Codec.K8V4, Codec.KIVI4),
    (Codec.KIVI8, Codec.K8V4, Codec.KIVI4),
)
CHUNK_TOKENS = (64, 16)
FINE, COARSE = Codec.KIVI4, Codec.KIVI3
PARTS = {0: "first", 1: "middle", 2: "last"}
"""The thirds of a model's layers."""
COARSE_PARTS = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2))
REAL_FORMS = len(CODECS) + len(chains_of(DEFAULT_CODECS)) + len(COARSE_PARTS)
"""Forms of each text, of which `real_rows` tells `advance`."""


@dataclass(frozen=True, slots=True)
class RealRows:
    """Rows of the forms on each model, of those by ranges of layers, and of the errors of chains."""

    forms: list[dict[str, Any]]
    ranges: list[dict[str, Any]]
    chains: list[dict[str, Any]]


def real_rows(
    models: Sequence[str], texts: int, context_tokens: int, continuation_tokens: int, advance: Callable[[int], None]
) -> RealRows:
    """Measure all of these models. Raises WrongUse where one cannot be had."""
    found = RealRows([], [], [])
    further = chains_of(DEFAULT_CODECS)
    for name in models:
        try:
            real = load_real_model(str(FOLDERS[name](models_folder())), "cpu")
        except (NoWeightsError, ImportError) as error:
            raise WrongUse(f"{name}: {error}") from error
        asked = asked_texts(real.tokenizer, texts, context_tokens, continuation_tokens)
        losses = form_losses(real, asked, CODECS, advance, further)
        curve = on_curve(losses[: 1 + len(CODECS)])
        found.forms.extend({"model": name, **each.row(), "is_on_curve": each.codec in curve} for each in losses)
        found.ranges.extend({"model": name, **each.row()} for each in _range_losses(real, asked, advance))
        states = prefix_states(real.model, torch.tensor([asked[0].context]))
        found.chains.extend({"model": name, **row} for row in _chain_rows(states))
    return found


def _range_losses(real: RealModel, asked: Sequence[Probe], advance: Callable[[int], None]) -> Iterator[FormLoss]:
    """The losses of KV with COARSE in some thirds of the layers and FINE in the others."""
    samples: dict[tuple[int, ...], list[TextSample]] = {parts: [] for parts in COARSE_PARTS}
    sizes: dict[tuple[int, ...], float] = {}
    errors: dict[tuple[int, ...], list[float]] = {parts: [] for parts in COARSE_PARTS}
    for probe in asked:
        states = prefix_states(real.model, torch.tensor([probe.context]))
        exact = scored(real, states, probe)
        fine, coarse = coded(states, FINE), coded(states, COARSE)
        for parts in COARSE_PARTS:
            chosen = [coarse if at * len(PARTS) // len(states) in parts else fine for at in range(len(states))]
            mixed = [each.states[at] for at, each in enumerate(chosen)]
            samples[parts].append(text_sample(scored(real, mixed, probe), exact, probe))
            sizes[parts] = sum(each.encoded_bytes / each.exact_bytes for each in chosen) / len(chosen)
            errors[parts] += [max(each.errors) for each in chosen]
            advance(1)
    for taken, mine in samples.items():
        name = " and ".join(PARTS[part] for part in taken)
        worst, mean = max(errors[taken]), sum(errors[taken]) / len(errors[taken])
        yield FormLoss(name, sizes[taken], worst, mean, tuple(mine))


def _chain_rows(states: States) -> Iterator[dict[str, Any]]:
    """For each size of a chunk and each chain: the errors of the last form, over all chunks of a context."""
    recoder = Recoder(cpu_fraction=1.0)
    try:
        for tokens in CHUNK_TOKENS:
            chunks, reading = _chunks(states, tokens)
            for chain in CHAINS:
                told, real = zip(*(_errors(recoder, chunk, reading, chain) for chunk in chunks), strict=True)
                yield {
                    "chain": " then ".join(codec.value for codec in chain), "chunk_tokens": tokens,
                    "chunks": len(chunks), "told_max": max(told), "real_max": max(real),
                    "real_within": sum(each <= MAX_ERROR for each in real) / len(real),
                    "told_within": sum(each <= MAX_ERROR for each in told) / len(told),
                }  # fmt: skip
    finally:
        recoder.close()


def _chunks(states: States, tokens: int) -> tuple[list[np.ndarray], Reading]:
    """The chunks of a context, each uint8 of L*S bytes, and how a reader reads them."""
    keys = states[0][0]
    shape = LayerShape(tokens, keys.shape[1] * keys.shape[3], Element.BFLOAT16)
    layers = [torch.stack([part[0].transpose(0, 1).flatten(1) for part in pair]) for pair in states]
    whole = torch.stack(layers).bfloat16()  # (layers, 2, tokens, width)
    found = [
        whole[:, :, start : start + tokens].contiguous().view(torch.uint8).reshape(-1).numpy()
        for start in range(0, keys.shape[2] - tokens + 1, tokens)
    ]
    return found, Reading(shape, len(states), KIVI)


def _errors(recoder: Recoder, exact: np.ndarray, reading: Reading, chain: Sequence[Codec]) -> tuple[float, float]:
    """The error that is told of a chunk behind a chain of codecs, and the real one."""
    made = recoder.encode(exact.data, reading, chain[0])
    for codec in chain[1:]:
        assert made is not None
        made = recoder.encode_further(memoryview(made[1]), made[0], reading, codec)
    assert made is not None
    encoded, packed = made
    back = np.empty(reading.shape.nbytes, dtype=np.uint8)
    real = 0.0
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(reading.num_layers, -1)
    for layer, row in zip(exact.reshape(reading.num_layers, -1), rows, strict=True):
        decode(row.data, reading.shape, back)
        real = max(real, loss(layer, back, reading.shape).worst)
    return encoded.worst_error, real
