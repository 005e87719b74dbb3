"""Chains: the codecs that a chunk has passed, one after the other, the present one last.

    kivi8-1>kivi4-1      8 bits, encoded further to 4: it loses more than kivi4-1, which is made from the exact chunk

Keys, and values, that keep their bits keep their payload. So two chains whose keys pass the same bits, and whose values
do, have the same bytes, and are one form: the shorter one stands for both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations, pairwise

from objectcache.kv_codecs.layer import KIVI, Codec, goes_on

Chain = tuple[Codec, ...]
CHAINS_MAX = 16
"""Chains that are measured: each takes as long as a codec."""
_JOINT = ">"
_BY_NAME = {codec.value: codec for codec in Codec}


def chain_name(chain: Sequence[Codec]) -> str:
    """The name of a chain. That of one codec is the codec's."""
    return _JOINT.join(codec.value for codec in chain)


def parse_chain(text: str) -> Chain:
    """The inverse of `chain_name`. Raises ValueError for codecs that are not known, or that do not go on."""
    parts = text.split(_JOINT)
    if unknown := [part for part in parts if part not in _BY_NAME]:
        raise ValueError(f"{unknown[0][:40]!r} is no codec")
    chain = tuple(_BY_NAME[part] for part in parts)
    for before, after in pairwise(chain):
        if before is Codec.EXACT or not goes_on(before, after):
            raise ValueError(f"{after.value} does not go on from {before.value}")
    return chain


def shortest(chain: Sequence[Codec]) -> Chain:
    """The shortest chain of the same bytes. Example: kivi8-1>k8v4-1>kivi4-1 is kivi8-1>kivi4-1."""
    found = tuple(chain)
    while shorter := _one_shorter(found):
        found = shorter
    return found


def _one_shorter(chain: Chain) -> Chain | None:
    for at in range(len(chain) - 1):
        rest = chain[:at] + chain[at + 1 :]
        if _paths(rest) == _paths(chain) and all(goes_on(*pair) for pair in pairwise(rest)):
            return rest
    return None


def chains_of(codecs: Collection[Codec]) -> tuple[Chain, ...]:
    """The chains of two and more of these codecs, as a memory that has them makes them: each once, CHAINS_MAX at most,
    the shortest first.
    """
    kivi = [codec for codec in KIVI if codec in codecs]
    every = (chain for count in range(2, len(kivi) + 1) for chain in combinations(kivi, count))
    able = (chain for chain in every if all(goes_on(*pair) for pair in pairwise(chain)))
    return tuple(dict.fromkeys(chain for chain in able if shortest(chain) == chain))[:CHAINS_MAX]


def _paths(chain: Sequence[Codec]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bits that the keys pass, and that the values do."""
    keys = [codec.key_bits for codec in chain]
    values = [codec.value_bits for codec in chain]
    return _changes(keys), _changes(values)


def _changes(bits: Sequence[int]) -> tuple[int, ...]:
    return tuple(each for at, each in enumerate(bits) if at == 0 or bits[at - 1] != each)
