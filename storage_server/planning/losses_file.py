"""The losses file: what `objectcache calibrate quality --losses FILE` writes, and a server reads. Pure.

    {"version": 1, "models": [{"model": "SmolLM2-135M-Instruct", "layers": 30, "width": 192, "element": "bfloat16",
      "chunk_tokens": 64, "texts": "Python 3.11 docs", "text_count": 16, "release": "0.1.0", "forms": {
        "kivi4-1": {"kl": 0.0049, "kl_high": 0.0058, "recall_loss": 0.42, "recall_loss_high": 0.52},
        "kivi8-1>kivi4-1": {...}}}]}

`model` is the name as the keys of chunks have it, `width` are the elements of one token's keys in a layer, and `forms`
are codecs and chains of them. A file with anything that is unknown, missing or impossible is refused as a whole: a loss
that is told too low is worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from descriptors.descriptor import CHUNK_TOKENS_MAX, NUM_LAYERS_MAX, WIDTH_MAX
from descriptors.json_body import parse_body
from descriptors.prefix_keys import MODEL_LABEL
from objectcache.kv_codecs.chains import Chain, chain_name, parse_chain, shortest
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.layer import KIVI, Codec
from storage_server.planning.losses import WORST, MeasuredLoss, ModelLosses

LOSSES_BYTES_MAX = 1 << 20
MODELS_MAX, FORMS_MAX, TEXT_MAX = 256, 64, 256
CALIBRATED_CODECS = (*KIVI, Codec.FP8)
"""The others are exact, or drop tokens: their loss depends on the length of the context."""
_Text = Annotated[str, Field(max_length=TEXT_MAX)]
_Loss = Annotated[float, Field(allow_inf_nan=False)]


class WrongLossesError(ValueError):
    """Bytes that are no losses file; the message names the field."""


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _FormModel(_StrictModel):
    kl: _Loss
    kl_high: _Loss
    recall_loss: _Loss
    recall_loss_high: _Loss


class _ModelModel(_StrictModel):
    model: Annotated[str, Field(pattern=f"^(?:{MODEL_LABEL.pattern})$")]
    layers: Annotated[int, Field(ge=1, le=NUM_LAYERS_MAX)]
    width: Annotated[int, Field(ge=1, le=WIDTH_MAX)]
    element: Literal["float16", "bfloat16", "float32"]
    chunk_tokens: Annotated[int, Field(ge=1, le=CHUNK_TOKENS_MAX)]
    texts: _Text
    text_count: Annotated[int, Field(ge=2, le=1_000_000)]
    release: _Text
    forms: Annotated[dict[str, _FormModel], Field(min_length=1, max_length=FORMS_MAX)]


class _FileModel(_StrictModel):
    version: Literal[1]
    models: Annotated[list[_ModelModel], Field(max_length=MODELS_MAX)]


def parse_losses(data: bytes) -> tuple[ModelLosses, ...]:
    """The calibrations of a file. Raises WrongLossesError, which names the field."""
    if len(data) > LOSSES_BYTES_MAX:
        raise WrongLossesError(f"it has {len(data)} bytes, at most {LOSSES_BYTES_MAX}")
    parsed = parse_body(_FileModel, data, _refuse)
    found: list[ModelLosses] = []
    for at, each in enumerate(parsed.models):
        found.append(_model_losses(each, f"models.{at}"))
        if each.model == WORST:
            raise _refuse(f"models.{at}.model", f"{WORST} is no model's name: it stands for all of them")
        if found[-1].layout in {other.layout for other in found[:-1]}:
            raise _refuse(f"models.{at}.model", f"{each.model} is there twice with the same layout")
    return tuple(found)


def losses_bytes(models: Sequence[ModelLosses]) -> bytes:
    """The inverse of `parse_losses`."""
    rows = [
        {
            "model": each.model, "layers": each.num_layers, "width": each.width,
            "element": each.element.name.lower(), "chunk_tokens": each.chunk_tokens, "texts": each.texts,
            "text_count": each.text_count, "release": each.release,
            "forms": {
                chain_name(chain): {
                    "kl": loss.kl, "kl_high": loss.kl_high,
                    "recall_loss": loss.recall_loss, "recall_loss_high": loss.recall_loss_high,
                }
                for chain, loss in each.forms.items()
            },
        }
        for each in models
    ]  # fmt: skip
    return (json.dumps({"version": 1, "models": rows}, indent=1, allow_nan=False) + "\n").encode()


def with_model(models: Sequence[ModelLosses], made: ModelLosses) -> tuple[ModelLosses, ...]:
    """These calibrations with a new one, in the place of the one of the same model and layout."""
    return (*(each for each in models if each.layout != made.layout), made)


def _model_losses(parsed: _ModelModel, field: str) -> ModelLosses:
    forms: dict[Chain, MeasuredLoss] = {}
    for name, each in parsed.forms.items():
        try:
            chain = parse_chain(name)
            if any(codec not in CALIBRATED_CODECS for codec in chain):
                raise ValueError(f"{chain[-1].value} has no loss that holds for every context")
            if shortest(chain) != chain:
                raise ValueError(f"{chain_name(shortest(chain))} has the same bytes")
            forms[chain] = MeasuredLoss(each.kl, each.kl_high, each.recall_loss, each.recall_loss_high)
        except ValueError as error:
            raise _refuse(f"{field}.forms.{name[:80]}", str(error)) from None
    return ModelLosses(
        model=parsed.model,
        num_layers=parsed.layers,
        width=parsed.width,
        element=Element[parsed.element.upper()],
        chunk_tokens=parsed.chunk_tokens,
        forms=forms,
        texts=parsed.texts,
        text_count=parsed.text_count,
        release=parsed.release,
    )


def _refuse(field: str, problem: str) -> WrongLossesError:
    return WrongLossesError(f"{field}: {problem}")
