"""People are told from which size on chunks are encoded, and the policy holds to it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.cache.policies.memory_policy import MemoryPolicy
from storage_server.cache.policies.reader_forms import ChunkUse
from storage_server.cache.policies.threshold import least_encoded_bytes, told
from storage_server.cache.policies.utility import CodecFigures, UtilitySettings
from storage_server.planning.forms import Reading

SAMPLE = UtilitySettings({Codec.KIVI4: CodecFigures(0.96, 4e9)}, alpha_s=0.25)
"""That of docs/guides/compression.md."""


def encodes(settings: UtilitySettings, tokens: int) -> bool:
    """Whether one of eight chunks is encoded in a memory that has room for four of them."""
    reading = Reading(LayerShape(tokens, 1024, Element.BFLOAT16), 32, tuple(settings.codecs))
    policy = MemoryPolicy(4 * reading.exact_bytes, settings)
    for now_s in range(40):
        keys = [(f"chunk {(now_s + place) % 8}", 0) for place in range(2)]
        decision = policy.request(float(now_s), [ChunkUse(key, reading.exact_bytes) for key in keys], reading)
        if decision.recoded or any(encoding is not None for encoding in decision.admitted.values()):
            return True
    return False


@pytest.mark.parametrize("alpha_s", [0.05, 0.25, 0.4])
def test_the_policy_encodes_from_about_that_size_on(alpha_s: float) -> None:
    """Near the border it depends on what else fits: so sizes on both sides of it are counted."""
    settings = replace(SAMPLE, alpha_s=alpha_s)
    token_bytes = LayerShape(1, 1024, Element.BFLOAT16).nbytes * 32
    tokens = least_encoded_bytes(settings, Codec.KIVI4) / token_bytes
    smaller = [encodes(settings, int(tokens * part / 20) + 1) for part in range(3, 15)]
    larger = [encodes(settings, int(tokens * part / 20) + 1) for part in range(32, 80, 3)]
    assert sum(smaller) < 0.4 * len(smaller)
    assert sum(larger) > 0.6 * len(larger)


def test_a_home_as_fast_as_memory_leaves_nothing_to_encode() -> None:
    settings = replace(SAMPLE, home_bytes_per_s=8e9)
    assert math.isinf(least_encoded_bytes(settings, Codec.KIVI4))
    assert told(settings).startswith("never encodes, because")
    assert not encodes(settings, 4096)


def test_a_line_says_from_which_size_on() -> None:
    assert told(None) == ""
    assert "kivi4-1" in told(SAMPLE)
    assert "from about 31.71 MiB on" in told(SAMPLE), "docs/guides/compression.md says about 32 MiB"
