"""A use of a chunk costs its delay in the form and place where it is, and the quality that it loses. Source: AdaptCache
(002), "utility definition".

    U = frequency * (alpha * quality - bytes / bandwidth - decoding)        kept
    U = frequency * (alpha * 1       - computing or loading)               evicted, or the reader does not take it

A use so costs `alpha * (1 - quality) + delay` seconds, and what one form is worth over another is the difference of
their costs. 002's text says "the product of its estimated future occurrence frequency and its quality-delay weighted
sum". The formula that is printed there leaves the delay out of the brackets, so that an entry that is never used would
still cost its loading time. The text is followed here. Decoding, computing again, and readers that do not take a form
are ours: 002 has the first in its estimator, counts no misses, and lets every reader take every form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from objectcache.kv_codecs.layer import Codec


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """A codec as it was measured: its quality (1 is that of exact KV), and the bytes of exact KV that one core decodes
    in a second.
    """

    quality: float
    decoded_bytes_per_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.quality <= 1 or not self.decoded_bytes_per_s > 0:
            raise ValueError("a quality is from 0 to 1, and a decoder has a speed")


@dataclass(frozen=True, slots=True)
class UtilitySettings:
    """`alpha_s` are the seconds that quality 1 is worth. `memory_bytes_per_s` and `home_bytes_per_s` are the rates at
    which chunks are delivered from memory, and from the home. Codecs that have no figures are not used.
    `class_qualities` are the qualities on content of a class, where they are other ones.
    """

    codecs: Mapping[Codec, CodecFigures] = field(default_factory=dict)
    class_qualities: Mapping[str, Mapping[Codec, float]] = field(default_factory=dict)
    alpha_s: float = 1.0
    memory_bytes_per_s: float = 8e9
    home_bytes_per_s: float = 1e9


@dataclass(frozen=True, slots=True)
class Form:
    """One way to keep a chunk: its bytes, its quality (1 for exact ones), and the seconds that decoding takes. `taken`
    is the part of the uses whose readers take this form.
    """

    codec: str
    nbytes: int
    quality: float = 1.0
    decode_s: float = 0.0
    taken: float = 1.0


def use_cost_s(form: Form, bytes_per_s: float, alpha_s: float, reload_s: float = 0.0) -> float:
    """The seconds that a use costs, the lost quality among them, where the form is read at `bytes_per_s`. Readers that
    do not take it wait `reload_s` for the exact bytes.
    """
    cost_s = alpha_s * (1 - form.quality) + form.nbytes / bytes_per_s + form.decode_s
    return cost_s if form.taken == 1 else form.taken * cost_s + (1 - form.taken) * reload_s
