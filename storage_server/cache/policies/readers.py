"""The readers of a chunk: its last uses, by the forms that their readers take. A form that only some of them take is
worth less: the others have the exact bytes loaded. Pure.

    of ten uses three take exact bytes only   ->  exact: taken by all;  4 bits: taken by 0.7
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from storage_server.cache.policies.utility import Form
from storage_server.planning.forms import Reading

KINDS_MAX = 4
"""Kinds of readers that are remembered for each chunk."""
KEPT_PART = 15 / 16
"""A further use keeps this part of what former ones count: about sixteen uses count."""
COUNT_PART_MIN = 1 / 64
"""A kind with a smaller part of the uses is forgotten."""
OTHER_SHAPE_FACTOR = 2.0
"""Readers of another shape than the present one's have to be so many times as many for a chunk to change to it."""


@dataclass(frozen=True, eq=False, slots=True)
class ReaderKind:
    """Readers that take the same forms, of which the first is exact. `reading` is theirs; None where they take exact
    bytes only. Kinds are compared as objects.
    """

    forms: tuple[Form, ...]
    reading: Reading | None = None


Uses = tuple[tuple[ReaderKind, float], ...]
"""Kinds with their counts, the last one last."""


def with_use(uses: Uses, kind: ReaderKind) -> Uses:
    """These uses and one more."""
    if len(uses) == 1 and uses[0][0] is kind:
        return ((kind, 1.0 + KEPT_PART * uses[0][1]),)
    return with_count(tuple((each, KEPT_PART * count) for each, count in uses), kind, 1.0)


def with_count(uses: Uses, kind: ReaderKind, count: float) -> Uses:
    """These uses, and so many of a kind."""
    if not uses:
        return ((kind, count),)
    own = count + sum(each_count for each, each_count in uses if each is kind)
    others = [each for each in uses if each[0] is not kind]
    least = COUNT_PART_MIN * (own + use_count(others))
    others = [each for each in others if each[1] >= least]
    while len(others) >= KINDS_MAX:
        others.remove(min(others, key=lambda each: each[1]))
    return (*others, (kind, own))


def use_count(uses: Uses | list[tuple[ReaderKind, float]]) -> float:
    """The uses of all kinds."""
    return sum(count for _, count in uses)


def forms_of(uses: Uses, present: Reading | None = None) -> tuple[Form, ...]:
    """The forms to choose from, largest first, each with the part of the uses whose readers take it. Encoded forms are
    for chunks of one shape, that of most of the readers; `present` is a reading of the present form, whose shape stays
    where others are not much more.
    """
    if len(uses) == 1:
        return uses[0][0].forms
    found: dict[str, Form] = {}
    counts: dict[str, float] = {}
    for kind, count in _alike(uses, present):
        for form in kind.forms:
            found[form.codec] = form
            counts[form.codec] = counts.get(form.codec, 0.0) + count
    total = use_count(uses)
    exact = uses[0][0].forms[0]
    parts = {codec: min(1.0, counts[codec] / total) for codec in found}
    forms = [exact, *(replace(form, taken=parts[codec]) for codec, form in found.items() if codec != exact.codec)]
    return tuple(sorted(forms, key=lambda form: -form.nbytes))


def reading_with(uses: Uses, codec: str, present: Reading | None = None) -> Reading | None:
    """The reading that took this codec last, among those of the shape that `forms_of` has; None for the exact one."""
    if codec == uses[0][0].forms[0].codec:
        return None
    for kind, _ in reversed(_alike(uses, present)):
        if kind.reading is not None and any(form.codec == codec for form in kind.forms):
            return kind.reading
    return None


def _alike(uses: Uses, present: Reading | None) -> Uses:
    """Without the readers that expect encoded chunks of another shape than the one of most."""
    if len(uses) == 1:
        return uses
    shapes: list[tuple[Reading, float]] = [] if present is None else [(present, 0.0)]
    for kind, count in uses:
        if kind.reading is None:
            continue
        at = next((at for at, (reading, _) in enumerate(shapes) if reading.is_shape_of(kind.reading)), None)
        if at is None:
            shapes.append((kind.reading, count))
        else:
            shapes[at] = (shapes[at][0], shapes[at][1] + count)
    if len(shapes) < 2:
        return uses
    if present is not None:
        shapes[0] = (present, OTHER_SHAPE_FACTOR * shapes[0][1])
    most, _ = max(shapes, key=lambda each: each[1])
    return tuple(each for each in uses if each[0].reading is None or each[0].reading.is_shape_of(most))
