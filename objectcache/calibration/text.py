"""Text for people: tables whose columns are as wide as what is in them, and spreads. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from objectcache.calibration.samples import Spread

NUMERIC = "+-0123456789~"
"""First characters of cells that are set to the right."""


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """A line for the heads and one for each row; columns of words are set to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    numeric = [all(row[column][:1] in NUMERIC for row in rows) for column in range(len(heads))]
    return [
        (
            indent
            + "  ".join(
                word.rjust(width) if is_number else word.ljust(width)
                for word, width, is_number in zip(row, widths, numeric, strict=True)
            )
        ).rstrip()
        for row in [heads, *rows]
    ]


def spread_text(found: Spread, form: str = ".2f", scale: float = 1.0) -> str:
    """Median, and in brackets least and greatest."""
    median, least, greatest = (format(scale * each, form) for each in (found.median, found.min, found.max))
    return f"{median} ({least} to {greatest})"


def plain_text(value: Any) -> str:
    """Nested settings and machines in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain_text(entry)}" for name, entry in value.items())
    return ", ".join(map(plain_text, value)) if isinstance(value, (list, tuple)) else str(value)


def origin_entries(origin: Mapping[str, Any]) -> dict[str, str]:
    """The origin of figures in short, for a config file: `measured_at`, `machine` and, where it is known, `commit`."""
    machine = origin["machine"]
    processor = f"{machine['cpu_model']}, {machine['cpu_count']} processors, {machine['memory_bytes']} bytes of memory"
    found = {"measured_at": origin["measured_at"], "machine": processor}
    if origin["commit"] is not None:
        found["commit"] = origin["commit"] + (" with local changes" if origin["has_local_changes"] else "")
    return found


def six_digits(value: float) -> float:
    """Six significant ones, which is more than any figure here has."""
    return float(f"{value:.6g}")
