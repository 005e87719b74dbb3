"""What a figure found out: measured cells with their raw samples, computed rows, and what went wrong. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from bench.report import format_bytes, spread

Label = str | int


class FigureName(Enum):
    """The paper's numbers of what can be measured or computed here."""

    LAYER_PAYLOAD = "2"
    HASHING = "4"
    RAW_STORE = "8"
    SINGLE_OBJECTS = "9"
    LATENCY = "10"
    MANY_OBJECTS = "11"
    AGGREGATION = "A8"
    ELEMENTS = "A7"


class State(Enum):
    """DONE: measured and every byte right. NOT_RUN: something it needs is absent. FAILED: wrong bytes, or an error."""

    DONE = "done"
    NOT_RUN = "not_run"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Cell:
    """Counted runs of one thing, in seconds; `labels` say which thing. `nbytes` were moved by each, 0 where the time
    itself is the figure.
    """

    labels: Mapping[str, Label]
    nbytes: int
    samples_s: tuple[float, ...]

    def median_s(self) -> float:
        """The median run."""
        return statistics.median(self.samples_s)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `notes` say what a reader must know, `settings` what it takes to run it again, `rows` what was
    computed rather than measured.
    """

    name: FigureName
    title: str
    state: State
    reason: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    cells: Sequence[Cell] = ()
    rows: Sequence[Mapping[str, Any]] = ()


def figure_json(figure: Figure) -> dict[str, Any]:
    """The figure as plain values, raw samples included."""
    return {
        "title": figure.title,
        "state": figure.state.value,
        "reason": figure.reason,
        "settings": dict(figure.settings),
        "notes": list(figure.notes),
        "cells": [cell_json(cell) for cell in figure.cells],
        "rows": [dict(row) for row in figure.rows],
    }


def figure_table(figure: Figure) -> str:
    """The figure for people: notes, then a line for each cell and row."""
    name = figure.name.value
    heading = f"{'Table' if figure.name is FigureName.ELEMENTS else 'Figure'} {name}: {figure.title}"
    lines = ["", heading, "-" * len(heading)]
    if figure.state is not State.DONE:
        lines.append(f"{figure.state.value.upper().replace('_', ' ')}: {figure.reason}")
    lines += [f"* {note}" for note in figure.notes]
    if figure.cells:
        labels = list(figure.cells[0].labels)
        rates = any(cell.nbytes for cell in figure.cells)
        heads = ["GB/s", "min", "max", "samples"] if rates else ["ms", "min", "max", "samples"]
        lines += _aligned([*labels, *heads], [_cell_words(cell) for cell in figure.cells])
    if figure.rows:
        columns = list(figure.rows[0])
        lines += _aligned(columns, [[_plain(column, row[column]) for column in columns] for row in figure.rows])
    return "\n".join(lines)


def cell_json(cell: Cell) -> dict[str, Any]:
    """The cell as plain values, raw samples included."""
    rates = {"throughput_bytes_per_s": asdict(spread([cell.nbytes / s for s in cell.samples_s]))} if cell.nbytes else {}
    return {
        **cell.labels,
        "nbytes": cell.nbytes,
        "sample_count": len(cell.samples_s),
        "duration_s": asdict(spread(cell.samples_s)),
        **rates,
        "samples_s": list(cell.samples_s),
    }


def _cell_words(cell: Cell) -> list[str]:
    words = [_plain(name, value) for name, value in cell.labels.items()]
    if cell.nbytes:
        found = spread([cell.nbytes / seconds / 1e9 for seconds in cell.samples_s])
    else:
        found = spread([seconds * 1e3 for seconds in cell.samples_s])
    return [*words, f"{found.median:.3f}", f"{found.min:.3f}", f"{found.max:.3f}", str(len(cell.samples_s))]


def _plain(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and name.endswith("_bytes"):
        return format_bytes(value)
    return str(value)


def _aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as what is in them, words to the left and the rest to the right."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    numeric = [all(row[column][:1].isdigit() or row[column] == "-" for row in rows) for column in range(len(heads))]
    return [
        "  ".join(
            word.rjust(width) if is_number else word.ljust(width)
            for word, width, is_number in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in [heads, *rows]
    ]
