"""Numbers of results as text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
NOT_MEASURED = "not measured"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def spread(found: Json | None, form: Callable[[float], str]) -> str:
    """Median, least and greatest."""
    if found is None or found.get("median") is None:
        return NOT_MEASURED
    least, greatest = found.get("min", found.get("least")), found.get("max", found.get("greatest"))
    if least is None or greatest is None or least == greatest:
        return form(found["median"])
    return f"{form(found['median'])} ({form(least)} to {form(greatest)})"


def significant(value: float) -> str:
    """Three digits, of what is 100 or more all before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:.{digits}f}"


def gbps(bytes_per_s: float) -> str:
    """In GB/s."""
    return significant(bytes_per_s / 1e9)


def ms(seconds: float) -> str:
    """In milliseconds."""
    return significant(seconds * 1e3)


def whole_ms(seconds: float) -> str:
    """In milliseconds, without a fraction."""
    return f"{seconds * 1e3:,.0f}"


def percent(part: float) -> str:
    """With its sign."""
    return f"{part * 100:+.1f} %"


def verdict(is_met: bool | None) -> str:
    """Of a target."""
    return {None: "", True: "met", False: "**missed**"}[is_met]


def origin(found: Json) -> str:
    """Which commit a result is of."""
    commit = found.get("commit")
    return f"commit `{commit[:7]}`" if commit else "no commit named"
