"""From which size on the policy encodes chunks at all: what people are told who switched compression on. Pure.

Of a chunk of s bytes that is used f times a second, an eviction loses f·(s/home - s/memory) and frees s. Encoding it
loses f·(alpha·(1 - quality) + s/(ratio·memory) + s/decoded - s/memory) and frees s - s/ratio. The policy takes what
loses least for each byte that it frees: below some size the quality that is lost is always worth more than the
reload.
"""

from __future__ import annotations

import math

from descriptors.units import format_bytes
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.encoding import encoded_bytes_max
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.cache.policies.utility import UtilitySettings

_LAYER = LayerShape(512, 1024, Element.BFLOAT16)
"""An ordinary one, which says how much smaller a codec makes KV."""


def least_encoded_bytes(settings: UtilitySettings, codec: Codec) -> float:
    """The size from which on chunks are encoded with this codec rather than evicted; infinite where they never are."""
    figures = settings.codecs[codec]
    part = encoded_bytes_max(codec, _LAYER) / _LAYER.nbytes
    evicted_s = 1 / settings.home_bytes_per_s - 1 / settings.memory_bytes_per_s
    decoded_s = part / settings.memory_bytes_per_s + 1 / figures.decoded_bytes_per_s - 1 / settings.memory_bytes_per_s
    gain_s = (1 - part) * evicted_s - decoded_s  # for each byte
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
