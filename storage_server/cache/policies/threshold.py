"""From which size on the policy encodes chunks at all: what people are told who switched compression on. Pure.

A use of an exact chunk of s bytes saves s/home - s/memory. Encoded to a part of its bytes it saves
s/home - alpha*(1 - quality) - part*s/memory - s/decoded, and takes part*s. The policy encodes it where that is
SAVED_OVER_EXACT_MIN times as much for each byte: below some size the quality that is lost is always worth more.
"""

from __future__ import annotations

import math

from descriptors.units import format_bytes
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.encoding import encoded_bytes_max
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.cache.policies.memory_ladder import SAVED_OVER_EXACT_MIN
from storage_server.cache.policies.utility import UtilitySettings

_LAYER = LayerShape(512, 1024, Element.BFLOAT16)
"""An ordinary one, which says how much smaller a codec makes KV."""


def least_encoded_bytes(settings: UtilitySettings, codec: Codec) -> float:
    """Say from which size on chunks are encoded with this codec; infinite where they never are."""
    figures = settings.codecs[codec]
    part = encoded_bytes_max(codec, _LAYER) / _LAYER.nbytes
    exact_s = 1 / settings.home_bytes_per_s - 1 / settings.memory_bytes_per_s  # saved, for each byte
    read_s = part / settings.memory_bytes_per_s + 1 / figures.decoded_bytes_per_s
    gain_s = 1 / settings.home_bytes_per_s - read_s - SAVED_OVER_EXACT_MIN * part * exact_s
    return settings.alpha_s * (1 - figures.quality) / gain_s if gain_s > 0 else math.inf


def told(settings: UtilitySettings | None) -> str:
    """A line that says what the policy encodes; empty without compression."""
    if settings is None:
        return ""
    least, name = min((least_encoded_bytes(settings, codec), codec.value) for codec in settings.codecs)
    if math.isinf(least):
        return "never encodes, because chunks come from home as soon as they are decoded (home_bytes_per_s)"
    if least < 1:
        return f"encodes chunks of any size ({name})"
    why = "of smaller ones the quality that is lost is worth more than the reload (alpha_s, home_bytes_per_s)"
    return f"encodes chunks from about {format_bytes(math.ceil(least))} on ({name}); {why}"
