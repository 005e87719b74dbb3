"""The shape of a layer of one chunk, and the codecs by name.

A layer is what KV_L2TD has of one chunk (descriptors.layout): keys, then values; of each, token after token, and of a
token all heads. Its S bytes are 2 * tokens * width * element bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from objectcache.kv_codecs.elements import Element

WIDTH_MAX = 1 << 16
TOKENS_MAX = 1 << 16
GROUP_MAX = 32
"""Elements that share a scale, at most."""
RUN_TOKENS_MIN = 128
"""Codecs that drop tokens take no fewer: a shorter chunk is a piece of a context, and no whole one."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Tokens of the chunk, and elements of one token's keys: KV heads times head dimension. Raises ValueError."""

    tokens: int
    width: int
    element: Element

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= TOKENS_MAX or not 1 <= self.width <= WIDTH_MAX:
            raise ValueError(f"a layer of {self.tokens} tokens and {self.width} elements")

    @property
    def half_elements(self) -> int:
        """Elements of the keys, and of the values."""
        return self.tokens * self.width

    @property
    def nbytes(self) -> int:
        """S."""
        return 2 * self.half_elements * self.element.nbytes


class Codec(Enum):
    """The codecs. The value is what an encoded layer's head, and the wire, have; it never changes its meaning."""

    EXACT = "exact"
    LOSSLESS = "lossless-1"
    FP8 = "fp8-1"
    KIVI8 = "kivi8-1"
    K8V4 = "k8v4-1"
    KIVI4 = "kivi4-1"
    K4V3 = "k4v3-1"
    KIVI3 = "kivi3-1"
    K4V2 = "k4v2-1"
    KIVI2 = "kivi2-1"
    STREAMING50 = "streaming50-1"
    STREAMING25 = "streaming25-1"
    KEYDIFF50 = "keydiff50-1"
    KEYDIFF25 = "keydiff25-1"

    @property
    def key_bits(self) -> int:
        """Bits of an element of the keys; 0 for codecs that have no fixed number."""
        return _BITS.get(self, (0, 0))[0]

    @property
    def value_bits(self) -> int:
        """Bits of an element of the values; 0 for codecs that have no fixed number."""
        return _BITS.get(self, (0, 0))[1]

    @property
    def is_lossy(self) -> bool:
        """Whether other bytes come back."""
        return self not in (Codec.EXACT, Codec.LOSSLESS)

    @property
    def drops_tokens(self) -> bool:
        """Whether some tokens are left out, so that only readers that can attend to fewer of them take it."""
        return self in DROPPING

    @property
    def number(self) -> int:
        """In the head of an encoded layer."""
        return _NUMBERS[self]


_NUMBERS = {
    Codec.EXACT: 0, Codec.LOSSLESS: 1, Codec.FP8: 2, Codec.KIVI8: 8, Codec.KIVI4: 4, Codec.KIVI3: 3, Codec.KIVI2: 12,
    Codec.K8V4: 84, Codec.K4V3: 43, Codec.K4V2: 42,
    Codec.STREAMING50: 32, Codec.STREAMING25: 33, Codec.KEYDIFF50: 34, Codec.KEYDIFF25: 35,
}  # fmt: skip
_BITS = {
    Codec.KIVI8: (8, 8), Codec.K8V4: (8, 4), Codec.KIVI4: (4, 4), Codec.K4V3: (4, 3), Codec.KIVI3: (3, 3),
    Codec.K4V2: (4, 2), Codec.KIVI2: (2, 2), Codec.FP8: (8, 8),
}  # fmt: skip
KIVI = (Codec.KIVI8, Codec.K8V4, Codec.KIVI4, Codec.K4V3, Codec.KIVI3, Codec.K4V2, Codec.KIVI2)
"""Models bear errors of the values better than errors of the keys, so some have fewer bits for the values."""
STREAMING = (Codec.STREAMING50, Codec.STREAMING25)
KEYDIFF = (Codec.KEYDIFF50, Codec.KEYDIFF25)
DROPPING = (*STREAMING, *KEYDIFF)
_KEPT_PARTS = {Codec.STREAMING50: 2, Codec.STREAMING25: 4, Codec.KEYDIFF50: 2, Codec.KEYDIFF25: 4}


def goes_on(before: Codec, after: Codec) -> bool:
    """Whether a layer that is encoded is encoded further without the exact one: from KIVI to KIVI, by fewer bits of the
    keys, of the values or of both, and more of neither. The error is then at most that of both. FP8 does not go on: the
    bound would be a quarter above the error of four bits, and readers refuse chunks by the bound. Exact layers are
    encoded in any way. With few tokens scales may take more bytes than fewer bits save: the layer is then larger.
    """
    if before is Codec.EXACT:
        return after is not Codec.EXACT
    if before is after or before not in KIVI or after not in KIVI:
        return False
    return after.key_bits <= before.key_bits and after.value_bits <= before.value_bits


def takes(codec: Codec, tokens: int) -> bool:
    """Whether a codec encodes chunks of so many tokens."""
    return not codec.drops_tokens or tokens >= RUN_TOKENS_MIN


def kept_count(codec: Codec, tokens: int) -> int:
    """How many of a chunk's tokens an encoded layer has."""
    return -(-tokens // _KEPT_PARTS[codec]) if codec.drops_tokens else tokens


def group_of(elements: int) -> int:
    """Elements that share a scale: as many as divide them, at most GROUP_MAX. Example: 48 elements, groups of 24."""
    return next(size for size in range(min(GROUP_MAX, elements), 0, -1) if elements % size == 0)
