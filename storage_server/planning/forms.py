"""A chunk's forms, in the DRAM tier or as a stored object: exact, or encoded layer by layer with one codec. Pure.

An encoded chunk has layer after layer, each of one size, so that a layer can be sent without looking at the others.
Therefore the lossless codec is not among the codecs of the tier: its sizes depend on the layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol, TypeVar

from descriptors.descriptor import Accept, Descriptor
from descriptors.kv_forms import EncodedForm, KvLayout
from objectcache.kv_codecs.chains import Chain
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.encoding import encoded_bytes_max
from objectcache.kv_codecs.layer import DROPPING, KIVI, Codec, LayerShape, takes
from objectcache.kv_codecs.loss import Loss
from storage_server.planning.losses import ChunksModel, LossTable, ToldLoss

TIER_CODECS = (*KIVI, Codec.FP8, *DROPPING)
_BY_NAME = {codec.value: codec for codec in TIER_CODECS}
_ELEMENTS = {"float16": Element.FLOAT16, "bfloat16": Element.BFLOAT16, "float32": Element.FLOAT32}
_ELEMENT_NAMES = {element: name for name, element in _ELEMENTS.items()}
KEPT_FORMS_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Encoded:
    """The form of an encoded chunk. The errors are those of its layers, of keys and of values, each against the exact
    one: the greatest, and the mean. `greatest` are the greatest of the keys and of the values, where they are known.
    `before` are the codecs that it was encoded with earlier, and `least_loss` is the loss that a stored object's label
    tells, in nats a token.
    """

    codec: Codec
    shape: LayerShape
    num_layers: int
    worst_error: float
    mean_error: float
    greatest: Loss | None = None
    before: Chain = ()
    least_loss: float = 0.0

    @property
    def chain(self) -> Chain:
        """The codecs that it has passed, the present one last."""
        return (*self.before, self.codec)

    @property
    def greatest_errors(self) -> Loss:
        """The greatest errors of the keys and of the values, or bounds of them."""
        return self.greatest or Loss(self.worst_error, self.worst_error)

    @property
    def layer_bytes(self) -> int:
        """The bytes of each of its layers."""
        return encoded_bytes_max(self.codec, self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the chunk."""
        return self.num_layers * self.layer_bytes

    @property
    def kept(self) -> EncodedForm:
        """As it is kept with an object."""
        shape = self.shape
        layout = KvLayout(self.num_layers, shape.tokens, shape.width, _ELEMENT_NAMES[shape.element])
        before = tuple(codec.value for codec in self.before)
        return EncodedForm(
            codec=self.codec.value,
            layout=layout,
            worst_error=self.worst_error,
            mean_error=self.mean_error,
            loss=self.least_loss,
            before=before,
        )


class Takes(Protocol):
    """Says which encoded chunks a reader takes."""

    def takes(self, encoded: Encoded) -> bool: ...


@dataclass(frozen=True, slots=True)
class LossView:
    """The losses of one reader's chunks, which are of `model`, and the most that it takes: None for any."""

    table: LossTable
    model: ChunksModel
    max_loss: float | None = None
    _known: dict[Hashable, ToldLoss] = field(init=False, default_factory=dict, compare=False, repr=False)
    """The losses of forms that were asked for: a delivery has many chunks, and few forms."""

    def told(self, encoded: Encoded) -> ToldLoss:
        """The loss of a chunk of this form. A label cannot make it less than the calibration says."""
        name = encoded.before, encoded.codec, encoded.shape, encoded.num_layers, encoded.least_loss
        known = self._known.get(name)
        if known is None:
            told = self.table.told(self.model, encoded.shape, encoded.num_layers, encoded.chain)
            known = self._known[name] = replace(told, kl=max(told.kl, encoded.least_loss))
        return known

    def takes(self, encoded: Encoded) -> bool:
        """Whether the loss of a chunk of this form is within the bound, and known where there is one."""
        return self.max_loss is None or self.told(encoded).kl <= self.max_loss


@dataclass(frozen=True, slots=True)
class Taken:
    """The forms that a lookup takes beside exact chunks: these codecs, of such elements, with at most `max_error`, and
    with a loss within the bound.
    """

    codecs: tuple[Codec, ...]
    element: Element
    max_error: float | None = None
    losses: LossView | None = None

    def takes(self, encoded: Encoded) -> bool:
        """Whether a chunk of this form counts."""
        if encoded.codec not in self.codecs or encoded.shape.element is not self.element:
            return False
        return _is_within(encoded, self.max_error, self.losses)

    def bounded(self, max_error: float | None, max_loss: float | None = None) -> Taken:
        """The same, with an error and a loss of at most that."""
        return replace(self, max_error=_least(self.max_error, max_error), losses=_bounded(self.losses, max_loss))


