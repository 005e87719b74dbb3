"""The loss of each form on two real models, as `objectcache calibrate quality` measures it, and the errors of chunks
that are encoded one form after the other, as they are told and as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.core.experiment import WrongUse
from bench.paper.compression.gemma import NAME as GEMMA
from bench.paper.compression.gemma import gemma3
from nixl_client.lossy import MAX_ERROR
from objectcache.calibration.form_losses import on_curve
from objectcache.calibration.measured_text import text_of
from objectcache.calibration.model_quality import form_losses
from objectcache.calibration.probes import Ids, Probe, beginning_of, cut, encoder_of, probes
from objectcache.calibration.quality import States, prefix_states
from objectcache.calibration.real_model import RealModel, load_real_model
from objectcache.demo.weights import NAME as SMOLLM2
from objectcache.demo.weights import NoWeightsError, models_folder, smollm2
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


def real_rows(
    models: Sequence[str], texts: int, context_tokens: int, continuation_tokens: int, advance: Callable[[int], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the forms on each model, and of the chains. Raises WrongUse where a model cannot be had."""
    forms: list[dict[str, Any]] = []
    chains: list[dict[str, Any]] = []
    for name in models:
        try:
            real = load_real_model(str(FOLDERS[name](models_folder())), "cpu")
        except (NoWeightsError, ImportError) as error:
            raise WrongUse(f"{name}: {error}") from error
        asked = _asked(real, texts, context_tokens, continuation_tokens)
        losses = form_losses(real, asked, CODECS, advance)
        curve = on_curve(losses)
        forms += [{"model": name, **each.row(), "is_on_curve": each.codec in curve} for each in losses]
        states = prefix_states(real.model, torch.tensor([asked[0].context]))
        chains += [{"model": name, **row} for row in _chain_rows(states)]
    return forms, chains


def _asked(real: RealModel, texts: int, context_tokens: int, continuation_tokens: int) -> list[Probe]:
    encode, beginning = encoder_of(real.tokenizer), beginning_of(real.tokenizer)
    whole: Ids = encode(text_of(None)[0])
    asked = probes(cut(whole, context_tokens + continuation_tokens, texts), encode, beginning, context_tokens, 1)
    return [Probe(each.context, each.continuation[:continuation_tokens], each.facts) for each in asked]


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
