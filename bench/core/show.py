"""Results for people. The JSON of a result is all there is to show: `show` of an experiment makes named sections of it,
the command prints them, and docs/design/figures.md has the same sections as Markdown. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from descriptors.units import format_bytes
from objectcache.calibration.text import aligned, plain_text

Json = Mapping[str, Any]
Form = Callable[[Any], str]
NOT_MEASURED = "not measured"


def significant(value: float) -> str:
    """Three digits, of what is 100 or more all before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:.{digits}f}"


def scaled(factor: float, form: Form = significant) -> Form:
    """The form of a value in another unit."""
    return lambda value: form(value * factor)


def fixed(digits: int, factor: float = 1.0) -> Form:
    """So many digits after the point."""
    return lambda value: f"{value * factor:,.{digits}f}"


UNITS = {"": 1.0, "ms": 1e3, "us": 1e6, "GB/s": 1e-9, "MB/s": 1e-6, "MiB": 2**-20}
"""How many of the unit are one second, one byte or one byte/s."""
ms, gbps = scaled(UNITS["ms"]), scaled(UNITS["GB/s"])
size: Form = format_bytes


def percent(part: float) -> str:
    """With its sign."""
    return f"{part * 100:+.1f} %"


def over_one(ratio: float) -> str:
    """A ratio less one, in percent."""
    return percent(ratio - 1)


def verdict(is_met: bool | None) -> str:
    """How a target was met, in words."""
    return {None: "", True: "met", False: "**missed**"}[is_met]


def code(text: str) -> str:
    """A name as it is typed."""
    return f"`{text}`"


def written(value: Any, form: Form | None = None) -> str:
    """A value in its form; a spread as its median with least and greatest; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, Mapping) and "median" in value:
        form, median = form or significant, value["median"]
        if median is None:
            return NOT_MEASURED
        least, greatest = value.get("min", value.get("least")), value.get("max", value.get("greatest"))
        if least is None or greatest is None or least == greatest:
            return form(median)
        return f"{form(median)} ({form(least)} to {form(greatest)})"
    if form is not None:
        return form(value)
    if isinstance(value, bool):
        return verdict(value)
    return significant(value) if isinstance(value, float) else str(value)


def at(row: Any, path: str) -> Any:
    """The value at "a.b.c" of nested mappings; None where there is none."""
    for name in path.split("."):
        row = row.get(name) if isinstance(row, Mapping) else None
    return row


@dataclass(frozen=True, slots=True)
class Column:
    """`value` is where the value is in a row, or what it is of a row; `form` is how it is written."""

    head: str
    value: str | Callable[[Any], Any]
    form: Form | None = None

    def of(self, row: Any) -> str:
        """The cell of a row."""
        return written(at(row, self.value) if isinstance(self.value, str) else self.value(row), self.form)


FORMS: Mapping[str, Form] = {"size": size, "significant": significant, "verdict": verdict, "code": code}


def form_of(name: str) -> Form:
    """The form of that name: "ms" is in milliseconds, "ms.2" too with two digits after the point, ".2" in the value's
    own unit; and a format such as "g" or ".1%".
    """
    if name in FORMS:
        return FORMS[name]
    unit, point, digits = name.rpartition(".")
    if digits in UNITS:
        return scaled(UNITS[digits])
    return fixed(int(digits), UNITS[unit]) if point and digits.isdecimal() else f"{{:{name}}}".format


def columns(text: str) -> list[Column]:
    """Columns as the head of the table has them, "HEAD | HEAD = PATH | HEAD = PATH:FORM"; a path may be the head."""
    made = []
    for part in text.split("|"):
        head, is_other, value = part.strip().rpartition("= ")
        path, _, form = value.partition(":")
        made.append(Column(head.strip() if is_other else path, path, form_of(form) if form else None))
    return made


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """For a terminal."""
        head, *rows = [[cell.replace("**", "").replace("`", "") for cell in row] for row in (self.head, *self.rows)]
        return "\n".join(aligned(head, rows))

    def markdown(self) -> str:
        """For a document."""
        lines = ["| " + " | ".join(self.head) + " |", "|" + "---|" * len(self.head)]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in self.rows)])


Block = str | Table
Section = Sequence[Block]
Sections = Mapping[str, Section]


def table(rows: Iterable[Any], *shown: str | Column) -> Table:
    """One line for each row; columns as text are those of `columns`."""
    every = [column for each in shown for column in (columns(each) if isinstance(each, str) else [each])]
    return Table([column.head for column in every], [[column.of(row) for column in every] for row in rows])


def listed(found: Mapping[str, Any], name: str) -> list[Json]:
    """The values as rows, which have their names under `name`."""
    return [{name: key, **value} for key, value in found.items()]


def crossed(
    rows: Iterable[Any], head: str, down: Callable[[Any], Any], across: Callable[[Any], Any], cell: Callable[[Any], str]
) -> Table:
    """One line for each value of `down`, one column for each value of `across`, in the order of the rows."""
    found = {(down(row), across(row)): cell(row) for row in rows}
    lines, columns = (list(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    body = [[str(line), *(found.get((line, column), "") for column in columns)] for line in lines]
    return Table([head, *map(str, columns)], body)


TARGETS = (
    Column("target", lambda target: target["what"].replace("_", " ")),
    Column("worst case", lambda target: target.get("case") or ""),
    Column("limit", lambda target: f"{target.get('side', 'at least')} {limit_of(target):g}"),
    Column("seen", lambda target: NOT_MEASURED if target["value"] is None else target["value"]),
    Column("", "is_met", verdict),
    Column("", lambda target: target.get("reason") or ""),
)


def limit_of(target: Json) -> float:
    """The limit, which results call by two names."""
    limit: float = target["limit"] if "limit" in target else target["least"]
    return limit


def targets(found: Iterable[Json]) -> Table:
    """Targets, and whether they are met."""
    made = table(found, *TARGETS)
    kept = [place for place, head in enumerate(made.head) if head not in ("", "worst case") or _is_used(made, place)]
    return Table([made.head[place] for place in kept], [[row[place] for place in kept] for row in made.rows])


def _is_used(made: Table, place: int) -> bool:
    return any(row[place] for row in made.rows)


def as_markdown(section: Section) -> str:
    """A section of a document."""
    return "\n\n".join(block if isinstance(block, str) else block.markdown() for block in section)


def as_text(result: Json, sections: Sections) -> str:
    """The text that a command prints: the origin of the result, its sections, and whether everything was right."""
    shown = ("commit", "has_local_changes", "machine", "settings")
    lines = [f"{name}: {plain_text(result[name])}" for name in shown if name in result]
    for section in sections.values():
        for block in section:
            lines += ["", block.replace("**", "").replace("`", "") if isinstance(block, str) else block.text()]
    problem = result["problem"]
    return "\n".join([*lines, "", "everything verified" if problem is None else f"FAILED: {problem}"])
