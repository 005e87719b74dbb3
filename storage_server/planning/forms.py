"""A chunk's forms, in the DRAM tier or as a stored object: exact, or encoded layer by layer with one codec. Pure.

An encoded chunk has layer after layer, each of one size, so that a layer can be sent without looking at the others.
Therefore the lossless codec is not among the codecs of the tier: its sizes depend on the layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeVar

from descriptors.descriptor import Accept, Descriptor
from descriptors.kv_forms import EncodedForm, KvLayout
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.encoding import encoded_bytes_max
from objectcache.kv_codecs.layer import DROPPING, KIVI, Codec, LayerShape, takes
from objectcache.kv_codecs.loss import Loss

TIER_CODECS = (*KIVI, Codec.FP8, *DROPPING)
_BY_NAME = {codec.value: codec for codec in TIER_CODECS}
_ELEMENTS = {"float16": Element.FLOAT16, "bfloat16": Element.BFLOAT16, "float32": Element.FLOAT32}
_ELEMENT_NAMES = {element: name for name, element in _ELEMENTS.items()}
KEPT_FORMS_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Encoded:
    """The form of an encoded chunk. The errors are those of its layers, of keys and of values, each against the exact
    one: the greatest, and the mean. `greatest` are the greatest of the keys and of the values, where they are known.
    """

    codec: Codec
    shape: LayerShape
    num_layers: int
    worst_error: float
    mean_error: float
    greatest: Loss | None = None

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
        return EncodedForm(self.codec.value, layout, self.worst_error, self.mean_error)


class Takes(Protocol):
    """Says which encoded chunks a reader takes."""

    def takes(self, encoded: Encoded) -> bool: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """The forms that a lookup takes beside exact chunks: these codecs, of such elements, with at most `max_error`."""

    codecs: tuple[Codec, ...]
    element: Element
    max_error: float | None = None

    def takes(self, encoded: Encoded) -> bool:
        """Whether a chunk of this form counts."""
        if encoded.codec not in self.codecs or encoded.shape.element is not self.element:
            return False
        return self.max_error is None or encoded.worst_error <= self.max_error

    def bounded(self, max_error: float | None) -> Taken:
        """The same, with an error of at most that."""
        return replace(self, max_error=_least(self.max_error, max_error))


@dataclass(frozen=True, slots=True)
class Reading:
    """One reader's chunks: their shape, and the encoded forms that it takes: none, or some of `codecs` with at most
    `max_error`. Chunks of one bucket are expected to lose alike.
    """

    shape: LayerShape
    num_layers: int
    codecs: tuple[Codec, ...]
    max_error: float | None = None
    bucket: str = ""

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
        return self.max_error is None or encoded.worst_error <= self.max_error

    def is_shape_of(self, other: Encoded | Reading) -> bool:
        """Whether the reader's chunks have the shape of this one, or of another reader's."""
        return other.shape == self.shape and other.num_layers == self.num_layers

    def bounded(self, max_error: float | None) -> Reading:
        """The same reading, with an error of at most that."""
        return replace(self, max_error=_least(self.max_error, max_error))


Bounded = TypeVar("Bounded", Reading, Taken)


def reading_of(descriptor: Descriptor, bucket: str) -> Reading | None:
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
    return Reading(shape, descriptor.num_layers, tuple(smaller), accept.max_error, bucket) if smaller else None


def taken_of(accept: Accept | None) -> Taken | None:
    """The encoded chunks that a lookup with this `accept` takes; None for exact chunks only."""
    return None if accept is None else Taken(_known(accept), _ELEMENTS[accept.element], accept.max_error)


@lru_cache(KEPT_FORMS_MAX)
def kept_form(text: str) -> Encoded | None:
    """The form of a stored object by its header; None for one that nobody can read here, as of a later release."""
    try:
        found = EncodedForm.parse(text)
        layout = found.layout
        return Encoded(_BY_NAME[found.codec], shape_of(layout), layout.num_layers, found.worst_error, found.mean_error)
    except (ValueError, KeyError):
        return None


def shape_of(layout: KvLayout) -> LayerShape:
    """The shape of one layer."""
    return LayerShape(layout.tokens, layout.width, _ELEMENTS[layout.element])


def _known(accept: Accept) -> tuple[Codec, ...]:
    return tuple(_BY_NAME[name] for name in accept.codecs if name in _BY_NAME)


def _least(*bounds: float | None) -> float | None:
    return min((bound for bound in bounds if bound is not None), default=None)
