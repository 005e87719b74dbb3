"""A chart for each figure. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.ladder.hashing import HASH_ALONE
from bench.ladder.results import Cell, Figure, FigureName, Label
from bench.report import format_bytes
from descriptors.units import KIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 120
BASELINE_KIB = 64
PART_COLORS = {"client": "tab:gray", "gateway": "tab:orange", "storage": "tab:blue", "transfer": "tab:green"}


@dataclass(frozen=True, slots=True)
class Lines:
    """Which labels of the cells are panels, lines and the horizontal axis."""

    rows: str | None
    columns: str | None
    lines: Sequence[str]
    across: str
    across_title: str


LINES: Mapping[FigureName, Lines] = {
    FigureName.HASHING: Lines(None, None, ("what", "chunk_tokens"), "tokens", "tokens"),
    FigureName.RAW_STORE: Lines("state", "in_flight", ("way",), "block_bytes", "block size"),
    FigureName.SINGLE_OBJECTS: Lines("operation", "in_flight", ("path",), "block_bytes", "object size"),
    FigureName.MANY_OBJECTS: Lines("operation", "in_flight", ("path",), "block_bytes", "slice size"),
    FigureName.AGGREGATION: Lines(None, None, ("aggregation_bytes",), "chunk_tokens", "tokens of a chunk (G)"),
}


def plot_figure(figure: Figure, path: Path) -> None:
    """Draw the figure into a file whose name says its format."""
    drawn: Mapping[FigureName, Callable[[Figure, Path], None]] = {
        FigureName.LAYER_PAYLOAD: _draw_payloads,
        FigureName.ELEMENTS: _draw_elements,
        FigureName.LATENCY: _draw_latency,
    }
    drawn.get(figure.name, _draw_lines)(figure, path)


def _draw_lines(figure: Figure, path: Path) -> None:
    """Median and extremes over one label, a panel for each value of two others."""
    from matplotlib.figure import Figure as Canvas

    which = LINES[figure.name]
    rows = _values(figure.cells, which.rows)
    columns = _values(figure.cells, which.columns)
    kinds = [value for value in _values(figure.cells, which.lines[-1]) if value != 0]
    canvas = Canvas(figsize=(4 + 4.5 * len(columns), 1.2 + 3.2 * len(rows)), layout="constrained")
    panels = canvas.subplots(len(rows), len(columns), squeeze=False)
    for row, row_panels in zip(rows, panels, strict=True):
        for column, axes in zip(columns, row_panels, strict=True):
            cells = [cell for cell in figure.cells if _has(cell, which.rows, row) and _has(cell, which.columns, column)]
            _draw_panel(axes, cells, which, kinds)
            said = {which.rows: row, which.columns: column}
            axes.set_title(", ".join(_said(name, value) for name, value in said.items() if name and value is not None))
    handles: dict[str, Any] = {}
    for axes in panels.flat:
        found, names = axes.get_legend_handles_labels()
        handles |= dict(zip(names, found, strict=True))
    canvas.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8)
    canvas.suptitle(_title(figure))
    canvas.savefig(path, dpi=DPI)


def _draw_panel(axes: Axes, cells: Sequence[Cell], which: Lines, kinds: Sequence[Label | None]) -> None:
    """`kinds` are the values that have a colour, in every panel the same."""
    is_rate = any(cell.nbytes for cell in cells)
    for line in dict.fromkeys(tuple(cell.labels[name] for name in which.lines) for cell in cells):
        points = [cell for cell in cells if tuple(cell.labels[name] for name in which.lines) == line]
        at = [int(cell.labels[which.across]) for cell in points]
        values = [[_value(cell, seconds) for seconds in cell.samples_s] for cell in points]
        medians = [statistics.median(each) for each in values]
        below = [median - min(each) for median, each in zip(medians, values, strict=True)]
        above = [max(each) - median for median, each in zip(medians, values, strict=True)]
        name = ", ".join(_said(label, value) for label, value in zip(which.lines, line, strict=True) if value != 0)
        color = f"C{kinds.index(line[-1])}" if line[-1] in kinds else "black"
        style = ":" if line[0] == HASH_ALONE else "-"
        axes.errorbar(at, medians, yerr=[below, above], label=name, color=color, linestyle=style, marker=".", capsize=2)
    ticks = sorted({int(cell.labels[which.across]) for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [format_bytes(x) if which.across.endswith("_bytes") else str(x) for x in ticks], fontsize=8)
    axes.set_xlabel(which.across_title)
    axes.set_ylabel("GB/s" if is_rate else "ms")
    axes.grid(alpha=0.3)
    if is_rate:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")


def _draw_latency(figure: Figure, path: Path) -> None:
    """Stacked bars of the median of each part, a panel for each object size."""
    from matplotlib.figure import Figure as Canvas

    columns = _values(figure.cells, "block_bytes")
    canvas = Canvas(figsize=(2 + 4.2 * len(columns), 4.5), layout="constrained")
    panels = canvas.subplots(1, len(columns), squeeze=False)[0]
    for nbytes, axes in zip(columns, panels, strict=True):
        cells = [cell for cell in figure.cells if cell.labels["block_bytes"] == nbytes]
        bars = list(dict.fromkeys(map(_bar, cells)))
        bottoms = dict.fromkeys(bars, 0.0)
        for part, color in PART_COLORS.items():
            heights = dict.fromkeys(bars, 0.0)
            for cell in cells:
                if cell.labels["part"] == part:
                    heights[_bar(cell)] = statistics.median(cell.samples_s) * 1e3
            axes.bar(bars, list(heights.values()), bottom=list(bottoms.values()), color=color, label=part)
            bottoms = {bar: bottoms[bar] + heights[bar] for bar in bars}
        axes.set_title(format_bytes(int(nbytes or 0)))
        axes.set_ylabel("ms, medians")
        axes.tick_params(axis="x", labelsize=7)
    panels[0].legend(fontsize=8)
    canvas.suptitle(_title(figure))
    canvas.savefig(path, dpi=DPI)


def _draw_payloads(figure: Figure, path: Path) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(9, 1.5 + 0.26 * len(figure.rows)), layout="constrained")
    axes = canvas.subplots()
    families = list(dict.fromkeys(str(row["family"]) for row in figure.rows))
    colors = [colormaps["tab20"](families.index(str(row["family"]))) for row in figure.rows]
    kibibytes = [row["payload_bytes"] / KIB for row in figure.rows]
    bars = axes.barh([str(row["model"]) for row in figure.rows], kibibytes, color=colors)
    axes.bar_label(bars, fmt="%g", padding=3, fontsize=8)
    axes.axvline(BASELINE_KIB, linestyle="--", color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("KiB a layer; dashed: 8 KV heads of 128 dimensions")
    axes.set_title(_title(figure))
    canvas.savefig(path, dpi=DPI)


def _draw_elements(figure: Figure, path: Path) -> None:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(9, 4), layout="constrained")
    axes = canvas.subplots()
    names = [f"{row['context']}, G={row['chunk_tokens']}\n{row['agg_payload_mib']} MiB" for row in figure.rows]
    places = range(len(names))
    for shift, column, label in ((-0.2, "original_elements", "slices"), (0.2, "elements_after", "payloads")):
        bars = axes.bar([place + shift for place in places], [row[column] for row in figure.rows], 0.4, label=label)
        axes.bar_label(bars, fontsize=8)
    axes.set_xticks(list(places), names)
    axes.set_yscale("log")
    axes.set_ylabel("elements the client sees")
    axes.legend()
    axes.set_title(_title(figure))
    canvas.savefig(path, dpi=DPI)


def _title(figure: Figure) -> str:
    kind = "Table" if figure.name is FigureName.ELEMENTS else "Figure"
    counts = sorted({len(cell.samples_s) for cell in figure.cells})
    samples = f" ({'-'.join(map(str, counts))} samples, median and extremes)" if counts else ""
    return f"{kind} {figure.name.value}: {figure.title}{samples}"


def _values(cells: Sequence[Cell], name: str | None) -> list[Label | None]:
    """The values of a label, in order of appearance; one None without a label."""
    return [None] if name is None else list(dict.fromkeys(cell.labels[name] for cell in cells))


def _has(cell: Cell, name: str | None, value: Label | None) -> bool:
    return name is None or cell.labels[name] == value


def _said(name: str, value: Label) -> str:
    if name == "in_flight":
        return f"C={value}"
    if name == "chunk_tokens":
        return f"G={value}"
    return format_bytes(value) if isinstance(value, int) and name.endswith("_bytes") else str(value)


def _bar(cell: Cell) -> str:
    return f"{str(cell.labels['path']).removeprefix('S3RDMA ')}\n{cell.labels['operation']}"


def _value(cell: Cell, seconds: float) -> float:
    """GB/s where bytes were moved, else milliseconds."""
    return cell.nbytes / seconds / 1e9 if cell.nbytes else seconds * 1e3
