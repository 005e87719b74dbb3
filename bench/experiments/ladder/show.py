"""Sections and charts of a result of `bench ladder`. Pure but for the charts' files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench.core.plots import Chart, Kind, Of, draw
from bench.core.show import Column, Json, Section, Table, gbps, ms, size, table, written
from bench.paper.models import MODELS
from calibration.samples import format_bytes
from descriptors.units import KIB

MEASURED = ("nbytes", "sample_count", "duration_s", "throughput_bytes_per_s", "samples_s")
"""Of a cell; its other fields say of what the cell is."""
RATE, TIME = "throughput_bytes_per_s", "duration_s"


def show(result: Json) -> dict[str, Section]:
    """Every figure; 64 KiB slices by the five paths; what one thread copies, and what was not run."""
    figures = result["figures"]
    copied = f"One thread copies memory at {written(result['memcpy'][RATE], gbps)} GB/s here."
    left_out = ", ".join(name for name, figure in figures.items() if figure["state"] == "not_run")
    sections = {f"figure-{name}": _figure(name, figure) for name, figure in figures.items()}
    if "11" in figures and figures["11"]["cells"]:
        sections["ladder"] = _slices(figures["11"]["cells"])
    return {**sections, "remarks": (copied, f"Not run: {left_out or 'none'}")}


def _heading(name: str, figure: Json) -> str:
    return f"{'Table' if name == 'A7' else 'Figure'} {name}: {figure['title']}"


def _figure(name: str, figure: Json) -> Section:
    state = figure["state"].upper().replace("_", " ")
    said = [f"{state}: {figure['reason']}"] if figure["state"] != "done" else []
    head = "\n".join([_heading(name, figure), *said, *(f"* {note}" for note in figure["notes"])])
    return head, *(_table(rows) for rows in (figure["cells"], figure["rows"]) if rows)


def _table(rows: Sequence[Json]) -> Table:
    first = rows[0]
    columns = [Column(name, name, size if name.endswith("_bytes") else None) for name in first if name not in MEASURED]
    if TIME in first:
        columns.append(Column("GB/s", RATE, gbps) if RATE in first else Column("ms", TIME, ms))
        columns.append(Column("samples", "sample_count"))
    return table(rows, *columns)


def _slices(cells: Sequence[Json]) -> Section:
    shown = [cell for cell in cells if cell["operation"] == "GET" and cell["block_bytes"] == 64 * KIB]
    made = table(shown, "GET, 64 KiB slices = path | in flight = in_flight | GB/s = throughput_bytes_per_s:GB/s")
    return made, f"Samples of a cell: {min(cell['sample_count'] for cell in shown)}."


FAMILIES = list(dict.fromkeys(model.family for model in MODELS))
COLORS = 10


def plot(result: Json, folder: Path) -> None:
    """A chart for each figure that was done."""
    for name, figure in result["figures"].items():
        if figure["state"] == "done":
            counts = sorted({cell["sample_count"] for cell in figure["cells"]})
            samples = f" ({'-'.join(map(str, counts))} samples, median and extremes)" if counts else ""
            how, rows_of = CHARTS[name]
            draw(how, rows_of(figure), _heading(name, figure) + samples, folder / f"figure-{name.lower()}.png")


def _hashing(figure: Json) -> list[Json]:
    """Tokenization stands beside hashing alone and beside hashing with lookup."""
    panels = ("hash", "hash and lookup")
    return [
        {**cell, "panel": panel} for panel in panels for cell in figure["cells"] if cell["what"] in ("tokenize", panel)
    ]


def _payloads(figure: Json) -> list[Json]:
    baseline = {"model": "8 KV heads of 128 dimensions", "payload_bytes": figure["settings"]["baseline_bytes"]}
    return [baseline, *figure["rows"]]


def _family_color(row: Json) -> str:
    return f"C{FAMILIES.index(row['family']) % COLORS}" if "family" in row else "black"


def _elements(figure: Json) -> list[Json]:
    kinds = (("slices", "original_elements"), ("payloads", "elements_after"))
    return [{**row, "kind": kind, "count": row[column]} for row in figure["rows"] for kind, column in kinds]


def _rates(across: Of, title: str, series: Of, **panels: Any) -> Chart:
    return Chart(Kind.LINES, across, RATE, "GB/s", series, across_title=title, scale=1e-9, **panels)


def _over_blocks(series: str, row: str, what: str) -> Chart:
    panels = {"row": row, "column": lambda cell: f"C={cell['in_flight']}"}
    return _rates(lambda cell: cell["block_bytes"] / KIB, f"{what} size, KiB", series, **panels)


PAYLOADS = Chart(
    Kind.LYING, "model", "payload_bytes", "KiB a layer; one colour for each family", scale=1 / KIB, color=_family_color
)
HASHING = Chart(
    Kind.LINES,
    "tokens",
    TIME,
    "ms",
    lambda cell: f"G={cell['chunk_tokens']}" if cell["chunk_tokens"] else cell["what"],
    column="panel",
    across_title="tokens",
    scale=1e3,
    is_log=True,
)
LATENCY = Chart(
    Kind.BARS,
    lambda cell: f"{cell['path'].removeprefix('S3RDMA ')}\n{cell['operation']}",
    TIME,
    "ms",
    "part",
    row=lambda cell: format_bytes(cell["block_bytes"]),
    scale=1e3,
)
AGGREGATION = _rates("chunk_tokens", "tokens of a chunk (G)", lambda cell: format_bytes(cell["aggregation_bytes"]))
ELEMENTS = Chart(
    Kind.BARS,
    lambda row: f"{row['context']}, G={row['chunk_tokens']}\n{row['agg_payload_mib']} MiB",
    "count",
    "elements the client sees",
    "kind",
    is_log=True,
)
CELLS = itemgetter("cells")
CHARTS: Mapping[str, tuple[Chart, Callable[[Json], Sequence[Any]]]] = {
    "2": (PAYLOADS, _payloads),
    "4": (HASHING, _hashing),
    "8": (_over_blocks("way", "state", "block"), CELLS),
    "9": (_over_blocks("path", "operation", "object"), CELLS),
    "10": (LATENCY, CELLS),
    "11": (_over_blocks("path", "operation", "slice"), CELLS),
    "A8": (AGGREGATION, CELLS),
    "A7": (ELEMENTS, _elements),
}
