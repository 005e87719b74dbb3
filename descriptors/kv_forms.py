"""The layout of exact chunks, which whoever puts them may declare, and the form of encoded ones, which only the server
writes. Both are values of headers, kept with the object.

    x-amz-objectcache-layout: layers=32;tokens=16;width=1024;element=bfloat16
    x-amz-objectcache-codec:  kivi4-1;layers=32;tokens=16;width=1024;element=bfloat16;error=0.0861;mean_error=0.0712

Where the chunk's model is calibrated, `;loss=0.0058` stands behind them (storage_server.planning.losses), and where it
was encoded with others before, `;before=kivi8-1>k8v4-1`.

`width` are the elements of one token's keys in a layer: KV heads times head dimension.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

from descriptors.descriptor import CHUNK_TOKENS_MAX, ELEMENT_BYTES, NUM_LAYERS_MAX

LAYOUT_RULE = "layers=L;tokens=G;width=W;element=float16, bfloat16 or float32"
WIDTH_MAX = 1 << 16
_LAYOUT = re.compile(r"layers=([0-9]{1,6});tokens=([0-9]{1,9});width=([0-9]{1,6});element=([a-z0-9]{1,16})")
_NUMBER = "([0-9.e+-]{1,24})"
_SIX_DIGITS_UP = Context(prec=6, rounding=ROUND_CEILING)
_CODEC = "[a-z0-9][a-z0-9._-]{0,31}"
_BEFORE_MAX = 8
_FORM = re.compile(
    rf"({_CODEC});({_LAYOUT.pattern});error={_NUMBER};mean_error={_NUMBER}(?:;loss={_NUMBER})?"
    rf"(?:;before=({_CODEC}(?:>{_CODEC}){{0,{_BEFORE_MAX - 1}}}))?"
)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV of a chunk: layers, tokens, elements of one token's keys, and their type. Raises ValueError."""

    num_layers: int
    tokens: int
    width: int
    element: str

    def __post_init__(self) -> None:
        if not 1 <= self.num_layers <= NUM_LAYERS_MAX or not 1 <= self.tokens <= CHUNK_TOKENS_MAX:
            raise ValueError(f"{self.num_layers} layers of {self.tokens} tokens")
        if not 1 <= self.width <= WIDTH_MAX or self.element not in ELEMENT_BYTES:
            raise ValueError(f"{self.width} elements of type {self.element!r}")

    @property
    def nbytes(self) -> int:
        """The bytes of an exact chunk."""
        return self.num_layers * 2 * self.tokens * self.width * ELEMENT_BYTES[self.element]

    @property
    def text(self) -> str:
        """The header's value."""
        return f"layers={self.num_layers};tokens={self.tokens};width={self.width};element={self.element}"

    @classmethod
    def parse(cls, text: str) -> KvLayout:
        """Raises ValueError for a text that is none."""
        found = _LAYOUT.fullmatch(text)
        if found is None:
            raise ValueError(f"no layout: {text!r}")
        layers, tokens, width, element = found.groups()
        return cls(int(layers), int(tokens), int(width), element)


@dataclass(frozen=True, slots=True)
class EncodedForm:
    """An encoded chunk: its codec, the layout of the exact one, and the errors of its layers, of keys and of values:
    the greatest, and the mean. `loss` is the calibrated one when it was encoded, in nats a token; 0 where there was no
    calibration. `before` are the codecs that it was encoded with earlier. Raises ValueError.
    """

    codec: str
    layout: KvLayout
    worst_error: float
    mean_error: float
    loss: float = 0.0
    before: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not all(0 <= each < math.inf for each in (self.mean_error, self.worst_error, self.loss)):
            raise ValueError("an error or a loss is a number from 0")

    @property
    def text(self) -> str:
        """The header's value. An error, and a loss, is told up to its sixth digit, rounded up."""
        worst, mean, loss = (f"{_rounded_up(each):.6g}" for each in (self.worst_error, self.mean_error, self.loss))
        told = f"{self.codec};{self.layout.text};error={worst};mean_error={mean}"
        told += f";loss={loss}" if self.loss else ""
        return told + (f";before={'>'.join(self.before)}" if self.before else "")

    @classmethod
    def parse(cls, text: str) -> EncodedForm:
        """Raises ValueError for a text that is none."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"no form: {text!r}")
        before = tuple(found[10].split(">")) if found[10] else ()
        return cls(found[1], KvLayout.parse(found[2]), float(found[7]), float(found[8]), float(found[9] or 0), before)


def _rounded_up(error: float) -> float:
    """In decimal digits, since a power of ten that scales the least numbers is none that a float holds."""
    return float(_SIX_DIGITS_UP.create_decimal(repr(error)))
