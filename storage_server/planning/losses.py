"""The losses of encoded chunks, by what `objectcache calibrate quality` measured on models. Pure.

A loss is the upper end of the 95 % interval of the KL a token, in nats, from the model's answers on exact KV to those
on KV that is all in this form. It holds for the model that was measured, with its layers, width and elements:

    kivi4-1 of SmolLM2 (30 layers x 192, bfloat16)    0.0058    calibrated
    its half of the heads, by keys of two ranks       0.0058    the pieces together are the measured KV
    its chunks of 256 tokens as LMCache has them      0.0058    one layer of 7,680 rows, in the same groups
    the same name, 32 layers x 1,024                  none      the calibration is of another layout
    a model that was not measured                     none, or in a bucket with "worst" the greatest of all models

Chunks may have any number of tokens where groups of at most 32 share a scale (KIVI). FP8 has one scale for a chunk, so
chunks with more tokens than the measured ones, or with several layers in one, are not calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from descriptors.layer_forms import LossBasis
from descriptors.prefix_keys import LMCACHE_ROOT, ONE_RANK, RankCounts, model_of_all, rank_counts_of
from objectcache.kv_codecs.chains import Chain, shortest
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.layer import GROUP_MAX, KIVI, LayerShape, group_of

WORST = "worst"
"""In place of a bucket's model: chunks that are not calibrated have the greatest loss of all models."""


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

    def is_of(self, model: ChunksModel, shape: LayerShape, num_layers: int) -> bool:
        """Whether chunks of this model with these layers are encoded as the measured ones were: they are whole, or one
        rank's part of its heads and layers, or they have all layers one after the other as rows of one.
        """
        if self.model != model.name or self.element is not shape.element:
            return False
        if model.joins_layers:
            is_in_groups = shape.tokens % (self.num_layers * GROUP_MAX) == 0
            return num_layers == 1 and self.width == shape.width and is_in_groups
        tp_size, pp_size = model.ranks
        part, rest = divmod(self.width, shape.width)
        is_rank = not rest and part > 0 and tp_size % part == 0 and group_of(shape.width) <= group_of(self.width)
        least = self.num_layers // pp_size
        return is_rank and num_layers in ((least, least + 1) if self.num_layers % pp_size else (least,))

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


@dataclass(frozen=True, slots=True)
class ChunksModel:
    """The model of a reader's chunks, empty where it is not known; and whether the greatest loss of all models counts
    where it is not calibrated. A chunk is one rank's of `ranks`; with `joins_layers` all layers are rows of one.
    """

    name: str = ""
    takes_worst: bool = False
    ranks: RankCounts = ONE_RANK
    joins_layers: bool = False


@dataclass(frozen=True)
class LossTable:
    """All calibrations, each of another model or layout, and the models of buckets, for chunks whose keys name none:
    WORST has the greatest loss count for all chunks of the bucket that are not calibrated.
    """

    models: tuple[ModelLosses, ...] = ()
    bucket_models: Mapping[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(len(self.models))

    def model_of(self, bucket: str, keys: Sequence[str]) -> ChunksModel:
        """The model of a bucket's chunks with these keys."""
        named, of_bucket = model_of_all(keys), self.bucket_models.get(bucket, "")
        takes_worst = of_bucket == WORST
        name = named or "" if takes_worst or named is None else named or of_bucket
        joins_layers = bool(named) and keys[0].startswith(f"{LMCACHE_ROOT}/")
        return ChunksModel(name, takes_worst, rank_counts_of(keys) if name else ONE_RANK, joins_layers)

    def told(self, model: ChunksModel, shape: LayerShape, num_layers: int, chain: Chain) -> ToldLoss:
        """The loss of a chunk of this model whose present form came by `chain`."""
        form = shortest(chain)
        found = self._found(model, shape, num_layers)
        is_in_groups = not model.joins_layers or form[-1] in KIVI
        if found is not None and is_in_groups and math.isfinite(kl := found.loss(shape, form)):
            return ToldLoss(kl, LossBasis.CALIBRATED)
        if model.takes_worst:
            worst = max((each.loss(shape, form) for each in self.models), default=math.inf)
            if math.isfinite(worst):
                return ToldLoss(worst, LossBasis.WORST)
        return ToldLoss(math.inf, LossBasis.UNCALIBRATED)

    def basis(self, model: ChunksModel, shape: LayerShape, num_layers: int) -> LossBasis:
        """The ground on which chunks of this model may come encoded, or have to come exactly."""
        if self._found(model, shape, num_layers) is not None:
            return LossBasis.CALIBRATED
        return LossBasis.WORST if model.takes_worst and self.models else LossBasis.UNCALIBRATED

    def problem(self, model: ChunksModel, shape: LayerShape, num_layers: int) -> str | None:
        """The reason why chunks of this model are not calibrated, for people; None where they are."""
        if self._found(model, shape, num_layers) is not None:
            return None
        if not model.name:
            return "their keys name no model, or several, and [compression.models] names none for the bucket"
        others = [each for each in self.models if each.model == model.name]
        if not others:
            return f"{model.name} is not among the {len(self.models)} calibrated models"
        measured = ", ".join(f"{each.num_layers} layers x {each.width} {_name(each.element)}" for each in others)
        return (
            f"{model.name} was measured on {measured}; the chunks have {num_layers} layers x {shape.width} "
            f"{_name(shape.element)}"
        )

    def _found(self, model: ChunksModel, shape: LayerShape, num_layers: int) -> ModelLosses | None:
        return next((each for each in self.models if each.is_of(model, shape, num_layers)), None)


def _name(element: Element) -> str:
    return element.name.lower()