@dataclass(frozen=True, slots=True)
class Reading:
    """One reader's chunks: their shape, and the encoded forms that it takes: none, or some of `codecs` with at most
    `max_error`, and with a loss within the bound. Chunks of one bucket are expected to lose alike.
    """

    shape: LayerShape
    num_layers: int
    codecs: tuple[Codec, ...]
    max_error: float | None = None
    bucket: str = ""
    losses: LossView | None = None

    @property
    def exact_bytes(self) -> int:
        """The bytes of an exact chunk."""
        return self.num_layers * self.shape.nbytes

    def chunk_bytes(self, codec: Codec) -> int:
        """The bytes of an encoded chunk."""
        return self.num_layers * encoded_bytes_max(codec, self.shape)

    def takes(self, encoded: Encoded) -> bool:
        """Whether the reader takes a chunk of this form."""
        if encoded.codec not in self.codecs or not self.is_shape_of(encoded):
            return False
        return _is_within(encoded, self.max_error, self.losses)

    def loss_of(self, chain: Chain) -> float:
        """The loss of a chunk of this reader's that has passed these codecs; 0 for readers without a bound."""
        if self.losses is None or self.losses.max_loss is None:
            return 0.0
        return self.losses.table.told(self.losses.model, self.shape, self.num_layers, chain).kl

    def bears(self, loss: float) -> bool:
        """Whether a chunk with this loss is within the bound."""
        return self.losses is None or self.losses.max_loss is None or loss <= self.losses.max_loss

    def is_shape_of(self, other: Encoded | Reading) -> bool:
        """Whether the reader's chunks have the shape of this one, or of another reader's."""
        return other.shape == self.shape and other.num_layers == self.num_layers

    def bounded(self, max_error: float | None, max_loss: float | None = None) -> Reading:
        """The same reading, with an error and a loss of at most that."""
        return replace(self, max_error=_least(self.max_error, max_error), losses=_bounded(self.losses, max_loss))


Bounded = TypeVar("Bounded", Reading, Taken)


def reading_of(descriptor: Descriptor, bucket: str, table: LossTable) -> Reading | None:
    """The reading of a descriptor of chunks in this bucket; None where it takes exact chunks only, or codecs that are
    all unknown here.
    """
    accept = descriptor.accept
    if accept is None:
        return None
    codecs, element = _known(accept), _ELEMENTS[accept.element]
    width = descriptor.per_layer_chunk_bytes // (2 * descriptor.chunk_tokens * element.nbytes)
    shape = LayerShape(descriptor.chunk_tokens, width, element)
    smaller = [
        codec for codec in codecs if takes(codec, shape.tokens) and encoded_bytes_max(codec, shape) < shape.nbytes
    ]
    if not smaller:
        return None
    losses = _losses(accept, bucket, descriptor.chunk_keys, table)
    return Reading(
        shape=shape,
        num_layers=descriptor.num_layers,
        codecs=tuple(smaller),
        max_error=accept.max_error,
        bucket=bucket,
        losses=losses,
    )


def taken_of(accept: Accept | None, bucket: str, keys: Sequence[str], table: LossTable) -> Taken | None:
    """The encoded chunks that a lookup of these keys with this `accept` takes; None for exact chunks only."""
    if accept is None:
        return None
    losses = _losses(accept, bucket, keys, table)
    return Taken(_known(accept), _ELEMENTS[accept.element], accept.max_error, losses)


def _losses(accept: Accept, bucket: str, keys: Sequence[str], table: LossTable) -> LossView | None:
    """None where nobody asks for losses, and none are known."""
    if accept.max_loss is None and not table.models:
        return None
    return LossView(table, table.model_of(bucket, keys), accept.max_loss)


@lru_cache(KEPT_FORMS_MAX)
def kept_form(text: str) -> Encoded | None:
    """The form of a stored object by its header; None for one that nobody can read here, as of a later release."""
    try:
        found = EncodedForm.parse(text)
        layout = found.layout
        return Encoded(
            codec=_BY_NAME[found.codec],
            shape=shape_of(layout),
            num_layers=layout.num_layers,
            worst_error=found.worst_error,
            mean_error=found.mean_error,
            before=tuple(_BY_NAME[name] for name in found.before),
            least_loss=found.loss,
        )
    except (ValueError, KeyError):
        return None


def shape_of(layout: KvLayout) -> LayerShape:
    """The shape of one layer."""
    return LayerShape(layout.tokens, layout.width, _ELEMENTS[layout.element])


def _known(accept: Accept) -> tuple[Codec, ...]:
    return tuple(_BY_NAME[name] for name in accept.codecs if name in _BY_NAME)


def _is_within(encoded: Encoded, max_error: float | None, losses: LossView | None) -> bool:
    if max_error is not None and not encoded.worst_error <= max_error:
        return False
    return losses is None or losses.takes(encoded)


def _bounded(losses: LossView | None, max_loss: float | None) -> LossView | None:
    """Where no losses are known, a bound leaves exact chunks only."""
    if max_loss is None:
        return losses
    if losses is None:
        return LossView(LossTable(), ChunksModel(), max_loss)
    return LossView(losses.table, losses.model, _least(losses.max_loss, max_loss))


def _least(*bounds: float | None) -> float | None:
    return min((bound for bound in bounds if bound is not None), default=None)
