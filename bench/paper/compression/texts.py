"""SmolLM2, and texts out of Python's documentation with facts in them, about which real models are asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.core.experiment import WrongUse
from objectcache.calibration.measured_text import text_of
from objectcache.calibration.probes import Probe, beginning_of, cut, encoder_of, probes
from objectcache.demo.weights import NAME as SMOLLM2
from objectcache.demo.weights import NoWeightsError, models_folder, smollm2

FOLDER = smollm2
SEED = 1


def smollm2_folder() -> Path:
    """The model as transformers and vLLM read it. Raises WrongUse where it cannot be had."""
    try:
        return FOLDER(models_folder())
    except (NoWeightsError, ImportError) as error:
        raise WrongUse(f"{SMOLLM2}: {error}") from error


def asked_texts(tokenizer: Any, count: int, context_tokens: int, continuation_tokens: int) -> list[Probe]:
    """So many contexts, each with the tokens that follow it and its facts. Raises WrongUse where the documentation is
    too short.
    """
    encode, beginning = encoder_of(tokenizer), beginning_of(tokenizer)
    texts = cut(encode(text_of(None)[0]), context_tokens + continuation_tokens, count)
    if len(texts) < count:
        raise WrongUse(f"{count} contexts, and the documentation of this Python has {len(texts)}")
    found = probes(texts, encode, beginning, context_tokens, SEED)
    return [replace(each, continuation=each.continuation[:continuation_tokens]) for each in found]
