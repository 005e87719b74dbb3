"""The readers of a chunk: its decayed uses, by the forms that their readers take. A form that only some of them take is
worth less: the others have the exact bytes loaded. Pure.

    of ten uses three take exact bytes only   ->  exact: taken by all;  4 bits: taken by 0.7
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kv_codecs.layer import Codec
from storage_server.compression.forms import Reading
from storage_server.compression.utility import Form

KINDS_MAX = 4
"""Kinds of readers that are remembered for each chunk."""
COUNT_PART_MIN = 1 / 64
"""A kind with a smaller part of the uses is forgotten."""


@dataclass(frozen=True, eq=False, slots=True)
class Kind:
    """Readers that take the same forms, of which the first is exact. `reading` is theirs; None where they take exact
    bytes only. Kinds are compared as objects.
    """

    forms: tuple[Form, ...]
    reading: Reading | None = None


Uses = tuple[tuple[Kind, float], ...]
"""Kinds with their counts, the last one last."""


def with_use(uses: Uses, kind: Kind, weight: float) -> Uses:
    """These uses and one more."""
    if not uses:
        return ((kind, weight),)
    if len(uses) == 1 and uses[0][0] is kind:
        return ((kind, uses[0][1] + weight),)
    own = weight + sum(count for each, count in uses if each is kind)
    others = [each for each in uses if each[0] is not kind]
    least = COUNT_PART_MIN * (own + use_count(others))
    others = [each for each in others if each[1] >= least]
    while len(others) >= KINDS_MAX:
        others.remove(min(others, key=lambda each: each[1]))
    return (*others, (kind, own))


def taking(uses: Uses, errors: Mapping[Codec, float]) -> Uses:
    """Without the kinds that would take a form of the chunk whose error is known to be too great for them."""
    return tuple((kind, count) for kind, count in uses if not any(_is_too_much(kind, *each) for each in errors.items()))


def scaled(uses: Uses, factor: float) -> Uses:
    """The same with all counts multiplied."""
    return tuple((kind, count * factor) for kind, count in uses)


def use_count(uses: Uses | list[tuple[Kind, float]]) -> float:
    """The uses of all kinds."""
    return sum(count for _, count in uses)


def forms_of(uses: Uses) -> tuple[Form, ...]:
    """The forms to choose from, largest first, each with the part of the uses whose readers take it. Encoded forms are
    those for chunks of the shape that was read last.
    """
    if len(uses) == 1:
        return uses[0][0].forms
    found: dict[str, Form] = {}
    counts: dict[str, float] = {}
    for kind, count in _alike(uses):
        for form in kind.forms:
            found[form.codec] = form
            counts[form.codec] = counts.get(form.codec, 0.0) + count
    total = use_count(uses)
    forms = [
        replace(form, taken=min(1.0, counts[codec] / total) if at else 1.0)
        for at, (codec, form) in enumerate(found.items())
    ]
    return tuple(sorted(forms, key=lambda form: -form.nbytes))


def reading_with(uses: Uses, codec: str) -> Reading | None:
    """The reading that took this codec last, among those of the shape that was read last; None where none did."""
    for kind, _ in reversed(_alike(uses)):
        if kind.reading is not None and any(form.codec == codec for form in kind.forms):
            return kind.reading
    return None


def _alike(uses: Uses) -> Uses:
    """Without the readers that expect chunks of another shape than the last one of those that take encoded chunks."""
    last = next((kind.reading for kind, _ in reversed(uses) if kind.reading is not None), None)
    if last is None:
        return uses
    return tuple(each for each in uses if each[0].reading is None or each[0].reading.is_like(last))


def _is_too_much(kind: Kind, codec: Codec, error: float) -> bool:
    if kind.reading is None or not any(form.codec == codec.value for form in kind.forms):
        return False
    return math.isinf(error) or (kind.reading.max_error is not None and error > kind.reading.max_error)
