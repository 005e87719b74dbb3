"""The losses of encoded chunks, by what `objectcache calibrate quality` measured on models. Pure.

A loss is the upper end of the 95 % interval of the KL a token, in nats, from the model's answers on exact KV to those
on KV that is all in this form. It holds for the model that was measured, with its layers, width and elements:

    kivi4-1 of SmolLM2 (30 layers x 192, bfloat16)    0.0058    calibrated
    the same name, 32 layers x 1,024                  none      the calibration is of another layout
    a model that was not measured                     none, or with `uncalibrated = "worst"` the greatest of all models

Chunks may have any number of tokens where groups of at most 32 share a scale (KIVI). FP8 has one scale for a chunk, so
chunks with more tokens than the measured ones are not calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from descriptors.layer_forms import LossBasis
from descriptors.prefix_keys import model_of_all
from objectcache.kv_codecs.chains import Chain, shortest
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.layer import KIVI, LayerShape


class Uncalibrated(Enum):
    """The loss of chunks of a model that was not calibrated: none is known, so that readers with a bound get exact
    bytes; or the greatest of all calibrated models.
    """

    EXACT = "exact"
    WORST = "worst"


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """The KL a token in nats, and the change of a fact's log-probability in nats, as a loss: means over the texts, and
    the upper ends of their 95 % intervals.
    """

    kl: float
    kl_high: float
    recall_loss: float
    recall_loss_high: float

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.kl, self.kl_high, self.recall_loss, self.recall_loss_high))):
            raise ValueError("a loss is a number")
        if not 0 <= self.kl <= self.kl_high or not self.recall_loss <= self.recall_loss_high:
            raise ValueError("kl is from 0 on, and no upper end is below its mean")


@dataclass(frozen=True, slots=True)
class ModelLosses:
    """The calibration of one model: its layout, the tokens of the chunks that were encoded, the loss of each form, and
    the texts and the release that it was measured with.
    """

    model: str
    num_layers: int
    width: int
    element: Element
    chunk_tokens: int
    forms: Mapping[Chain, MeasuredLoss]
    texts: str
    text_count: int
    release: str

    @property
    def layout(self) -> tuple[str, int, int, Element]:
        """The name and the layout, which only one calibration has."""
        return self.model, self.num_layers, self.width, self.element

    def loss(self, shape: LayerShape, chain: Chain) -> float:
        """The loss of chunks of this shape; infinite where it was not measured."""
        if chain[-1] not in KIVI and shape.tokens > self.chunk_tokens:
            return math.inf
        found = self.forms.get(chain)
        return math.inf if found is None else found.kl_high


@dataclass(frozen=True, slots=True)
class ToldLoss:
    """A chunk's loss, infinite where it is not known, and the ground of the figure."""

    kl: float
    basis: LossBasis


@dataclass(frozen=True, eq=False)
class LossTable:
    """All calibrations, and the models of buckets, for chunks whose keys name none. Raises ValueError for two of one
    model and layout.
    """

    models: tuple[ModelLosses, ...] = ()
    bucket_models: Mapping[str, str] = field(default_factory=dict)
    uncalibrated: Uncalibrated = Uncalibrated.EXACT
    _by_layout: dict[tuple[str, int, int, Element], ModelLosses] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for each in self.models:
            if each.layout in self._by_layout:
                raise ValueError(f"{each.model} is there twice with the same layout")
            self._by_layout[each.layout] = each

    def told(self, model: str, shape: LayerShape, num_layers: int, chain: Chain) -> ToldLoss:
        """The loss of a chunk of this model whose present form came by `chain`."""
        form = shortest(chain)
        found = self._found(model, shape, num_layers)
        if found is not None and math.isfinite(kl := found.loss(shape, form)):
            return ToldLoss(kl, LossBasis.CALIBRATED)
        if self.uncalibrated is Uncalibrated.WORST:
            worst = max((each.loss(shape, form) for each in self.models), default=math.inf)
            if math.isfinite(worst):
                return ToldLoss(worst, LossBasis.WORST)
        return ToldLoss(math.inf, LossBasis.UNCALIBRATED)

    def model_of(self, bucket: str, keys: Sequence[str]) -> str:
        """The model of a bucket's chunks with these keys; empty where it is not known, or more than one."""
        named = model_of_all(keys)
        return "" if named is None else named or self.bucket_models.get(bucket, "")

    def basis(self, model: str, shape: LayerShape, num_layers: int) -> LossBasis:
        """The ground on which chunks of this model may come encoded, or have to come exactly."""
        if self._found(model, shape, num_layers) is not None:
            return LossBasis.CALIBRATED
        is_worst = self.uncalibrated is Uncalibrated.WORST and bool(self.models)
        return LossBasis.WORST if is_worst else LossBasis.UNCALIBRATED

    def problem(self, model: str, shape: LayerShape, num_layers: int) -> str | None:
        """The reason why chunks of this model are not calibrated, for people; None where they are."""
        if self._found(model, shape, num_layers) is not None:
            return None
        if not model:
            return "their keys name no model, or several, and so does no [compression.models] for the bucket"
        others = [each for each in self.models if each.model == model]
        if not others:
            return f"{model} is not among the {len(self.models)} calibrated models"
        measured = ", ".join(f"{each.num_layers} layers x {each.width} {_name(each.element)}" for each in others)
        return (
            f"{model} was measured on {measured}; the chunks have {num_layers} layers x {shape.width} "
            f"{_name(shape.element)}"
        )

    def _found(self, model: str, shape: LayerShape, num_layers: int) -> ModelLosses | None:
        return self._by_layout.get((model, num_layers, shape.width, shape.element)) if model else None


def _name(element: Element) -> str:
    return element.name.lower()
